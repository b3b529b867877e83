"""The moments of a loop at which hooks are called, and that a loop without hooks has none to call."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.seams import LoopHook, LoopHooks
from accelerate.training.accumulation import GradientState


class Notes(LoopHook):
    """Writes each moment down."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def begin_pass(self, loader: Any) -> None:
        self.notes.append("pass")

    def between_batches(self, loader: Any | None) -> None:
        self.notes.append("alone" if loader is None else "between")

    def before_backward(self, loss: Any, weight: Any) -> None:
        self.notes.append(f"backward {weight}")

    def after_backward(self, loss: Any, weight: Any) -> None:
        self.notes.append("gradients")

    def before_step(self, optimizer: Any) -> None:
        self.notes.append("step")

    def after_step(self, optimizer: Any) -> None:
        self.notes.append("stepped")

    def after_clip(self, norm: Any) -> None:
        self.notes.append(f"clip {norm:.1f}")

    def before_save(self) -> None:
        self.notes.append("save")

    def details_of_save(self, alone: bool) -> dict[str, object]:
        self.notes.append("alone" if alone else "details")
        return {"by_hook": 3, "by_script": "hook's"}

    def after_save(self, folder: str, seconds: float, details: Any) -> None:
        self.notes.append(f"saved {details['by_script']} {seconds >= 0}")

    def after_load(self, folder: str, details: Any) -> None:
        self.notes.append(f"loaded {details['by_hook']} {details['by_script']}")

    def free_memory(self) -> None:
        self.notes.append("free")

    def asks_to_end(self) -> bool:
        self.notes.append("asked")
        return True

    def end_run(self) -> None:
        self.notes.append("end")


class OneMoment(LoopHook):
    def __init__(self, notes: list[str]) -> None:
        self.notes = notes

    def before_step(self, optimizer: Any) -> None:
        self.notes.append("second hook")


def test_each_moment_comes_in_its_place(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    hook = Notes()
    accelerator.gradient_state.hooks.add(hook)
    accelerator.gradient_state.hooks.add(OneMoment(hook.notes))
    model = torch.nn.Linear(1, 1)
    loader = DataLoader(torch.ones(2, 1), batch_size=1)  # pyright: ignore[reportArgumentType]
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters()), loader)
    for rows in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(rows).sum(), weight=1)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert accelerator.preempted
    accelerator.save_state(tmp_path / "state", details={"by_script": "script's"})
    accelerator.load_state(tmp_path / "state")
    accelerator.free_memory()
    accelerator.end_training()
    first, second = (
        ["backward 1", "gradients"],
        ["backward 1", "gradients", "clip 1.4", "step", "second hook", "stepped"],
    )
    saved = ["save", "details", "saved script's True", "loaded 3 script's"]
    assert hook.notes == ["pass", *first, "between", *second, "asked", *saved, "free", "end"]


def test_a_loop_without_a_prepared_loader_has_points_between_its_batches() -> None:
    accelerator, hook = Accelerator(cpu=True), Notes()
    accelerator.gradient_state.hooks.add(hook)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    with accelerator.accumulate(model):
        pass
    assert hook.notes == ["alone"]


def test_a_part_of_a_backward_is_a_backward() -> None:
    accelerator, hook = Accelerator(cpu=True), Notes()
    accelerator.gradient_state.hooks.add(hook)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    accelerator.backward_in_parts(lambda rows: model(rows).sum(), torch.ones(2, 1))
    accelerator.pipeline_step(model, (torch.ones(2, 1), torch.ones(2, 1)), torch.nn.functional.mse_loss)
    assert hook.notes == ["backward None", "gradients"] * 2


def test_only_moments_that_a_hook_overrides_are_listed() -> None:
    hooks, one = LoopHooks(), OneMoment([])
    hooks.add(one)
    listed = {moment: len(getattr(hooks, moment)) for moment in LoopHooks.__annotations__}
    assert listed == {moment: int(moment == "before_step") for moment in listed} and len(listed) == 16
    hooks.remove(one)
    assert not any(getattr(hooks, moment) for moment in LoopHooks.__annotations__)


def test_an_exception_of_a_hook_ends_the_run() -> None:
    class Stops(LoopHook):
        def before_backward(self, loss: Any, weight: Any) -> None:
            raise SystemExit(3)

    accelerator = Accelerator(cpu=True)
    accelerator.gradient_state.hooks.add(Stops())
    with pytest.raises(SystemExit):
        accelerator.backward(torch.ones((), requires_grad=True))


def test_a_copy_in_another_process_has_the_hooks_that_nothing_asks_for() -> None:
    accelerator = Accelerator(cpu=True)
    pickled = pickle.dumps(accelerator)
    assert pickle.loads(pickled).gradient_state is accelerator.gradient_state  # of the same loop
    assert len(accelerator.gradient_state.hooks.before_save) == 1
    GradientState._reset_state()  # as in a new process
    copy = pickle.loads(pickled)
    assert copy.gradient_state is not accelerator.gradient_state
    assert len(copy.gradient_state.hooks.before_save) == 1
