"""The world of this process: its rank, device and process group, and how to join and leave it.

This module holds the global world. `join_world` makes or adopts torch's process group. `leave_world` releases all
references to the group, then destroys it, because a group that outlives the interpreter aborts the process.
"""

from __future__ import annotations

import atexit
import gc
import linecache
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar, final

import torch
import torch.distributed as dist

from .. import seams
from ..cores import threads_of_this_rank
from ..devices import hardware, table
from ..devices.table import DeviceKind
from ..errors import WorldError
from ..settings.env import flag, read, snapshot
from ..torch_private.distributed import forget_comm_hooks
from . import environment
from .failures import RECORDS_VARIABLE, forget_end, record_end
from .flight_record import FailureHook
from .store_client import Coordinator

if TYPE_CHECKING:
    from types import FrameType

    from ..seams import Members
    from ..torch_private.distributed import Store
    from .environment import ProcessIdentity

logger: logging.Logger = logging.getLogger(__name__)
Released = TypeVar("Released", bound=Callable[[], object])

#: How long ranks wait for each other by default.
DEFAULT_TIMEOUT: Final = timedelta(minutes=30)


@final
@dataclass(frozen=True)
class World:
    """This process's rank among those of a run, its device and its process group."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    kind: DeviceKind = table.CPU
    backend: str | None = None  # None: no process group
    attempt: int = 0  # how often the launcher has restarted the job
    fork_launched: bool = False
    coordinator: Coordinator | None = field(default=None, repr=False, compare=False)
    group: Any = field(default=None, repr=False, compare=False)  # of its ranks; None: the default group
    members: Members | None = field(default=None, repr=False, compare=False)  # instead of a process group

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Whether this is the first process of its host."""
        return self.local_rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the highest rank."""
        return self.rank == self.size - 1

    @property
    def is_distributed(self) -> bool:
        """Whether there are several ranks."""
        return self.size > 1

    @property
    def label(self) -> str:
        """The DistributedType of plain replicas in this world."""
        return self.kind.label if self.backend is not None or self.members is not None else "NO"

    @property
    def holders(self) -> World | None:
        """The ranks that hold, save and load the run's state together: all of them, unless ranks may be lost."""
        return self if self.members is None else self.members.replica

    @property
    def debug(self) -> bool:
        """Whether collectives are published and compared: as set by `set_debug`, else by ACCELERATE_DEBUG_MODE."""
        return flag("ACCELERATE_DEBUG_MODE") if _debug is None else _debug

    @classmethod
    def pretend(cls, rank: int = 0, size: int = 1, **fields: object) -> World:
        """Make a world without communication, to simulate one rank without the other processes."""
        return cls(rank=rank, size=size, **{"local_rank": rank, "local_size": size, **fields})


_world: World | None = None
_debug: bool | None = None  # as set since the world was joined
_forgotten: World | None = None  # by forget_world; its coordinator is still in use
_releasers: list[Callable[[], object]] = []
_num_adopted: dict[int, int] = {}  # by process id: a forked child starts at 0
_exit_hooked: set[int] = set()


def current_world() -> World | None:
    """Return the world that this process has joined, or None."""
    return _world


def join_world(
    *,
    cpu: bool = False,
    device: torch.device | str | None = None,
    backend: str | None = None,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    debug: bool = False,
    alone: bool = False,
    spmd: bool = False,
    **init_kwargs: object,
) -> World:
    """Join this process to its world and return it; later calls return the same world.

    An initialised process group is adopted. Otherwise, if the environment says that this process is one of several
    (`environment.detect`), they form a group.

    Args:
        cpu: compute on the CPU even if there is an accelerator.
        device: compute on this device (default: ACCELERATE_TORCH_DEVICE, else the first kind found here).
        backend: the communication backend (default: the device kind's own).
        timeout: how long to wait for the other processes, when joining and in every operation.
        init_method: the address of the rendezvous (`env://`, `tcp://HOST:PORT`, `file:///PATH`).
        debug: switch the check of collectives on (`set_debug`).
        alone: make a world of one process, ignoring the environment.
        spmd: with a device runtime (XLA), this process drives all devices (SPMD).
        init_kwargs: passed on to `torch.distributed.init_process_group`.

    Raises:
        WorldError: the environment contradicts itself, or the processes can't form one world.
    """
    global _world
    if _world is not None:
        return _world
    requested = device if device is not None else read("ACCELERATE_TORCH_DEVICE")
    kind = _choose_kind(cpu or flag("ACCELERATE_USE_CPU"), requested)
    facts: dict[str, Any] = {"kind": kind, "fork_launched": flag("FORK_LAUNCHED")}
    if debug:
        set_debug(True)
    if kind.runtime:
        _world = _join_runtime(kind, facts, spmd)
    elif not alone and (asked := [variable for variable in seams.members() if read(variable)]):
        _world = _join_members(asked[0], kind, requested, facts)
    elif _has_group() and not alone:
        _world = _adopt(requested, timeout, facts)
    else:
        identity = None if alone else _own_identity(init_kwargs, kind, backend)
        if identity is None:
            _world = World(device=_choose_device(kind, requested, None), **facts)
        else:
            _world = _form(identity, requested, backend, timeout, init_method, init_kwargs, facts)
    if kind.select:
        kind.set_device(_world.device)
        hardware.bind_to_cores(_world.local_rank)
    _leave_at_exit()
    return _world


