"""The launcher of a machine other than 0: it forwards what its ranks send, and ends when machine 0 is lost."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import time
from typing import Any, Final, final

from ...errors import LaunchError
from .connections import Clock, HostLink
from .launcher_members import SILENCE_SECONDS, Hosts, LauncherMembers, say

#: How long to look for the launcher of machine 0.
_CONNECT_SECONDS: Final = 600.0
_RETRY_SECONDS: Final = 0.5
_REPLY_SECONDS: Final = 10.0


@final
class RemoteMembers(LauncherMembers):
    """The members of this host, as the launcher of machine 0 sees them.

    Attributes:
        is_cut_off: whether machine 0 was lost, so that no rank here can continue.

    Raises:
        LaunchError: no launcher answers for machine 0, or it refuses this one.
    """

    def __init__(self, hosts: Hosts, size: int, num_replacements: int, minimum: int = 1, replica_size: int = 1) -> None:
        super().__init__(size, num_replacements, minimum, replica_size)
        self._hosts = hosts
        self.is_cut_off: bool = False
        try:
            self._link = HostLink(self._connect(), self.folder, self._receive_from_holder, self._lose_holder)
        except BaseException:  # an interrupt too leaves no folder behind
            super().close()
            raise
        self._link.takes_files = True
        self._clock = Clock()

    def _connect(self) -> socket.socket:
        """Return the connection with the launcher of machine 0, which has greeted this one."""
        hosts, deadline = self._hosts, time.monotonic() + _CONNECT_SECONDS
        where = f"machine 0 at {hosts.address}:{hosts.port}"
        while True:
            try:
                with contextlib.ExitStack() as held:
                    opened = held.enter_context(socket.create_connection((hosts.address, hosts.port), _REPLY_SECONDS))
                    reply = _ask(opened, {"machine": hosts.machine, "token": hosts.token})
                    if not reply["error"] and not reply["again"]:
                        held.pop_all()
                        self.joins, self.members = bool(reply["joins"]), set(reply["members"])
                        self._starts, self._replaced = dict(reply["starts"]), dict(reply["starts"])
                        self._started = {rank: self._start_of(rank) for rank in hosts.ranks(hosts.machine)}
                        return opened
                reason = reply["error"] or "it waits for the end of the run before"
            except (OSError, ValueError) as error:
                reply, reason = {}, str(error)
            if reply.get("error"):
                raise LaunchError(f"The launcher of {where} refuses machine {hosts.machine}: {reason}.")
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"No launcher answers for {where} ({reason}). Start `accelerate launch --machine_rank 0` there "
                    "with the same arguments, and check --main_process_ip and --main_process_port."
                )
            time.sleep(_RETRY_SECONDS)

    def register(self, selector: selectors.BaseSelector) -> None:
        """Let ``selector`` call this object's functions, which are the data of its keys."""
        super().register(selector)
        self._link.register(selector)

    def close(self) -> None:
        """Close all connections, and remove the folder."""
        self._link.finish()
        super().close()

    def lost(self, rank: int, *, has_failed: bool = True) -> None:
        """Note that the process of ``rank`` has ended; the values it sent before still count."""
        self.members.difference_update(self.replica_of(rank) if has_failed else (rank,))
        self._ranks.forget(rank)
        self._remove_old_states(rank)
        self._send(rank, failed=has_failed)
        if has_failed:
            self._end_replica(rank, self._started[rank] + 1)

    def _receive(self, rank: int, message: dict[str, Any]) -> None:
        if self.has_finished:
            self._give_up()
        self._send(rank, message.get("file", ""), message=message)

    def _leave(self, rank: int) -> None:
        self._send(rank)

    def _send(self, rank: int, file: str = "", **what: object) -> None:
        self._link.send({"rank": rank, "start": self._started[rank], **what}, file)

    def _tick(self) -> None:
        self._link.send({})
        self._link.run()  # this launcher may not have read for a while either
        if time.monotonic() - self._link.heard_at > SILENCE_SECONDS:
            self._lose_holder(f"nothing was heard from it for {SILENCE_SECONDS:.0f} s")

    def _receive_from_holder(self, message: dict[str, Any]) -> None:
        for rank in message.get("kill", ()):
            self._ranks.kill(rank)
        if "over" in message:
            self.has_finished = True
            self.members.clear()
            self._give_up()
        if "lost" in message:
            self._end_replica(message["lost"], message["start"])
        if str(message.get("file", "")).startswith("state_"):
            self._remove_old_states(int(message["file"].split("_")[1]))
        if "to" in message:
            answer = message["message"]
            if "members" in answer:
                self.members, self.ending = set(answer["members"]), answer["ending"]
                self.is_preempted = self.ending.startswith("preempted")
            self._ranks.send(message["to"], answer)

    def _lose_holder(self, why: str) -> None:
        """Kill all ranks: without machine 0 nobody knows who is a member, and the others may continue without these."""
        if self.is_cut_off or self.has_finished:
            return
        self.is_cut_off = True
        self._link.close()
        self.members.clear()
        say(
            f"machine {self._hosts.machine} has lost machine 0, which keeps the members of the run ({why}). "
            "No rank here can continue, so this launcher ends them. Start the same command again to join the run, or "
            "let --max_restarts do it."
        )
        self._ranks.kill_all()
        self._ranks.close()


def _ask(opened: socket.socket, question: dict[str, Any]) -> dict[str, Any]:
    """Return the one line of answer to ``question``; later lines stay in the socket."""
    opened.sendall(json.dumps(question).encode() + b"\n")
    line = b""
    while not line.endswith(b"\n"):
        part = opened.recv(1)
        if not part:
            raise ConnectionError("it closed the connection")
        line += part
    reply = json.loads(line)
    if "members" not in reply:
        raise ValueError("no launcher of this package answers")
    return reply
