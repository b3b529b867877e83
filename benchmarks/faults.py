"""Silent faults: what the same loop does with this library and with the peer, beside a loop in plain torch.

    python benchmarks/faults.py --peer ~/peer/bin/python
    python benchmarks/faults.py --peer ~/peer/bin/python --only second_resume

``--peer``, or PEER_PYTHON, names the Python of an environment that has the peer, release 1.15.0.
Each row is one function that both libraries run on one or two gloo ranks, as under torchrun. What the ranks saw is
compared with the plain loop, which is compared with a number in the row. The output is a markdown table: "right" is
what the plain loop gives. Issues and pull requests are those of the peer's repository.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

import accelerate
from accelerate import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin, skip_first_batches
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import set_seed

SAMPLES: Final = 64
ODD: Final = 42  # the last batch is short
BATCH: Final = 4
TIMEOUT_SECONDS: Final = 120

# -- which samples ----------------------------------------------------------------------------------------------------


class Stream(IterableDataset[int]):
    """All of `ODD`, or a part of `SAMPLES` for each of two ranks; the first part is longer."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size

    def __iter__(self) -> Iterator[int]:
        if self.world_size == 1:
            return iter(range(ODD))
        return iter(range(36, SAMPLES) if self.rank else range(36))


def loader_of(dataset: Any = SAMPLES, **settings: Any) -> DataLoader[Any]:
    samples: Any = range(dataset) if isinstance(dataset, int) else dataset
    return DataLoader(samples, BATCH, **settings)


def drawn(loader: Any) -> list[int]:
    return [int(sample) for batch in loader for sample in batch]


def prepared_twice() -> list[int]:
    accelerator = Accelerator(cpu=True)
    return drawn(accelerator.prepare(accelerator.prepare(loader_of(shuffle=True))))


def own_sampler() -> list[int]:
    accelerator = Accelerator(cpu=True)
    dataset: Any = range(SAMPLES)
    return drawn(accelerator.prepare(loader_of(sampler=DistributedSampler(dataset, 2, accelerator.process_index))))


def own_stream() -> list[int]:
    accelerator = Accelerator(cpu=True)
    return drawn(accelerator.prepare(loader_of(Stream(accelerator.process_index, 2))))


def gathered(accelerator: Accelerator, batches: Iterable[Any]) -> list[int]:
    return [sample for batch in batches for sample in accelerator.gather_for_metrics(batch).tolist()]


def metrics_of_a_stream() -> list[int]:
    accelerator = Accelerator(cpu=True)
    return gathered(accelerator, accelerator.prepare(loader_of(Stream())))


def metrics_after_skipping() -> list[int]:
    accelerator = Accelerator(cpu=True)
    return gathered(accelerator, skip_first_batches(accelerator.prepare(loader_of(ODD)), 2))


def metrics_of_two_loaders() -> list[int]:
    accelerator = Accelerator(cpu=True)
    loader, other = accelerator.prepare(loader_of(ODD), loader_of(ODD + 1))
    return gathered(accelerator, (batch for batch, _ in zip(loader, other, strict=True)))


# -- resume -----------------------------------------------------------------------------------------------------------


def resumed(*stops: int, **settings: Any) -> list[int]:
    """Draw one epoch, with a save, a new loader and a load after each of these numbers of batches."""
    seen: list[int] = []
    folder = os.environ["FAULTS_FOLDER"]
    for run, stop in enumerate((*stops, SAMPLES)):
        set_seed(1)
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**settings))
        loader = accelerator.prepare(loader_of(shuffle=True))
        if run:
            accelerator.load_state(folder)
            if "use_stateful_dataloader" not in settings:
                loader = skip_first_batches(loader, sum(stops[:run]))
        for taken, batch in enumerate(loader, 1):
            seen += batch.tolist()
            if taken == stop:
                accelerator.save_state(folder)
                break
    return seen


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)


