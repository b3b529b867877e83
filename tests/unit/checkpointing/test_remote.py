"""Checkpoints behind a network: the same promises, on fsspec's memory and on a server that speaks S3."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate.checkpointing import (
    Background,
    list_checkpoints,
    pin,
    read_checkpoint,
    write_checkpoint,
)
from accelerate.checkpointing import storage as storage_module
from accelerate.checkpointing.series import list_committed
from accelerate.checkpointing.storage import RemoteStorage, storage_of
from accelerate.errors import CheckpointError, CheckpointNotFound
from accelerate.settings.training import ProjectOptions
from tests.ranks import run_on_ranks
from tests.unit.checkpointing.resuming import resume_models

fsspec = pytest.importorskip("fsspec")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Attempts follow each other at once, and files pass through a folder that must be empty in the end."""
    monkeypatch.setattr(storage_module, "FIRST_PAUSE_SECONDS", 0.001)
    passage = tmp_path / "passage"
    passage.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(passage))
    yield passage
    assert list(passage.iterdir()) == []


@pytest.fixture
def memory() -> Iterator[str]:
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    yield "memory://bucket/run"
    system.store.clear()


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    """A server of S3's protocol on this host, as the variables with which real clients of S3 find it."""
    if importlib.util.find_spec("s3fs") is None or importlib.util.find_spec("moto") is None:
        pytest.skip("needs s3fs and moto[server]: make storage")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    settings = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
        "NO_PROXY": "127.0.0.1",
    }
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.2)
        yield settings
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture
def s3(server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    fsspec.filesystem("s3").makedirs("bucket", exist_ok=True)
    return "s3://bucket/run"


@pytest.fixture(params=["memory", "s3"])
def root(request: pytest.FixtureRequest) -> str:
    return f"{request.getfixturevalue(request.param)}/{time.monotonic_ns()}"


def project(root: str, **options: Any) -> ProjectOptions:
    return ProjectOptions(project_dir=root, automatic_checkpoint_naming=True, **options)


def save(target: str | ProjectOptions, value: float, **more: Any) -> str:
    where: dict[str, Any] = {"project": target} if isinstance(target, ProjectOptions) else {"output_dir": target}
    weights = [{"w": torch.full((50,), value)}, *[{"w": torch.zeros(1)}] * more.pop("extra", 0)]
    return write_checkpoint(**where, weights=weights, step=int(value), **more)


def load(target: str | ProjectOptions) -> float:
    where: dict[str, Any] = {"project": target} if isinstance(target, ProjectOptions) else {"input_dir": target}
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.zeros(50))
    found = read_checkpoint(**where, models=[model])
    assert found.step == int(model.w[0].item())
    return model.w[0].item()


def files(address: str) -> set[str]:
    return set(storage_of(address).files())


def test_a_checkpoint_is_saved_listed_and_loaded(root: str) -> None:
    options = project(root)
    assert save(options, 1, metrics={"loss": 2.0}) == f"{root}/checkpoints/checkpoint_0"
    save(options, 2, pin=True)
    assert load(options) == 2.0
    assert load(f"{root}/checkpoints/checkpoint_0") == 1.0
    assert files(f"{root}/checkpoints/checkpoint_0") == {"manifest.json", "model.safetensors", "random_states_0.json"}
    listed = [(entry.name, entry.problem, entry.is_pinned, dict(entry.metrics)) for entry in list_checkpoints(root)]
    assert listed == [("checkpoint_0", None, False, {"loss": 2.0}), ("checkpoint_1", None, True, {})]


def test_numbers_go_on_and_limits_hold(root: str) -> None:
    for value in range(5):
        address = save(project(root, total_limit=2), value)
        if value == 1:
            pin(address)
    assert [entry.name for entry in list_checkpoints(root)] == ["checkpoint_1", "checkpoint_3", "checkpoint_4"]


def test_a_checkpoint_is_replaced_in_its_folder(root: str) -> None:
    save(f"{root}/last", 1, extra=1)
    storage_of(f"{root}/last").write("notes.txt", b"foreign")
    save(f"{root}/last", 2)
    assert load(f"{root}/last") == 2.0
    assert files(f"{root}/last") == {"manifest.json", "model.safetensors", "random_states_0.json", "notes.txt"}
    assert set(storage_of(root).folders()) == {"last"}


def test_damage_is_found_and_an_older_one_is_loaded(root: str) -> None:
    options = project(root)
    addresses = [save(options, value) for value in range(1, 6)]
    storage_of(addresses[4]).write("model.safetensors", b"x" * 264)
    storage_of(addresses[3]).delete("random_states_0.json")
    storage_of(addresses[2]).write("random_states_0.json", b"")
    storage_of(addresses[1]).delete("manifest.json")
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.zeros(50))
    found = read_checkpoint(project=options, models=[model])
    assert model.w[0] == 1.0
    assert list(found.skipped) == [f"checkpoint_{number}" for number in (4, 3, 2, 1)]
    reasons = list(found.skipped.values())
    assert "model.safetensors" in reasons[0]
    assert reasons[1] == "random_states_0.json: missing"
    assert "truncated to 0 bytes" in reasons[2]
    assert "no manifest.json" in reasons[3]


