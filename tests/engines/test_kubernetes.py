"""The official client of Kubernetes against an emulator of its API (kmock): objects are kept, no pod runs.

What a cluster would refuse, the emulator keeps: manifests are held against the schemas of the API too.
"""

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
READ = """\
import sys
import kubernetes_validate, yaml

job = yaml.safe_load(sys.stdin)
if job["kind"] == "JobSet":
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

    read = JobsetV1alpha2JobSet.from_dict(job).to_dict()
    known = [{"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "one"}, **replicated["template"]}
             for replicated in job["spec"]["replicatedJobs"]]
else:
    from kubeflow.training import KubeflowOrgV1PyTorchJob
    from kubeflow.training.api_client import ApiClient

    client = ApiClient()
    read = client.sanitize_for_serialization(client._ApiClient__deserialize(job, KubeflowOrgV1PyTorchJob))
    known = [{"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "one"}, "template": replicas["template"]}
             for replicas in job["spec"]["pytorchReplicaSpecs"].values()]

def keys(value):
    if isinstance(value, dict):
        return {key: keys(each) for key, each in value.items()}
    return [keys(each) for each in value] if isinstance(value, list) else None

assert keys(read) == keys(job), "a key that the API doesn't know"
for each in known:
    kubernetes_validate.validate(each, "1.37", strict=True)
print("read", job["kind"], "with", len(known))
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


def read_by_the_api(manifest: str) -> subprocess.CompletedProcess[str]:
    words = [python_of("kubernetes_schemas"), "-c", READ]
    return subprocess.run(words, input=manifest, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("kind", ["PyTorchJob", "JobSet"])
def test_the_schemas_of_the_api_take_a_manifest_of_2048_hosts(launch: Launch, kind: str) -> None:
    given = ("--launcher", "kubernetes", "--num_machines", "2048", "--k8s_image", "image:1", "--k8s_kind", kind)
    code, output = launch(*given, "--num_processes", "16384", "--k8s_manifest", "job.yaml", "--dry-run", "who.py")
    assert code == 0, output
    manifest = (launch.folder / "job.yaml").read_text()
    done = read_by_the_api(manifest)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["read", kind, "with", "2" if kind == "PyTorchJob" else "1"]
    for wrong in (manifest.replace("mountPath", "mountpath"), manifest.replace("restartPolicy", "restartpolicy")):
        assert wrong != manifest and read_by_the_api(wrong).returncode != 0
