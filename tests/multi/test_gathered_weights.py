"""A forward without a backward leaves weights gathered under FSDP 2; what reads or writes weights is exact then."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from tests.ranks import run_on_ranks
from tests.sharded_runs import BLOCKS, Network, samples
from tests.torch_needed import FSDP2_ON_CPU

pytestmark = FSDP2_ON_CPU

Found = dict[str, torch.Tensor]


class Run:
    """A model in training, with gradients of a batch and, after it, a forward without a backward."""

    def __init__(self, plugin: dict[str, Any] | None, folder: Path, has_gradients: bool = True) -> None:
        fsdp = None if plugin is None else FullyShardedDataParallelPlugin(**{"fsdp_version": 2, **plugin})
        self.accelerator, self.folder = Accelerator(cpu=True, fsdp_plugin=fsdp), folder
        torch.manual_seed(0)
        model = Network().double()
        self.model, self.optimizer = self.accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        self.average = self.accelerator.average_weights(self.model, decay=0.5)
        self.inputs, self.classes = samples(8).tensors
        self.inputs = self.inputs.double()
        self.backward()
        self.optimizer.step()
        self.average.update()
        if has_gradients:
            self.optimizer.zero_grad()
            self.backward()

    def backward(self) -> None:
        """Accumulate the gradients of the batch."""
        self.accelerator.backward(nn.functional.cross_entropy(self.model(self.inputs), self.classes))

    def forward(self) -> torch.Tensor:
        """Return the scores of the batch, without a graph."""
        with torch.no_grad():
            return self.model(self.inputs)

    def train_on(self) -> Found:
        """Make the update, a forward and another update; return the scores, and the weights of the main process."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        scores = self.forward()
        self.backward()
        self.optimizer.step()
        weights = self.accelerator.get_state_dict(self.model)
        return {"scores": scores, **(weights if self.accelerator.is_main_process else {})}


def step(run: Run) -> Found:
    """Update the weights, and read them by a forward."""
    return run.train_on()


def with_a_graph(run: Run) -> Found:
    """Compute a loss that has no backward, then update the weights."""
    run.model(run.inputs).sum()
    return run.train_on()


def before_a_backward(run: Run) -> Found:
    """Call the model without a graph while another graph waits for its backward."""
    loss = run.model(run.inputs).square().mean()
    run.forward()
    run.accelerator.backward(loss)
    return run.train_on()


def clip_norm(run: Run) -> Found:
    """Clip the gradients of the parameters that the model has now."""
    norm = run.accelerator.clip_grad_norm_(run.model.parameters(), 0.01)
    return {"norm": norm, **run.train_on()}


def clip_value(run: Run) -> Found:
    """Clamp the gradients of the parameters that the model has now."""
    run.accelerator.clip_grad_value_(run.model.parameters(), 1e-3)
    return run.train_on()


def zero_grad(run: Run) -> Found:
    """Drop the gradients through the model."""
    run.model.zero_grad()
    run.backward()
    return run.train_on()


def state_dict(run: Run) -> Found:
    """Gather the weights on the main process."""
    found = {name: value.clone() for name, value in run.accelerator.get_state_dict(run.model).items()}
    return {**found, **{f"later {name}": value for name, value in run.train_on().items()}}


def checkpoint(run: Run) -> Found:
    """Save, go on, load what was saved, and go on from there."""
    run.accelerator.save_state(str(run.folder))
    run.train_on()
    run.forward()
    run.accelerator.load_state(str(run.folder))
    run.backward()
    return run.train_on()


def average(run: Run) -> Found:
    """Average the weights, and read the average by a forward."""
    run.average.update()
    with run.average.applied():
        scores = run.forward()
    return {"average": scores, **run.train_on()}


def streamed(run: Run) -> Found:
    """Stream the weights to the main process."""
    found = {name: value.clone() for name, value in run.accelerator.stream_weights(run.model, ranks=[0])}
    return {**{name: found[name] for name in sorted(found)}, **run.train_on()}


def new_optimizer(run: Run) -> Found:
    """Prepare a second optimizer, of the parameters that the model has now."""
    run.optimizer.zero_grad()
    run.optimizer = run.accelerator.prepare(torch.optim.SGD(run.model.parameters(), lr=0.1))
    run.backward()
    return run.train_on()


CALLS: dict[str, Callable[[Run], Found]] = {
    call.__name__: call
    for call in (
        step,
        with_a_graph,
        before_a_backward,
        clip_norm,
        clip_value,
        zero_grad,
        state_dict,
        checkpoint,
        average,
        streamed,
        new_optimizer,
    )
}
VERSION_1: dict[str, Any] = {"fsdp_version": 1, "use_orig_params": True}
PLUGINS: dict[str, dict[str, Any]] = {
    "whole model one unit": {},
    "blocks": BLOCKS,
    "no resharding": {**BLOCKS, "reshard_after_forward": False},
    "version 1": VERSION_1,
    "version 1, not sharded": {**VERSION_1, "reshard_after_forward": "NO_SHARD"},
    "version 1, blocks": {**BLOCKS, **VERSION_1, "reshard_after_forward": "SHARD_GRAD_OP"},
}


def _all_calls(plugin: dict[str, Any] | None, folder: Path) -> dict[str, Found | str]:
    found: dict[str, Found | str] = {}
    for name, call in CALLS.items():
        run = Run(plugin, folder / name)
        run.forward()
        try:
            found[name] = copy.deepcopy(call(run))
        except Exception as error:  # the table shows every call
            found[name] = f"{type(error).__name__}: {error}"
    return found


@pytest.mark.parametrize("name", PLUGINS)
def test_every_call_after_a_forward_without_a_backward_is_that_of_one_process(name: str, tmp_path: Path) -> None:
    alone = run_on_ranks(_all_calls, 1, None, tmp_path / "alone")[0]
    sharded = run_on_ranks(_all_calls, 2, PLUGINS[name], tmp_path / "sharded")[0]
    wrong: dict[str, str] = {}
    for call, expected in alone.items():
        assert isinstance(expected, dict), expected
        try:
            assert isinstance(sharded[call], dict), sharded[call]
            torch.testing.assert_close(sharded[call], expected, rtol=1e-9, atol=1e-11)
        except AssertionError as error:
            wrong[call] = str(error)[:300]
    assert not wrong, "\n".join(f"{call}: {text}" for call, text in wrong.items())


def _fingerprints(plugin: dict[str, Any], folder: Path) -> list[str]:
    run = Run(plugin, folder)
    before = run.accelerator.fingerprint()
    run.forward()
    return [before, run.accelerator.fingerprint()]


@pytest.mark.parametrize("name", [name for name in PLUGINS if "version 1" not in name])
def test_a_forward_doesnt_change_the_fingerprint(name: str, tmp_path: Path) -> None:
    before, after = run_on_ranks(_fingerprints, 2, PLUGINS[name], tmp_path)[0]
    assert before == after
