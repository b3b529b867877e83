"""Launch on SageMaker: upload the script's folder and create a training job.

Version 2 of Amazon's SDK uses its HuggingFace estimator, version 3 its ModelTrainer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from ...errors import LaunchError, MissingDependency, SettingError
from ...launch.engine import LaunchEngine, base_environment
from ...launch.plan import LaunchPlan, Program
from ...launch.remote import Secret, named_file

if TYPE_CHECKING:
    from ...launch.preflight import Host
    from ...settings.cluster_options import SageMakerOptions
    from ...settings.tree import Settings

_NUMBER: Final = r"-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?"
#: The folder of this package, which is uploaded with the script: pip would install another package of this name.
_PACKAGE: Final = Path(__file__).resolve().parents[2]
#: Amazon's own data-parallel library, and torch's launcher in the job for several machines without it.
_DATA_PARALLEL: Final = {"smdistributed": {"dataparallel": {"enabled": True}}}
_TORCHRUN: Final = {"torch_distributed": {"enabled": True}}


@final
class SageMaker(LaunchEngine):
    """A training job on Amazon SageMaker."""

    name = "sagemaker"

    def suits(self, settings: Settings, host: Host) -> bool:
        """Return whether the configuration is for SageMaker and this process isn't the job itself."""
        return settings.sagemaker is not None and settings.launch.compute_environment == "AMAZON_SAGEMAKER"

    @staticmethod
    def estimator_arguments(plan: LaunchPlan) -> dict[str, Any]:
        """Return the arguments of version 2's HuggingFace estimator, without the session."""
        options = dict(plan.engine_options)
        taken = (
            "entry_point source_dir role image_uri instance_type instance_count base_job_name transformers_version "
            "pytorch_version py_version hyperparameters distribution metric_definitions"
        )
        given = {name: options[name] for name in taken.split() if name in options}
        if options.get("image_uri") is not None:  # the image determines the versions
            given.update(transformers_version=None, pytorch_version=None)
        additional = options.get("additional_args") or {}
        assert isinstance(additional, Mapping)
        more = {**given, "environment": dict(plan.environment), **additional}
        # Copied next to the script, where Python looks first, so that the job uses this package.
        return {**more, "dependencies": [*(additional.get("dependencies") or ()), str(_PACKAGE)]}

    def plan(self, settings: Settings, program: Program, host: Host) -> LaunchPlan:
        """Plan the job: its script, instances, image, inputs and hyper-parameters."""
        options = settings.sagemaker
        assert options is not None
        script = Path(program.target)
        if program.kind != "script" or script.suffix != ".py":
            raise SettingError(
                f"A SageMaker job runs a .py file, not {program.target!r}. Leave -m and --no_python out and "
                "name a file."
            )
        if options.distributed_type == "MODEL_PARALLEL":
            raise SettingError(
                f"{settings.quote('sagemaker.distributed_type')} isn't supported. Give NO or DATA_PARALLEL."
            )
        job: dict[str, object] = {
            "entry_point": script.name,
            "source_dir": str(script.parent),
            "role": options.iam_role_name,
            "image_uri": options.image_uri,
            "instance_type": options.ec2_instance_type,
            "instance_count": options.num_machines,
            "base_job_name": options.base_job_name,
            "transformers_version": options.transformers_version,
            "pytorch_version": options.pytorch_version,
            "py_version": options.py_version,
            "hyperparameters": hyperparameters(program.arguments),
            "distribution": _distribution(options),
            "inputs": inputs(settings, options),
            "metric_definitions": metrics(settings, options),
            "additional_args": dict(options.additional_args or {}),
            "dependencies": [str(_PACKAGE)],
            "profile": options.profile,
            "region": options.region,
        }
        for name in ("aws_access_key_id", "aws_secret_access_key"):
            value = getattr(options, name)
            job[name] = None if value is None else Secret(value)
        return LaunchPlan(
            engine=f"{self.name}: {options.num_machines} x {options.ec2_instance_type} in {options.region}",
            argv=("python", script.name, *program.arguments),
            environment=_environment(settings, host),
            rendezvous="inside the job",
            engine_options={name: value for name, value in job.items() if value not in (None, {}, [])},
        )

    def run(self, plan: LaunchPlan) -> int:
        """Create the job, wait until it has completed and return 0.

        Raises:
            MissingDependency: Amazon's SDK isn't installed.
            LaunchError: the job failed, or couldn't be created.
        """
        from ...optional import installed_version

        version = installed_version("sagemaker")
        if version is None:
            raise MissingDependency(
                "Launching on SageMaker needs Amazon's SDK. Install it with: pip install sagemaker "
                '(or: pip install "accelerate[sagemaker]")'
            )
        start = _start_v2 if int(version.partition(".")[0]) < 3 else _start_v3
        try:
            start(plan)
        except Exception as error:  # any error of the SDK or of botocore means that the job isn't done
            raise LaunchError(f"The SageMaker job didn't complete: {type(error).__name__}: {error}") from error
        return 0


