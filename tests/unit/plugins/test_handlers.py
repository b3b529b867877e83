"""Handlers of torch arguments: what they pass on, what the environment says, what they refuse."""

from __future__ import annotations

import json
import os
import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accelerate.errors import MissingDependency, SettingError
from accelerate.optional import is_installed
from accelerate.plugins.ddp import DistributedDataParallelKwargs
from accelerate.plugins.fp8 import AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from accelerate.plugins.handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from accelerate.settings.env import patched
from accelerate.settings.labels import DDPCommunicationHookType, DynamoBackend


@pytest.mark.parametrize(
    ("handler", "changed"),
    [
        (GradScalerKwargs(), {}),
        (GradScalerKwargs(init_scale=4.0, enabled=False), {"init_scale": 4.0, "enabled": False}),
        (AutocastKwargs(enabled=False), {"enabled": False}),
        (AutocastKwargs(output_dtype=None), {}),
        (DistributedDataParallelKwargs(comm_hook="fp16", bucket_cap_mb=1), {"bucket_cap_mb": 1}),
        (GradientAccumulationPlugin(num_steps=2), {"num_steps": 2}),
        (InitProcessGroupKwargs(), {}),
        (InitProcessGroupKwargs(backend="gloo"), {"backend": "gloo", "timeout": timedelta(seconds=1800)}),
        (TorchDynamoPlugin(), {}),
        (
            TorchDynamoPlugin(backend="INDUCTOR", dynamic=False, use_regional_compilation=True),
            {"backend": "inductor", "dynamic": False},
        ),
    ],
    ids=repr,
)
def test_to_kwargs_is_what_was_changed(handler: KwargsHandler, changed: dict[str, Any]) -> None:
    assert handler.to_kwargs() == changed


def test_to_kwargs_compares_with_the_defaults_and_not_with_the_environment() -> None:
    with patched(ACCELERATE_DYNAMO_BACKEND="eager", ACCELERATE_DYNAMO_MODE="max-autotune"):
        plugin = TorchDynamoPlugin()
        assert plugin.to_kwargs() == {"backend": "eager", "mode": "max-autotune"}


def test_to_kwargs_leaves_the_environment_alone_while_other_threads_read_it() -> None:
    missing, stop = [], threading.Event()

    def watch() -> None:
        while not stop.is_set():
            if os.environ.get("ACCELERATE_DYNAMO_BACKEND") != "eager":
                missing.append(True)

    with patched(ACCELERATE_DYNAMO_BACKEND="eager"):
        watcher = threading.Thread(target=watch)
        watcher.start()
        for _ in range(300):
            assert TorchDynamoPlugin().to_kwargs() == {"backend": "eager"}
        stop.set()
        watcher.join()
    assert not missing


def test_to_kwargs_of_a_deprecated_handler_does_not_warn_again() -> None:
    with pytest.warns(FutureWarning, match="TERecipeKwargs"):
        handler = FP8RecipeKwargs(backend="TE", margin=3)
    assert handler.to_kwargs() == {"margin": 3}  # warnings are errors here


def test_to_dict_hands_out_copies() -> None:
    profile = ProfileKwargs(schedule_option={"active": 1})
    profile.to_dict()["schedule_option"]["active"] = 9
    assert profile.schedule_option == {"active": 1}


def test_a_subclass_of_a_handler_keeps_its_own_arguments() -> None:
    from dataclasses import dataclass

    @dataclass
    class Mine(KwargsHandler):
        a: int = 0
        b: bool = False

    assert Mine(a=2).to_kwargs() == {"a": 2}


def test_ddp_arguments_leave_out_the_hook_and_can_show_it() -> None:
    handler = DistributedDataParallelKwargs(comm_hook="bf16")
    assert "comm_hook" not in handler.to_dict()
    assert handler.to_dict(ignore_keys=())["comm_hook"] is DDPCommunicationHookType.BF16


