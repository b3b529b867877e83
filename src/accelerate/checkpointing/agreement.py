"""The ranks of one save or load: an error on one rank raises on all, with its rank number."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar, final

from ..distributed.store_requests import RequestThread, StoreTimeout, read_present
from ..distributed.world import current_world
from ..errors import CheckpointError, CollectiveError
from ..torch_private.distributed import set_keys

if TYPE_CHECKING:
    from ..distributed.store_client import Coordinator
    from ..distributed.world import World

T = TypeVar("T")
Combined = TypeVar("Combined")

#: The interval of heartbeats of a rank with a save in the background.
HEARTBEAT_SECONDS: Final = 2.0
#: A rank counts as dead after this long without a heartbeat.
HEARTBEAT_TIMEOUT_SECONDS: Final = 60.0
_HEARTBEATS_PER_SECOND: Final = 1024
#: The message that replaces one that a rank no longer waits for.
_GIVEN_UP: Final = "given up"
_STORE_ENDED: Final = "the process that keeps the ranks' store (rank 0, or the launcher) has ended"


@final
class Ranks:
    """The ranks that take part in one save or load: those of a world, or one process alone.

    Args:
        store_collectives: the exchange to use while the training uses the process group.
        alone: this rank writes without the others.

    Attributes:
        world_size: the number of ranks of the run, whether they take part or not.
    """

    def __init__(
        self, world: World | None = None, store_collectives: StoreCollectives | None = None, *, alone: bool = False
    ) -> None:
        if world is not None:
            world = world.holders  # of ranks that may be lost, one replica writes for all, and each reads by itself
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
        """True on the rank that writes the common files."""
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
        """Return the values of all ranks, in rank order, on the main rank; None elsewhere."""
        if self._store_collectives is not None:
            return self._store_collectives.gather(value)
        gathered = self.all_gather(value)
        return gathered if self.is_main else None

    def scatter(self, values: list[T] | None) -> T:
        """Return this rank's item of the main rank's list ``values``, which has one item per rank."""
        if self._store_collectives is not None:
            return self._store_collectives.scatter(values)
        all_values = self.all_gather(values)[0]
        assert all_values is not None
        return all_values[self.rank]

    def on_main(self, what: str, call: Callable[[], T]) -> T:
        """Return the result of ``call()`` on the main rank, on every rank; raise as :meth:`fail_together`."""
        results: list[T] = []
        with self.fail_together(what):
            if self.is_main:
                results.append(call())
        return self.all_gather(results)[0][0]

    @contextmanager
    def fail_together(self, what: str, *, kind: type[CheckpointError] = CheckpointError) -> Generator[None]:
        """Enter a block that raises on every rank if it fails on any; a collective at its end.

        Raises:
            CheckpointError: of `kind`, if a rank failed to do `what`; the text names each that did, and why.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as problem:  # of any type: an object store has many; raised again below
            error = problem
        text = None if error is None else f"{type(error).__name__}: {error}"
        if self._store_collectives is not None:
            failed = self._store_collectives.combine(text, _failures)
        else:
            failed = _failures(self.all_gather(text))
        if not failed:
            return
        if error is not None and not isinstance(error, (OSError, CheckpointError)):
            raise error  # on its own rank, the error of a hook or an object keeps its type
        if isinstance(error, kind) and (self.size == 1 or error.is_on_all_ranks):
            raise error  # of a block inside of this one: the text names the ranks already
        reasons = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
        problem = kind(f"can't {what}: {reasons}")
        problem.is_on_all_ranks = True
        raise problem from error

    def close(self) -> None:
        """Wait until every live rank has read all messages, then stop the exchange."""
        if self._store_collectives is not None:
            self._store_collectives.close()


def world_of(process_index: int) -> World | None:
    """Return the world that this process has joined, if any, with the rank ``process_index``.

    Raises:
        CheckpointError: this process has another rank.
    """
    world = current_world()
    if world is not None and process_index != world.rank:
        raise CheckpointError(
            f"process_index={process_index} was given, but this process is rank {world.rank} of {world.size}"
        )
    return world


def _failures(texts: Sequence[str | None]) -> dict[int, str]:
    return {rank: text for rank, text in enumerate(texts) if text is not None}


