"""The options of Megatron-LM: degrees of parallelism, and arguments that follow from the prepared objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from ...errors import SettingError
from ...optional import require
from ...plugins.handlers import LaunchedOptions
from ...plugins.placeholder import Placeholder
from ...settings.megatron import MegatronOptions, option_names

#: A batch of named tensors, from which the length of the sequences is read.
Batch = Mapping[str, torch.Tensor]


class Configured(Protocol):
    """A model with a configuration of sizes, as those of transformers have."""

    @property
    def config(self) -> Any:
        """The sizes, under names that depend on the model's type."""
        ...


#: Options that Megatron-LM knows under another name.
_RENAMED = {
    "tp_degree": "tensor_model_parallel_size",
    "pp_degree": "pipeline_model_parallel_size",
    "sequence_parallelism": "sequence_parallel",
    "gradient_clipping": "clip_grad",
}


@dataclass
class MegatronLMPlugin(LaunchedOptions, MegatronOptions):
    """The options of Megatron-LM; ``megatron_lm_default_args`` is the dictionary of arguments that it gets."""

    def _resolve(self, given: Mapping[str, object]) -> None:
        samples = list(self.consumed_samples or [])
        if samples:  # train, evaluation, test
            self.consumed_samples: list[int] | None = [*samples, 0, 0, 0][: max(3, len(samples))]
        self._set_ddp_implementation(local=self.pp_degree > 1 or self.use_distributed_optimizer)
        self.megatron_lm_default_args: dict[str, Any] = {
            **{theirs: getattr(self, ours) for ours, theirs in _RENAMED.items()},
            **{name: getattr(self, name) for name in option_names("argument") if name not in _RENAMED},
            "DDP_impl": self.DDP_impl,
        }
        if self.recompute_activations:
            # Megatron takes a method and a number of layers for full recomputation only.
            for name, value in (("granularity", "selective"), ("method", None), ("num_layers", None)):
                self.megatron_lm_default_args[f"recompute_{name}"] = value
        if self.tensorboard_dir is not None:
            self.megatron_lm_default_args["tensorboard_dir"] = self.tensorboard_dir
            if self.set_all_logging_options:
                self.set_tensorboard_logging_options()
        self.megatron_lm_default_args.update(self.other_megatron_args or {})

    def _set_ddp_implementation(self, *, local: bool) -> None:
        self.DDP_impl = "local" if local else "torch"

    def set_network_size_args(self, model: torch.nn.Module, batch_data: Batch | None = None) -> None:
        """Set the arguments for the size of ``model``, read from its configuration.

        Raises:
            SettingError: no parser is registered for the model's type.
        """
        self.megatron_lm_default_args.update(network_size(self, model, batch_data))

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Set the arguments for ``mixed_precision``."""
        if mixed_precision in ("fp16", "bf16"):
            self.megatron_lm_default_args[mixed_precision] = True
        if mixed_precision == "bf16":  # gradients are accumulated in fp32 by Megatron's own implementation
            self._set_ddp_implementation(local=True)
            self.megatron_lm_default_args["DDP_impl"] = self.DDP_impl

    def set_training_args(self, micro_batch_size: int, dp_degree: int) -> None:
        """Set the size of a micro-batch, and of the global batch on all data-parallel ranks."""
        self.data_parallel_size = dp_degree
        self.micro_batch_size = micro_batch_size
        self.global_batch_size: int = dp_degree * micro_batch_size * self.num_micro_batches
        for name in ("data_parallel_size", "micro_batch_size", "global_batch_size"):
            self.megatron_lm_default_args[name] = getattr(self, name)

    def set_optimizer_type(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the arguments for an optimizer like ``optimizer``, of the Adam or SGD family."""
        name, defaults = type(optimizer).__name__.lower(), optimizer.defaults
        arguments = self.megatron_lm_default_args
        if "adam" in name:
            arguments["optimizer"] = "adam"
            arguments["adam_beta1"], arguments["adam_beta2"] = defaults["betas"]
            arguments["adam_eps"] = defaults["eps"]
        elif "sgd" in name:
            arguments["optimizer"] = "sgd"
            arguments["sgd_momentum"] = defaults["momentum"]
        else:
            raise SettingError(f"Optimizer {name} is not supported by Megatron-LM: use one of the Adam or SGD family.")
        arguments["lr"] = defaults["lr"]
        arguments["weight_decay"] = defaults["weight_decay"]

    def set_scheduler_args(self, scheduler: Any) -> None:
        """Set the run's length and learning rate schedule: by options, else by ``scheduler``."""
        if self.train_iters is None:
            self.train_iters: int | None = (
                scheduler.total_num_steps // self.megatron_lm_default_args["data_parallel_size"]
            )
            self.train_samples: int | None = None  # the length of a run is given once
        if self.lr_warmup_iters is None:
            self.lr_warmup_iters: int | None = (
                scheduler.warmup_num_steps // self.megatron_lm_default_args["data_parallel_size"]
            )
        if self.lr_warmup_samples is None:
            self.lr_warmup_samples: int | None = 0
        self.megatron_lm_default_args.update({name: getattr(self, name) for name in option_names("schedule")})

    def set_tensorboard_logging_options(self) -> None:
        """Turn on everything that Megatron-LM can log."""
        library = require("megatron.training.arguments", purpose="set_all_logging_options")
        import argparse

        parser = library._add_logging_args(argparse.ArgumentParser())
        known, _ = parser.parse_known_args([])
        everything = {name: True for name, value in vars(known).items() if value is False}
        self.megatron_lm_default_args.update(everything)


