"""Configuration files as the objects that other programs know: ``ClusterConfig`` and ``SageMakerConfig``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from ...errors import SettingError
from ...settings import file
from ...settings.document import read_entries
from ...settings.labels import ComputeEnvironment, DistributedType, SageMakerDistributedType
from ..parser import configuration_path

Config = TypeVar("Config", bound="BaseConfig")

#: The newest image of Amazon's that this package runs in (Python >= 3.10, torch >= 2.6).
SAGEMAKER_PYTORCH_VERSION = "2.8.0"
SAGEMAKER_TRANSFORMERS_VERSION = "4.56.2"
SAGEMAKER_PYTHON_VERSION = "py312"

default_config_file: str = str(file.default_config_file())
cache_dir: str = str(Path(default_config_file).parent)
default_yaml_config_file: str = str(Path(cache_dir) / "default_config.yaml")
default_json_config_file: str = str(Path(cache_dir) / "default_config.json")


Label = TypeVar("Label", bound=Enum)
Given = TypeVar("Given")


def _labelled(kind: type[Label], value: Given) -> Label | Given:
    """Return the label spelled by the text, or the value unchanged if it spells none."""
    if isinstance(value, kind):
        return value
    for label in kind:
        if str(label.value).lower() == str(value).lower() or label.name.lower() == str(value).lower():
            return label
    return value


@dataclass
class BaseConfig:
    """The fields of both kinds of configuration."""

    compute_environment: ComputeEnvironment
    distributed_type: DistributedType | SageMakerDistributedType | str
    mixed_precision: str | None
    use_cpu: bool
    debug: bool

    def __post_init__(self) -> None:
        self.compute_environment = _labelled(ComputeEnvironment, self.compute_environment)
        cloud = self.compute_environment is ComputeEnvironment.AMAZON_SAGEMAKER
        self.distributed_type = _labelled(SageMakerDistributedType if cloud else DistributedType, self.distributed_type)

    def to_dict(self) -> dict[str, object]:
        """Return the content of the file: labels as text, without values that are None or empty."""
        content: dict[str, object] = {}
        for name, value in dataclasses.asdict(self).items():
            plain = value.value if isinstance(value, Enum) else value
            if plain is not None and plain != {}:
                content[name] = plain
        return content

    @staticmethod
    def process_config(config_dict: Mapping[str, object]) -> dict[str, Any]:
        """Return a file's content with today's keys: old spellings converted, defaults filled in."""
        content = dict(config_dict)
        content.setdefault("compute_environment", ComputeEnvironment.LOCAL_MACHINE.value)
        if content.get("distributed_type") is None:
            raise SettingError("A configuration needs `distributed_type`, such as distributed_type: 'NO'.")
        if content["distributed_type"] is False:  # YAML reads a bare `no` so
            content["distributed_type"] = "NO"
        if "fp16" in content:
            fp16 = content.pop("fp16")
            content.setdefault("mixed_precision", "fp16" if fp16 else "no")
        if content.get("mixed_precision") in (None, False):
            content["mixed_precision"] = "no"
        if "dynamo_backend" in content:
            backend = content.pop("dynamo_backend")
            if str(backend).upper() not in ("NO", "FALSE"):
                content.setdefault("dynamo_config", {"dynamo_backend": str(backend).upper()})
        for name in ("use_cpu", "debug", "enable_cpu_affinity"):
            content.setdefault(name, False)
        if content["distributed_type"] == "NO" and content["compute_environment"] == "LOCAL_MACHINE":
            content.setdefault("num_processes", 1)
        return content

    @classmethod
    def from_dict(cls: type[Config], content: Mapping[str, object], where: str = "the configuration") -> Config:
        """Create the configuration with this content.

        Raises:
            ValueError: it has keys that no configuration has.
        """
        processed = cls.process_config(content)
        known = {row.name for row in dataclasses.fields(cls)}
        unknown = sorted(set(processed) - known)
        if unknown:
            raise SettingError(
                f"{where} has keys that nothing reads: {', '.join(unknown)}. Remove them, or correct their spelling; "
                "`accelerate config update` rewrites a file."
            )
        return cls(**processed)

    @classmethod
    def from_yaml_file(cls: type[Config], yaml_file: str | Path | None = None) -> Config:
        """Load the configuration from a YAML file (default: the one that ``accelerate config`` writes)."""
        path = Path(yaml_file if yaml_file is not None else default_yaml_config_file)
        return cls.from_dict(content_of(path), str(path))

    @classmethod
    def from_json_file(cls: type[Config], json_file: str | Path | None = None) -> Config:
        """Load the configuration from a JSON file."""
        path = Path(json_file if json_file is not None else default_json_config_file)
        return cls.from_dict(content_of(path), str(path))

    def to_json_file(self, json_file: str | Path) -> None:
        """Write this configuration to a JSON file."""
        Path(json_file).write_text(json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def to_yaml_file(self, yaml_file: str | Path) -> None:
        """Write this configuration to a YAML file."""
        import yaml

        Path(yaml_file).write_text(yaml.safe_dump(self.to_dict()), encoding="utf-8")


def content_of(path: Path) -> dict[str, object]:
    """Return the keys and values of a configuration file.

    Raises:
        SettingError: it isn't one.
    """
    read_entries(path)  # refuses what isn't a configuration, with the line
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        content = json.loads(text)
    else:
        import yaml

        content = yaml.safe_load(text)
    return content


@dataclass
class ClusterConfig(BaseConfig):
    """The configuration of a run on machines of one's own."""

    num_processes: int = -1
    machine_rank: int = 0
    num_machines: int = 1
    gpu_ids: str | None = None
    main_process_ip: str | None = None
    main_process_port: int | None = None
    rdzv_backend: str | None = "static"
    same_network: bool | None = False
    main_training_function: str = "main"
    enable_cpu_affinity: bool = False
    fp8_config: dict[str, Any] = field(default_factory=dict)
    deepspeed_config: dict[str, Any] = field(default_factory=dict)
    fsdp_config: dict[str, Any] = field(default_factory=dict)
    parallelism_config: dict[str, Any] = field(default_factory=dict)
    megatron_lm_config: dict[str, Any] = field(default_factory=dict)
    mpirun_config: dict[str, Any] = field(default_factory=dict)
    downcast_bf16: bool | str = False
    tpu_name: str | None = None
    tpu_zone: str | None = None
    tpu_use_cluster: bool = False
    tpu_use_sudo: bool = False
    command_file: str | None = None
    commands: list[str] | None = None
    tpu_vm: list[str] | None = None
    tpu_env: list[str] | None = None
    dynamo_config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        for row in dataclasses.fields(self):
            if row.name.endswith("_config") and getattr(self, row.name) is None:  # an empty section of a file
                setattr(self, row.name, {})