def scale_after_loading(wrap: Callable[..., Any]) -> list[float]:
    """Load a scaler, then an optimizer; return the scale and the number of steps since it grew."""
    model = nn.Linear(4, 4)
    optimizer, trained, restored = torch.optim.AdamW(model.parameters()), scaler(), scaler()
    for _ in range(3):
        trained.scale(model(torch.ones(2, 4)).sum()).backward()
        trained.step(optimizer)
        trained.update()
        optimizer.zero_grad()
    state = get_optimizer_state_dict(model, optimizer)
    restored.scale(torch.ones(()))  # as in a process that trained before it loads
    restored.load_state_dict(trained.state_dict())
    set_optimizer_state_dict(model, wrap(torch.optim.AdamW(model.parameters()), scaler=restored), state)
    return [restored.state_dict()["scale"], restored.state_dict()["_growth_tracker"]]


def wrapped_scale() -> list[float]:
    Accelerator(cpu=True)
    return scale_after_loading(AcceleratedOptimizer)


# -- gradients --------------------------------------------------------------------------------------------------------


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def one_weight() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(1, 1, bias=False)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def gradient(model: nn.Module) -> float:
    return float(whole(next(iter(model.parameters())).grad))


def windows(batches: int, stop: int) -> list[float]:
    """Return the gradient of each window of four micro-batches, in an epoch that stops early and a whole one."""
    accelerator, found = Accelerator(cpu=True, gradient_accumulation_steps=4), []
    model, optimizer, loader = accelerator.prepare(*one_weight(), loader_of(range(2 * BATCH * batches)))
    for last in filter(None, (stop, batches)):
        for number, batch in enumerate(loader, 1):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(len(batch), 1)).mean())
                if accelerator.sync_gradients:
                    found.append(gradient(model))
                optimizer.step()
                optimizer.zero_grad()
            if number == last:
                break
    return found


def without_cpu() -> float:
    accelerator = Accelerator()
    model, _, loader = accelerator.prepare(*one_weight(), loader_of(range(2 * BATCH)))
    for batch in loader:
        model.zero_grad()
        accelerator.backward(model(batch.float().unsqueeze(1)).mean())
    return gradient(model)


def held_under_fsdp() -> int:
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model = nn.Linear(16, 16, bias=False)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    return sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters())


def clipped(second_mesh: bool, prepared: bool = False) -> list[float]:
    """Return the norm of two parameters of four ones, and an element of each clipped gradient."""
    accelerator = Accelerator(cpu=True)
    first: torch.Tensor = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)])
    second = torch.ones(4)
    if second_mesh:
        second = distribute_tensor(second, init_device_mesh("cpu", (2, 1)), [Shard(0), Replicate()])
    model = nn.ParameterList([nn.Parameter(first), nn.Parameter(second)])
    if prepared:
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    norm = accelerator.clip_grad_norm_(parameters, 1.0)
    return [float(whole(norm)), *(float(whole(parameter.grad)[0]) for parameter in parameters)]


# -- the rows ---------------------------------------------------------------------------------------------------------


def plain_samples(number: int = SAMPLES, skip: int = 0) -> list[int]:
    return drawn(batch for place, batch in enumerate(loader_of(number)) if place >= skip)


def plain_scale() -> list[float]:
    return scale_after_loading(lambda optimizer, scaler: optimizer)


