"""Launch on Kubernetes with a PyTorchJob of Kubeflow or a JobSet; each pod runs one torch agent.

The script is part of the image. Kubernetes replaces ``$(NAME)`` in commands and values, so every ``$`` of the user's is
doubled, and Kubernetes turns it back into one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, final

from ...errors import LaunchError, SettingError
from ...launch.engine import LaunchEngine, is_cpu_run
from ...launch.plan import LaunchPlan, Program
from ...launch.remote import job_name, spread, write_files
from ...ports import DEFAULT_PORT
from ...settings.preemption import PREEMPTED_EXIT_CODE
from .slurm import agent_command, environment_elsewhere

if TYPE_CHECKING:
    from ...launch.preflight import Host
    from ...settings.tree import Settings

#: Kind -> (group, version, plural) of the API.
APIS: Final = {
    "PyTorchJob": ("kubeflow.org", "v1", "pytorchjobs"),
    "JobSet": ("jobset.x-k8s.io", "v1alpha2", "jobsets"),
}
#: The variable with the pod's rank, by the operator's kind, on the agents' command line; Kubernetes expands it.
_MACHINE_RANK: Final = {"PyTorchJob": "$(RANK)", "JobSet": "$(JOB_COMPLETION_INDEX)"}
_DNS_NAME: Final = r"[a-z]([-a-z0-9]{0,47}[a-z0-9])?"


@final
class Kubernetes(LaunchEngine):
    """A PyTorchJob or JobSet with one pod per machine."""

    name = "kubernetes"

    def suits(self, settings: Settings, host: Host) -> bool:
        """Return whether Kubernetes was selected."""
        return settings.cluster.launcher == "kubernetes"

    def plan(self, settings: Settings, program: Program, host: Host) -> LaunchPlan:
        """Plan the job's manifest."""
        import yaml

        options, launch = settings.kubernetes, settings.launch
        if options.image is None:
            raise SettingError("A Kubernetes job needs an image that holds the script: give --k8s_image.")
        name = options.name or job_name(program)
        if not re.fullmatch(_DNS_NAME, name):
            raise SettingError(
                f"{settings.quote('kubernetes.name')} is no name that Kubernetes accepts. Give at most 49 small "
                "letters, digits and hyphens, with a letter first."
            )
        _refuse_saves_without_restarts(settings)
        _, per_pod = spread(settings, host, launch.num_machines)
        environment = environment_elsewhere(settings, host, per_pod)
        command = _agent(settings, program, per_pod, name)
        pod = _pod(settings, environment, command, per_pod)
        manifest = _manifest(settings, name, pod, per_pod)
        path = options.manifest or f"{name}.yaml"
        return LaunchPlan(
            engine=f"{self.name}: a {options.kind} of {per_pod} processes in each of {launch.num_machines} pod(s)",
            argv=tuple(command),
            environment=environment,
            rendezvous=f"pod 0 of {name}",
            engine_options={
                "namespace": options.namespace,
                "context": options.context or "",
                "written": options.manifest is not None,
            },
            files={path: yaml.safe_dump(manifest, sort_keys=False, width=100)},
            notes=(f"`kubectl get {APIS[options.kind][2]} {name} -n {options.namespace}` shows the job",),
        )

    def dry_run(self, plan: LaunchPlan) -> None:
        """Print the plan, and write the manifest to ``--k8s_manifest``."""
        if plan.engine_options["written"]:
            write_files(plan)
        print(plan.show())

    def run(self, plan: LaunchPlan) -> int:
        """Submit the job and return 0.

        Raises:
            MissingDependency: the official client isn't installed.
            LaunchError: the cluster rejected the job, or can't be reached.
        """
        import yaml

        if plan.engine_options["written"]:
            write_files(plan)
        (text,) = plan.files.values()
        submit(yaml.safe_load(text), context=str(plan.engine_options["context"]) or None)
        return 0


def submit(manifest: dict[str, Any], *, context: str | None = None) -> None:
    """Create the object in the cluster and print its name."""
    from ...optional import require

    client = require("kubernetes.client", purpose="Submitting a job to Kubernetes")
    config = require("kubernetes.config")
    kind, metadata = manifest["kind"], manifest["metadata"]
    group, version, plural = APIS[kind]
    try:
        if context is None:
            try:
                config.load_incluster_config()
            except config.ConfigException:  # not inside of a pod
                config.load_kube_config()
        else:
            config.load_kube_config(context=context)
        client.CustomObjectsApi().create_namespaced_custom_object(
            group, version, metadata["namespace"], plural, manifest
        )
    except config.ConfigException as error:
        raise LaunchError(f"No Kubernetes cluster is configured here: {error}") from error
    except client.ApiException as error:
        hint = {
            404: f"Is the operator that knows {kind} installed, and the namespace there?",
            409: "A job of this name is there already: give another --k8s_name, or delete it.",
        }.get(error.status, "")
        reason = f"{error.status} {error.reason}"
        raise LaunchError(f"Kubernetes refused {kind} {metadata['name']}: {reason}. {hint}".strip()) from error
    print(f"{kind} {metadata['namespace']}/{metadata['name']} was created.")


