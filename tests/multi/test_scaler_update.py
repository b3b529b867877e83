"""fp16 with several optimizers and one scaler trains as a plain torch loop, which updates the scaler once a window."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.plugins.handlers import GradScalerKwargs
from accelerate.utils import DistributedDataParallelKwargs, FullyShardedDataParallelPlugin
from tests.ranks import run_on_ranks
from tests.slow import slow

UPDATES, SCALE, OVERFLOWS = 6, 2.0**10, 3  # in the update OVERFLOWS, gradients of the second half are infinite
Optimizers = tuple[torch.optim.Optimizer, torch.optim.Optimizer]


class Halves(nn.Module):
    """Two halves that two optimizers train; the second one's gradients can overflow alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(4, 6)

    def forward(self, rows: torch.Tensor, half: str = "both") -> torch.Tensor:
        first, second = self.first(rows).tanh(), self.second(rows)
        return {"both": first * second, "first": first, "second": second, "chain": second.detach() + first}[half]


def make() -> Halves:
    torch.manual_seed(0)
    return Halves()


def optimizers_of(model: Any, kind: str = "AdamW") -> Optimizers:
    second: Any = getattr(torch.optim, kind)
    matrices = [model.second.weight] if kind == "Muon" else model.second.parameters()
    rest = [model.second.bias] if kind == "Muon" else []
    return torch.optim.AdamW([*model.first.parameters(), *rest], lr=0.1), second(matrices, lr=0.1)


class Plain:
    """What the loops below call, in plain torch: the scaler is updated where the loop says that a window ends."""

    def __init__(self, kind: str, interval: int) -> None:
        self.model: Any = make()
        self.optimizers = optimizers_of(self.model, kind)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=interval)

    def loss(self, rows: torch.Tensor, half: str = "both") -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            out = self.model(rows, half)
        return out.float().pow(2).mean()

    def backward(self, loss: torch.Tensor) -> None:
        self.scaler.scale(loss).backward()

    def clip(self, number: int) -> None:
        self.scaler.unscale_(self.optimizers[number])
        nn.utils.clip_grad_norm_(self.parameters(number), 0.05)

    def parameters(self, number: int) -> list[torch.Tensor]:
        return [p for group in self.optimizers[number].param_groups for p in group["params"]]

    def step(self, number: int, closure: Callable[[], float] | None = None) -> None:
        options = {} if closure is None else {"closure": closure}
        self.scaler.step(self.optimizers[number], **options)

    def zero(self, number: int) -> None:
        self.optimizers[number].zero_grad()

    def end_window(self) -> None:
        self.scaler.update()


class Ours(Plain):
    """The same with an Accelerator, which isn't told where a window ends."""

    def __init__(self, kind: str, interval: int, layout: str = "replicas") -> None:
        model = make()
        handler = GradScalerKwargs(init_scale=SCALE, growth_interval=interval)
        unused = DistributedDataParallelKwargs(find_unused_parameters=True)  # the loops take turns
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if layout == "shards" else None
        self.accelerator = Accelerator(
            cpu=True, mixed_precision="fp16", kwargs_handlers=[handler, unused], fsdp_plugin=plugin
        )
        self.model, *found = self.accelerator.prepare(model, *optimizers_of(model, kind))
        self.optimizers = found[0], found[1]
        assert self.accelerator.scaler is not None
        self.scaler = self.accelerator.scaler

    def loss(self, rows: torch.Tensor, half: str = "both") -> torch.Tensor:
        return self.model(rows, half).float().pow(2).mean()

    def backward(self, loss: torch.Tensor) -> None:
        self.accelerator.backward(loss)

    def clip(self, number: int) -> None:
        self.accelerator.clip_grad_norm_(self.parameters(number), 0.05)

    def step(self, number: int, closure: Any = None) -> None:
        self.optimizers[number].step(closure)

    def end_window(self) -> None:
        pass


def batches() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(UPDATES):
        yield torch.randn(8, 4, generator=generator)


def overflow(run: Plain, number: int) -> None:
    """Make the gradients of the second optimizer infinite in one update."""
    if number == OVERFLOWS:
        gradient: Any = run.parameters(1)[0].grad
        (gradient.to_local() if hasattr(gradient, "to_local") else gradient).fill_(float("inf"))


def together(run: Plain, clipped: tuple[int, ...] = ()) -> None:
    for number, rows in enumerate(batches()):
        run.backward(run.loss(rows))
        overflow(run, number)
        for one in clipped:
            run.clip(one)
        for one in (0, 1):
            run.step(one)
        for one in (0, 1):
            run.zero(one)
        run.end_window()


