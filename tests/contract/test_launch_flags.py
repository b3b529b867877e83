"""Every launch flag with every distributed type: the launch is planned, with at most one remark,
and its processes get the documented environment.

`data/launch_environments.json` holds what the documented launcher (release 1.15.0) makes of the same command lines:
its defaults (`defaults`), the environment of a configuration file of each type (`base`), and what each flag, with its
default and with another value, changes there (`flags`).
"""

from __future__ import annotations

import json
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any, Final

import pytest

from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.errors import SettingError
from accelerate.utils.launch import (
    prepare_deepspeed_cmd_env,
    prepare_multi_gpu_env,
    prepare_simple_launcher_cmd_env,
    prepare_tpu,
)

DOCUMENTED: Final[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data" / "launch_environments.json").read_text(encoding="utf-8")
)
Environment = dict[str, str]

#: The rest of each type's configuration file.
FILES: Final = {
    "NO": "num_processes: 1\n",
    "MULTI_CPU": "num_processes: 2\nuse_cpu: true\n",
    "FSDP": "num_processes: 2\nfsdp_config: {fsdp_version: 1, fsdp_offload_params: true}\n",
    "DEEPSPEED": "num_processes: 2\ndeepspeed_config: {zero_stage: 3, gradient_accumulation_steps: 2}\n",
    "MEGATRON_LM": "num_processes: 2\nmegatron_lm_config: {megatron_lm_tp_degree: 2}\n",
    "XLA": "num_processes: 8\n",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("HF_HOME", "OMP_NUM_THREADS", "KMP_AFFINITY", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "train.py").write_text("")
    (tmp_path / "hosts").write_text("localhost slots=4\n")
    for kind in DOCUMENTED["base"]:
        (tmp_path / f"{kind}.yaml").write_text(
            f"compute_environment: LOCAL_MACHINE\ndistributed_type: '{kind}'\nmixed_precision: 'no'\n"
            + FILES.get(kind, "num_processes: 2\n")
        )
    return tmp_path


#: What differs on purpose: (flag or "", variable) -> why. A flag of "" stands for every flag.
DIFFERENT: Final[dict[tuple[str, str], str]] = {
    ("", "ACCELERATE_DYNAMO_USE_DYNAMIC"): "not given leaves it to the compiler, as torch does",
    ("", "FSDP_RESHARD_AFTER_FORWARD"): "each version of FSDP is told in its own words only",
    ("", "KMP_AFFINITY"): "several processes pinned alike would share the same cores",
    ("--cpu", "FSDP"): "FSDP runs on CPU processes too",
    ("--use_fsdp", "CPU"): "FSDP runs on CPU processes too",
    ("--use_deepspeed", "CPU"): "use_cpu of the file stays true",
    ("--use_megatron_lm", "CPU"): "use_cpu of the file stays true",
}
#: Booleans of Megatron-LM for which the documented launcher takes any text, "false" too, for true.
ANY_TEXT_IS_TRUE: Final = tuple(
    f"--megatron_lm_{name} false"
    for name in ("use_custom_fsdp", "no_load_optim", "eod_mask_loss", "overlap_cpu_optimizer_d2h_h2d", "no_save_optim",
                 "optimizer_cpu_offload", "use_precision_aware_optimizer")
)  # fmt: skip
#: Contradictions and values that can't be: (type or "", flag) -> what the refusal says.
REFUSED: Final[dict[tuple[str, str], str | None]] = {
    ("NO", "--no_python"): "can't be run",  # a file of this folder is no command
    ("MULTI_CPU", "--no_python"): "can't be run",
    ("DEEPSPEED", "--use_parallelism_config"): None,  # sequence parallelism; the documented launcher wants FSDP
    ("XLA", "--tpu_cluster"): "needs `tpu_name` and `tpu_zone`",
    ("FSDP", "--fsdp_activation_checkpointing_offload true"): "needs version 2",
    ("FSDP", "--use_parallelism_config"): "needs FSDP version 2",
    ("MEGATRON_LM", "--use_parallelism_config"): "exclude each other",
    ("", "--use_parallelism_config"): "needs FSDP version 2",
}
#: Flags with which the documented launcher forgets the file's engine: why not here.
KEEPS_THE_ENGINE: Final = {"--tpu_cluster": "it is about TPUs, and says nothing where there is none"}
PARSER: Final = launch_command_parser()


def planned(words: list[str]) -> tuple[str, Environment, list[str]]:
    """(which documented function made it, the environment, the remarks) of a command line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        args, _, _ = _validate_launch_command(PARSER.parse_args(words))
        kind, environment = prepared(args)
    return kind, environment, [str(each.message) for each in caught]


def prepared(args: Namespace) -> tuple[str, Environment]:
    if args.use_deepspeed and not args.cpu:
        return "deepspeed", prepare_deepspeed_cmd_env(args)[1]
    if (args.use_fsdp or args.use_megatron_lm or args.multi_gpu) and not args.cpu:
        return "multi", prepare_multi_gpu_env(args)
    if args.tpu and not args.cpu:
        return "tpu", prepare_tpu(args, {})[1]
    return "simple", prepare_simple_launcher_cmd_env(args)[1]


def is_different_on_purpose(flag: str, name: str) -> bool:
    return flag in ANY_TEXT_IS_TRUE or any(
        where in ("", flag) and (what in name or (what == "CPU" and name == "KMP_BLOCKTIME"))
        for where, what in DIFFERENT
    )


def same(name: str, ours: str, documented: str | None) -> bool:
    """Whether both say the same; what is not set says nothing, and ours may say a default that the other leaves out."""
    if documented in (None, ""):
        return name not in ENGINES or ours in ("", "false")
    if name == "ACCELERATE_CONFIG_DS_FIELDS":
        return set(ours.split(",")) | {"mixed_precision"} == set(str(documented).split(",")) | {"mixed_precision"}
    return ours.lower().replace("true", "1") == str(documented).lower().replace("true", "1")


ENGINES: Final = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM", "ACCELERATE_USE_CPU",
                  "ACCELERATE_USE_PARALLELISM_CONFIG")  # fmt: skip


@pytest.mark.parametrize("kind", DOCUMENTED["base"])
def test_every_flag_is_planned_with_every_distributed_type(folder: Path, kind: str) -> None:
    base_kind, base, remarks = planned(["--config_file", f"{kind}.yaml", "train.py"])
    assert (base_kind, remarks) == (DOCUMENTED["base"][kind]["kind"], [])
    found = [
        f"{name} is {base.get(name, '')!r}, documented {value!r}"
        for name, value in DOCUMENTED["base"][kind]["environment"].items()
        if not same(name, base.get(name, ""), value) and not is_different_on_purpose("", name)
    ]
    for flag, rows in DOCUMENTED["flags"].items():
        documented = next(row for kinds, row in rows if kind in kinds)
        refusal = REFUSED.get((kind, flag), REFUSED.get(("", flag)))
        try:
            made, environment, remarks = planned(["--config_file", f"{kind}.yaml", *flag.split(" "), "train.py"])
        except SettingError as error:
            if refusal is None or refusal not in str(error):
                found.append(f"{flag}: refused: {error}")
            continue
        if refusal is not None:
            found.append(f"{flag}: not refused any more")
        elif len(remarks) > 1:
            found.append(f"{flag}: {remarks}")
        elif not isinstance(documented, str) and flag not in KEEPS_THE_ENGINE:
            if made != documented.get("kind", base_kind):
                found.append(f"{flag}: made by {made}")
            found += [
                f"{flag}: {name} is {environment.get(name, '')!r}, documented {value!r}"
                for name, value in documented["environment"].items()
                if not same(name, environment.get(name, ""), value) and not is_different_on_purpose(flag, name)
            ]
    assert not found, "\n".join(found)


def test_flags_left_out_have_the_documented_defaults() -> None:
    args = vars(PARSER.parse_args(["train.py"]))
    documented = {
        name: tuple(value) if isinstance(value, list) else value for name, value in DOCUMENTED["defaults"].items()
    }
    assert {name: args.get(name, "missing") for name in documented} == documented


def test_what_the_command_line_gave_is_known_beside_the_defaults() -> None:
    args = PARSER.parse_args(["--num-processes=2", "-m", "--fsdp_version", "1", "train", "--cpu"])
    assert args.nondefault == {"num_processes", "module", "fsdp_version", "training_script", "training_script_args"}
