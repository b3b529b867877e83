"""The cost of the ranks' store by the number of ranks: real TCPStore clients, many in a process, beside plain torch.

    python benchmarks/scale.py --ranks 1024

Each rank is a thread with connections of its own, opened beforehand; a line is one operation that all ranks make at
once: seconds from the first rank's start to the last one's end, the same in plain torch, and the requests of a rank on
average (calls of the store's methods). `--idle SECONDS` counts what the watch for hangs asks while nothing happens.

torch looks up the name of each connection's host: give ::ffff:127.0.0.1 one in /etc/hosts where no server answers.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import resource
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from accelerate.checkpointing.agreement import Ranks, StoreCollectives
from accelerate.distributed import rendezvous, watchdog
from accelerate.distributed.environment import ProcessIdentity
from accelerate.distributed.store_client import Coordinator
from accelerate.distributed.watchdog import HangWatch
from accelerate.distributed.world import World
from accelerate.torch_private.distributed import PrefixStore, TCPStore

RANKS_PER_PROCESS = 128
LIMIT = timedelta(seconds=120)
REQUESTS = ("add", "set", "get", "wait", "check", "multi_get", "multi_set", "append", "compare_set", "delete_key")
OPERATIONS = ("join", "barrier", "all-gather of objects", "agreement of a save", "question of the hang watch", "leave")

counts: Counter[str] = Counter()
connecting = threading.Lock()


def count_requests() -> None:
    """Make the methods of stores count their calls."""

    def counted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return method(*args, **kwargs)

        return call

    for kind in (TCPStore, PrefixStore):
        for name in REQUESTS:
            setattr(kind, name, counted(name, getattr(kind, name)))


@dataclass
class Rank:
    """One rank: its connection, and what it has made of it."""

    rank: int
    size: int
    store: TCPStore
    parts: dict[str, Any] = field(default_factory=dict)

    def join(self) -> None:
        identity = ProcessIdentity(self.rank, self.size, self.rank % 8, 8, "127.0.0.1", 0, "benchmark")
        name = rendezvous.agree_on_name(self.store, identity, LIMIT)
        store = PrefixStore(name, self.store)
        self.parts["coordinator"] = Coordinator(store, self.rank, self.size, LIMIT, keeps_store=self.rank == 0)

    def connect(self) -> None:
        """Open the connections for three waits at a time, one rank after the other: names of hosts are looked up."""
        coordinator: Coordinator = self.parts["coordinator"]
        with connecting, ExitStack() as held:
            coordinator.set_key("connected")
            for _ in range(3):
                held.enter_context(coordinator.waits.start("connected")).is_over(10.0)

    def barrier(self) -> None:
        self.parts["coordinator"].wait_for_everyone()

    def exchange(self) -> StoreCollectives:
        if "exchange" not in self.parts:
            self.parts["exchange"] = StoreCollectives(self.parts["coordinator"], "save/1")
        return self.parts["exchange"]

    def all_gather(self) -> None:
        gathered = self.exchange().all_gather({"rank": self.rank, "folder": "checkpoint_1"})
        assert [one["rank"] for one in gathered] == list(range(self.size))

    def agree(self) -> None:
        world = World.pretend(self.rank, self.size)
        Ranks(world, self.exchange()).agree(None, "save")

    def watch(self) -> None:
        self.exchange().close()
        coordinator = self.parts["coordinator"]
        self.parts["watch"] = HangWatch(coordinator, 1000.0, threading.get_ident())
        self.parts["watch"].start()

    def question(self) -> None:
        """Rank 0 asks every other one where it is."""
        if self.rank == 0:
            watch: HangWatch = self.parts["watch"]
            watch.ask_for_stuck(range(1, self.size))

    def leave(self) -> None:
        if "watch" in self.parts:
            self.parts["watch"].stop()
        coordinator: Coordinator = self.parts["coordinator"]
        coordinator.leave()
        coordinator.wait_for_readers()

    # -- the same in plain torch ---------------------------------------------------------------------------

    def plain_barrier(self, name: str) -> None:
        if self.store.add(f"plain/{name}", 1) == self.size:
            self.store.set(f"plain/{name}/open", "1")
        self.store.wait([f"plain/{name}/open"], LIMIT)

    def plain_all_gather(self, name: str) -> None:
        self.store.set(f"plain/{name}/{self.rank}", f'{{"rank": {self.rank}, "folder": "checkpoint_1"}}')
        self.plain_barrier(name)
        self.store.multi_get([f"plain/{name}/{rank}" for rank in range(self.size)])

    def plain_question(self) -> None:
        """Rank 0 sets a key for which all wait, and gets every rank's answer."""
        if self.rank == 0:
            self.store.set("plain/question", "1")
        else:
            self.store.wait(["plain/question"], LIMIT)
            self.store.set(f"plain/answer/{self.rank}", f'{{"rank": {self.rank}, "place": "train.py:31"}}')
        if self.rank == 0:
            self.store.multi_get([f"plain/answer/{rank}" for rank in range(1, self.size)])

    def plain_leave(self) -> None:
        if self.store.add("plain/left", 1) == self.size:
            self.store.set("plain/left/all", "1")
        if self.rank == 0:
            self.store.wait(["plain/left/all"], LIMIT)


