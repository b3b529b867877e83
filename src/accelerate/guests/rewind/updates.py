"""The updates of a replay: the first part of one to stand out, or to differ from another replay or from the run.

Logged numbers and checkpoints of a replay and of its run are compared bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, final

from ...checkpointing.series import Entry, inspect
from .rerun import Facts, Observed
from .run_folder import Log, Recorded, RunFolder, updates_of

#: A norm this many times its largest value before stands out; so does a sample beside the median of its batch.
_FACTOR: Final = 4.0
_FACTOR_OF_SAMPLES: Final = 8.0
#: A norm this many times its largest value before may make what follows it infinite.
_FACTOR_OF_CAUSES: Final = 1e3
_WORDS: Final = {
    "weight": "the weight {} before the update",
    "input": "the input {}",
    "output": "the output of {}",
    "loss": "the loss",
    "gradient": "the gradient of the output of {}",
    "parameter gradient": "the gradient of the weight {}",
}


@final
class Tensor(NamedTuple):
    """The facts of one tensor of an update; see `accelerate.guests.rewind.observe`."""

    kind: str
    name: str
    norm: float | None
    batch: int
    top: tuple[list[int], float] | None = None
    checksum: int | None = None
    rows: list[int] | None = None

    @property
    def words(self) -> str:
        """The tensor in words."""
        return _WORDS[self.kind].format(self.name or "0")

    @property
    def is_of_weight(self) -> bool:
        """Whether it belongs to no micro-batch; ranks may hold other parts of it."""
        return self.kind in ("weight", "parameter gradient")

    @property
    def module(self) -> str:
        """The name of a module or weight; "" for an input or the loss."""
        return "" if self.kind in ("input", "loss") else self.name

    @property
    def batch_or_none(self) -> int | None:
        """The micro-batch, from 0 on; None for what isn't of one."""
        return None if self.is_of_weight else self.batch

    def key(self, rank: int) -> tuple[object, ...]:
        """Return what has one history."""
        return self.kind, self.name, rank if self.is_of_weight else None


@final
@dataclass(frozen=True)
class Update:
    """One update of a replay, with the facts of each rank."""

    number: int
    ranks: list[Facts]

    @property
    def values(self) -> dict[str, float]:
        """The loss, the gradient norm and the learning rate over all ranks."""
        losses = [
            batch["loss"] for rank in self.ranks for batch in rank.get("batches", ()) if batch["loss"] is not None
        ]
        squares = sum(rank.get("grad_squares", 0.0) for rank in self.ranks)
        norms = [rank["grad_norm"] for rank in self.ranks if rank.get("grad_norm") is not None]
        found = {"loss": sum(losses) / len(losses)} if losses else {}
        if norms or squares:
            found["grad_norm"] = norms[0] if norms else math.sqrt(squares)
        if self.ranks and self.ranks[0].get("lr"):
            found["lr"] = self.ranks[0]["lr"][0]
        return found

    @property
    def logged(self) -> dict[int, dict[str, float]]:
        """By step the numbers that the script has logged after this update."""
        return {int(step): values for step, values in (self.ranks[0]["logged"] if self.ranks else {}).items()}

    def tensors(self, rank: int) -> list[Tensor]:
        """Return the tensors of one rank, in the order of computation."""
        return [Tensor(*facts) for facts in self.ranks[rank].get("tensors", ())]

    def samples(self, rank: int, batch: int, rows: Sequence[int]) -> list[int]:
        """Return the indices of the samples in these rows of a rank's batch."""
        batches = self.ranks[rank].get("batches", ())
        known = batches[batch]["samples"] if 0 <= batch < len(batches) else []
        return [known[row] for row in rows if row < len(known)]

    @classmethod
    def all_of(cls, observed: Observed) -> list[Update]:
        """Return the updates that all ranks have facts of."""
        by_number: dict[int, list[Facts]] = {}
        for facts in observed.ranks:
            for one in facts:
                by_number.setdefault(one["update"], []).append(one)
        whole = {number: ranks for number, ranks in by_number.items() if len(ranks) == len(observed.ranks)}
        return [cls(number, ranks) for number, ranks in sorted(whole.items())]


