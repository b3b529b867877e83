"""Tensor, context, sequence and pipeline parallelism inside of data-parallel ranks: bits for any number of them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accelerate.utils import set_seed
from tests import mesh_runs
from tests.batch_parts.training import digest, state_of
from tests.mesh_runs import SEQUENCE_PLAN, V2, LanguageModel, mean_loss, samples
from tests.ranks import RankFailed, run_on_ranks
from tests.slow import IS_SLOW, slow_for

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
        {"cp": 2}, {"dp_shard": 2, "cp": 2}, {"dp_shard": 3, "cp": 2}, {"dp_replicate": 2, "dp_shard": 2, "cp": 2},
    ]),
    "cp, a ring": (RING, [{"cp": 2}, {"dp_shard": 2, "cp": 2}]),
    "sp": ({}, [{"sp": 2}, {"dp_shard": 2, "sp": 2}]),
    "pp": ({}, [{"dp_shard": 2, "pp": 2}, {"dp_shard": 3, "pp": 2}, {"dp_replicate": 2, "dp_shard": 2, "pp": 2}]),
    "pp, tied weights at both ends": (
        {"tied": True}, [{"dp_shard": 2, "pp": 2}, {"dp_shard": 3, "pp": 2}],
    ),
    "cp x tp": ({}, [{"cp": 2, "tp": 2}, {"dp_shard": 2, "cp": 2, "tp": 2}]),
}  # fmt: skip
QUICK = ("cp",)


def train(
    degrees: dict[str, int] | None, tied: bool = False, folder: str = "", resumes: bool = False, **options: Any
) -> list[Any]:
    """Train with accumulation, clipping, a schedule and random numbers; return hashes, the norms and the weights.

    Args:
        folder: a checkpoint, saved after two updates or, if the run ``resumes``, loaded at the beginning.
    """
    run = mesh_runs.accelerator(degrees, None if degrees is None else V2, batch_parts=NUM_PARTS, **options)
    set_seed(0)
    net: Any = LanguageModel(tied)
    # With the usual eps, AdamW makes whole steps of gradients that are rounding errors, which differ by processor.
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-4)
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.7)
    loader: Any = DataLoader(samples(170), batch_size=2, shuffle=True)  # 24 parts an update, and then a short one
    net, optimizer, schedule, loader = run.prepare(net, optimizer, schedule, loader)
    if resumes:
        run.load_state(folder)
    norms = []
    for words, following in loader:
        places = torch.arange(mesh_runs.LENGTH).repeat(len(words), 1)
        buffers = [words, following, places]
        with (
            run.maybe_context_parallel(buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(buffers)),
            run.accumulate(net),
        ):
            factor = 1 + 0.1 * torch.rand(())
            run.pipeline_step(net, ((words, places), following), lambda *given, f=factor: mean_loss(*given) * f)
            if run.sync_gradients:
                norms.append(run.clip_grad_norm_(net.parameters(), 0.5))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if folder and not resumes and run.sync_gradients and optimizer.num_updates == 2:
            run.save_state(folder)
    weights = run.get_state_dict(net).values()  # of the main process
    state = "" if "pp" in (degrees or {}) else state_of(run, net, optimizer)  # else the fingerprint has it
    return [
        [digest(norms), state, run.fingerprint(), optimizer.num_updates],
        norms,
        torch.cat([one.flatten() for one in weights]) if weights else None,
    ]


@cache
def alone(tied: bool) -> list[Any]:
    """What one process with the same parts computes."""
    return run_on_ranks(lambda: train(None, tied), 1, timeout_seconds=240)[0]


@pytest.mark.parametrize("name", LAYOUTS if IS_SLOW else QUICK)
def test_an_inner_layout_computes_the_same_bits_on_any_number_of_data_parallel_ranks(name: str) -> None:
    options, meshes = LAYOUTS[name]
    hashes = []
    for degrees in meshes if IS_SLOW else meshes[:2]:
        num_ranks = torch.tensor([*degrees.values()]).prod().item()
        found = run_on_ranks(lambda degrees=degrees: train(degrees, **options), int(num_ranks), timeout_seconds=240)
        assert all(one[0] == found[0][0] for one in found)
        for own, expected in zip(
            found[0][1:], alone(options.get("tied", False))[1:], strict=True
        ):  # another order of sums, the same numbers
            torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-4)
        hashes.append(found[0][0])
    assert hashes[0][3] == 4 and all(one == hashes[0] for one in hashes)


@slow_for("ten ranks train", "oracle")
@pytest.mark.parametrize("inner", ["pp", "tp"])
def test_a_run_is_resumed_on_another_number_of_data_parallel_ranks(inner: str, tmp_path: Path) -> None:
    folder, wide, small = str(tmp_path / "saved"), {"dp_shard": 3, inner: 2}, {"dp_shard": 2, inner: 2}
    whole = run_on_ranks(lambda: train(wide, folder=folder), 6, timeout_seconds=240)[0]
    resumed = run_on_ranks(lambda: train(small, folder=folder, resumes=True), 4, timeout_seconds=240)[0]
    assert resumed[0][2:] == whole[0][2:] and resumed[1] == whole[1][2:]


def normalised() -> None:
    run = mesh_runs.accelerator({"dp_shard": 2, "pp": 2}, {"fsdp_version": 2}, batch_parts=4)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
    run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))


def test_batch_norm_in_a_pipeline_is_refused() -> None:
    with pytest.raises(RankFailed, match="BatchNorm in a pipeline with batch_parts isn't built"):
        run_on_ranks(normalised, 4)
