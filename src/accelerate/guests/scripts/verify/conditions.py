"""The conditions of one run, handed from the command to the processes that it starts."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final, final

from .record import Record

CONDITIONS: Final = "conditions.json"
#: The file with the reason why a process couldn't prepare its objects.
REFUSAL: Final = "refusal.txt"
#: How long an evaluation may take in the first run of a script, and in the runs after it.
_FIRST_SECONDS: Final = 30.0
_LATER_SECONDS: Final = 300.0


@final
@dataclass(frozen=True)
class Conditions:
    """The conditions of a run.

    Attributes:
        num_steps: the number of optimizer steps after which to end.
        splits_batches: several processes share each batch of the script, and loaders give only full batches.
        multiple: full batches have a multiple of this many samples.
        num_parts: how many micro-batches each batch of the script becomes, in scripts that accumulate gradients.
        num_shares: by how much smaller batches are, in scripts that divide the data between processes themselves, or
            whose schedule is as many times longer; prepared loaders then don't split batches.
        divides_itself: the script makes its batches smaller by the number of shares itself.
        counts_updates: the lengths of loaders that the script asks for are in updates, not in micro-batches.
        dtype: the dtype of parameters and inputs; "" leaves them as they are.
        batch_parts: the number of parts of an update, which makes every bit equal; 0 leaves it as it is.
        mixed_precision: of the Accelerator; "" leaves it as it is.
        mesh: the size of each axis of parallelism that isn't 1, in place of the script's own sizes.
        shards: the model is sharded by FSDP; if not, the script's own FSDP plugin isn't used.
        reorders: reverse the samples of each batch, which changes the order of sums and nothing else.
        noise: how much to change each parameter at first, relative to its value.
        recomputes: compute activations again in the backward pass.
        keeps_tensors: record gradients, parameters and optimizer states of each step.
        saves_at: the number of steps after which to save the run; 0 saves nothing.
        save_to: the folder for it.
        evaluates: record what the script's evaluations show.
        evaluation_seconds: let the script go on after the last step until it trains again, for an evaluation that
            takes no longer; 0 ends it.
        evaluated: the datasets whose loaders keep their last batch, as in `Record.evaluated`.
        resumes_from: a folder to resume from when the first prepared loader is read; "" begins anew.
    """

    num_steps: int
    splits_batches: bool
    multiple: int = 2
    num_parts: int = 1
    num_shares: int = 1
    divides_itself: bool = False
    counts_updates: bool = False
    dtype: str = ""
    batch_parts: int = 0
    mixed_precision: str = ""
    mesh: dict[str, int] = field(default_factory=dict[str, int])
    shards: bool = False
    reorders: bool = False
    noise: float = 0.0
    recomputes: bool = False
    keeps_tensors: bool = False
    saves_at: int = 0
    save_to: str = ""
    evaluates: bool = False
    evaluation_seconds: float = 0.0
    evaluated: list[int] = field(default_factory=list[int])
    resumes_from: str = ""

    @classmethod
    def read(cls, folder: Path) -> Conditions:
        """Read the conditions from `folder`."""
        return cls(**json.loads((folder / CONDITIONS).read_text()))

    def write(self, folder: Path) -> None:
        """Write the conditions to `folder`."""
        (folder / CONDITIONS).write_text(json.dumps(asdict(self)))

    def for_first_run(self, script: Path) -> Conditions:
        """Return the conditions of a script's first run, which shows whether it evaluates."""
        evaluates = ".eval()" in script.read_text(encoding="utf-8", errors="replace")
        return replace(self, evaluates=evaluates, evaluation_seconds=_FIRST_SECONDS if evaluates else 0.0)

    def after(self, first: Record) -> Conditions:
        """Return the conditions of runs that are compared with a script's first run."""
        shows = [each.num_steps for each in first.evaluations if each.shown]
        seconds = _LATER_SECONDS if first.num_steps in shows else 0.0
        return replace(self, evaluates=bool(shows), evaluation_seconds=seconds, evaluated=first.evaluated)