def expected_backend(*, cpu: bool = False, backend: str | None = None) -> tuple[str | None, DeviceKind]:
    """Return the backend and the kind of device that `join_world` would choose, without joining."""
    if _world is not None:
        return _world.backend, _world.kind
    kind = _choose_kind(cpu or flag("ACCELERATE_USE_CPU"), read("ACCELERATE_TORCH_DEVICE"))
    if kind.runtime:
        return kind.backend, kind
    if _has_group():
        return dist.get_backend(), kind
    identity = _own_identity({}, kind, backend)
    return (None if identity is None else _choose_backend(kind, identity, backend)), kind


def set_debug(value: bool) -> None:
    """Switch the check of collectives on or off in this process, overriding ACCELERATE_DEBUG_MODE."""
    global _debug
    _debug = bool(value)


def forget_world() -> None:
    """Forget the joined world but keep its process group, which the next `join_world` adopts."""
    global _world, _forgotten, _debug
    _debug = None
    if _world is not None:
        _world, _forgotten = None, _world


def leave_group(group: Any = None) -> None:
    """Destroy the process group ``group``; without it, leave the world."""
    if group is None:
        leave_world()
    elif _has_group():
        dist.destroy_process_group(group)


def leave_world(*, at_exit: bool = False) -> None:
    """Release all references to the process group, destroy it, and forget the world.

    Args:
        at_exit: the process ends, and with it threads and connections.
    """
    global _world, _forgotten
    world, _world, _forgotten = _world or _forgotten, None, None
    _call_releasers()
    if world is not None and world.coordinator is not None:
        world.coordinator.leave(*dist.distributed_c10d._world.pg_map)
    if _has_group():
        _release_holders()
        dist.destroy_process_group()
    if world is not None and world.coordinator is not None:
        world.coordinator.wait_for_readers()
        if not at_exit:
            world.coordinator.close()


def release_before_leaving(release: Released) -> Released:
    """Register `release` to be called once before the process group is destroyed, to free what refers to it."""
    _releasers.append(release)
    return release


def release_ddp(ddp: torch.nn.parallel.DistributedDataParallel) -> None:
    """Make `ddp` release the process group; later calls run its module, without averaging gradients."""
    if ddp.__dict__.get("reducer") is None:
        return
    ddp.forward = ddp.module.__call__
    ddp.require_backward_grad_sync = False
    forget_comm_hooks(ddp)  # the states of communication hooks hold the group too
    for name in ("logger", "reducer", "process_group"):  # each of the three holds the group
        setattr(ddp, name, None)


# -- joining ----------------------------------------------------------------------------------------------


def _choose_kind(cpu: bool, requested: torch.device | str | None) -> DeviceKind:
    if cpu:
        return table.CPU
    if requested is None:
        return table.available_kind()
    try:
        kind = table.kind_of(requested)
    except ValueError as error:
        raise WorldError(f"ACCELERATE_TORCH_DEVICE={requested}: {error}") from None
    if kind is not table.CPU and not kind.is_available():
        raise WorldError(
            f"Device {str(requested)!r} was asked for (ACCELERATE_TORCH_DEVICE, or the argument `device`), but torch "
            f"finds no {kind.name} device here. Choose another device, or unset the variable."
        )
    return kind


def _choose_device(
    kind: DeviceKind, requested: torch.device | str | None, identity: ProcessIdentity | None
) -> torch.device:
    if requested is not None and table.kind_of(requested) is kind and torch.device(requested).index is not None:
        return torch.device(requested)
    if not kind.select:
        return kind.device()
    local_rank = 0 if identity is None else identity.local_rank
    num_devices = kind.device_count()
    if local_rank < num_devices:
        return kind.device(local_rank)
    if identity is not None and num_devices == 1 and identity.name not in ("torchrun", "environment"):
        return kind.device(0)  # the scheduler shows every task its own device only
    raise WorldError(
        f"This is process {local_rank} of its host (LOCAL_RANK), but torch sees {num_devices} {kind.name} device(s). "
        f"Start at most {num_devices} processes on this host, or show it more ({kind.visible_devices or 'its driver'})."
    )


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _own_identity(init_kwargs: dict[str, Any], kind: DeviceKind, backend: str | None) -> ProcessIdentity | None:
    """Return the identity from `join_world`'s rank= and world_size=, else the environment's; None for one process."""
    rank, size = init_kwargs.pop("rank", -1), init_kwargs.pop("world_size", -1)
    environ = snapshot()
    if rank >= 0 and size > 0:
        environ = {"LOCAL_RANK": str(rank), **environ, "RANK": str(rank), "WORLD_SIZE": str(size)}
    identity = environment.detect(environ)
    needs_no_group = identity is not None and identity.size == 1 and kind is table.CPU and backend is None
    return None if needs_no_group else identity


