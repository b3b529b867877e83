"""Tensor, context and sequence parallelism inside of a data-parallel rank, whose number doesn't change the bits."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accelerate.utils import set_seed
from tests import mesh_runs
from tests.batch_parts.training import digest, state_of
from tests.mesh_runs import SEQUENCE_PLAN, V2, LanguageModel, mean_loss, samples
from tests.ranks import run_on_ranks
from tests.slow import IS_SLOW

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")

NUM_PARTS = 12
RING = {"communication": "alltoall"}
#: By inner layout: its options, and the meshes that have to give the same bits.
LAYOUTS: dict[str, tuple[dict[str, Any], list[dict[str, int]]]] = {
    "tp": ({}, [
        {"dp_shard": 2, "tp": 2}, {"dp_shard": 3, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
    ]),
    "tp, sequences cut between": ({"plan": SEQUENCE_PLAN}, [{"dp_shard": 2, "tp": 2}, {"dp_shard": 3, "tp": 2}]),
    "cp": ({}, [
        {"cp": 2}, {"dp_shard": 2, "cp": 2}, {"dp_shard": 3, "cp": 2}, {"dp_replicate": 2, "cp": 2},
    ]),
    "cp, a ring": (RING, [{"cp": 2}, {"dp_shard": 2, "cp": 2}]),
    "sp": ({}, [{"sp": 2}, {"dp_shard": 2, "sp": 2}]),
    "cp x tp": ({}, [{"cp": 2, "tp": 2}, {"dp_shard": 2, "cp": 2, "tp": 2}]),
}  # fmt: skip
QUICK = ("cp",)


def train(degrees: dict[str, int] | None, **options: Any) -> list[Any]:
    """Train with accumulation, clipping, a schedule and random numbers; return hashes, the norms and the weights."""
    run = mesh_runs.accelerator(degrees, None if degrees is None else V2, batch_parts=NUM_PARTS, **options)
    set_seed(0)
    net: Any = LanguageModel()
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.7)
    loader: Any = DataLoader(samples(85), batch_size=1, shuffle=True)  # 24 parts an update, and then a short one
    net, optimizer, schedule, loader = run.prepare(net, optimizer, schedule, loader)
    norms = []
    for words, following in loader:
        places = torch.arange(mesh_runs.LENGTH).repeat(len(words), 1)
        buffers = [words, following, places]
        with (
            run.maybe_context_parallel(buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(buffers)),
            run.accumulate(net),
        ):
            run.backward(mean_loss(net(words, places), following) * (1 + 0.1 * torch.rand(())))
            if run.sync_gradients:
                norms.append(run.clip_grad_norm_(net.parameters(), 0.5))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    weights = [getattr(one, "full_tensor", lambda one=one: one)().detach() for one in net.parameters()]
    found = [digest(norms), state_of(run, net, optimizer), run.fingerprint(), optimizer.num_updates]
    return [found, norms, torch.cat([one.flatten() for one in weights])]


@cache
def alone() -> list[Any]:
    """What one process with the same parts computes."""
    return run_on_ranks(lambda: train(None), 1, timeout_seconds=240)[0]


@pytest.mark.parametrize("name", LAYOUTS if IS_SLOW else QUICK)
def test_an_inner_layout_computes_the_same_bits_on_any_number_of_data_parallel_ranks(name: str) -> None:
    options, meshes = LAYOUTS[name]
    hashes = []
    for degrees in meshes if IS_SLOW else meshes[:2]:
        num_ranks = torch.tensor([*degrees.values()]).prod().item()
        found = run_on_ranks(lambda degrees=degrees: train(degrees, **options), int(num_ranks), timeout_seconds=240)
        assert all(one[0] == found[0][0] for one in found)
        for own, expected in zip(found[0][1:], alone()[1:], strict=True):  # another order of sums, the same numbers
            torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-4)
        hashes.append(found[0][0])
    assert hashes[0][3] == 4 and all(one == hashes[0] for one in hashes)