def step_each(run: Plain) -> None:
    for one in (1, 0):
        run.clip(one)
        run.step(one)
        run.zero(one)
    run.end_window()


def clears_after_each_step(run: Plain) -> None:
    for number, rows in enumerate(batches()):
        run.backward(run.loss(rows))
        overflow(run, number)
        step_each(run)


def in_turns(run: Plain) -> None:
    """As a GAN: the first one's loss also gives gradients to the second, which are cleared unused."""
    for number, rows in enumerate(batches()):
        run.zero(1)
        run.backward(run.loss(rows, "second"))
        overflow(run, number)
        run.clip(1)
        run.step(1)
        run.end_window()
        run.zero(0)
        run.backward(run.loss(rows))
        run.clip(0)
        run.step(0)
        run.end_window()


def backwards_first(run: Plain) -> None:
    for number, rows in enumerate(batches()):
        run.backward(run.loss(rows, "second"))
        run.backward(run.loss(rows, "chain"))
        overflow(run, number)
        step_each(run)


def one_skips(run: Plain) -> None:
    """The second optimizer is left out of every other window; its gradients are cleared."""
    for number, rows in enumerate(batches()):
        run.backward(run.loss(rows))
        overflow(run, number)
        run.clip(0)
        if number % 2:
            run.clip(1)
            run.step(1)
        run.step(0)
        for one in (0, 1):
            run.zero(one)
        run.end_window()


LOOPS: dict[str, Callable[[Plain], None]] = {
    "together": together,
    "together, both clipped": lambda run: together(run, (0, 1)),
    "together, the first clipped": lambda run: together(run, (0,)),
    "together, the second clipped": lambda run: together(run, (1,)),
    "each cleared after its step": clears_after_each_step,
    "in turns": in_turns,
    "backwards first": backwards_first,
    "one skips": one_skips,
}
KINDS = ("AdamW", "Muon") if hasattr(torch.optim, "Muon") else ("AdamW",)  # not in the oldest torch
CASES = [(loop, interval, kind) for loop in LOOPS for interval in (1, 2, 1000) for kind in KINDS]


def whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def results(run: Plain) -> tuple[list[torch.Tensor], float, Any]:
    if isinstance(run, Ours):
        run.accelerator.gradient_state.note_backward()  # the next window begins
    return [whole(p) for p in run.model.parameters()], run.scaler.get_scale(), run.scaler.state_dict()


def all_of(layout: str) -> list[Any]:
    found = []
    for loop, interval, kind in CASES:
        run = Ours(kind, interval, layout)
        LOOPS[loop](run)
        found.append(results(run))
        run.accelerator.free_memory()
    return found


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [("replicas", 1), ("replicas", 2), ("shards", 1), pytest.param("shards", 2, marks=slow)],  # below: one such loop
)
def test_several_optimizers_share_a_scaler_as_in_a_plain_loop(layout: str, ranks: int) -> None:
    answers = [all_of(layout)] if ranks == 1 else run_on_ranks(all_of, ranks, layout)
    for answer in answers:
        for case, (weights, scale, state) in zip(CASES, answer, strict=True):
            run = Plain(case[2], case[1])
            LOOPS[case[0]](run)
            expected, *_ = results(run)
            assert (scale, state) == (run.scaler.get_scale(), run.scaler.state_dict()), case
            for ours, plain in zip(weights, expected, strict=True):
                if layout == "replicas":
                    assert torch.equal(ours, plain), case
                else:  # weights are cast, not each operation
                    torch.testing.assert_close(ours, plain, rtol=0, atol=5e-3, msg=str(case))


def keeps_gradients(run: Plain, every: int = 2) -> None:
    """The second optimizer steps in every second batch, with the gradients of both."""
    for number, rows in enumerate(batches()):
        run.backward(run.loss(rows))
        run.clip(0)
        run.step(0)
        run.zero(0)
        if number % every:
            run.step(1)
            run.zero(1)
        run.end_window()


def test_gradients_that_wait_for_a_later_step_follow_the_scale() -> None:
    constant, growing = Plain("AdamW", 1000), Ours("AdamW", 1)
    keeps_gradients(constant)
    keeps_gradients(growing)
    assert growing.scaler.get_scale() > SCALE
    for ours, plain in zip(results(growing)[0], results(constant)[0], strict=True):
        torch.testing.assert_close(ours, plain, rtol=0, atol=2e-3)


