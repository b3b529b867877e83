"""Sequence parallelism with DeepSpeed: all-to-all between sequence and heads around transformers' attention.

Bekman et al., "Arctic Long Sequence Training: Scalable And Efficient Training For Multi-Million Token Sequences", 2025.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Protocol, final

import torch

from ...data_loader.adapter import SequenceShardLoader
from ...errors import PreparationError
from ...hooks.attach import refuse_recurrent_layers
from ...optional import require
from ...plugins.parallelism import DeepSpeedSequenceParallelConfig, ParallelismConfig
from ...training.accumulation import GradientState
from .engine import Engine

#: The oldest DeepSpeed that has it.
ULYSSES_FLOOR: Final = "0.18.2"
_PURPOSE: Final = "sequence parallelism (sp_backend='deepspeed')"
_WITHOUT_WHOLE_MASKS: Final = ("eager", "flex_attention")


class Architecture(Protocol):
    """The part of a transformers configuration with the number of attention heads."""

    num_attention_heads: int
    num_key_value_heads: int


def check(config: ParallelismConfig, model: torch.nn.Module, *, even_batches: bool) -> None:
    """Raise, before anything is changed, if the heads of ``model`` can't be sharded as ``config`` says.

    Raises:
        MissingDependency: DeepSpeed or transformers is missing, or too old.
        PreparationError: the model or the loaders don't allow it.
    """
    require("deepspeed", "deepspeed", purpose=_PURPOSE, at_least=ULYSSES_FLOOR)
    require("transformers", purpose=_PURPOSE)
    size = config.sp_size
    if not even_batches:
        raise PreparationError(
            f"sp_size={size}: the ranks of a group compute each other's batches, so all need equally many, of one "
            "size. Set even_batches=True."
        )
    architecture = _architecture(model)
    refuse_recurrent_layers(model)
    heads, stored = architecture.num_attention_heads, architecture.num_key_value_heads
    if heads % size or (stored % size and size % stored):
        raise PreparationError(
            f"sp_size={size} splits attention heads over ranks, and doesn't fit this model's {heads} heads "
            f"({stored} of keys and values). Choose a divisor of both."
        )
    handler: DeepSpeedSequenceParallelConfig = config.sp_handler
    length = None if handler.sp_seq_length_is_variable else handler.sp_seq_length
    if length is not None and length % size:
        raise PreparationError(
            f"sp_seq_length={length} can't be split into sp_size={size} equal parts. Pad sequences to a multiple of it."
        )
    _attention(handler, model)


def _architecture(model: torch.nn.Module) -> Architecture:
    config: Any = getattr(model, "config", None)
    text_config = getattr(config, "get_text_config", None)
    described: Any = None if text_config is None else text_config()
    if getattr(described, "num_key_value_heads", None) is None:
        raise PreparationError(
            f"{type(model).__name__}: DeepSpeed's sequence parallelism exchanges the attention of models from "
            "transformers, and this one has no config of theirs. Set sp_backend='torch', which needs only torch's "
            "scaled_dot_product_attention in the model."
        )
    return described


def _attention(handler: DeepSpeedSequenceParallelConfig, model: torch.nn.Module) -> str:
    """Return the attention implementation that the model calls.

    Raises:
        PreparationError: it isn't the one in ``handler``, or it needs masks of full sequences.
    """
    found: str = getattr(model.config, "_attn_implementation", None) or "sdpa"
    asked = handler.sp_attn_implementation or found
    if asked != found or found in _WITHOUT_WHOLE_MASKS:
        raise PreparationError(
            f"{type(model).__name__} calls the attention {found!r}, and sequence parallelism "
            + (f"was asked to exchange {asked!r} (sp_attn_implementation)" if asked != found else "can't exchange it")
            + ". Load the model with from_pretrained(..., attn_implementation='sdpa') or a flash attention, and name "
            "the same in DeepSpeedSequenceParallelConfig, or none."
        )
    return found


@final
class Ulysses:
    """Sequence-parallel attention that replaces one of transformers' attention functions until it is released.

    In evaluation mode, it is used only if the running loader shards sequences.

    Args:
        micro_batch_size: the rows of every batch, which DeepSpeed needs in advance.
        gradient_state: holds the running loader.
    """

    def __init__(
        self, config: ParallelismConfig, model: torch.nn.Module, micro_batch_size: int, gradient_state: GradientState
    ) -> None:
        self.size: int = config.sp_size
        self._num_added = self.size
        handler: DeepSpeedSequenceParallelConfig = config.sp_handler
        self._module = require("deepspeed.runtime.sequence_parallel.ulysses_sp", purpose=_PURPOSE)
        self._functions: Any = require("transformers.modeling_utils", purpose=_PURPOSE).ALL_ATTENTION_FUNCTIONS
        self._kind = _attention(handler, model)
        self._original = original = self._functions[self._kind]
        #: The process groups, as ``deepspeed.initialize(mpu=...)`` takes them.
        self.groups: Any = self._module.UlyssesSPAttentionHF.register_with_transformers(
            model_name_or_path=model,
            core_attn_implementation=self._kind,
            sequence_parallel_size=self.size,
            micro_batch_size=micro_batch_size,
            seq_length=handler.sp_seq_length,
            seq_length_is_variable=handler.sp_seq_length_is_variable,
        )
        together = self._functions[self._kind]

        def attention(module: torch.nn.Module, *args: object, **kwargs: object) -> object:
            has_parts = module.training or isinstance(gradient_state.loaders.active, SequenceShardLoader)
            return (together if has_parts else original)(module, *args, **kwargs)

        self._functions[self._kind] = attention

    def shard_loader(self, loader: object, device: torch.device) -> SequenceShardLoader:
        """Wrap ``loader`` so that each rank gets its part of every sequence, with labels as ``shift_labels``."""
        if isinstance(loader, SequenceShardLoader):
            return loader

        def parts(loader: object) -> Iterable[object]:
            return self._module.UlyssesSPDataLoaderAdapter(
                loader,
                sp_rank=self.groups.get_sequence_parallel_rank(),
                sp_group=self.groups.get_sequence_parallel_group(),
                sp_world_size=self.size,
                device=device,
            )

        return SequenceShardLoader(loader, parts, self.size)

    def set_loss_scaling(self, engine: Engine) -> None:
        """Set the scaling of losses for ``engine``.

        ZeRO sums the gradients of the ranks that share a sequence; only stage 3 averages them when it scatters them.
        """
        averages = engine.zero_optimization_partition_weights() and engine.zero_reduce_scatter()
        self._num_added = 1 if averages else self.size

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return ``loss`` scaled so that the engine's gradients are those of full sequences.

        Each rank has the gradient of the mean over its part, or, with a differentiable gather of all parts, its share
        of the full gradient times the number of ranks. In both cases the average over the ranks is correct.
        """
        return loss if self._num_added == 1 else loss / self._num_added

    def release(self) -> None:
        """Restore transformers' own attention function, and release the process groups."""
        self._functions[self._kind] = self._original
        self.groups._release_sequence_parallel_groups()
