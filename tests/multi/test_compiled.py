"""Compiled models over ranks train like a model that isn't compiled, in one process."""

from __future__ import annotations

from typing import Any

import pytest

from accelerate.utils import TorchDynamoPlugin
from tests.ranks import run_on_ranks
from tests.sharded_runs import BLOCKS, assert_same_run, train
from tests.slow import slow_for

STRATEGIES: dict[str, dict[str, Any] | None] = {
    "ddp": None,
    "fsdp1": {"fsdp_version": 1, "use_orig_params": True, **BLOCKS},
    "fsdp1-flat": {"fsdp_version": 1, **BLOCKS},
    "fsdp2": {"fsdp_version": 2, **BLOCKS},
}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """One process, not compiled."""
    return run_on_ranks(train, 1)[0]


def compiled(options: dict[str, Any] | None, by_region: bool) -> dict[str, Any]:
    plugin = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=by_region)
    return train(options, accelerator={"dynamo_plugin": plugin})


SLOW = slow_for("compiles for seconds")
CASES = [
    pytest.param(name, by_region, id=f"{name}-regions" if by_region else name, marks=[SLOW] if slow else [])
    for name in STRATEGIES
    for by_region in (False, True)
    for slow in [by_region or name != "ddp"]  # shards: test_fsdp2.py
]


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself
@pytest.mark.parametrize(("name", "by_region"), CASES)
def test_two_compiled_ranks_train_like_one(name: str, by_region: bool, alone: dict[str, Any]) -> None:
    assert_same_run(run_on_ranks(compiled, 2, STRATEGIES[name], by_region, timeout_seconds=110)[0], alone)
