"""What would be without effect in silence is said once, by name; what programs rightly do is not remarked on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate import logging as accelerate_logging
from accelerate.utils import set_seed
from tests.unit.tracking.test_in_a_run import MemoryTracker


@pytest.fixture(autouse=True)
def _nothing_said_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerate_logging, "_logged_once", set())
    monkeypatch.setattr("accelerate.tracking.choose._remarked_names", set())


def remarks(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def optimizer_of(*models: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for model in models for parameter in model.parameters()], lr=0.1)


def update(accelerator: Accelerator, model: Any, *optimizers: Any) -> None:
    for _ in range(2):
        accelerator.backward(model(torch.ones(1, 2)).sum())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


# -- containers --------------------------------------------------------------------------------------------

ROWS: Any = [1]


def linear() -> nn.Linear:
    return nn.Linear(2, 2)


HIDDEN: dict[str, tuple[Callable[[], Any], str]] = {
    "a list": (lambda: [linear()], "list with a Linear"),
    "a tuple after other things": (lambda: (1, linear()), "tuple with a Linear"),
    "a dict": (lambda: {"o": optimizer_of(linear())}, "dict with a SGD"),
    "a list of loaders": (lambda: [DataLoader(ROWS)], "list with a DataLoader"),
    "a list of schedules": (
        lambda: [torch.optim.lr_scheduler.ConstantLR(optimizer_of(linear()))], "list with a ConstantLR"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HIDDEN)
def test_a_container_that_is_returned_with_unprepared_objects_is_named_once(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    make, says = HIDDEN[name]
    accelerator, given = Accelerator(cpu=True), make()
    assert accelerator.prepare(given) is given
    accelerator.prepare(make())
    (text,) = remarks(caplog)
    assert says in text and "prepare(*objects)" in text


def test_containers_of_other_things_and_of_prepared_ones_are_not_remarked_on(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(linear())
    accelerator.prepare([model], {"rows": torch.ones(2)}, ["text"], nn.ModuleList([linear()]))
    assert remarks(caplog) == []


def test_a_data_parallel_model_is_named(caplog: pytest.LogCaptureFixture) -> None:
    Accelerator(cpu=True).prepare(nn.DataParallel(linear()))
    (text,) = remarks(caplog)
    assert "Linear in a torch.nn.DataParallel" in text and "accelerate launch" in text


# -- optimizers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_an_optimizer_of_no_prepared_model_is_named_at_its_first_step(
    precision: Any, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator, model = Accelerator(cpu=True, mixed_precision=precision), linear()
    optimizer = accelerator.prepare(optimizer_of(model))
    before = model.weight.detach().clone()
    assert remarks(caplog) == []
    update(accelerator, model, optimizer)
    (text,) = remarks(caplog)
    assert "SGD trains no parameter of a prepared model (the first has shape (2, 2))" in text
    assert optimizer.num_updates == 2 and not torch.equal(model.weight, before)


def later(accelerator: Accelerator) -> None:
    """The optimizer is prepared first, and alone."""
    model = linear()
    optimizer = accelerator.prepare(optimizer_of(model))
    update(accelerator, accelerator.prepare(model), optimizer)


def frozen(accelerator: Accelerator) -> None:
    """A GAN's discriminator, part of which is frozen, beside its generator."""
    generator, discriminator = linear(), nn.Sequential(linear(), linear())
    discriminator[0].requires_grad_(False)
    optimizers = accelerator.prepare(optimizer_of(generator), optimizer_of(discriminator[1]))
    generator, discriminator = accelerator.prepare(generator, discriminator)
    update(accelerator, lambda rows: discriminator(generator(rows)), *optimizers)


def outside(accelerator: Accelerator) -> None:
    """Some of the parameters belong to no model: a temperature, an embedding."""
    model, temperature = linear(), nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    update(accelerator, lambda rows: model(rows) * temperature, optimizer)


def adapted(accelerator: Accelerator) -> None:
    """An adapter is added to the model after it was prepared, and has an optimizer of its own."""
    model: Any = accelerator.prepare(nn.Sequential(linear()))
    model.append(linear())
    update(accelerator, model, accelerator.prepare(optimizer_of(model[1])))


def compiled(accelerator: Accelerator) -> None:
    """The model is compiled before, or its submodule is trained."""
    model = nn.Sequential(linear())
    prepared = accelerator.prepare(torch.compile(model, backend="eager"))
    update(accelerator, prepared, accelerator.prepare(optimizer_of(model[0])))


@pytest.mark.parametrize("program", [later, frozen, outside, adapted, compiled])
def test_optimizers_of_models_that_are_prepared_by_the_first_step_are_not_remarked_on(
    program: Callable[[Accelerator], None], caplog: pytest.LogCaptureFixture
) -> None:
    program(Accelerator(cpu=True))
    assert remarks(caplog) == []


# -- trackers ----------------------------------------------------------------------------------------------


def test_log_before_the_trackers_run_and_after_their_end_is_remarked_on_once(caplog: pytest.LogCaptureFixture) -> None:
    mine = MemoryTracker()
    accelerator = Accelerator(cpu=True, log_with=mine)
    accelerator.log({"loss": 1.0})
    accelerator.log({"loss": 2.0})
    (early,) = remarks(caplog)
    assert "before init_trackers(), so memory didn't get the values" in early
    accelerator.init_trackers("run")
    accelerator.log({"loss": 3.0})
    accelerator.end_training()
    assert len(remarks(caplog)) == 1
    accelerator.log({"loss": 4.0})
    accelerator.log({"loss": 5.0})
    assert "'memory' doesn't run" in remarks(caplog)[1] and len(remarks(caplog)) == 2
    assert [row[0] for row in mine.values if row != "finish"] == [{"loss": 3.0}]


def test_log_without_trackers_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.log({"loss": 1.0})
    accelerator.init_trackers("run")
    accelerator.log({"loss": 1.0})
    assert remarks(caplog) == []


def test_a_seed_that_is_no_whole_number_is_named() -> None:
    with pytest.raises(TypeError, match=r"set_seed\('abc'\): the seed has to be a whole number, not str"):
        set_seed("abc")  # pyright: ignore[reportArgumentType]
