"""`accelerate verify` on scripts of libraries on top: a Trainer, a loop without one, TRL's SFT, a diffusion model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.test_clients import HERE, SOURCE, environment

pytestmark = pytest.mark.timeout(1200)
#: By script, the layouts that must agree.
LAYOUTS = {
    "trainer": "ranks2,parts2,ranks2_parts2,fsdp2,recompute",
    "no_trainer": "ranks2,parts2,fsdp2,bf16,resume",
    "sft": "ranks2,parts2",
    "diffusion": "ranks2,parts2,fsdp2,resume",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the tiny models and data."""
    folder = tmp_path_factory.mktemp("verified")
    command = [sys.executable, str(HERE / "assets.py"), str(folder / "assets")]
    subprocess.run(command, env=environment(folder), check=True, capture_output=True)
    return folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_agree(name: str, folder: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [
        sys.executable, "-m", "accelerate.commands.main", "verify", str(HERE / "verified" / f"{name}.py"),
        "--num_steps", "4", "--layouts", LAYOUTS[name], "--report", str(report),
    ]  # fmt: skip
    variables = {**environment(folder), "PYTHONPATH": os.fspath(SOURCE)}
    done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    states = {layout["name"]: layout["state"] for layout in json.loads(report.read_text())["layouts"]}
    assert states == dict.fromkeys(LAYOUTS[name].split(","), "agrees")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [report]  # nothing of the script's is written
