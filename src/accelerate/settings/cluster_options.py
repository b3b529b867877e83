"""Options of clusters: Slurm, Kubernetes, Ray, SageMaker, TPU pods; and the preflight check."""

from __future__ import annotations

from .labels import SageMakerDistributedType
from .option import OptionGroup, option, option_group

LAUNCHERS = ("local", "torchrun", "mpirun", "deepspeed", "slurm", "kubernetes", "ray")
MPI_FLAVORS = ("openmpi", "mpich", "intel", "mvapich")
KUBERNETES_KINDS = ("PyTorchJob", "JobSet")


@option_group
class ClusterOptions(OptionGroup, title="Clusters", key="", flag=""):
    """The launcher that starts the processes."""

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


@option_group
class SlurmOptions(OptionGroup, title="Slurm", section="slurm_config", key="slurm_", flag="slurm_"):
    """The resources of the batch job, when it is submitted from outside of an allocation."""

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


@option_group
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


@option_group
class RayOptions(OptionGroup, title="Ray", section="ray_config", key="ray_", flag="ray_"):
    """The Ray cluster, and the resources of each of its workers."""

    address: str | None = option(
        None, "The address of the cluster; the one of RAY_ADDRESS, or of this machine, when it is not given."
    )
    cpus_per_worker: int | None = option(None, "The cores of each process.", minimum=1)
    storage_path: str | None = option(None, "The folder for Ray Train's records of the run.")
    upload: bool = option(True, "Send this folder to the workers; say false where all machines have it.")


# --------------------------------------------------------------------------------------------------
# Options of SageMaker jobs


@option_group
class SageMakerOptions(OptionGroup, title="AWS", key=""):
    """The machines and the rights of a SageMaker job."""

    distributed_type: str = option(
        "NO",
        "How the job is distributed.",
        env="ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE",
        choices=SageMakerDistributedType,
        question="What is the distributed mode?",
    )
    ec2_instance_type: str | None = option(
        None, "The EC2 instance type.", question="Which EC2 instance type do you want to use for your training?"
    )
    iam_role_name: str | None = option(
        None, "The IAM role that the job assumes.", question="What is the name of the IAM role for SageMaker?"
    )
    profile: str | None = option(None, "The AWS profile.", question="Enter your AWS profile name")
    region: str = option("us-east-1", "The AWS region.", question="Enter your AWS region")
    image_uri: str | None = option(None, "A custom Docker image.", question="Enter your Docker image")
    num_machines: int = option(
        1, "The number of machines.", minimum=1, question="How many machines do you want to use?"
    )
    gpu_ids: str = option("all", "The devices to use on each machine.")
    base_job_name: str = option("accelerate-sagemaker-1", "The first part of the job's name.")
    pytorch_version: str = option("2.8.0", "The PyTorch version of the job's image.")
    transformers_version: str = option("4.56.2", "The Transformers version of the job's image.")
    py_version: str = option("py312", "The Python version of the job's image.")
    sagemaker_inputs_file: str | None = option(
        None,
        "A TSV file of input channels: name, location.",
        question="Enter the path to the SageMaker inputs TSV file with columns (channel_name, data_location)",
    )
    sagemaker_metrics_file: str | None = option(
        None,
        "A TSV file of metrics: name, regular expression.",
        question="Enter the path to the SageMaker metrics TSV file with columns (metric_name, metric_regex)",
    )
    additional_args: dict[str, object] | None = option(None, "More arguments of the SageMaker estimator.")
    aws_access_key_id: str | None = option(
        None, "The AWS access key of the job.", key=None, flag="--aws_access_key_id", secret=True
    )
    aws_secret_access_key: str | None = option(
        None, "The AWS secret key of the job.", key=None, flag="--aws_secret_access_key", secret=True
    )


# --------------------------------------------------------------------------------------------------
# Options of runs on TPUs


@option_group
class TpuOptions(OptionGroup, title="TPU", key="", flag=""):
    """The TPU, and the way to reach its machines."""

    tpu_name: str | None = option(
        None, "The name of the TPU.", flag=None, question="What is the name of your cloud TPU?"
    )
    tpu_zone: str | None = option(None, "The zone of the TPU.", flag=None, question="What zone is your cloud TPU in?")
    tpu_use_cluster: bool = option(
        False,
        "Start on every machine of a TPU pod.",
        flag="--tpu_cluster",
        off_flag="--no_tpu_cluster",
        switch=True,
        question="Are you using a TPU cluster?",
    )
    tpu_use_sudo: bool = option(
        False, "Use sudo on the TPU's machines.", switch=True, question="Do you want to run the commands with sudo?"
    )
    tpu_vm: list[str] | None = option(
        None, "A machine of the pod (may be given several times).", flag="--vm", repeat=True
    )
    tpu_env: list[str] | None = option(
        None, "NAME=value for the pod's machines (may be given several times).", flag="--env", repeat=True
    )
    command_file: str | None = option(
        None,
        "A file of commands to run on the machines at start-up.",
        flag=None,
        question="What is the path to your script?",
    )
    commands: list[str] | None = option(
        None, "Commands to run on the machines at start-up.", flag=None, question="What command should be run?"
    )
    in_tpu_pod: bool = option(
        False,
        "This process runs on a machine of a TPU pod.",
        env="ACCELERATE_IN_TPU_POD",
        key=None,
        flag=None,
        quiet=True,
    )
