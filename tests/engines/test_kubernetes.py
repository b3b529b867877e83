"""The official client of Kubernetes against an emulator of its API (kmock): objects are kept, no pod runs."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from tests.engines.conftest import NASTY, Launch, python_of

SERVER = """\
import asyncio, sys
import kmock

async def main():
    async with kmock.KubernetesEmulator() as emulator, kmock.Server(emulator) as server:
        kinds = {"kubeflow.org/v1/pytorchjobs": "PyTorchJob", "jobset.x-k8s.io/v1alpha2/jobsets": "JobSet"}
        for name, kind in kinds.items():
            emulator.resources[name] = {"kind": kind, "namespaced": True, "verbs": ["create", "get", "list"]}
        print(str(server.url).rstrip("/"), flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""
FETCH = """\
import json, sys
from kubernetes import client, config

config.load_kube_config()
found = client.CustomObjectsApi().get_namespaced_custom_object(*sys.argv[1:])
print(json.dumps(found))
"""
GIVEN = ("--launcher", "kubernetes", "--cpu", "--num_machines", "2", "--num_processes", "4", "--k8s_image", "image:1")


@pytest.fixture
def cluster(launch: Launch, children: Callable[..., Any]) -> Launch:
    """A launcher whose kubeconfig names the emulator."""
    launch.python = python_of("kubernetes")
    log = launch.folder / "server.txt"
    with log.open("w") as file:
        children(launch.python, "-c", SERVER, stdout=file, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 30
    while "http" not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    configuration = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "clusters": [{"name": "c", "cluster": {"server": log.read_text().split()[-1]}}],
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
        "users": [{"name": "u", "user": {}}],
    }
    (launch.folder / "kubeconfig").write_text(yaml.safe_dump(configuration))
    launch.variables["KUBECONFIG"] = str(launch.folder / "kubeconfig")
    return launch


def fetched(cluster: Launch, *address: str) -> dict[str, Any]:
    words = [cluster.python, "-c", FETCH, *address]
    return json.loads(
        subprocess.run(words, env=cluster.environment(), capture_output=True, text=True, check=True).stdout
    )


def test_a_pytorchjob_is_created_as_the_manifest_says(cluster: Launch) -> None:
    code, output = cluster(*GIVEN, "--k8s_manifest", "job.yaml", "who.py", *NASTY)
    assert code == 0, output
    assert "PyTorchJob default/who was created." in output
    job = fetched(cluster, "kubeflow.org", "v1", "default", "pytorchjobs", "who")
    assert job == yaml.safe_load((cluster.folder / "job.yaml").read_text())
    assert job["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] == 1


def test_a_jobset_is_created_in_its_namespace(cluster: Launch) -> None:
    given = ("--k8s_kind", "JobSet", "--k8s_namespace", "research", "--k8s_name", "a-run")
    code, output = cluster(*GIVEN, *given, "who.py")
    assert code == 0, output
    job = fetched(cluster, "jobset.x-k8s.io", "v1alpha2", "research", "jobsets", "a-run")
    assert job["spec"]["replicatedJobs"][0]["template"]["spec"]["completions"] == 2


def test_a_name_that_is_taken_is_refused(cluster: Launch) -> None:
    assert cluster(*GIVEN, "who.py")[0] == 0
    code, output = cluster(*GIVEN, "who.py")
    assert code == 2 and "409 Conflict" in output and "--k8s_name" in output, output


def test_a_dry_run_writes_the_manifest_and_submits_nothing(cluster: Launch) -> None:
    code, output = cluster(*GIVEN, "--k8s_manifest", "job.yaml", "--dry-run", "who.py")
    assert code == 0 and (cluster.folder / "job.yaml").exists(), output
    with pytest.raises(subprocess.CalledProcessError):
        fetched(cluster, "kubeflow.org", "v1", "default", "pytorchjobs", "who")
