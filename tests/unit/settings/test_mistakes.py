"""Seeded mistakes: each is refused before anything starts, naming the value, where it came from and what is legal."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from accelerate.errors import SettingError
from accelerate.settings.document import OLD_KEYS, _Reader, layer_of_mapping
from accelerate.settings.run import collect


@dataclass
class Mistake:
    """What was given, and what the refusal has to say."""

    says: tuple[str, ...]
    file: str | None = None
    flags: dict[str, Any] | None = None
    environ: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)


FSDP = {"use_fsdp": True}
FSDP2 = {"use_fsdp": True, "fsdp_version": "2"}
MESH = {**FSDP2, "use_parallelism_config": True}

MISTAKES = {
    # files
    "an unknown key": Mistake(
        ("config.yaml:2", "unknown key `num_proceses`", "Did you mean `num_processes`?", "num_machines"),
        file="distributed_type: MULTI_GPU\nnum_proceses: 2\n",
    ),
    "a section of a newer version": Mistake(
        ("config.yaml:2", "unknown key `quantum_config`. Correct or remove it; a newer version", "fsdp_config"),
        file="distributed_type: 'NO'\nquantum_config: {qubits: 3}\n",
    ),
    "a key in the wrong section": Mistake(
        ("config.yaml:2", "unknown key `zero_stage`", "It belongs into the section `deepspeed_config`"),
        file="distributed_type: DEEPSPEED\nzero_stage: 3\n",
    ),
    "a misspelt key in a section": Mistake(
        ("config.yaml:3", "unknown key `fsdp_sharding_stratgy` in `fsdp_config`", "mean `fsdp_sharding_strategy`?"),
        file="distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_stratgy: SHARD_GRAD_OP\n",
    ),
    "a key of another section": Mistake(
        ("config.yaml:3", "`zero_stage` in `fsdp_config`", "It belongs into the section `deepspeed_config`."),
        file="distributed_type: FSDP\nfsdp_config:\n  zero_stage: 3\n",
    ),
    "a key given twice": Mistake(
        ("config.yaml:3", "`num_processes` stands here a second time", "config.yaml:1"),
        file="num_processes: 2\ndistributed_type: MULTI_GPU\nnum_processes: 4\n",
    ),
    "a section that is none": Mistake(
        ("config.yaml:2", "`fsdp_config` has to be a section", "'on'"),
        file="distributed_type: FSDP\nfsdp_config: 'on'\n",
    ),
    "text that is not YAML": Mistake(("config.yaml:2", "not YAML"), file="num_processes: 2\n  broken: [\n"),
    "an empty file": Mistake(("config.yaml:1", "empty", "accelerate config"), file=""),
    "a file of comments": Mistake(("config.yaml:2", "empty"), file="# mine\n# all of it\n"),
    "a file cut off after a key": Mistake(
        ("config.yaml:2", "cut off", "num_processes"), file="distributed_type: MULTI_GPU\nnum_processes:"
    ),
    "a file cut off in a section": Mistake(
        ("config.yaml:3", "cut off", "fsdp_version"), file="distributed_type: FSDP\nfsdp_config:\n  fsdp_version:"
    ),
    "a file cut off in a value": Mistake(
        ("distributed_type", "'MULTI_'", "config.yaml:1"), file="distributed_type: MULTI_"
    ),
    "a file that is a list": Mistake(("config.yaml:1", "keys and values"), file="- one\n- two\n"),
    "a misspelt precision in a file": Mistake(
        ("mixed_precision", "'bf-16'", "config.yaml:2", "no, fp16, bf16, fp8", "Did you mean 'bf16'"),
        file="distributed_type: MULTI_GPU\nmixed_precision: bf-16\n",
    ),
    "a word for a number": Mistake(
        ("num_processes", "'two'", "config.yaml:1", "whole number, at least 1"), file="num_processes: two\n"
    ),
    "no processes at all": Mistake(("num_processes", "0", "config.yaml:1", "at least 1"), file="num_processes: 0\n"),
    "fewer than no processes": Mistake(
        ("num_processes", "-2", "config.yaml:1", "at least 1 or -1 for the default"), file="num_processes: -2\n"
    ),
    "a misspelt type": Mistake(
        ("distributed_type", "'MULTI_GPUS'", "config.yaml:1", "Did you mean 'MULTI_GPU'"),
        file="distributed_type: MULTI_GPUS\n",
    ),
    "an old fp16 key with a word": Mistake(
        ("config.yaml:1", "`fp16`", "'sometimes'", "true or false"), file="fp16: sometimes\n"
    ),
    "a SageMaker type that is none": Mistake(
        ("distributed_type", "'DATA'", "NO, DATA_PARALLEL, MODEL_PARALLEL"),
        file="compute_environment: AMAZON_SAGEMAKER\ndistributed_type: DATA\n",
    ),
    # flags
    "two kinds of hardware": Mistake(
        ("`--cpu` (flag --cpu)", "`--multi_gpu` (flag --multi_gpu)", "exclude each other"),
        flags={"cpu": True, "multi_gpu": True, "num_processes": 2},
    ),
    "hardware beside an engine": Mistake(
        ("--multi_gpu", "--use_fsdp", "exclude each other"), flags={"multi_gpu": True, "use_fsdp": True}
    ),
    "two engines": Mistake(
        ("`use_deepspeed` (flag --use_deepspeed)", "`use_fsdp`", "one engine"),
        flags={"use_deepspeed": True, "use_fsdp": True},
    ),
    "one process on many GPUs": Mistake(
        ("--multi_gpu", "at least 2", "--num_processes 1"), flags={"multi_gpu": True, "num_processes": 1}
    ),
    "processes that don't divide": Mistake(
        ("--num_processes 3", "--num_machines 2", "multiple of 2"), flags={"num_processes": 3, "num_machines": 2}
    ),
    "a machine that isn't there": Mistake(
        ("--machine_rank 2", "--num_machines 2", "0 to 1"),
        flags={"machine_rank": 2, "num_machines": 2, "num_processes": 2},
    ),
    "a port beyond the last": Mistake(
        ("--main_process_port", "70000", "at most 65535"), flags={"main_process_port": 70000}
    ),
    "any port for several machines": Mistake(
        ("--main_process_port 0", "--num_machines 2", "fixed port"),
        flags={"main_process_port": 0, "num_machines": 2, "num_processes": 2},
    ),
    "a device twice": Mistake(("--gpu_ids 0,0", "twice"), flags={"gpu_ids": "0,0"}),
    "devices that are none": Mistake(("--gpu_ids 0,,1", "such as 0,1; or all"), flags={"gpu_ids": "0,,1"}),
    "one device for many GPUs": Mistake(
        ("--gpu_ids 0", "--multi_gpu"), flags={"gpu_ids": "0", "multi_gpu": True, "num_processes": 2}
    ),
    "more processes than devices": Mistake(
        ("--num_processes 4", "2 devices of `--gpu_ids 0,1`"),
        flags={"gpu_ids": "0,1", "multi_gpu": True, "num_processes": 4},
    ),
    "a module without python": Mistake(
        ("--module", "--no_python", "exclude each other"), flags={"module": True, "no_python": True}
    ),
    "a misspelt rendezvous": Mistake(
        ("--rdzv_backend c10", "Did you mean 'c10d'", "static, c10d, etcd"), flags={"rdzv_backend": "c10"}
    ),
    "rendezvous settings without values": Mistake(
        ("--rdzv_conf", "'timeout'", "key1=value1"), flags={"rdzv_conf": "timeout,join_timeout=3"}
    ),
    "negative restarts": Mistake(("--max_restarts", "-1", "at least 0"), flags={"max_restarts": -1}),
    "an FSDP version to come": Mistake(("--fsdp_version", "'3'", "1, 2"), flags={**FSDP, "fsdp_version": "3"}),
    "a value of version 1 in version 2": Mistake(
        ("--fsdp_reshard_after_forward FULL_SHARD", "--fsdp_version 2", "true or false"),
        flags={**FSDP2, "fsdp_reshard_after_forward": "FULL_SHARD"},
    ),
    "local state in version 2": Mistake(
        ("LOCAL_STATE_DICT", "FULL_STATE_DICT or SHARDED_STATE_DICT"),
        flags={**FSDP2, "fsdp_state_dict_type": "LOCAL_STATE_DICT"},
    ),
    "offloaded activations in version 1": Mistake(
        ("--fsdp_activation_checkpointing_offload true", "version 2"),
        flags={**FSDP, "fsdp_activation_checkpointing_offload": "true"},
    ),
    "offloaded activations without checkpointing": Mistake(
        ("--fsdp_activation_checkpointing_offload true", "`fsdp_activation_checkpointing`"),
        flags={**FSDP2, "fsdp_activation_checkpointing_offload": "true"},
    ),
    "a ZeRO stage to come": Mistake(
        ("--zero_stage", "4", "0, 1, 2, 3"), flags={"use_deepspeed": True, "zero_stage": 4}
    ),
    "offloading to nowhere": Mistake(
        ("--offload_param_device nvme", "`offload_param_nvme_path`"),
        flags={"use_deepspeed": True, "offload_param_device": "nvme"},
    ),
    "both DeepSpeed filters": Mistake(
        ("deepspeed_inclusion_filter", "deepspeed_exclusion_filter", "exclude each other"),
        flags={"use_deepspeed": True, "deepspeed_inclusion_filter": "a", "deepspeed_exclusion_filter": "b"},
    ),
    "parallelism without FSDP": Mistake(
        ("--use_parallelism_config", "--use_fsdp --fsdp_version 2"), flags={"use_parallelism_config": True}
    ),
    "parallelism with FSDP version 1": Mistake(
        ("--use_parallelism_config", "--fsdp_version 1", "--fsdp_version 2"),
        flags={"use_parallelism_config": True, **FSDP, "fsdp_version": "1"},
    ),
    "a sequence split twice": Mistake(
        ("--parallelism_config_cp_size 2", "--parallelism_config_sp_size 2", "to 1"),
        flags={**MESH, "parallelism_config_cp_size": 2, "parallelism_config_sp_size": 2},
    ),
    "tensor parallel beside pure replicas": Mistake(
        ("--parallelism_config_tp_size 2", "--parallelism_config_dp_replicate_size 2", "dp_shard_size"),
        flags={**MESH, "parallelism_config_tp_size": 2, "parallelism_config_dp_replicate_size": 2},
    ),
    "degrees that don't make the world": Mistake(
        ("multiply to 4", "dp_shard_size=2", "tp_size=2", "8 processes"),
        flags={**MESH, "parallelism_config_tp_size": 2, "parallelism_config_dp_shard_size": 2, "num_processes": 8},
    ),
    "no process for a dimension": Mistake(
        ("--parallelism_config_tp_size", "0", "at least 1"), flags={**MESH, "parallelism_config_tp_size": 0}
    ),
    "a fixed sequence length that is missing": Mistake(
        ("sp_seq_length_is_variable false", "`sp_seq_length`"),
        flags={
            "use_deepspeed": True,
            "use_parallelism_config": True,
            "parallelism_config_sp_size": 2,
            "parallelism_config_sp_seq_length_is_variable": "false",
        },
    ),
    "attention that sequence parallelism can't have": Mistake(
        ("--parallelism_config_sp_attn_implementation eager", "sdpa, flash_attention_2"),
        flags={
            "use_deepspeed": True,
            "use_parallelism_config": True,
            "parallelism_config_sp_size": 2,
            "parallelism_config_sp_attn_implementation": "eager",
        },
    ),
    "a dynamo backend that is none": Mistake(
        ("--dynamo_backend", "'inductr'", "Did you mean 'INDUCTOR'"), flags={"dynamo_backend": "inductr"}
    ),
    "a TPU variable without value": Mistake(("--env", "'HOME'", "NAME=value"), flags={"tpu": True, "env": ["HOME"]}),
    # environment
    "a misspelt precision in the environment": Mistake(
        ("ACCELERATE_MIXED_PRECISION", "'float16'", "environment variable", "no, fp16, bf16, fp8"),
        environ={"ACCELERATE_MIXED_PRECISION": "float16"},
    ),
    "a switch that is neither": Mistake(
        ("ACCELERATE_USE_CPU", "'perhaps'", "true or false"), environ={"ACCELERATE_USE_CPU": "perhaps"}
    ),
    "no accumulation steps": Mistake(
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "'0'", "at least 1"),
        environ={"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "0"},
    ),
    "two engines in the environment": Mistake(
        ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "one engine"),
        environ={"ACCELERATE_USE_FSDP": "true", "ACCELERATE_USE_DEEPSPEED": "true"},
    ),
    "a bad variable of an engine in use": Mistake(
        ("FSDP_SHARDING_STRATEGY", "'FULL'", "FULL_SHARD, SHARD_GRAD_OP", "Did you mean"),
        environ={"ACCELERATE_USE_FSDP": "true", "FSDP_SHARDING_STRATEGY": "FULL"},
    ),
    "parallelism degrees that are words": Mistake(
        ("PARALLELISM_CONFIG_TP_SIZE", "'all'", "whole number"),
        environ={"ACCELERATE_USE_PARALLELISM_CONFIG": "1", "PARALLELISM_CONFIG_TP_SIZE": "all"},
    ),
    # arguments
    "a misspelt precision in code": Mistake(
        ("mixed_precision", "'fp61'", "argument mixed_precision", "Did you mean 'fp16'"),
        arguments={"mixed_precision": "fp61"},
    ),
    "an object for a precision": Mistake(("mixed_precision", "argument", "fp16"), arguments={"mixed_precision": 16.5}),
    "accumulation of nothing": Mistake(
        ("gradient_accumulation_steps", "0", "at least 1"), arguments={"gradient_accumulation_steps": 0}
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_refused_with_its_source_and_what_is_legal(tmp_path: Path, name: str) -> None:
    mistake = MISTAKES[name]
    path = None
    if mistake.file is not None:
        path = tmp_path / "config.yaml"
        path.write_text(mistake.file, encoding="utf-8")
    with pytest.raises(SettingError) as refusal:
        collect(mistake.arguments, mistake.environ, flags=mistake.flags, file=path)
    text = str(refusal.value)
    missing = [word for word in mistake.says if word not in text]
    assert not missing, f"{missing} not in: {text}"
    assert isinstance(refusal.value, ValueError)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_refusal_is_short_enough_to_read(tmp_path: Path, name: str) -> None:
    mistake = MISTAKES[name]
    path = tmp_path / "config.yaml"
    path.write_text(mistake.file or "", encoding="utf-8")
    with pytest.raises(SettingError) as refusal:
        collect(mistake.arguments, mistake.environ, flags=mistake.flags, file=None if mistake.file is None else path)
    assert len(str(refusal.value).splitlines()) == 1 and len(str(refusal.value)) < 1200 + len(str(path))


def test_there_are_enough_of_them() -> None:
    assert len(MISTAKES) >= 40


@pytest.mark.parametrize(
    "flags",
    [
        {"cpu": True, "use_fsdp": True, "num_processes": 2},
        {"cpu": True, "num_processes": 2},
        {"multi_gpu": True, "num_processes": 4, "gpu_ids": "0,1,2,3"},
        {"multi_gpu": True, "num_processes": 4, "num_machines": 2, "gpu_ids": "0,1"},
        {**MESH, "parallelism_config_tp_size": 2, "parallelism_config_dp_shard_size": 2, "num_processes": 4},
        {"use_deepspeed": True, "offload_param_device": "nvme", "offload_param_nvme_path": "/nvme"},
        {"use_megatron_lm": True, "multi_gpu": True, "num_processes": 2},
        {"rdzv_backend": "my_own_store"},
        {"mixed_precision": "fp8", "fp8_margin": 1},
    ],
)
def test_what_is_right_is_not_refused(flags: dict[str, Any]) -> None:
    collect({}, {}, flags=flags)


def test_a_flag_for_hardware_replaces_the_kind_that_a_variable_asks_for() -> None:
    found = collect({}, {"ACCELERATE_USE_CPU": "true"}, flags={"multi_gpu": True, "num_processes": 2})
    assert found.launch.multi_gpu is True


WARNINGS = {
    "a key of other programs": Mistake(
        ("`mpirun_config.cable`", "config.yaml:3", "no option has this name"),
        file="distributed_type: MULTI_CPU\nmpirun_config:\n  cable: blue\n",
    ),
    "old keys": Mistake(
        ("`use_mps_device`", "config.yaml:2", "`ipex_config`", "config.yaml:3", "`mpirun_config.mpirun_ccl`"),
        file="distributed_type: MULTI_CPU\nuse_mps_device: false\nipex_config: {ipex: true}\n"
        "mpirun_config: {mpirun_ccl: '1'}\n",
    ),
    "several processes without distribution": Mistake(
        ("num_processes: 4", "config.yaml:2", "distributed_type: NO", "config.yaml:1", "MULTI_GPU"),
        file="distributed_type: 'NO'\nnum_processes: 4\n",
    ),
    "flags of engines that aren't used": Mistake(
        ("`--fsdp_version`", "FSDP is not used", "--use_fsdp", "`--zero_stage`, `--deepspeed_hostfile`"),
        flags={"fsdp_version": "2", "zero_stage": 3, "deepspeed_hostfile": "hosts"},
    ),
    "flags of one engine under another": Mistake(
        ("`--fsdp_version`", "FSDP is not used"), flags={"use_deepspeed": True, "fsdp_version": "2"}
    ),
    "forward prefetch in version 2": Mistake(
        ("--fsdp_forward_prefetch true", "version 2"), flags={**FSDP2, "fsdp_forward_prefetch": "true"}
    ),
    "layer classes for wrapping by size": Mistake(
        ("--fsdp_transformer_layer_cls_to_wrap Block", "SIZE_BASED_WRAP"),
        flags={
            **FSDP,
            "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": "Block",
        },
    ),
    "fp8 flags without fp8": Mistake(
        ("`--fp8_margin`", "--mixed_precision fp8"), flags={"fp8_margin": 1, "mixed_precision": "bf16"}
    ),
}


@pytest.mark.parametrize("name", WARNINGS)
def test_what_has_no_effect_gets_one_remark_and_the_launch_goes_on(tmp_path: Path, name: str) -> None:
    given = WARNINGS[name]
    path = None
    if given.file is not None:
        path = tmp_path / "config.yaml"
        path.write_text(given.file, encoding="utf-8")
    with pytest.warns(UserWarning) as remarks:
        collect(given.arguments, given.environ, flags=given.flags, file=path)
    assert len(remarks) == 1
    text = str(remarks[0].message)
    missing = [word for word in given.says if word not in text]
    assert not missing, f"{missing} not in: {text}"


def written_keys() -> list[tuple[str | None, str]]:
    """Every key that a release wrote, by section: those of the options with their older spellings, and the old ones."""
    known = [(section, key) for section, keys in _Reader("", False).known.items() for key in keys]
    dotted = [key.rpartition(".") for key in OLD_KEYS]
    return [*known, *((section or None, key) for section, _, key in dotted)]


def unknown_keys(written: list[tuple[str | None, str]]) -> dict[str, str]:
    """Read a file with each key alone, and return the errors about keys that aren't known."""
    errors: dict[str, str] = {}
    for section, key in written:
        document = {key: None} if section is None else {section: {key: None}}
        try:
            layer_of_mapping(document, "config.yaml:1")
        except SettingError as error:
            if "unknown key" in str(error):
                errors[f"{section}.{key}"] = str(error)
    return errors


def test_every_key_that_a_release_wrote_is_read() -> None:
    assert unknown_keys(written_keys()) == {}


def test_every_misspelt_key_is_refused_with_the_one_that_was_meant() -> None:
    written = written_keys()
    names = {(section, key) for section, key in written}
    misspelt = [(section, key[:-3] + key[-2:]) for section, key in written if len(key) > 6]
    misspelt = [one for one in misspelt if one not in names]
    errors = unknown_keys(misspelt)
    missed = [one for one in misspelt if "Did you mean" not in errors.get(f"{one[0]}.{one[1]}", "")]
    old = {key.rpartition(".")[2] for key in OLD_KEYS}
    assert [one for one in missed if not any(key.startswith(one[1][:-2]) for key in old)] == []
