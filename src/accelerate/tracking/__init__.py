"""Trackers: where the numbers of a run go. One file per service, and a JSONL log that is always there."""

from __future__ import annotations

from .aim import AimTracker
from .base import BlankTracker, GeneralTracker, on_main_process
from .choose import (
    LOGGER_TYPE_TO_CLASS,
    filter_trackers,
    find_tracker,
    finish,
    get_available_trackers,
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
    "init_trackers",
    "log",
    "on_main_process",
    "register_tracker_class",
]
