"""The names of this address, for editors, type checkers and `names_of_stub`: where each is defined."""

# isort: off
from .background import Background as Background
from .codec import EncodingError as EncodingError
from .dcp import merge_fsdp_weights as merge_fsdp_weights
from .loading import load_accelerator_state as load_accelerator_state, load_run as load_run
from .loading import LoadedCheckpoint as LoadedCheckpoint, LoadOptions as LoadOptions
from .loading import read_checkpoint as read_checkpoint, resume_run as resume_run, watch_first_step as watch_first_step
from .objects import check_registrable as check_registrable, Hooks as Hooks, load as load
from .objects import load_custom_state as load_custom_state, save as save, save_custom_state as save_custom_state
from .run_state import RunState as RunState, StrategyState as StrategyState
from .saving import participants_of_save as participants_of_save, save_accelerator_state as save_accelerator_state
from .saving import save_run as save_run, write_checkpoint as write_checkpoint
from .series import list_checkpoints as list_checkpoints, pin as pin, unpin as unpin
from .store import CheckpointStore as CheckpointStore, StagingDirectory as StagingDirectory
from .weights import clean_state_dict_for_safetensors as clean_state_dict_for_safetensors
from .weights import convert_file_size_to_int as convert_file_size_to_int, export_model as export_model
from .weights import save_model as save_model, Selection as Selection
