"""Worlds of one, pretended worlds, and the choices that are made before anybody is met."""

from __future__ import annotations

import importlib.machinery
import socket
import sys
import types
from datetime import timedelta

import pytest
import torch

from accelerate import cores
from accelerate.devices import table as devices
from accelerate.distributed import rendezvous, world
from accelerate.distributed.environment import ProcessIdentity
from accelerate.distributed.world import (
    World,
    current_world,
    expected_backend,
    forget_world,
    join_world,
    leave_world,
    release_before_leaving,
    release_ddp,
)
from accelerate.errors import WorldError


def test_a_process_that_nobody_started_is_a_world_of_one() -> None:
    assert current_world() is None
    joined = join_world()
    assert (joined.rank, joined.size, joined.local_rank, joined.local_size) == (0, 1, 0, 1)
    assert joined.device == torch.device("cpu")
    assert joined.backend is None
    assert joined.label == "NO"
    assert joined.is_main
    assert joined.is_local_main
    assert joined.is_last
    assert not joined.is_distributed
    assert not torch.distributed.is_initialized()


def test_joining_again_gives_the_same_world_until_it_is_left() -> None:
    first = join_world()
    assert join_world(debug=True) is first
    assert current_world() is first
    leave_world()
    assert current_world() is None
    assert join_world() is not first


def test_forgetting_lets_the_next_join_decide_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not join_world().debug
    forget_world()
    assert current_world() is None
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "true")
    assert join_world().debug


def test_a_world_of_one_under_a_launcher_needs_no_group_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert join_world().backend is None


def test_alone_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert expected_backend() == ("gloo", devices.CPU)
    assert join_world(alone=True).size == 1


def test_a_pretended_world_answers_for_any_rank() -> None:
    pretended = World.pretend(rank=3, size=8)
    assert (pretended.rank, pretended.size, pretended.local_rank, pretended.local_size) == (3, 8, 3, 8)
    assert not pretended.is_main
    assert World.pretend(rank=7, size=8).is_last
    assert World.pretend(rank=4, size=8, local_rank=0, local_size=4).is_local_main
    assert current_world() is None


def test_the_device_variable_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")
    assert join_world().device == torch.device("cpu")


@pytest.mark.parametrize(
    ("value", "words"), [("cuda:0", "torch finds no cuda device"), ("warp", "no device that is known")]
)
def test_a_device_that_isnt_there_is_refused(monkeypatch: pytest.MonkeyPatch, value: str, words: str) -> None:
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", value)
    with pytest.raises(WorldError, match=words) as caught:
        join_world()
    assert "ACCELERATE_TORCH_DEVICE" in str(caught.value)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> devices.DeviceKind:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return devices.kind_of("cuda")


def identity(local_rank: int, name: str = "torchrun") -> ProcessIdentity:
    return ProcessIdentity(local_rank, 4, local_rank, 4, "127.0.0.1", 1, name)


def test_each_process_of_a_host_takes_its_own_device(two_gpus: devices.DeviceKind) -> None:
    assert world._choose_device(two_gpus, None, identity(1)) == torch.device("cuda:1")
    assert world._choose_device(two_gpus, None, None) == torch.device("cuda:0")
    assert world._choose_device(two_gpus, "cuda:1", identity(0)) == torch.device("cuda:1")
    assert world._choose_device(two_gpus, "cuda", identity(1)) == torch.device("cuda:1")


def test_more_processes_than_devices_are_refused(two_gpus: devices.DeviceKind) -> None:
    with pytest.raises(WorldError, match=r"process 2 of its host .* sees 2 cuda device.*CUDA_VISIBLE_DEVICES"):
        world._choose_device(two_gpus, None, identity(2))


