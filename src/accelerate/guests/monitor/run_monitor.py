"""The monitor of a run: a report every few updates, and one decision of all ranks to stop.

Between reports, a step reads the clock and adds a few numbers: it reads nothing from the device, and ranks don't
communicate. At a report, each rank reads its losses (one wait for the device) and one small row of numbers is gathered.
Every rank computes the same verdict from the same rows, so all ranks stop in the same update, or none does.
"""

from __future__ import annotations

import math
import platform
import socket
import statistics
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, cast, final

import torch

from ...distributed.collectives import gather, gather_object
from ...distributed.watchdog import hang_seconds
from ...distributed.world import World
from ...errors import RunStopped, SettingError
from ...settings.env import read
from ...settings.labels import DistributedType
from ...torch_private.modules import compile_seconds
from ...training.accumulation import GradientState
from ...watching import NUM_FEWEST_REPORTS, Flops, LossRules, RunCallback, RunWatch, StepReport
from .ledger import EVALUATION, Ledger, Position
from .records import FOLDER, FOLDER_VARIABLE, RankRecord, shown_command
from .throughput import DeviceMeter, StepTimer, host_memory_bytes, peak_flops_of

if TYPE_CHECKING:
    from ...accelerator import Accelerator

#: A checkpoint's folder, and the details of its manifest.
Loaded = tuple[str, Mapping[str, object]]


