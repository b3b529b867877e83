"""Ray Train on a cluster of this machine alone."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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


@pytest.fixture
def cluster(ray: Launch, children: Callable[..., Any]) -> Iterator[Launch]:
    """A launcher beside a cluster that was started by itself, on a host without a network."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root here")
    name = "acc-ray"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode != 0:
        pytest.skip("this system doesn't allow network namespaces")
    try:
        subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        ray.prefix = ("ip", "netns", "exec", name)
        # Ray lets nobody in without the token that the cluster was started with.
        ray.variables |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "t" * 40}
        command = str(Path(ray.python).with_name("ray"))
        head = (
            "start",
            "--head",
            "--block",
            "--node-ip-address=127.0.0.1",
            "--num-cpus=4",
            "--include-dashboard=false",
        )
        with (ray.folder / "head.txt").open("w") as file:
            children(*ray.prefix, command, *head, env=ray.environment(), stdout=file, stderr=file)
        deadline = time.monotonic() + 90
        while "Ray runtime started" not in (ray.folder / "head.txt").read_text():
            assert time.monotonic() < deadline, (ray.folder / "head.txt").read_text()
            time.sleep(0.5)
        yield ray
    finally:
        left = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
        for pid in map(int, left):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        subprocess.run(["ip", "netns", "delete", name], check=False)


def test_a_cluster_that_is_there_runs_the_program_as_well(cluster: Launch) -> None:
    out = cluster.folder / "out"
    out.mkdir()
    given = ("--launcher", "ray", "--ray_address", "127.0.0.1:6379", "--cpu", "--num_processes", "2")
    code, output = cluster(*given, "who.py", "--out", str(out), timeout=280)
    assert code == 0, output
    cluster.folder = out
    assert [(line["rank"], line["sum"]) for line in cluster.lines()] == [(0, 3.0), (1, 3.0)]


def test_a_cluster_that_isnt_there_is_named(ray: Launch) -> None:
    given = ("--launcher", "ray", "--ray_address", "127.0.0.1:6399", "--cpu", "--num_processes", "2")
    code, output = ray(*given, "who.py", timeout=200)
    assert code == 2 and "There is no Ray cluster at 127.0.0.1:6399" in output, output
