"""The names of this address, for editors, type checkers and `names_of_stub`: where each is defined."""

# isort: off
from .base import BlankTracker as BlankTracker, GeneralTracker as GeneralTracker, on_main_process as on_main_process
from .choose import filter_trackers as filter_trackers, find_tracker as find_tracker, finish as finish
from .choose import get_available_trackers as get_available_trackers, init_run_log as init_run_log
from .choose import init_trackers as init_trackers, log as log, LOGGER_TYPE_TO_CLASS as LOGGER_TYPE_TO_CLASS
from .choose import register_tracker_class as register_tracker_class
from .jsonl import JSONLTracker as JSONLTracker
from .mlflow import MLflowTracker as MLflowTracker
from .services import AimTracker as AimTracker, ClearMLTracker as ClearMLTracker, CometMLTracker as CometMLTracker
from .services import DVCLiveTracker as DVCLiveTracker, SwanLabTracker as SwanLabTracker
from .services import TensorBoardTracker as TensorBoardTracker, TrackioTracker as TrackioTracker
from .services import WandBTracker as WandBTracker
