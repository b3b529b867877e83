"""Adding a strategy is one file plus one line: here is the file, and the line."""

from __future__ import annotations

import functools
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate import Accelerator
from accelerate import parallel as strategies
from tests.ranks import run_on_ranks
from tests.sharded_runs import assert_same_run, train

#: Replicas that average their gradients by hand, once an update, in one message.
THE_FILE = '''
    """Replicas that average their gradients once an update."""

    import torch
    from torch import distributed as dist

    from accelerate.settings.labels import DistributedType
    from accelerate.parallel.base import Strategy


    class OneMessage(Strategy):
        """Gradients of all replicas are averaged in one message, when the update is complete."""

        @property
        def label(self):
            """What old callers see."""
            return DistributedType.MULTI_CPU

        def _wrap(self, model):
            """The same weights on every rank."""
            for tensor in model.state_dict().values():
                dist.broadcast(tensor, 0)
            return model

        def backward(self, loss, scaler, num_steps=1, **kwargs):
            """Gradients have been added, and averaged at the end of a window."""
            super().backward(loss, scaler, num_steps, **kwargs)
            if self.options.gradient_state.sync_gradients:
                self.average()

        def average(self):
            """One message."""
            trained = [p for group in OPTIMIZED for p in group["params"] if p.grad is not None]
            flat = torch.cat([p.grad.flatten() for p in trained]) / self.world.size
            dist.all_reduce(flat)
            for p, piece in zip(trained, flat.split([p.numel() for p in trained]), strict=True):
                p.grad.copy_(piece.view_as(p))

        def register_step_hooks(self, optimizer):
            """Its parameters are what is averaged."""
            OPTIMIZED.extend(optimizer.param_groups)


    OPTIMIZED = []
'''


def _train_under_it(folder: str, **options: Any) -> dict[str, Any]:
    sys.path.insert(0, folder)
    line = strategies.Candidate("one_message", "OneMessage", lambda settings, world: world.size > 1)
    strategies.ORDER = (line, *strategies.ORDER)
    torch.manual_seed(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
    found = train(**options)
    assert type(Accelerator(cpu=True).strategy).__name__ == "OneMessage"
    return found


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "one_message.py").write_text(textwrap.dedent(THE_FILE), encoding="utf-8")
    return str(tmp_path)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_strategy_of_one_file_trains_as_one_process(precision: str, folder: str) -> None:
    alone = run_on_ranks(functools.partial(train, precision=precision), 1)[0]
    ranks = run_on_ranks(functools.partial(_train_under_it, folder, precision=precision), 2)
    for rank in ranks:
        assert_same_run(rank, alone, 1e-5 if precision == "no" else 1e-2)


def test_it_is_one_file_and_one_line() -> None:
    assert not strategies.Strategy.__abstractmethods__  # a strategy says only what is different under it
    assert all(issubclass(each.load(), strategies.Strategy) for each in strategies.ORDER)