def plain_windows(batches: int, stop: int) -> list[float]:
    model, optimizer = one_weight()
    found: list[float] = []
    micro_batches = stop + batches
    for number in range(micro_batches):
        window = min(4, micro_batches - number // 4 * 4)
        (model(torch.ones(BATCH, 1)).mean() / window).backward()
        if number % 4 == 3 or number + 1 == micro_batches:
            found.append(gradient(model))
            optimizer.zero_grad()
    return found


def plain_gradient() -> float:
    model, _ = one_weight()
    model(torch.arange(2.0 * BATCH).unsqueeze(1)).mean().backward()
    return gradient(model)


def plain_held() -> int:
    return nn.Linear(16, 16, bias=False).weight.numel() // 2


def plain_clipped() -> list[float]:
    parameters = [nn.Parameter(torch.ones(4)) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.ones(4)
    norm = nn.utils.clip_grad_norm_(parameters, 1.0)
    return [float(norm), *(float(p.grad[0]) for p in parameters if p.grad is not None)]


@final
@dataclass(frozen=True)
class Row:
    """A fault, the loop that shows it, and the plain loop.

    Args:
        expected: What the plain loop must give: the number of its samples, or the value.
        divided: Whether the samples of all ranks together are those of the plain loop, and not those of each rank.
    """

    issue: str
    fault: str
    loop: Callable[[], Any]
    plain: Callable[[], Any]
    expected: Any
    ranks: int = 2
    divided: bool = False


CLIPPED: Final = [8**0.5, 8**-0.5, 8**-0.5]
ROWS: Final = {
    "prepared_twice": Row(
        "#4199", "samples of a loader prepared twice", prepared_twice, plain_samples, SAMPLES, divided=True
    ),
    "own_sampler": Row(
        "#4199, #4276", "samples of a loader with a `DistributedSampler`", own_sampler, plain_samples, SAMPLES,
        divided=True,
    ),
    "own_stream": Row(
        "#4199", "samples of a stream that gives its `rank` a part, 36 and 28", own_stream, plain_samples, SAMPLES,
        divided=True,
    ),
    "metrics_of_a_stream": Row(
        "", "`gather_for_metrics` over a stream of 42", metrics_of_a_stream, lambda: plain_samples(ODD), ODD
    ),
    "metrics_after_skipping": Row(
        "", "`gather_for_metrics` after `skip_first_batches`", metrics_after_skipping, lambda: plain_samples(ODD, 4), 26
    ),
    "metrics_of_two_loaders": Row(
        "", "`gather_for_metrics` while a second loader is read", metrics_of_two_loaders, lambda: plain_samples(ODD),
        ODD,
    ),
    "resume": Row(
        "#2016", "samples of an epoch resumed once, with `skip_first_batches`", lambda: resumed(3), plain_samples,
        SAMPLES, ranks=1,
    ),
    "second_resume": Row(
        "#4244", "samples of an epoch resumed twice, with `skip_first_batches` and `use_seedable_sampler`",
        lambda: resumed(3, 2, use_seedable_sampler=True), plain_samples, SAMPLES, ranks=1,
    ),
    "second_resume_stateful": Row(
        "#4195", "samples of an epoch resumed twice, with `use_stateful_dataloader`",
        lambda: resumed(3, 2, use_stateful_dataloader=True), plain_samples, SAMPLES, ranks=1,
    ),
    "scaler": Row(
        "#4290", "scale and growth tracker after torch loads an optimizer's state through its wrapper",
        wrapped_scale, plain_scale, [2048.0, 1], ranks=1,
    ),
    "short_window": Row(
        "", "gradients of windows of 4 where 6 batches remain", lambda: windows(6, 0), lambda: plain_windows(6, 0),
        [1.0, 1.0],
    ),
    "break": Row(
        "", "gradients of windows of 4 after a `break` in a window", lambda: windows(10, 6),
        lambda: plain_windows(10, 6), [1.0, 1.0, 1.0, 1.0],
    ),
    "without_cpu": Row(
        "", "gradient of two ranks without a GPU, under torchrun, without `cpu=True`", without_cpu, plain_gradient, 3.5
    ),
    "fsdp": Row("", "elements of 256 that each of two CPU ranks holds under FSDP2", held_under_fsdp, plain_held, 128),
    "clipped_with_plain": Row(
        "#4219", "norm and gradients clipped: a DTensor and a tensor", lambda: clipped(False), plain_clipped, CLIPPED
    ),
    "clipped_of_two_meshes": Row(
        "#4266", "norm and gradients clipped: DTensors of two meshes", lambda: clipped(True), plain_clipped, CLIPPED
    ),
    "clipped_of_a_prepared_model": Row(
        "", "the same, of a model that was prepared", lambda: clipped(True, prepared=True), plain_clipped, CLIPPED
    ),
}  # fmt: skip


def equal(found: Any, right: Any) -> bool:
    if isinstance(right, str) or isinstance(found, str):
        return found == right
    found, right = torch.tensor(found), torch.tensor(right)
    return found.shape == right.shape and torch.allclose(found.double(), right.double())


def sample_counts(row: Row) -> bool:
    return isinstance(row.expected, int) and isinstance(row.plain(), list)


def plain_value(row: Row) -> Any:
    value = row.plain()
    if sample_counts(row):
        assert len(set(value)) == len(value) == row.expected, f"the plain loop gives {value}"
    else:
        assert equal(value, row.expected), f"the plain loop gives {value}"
    return value


# -- ranks ------------------------------------------------------------------------------------------------------------


def run_rank(loop: Callable[[], Any], environment: dict[str, str], results: Any) -> None:
    os.environ.update(environment)
    rank = int(environment["RANK"])
    try:
        results.put((rank, "value", loop()))
    except Exception as error:
        results.put((rank, "error", type(error).__name__))


def run(row: Row) -> list[Any]:
    """Return what each rank's loop gave: ["value", ...] or ["error", the exception's name]."""
    context = multiprocessing.get_context("fork")  # torch is imported once
    results = context.Queue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(row.ranks), "LOCAL_WORLD_SIZE": str(row.ranks)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(
                target=run_rank,
                args=(row.loop, {**shared, "RANK": str(n), "LOCAL_RANK": str(n), "FAULTS_FOLDER": folder}, results),
            )
            for n in range(row.ranks)
        ]
        for rank in ranks:
            rank.start()
        try:
            found = sorted(results.get(timeout=TIMEOUT_SECONDS) for _ in ranks)
        except queue.Empty:
            found = [(0, "error", f"no result in {TIMEOUT_SECONDS} s")]
        for rank in ranks:
            rank.join(10)
            rank.kill()
    return [[kind, value] for _, kind, value in found]


def measure(python: str, names: list[str]) -> dict[str, Any]:
    """Run these rows in a process of that Python."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [python, str(Path(__file__).resolve()), "--json", *(f"--only={name}" for name in names)]
    done = subprocess.run(
        command, env=environment, cwd=tempfile.gettempdir(), stdout=subprocess.PIPE, check=True, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


# -- the table --------------------------------------------------------------------------------------------------------


def numbers(value: Any) -> str:
    values = value if isinstance(value, list) else [value]
    return ", ".join(str(part) if isinstance(part, str) else f"{part:.4g}" for part in values)


def cell(row: Row, right: Any, found: list[Any]) -> str:
    errors = [value for kind, value in found if kind == "error"]
    if errors:
        return f"raises {errors[0]}"
    values = [value for _, value in found]
    if not sample_counts(row):
        return "right" if all(equal(value, right) for value in values) else f"**{numbers(values[0])}**"
    if row.divided:
        values = [[sample for value in values for sample in value]]
    for value in values:
        missing, extra = Counter(right) - Counter(value), Counter(value) - Counter(right)
        if missing or extra:
            counts = {"missing": missing.total(), "repeated": extra.total()}
            return f"**{', '.join(f'{count} {word}' for word, count in counts.items() if count)}**"
    return "right"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", default=os.environ.get("PEER_PYTHON"), help="the Python of the peer's environment")
    parser.add_argument("--only", action="append", choices=list(ROWS), help="this row; may be given several times")
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    names: list[str] = given.only or list(ROWS)
    if given.json:
        found = {name: run(ROWS[name]) for name in names}
        print(json.dumps({"library": accelerate.__file__, "version": accelerate.__version__, "rows": found}))
        return
    ours = measure(sys.executable, names)
    peer = measure(given.peer, names) if given.peer else {"library": "", "version": "not run", "rows": {}}
    assert peer["library"] != ours["library"], f"{given.peer} has this library, not the peer"
    print(f"torch {torch.__version__}, the peer {peer['version']} ({peer['library']}), here {ours['library']}\n")
    print("| issue | what is compared | ranks | right | peer | here |\n|---|---|---|---|---|---|")
    for name in names:
        row = ROWS[name]
        right = plain_value(row)
        shown = f"{len(right)} samples" if sample_counts(row) else numbers(right)
        cells = [cell(row, right, rows[name]) if name in rows else "" for rows in (peer["rows"], ours["rows"])]
        print(f"| {row.issue} | {row.fault} | {row.ranks} | {shown} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
