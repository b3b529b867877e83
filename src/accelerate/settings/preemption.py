"""Options of preemption: when all ranks of a run save at one step and end, because their machines are taken away."""

from __future__ import annotations

from .option import OptionGroup, option, option_group

#: The exit code of a run that has saved and wants to be started again: EX_TEMPFAIL of sysexits.h.
PREEMPTED_EXIT_CODE = 75


@option_group
class PreemptionOptions(OptionGroup, title="Preemption", env="ACCELERATE_", flag=""):
    """The notices that a machine is taken away, and how the run ends then."""

    save_on_signal: bool = option(
        False,
        "After SIGTERM, SIGUSR1 or SIGUSR2 to any rank, all ranks save at one step and end with exit code 75.",
        switch=True,
        quiet=True,
    )
    grace_seconds: float = option(
        30.0, "How long the ranks may continue after a signal, before they are killed.", minimum=0, quiet=True
    )
    notice_file: str | None = option(
        None, "A file whose appearance is a notice of preemption, as a signal is.", quiet=True
    )
    notice_url: str | None = option(
        None, "A URL that answers with a notice of preemption, such as a cloud instance's metadata.", quiet=True
    )
    finish_evaluation: bool = option(
        False, "A notice inside of an evaluation waits for its end, however long it takes.", flag=None, env=None
    )
    exit_code: int = option(
        PREEMPTED_EXIT_CODE, "The exit code of a run that has saved.", flag=None, env=None, minimum=1, maximum=125
    )
