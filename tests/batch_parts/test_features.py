"""Each feature computes the same bits on any number of ranks, or is refused by name, as the guarantee's page says."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset

from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.errors import NotBuilt, PreparationError, SettingError
from accelerate.local_sgd import LocalSGD
from accelerate.plugins.handlers import ActivationCheckpointing
from accelerate.utils import (
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    GradScalerKwargs,
    ParallelismConfig,
    TorchDynamoPlugin,
    set_seed,
)
from tests.batch_parts.test_loops import adversaries, prepared
from tests.batch_parts.training import Dense, Transformer, data, layout_options, state_of, train
from tests.ranks import RankFailed, run_on_ranks
from tests.slow import IS_SLOW

PAGE = Path(__file__).parents[2] / "docs" / "guarantees" / "same_bits.md"

# -- what works --------------------------------------------------------------------------------------------


def matrices(layout: str = "replicas", name: str = "Muon") -> Any:
    """Train with an optimizer of whole matrices, and AdamW for the other parameters."""
    accelerator = Accelerator(cpu=True, batch_parts=4, **layout_options(layout))
    set_seed(3)
    model: Any = Transformer()
    named = dict(model.named_parameters())
    whole = [parameter for name, parameter in named.items() if parameter.ndim == 2 and "embedding" not in name]
    others = [parameter for parameter in named.values() if not any(parameter is one for one in whole)]
    optimizers = [getattr(torch.optim, name)(whole, lr=1e-2), torch.optim.AdamW(others, lr=1e-2)]
    loader: Any = DataLoader(data(29, noisy=True), batch_size=2, shuffle=True)
    model, loader, *optimizers = accelerator.prepare(model, loader, *optimizers)
    found = []
    for _ in range(2):
        for rows, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(rows), targets))
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        found.append(accelerator.fingerprint())
    return found


def overflowing(layout: str = "replicas") -> Any:
    """Train in fp16 with a scale at which the gradients of some parts overflow."""
    handler = GradScalerKwargs(init_scale=2.0**24, growth_interval=3)
    accelerator, _, _, loader = prepared(4, mixed_precision="fp16", kwargs_handlers=[handler], **layout_options(layout))
    model: Any = Transformer()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    skipped, scales = 0, []
    for _ in range(2):
        for rows, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(rows).float(), targets))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                if accelerator.sync_gradients:
                    skipped += optimizer.step_was_skipped
                    scales.append(accelerator.scaler.get_scale())
                optimizer.zero_grad()
    assert 0 < skipped < len(scales)
    return state_of(accelerator, model, optimizer), skipped, scales, accelerator.fingerprint()


def compiled(model: str) -> Any:
    return train(model, num_rows=29, dynamo_plugin=TorchDynamoPlugin(backend="aot_eager"))


def shared_layer(reentrant: bool) -> Any:
    """Train a layer that is used three times: twice in checkpoints, once outside."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.last = nn.Linear(6, 6), nn.Linear(6, 5)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                rows = checkpoint(lambda inputs: self.layer(inputs).tanh(), rows, use_reentrant=reentrant)  # pyright: ignore[reportAssignmentType]
            return self.last(rows)

    accelerator, _, _, loader = prepared(4)
    set_seed(5)
    model: Any = Shared()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    for rows, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(rows.requires_grad_()), targets))
            optimizer.step()
            optimizer.zero_grad()
    return state_of(accelerator, model, optimizer)


def sometimes_used(layout: str = "replicas") -> Any:
    """Train layers of which an update uses one in no part, or in one part."""

    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 5) for _ in range(4))

        def forward(self, rows: torch.Tensor, numbers: tuple[int, ...]) -> torch.Tensor:
            return torch.stack([self.layers[number](rows) for number in numbers]).sum(0)

    accelerator, _, _, loader = prepared(4, **layout_options(layout))
    set_seed(5)
    model: Any = Chosen()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    norms, unused = [], []
    for rows, targets in loader:
        with accelerator.accumulate(model):
            update, part = divmod(int(targets.sum()), 4)  # a function of the samples, equal for any number of ranks
            numbers = (0, 1) if part == 1 else (0,)
            if optimizer.num_updates % 2:
                numbers = (0, 3) if update % 2 else (0, 2)
            accelerator.backward(F.cross_entropy(model(rows, numbers), targets))
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
                unused.append(sum(one.grad is None for one in model.parameters()))
            optimizer.step()
            optimizer.zero_grad()
    assert max(unused) > 0, "some layers aren't used"
    return state_of(accelerator, model, optimizer), norms, unused


