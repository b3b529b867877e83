"""The policy of preemption: what announces it, and how a run ends then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...errors import SettingError
from ...plugins.handlers import LaunchedOptions, canonicalize
from ...settings.preemption import PreemptionOptions


@dataclass
class PreemptionPolicy(LaunchedOptions, PreemptionOptions):
    """The signals and notices after which all ranks save at one and the same step, and the run ends.

    A notice to any one rank is one to all. They agree on the next step that none of them has passed; each saves there,
    between two batches, and raises ``SystemExit(exit_code)``.

    Attributes:
        save_on_signal: whether the run saves and ends by itself. With False only ``Accelerator.preempted`` says that it
            is to end, to all ranks at the same call, and the script decides.
        grace_seconds: how long all ranks have to reach the step; a run in which one doesn't says which, and goes on.
        signals: names of the signals that are notices. A script's own handlers of them aren't called.
        notice_file: a file whose appearance (or change) is a notice.
        notice_url: an address that gives a notice, as the metadata of a cloud's instance do: any answer with status
            200 but an empty one, ``NONE`` and ``FALSE``. It is asked every five seconds by one rank of each host.
        finish_evaluation: whether a notice inside of an evaluation waits for its end even if that takes longer than the
            grace period. Otherwise an evaluation that half of the grace period doesn't suffice for is left, and a
            resumed run doesn't repeat it: what it would have drawn at random isn't drawn.
        exit_code: of the run, after it has saved. 75 (EX_TEMPFAIL) is what the launcher knows as "start me again", and
            after which alone the batch script that it writes for Slurm queues the job again.
    """

    signals: tuple[str, ...] = field(default=("SIGTERM", "SIGUSR1", "SIGUSR2"))

    def _resolve(self, given: Mapping[str, object]) -> None:
        canonicalize(self, "grace_seconds", "exit_code")
        self.save_on_signal: bool = bool(given.get("save_on_signal", True))
        wrong = [name for name in self.signals if not name.startswith("SIG")]
        if wrong:
            raise SettingError(f"PreemptionPolicy(signals={self.signals!r}): give names such as 'SIGTERM'.")
