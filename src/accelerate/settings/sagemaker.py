"""Options of SageMaker jobs."""

from __future__ import annotations

from dataclasses import dataclass

from accelerate.settings.labels import SageMakerDistributedType
from accelerate.settings.option import OptionGroup, option


@dataclass
class SageMakerOptions(OptionGroup, title="AWS", key=""):
    """What a SageMaker job runs on, and with which rights."""

    distributed_type: str = option(
        "NO",
        "How the job is distributed.",
        env="ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE",
        choices=SageMakerDistributedType,
        question="What is the distributed mode?",
    )
    ec2_instance_type: str | None = option(
        None,
        "The EC2 instance type.",
        question="Which EC2 instance type do you want to use for your training?",
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
