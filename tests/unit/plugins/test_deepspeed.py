"""The DeepSpeed plugin's configuration logic, without DeepSpeed."""

from __future__ import annotations

import base64
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from accelerate.errors import MissingDependency, SettingError
from accelerate.guests.deepspeed.plugin import (
    DeepSpeedPlugin,
    DummyOptim,
    DummyScheduler,
    HfDeepSpeedConfig,
    get_active_deepspeed_plugin,
)
from accelerate.optional import is_installed
from accelerate.settings import env

DOCUMENT: dict[str, Any] = {
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "other": {"entry": 1, "off": False},
}


class TestDocument:
    @pytest.mark.parametrize("form", ["mapping", "path", "text", "base64"])
    def test_comes_in_four_forms(self, form: str, tmp_path: Path) -> None:
        text = json.dumps(DOCUMENT)
        path = tmp_path / "ds.json"
        path.write_text(text)
        given = {
            "mapping": DOCUMENT,
            "path": path,
            "text": text,
            "base64": base64.urlsafe_b64encode(text.encode()).decode(),
        }[form]
        assert HfDeepSpeedConfig(given).config == DOCUMENT

    def test_the_given_mapping_is_left_alone(self) -> None:
        HfDeepSpeedConfig(DOCUMENT).config["zero_optimization"]["stage"] = 0
        assert DOCUMENT["zero_optimization"]["stage"] == 2

    def test_entries_are_found_by_dotted_name(self) -> None:
        config = HfDeepSpeedConfig(DOCUMENT)
        assert config.find_config_node("other.entry") == ({"entry": 1, "off": False}, "entry")
        assert config.find_config_node("missing.entry") == (None, "entry")
        assert config.get_value("other.entry") == 1
        assert config.get_value("other.entry.below", 7) == 7
        assert config.is_true("other.entry") and config.is_false("other.off")
        assert not config.is_true("other.missing") and not config.is_false("other.missing")

    def test_knows_stage_and_offload(self) -> None:
        config = HfDeepSpeedConfig(DOCUMENT)
        assert config.is_zero2() and not config.is_zero3() and config.is_offload()
        config.config["zero_optimization"] = {"stage": 3}
        config.set_stage_and_offload()
        assert config.is_zero3() and not config.is_offload()

    def test_a_tree_can_be_cut(self) -> None:
        config = HfDeepSpeedConfig(DOCUMENT)
        config.del_config_sub_tree("other.entry")
        config.del_config_sub_tree("missing.entry")
        assert config.config["other"] == {"off": False}
        with pytest.raises(SettingError, match=r"missing\.entry"):
            config.del_config_sub_tree("missing.entry", must_exist=True)

    @pytest.mark.parametrize("given", ["no_such_file.json", "{broken", base64.b64encode(b"[1]").decode()])
    def test_what_is_no_document_is_refused(self, given: str) -> None:
        with pytest.raises(SettingError, match="DeepSpeed config"):
            HfDeepSpeedConfig(given)


def test_options_make_a_document() -> None:
    plugin = DeepSpeedPlugin(
        zero_stage=3,
        gradient_accumulation_steps=4,
        gradient_clipping=1.0,
        offload_optimizer_device="cpu",
        offload_param_device="nvme",
        offload_param_nvme_path="/nvme",
        zero3_save_16bit_model=True,
    )
    assert plugin.deepspeed_config == {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "nvme_path": None},
            "offload_param": {"device": "nvme", "nvme_path": "/nvme"},
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "steps_per_print": math.inf,
    }
    assert plugin.zero3_init_flag is True
    assert plugin.hf_ds_config.is_offload()


def test_the_environment_fills_what_was_not_given() -> None:
    with env.patched(
        ACCELERATE_DEEPSPEED_ZERO_STAGE="1",
        ACCELERATE_GRADIENT_ACCUMULATION_STEPS="3",
        ACCELERATE_GRADIENT_CLIPPING="0.5",
        ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE="cpu",
        ACCELERATE_DEEPSPEED_ZERO3_INIT="false",
    ):
        plugin = DeepSpeedPlugin(gradient_clipping=2.0)
    assert (plugin.zero_stage, plugin.gradient_accumulation_steps, plugin.gradient_clipping) == (1, 3, 2.0)
    assert (plugin.offload_optimizer_device, plugin.zero3_init_flag) == ("cpu", False)


def test_nothing_given_is_stage_2_with_the_rest_left_open() -> None:
    plugin = DeepSpeedPlugin()
    assert (plugin.zero_stage, plugin.gradient_clipping, plugin.gradient_accumulation_steps) == (2, "auto", "auto")
    assert (plugin.zero3_init_flag, plugin.enable_msamp, plugin.msamp_opt_level) == (False, False, "O1")


