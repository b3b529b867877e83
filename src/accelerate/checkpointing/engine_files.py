"""What DeepSpeed's engine leaves in a checkpoint, read without the engine: its weights, put together again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..names import engine_tag
from ..optional import require


def holds_engine_state(folder: Path, index: int = 0) -> bool:
    """Whether an engine saved model ``index`` into ``folder``."""
    return (folder / engine_tag(index)).is_dir()


def read_engine_weights(folder: Path, index: int = 0, *, trusted: bool = False) -> dict[str, Any]:
    """The full-precision weights of model ``index``, out of the shards of all ranks.

    Args:
        trusted: DeepSpeed's files are pickles, which can run code when they are read.

    Raises:
        CheckpointError: they are not trusted.
        MissingDependency: DeepSpeed isn't installed.
    """
    if not trusted:
        raise CheckpointError(
            f"{folder} holds weights in DeepSpeed's own shards only, which are pickles and can run code. If you trust "
            "them, pass load_kwargs={'weights_only': False}, or run `python zero_to_fp32.py . . --safe_serialization` "
            "in that folder; to have whole weights in the next checkpoint, save with zero3_save_16bit_model=True."
        )
    library = require("deepspeed.utils.zero_to_fp32", "deepspeed", purpose=f"reading {folder / engine_tag(index)}")
    return library.get_fp32_state_dict_from_zero_checkpoint(str(folder), engine_tag(index))