# --------------------------------------------------------------------------------------------------
# Placeholders for the data and schedules that Megatron-LM makes from its own arguments


class MegatronLMDummyDataLoader(Placeholder):
    """A placeholder for a loader over data in Megatron-LM's own format.

    Args:
        dataset_kwargs: Megatron-LM's arguments about data (``data_path``, ``splits_string``, ``seq_length``, ...),
            which it gets with all others.
    """

    role: ClassVar[str] = "data loader"
    engine: ClassVar[str] = "Megatron-LM"
    asked_by: ClassVar[str] = "megatron_lm"

    def __init__(self, **dataset_kwargs: object) -> None:
        self.dataset_args: dict[str, Any] = {**dataset_kwargs, "megatron_dataset_flag": True}


class MegatronLMDummyScheduler(Placeholder):
    """A placeholder for the schedule that Megatron-LM makes: its length and warm-up."""

    role: ClassVar[str] = "scheduler"
    engine: ClassVar[str] = "Megatron-LM"
    asked_by: ClassVar[str] = "megatron_lm"

    def __init__(
        self, optimizer: object, total_num_steps: int | None = None, warmup_num_steps: int = 0, **kwargs: object
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.kwargs = kwargs


# --------------------------------------------------------------------------------------------------
# Megatron-LM's arguments for the sizes of a model, by the model's type; users add their own types

#: (plugin, model, batch or None) -> Megatron's arguments.
Parser = Callable[["MegatronLMPlugin", Any, Any], Mapping[str, object] | None]

_PARSERS: dict[str, Parser] = {}


def add_model_config_to_megatron_parser(model_type: str) -> Callable[[Parser], Parser]:
    """Return a decorator that registers a parser for models with ``model_type`` in their ``config.model_type``.

    The function returns Megatron's arguments, or puts them into
    ``megatron_lm_plugin.megatron_lm_default_args``.
    """

    def add(parser: Parser) -> Parser:
        _PARSERS[model_type] = parser
        return parser

    return add


def network_size(
    plugin: MegatronLMPlugin, model: torch.nn.Module, batch_data: Batch | None = None
) -> Mapping[str, object]:
    """Return Megatron's arguments for the size of ``model``."""
    model_type = str(getattr(model.config, "model_type", "")).lower()
    for name, parser in _PARSERS.items():
        if name in model_type:
            return parser(plugin, model, batch_data) or {}
    raise SettingError(
        f"Megatron-LM: no sizes are known for models of type {model_type!r} (known: "
        f"{', '.join(_PARSERS)}). Add yours "
        "with the decorator add_model_config_to_megatron_parser."
    )


@add_model_config_to_megatron_parser("megatron-bert")
def _bert(plugin: MegatronLMPlugin, model: Configured, batch_data: Batch | None) -> dict[str, object]:
    config = model.config
    plugin.seq_length = _length(batch_data, "input_ids", plugin.seq_length, config.max_position_embeddings)
    return {
        "seq_length": plugin.seq_length,
        "num_labels": config.num_labels,
        **_common(
            "bert",
            config,
            "num_hidden_layers",
            "hidden_size",
            "num_attention_heads",
            "max_position_embeddings",
        ),
        "pretraining_flag": "forpretraining" in type(model).__name__.lower(),
    }


@add_model_config_to_megatron_parser("gpt2")
def _gpt2(plugin: MegatronLMPlugin, model: Configured, batch_data: Batch | None) -> dict[str, object]:
    config = model.config
    plugin.seq_length = _length(batch_data, "input_ids", plugin.seq_length, config.n_positions)
    return {
        "seq_length": plugin.seq_length,
        "return_logits": plugin.return_logits,
        "tokenizer_type": "GPT2BPETokenizer",
        **_common("gpt", config, "n_layer", "n_embd", "n_head", "n_positions"),
    }


@add_model_config_to_megatron_parser("t5")
def _t5(plugin: MegatronLMPlugin, model: Configured, batch_data: Batch | None) -> dict[str, object]:
    config = model.config
    longest = config.n_positions
    plugin.encoder_seq_length = _length(batch_data, "input_ids", plugin.encoder_seq_length, longest)
    plugin.decoder_seq_length = _length(batch_data, "labels", plugin.decoder_seq_length, longest)
    return {
        "encoder_seq_length": plugin.encoder_seq_length,
        "decoder_seq_length": plugin.decoder_seq_length,
        **_common("t5", config, "num_layers", "d_model", "num_heads", "n_positions"),
    }


@add_model_config_to_megatron_parser("llama")
def _llama(plugin: MegatronLMPlugin, model: Configured, batch_data: Batch | None) -> dict[str, object]:
    config = model.config
    longest = getattr(config, "max_sequence_length", config.max_position_embeddings)
    plugin.seq_length = _length(batch_data, "input_ids", plugin.seq_length, longest)
    return {
        "seq_length": plugin.seq_length,
        "return_logits": plugin.return_logits,
        "tokenizer_type": "Llama2Tokenizer",
        **_common(
            "gpt",
            config,
            "num_hidden_layers",
            "hidden_size",
            "num_attention_heads",
            "max_position_embeddings",
        ),
    }


@add_model_config_to_megatron_parser("glm4_moe")
def _glm4_moe(plugin: MegatronLMPlugin, model: Configured, batch_data: Batch | None) -> dict[str, object]:
    config = model.config
    plugin.seq_length = _length(batch_data, "input_ids", plugin.seq_length, config.max_position_embeddings)
    return {
        "seq_length": plugin.seq_length,
        "return_logits": plugin.return_logits,
        "num_experts": config.n_routed_experts,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        **_common(
            "gpt",
            config,
            "num_hidden_layers",
            "hidden_size",
            "num_attention_heads",
            "max_position_embeddings",
        ),
    }


def _common(kind: str, config: Any, layers: str, width: str, heads: str, positions: str) -> dict[str, object]:
    return {
        "model_type_name": kind,
        "num_layers": getattr(config, layers),
        "hidden_size": getattr(config, width),
        "num_attention_heads": getattr(config, heads),
        "max_position_embeddings": getattr(config, positions),
        "orig_vocab_size": config.vocab_size,
        "model_return_dict": config.return_dict,
        "pretraining_flag": True,
    }


def _length(batch_data: Batch | None, name: str, given: int | None, longest: int) -> int:
    """Return the sequence length: the given one, else that of the batch, else the longest the model takes."""
    if given is not None:
        return given
    return longest if batch_data is None else batch_data[name].shape[1]
