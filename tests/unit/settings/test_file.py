"""Configuration files: files of every age are read, saved ones are clean, mistakes are named with file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from accelerate.errors import SettingError
from accelerate.settings import file
from accelerate.settings.option import Source, options_of
from accelerate.settings.run import Settings, collect
from accelerate.settings.tree import GROUPS
from tests.unit.settings.strategies import values


def load(tmp_path: Path, text: str, name: str = "config.yaml") -> Settings:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return file.load(path)


FULL_HEADER = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: {type}
downcast_bf16: 'no'
enable_cpu_affinity: false
gpu_ids: all
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 8
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""


def test_a_multi_gpu_file(tmp_path: Path) -> None:
    found = load(tmp_path, FULL_HEADER.format(type="MULTI_GPU"))
    assert (found.launch.distributed_type, found.launch.num_processes, found.launch.gpu_ids) == ("MULTI_GPU", 8, "all")
    assert (found.run.mixed_precision, found.run.downcast_bf16, found.launch.same_network) == ("bf16", False, True)
    assert found.launch.multi_gpu is True
    assert found.source_of("num_processes") == Source("file", f"{tmp_path / 'config.yaml'}:11")


@pytest.mark.parametrize("spelling", ["NO", "'NO'", "no", "No", "'no'"])
def test_a_bare_no_is_the_type_no(tmp_path: Path, spelling: str) -> None:
    found = load(tmp_path, f"distributed_type: {spelling}\nmixed_precision: no\nuse_cpu: no\n")
    assert (found.launch.distributed_type, found.run.mixed_precision, found.run.use_cpu) == ("NO", "no", False)
    assert found.launch.num_processes == 1


def test_an_fsdp_1_file(tmp_path: Path) -> None:
    text = FULL_HEADER.format(type="FSDP") + (
        "fsdp_config:\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_backward_prefetch_policy: BACKWARD_PRE\n"
        "  fsdp_cpu_ram_efficient_loading: true\n  fsdp_forward_prefetch: false\n  fsdp_offload_params: false\n"
        "  fsdp_sharding_strategy: 1\n  fsdp_state_dict_type: SHARDED_STATE_DICT\n  fsdp_sync_module_states: true\n"
        "  fsdp_transformer_layer_cls_to_wrap: BertLayer,GPT2Block\n  fsdp_use_orig_params: true\n"
    )
    fsdp = load(tmp_path, text).fsdp
    assert fsdp is not None
    assert (fsdp.fsdp_version, fsdp.sharding_strategy, fsdp.backward_prefetch) == (1, "FULL_SHARD", "BACKWARD_PRE")
    assert fsdp.transformer_cls_names_to_wrap == ["BertLayer", "GPT2Block"]


def test_an_fsdp_2_file(tmp_path: Path) -> None:
    text = FULL_HEADER.format(type="FSDP") + (
        "fsdp_config:\n  fsdp_version: 2\n  fsdp_reshard_after_forward: true\n  fsdp_offload_params: true\n"
        "  fsdp_activation_checkpointing: true\n"
        "parallelism_config:\n  parallelism_config_dp_shard_size: 4\n  parallelism_config_tp_size: 2\n"
    )
    found = load(tmp_path, text)
    assert found.fsdp is not None and found.parallelism is not None
    assert (found.fsdp.reshard_after_forward, found.fsdp.cpu_offload) == (True, True)
    assert (found.parallelism.dp_shard_size, found.parallelism.tp_size) == (4, 2)


def test_early_fsdp_files_have_keys_without_prefix(tmp_path: Path) -> None:
    text = (
        "distributed_type: FSDP\nfsdp_config:\n  sharding_strategy: 2\n  offload_params: no\n  min_num_params: 2000\n"
    )
    fsdp = load(tmp_path, text).fsdp
    assert fsdp is not None
    assert (fsdp.sharding_strategy, fsdp.cpu_offload, fsdp.min_num_params) == ("SHARD_GRAD_OP", False, 2000)


def test_a_deepspeed_file_keeps_the_keys_of_deepspeed_itself(tmp_path: Path) -> None:
    text = FULL_HEADER.format(type="DEEPSPEED") + (
        "deepspeed_config:\n  deepspeed_multinode_launcher: standard\n  gradient_accumulation_steps: 1\n"
        "  gradient_clipping: 1.0\n  offload_optimizer_device: none\n  offload_param_device: none\n"
        "  zero3_init_flag: true\n  zero3_save_16bit_model: true\n  zero_stage: 3\n"
        "  seq_parallel_communication_data_type: bf16\n"
    )
    found: Any = load(tmp_path, text)
    assert found.deepspeed is not None
    assert (found.deepspeed.zero_stage, found.deepspeed.zero3_init_flag) == (3, True)
    assert found.deepspeed_launch.deepspeed_multinode_launcher == "standard"
    assert found.foreign == {"deepspeed_config": {"seq_parallel_communication_data_type": "bf16"}}
    assert found.deepspeed_launch.config_fields is not None and "zero_stage" in found.deepspeed_launch.config_fields
    file.save(found, tmp_path / "again.yaml")
    assert file.load(tmp_path / "again.yaml") == found


def test_a_misspelt_deepspeed_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"config.yaml:3: unknown key `zero_stag`.*`zero_stage`"):
        load(tmp_path, "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stag: 3\n")


def test_sequence_parallelism_through_deepspeed(tmp_path: Path) -> None:
    text = FULL_HEADER.format(type="DEEPSPEED") + (
        "parallelism_config:\n  parallelism_config_sp_size: 8\n  parallelism_config_sp_backend: deepspeed\n"
        "  parallelism_config_sp_seq_length_is_variable: true\n  parallelism_config_sp_attn_implementation: sdpa\n"
    )
    found = load(tmp_path, text)
    assert found.sequence is not None and found.sequence.sp_attn_implementation == "sdpa"
    assert found.parallelism is not None and found.parallelism.sp_size == 8


def test_the_oldest_files(tmp_path: Path) -> None:
    text = "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nfp16: true\nnum_processes: 2\n"
    assert load(tmp_path, text).run.mixed_precision == "fp16"
    assert load(tmp_path, text.replace("fp16: true", "fp16: false")).run.mixed_precision == "no"
    with pytest.warns(UserWarning, match="`use_mps_device`.*`ipex_config`"):
        found = load(
            tmp_path, "distributed_type: NO\ndynamo_backend: INDUCTOR\nuse_mps_device: false\nipex_config: {}\n"
        )
    assert found.compile.backend == "INDUCTOR"


def test_dynamo_sections_with_and_without_prefix(tmp_path: Path) -> None:
    for prefix in ("dynamo_", ""):
        text = f"distributed_type: NO\ndynamo_config:\n  {prefix}backend: inductor\n  {prefix}mode: reduce-overhead\n"
        compile = load(tmp_path, text).compile
        assert (compile.backend, compile.mode, compile.dynamic) == ("INDUCTOR", "reduce-overhead", None)


def test_every_fp8_answer_is_read_under_each_of_its_names(tmp_path: Path) -> None:
    text = (
        "distributed_type: NO\nmixed_precision: fp8\nfp8_config:\n  backend: TE\n"
        "  {a}: 16\n  {b}: max\n  fp8_margin: 3\n  {c}: O1\n  {d}: E4M3\n"
        "  override_linear_precision: [true, false, false]\n"
    )
    for names in (
        ("amax_history_len", "amax_compute_algo", "opt_level", "fp8_format"),
        ("amax_history_length", "amax_compute_algorithm", "optimization_level", "format"),
        ("fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_opt_level", "fp8_format"),
    ):
        fp8 = load(tmp_path, text.format(**dict(zip("abcd", names, strict=True)))).fp8
        assert fp8 is not None
        assert (fp8.amax_history_len, fp8.amax_compute_algo, fp8.opt_level, fp8.fp8_format) == (16, "max", "O1", "E4M3")
        assert fp8.margin == 3
        assert fp8.override_linear_precision == (True, False, False)


def test_empty_values_and_sections_are_not_given(tmp_path: Path) -> None:
    text = (
        "distributed_type: MULTI_CPU\nmegatron_lm_config: {}\nfsdp_config:\ncommands: null\ncommand_file: null\n"
        "main_process_ip:\nnum_processes: -1\ntpu_name: null\n"
    )
    found = load(tmp_path, text)
    assert found.launch.num_processes is None and found.run.use_cpu is True and found.fsdp is None
    assert not found.was_given("main_process_ip")


def test_a_sagemaker_file(tmp_path: Path) -> None:
    text = (
        "compute_environment: AMAZON_SAGEMAKER\ndistributed_type: DATA_PARALLEL\nec2_instance_type: ml.p3.16xlarge\n"
        "iam_role_name: role\nnum_machines: 3\nprofile: default\nregion: eu-west-1\nmixed_precision: fp16\n"
        "additional_args: {max_run: 60}\n"
    )
    found = load(tmp_path, text)
    assert found.sagemaker is not None
    assert (found.sagemaker.num_machines, found.sagemaker.distributed_type) == (3, "DATA_PARALLEL")
    assert (found.launch.num_machines, found.launch.distributed_type) == (1, None)
    assert found.sagemaker.additional_args == {"max_run": 60}
    file.save(found, tmp_path / "again.yaml")
    assert file.load(tmp_path / "again.yaml") == found
    assert not {"num_processes", "machine_rank", "rdzv_backend"} & set(file.read(tmp_path / "again.yaml"))


def test_json_is_read_by_extension_and_in_a_yaml_path(tmp_path: Path) -> None:
    text = json.dumps({"distributed_type": "MULTI_GPU", "num_processes": 2, "fp8_config": {}}, indent=2)
    for name in ("config.json", "config.yaml"):
        found = load(tmp_path, text, name)
        assert found.launch.num_processes == 2
        assert found.source_of("num_processes").where.endswith(f"{name}:3")


# Saving


SAVED = {
    "run": "NO",
    "launch": "MULTI_GPU",
    "compile": "MULTI_CPU",
    "mpi": "MULTI_CPU",
    "tpu": "XLA",
    "fsdp": "FSDP",
    "deepspeed": "DEEPSPEED",
    "deepspeed_launch": "DEEPSPEED",
    "megatron": "MEGATRON_LM",
}


@pytest.mark.filterwarnings("ignore:Given without effect:UserWarning")  # any values together
@pytest.mark.filterwarnings("ignore:.* is a name of version 1:UserWarning")
@pytest.mark.parametrize("suffix", [".yaml", ".json"])
@pytest.mark.parametrize(("group", "kind"), SAVED.items(), ids=SAVED)
def test_loading_what_was_saved_gives_the_same_settings(tmp_path: Path, suffix: str, group: str, kind: str) -> None:
    names = {option.name: option for option in options_of(GROUPS[group]) if option.key}
    path = tmp_path / f"config{suffix}"

    @settings(max_examples=25, deadline=None, phases=[Phase.generate])
    @given(st.fixed_dictionaries({}, optional={name: values(option) for name, option in names.items()}))
    def check(given: dict[str, Any]) -> None:
        source = Source("file", "c.yaml:1")
        layer = {f"{group}.{name}": (value, source) for name, value in given.items()}
        layer["launch.distributed_type"] = (kind, source)
        layer.pop("launch.compute_environment", None)
        try:
            found = collect({}, {}, file=layer)
        except SettingError:
            assume(False)
            raise
        file.save(found, path)
        again: Any = file.load(path)
        again.deepspeed_launch.config_fields = None
        assert again == found

    check()


def test_saved_files_are_clean_yaml(tmp_path: Path) -> None:
    flags = {"use_fsdp": True, "fsdp_version": "2", "aws_secret_access_key": "hunter2"}
    flags["fsdp_transformer_layer_cls_to_wrap"] = "A,B"
    file.save(collect({}, {}, flags=flags), tmp_path / "new" / "config.yaml")
    text = (tmp_path / "new" / "config.yaml").read_text(encoding="utf-8")
    document = yaml.safe_load(text)
    assert list(document)[:3] == ["compute_environment", "distributed_type", "mixed_precision"]
    assert document["fsdp_config"] == {"fsdp_version": 2, "fsdp_transformer_layer_cls_to_wrap": "A,B"}
    assert "hunter2" not in text and None not in document.values() and {} not in document.values()


def test_lists_of_commands_stay_lists(tmp_path: Path) -> None:
    found = load(tmp_path, "distributed_type: XLA\ncommands: [one, 'two, three']\ntpu_env: [A=b]\n")
    file.save(found, tmp_path / "again.yaml")
    assert file.read(tmp_path / "again.yaml")["commands"] == ["one", "two, three"]


def test_updating_keeps_the_meaning(tmp_path: Path) -> None:
    path = tmp_path / "old.yaml"
    path.write_text(
        "distributed_type: MULTI_CPU\nfp16: true\nnum_processes: 4\ndynamo_backend: EAGER\n", encoding="utf-8"
    )
    before = file.load(path)
    file.save(before, path)
    assert file.load(path) == before
    document = file.read(path)
    assert (document["mixed_precision"], document["use_cpu"]) == ("fp16", True)
    assert document["dynamo_config"] == {"dynamo_backend": "EAGER"}


def test_parse_takes_the_content_of_a_file() -> None:
    found = file.parse({"distributed_type": "MULTI_CPU", "num_processes": 2}, "the answers")
    assert found.launch.num_processes == 2 and found.source_of("num_processes").where == "the answers"
    with pytest.raises(SettingError, match="the answers: unknown key `num_proc`"):
        file.parse({"num_proc": 2}, "the answers")


# Where


def test_the_default_file_lies_in_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    assert file.default_config_file() == tmp_path / "hf" / "accelerate" / "default_config.yaml"
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert file.default_config_file() == tmp_path / "xdg" / "huggingface" / "accelerate" / "default_config.yaml"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert file.default_config_file() == tmp_path / ".cache" / "huggingface" / "accelerate" / "default_config.yaml"


def test_a_json_default_file_counts_when_it_is_the_only_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "default_config.json").write_text("{}", encoding="utf-8")
    assert file.default_config_file().name == "default_config.json"
    (tmp_path / "accelerate" / "default_config.yaml").write_text("", encoding="utf-8")
    assert file.default_config_file().name == "default_config.yaml"


def test_a_missing_file_is_a_file_not_found_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"accelerate config --config_file"):
        file.load(tmp_path / "nowhere.yaml")