def saved_by_one(folder: str) -> Any:
    """Save on the main process alone, go on, and go on again from the checkpoint."""
    accelerator, model, optimizer, loader = prepared(4)
    found = []
    for _ in range(2):
        for rows, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(rows), targets))
                optimizer.step()
                optimizer.zero_grad()
            if optimizer.num_updates == 2 and accelerator.sync_gradients and accelerator.is_main_process and not found:
                accelerator.save_state(folder)
        accelerator.wait_for_everyone()
        found.append(state_of(accelerator, model, optimizer))
        accelerator.load_state(folder)
    return found[0], found[1]


#: By the page's name of a feature, functions that leave the same hashes on one rank and on two.
WORKS: dict[str, list[Callable[[], Any]]] = {
    "`gradient_accumulation_steps`": [partial(train, num_steps=2, num_rows=41)],
    "`backward(loss, weight=)`": [partial(train, weighted=True, num_rows=29)],
    "bf16": [partial(train, precision="bf16", num_rows=29)],
    "fp16 with a gradient scaler": [overflowing],
    "Muon and other optimizers of whole matrices": [matrices],
    "activation checkpointing": [
        partial(train, "Transformer", num_rows=29, kwargs_handlers=[ActivationCheckpointing(modules="layer")]),
        partial(shared_layer, False),
        partial(shared_layer, True),
    ],
    "parameters that no part of an update uses, such as an expert's": [sometimes_used],
    "`torch.compile`": [partial(compiled, name) for name in (("Dense", "Transformer") if IS_SLOW else ())],
}
#: Features with tests of their own: the checkpoint test below, and `test_inner_layouts.py`.
ELSEWHERE = {
    "checkpoints of the main process alone",
    "tensor, context, sequence and pipeline parallelism under FSDP 2",
}
#: The same under FSDP 2, compared with one process.
SHARDED: dict[str, list[Callable[[str], Any]]] = {
    "Muon and other optimizers of whole matrices": [matrices, partial(matrices, name="Adafactor")],
    "fp16 with a gradient scaler": [overflowing],
    "parameters that no part of an update uses, such as an expert's": [sometimes_used],
}


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself
@pytest.mark.parametrize(
    "act", [pytest.param(act, id=f"{name} {number}") for name in WORKS for number, act in enumerate(WORKS[name])]
)
def test_a_feature_computes_the_same_bits(act: Callable[[], Any]) -> None:
    (expected,) = run_on_ranks(act, 1, timeout_seconds=240)
    assert run_on_ranks(act, 2, timeout_seconds=240) == [expected] * 2


@pytest.mark.parametrize(
    "act", [pytest.param(act, id=f"{name} {number}") for name in SHARDED for number, act in enumerate(SHARDED[name])]
)
def test_a_feature_computes_the_same_bits_under_fsdp2(act: Callable[[str], Any]) -> None:
    is_rounded = act is overflowing  # FSDP 2 casts at other places than autocast
    (expected,) = run_on_ranks(act, 1, "replicas", timeout_seconds=240)
    two = run_on_ranks(act, 2, "fsdp2", timeout_seconds=240)
    assert two == [two[0] if is_rounded else expected] * 2
    if is_rounded:
        assert run_on_ranks(act, 4, "fsdp2", timeout_seconds=240) == [two[0]] * 4


def test_a_checkpoint_of_the_main_process_alone_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    (expected,) = run_on_ranks(saved_by_one, 1, str(tmp_path / "one"))
    assert run_on_ranks(saved_by_one, 2, str(tmp_path / "two")) == [expected] * 2


def statistics_of(num_rounds: int, **options: Any) -> list[torch.Tensor]:
    """The running statistics after two updates of a plain loop that accumulates."""
    accelerator = Accelerator(cpu=True, **options)
    set_seed(3)
    model: Any = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, momentum=0.5))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data(2 * 4 * num_rounds * 2), 2))  # pyright: ignore[reportUnknownVariableType]
    for rows, _ in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(rows).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    layer = accelerator.unwrap_model(model)[1]
    return [layer.running_mean.clone(), layer.running_var.clone(), layer.num_batches_tracked.clone()]


