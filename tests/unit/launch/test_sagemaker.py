"""What a SageMaker job is made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import accelerate
from accelerate.errors import MissingDependency, SettingError
from accelerate.guests.clusters.sagemaker import SageMaker, hyperparameters
from accelerate.launch.choose import choose
from accelerate.launch.plan import LaunchPlan, Program
from tests.unit.launch.plans import CPU_HOST, GPU_HOST, NASTY, settings

SCRIPT = Program("src/train.py", ("--lr", "1e-5"))


def job_file(folder: Path, *more: str) -> Path:
    path = folder / "job.yaml"
    lines = ["compute_environment: AMAZON_SAGEMAKER", "ec2_instance_type: ml.p3.2xlarge", "iam_role_name: a-role"]
    path.write_text("\n".join([*lines, *(more or ["distributed_type: 'NO'"]), ""]))
    return path


def plan(folder: Path, *more: str, program: Program = SCRIPT, **flags: Any) -> LaunchPlan:
    return SageMaker().plan(settings(file=job_file(folder, *more), **flags), program, GPU_HOST)


def test_the_job_runs_the_script_with_its_folder_and_arguments(tmp_path: Path) -> None:
    options = plan(tmp_path, mixed_precision="fp16").engine_options
    expected = {
        "entry_point": "train.py",
        "source_dir": "src",
        "role": "a-role",
        "instance_type": "ml.p3.2xlarge",
        "instance_count": 1,
        "hyperparameters": {"lr": "1e-5"},
        "region": "us-east-1",
        "pytorch_version": "2.8.0",
    }
    assert expected.items() <= options.items()
    assert not {"distribution", "inputs", "metric_definitions", "image_uri", "profile"} & set(options)


def test_the_job_has_the_settings_but_not_this_machines_threads(tmp_path: Path) -> None:
    environment = plan(tmp_path, mixed_precision="fp16").environment
    assert environment["ACCELERATE_MIXED_PRECISION"] == "fp16" and environment["ACCELERATE_USE_SAGEMAKER"] == "true"
    assert environment["ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE"] == "NO"
    assert not {"OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"} & set(environment)


def test_data_parallel_is_amazons_library_where_the_image_has_it_and_torchs_launcher_elsewhere(tmp_path: Path) -> None:
    old = plan(tmp_path, "distributed_type: DATA_PARALLEL", "pytorch_version: 1.10.2").engine_options["distribution"]
    assert old == {"smdistributed": {"dataparallel": {"enabled": True}}}
    new = plan(tmp_path, "distributed_type: DATA_PARALLEL").engine_options["distribution"]
    assert new == {"torch_distributed": {"enabled": True}}
    several = plan(tmp_path, "distributed_type: 'NO'", "num_machines: 2").engine_options["distribution"]
    assert several == {"torch_distributed": {"enabled": True}}


def test_the_defaults_are_an_image_that_this_package_runs_in_and_the_package_goes_along(tmp_path: Path) -> None:
    options = plan(tmp_path).engine_options
    torch_version = tuple(map(int, str(options["pytorch_version"]).split(".")))
    assert torch_version >= (2, 6) and str(options["py_version"]) >= "py310"
    given = SageMaker.estimator_arguments(plan(tmp_path, "additional_args: {dependencies: [lib], max_run: 60}"))
    assert given["dependencies"] == ["lib", str(Path(accelerate.__file__).parent)]
    assert given["max_run"] == 60


def test_model_parallel_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="MODEL_PARALLEL"):
        plan(tmp_path, "distributed_type: MODEL_PARALLEL")


def test_tables_of_inputs_and_metrics_are_read(tmp_path: Path) -> None:
    (tmp_path / "i.tsv").write_text("channel_name\tdata_location\ntrain\ts3://b/a b\n\n")
    (tmp_path / "m.tsv").write_text("metric_name\tmetric_regex\nloss\tloss=(.*?);\n")
    more = (f"sagemaker_inputs_file: {tmp_path}/i.tsv", f"sagemaker_metrics_file: {tmp_path}/m.tsv")
    options = plan(tmp_path, "distributed_type: 'NO'", *more).engine_options
    assert options["inputs"] == {"train": "s3://b/a b"}
    assert options["metric_definitions"] == [{"Name": "loss", "Regex": "loss=(.*?);"}]


def test_a_broken_table_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "i.tsv").write_text("channel_name\tdata_location\ntrain s3://b\n")
    with pytest.raises(SettingError, match=r"i.tsv:2 isn't a row of channel_name and data_location"):
        plan(tmp_path, "distributed_type: 'NO'", f"sagemaker_inputs_file: {tmp_path}/i.tsv")
    with pytest.raises(SettingError, match="no such file"):
        plan(tmp_path, "distributed_type: 'NO'", "sagemaker_metrics_file: nowhere.tsv")


@pytest.mark.parametrize("program", [Program("a.b", kind="module"), Program("x", kind="command"), Program("run.sh")])
def test_only_a_python_file_can_be_a_job(tmp_path: Path, program: Program) -> None:
    with pytest.raises(SettingError, match=r"runs a \.py file"):
        plan(tmp_path, program=program)


def test_keys_never_show(tmp_path: Path) -> None:
    made = plan(tmp_path, aws_access_key_id="AKIA1", aws_secret_access_key="hush")
    assert "hush" not in made.show() + repr(made) and "AKIA1" not in made.show() + repr(made)
    assert made.engine_options["aws_secret_access_key"].value == "hush"  # type: ignore[attr-defined]


def test_who_is_chosen(tmp_path: Path) -> None:
    assert choose(settings(file=job_file(tmp_path)), CPU_HOST).name == "sagemaker"
    assert choose(settings({"ACCELERATE_USE_SAGEMAKER": "true"}, cpu=True), CPU_HOST).name == "simple"


def test_without_the_sdk_it_is_said_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(MissingDependency, match=r"pip install sagemaker"):
        SageMaker().run(plan(tmp_path))


@given(st.dictionaries(st.from_regex(r"[a-z][a-z_]{1,8}", fullmatch=True), st.text(max_size=9), max_size=5))
def test_pairs_stay_text(pairs: dict[str, str]) -> None:
    assert hyperparameters([f"--{name}={value}" for name, value in pairs.items()]) == pairs
    plain = {name: value for name, value in pairs.items() if not value.startswith("-")}
    assert hyperparameters([word for name, value in plain.items() for word in (f"--{name}", value)]) == plain


def test_nasty_values_and_negative_numbers_are_values() -> None:
    words = [word for number, value in enumerate(NASTY) for word in (f"--w{number}", value)]
    assert list(hyperparameters(words).values()) == list(NASTY)
    assert hyperparameters(["--min", "-1", "--rate", "-.5e-3"]) == {"min": "-1", "rate": "-.5e-3"}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--flag"], r"--flag, which stands alone"),
        (["--flag", "--lr", "1"], r"--flag, which stands alone"),
        (["data"], r"only hand on arguments of the form --name value, but there is 'data'"),
        (["-5"], r"only hand on arguments"),
        (["-x", "1"], r"can't hand on -x, only --names"),
        (["-lr", "1"], r"can't hand on -lr"),
        (["--a1", "1", "--a1", "2"], r"--a1 only once"),
        (["--"], r"only hand on"),
    ],
)
def test_other_arguments_are_refused(words: list[str], text: str) -> None:
    with pytest.raises(SettingError, match=text):
        hyperparameters(words)