def test_a_scheduler_that_shows_each_task_one_device(
    two_gpus: devices.DeviceKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert world._choose_device(two_gpus, None, identity(3, "Slurm")) == torch.device("cuda:0")


def test_the_backend_is_the_kinds_own_unless_asked_for(
    two_gpus: devices.DeviceKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert world._choose_backend(two_gpus, identity(0), None) == "nccl"
    assert world._choose_backend(two_gpus, identity(0), "gloo") == "gloo"
    assert world._choose_backend(devices.CPU, identity(0), None) == "gloo"
    monkeypatch.setattr(torch.distributed, "is_mpi_available", lambda: True)
    assert world._choose_backend(devices.CPU, identity(0, "Open MPI"), None) == "mpi"
    assert world._choose_backend(devices.CPU, identity(0), None) == "gloo"
    assert world._choose_backend(devices.kind_of("mps"), identity(0), None) == "gloo"


def test_threads_are_shared_between_the_processes_of_a_host(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(cores, "num_cores", lambda cpus=None: 16)
    world._share_cores(identity(0))
    assert chosen == []  # OMP_NUM_THREADS is set
    monkeypatch.delenv("OMP_NUM_THREADS")
    world._share_cores(identity(0))
    assert chosen == [4]
    assert "OMP_NUM_THREADS" in caplog.text
    caplog.clear()
    world._share_cores(identity(1))
    assert (chosen, caplog.text) == ([4, 4], "")


def test_releasers_run_once_newest_first_and_all_of_them(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[str] = []

    def fails() -> None:
        raise ValueError("can't let go")

    release_before_leaving(lambda: calls.append("first"))
    release_before_leaving(fails)
    release_before_leaving(lambda: calls.append("last"))
    leave_world()
    leave_world()
    assert calls == ["last", "first"]
    assert "can't let go" in caplog.text
    caplog.clear()


def test_a_rendezvous_that_nobody_keeps_is_an_error_that_says_where(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rendezvous, "NOTICE_SECONDS", 0.2)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(WorldError, match="Rank 1 of 2 reached nobody") as caught:
        join_world(timeout=timedelta(seconds=1))
    assert f"127.0.0.1:{port}" in str(caught.value)
    assert "MASTER_ADDR" in str(caught.value)
    assert "Rank 1 waits for rank 0 at" in caplog.text  # long before it gives up
    assert current_world() is None


def test_a_busy_port_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_INET6) as holder:
        holder.bind(("::", 0))
        holder.listen()
        port = holder.getsockname()[1]
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": str(port)}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(WorldError, match=f"Port {port} of this host is in use") as caught:
            join_world(timeout=timedelta(seconds=1))
    assert "MASTER_PORT" in str(caught.value)


def test_ranks_that_never_come_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(WorldError, match="ranks 1 and 2 of 3 didn't come"):
        join_world(timeout=timedelta(seconds=1))


def test_an_init_method_that_is_unknown_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(WorldError, match="carrier://pigeon"):
        join_world(init_method="carrier://pigeon")


def test_a_replica_without_its_group_is_its_module() -> None:
    class Replica(torch.nn.Module):
        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module = module
            self.reducer = object()
            self.logger = object()
            self.process_group = object()
            self._comm_hooks = [("hook", "state")]
            self.require_backward_grad_sync = True

        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            raise AssertionError("the reducer is gone")

    replica = Replica(torch.nn.Linear(2, 2))
    release_ddp(replica)  # pyright: ignore[reportArgumentType]
    assert replica.reducer is None
    assert replica.process_group is None
    assert replica._comm_hooks == []
    assert replica(torch.ones(1, 2)).shape == (1, 2)
    release_ddp(replica)  # pyright: ignore[reportArgumentType]


def test_an_accelerators_group_is_bound_to_its_device(
    two_gpus: devices.DeviceKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    formed: dict[str, object] = {}

    def form_group(identity: ProcessIdentity, backend: str, **options: object) -> torch.distributed.HashStore:
        formed.update(options, backend=backend)
        return torch.distributed.HashStore()

    monkeypatch.setattr("accelerate.distributed.rendezvous.form_group", form_group)
    monkeypatch.setattr(world.hardware, "refuse_missing_links", lambda kind: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: formed.update(set_device=device))
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    joined = join_world(timeout=timedelta(seconds=60))
    assert joined.label == "MULTI_GPU"
    assert joined.device == torch.device("cuda:1")
    assert joined.coordinator is not None
    assert joined.coordinator.timeout == timedelta(seconds=60)
    assert formed["backend"] == "nccl"
    assert formed["device_id"] == formed["set_device"] == torch.device("cuda:1")
    forget_world()
    formed.clear()
    join_world(backend="cuda:nccl,cpu:gloo")
    assert formed["backend"] == "cuda:nccl,cpu:gloo"
    assert formed["device_id"] is None


def test_a_runtime_that_connects_its_processes_itself_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = types.ModuleType("torch_xla.runtime")
    answers = {"global_ordinal": 3, "world_size": 8, "local_ordinal": 1, "local_process_count": 4}
    for name, value in answers.items():
        setattr(runtime, name, lambda value=value: value)
    package = types.ModuleType("torch_xla")
    package.__spec__ = importlib.machinery.ModuleSpec("torch_xla", None)
    package.device = lambda: torch.device("cpu")  # type: ignore[attr-defined]
    runtime.addressable_runtime_device_count = lambda: 1  # type: ignore[attr-defined]
    backend = types.ModuleType("torch_xla.distributed.xla_backend")
    for module in (package, runtime, backend, types.ModuleType("torch_xla.distributed")):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    formed: dict[str, object] = {}
    monkeypatch.setattr(
        "torch.distributed.init_process_group", lambda name, **options: formed.update(options, name=name)
    )
    monkeypatch.setattr(
        "accelerate.distributed.rendezvous.store_of_group", lambda number: torch.distributed.HashStore()
    )
    joined = join_world()
    assert (joined.rank, joined.size, joined.local_rank, joined.local_size) == (3, 8, 1, 4)
    assert joined.label == "XLA"
    assert formed == {"name": "xla", "init_method": "xla://", "rank": 3, "world_size": 8}
    assert joined.coordinator is not None and joined.coordinator.size == 8


def test_one_program_for_all_devices_is_chosen_before_any_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    runtime = types.ModuleType("torch_xla.runtime")
    answers = {"world_size": 1, "local_ordinal": 0, "local_process_count": 1, "is_spmd": False}
    for name, value in {**answers, "addressable_runtime_device_count": 4}.items():
        setattr(runtime, name, lambda value=value: value)
    runtime.use_spmd = lambda: order.append("one program")  # type: ignore[attr-defined]
    runtime.global_ordinal = lambda: order.append("device") or 0  # type: ignore[attr-defined]
    package = types.ModuleType("torch_xla")
    package.__spec__ = importlib.machinery.ModuleSpec("torch_xla", None)
    package.device = lambda: torch.device("cpu")  # type: ignore[attr-defined]
    locked = types.SimpleNamespace(_xla_get_spmd_config_is_locked=lambda: bool(order))
    package._XLAC = locked  # type: ignore[attr-defined]
    for module in (package, runtime):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    assert join_world(spmd=True).size == 1
    assert order == ["one program", "device"]
    forget_world()
    with pytest.raises(WorldError, match="Make the Accelerator before the first tensor"):
        join_world(spmd=True)