@pytest.mark.parametrize(("backend", "seconds"), [("nccl", 600), ("gloo", 1800), ("mpi", 1800), (None, 1800)])
def test_a_process_group_without_timeout_has_torchs(backend: str | None, seconds: int) -> None:
    assert InitProcessGroupKwargs(backend=backend).timeout == timedelta(seconds=seconds)


def test_a_given_timeout_stays() -> None:
    assert InitProcessGroupKwargs(timeout=timedelta(seconds=5)).to_kwargs() == {"timeout": timedelta(seconds=5)}


class TestDynamo:
    def test_nothing_given_means_no_compilation(self) -> None:
        plugin = TorchDynamoPlugin(backend=None)
        assert plugin.backend is DynamoBackend.NO
        assert (plugin.mode, plugin.fullgraph, plugin.dynamic, plugin.disable) == ("default", False, None, False)

    def test_the_environment_fills_what_was_not_given(self) -> None:
        with patched(
            ACCELERATE_DYNAMO_BACKEND="aot_eager",
            ACCELERATE_DYNAMO_USE_FULLGRAPH="true",
            ACCELERATE_DYNAMO_USE_DYNAMIC="false",
            ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION="1",
        ):
            plugin = TorchDynamoPlugin(fullgraph=False)
        assert plugin.backend is DynamoBackend.AOT_EAGER
        assert (plugin.fullgraph, plugin.dynamic, plugin.use_regional_compilation) == (False, False, True)

    def test_a_member_is_as_good_as_its_name(self) -> None:
        assert TorchDynamoPlugin(backend=DynamoBackend.EAGER).to_kwargs() == {"backend": "eager"}

    def test_an_unknown_backend_is_refused_with_the_nearest(self) -> None:
        with pytest.raises(SettingError, match=r"indutcor.*Did you mean 'INDUCTOR'"):
            TorchDynamoPlugin(backend="indutcor")


class TestFp8:
    def test_recipes_are_data_and_need_no_library(self) -> None:
        assert MSAMPRecipeKwargs().opt_level == "O2"
        recipe = TERecipeKwargs(fp8_format="e4m3", amax_compute_algo="MAX")
        assert (recipe.fp8_format, recipe.amax_compute_algo) == ("E4M3", "max")

    def test_the_environment_fills_what_was_not_given(self) -> None:
        with patched(ACCELERATE_FP8_MARGIN="3", ACCELERATE_FP8_FORMAT="E5M2", ACCELERATE_FP8_OVERRIDE_DGRAD="true"):
            recipe = TERecipeKwargs(margin=1)
        assert (recipe.margin, recipe.fp8_format) == (1, "E5M2")
        assert recipe.override_linear_precision == (False, True, False)

    @pytest.mark.parametrize("argument", ["fp8_format", "amax_compute_algo"])
    def test_an_illegal_choice_is_refused(self, argument: str) -> None:
        with pytest.raises(SettingError, match=argument):
            TERecipeKwargs(**{argument: "foo"})

    def test_an_illegal_level_is_refused(self) -> None:
        with pytest.raises(SettingError, match="O1, O2"):
            MSAMPRecipeKwargs(opt_level="O3")

    def test_the_joint_recipe_is_deprecated_and_has_both(self) -> None:
        with pytest.warns(FutureWarning, match="TERecipeKwargs"):
            recipe = FP8RecipeKwargs(backend="msamp", opt_level="O1")
        assert (recipe.backend, recipe.opt_level, recipe.margin) == ("MSAMP", "O1", 0)
        with pytest.warns(FutureWarning), pytest.raises(SettingError, match="TE, MSAMP"):
            FP8RecipeKwargs(backend="AO")

    def test_torchaos_configuration_is_made_from_the_two_switches(self, monkeypatch: pytest.MonkeyPatch) -> None:
        library = SimpleNamespace(Float8LinearConfig=lambda **switches: switches)
        monkeypatch.setattr("accelerate.plugins.fp8.require", lambda *names, **more: library)
        with patched(ACCELERATE_FP8_PAD_INNER_DIM="false"):
            recipe = AORecipeKwargs()
        assert recipe.config == {"pad_inner_dim": False, "enable_fsdp_float8_all_gather": True}
        assert AORecipeKwargs(config="mine").config == "mine"

    def test_torchao_is_named_when_it_is_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("accelerate.optional.installed_version", lambda module: None)
        with pytest.raises(MissingDependency, match=r"AORecipeKwargs needs 'torchao>=0\.6\.1'"):
            AORecipeKwargs()