def write_on_main(
    world: World | None, operation: str, target: str, write: Callable[[], None], what: str, *, moment: str = ""
) -> None:
    """Run ``write()`` on the main process, without waiting for the other ranks; they wait for it.

    If ranks may be lost (a world with members), no rank waits.

    Args:
        moment: tells apart calls that are made from the same line.

    Raises:
        CheckpointError: on every rank that calls this, if ``write()`` failed; the text names ``what`` failed.
    """
    if world is not None and world.members is not None:
        if world.members.writes_files:
            write()
        return
    coordinator = world.coordinator if world is not None and world.is_distributed else None
    if coordinator is not None and coordinator.has_left:  # the program has destroyed the group: no rank waits
        if coordinator.rank == 0:
            write()
        return
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
    """All-gather, gather and scatter of objects over the ranks' store, from any thread, while the training runs.

    Rank 0 reads what all ranks have published, and publishes one value, for which the others wait. The training's
    process group is never used. A rank may take as long as its disk does: each rank sends a heartbeat every few
    seconds, and counts as dead only when its heartbeats stop.
    """

    def __init__(self, coordinator: Coordinator, name: str) -> None:
        self._coordinator, self._store, self._name = coordinator, coordinator.store, name
        self.rank: int = coordinator.rank
        self.size: int = coordinator.size
        self._number = 0
        self._published: list[str] = []  # keys of messages that a rank may not have read yet
        self._store_is_lost = False
        self._requests = RequestThread("checkpoint store requests", coordinator.lock)
        self._seen: dict[int, tuple[str, float]] = {}  # each rank's last heartbeat, and when it was first seen
        self._num_beats = 0
        self._failure = ""  # as rank 0 reports it to the others, which wait for it
        self._closed = threading.Event()
        self._request(self._beat)
        self._heartbeat = threading.Thread(target=self._send_heartbeats, name="checkpoint heartbeat", daemon=True)
        self._heartbeat.start()

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order.

        Raises:
            CheckpointError: a rank has died, or the process that serves the store has ended.
        """
        return self.combine(value, lambda values: values)

    def combine(self, value: T, combined: Callable[[list[T]], Combined]) -> Combined:
        """Return ``combined(values of all ranks)``, which rank 0 computes. Raises as :meth:`all_gather`."""
        self._number += 1
        key = f"{self._name}/{self._number}/all"
        if self.rank:
            self._publish(self._key(self.rank), value)
            result: Combined = _decoded(self._wait_for([key], [0])[0])
            self._delete_published()  # rank 0 has read all before it published this
            return result
        result = combined([value, *self._values_of_others()])
        self._delete_published()  # every rank has read the values before these
        self._publish(key, result)
        return result

    def gather(self, value: T) -> list[T] | None:
        """Return the values of all ranks on rank 0, in rank order; None elsewhere. Raises as :meth:`all_gather`."""
        self._number += 1
        if self.rank:
            self._publish(self._key(self.rank), value)
            return None
        return [value, *self._values_of_others()]

    def scatter(self, values: list[T] | None) -> T:
        """Return this rank's item of rank 0's values, one per rank. Raises as :meth:`all_gather`."""
        self._number += 1
        if self.rank == 0:
            assert values is not None
            messages = {self._key(rank): _encoded(value) for rank, value in enumerate(values) if rank}
            self._request(lambda: set_keys(self._store, messages))
            return values[0]
        key = self._key(self.rank)
        value: T = _decoded(self._wait_for([key], [0])[0])
        self._published.append(key)
        self._delete_published()
        return value

    def close(self) -> None:
        """Stop the heartbeat; rank 0 first waits until every live rank has closed too."""
        if self._closed.is_set():
            return
        with suppress(CheckpointError):  # the store's process has ended: no rank can wait for this
            self._request(self._announce_close)
            if self.rank == 0 and not self._store_is_lost:
                self._wait_for_closing()
                self._delete_published()
        self._closed.set()
        self._requests.stop()

    def _announce_close(self) -> None:
        if self._store.add(f"{self._name}/closed", 1) == self.size:
            self._store.set(f"{self._name}/all_closed", "1")

    def _wait_for_closing(self) -> None:
        last_change, seen = time.monotonic(), -1
        with self._coordinator.waits.start(f"{self._name}/all_closed") as wait:
            while not wait.is_over(self._pause_seconds()):
                count = self._request(lambda: self._store.add(f"{self._name}/closed", 0))
                if count != seen:
                    last_change, seen = time.monotonic(), count
                if time.monotonic() - last_change > HEARTBEAT_TIMEOUT_SECONDS:
                    return
        self._published += [f"{self._name}/closed", f"{self._name}/all_closed"]

    # -------------------------------------------------------------------------------- messages in the store

    def _publish(self, key: str, value: object) -> None:
        message = _encoded(value)
        self._request(lambda: self._store.set(key, message))
        self._published.append(key)

    def _values_of_others(self) -> list[Any]:
        ranks = range(1, self.size)
        return [_decoded(message) for message in self._wait_for([self._key(rank) for rank in ranks], ranks)]

    def _key(self, rank: int) -> str:
        return f"{self._name}/{self._number}/{rank}"

    def _request(self, call: Callable[[], T]) -> T:
        try:
            return self._requests.run(call, HEARTBEAT_TIMEOUT_SECONDS)
        except StoreTimeout as error:
            self._store_is_lost = True
            raise CheckpointError(
                f"the ranks' store has given no answer for {HEARTBEAT_TIMEOUT_SECONDS:.0f} s"
            ) from error
        except RuntimeError as error:
            raise CheckpointError(_STORE_ENDED) from error

    def _wait_for(self, keys: list[str], senders: Sequence[int]) -> list[str]:
        """Wait for the values of ``keys``, one from each of ``senders``, as long as the senders are alive."""
        self._seen.clear()
        with self._coordinator.waits.start(*keys, given_up=_GIVEN_UP) as wait:
            while not wait.is_over(self._pause_seconds()):
                self._require_alive(keys, senders)
            try:
                values = wait.response()
            except RuntimeError as error:
                raise CheckpointError(_STORE_ENDED) from error
        if _GIVEN_UP in values:
            raise CheckpointError("another rank has given the save up")
        return values

    def _require_alive(self, keys: list[str], senders: Sequence[int]) -> None:
        """Raise CheckpointError if one of ``senders`` has died before it published its key."""
        now = time.monotonic()
        beats = self._read([f"heartbeat/{rank}" for rank in senders])
        for key, rank in zip(keys, senders, strict=True):
            name, _, beat = beats.get(f"heartbeat/{rank}", "").partition(" ")
            if name == self._name and not beat.isdecimal():
                self._store_is_lost = True
                raise CheckpointError(beat)
            last, since = self._seen.setdefault(rank, (beat, now))
            if last != beat:
                self._seen[rank] = (beat, now)
            elif now - since > HEARTBEAT_TIMEOUT_SECONDS and key not in self._read([key]):
                self._store_is_lost = True
                self._failure = f"rank {rank} has sent no heartbeat for {HEARTBEAT_TIMEOUT_SECONDS:.0f} s"
                self._request(self._beat)
                raise CheckpointError(self._failure)

    def _read(self, keys: list[str]) -> dict[str, str]:
        return read_present(self._store, keys, self._request)

    def _delete_published(self) -> None:
        keys, self._published = self._published, []
        for key in keys:
            with suppress(CheckpointError, NotImplementedError):  # a store that can't delete keys, such as a file
                self._request(lambda key=key: self._store.delete_key(key))

    def _pause_seconds(self) -> float:
        """Return the interval of heartbeats in seconds, with a limit on the heartbeats of all ranks per second."""
        return max(HEARTBEAT_SECONDS, self.size / _HEARTBEATS_PER_SECOND)

    def _beat(self) -> None:
        self._num_beats += 1
        self._store.set(f"heartbeat/{self.rank}", f"{self._name} {self._failure or self._num_beats}")

    def _send_heartbeats(self) -> None:
        while not self._closed.wait(self._pause_seconds()):
            try:
                self._request(self._beat)
            except CheckpointError:
                return  # the store is gone; the calls that wait for it raise


def _encoded(value: object) -> str:
    from .codec import encode, inline

    return json.dumps(inline(encode(value, "a message between ranks")))


def _decoded(text: str) -> Any:
    from .codec import TAG, decode, inlined_tensor

    message: dict[str, Any] = json.loads(text)
    if f'"{TAG}"' not in text:
        return message["state"]  # JSON has a type for everything in it
    return decode(message["state"], lambda name: inlined_tensor(message, name))
