"""The Megatron-LM plugin's arguments, without Megatron-LM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accelerate.errors import SettingError
from accelerate.guests.megatron import plugin as megatron_models
from accelerate.guests.megatron.options import option_names
from accelerate.guests.megatron.plugin import MegatronLMPlugin, add_model_config_to_megatron_parser
from accelerate.settings import env
from accelerate.utils import BertTrainStep, T5TrainStep


def _model(model_type: str, **sizes: Any) -> Any:
    return SimpleNamespace(config=SimpleNamespace(model_type=model_type, vocab_size=30, return_dict=True, **sizes))


def test_degrees_and_options_get_megatrons_names() -> None:
    arguments = MegatronLMPlugin(tp_degree=2, gradient_clipping=0.5, sequence_parallelism=True).megatron_lm_default_args
    assert arguments["tensor_model_parallel_size"] == 2
    assert arguments["clip_grad"] == 0.5
    assert arguments["sequence_parallel"] is True
    assert arguments["context_parallel_size"] == 2  # the documented default


def test_every_option_is_an_argument_one_of_the_schedule_or_our_own() -> None:
    plugin = MegatronLMPlugin()
    arguments = set(plugin.megatron_lm_default_args)
    assert {"eval_iters", "lr_mult", "use_custom_fsdp", "recompute_method"} <= arguments
    assert not arguments & {"seq_length", "custom_loss_function", "recompute_activations", "train_iters", "tp_degree"}
    plugin.set_training_args(micro_batch_size=1, dp_degree=1)
    plugin.set_scheduler_args(SimpleNamespace(total_num_steps=1, warmup_num_steps=1))
    assert set(plugin.megatron_lm_default_args) - arguments == {
        *option_names("schedule"), "data_parallel_size", "micro_batch_size", "global_batch_size",
    }  # fmt: skip
    assert len(option_names("schedule")) == 12


def test_the_environment_fills_what_was_not_given() -> None:
    with env.patched(MEGATRON_LM_TP_DEGREE="4", MEGATRON_LM_PP_DEGREE="2", MEGATRON_LM_NO_SAVE_OPTIM="false"):
        plugin = MegatronLMPlugin(pp_degree=1)
    assert (plugin.tp_degree, plugin.pp_degree, plugin.no_save_optim) == (4, 1, False)


@pytest.mark.parametrize(
    ("arguments", "implementation"),
    [({}, "torch"), ({"pp_degree": 2}, "local"), ({"use_distributed_optimizer": True}, "local")],
)
def test_data_parallel_implementation(arguments: dict[str, Any], implementation: str) -> None:
    plugin = MegatronLMPlugin(**arguments)
    assert plugin.DDP_impl == plugin.megatron_lm_default_args["DDP_impl"] == implementation
    plugin.set_mixed_precision("bf16")
    assert plugin.megatron_lm_default_args["bf16"] is True
    assert plugin.megatron_lm_default_args["DDP_impl"] == "local"


def test_consumed_samples_are_those_of_three_loaders() -> None:
    assert MegatronLMPlugin(consumed_samples=[5]).consumed_samples == [5, 0, 0]
    assert MegatronLMPlugin().consumed_samples is None


def test_the_global_batch_counts_micro_batches_and_ranks() -> None:
    plugin = MegatronLMPlugin(num_micro_batches=3)
    plugin.set_training_args(micro_batch_size=2, dp_degree=4)
    assert plugin.megatron_lm_default_args["global_batch_size"] == 24


def test_the_optimizers_family_and_arguments_are_taken_over() -> None:
    plugin = MegatronLMPlugin()
    parameters = torch.nn.Linear(1, 1).parameters()
    plugin.set_optimizer_type(torch.optim.AdamW(parameters, lr=0.1, betas=(0.8, 0.9), weight_decay=0.2))
    taken = ("optimizer", "lr", "adam_beta1", "adam_beta2", "weight_decay")
    assert [plugin.megatron_lm_default_args[name] for name in taken] == ["adam", 0.1, 0.8, 0.9, 0.2]
    with pytest.raises(SettingError, match="rmsprop"):
        plugin.set_optimizer_type(torch.optim.RMSprop(torch.nn.Linear(1, 1).parameters()))


def test_the_schedule_comes_from_the_scheduler_where_not_given() -> None:
    plugin = MegatronLMPlugin(lr_warmup_iters=7)
    plugin.set_training_args(micro_batch_size=2, dp_degree=4)
    plugin.set_scheduler_args(SimpleNamespace(total_num_steps=100, warmup_num_steps=10))
    assert plugin.megatron_lm_default_args["train_iters"] == 25
    assert plugin.megatron_lm_default_args["lr_warmup_iters"] == 7


def test_other_arguments_have_the_last_word() -> None:
    plugin = MegatronLMPlugin(other_megatron_args={"clip_grad": 9, "new": 1})
    assert plugin.megatron_lm_default_args["clip_grad"] == 9
    assert plugin.megatron_lm_default_args["new"] == 1


def test_selective_recomputation_replaces_the_full_one() -> None:
    arguments = MegatronLMPlugin(recompute_activations=True).megatron_lm_default_args
    assert (arguments["recompute_granularity"], arguments["recompute_method"]) == ("selective", None)


class TestSizes:
    def test_of_a_gpt2_model_and_its_batch(self) -> None:
        plugin = MegatronLMPlugin()
        model = _model("gpt2", n_layer=2, n_embd=8, n_head=4, n_positions=16)
        plugin.set_network_size_args(model, {"input_ids": torch.zeros(3, 5)})
        sizes = ("model_type_name", "num_layers", "hidden_size", "num_attention_heads", "seq_length")
        assert [plugin.megatron_lm_default_args[name] for name in sizes] == ["gpt", 2, 8, 4, 5]

    def test_of_a_mixture_of_experts(self) -> None:
        plugin = MegatronLMPlugin()
        plugin.set_network_size_args(
            _model(
                "glm4_moe", num_hidden_layers=2, hidden_size=8, num_attention_heads=4, max_position_embeddings=16,
                n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=6,
            )
        )  # fmt: skip
        sizes = ("model_type_name", "num_layers", "num_experts", "moe_router_topk", "moe_ffn_hidden_size", "seq_length")
        assert [plugin.megatron_lm_default_args[name] for name in sizes] == ["gpt", 2, 4, 2, 6, 16]

    @pytest.mark.parametrize("model_type", ["sparrow", "t5", "megatron-bert"])
    def test_an_unknown_model_type_is_refused_with_the_way_out(self, model_type: str) -> None:
        with pytest.raises(SettingError, match="add_model_config_to_megatron_parser"):
            MegatronLMPlugin().set_network_size_args(_model(model_type))

    def test_users_add_their_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(megatron_models, "_PARSERS", dict(megatron_models._PARSERS))

        @add_model_config_to_megatron_parser("sparrow")
        def sparrow(megatron_lm_plugin: Any, model: Any, batch_data: Any) -> None:
            megatron_lm_plugin.megatron_lm_default_args["wings"] = 2

        plugin = MegatronLMPlugin()
        plugin.set_network_size_args(_model("house-sparrow"))
        assert plugin.megatron_lm_default_args["wings"] == 2


@pytest.mark.parametrize(("step", "script"), [(BertTrainStep, "pretrain_bert.py"), (T5TrainStep, "pretrain_t5.py")])
def test_train_steps_of_encoders_are_refused_with_the_way_out(step: Any, script: str) -> None:
    with pytest.raises(SettingError, match=rf"{script}.*AbstractTrainStep.*custom_train_step_class"):
        step(None, None)