def test_running_statistics_follow_the_order_of_a_plain_loop() -> None:
    """With a momentum of 0.5, another order of the batches would give other statistics."""
    (plain,) = run_on_ranks(partial(statistics_of, 3, gradient_accumulation_steps=12), 1)
    for num_ranks in (1, 2, 4):
        for found in run_on_ranks(partial(statistics_of, 3, gradient_accumulation_steps=3, batch_parts=4), num_ranks):
            for one, expected in zip(found, plain, strict=True):
                torch.testing.assert_close(one, expected, rtol=1e-5, atol=1e-6)


# -- what is refused ---------------------------------------------------------------------------------------


def without_accumulate() -> None:
    accelerator, model, _, loader = prepared()
    for rows, targets in loader:
        accelerator.backward(F.cross_entropy(model(rows), targets))


def with_another_buffer() -> None:
    class Counting(Dense):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.seen += len(inputs)
            return super().forward(inputs)

    accelerator, _, _, loader = prepared()
    model: Any = accelerator.prepare(Counting())
    for rows, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(rows), targets))


def with_an_assigned_buffer() -> None:
    class Following(Dense):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(6))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.seen = 0.9 * self.seen + inputs.mean(0)
            return super().forward(inputs)

    _train(Following())


def with_a_renormalised_weight() -> None:
    class Renormalised(Dense):
        def __init__(self) -> None:
            super().__init__()
            self.seen = nn.Embedding(4, 6, max_norm=0.1)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs + self.seen(torch.zeros(len(inputs), dtype=torch.long)))

    _train(Renormalised())


def _train(net: nn.Module) -> None:
    accelerator, _, _, loader = prepared()
    model: Any = accelerator.prepare(net)
    for rows, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(rows), targets))


def with_plain_backward() -> None:
    accelerator, model, optimizer, loader = prepared()
    for rows, targets in loader:
        with accelerator.accumulate(model):
            F.cross_entropy(model(rows), targets).backward()
            optimizer.step()


def left_inside() -> None:
    accelerator, model, _, loader = prepared()
    for _ in range(2):
        for rows, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(rows), targets))
            break


def saved_inside() -> None:
    accelerator, model, _, loader = prepared()
    for rows, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(rows), targets))
        accelerator.save_state("never")


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(torch.ones(8, 6))


def token_budget() -> None:
    config = DataLoaderConfiguration(token_budget=8, length_of=lambda sample: 2)
    prepared(dataloader_config=config)


def sparse_gradients() -> None:
    accelerator, _, _, loader = prepared()
    model: Any = nn.Embedding(5, 5, sparse=True)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(targets), targets))


def closures() -> None:
    accelerator, model, _, loader = prepared()
    optimizer: Any = accelerator.prepare(torch.optim.LBFGS(model.parameters()))
    for rows, targets in loader:
        with accelerator.accumulate(model):

            def closure(rows: Any = rows, targets: Any = targets) -> Any:
                loss = F.cross_entropy(model(rows), targets)
                accelerator.backward(loss)
                return loss

            closure()
            optimizer.step(closure)


def lomo() -> None:
    kind = type("Lomo", (torch.optim.SGD,), {"__module__": "lomo_optim"})
    accelerator, model, _, _ = prepared()
    accelerator.prepare(kind(model.parameters(), lr=0.1))


def local_sgd() -> None:
    accelerator, model, _, _ = prepared()
    LocalSGD(accelerator, model, 4)


def mesh(**degrees: Any) -> None:
    prepared(4, parallelism_config=ParallelismConfig(**degrees))


def mesh_of_shards(**degrees: Any) -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    prepared(4, parallelism_config=ParallelismConfig(**degrees), fsdp_plugin=plugin)


