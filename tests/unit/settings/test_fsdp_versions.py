"""Every FSDP option in both versions, however it is given: it has its effect, or one remark or refusal names it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, FullOptimStateDictConfig, FullStateDictConfig

from accelerate.errors import SettingError
from accelerate.plugins.fsdp import FullyShardedDataParallelPlugin
from accelerate.settings.env import patched
from accelerate.settings.fsdp import FSDP_SHARDING_STRATEGY, FsdpOptions
from accelerate.settings.option import option_of, options_of
from accelerate.settings.run import collect
from accelerate.settings.tree import encode_settings
from accelerate.versions import is_torch_version

#: By option: a value other than its default, and the versions that read it.
VALUES: Final[dict[str, tuple[Any, tuple[int, ...]]]] = {
    "fsdp_version": (1, (1, 2)),
    "sharding_strategy": ("SHARD_GRAD_OP", (1, 2)),  # converted for version 2
    "reshard_after_forward": (False, (1, 2)),  # converted for version 1
    "backward_prefetch": ("BACKWARD_POST", (1,)),
    "mixed_precision_policy": ("bf16", (1, 2)),
    "auto_wrap_policy": ("SIZE_BASED_WRAP", (1, 2)),
    "cpu_offload": (True, (1, 2)),
    "ignored_modules": ("head.*", (1, 2)),
    "state_dict_type": ("LOCAL_STATE_DICT", (1,)),
    # Read by programs only: our saved state is gathered on the CPU by itself.
    "state_dict_config": (FullStateDictConfig(), (1, 2)),
    "optim_state_dict_config": (FullOptimStateDictConfig(), (1, 2)),
    "limit_all_gathers": (False, (1,)),
    "use_orig_params": (False, (1,)),
    "param_init_fn": (nn.Module.to_empty, (1,)),
    "sync_module_states": (False, (1,)),
    "forward_prefetch": (True, (1,)),
    "activation_checkpointing": (True, (1, 2)),
    "activation_checkpointing_offload": (True, (2,)),
    "cpu_ram_efficient_loading": (False, (1, 2)),
    "transformer_cls_names_to_wrap": ("Block", (1, 2)),
    "min_num_params": (7, (1, 2)),
}
#: What else has to be given for an option to be right.
BESIDE: Final = {"activation_checkpointing_offload": {"activation_checkpointing": True}}
Road = Callable[[dict[str, Any], Path], object]


def by_flag(options: dict[str, Any], folder: Path) -> object:
    flags = {str(option_of(FsdpOptions, name).dest): text(value) for name, value in options.items()}
    return collect({}, {}, flags={"use_fsdp": True, **flags})


def by_file(options: dict[str, Any], folder: Path) -> object:
    path = folder / "config.yaml"
    keys = "".join(f"  {option_of(FsdpOptions, name).key}: {text(value)}\n" for name, value in options.items())
    path.write_text(f"distributed_type: FSDP\nfsdp_config:\n{keys}", encoding="utf-8")
    return collect({}, {}, flags={}, file=path)


def by_environment(options: dict[str, Any], folder: Path) -> object:
    variables = {option_of(FsdpOptions, name).env[0]: text(value) for name, value in options.items()}
    return collect({}, {"ACCELERATE_USE_FSDP": "true", **variables})


def by_environment_of_a_plugin(options: dict[str, Any], folder: Path) -> object:
    with patched(**{option_of(FsdpOptions, name).env[0]: text(value) for name, value in options.items()}):
        return FullyShardedDataParallelPlugin()


def by_argument(options: dict[str, Any], folder: Path) -> object:
    return FullyShardedDataParallelPlugin(**options)


ROADS: Final[dict[str, Road]] = {
    "flag": by_flag,
    "file": by_file,
    "environment": by_environment,
    "environment of a plugin": by_environment_of_a_plugin,
    "argument": by_argument,
}


def text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def remarks(road: str, options: dict[str, Any], folder: Path) -> tuple[list[str], str]:
    """What was remarked, and with what it was refused ("" if it wasn't); old spellings aside."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        refusal = ""
        try:
            ROADS[road](options, folder)
        except SettingError as error:
            refusal = str(error)
    return [str(each.message) for each in caught if each.category is UserWarning], refusal


def can_be_given(road: str, name: str) -> bool:
    option = option_of(FsdpOptions, name)
    return {"flag": option.flag, "file": option.key, "argument": name}.get(road, option.env) not in (None, ())


def test_every_option_is_in_the_table() -> None:
    assert set(VALUES) == {option.name for option in options_of(FsdpOptions)}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("name", "road"), [(name, road) for name in VALUES for road in ROADS if can_be_given(road, name)]
)
def test_an_option_that_a_version_does_not_read_is_named_once(
    tmp_path: Path, name: str, road: str, version: int
) -> None:
    value, versions = VALUES[name]
    options = {**BESIDE.get(name, {}), "fsdp_version": version, name: value}
    if name == "fsdp_version":
        options[name] = version
    is_plugin = road in ("argument", "environment of a plugin")
    if (name, version, is_plugin) == ("ignored_modules", 2, True) and not is_torch_version(">=", "2.7.0"):
        pytest.skip("before torch 2.7, version 2 can't leave modules out")
    found, refusal = remarks(road, options, tmp_path)
    if name == "sharding_strategy" and version == 2 and road in ("flag", "file", "environment"):
        assert not refusal and "reshard_after_forward: false" in found[0] and len(found) == 1
    elif (name, version, road) == ("reshard_after_forward", 1, "argument"):
        assert "is for FSDP2" in refusal  # the plugin wants a strategy, as documented
    elif (name, version, road) == ("sync_module_states", 2, "argument"):
        assert (found, refusal) == ([], "")  # version 2 doesn't send rank 0's weights either
    elif version in versions:
        assert (found, refusal) == ([], "")
    else:
        said = [*found, *filter(None, [refusal])]
        assert len(said) == 1, said
        option = option_of(FsdpOptions, name)
        spelled = {"flag": option.flag, "file": option.key, "environment": option.env[0] if option.env else ""}
        assert any(word in said[0] for word in (spelled.get(road) or name, name, *option.env))


