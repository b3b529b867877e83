"""The file of fingerprints: one line each n updates, to find the first update at which two runs differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final
from weakref import ref

from ...errors import SettingError
from ...seams import LoopHook
from ...tracking.jsonl import JSONLTracker
from .parts import Parts

if TYPE_CHECKING:
    from ...accelerator import Accelerator

#: The file is ``{logging_dir}/fingerprints.jsonl``; the monitor of a run reads it too.
_NAME: Final = "fingerprints"


@final
class FingerprintLog(LoopHook):
    """The fingerprints of a run, written where the body of the training loop has ended.

    So the fingerprint is the one of a checkpoint that the body saves; after an epoch's last batch, it is the one of a
    checkpoint saved after the epoch.

    Raises:
        SettingError: the run has no folder for the file.
    """

    def __init__(self, run: Accelerator, every: int) -> None:
        if run.logging_dir is None:
            raise SettingError(
                f"{run.settings.quote('fingerprints.fingerprint_every')}: the run has no folder for the file. Give "
                "Accelerator(project_dir=...)."
            )
        self._run, self._every = ref(run), every
        self._log = JSONLTracker(_NAME, run.logging_dir)
        self._log.start()
        self._last = 0  # the update that was noted last
        self._due = 0  # an update whose fingerprint isn't written; 0: none
        self._loader = 0  # the id of the loader whose loop made it

    def after_step(self, optimizer: object) -> None:
        """Note each n-th update."""
        run = self._run()
        assert run is not None, "it calls this"
        updates = max(prepared.num_updates for prepared in run._optimizers)
        if updates != self._last and updates % self._every == 0:
            self._last = self._due = updates
            self._loader = id(run.gradient_state.loaders.active)

    def begin_pass(self, loader: object) -> None:
        """Write the last fingerprint of a loop that ended by ``break``."""
        self.between_batches(loader)

    def between_batches(self, loader: object) -> None:
        """Write the fingerprint of the update that this batch completed."""
        if id(loader) == self._loader:
            self._write()

    def end_pass(self, loader: object) -> None:
        """Write the fingerprint of an epoch's last update."""
        if getattr(loader, "end_of_dataloader", False):  # else it may be one rank's
            self.between_batches(loader)

    def end_run(self) -> None:
        """Write the last fingerprint."""
        self._write()

    def _write(self) -> None:
        """Write the fingerprint that is due, if one is; a collective if parameters are sharded."""
        run = self._run()
        if not self._due or run is None:
            return
        updates, self._due = self._due, 0
        for parts in run.gradient_state.hooks.of(Parts):
            parts.before_save()
        self._log.log({"fingerprint": run.fingerprint()}, updates)
