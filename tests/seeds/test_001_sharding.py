"""The blog post that introduced the library: sharded data parallel, which it names by the library of its day."""

from __future__ import annotations

import pytest

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from tests.ranks import run_on_ranks
from tests.seeds.two_epochs import losses_of

row = pytest.mark.row


def replicas() -> tuple[str, list[float]]:
    accelerator = Accelerator(cpu=True)
    return accelerator.distributed_type.value, losses_of(accelerator)


def shards() -> tuple[str, list[float]]:
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    return accelerator.distributed_type.value, losses_of(accelerator)


@row("001-04")
def test_shards_train_like_replicas() -> None:
    for (kind, ours), (_, theirs) in zip(run_on_ranks(shards, 2), run_on_ranks(replicas, 2), strict=True):
        assert kind == "FSDP" and ours == pytest.approx(theirs, abs=1e-6)
