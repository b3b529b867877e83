"""A real run is logged to each service offline, and read back by the service's own reader."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.python_path import python_path

HERE = Path(__file__).parent
SERVICES = ("tensorboard", "wandb", "mlflow", "aim", "comet_ml", "clearml", "dvclive", "swanlab", "trackio")
SETTINGS = {"learning_rate": 0.5, "batch_size": 32, "model": "linear"}
NUM_STEPS = 12

pytestmark = pytest.mark.timeout(1800)  # services start many processes, however loaded the machine


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Every service keeps to ``folder``, and none looks for a network."""
    # ClearML's reporter is forked while another thread of ClearML's starts git, which may then wait for ever.
    (folder / "clearml.conf").write_text("sdk { development { report_use_subprocess: false } }\n")
    return {
        **os.environ,
        "PYTHONPATH": python_path(),
        "HOME": str(folder),
        "HF_HOME": str(folder),
        "PYTHONUNBUFFERED": "1",
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        "COMET_START_ONLINE": "false",
        "COMET_OFFLINE_DIRECTORY": str(folder / "comet"),
        "COMET_API_KEY": "none",
        "CLEARML_OFFLINE_MODE": "1",
        "CLEARML_CONFIG_FILE": str(folder / "clearml.conf"),
        "CLEARML_CACHE_DIR": str(folder / "clearml"),
        "TRACKIO_DIR": str(folder / "trackio"),
        "DVCLIVE_TEST": "true",  # no usage statistics
        "DO_NOT_TRACK": "1",
        **more,
    }


def command(folder: Path, services: Sequence[str], *options: str) -> list[str]:
    return [sys.executable, str(HERE / "run.py"), str(folder), *services, *options]


def jsonl(folder: Path) -> tuple[dict[str, Any], dict[int, float]]:
    """The settings and the losses of the JSONL log."""
    first, *rest = [json.loads(line) for line in (folder / "digits.jsonl").read_text().splitlines()]
    return first["config"], {line["step"]: line["train_loss"] for line in rest}


def read_back(service: str, folder: Path) -> tuple[dict[str, Any] | None, dict[int, float]]:
    done = subprocess.run(
        [sys.executable, str(HERE / "readers.py"), service, str(folder)],
        env=environment(folder), cwd=folder, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    kept = json.loads(done.stdout.splitlines()[-1])
    return kept["settings"], {int(step): loss for step, loss in kept["losses"]}


def assert_kept(service: str, folder: Path) -> None:
    settings, losses = jsonl(folder)
    assert settings == SETTINGS and list(losses) == list(range(1, NUM_STEPS + 1))
    kept_settings, kept_losses = read_back(service, folder)
    assert kept_settings is None or {key: kept_settings[key] for key in SETTINGS} == SETTINGS
    assert kept_losses == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize("service", SERVICES)
def test_a_run_is_logged_offline_and_read_back(service: str, tmp_path: Path) -> None:
    done = subprocess.run(
        command(tmp_path, [service], "--images", "--steps", str(NUM_STEPS)),
        env=environment(tmp_path), cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "The tracker" not in done.stderr  # nothing failed, nothing was left out
    assert_kept(service, tmp_path)


def test_all_nine_at_once(tmp_path: Path) -> None:
    done = subprocess.run(
        command(tmp_path, SERVICES, "--images", "--steps", str(NUM_STEPS)),
        env=environment(tmp_path), cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "The tracker" not in done.stderr
    for service in SERVICES:
        assert_kept(service, tmp_path)


# ------------------------------------------------------------------------------------- backends that die


def listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def mlflow_server(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A real MLflow server, and its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    files = ["--backend-store-uri", f"sqlite:///{tmp_path}/server.db", "--artifacts-destination", str(tmp_path)]
    with (tmp_path / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [*program, *files], env=environment(tmp_path), cwd=tmp_path, stdout=log, stderr=log, start_new_session=True
        )
    deadline = time.monotonic() + 600
    try:
        while not listens(port):
            assert time.monotonic() < deadline and server.poll() is None, (tmp_path / "server.log").read_text()
            time.sleep(0.2)
        yield server, f"http://127.0.0.1:{port}"
    finally:
        for number in (signal.SIGCONT, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, number)
        server.wait()


def steps_of_a_run_whose_backend_goes(
    folder: Path, service: str, go: Any, *, num_steps: int = 60, **more: str
) -> tuple[dict[str, Any], str]:
    """(the run's report, what it said); ``go(run)`` is called after the first step."""
    run = subprocess.Popen(
        command(folder, [service], "--steps", str(num_steps), "--step_seconds", "0.05", "--finish_seconds", "5"),
        env=environment(folder, **more), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert run.stdout is not None
    try:
        for line in run.stdout:
            if line.startswith("step 1"):
                break
        go(run)
        said = run.communicate(timeout=600)[1]
    finally:
        run.kill()
    assert run.returncode == 0, said
    _, losses = jsonl(folder)
    assert list(losses) == list(range(1, num_steps + 1))  # the JSONL log has every step
    return json.loads((folder / "report.json").read_text()), said


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_killing_or_stopping_the_mlflow_server_costs_no_step(
    tmp_path: Path, mlflow_server: tuple[subprocess.Popen[bytes], str], how: signal.Signals
) -> None:
    server, address = mlflow_server
    report, said = steps_of_a_run_whose_backend_goes(
        tmp_path, "mlflow", lambda _run: os.killpg(server.pid, how), MLFLOW_TRACKING_URI=address
    )
    ended = time.time()
    assert max(report["step_seconds"]) < 1.0
    assert report["end_seconds"] < 30
    assert ended - report["ended_at"] < 30  # MLflow itself would try to reach the server for minutes
    assert said.count("The tracker 'mlflow' failed") <= 1
    assert said.count("The tracker 'mlflow' left out calls") == 1
    assert said.count("MLflow could not be told that run") == 1


def test_killing_the_service_process_of_wandb_costs_no_step(tmp_path: Path) -> None:
    import psutil

    def kill(run: subprocess.Popen[str]) -> None:
        for child in psutil.Process(run.pid).children(recursive=True):
            child.kill()

    report, _said = steps_of_a_run_whose_backend_goes(tmp_path, "wandb", kill)
    assert max(report["step_seconds"]) < 1.0
    assert report["end_seconds"] < 30