def hyperparameters(arguments: Sequence[str]) -> dict[str, str]:
    """Convert the script's arguments to the pairs of a SageMaker job; values stay text.

    Raises:
        SettingError: an argument isn't of the form ``--name value``.
    """
    pairs: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        name, equals, value = argument.partition("=")
        bare = name.lstrip("-")
        if not name.startswith("-") or not bare or re.fullmatch(_NUMBER, name):
            raise SettingError(
                f"SageMaker can only hand on arguments of the form --name value, but there is {argument!r}."
            )
        if name != f"--{bare}" or len(bare) == 1:  # one letter gets one hyphen from version 2, two from version 3
            raise SettingError(
                f"SageMaker can't hand on {name}, only --names of several letters. Spell the option out."
            )
        if not equals:
            if not rest or (rest[0].startswith("-") and not re.fullmatch(_NUMBER, rest[0])):
                raise SettingError(
                    f"SageMaker can't hand on {name}, which stands alone (store_true). Let the script take "
                    f"{name} true, and give that."
                )
            value = rest.pop(0)
        if bare in pairs:
            raise SettingError(f"SageMaker can hand on {name} only once.")
        pairs[bare] = value
    return pairs


def _table(settings: Settings, option: str, path: str, columns: tuple[str, str]) -> list[tuple[str, str]]:
    """Read the rows of a file with two tab-separated columns below a header line."""
    lines = named_file(path, f"sagemaker.{option}", settings).read_text(encoding="utf-8").splitlines()
    rows: list[tuple[str, str]] = []
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        cells = [cell.strip() for cell in line.split("\t")]
        if len(cells) != 2 or not all(cells):
            raise SettingError(
                f"{path}:{number} isn't a row of {columns[0]} and {columns[1]}, separated by one tab: {line!r}. The "
                "first line of the file holds the names of the columns."
            )
        rows.append((cells[0], cells[1]))
    return rows


def inputs(settings: Settings, options: SageMakerOptions) -> dict[str, str]:
    """Read the inputs file: channel -> location."""
    path = options.sagemaker_inputs_file
    if path is None:
        return {}
    return dict(_table(settings, "sagemaker_inputs_file", path, ("channel_name", "data_location")))


def metrics(settings: Settings, options: SageMakerOptions) -> list[dict[str, str]]:
    """Read the metrics file: names and regular expressions."""
    path = options.sagemaker_metrics_file
    if path is None:
        return []
    rows = _table(settings, "sagemaker_metrics_file", path, ("metric_name", "metric_regex"))
    return [{"Name": name, "Regex": expression} for name, expression in rows]


def _distribution(options: SageMakerOptions) -> Mapping[str, object] | None:
    if options.distributed_type == "DATA_PARALLEL":
        # Amazon's own library is in images up to torch 2.0; newer ones have torch's launcher.
        version = tuple(int(part) for part in options.pytorch_version.split(".")[:2])
        return _DATA_PARALLEL if options.image_uri or version <= (2, 0) else _TORCHRUN
    return _TORCHRUN if options.num_machines > 1 else None


