"""One recorded run for all tests that only read it, or a copy of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.reproduce.scripts import SECRETS, run_script, write_scripts


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a script with its finished run in ``run``: 24 updates, two checkpoints, and many secrets."""
    folder = tmp_path_factory.mktemp("recorded")
    write_scripts(folder)
    options = [word for name, value in SECRETS.items() if name.startswith("--") for word in (name, value)]
    variables = {name: value for name, value in SECRETS.items() if not name.startswith("--")}
    ended = run_script(folder, "run", "--seed", "1", *options, environment=variables)
    assert ended.returncode == 0, ended.stderr
    return folder


@pytest.fixture
def copied(recorded: Path, tmp_path: Path) -> Path:
    """A copy of the run's folder, to be changed."""
    return Path(shutil.copytree(recorded / "run", tmp_path / "run"))
