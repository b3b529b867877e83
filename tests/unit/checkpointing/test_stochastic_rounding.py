"""Updates of bf16 weights that are rounded stochastically (torchao): right on average, and resumed bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from tests.ranks import run_on_ranks

optim: Any = pytest.importorskip("torchao.optim", reason="the extra fp8 installs it")
pytestmark = pytest.mark.filterwarnings("ignore")  # torchao's own

WIDTH, NUM_STEPS = 96, 8
#: A sixteenth of the distance of bf16 numbers just below 1: rounded to the nearest, an update of 1 is lost.
RATE = 2**-12


def stepped(kind: str, rounds: bool) -> torch.Tensor:
    """Weights of 1 after steps along gradients of 1, each of which takes ``RATE`` from them."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.ones(WIDTH, WIDTH, dtype=torch.bfloat16))
    optimizer = getattr(optim, kind)([weight], lr=RATE, weight_decay=0.0, bf16_stochastic_round=rounds)
    with torch.compiler.set_stance("force_eager"):
        for _ in range(NUM_STEPS):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
    return weight.detach().double()


@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamWFp8"])
def test_small_updates_are_right_on_average(kind: str) -> None:
    """To five standard errors of the mean; rounded to the nearest, none of them arrives."""
    assert torch.equal(stepped(kind, False), torch.ones(WIDTH, WIDTH, dtype=torch.float64))
    weights = stepped(kind, True)
    assert set(weights.flatten().tolist()) <= {1 - step * 2**-8 for step in range(NUM_STEPS + 1)}
    share = RATE / 2**-8  # of the weights that one step moves by a whole distance
    error = 2**-8 * (NUM_STEPS * share * (1 - share)) ** 0.5 / WIDTH
    assert abs(float(weights.mean()) - (1 - NUM_STEPS * RATE)) < 5 * error


def trained(kind: str, folder: str | None, *, shards: bool, loads: bool) -> list[float]:
    """This rank's weights after six steps, with a checkpoint after three; with ``loads`` the last three alone."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if shards else None
    run = Accelerator(cpu=True, fsdp_plugin=plugin)
    torch.manual_seed(5 if loads else 0)
    model: Any = nn.Linear(WIDTH, WIDTH, bias=False).bfloat16()
    optimizer: Any = getattr(optim, kind)(model.parameters(), lr=RATE, bf16_stochastic_round=True)
    model, optimizer = run.prepare(model, optimizer)
    if loads:
        run.load_state(folder)
    with torch.compiler.set_stance("force_eager"):
        for number in range(3 if loads else 0, 6):
            inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number)).bfloat16()
            run.backward(model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if number == 2 and folder is not None:
                run.save_state(folder)
    weight = model.weight
    return getattr(weight, "to_local", lambda: weight)().float().flatten().tolist()


@pytest.mark.parametrize(("kind", "ranks"), [("AdamW8bit", 1), ("_AdamW", 2), ("_AdamW", 4)])
def test_a_resumed_run_rounds_as_one_that_was_not_interrupted(kind: str, ranks: int, tmp_path: Path) -> None:
    """The random bits are those of torch's stream, which a checkpoint holds for every rank."""
    folder, shards = str(tmp_path / "saved"), ranks > 1
    whole = run_on_ranks(lambda: trained(kind, folder, shards=shards, loads=False), ranks)
    assert run_on_ranks(lambda: trained(kind, folder, shards=shards, loads=True), ranks) == whole
