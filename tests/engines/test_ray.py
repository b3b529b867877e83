"""Ray Train on a cluster of this machine alone."""

from __future__ import annotations

import pytest

from tests.engines.conftest import NASTY, Launch, needs, python_of

GIVEN = ("--launcher", "ray", "--ray_address", "local", "--cpu", "--num_processes", "2")


@pytest.fixture
def ray(launch: Launch) -> Launch:
    """A launcher in Ray's environment."""
    launch.python = python_of("ray")
    needs("unshare", "ip")
    # Ray listens on the network card; here there is none but the loopback.
    launch.prefix = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
    launch.variables |= {"RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_V2_ENABLED": "1"}
    return launch


def test_two_workers_meet_and_get_their_words_and_settings(ray: Launch) -> None:
    out = ray.folder / "out"
    out.mkdir()
    code, output = ray(*GIVEN, "--mixed_precision", "bf16", "who.py", "--out", str(out), *NASTY, timeout=280)
    assert code == 0, output
    ray.folder = out
    lines = ray.lines()
    assert [(line["rank"], line["size"], line["sum"]) for line in lines] == [(0, 2, 3.0), (1, 2, 3.0)]
    assert all(line["arguments"] == list(NASTY) and line["precision"] == "bf16" for line in lines)


def test_a_worker_that_dies_ends_the_run_with_a_code(ray: Launch) -> None:
    code, output = ray(*GIVEN, "who.py", "--fail_rank", "1", timeout=280)
    assert code == 1, output
    assert "First cause: rank 1 of 2" in output, output