class TestProfile:
    def test_the_built_profiler_records_what_was_asked_for(self, tmp_path: Path) -> None:
        taken: list[torch.profiler.profile] = []
        kwargs = ProfileKwargs(
            activities=["cpu"],
            schedule_option={"wait": 1, "warmup": 1, "active": 1, "repeat": 1, "skip_first": 0},
            on_trace_ready=taken.append,
            record_shapes=True,
        )
        with kwargs.build() as profiler:
            for _ in range(4):
                torch.mm(torch.ones(3, 3), torch.ones(3, 3))
                profiler.step()
        assert len(taken) == 1
        trace = tmp_path / "trace.json"
        taken[0].export_chrome_trace(str(trace))
        assert any(event.get("name") == "aten::mm" for event in json.loads(trace.read_text())["traceEvents"])

    def test_an_unknown_activity_is_refused_with_those_that_exist(self) -> None:
        with pytest.raises(SettingError, match=r"'abacus'.*cpu"):
            ProfileKwargs(activities=["abacus"]).build()


class TestProject:
    def test_logs_lie_in_the_project_unless_sent_elsewhere(self) -> None:
        assert ProjectConfiguration("a").logging_dir == "a"
        assert ProjectConfiguration("a", "logs").logging_dir == "logs"

    def test_directories_can_be_set_later(self) -> None:
        project = ProjectConfiguration(logging_dir="logs")
        project.set_directories("b")
        assert (project.project_dir, project.logging_dir) == ("b", "logs")
        other = ProjectConfiguration()
        other.set_directories("b")
        assert (other.project_dir, other.logging_dir) == ("b", "b")

    def test_the_checkpoint_format_is_one_of_two(self) -> None:
        assert ProjectConfiguration().checkpoint_format == "safe"
        assert ProjectConfiguration(checkpoint_format="classic").checkpoint_format == "classic"
        with pytest.raises(SettingError, match="safe, classic"):
            ProjectConfiguration(checkpoint_format="zip")


@pytest.mark.parametrize("steps", [0, -1, "many"])
def test_accumulation_over_no_micro_batch_is_refused(steps: Any) -> None:
    with pytest.raises(SettingError, match="num_steps"):
        GradientAccumulationPlugin(num_steps=steps)


def test_options_stay_changeable() -> None:
    configuration = DataLoaderConfiguration(split_batches=True)
    configuration.data_seed, configuration.non_blocking = 3, True
    assert (configuration.data_seed, configuration.non_blocking, configuration.split_batches) == (3, True, True)


@pytest.mark.skipif(is_installed("torchdata"), reason="torchdata is installed")
def test_stateful_loaders_name_the_package_that_they_need() -> None:
    with pytest.raises(MissingDependency, match=r"torchdata>=0\.8\.0"):
        DataLoaderConfiguration(use_stateful_dataloader=True)


def test_autocast_takes_exactly_the_torch_arguments() -> None:
    with torch.autocast("cpu", torch.bfloat16, **AutocastKwargs(cache_enabled=False).to_kwargs()):
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.bfloat16
    assert AutocastKwargs().output_dtype is torch.float32


@pytest.mark.parametrize(
    ("field", "value"),
    [("split_batches", "both"), ("even_batches", 3), ("data_seed", 1.5), ("prefetch_to_device", -1)],
)
def test_loader_options_are_checked_where_they_are_given(field: str, value: Any) -> None:
    with pytest.raises(SettingError, match=rf"DataLoaderConfiguration\({field}=\.\.\.\)` cannot be"):
        DataLoaderConfiguration(**{field: value})


def test_loader_options_take_the_words_that_files_use() -> None:
    assert DataLoaderConfiguration(split_batches="yes", dispatch_batches="off").dispatch_batches is False
