"""Watching a run: a report of its numbers every so many updates, and one decision of all ranks to stop.

Between reports a step costs a clock reading and a few additions: nothing is asked of the device, and ranks don't talk.
At a report each rank reads its losses (one wait for the device) and one small row of numbers is gathered. Every rank
computes the same verdict from the same rows, so all stop in the same update, or none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, Final, final

import torch

from ..collectives import gather, gather_object
from ..errors import RunStopped, SettingError
from ..gradients import GradientState
from ..health.throughput import Flops, StepClock, StepReport, host_memory_bytes, peak_flops_of
from ..world import World
from .callbacks import RunCallback
from .records import FOLDER, RankRecord
from .rules import NEVER, LossJudge, LossRules

#: What a rank says about itself at a report.
_ROW: Final = (
    "loss_sum", "num_losses", "longest_non_finite", "first_non_finite", "wants_stop", "seconds", "updates", "samples",
    "tokens",
)  # fmt: skip


@final
class RunWatch:
    """The numbers of one training loop, as ``Accelerator.watch_run`` makes it.

    ``step(loss)`` follows each micro-batch, after the optimizer; every rank calls it equally often.

    Attributes:
        updates: optimizer updates done, those before a resumed checkpoint included.
        last_report: the newest report.
    """

    def __init__(
        self,
        world: World,
        clock: GradientState,
        optimizers: Sequence[Any],
        *,
        every: int,
        callbacks: Sequence[RunCallback],
        total_steps: int | None,
        rules: LossRules | None,
        flops: Flops,
        folder: Path | None,
        log: Callable[[dict[str, Any], int], None] | None,
        show: Callable[[str], None] | None,
        facts: Mapping[str, Any],
        resumed: Mapping[str, Any] | None = None,
    ) -> None:
        if every < 1:
            raise SettingError(f"watch_run(every={every}): a report is made of at least one update.")
        self.updates = 0
        self.last_report: StepReport | None = None
        self.total_steps = total_steps
        self.callbacks = list(callbacks)
        self._world, self._clock, self._optimizers = world, clock, optimizers
        self._every, self._log, self._show = every, log, show
        self._judge = LossJudge(rules or NEVER)
        self._flops = _with_peak(flops, world)
        self._times = StepClock()
        self._losses: list[torch.Tensor] = []
        self._window: torch.Tensor | None = None
        self._num_in_window = 0
        self._tokens: list[Any] = []
        self._values: dict[str, Any] = {}
        self._reason: str | None = None
        self._loader: Any = None
        self._samples_per_batch = 0.0
        self._warned = False
        self._record = RankRecord(folder, world.rank, seconds_between=0.1 if world.size <= 64 else 2.0)
        self._began, self._began_at = perf_counter(), 0
        self._record.start(rank=world.rank, ranks=world.size, total_steps=total_steps, **facts)
        if resumed:
            self.go_on(resumed)

    # -- the loop ------------------------------------------------------------------------------------------

    def step(
        self, loss: torch.Tensor | None = None, *, samples: float | None = None, tokens: Any = None, **values: Any
    ) -> None:
        """A micro-batch is counted, and if it completes the last update of a report, the report is made.

        Args:
            loss: the mean over the micro-batch, on the device; it is read only at a report.
            samples: in this rank's micro-batch; by default what the prepared loader says.
            tokens: in this rank's micro-batch: an int, or a tensor on the device.
            values: the user's own numbers, of which a report shows the newest.

        Raises:
            RunStopped: on every rank: a rule, or some rank's :meth:`stop`, ended the run.
        """
        is_update = self._clock.sync_gradients
        loader = self._clock.active_dataloader
        if loader is not self._loader:
            self._enter(loader)
        ends_pass = loader is not None and loader.end_of_dataloader
        waited = None if loader is None else loader.data_wait_seconds
        if samples is None:
            samples = self._samples_of(loader, ends_pass)
        is_counted = self._times.lap(samples, is_update, waited, ends_pass)
        if tokens is not None and is_counted:
            self._tokens.append(tokens)
        if values:
            self._values.update(values)
        if loss is not None:
            self._add(loss.detach(), is_update)
        if is_update:
            self._end_update()
        if ends_pass:
            self._end_pass(loader)

    def _add(self, loss: torch.Tensor, is_update: bool) -> None:
        """The loss of an update is the mean over its micro-batches."""
        if is_update and not self._num_in_window:
            self._losses.append(loss)
            return
        self._window = loss if self._window is None else self._window + loss
        self._num_in_window += 1
        if is_update:
            self._losses.append(self._window / self._num_in_window)
            self._window, self._num_in_window = None, 0

    def _end_update(self) -> None:
        self.updates += 1
        for callback in self.callbacks:
            callback.on_step(self)
        if self.updates % self._every == 0:
            self.report()

    def _enter(self, loader: Any) -> None:
        """A loader that wasn't in the loop before: the size of its batches is looked up once."""
        self._loader = loader
        if loader is None:
            return
        self._samples_per_batch = loader.total_batch_size / self._world.size

    def _samples_of(self, loader: Any, ends_pass: bool) -> float:
        if loader is None:
            return 0.0
        if ends_pass and loader.own_rows is not None:
            return loader.own_rows[0]
        return self._samples_per_batch

    def _end_pass(self, loader: Any) -> None:
        epoch = loader.iteration
        self._record.event("epoch", epoch=epoch, step=self.updates)
        for callback in self.callbacks:
            callback.on_epoch(self, epoch)

    @property
    def epoch(self) -> int | None:
        """The pass over the training loader that is running (or was last), counted from 0; None without one."""
        return None if self._loader is None else self._loader.iteration

    def stop(self, reason: str) -> None:
        """Every rank stops at the next report, because of ``reason``. One rank is enough to ask for it."""
        self._reason = reason

    # -- the report ----------------------------------------------------------------------------------------

    def report(self) -> StepReport | None:
        """The numbers since the last report; None when there was no update. A collective, made by every rank.

        Raises:
            RunStopped: on every rank, when the run is to end.
        """
        losses = torch.stack([loss.float() for loss in self._losses]).tolist() if self._losses else []
        first = self._judge.first_non_finite(losses)
        times = self._times
        own = (
            math.fsum(losses) if first is None else math.nan,
            len(losses),
            self._judge.run_of_non_finite(losses),
            -1 if first is None else self.updates - len(losses) + 1 + first,
            self._reason is not None,
            times.seconds,
            times.updates,
            times.samples,
            math.fsum(float(count) for count in self._tokens),
        )
        rows = self._gathered(own)
        self._losses.clear()
        self._tokens.clear()
        report = self._made_of(rows) if rows[0]["updates"] or losses else None
        times.reset()
        if report is not None:
            self._tell(report)
        reason = self._verdict(rows, report)
        if reason is not None:
            self._end(reason)
        return report

    def _gathered(self, own: Sequence[float]) -> list[dict[str, float]]:
        if self._world.size == 1:
            return [dict(zip(_ROW, map(float, own), strict=True))]
        row = torch.tensor([own], dtype=torch.float64).view(torch.uint8).to(self._world.device)  # as bytes: everywhere
        rows = gather(row, world=self._world).cpu().view(torch.float64).tolist()
        return [dict(zip(_ROW, each, strict=True)) for each in rows]

    def _made_of(self, rows: Sequence[Mapping[str, float]]) -> StepReport:
        num_losses = sum(row["num_losses"] for row in rows)
        times, ranks = self._times, self._world.size
        slowest = max(row["seconds"] for row in rows)
        is_timed = times.updates > 0 and slowest > 0
        samples, tokens = (sum(row[name] for row in rows) for name in ("samples", "tokens"))
        samples_rate = samples / slowest if is_timed and samples else None
        tokens_rate = tokens / slowest if is_timed and tokens else None
        done = self.updates - self._began_at
        left = None if self.total_steps is None else max(0, self.total_steps - self.updates)
        waited = times.wait_seconds
        device = self._world.kind.max_memory_allocated(self._world.device) or host_memory_bytes()
        updates_rate = times.updates / slowest if is_timed else 0.0
        return StepReport(
            step=self.updates,
            epoch=self.epoch,
            loss=sum(row["loss_sum"] for row in rows) / num_losses if num_losses else None,
            learning_rate=float(self._optimizers[0].param_groups[0]["lr"]) if self._optimizers else None,
            step_seconds=times.seconds / times.updates if is_timed else None,
            wait_seconds=waited / times.updates if is_timed and waited is not None else None,
            samples_per_second=samples_rate,
            tokens_per_second=tokens_rate,
            memory_bytes=device,
            mfu=self._flops.utilization(tokens=tokens_rate, samples=samples_rate, updates=updates_rate, ranks=ranks)
            if is_timed
            else None,
            eta_seconds=(perf_counter() - self._began) / done * left if left is not None and done else None,
            total_steps=self.total_steps,
            values={name: float(value) for name, value in self._values.items()},
        )

    def _tell(self, report: StepReport) -> None:
        self.last_report = report
        values = report.as_json()
        self._record.numbers(values)
        if self._log is not None:
            self._log({name: value for name, value in values.items() if name not in _NOT_LOGGED}, report.step)
        if self._show is not None:
            self._show(report.line())
        for callback in self.callbacks:
            callback.on_report(self, report)

    # -- stopping ------------------------------------------------------------------------------------------

    def _verdict(self, rows: Sequence[Mapping[str, float]], report: StepReport | None) -> str | None:
        """Why every rank stops now, or None; the same on all, because the rows are."""
        bad = [rank for rank, row in enumerate(rows) if row["first_non_finite"] >= 0]
        if bad:
            worst = max(bad, key=lambda rank: rows[rank]["longest_non_finite"])
            reason = (
                f"the loss on rank {worst} is not finite since step {rows[worst]['first_non_finite']:.0f} "
                f"({len(bad)} of {len(rows)} ranks)"
            )
            if self._judge.is_lost(rows[worst]["longest_non_finite"]):
                return reason
            if not self._warned:
                self._warned = True
                self._record.event("non_finite", text=reason, step=self.updates)
        if report is not None and report.loss is not None:
            usual = self._judge.judge_spike(report.loss)
            if usual is not None:
                return f"the loss is {report.loss:.4g}, {report.loss / usual:.1f} times the usual {usual:.4g}"
        if any(row["wants_stop"] for row in rows):
            return "; ".join(dict.fromkeys(filter(None, self._reasons())))
        return None

    def _reasons(self) -> list[str | None]:
        return gather_object([self._reason], world=self._world) if self._world.size > 1 else [self._reason]

    def _end(self, reason: str) -> None:
        self._record.event("stop", text=reason, step=self.updates)
        for callback in self.callbacks:
            callback.on_stop(self, reason)
        raise RunStopped(f"The run is stopped at step {self.updates}: {reason}.")

    # -- what the Accelerator tells ------------------------------------------------------------------------

    def before_save(self) -> dict[str, Any]:
        """What a checkpoint notes of this watch. Losses that were not looked at yet are, so that no lost run is saved.

        Raises:
            RunStopped: on every rank, when the run is to end.
        """
        self.report()
        return {"updates": self.updates}

    def saved(self, folder: str, seconds: float) -> None:
        """A checkpoint was written in ``seconds``, which are no part of a step."""
        self._times.set_aside(seconds)
        self._record.event("save", folder=folder, step=self.updates, seconds=round(seconds, 3))
        for callback in self.callbacks:
            callback.on_save(self, folder)

    def go_on(self, noted: Mapping[str, Any]) -> None:
        """The count continues from what a checkpoint noted."""
        self.updates = int(noted.get("updates", 0))
        self._began, self._began_at = perf_counter(), self.updates
        self._losses.clear()
        self._tokens.clear()
        self._times = StepClock()
        self._record.event("load", folder=noted.get("folder"), step=self.updates)

    def note(self, text: str) -> None:
        """``text`` is an event of this rank, in its file and on the page of ``accelerate monitor``."""
        self._record.event("note", text=text, step=self.updates)

    def finish(self) -> None:
        """The files are complete and closed; losses since the last report are looked at on this rank alone."""
        rest = [loss.item() for loss in self._losses]
        first = self._judge.first_non_finite(rest)
        if first is not None:
            step = self.updates - len(rest) + 1 + first
            self._record.event("non_finite", text=f"the loss is not finite since step {step}", step=step)
        self._losses.clear()
        self._record.finish()


