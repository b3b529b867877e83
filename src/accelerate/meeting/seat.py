"""Where the ranks of one world leave word for each other: who has arrived, who is where, who has left.

Word goes through the key-value store of the process group, never through a collective, so that it still gets through
when the ranks disagree about which collective comes next. Every operation that needs all ranks has a number; ranks
that are in the same number with different operations will never meet, and are told so instead of waiting for ever.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar, final

from ..callers import call_site
from ..errors import CollectiveError
from .courier import Courier, Silence
from .rendezvous import CallRendezvous

if TYPE_CHECKING:
    from ..torch_private.distributed import Store

Answer = TypeVar("Answer")

#: How long an operation may take before the others are asked where they are.
PATIENCE_SECONDS: Final = 2.0
#: How long the keeper of the store may take to answer before it counts as unreachable.
_SILENCE_SECONDS: Final = 10.0
_FAREWELL_SECONDS: Final = 2.0
#: How long a rank that serves the store to all others stays for them when its own program has ended.
_READERS_SECONDS: Final = 10.0
#: Up to this many ranks, each tells where it is at every operation; beyond, only when it has to wait.
_NUM_TALKATIVE: Final = 128
_SHORTEST_SLEEP_SECONDS: Final = 5e-5
_LONGEST_SLEEP_SECONDS: Final = 0.02
_SEPARATOR: Final = "|"
#: Operations that no rank gets out of before all are in.
_NEEDS_ALL: Final = (
    *("wait_for_everyone", "gather", "gather_object", "reduce"),
    *("save_state", "save_model", "get_state_dict", "export_model"),  # where the state lies over the ranks
)


@final
class Meeting:
    """One rank's seat at the table of a world.

    Args:
        store: shared by the ranks of this world and nobody else.
        timeout: how long to wait for the others in one operation.
        keeps_store: the store is served by this process, and ends with it.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, *, keeps_store: bool = False) -> None:
        self.store = store
        self.keeps_store = keeps_store
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.number = 0
        self.operation = ""
        self.site = ""
        self.watch: Any = None  # the thread that looks after hangs in this world
        #: By process group: how long its next message is; `messages.Lengths`, kept here because it ends with the world.
        self.lengths: dict[Any, Any] = {}
        self.calls = CallRendezvous(self)
        self._told = 0  # the number of the operation that the others were last told of
        self._courier = Courier("accelerate_meeting")

    # ------------------------------------------------------------------------------------ taking part

    def begin(self, operation: str, *, with_site: bool = False, aloud: bool = True) -> int:
        """This rank is in `operation`, the next one that needs all ranks; returns its number.

        Unless `aloud`, the others are told only once this rank has to wait, or the operation fails.
        """
        self.number += 1
        self.operation = operation
        self.site = call_site() if with_site else ""
        if aloud and self.size <= _NUM_TALKATIVE:
            self._tell()
        return self.number

    def wait_for_everyone(self, operation: str = "wait_for_everyone", *, looks_into_torch: bool = False) -> None:
        """Every rank has come here. Raises CollectiveError when one never will, or doesn't within the timeout.

        With ``looks_into_torch``, also when all that are missing wait in collectives of torch's; they are ended then.
        """
        number = self.begin(operation)

        def arrive() -> bool:
            is_last = self.store.add(f"{number}/{operation}/arrived", 1) == self.size
            if is_last:
                self.store.set(f"{number}/{operation}/open", "1")
                self._forget(number - 1, operation)
            return is_last

        key = f"{number}/{operation}/open"
        if not self.ask(arrive):
            self._wait_until(lambda: self.store.check([key]), looks_into_torch=looks_into_torch)

    def require_all(self, operation: str) -> None:
        """Every rank makes this call. Raises CollectiveError on every rank when one doesn't."""
        if self.size > 1:
            self.wait_for_everyone(operation, looks_into_torch=True)

    def note(self, key: str, text: str) -> None:
        """Any rank can read ``text`` from now on."""
        self.ask(lambda: self.store.set(key, text))

    def noted(self, key: str) -> str | None:
        """What a rank has noted, if it has."""
        return self.ask(lambda: self.store.get(key).decode() if self.store.check([key]) else None)

    def announce(self, key: str) -> None:
        """Whoever waits for `key` may go on."""
        self.ask(lambda: self.store.set(key, "1"))

    def wait_for_key(self, key: str, setter: int | None = None) -> None:
        """Rank `setter` has set `key`. Raises CollectiveError when it never will, or doesn't within the timeout."""
        self._wait_until(lambda: self.store.check([key]), setter)

    def explain(self, error: Exception) -> str:
        """Why the running operation failed with `error`, as far as the other ranks tell."""
        return self._verdict_of_all() or self._broken(error)

    def complete(self, work: Any) -> None:
        """A collective that was started asynchronously is done. Raises CollectiveError when it never will be."""
        patience = min(timedelta(seconds=PATIENCE_SECONDS), self.timeout)
        num_waits = 0
        while True:
            try:
                work.wait(patience)
                return
            except RuntimeError as error:
                # torch says "Operation timed out!" and keeps the operation going; anything else is its end.
                is_late = "timed out" in str(error).lower() and not work.is_completed()
                if not is_late:
                    raise CollectiveError(self.explain(error)) from error
                verdict = self._verdict()
                if verdict is not None:
                    raise CollectiveError(verdict) from error
                num_waits += 1
                if num_waits * patience >= self.timeout:
                    raise CollectiveError(self._too_late()) from error

    def compare(self, description: str, mismatch: Callable[[list[str], list[str]], str | None]) -> None:
        """Every rank's description of this operation has been compared.

        `mismatch` is given the descriptions and the call sites of all ranks and returns what is wrong, if anything.
        """
        number = self.number
        self.ask(lambda: self.store.set(f"{number}/call/{self.rank}", f"{self.site}{_SEPARATOR}{description}"))
        keys = [f"{number}/call/{rank}" for rank in range(self.size)]
        self._wait_until(lambda: self.store.check(keys))
        calls = self.ask(lambda: [self.store.get(key).decode() for key in keys])
        sites, descriptions = zip(*(call.split(_SEPARATOR, 1) for call in calls), strict=True)
        wrong = mismatch(list(descriptions), list(sites))
        if wrong is not None:
            raise CollectiveError(wrong)

    def leave(self, *groups: object) -> None:
        """The others can learn that this rank takes part in nothing any more.

        Where the store is silent, `groups`, which use it too, are never freed: that would wait for its answer.
        """

        def say_goodbye() -> None:
            self.store.set(f"left/{self.rank}", str(self.number))
            self.store.set("left", "1")
            self.store.add("num_left", 1)  # it is answered: what was sent before has arrived

        # Whoever keeps the store may be gone already: then nobody is left to be told.
        with contextlib.suppress(RuntimeError):
            self._courier.ask(say_goodbye, _FAREWELL_SECONDS)
        self._courier.keep(self.store, *groups)
        if not self.keeps_store:
            self._courier.dismiss()

    def wait_for_readers(self) -> None:
        """Keep the store until all others have left too, or for 10 s: they may still read what it says.

        A process that serves the store would otherwise take from slower ranks the answer they are waiting for. Called
        after `leave`, when the process group is gone: a rank that waits in it has been woken by that.
        """
        if not self.keeps_store:
            return
        until = time.monotonic() + _READERS_SECONDS
        with contextlib.suppress(RuntimeError):
            while self._courier.ask(self._num_left, _FAREWELL_SECONDS) < self.size and time.monotonic() < until:
                time.sleep(_LONGEST_SLEEP_SECONDS / 4)
        self._courier.dismiss()

    def _num_left(self) -> int:
        return self.store.add("num_left", 0)

    def ask(self, call: Callable[[], Answer]) -> Answer:
        """What the store answers. Raises CollectiveError when its keeper has ended, or doesn't answer."""
        try:
            return self._courier.ask(call, self._silence_seconds())
        except Silence as error:
            raise CollectiveError(self._store_is_silent()) from error
        except RuntimeError as error:
            raise CollectiveError(self._store_is_gone()) from error

    def _silence_seconds(self) -> float:
        return min(_SILENCE_SECONDS, max(1.0, self.timeout.total_seconds()))

    # ---------------------------------------------------------------------------------------- waiting

    def _wait_until(
        self, ready: Callable[[], bool], setter: int | None = None, *, looks_into_torch: bool = False
    ) -> None:
        start = time.monotonic()
        next_look = start + PATIENCE_SECONDS
        while not self.ask(lambda: self._poll(ready)):
            now = time.monotonic()
            if now - start > self.timeout.total_seconds():
                raise CollectiveError(self._too_late())
            if now >= next_look:
                verdict = self._verdict(setter)
                if verdict is None and looks_into_torch:
                    verdict = self._stuck_in_torch()
                if verdict is not None and not self.ask(ready):
                    raise CollectiveError(verdict)
                next_look = now + min(30.0, max(PATIENCE_SECONDS, (now - start) / 4))

    def _poll(self, ready: Callable[[], bool]) -> bool:
        # Polled: a blocking wait would hold the store's connection, and torch logs every wait that times out.
        until = time.monotonic() + min(PATIENCE_SECONDS, self.timeout.total_seconds()) / 2
        sleep_seconds = _SHORTEST_SLEEP_SECONDS
        longest = min(1.0, _LONGEST_SLEEP_SECONDS * max(1.0, self.size / 8))
        while not ready():
            if time.monotonic() > until:
                return False
            time.sleep(sleep_seconds)
            sleep_seconds = min(longest, sleep_seconds * 1.5)
        return True

    def _tell(self) -> None:
        if self._courier.is_lost:
            raise CollectiveError(self._store_is_silent())
        self._told = self.number
        try:
            self.store.set(f"at/{self.rank}", _SEPARATOR.join((str(self.number), self.operation, self.site)))
        except RuntimeError as error:
            raise CollectiveError(self._store_is_gone()) from error

    def _forget(self, number: int, operation: str) -> None:
        """Keys of the operations that everybody has passed are gone from the store."""
        for key in (f"{number}/{operation}/arrived", f"{number}/{operation}/open"):
            try:
                self.store.delete_key(key)
            except (RuntimeError, NotImplementedError):
                return  # a store that can't forget, such as a file

    def wait_for(self, ready: Callable[[], bool], hopeless: Callable[[], str | None] = lambda: None) -> None:
        """Wait until ``ready()``, beside the numbered operations; from any thread.

        Raises:
            CollectiveError: ``hopeless()`` said why it never will be, or it wasn't within the timeout.
        """
        start = time.monotonic()
        next_look, sleep_seconds = start, _SHORTEST_SLEEP_SECONDS
        while not self.ask(ready):
            now = time.monotonic()
            if now >= next_look:
                reason = hopeless()
                if reason is not None and not self.ask(ready):
                    raise CollectiveError(reason)
                next_look = now + PATIENCE_SECONDS / 4
            if now - start > self.timeout.total_seconds():
                raise CollectiveError(self._too_late())
            time.sleep(sleep_seconds)
            sleep_seconds = min(_LONGEST_SLEEP_SECONDS, sleep_seconds * 1.5)

    def whereabouts(self, rank: int) -> str | None:
        """Where ``rank`` is, if it can't come here: in a later operation that needs this rank too, or gone."""
        where = self.ask(lambda: self._where(rank))
        if where is not None and where[0] > self.number and where[1] in _NEEDS_ALL:
            return f"is in `{where[1]}`{_at(where[2])}, which needs all ranks"
        if self.ask(lambda: self._left_after(rank)) is not None:
            return "has ended (or left the world)"
        return None

    def stuck_in_torch(self, ranks: Sequence[int]) -> dict[int, str]:
        """Those of ``ranks`` that are known to wait in collectives of torch's, and where."""
        return self.watch.ask_for_stuck(ranks) if self.watch is not None and ranks else {}

    # --------------------------------------------------------------------------------------- verdicts

    def _verdict(self, setter: int | None = None) -> str | None:
        """Why this operation can't end, or None when it still may."""
        try:
            if self._told != self.number:
                self.ask(self._tell)
            return self.ask(lambda: self._look_around(setter))
        except CollectiveError as error:
            return str(error)

    def _stuck_in_torch(self) -> str | None:
        """Why this operation can't end, where all ranks that are missing wait in collectives of torch's."""
        absent = self._absent()
        stuck = self.stuck_in_torch(absent)
        if not absent or len(stuck) < len(absent):
            return None
        where = "; ".join(f"rank {rank} waits in a collective of torch's at {at}" for rank, at in stuck.items())
        verdict = (
            f"{self._me()}, which every rank has to call, because the state lies over all ranks; but {where}, and "
            f"won't come. Call `{self.operation}` on every rank, outside of `if accelerator.is_main_process:`."
        )
        self.watch.end_stuck(absent, verdict)
        return verdict

    def _absent(self) -> list[int]:
        return self.ask(lambda: [rank for rank in range(self.size) if rank != self.rank and not self._is_here(rank)])

    def _verdict_of_all(self) -> str | None:
        """As `_verdict`, once every rank that still lives has had the time to say where it is."""
        until = time.monotonic() + min(PATIENCE_SECONDS, self.timeout.total_seconds()) * 1.5
        while (verdict := self._verdict()) is None and time.monotonic() < until:
            if self.ask(lambda: all(rank == self.rank or self._is_here(rank) for rank in range(self.size))):
                break
            time.sleep(_LONGEST_SLEEP_SECONDS)
        return verdict

    def _look_around(self, setter: int | None) -> str | None:
        for rank in range(self.size):
            if rank == self.rank:
                continue
            where = self._where(rank)
            if where is not None and where[0] == self.number and where[1] != self.operation:
                return self._different(rank, where)
            if where is not None and rank == setter and where[0] > self.number and where[1] in _NEEDS_ALL:
                return self._inside(rank, where)
            left_after = self._left_after(rank)
            if left_after is not None and left_after < self.number:
                return self._left(rank)
        return None

    def _where(self, rank: int) -> tuple[int, str, str] | None:
        key = f"at/{rank}"
        if not self.store.check([key]):
            return None
        number, operation, site = self.store.get(key).decode().split(_SEPARATOR, 2)
        return int(number), operation, site

    def _left_after(self, rank: int) -> int | None:
        key = f"left/{rank}"
        return int(self.store.get(key)) if self.store.check(["left"]) and self.store.check([key]) else None

    def _me(self) -> str:
        return f"Rank {self.rank} is in `{self.operation}`{_at(self.site)}"

    def _different(self, rank: int, where: tuple[int, str, str]) -> str:
        return (
            f"{self._me()}, but rank {rank} is in `{where[1]}`{_at(where[2])} instead: they wait for each other and "
            f"would never meet (operation {self.number} of this world). Every rank has to make the same calls in the "
            "same order; look for a call under `if accelerator.is_main_process:` that the other branch doesn't make. "
            "To let the main process go first, use `with accelerator.main_process_first():`."
        )

    def _inside(self, rank: int, where: tuple[int, str, str]) -> str:
        return (
            f"{self._me()}, waiting for rank {rank} to finish its block, but inside it rank {rank} is in "
            f"`{where[1]}`{_at(where[2])}, which needs all ranks. Move that call out of the block."
        )

    def _left(self, rank: int) -> str:
        return (
            f"{self._me()}, but rank {rank} has ended (or left the world) without making that call, so it would wait "
            "for ever. Every rank has to make the same calls in the same order; look for a call under "
            "`if accelerator.is_main_process:` that the other branch doesn't make, or for an error on that rank."
        )

    def _broken(self, error: Exception) -> str:
        return (
            f"{self._me()}, and the operation broke off: {error}. Usually another rank has died or made a different "
            "call; its own error says more. ACCELERATE_DEBUG_MODE=true names the ranks that disagree."
        )

    def _too_late(self) -> str:
        absent = self._absent()
        who = f"Not there: rank {', '.join(map(str, absent))}. " if absent else ""
        return (
            f"{self._me()} and has waited {self.timeout.total_seconds():.0f} s for the others. {who}Where a rank "
            "legitimately takes longer, give a longer time: Accelerator(kwargs_handlers=[InitProcessGroupKwargs("
            "timeout=timedelta(hours=2))])."
        )

    def _is_here(self, rank: int) -> bool:
        where = self._where(rank)
        return where is not None and where[0] >= self.number

    def _store_is_gone(self) -> str:
        return (
            f"{self._me()}, but the process that keeps the ranks' store (rank 0, or the launcher) has ended. Its own "
            "error, or the end of its program, is the cause; look at its output."
        )

    def _store_is_silent(self) -> str:
        return (
            f"{self._me()}, but the host that keeps the ranks' store (rank 0's, or the launcher's) hasn't "
            f"answered for {self._silence_seconds():.0f} s. It is frozen "
            "or cut off from this host; look at the network between them."
        )


def _at(site: str) -> str:
    return f" at {site}" if site else ""
