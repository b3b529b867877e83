"""env, test, to-fsdp2, tpu-config, and the commands that this version refuses by name."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

import accelerate
from accelerate import __version__
from accelerate.commands import to_fsdp2
from accelerate.commands.main import main
from accelerate.commands.to_fsdp2 import convert_config_to_fsdp2
from accelerate.guests.xla import tpu_command as tpu
from tests.slow import slow

FSDP1 = {
    "distributed_type": "FSDP",
    "fsdp_config": {
        "fsdp_sharding_strategy": "SHARD_GRAD_OP",
        "fsdp_backward_prefetch": "BACKWARD_PRE",
        "fsdp_use_orig_params": True,
        "fsdp_sync_module_states": True,
        "fsdp_forward_prefetch": False,
        "fsdp_offload_params": True,
    },
}


def test_env_prints_versions_devices_variables_and_the_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("distributed_type: 'NO'\n")
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "INFO")
    monkeypatch.setenv("ACCELERATE_API_KEY", "secret")
    assert main(["env", "--config_file", str(path)]) == 0
    out = capsys.readouterr().out
    for expected in (accelerate.__version__, "PyTorch", "gloo", "ACCELERATE_LOG_LEVEL=INFO", "distributed_type: 'NO'"):
        assert expected in out
    assert "secret" not in out


@pytest.mark.parametrize(
    ("strategy", "reshards"),
    [
        ("FULL_SHARD", True),
        ("HYBRID_SHARD", True),
        ("SHARD_GRAD_OP", False),
        ("NO_SHARD", False),
        (1, True),
        ("2", False),
    ],
)
def test_a_sharding_strategy_becomes_resharding(strategy: object, reshards: bool) -> None:
    converted = convert_config_to_fsdp2({"fsdp_config": {"fsdp_sharding_strategy": strategy}})
    assert converted["fsdp_config"] == {"fsdp_reshard_after_forward": reshards, "fsdp_version": 2}


@pytest.mark.parametrize(
    ("strategy", "words"), [("NO_SHARD", "use DDP"), (3, "NO_SHARD"), ("HYBRID_SHARD", "dp_replicate_size")]
)
def test_a_strategy_that_version_2_does_not_have_gets_a_remark(
    strategy: object, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    convert_config_to_fsdp2({"fsdp_config": {"fsdp_sharding_strategy": strategy}})
    assert words in capsys.readouterr().err


def test_what_version_2_has_no_use_for_is_left_out_with_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    before = yaml.safe_dump(FSDP1)
    converted = convert_config_to_fsdp2(FSDP1)
    assert set(converted["fsdp_config"]) == {"fsdp_reshard_after_forward", "fsdp_offload_params", "fsdp_version"}
    assert capsys.readouterr().err.count("is left out") == 4
    assert yaml.safe_dump(FSDP1) == before


def test_a_file_is_converted_in_place_or_into_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "a.yaml", tmp_path / "b.yaml"
    source.write_text(yaml.safe_dump(FSDP1))
    assert to_fsdp2.main(["--config_file", str(source)]) == 2
    assert to_fsdp2.main(["--config_file", str(source), "--output-file", str(target)]) == 0
    assert to_fsdp2.main(["--config_file", str(source), "--output_file", str(target)]) == 2
    assert to_fsdp2.main(["--config_file", str(source), "--overwrite"]) == 0
    assert yaml.safe_load(source.read_text()) == yaml.safe_load(target.read_text())
    assert "is left out" in capsys.readouterr().err


def test_a_file_without_fsdp_and_a_missing_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fsdp_config"):
        convert_config_to_fsdp2({})
    assert to_fsdp2.main(["--config_file", str(tmp_path / "nowhere.yaml"), "--overwrite"]) == 2


def test_tpu_commands_are_one_argument_of_a_list(capsys: pytest.CaptureFixture[str]) -> None:
    parser = tpu.tpu_command_parser()
    args = parser.parse_args(
        [
            "--tpu_name",
            "t; rm",
            "--tpu_zone",
            "z",
            "--command",
            "echo",
            "a b",
            "--command",
            "ls",
            "--install_accelerate",
        ]
    )
    copy, words = tpu.command_lines(args, {}, Path("here"))
    wheel = f"accelerate-{__version__}-py3-none-any.whl"
    assert copy[3:7] == ["tpu-vm", "scp", f"here/{wheel}", "t; rm:/tmp/"]
    assert words[:6] == ["gcloud", "compute", "tpus", "tpu-vm", "ssh", "t; rm"]
    install = f"python3 -m pip install --upgrade /tmp/{wheel}"
    assert words[words.index("--command") + 1] == f"cd /usr/share; {install}; echo 'a b'; ls"
    assert words[-2:] == ["--worker", "all"]
    assert tpu.main(["--tpu_name", "t", "--tpu_zone", "z", "--command", "ls -l | wc", "--debug"]) == 0
    shown = capsys.readouterr().out.removeprefix("Running ")
    assert shlex.split(shown)[5:] == ["t", "--zone", "z", "--command", "cd /usr/share; ls -l | wc", "--worker", "all"]


@pytest.mark.parametrize("version", [pytest.param("latest", marks=slow), pytest.param("dev", marks=slow), "0.30.1"])
def test_a_pod_gets_this_very_package_whatever_version_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], version: str
) -> None:
    gcloud = tmp_path / "gcloud"
    gcloud.write_text(
        f"#!/bin/sh\nif [ $4 = scp ]; then cp $5 {tmp_path}; fi\necho $4 >> {tmp_path}/order\n", encoding="utf-8"
    )
    gcloud.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    words = ["--tpu_name", "t", "--tpu_zone", "z", "--install_accelerate", "--accelerate_version", version]
    assert tpu.main(words) == 0
    assert ("no release of this package" in capsys.readouterr().err) == (version == "0.30.1")
    assert (tmp_path / "order").read_text().split() == ["scp", "ssh"]
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        information = f"accelerate-{__version__}.dist-info"
        page = {
            f"accelerate/guests/monitor/{name}" for name in ("page.html", "page.css", "charts.js", "page.js", "runs.js")
        }
        assert {"accelerate/accelerator.py", *page} <= set(names)
        assert f"Version: {__version__}" in archive.read(f"{information}/METADATA").decode()
        rows = [row.split(",") for row in archive.read(f"{information}/RECORD").decode().split()]
        assert sorted(row[0] for row in rows) == sorted(names)
    installed = tmp_path / "installed"
    quiet = ["--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "install", *quiet, "--target", str(installed), str(wheel)], check=True)
    program = "import accelerate; print(accelerate.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )
    assert found.stdout.startswith(str(installed)), found.stderr


def test_to_fsdp2_onto_an_existing_file_raises_file_exists_error(tmp_path: Path) -> None:
    source, target = tmp_path / "one.yaml", tmp_path / "two.yaml"
    source.write_text("distributed_type: FSDP\nfsdp_config: {fsdp_version: 1, fsdp_sharding_strategy: FULL_SHARD}\n")
    target.write_text("mine")
    words = ["--config_file", str(source), "--output_file", str(target)]
    with pytest.raises(FileExistsError, match="--overwrite"):
        to_fsdp2.to_fsdp2_command(to_fsdp2.to_fsdp2_command_parser().parse_args(words))
    assert to_fsdp2.main(words) == 2
    assert target.read_text() == "mine"


def test_tpu_config_without_a_tpu_or_a_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert tpu.main(["--command", "ls"]) == 2
    assert tpu.main(["--tpu_name", "t", "--tpu_zone", "z"]) == 2
    assert "Traceback" not in capsys.readouterr().err
