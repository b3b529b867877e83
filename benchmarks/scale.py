"""The cost of the ranks' store by the number of ranks: real TCPStore clients, a few in a process, beside plain torch.

    python benchmarks/scale.py --ranks 1024 --rounds 3

Each rank is a thread with connections of its own, opened beforehand. All threads sleep until one moment and make an
operation then; a line is the seconds from that moment to the last one's end, the same in plain torch, and the requests
of a rank on average (calls of the store's methods): medians of the rounds, each of which is a new world over the same
connections. `--idle SECONDS` counts what the watch for hangs asks while nothing happens; `--simulated 16384` measures
a question of rank 0 to so many ranks, whose answers one connection gives.

Threads of one process take turns in Python, and what they wait for their turn no rank of a real run waits for:
`--ranks-per-process` says how much of a figure that is.

torch looks up the host name of each connection. Where a slow name server would be measured, this ends with the remedy.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import multiprocessing
import os
import queue
import resource
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from accelerate.checkpointing.agreement import Ranks, StoreCollectives
from accelerate.distributed import rendezvous
from accelerate.distributed.environment import ProcessIdentity
from accelerate.distributed.store_client import Coordinator
from accelerate.distributed.watchdog import HangWatch, StackPosition
from accelerate.distributed.world import World
from accelerate.torch_private.distributed import PrefixStore, TCPStore, set_keys

LIMIT = timedelta(seconds=120)
CONNECTIONS_PER_RANK = 4
REQUESTS = ("add", "set", "get", "wait", "check", "multi_get", "multi_set", "append", "compare_set", "delete_key")
#: The threads have so long to fall asleep before an operation begins: so many in a second, and a moment.
THREADS_PER_SECOND = 4096
MOMENT_SECONDS = 0.3
SWITCH_SECONDS = 1.0
#: A name server that takes longer would be what is measured.
NAME_SECONDS = 0.1

counts: Counter[str] = Counter()
connecting = threading.Lock()


def count_requests() -> None:
    """Make the methods of stores count their calls; over a prefix, as the one call that it is."""

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
    round: int = 0
    parts: dict[str, Any] = field(default_factory=dict)

    @property
    def coordinator(self) -> Coordinator:
        return self.parts["coordinator"]

    def begin_round(self) -> None:
        if self.parts:
            self.coordinator.close()
        self.round += 1
        self.parts.clear()

    def join(self) -> None:
        identity = ProcessIdentity(self.rank, self.size, self.rank % 8, 8, "127.0.0.1", 0, "benchmark")
        name = rendezvous.agree_on_name(self.store, identity, LIMIT)
        store = PrefixStore(name, self.store)
        self.parts["coordinator"] = Coordinator(store, self.rank, self.size, LIMIT, keeps_store=self.rank == 0)

    def connect(self) -> None:
        """Open the connections for three waits at a time, one rank after the other: names of hosts are looked up."""
        coordinator = self.coordinator
        with connecting, ExitStack() as held:
            coordinator.set_key("connected")
            for _ in range(CONNECTIONS_PER_RANK - 1):
                held.enter_context(coordinator.waits.start("connected")).is_over(10.0)

    def barrier(self) -> None:
        self.coordinator.wait_for_everyone()

    def exchange(self) -> StoreCollectives:
        if "exchange" not in self.parts:
            self.parts["exchange"] = StoreCollectives(self.coordinator, "save/1")
        return self.parts["exchange"]

    def all_gather(self) -> None:
        gathered = self.exchange().all_gather({"rank": self.rank, "folder": "checkpoint_1"})
        assert [one["rank"] for one in gathered] == list(range(self.size))

    def agree(self) -> None:
        world = World.pretend(self.rank, self.size)
        with Ranks(world, self.exchange()).fail_together("save"):
            pass

    def watch(self) -> None:
        self.exchange().close()
        self.coordinator.watch = HangWatch(self.coordinator, 1000.0, threading.get_ident())
        self.coordinator.watch.start()

    def question(self) -> None:
        """Rank 0 asks every other one where it is."""
        if self.rank == 0:
            self.coordinator.stuck_in_torch(range(1, self.size))

    def leave(self) -> None:
        """Leave as at the end of the process, which closes the connections."""
        self.coordinator.leave()
        self.coordinator.wait_for_readers()

    # -- the same in plain torch ---------------------------------------------------------------------------

    def key(self, name: str) -> str:
        return f"plain/{self.round}/{name}"

    def plain_barrier(self, name: str) -> None:
        if self.store.add(self.key(name), 1) == self.size:
            self.store.set(self.key(f"{name}/open"), "1")
        self.store.wait([self.key(f"{name}/open")], LIMIT)

    def plain_all_gather(self, name: str) -> None:
        self.store.set(self.key(f"{name}/{self.rank}"), f'{{"rank": {self.rank}, "folder": "checkpoint_1"}}')
        self.plain_barrier(name)
        self.store.multi_get([self.key(f"{name}/{rank}") for rank in range(self.size)])

    def plain_question(self) -> None:
        """Rank 0 sets a key for which all wait, and gets every rank's answer."""
        if self.rank == 0:
            self.store.set(self.key("question"), "1")
            self.store.multi_get([self.key(f"answer/{rank}") for rank in range(1, self.size)])
        else:
            self.store.wait([self.key("question")], LIMIT)
            self.store.set(self.key(f"answer/{self.rank}"), f'{{"rank": {self.rank}, "place": "train.py:31"}}')

    def plain_leave(self) -> None:
        if self.store.add(self.key("left"), 1) == self.size:
            self.store.set(self.key("left/all"), "1")
        if self.rank == 0:
            self.store.wait([self.key("left/all")], LIMIT)