def _environment(settings: Settings, host: Host) -> dict[str, str]:
    options = settings.sagemaker
    assert options is not None
    environment = base_environment(settings, host, 1)
    for name in ("OMP_NUM_THREADS", host.visible_devices):  # this machine's
        environment.pop(name or "", None)
    environment["ACCELERATE_USE_SAGEMAKER"] = "true"
    environment["ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE"] = options.distributed_type
    return environment


def _session(plan: LaunchPlan) -> Any:
    """Create a boto3 session with the keys or the profile of the plan."""
    from ...optional import require

    boto3 = require("boto3", "sagemaker")
    options = plan.engine_options
    keys = {
        name: secret.value
        for name in ("aws_access_key_id", "aws_secret_access_key")
        if isinstance(secret := options.get(name), Secret)
    }
    profile = {} if keys or "profile" not in options else {"profile_name": options["profile"]}
    return boto3.Session(region_name=options["region"], **keys, **profile)


def _start_v2(plan: LaunchPlan) -> None:
    """Run the job with version 2's estimator until it has completed."""
    from ...optional import require

    estimators = require("sagemaker.huggingface", "sagemaker")
    session = require("sagemaker", "sagemaker").Session(boto_session=_session(plan))
    estimator = estimators.HuggingFace(**{"sagemaker_session": session, **SageMaker.estimator_arguments(plan)})
    estimator.fit(inputs=plan.engine_options.get("inputs"))


def _start_v3(plan: LaunchPlan) -> None:
    """Run the job with version 3's ModelTrainer until it has completed."""
    import json

    from ...optional import require

    trainers = require("sagemaker.train.model_trainer", "sagemaker")
    configs = require("sagemaker.train.configs", "sagemaker")
    distributed = require("sagemaker.train.distributed", "sagemaker")
    session = require("sagemaker.core.helper.session_helper", "sagemaker").Session(boto_session=_session(plan))
    options = plan.engine_options
    additional, channels = options.get("additional_args", {}), options.get("inputs", {})
    parameters = options.get("hyperparameters", {})
    assert isinstance(additional, Mapping) and isinstance(channels, Mapping) and isinstance(parameters, Mapping)
    given: dict[str, Any] = {
        "role": options["role"],
        "base_job_name": options["base_job_name"],
        "training_image": options.get("image_uri") or _image(plan),
        "source_code": configs.SourceCode(source_dir=options["source_dir"], entry_script=options["entry_point"]),
        "compute": configs.Compute(instance_type=options["instance_type"], instance_count=options["instance_count"]),
        # The job decodes each once; version 2 encodes them itself.
        "hyperparameters": {name: json.dumps(value) for name, value in parameters.items()},
        # The package is a separate channel, in the folder of all channels.
        "environment": {"PYTHONPATH": "/opt/ml/input/data", **plan.environment},
        "sagemaker_session": session,
        # Version 3 has no other launcher for data parallelism than torch's.
        "distributed": distributed.Torchrun() if "distribution" in options else None,
    }
    trainer = trainers.ModelTrainer(**{**given, **additional})
    definitions = options.get("metric_definitions", [])
    assert isinstance(definitions, list)
    if definitions:
        rows = [configs.MetricDefinition(name=row["Name"], regex=row["Regex"]) for row in definitions]
        trainer = trainer.with_metric_definitions(rows)
    data = [configs.InputData(channel_name=name, data_source=source) for name, source in channels.items()]
    data.append(configs.InputData(channel_name=_PACKAGE.name, data_source=str(_PACKAGE)))
    trainer.train(input_data_config=data)


def _image(plan: LaunchPlan) -> str:
    """Return the image that version 2's estimator would choose for these versions."""
    from ...optional import require

    options = plan.engine_options
    return require("sagemaker.core.image_uris", "sagemaker").retrieve(
        framework="huggingface",
        region=options["region"],
        version=options["transformers_version"],
        base_framework_version=f"pytorch{options['pytorch_version']}",
        py_version=options["py_version"],
        instance_type=options["instance_type"],
        image_scope="training",
    )
