"""Ranks that should hold the same parameters: what is compared, when, and what is said of a difference."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.errors import CollectiveError, ReplicaError, ReplicaWarning, RunStopped
from accelerate.guests.checks import replicas_of
from accelerate.guests.reproduce.chain import LOCK
from accelerate.local_sgd import LocalSGD
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import ProjectConfiguration
from tests.ranks import run_on_ranks

Parts = tuple[Accelerator, nn.Module, Any]


def parts(**options: Any) -> Parts:
    accelerator = Accelerator(cpu=True, **options)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return accelerator, *accelerator.prepare(model, optimizer)


def step(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(torch.randn(6, 4) + accelerator.process_index).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    return loss


def what_is_said(accelerator: Accelerator) -> str:
    try:
        accelerator.compare_replicas()
    except ReplicaError as error:
        return str(error)
    return ""


def test_replicas_that_are_trained_stay_equal_and_one_that_is_changed_is_named() -> None:
    def on_rank() -> list[str]:
        accelerator, model, optimizer = made = parts()
        said = [what_is_said(accelerator)]  # before there is any optimizer state
        for _ in range(3):
            step(*made)
        said.append(what_is_said(accelerator))  # with buffers that differ by rank
        weight = dict(model.named_parameters())["module.2.weight"]
        if accelerator.process_index == 2:
            weight.data[1, 5] = torch.nextafter(weight.data[1, 5], torch.tensor(9.0))  # one bit
        said.append(what_is_said(accelerator))
        if accelerator.process_index == 2:
            weight.data[1, 5] = torch.nextafter(weight.data[1, 5], torch.tensor(-9.0))
            optimizer.state[weight]["exp_avg"][0, 0] += 1
            weight.data[0], weight.data[1] = weight.data[0].clone(), weight.data[1].clone()
        return [*said, what_is_said(accelerator)]

    said = run_on_ranks(on_rank, 4)
    assert said[0][:2] == ["", ""]
    assert said[0] == said[1] == said[2] == said[3]
    assert said[0][2].startswith("Replicas differ: rank 2 holds other values than ranks 0, 1 and 3 of `2.weight`. ")
    assert "rank 2 holds other values than ranks 0, 1 and 3 of the optimizer's 'exp_avg' of `2.weight`" in said[0][3]


def test_statistics_that_all_ranks_compute_alike_are_compared() -> None:
    """DDP takes SyncBatchNorm on accelerators only, so the replicas are those of a model that it hasn't wrapped."""

    def on_rank() -> list[str]:
        accelerator, *_ = parts()
        torch.manual_seed(0)
        group = torch.distributed.new_group([0, 1])
        of_some = nn.SyncBatchNorm(8, process_group=group)
        model = nn.Sequential(nn.Linear(4, 8), nn.SyncBatchNorm(8), nn.BatchNorm1d(8), of_some)
        replicas = replace(replicas_of(accelerator), models=[model], optimizers=[])
        said = [str(replicas.difference())]
        for name, buffer in model.named_buffers():
            if accelerator.process_index == 1 and name.endswith("running_var"):
                buffer[3] += 1
        return [*said, str(replicas.difference())]

    assert run_on_ranks(on_rank, 3)[0] == ["None", "rank 1 holds other values than ranks 0 and 2 of `1.running_var`"]


def test_a_model_that_was_not_prepared_is_found_at_the_first_report() -> None:
    def on_rank() -> tuple[str, int]:
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(accelerator.process_index)
        model = nn.Linear(4, 2)
        optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        run = accelerator.watch_run(every=2, log=False)
        with pytest.raises(RunStopped) as stopped:
            for _ in range(9):
                run.step(step(accelerator, model, optimizer))
        return str(stopped.value), run.updates

    [(said, updates), other] = run_on_ranks(on_rank, 2)
    assert (said, updates) == other and updates == 2
    what = "parameter 0 (2, 4) of optimizer 0, which is in no prepared model"
    assert f"ranks 0 and 1 hold different values of {what}" in said
    assert "never compared before" in said


def test_a_run_compares_as_often_as_it_is_asked_and_names_the_steps() -> None:
    def on_rank(every: int | bool) -> str:
        accelerator, model, _ = made = parts()
        run = accelerator.watch_run(every=2, log=False, compare_replicas=every)
        try:
            for number in range(12):
                if number == 5 and accelerator.process_index == 1:
                    next(model.parameters()).data += 1
                run.step(step(*made))
        except RunStopped as stopped:
            return str(stopped)
        return "went on"

    assert run_on_ranks(on_rank, 2, False) == run_on_ranks(on_rank, 2, True) == ["went on"] * 2
    said = run_on_ranks(on_rank, 2, 4)
    assert said[0] == said[1]
    assert said[0].startswith("The run is stopped at step 6: ranks 0 and 1 hold different values of ")
    assert said[0].endswith("; they were equal at step 2.")


def test_a_rank_that_compares_alone_is_told_who_is_missing() -> None:
    def on_rank() -> str:
        accelerator = parts()[0]
        if accelerator.is_main_process:
            with pytest.raises(CollectiveError) as error:
                accelerator.compare_replicas()
            return str(error.value)
        return ""

    said = run_on_ranks(on_rank, 2)[0]
    assert "`compare_replicas`" in said and "rank 1 has ended" in said


