"""Part b: the cost of a step over the same step written by hand, of ours, the peer's and Fabric's.

Each process holds the loop by hand and those beside it on the same parameters, and times them in turns, so that a
device whose clocks drift slows all of them.
"""

from __future__ import annotations

import collections
import copy
import importlib.util
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from .models import LARGE, TINY, LlamaShaped, flops_per_token, peak_flops
from .sheet import Sheet
from .smoke import accelerator_on
from .workers import Session

MODES = ("eager", "compiled", "regionally compiled", "reduce-overhead")
ROUNDS = 5
WARM_UP_STEPS = 4
OURS_SECONDS, PEER_SECONDS = 150.0, 90.0  # of a process that measures a mode
START_SECONDS = 25.0  # of them, for imports and values
Step = Callable[[], None]


def run(sheet: Sheet, session: Session) -> None:
    """Add the rows of the tiny model, then of the large one in each mode."""
    for who, name in (("ours", "ours"), ("peer", "the peer")):
        if who == "peer" and session.peer is None:
            sheet.skip("tiny model, the peer", "no other installation of accelerate was found; PEER_PYTHON names one")
            continue
        sheet.attempt(f"tiny model, {name}", partial(_tiny, sheet, session, who, name))
    if session.dry:
        for mode in MODES[1:]:
            sheet.skip(f"1.2B, {mode}", "left out of a dry run for its time")
    modes = MODES[:1] if session.dry else MODES
    for mode in modes:  # ours first: they have goals, if the time ends
        sheet.attempt(f"1.2B, {mode}", partial(_large, sheet, session, mode))
    for mode in modes if session.peer is not None else ():
        sheet.attempt(f"1.2B, {mode}, the peer", partial(_large_of_the_peer, sheet, session, mode))


def _tiny(sheet: Sheet, session: Session, who: str, name: str) -> None:
    found = session.ask(who, "step:tiny", at_most=60, seconds=min(session.seconds, 5.0))
    if who == "ours":
        sheet.add("tiny model, by hand", found["raw_us"], "us a step")
    sheet.add(f"tiny model, {name}: over by hand", found["ratio"], "x", note=f"{found['us']:.1f} us a step")


def _large(sheet: Sheet, session: Session, mode: str) -> None:
    variants = ["raw", "accelerate"]
    if importlib.util.find_spec("lightning") or importlib.util.find_spec("lightning_fabric"):
        variants.append("fabric")
    found = _asked(session, "ours", mode, variants, OURS_SECONDS)
    if mode == "eager":
        sheet.add("1.2B: parameters", found["parameters"])
    rate = found["tokens_per_second"]["raw"]
    sheet.add(f"1.2B, {mode}, by hand", rate, "tokens/s")
    limit = None if session.dry else 1.01
    for variant, ratio in found["ratios"].items():
        name = "ours" if variant == "accelerate" else "Fabric"
        note = f"{found['tokens_per_second'][variant]:,.0f} tokens/s"
        at_most = limit if variant == "accelerate" else None
        sheet.add(f"1.2B, {mode}, {name}: time over by hand", ratio, "x", at_most=at_most, note=note)
    if "mfu" in found:
        goal = 0.45 if mode == "compiled" else None
        sheet.add(f"1.2B, {mode}, ours: MFU", found["mfu"], at_least=goal, note=f"of {found['peak']:.3g} FLOP/s")
    for variant, error in found["failed"].items():
        sheet.skip(f"1.2B, {mode}, {variant}", f"failed: {error}")


def _asked(session: Session, who: str, mode: str, variants: list[str], limit: float) -> dict[str, Any]:
    # A variant is measured for longer where that was asked for (--seconds).
    limit = min(limit + (session.seconds - 10) * len(variants), session.left)
    return session.ask(
        who, "step:large", at_most=limit, mode=mode, variants=variants, seconds=session.seconds, limit=limit
    )


def _large_of_the_peer(sheet: Sheet, session: Session, mode: str) -> None:
    variants = ["raw", "accelerate"]
    found = _asked(session, "peer", mode, variants, PEER_SECONDS)
    note = f"{found['tokens_per_second']['accelerate']:,.0f} tokens/s"
    sheet.add(f"1.2B, {mode}, the peer: time over by hand", found["ratios"]["accelerate"], "x", note=note)


# ------------------------------------------------------------------------------------------------ the workers


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def in_turns(steps: dict[str, Step], device: str, seconds: float) -> dict[str, list[float]]:
    """Return the seconds of a step of each variant in each round; a round gives each the same time."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    counts: dict[str, int] = {}
    for name, step in steps.items():
        for _ in range(WARM_UP_STEPS):
            step()
        synchronize(device)
        start = time.perf_counter()
        step()
        synchronize(device)
        counts[name] = max(1, int(seconds / ROUNDS / (time.perf_counter() - start)))
    for number in range(ROUNDS):
        order = list(steps) if number % 2 else list(reversed(steps))
        for name in order:
            synchronize(device)
            start = time.perf_counter()
            for _ in range(counts[name]):
                steps[name]()
            synchronize(device)
            found[name].append((time.perf_counter() - start) / counts[name])
    return found


def ratio(times: dict[str, list[float]], name: str) -> float:
    """Return the median over the rounds of a variant's time over that of the loop by hand."""
    return statistics.median(own / bare for own, bare in zip(times[name], times["raw"], strict=True))