def _refuse_saves_without_restarts(settings: Settings) -> None:
    """Raise if pods save and exit with code 75 but have no restarts: Kubernetes wouldn't start them again.

    Raises:
        SettingError: the job saves on signals, but has no restarts.
    """
    if settings.preemption.save_on_signal and not settings.launch.max_restarts:
        raise SettingError(
            f"{settings.quote('preemption.save_on_signal')} and {settings.quote('launch.max_restarts')}: pods that "
            f"saved end with exit code {PREEMPTED_EXIT_CODE}, and the job fails if it may not restart them. "
            "Set --max_restarts to the number of restarts."
        )


def escape(text: str) -> str:
    """Escape the text so that Kubernetes's expansion of ``$(NAME)`` gives the original back."""
    return text.replace("$", "$$")


def _agent(settings: Settings, program: Program, per_pod: int, name: str) -> list[str]:
    """Return the command line of each pod: torch's agent, which starts and restarts the ranks."""
    launch, kind = settings.launch, settings.kubernetes.kind
    port = launch.main_process_port or DEFAULT_PORT
    first, port_there = "$(MASTER_ADDR)", "$(MASTER_PORT)"
    if kind == "JobSet":
        first, port_there = f"{name}-workers-0-0.{name}", str(port)  # the stable DNS name of its first pod
    options = {
        "nnodes": str(launch.num_machines),
        "nproc-per-node": str(per_pod),
        "node-rank": _MACHINE_RANK[kind],
        "master-addr": first,
        "master-port": port_there,
        "max-restarts": str(launch.max_restarts),
        "monitor-interval": str(launch.monitor_interval),
    }
    escaped = replace(program, target=escape(program.target), arguments=tuple(map(escape, program.arguments)))
    return agent_command(settings.kubernetes.python, options, escaped)


def _pod(settings: Settings, environment: dict[str, str], command: Sequence[str], per_pod: int) -> dict[str, Any]:
    """Return the template of the pods."""
    options = settings.kubernetes
    limits: dict[str, object] = {
        key: value for key, value in (("cpu", options.cpu), ("memory", options.memory)) if value
    }
    if not is_cpu_run(settings):
        limits[options.device_resource or "nvidia.com/gpu"] = per_pod
    container: dict[str, Any] = {
        "name": "pytorch",  # Kubeflow looks for this name
        "image": options.image,
        "command": list(command),
        "env": [{"name": name, "value": escape(value)} for name, value in sorted(environment.items())],
        # Workers of a data loader pass batches through shared memory; a container's default is 64 MB.
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    if options.working_dir is not None:
        container["workingDir"] = options.working_dir
    if limits:
        container["resources"] = {"limits": limits}
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "containers": [container],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }
    if settings.preemption.save_on_signal:
        spec["terminationGracePeriodSeconds"] = math.ceil(settings.preemption.grace_seconds)
    if options.service_account is not None:
        spec["serviceAccountName"] = options.service_account
    return {"spec": spec}


def _manifest(settings: Settings, name: str, pod: dict[str, Any], per_pod: int) -> dict[str, Any]:
    options, machines = settings.kubernetes, settings.launch.num_machines
    group, version, _ = APIS[options.kind]
    head = {
        "apiVersion": f"{group}/{version}",
        "kind": options.kind,
        "metadata": {"name": name, "namespace": options.namespace},
    }
    if options.kind == "JobSet":
        job = {
            "parallelism": machines,
            "completions": machines,
            "completionMode": "Indexed",
            "backoffLimit": 0,
            "template": pod,
        }
        workers = {"name": "workers", "replicas": 1, "template": {"spec": job}}
        # All pods restart together if one of them is lost with its agent.
        failures = {"maxRestarts": settings.launch.max_restarts}
        return {**head, "spec": {"failurePolicy": failures, "replicatedJobs": [workers]}}
    # Kubeflow's own restart policy overrides the template's.
    restarts = "OnFailure" if settings.launch.max_restarts else "Never"
    replicas = {"Master": {"replicas": 1, "restartPolicy": restarts, "template": pod}}
    if machines > 1:
        # A copy, so that the YAML repeats it instead of using an alias.
        replicas["Worker"] = {"replicas": machines - 1, "restartPolicy": restarts, "template": deepcopy(pod)}
    # Without this limit, Kubeflow would restart pods with an ordinary bug forever.
    policy = {"cleanPodPolicy": "None", "backoffLimit": settings.launch.max_restarts}
    spec = {"nprocPerNode": str(per_pod), "runPolicy": policy, "pytorchReplicaSpecs": replicas}
    return {**head, "spec": spec}