def steps_twice(run: Plain, steps: int) -> list[torch.Tensor]:
    """As a GAN in windows: the second optimizer steps, gets gradients of the first's loss, and steps with them, too."""
    accelerator = run.accelerator if isinstance(run, Ours) else None
    if accelerator is not None:
        accelerator.gradient_accumulation_steps = steps
    for number, rows in enumerate(batches()):
        is_last = number % steps == steps - 1
        with nullcontext() if accelerator is None else accelerator.accumulate(run.model):
            for half in ("second", "both"):
                run.backward(run.loss(rows, half) / (steps if accelerator is None else 1))
                if is_last:
                    run.clip(1)
                    run.step(1)
                    run.zero(1)
                    run.end_window()
            run.backward(run.loss(rows) / (steps if accelerator is None else 1))  # the second's are kept
            if is_last:
                run.step(0)
                run.zero(0)
                run.end_window()
    return results(run)[0]


@pytest.mark.parametrize("steps", [1, 2])
def test_gradients_that_come_after_a_step_follow_the_scale(steps: int) -> None:
    expected = steps_twice(Plain("AdamW", 1000), steps)
    for interval in (4, 1000):
        for ours, plain in zip(steps_twice(Ours("AdamW", interval), steps), expected, strict=True):
            torch.testing.assert_close(ours, plain, rtol=0, atol=2e-3)


def test_an_open_window_keeps_the_scale_of_its_gradients() -> None:
    handler = GradScalerKwargs(init_scale=SCALE, growth_interval=1)
    accelerator = Accelerator(
        cpu=True, mixed_precision="fp16", kwargs_handlers=[handler], gradient_accumulation_steps=2
    )
    models = [make().first, make().second]
    models = list(accelerator.prepare(*models))
    optimizers = [accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1)) for model in models]
    scaler: Any = accelerator.scaler
    scales, gradients = [], []
    for rows in list(batches())[:4]:
        for model, optimizer in zip(models, optimizers, strict=True):
            with accelerator.accumulate(model):
                accelerator.backward(model(rows).pow(2).mean())
                scales.append(scaler.get_scale())
                gradients.append(float(model.weight.grad.abs().sum()) / scales[-1])
                optimizer.step()
                optimizer.zero_grad()
    assert [scale / SCALE for scale in scales] == [1, 1, 1, 1, 2, 2, 2, 2]  # one update for the two windows
    assert all(0 < gradient < 100 for gradient in gradients)
    assert [optimizer.step_was_skipped for optimizer in optimizers] == [False, False]


def test_a_save_has_the_scale_of_the_next_window(tmp_path: Path) -> None:
    run = Ours("AdamW", 1)
    in_turns(run)  # the second optimizer has gradients that no step uses
    assert run.accelerator.gradient_state.update_scaler is not None
    run.accelerator.save_state(tmp_path / "saved")
    again = Ours("AdamW", 1)
    again.accelerator.load_state(tmp_path / "saved")
    plain = Plain("AdamW", 1)
    in_turns(plain)
    assert again.scaler.state_dict() == run.scaler.state_dict() == plain.scaler.state_dict()


def closures(run: Plain) -> list[str]:
    """Each window begins with a closure, which torch's scaler refuses; the loop then steps without one."""
    refused = []
    for number, rows in enumerate(batches()):
        run.backward(run.loss(rows))
        overflow(run, number)
        run.clip(1)
        for one in (0, 1):
            try:
                run.step(one, lambda: 1.0)
            except RuntimeError as error:
                refused.append(str(error))
            run.step(one)
        for one in (0, 1):
            run.zero(one)
        run.end_window()
    return refused


def closures_of(layout: str) -> tuple[list[str], Any]:
    run = Ours("AdamW", 2, layout)
    return closures(run), results(run)


@pytest.mark.parametrize(("layout", "ranks"), [("replicas", 1), ("replicas", 2), ("shards", 1), ("shards", 2)])
def test_a_closure_is_refused_as_torchs_scaler_does_and_the_window_goes_on(layout: str, ranks: int) -> None:
    plain = Plain("AdamW", 2)
    expected = closures(plain)
    assert len(expected) == 2 * UPDATES and "Closure use is not currently supported" in expected[0]
    for refused, (weights, scale, state) in run_on_ranks(closures_of, ranks, layout):
        assert refused == expected
        assert (scale, state) == (plain.scaler.get_scale(), plain.scaler.state_dict())
        for ours, other in zip(weights, results(plain)[0], strict=True):
            torch.testing.assert_close(ours, other, rtol=0, atol=0 if layout == "replicas" else 5e-3)
