"""The options of Megatron-LM: degrees of parallelism, and arguments inferred from the prepared objects."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ...errors import MissingDependency, SettingError
from ...optional import MEGATRON_REMEDY
from ...plugins import Placeholder
from ...plugins.handlers import LaunchedOptions
from .options import MegatronOptions, option_names

if TYPE_CHECKING:
    from ...settings.tree import Settings

#: A batch of named tensors, from which the length of the sequences is read.
Batch = Mapping[str, torch.Tensor]


#: Options that Megatron-LM knows under another name.
_RENAMED = {
    "tp_degree": "tensor_model_parallel_size",
    "pp_degree": "pipeline_model_parallel_size",
    "sequence_parallelism": "sequence_parallel",
    "gradient_clipping": "clip_grad",
}


@dataclass(repr=False, eq=False)
class MegatronLMPlugin(LaunchedOptions, MegatronOptions):
    """The options of Megatron-LM; ``megatron_lm_default_args`` is the dict of arguments for it."""

    def _resolve(self, given: Mapping[str, object]) -> None:
        samples = list(self.consumed_samples or [])
        if samples:  # train, evaluation, test
            self.consumed_samples: list[int] | None = [*samples, 0, 0, 0][: max(3, len(samples))]
        self.DDP_impl = "local" if self.pp_degree > 1 or self.use_distributed_optimizer else "torch"
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
        self.megatron_lm_default_args.update(self.other_megatron_args or {})

    @property
    def mesh_axes(self) -> dict[str, int]:
        """The degrees of Megatron's tensor, pipeline and context parallelism."""
        return {"tp": self.tp_degree, "pp": self.pp_degree, "cp": self.context_parallel_size or 1}

    def set_network_size_args(self, model: torch.nn.Module, batch_data: Batch | None = None) -> None:
        """Set the arguments for the size of ``model``, read from its configuration.

        Raises:
            SettingError: the sizes of this type of model are unknown.
        """
        model_type = str(getattr(model.config, "model_type", "")).lower()
        parser = next((found for name, found in _PARSERS.items() if name in model_type), None)
        known = next((name for name in _SIZES if name in model_type), None)
        if parser is not None:
            self.megatron_lm_default_args.update(parser(self, model, batch_data) or {})
        elif known is not None:
            self.megatron_lm_default_args.update(self._network_size(model.config, known, batch_data))
        else:
            raise SettingError(
                f"Megatron-LM: no sizes are known for models of type {model_type!r} (known: {', '.join(_SIZES)}). Add "
                "yours with the decorator add_model_config_to_megatron_parser."
            )

    def _network_size(self, config: Any, kind: str, batch_data: Batch | None) -> dict[str, object]:
        sizes: dict[str, Any] = {theirs: getattr(config, ours) for theirs, ours in _SIZES[kind].items()}
        if self.seq_length is None:
            longest = getattr(config, "max_sequence_length", sizes["max_position_embeddings"])
            self.seq_length: int | None = longest if batch_data is None else batch_data["input_ids"].shape[1]
        sizes.update(model_type_name="gpt", seq_length=self.seq_length, return_logits=self.return_logits)
        return {**sizes, **({"tokenizer_type": _TOKENIZERS[kind]} if kind in _TOKENIZERS else {})}

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Set the arguments for ``mixed_precision``."""
        if mixed_precision in ("fp16", "bf16"):
            self.megatron_lm_default_args[mixed_precision] = True
        if mixed_precision == "bf16":  # gradients are accumulated in fp32 by Megatron's own implementation
            self.DDP_impl = self.megatron_lm_default_args["DDP_impl"] = "local"

    def set_training_args(self, micro_batch_size: int, dp_degree: int) -> None:
        """Set the micro-batch size, and the global batch size over all data-parallel ranks."""
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
        """Set the run's length and learning rate schedule from the options, else from ``scheduler``."""
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


def complete(
    settings: Settings, arguments: Mapping[str, object], known: Mapping[str, object]
) -> tuple[MegatronLMPlugin, MegatronLMPlugin]:
    """Return the MegatronLMPlugin, in the run's precision.

    Raises:
        MissingDependency: Megatron-LM isn't installed.
    """
    try:
        importlib.import_module("megatron.training")
    except ImportError as error:
        raise MissingDependency(
            f"Megatron-LM, asked for by {settings.quote('paradigm.use_megatron_lm')}, can't be imported ({error}). "
            f"{MEGATRON_REMEDY}"
        ) from error
    options = settings.find(MegatronOptions)
    assert options is not None  # it is called then only
    plugin = MegatronLMPlugin.of(options)
    plugin.set_mixed_precision(str(settings.run.mixed_precision))
    return plugin, plugin


# --------------------------------------------------------------------------------------------------
# Placeholders for the data and schedules that Megatron-LM makes from its own arguments


class MegatronLMDummyDataLoader(Placeholder):
    """A placeholder for a loader over data in Megatron-LM's own format.

    Args:
        dataset_kwargs: Megatron-LM's arguments for data (``data_path``, ``splits_string``, ``seq_length``, ...),
            which are added to its other arguments.
    """

    role: ClassVar[str] = "data loader"
    engine: ClassVar[str] = "Megatron-LM"
    asked_by: ClassVar[str] = "megatron_lm"

    def __init__(self, **dataset_kwargs: object) -> None:
        self.dataset_args: dict[str, Any] = {**dataset_kwargs, "megatron_dataset_flag": True}


class MegatronLMDummyScheduler(Placeholder):
    """A placeholder, with length and warm-up, for the schedule that Megatron-LM creates."""

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

#: The parsers that users added; they come before the sizes below.
_PARSERS: dict[str, Parser] = {}

_LLAMA = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "max_position_embeddings": "max_position_embeddings",
    "orig_vocab_size": "vocab_size",
}
#: By the type of a decoder-only model: Megatron's arguments, and their names in the model's configuration.
_SIZES: dict[str, Mapping[str, str]] = {
    "gpt2": {
        "num_layers": "n_layer",
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "orig_vocab_size": "vocab_size",
    },
    "llama": _LLAMA,
    "glm4_moe": {
        **_LLAMA,
        "num_experts": "n_routed_experts",
        "moe_router_topk": "num_experts_per_tok",
        "moe_ffn_hidden_size": "moe_intermediate_size",
    },
}
_TOKENIZERS = {"gpt2": "GPT2BPETokenizer", "llama": "Llama2Tokenizer"}


def add_model_config_to_megatron_parser(model_type: str) -> Callable[[Parser], Parser]:
    """Return a decorator that registers a parser for models with ``model_type`` in their ``config.model_type``.

    The function returns Megatron's arguments, or sets them in ``megatron_lm_plugin.megatron_lm_default_args``.
    """

    def add(parser: Parser) -> Parser:
        _PARSERS[model_type] = parser
        return parser

    return add