# What is sharded has two names


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize(
    ("strategy", "reshard"),
    [("FULL_SHARD", True), ("SHARD_GRAD_OP", False), ("HYBRID_SHARD", True), ("HYBRID_SHARD_ZERO2", False)],
)
@pytest.mark.filterwarnings("ignore")
def test_a_strategy_means_resharding_in_version_2(tmp_path: Path, road: str, strategy: str, reshard: bool) -> None:
    options = {"fsdp_version": 2, "sharding_strategy": strategy}
    found: Any = ROADS[road](options, tmp_path)
    fsdp = getattr(found, "fsdp", found)
    assert fsdp.sharding_strategy is None
    assert fsdp.reshard_after_forward is reshard


@pytest.mark.parametrize("road", ROADS)
def test_a_strategy_that_version_2_does_not_have_is_refused(tmp_path: Path, road: str) -> None:
    found, refusal = remarks(road, {"fsdp_version": 2, "sharding_strategy": "NO_SHARD"}, tmp_path)
    origin = {
        "flag": "`--fsdp_sharding_strategy NO_SHARD` (flag --fsdp_sharding_strategy)",
        "file": "config.yaml:4",
        "environment": "environment variable FSDP_SHARDING_STRATEGY",
        "environment of a plugin": "FSDP_SHARDING_STRATEGY=NO_SHARD",
        "argument": "sharding_strategy=NO_SHARD",
    }[road]
    assert origin in refusal and "DDP" in refusal and "version" in refusal
    assert found == []


@pytest.mark.parametrize("road", ROADS)
def test_a_hybrid_strategy_in_version_2_says_how_its_groups_are_given(tmp_path: Path, road: str) -> None:
    found, refusal = remarks(road, {"fsdp_version": 2, "sharding_strategy": "HYBRID_SHARD"}, tmp_path)
    assert not refusal and len(found) == 1
    assert "HYBRID_SHARD" in found[0] and "dp_replicate_size" in found[0] and "dp_shard_size" in found[0]


def test_a_hybrid_strategy_beside_its_groups_needs_no_hint() -> None:
    flags = {
        "use_fsdp": True, "fsdp_version": "2", "fsdp_sharding_strategy": "HYBRID_SHARD", "num_processes": 4,
        "use_parallelism_config": True, "parallelism_config_dp_replicate_size": 2,
        "parallelism_config_dp_shard_size": 2,
    }  # fmt: skip
    with pytest.warns(UserWarning, match=r"fsdp_reshard_after_forward: true`.$"):
        collect({}, {}, flags=flags)


PAIRS: Final[dict[str, tuple[int, str, bool, Any]]] = {
    "both say the same": (2, "SHARD_GRAD_OP", False, False),
    "version 2 reads its own": (2, "SHARD_GRAD_OP", True, True),
    "version 2 reads its own beside NO_SHARD": (2, "NO_SHARD", True, True),
    "version 2 reads its own beside a hybrid one": (2, "HYBRID_SHARD", True, True),
    "version 1 reads its own": (1, "FULL_SHARD", False, "FULL_SHARD"),
    "both say the same in version 1": (1, "FULL_SHARD", True, "FULL_SHARD"),
}