@final
@dataclass(frozen=True)
class Finding:
    """The first part of an update that stands out, or differs from another run.

    Attributes:
        what: the part, in words.
        how: how it stands out.
        samples: indices of samples in the data set; empty if no single sample stands out.
        module: the name of the module or weight; "" for an input or the loss.
        batch: the micro-batch, from 0 on; None for what isn't of one.
    """

    update: int
    rank: int
    what: str
    how: str
    module: str = ""
    batch: int | None = None
    samples: list[int] = field(default_factory=list[int])


def stands_out(updates: Sequence[Update], number: int) -> Finding | None:
    """Return what stands out first in update ``number``: a tensor that isn't finite, or whose norm exceeds its history.

    Of all ranks, it is the one in which this comes earliest in the order of computation.
    """
    update = next(one for one in updates if one.number == number)
    usual: dict[tuple[object, ...], float] = {}
    for earlier in updates:
        for rank in range(len(earlier.ranks)) if earlier.number < number else ():
            for one in earlier.tensors(rank):
                if one.norm is not None and math.isfinite(one.norm):
                    usual[one.key(rank)] = max(usual.get(one.key(rank), 0.0), one.norm)
    found: list[tuple[int, int, float, Tensor]] = []
    for rank in range(len(update.ranks)):
        for place, one in enumerate(update.tensors(rank)):
            ratio = _ratio(one.norm or 0.0, usual.get(one.key(rank)))
            if ratio > _FACTOR:
                found.append((place, rank, ratio, one))
    if not found:
        return None
    # Beside a tensor that isn't finite, one that is only a few times larger than usual is no cause.
    largest = max(ratio for _, _, ratio, _ in found)
    place, rank, _, one = min(each for each in found if largest < math.inf or each[2] > _FACTOR_OF_CAUSES)
    before = usual.get(one.key(rank), 0.0)
    how = f"has the norm {one.norm:.4g}, and at most {before:.4g} in earlier updates"
    if not math.isfinite(one.norm or 0.0):
        how = f"isn't finite (norm {one.norm})"
    samples = [] if one.is_of_weight else _samples(update, rank, place)
    return Finding(number, rank, one.words, how, one.module, one.batch_or_none, samples)


def _ratio(norm: float, before: float | None) -> float:
    """Return how many times larger a norm is than before; without a history, as large as before."""
    if not math.isfinite(norm):
        return math.inf
    return norm / before if before else 1.0


def _samples(update: Update, rank: int, place: int) -> list[int]:
    """Return the samples that stand out in a tensor, or after a loss in the next gradient."""
    cause, *following = update.tensors(rank)[place:]
    for one in (cause, *following):
        if one.batch != cause.batch:
            break
        if one.top is not None:
            rows, ratio = one.top
            return update.samples(rank, one.batch, rows) if ratio >= _FACTOR_OF_SAMPLES else []
    return []


def first_difference(first: Sequence[Update], second: Sequence[Update]) -> Finding | None:
    """Return the first difference between two replays with checksums; None if all updates of both are equal."""
    others = {update.number: update for update in second}
    for one in first:
        other = others.get(one.number)
        if other is None:
            continue
        found = [
            difference
            for rank in range(min(len(one.ranks), len(other.ranks)))
            if (difference := _difference(one, other, rank)) is not None
        ]
        if found:
            return min(found, key=lambda each: each[0])[1]
    return None


def _difference(one: Update, other: Update, rank: int) -> tuple[int, Finding] | None:
    """Return the place of the first difference on one rank in the order of computation, and the finding."""
    mine, others = one.ranks[rank], other.ranks[rank]

    def finding(what: str, how: str, **more: Any) -> Finding:
        return Finding(one.number, rank, what, how, **more)

    for batch, (own, its) in enumerate(zip(mine.get("batches", ()), others.get("batches", ()), strict=False)):
        if own["samples"] != its["samples"]:
            samples = [sample for sample in its["samples"] if sample not in own["samples"]] or its["samples"]
            return 0, finding("the choice of samples", "differs", batch=batch, samples=samples)
    pairs = list(zip(one.tensors(rank), other.tensors(rank), strict=False))
    for place, (own, its) in enumerate(pairs):
        if own[:2] != its[:2]:
            how = f"is computed where the other run computes {its.words}"
            return place, finding(own.words, how, module=own.module)
        if own.checksum != its.checksum:
            samples: list[int] = []
            if own.rows and its.rows:
                rows = [row for row, pair in enumerate(zip(own.rows, its.rows, strict=False)) if pair[0] != pair[1]]
                samples = one.samples(rank, own.batch, rows)
            where = {"module": own.module, "batch": own.batch_or_none}
            return place, finding(own.words, "differs", samples=samples, **where)
    for name, text in (("lr", "the learning rate"), ("grad_norm", "the gradient norm")):
        if mine.get(name) != others.get(name):
            return len(pairs), finding(text, f"is {mine.get(name)}, and {others.get(name)} there")
    return None