def test_a_document_fills_its_open_entries_and_rules_the_rest() -> None:
    plugin = DeepSpeedPlugin(
        {"zero_optimization": {"stage": 0, "offload_param": {"device": "auto"}}, "gradient_clipping": "auto"},
        zero_stage=3,
        gradient_clipping=1.0,
    )
    assert plugin.zero_stage == 0
    assert plugin.deepspeed_config["zero_optimization"]["offload_param"]["device"] == "none"
    assert plugin.deepspeed_config["gradient_clipping"] == 1.0
    assert plugin.deepspeed_config["gradient_accumulation_steps"] == plugin.gradient_accumulation_steps == 1


def test_a_document_without_zero_is_refused() -> None:
    with pytest.raises(SettingError, match="ZeRO optimization"):
        DeepSpeedPlugin({"bf16": {"enabled": True}})


def test_a_document_from_the_environment_is_read(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(DOCUMENT))
    with env.patched(ACCELERATE_DEEPSPEED_CONFIG_FILE=str(path)):
        assert DeepSpeedPlugin().offload_optimizer_device == "cpu"


def test_another_librarys_config_object_is_used_as_it_is() -> None:
    class Theirs(HfDeepSpeedConfig):
        def dtype(self) -> str:
            return "bf16"

    theirs = Theirs(DOCUMENT)
    plugin = DeepSpeedPlugin(theirs)
    assert plugin.hf_ds_config is theirs and plugin.deepspeed_config is theirs.config


def test_an_entry_given_twice_is_refused() -> None:
    with env.patched(ACCELERATE_CONFIG_DS_FIELDS="zero_stage,gradient_clipping"):
        with pytest.raises(SettingError, match=r"^zero_stage: given in the accelerate config, .* gives it as well"):
            DeepSpeedPlugin({"zero_optimization": {"stage": 2}, "gradient_clipping": "auto"})


def test_an_entry_that_would_be_ignored_is_refused() -> None:
    with env.patched(ACCELERATE_CONFIG_DS_FIELDS="deepspeed_config_file,gradient_clipping,zero3_init_flag"):
        with pytest.raises(SettingError, match=r"^gradient_clipping: .* says nothing of it\. .* 'auto' there"):
            DeepSpeedPlugin({"zero_optimization": {"stage": 2}})


def test_sharded_construction_belongs_to_stage_3() -> None:
    with pytest.warns(UserWarning, match="ZeRO stage 3"):
        assert DeepSpeedPlugin(zero_stage=1, zero3_init_flag=True).zero3_init_flag is False


