"""The slides on the library and on distributed data parallelism."""

from __future__ import annotations

import copy
import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import DataLoaderConfiguration, gather_object
from tests.ranks import RankFailed, run_on_ranks
from tests.seeds.test_001_commands import STATE, told, with_own_port
from tests.seeds.tools import launcher, run

row = pytest.mark.row


@row("004-01", "004-06")
def test_gradients_are_the_mean_over_the_processes() -> None:
    inputs = torch.arange(8.0).reshape(8, 1)

    def gradient() -> float:
        accelerator = Accelerator(cpu=True)
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        model = accelerator.prepare(model)
        half = inputs.chunk(2)[accelerator.process_index]
        accelerator.backward(model(half).pow(2).mean())
        return next(model.parameters()).grad.item()

    weight = torch.ones(1, 1, requires_grad=True)
    (inputs @ weight).pow(2).mean().backward()
    assert run_on_ranks(gradient, 2) == [pytest.approx(weight.grad.item())] * 2


@row("004-03")
def test_the_process_group_is_made_with_the_given_options() -> None:
    def made() -> tuple[str, int]:
        options = InitProcessGroupKwargs(backend="gloo", timeout=timedelta(seconds=77))
        Accelerator(cpu=True, kwargs_handlers=[options])
        return torch.distributed.get_backend(), torch.distributed.get_world_size()

    assert run_on_ranks(made, 2) == [("gloo", 2)] * 2


@row("004-04")
def test_the_first_ranks_weights_reach_all_ranks() -> None:
    def weights() -> tuple[list[float], list[float]]:
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(accelerator.process_index)
        model = nn.Linear(3, 1, bias=False)
        before = model.weight.flatten().tolist()
        return before, next(accelerator.prepare(model).parameters()).flatten().tolist()

    (first_before, first), (second_before, second) = run_on_ranks(weights, 2)
    assert first_before != second_before
    assert first == second == first_before


@row("004-05")
@pytest.mark.parametrize("dispatch", [False, True])
def test_data_is_partitioned_or_broadcast(dispatch: bool) -> None:
    def mine() -> list[int]:
        configuration = DataLoaderConfiguration(dispatch_batches=dispatch)
        accelerator = Accelerator(cpu=True, dataloader_config=configuration)
        loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(16)), batch_size=4))
        return [int(i) for (batch,) in loader for i in batch]

    first, second = run_on_ranks(mine, 2)
    assert not set(first) & set(second)
    assert sorted(first + second) == list(range(16))


@row("004-08")
def test_every_epoch_has_a_new_order_and_set_epoch_brings_one_back() -> None:
    def orders() -> list[list[int]]:
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
        torch.manual_seed(0)
        loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(32)), batch_size=4, shuffle=True))
        found = [[int(i) for (batch,) in loader for i in batch] for _ in range(2)]
        loader.set_epoch(1)
        found.append([int(i) for (batch,) in loader for i in batch])
        return found

    for zero, one, again in run_on_ranks(orders, 2):
        assert zero != one
        assert one == again


@row("004-10")
def test_fp16_has_a_scaler_and_a_real_half_forward_on_the_cpu() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    before = model.weight.detach().clone()
    # Small enough to survive the scaler's first factor, 65536: half precision ends at 65504.
    accelerator.backward(0.1 * model(torch.ones(2, 4)).mean())
    optimizer.step()
    assert not accelerator.optimizer_step_was_skipped
    assert accelerator.scaler is not None
    assert not torch.equal(before, model.weight)


@row("004-13")
def test_a_one_sided_barrier_ends_with_an_error_and_not_with_a_hang() -> None:
    def one_sided() -> None:
        accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=5))])
        if accelerator.is_main_process():
            pass
        else:
            accelerator.wait_for_everyone()
        accelerator.gather(torch.ones(2))

    with pytest.raises(RankFailed) as failure:
        run_on_ranks(one_sided, 2, timeout_seconds=40, environment={"ACCELERATE_DEBUG_MODE": "true"})
    assert "no answer within" not in str(failure.value)
    assert "wait_for_everyone" in str(failure.value)


@row("004-13")
def test_the_barrier_that_both_reach_and_main_process_first_work(tmp_path: Path) -> None:
    def both() -> bool:
        accelerator = Accelerator(cpu=True)
        file = tmp_path / "written"
        if accelerator.is_main_process():
            file.write_text("x")
        accelerator.wait_for_everyone()
        found = file.exists()
        with accelerator.main_process_first():
            second = tmp_path / "first"
            found = found and (accelerator.is_main_process() or second.exists())
            second.touch()
        return found

    assert run_on_ranks(both, 2) == [True, True]


@row("004-14")
def test_accelerators_share_the_world_and_can_be_passed_around() -> None:
    first = Accelerator(cpu=True)
    second = Accelerator()
    assert first.state.__dict__ is second.state.__dict__ or vars(first.state) == vars(second.state)
    assert second.device == first.device
    assert copy.deepcopy(first) is first
    again = pickle.loads(pickle.dumps(first))
    assert again.device == first.device and again.num_processes == first.num_processes


@row("004-16", "004-17")
def test_a_path_with_dots_is_launched_with_what_the_file_says(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "told.py").write_text(STATE)
    config = tmp_path / "old.yaml"
    config.write_text("distributed_type: MULTI_CPU\nnum_processes: 2\nuse_cpu: true\nfp16: true\n")
    with_own_port(config)
    odd = tmp_path / "scripts" / ".." / "told.py"
    words = launcher("accelerate")[:4]
    facts = told(run([*words[:3], "launch", "--config_file", config, odd]).stdout)
    assert len(facts) == 2
    assert {fact["mixed_precision"] for fact in facts} == {"fp16"}


@row("004-18")
def test_wrapped_objects_are_transparent() -> None:
    accelerator = Accelerator(cpu=True)
    dataset = TensorDataset(torch.arange(6))
    loader: Any = accelerator.prepare(DataLoader(dataset, batch_size=3))
    assert isinstance(loader, DataLoader)
    assert (loader.batch_size, loader.dataset) == (3, dataset)
    again = pickle.loads(pickle.dumps(loader))
    assert [batch.tolist() for (batch,) in again] == [[0, 1, 2], [3, 4, 5]]


@row("004-19")
def test_texts_are_embedded_in_parallel_and_come_back_in_order() -> None:
    texts = [f"text {number}" for number in range(7)]

    def embed() -> list[int]:
        accelerator = Accelerator(cpu=True)
        with accelerator.split_between_processes(texts) as mine:
            found = [int(text.split()[1]) for text in mine]
        return gather_object(found)

    assert run_on_ranks(embed, 2) == [list(range(7))] * 2
