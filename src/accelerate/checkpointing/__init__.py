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
  `sharded`: sharded state, `dcp`: its files, written, read or merged into one.

Names are imported when first used, because a listing (`series`) needs no torch.
"""

from __future__ import annotations

from ..lazy import names_of_stub

__getattr__, __dir__ = names_of_stub(__name__)
