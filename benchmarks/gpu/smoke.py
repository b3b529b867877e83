"""Part a: does what the CPU's tests hold run on the device, each check in a process of its own."""

from __future__ import annotations

import json
import logging
import os
import socket
import tempfile
import time
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from .sheet import Sheet
from .workers import MARK, ROOT, Session, answer_of, end, environment_of, start

STEPS = 12
HANG_SECONDS = 2.0


def run(sheet: Sheet, session: Session) -> None:
    """Add a row for each check."""
    for precision in ("no", "bf16", "fp16", "fp8"):
        sheet.attempt(f"precision {precision}", partial(_precision, sheet, session, precision))
    for kind in ("ddp", "fsdp2"):
        sheet.attempt(f"{kind}, a group of one", partial(_group, sheet, session, kind))
    for check in (_resume, _offload, _out_of_memory, _notebook, _hang, _oracle):
        sheet.attempt(check.__name__.strip("_").replace("_", " "), partial(check, sheet, session))


def _precision(sheet: Sheet, session: Session, precision: str) -> None:
    import importlib.util

    if precision == "fp8":
        # Where ours looks for it: in this interpreter, or beside the checkout.
        if importlib.util.find_spec("torchao") is None:
            sheet.skip("precision fp8", "torchao isn't installed; `make wheels` puts its wheel beside the checkout")
            return
        if session.dry:
            sheet.skip("precision fp8", "left out of a dry run for its time")
            return
    losses = session.ask("ours", "smoke:train", at_most=60, precision=precision)["losses"]
    sheet.add(f"precision {precision}: last loss over first", losses[-1] / losses[0], at_most=0.9)


def _group(sheet: Sheet, session: Session, kind: str) -> None:
    alone = session.ask("ours", "smoke:train", at_most=60, precision="no")["losses"]
    found = session.ask("ours", "smoke:train", at_most=60, precision="no", kind=kind)
    worst = max(abs(one - other) / abs(other) for one, other in zip(found["losses"], alone, strict=True))
    note = f"{found['type']}, {found['backend']}"
    sheet.add(f"{kind}, a group of one: losses beside a run without a group", worst, at_most=1e-5, note=note)


def _resume(sheet: Sheet, session: Session) -> None:
    found = session.ask("ours", "smoke:resume", at_most=90)
    sheet.add("saved, loaded, resumed: values that differ", found["differ"], at_most=0, note=f"of {found['values']}")


def _offload(sheet: Sheet, session: Session) -> None:
    found = session.ask("ours", "smoke:generate", at_most=60)
    sheet.add("generated with weights in host memory: tokens that differ", found["differ"], at_most=0)


def _out_of_memory(sheet: Sheet, session: Session) -> None:
    found = session.ask("ours", "smoke:out_of_memory", at_most=60)
    note = f"{found['tried']} sizes tried, {found['fits']} fits"
    sheet.add("batch sizes tried after real out-of-memory errors", len(found["tried"]), at_least=2, note=note)


def _notebook(sheet: Sheet, session: Session) -> None:
    found = session.ask("ours", "smoke:notebook", at_most=60)
    sheet.add("notebook_launcher after the device was used: ranks", found["ranks"], at_least=1, note=found["note"])


def _oracle(sheet: Sheet, session: Session) -> None:
    found = session.ask("ours", "oracle:cells", at_most=90)
    for name, (tried, wrong) in found.items():
        sheet.add(f"oracle, {name}: cells wrong", wrong, at_most=0, note=f"of {tried}")


def _hang(sheet: Sheet, session: Session) -> None:
    # Two ranks of gloo on one device: NCCL refuses a device twice.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    options = {"dry": session.dry, "device": session.device}
    ranks = [
        start(
            "ours", "smoke:hang", options, RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1", MASTER_PORT=port, GLOO_SOCKET_IFNAME="lo",
            ACCELERATE_HANG_SECONDS=str(HANG_SECONDS),
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        # Whichever rank has been without progress for longer asks the others, and logs the verdict.
        seconds = min(60.0, session.left)
        until = time.monotonic() + seconds
        while not (ended := [rank for rank in ranks if rank.poll() is not None]):
            if time.monotonic() > until:
                raise TimeoutError(f"a hang on two ranks took more than {seconds:.0f} s")
            time.sleep(0.1)
        found = answer_of(min(ended, key=lambda rank: rank.returncode != 0), 10, "a hang on two ranks")
    finally:
        for rank in ranks:
            end(rank)
    named = "the others wait for rank 1" in found["verdict"] and "# the culprit" in found["verdict"]
    sheet.add("hang: the verdict names the rank and the line", int(named), at_least=1, note=f"{found['seconds']:.1f} s")


# ------------------------------------------------------------------------------------------------ the workers


def accelerator_on(device: str, **options: Any) -> Any:
    """Return an accelerator of ours, or of whichever library this process imports."""
    from accelerate import Accelerator

    return Accelerator(cpu=device == "cpu", **options)


def _task() -> tuple[nn.Module, DataLoader]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 64))
    rows = torch.randn(16 * STEPS, 64)
    return model, DataLoader(TensorDataset(rows, rows.flip(1)), batch_size=16, shuffle=True)


def _form_group_of_one() -> None:
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(probe.getsockname()[1])


