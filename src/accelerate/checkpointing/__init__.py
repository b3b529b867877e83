"""Checkpoints: atomic, without code, and with a manifest of their files.

``Accelerator.save_state`` and ``load_state`` are one call each::

    run = RunState(strategy, world, project, models=models, optimizers=optimizers, step=step, ...)
    folder = save_run(run, output_dir, asynchronous=True)
    step = load_run(run, input_dir, LoadOptions.of(strict=True)).step

and without a strategy, with state dicts of full tensors::

    folder = write_checkpoint(output_dir, weights=[model.state_dict()], optimizers=[optimizer], step=step)
    step = read_checkpoint(input_dir, models=[model], optimizers=[optimizer], strict=True).step

All are collectives of ``world`` (None: this process alone); a failure on one rank raises on all ranks.

- `run_state`: the live objects of a run, as the Accelerator passes them to ``save_run``, ``load_run``, ``resume_run``.
- `saving`, `loading`: the state of a run; `series`: numbered checkpoints, and which of them are kept.
- `store`: the folder of one checkpoint, from staging to commit; `remote`: the same over a network; `storage`: folders
  on a disk or elsewhere, and safe file names; `manifest`: the list of a checkpoint's files.
- `agreement`: errors and messages between ranks; `items`: the pieces of a run's state, also of ranks that come late;
  `background`: snapshots, and saving in a thread.
- `codec`: state dicts as JSON and tensors, old pickles through an allow-list; `tensor_files`: safetensors; `layout`:
  the files of each kind of state.
- `weights`: the files of models, selections, export; `objects`: single objects, registered objects and hooks;
  `sharded`: sharded state, `dcp`: its files, read or merged into one.

Names are imported when first used, because a listing (`series`) needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..lazy import names_from

if TYPE_CHECKING:
    from .background import Background
    from .codec import EncodingError
    from .dcp import merge_fsdp_weights
    from .loading import (
        LoadedCheckpoint,
        LoadOptions,
        find_newest,
        load_accelerator_state,
        load_run,
        read_checkpoint,
        resume_checkpoint,
        resume_run,
    )
    from .missed import watch_first_step
    from .objects import Hooks, check_registrable, load, load_custom_state, save, save_custom_state
    from .run_state import RunState, StrategyState
    from .saving import participants_of_save, save_accelerator_state, save_run, write_checkpoint
    from .series import list_checkpoints, pin, unpin
    from .store import CheckpointStore, StagingDirectory
    from .weights import (
        Selection,
        clean_state_dict_for_safetensors,
        convert_file_size_to_int,
        export_model,
        save_model,
    )

__all__ = [
    # a whole run
    "Background",
    "LoadedCheckpoint",
    "Selection",
    "participants_of_save",
    "find_newest",
    "list_checkpoints",
    "load_accelerator_state",
    "pin",
    "read_checkpoint",
    "resume_checkpoint",
    "save_accelerator_state",
    "unpin",
    "write_checkpoint",
    # models and single objects
    "clean_state_dict_for_safetensors",
    "convert_file_size_to_int",
    "export_model",
    "load",
    "load_custom_state",
    "merge_fsdp_weights",
    "save",
    "save_custom_state",
    "save_model",
    # what strategies and the Accelerator build on
    "CheckpointStore",
    "Hooks",
    "LoadOptions",
    "RunState",
    "StagingDirectory",
    "StrategyState",
    "load_run",
    "resume_run",
    "save_run",
    "watch_first_step",
    "EncodingError",
    "check_registrable",
]


__getattr__: Callable[[str], Any] = names_from(
    __name__,
    __name__,
    {
        "background": "Background",
        "codec": "EncodingError",
        "store": "CheckpointStore StagingDirectory",
        "weights": "export_model Selection clean_state_dict_for_safetensors convert_file_size_to_int save_model",
        "dcp": "merge_fsdp_weights",
        "missed": "watch_first_step",
        "objects": "Hooks check_registrable load load_custom_state save save_custom_state",
        "loading": "LoadOptions LoadedCheckpoint find_newest load_accelerator_state load_run read_checkpoint"
        " resume_checkpoint resume_run",
        "run_state": "RunState StrategyState",
        "series": "list_checkpoints pin unpin",
        "saving": "participants_of_save save_accelerator_state save_run write_checkpoint",
    },
)


def __dir__() -> list[str]:
    return sorted(__all__)