@pytest.mark.parametrize("road", ["flag", "file", "argument"])
@pytest.mark.parametrize("name", PAIRS)
def test_of_two_names_a_version_reads_its_own_and_a_contradiction_is_remarked(
    tmp_path: Path, road: str, name: str
) -> None:
    version, strategy, reshard, read = PAIRS[name]
    options = {"fsdp_version": version, "sharding_strategy": strategy, "reshard_after_forward": reshard}
    if road == "argument" and version == 1:
        options["reshard_after_forward"] = "FULL_SHARD" if reshard else "SHARD_GRAD_OP"
    found, refusal = remarks(road, options, tmp_path)
    assert not refusal
    assert len(found) == ("same" not in name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: Any = ROADS[road](options, tmp_path)
    fsdp = getattr(made, "fsdp", made)
    value = fsdp.reshard_after_forward if version == 2 else fsdp.sharding_strategy
    assert getattr(value, "name", value) == read


@pytest.mark.parametrize(
    ("version", "flag", "file", "read"),
    [
        ("2", {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}, "fsdp_reshard_after_forward: true", False),
        ("2", {"fsdp_reshard_after_forward": "false"}, "fsdp_sharding_strategy: FULL_SHARD", False),
        ("1", {"fsdp_reshard_after_forward": "false"}, "fsdp_sharding_strategy: FULL_SHARD", "SHARD_GRAD_OP"),
        ("1", {"fsdp_sharding_strategy": "NO_SHARD"}, "fsdp_reshard_after_forward: true", "NO_SHARD"),
    ],
)
def test_a_flag_comes_before_the_file_under_either_name(
    tmp_path: Path, version: str, flag: dict[str, str], file: str, read: object
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"distributed_type: FSDP\nfsdp_config:\n  {file}\n", encoding="utf-8")
    with pytest.warns(UserWarning, match=r"c.yaml:3"):
        fsdp = collect({}, {}, flags={"fsdp_version": version, **flag}, file=path).fsdp
    assert fsdp is not None
    assert (fsdp.reshard_after_forward if version == "2" else fsdp.sharding_strategy) == read


@pytest.mark.filterwarnings("ignore:.*sharding_strategy:FutureWarning")
def test_an_argument_comes_before_the_launchers_variable_under_either_name() -> None:
    with patched(FSDP_RESHARD_AFTER_FORWARD="true"):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, sharding_strategy="SHARD_GRAD_OP")
    assert plugin.reshard_after_forward is False
    with patched(FSDP_SHARDING_STRATEGY="FULL_SHARD"):
        plugin = FullyShardedDataParallelPlugin(reshard_after_forward="SHARD_GRAD_OP")
    assert plugin.sharding_strategy.name == "SHARD_GRAD_OP"


def test_a_strategy_of_version_1_may_be_given_under_the_name_of_version_2() -> None:
    fsdp = collect({}, {}, flags={"use_fsdp": True, "fsdp_reshard_after_forward": "SHARD_GRAD_OP"}).fsdp
    assert fsdp is not None and (fsdp.sharding_strategy, fsdp.reshard_after_forward) == ("SHARD_GRAD_OP", None)


# What the ranks are told


@pytest.mark.parametrize("reshard", ["true", "false"])
@pytest.mark.parametrize("version", ["1", "2"])
def test_variables_of_launchers_that_export_both_versions_are_read_without_a_remark(version: str, reshard: str) -> None:
    variables = {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": version,
        "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
        "FSDP_RESHARD_AFTER_FORWARD": reshard if version == "2" else "true",
        "FSDP_USE_ORIG_PARAMS": "true",
        "FSDP_SYNC_MODULE_STATES": "true",
        "FSDP_FORWARD_PREFETCH": "false",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
        "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false",
    }
    fsdp = collect({}, variables).fsdp  # a warning would be an error here
    with patched(**variables):
        plugin = FullyShardedDataParallelPlugin()
    assert fsdp is not None
    if version == "2":
        assert fsdp.reshard_after_forward is plugin.reshard_after_forward is (reshard == "true")
    else:
        assert fsdp.sharding_strategy == plugin.sharding_strategy.name == "FULL_SHARD"


def test_ranks_of_version_2_get_no_variables_of_version_1() -> None:
    variables = encode_settings(collect({}, {}, flags={"use_fsdp": True, "fsdp_version": "2"}))
    only_1 = ("BACKWARD_PREFETCH", "FORWARD_PREFETCH", "USE_ORIG_PARAMS", "SYNC_MODULE_STATES", "SHARDING_STRATEGY")
    assert not [name for name in variables if name.removeprefix("FSDP_") in only_1]
    assert variables["FSDP_RESHARD_AFTER_FORWARD"] == "true"


@pytest.mark.parametrize("strategy", FSDP_SHARDING_STRATEGY)
def test_version_1_takes_every_strategy_as_it_is(strategy: str) -> None:
    fsdp = collect({}, {}, flags={"use_fsdp": True, "fsdp_sharding_strategy": strategy}).fsdp
    assert fsdp is not None and fsdp.sharding_strategy == strategy


@pytest.mark.parametrize("prefetch", [BackwardPrefetch.BACKWARD_PRE, "BACKWARD_PRE"])
def test_ranks_that_construct_the_plugin_hear_of_a_variable_of_the_other_version(prefetch: Any) -> None:
    with pytest.warns(UserWarning, match="has no backward_prefetch, FSDP_FORWARD_PREFETCH, FSDP_USE_ORIG_PARAMS"):
        with patched(FSDP_USE_ORIG_PARAMS="false", FSDP_FORWARD_PREFETCH="true"):
            FullyShardedDataParallelPlugin(fsdp_version=2, backward_prefetch=prefetch)
