"""The ranks that write or read one checkpoint: an error on one of them is an error on all, with its name."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar, final

from ..distributed.store_client import RequestThread, StoreTimeout
from ..errors import CheckpointError, CollectiveError

if TYPE_CHECKING:
    from ..distributed.store_client import Coordinator
    from ..distributed.world import World

T = TypeVar("T")

#: The interval of heartbeats of a rank with a save in the background.
HEARTBEAT_SECONDS: Final = 2.0
#: A rank without a heartbeat for so long is taken for dead.
HEARTBEAT_TIMEOUT_SECONDS: Final = 60.0
_SHORTEST_SLEEP_SECONDS: Final = 1e-4
_LONGEST_SLEEP_SECONDS: Final = 0.05


@final
class Ranks:
    """The ranks that take part in one save or load: those of a world, or one process alone.

    Args:
        store_collectives: the exchange to use where the training's own process group must be left alone.
        alone: this rank writes without the others.

    Attributes:
        world_size: the ranks of the run, whether they take part or not.
    """

    def __init__(
        self, world: World | None = None, store_collectives: StoreCollectives | None = None, *, alone: bool = False
    ) -> None:
        self._world = None if alone else world
        self._alone = alone
        self._store_collectives = store_collectives
        self.rank: int = world.rank if world else 0
        self.size: int = world.size if world and not alone else 1
        self.local_rank: int = world.local_rank if world else 0
        self.local_size: int = world.local_size if world and not alone else 1
        self.world_size: int = world.size if world else 1

    @property
    def is_main(self) -> bool:
        """True on the rank that writes what all have in common."""
        return self.rank == 0 or self._alone

    @property
    def is_local_main(self) -> bool:
        """True on the first rank of each node."""
        return self.local_rank == 0 or self._alone

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order; wait until every rank has called this."""
        if self._world is None or self.size == 1:
            return [value]
        if self._store_collectives is not None:
            return self._store_collectives.all_gather(value)
        from ..distributed.collectives import gather_object

        return list(gather_object([value], world=self._world))

    def gather(self, value: T) -> list[T] | None:
        """Return the values of all ranks, in rank order, on the main one; None elsewhere."""
        if self._store_collectives is not None:
            return self._store_collectives.gather(value)
        gathered = self.all_gather(value)
        return gathered if self.is_main else None

    def scatter(self, values: list[T] | None) -> T:
        """Return this rank's item of ``values``, the list that the main rank holds with one item per rank."""
        if self._store_collectives is not None:
            return self._store_collectives.scatter(values)
        all_values = self.all_gather(values)[0]
        assert all_values is not None
        return all_values[self.rank]

    def agree(self, error: Exception | None, what: str, *, kind: type[CheckpointError] = CheckpointError) -> None:
        """Raise on every rank if any rank comes with an error.

        Raises:
            CheckpointError: a rank failed; the text names each that did, and why.
        """
        gathered = self.all_gather(None if error is None else f"{type(error).__name__}: {error}")
        if not any(gathered):
            return
        failed = {rank: text for rank, text in enumerate(gathered) if text is not None}
        if error is not None and not isinstance(error, (OSError, CheckpointError)):
            raise error  # a hook's or an object's own error stays what it is where it happened
        if self.size == 1 and isinstance(error, kind):
            raise error
        reasons = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
        raise kind(f"can't {what}: {reasons}") from error

    def close(self) -> None:
        """Wait until every living rank has read all messages, then stop exchanging any."""
        if self._store_collectives is not None:
            self._store_collectives.close()


def write_on_main(
    world: World | None, operation: str, target: str, write: Callable[[], None], what: str, *, moment: str = ""
) -> None:
    """Run ``write()`` on the main process, which waits for no other rank; other ranks that call this wait for it.

    Args:
        moment: tells this call from others that are made from the same line.

    Raises:
        CheckpointError: on every rank that calls this, when it failed; the text says that ``what`` can't be done.
    """
    coordinator = world.coordinator if world is not None and world.is_distributed else None
    participants = coordinator.calls.main_alone(operation, target, moment=moment) if coordinator is not None else None
    error: Exception | None = None
    try:
        if participants is None or participants.is_main:
            write()
        else:
            participants.wait_for_outcome()
    except Exception as problem:  # whatever it is, the waiting ranks get it too, and it is raised below
        error = problem
    if participants is not None and participants.is_main:
        participants.finish(error=error)
    if error is None:
        return
    if participants is None or not isinstance(error, (OSError, CheckpointError, CollectiveError)):
        raise error
    reason = str(error) if isinstance(error, CollectiveError) else f"rank 0: {type(error).__name__}: {error}"
    raise CheckpointError(f"can't {what}: {reason}") from error