_NOT_LOGGED: Final = frozenset({"step", "total_steps", "eta_seconds"})


def folder_of(logging_dir: Any) -> Path | None:
    """Where the files of a run's ranks lie; None for a run without a folder, or with one behind a network."""
    if logging_dir is None or "://" in str(logging_dir):
        return None
    return Path(logging_dir) / FOLDER


def before_save(run: RunWatch | None, *, alone: bool = False) -> dict[str, Any]:
    """What a checkpoint notes of the watch, if there is one.

    A collective, in which losses that were not looked at yet are; unless this rank saves ``alone``.
    """
    if run is None:
        return {}
    return {"watch": {"updates": run.updates} if alone else run.before_save()}


def after_load(run: RunWatch | None, loaded: Any) -> Mapping[str, Any] | None:
    """What a loaded checkpoint noted of a watch; ``run`` goes on from it."""
    noted = None if loaded.manifest is None else loaded.manifest.details.get("watch")
    if noted is not None:
        noted = {**noted, "folder": str(loaded.folder)}
        if run is not None:
            run.go_on(noted)
    return noted


def _with_peak(flops: Flops, world: World) -> Flops:
    """``flops`` with the peak of this device, where the author gave none and the table knows it."""
    if flops.peak is not None or (flops.per_token, flops.per_sample, flops.per_update) == (None, None, None):
        return flops
    return replace(flops, peak=peak_flops_of(world.kind.device_name(world.device.index or 0)))