@final
class RunMonitor(RunWatch):
    """The monitor of one training loop."""

    def __init__(
        self,
        run: Accelerator,
        *,
        every: int,
        callbacks: Sequence[RunCallback] = (),
        total_steps: int | None = None,
        rules: LossRules | None = None,
        flops: Flops | None = None,
        print_line: bool = False,
        log: bool = False,
        resumed: Mapping[str, Any] | None = None,
        difference: Callable[[], object | None] | None = None,
        compare_replicas: bool | int = False,
        is_alone: bool = False,
    ) -> None:
        if every < 1:
            raise SettingError(f"watch_run(every={every}): a report is made of at least one update.")
        if compare_replicas < 0:
            raise SettingError(
                f"watch_run(compare_replicas={compare_replicas}): replicas are compared every n updates."
            )
        self.updates: int = 0
        self.last_report: StepReport | None = None
        self.total_steps = total_steps
        self.callbacks: list[RunCallback] = list(callbacks)
        world = self._world = run.world
        self._gradient_state: GradientState = run.gradient_state
        self._optimizers: Sequence[torch.optim.Optimizer] = run._optimizers
        self._every = every
        self._log = run.log if log else None
        self._show = run.print if print_line and world.is_main else None
        self._is_alone = is_alone or world.size == 1  # its reports are no collectives
        self._gradient_norm: torch.Tensor | None = None
        self._judge = LossJudge(rules or NEVER)
        self._flops = _with_device_peak(flops or Flops(), world)
        self._timer = StepTimer()
        self._losses: list[torch.Tensor] = []
        self._window: torch.Tensor | None = None
        self._num_in_window = 0
        self._tokens: list[int | torch.Tensor] = []
        self._values: dict[str, Any] = {}
        self._reason: str | None = None
        self._difference = difference if compare_replicas else None
        self._compare_every = math.inf if compare_replicas is True else compare_replicas
        self._next_comparison, self._equal_at = 0.0, -1
        self._loader: Any = None
        self._pass_began: float | None = math.nan  # start of the loader's pass; NaN before the first one
        self._num_loads = 0
        self.samples_per_batch: float = 0.0
        self._warned = False
        meter, folder = DeviceMeter(world.kind, world.device), folder_of(read(FOLDER_VARIABLE) or run.logging_dir)
        self._record = RankRecord(folder, world.rank, seconds_between=_seconds_between(world), utilization=meter.read)
        self._began, self._began_at = perf_counter(), 0
        watched_by = "launcher" if is_alone else "script"
        numbers = {"rank": world.rank, "ranks": world.size, "total_steps": total_steps}
        self._record.start(**numbers, **_facts_of(run), watched_by=watched_by)
        self._ledger = Ledger(folder if world.is_main else None, self._position, hang_seconds() or math.inf)
        if resumed:
            self.resume(resumed)

    # -- the loop ------------------------------------------------------------------------------------------

    def step(
        self,
        loss: torch.Tensor | None = None,
        *,
        samples: float | None = None,
        tokens: int | torch.Tensor | None = None,
        **values: Any,
    ) -> None:
        """Count a micro-batch, and make a report if it completes the last update of one; see :class:`RunWatch`."""
        is_update = self._gradient_state.sync_gradients
        loader = self._gradient_state.loaders.active
        if loader is not self._loader or getattr(loader, "pass_began", None) != self._pass_began:
            self._enter(loader)
        ends_pass = loader is not None and loader.end_of_dataloader
        waited = getattr(loader, "data_wait_seconds", None)
        if samples is None:
            samples = self._samples_of(loader, ends_pass)
        is_counted = self._timer.lap(samples, is_update, waited, ends_pass)
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
        """Add the loss of a micro-batch; an update's loss is the mean over its micro-batches."""
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
        """Record a loader's pass when it starts, and look up its batch size once."""
        self._loader, self._pass_began = loader, getattr(loader, "pass_began", None)
        self._ledger.rejoin(self._timer.last_lap, self._pass_began or self._began)
        if loader is None:
            return
        self.samples_per_batch = loader.total_batch_size / self._world.size

    def _samples_of(self, loader: Any, ends_pass: bool) -> float:
        if loader is None:
            return 0.0
        if ends_pass and loader.own_rows is not None:
            return loader.own_rows[0]
        return self.samples_per_batch

    def _end_pass(self, loader: Any) -> None:
        epoch = loader.iteration
        self._pass_began = math.nan
        self._ledger.enter(EVALUATION, perf_counter())
        self._record.event("epoch", epoch=epoch, step=self.updates)
        for callback in self.callbacks:
            callback.on_epoch(self, epoch)

    @property
    def epoch(self) -> int | None:
        """The running (or last) pass over the training loader, counted from 0; None if there is none."""
        return None if self._loader is None else self._loader.iteration

    def stop(self, reason: str) -> None:
        """Request that all ranks stop at the next report, because of ``reason``; one rank's request is enough."""
        self._reason = reason

    # -- the report ----------------------------------------------------------------------------------------

    def report(self) -> StepReport | None:
        """Return the numbers since the last report; None if there was no update. A collective."""
        losses = torch.stack([loss.float() for loss in self._losses]).tolist() if self._losses else []
        first = self._judge.first_non_finite(losses)
        times = self._timer
        own = {
            "loss_sum": math.fsum(losses) if first is None else math.nan,
            "num_losses": len(losses),
            "longest_non_finite": self._judge.run_of_non_finite(losses),
            "first_non_finite": -1 if first is None else self.updates - len(losses) + 1 + first,
            "wants_stop": self._reason is not None,
            "seconds": times.seconds,
            "updates": times.updates,
            "samples": times.samples,
            "tokens": math.fsum(float(count) for count in self._tokens),
        }
        rows = self._gather_rows(own)
        self._losses.clear()
        self._tokens.clear()
        report = self._make_report(rows) if rows[0]["updates"] or losses else None
        times.reset()
        if report is not None:
            self._publish(report)
        reason = self._verdict(rows, report) or self._compare_replicas()
        if reason is not None:
            self._end(reason)
        return report

    def _gather_rows(self, own: Mapping[str, float]) -> Sequence[Mapping[str, float]]:
        """Return the numbers of all ranks by name; a collective."""
        if self._is_alone:
            return [own]
        row = (
            torch.tensor([[*own.values()]], dtype=torch.float64).view(torch.uint8).to(self._world.device)
        )  # as bytes: everywhere
        rows = gather(row, world=self._world).cpu().view(torch.float64).tolist()
        return [dict(zip(own, each, strict=True)) for each in rows]

    def _make_report(self, rows: Sequence[Mapping[str, float]]) -> StepReport:
        num_losses = sum(row["num_losses"] for row in rows)
        times, ranks = self._timer, self._world.size
        slowest = max(row["seconds"] for row in rows)
        is_timed = times.updates > 0 and slowest > 0
        share = ranks if len(rows) < ranks else 1  # a rank that reports alone assumes that the others are equal
        samples, tokens = (share * sum(row[name] for row in rows) for name in ("samples", "tokens"))
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
            gradient_norm=self._read_gradient_norm(),
        )

    def note_gradient_norm(self, norm: object) -> None:
        """Keep the norm of the last clipping, on the device, for the next report."""
        if isinstance(norm, torch.Tensor):
            self._gradient_norm = norm.detach()

    def _read_gradient_norm(self) -> float | None:
        """Return the last norm; reading the losses has already waited for the device."""
        norm, self._gradient_norm = self._gradient_norm, None
        return None if norm is None else float(norm)

    def _publish(self, report: StepReport) -> None:
        self.last_report = report
        values = report.as_json()
        self._record.numbers(values)
        if self._log is not None:
            self._log({name: value for name, value in values.items() if name not in _NOT_LOGGED}, report.step)
        if self._show is not None:
            self._show(report.line())
        for callback in self.callbacks:
            callback.on_report(self, report)

    def _position(self) -> Position:
        coordinator = self._world.coordinator
        watch = None if coordinator is None else coordinator.watch
        return Position(
            updates=self.updates,
            first_update=self._began_at,
            loads=self._num_loads,
            waited=self._timer.total_wait,
            evaluated=self._gradient_state.loaders.nested_seconds,
            compiled=compile_seconds(),
            progress=self._gradient_state.progress,
            stalled=None if watch is None else watch.stalled_seconds,
        )

    # -- stopping ------------------------------------------------------------------------------------------

    def _verdict(self, rows: Sequence[Mapping[str, float]], report: StepReport | None) -> str | None:
        """Return why every rank stops now, or None; the same on all ranks, because the rows are."""
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
            reasons = [self._reason] if self._is_alone else gather_object([self._reason], world=self._world)
            return "; ".join(dict.fromkeys(filter(None, reasons)))
        return None

    def _compare_replicas(self) -> str | None:
        """Return how replicas differ, at the first report and at the configured interval; a collective."""
        if self._difference is None or self.updates < self._next_comparison:
            return None
        found, before = self._difference(), self._equal_at
        self._next_comparison, self._equal_at = self.updates + self._compare_every, self.updates
        if found is None:
            return None
        return f"{found}; they were {'never compared before' if before < 0 else f'equal at step {before}'}"

    def _end(self, reason: str) -> None:
        self._record.event("stop", text=reason, step=self.updates)
        self._ledger.finish("stop")
        for callback in self.callbacks:
            callback.on_stop(self, reason)
        raise RunStopped(f"The run is stopped at step {self.updates}: {reason}.")

    # -- calls of the Accelerator --------------------------------------------------------------------------

    def before_save(self) -> dict[str, object]:
        """Return the state for a checkpoint, after a report of recent losses, so that no diverged run is saved.

        Raises:
            RunStopped: on every rank, if the run has to end.
        """
        self.report()
        return {"updates": self.updates}

    def saved(self, folder: str, seconds: float, preempted_by: object = None) -> None:
        """Record that a checkpoint was written; its ``seconds`` don't count as step time.

        Args:
            preempted_by: the notice of preemption that ends the run after this save.
        """
        self._timer.exclude(seconds)
        self._ledger.saved(seconds)
        self._record.event("save", folder=folder, step=self.updates, seconds=round(seconds, 3))
        for callback in self.callbacks:
            callback.on_save(self, folder)
        if preempted_by is not None:
            self._record.event("preempted", text=str(preempted_by), folder=folder, step=self.updates)
            self._ledger.finish("preempted")

    def resume(self, saved_state: Mapping[str, Any]) -> None:
        """Continue the count from the state in a checkpoint."""
        self._ledger.keep()
        self.updates = int(saved_state.get("updates", 0))
        self._began, self._began_at = perf_counter(), self.updates
        self._num_loads += 1
        self._losses.clear()
        self._tokens.clear()
        self._timer = StepTimer(total_wait=self._timer.total_wait)
        self._ledger.keep()
        self._record.event("load", folder=saved_state.get("folder"), step=self.updates)

    def note(self, text: str) -> None:
        """Record ``text`` as an event of this rank, in its file and on the page of ``accelerate monitor``."""
        self._record.event("note", text=text, step=self.updates)

    def finish(self) -> None:
        """Complete and close the files; check the losses since the last report on this rank alone."""
        rest = [loss.item() for loss in self._losses]
        first = self._judge.first_non_finite(rest)
        if first is not None:
            step = self.updates - len(rest) + 1 + first
            self._record.event("non_finite", text=f"the loss is not finite since step {step}", step=step)
        self._losses.clear()
        self._record.finish()
        self._ledger.finish("end")


