"""The functions and methods that programs replace: each is replaced in a real run, and the run does as it says."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader

import accelerate.accelerator
import accelerate.utils.fsdp_utils
from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig, cpu_offload
from accelerate.construction import NAMES_OF_ACCELERATOR
from accelerate.errors import SettingError
from accelerate.state import AcceleratorState
from tests.ranks import run_on_ranks

MODULE = "accelerate.accelerator"
LOADER = "accelerate.utils.fsdp_utils.fsdp2_load_full_state_dict"
ROWS: Any = [1, 2]
FSDP2 = {"fsdp_version": 2, "auto_wrap_policy": "no_wrap"}


def trained(accelerator: Accelerator, make: Callable[[], nn.Module] | None = None) -> tuple[Any, list[torch.Tensor]]:
    """Train a small model for two updates, with other data on each rank; return it prepared, and its weights."""
    torch.manual_seed(3)
    model = make() if make else nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(2):
        rows = torch.full((3, 4), 1.0 + step + accelerator.process_index)
        accelerator.backward(model(rows).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return model, list(accelerator.get_state_dict(model).values())


def sharding(**options: Any) -> Accelerator:
    AcceleratorState._reset_state(True)
    return Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(**FSDP2, **options))


def equal(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


# -- each returns what must be true; under FSDP2 on two ranks ----------------------------------------------


def own_sharding() -> dict[str, bool]:
    """A library shards the model itself: LLaMA-Factory, axolotl."""
    _, expected = trained(sharding())
    called: list[Any] = []

    def shard_it_myself(accelerator: Accelerator, model: nn.Module) -> FSDPModule:
        called.append(accelerator)
        return fully_shard(model)

    with mock.patch(f"{MODULE}.fsdp2_prepare_model", shard_it_myself):
        accelerator = sharding()
        model, weights = trained(accelerator)
    return {
        "called": called == [accelerator],
        "sharded": isinstance(model, FSDPModule),
        "trained": not accelerator.is_main_process or equal(weights, expected),
    }


def sharding_around_ours() -> dict[str, bool]:
    _, expected = trained(sharding())
    ours, seen = accelerate.accelerator.fsdp2_prepare_model, []

    def around(accelerator: Accelerator, model: nn.Module) -> nn.Module:
        sharded = ours(accelerator, model)
        seen.append(isinstance(sharded, FSDPModule))
        return sharded

    with mock.patch(f"{MODULE}.fsdp2_prepare_model", around):
        accelerator = sharding()
        _, weights = trained(accelerator)
    return {"called": seen == [True], "trained": not accelerator.is_main_process or equal(weights, expected)}


def own_loading() -> dict[str, bool]:
    """A library loads the full weights of rank 0 into the shards itself: axolotl, SimpleTuner."""
    _, expected = trained(sharding())
    ours, loaded = accelerate.utils.fsdp_utils.fsdp2_load_full_state_dict, {}

    def load(accelerator: Any, model: nn.Module, full_sd: Any, cpu_offload: bool = False) -> nn.Module:
        if accelerator.is_main_process:
            loaded.update({name: tuple(value.shape) for name, value in full_sd.items()}, offload=cpu_offload)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()  # so that nothing but this function loads what is trained
        return ours(accelerator, model, full_sd, cpu_offload=cpu_offload)

    with mock.patch(LOADER, load):
        accelerator = sharding(cpu_ram_efficient_loading=True)
        _, weights = trained(accelerator)
    shapes = {"0.weight": (6, 4), "0.bias": (6,), "2.weight": (2, 6), "2.bias": (2,), "offload": False}
    is_main = accelerator.is_main_process
    return {"called": loaded == (shapes if is_main else {}), "trained": not is_main or equal(weights, expected)}


def preparation_around_ours() -> dict[str, bool]:
    """A library changes what is prepared under FSDP2, or the results: ms-swift, axolotl."""
    ours, seen = Accelerator._prepare_fsdp2, []

    def around(self: Accelerator, *args: Any, **options: Any) -> tuple[Any, ...]:
        seen.append([type(one).__name__ for one in args])
        return ours(self, *args, **options)

    with mock.patch.object(Accelerator, "_prepare_fsdp2", around):
        model, _ = trained(sharding())
        loader = sharding().prepare(DataLoader(ROWS))
    return {
        "called": seen == [["Sequential", "SGD"], ["DataLoader"]],
        "sharded": isinstance(model, FSDPModule) and not isinstance(loader, tuple),
    }


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        heads = self.layer(rows)[:, None]
        return nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)[:, 0]


def split_length(accelerator: Accelerator) -> int:
    """Return the length of a sequence of 8 in the context of context parallelism, after preparing a model."""
    accelerator.prepare(model := Attention(), torch.optim.SGD(model.parameters()))
    rows = torch.zeros(2, 8, 4)
    with accelerator.maybe_context_parallel(buffers=[rows], buffer_seq_dims=[1]):
        return rows.shape[1]


def over_sequences() -> Accelerator:
    AcceleratorState._reset_state(True)
    plugin = FullyShardedDataParallelPlugin(**FSDP2)
    return Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=ParallelismConfig(cp_size=2))


def own_context_parallelism() -> dict[str, bool]:
    """A library splits sequences by its own attention: axolotl, ms-swift."""

    @contextlib.contextmanager
    def nothing(buffers: Any = None, buffer_seq_dims: Any = None, no_restore_buffers: Any = None) -> Iterator[None]:
        yield

    def without_ours(self: Accelerator, *args: Any) -> tuple[Any, ...]:
        self._cp_context = nothing
        return args

    with (
        mock.patch.object(Accelerator, "_prepare_cp", without_ours),
        mock.patch("accelerate.parallel.fsdp.fsdp2.prepare_attention") as prepare_attention,
    ):
        whole = split_length(over_sequences())
    return {"not split": whole == 8, "attention as it was": not prepare_attention.called}


def context_parallelism_around_ours() -> dict[str, bool]:
    ours, seen = Accelerator._prepare_cp, []

    def around(self: Accelerator, *args: Any) -> tuple[Any, ...]:
        seen.append(len(args))
        return ours(self, *args)

    with mock.patch.object(Accelerator, "_prepare_cp", around):
        part = split_length(over_sequences())
    return {"called": seen == [2], "split": part == 4, "as without it": split_length(over_sequences()) == 4}


ON_TWO_RANKS = {
    one.__name__: one
    for one in (
        own_sharding, sharding_around_ours, own_loading, preparation_around_ours, own_context_parallelism,
        context_parallelism_around_ours,
    )
}  # fmt: skip


def all_on_this_rank() -> dict[str, dict[str, bool]]:
    return {name: run() for name, run in ON_TWO_RANKS.items()}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, dict[str, bool]]]:
    return run_on_ranks(all_on_this_rank, 2, timeout_seconds=300)


@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_what_a_library_puts_in_place_of_a_step_of_sharding_takes_effect(
    name: str, ranks: list[dict[str, dict[str, bool]]]
) -> None:
    assert [[what for what, holds in rank[name].items() if not holds] for rank in ranks] == [[], []]


# -- on one process ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [True, False])
def test_the_answer_of_a_replaced_is_bf16_available_counts(answer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.devices.table import CPU

    assert CPU.supports_bf16()
    monkeypatch.setattr(f"{MODULE}.is_bf16_available", lambda ignore_tpu=False: answer)
    if answer:
        monkeypatch.setattr("accelerate.devices.table.DeviceKind.supports_bf16", lambda self: False)
        assert Accelerator(cpu=True, mixed_precision="bf16").mixed_precision == "bf16"
    else:
        with pytest.raises(SettingError, match="bf16"):
            Accelerator(cpu=True, mixed_precision="bf16")


def test_a_replaced_prepare_data_loader_makes_the_loaders(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, seen = accelerate.accelerator.prepare_data_loader, []
    monkeypatch.setattr(
        f"{MODULE}.prepare_data_loader", lambda *args, **kwargs: seen.append(1) or ours(*args, **kwargs)
    )
    Accelerator(cpu=True).prepare(DataLoader(ROWS))
    assert seen == [1]


def test_a_replaced_skip_first_batches_makes_the_rest_of_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{MODULE}.skip_first_batches", lambda loader, num_batches: [loader, num_batches])
    assert Accelerator(cpu=True).skip_first_batches("loader", 2) == ["loader", 2]


def test_a_replaced_get_state_dict_offloaded_model_gives_the_weights_that_are_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both by `get_state_dict` and by `save_model`."""
    accelerator, own = Accelerator(cpu=True), {"weight": torch.ones(2, 2), "bias": torch.zeros(2)}
    model = cpu_offload(nn.Linear(2, 2), execution_device=torch.device("cpu"))
    monkeypatch.setattr(f"{MODULE}.get_state_dict_offloaded_model", lambda model: own)
    assert accelerator.get_state_dict(model, unwrap=False) is own
    accelerator.save_model(model, tmp_path)
    saved = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert torch.equal(saved["weight"], own["weight"])


def test_every_function_that_a_library_may_replace_is_looked_up_when_it_is_called() -> None:
    """None of them is bound while our modules are imported: what a library puts in its place would have no effect."""
    names = {name for names in NAMES_OF_ACCELERATOR.values() for name in names.split() if name.islower()}
    look_up = re.compile(r'(?:(?:functions|function_in_use)\(|sharding_function = )"(\w+)"')
    looked_up: set[str] = set()
    for path in Path(accelerate.__file__).parent.rglob("*.py"):
        looked_up |= set(look_up.findall(path.read_text(encoding="utf-8")))
    assert names - looked_up == set()


def test_names_that_are_replaced_are_found_where_programs_look_for_them() -> None:
    """An attribute of the module itself, and the same function at every address of it."""
    for name in ("fsdp2_prepare_model", "is_bf16_available", "prepare_data_loader"):
        assert getattr(sys.modules[MODULE], name) is not None
    assert accelerate.accelerator.fsdp2_prepare_model is accelerate.utils.fsdp_utils.fsdp2_prepare_model
