"""One object per setting: what the user reads, the settings hold and the strategy uses is the same plugin."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from accelerate import Accelerator
from accelerate.errors import SettingError
from accelerate.plugins.fsdp import FullyShardedDataParallelPlugin
from accelerate.plugins.handlers import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from accelerate.plugins.parallelism import ParallelismConfig
from accelerate.settings import env
from accelerate.settings.env import patched

LAUNCHED = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_RESHARD_AFTER_FORWARD": "false",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "ACCELERATE_DYNAMO_BACKEND": "eager",
}


@pytest.mark.parametrize("is_launched", [True, False], ids=["launched", "arguments"])
def test_plugins_are_groups_of_the_settings(is_launched: bool) -> None:
    given: dict[str, Any] = {
        "fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=False),
        "parallelism_config": ParallelismConfig(),
        "dynamo_plugin": TorchDynamoPlugin(backend="eager"),
    }
    with patched(**(LAUNCHED if is_launched else {})):
        accelerator = Accelerator(cpu=True, **({} if is_launched else given))
    settings, plugins, state = accelerator.settings, accelerator.strategy.options.plugins, accelerator.state
    assert settings.fsdp is plugins.fsdp is state.fsdp_plugin
    assert settings.parallelism is plugins.parallelism is state.parallelism_config is accelerator.parallelism_config
    assert settings.compile is plugins.dynamo is state.dynamo_plugin is accelerator.dynamo_plugin
    assert isinstance(plugins.fsdp, FullyShardedDataParallelPlugin) and plugins.fsdp.reshard_after_forward is False
    assert isinstance(plugins.parallelism, ParallelismConfig) and isinstance(plugins.dynamo, TorchDynamoPlugin)
    if not is_launched:
        assert plugins.fsdp is given["fsdp_plugin"] and plugins.dynamo is given["dynamo_plugin"]


def test_the_options_of_loaders_projects_and_accumulation_are_groups_of_the_settings() -> None:
    loaders, project = DataLoaderConfiguration(even_batches=False), ProjectConfiguration(total_limit=2)
    accumulation = GradientAccumulationPlugin(num_steps=3)
    accelerator = Accelerator(
        cpu=True, dataloader_config=loaders, project_config=project, gradient_accumulation_plugin=accumulation
    )
    settings = accelerator.settings
    assert settings.data is accelerator.dataloader_config is loaders is accelerator.strategy.options.loaders
    assert settings.project is accelerator.project_configuration is project
    assert settings.accumulation is accumulation
    assert Accelerator(cpu=True, gradient_accumulation_steps=2).settings.accumulation.num_steps == 2


def test_a_plugin_that_is_changed_after_construction_is_the_one_that_prepare_reads() -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 2)
    accelerator.dynamo_plugin = TorchDynamoPlugin(backend="eager")
    assert accelerator.prepare(model) is not model


def test_the_launchers_variables_are_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[str] = []
    decode = env._decode_option

    def count(option: Any, environ: Any) -> Any:
        decoded.extend(option.env)
        return decode(option, environ)

    monkeypatch.setattr(env, "_decode_option", count)
    with patched(**LAUNCHED):
        Accelerator(cpu=True)
    assert sorted(decoded) == sorted(LAUNCHED)


def test_a_plugin_of_collected_options_reports_their_variable() -> None:
    environ = {**LAUNCHED, "FSDP_STATE_DICT_TYPE": "LOCAL_STATE_DICT"}
    with patched(**environ), pytest.raises(SettingError, match="environment variable FSDP_STATE_DICT_TYPE"):
        Accelerator(cpu=True)


def test_a_copy_for_another_process_keeps_one_object_per_setting() -> None:
    with patched(**LAUNCHED):
        accelerator = Accelerator(cpu=True)
        copy = pickle.loads(pickle.dumps(accelerator))
    assert copy.settings.fsdp is copy.strategy.options.plugins.fsdp
    assert copy.settings.parallelism is copy.strategy.options.plugins.parallelism