#: Ours, and the same in plain torch; beside them what they need, which isn't measured.
OPERATIONS: dict[str, tuple[Callable[[Rank], Any], Callable[[Rank], Any]]] = {
    "join": (Rank.join, lambda rank: rank.plain_barrier("join")),
    "barrier": (Rank.barrier, lambda rank: rank.plain_barrier("barrier")),
    "all-gather of objects": (Rank.all_gather, lambda rank: rank.plain_all_gather("gather")),
    "agreement of a save": (Rank.agree, lambda rank: rank.plain_all_gather("agree")),
    "question of the hang watch": (Rank.question, Rank.plain_question),
    "leave": (Rank.leave, Rank.plain_leave),
}
PREPARATIONS: dict[str, Callable[[Rank], Any]] = {
    "join": Rank.begin_round,
    "barrier": Rank.connect,
    "all-gather of objects": Rank.exchange,
    "question of the hang watch": Rank.watch,
}


@dataclass(frozen=True)
class Task:
    """What all ranks of a process do next, from a moment on, and how long the process counts requests after it."""

    act: str
    operation: str
    at: float
    seconds: float = 0.0

    def of(self, rank: Rank) -> object:
        if self.act == "prepare":
            return PREPARATIONS[self.operation](rank)
        if self.act == "pause":
            return None
        ours, plain = OPERATIONS[self.operation]
        return ours(rank) if self.act == "ours" else plain(rank)


@dataclass(frozen=True)
class Report:
    """What a process says of a task: the moment when its last rank had ended, and errors; since its start, the rest."""

    ended: float
    requests: int
    cpu_seconds: float
    errors: list[str]


