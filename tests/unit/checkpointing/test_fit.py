"""A checkpoint is loaded whole or not at all, and optimizers go by the names of their parameters, as weights do."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.errors import CheckpointError
from accelerate.utils import ProjectConfiguration

FORMATS: list[Literal["safe", "classic"]] = ["safe", "classic"]


class Net(nn.Module):
    """Three layers of one shape, made in the given order."""

    a: nn.Linear
    b: nn.Linear
    c: nn.Linear
    seen: torch.Tensor

    def __init__(self, order: str = "abc", width: int = 4) -> None:
        super().__init__()
        for name in order:
            setattr(self, name, nn.Linear(width, width))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.c(self.b(self.a(inputs)).relu())


class Run:
    """A small training run with one of everything."""

    def __init__(
        self,
        form: Literal["safe", "classic"],
        *,
        model: Callable[[], Net] = Net,
        frozen: str = "",
        second: int = 4,
        objects: int = 1,
        ema: Callable[[], nn.Module] = Net,
        grouped: bool = False,
        parted: str = "a",
        make: Callable[[Any], torch.optim.Optimizer] = lambda groups: torch.optim.AdamW(groups, lr=0.1),
        seed: int = 0,
    ) -> None:
        torch.manual_seed(seed)
        project = ProjectConfiguration(checkpoint_format=form)
        self.accelerator = Accelerator(cpu=True, project_config=project)
        self.net, self.other, self.ema = model(), nn.Linear(second, second), ema()
        for name, parameter in self.net.named_parameters():
            parameter.requires_grad_(not (frozen and name.startswith(frozen)))
        trained = {name: p for name, p in self.net.named_parameters() if p.requires_grad}
        groups: Any = list(trained.values())
        if grouped:
            groups = [
                {"params": [p for name, p in trained.items() if name.startswith(parted)], "lr": 0.5},
                {"params": [p for name, p in trained.items() if not name.startswith(parted)]},
            ]
        self.optimizer = make(groups)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        data: Any = torch.arange(8.0)
        self.loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
        prepared: Any = self.accelerator.prepare(self.net, self.other, self.optimizer, self.scheduler, self.loader)
        self.model, _, self.prepared_optimizer, self.prepared_scheduler, self.prepared_loader = prepared
        self.accelerator.register_for_checkpointing(self.ema, *[Counter() for _ in range(objects)])

    def train(self, steps: int = 3) -> None:
        generator = torch.Generator().manual_seed(7)
        for _ in range(steps):
            loss = self.model(torch.randn(3, 4, generator=generator)).square().mean()
            self.accelerator.backward(loss)
            self.prepared_optimizer.step()
            self.prepared_scheduler.step()
            self.prepared_optimizer.zero_grad()

    def everything(self) -> list[Any]:
        """All that a load changes, copied."""
        accelerator = self.accelerator
        states = [one.state_dict() for one in (self.net, self.other, self.ema, self.optimizer, self.scheduler)]
        states += [self.prepared_loader.state_dict(), *(one.state_dict() for one in accelerator._custom_objects)]
        return copy.deepcopy([*states, torch.get_rng_state(), accelerator.step])


class Counter:
    count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def is_equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(is_equal(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(is_equal, left, right))
    return left == right


def _remove(stem: str) -> Callable[[Path], object]:
    return lambda folder: [path.unlink() for path in folder.glob(f"{stem}.*")]


MISFITS: dict[str, tuple[dict[str, Any], Callable[[Path], object] | None, str]] = {
    "names of a model": ({"model": lambda: Net("abcd")}, None, "d.weight"),
    "shapes of a model": ({"model": lambda: Net(width=5)}, None, "a.weight"),
    "shapes of the second model": ({"second": 5}, None, "weight"),
    "parameter groups": ({"grouped": True, "frozen": "c"}, None, "optimizer 0"),
    "one group instead of two": ({"grouped": False, "saved": {"grouped": True}}, None, "parameter groups"),
    "two groups instead of one": ({"grouped": True}, None, "parameter groups"),
    "other groups": ({"parted": "b", "grouped": True, "saved": {"grouped": True}}, None, "parameter groups"),
    "another kind of optimizer": ({"make": lambda groups: torch.optim.SGD(groups, lr=0.1)}, None, "betas.*momentum"),
    "other parameters of the same shapes": ({"frozen": "c"}, None, "c.weight"),
    "the number of registered objects": ({"objects": 2}, None, "registered"),
    "a registered module": ({"ema": lambda: Net("ab")}, None, "c.weight"),
    "no scheduler": ({}, _remove("scheduler"), "scheduler"),
    "no registered object": ({}, _remove("custom_checkpoint_1"), "registered"),
}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("what", MISFITS)
def test_a_load_that_fails_on_what_does_not_fit_changes_nothing(
    what: str, form: Literal["safe", "classic"], tmp_path: Path
) -> None:
    options, damage, message = MISFITS[what]
    options = {**options}
    saved = Run(form, **options.pop("saved", {}))
    saved.train()
    saved.accelerator.save_state(tmp_path / "ck")
    if damage is not None:
        damage(tmp_path / "ck")
        manifest = json.loads((tmp_path / "ck" / "manifest.json").read_bytes())
        manifest["files"] = {name: one for name, one in manifest["files"].items() if (tmp_path / "ck" / name).exists()}
        (tmp_path / "ck" / "manifest.json").write_text(json.dumps(manifest))
    other = Run(form, seed=1, **options)
    before = other.everything()
    with pytest.raises(CheckpointError, match=message):
        other.accelerator.load_state(tmp_path / "ck")
    assert is_equal(before, other.everything())


def test_a_module_that_renames_what_it_loads_is_asked_and_keeps_its_values_until_everything_fits(
    tmp_path: Path,
) -> None:
    class Renamed(Net):
        x: nn.Linear

        def __init__(self) -> None:
            super().__init__("xbc")
            self._register_load_state_dict_pre_hook(self._rename)

        def _rename(self, state: dict[str, Any], *_: object) -> None:
            for key in [key for key in state if key.startswith("a.")]:
                state["x" + key[1:]] = state.pop(key)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.c(self.b(self.x(inputs)).relu())

    saved = Run("safe")
    saved.train()
    saved.accelerator.save_state(tmp_path / "ck")
    refused = Run("safe", model=Renamed, objects=2, seed=1)
    before = refused.everything()
    with pytest.raises(CheckpointError, match="registered"):
        refused.accelerator.load_state(tmp_path / "ck")
    assert is_equal(before, refused.everything())
    other = Run("safe", model=Renamed, seed=1)
    other.accelerator.load_state(tmp_path / "ck")  # its optimizer goes by order: the names are others
    assert torch.equal(dict(other.net.named_parameters())["x.weight"], saved.net.a.weight)
    assert torch.equal(state_of(other, "x.weight")["exp_avg"], state_of(saved, "a.weight")["exp_avg"])


def state_of(run: Run, name: str) -> dict[str, Any]:
    return run.optimizer.state[dict(run.net.named_parameters())[name]]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("order", ["abc", "cab", "bca"])
def test_states_of_optimizers_go_by_name_where_modules_come_in_another_order(
    order: str, grouped: bool, form: Literal["safe", "classic"], tmp_path: Path
) -> None:
    saved = Run(form, grouped=grouped)
    saved.train()
    saved.accelerator.save_state(tmp_path / "ck")
    other = Run(form, model=lambda: Net(order), grouped=grouped, seed=1)
    other.accelerator.load_state(tmp_path / "ck")
    for name, _ in saved.net.named_parameters():
        assert is_equal(dict(state_of(other, name)), dict(state_of(saved, name))), name
    assert [group["lr"] for group in other.optimizer.param_groups] == [g["lr"] for g in saved.optimizer.param_groups]
    for run in (saved, other):
        run.train(2)
    for name, parameter in saved.net.named_parameters():
        assert torch.equal(parameter, dict(other.net.named_parameters())[name]), name


def test_a_load_before_prepare_is_an_error_that_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved = Run("safe", objects=0)
    saved.accelerator.save_state(tmp_path / "ck")
    for load in ("load_state", "resume"):
        with pytest.raises(CheckpointError, match="nothing is prepared or registered"):
            getattr(Accelerator(cpu=True), load)(tmp_path / "ck")
    registers = Accelerator(cpu=True)
    registers.register_for_checkpointing(Net())
    registers.load_state(tmp_path / "ck")  # programs that register all that they save
    assert "no model is prepared, so the weights that it holds aren't loaded" in caplog.text
    hooked, loaded = Accelerator(cpu=True), []
    hooked.register_load_state_pre_hook(lambda models, folder: loaded.append(folder))
    hooked.register_for_checkpointing(Net())
    caplog.clear()
    hooked.load_state(tmp_path / "ck")
    assert loaded == [str(tmp_path / "ck")] and "no model" not in caplog.text


def test_a_checkpoint_without_models_is_loaded_by_a_run_without_models(tmp_path: Path) -> None:
    Accelerator(cpu=True).save_state(tmp_path / "ck")
    Accelerator(cpu=True).load_state(tmp_path / "ck")


def without_names(folder: Path) -> None:
    """Make of the checkpoint one that an older version saved."""
    path = folder / "optimizer.json"
    content = json.loads(path.read_bytes())
    del content["state"]["param_names"]
    path.write_text(json.dumps(content))
    manifest = json.loads((folder / "manifest.json").read_bytes())
    del manifest["files"]["optimizer.json"]
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_a_checkpoint_without_names_is_checked_by_shapes_and_remarked_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Wide(Net):
        def __init__(self, order: str) -> None:
            super().__init__("")
            for name in order:
                setattr(self, name, nn.Linear(*{"a": (4, 6), "b": (6, 4), "c": (4, 4)}[name]))

    saved = Run("safe", model=lambda: Wide("abc"))
    saved.train()
    saved.accelerator.save_state(tmp_path / "ck")
    without_names(tmp_path / "ck")
    same = Run("safe", model=lambda: Wide("abc"), seed=1)
    same.accelerator.load_state(tmp_path / "ck")
    assert is_equal(dict(state_of(same, "b.weight")), dict(state_of(saved, "b.weight")))
    assert "optimizer 0 was saved without the names of its parameters" in caplog.text
    other = Run("safe", model=lambda: Wide("bca"), seed=1)
    before = other.everything()
    with pytest.raises(CheckpointError, match="shape"):
        other.accelerator.load_state(tmp_path / "ck")
    assert is_equal(before, other.everything())


def test_an_optimizer_whose_state_has_no_parts_by_parameter_is_refused_in_another_order(tmp_path: Path) -> None:
    options: dict[str, Any] = {"make": lambda groups: torch.optim.LBFGS(groups, lr=0.1)}
    saved = Run("safe", **options)
    saved.accelerator.save_state(tmp_path / "ck")
    with pytest.raises(CheckpointError, match="another order"):
        Run("safe", model=lambda: Net("cab"), **options).accelerator.load_state(tmp_path / "ck")


def test_what_a_checkpoint_holds_and_nothing_takes_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved = Run("safe")
    saved.train()
    saved.accelerator.save_state(tmp_path / "ck")
    accelerator, model = Accelerator(cpu=True), Net()
    accelerator.prepare(model, nn.Linear(4, 4))
    accelerator.register_for_checkpointing(Net(), Counter())
    accelerator.load_state(tmp_path / "ck")
    said = [record.getMessage() for record in caplog.records if "prepared here" in record.getMessage()]
    assert [text.partition(": ")[2][:30] for text in said] == [
        "optimizers in it: 1, prepared ",
        "schedulers in it: 1, prepared ",
    ]