def test_what_is_not_there_is_not_found(root: str) -> None:
    with pytest.raises(CheckpointNotFound):
        load(f"{root}/nowhere")
    with pytest.raises(CheckpointNotFound):
        load(project(root))
    assert resume_models([], project=project(root)) is None


def test_in_the_background(root: str) -> None:
    background = Background()
    for value in range(3):
        save(project(root, total_limit=2), value, background=background, asynchronous=True)
    background.wait()
    assert load(project(root)) == 2.0
    assert len(list_checkpoints(root)) == 2


def test_two_ranks_save_to_one_server(s3: str, quick: Path) -> None:
    root = f"{s3}/{time.monotonic_ns()}"

    def attempt(asynchronous: bool) -> tuple[str, float]:
        from accelerate.distributed.world import join_world

        world = join_world(cpu=True)
        background = Background()
        address = write_checkpoint(
            project=project(root),
            world=world,
            weights=[{"w": torch.full((50,), 3.0)}],
            step=3,
            background=background,
            asynchronous=asynchronous,
        )
        background.wait()
        model = torch.nn.Module()
        model.w = torch.nn.Parameter(torch.zeros(50))
        read_checkpoint(address, world=world, models=[model])
        return address, model.w[0].item()

    for number, asynchronous in enumerate([False, True]):
        address = f"{root}/checkpoints/checkpoint_{number}"
        assert run_on_ranks(attempt, 2, asynchronous, timeout_seconds=100) == [(address, 3.0)] * 2
        assert {"random_states_0.json", "random_states_1.json"} < files(address)


# ------------------------------------------------------------------------------------------ a bad network


class Network:
    """Every n-th call of the file system fails, in one of the ways in which networks do."""

    CALLS = ("put_file", "get_file", "pipe_file", "cat_file", "ls", "find", "info", "cp_file", "rm_file", "rm")

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, every: int = 0, from_call: int | None = None) -> None:
        self.every, self.from_call, self.count = every, from_call, 0
        self.system = fsspec.filesystem("memory")
        for name in self.CALLS:
            monkeypatch.setattr(type(self.system), name, self.wrapped(getattr(type(self.system), name)), raising=True)

    def wrapped(self, function: Any) -> Any:
        inside: list[bool] = []

        def call(*arguments: Any, **options: Any) -> Any:
            if not inside:
                self.count += 1
                if self.every and self.count % self.every == 0:
                    raise ConnectionResetError("Connection reset by peer")
                if self.from_call is not None and self.count >= self.from_call:
                    raise TimeoutError("the network is gone")
            inside.append(True)  # what one call of fsspec makes of others is one call to us
            try:
                return function(*arguments, **options)
            finally:
                inside.pop()

        return call


def test_a_network_that_fails_now_and_then_is_met_with_patience(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network(monkeypatch, every=3)
    for value in range(4):
        save(project(memory, total_limit=2), value)
        save(f"{memory}/last", value)
    assert load(project(memory)) == 3.0
    assert load(f"{memory}/last") == 3.0
    assert network.count > 50


def test_a_network_that_is_gone_at_any_call_leaves_the_old_or_the_new_state(memory: str, quick: Path) -> None:
    """In a fresh folder and in one that is replaced, for every call after which the network may go."""
    for number in range(1, 200):
        failed = 0
        for fresh in (True, False):
            address = f"{memory}/{number}/{'fresh' if fresh else 'replaced'}"
            if not fresh:
                save(address, 1)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(storage_module, "NUM_ATTEMPTS", 2)
                Network(patch, from_call=number)
                try:
                    save(address, 2)
                except (CheckpointError, TimeoutError):
                    failed += 1
            if fresh:
                assert not list_committed(address) or load(address) == 2.0
            else:
                assert load(address) in (1.0, 2.0)
            save(address, 3)
            assert load(address) == 3.0
            assert files(address) == {"manifest.json", "model.safetensors", "random_states_0.json"}
        assert set(storage_of(f"{memory}/{number}").folders()) == {"fresh", "replaced"}
        if not failed:
            assert number > 10
            return
    raise AssertionError("the save never got through")


def test_answers_that_stay_the_same_are_not_asked_for_again(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = storage_of(memory)
    assert isinstance(storage, RemoteStorage)
    calls: list[int] = []

    def denied(*_: Any, **__: Any) -> None:
        calls.append(1)
        raise PermissionError("no")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "cat_file", denied)
    with pytest.raises(PermissionError):
        storage.read("x")
    assert len(calls) == 1


def test_an_unknown_protocol_is_refused_in_words() -> None:
    with pytest.raises(CheckpointError, match="gopher"):
        save("gopher://host/ck", 1)


def test_a_url_of_a_local_file_is_a_path(tmp_path: Path) -> None:
    save(f"file://{tmp_path}/ck", 1)
    assert load(str(tmp_path / "ck")) == 1.0
    shutil.rmtree(tmp_path / "ck")
