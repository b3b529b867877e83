"""Amazon's SDK, versions 2 and 3, against a local server that speaks Amazon's protocol (moto): no job runs, but the
request that would start it is recorded, and the source is uploaded.
"""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engines.conftest import NASTY, Launch, python_of

# Runs in the SDK's environment: `accelerate launch` with every request to SageMaker kept.
RECORDER = """\
import json, sys
from pathlib import Path
import botocore.client

send = botocore.client.BaseClient._make_api_call

def record(self, operation, parameters):
    if operation == "CreateTrainingJob":
        Path("request.json").write_text(json.dumps(parameters, default=str))
    return send(self, operation, parameters)

botocore.client.BaseClient._make_api_call = record
from accelerate.commands.launch import main
sys.exit(main(sys.argv[1:]))
"""
CONFIGURATION = """\
compute_environment: AMAZON_SAGEMAKER
distributed_type: {kind}
mixed_precision: fp16
ec2_instance_type: ml.p3.16xlarge
iam_role_name: a-role
region: us-east-1
base_job_name: tests
num_machines: 2
transformers_version: {versions[0]}
pytorch_version: {versions[1]}
py_version: {versions[2]}
sagemaker_inputs_file: inputs.tsv
sagemaker_metrics_file: metrics.tsv
"""


@pytest.fixture(params=["sagemaker", "sagemaker3"])
def job(request: pytest.FixtureRequest, launch: Launch, children: Callable[..., Any]) -> Launch:
    """A launcher whose SDK talks to a server of the test's own."""
    python = python_of(request.param)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    launch.python = python
    launch.variables |= {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "SAGEMAKER_USER_CONFIG_OVERRIDE": str(launch.folder / "sdk.yaml"),
        "SAGEMAKER_VALIDATE_ROLE": "false",
    }
    (launch.folder / "sdk.yaml").write_text(
        "SchemaVersion: '1.0'\n"
        "SageMaker: {PythonSDK: {Modules: {Session: {DefaultS3Bucket: bucket}, TelemetryOptOut: true}}}\n"
    )
    server = str(Path(python).with_name("moto_server"))
    with (launch.folder / "moto.log").open("w") as log:
        children(server, "-H", "127.0.0.1", "-p", str(port), stdout=log, stderr=log)
    prepare = (
        "import boto3, json\n"
        "boto3.client('s3').create_bucket(Bucket='bucket')\n"
        "policy = json.dumps({'Version': '2012-10-17', 'Statement': []})\n"
        "boto3.client('iam').create_role(RoleName='a-role', AssumeRolePolicyDocument=policy)\n"
    )
    deadline = time.monotonic() + 40
    while subprocess.run([python, "-c", prepare], env=launch.environment(), capture_output=True).returncode != 0:
        assert time.monotonic() < deadline, (launch.folder / "moto.log").read_text()
        time.sleep(0.5)
    (launch.folder / "inputs.tsv").write_text("channel_name\tdata_location\ntrain\ts3://bucket/a b/train\n")
    (launch.folder / "metrics.tsv").write_text("metric_name\tmetric_regex\nloss\tloss=([0-9.]+)\n")
    source = launch.folder / "source"
    source.mkdir()
    (source / "train.py").write_text("print('hello')\n")
    (source / "beside.py").write_text("x = 1\n")
    (launch.folder / "record.py").write_text(RECORDER)
    return launch


def start(job: Launch, kind: str, *arguments: str) -> tuple[int, str]:
    # Amazon's data-parallel library ends with older versions.
    versions = ("4.17.0", "1.10.2", "py38") if "DATA" in kind else ("4.56.2", "2.8.0", "py312")
    (job.folder / "config.yaml").write_text(CONFIGURATION.format(kind=kind, versions=versions))
    words = [job.python, "record.py", "--config_file", "config.yaml", "source/train.py", *arguments]
    done = subprocess.run(
        words,
        cwd=job.folder,
        env=job.environment(),
        text=True,
        capture_output=True,
        timeout=150,
        stdin=subprocess.DEVNULL,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("kind", ["'NO'", "DATA_PARALLEL"])
def test_a_job_is_created_with_source_arguments_inputs_and_metrics(job: Launch, kind: str) -> None:
    nasty = [word for word in NASTY if word]
    words = [part for number, word in enumerate(nasty) for part in (f"--w{number}", word)]
    code, output = start(job, kind, "--lr", "1e-5", *words)
    assert code == 0, output
    request = json.loads((job.folder / "request.json").read_text())
    parameters = {name: _decoded(value) for name, value in request["HyperParameters"].items()}
    assert parameters["lr"] == "1e-5"
    assert [parameters[f"w{number}"] for number in range(len(nasty))] == nasty
    assert request["Environment"]["ACCELERATE_MIXED_PRECISION"] == "fp16"
    assert request["Environment"]["ACCELERATE_USE_SAGEMAKER"] == "true"
    assert request["Environment"]["ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE"] == kind.strip("'")
    assert request["ResourceConfig"]["InstanceCount"] == 2
    assert request["ResourceConfig"]["InstanceType"] == "ml.p3.16xlarge"
    assert request["RoleArn"].endswith("a-role")
    channels = {channel["ChannelName"]: channel for channel in request["InputDataConfig"]}
    assert channels["train"]["DataSource"]["S3DataSource"]["S3Uri"] == "s3://bucket/a b/train"
    assert {"Name": "loss", "Regex": "loss=([0-9.]+)"} in request["AlgorithmSpecification"]["MetricDefinitions"]
    if "sagemaker3" not in job.python:
        distribution = (
            "sagemaker_distributed_dataparallel_enabled" if "DATA" in kind else "sagemaker_torch_distributed_enabled"
        )
        assert parameters[distribution] in (True, "true")
    assert _uploaded(job) >= {"train.py", "beside.py"}


def _decoded(value: str) -> Any:
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def _uploaded(job: Launch) -> set[str]:
    """The names of the files that the server has been given, also inside of archives."""
    fetch = (
        "import boto3, io, tarfile\n"
        "s3 = boto3.client('s3')\n"
        "for page in s3.get_paginator('list_objects_v2').paginate(Bucket='bucket'):\n"  # the package alone may fill one
        "    for row in page.get('Contents', []):\n"
        "        print(row['Key'].rpartition('/')[2])\n"
        "        if row['Key'].endswith('tar.gz'):\n"
        "            body = s3.get_object(Bucket='bucket', Key=row['Key'])['Body'].read()\n"
        "            print('\\n'.join(tarfile.open(fileobj=io.BytesIO(body)).getnames()))\n"
    )
    done = subprocess.run([job.python, "-c", fetch], env=job.environment(), text=True, capture_output=True, check=True)
    return {Path(name).name for name in done.stdout.split()}
