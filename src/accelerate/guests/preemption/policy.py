"""The preemption policy: which notices announce it, and how the run ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...errors import SettingError
from ...plugins.handlers import LaunchedOptions, canonicalize
from ...settings.preemption import PreemptionOptions


@dataclass(repr=False, eq=False)
class PreemptionPolicy(LaunchedOptions, PreemptionOptions):
    """The signals and notices after which all ranks save at the same step and the run ends.

    A notice to one rank applies to all ranks. They agree on the next step that none of them has passed. There, between
    two batches, each rank saves and raises ``SystemExit(exit_code)``.

    Attributes:
        save_on_signal: whether the run saves and ends automatically. If False, only ``Accelerator.preempted`` becomes
            true, in the same call on all ranks, and the script decides. grace_seconds: the time in which all ranks
            must reach the step. If one doesn't, its rank is logged and the run continues.
        signals: names of the signals that are notices. The script's own handlers of them aren't called. notice_file:
            a file whose creation or change is a notice. notice_url: a URL that returns a notice, such as the metadata
            of a cloud instance: any response with status 200 except an empty one, ``NONE`` and ``FALSE``. One rank of
            each host requests it every five seconds. finish_evaluation: whether to finish a running evaluation first,
            even if that takes longer than the grace period. Otherwise an evaluation is abandoned if it needs more
            than half of the grace period. A resumed run doesn't repeat it, nor draw its random numbers. exit_code:
            the exit code of the run after saving. The launcher restarts a run that ends with 75 (EX_TEMPFAIL), and
            its batch script for Slurm requeues the job only after this code.
    """

    signals: tuple[str, ...] = field(default=("SIGTERM", "SIGUSR1", "SIGUSR2"))

    def _resolve(self, given: Mapping[str, object]) -> None:
        canonicalize(self, "grace_seconds", "exit_code")
        self.save_on_signal: bool = bool(given.get("save_on_signal", True))
        wrong = [name for name in self.signals if not name.startswith("SIG")]
        if wrong:
            raise SettingError(f"PreemptionPolicy(signals={self.signals!r}): give names such as 'SIGTERM'.")