def tiny(*, dry: bool, device: str, seconds: float) -> dict[str, float]:
    """Return the time of a step of a model so small that the host is all there is to see."""
    accelerator = accelerator_on(device, mixed_precision="no")
    rows = torch.randn(8, 16, device=accelerator.device)

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)).to(accelerator.device)
        return model, torch.optim.SGD(model.parameters(), lr=1e-3)

    bare, bare_optimizer = made()

    def raw() -> None:
        bare(rows).square().mean().backward()
        bare_optimizer.step()
        bare_optimizer.zero_grad()

    model, optimizer = accelerator.prepare(*made())

    def ours() -> None:
        with accelerator.accumulate(model):
            accelerator.backward(model(rows).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    times = in_turns({"raw": raw, "ours": ours}, device, seconds)
    return {
        "raw_us": statistics.median(times["raw"]) * 1e6,
        "us": statistics.median(times["ours"]) * 1e6,
        "ratio": ratio(times, "ours"),
    }


def sharing(model: nn.Module) -> nn.Module:
    """Return a copy of the modules on the same parameters and buffers: a variant takes no memory for its own."""
    tensors: list[torch.Tensor] = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def loss_of(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy in float32."""
    return nn.functional.cross_entropy(scores.float().flatten(0, 1), tokens.flatten())


def _optimizer(model: nn.Module, state: Any) -> torch.optim.Optimizer:
    """Return AdamW over the parameters, with the moments that the variants share."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    optimizer.state = state
    return optimizer


def _by_hand(model: nn.Module, tokens: torch.Tensor, mode: str, state: Any) -> Step:
    optimizer = _optimizer(model, state)
    if mode == "regionally compiled":
        for block in model.blocks:  # type: ignore[union-attr]
            block.compile()
    elif mode != "eager":
        model.compile(mode="reduce-overhead" if mode == "reduce-overhead" else None)

    def step() -> None:
        with torch.autocast(tokens.device.type, torch.bfloat16):
            scores = model(tokens)
        loss_of(scores, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _dynamo(mode: str) -> dict[str, Any]:
    if mode == "eager":
        return {}
    from accelerate.utils import TorchDynamoPlugin

    options: dict[str, Any] = {"backend": "inductor"}
    if mode == "reduce-overhead":
        options["mode"] = "reduce-overhead"
    return {"dynamo_plugin": TorchDynamoPlugin(use_regional_compilation=mode == "regionally compiled", **options)}


def _of_accelerate(model: nn.Module, tokens: torch.Tensor, mode: str, state: Any) -> Step:
    accelerator = accelerator_on(tokens.device.type, mixed_precision="bf16", **_dynamo(mode))
    optimizer = _optimizer(model, state)
    prepared, stepped = accelerator.prepare(model, optimizer)

    def step() -> None:
        with accelerator.accumulate(prepared):
            accelerator.backward(loss_of(prepared(tokens), tokens))
            stepped.step()
            stepped.zero_grad()

    return step


def _of_fabric(model: nn.Module, tokens: torch.Tensor, mode: str, state: Any) -> Step:
    try:
        from lightning.fabric import Fabric  # type: ignore[import-not-found]
    except ImportError:
        from lightning_fabric import Fabric  # type: ignore[import-not-found]

    fabric = Fabric(accelerator=tokens.device.type, devices=1, precision="bf16-mixed")
    optimizer = _optimizer(model, state)
    if mode == "regionally compiled":
        for block in model.blocks:  # type: ignore[union-attr]
            block.compile()
    elif mode != "eager":
        model = torch.compile(model, mode="reduce-overhead" if mode == "reduce-overhead" else None)  # type: ignore
    prepared, stepped = fabric.setup(model, optimizer)

    def step() -> None:
        fabric.backward(loss_of(prepared(tokens), tokens))
        stepped.step()
        stepped.zero_grad()

    return step


VARIANTS: dict[str, Callable[[nn.Module, torch.Tensor, str, Any], Step]] = {
    "raw": _by_hand,
    "accelerate": _of_accelerate,
    "fabric": _of_fabric,
}


def large(*, dry: bool, device: str, mode: str, variants: list[str], seconds: float, limit: float) -> dict[str, Any]:
    """Return the rates of the variants in a mode, ours' MFU, and what failed.

    What compiling takes of the limit is taken from the time that the variants are measured for.
    """
    until = time.monotonic() + limit - START_SECONDS
    shape = TINY if dry else LARGE
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaShaped(shape)
        tokens = torch.randint(shape.vocabulary, (shape.samples, shape.sequence))
    steps: dict[str, Step] = {}
    state: Any = collections.defaultdict(dict)
    failed: dict[str, str] = {}
    for name in variants:
        if name == "fabric" and until - time.monotonic() < limit / 3:
            failed[name] = "no time was left for it"
            continue
        try:
            steps[name] = VARIANTS[name](sharing(model), tokens, mode, state)
            steps[name]()
        except Exception as error:  # Fabric's or the compiler's: the others are still measured
            steps.pop(name, None)
            failed[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
    if "raw" not in steps or "accelerate" not in steps:
        raise RuntimeError("; ".join(f"{name}: {error}" for name, error in failed.items()))
    left = (until - time.monotonic()) * 0.8 / len(steps)
    times = in_turns(steps, device, max(0.2, min(seconds, left)))
    parameters = sum(p.numel() for p in model.parameters())
    rates = {name: tokens.numel() / statistics.median(seconds) for name, seconds in times.items()}
    found: dict[str, Any] = {
        "parameters": parameters,
        "tokens_per_second": rates,
        "ratios": {name: ratio(times, name) for name in times if name != "raw"},
        "failed": failed,
    }
    peak = peak_flops(torch.cuda.get_device_name()) if device == "cuda" else None
    if peak is not None:
        found |= {"peak": peak, "mfu": rates["accelerate"] * flops_per_token(shape, parameters) / peak}
    return found
