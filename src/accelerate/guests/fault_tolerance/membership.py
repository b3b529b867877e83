"""The members of a fault-tolerant run: exchange values between living ranks, any of which may die.

The launcher decides the membership, because it is the parent of all ranks and outlives them: the kernel tells it when a
rank ends. An exchange is complete once every living member has sent its value. All members get the same answer, so
they all do the same next. Values that a rank sent before it died still count, and are in shared memory.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast, final

import torch

from ...distributed.world import current_world
from ...errors import CheckpointError, CollectiveError, WorldError
from ...ports import claim_port, get_free_port
from ...seams import Members, NoticeSource
from ...settings.env import read
from ...settings.preemption import PREEMPTED_EXIT_CODE
from .connections import REPLICAS_SOCKET_NAME
from .launcher_members import (
    BUSY,
    MEET,
    REPLICA_JOINS_VARIABLE,
    REPLICA_SIZE_VARIABLE,
    REPLICA_START_VARIABLE,
    REPLICAS_FOLDER_VARIABLE,
    REPLICAS_MINIMUM_VARIABLE,
)
from .shards import form_replica, with_mesh, without_meshes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils.data import DataLoader

    from ...devices.table import DeviceKind
    from ...distributed.environment import ProcessIdentity
    from ...distributed.mesh import Mesh
    from .shared_epoch import SharedLoader

Made = TypeVar("Made")


@final
@dataclass(frozen=True)
class Answer:
    """The same answer to every member: all values, the living and the waiting ranks, and why the run ends."""

    values: Mapping[int, Any]
    members: tuple[int, ...]
    joining: tuple[int, ...]
    ending: str
    awaited: tuple[int, ...] = ()

    @classmethod
    def of(cls, line: bytes) -> Answer:
        """Parse the answer in a line from the launcher."""
        found = json.loads(line)
        if "error" in found:
            raise CollectiveError(found["error"])
        values = {int(rank): value for rank, value in found["values"].items()}
        members, joining, awaited = (tuple(found[name]) for name in ("members", "joining", "awaited"))
        return cls(values, members, joining, found["ending"], awaited)


@final
class Membership(Members):
    """This process's part of a fault-tolerant run.

    Args:
        folder: the launcher's folder.
        joins: this process replaces a lost one; it becomes a member once it has a member's state.
        minimum: with fewer living replicas, the members save and end.
        has_hosts: members are on several hosts; objects of others are read without what a pickle could call.
        replica_size: the number of ranks that hold a copy of the model together, and are lost together.
        start: how often the ranks of this replica were started before.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        *,
        joins: bool,
        minimum: int = 1,
        has_hosts: bool = False,
        replica_size: int = 1,
        start: int = 0,
    ) -> None:
        self.joint_states: list[Any] = []
        self.folder: Path = folder
        self.rank: int = rank
        self.is_joining: bool = joins
        self.minimum: int = minimum
        self._has_hosts = has_hosts
        self.replica_size: int = replica_size
        self.num_copies = 1  # of neighbouring ranks that read the same samples, because they share out their model
        self.num_stages = 1  # of pipelines, whose ranks read the same samples
        self.meshes: dict[tuple[str, ...], DeviceMesh] = {}  # of sharded models' DTensors, by their axes
        #: Whether it has joined but not yet reached the others' position; until then, it takes part in no exchange.
        self.is_entering = False
        self.last_saved: str = ""  # the folder of the newest checkpoint
        self.ending: str = ""  # why the members save and end; empty while they go on
        self.notices: NoticeSource | None = None  # notices that this process passes on
        self.exit_code: int = PREEMPTED_EXIT_CODE  # of members that have saved and end
        self.members: tuple[int, ...] = ()
        self.joining: tuple[int, ...] = ()
        self._num_updates = self._num_states = 0
        self.count_steps: Callable[[], int] = lambda: 0  # the optimizers' steps, which the loop's hook counts
        self.running_loaders: Callable[[], list[SharedLoader]] = list[Any]  # as the hook says
        self.awaits: SharedLoader | None = None  # this process joins in a loop over it; None: in any
        self.awaited: tuple[int, ...] = ()  # the same of the waiting processes, by the loaders' numbers
        self._mapped: dict[Path, torch.Tensor] = {}
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._connection.connect(str(folder / REPLICAS_SOCKET_NAME))
        except OSError as error:
            raise WorldError(
                f"{REPLICAS_FOLDER_VARIABLE}={folder}: no launcher answers there ({error}). Start the script with "
                "`accelerate launch --keep_replicas N`, which sets the variable, or unset it."
            ) from error
        self._answers = self._connection.makefile("rb")
        self._send({"rank": rank, "joins": joins, "pid": os.getpid(), "start": start})

    @property
    def is_behind(self) -> bool:
        """Whether this process still has to catch up with the others' position in the script."""
        return self.is_joining or self.is_entering

    @property
    def writes_files(self) -> bool:
        """Whether this process writes files as the main process; False until it has caught up."""
        return self.rank == 0 and not self.is_behind

    def wait_for_everyone(self) -> None:
        """Wait until every member calls this; a process that isn't a member yet doesn't wait."""
        if not self.is_behind:
            self.exchange("wait_for_everyone")

    def why_not(self, operation: str) -> str:
        """Return the reason: there is no process group."""
        return (
            f"`{operation}` under `accelerate launch --keep_replicas`: the ranks of such a run have no process group, "
            "as any rank may be lost. Leave that out, or --keep_replicas."
        )

    def collective(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of the collective ``name`` over the living members."""
        from .collectives import COLLECTIVES

        return COLLECTIVES[name](self, *args, **kwargs)

    def gather_for_metrics(self, data: object, loader: object, as_objects: bool, is_receiver: bool) -> object:
        """Return the joined values that the living members computed from the current batch of ``loader``."""
        from .collectives import gather_for_metrics

        return gather_for_metrics(self, data, loader, as_objects, is_receiver)

    def exchange_apart(self, operation: str, own: object, loader: SharedLoader | None = None) -> list[Any]:
        """Return the objects of this rank and its counterparts in the other living replicas, in the order of ranks.

        The samples that a replica has read since the last call count as trained once it has sent its object; those of
        a lost replica are read again. These are the samples of running loops, and of ``loader``.
        """
        from .shared_epoch import position_of, record_update

        if self.is_behind:
            return [own]
        loaders = self.running_loaders()
        loaders += [] if loader is None or loader in loaders else [loader]
        shared = self.share(operation, (own, position_of(loaders, self.count_steps())))
        record_update(loaders, {rank: position for rank, (_, position) in shared.items()})
        return [shared[rank][0] for rank in self.counterparts(shared)]

    def save(self, save: Callable[[], str], *, is_window_open: bool) -> str:
        """Save on the lowest member, or on the next if it is lost; return the folder, or raise the error, everywhere.

        Raises:
            CheckpointError: saving failed, or an accumulation window is open.
        """
        if is_window_open:
            raise CheckpointError(
                "save_state() inside a window of gradient accumulation under `accelerate launch --keep_replicas`: one "
                "rank writes for all, and the others' gradients would be lost. Save where accelerator.sync_gradients "
                "is True."
            )
        if self.is_behind:
            return self.last_saved  # the others have already passed this save

        own: list[Exception] = []

        def attempt() -> dict[str, str]:
            try:
                return {"address": save()}
            except Exception as error:  # whatever it is, all members raise it
                own.append(error)
                is_told = isinstance(error, CheckpointError)
                return {"error": str(error) if is_told else f"can't save: {type(error).__name__}: {error}"}

        found, _ = self.made_by_lowest("save_state", attempt)
        if "error" in found:
            raise CheckpointError(found["error"]) from (own[-1] if own else None)
        self.last_saved = found["address"]
        return found["address"]

    def prepare_data_loader(
        self, dataloader: object, arguments: Mapping[str, object], data_seed: int | None, common: Mapping[str, object]
    ) -> object:
        """Return a loader over the same data, with samples divided among the living ranks."""
        from .shared_epoch import shared_loader

        world, loader = current_world(), cast("DataLoader[object]", dataloader)
        size = 1 if world is None else world.size // (self.num_copies * self.num_stages)
        return shared_loader(loader, self, size, arguments, data_seed, **common)

    def end_on(self, start_notices: Callable[[], NoticeSource], exit_code: int) -> None:
        """Pass notices to this process on to the members in the next exchange."""
        self.exit_code = exit_code
        if self.notices is None:
            self.notices = start_notices()

    # -- exchanges -----------------------------------------------------------------------------------------

    def counterparts(self, ranks: Iterable[int]) -> list[int]:
        """Return those of ``ranks`` that hold the same part of the model, in order."""
        return sorted(rank for rank in ranks if (rank - self.rank) % self.replica_size == 0)

    def without_copies(self, ranks: Iterable[int], num_copies: int) -> list[int]:
        """Return one of each ``num_copies`` ranks of a replica, all of this rank's stage; with 1, all ``ranks``."""
        every, stage = max(1, num_copies // self.num_stages), self._place(self.rank)[0]
        kept = [rank for rank in ranks if num_copies == 1 or self._place(rank)[0] == stage]
        return [rank for rank in kept if (rank - self.rank) % every == 0]

    def reader_of(self, rank: int) -> int:
        """Return the lowest of the ranks that read the same samples as ``rank``."""
        stage, place = self._place(rank)
        return rank - stage * (self.replica_size // self.num_stages) - place % self.num_copies

    def placed(self, mesh: Mesh) -> Mesh:
        """Return the ``mesh`` of all ranks with this rank's place in it: the stages of all replicas come first."""
        stage, place = self._place(self.rank)
        number, num_replicas = self.rank // self.replica_size, mesh.world.size // self.replica_size
        rank = (stage * num_replicas + number) * (self.replica_size // self.num_stages) + place
        return replace(mesh, world=replace(mesh.world, rank=rank))

    def _place(self, rank: int) -> tuple[int, int]:
        """Return the stage of ``rank`` in its pipeline, and its place among the ranks of that stage."""
        return divmod(rank % self.replica_size, self.replica_size // self.num_stages)

    @property
    def readers(self) -> tuple[int, ...]:
        """The members that read different samples."""
        return tuple(rank for rank in self.members if rank == self.reader_of(rank))

    def is_with(self, rank: int) -> bool:
        """Return whether ``rank`` belongs to this rank's replica."""
        return rank // self.replica_size == self.rank // self.replica_size

    @property
    def is_lowest(self) -> bool:
        """Whether this rank belongs to the lowest living replica."""
        return self.is_with(min(self.members))

    def exchange(self, operation: str, value: object = None, file: str | None = None) -> Answer:
        """Send ``value`` to all members, and return all members' values; before this process joins, only its own.

        Args:
            file: the name of a file in the folder, which all members' hosts have once they get the answer.

        Raises:
            CollectiveError: members are in different operations, this process hasn't joined yet, or the launcher has
                ended.
        """
        if self.is_joining or (self.is_entering and operation == "update"):
            raise CollectiveError(
                f"`{operation}` in a process that replaces lost rank {self.rank} and hasn't joined the others yet. "
                "It joins them at the start of the loop over a prepared loader: make this call inside that loop."
            )
        if self.is_entering:
            return Answer({self.rank: value}, self.members, self.joining, self.ending)
        notice = None if self.notices is None else self.notices.take(0)
        self._send({"operation": operation, "value": value, "notice": notice, "file": file})
        return self._receive()

    def _send(self, message: Mapping[str, object]) -> None:
        try:
            self._connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise CollectiveError(_LAUNCHER_ENDED) from error

    def _receive(self) -> Answer:
        answer = self._read_answer()
        self.members, self.joining, self.ending = answer.members, answer.joining, answer.ending
        self.awaited = answer.awaited
        return answer

    def _read_answer(self) -> Answer:
        line = self._answers.readline()
        if not line:
            raise CollectiveError(_LAUNCHER_ENDED)
        return Answer.of(line)

    def meet(self, address: str | None) -> str:
        """Return the address that the first rank of this replica gives, once all of its ranks call this."""
        self._send({"operation": MEET, "value": address})
        return self._read_answer().values[self.rank - self.rank % self.replica_size]

    def made_by_lowest(self, operation: str, make: Callable[[], Made], *, is_file: bool = False) -> tuple[Made, bool]:
        """Call ``make()`` on the lowest replica only; return its value, and whether this rank belongs to it.

        If it is lost before it has sent the value (JSON, not None), the next replica calls ``make``. Of a replica of
        several ranks, each calls it, and its counterparts get its value.

        Args:
            is_file: the value is the name of a file in the folder.
        """
        while True:
            if not self.members:
                self.exchange("members")
            if self.is_lowest and not self.is_behind:
                self._send({"operation": BUSY, "value": operation})
            own = make() if self.is_lowest else None
            values = self.exchange(operation, own, str(own) if is_file and own is not None else None).values
            given = [values[rank] for rank in self.counterparts(values) if values[rank] is not None]
            if given:
                return given[0], own is not None

    # -- sums ----------------------------------------------------------------------------------------------

    def add_up(self, flat: torch.Tensor, value: object) -> tuple[torch.Tensor, Mapping[int, Any]]:
        """Return the sum of all counterparts' ``flat`` tensors in the order of ranks, and the value each member sent.

        The sum is bit for bit the same on all members. It omits a member that dies before it has sent its tensor, and
        includes one that dies later. Two buffers alternate: a member that sends a tensor has read the one before the
            last.
        """
        turn = self._num_updates % 2
        self._num_updates += 1
        self._buffer(self.rank, turn, flat).copy_(flat)
        given = {"turn": turn, "size": flat.numel(), "value": value}
        values = self.exchange("update", given, _buffer_name(self.rank, turn, flat)).values
        same = self.counterparts(values)
        sizes = {rank: values[rank]["size"] for rank in same}
        if len(set(sizes.values())) > 1:
            raise CollectiveError(
                f"The ranks have gradients of different sizes: {sizes} (rank: numbers). Prepare the same models on all "
                "ranks, and freeze the same parameters at the same step."
            )
        total = torch.zeros_like(flat, device="cpu")
        for rank in same:
            total += self._buffer(rank, values[rank]["turn"], flat)
        return total, {rank: given["value"] for rank, given in values.items()}

    def piece_of(self, rank: int, flat: torch.Tensor, start: int) -> torch.Tensor:
        """Return the tensor that ``rank`` sent to the last sum, from element ``start`` on."""
        return self._buffer(rank, (self._num_updates - 1) % 2, flat)[start:]

    def _buffer(self, rank: int, turn: int, like: torch.Tensor) -> torch.Tensor:
        path = self.folder / _buffer_name(rank, turn, like)
        if path not in self._mapped:
            size = like.numel() * like.element_size()
            with path.open("ab") as file:
                try:
                    if sys.platform == "darwin":
                        file.truncate(max(1, size))
                    else:  # writing to a full file system through a mapping would kill the process
                        os.posix_fallocate(file.fileno(), 0, max(1, size))
                except OSError as error:
                    raise CollectiveError(
                        f"{path}: no room for {size} bytes of gradients, which ranks exchange there ({error}). {_ROOM}"
                    ) from error
            self._mapped[path] = torch.from_file(str(path), shared=True, size=like.numel(), dtype=like.dtype)
        return self._mapped[path]

    # -- objects and states --------------------------------------------------------------------------------

    def share(self, operation: str, own: object) -> dict[int, Any]:
        """Return the objects of all living members by rank, in the order of ranks, with tensors on the CPU."""
        name = self._write(own)
        names = self.exchange(operation, name, name).values
        return {rank: self._load(names[rank]) for rank in sorted(names)}

    def share_state(self, operation: str, make: Callable[[], object]) -> Any:
        """Return the lowest member's state, created there by ``make``; None on the lowest member itself."""
        name, is_own = self.made_by_lowest(operation, lambda: self._write(make()), is_file=True)
        return None if is_own else self._load(name)

    def receive_state(self, loader: int | None) -> Any:
        """Wait until the members admit this process, in a loop over their ``loader``; return their common state."""
        self._send({"operation": "join", "value": loader})
        answer = self._receive()
        self.is_joining, self._num_updates = False, answer.values[-1]
        given = (answer.values[rank] for rank in self.counterparts(answer.values) if rank >= 0)
        return self._load(next(value for value in given if value))

    def admit(self, make: Callable[[], object]) -> None:
        """Let the waiting processes join, with the state of the lowest member."""
        while self.joining:
            name = self._write(make()) if self.is_lowest else None
            answer = self.exchange("admit", {"path": name, "updates": self._num_updates}, name)
            if any(given["path"] for given in answer.values.values()):
                return

    def _write(self, state: object) -> str:
        """Write an object that others may read until this rank has written two more; return the file's name."""
        self._num_states += 1
        path = self.folder / f"state_{self.rank}_{os.getpid()}_{self._num_states}"
        try:
            torch.save(without_meshes(state), path)
        except (OSError, RuntimeError) as error:
            path.unlink(missing_ok=True)
            raise CollectiveError(
                f"{path}: no room for the state of a rank, which others read ({error}). {_ROOM}"
            ) from error
        (self.folder / f"state_{self.rank}_{os.getpid()}_{self._num_states - 2}").unlink(missing_ok=True)
        return path.name

    def _load(self, name: str) -> Any:
        # Registered objects may hold anything. Only this user can write into the folder, unless there are other hosts.
        try:
            state = torch.load(self.folder / name, weights_only=self._has_hosts, map_location="cpu")
        except pickle.UnpicklingError as error:
            raise CollectiveError(
                f"members on several machines exchange only tensors, numbers, text and containers of these: {error}"
            ) from error
        return with_mesh(state, self.meshes)


def join(identity: ProcessIdentity, device: torch.device, kind: DeviceKind) -> Membership:
    """Return the membership of this process, according to the launcher's environment variables.

    The ranks that hold a copy of the model together form a process group.
    """
    size, start = (int(read(name) or default) for name, default in _OF_REPLICA.items())
    members = Membership(
        Path(read(REPLICAS_FOLDER_VARIABLE) or ""),
        identity.rank,
        joins=bool(read(REPLICA_JOINS_VARIABLE)),
        minimum=int(read(REPLICAS_MINIMUM_VARIABLE) or 1),
        has_hosts=int(read("GROUP_WORLD_SIZE") or 1) > 1,
        replica_size=size,
        start=start,
    )
    if size > 1:
        address = members.meet(_own_address(identity.address) if identity.rank % size == 0 else None)
        members.replica = form_replica(identity, size, address, device, kind)
    return members


def _own_address(address_of_machine_0: str) -> str:
    """Return a URL with a free port of this machine, at which the other machines reach it."""
    host = address_of_machine_0
    if read("GROUP_RANK") not in (None, "0"):
        family, _, _, _, target = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            host = str(probe.getsockname()[0])
    port = get_free_port()
    while not claim_port(port):  # by another replica of this machine, which may not listen yet
        port = get_free_port()
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _buffer_name(rank: int, turn: int, like: torch.Tensor) -> str:
    return f"gradients_{rank}_{turn}_{like.numel()}"  # parameters may be frozen on the way


#: The variables of a replica of several ranks, with their defaults.
_OF_REPLICA: Final = {REPLICA_SIZE_VARIABLE: 1, REPLICA_START_VARIABLE: 0}
_ROOM: Final = "Give /dev/shm more room (docker run --shm-size), or point TMPDIR at a folder that has it."
_LAUNCHER_ENDED: Final = (
    "The launcher, which keeps the members of this run, has ended: no rank can continue. Start the run again with "
    "`accelerate launch --keep_replicas N`."
)
