"""The ranks that write or read one checkpoint: an error on one of them is an error on all, with its name."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar, final

from ..errors import CheckpointError, CollectiveError
from ..meeting import Courier, Silence

if TYPE_CHECKING:
    from ..meeting import Meeting
    from ..world import World

T = TypeVar("T")

#: How often a rank with a save in the background tells the others that it is alive.
PULSE_SECONDS: Final = 2.0
#: A rank that has said nothing for so long is taken for dead.
SILENCE_SECONDS: Final = 60.0
_SHORTEST_SLEEP_SECONDS: Final = 1e-4
_LONGEST_SLEEP_SECONDS: Final = 0.05


@final
class Ranks:
    """Who takes part, from a world or from one process by itself.

    Args:
        conversation: how they talk where the training's own process group must be left alone.
        alone: this rank writes without the others.

    Attributes:
        world_size: the ranks of the run, whether they take part or not.
    """

    def __init__(
        self, world: World | None = None, conversation: Conversation | None = None, *, alone: bool = False
    ) -> None:
        self._world = None if alone else world
        self._alone = alone
        self._conversation = conversation
        self.rank = world.rank if world else 0
        self.size = world.size if world and not alone else 1
        self.local_rank = world.local_rank if world else 0
        self.local_size = world.local_size if world and not alone else 1
        self.world_size = world.size if world else 1

    @property
    def is_main(self) -> bool:
        """True on the rank that writes what all have in common."""
        return self.rank == 0 or self._alone

    @property
    def is_local_main(self) -> bool:
        """True on the first rank of each node."""
        return self.local_rank == 0 or self._alone

    def everyone(self, value: T) -> list[T]:
        """What every rank said, in rank order; all ranks wait here for each other."""
        if self._world is None or not self._world.is_distributed:
            return [value]
        if self._conversation is not None:
            return self._conversation.everyone(value)
        from ..collectives import gather_object

        return list(gather_object([value], world=self._world))

    def to_main(self, value: T) -> list[T] | None:
        """What every rank said, in rank order, on the main one; None elsewhere."""
        if self._conversation is not None:
            return self._conversation.to_main(value)
        told = self.everyone(value)
        return told if self.is_main else None

    def from_main(self, values: list[T] | None) -> T:
        """This rank's of the values, one per rank, that the main one has."""
        if self._conversation is not None:
            return self._conversation.from_main(values)
        everything = self.everyone(values)[0]
        assert everything is not None
        return everything[self.rank]

    def agree(self, error: Exception | None, what: str, *, kind: type[CheckpointError] = CheckpointError) -> None:
        """All ranks reached this line without an error.

        Raises:
            CheckpointError: some rank did not; the text names each that failed, and why.
        """
        told = self.everyone(None if error is None else f"{type(error).__name__}: {error}")
        failed = {rank: text for rank, text in enumerate(told) if text is not None}
        if not failed:
            return
        if error is not None and not isinstance(error, (OSError, CheckpointError)):
            raise error  # a hook's or an object's own error stays what it is where it happened
        if self.size == 1 and isinstance(error, kind):
            raise error
        reasons = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
        raise kind(f"can't {what}: {reasons}") from error

    def close(self) -> None:
        """Every rank has heard everything that was said (or is dead); nothing more is said."""
        if self._conversation is not None:
            self._conversation.close()


def written_by_main(
    world: World | None, operation: str, target: str, write: Callable[[], None], what: str, *, moment: str = ""
) -> None:
    """``write()`` has run on the main process, which waits for nobody; the ranks that call this too wait for it.

    Args:
        moment: what tells this call from others that are made from the same line.

    Raises:
        CheckpointError: on every rank that calls this, when it failed; ``what`` is what can't be done then.
    """
    meeting = world.meeting if world is not None and world.is_distributed else None
    attendance = meeting.calls.tell(operation, target, moment=moment) if meeting is not None else None
    error: Exception | None = None
    try:
        if attendance is None or attendance.is_main:
            write()
        else:
            attendance.wait_for_outcome()
    except Exception as problem:  # whatever it is, the waiting ranks are told, and it is raised below
        error = problem
    if attendance is not None and attendance.is_main:
        attendance.finish(error=error)
    if error is None:
        return
    if attendance is None or not isinstance(error, (OSError, CheckpointError, CollectiveError)):
        raise error
    reason = str(error) if isinstance(error, CollectiveError) else f"rank 0: {type(error).__name__}: {error}"
    raise CheckpointError(f"can't {what}: {reason}") from error