def train(*, dry: bool, device: str, precision: str, kind: str = "one") -> dict[str, Any]:
    """Return the losses of two epochs, and the group they were computed in."""
    options: dict[str, Any] = {}
    if kind != "one":
        from accelerate.utils import InitProcessGroupKwargs

        _form_group_of_one()
        backend = "nccl" if device == "cuda" else "gloo"
        options["kwargs_handlers"] = [InitProcessGroupKwargs(backend=backend)]
    if kind == "fsdp2":
        from accelerate.utils import FullyShardedDataParallelPlugin

        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = accelerator_on(device, mixed_precision=precision, **options)
    model, data = _task()
    model, optimizer, data = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), data)
    losses = []
    for _ in range(3):
        for rows, targets in data:
            loss = (model(rows) - targets).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    formed = torch.distributed.is_initialized()
    return {
        "losses": [float(loss) for loss in losses],
        "type": str(accelerator.distributed_type),
        "backend": torch.distributed.get_backend() if formed else "no process group",
    }


def resume(*, dry: bool, device: str) -> dict[str, int]:
    """Save amid a run with dropout, go on; do the same from the file: count the values that differ."""
    accelerator = accelerator_on(device, mixed_precision="bf16")
    model, data = _task()
    model = nn.Sequential(model, nn.Dropout(0.1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)

    def go_on(batches: Any, saves_to: str | None = None) -> list[torch.Tensor]:
        losses = []
        for number, (rows, targets) in enumerate(batches):
            loss = (model(rows) - targets).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            if saves_to and number == STEPS // 2:
                accelerator.save_state(saves_to)
                losses.clear()
        return [*losses, *(p.detach().flatten().clone() for p in model.parameters())]

    with tempfile.TemporaryDirectory() as folder:
        expected = go_on(data, f"{folder}/state")
        accelerator.load_state(f"{folder}/state")
        found = go_on(data)
    assert len(found) == len(expected), f"{len(found)} values after the resume, {len(expected)} before"
    return {
        "differ": sum(int((one != other).sum()) for one, other in zip(found, expected, strict=True)),
        "values": sum(one.numel() for one in found),
    }


def generate(*, dry: bool, device: str) -> dict[str, int]:
    """Generate greedily with the weights on the device, then in host memory: count the tokens that differ."""
    from accelerate import cpu_offload

    from .models import TINY, LlamaShaped

    torch.manual_seed(0)
    model = LlamaShaped(TINY).eval()

    def tokens_of(model: nn.Module) -> torch.Tensor:
        tokens = torch.arange(8, device=device).reshape(2, 4)
        with torch.no_grad():
            for _ in range(8):
                tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
        return tokens.cpu()

    expected = tokens_of(model.to(device))
    found = tokens_of(cpu_offload(model.to("cpu"), torch.device(device)))
    return {"differ": int((found != expected).sum())}


def out_of_memory(*, dry: bool, device: str) -> dict[str, Any]:
    """Return the batch sizes that were tried until one fitted."""
    from accelerate import find_executable_batch_size

    tried: list[int] = []
    # Rows so long that 64 of them never fit and one does.
    memory = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else 1 << 48
    row_bytes = memory // 8 if device == "cuda" else 1 << 45

    @find_executable_batch_size(starting_batch_size=64)
    def fill(batch_size: int) -> int:
        tried.append(batch_size)
        if device == "cpu" and batch_size <= 8:
            return batch_size
        torch.empty(batch_size * row_bytes, dtype=torch.uint8, device=device)
        return batch_size

    return {"fits": fill(), "tried": tried}


NOTEBOOK = """
import sys, torch
from accelerate import notebook_launcher

torch.ones(1, device={device!r}).sum().item()  # the device is in use before the launch


def train():
    from accelerate import Accelerator

    print("rank", Accelerator(cpu={cpu}).device, flush=True)


notebook_launcher(train, num_processes=1, use_port="0")
"""


def notebook(*, dry: bool, device: str) -> dict[str, Any]:
    """Run a notebook's cell in a fresh interpreter, and return how many ranks answered."""
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-c", NOTEBOOK.format(device=device, cpu=device == "cpu")],
        env=environment_of("ours"), cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("rank ")]
    note = lines[0] if lines else (done.stderr.strip().splitlines() or ["no output"])[-1]
    return {"ranks": len(lines), "note": note}


class Heard(logging.Handler):
    """Ends the rank with the verdict as its answer: it waits in a collective that never ends."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.start = start

    def emit(self, record: logging.LogRecord) -> None:
        """Print the verdict and end the process."""
        answer = {"verdict": record.getMessage(), "seconds": time.monotonic() - self.start}
        print(f"\n{MARK}{json.dumps(answer)}", flush=True)
        os._exit(0)


def hang(*, dry: bool, device: str) -> dict[str, Any]:
    """Run one of two ranks, of which rank 1 sleeps; the rank that logs the verdict returns it."""
    from accelerate.utils import InitProcessGroupKwargs

    accelerator = accelerator_on(device, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    model = accelerator.prepare(nn.Linear(2, 2))
    rows = torch.ones(1, 2, device=accelerator.device)
    accelerator.backward(model(rows).sum())
    loss = model(rows).sum()
    logging.getLogger("accelerate.distributed.watchdog").addHandler(Heard(time.monotonic()))
    if accelerator.process_index == 1:
        time.sleep(120)  # the culprit
    accelerator.backward(loss)  # DDP's all-reduce waits
    return {"verdict": "rank 0 didn't wait", "seconds": 0.0}
