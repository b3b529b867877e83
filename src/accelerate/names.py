"""Names shared between programs: file names, and variables that connect a launcher and its ranks."""

from __future__ import annotations

from typing import Final

MODEL_NAME: Final = "pytorch_model"
SAFE_MODEL_NAME: Final = "model"
RNG_STATE_NAME: Final = "random_states"
OPTIMIZER_NAME: Final = "optimizer"
SCHEDULER_NAME: Final = "scheduler"
SAMPLER_NAME: Final = "sampler"
SCALER_NAME: Final = "scaler.pt"
CUSTOM_CHECKPOINT_NAME: Final = "custom_checkpoint"

WEIGHTS_NAME: Final = f"{MODEL_NAME}.bin"
WEIGHTS_PATTERN_NAME: Final = "pytorch_model{suffix}.bin"
WEIGHTS_INDEX_NAME: Final = f"{WEIGHTS_NAME}.index.json"
SAFE_WEIGHTS_NAME: Final = f"{SAFE_MODEL_NAME}.safetensors"
SAFE_WEIGHTS_PATTERN_NAME: Final = "model{suffix}.safetensors"
SAFE_WEIGHTS_INDEX_NAME: Final = f"{SAFE_WEIGHTS_NAME}.index.json"

FSDP_MODEL_NAME: Final = "pytorch_model_fsdp"
PROFILE_PATTERN_NAME: Final = "profile_{suffix}.json"

CHECKPOINTS_FOLDER: Final = "checkpoints"
CHECKPOINT_NAME: Final = "checkpoint"
MANIFEST_NAME: Final = "manifest.json"


def engine_tag(index: int = 0) -> str:
    """Return the name of the folder inside a checkpoint that DeepSpeed's engine of model ``index`` writes."""
    return f"{MODEL_NAME}_{index}" if index else MODEL_NAME
