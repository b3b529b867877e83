"""The blog post that introduced the library: its data parallelism on Amazon SageMaker, up to the job that is asked for.

The SDK is a stand-in that writes down what it is asked for; the real one runs against a local server in tests/engines.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.seeds.tools import ACCELERATE, environment, run

row = pytest.mark.row

HUGGING_FACE = """
import json, os

class HuggingFace:
    def __init__(self, **arguments):
        self.arguments = arguments

    def fit(self, inputs=None):
        told = {name: value for name, value in self.arguments.items() if name != "sagemaker_session"}
        with open(os.environ["TOLD"], "w") as file:
            json.dump({**told, "inputs": inputs}, file)
"""


@pytest.fixture
def sdk(tmp_path: Path) -> dict[str, str]:
    """Variables under which `import sagemaker` and `import boto3` find the stand-in, version 2."""
    folder = tmp_path / "sdk"
    files = {
        "sagemaker/__init__.py": "class Session:\n    def __init__(self, boto_session=None):\n        pass\n",
        "sagemaker/huggingface.py": HUGGING_FACE,
        "boto3.py": "class Session:\n    def __init__(self, **arguments):\n        pass\n\n\nsession = None\n",
        "sagemaker-2.250.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: sagemaker\nVersion: 2.250.0\n",
        "boto3-1.40.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: boto3\nVersion: 1.40.0\n",
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    paths = f"{folder}:{environment()['PYTHONPATH']}"
    return {"PYTHONPATH": paths, "TOLD": str(tmp_path / "told.json"), "HF_HOME": str(tmp_path)}


def launched(tmp_path: Path, sdk: dict[str, str], distributed_type: str) -> dict[str, object]:
    """What the SDK was asked for by `accelerate launch` with a SageMaker configuration."""
    (tmp_path / "train.py").write_text("print('trains')\n")
    config = tmp_path / "sagemaker.yaml"
    config.write_text(
        "compute_environment: AMAZON_SAGEMAKER\nec2_instance_type: ml.p3.16xlarge\niam_role_name: a-role\n"
        f"distributed_type: {distributed_type}\nnum_machines: 2\nmixed_precision: fp16\n"
    )
    command = [*ACCELERATE, "launch", "--config_file", str(config), "train.py", "--epochs", "3"]
    run(command, folder=tmp_path, **sdk)
    return json.loads(Path(sdk["TOLD"]).read_text())


@row("001-06")
def test_amazons_data_parallelism_is_asked_for(tmp_path: Path, sdk: dict[str, str]) -> None:
    # Newer images, the default one among them, have torch's launcher in its place.
    job = launched(tmp_path, sdk, "DATA_PARALLEL\npytorch_version: '1.10.2'")
    assert job["distribution"] == {"smdistributed": {"dataparallel": {"enabled": True}}}
    assert job["environment"]["ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE"] == "DATA_PARALLEL"  # type: ignore[index]


@row("001-55")
def test_launching_on_sagemaker_asks_for_the_machines_and_passes_the_arguments(
    tmp_path: Path, sdk: dict[str, str]
) -> None:
    job = launched(tmp_path, sdk, "'NO'")
    expected = {"entry_point": "train.py", "role": "a-role", "instance_count": 2, "instance_type": "ml.p3.16xlarge"}
    assert expected.items() <= job.items() and job["hyperparameters"] == {"epochs": "3"}
    assert job["environment"]["ACCELERATE_MIXED_PRECISION"] == "fp16"  # type: ignore[index]