def _facts_of(run: Accelerator) -> dict[str, object]:
    """Return how a rank runs, for the record of its start."""
    return {
        "device": str(run.world.device),
        "precision": run.mixed_precision,
        "strategy": DistributedType(run.distributed_type).value,
        "command": shown_command(sys.argv),
        "accumulation_steps": run.gradient_state.num_steps,
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def saved_watch(loaded: Loaded | None) -> Mapping[str, Any] | None:
    """Return the watch's state in a checkpoint, given by its folder and details; None if there is none."""
    state = None if loaded is None else loaded[1].get("watch")
    if loaded is None or not isinstance(state, Mapping):
        return None
    return {**cast("Mapping[str, Any]", state), "folder": loaded[0]}


def _seconds_between(world: World) -> float:
    """Return how often this rank writes its numbers: at most 640 lines per second over all ranks."""
    if world.size <= 64:
        return 0.1
    return 2.0 if world.is_main else max(2.0, world.size / 640)


_NOT_LOGGED: Final = frozenset({"step", "total_steps", "eta_seconds"})


def folder_of(logging_dir: str | PathLike[str] | None) -> Path | None:
    """Return the folder of the ranks' record files; None for a run without a folder, or with a remote one."""
    if logging_dir is None or "://" in str(logging_dir):
        return None
    return Path(logging_dir) / FOLDER


def _with_device_peak(flops: Flops, world: World) -> Flops:
    """Return ``flops`` with this device's peak, if the user gave none and the table has it."""
    if flops.peak is not None or (flops.per_token, flops.per_sample, flops.per_update) == (None, None, None):
        return flops
    return replace(flops, peak=peak_flops_of(world.kind.device_name(world.device.index or 0)))


# --------------------------------------------------------------------------------------------------
# Rules for losses: not finite for too long, or far above the usual

#: Rules that never end a run; losses that aren't finite are still recorded.
NEVER = LossRules(non_finite=0)


@final
@dataclass
class LossJudge:
    """The losses of one run so far, checked by rules. The same input gives the same result on every rank."""

    rules: LossRules
    num_non_finite: int = 0
    num_spikes: int = 0
    recent: deque[float] = field(default_factory=deque[float])

    def first_non_finite(self, losses: Sequence[float]) -> int | None:
        """Return the index of the first update whose loss on this rank isn't finite."""
        return next((index for index, loss in enumerate(losses) if not math.isfinite(loss)), None)

    def run_of_non_finite(self, losses: Sequence[float]) -> int:
        """Return the longest run of updates without a finite loss on this rank, including earlier updates."""
        longest = 0
        for loss in losses:
            self.num_non_finite = 0 if math.isfinite(loss) else self.num_non_finite + 1
            longest = max(longest, self.num_non_finite)
        return longest

    def is_lost(self, longest: float) -> bool:
        """Return whether so many updates in a row without a finite loss end the run."""
        return 0 < self.rules.non_finite <= longest

    def judge_spike(self, loss: float) -> float | None:
        """Return the usual loss if ``loss`` (the mean over ranks and a report) is one spike too many, else None."""
        if self.rules.spike is None or not math.isfinite(loss):
            return None
        usual = statistics.median(self.recent) if len(self.recent) >= NUM_FEWEST_REPORTS else None
        if usual is not None and usual > 0 and loss > self.rules.spike * usual:
            self.num_spikes += 1
            return usual if self.num_spikes >= self.rules.spike_patience else None
        self.num_spikes = 0
        self.recent.append(loss)
        while len(self.recent) > self.rules.spike_reports:
            self.recent.popleft()
        return None