def run_ranks(numbers: range, size: int, port: int, pipe: Connection) -> None:
    """Run the ranks of one process, task by task, as the parent says."""
    count_requests()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    threading.stack_size(256 << 10)
    # A thread that waits for its turn in Python looks so often whether to ask for it: thousands of them, on cores
    # that have no time for the thread whose turn it is, would do nothing else.
    sys.setswitchinterval(SWITCH_SECONDS)
    stores = [TCPStore("127.0.0.1", port, is_master=False, timeout=LIMIT, wait_for_workers=False) for _ in numbers]
    done: queue.SimpleQueue[tuple[float, str]] = queue.SimpleQueue()

    def act(rank: Rank, tasks: queue.SimpleQueue[Task]) -> None:
        while True:
            task, error = tasks.get(), ""
            time.sleep(max(0.0, task.at - time.monotonic()))
            try:
                task.of(rank)
            except Exception as problem:
                error = f"rank {rank.rank}: {type(problem).__name__}: {str(problem)[:300]}"
            done.put((time.monotonic(), error))

    tasks: list[queue.SimpleQueue[Task]] = []
    for number, store in zip(numbers, stores, strict=True):
        tasks.append(queue.SimpleQueue())
        threading.Thread(target=act, args=(Rank(number, size, store), tasks[-1]), daemon=True).start()
    pipe.send("ready")
    while (task := pipe.recv()) is not None:
        for one in tasks:
            one.put(task)
        results = [done.get() for _ in tasks]
        time.sleep(task.seconds)
        errors = [error for _, error in results if error]
        pipe.send(Report(max(ended for ended, _ in results), counts.total(), time.process_time(), errors[:3]))
    pipe.send("bye")
    os._exit(0)  # without waiting for connections that are being closed by the hundred


@dataclass(frozen=True)
class Sample:
    """One operation of all ranks: the seconds until the last one's end, and of a rank its requests and CPU time."""

    seconds: float
    requests: float
    cpu_seconds: float


class Run:
    """All processes of one number of ranks, and the store that they share."""

    def __init__(self, size: int, ranks_per_process: int) -> None:
        self.size = size
        self.requests, self.cpu_seconds = 0, 0.0  # of all ranks up to now
        self.server = TCPStore("127.0.0.1", 0, is_master=True, timeout=LIMIT, wait_for_workers=False)
        self.pipes: list[Connection] = []
        context = multiprocessing.get_context("fork")
        for first in range(0, size, ranks_per_process):
            mine, theirs = context.Pipe()
            numbers = range(first, min(size, first + ranks_per_process))
            context.Process(target=run_ranks, args=(numbers, size, self.server.port, theirs), daemon=True).start()
            self.pipes.append(mine)
        for pipe in self.pipes:
            pipe.recv()

    def do(self, act: str, operation: str, seconds: float = 0.0) -> float:
        """Let all ranks do a task; return its seconds."""
        at = time.monotonic() + MOMENT_SECONDS + self.size / THREADS_PER_SECOND
        for pipe in self.pipes:
            pipe.send(Task(act, operation, at, seconds))
        reports: list[Report] = [pipe.recv() for pipe in self.pipes]
        errors = [error for report in reports for error in report.errors]
        if errors:
            raise RuntimeError(f"{operation}: {errors[0]}")
        self.requests = sum(report.requests for report in reports)
        self.cpu_seconds = sum(report.cpu_seconds for report in reports) + time.process_time()  # here is the server
        return max(report.ended for report in reports) - at

    def measure(self, act: str, operation: str) -> Sample:
        """Let all ranks do a task, and what follows from it in their other threads."""
        self.do("pause", operation)
        requests, cpu_seconds = self.requests, self.cpu_seconds
        elapsed = self.do(act, operation)
        self.do("pause", operation)
        return Sample(elapsed, (self.requests - requests) / self.size, (self.cpu_seconds - cpu_seconds) / self.size)

    def end(self) -> None:
        """End the processes."""
        for pipe in self.pipes:
            pipe.send(None)
        for pipe in self.pipes:
            with contextlib.suppress(EOFError):
                pipe.recv()


def median(samples: list[Sample], figure: str) -> float:
    return statistics.median(getattr(sample, figure) for sample in samples)


