"""collect(): precedence, provenance, which groups there are, and what follows from several values together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from accelerate.errors import SettingError
from accelerate.guests.deepspeed.options import DeepSpeedOptions
from accelerate.guests.megatron.options import MegatronOptions
from accelerate.settings.checks import check_launchable, check_world
from accelerate.settings.fp8 import TeOptions
from accelerate.settings.fsdp import FsdpOptions
from accelerate.settings.option import Source, options_of
from accelerate.settings.parallelism import ContextParallelOptions, ParallelismOptions
from accelerate.settings.run import collect
from accelerate.settings.training import AccumulationOptions, DynamoOptions
from accelerate.settings.tree import GROUPS, Settings, encode_settings, launch_options_of
from tests.unit.settings.strategies import values

PRECISIONS = ("no", "fp16", "bf16")


def from_file(**given: Any) -> dict[str, tuple[Any, Source]]:
    return {address.replace("__", "."): (value, Source("file", "c.yaml:1")) for address, value in given.items()}


# Precedence


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(st.none(), st.sampled_from(PRECISIONS)), min_size=4, max_size=4))
def test_argument_before_flag_before_file_before_environment_before_default(given: list[str | None]) -> None:
    argument, flag, file, variable = given
    found = collect(
        {"mixed_precision": argument},
        {} if variable is None else {"ACCELERATE_MIXED_PRECISION": variable},
        flags={"mixed_precision": flag},
        file={} if file is None else from_file(run__mixed_precision=file),
    )
    kinds = ("argument", "flag", "file", "environment")
    expected = next(((v, k) for v, k in zip(given, kinds, strict=True) if v is not None), ("no", "default"))
    assert (found.run.mixed_precision, found.source_of("mixed_precision").kind) == expected


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([None, False, True]), st.sampled_from([None, "true", "false"]))
def test_the_same_holds_for_switches(flag: bool | None, variable: str | None) -> None:
    environ = {} if variable is None else {"ACCELERATE_USE_CPU": variable}
    found = collect({}, environ, flags={"cpu": flag})
    assert found.run.use_cpu is (True if flag else variable == "true")


@pytest.mark.parametrize(("argument", "variable", "value"), [(1, "4", 4), (2, "4", 2), (1, None, 1)])
def test_an_argument_that_has_its_default_counts_as_not_given(argument: int, variable: str | None, value: int) -> None:
    environ = {} if variable is None else {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": variable}
    found = collect({"gradient_accumulation_steps": argument, "cpu": False}, environ)
    assert found.run.gradient_accumulation_steps == value
    assert found.accumulation.num_steps == value


def test_an_explicit_argument_that_is_the_classs_default_wins() -> None:
    assert collect({"mixed_precision": "no"}, {"ACCELERATE_MIXED_PRECISION": "bf16"}).run.mixed_precision == "no"


def test_every_source_says_where() -> None:
    found = collect(
        {"cpu": True},
        {"ACCELERATE_DEBUG_MODE": "1"},
        flags={"num_processes": "2"},
        file=from_file(launch__num_machines=2),
    )
    assert str(found.source_of("run.use_cpu")) == "argument cpu"
    assert str(found.source_of("debug")) == "environment variable ACCELERATE_DEBUG_MODE"
    assert str(found.source_of("num_processes")) == "flag --num_processes"
    assert str(found.source_of("num_machines")) == "file c.yaml:1"
    assert str(found.source_of("main_process_ip")) == "default"
    with pytest.raises(KeyError):
        found.source_of("no_such_option")


def test_explain_lists_every_value_in_use_and_masks_secrets() -> None:
    found = collect(
        {},
        {},
        flags={"aws_secret_access_key": "hunter2", "use_fsdp": True, "fsdp_version": "2"},
        file=from_file(launch__compute_environment="AMAZON_SAGEMAKER"),
    )
    rows = {(group, name): (value, source.kind) for group, name, value, source in found.explain()}
    assert rows["fsdp", "fsdp_version"] == (2, "flag")
    assert rows["sagemaker", "aws_secret_access_key"] == ("***", "flag")
    assert ("megatron", "tp_degree") not in rows
    assert "hunter2" not in str(found.explain())
    assert "--fsdp_version" in str(found.explain()) and "flag --fsdp_version" in str(found.explain())
    sources = [line.split()[-1] == "default" for line in str(found.explain()).splitlines()]
    assert sources == sorted(sources)  # what was given stands at the beginning


def test_explain_aligns_the_sources_of_values_of_up_to_40_characters() -> None:
    flags = {"main_process_ip": "a" * 40, "main_training_function": "b" * 50}
    lines = str(collect({}, {}, flags=flags).explain()).splitlines()
    ip = next(line for line in lines if "a" * 40 in line)
    machines = next(line for line in lines if line.startswith("--num_machines "))
    assert ip.index("flag --main_process_ip") == machines.index("default")


# Groups


def test_without_anything_the_settings_are_the_defaults() -> None:
    found = collect({}, {})
    assert found == Settings(accumulation=AccumulationOptions(num_steps=1))
    assert not any(
        found.was_given(f"{group}.{option.name}") for group in GROUPS for option in options_of(GROUPS[group])
    )


@pytest.mark.parametrize(
    ("variable", "group", "cls"),
    [
        ("ACCELERATE_USE_FSDP", "fsdp", FsdpOptions),
        ("ACCELERATE_USE_DEEPSPEED", "deepspeed", DeepSpeedOptions),
        ("ACCELERATE_USE_MEGATRON_LM", "megatron", MegatronOptions),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "parallelism", ParallelismOptions),
    ],
)
def test_a_paradigm_variable_turns_its_group_on(variable: str, group: str, cls: type) -> None:
    found = collect({}, {variable: "true"})
    assert type(getattr(found, group)) is cls
    assert found.source_of(f"paradigm.{variable.removeprefix('ACCELERATE_').lower()}").where == variable
    assert getattr(collect({}, {variable: "false"}), group) is None


def test_variables_of_an_engine_that_is_not_used_are_not_even_read() -> None:
    assert collect({}, {"FSDP_VERSION": "seventeen"}).fsdp is None


def test_a_plugin_object_stays_that_object() -> None:
    plugin = FsdpOptions(fsdp_version=2)
    found = collect({"fsdp_plugin": plugin}, {"FSDP_VERSION": "1"})
    assert found.fsdp is plugin
    assert found.paradigm.use_fsdp is True
    assert found.source_of("fsdp.fsdp_version") == Source("argument", "fsdp_plugin")


def test_a_plugin_argument_beats_another_engine_in_the_environment() -> None:
    found = collect({"fsdp_plugin": FsdpOptions()}, {"ACCELERATE_USE_DEEPSPEED": "true"})
    assert found.find(DeepSpeedOptions) is None and found.fsdp is not None


def test_the_first_of_several_deepspeed_plugins_is_the_active_one() -> None:
    first, second = DeepSpeedOptions(zero_stage=2), DeepSpeedOptions(zero_stage=3)
    assert collect({"deepspeed_plugin": {"a": first, "b": second}}, {}).find(DeepSpeedOptions) is first


def test_wrong_plugin_types_are_type_errors() -> None:
    with pytest.raises(TypeError, match="fsdp_plugin"):
        collect({"fsdp_plugin": DeepSpeedOptions()}, {})


def test_handlers_of_a_parallelism_config_say_more_about_it() -> None:
    handler = ContextParallelOptions(cp_comm_strategy="alltoall")
    found = collect({"parallelism_config": ParallelismOptions(cp_size=2, cp_handler=handler)}, {})
    assert found.context is handler


def test_accumulation_steps_come_from_the_plugin() -> None:
    plugin = AccumulationOptions(num_steps=3)
    found = collect({"gradient_accumulation_plugin": plugin}, {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "5"})
    assert found.run.gradient_accumulation_steps == 3 and found.accumulation is plugin


def test_fp8_options_are_there_only_with_fp8() -> None:
    environ = {"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_FP8_BACKEND": "te", "ACCELERATE_FP8_MARGIN": "2"}
    found = collect({}, environ).fp8
    assert found is not None and (found.backend, found.margin) == ("TE", 2)
    assert collect({}, {**environ, "ACCELERATE_MIXED_PRECISION": "bf16"}).fp8 is None


# What a launch adds


def test_a_launched_run_has_the_launchers_own_defaults() -> None:
    launched = collect({}, {}, flags={"use_fsdp": True}).fsdp
    in_process = collect({}, {"ACCELERATE_USE_FSDP": "true"}).fsdp
    assert launched is not None and in_process is not None
    assert (launched.sharding_strategy, launched.use_orig_params, launched.min_num_params) == (
        "FULL_SHARD",
        True,
        10**8,
    )
    assert (in_process.sharding_strategy, in_process.use_orig_params, in_process.min_num_params) == (None, False, None)


def test_the_launchers_defaults_for_version_1_are_not_handed_to_version_2() -> None:
    fsdp = collect({}, {}, flags={"use_fsdp": True, "fsdp_version": "2"}).fsdp
    assert fsdp is not None
    assert (fsdp.sharding_strategy, fsdp.use_orig_params, fsdp.reshard_after_forward) == (None, None, True)


@pytest.mark.parametrize(("text", "strategy"), [("true", "FULL_SHARD"), ("false", "SHARD_GRAD_OP")])
def test_a_boolean_reshard_means_a_strategy_in_version_1(text: str, strategy: str) -> None:
    fsdp = collect({}, {}, flags={"use_fsdp": True, "fsdp_reshard_after_forward": text}).fsdp
    assert fsdp is not None
    assert (fsdp.sharding_strategy, fsdp.reshard_after_forward) == (strategy, None)


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ({"cpu": True, "num_processes": 2}, "MULTI_CPU"),
        ({"cpu": True}, None),
        ({"multi_gpu": True, "num_processes": 2}, "MULTI_GPU"),
        ({"tpu": True}, "XLA"),
        ({"use_fsdp": True}, "FSDP"),
        ({"cpu": True, "use_fsdp": True}, "FSDP"),
        ({"use_deepspeed": True}, "DEEPSPEED"),
        ({"use_megatron_lm": True}, "MEGATRON_LM"),
    ],
)
def test_a_launch_has_the_type_that_its_flags_mean(flags: dict[str, Any], kind: str | None) -> None:
    assert collect({}, {}, flags=flags).launch.distributed_type == (kind if kind else "NO" if "cpu" in flags else None)


def test_flags_for_other_hardware_replace_what_the_file_says() -> None:
    file = from_file(launch__distributed_type="FSDP", launch__num_processes=4)
    assert collect({}, {}, flags={"multi_gpu": True}, file=file).launch.distributed_type == "MULTI_GPU"
    file = from_file(launch__distributed_type="MULTI_GPU", launch__num_processes=4)
    assert collect({}, {}, flags={"cpu": True}, file=file).launch.distributed_type == "MULTI_CPU"
    assert collect({}, {}, flags={"use_fsdp": True}, file=file).launch.distributed_type == "FSDP"


def test_fp16_flag_is_mixed_precision() -> None:
    assert collect({}, {}, flags={"fp16": True}).run.mixed_precision == "fp16"


def test_an_off_flag_says_false() -> None:
    file = from_file(tpu__tpu_use_cluster=True, tpu__tpu_name="t", tpu__tpu_zone="z")
    assert collect({}, {}, file=file).tpu.tpu_use_cluster is True
    assert collect({}, {}, flags={"tpu_use_cluster": False}, file=file).tpu.tpu_use_cluster is False


def test_a_shared_flag_reaches_every_group_that_has_it() -> None:
    found: Any = collect({}, {}, flags={"gradient_accumulation_steps": 4, "use_deepspeed": True})
    assert found.deepspeed is not None
    assert (found.run.gradient_accumulation_steps, found.deepspeed.gradient_accumulation_steps) == (4, 4)
    assert collect({}, {}, flags={"gradient_accumulation_steps": 4}).run.gradient_accumulation_steps == 4


def test_options_of_an_engine_that_the_file_does_not_use_are_worth_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"fsdp_offload_params.*c.yaml:1.*FSDP is not used.*--use_fsdp"):
        collect({}, {}, file=from_file(launch__distributed_type="NO", fsdp__cpu_offload=True))


# From the launcher to the worker


ENGINES = {
    "run": None,
    "compile": None,
    "fsdp": "use_fsdp",
    "deepspeed": "use_deepspeed",
    "megatron": "use_megatron_lm",
    "parallelism": "use_parallelism_config",
    "context": "use_parallelism_config",
    "sequence": "use_parallelism_config",
    "fp8": None,
}


@pytest.mark.filterwarnings("ignore:Given without effect:UserWarning")  # any values together
@pytest.mark.filterwarnings("ignore:.* is a name of version 1:UserWarning")
@pytest.mark.parametrize("group", ENGINES)
def test_a_worker_collects_what_the_launcher_encoded(group: str) -> None:
    names = {option.name: option for option in options_of(GROUPS[group]) if option.env}

    @settings(max_examples=40, deadline=None, phases=[Phase.generate])
    @given(st.fixed_dictionaries({}, optional={name: values(option) for name, option in names.items()}))
    def check(given: dict[str, Any]) -> None:
        layer = {f"{group}.{name}": (value, Source("file", "c.yaml:1")) for name, value in given.items()}
        if ENGINES[group]:
            layer[f"paradigm.{ENGINES[group]}"] = (True, Source("environment"))
        if group == "fp8":
            layer["run.mixed_precision"] = ("fp8", Source("file", "c.yaml:1"))
        try:
            sent = collect({}, {}, file=layer)
        except SettingError:
            assume(False)
            raise
        received = collect({}, encode_settings(sent))
        for name in names:
            assert getattr(getattr(received, group), name) == getattr(getattr(sent, group), name), name

    check()


def test_engines_announce_themselves_only_when_used() -> None:
    assert not [name for name in encode_settings(collect({}, {})) if "USE_FSDP" in name or "USE_DEEPSPEED" in name]
    assert encode_settings(collect({}, {}, flags={"use_fsdp": True}))["ACCELERATE_USE_FSDP"] == "true"


def test_the_engines_accumulation_is_the_one_that_travels() -> None:
    found = collect({}, {}, flags={"use_deepspeed": True, "gradient_accumulation_steps": 4, "gradient_clipping": 0.5})
    variables = encode_settings(found)
    assert variables["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "4"
    assert variables["ACCELERATE_GRADIENT_CLIPPING"] == "0.5"


def test_launcher_matters_stay_with_the_launcher() -> None:
    found = collect({}, {}, flags={"num_processes": 2, "main_process_port": 1234, "cpu": True})
    assert not [text for text in encode_settings(found).values() if text in ("2", "1234")]


# Others ask


def test_launch_options_name_each_flag_once() -> None:
    flags = [option.flag for option in launch_options_of()]
    assert len(flags) == len(set(flags))
    assert {"--cpu", "--num_processes", "--fsdp_offload_params", "--aws_access_key_id"} <= set(flags)


def test_several_machines_have_to_know_where_to_meet() -> None:
    found = collect({}, {}, flags={"num_machines": 2, "num_processes": 4})
    with pytest.raises(SettingError, match="main_process_ip"):
        check_launchable(found)
    flags = {"num_machines": 2, "num_processes": 4, "main_process_ip": "10.0.0.1", "main_process_port": 29500}
    check_launchable(collect({}, {}, flags=flags))


def test_degrees_of_parallelism_multiply_to_the_world() -> None:
    found = collect({"parallelism_config": ParallelismOptions(dp_shard_size=2, tp_size=2)}, {})
    check_world(found, 4)
    with pytest.raises(SettingError, match=r"multiply to 4 \(.*dp_shard_size=2.*\), but there are 8 processes"):
        check_world(found, 8)


def test_excluding_arguments() -> None:
    with pytest.raises(SettingError, match="dynamo_backend"):
        collect({"dynamo_backend": "inductor", "dynamo_plugin": DynamoOptions()}, {})
    with pytest.raises(SettingError, match="gradient_accumulation_plugin"):
        collect({"gradient_accumulation_steps": 2, "gradient_accumulation_plugin": AccumulationOptions()}, {})

    @dataclass
    class Recipe(TeOptions):
        pass

    with pytest.raises(SettingError, match="Recipe was given, but the precision is"):
        collect({"kwargs_handlers": [Recipe()]}, {})