@final
class Conversation:
    """What the ranks of a world say to each other through its store, from any thread, beside the training.

    No collective is involved, so the training's process group is never touched, and a rank may take as long as its
    disk does: each tells the others every few seconds that it is alive, and only one that falls silent is given up.
    """

    def __init__(self, meeting: Meeting, name: str) -> None:
        from ..torch_private.distributed import PrefixStore

        self._store = PrefixStore(name, meeting.store)
        self.rank, self.size = meeting.rank, meeting.size
        self._number = 0
        self._said: deque[str] = deque()  # keys of words that somebody may not have read yet
        self._lost = False
        self._courier = Courier("checkpoint courier")
        self._over = threading.Event()
        self._pulse = threading.Thread(target=self._beat, name="checkpoint pulse", daemon=True)
        self._pulse.start()

    def everyone(self, value: T) -> list[T]:
        """What every rank said as its n-th word.

        Raises:
            CheckpointError: a rank has died, or the store has gone with its process.
        """
        self._number += 1
        self._say(self._key(self.rank), value)
        told: list[T] = [self._hear(self._key(rank), rank) for rank in range(self.size)]
        while self._said[0] != self._key(self.rank):  # all have come here, so nobody reads older words any more
            self._forget(self._said.popleft())
        return told

    def to_main(self, value: T) -> list[T] | None:
        """What every rank said as its n-th word, on rank 0; None elsewhere. Raises as :meth:`everyone`."""
        self._number += 1
        self._say(self._key(self.rank), value)
        return None if self.rank else [self._hear(self._key(rank), rank) for rank in range(self.size)]

    def from_main(self, values: list[T] | None) -> T:
        """This rank's of the n-th words of rank 0, one per rank. Raises as :meth:`everyone`."""
        self._number += 1
        for rank, value in enumerate(values or ()):
            self._say(self._key(rank), value)
        return self._hear(self._key(self.rank), 0)

    def close(self) -> None:
        """Every living rank has heard the last word, as far as this rank keeps the store for the others."""
        with suppress(CheckpointError):  # the store's process has ended: nobody is left to be told
            self._ask(lambda: self._store.add("closed", 1))
            if self.rank == 0 and not self._lost:
                last_news, seen = time.monotonic(), -1
                while (count := self._ask(lambda: self._store.add("closed", 0))) < self.size:
                    if count != seen:
                        last_news, seen = time.monotonic(), count
                    if time.monotonic() - last_news > SILENCE_SECONDS:
                        break
                    time.sleep(_LONGEST_SLEEP_SECONDS)
        self._over.set()
        self._courier.dismiss()

    # ------------------------------------------------------------------------------------------ the store

    def _say(self, key: str, value: Any) -> None:
        from .codec import encode, inline

        word = json.dumps(inline(encode(value, "what a rank tells the others")))
        self._ask(lambda: self._store.set(key, word))
        self._said.append(key)

    def _hear(self, key: str, rank: int) -> Any:
        from .codec import decode, inlined_tensor

        heard: dict[str, Any] = json.loads(self._wait_for(key, rank))
        return decode(heard["state"], lambda name: inlined_tensor(heard, name))

    def _key(self, rank: int) -> str:
        return f"{self._number}/{rank}"

    def _ask(self, call: Callable[[], T]) -> T:
        try:
            return self._courier.ask(call, SILENCE_SECONDS)
        except Silence as error:
            self._lost = True
            raise CheckpointError(f"the ranks' store has given no answer for {SILENCE_SECONDS:.0f} s") from error
        except RuntimeError as error:
            raise CheckpointError("the process that keeps the ranks' store (rank 0, or the launcher) has ended") from (
                error
            )

    def _wait_for(self, key: str, rank: int) -> str:
        sleep_seconds = _SHORTEST_SLEEP_SECONDS
        last_news, seen = time.monotonic(), -1
        while not self._ask(lambda: self._store.check([key])):
            now = time.monotonic()
            if sleep_seconds >= _LONGEST_SLEEP_SECONDS:
                beats = self._ask(lambda: self._store.add(f"pulse/{rank}", 0))
                if beats != seen:
                    last_news, seen = now, beats
                elif now - last_news > SILENCE_SECONDS:
                    self._lost = True
                    raise CheckpointError(f"rank {rank} has given no sign of life for {SILENCE_SECONDS:.0f} s")
            time.sleep(sleep_seconds)
            sleep_seconds = min(_LONGEST_SLEEP_SECONDS, sleep_seconds * 1.5)
        return self._ask(lambda: self._store.get(key)).decode()

    def _forget(self, key: str) -> None:
        with suppress(CheckpointError, NotImplementedError):  # a store that can't forget, such as a file
            self._ask(lambda: self._store.delete_key(key))

    def _beat(self) -> None:
        while not self._over.wait(PULSE_SECONDS):
            try:
                self._store.add(f"pulse/{self.rank}", 1)
            except RuntimeError:
                return  # the store is gone; whoever waits is told so by its own call