PHASES: dict[str, Callable[[Rank], Any]] = {
    "plain join": lambda rank: rank.plain_barrier("join"),
    "join": Rank.join,
    "plain barrier": lambda rank: rank.plain_barrier("barrier"),
    "connect": Rank.connect,
    "barrier": Rank.barrier,
    "plain all-gather of objects": lambda rank: rank.plain_all_gather("gather"),
    "open": Rank.exchange,
    "all-gather of objects": Rank.all_gather,
    "plain agreement of a save": lambda rank: rank.plain_all_gather("agree"),
    "agreement of a save": Rank.agree,
    "watch": Rank.watch,
    "idle": lambda rank: None,
    "plain question of the hang watch": Rank.plain_question,
    "question of the hang watch": Rank.question,
    "plain leave": Rank.plain_leave,
    "leave": Rank.leave,
}


def run_ranks(numbers: range, size: int, port: int, pipe: Connection) -> None:
    """Run the ranks of one process, phase by phase, as the parent says."""
    count_requests()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    threading.stack_size(256 << 10)
    stores = [TCPStore("127.0.0.1", port, is_master=False, timeout=LIMIT, wait_for_workers=False) for _ in numbers]
    ranks = [Rank(number, size, store) for number, store in zip(numbers, stores, strict=True)]
    pipe.send("ready")
    start, finish = threading.Barrier(len(ranks) + 1), threading.Barrier(len(ranks) + 1)
    phase: list[str] = [""]
    times: list[tuple[float, float]] = []
    errors: list[str] = []

    def act(rank: Rank) -> None:
        while True:
            start.wait()
            if not phase[0]:
                return
            begun = time.monotonic()
            try:
                PHASES[phase[0]](rank)
            except Exception as error:
                errors.append(f"rank {rank.rank}: {type(error).__name__}: {str(error)[:300]}")
            times.append((begun, time.monotonic()))
            finish.wait()

    threads = [threading.Thread(target=act, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    while True:
        phase[0], seconds = pipe.recv()
        if not phase[0]:
            pipe.send("bye")
            os._exit(0)  # without waiting for connections that are being closed by the hundred
        counts.clear()
        times.clear()
        errors.clear()
        start.wait()
        finish.wait()
        time.sleep(seconds)
        first, last = min(begun for begun, _ in times), max(ended for _, ended in times)
        pipe.send((first, last, sum(counts.values()), errors[:3]))


@dataclass(frozen=True)
class Figures:
    """One operation's figures."""

    seconds: float
    requests_per_rank: float
    errors: list[str]


def measure(size: int, idle_seconds: float = 0.0, only: tuple[str, ...] = ()) -> dict[str, Figures]:
    """Return the figures of each phase with that many ranks."""
    server = TCPStore("127.0.0.1", 0, is_master=True, timeout=LIMIT, wait_for_workers=False)
    context = multiprocessing.get_context("fork")
    pipes: list[Connection] = []
    for first in range(0, size, RANKS_PER_PROCESS):
        mine, theirs = context.Pipe()
        numbers = range(first, min(size, first + RANKS_PER_PROCESS))
        context.Process(target=run_ranks, args=(numbers, size, server.port, theirs), daemon=True).start()
        pipes.append(mine)
    for pipe in pipes:
        pipe.recv()
    figures: dict[str, Figures] = {}
    for name in PHASES:
        if only and name.removeprefix("plain ") not in only:
            continue
        seconds = idle_seconds if name == "idle" else 0.0
        for pipe in pipes:
            pipe.send((name, seconds))
        answers = [pipe.recv() for pipe in pipes]
        errors = [error for answer in answers for error in answer[3]]
        elapsed = max(answer[1] for answer in answers) - min(answer[0] for answer in answers)
        num_requests = sum(answer[2] for answer in answers)
        figures[name] = Figures(elapsed, num_requests / size, errors)
        if errors:
            print(f"  {name}: {errors[0]}")
            break
    for pipe in pipes:
        pipe.send(("", 0.0))
    for pipe in pipes:
        pipe.recv()
    return figures


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--idle", type=float, default=0.0, help="seconds in which nothing happens")
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    for size in options.ranks:
        figures = measure(size, options.idle)
        print(f"{size} ranks, the hang watch looks every {watchdog._TICK_SECONDS:.0f} s")
        for name in OPERATIONS:
            if name not in figures:
                print(f"  {name:<27} -")
                continue
            ours, plain = figures[name], figures[f"plain {name}"]
            print(
                f"  {name:<27} {ours.seconds:7.2f} s   plain torch {plain.seconds:6.2f} s   "
                f"{ours.seconds / plain.seconds:6.1f}x   {ours.requests_per_rank:6.1f} requests a rank"
            )
        if options.idle and "idle" in figures:
            idle = figures["idle"]
            print(f"  idle: {idle.requests_per_rank * size / options.idle:.1f} requests a second of all ranks")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
