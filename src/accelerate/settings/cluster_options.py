"""How a cluster's own engine starts the run: Slurm, Kubernetes, Ray; and the look before the start."""

from __future__ import annotations

from dataclasses import dataclass

from accelerate.settings.option import OptionGroup, option

LAUNCHERS = (
    "local",
    "torchrun",
    "mpirun",
    "deepspeed",
    "slurm",
    "kubernetes",
    "ray",
)
MPI_FLAVORS = ("openmpi", "mpich", "intel", "mvapich")
KUBERNETES_KINDS = ("PyTorchJob", "JobSet")


@dataclass
class ClusterOptions(OptionGroup, title="Clusters", key="", flag=""):
    """Who starts the processes."""

    launcher: str | None = option(
        None,
        "Who starts the processes: local, torchrun, mpirun, deepspeed, slurm, kubernetes or ray; follows from the "
        "other settings when it is not given.",
        choices=LAUNCHERS,
    )
    mpi_flavor: str | None = option(
        None,
        "The MPI that mpirun belongs to; it is asked (`mpirun --version`) when this is not given.",
        section="mpirun_config",
        choices=MPI_FLAVORS,
    )
    preflight: bool = option(
        False,
        "Start a check of the machines instead of the script: ranks, devices, versions, clocks, disk, bandwidth.",
        key=None,
        switch=True,
    )


@dataclass
class SlurmOptions(OptionGroup, title="Slurm", section="slurm_config", key="slurm_", flag="slurm_"):
    """What the batch job asks for, when it is submitted from outside of an allocation."""

    job_name: str | None = option(None, "The name of the job; the script's name when it is not given.")
    partition: str | None = option(None, "The partition.")
    account: str | None = option(None, "The account that is charged.")
    qos: str | None = option(None, "The quality of service.")
    time: str | None = option(None, "The time limit, such as 2-00:00:00.")
    cpus_per_task: int | None = option(None, "The cores of each process.", minimum=1)
    memory: str | None = option(None, "The memory of each node, such as 64G.")
    output: str | None = option(None, "The file of the job's output; Slurm's own default when it is not given.")
    arguments: list[str] | None = option(
        None,
        "One more argument of sbatch: --slurm_argument=--constraint=a100 (may be given several times).",
        flag="--slurm_argument",
        repeat=True,
    )
    setup: list[str] | None = option(
        None,
        "A shell line that the batch script runs first, such as `module load cuda` (may be given several times).",
        repeat=True,
    )
    script: str | None = option(None, "Where the batch script is written; <job name>.sbatch when it is not given.")
    wait: bool = option(False, "Wait for the end of the job, and end with its exit code.", switch=True)


@dataclass
class KubernetesOptions(OptionGroup, title="Kubernetes", section="kubernetes_config", key="kubernetes_", flag="k8s_"):
    """The job that a cluster's operator runs."""

    kind: str = option("PyTorchJob", "The kind of object: of Kubeflow, or a JobSet.", choices=KUBERNETES_KINDS)
    name: str | None = option(None, "The name of the job; the script's name when it is not given.")
    namespace: str = option("default", "The namespace of the job.")
    image: str | None = option(None, "The container image, which holds the script.")
    python: str = option("python", "The Python interpreter of the image.")
    working_dir: str | None = option(None, "The folder in the image that the script's path starts from.")
    device_resource: str | None = option(
        None, "The name of the devices, such as nvidia.com/gpu; none are asked for on the CPU."
    )
    cpu: str | None = option(None, "The cores of each machine, such as 8.")
    memory: str | None = option(None, "The memory of each machine, such as 64Gi.")
    service_account: str | None = option(None, "The service account of the pods.")
    context: str | None = option(None, "The context of the kubeconfig; the current one when it is not given.")
    manifest: str | None = option(None, "Also write the manifest to this file; with --dry-run, only that.")


@dataclass
class RayOptions(OptionGroup, title="Ray", section="ray_config", key="ray_", flag="ray_"):
    """Which Ray cluster, and what each of its workers gets."""

    address: str | None = option(
        None, "The address of the cluster; the one of RAY_ADDRESS, or of this machine, when it is not given."
    )
    cpus_per_worker: int | None = option(None, "The cores of each process.", minimum=1)
    storage_path: str | None = option(None, "Where Ray Train keeps what it knows of the run.")
    upload: bool = option(True, "Send this folder to the workers; say false where all machines have it.")