# --------------------------------------------------------------------------------------------------
# Whether a replay is equal to its run: logged numbers, fingerprints and checkpoints


@final
class Compared(NamedTuple):
    """A number, fingerprint or checkpoint that is in a replay and in its run.

    Attributes:
        update: the update after which it was written.
        difference: how it differs, in words; "" if it is equal bit for bit.
    """

    update: int
    difference: str


def compare(run: RunFolder, replay: Observed) -> Iterator[Compared]:
    """Yield for each number, fingerprint and checkpoint in both whether it is equal."""
    updates = Update.all_of(replay)
    logged = {step: (update.number, values) for update in updates for step, values in update.logged.items()}
    for log in run.logs:
        place, by_step = replay.mirrored(log.path), logged
        if log.is_of_monitor:
            again = Log.read(place, only_last=True).lines if is_written(place, replay) else []
            by_step = {line.step: (line.step, line.lasting) for line in again}
        for line in log.lines:
            update, mine = by_step.get(line.step, (0, {}))
            for name in sorted(mine.keys() & line.lasting.keys()):
                one, its = mine[name], line.lasting[name]
                text = f"At step {line.step}, {name} is {one!r} in the replay, and {its!r} in the run."
                yield Compared(update, text if differ({name: one}, {name: its}) else "")
    again = Recorded.read(replay.mirrored(run.path), only_last=True)
    if again is not None and run.recorded is not None:
        for update in [one.number for one in updates if one.number in again.weights]:
            its = run.recorded.weights.get(update)
            if its is not None:
                text = f"After update {update}, the fingerprint of the weights is another one in the replay."
                yield Compared(update, text if its != again.weights[update] else "")
    for entry in run.checkpoints:
        place = replay.mirrored(Path(str(entry.storage)))
        if is_written(place, replay) and place.is_dir():
            mine, its = contents(inspect(place)), contents(entry)
            names = ", ".join(sorted(name for name in mine.keys() & its.keys() if mine[name] != its[name]))
            text = f"{entry.name} has other contents in the replay: {names}."
            yield Compared(updates_of(entry), text if names else "")


def is_written(place: Path, replay: Observed) -> bool:
    """Return whether a replay has written a file or folder; else its mirror has a link to the run's own."""
    return place.exists() and place.resolve().is_relative_to(replay.folder.resolve())


def other_facts(run: RunFolder, replay: Observed) -> str:
    """Return what is known to be different about the machine, its packages and the code, in words."""
    written = replay.mirrored(run.path)
    then, now = run.facts, RunFolder(written).facts if is_written(written, replay) else {}
    other = [
        f"{name} is {now[name]}, and was {then[name]}" for name in then.keys() & now.keys() if then[name] != now[name]
    ]
    if other:
        return f"{'; '.join(sorted(other))}."
    return (
        "What the run's files tell of versions is the same. The script may keep state that isn't in its checkpoints. "
        "The processor, its threads, the data or the script may be other ones, or the hardware has erred."
    )


def contents(entry: Entry) -> dict[str, int]:
    """Return the checksums of a checkpoint's tensors by file."""
    files = {} if entry.manifest is None else entry.manifest.files
    return {name: record.crc32 for name, record in files.items() if name.endswith(".safetensors")}


def differ(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    """Return whether a number of both isn't the same bit for bit."""
    pairs = ((one[name], other[name]) for name in one.keys() & other.keys())
    return any(mine != its and not (math.isnan(mine) and math.isnan(its)) for mine, its in pairs)
