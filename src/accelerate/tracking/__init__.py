"""Trackers: one file per logging service, and a JSONL log that is always written."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..lazy import names_from

if TYPE_CHECKING:
    from .aim import AimTracker
    from .base import BlankTracker, GeneralTracker, on_main_process
    from .choose import (
        LOGGER_TYPE_TO_CLASS,
        filter_trackers,
        find_tracker,
        finish,
        get_available_trackers,
        init_run_log,
        init_trackers,
        log,
        register_tracker_class,
    )
    from .clearml import ClearMLTracker
    from .comet import CometMLTracker
    from .dvclive import DVCLiveTracker
    from .jsonl import JSONLTracker
    from .mlflow import MLflowTracker
    from .swanlab import SwanLabTracker
    from .tensorboard import TensorBoardTracker
    from .trackio import TrackioTracker
    from .wandb import WandBTracker

__all__ = [
    "LOGGER_TYPE_TO_CLASS",
    "AimTracker",
    "BlankTracker",
    "ClearMLTracker",
    "CometMLTracker",
    "DVCLiveTracker",
    "GeneralTracker",
    "JSONLTracker",
    "MLflowTracker",
    "SwanLabTracker",
    "TensorBoardTracker",
    "TrackioTracker",
    "WandBTracker",
    "filter_trackers",
    "find_tracker",
    "finish",
    "get_available_trackers",
    "init_run_log",
    "init_trackers",
    "log",
    "on_main_process",
    "register_tracker_class",
]

__getattr__: Callable[[str], Any] = names_from(
    __name__,
    "accelerate",
    {
        "tracking.aim": "AimTracker",
        "tracking.base": "BlankTracker GeneralTracker on_main_process",
        "tracking.choose": "LOGGER_TYPE_TO_CLASS filter_trackers find_tracker finish get_available_trackers"
        " init_run_log init_trackers log register_tracker_class",
        "tracking.clearml": "ClearMLTracker",
        "tracking.comet": "CometMLTracker",
        "tracking.dvclive": "DVCLiveTracker",
        "tracking.jsonl": "JSONLTracker",
        "tracking.mlflow": "MLflowTracker",
        "tracking.swanlab": "SwanLabTracker",
        "tracking.tensorboard": "TensorBoardTracker",
        "tracking.trackio": "TrackioTracker",
        "tracking.wandb": "WandBTracker",
    },
)