@final
class StoreCollectives:
    """All-gather, gather and scatter of objects over the ranks' store, from any thread, beside the training.

    The training's process group is never touched, and a rank may take as long as its disk does: each sends a heartbeat
    every few seconds, and only one whose heartbeats stop is taken for dead.
    """

    def __init__(self, coordinator: Coordinator, name: str) -> None:
        from ..torch_private.distributed import PrefixStore

        self._store = PrefixStore(name, coordinator.store)
        self.rank: int = coordinator.rank
        self.size: int = coordinator.size
        self._number = 0
        self._published: deque[str] = deque()  # keys of messages that a rank may not have read yet
        self._store_is_lost = False
        self._requests = RequestThread("checkpoint store requests")
        self._closed = threading.Event()
        self._heartbeat = threading.Thread(target=self._send_heartbeats, name="checkpoint heartbeat", daemon=True)
        self._heartbeat.start()

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order.

        Raises:
            CheckpointError: a rank has died, or the store has gone with its process.
        """
        self._number += 1
        self._publish(self._key(self.rank), value)
        gathered: list[T] = [self._receive(self._key(rank), rank) for rank in range(self.size)]
        while self._published[0] != self._key(self.rank):  # all ranks are here: none reads older messages
            self._delete(self._published.popleft())
        return gathered

    def gather(self, value: T) -> list[T] | None:
        """Return the values of all ranks on rank 0, in rank order; None elsewhere. Raises as :meth:`all_gather`."""
        self._number += 1
        self._publish(self._key(self.rank), value)
        return None if self.rank else [self._receive(self._key(rank), rank) for rank in range(self.size)]

    def scatter(self, values: list[T] | None) -> T:
        """Return this rank's item of the values, one per rank, of rank 0. Raises as :meth:`all_gather`."""
        self._number += 1
        for rank, value in enumerate(values or ()):
            self._publish(self._key(rank), value)
        return self._receive(self._key(self.rank), 0)

    def close(self) -> None:
        """Stop the heartbeat; the rank that keeps the store first waits until every living rank has closed too."""
        with suppress(CheckpointError):  # the store's process has ended: no rank can wait for this
            self._request(lambda: self._store.add("closed", 1))
            if self.rank == 0 and not self._store_is_lost:
                last_change, seen = time.monotonic(), -1
                while (count := self._request(lambda: self._store.add("closed", 0))) < self.size:
                    if count != seen:
                        last_change, seen = time.monotonic(), count
                    if time.monotonic() - last_change > HEARTBEAT_TIMEOUT_SECONDS:
                        break
                    time.sleep(_LONGEST_SLEEP_SECONDS)
        self._closed.set()
        self._requests.stop()

    # -------------------------------------------------------------------------------- messages in the store

    def _publish(self, key: str, value: object) -> None:
        from .codec import encode, inline

        message = json.dumps(inline(encode(value, "a message between ranks")))
        self._request(lambda: self._store.set(key, message))
        self._published.append(key)

    def _receive(self, key: str, rank: int) -> Any:
        from .codec import decode, inlined_tensor

        message: dict[str, Any] = json.loads(self._wait_for(key, rank))
        return decode(message["state"], lambda name: inlined_tensor(message, name))

    def _key(self, rank: int) -> str:
        return f"{self._number}/{rank}"

    def _request(self, call: Callable[[], T]) -> T:
        try:
            return self._requests.run(call, HEARTBEAT_TIMEOUT_SECONDS)
        except StoreTimeout as error:
            self._store_is_lost = True
            raise CheckpointError(
                f"the ranks' store has given no answer for {HEARTBEAT_TIMEOUT_SECONDS:.0f} s"
            ) from error
        except RuntimeError as error:
            raise CheckpointError("the process that keeps the ranks' store (rank 0, or the launcher) has ended") from (
                error
            )

    def _wait_for(self, key: str, rank: int) -> str:
        sleep_seconds = _SHORTEST_SLEEP_SECONDS
        last_beat, seen = time.monotonic(), -1
        while not self._request(lambda: self._store.check([key])):
            now = time.monotonic()
            if sleep_seconds >= _LONGEST_SLEEP_SECONDS:
                beats = self._request(lambda: self._store.add(f"heartbeat/{rank}", 0))
                if beats != seen:
                    last_beat, seen = now, beats
                elif now - last_beat > HEARTBEAT_TIMEOUT_SECONDS:
                    self._store_is_lost = True
                    raise CheckpointError(f"rank {rank} has sent no heartbeat for {HEARTBEAT_TIMEOUT_SECONDS:.0f} s")
            time.sleep(sleep_seconds)
            sleep_seconds = min(_LONGEST_SLEEP_SECONDS, sleep_seconds * 1.5)
        return self._request(lambda: self._store.get(key)).decode()

    def _delete(self, key: str) -> None:
        with suppress(CheckpointError, NotImplementedError):  # a store that can't delete keys, such as a file
            self._request(lambda: self._store.delete_key(key))

    def _send_heartbeats(self) -> None:
        while not self._closed.wait(HEARTBEAT_SECONDS):
            try:
                self._store.add(f"heartbeat/{self.rank}", 1)
            except RuntimeError:
                return  # the store is gone, on which the calls that wait for it fail themselves
