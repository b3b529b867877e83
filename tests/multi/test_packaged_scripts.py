"""The scripts that come with the package, as `accelerate launch` would run them on two processes."""

from __future__ import annotations

import importlib

import pytest

from tests.ranks import run_on_ranks

SCRIPTS = (
    "test_ops",
    "test_sync",
    "test_distributed_data_loop",
    "test_ddp_comm_hook",
    "test_cli",
    "test_merge_weights",
    "external_deps.test_metrics",
    "external_deps.test_checkpointing",
    "external_deps.test_performance",
    "external_deps.test_peak_memory_usage",
    "external_deps.test_pippy",
    "external_deps.test_ds_alst_ulysses_sp",
)


def _run(script: str) -> str:
    importlib.import_module(f"accelerate.test_utils.scripts.{script}").main()
    return "passed"


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_packaged_script_passes_on_two_processes(script: str) -> None:
    assert run_on_ranks(_run, 2, script) == ["passed", "passed"]
