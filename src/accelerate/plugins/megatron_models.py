"""What Megatron-LM calls the sizes of a model, by the model's type; users add their own types."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import SettingError

if TYPE_CHECKING:
    from .megatron import MegatronLMPlugin

#: (plugin, model, batch or None) -> Megatron's arguments.
Parser = Callable[["MegatronLMPlugin", Any, Any], dict[str, Any] | None]

_PARSERS: dict[str, Parser] = {}


def add_model_config_to_megatron_parser(model_type: str) -> Callable[[Parser], Parser]:
    """A decorator: models whose ``config.model_type`` contains ``model_type`` are described by the function.

    The function returns Megatron's arguments, or puts them into
    ``megatron_lm_plugin.megatron_lm_default_args``.
    """

    def add(parser: Parser) -> Parser:
        _PARSERS[model_type] = parser
        return parser

    return add


def network_size(plugin: MegatronLMPlugin, model: Any, batch_data: Any = None) -> dict[str, Any]:
    """Megatron's arguments for the size of ``model``."""
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
def _bert(plugin: MegatronLMPlugin, model: Any, batch_data: Any) -> dict[str, Any]:
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
def _gpt2(plugin: MegatronLMPlugin, model: Any, batch_data: Any) -> dict[str, Any]:
    config = model.config
    plugin.seq_length = _length(batch_data, "input_ids", plugin.seq_length, config.n_positions)
    return {
        "seq_length": plugin.seq_length,
        "return_logits": plugin.return_logits,
        "tokenizer_type": "GPT2BPETokenizer",
        **_common("gpt", config, "n_layer", "n_embd", "n_head", "n_positions"),
    }


@add_model_config_to_megatron_parser("t5")
def _t5(plugin: MegatronLMPlugin, model: Any, batch_data: Any) -> dict[str, Any]:
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
def _llama(plugin: MegatronLMPlugin, model: Any, batch_data: Any) -> dict[str, Any]:
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
def _glm4_moe(plugin: MegatronLMPlugin, model: Any, batch_data: Any) -> dict[str, Any]:
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


def _common(kind: str, config: Any, layers: str, width: str, heads: str, positions: str) -> dict[str, Any]:
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


def _length(batch_data: Any, name: str, given: int | None, longest: int) -> int:
    """The sequence length: the given one, else that of the batch, else the longest the model takes."""
    if given is not None:
        return given
    return longest if batch_data is None else batch_data[name].shape[1]