def measure(size: int, rounds: int, ranks_per_process: int, idle_seconds: float) -> None:
    """Measure that many ranks, and print."""
    run, idle = Run(size, ranks_per_process), 0.0
    ours: dict[str, list[Sample]] = {operation: [] for operation in OPERATIONS}
    plain: dict[str, list[Sample]] = {operation: [] for operation in OPERATIONS}
    for _ in range(rounds):
        for operation in OPERATIONS:  # before any of our threads run
            plain[operation].append(run.measure("plain", operation))
        for operation in OPERATIONS:
            if operation in PREPARATIONS:
                run.do("prepare", operation)
            if idle_seconds and operation == "question of the hang watch":
                run.do("pause", operation, MOMENT_SECONDS)  # the watches have begun
                before = run.requests
                run.do("pause", operation, idle_seconds)
                idle = (run.requests - before) / idle_seconds
            ours[operation].append(run.measure("ours", operation))
            print(operation, plain[operation][-1], ours[operation][-1], file=sys.stderr, flush=True)
    run.end()
    print(f"{size} ranks in {len(run.pipes)} processes, load {os.getloadavg()[0]:.0f}; (CPU per rank)")
    for operation in OPERATIONS:
        seconds, plain_seconds = (median(samples[operation], "seconds") for samples in (ours, plain))
        spread = [sample.seconds for sample in ours[operation]]
        print(
            f"  {operation:<27}{seconds:6.2f} s ({median(ours[operation], 'cpu_seconds') * 1e3:4.1f} ms), "
            f"{min(spread):.2f} to {max(spread):.2f}   plain torch {plain_seconds:6.2f} s "
            f"({median(plain[operation], 'cpu_seconds') * 1e3:4.1f} ms)   {seconds / plain_seconds:5.1f}x   "
            f"{median(ours[operation], 'requests'):5.1f} requests a rank"
        )
    if idle_seconds:
        print(f"  idle: {idle:.1f} requests a second of all ranks")
    sys.stdout.flush()


def measure_simulated_question(size: int) -> None:
    """Measure rank 0's part of a question, and the store's, without the ranks, and print."""
    server = TCPStore("127.0.0.1", 0, is_master=True, timeout=LIMIT, wait_for_workers=False)
    mine, others = (TCPStore("127.0.0.1", server.port, timeout=LIMIT, wait_for_workers=False) for _ in range(2))
    watch = HangWatch(Coordinator(mine, 0, size, LIMIT), 1000.0, threading.get_ident())
    position = json.dumps(asdict(StackPosition(0, 60.0, "train.py:31", "loss.backward()", True)))

    def answer_for_all() -> None:
        others.wait([watch._question_key(size - 1, 1)], LIMIT)
        answers = {f"hang/1/{rank}": position.replace('"rank": 0', f'"rank": {rank}') for rank in range(1, size)}
        set_keys(others, answers)

    threading.Thread(target=answer_for_all, daemon=True).start()
    begun, cpu_seconds = time.monotonic(), time.process_time()
    watch.ask_for_stuck(range(1, size))
    print(
        f"question to {size} simulated ranks: {time.monotonic() - begun:.2f} s, CPU of rank 0, the store and the "
        f"simulation {time.process_time() - cpu_seconds:.2f} s"
    )


def allow_connections(size: int) -> None:
    """Let this process keep the connections of all ranks open, and those of a rank's process its pipes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = CONNECTIONS_PER_RANK * size * 2 + 1024
    with contextlib.suppress(ValueError, OSError):  # only root may raise the hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), max(hard, needed)))
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--rounds", type=int, default=3, help="the figures are medians of so many")
    parser.add_argument("--ranks-per-process", type=int, default=16, help="ranks that take turns in Python")
    parser.add_argument("--idle", type=float, default=0.0, help="seconds in which nothing happens")
    parser.add_argument("--simulated", type=int, default=0, metavar="RANKS", help="measure a question to so many only")
    options = parser.parse_args()
    seconds, address = rendezvous.time_name_lookup("127.0.0.1")
    if seconds > NAME_SECONDS:
        sys.exit(
            f"The name server took {seconds:.0f} s, and torch would ask it for the host of each connection. "
            f'Add the line "{address} localhost" to /etc/hosts.'
        )
    if options.simulated:
        measure_simulated_question(options.simulated)
        return
    allow_connections(max(options.ranks))
    gc.freeze()  # what the processes share stays shared
    for size in options.ranks:
        measure(size, options.rounds, options.ranks_per_process, options.idle)


if __name__ == "__main__":
    sys.exit(main())
