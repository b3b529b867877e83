"""Part d: generation with the weights in host memory beside the peer's, and loading at the rate of a copy."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import nn

from .models import TINY, LlamaBlock, LlamaShaped, Shape
from .sheet import Sheet
from .step import synchronize
from .workers import Session

# Blocks of 405 MB in bf16, twelve of them: 5 GB beside the embeddings.
OFFLOADED = Shape(hidden=4096, inner=11008, layers=12, heads=32, vocabulary=32000, sequence=512, samples=4)
NEW_TOKENS = 8
SHARDS = 4


def run(sheet: Sheet, session: Session) -> None:
    """Add the rows of generation and of loading."""
    sheet.attempt("generation", partial(_generation, sheet, session))
    sheet.attempt("loading", partial(_loading, sheet, session))


def _generation(sheet: Sheet, session: Session) -> None:
    ours = session.ask("ours", "big:generation", at_most=90)
    sheet.add("generated with weights in host memory, ours", ours["rate"], "tokens/s")
    bound = ours["streamed"] / ours["copy_rate"]
    sheet.add("its time over copying the weights once a token", ours["seconds_a_token"] / bound, "x")
    if session.device == "cuda":
        beyond = (ours["peak"] - ours["activations"]) / ours["block"]
        sheet.add("blocks of weights on the device at once", beyond, at_most=2, note="the running one and one extra")
    if session.peer is None:
        sheet.skip("generated, the peer", "no other installation of accelerate was found; PEER_PYTHON names one")
        return
    peer = session.ask("peer", "big:generation", at_most=120)
    sheet.add("generated with weights in host memory, the peer", peer["rate"], "tokens/s")
    goal = None if session.dry else 1.7
    sheet.add("generated, ours over the peer", ours["rate"] / peer["rate"], "x", at_least=goal)
    sheet.add("most on the device, ours over the peer", ours["peak"] / max(peer["peak"], 1), "x")


def _loading(sheet: Sheet, session: Session) -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        size = session.ask("none", "big:written", at_most=60, folder=str(folder))["bytes"]
        copy = session.ask("none", "big:copy_rate", at_most=30)["rate"]
        gigabytes = f"{size / 1e9:.2f} GB"
        sheet.add("copy from pinned memory", copy / 1e9, "GB/s")
        for who, name in (("ours", "ours"), ("peer", "the peer")):
            if who == "peer" and session.peer is None:
                continue
            found = session.ask(who, "big:loading", at_most=60, folder=str(folder))
            rate = size / found["seconds"]
            goal = 0.8 if who == "ours" and not session.dry else None
            sheet.add(f"safetensors to the device, {name}", rate / 1e9, "GB/s", note=f"{gigabytes}, warm")
            sheet.add(f"safetensors to the device, {name}, of the pinned copy", rate / copy, "", at_least=goal)
    finally:
        shutil.rmtree(folder)


# ------------------------------------------------------------------------------------------------ the workers


def _shape(dry: bool) -> Shape:
    return TINY if dry else OFFLOADED


def _made(shape: Shape, device: str) -> LlamaShaped:
    """Return the model in bf16 in host memory; the device draws the values, which takes the host minutes."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cpu"):
            model = LlamaShaped(Shape(**{**asdict(shape), "layers": 0}))
        for _ in range(shape.layers):
            with torch.device(device):
                block = LlamaBlock(shape)
            model.blocks.append(block.to("cpu"))
    finally:
        torch.set_default_dtype(before)
    return model.eval()


def _bytes_of(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def generation(*, dry: bool, device: str) -> dict[str, float]:
    """Return the rate of generating with every weight in host memory, and the device's peak memory."""
    from accelerate import cpu_offload

    shape = _shape(dry)
    model = _made(shape, device)
    block, streamed = _bytes_of(model.blocks[0]), _bytes_of(model)
    rate = copy_rate(dry=dry, device=device)["rate"]
    if device == "cuda":
        torch.cuda.empty_cache()
    cpu_offload(model, execution_device=torch.device(device))
    tokens = torch.randint(shape.vocabulary, (shape.samples, 8), device=device)
    activations = shape.samples * (8 + NEW_TOKENS) * shape.vocabulary * 2
    with torch.no_grad():
        for _ in range(2):
            model(tokens)  # the order of the layers is learnt here
        synchronize(device)
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        for _ in range(NEW_TOKENS):
            tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
        synchronize(device)
        seconds = time.perf_counter() - start
    return {
        "rate": shape.samples * NEW_TOKENS / seconds,
        "seconds_a_token": seconds / NEW_TOKENS,
        "copy_rate": rate,
        "block": block,
        "streamed": streamed,
        "before": before,
        "activations": activations,
        "peak": torch.cuda.max_memory_allocated() if device == "cuda" else 0,
    }


def copy_rate(*, dry: bool, device: str) -> dict[str, float]:
    """Return the bytes per second of a copy from pinned memory; on the CPU, of a copy."""
    size = 1 << 20 if dry else 1 << 30
    source = torch.ones(size, dtype=torch.uint8, pin_memory=device == "cuda")
    target = torch.empty(size, dtype=torch.uint8, device=device)
    best = float("inf")
    for _ in range(5):
        synchronize(device)
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return {"rate": size / best}


def written(*, dry: bool, device: str, folder: str) -> dict[str, int]:
    """Write the model's weights in shards with an index, and return their bytes."""
    from safetensors.torch import save_file

    state = _made(_shape(dry), device).state_dict()
    weight_map: dict[str, str] = {}
    names = list(state)
    for shard in range(SHARDS):
        name = f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors"
        part = {key: state[key] for key in names[shard * len(names) // SHARDS : (shard + 1) * len(names) // SHARDS]}
        save_file(part, Path(folder) / name, {"format": "pt"})
        weight_map.update(dict.fromkeys(part, name))
    index = {"metadata": {}, "weight_map": weight_map}
    (Path(folder) / "model.safetensors.index.json").write_text(json.dumps(index))
    return {"bytes": sum(tensor.numel() * tensor.element_size() for tensor in state.values())}


def loading(*, dry: bool, device: str, folder: str) -> dict[str, float]:
    """Return the seconds of the second of two loads onto the device."""
    from accelerate import init_empty_weights, load_checkpoint_and_dispatch

    place = 0 if device == "cuda" else "cpu"
    torch.ones(1, device=device)
    seconds = 0.0
    for _ in range(2):
        with init_empty_weights():
            model = LlamaShaped(_shape(dry)).to(torch.bfloat16)
        synchronize(device)
        start = time.perf_counter()
        model = load_checkpoint_and_dispatch(model, folder, {"": place})
        synchronize(device)
        seconds = time.perf_counter() - start
        del model
    return {"seconds": seconds}
