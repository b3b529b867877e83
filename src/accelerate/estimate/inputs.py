"""What models of known libraries are called with."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

#: Parts of class names -> whether there is one label for a whole sample (or one for each token).
_ONE_LABEL_A_SAMPLE = {
    "ForSequenceClassification": True,
    "ForImageClassification": True,
    "ForAudioClassification": True,
    "ForVideoClassification": True,
    "ForMultipleChoice": True,
    "LMHead": False,
    "ForCausalLM": False,
    "ForMaskedLM": False,
    "ForConditionalGeneration": False,
    "ForSpeechSeq2Seq": False,
    "ForTokenClassification": False,
}
_CHANNELS = 3
_SIDE = 224


def inputs_of_transformers(model: nn.Module, batch: int, sequence: int) -> dict[str, Any] | None:
    """Arguments of a training step of a transformers model; None where its main input is of no known kind."""
    config: Any = model.config
    main = getattr(model, "main_input_name", "input_ids")
    accepted = inspect.signature(model.forward).parameters
    found: dict[str, Any] = {}
    if main == "input_ids":
        found["input_ids"] = _integers(batch, sequence)
    elif main == "pixel_values":
        found["pixel_values"] = _images(config, batch)
    elif main == "input_features":
        frames = 2 * getattr(config, "max_source_positions", sequence)
        found["input_features"] = torch.zeros(batch, getattr(config, "num_mel_bins", 80), frames)
    elif main == "input_values":
        found["input_values"] = torch.zeros(batch, sequence)
    else:
        return None
    compares = callable(getattr(model, "get_image_features", None)) and callable(
        getattr(model, "get_text_features", None)
    )
    if compares:  # images and texts side by side
        found |= {"input_ids": _integers(batch, sequence), "pixel_values": _images(config, batch)}
    per_sample = next((one for part, one in _ONE_LABEL_A_SAMPLE.items() if part in type(model).__name__), None)
    if per_sample is not None and "labels" in accepted:
        found["labels"] = _integers(batch) if per_sample else _integers(batch, sequence)
    elif "start_positions" in accepted:
        found |= {"start_positions": _integers(batch), "end_positions": _integers(batch)}
    elif getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in accepted:
        found["decoder_input_ids"] = _integers(batch, sequence)
    return found


def inputs_of_timm(model: nn.Module, batch: int) -> tuple[Any, ...]:
    """The images that a timm model reads."""
    about: Any = getattr(model, "default_cfg", None) or {}
    return (torch.zeros(batch, *about.get("input_size", (_CHANNELS, _SIDE, _SIDE))),)


def _integers(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.long)


def _images(config: Any, batch: int) -> torch.Tensor:
    about = getattr(config, "vision_config", None) or config
    side = getattr(about, "image_size", None) or _SIDE
    height, width = side if isinstance(side, (tuple, list)) else (side, side)
    return torch.zeros(batch, getattr(about, "num_channels", _CHANNELS), height, width)
