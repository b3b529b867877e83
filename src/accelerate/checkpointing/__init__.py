"""Checkpoints that are whole or not there, hold no code, and say what they hold.

``Accelerator.save_state`` and ``load_state`` are one call each::

    folder = write_checkpoint(
        output_dir, world=world, project=project_configuration, models=models,
        weights=[full_state_dict(model) for model in models], optimizers=optimizers, schedulers=schedulers,
        dataloaders=dataloaders, scaler=scaler, custom_objects=custom_objects, step=step, strategy=label,
        safe_serialization=True, pre_hooks=save_hooks, background=background, asynchronous=True,
    )
    loaded = read_checkpoint(
        input_dir, world=world, project=project_configuration, models=models, optimizers=optimizers,
        schedulers=schedulers, dataloaders=dataloaders, scaler=scaler, custom_objects=custom_objects,
        pre_hooks=load_hooks, load_kwargs=load_kwargs, strict=True,
    )
    step = loaded.step

Both are collectives of ``world`` (None: this process alone), and what fails on one rank raises on all.

- `draft`: a checkpoint that is being written; `store`: one folder, from staging to commit; `remote`: the same behind
  a network; `place`: folders on a disk or elsewhere; `manifest`: what makes a folder a checkpoint.
- `agreement`: all ranks or none; `content`: what is written, now or from a snapshot; `background`: meanwhile.
- `codec`: state dicts as JSON and tensors, old pickles through an allow-list; `tensor_files`: safetensors.
- `layout`: what files are called; `weights`: the files of models; `objects`: single objects and the user's own.
- `selection`: a part of a run; `export`: the layout of other libraries; `sharded`, `dcp`: state in shards; `merge`:
  shards as one file.
- `series`: numbered checkpoints, which to keep; `write` and `read`: a whole run; `meter`: how far it has come.

Names are resolved when they are used, because a listing (`series`) needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .background import Background
    from .codec import EncodingError
    from .draft import Draft
    from .export import export_model
    from .merge import merge_fsdp_weights
    from .objects import Hooks, check_registrable, load, load_custom_state, save, save_custom_state
    from .read import (
        LoadedCheckpoint,
        find_newest,
        load_accelerator_state,
        read_checkpoint,
        resume_checkpoint,
    )
    from .selection import Selection
    from .series import list_checkpoints, pin, unpin
    from .store import CheckpointStore
    from .weights import clean_state_dict_for_safetensors, convert_file_size_to_int, load_weights, save_model
    from .write import attend_save, save_accelerator_state, write_checkpoint

_HOMES: Final[dict[str, str]] = {
    name: home
    for home, names in {
        "background": "Background",
        "codec": "EncodingError",
        "draft": "Draft",
        "export": "export_model",
        "merge": "merge_fsdp_weights",
        "objects": "Hooks check_registrable load load_custom_state save save_custom_state",
        "read": "LoadedCheckpoint find_newest load_accelerator_state read_checkpoint resume_checkpoint",
        "selection": "Selection",
        "series": "list_checkpoints pin unpin",
        "store": "CheckpointStore",
        "weights": "clean_state_dict_for_safetensors convert_file_size_to_int load_weights save_model",
        "write": "attend_save save_accelerator_state write_checkpoint",
    }.items()
    for name in names.split()
}

__all__ = [
    # a whole run
    "Background",
    "LoadedCheckpoint",
    "Selection",
    "attend_save",
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
    "load_weights",
    "merge_fsdp_weights",
    "save",
    "save_custom_state",
    "save_model",
    # what strategies and the Accelerator build on
    "CheckpointStore",
    "Draft",
    "EncodingError",
    "Hooks",
    "check_registrable",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