def _choose_backend(kind: DeviceKind, identity: ProcessIdentity, requested: str | None) -> str:
    if requested is not None:
        return requested
    if kind is table.CPU and "MPI" in identity.name and dist.is_mpi_available():
        return "mpi"
    return kind.backend or table.CPU.backend


def _form(
    identity: ProcessIdentity,
    requested: torch.device | str | None,
    backend: str | None,
    timeout: timedelta | None,
    init_method: str | None,
    init_kwargs: dict[str, Any],
    facts: dict[str, Any],
) -> World:
    from . import rendezvous

    kind: DeviceKind = facts["kind"]
    if not dist.is_available():
        raise WorldError(
            f"{identity.name} started {identity.size} processes, but this torch is built without torch.distributed. "
            "Install one that has it, or start a single process."
        )
    if kind is table.CPU:
        _share_cores(identity)
    elif identity.size > 1:
        hardware.refuse_missing_links(kind)
    device = _choose_device(kind, requested, identity)
    backend = _choose_backend(kind, identity, backend)
    store = rendezvous.form_group(
        identity,
        backend,
        timeout=timeout,
        init_method=init_method,
        device_id=device if kind.binds_group and backend == kind.backend else None,
        **init_kwargs,
    )
    coordinator = _coordinator_over(store, identity.rank, identity.size, timeout)
    place = (identity.rank, identity.size, identity.local_rank, identity.local_size)
    return World(*place, device, backend=backend, attempt=identity.attempt, coordinator=coordinator, **facts)


def _join_members(
    variable: str, kind: DeviceKind, requested: torch.device | str | None, facts: dict[str, Any]
) -> World:
    """Return a world with the members that ``variable`` asks for.

    It has no process group, which a lost rank couldn't leave.
    """
    identity = environment.detect(snapshot())
    if identity is None:
        raise WorldError(
            f"{variable}={read(variable)}, which a launcher sets, is there, but RANK and WORLD_SIZE are not. Start the "
            "script with the launcher, or unset the variable."
        )
    if kind is table.CPU:
        _share_cores(identity)
    place = (identity.rank, identity.size, identity.local_rank, identity.local_size)
    device = _choose_device(kind, requested, identity)
    members = seams.load(seams.members()[variable])(identity, device, kind)
    return World(*place, device, members=members, **facts)


def _adopt(requested: torch.device | str | None, timeout: timedelta | None, facts: dict[str, Any]) -> World:
    """Return the world of a process group that was initialised outside of this package."""
    rank, size = dist.get_rank(), dist.get_world_size()
    try:
        identity = environment.detect(snapshot())
    except WorldError:
        identity = None  # the group exists, so the environment isn't needed
    is_same = identity is not None and (identity.rank, identity.size) == (rank, size)
    local_rank, local_size = (
        (identity.local_rank, identity.local_size) if identity is not None and is_same else (rank, size)
    )
    kind: DeviceKind = facts["kind"]
    device = _choose_device(kind, requested, identity if is_same else None)
    coordinator = None if _forgotten is None else _forgotten.coordinator
    if coordinator is None or (coordinator.rank, coordinator.size) != (rank, size):
        from .rendezvous import store_of_group

        number = _num_adopted.get(os.getpid(), 0)
        _num_adopted[os.getpid()] = number + 1
        store = store_of_group(number)
        coordinator = _coordinator_over(store, rank, size, timeout)
    return World(
        rank, size, local_rank, local_size, device, backend=dist.get_backend(), coordinator=coordinator, **facts
    )


def _coordinator_over(store: Store, rank: int, size: int, timeout: timedelta | None = None) -> Coordinator:
    from .rendezvous import serves

    return Coordinator(store, rank, size, timeout or DEFAULT_TIMEOUT, keeps_store=serves(store, rank))


