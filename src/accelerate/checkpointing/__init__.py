"""Checkpoints that are whole or not there, hold no code, and say what they hold.

``Accelerator.save_state`` and ``load_state`` are one call each::

    folder = write_checkpoint(
        output_dir, world=world, project=project_configuration, models=models,
        weights=[full_state_dict(model) for model in models], optimizers=optimizers, schedulers=schedulers,
        dataloaders=dataloaders, scaler=scaler, custom_objects=custom_objects, step=step, strategy=label,
        safe_serialization=True, pre_hooks=save_hooks,
    )
    loaded = read_checkpoint(
        input_dir, world=world, project=project_configuration, models=models, optimizers=optimizers,
        schedulers=schedulers, dataloaders=dataloaders, scaler=scaler, custom_objects=custom_objects,
        pre_hooks=load_hooks, load_kwargs=load_kwargs, strict=True,
    )
    step = loaded.step

Both are collectives of ``world`` (None: this process alone), and what fails on one rank raises on all.

- `store`: one folder, from staging to commit; `manifest`: what makes it a checkpoint; `agreement`: all ranks or none.
- `codec`: state dicts as JSON and tensors, old pickles through an allow-list; `tensor_files`: safetensors.
- `layout`: what files are called; `weights`: the files of models; `objects`: single objects and the user's own.
- `series`: numbered checkpoints, the newest, the limit; `write` and `read`: a whole run.
"""

from __future__ import annotations

from .codec import EncodingError
from .objects import (
    Hooks,
    check_registrable,
    load,
    load_custom_state,
    save,
    save_custom_state,
)
from .read import LoadedCheckpoint, find_newest, load_accelerator_state, read_checkpoint
from .series import list_checkpoints
from .store import CheckpointStore, Draft
from .weights import (
    clean_state_dict_for_safetensors,
    convert_file_size_to_int,
    load_weights,
    save_model,
)
from .write import save_accelerator_state, write_checkpoint

__all__ = [
    # a whole run
    "LoadedCheckpoint",
    "find_newest",
    "list_checkpoints",
    "load_accelerator_state",
    "read_checkpoint",
    "save_accelerator_state",
    "write_checkpoint",
    # models and single objects
    "clean_state_dict_for_safetensors",
    "convert_file_size_to_int",
    "load",
    "load_custom_state",
    "load_weights",
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