class TestProcess:
    def test_open_entries_are_filled_from_what_was_prepared(self) -> None:
        plugin = DeepSpeedPlugin(gradient_accumulation_steps=2, gradient_clipping=1.0)
        plugin.deepspeed_config_process(
            **{
                "train_batch_size": 16,
                "train_micro_batch_size_per_gpu": 4,
                "gradient_accumulation_steps": 2,
                "zero_optimization.stage": 2,
            }
        )
        assert plugin.deepspeed_config["train_batch_size"] == 16
        assert plugin.get_value("train_micro_batch_size_per_gpu") == 4

    def test_an_open_entry_without_a_value_is_refused(self) -> None:
        with pytest.raises(SettingError, match="train_micro_batch_size_per_gpu"):
            DeepSpeedPlugin(gradient_accumulation_steps=1).deepspeed_config_process(train_batch_size=4)

    def test_disagreements_are_listed(self) -> None:
        plugin = DeepSpeedPlugin({"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0})
        with pytest.raises(SettingError) as refused:
            plugin.deepspeed_config_process(**{"zero_optimization.stage": 3, "gradient_clipping": 2.0})
        assert "- ds zero_optimization.stage=2 vs arg zero_optimization.stage=3" in str(refused.value)
        assert "- ds gradient_clipping=1.0 vs arg gradient_clipping=2.0" in str(refused.value)
        plugin.deepspeed_config_process(must_match=False, **{"zero_optimization.stage": 3})

    def test_says_which_entries_are_open(self) -> None:
        plugin = DeepSpeedPlugin()
        assert plugin.is_auto("train_batch_size") and not plugin.is_auto("zero_optimization.stage")
        assert not plugin.is_auto("missing.entry")


class TestMixedPrecision:
    @pytest.mark.parametrize(
        ("precision", "fp16", "bf16"),
        [("no", False, False), ("fp16", True, False), ("bf16", False, True), ("fp8", False, True)],
    )
    def test_is_written_where_the_document_says_nothing(self, precision: str, fp16: bool, bf16: bool) -> None:
        for document in (None, {"zero_optimization": {}, "fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}):
            plugin = DeepSpeedPlugin(document)
            plugin.set_mixed_precision(precision)
            enabled = [plugin.deepspeed_config[name]["enabled"] for name in ("fp16", "bf16")]
            assert enabled == [fp16, bf16]

    def test_stays_as_the_document_says(self) -> None:
        plugin = DeepSpeedPlugin({"zero_optimization": {}, "bf16": {"enabled": True}})
        plugin.set_mixed_precision("no")
        assert plugin.deepspeed_config["bf16"] == {"enabled": True}

    def test_the_other_half_precision_is_a_conflict(self) -> None:
        plugin = DeepSpeedPlugin({"zero_optimization": {}, "fp16": {"enabled": True}})
        with pytest.raises(SettingError, match="`fp16` is set in the DeepSpeed config"):
            plugin.set_mixed_precision("bf16")


class TestMsamp:
    def test_is_refused_with_what_to_use_instead(self) -> None:
        with pytest.raises(NotImplementedError, match=r"MS-AMP .*isn't supported any more.*torchao"):
            DeepSpeedPlugin(enable_msamp=True)
        with env.patched(ACCELERATE_FP8_BACKEND="MSAMP"), pytest.raises(NotImplementedError, match="MS-AMP"):
            DeepSpeedPlugin()


class TestSelection:
    def test_the_state_selects(self) -> None:
        plugin = DeepSpeedPlugin()
        assert not plugin.selected
        with pytest.raises(SettingError, match="select_deepspeed_plugin"):
            plugin.select()
        with pytest.raises(NotImplementedError):
            plugin.selected = True
        plugin.select(_from_accelerator_state=True)
        assert plugin.selected

    def test_the_active_plugin_is_found(self) -> None:
        first, second = DeepSpeedPlugin(), DeepSpeedPlugin(zero_stage=3)
        second.select(_from_accelerator_state=True)
        state = SimpleNamespace(deepspeed_plugins={"a": first, "b": second})
        assert get_active_deepspeed_plugin(state) is second
        assert get_active_deepspeed_plugin(SimpleNamespace(deepspeed_plugins=first)) is first
        with pytest.raises(SettingError, match="none were enabled"):
            get_active_deepspeed_plugin(SimpleNamespace(deepspeed_plugins=None))


class TestShardedConstruction:
    def test_is_switched_for_a_block(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plugin = DeepSpeedPlugin(zero_stage=3)
        monkeypatch.setattr(DeepSpeedPlugin, "set_deepspeed_weakref", lambda self: setattr(self, "dschf", "held"))
        with plugin.zero3_init_context_manager(enable=False):
            assert not plugin.is_zero3_init_enabled()
        assert plugin.is_zero3_init_enabled() and plugin.dschf == "held"

    def test_comes_back_when_the_block_raises(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plugin = DeepSpeedPlugin(zero_stage=3)
        monkeypatch.setattr(DeepSpeedPlugin, "set_deepspeed_weakref", lambda self: None)
        with pytest.raises(KeyError), plugin.zero3_init_context_manager(enable=False):
            raise KeyError
        assert plugin.is_zero3_init_enabled()

    @pytest.mark.skipif(is_installed("transformers"), reason="transformers is installed")
    def test_names_the_library_that_it_needs(self) -> None:
        with pytest.raises(MissingDependency, match="transformers"):
            DeepSpeedPlugin(zero_stage=3).set_deepspeed_weakref()


@pytest.mark.skipif(is_installed("deepspeed"), reason="deepspeed is installed")
def test_leaf_modules_need_deepspeed_only_when_there_are_some() -> None:
    DeepSpeedPlugin().set_moe_leaf_modules(nn.Linear(1, 1))
    with pytest.raises(MissingDependency, match="deepspeed"):
        DeepSpeedPlugin(transformer_moe_cls_names="Linear").set_moe_leaf_modules(nn.Linear(1, 1))


def test_stand_ins_keep_what_they_were_given() -> None:
    optimizer = DummyOptim([1], lr=0.1, betas=(0.9, 0.99))
    assert (optimizer.lr, optimizer.weight_decay, optimizer.kwargs) == (0.1, 0, {"betas": (0.9, 0.99)})
    scheduler = DummyScheduler(optimizer, total_num_steps=10)
    assert (scheduler.optimizer, scheduler.total_num_steps, scheduler.warmup_num_steps) == (optimizer, 10, 0)
