"""What Ray Train is told."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any

import pytest

from accelerate.errors import LaunchError, MissingDependency
from accelerate.guests.clusters import ray as engine
from accelerate.guests.clusters.ray import RayTrain
from accelerate.launch.choose import choose
from accelerate.launch.plan import LaunchPlan, Program
from tests.unit.launch.plans import CPU_HOST, GPU_HOST, NASTY, NASTY_PROGRAM, PROGRAM, settings


def plan(host: Any = GPU_HOST, program: Program = PROGRAM, **flags: Any) -> LaunchPlan:
    return RayTrain().plan(settings(launcher="ray", **flags), program, host)


def test_one_worker_a_rank_with_a_device_each() -> None:
    made = plan(num_machines=2, num_processes=8, ray_cpus_per_worker=3, max_restarts=2)
    options = made.engine_options
    assert (options["num_workers"], options["use_gpu"], options["max_failures"]) == (8, True, 2)
    assert options["resources_per_worker"] == {"CPU": 3}
    assert choose(settings(launcher="ray"), CPU_HOST).name == "ray"


def test_the_cpu_needs_no_device() -> None:
    assert plan(cpu=True, num_processes=2).engine_options["use_gpu"] is False


def test_the_cluster_is_named_by_flag_before_variable_before_this_machine() -> None:
    host = replace(CPU_HOST, environment={"RAY_ADDRESS": "ray://a:1"})
    assert plan(host, cpu=True, ray_address="ray://b:2").engine_options["address"] == "ray://b:2"
    assert plan(host, cpu=True).engine_options["address"] == "ray://a:1"
    assert plan(CPU_HOST, cpu=True).engine_options["address"] == "auto"


@pytest.mark.parametrize("kind", ["script", "module", "command"])
def test_words_stay_words(kind: Any) -> None:
    made = plan(program=replace(NASTY_PROGRAM, kind=kind), num_processes=2)
    assert made.argv[-len(NASTY) :] == NASTY
    assert "options" in made.show()


def test_without_ray_it_is_said_what_to_install() -> None:
    with pytest.raises(MissingDependency, match=r"ray.*accelerate\[ray\]"):
        RayTrain().run(plan(num_processes=2))


def test_a_cluster_that_isnt_there_is_named() -> None:
    class Ray:
        @staticmethod
        def init(**_: object) -> None:
            raise ConnectionError("nobody listens")

    with pytest.raises(LaunchError, match=r"no Ray cluster at auto: nobody listens.*ray start --head"):
        engine._connect(Ray, plan(CPU_HOST, cpu=True))


@pytest.mark.parametrize("form", ["{}:{}", "ray://{}:{}"])
def test_an_address_where_nobody_listens_is_known_at_once(form: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = form.format("127.0.0.1", port)
    with pytest.raises(LaunchError, match=rf"no Ray cluster at {address}.*refused"):
        engine._connect(object(), plan(CPU_HOST, cpu=True, ray_address=address))


def test_a_run_that_failed_has_a_code(capsys: pytest.CaptureFixture[str]) -> None:
    class Trainer:
        def fit(self) -> None:
            raise RuntimeError("worker\n  First cause: rank 1")

    assert engine._exit_code(Trainer()) == 1
    assert "First cause: rank 1" in capsys.readouterr().err