@dataclass
class SageMakerConfig(BaseConfig):
    """The configuration of a run as a SageMaker job."""

    ec2_instance_type: str | None = None
    iam_role_name: str | None = None
    image_uri: str | None = None
    profile: str | None = None
    region: str = "us-east-1"
    num_machines: int = 1
    gpu_ids: str = "all"
    base_job_name: str = "accelerate-sagemaker-1"
    pytorch_version: str = SAGEMAKER_PYTORCH_VERSION
    transformers_version: str = SAGEMAKER_TRANSFORMERS_VERSION
    py_version: str = SAGEMAKER_PYTHON_VERSION
    sagemaker_inputs_file: str | None = None
    sagemaker_metrics_file: str | None = None
    additional_args: dict[str, Any] | None = None
    dynamo_config: dict[str, Any] = field(default_factory=dict)
    enable_cpu_affinity: bool = False


def load_config_from_file(config_file: str | Path | None) -> ClusterConfig | SageMakerConfig:
    """Load the configuration from ``config_file``, or from the default file if it is None.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds keys that nothing reads.
    """
    path = configuration_path(config_file, must_exist=True)
    content = content_of(path)
    cloud = content.get("compute_environment") == ComputeEnvironment.AMAZON_SAGEMAKER.value
    return (SageMakerConfig if cloud else ClusterConfig).from_dict(content, str(path))