@pytest.mark.parametrize("action", ["warn", "raise", "no"])
def test_a_save_says_that_replicas_differ(tmp_path: Path, action: Any) -> None:
    def on_rank() -> tuple[list[str], bool]:
        project = ProjectConfiguration(str(tmp_path / action), compare_replicas=action)
        accelerator, model, _ = made = parts(project_config=project)
        step(*made)
        accelerator.save_state(str(tmp_path / action / "good"))
        if accelerator.process_index == 1:
            next(model.parameters()).data += 1
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            try:
                accelerator.save_state(str(tmp_path / action / "bad"))
            except ReplicaError as error:
                return [str(error)], False
        return [str(one.message) for one in found if one.category is ReplicaWarning], True

    said = run_on_ranks(on_rank, 2)
    folders = {path.name for path in (tmp_path / action).iterdir()} - {LOCK}
    if action == "raise":
        assert said[0] == said[1] and "`0.weight`" in said[0][0][0] and not said[0][1]
        assert folders == {"good"}
    else:
        assert [len(texts) for texts, _ in said] == [1 if action == "warn" else 0, 0]
        assert folders == {"good", "bad"}


def test_what_may_differ_is_left_alone() -> None:
    """Replicas between two averages, states that an optimizer keeps on one rank, and a world of one."""

    def on_rank() -> list[str]:
        accelerator, model, _ = made = parts()
        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=4) as local:
            step(*made)
            local.step()
            said = [what_is_said(accelerator)]
        said.append(what_is_said(accelerator))  # parameters and states are averaged
        from torch.distributed.optim import ZeroRedundancyOptimizer

        second = nn.Linear(4, 2)
        sharded = ZeroRedundancyOptimizer(second.parameters(), torch.optim.Adam, lr=0.1)
        again = Accelerator(cpu=True)
        second, prepared = again.prepare(second, sharded)
        step(again, second, prepared)
        return [*said, what_is_said(again)]

    assert run_on_ranks(on_rank, 2) == [["", "", ""]] * 2
    assert run_on_ranks(lambda: what_is_said(parts()[0]), 1) == [""]


def test_a_tensor_that_cant_be_compared_ends_no_save(tmp_path: Path) -> None:
    class Odd(torch.optim.SGD):
        """Keeps its state by a key of its own on one rank."""

        def __getattribute__(self, name: str) -> Any:
            if name == "state" and torch.distributed.get_rank() == 1 and is_comparing[0]:
                raise RuntimeError("no state by parameter")
            return super().__getattribute__(name)

    is_comparing = [False]

    def on_rank() -> list[str]:
        accelerator = Accelerator(cpu=True)
        model = nn.Linear(4, 2)
        model.turned = nn.Parameter(torch.ones(2, dtype=torch.complex64).conj())  # type: ignore[assignment]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch: deprecated
            whole = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)
        model.whole = nn.Parameter(whole, requires_grad=False)  # type: ignore[assignment]
        optimizer = Odd([model.weight, model.bias], lr=0.1)
        optimizer = accelerator.prepare(optimizer)
        accelerator._models.append(model)  # as it is: DDP takes no quantized parameter
        said = [what_is_said(accelerator)]
        model.weight.data += accelerator.process_index
        said.append(what_is_said(accelerator))
        is_comparing[0] = True
        return [*said, what_is_said(accelerator)]

    for said in run_on_ranks(on_rank, 2):
        assert said is not None and (said[0], said[2]) == ("", "")
        assert "ranks 0 and 1 hold different values of `weight`" in said[1]


def test_parameters_that_ddp_leaves_to_each_rank_are_left_alone() -> None:
    def on_rank() -> list[str]:
        accelerator = Accelerator(cpu=True)
        model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2))
        model._ddp_params_and_buffers_to_ignore = ["1.weight", "1.bias"]  # type: ignore[assignment]
        torch.manual_seed(accelerator.process_index)
        model[1].load_state_dict(nn.Linear(2, 2).state_dict())
        model = accelerator.prepare(model)
        said = [what_is_said(accelerator)]
        if accelerator.is_main_process:
            accelerator.prepare_model(nn.Linear(3, 3), evaluation_mode=True)  # an average, kept by one rank
        return [*said, what_is_said(accelerator)]

    assert run_on_ranks(on_rank, 2) == [["", ""]] * 2


@pytest.mark.parametrize("layout", ["hsdp", "tp", "fsdp"])
def test_shards_are_compared_with_those_that_other_ranks_hold_too(layout: str) -> None:
    def on_rank() -> list[str]:
        degrees = {"hsdp": {"dp_replicate_size": 2, "dp_shard_size": 2}, "tp": {"tp_size": 2}, "fsdp": {}}[layout]
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if layout != "tp" else None
        config = ParallelismConfig(**degrees) if degrees else None
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=config)
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.LayerNorm(8))
        if layout == "tp":
            from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

            model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
            assert accelerator.torch_device_mesh is not None
            mesh = accelerator.torch_device_mesh["tp"]
            model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        torch.manual_seed(accelerator.process_index if layout != "tp" else 0)
        for _ in range(2):
            step(accelerator, model, optimizer)
        said = [what_is_said(accelerator)]
        if accelerator.process_index == 1:
            list(model.parameters())[3].to_local().data += 1  # type: ignore[attr-defined]
        return [*said, what_is_said(accelerator)]

    said = run_on_ranks(on_rank, 4 if layout == "hsdp" else 2)
    first = said[0]
    assert first is not None and all(each == first for each in said) and first[0] == ""
    ranks = {
        "hsdp": "ranks 1 and 3 hold different values of `2.bias`",
        "tp": "ranks 0 and 1 hold different values of `2.bias`",
    }
    assert ranks.get(layout, "") in first[1] and bool(first[1]) == (layout != "fsdp")