#: By the page's name of a feature: what is done on two ranks, and the pattern of the message.
REFUSED: dict[str, list[tuple[Callable[[], Any], str]]] = {
    "iterable datasets": [
        (lambda: prepared()[0].prepare(DataLoader(Endless(), batch_size=2)), r"an iterable dataset"),
    ],
    "`token_budget`": [(token_budget, r"batches planned by token_budget")],
    "`split_batches`": [
        (
            lambda: prepared(dataloader_config=DataLoaderConfiguration(split_batches=True)),
            r"split_batches=True with batch_parts",
        )
    ],
    "`dispatch_batches`": [
        (
            lambda: prepared(dataloader_config=DataLoaderConfiguration(dispatch_batches=True)),
            r"dispatch_batches=True with batch_parts",
        )
    ],
    "`even_batches=False`": [
        (
            lambda: prepared(dataloader_config=DataLoaderConfiguration(even_batches=False)),
            r"even_batches=False with batch_parts",
        )
    ],
    "a number of processes that doesn't divide the parts": [
        (lambda: Accelerator(cpu=True, batch_parts=3), r"2 processes can't share 3 parts equally")
    ],
    "`backward()` outside of `accumulate()`": [
        (without_accumulate, r"put each batch's forward, backward and step under")
    ],
    "a loss after a step of the same batch": [
        (lambda: adversaries(True), r"after an optimizer has stepped in the same micro-batch")
    ],
    "`SyncBatchNorm`": [(lambda: prepared()[0].prepare(nn.SyncBatchNorm(3)), r"SyncBatchNorm")],
    "other buffers that `forward()` changes": [
        (with_another_buffer, r"while it trains: buffer seen"),
        (with_an_assigned_buffer, r"while it trains: buffer seen"),
    ],
    "weights that `forward()` changes": [(with_a_renormalised_weight, r"while it trains: weight seen")],
    "`loss.backward()`": [(with_plain_backward, r"Call accelerator.backward\(loss\) instead of loss.backward\(\)")],
    "a loop that is left inside an update": [(left_inside, r"was left after some of them")],
    "checkpoints inside an update": [(saved_inside, r"save_state\(\) inside an update of 6 parts")],
    "sparse gradients": [(sparse_gradients, r"A gradient is sparse")],
    "optimizers with a closure, such as LBFGS": [(closures, r"in the closure of an optimizer's step")],
    "LOMO": [(lomo, r"Lomo with batch_parts=6")],
    "`backward_in_parts()`": [
        (lambda: prepared()[0].backward_in_parts(lambda part: part, None), r"backward_in_parts\(\).* batch_parts")
    ],
    "`LocalSGD`": [(local_sgd, r"LocalSGD .* no sharding or batch_parts")],
    "DDP's options": [
        (
            lambda: prepared(kwargs_handlers=[DistributedDataParallelKwargs()]),
            r"DistributedDataParallelKwargs with batch_parts",
        )
    ],
    "FSDP 1": [
        (lambda: prepared(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=1)), r"fsdp with batch_parts")
    ],
    "tensor, context, sequence and pipeline parallelism without FSDP 2": [
        (lambda: mesh(tp_size=2), r"parallelism with batch_parts"),
        (lambda: mesh(pp_size=2), r"parallelism with batch_parts"),
        (lambda: mesh(sp_size=2, sp_backend="torch"), r"parallelism with batch_parts"),
    ],
    "BatchNorm under context or sequence parallelism, or in a pipeline": [
        (lambda: mesh_of_shards(cp_size=2), r"BatchNorm under cp with batch_parts"),
        (lambda: mesh_of_shards(sp_size=2, sp_backend="torch"), r"BatchNorm under sp with batch_parts"),
    ],
    "expert parallelism": [(lambda: mesh_of_shards(ep_size=2), r"ep with batch_parts")],
}


@pytest.mark.parametrize(
    ("act", "pattern"),
    [pytest.param(*case, id=f"{name} {number}") for name in REFUSED for number, case in enumerate(REFUSED[name])],
)
def test_what_cannot_be_is_refused_by_name(act: Any, pattern: str) -> None:
    with pytest.raises(RankFailed, match=f"(?s){pattern}") as caught:
        run_on_ranks(act, 2)
    assert any(kind.__name__ in str(caught.value) for kind in (PreparationError, SettingError, NotBuilt))


#: Refused in a process of its own; the message names the flag.
LAUNCHED = {
    "`--keep_replicas`": (["--keep_replicas", "1"], "--keep_replicas with batch_parts"),
}


@pytest.mark.parametrize("name", LAUNCHED)
def test_what_cannot_be_launched_is_refused_by_name(name: str, tmp_path: Path) -> None:
    flags, message = LAUNCHED[name]
    script = tmp_path / "train.py"
    script.write_text("from accelerate import Accelerator\nAccelerator(cpu=True)\n")
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--cpu", "--num_processes", "2"]
    ended = subprocess.run(
        [*command, "--batch_parts", "4", *flags, str(script)], capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode
    assert message in ended.stderr


def test_the_page_lists_the_same_features() -> None:
    rows = re.findall(r"^\| (.+?) \| (works|refused)\b", PAGE.read_text(), re.MULTILINE)
    assert {name for name, kind in rows if kind == "refused"} == {*REFUSED, *LAUNCHED}
    assert {name for name, kind in rows if kind == "works"} == {*WORKS, *ELSEWHERE}
