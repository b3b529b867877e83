"""Manifests of Kubernetes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given

from accelerate.errors import MissingDependency, SettingError
from accelerate.guests.clusters.kubernetes import Kubernetes, escape
from accelerate.launch.choose import choose
from accelerate.launch.plan import LaunchPlan, Program
from accelerate.launch.preflight import Host
from tests.unit.launch.plans import CPU_HOST, GPU_HOST, NASTY, PROGRAM, argument_lists, settings


def plan(program: Program = PROGRAM, host: Host = GPU_HOST, **flags: Any) -> LaunchPlan:
    chosen = settings(**{"launcher": "kubernetes", "k8s_image": "image:1", **flags})
    return Kubernetes().plan(chosen, program, host)


def manifest(made: LaunchPlan) -> dict[str, Any]:
    (text,) = made.files.values()
    return yaml.safe_load(text)


def container(job: dict[str, Any]) -> dict[str, Any]:
    spec = job["spec"]
    if job["kind"] == "JobSet":
        template = spec["replicatedJobs"][0]["template"]["spec"]["template"]
    else:
        template = spec["pytorchReplicaSpecs"]["Master"]["template"]
    return template["spec"]["containers"][0]


def expanded(text: str, variables: dict[str, str]) -> str:
    """The text as Kubernetes hands it to a container."""

    def replace(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else variables.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", replace, text)


def test_a_pytorchjob_has_a_master_and_workers_with_an_agent_each() -> None:
    made = plan(num_machines=3, num_processes=12, k8s_namespace="research", k8s_cpu="8", k8s_memory="64Gi")
    job = manifest(made)
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert job["metadata"] == {"name": "train", "namespace": "research"}
    assert job["spec"]["nprocPerNode"] == "4"
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert (replicas["Master"]["replicas"], replicas["Worker"]["replicas"]) == (1, 2)
    pod = container(job)
    assert pod["name"] == "pytorch" and pod["image"] == "image:1"
    assert pod["resources"]["limits"] == {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": 4}
    values = dict(zip(pod["command"], pod["command"][1:], strict=False))
    expected = {"--nnodes": "3", "--nproc-per-node": "4", "--node-rank": "$(RANK)", "--master-addr": "$(MASTER_ADDR)"}
    assert expected.items() <= values.items()
    assert pod["command"][-3:] == ["train.py", "--lr", "1"]
    assert {"name": "ACCELERATE_MIXED_PRECISION", "value": "no"} in pod["env"]
    assert replicas["Worker"]["template"] == replicas["Master"]["template"]
    assert "&id" not in next(iter(made.files.values()))


def test_a_jobset_has_an_indexed_job_that_knows_its_first_pod() -> None:
    job = manifest(plan(num_machines=3, num_processes=12, k8s_kind="JobSet", k8s_name="run-1", max_restarts=2))
    inner = job["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (inner["parallelism"], inner["completions"], inner["completionMode"]) == (3, 3, "Indexed")
    values = dict(zip(container(job)["command"], container(job)["command"][1:], strict=False))
    assert values["--node-rank"] == "$(JOB_COMPLETION_INDEX)"
    assert values["--master-addr"] == "run-1-workers-0-0.run-1" and values["--max-restarts"] == "2"
    assert job["spec"]["failurePolicy"] == {"maxRestarts": 2}


def test_one_machine_has_no_workers_and_the_cpu_asks_for_no_devices() -> None:
    job = manifest(plan(cpu=True, num_processes=2))
    assert list(job["spec"]["pytorchReplicaSpecs"]) == ["Master"]
    assert "resources" not in container(job)


def test_optional_parts_are_there_when_asked_for() -> None:
    flags = {"k8s_device_resource": "amd.com/gpu", "k8s_service_account": "me", "k8s_working_dir": "/app"}
    job = manifest(plan(num_processes=2, k8s_python="python3.12", **flags))
    assert container(job)["workingDir"] == "/app" and container(job)["command"][0] == "python3.12"
    assert container(job)["resources"]["limits"] == {"amd.com/gpu": 2}
    spec = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    assert spec["serviceAccountName"] == "me"


def test_this_machines_threads_are_not_the_pods() -> None:
    assert "OMP_NUM_THREADS" not in plan(num_processes=2).environment
    assert plan(num_processes=2, num_cpu_threads_per_process=3).environment["OMP_NUM_THREADS"] == "3"


def test_without_an_image_there_is_no_job() -> None:
    with pytest.raises(SettingError, match="--k8s_image"):
        plan(k8s_image=None)


@pytest.mark.parametrize("name", ["A", "-a", "a_b", "a" * 50, "1a", "a\nb: c"])
def test_a_name_that_kubernetes_refuses_is_refused_here(name: str) -> None:
    with pytest.raises(SettingError, match="no name that Kubernetes accepts"):
        plan(k8s_name=name)


def test_a_job_is_called_like_its_script() -> None:
    assert manifest(plan(Program("dir/My_Script.v2.py"), num_processes=1))["metadata"]["name"] == "my-script-v2"
    assert manifest(plan(Program("a.b.Train", kind="module"), num_processes=1))["metadata"]["name"] == "train"
    assert manifest(plan(Program("9.py"), num_processes=1))["metadata"]["name"] == "job-9"


def test_only_who_asks_for_kubernetes_gets_it() -> None:
    assert choose(settings(launcher="kubernetes"), CPU_HOST).name == "kubernetes"
    with pytest.raises(SettingError, match=r"--k8s_image x.*--launcher kubernetes"):
        settings(k8s_image="x")


def test_a_dry_run_writes_the_manifest_only_where_it_was_asked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Kubernetes().dry_run(plan(num_processes=2))
    assert list(tmp_path.iterdir()) == [] and "kind: PyTorchJob" in capsys.readouterr().out
    made = plan(num_processes=2, k8s_manifest="jobs/a.yaml")
    Kubernetes().dry_run(made)
    assert yaml.safe_load((tmp_path / "jobs" / "a.yaml").read_text()) == manifest(made)


def test_without_the_client_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "kubernetes", None)
    monkeypatch.setitem(sys.modules, "kubernetes.client", None)
    with pytest.raises(MissingDependency, match="kubernetes"):
        Kubernetes().run(plan(num_processes=2))


@given(argument_lists)
def test_every_argument_arrives_as_it_was(arguments: list[str]) -> None:
    made = plan(Program("train.py", tuple(arguments)), num_processes=2)
    command = container(manifest(made))["command"]
    variables = {"RANK": "7", "HOME": "/root", "MASTER_ADDR": "m"}
    arrived = [expanded(word, variables) for word in command]
    assert arrived[len(arrived) - len(arguments) :] == arguments
    assert "7" in arrived  # what is meant to be replaced is replaced


@pytest.mark.parametrize("text", [*NASTY, "$$", "$(HOME)", "$$(HOME)", "a$", "$$$(x"])
def test_kubernetes_replaces_nothing_in_a_value(text: str) -> None:
    assert expanded(escape(text), {"HOME": "/root"}) == text


def test_pods_that_save_on_signals_have_the_time_for_it_and_start_again() -> None:
    job = manifest(plan(num_machines=2, num_processes=8, save_on_signal=True, grace_seconds=120, max_restarts=20))
    assert job["spec"]["runPolicy"]["backoffLimit"] == 20
    for replica in job["spec"]["pytorchReplicaSpecs"].values():
        spec = replica["template"]["spec"]
        assert spec["terminationGracePeriodSeconds"] == 120 and replica["restartPolicy"] == "OnFailure"
        variables = {variable["name"]: variable["value"] for variable in spec["containers"][0]["env"]}
        assert variables["ACCELERATE_SAVE_ON_SIGNAL"] == "true" and variables["PET_SHUTDOWN_TIMEOUT"] == "120"
        assert "SIGUSR1" in variables["PET_SIGNALS_TO_HANDLE"]


@pytest.mark.parametrize("kind", ["PyTorchJob", "JobSet"])
def test_pods_that_save_but_may_not_start_again_are_refused(kind: str) -> None:
    with pytest.raises(SettingError, match=r"--save_on_signal.* exit code 75, .* Set --max_restarts to the number"):
        plan(k8s_kind=kind, num_processes=2, save_on_signal=True)
    spec = manifest(plan(k8s_kind="JobSet", num_processes=2, save_on_signal=True, max_restarts=3))["spec"]
    assert spec["failurePolicy"] == {"maxRestarts": 3}


@pytest.mark.parametrize(("restarts", "policy"), [(0, "Never"), (3, "OnFailure")])
def test_a_pytorchjob_starts_its_pods_only_so_often(restarts: int, policy: str) -> None:
    spec = manifest(plan(num_machines=2, num_processes=8, max_restarts=restarts))["spec"]
    assert spec["runPolicy"]["backoffLimit"] == restarts
    assert {replica["restartPolicy"] for replica in spec["pytorchReplicaSpecs"].values()} == {policy}