def _join_runtime(kind: DeviceKind, facts: dict[str, Any], spmd: bool) -> World:
    """Join the world of a runtime that starts and connects its processes itself."""
    import importlib

    runtime: Any = importlib.import_module(kind.runtime)
    if spmd and runtime.world_size() == 1 and not runtime.is_spmd():
        extension: Any = importlib.import_module(kind.extension)
        if extension._XLAC._xla_get_spmd_config_is_locked():  # compiling for all devices would crash
            raise WorldError(
                f"FSDP on {kind.name} devices is one program for all of them, and one of them was used already. "
                "Make the Accelerator before the first tensor or question to a device, or begin with "
                f"{kind.runtime}.use_spmd()."
            )
        runtime.use_spmd()
    rank, size = runtime.global_ordinal(), runtime.world_size()
    return World(
        rank,
        size,
        runtime.local_ordinal(),
        runtime.local_process_count(),
        importlib.import_module(kind.extension).device(),
        backend=kind.backend,
        coordinator=_coordinator_over_runtime(kind, rank, size) if size > 1 else None,
        **facts,
    )


def _coordinator_over_runtime(kind: DeviceKind, rank: int, size: int) -> Coordinator:
    """Initialise torch's process group over the runtime; return a coordinator over the group's store."""
    import importlib

    from .rendezvous import store_of_group

    importlib.import_module(f"{kind.extension}.distributed.xla_backend")  # torch knows the backend by its import
    if not _has_group():
        dist.init_process_group(kind.backend, init_method=f"{kind.backend}://", rank=rank, world_size=size)
    return _coordinator_over(store_of_group(0), rank, size)


def _share_cores(identity: ProcessIdentity) -> None:
    """Divide the host's cores among its processes as threads of torch, unless OMP_NUM_THREADS is set."""
    if read("OMP_NUM_THREADS") is not None or identity.size == 1:
        return
    num_threads = threads_of_this_rank(identity.local_size)
    torch.set_num_threads(num_threads)
    if identity.local_rank == 0:
        logger.warning(
            "OMP_NUM_THREADS is not set: each of the %d processes of this host computes with %d thread(s). Set "
            "OMP_NUM_THREADS to choose, and to silence this.",
            identity.local_size,
            num_threads,
        )


# -- leaving ----------------------------------------------------------------------------------------------


def _call_releasers() -> None:
    releasers, _releasers[:] = _releasers[:], []
    for release in reversed(releasers):
        try:
            release()
        except Exception:  # the other references are still released
            logger.exception("While leaving the world, %r failed.", release)


def _release_holders() -> None:
    """Release all known references to the process group."""
    gc.collect()  # wrappers are in reference cycles
    for ddp in _alive(torch.nn.parallel.DistributedDataParallel):
        release_ddp(ddp)
    _release_defaults()


def _alive(kind: type[object]) -> list[Any]:
    """Return all living objects of that type."""
    return [found for found in gc.get_objects() if issubclass(type(found), kind)]


def _release_defaults() -> None:
    """Reset functions that took the group as a default argument to mean "the default group" again.

    torch.distributed.nn.functional evaluates `group=group.WORLD` when it is imported, which DDP does at the first
    construction: from then on its functions hold the group.
    """
    module = sys.modules.get("torch.distributed.nn.functional")
    for function in vars(module).values() if module is not None else ():
        defaults = getattr(function, "__defaults__", None)
        if defaults and any(isinstance(default, dist.ProcessGroup) for default in defaults):
            function.__defaults__ = tuple(
                None if isinstance(default, dist.ProcessGroup) else default for default in defaults
            )


def _leave_at_exit() -> None:
    """Register leaving the world at interpreter exit, for programs that don't leave it themselves."""
    process_id = os.getpid()
    if process_id in _exit_hooked:
        return
    _exit_hooked.add(process_id)
    script, records = _script(), read(RECORDS_VARIABLE)
    if _world is not None:
        forget_end(records, _world.rank)

    def leave() -> None:
        world = _world or _forgotten
        if os.getpid() != process_id or world is None:
            return
        if world.is_distributed and not FailureHook.has_failed:
            record_end(records, world.rank, _place_of(script))
        if getattr(sys, "last_value", None) is None or world.backend == table.CPU.backend:
            leave_world(at_exit=True)
        elif world.coordinator is not None:
            # After an error, an accelerator's group may wait for operations that will never complete.
            world.coordinator.leave(*dist.distributed_c10d._world.pg_map)
            world.coordinator.wait_for_readers()

    atexit.register(leave)


def _script() -> FrameType | None:
    """Return the frame of the `__main__` module, whose variables live to the end anyway; None outside of it."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__":
            return frame
        frame = frame.f_back
    return None


def _place_of(script: FrameType | None) -> str:
    """Return the last line of the `__main__` module that ran, with its file and source."""
    if script is None:
        return ""
    file, line = script.f_code.co_filename, script.f_lineno
    source = linecache.getline(file, line).strip()
    return f"{os.path.basename(file)}:{line}" + (f" `{source}`" if source else "")
