"""What a loop sees of the engine: the documented names, and the documented refusals."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator, DeepSpeedPlugin, DistributedType
from accelerate.errors import NotBuilt, PreparationError, SettingError
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DeepSpeedEngineWrapper,
    DeepSpeedOptimizerWrapper,
    DummyOptim,
    DummyScheduler,
    GatheredParameters,
)
from tests.ranks import RankFailed, run_on_ranks
from tests.sharded_runs import Network, samples


def prepared(stage: int = 2, num_steps: int = 1, **options: Any) -> tuple[Accelerator, Any, Any, Any]:
    """An Accelerator, and the common network under it."""
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=num_steps,
        deepspeed_plugin=DeepSpeedPlugin(**{"zero_stage": stage, "gradient_clipping": 1e6, **options}),
    )
    torch.manual_seed(0)
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(samples(64), batch_size=8 // accelerator.num_processes)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def on_one(function: Any, *args: Any) -> Any:
    """What ``function`` returns in a process of its own."""
    return run_on_ranks(function, 1, *args)[0]


def test_the_engine_and_its_parts() -> None:
    def look() -> None:
        accelerator, model, optimizer, loader = prepared()
        assert accelerator.distributed_type is DistributedType.DEEPSPEED
        wrapped = accelerator.deepspeed_engine_wrapped
        assert isinstance(wrapped, DeepSpeedEngineWrapper) and wrapped.engine is model
        assert isinstance(optimizer, DeepSpeedOptimizerWrapper) and not optimizer.step_was_skipped
        assert type(accelerator.unwrap_model(model)) is Network
        assert accelerator._models == [model] and accelerator.prepare(model) is model
        before = [p.clone() for p in model.module.parameters()]
        model.train()
        for batch in loader:
            optimizer.zero_grad()
            accelerator.backward(loss_of(model, batch))
            moved = [p.clone() for p in model.module.parameters()]
            optimizer.step()  # has already happened
            assert all(map(torch.equal, moved, model.module.parameters()))
            break
        assert not all(map(torch.equal, before, moved))
        assert wrapped.get_global_grad_norm() == pytest.approx(float(accelerator.clip_grad_norm_([], float("inf"))))
        accelerator.free_memory()
        assert accelerator.deepspeed_engine_wrapped is None and accelerator._models == []

    on_one(look)


@pytest.mark.parametrize("stage", [1, 3])
def test_no_sync_adds_without_stepping(stage: int) -> None:
    def run(held: bool) -> list[list[float]]:
        accelerator, model, _, loader = prepared(stage, zero3_save_16bit_model=True)
        first, second = list(loader)[:2]
        if held:
            with accelerator.no_sync(model):
                accelerator.backward(loss_of(model, first) / 2)
            accelerator.backward(loss_of(model, second) / 2)
        else:
            both = [torch.cat(parts) for parts in zip(first, second, strict=True)]
            accelerator.backward(loss_of(model, both))
        return [value.flatten().tolist() for value in accelerator.get_state_dict(model).values()]

    for ours, theirs in zip(run_on_ranks(run, 2, True)[0], run_on_ranks(run, 2, False)[0], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-6)


def test_weighted_losses_of_single_micro_batches() -> None:
    def run(weighted: bool) -> list[list[float]]:
        accelerator, model, _, loader = prepared(2)
        for inputs, classes in loader:
            total = nn.functional.cross_entropy(model(inputs), classes, reduction="sum")
            accelerator.backward(total, weight=len(inputs)) if weighted else accelerator.backward(total / len(inputs))
        return [value.flatten().tolist() for value in accelerator.get_state_dict(model).values()]

    for ours, theirs in zip(run_on_ranks(run, 2, True)[0], run_on_ranks(run, 2, False)[0], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-6)


def test_weighted_losses_over_several_micro_batches_are_refused() -> None:
    def run() -> None:
        accelerator, model, _, loader = prepared(2, num_steps=2)
        with pytest.raises(PreparationError, match="gradient_accumulation_steps=1"):
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(model, batch), weight=4)

    on_one(run)


def test_whole_parameters_inside_a_block() -> None:
    def run() -> list[Any]:
        accelerator, model, _, _ = prepared(3)
        weight = model.module.head.weight
        pieces = weight.numel()
        with GatheredParameters([weight], modifier_rank=0):
            shape = list(weight.shape)
            if accelerator.is_main_process:
                weight.data.fill_(0.25)
        with GatheredParameters(weight):
            value = float(weight.mean())
        with GatheredParameters([torch.nn.Parameter(torch.ones(2))]):  # in one piece: nothing to do
            pass
        return [pieces, shape, value]

    assert run_on_ranks(run, 2) == [[0, [8, 8], 0.25]] * 2


def test_stage_3_weights_are_gathered_only_where_that_is_allowed() -> None:
    def run(allowed: bool) -> list[str]:
        accelerator, model, _, _ = prepared(3, zero3_save_16bit_model=allowed)
        return sorted(accelerator.get_state_dict(model))

    names = sorted(Network().state_dict())
    assert run_on_ranks(run, 2, True) == [names, []]
    with pytest.raises(RankFailed, match="stage3_gather_16bit_weights_on_model_save"):
        run_on_ranks(run, 2, False)


def test_evaluation_and_other_methods_of_the_model() -> None:
    def run() -> list[float]:
        accelerator, model, _, loader = prepared(3)
        model.eval()
        with torch.no_grad():
            return [float(accelerator.gather_for_metrics(model(inputs)).sum()) for inputs, _ in loader]

    torch.manual_seed(0)
    network = Network()
    expected = [float(network(inputs).sum()) for inputs, _ in DataLoader(samples(64), batch_size=8)]
    assert run_on_ranks(run, 2)[0] == pytest.approx(expected, abs=1e-4)


def test_several_plugins_by_name() -> None:
    def run() -> None:
        plugins = {"student": DeepSpeedPlugin(zero_stage=2), "teacher": DeepSpeedPlugin(zero_stage=3)}
        first = Accelerator(cpu=True, deepspeed_plugins=plugins)
        assert first.deepspeed_plugin is plugins["student"] and plugins["student"].selected
        loader = DataLoader(samples(16), batch_size=4)
        student = Network()
        student, _, loader = first.prepare(student, torch.optim.SGD(student.parameters(), lr=0.1), loader)
        second = Accelerator(cpu=True)
        AcceleratorState().select_deepspeed_plugin("teacher")
        assert second.deepspeed_plugin is plugins["teacher"] and not plugins["student"].selected
        plugins["teacher"].deepspeed_config["train_micro_batch_size_per_gpu"] = 4
        teacher = second.prepare(Network())
        assert (student.zero_optimization_stage(), teacher.zero_optimization_stage()) == (2, 3)
        for batch in loader:
            with torch.no_grad():
                goal = teacher(batch[0])
            first.backward(nn.functional.mse_loss(student(batch[0]), goal))
        with pytest.raises(NotImplementedError, match="second `Accelerator`"):
            Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin())

    on_one(run)


def test_compiled_engines_train_the_same() -> None:
    def run(backend: str | None) -> list[float]:
        accelerator = Accelerator(cpu=True, dynamo_backend=backend, deepspeed_plugin=DeepSpeedPlugin(zero_stage=1))
        torch.manual_seed(0)
        model = Network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, _, loader = accelerator.prepare(model, optimizer, DataLoader(samples(32), batch_size=8))
        losses = []
        for batch in loader:
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            losses.append(loss.item())
        return losses

    assert on_one(run, "eager") == pytest.approx(on_one(run, None), abs=1e-6)


def test_a_clipping_norm_that_the_configuration_left_open_is_followed(caplog: pytest.LogCaptureFixture) -> None:
    def run() -> tuple[list[float], list[str]]:
        records: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: records.append(record.getMessage())  # pyright: ignore[reportAttributeAccessIssue]
        logging.getLogger("accelerate.guests.deepspeed.strategy").addHandler(handler)
        accelerator, model, _, loader = prepared(1, gradient_clipping="auto")
        sizes = []
        for batch in loader:
            before = torch.cat([p.detach().flatten().clone() for p in model.module.parameters()])
            accelerator.backward(loss_of(model, batch))
            after = torch.cat([p.detach().flatten() for p in model.module.parameters()])
            accelerator.clip_grad_norm_(model.parameters(), 0.01)
            sizes.append(float((after - before).norm()) / 0.1)
        return sizes, records

    (sizes, records) = on_one(run)
    assert sizes[0] > 0.02 and sizes[1:] == pytest.approx([0.01] * (len(sizes) - 1), rel=1e-3)
    assert len(records) == 1 and "gradient_clipping=0.01" in records[0] and "from the next update on" in records[0]


def test_accumulation_steps_of_the_configuration_win() -> None:
    def run() -> int:
        config = {"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 4, "train_batch_size": "auto"}
        config["train_micro_batch_size_per_gpu"] = "auto"
        accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=2, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config)
        )
        model = Network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        accelerator.prepare(model, optimizer, DataLoader(samples(32), batch_size=8))
        return accelerator.gradient_accumulation_steps

    assert on_one(run) == 4


def refusals() -> dict[str, str]:
    """Each documented mistake, and what is said about it."""
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=1))
    plugin, model = accelerator.deepspeed_plugin, Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    loader = DataLoader(samples(16), batch_size=4)
    dummy = DummyOptim(model.parameters())

    def attempt(*objects: Any, **options: Any) -> str:
        try:
            accelerator.prepare(*objects, **options)
        except (ValueError, AssertionError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    found = {
        "models": attempt(model, Network(), optimizer, loader),
        "placement": attempt(model, optimizer, device_placement=[True, True]),
        "no model": attempt(optimizer, loader),
        "no loader": attempt(model, optimizer),
        "no batch size": attempt(model, optimizer, DataLoader(samples(16), batch_size=None)),
        "no optimizer in the config": attempt(model, dummy, loader),
        "no scheduler in the config": attempt(model, optimizer, DummyScheduler(optimizer), loader),
        "optimizers": attempt(model, optimizer, torch.optim.SGD(model.parameters(), lr=0.1), loader),
    }
    plugin.deepspeed_config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.1}}
    found["optimizer in both"] = attempt(model, optimizer, loader)
    found["schedule of an optimizer to come"] = attempt(model, dummy, schedule, loader)
    del plugin.deepspeed_config["optimizer"]
    plugin.deepspeed_config["scheduler"] = {"type": "WarmupLR", "params": {}}
    found["scheduler in both"] = attempt(model, optimizer, schedule, loader)
    del plugin.deepspeed_config["scheduler"]
    plugin.deepspeed_config["zero_optimization"]["reduce_bucket_size"] = "auto"
    found["no width"] = attempt(model, optimizer, loader)
    return found


def test_every_documented_mistake_is_named() -> None:
    found = on_one(refusals)
    expected = {
        "models": ("AssertionError", "multiple models"),
        "placement": ("PreparationError", "device_placement"),
        "no model": ("PreparationError", "without its model"),
        "no loader": ("PreparationError", "train_micro_batch_size_per_gpu"),
        "no batch size": ("PreparationError", "`None` as batch size"),
        "no optimizer in the config": ("PreparationError", "DummyOptim"),
        "no scheduler in the config": ("PreparationError", "lr_scheduler_callable"),
        "optimizers": ("PreparationError", "2 optimizers"),
        "optimizer in both": ("PreparationError", "config file and in the code"),
        "schedule of an optimizer to come": ("PreparationError", "ConstantLR"),
        "scheduler in both": ("PreparationError", "config file and in the code"),
        "no width": ("PreparationError", "hidden_size"),
    }
    assert found.keys() == expected.keys()
    for name, (kind, words) in expected.items():
        assert found[name].startswith(kind) and words in found[name], f"{name}: {found[name]}"


def test_what_only_the_engine_can_do_is_refused_in_words() -> None:
    def run() -> None:
        accelerator, model, _, loader = prepared(1)
        with pytest.raises(PreparationError, match="gradient_clipping"):
            accelerator.clip_grad_value_(model.parameters(), 1.0)
        with pytest.raises(PreparationError, match="DeepSpeed's engine updates"):
            accelerator.backward_in_parts(lambda part: loss_of(model, part), next(iter(loader)))
        with pytest.raises(PreparationError, match="2-norm"):
            accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=float("inf"))
        with pytest.raises(SettingError, match="bf16"):
            DeepSpeedPlugin(
                hf_ds_config={"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}
            ).set_mixed_precision("fp16")

    on_one(run)


def test_stand_ins_need_deepspeed() -> None:
    def run() -> None:
        accelerator = Accelerator(cpu=True)
        model = Network()
        with pytest.raises(PreparationError, match="use_deepspeed"):
            accelerator.prepare(model, DummyOptim(model.parameters()))

    on_one(run)


def test_weights_that_stage_3_has_sharded_are_not_streamed() -> None:
    """The refusal says what does; stage 2, where every rank has all of them, streams what a saved model holds."""

    def run(stage: int) -> Any:
        accelerator, model, _, _ = prepared(stage)
        if stage == 3:
            with pytest.raises(NotBuilt) as caught:
                accelerator.stream_weights(model)
            return str(caught.value)
        whole, found = accelerator.get_state_dict(model), dict(accelerator.stream_weights(model))
        return sorted(found) == sorted(whole) and all(torch.equal(found[name], whole[name]) for name in found)

    assert all("DeepSpeed's stage 3" in said and "get_state_dict()" in said for said in run_on_ranks(run, 2, 3))
    assert run_on_ranks(run, 2, 2)[0] is True
