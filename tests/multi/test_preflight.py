"""The check of the machines on real ranks."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from accelerate.launch import preflight as probe
from tests.ranks import run_on_ranks


def test_ranks_that_agree_end_well(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--folder", str(tmp_path / "not there yet"), "--megabytes", "1"]
    assert run_on_ranks(lambda: probe.main(words)) == [0, 0]
    out = capfd.readouterr().out
    assert "rendezvous (world size 2)" in out and "all-reduce of 1 MiB" in out and "no contradictions" in out


def test_a_rank_that_differs_is_named_and_every_rank_ends_with_a_code(capfd: pytest.CaptureFixture[str]) -> None:
    def differ() -> int:
        import os

        if os.environ["RANK"] == "1":
            platform.python_version = lambda: "3.9.0"
        return probe.main(["--megabytes", "1"])

    assert run_on_ranks(differ) == [3, 3]
    assert "contradiction: Versions of python differ" in capfd.readouterr().out


def test_clocks_of_one_machine_agree() -> None:
    def ahead() -> float:
        from accelerate.distributed.world import join_world

        return probe.clock_ahead(join_world(cpu=True))

    assert all(abs(seconds) < 5 for seconds in run_on_ranks(ahead))
