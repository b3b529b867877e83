from __future__ import annotations

import os
import pickle
import random
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

from accelerate.checkpointing import (
    EncodingError,
    check_registrable,
    load,
    load_accelerator_state,
    load_custom_state,
    read_checkpoint,
    save,
    save_accelerator_state,
    save_custom_state,
    write_checkpoint,
)
from accelerate.errors import CheckpointError, CheckpointNotFound
from accelerate.settings.training import ProjectOptions
from tests.torch_needed import needs_torch


class Keeper:
    """An object of the user's with any state."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class Loader(Keeper):
    """A data loader as far as a checkpoint is concerned."""


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adamw-tensor-lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "rprop": lambda p: torch.optim.Rprop(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
    "step": lambda o: lr_scheduler.StepLR(o, 2),
    "multi-step": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "constant": lambda o: lr_scheduler.ConstantLR(o),
    "linear": lambda o: lr_scheduler.LinearLR(o),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.CosineAnnealingLR(o, 5)], milestones=[2]
    ),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
    "cyclic-own-scale": lambda o: lr_scheduler.CyclicLR(
        o, 0.01, 0.1, cycle_momentum=False, scale_fn=lambda x: 0.5, scale_mode="cycle"
    ),
    "one-cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "warm-restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "swa": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.05),
}


def trained(
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    make_scheduler: Callable[[torch.optim.Optimizer], Any] = SCHEDULERS["step"],
    steps: int = 3,
) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    optimizer = make_optimizer(model.parameters())
    scheduler = make_scheduler(optimizer)
    go_on(model, optimizer, scheduler, steps)
    return model, optimizer, scheduler


def go_on(model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        inputs, targets = torch.randn(3, 4, generator=generator), torch.randn(3, 2, generator=generator)

        # One batch a step, however often LBFGS asks: its curvature is of one function, and never 0 / 0.
        def closure(inputs: torch.Tensor = inputs, targets: torch.Tensor = targets) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(inputs) - targets).square().mean()
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        scheduler.step(*([loss.detach()] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))


def assert_goes_on_equally(
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    make_scheduler: Callable[[torch.optim.Optimizer], Any],
    folder: Path,
) -> None:
    model, optimizer, scheduler = trained(make_optimizer, make_scheduler)
    write_checkpoint(folder, weights=[model.state_dict()], optimizers=[optimizer], schedulers=[scheduler])
    other, other_optimizer, other_scheduler = trained(make_optimizer, make_scheduler, steps=0)
    read_checkpoint(folder, models=[other], optimizers=[other_optimizer], schedulers=[other_scheduler])
    before = [parameter.detach().clone() for parameter in model.parameters()]
    go_on(model, optimizer, scheduler, 3)
    go_on(other, other_optimizer, other_scheduler, 3)
    assert all(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    for left, right in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(left, right)
    assert scheduler.get_last_lr() == other_scheduler.get_last_lr()


def pickles_in(folder: Path) -> list[str]:
    """Files that a pickle reader would run: zip archives of torch.save, and bare pickles."""
    found: list[str] = []
    for path in folder.rglob("*"):
        data = path.read_bytes() if path.is_file() else b""
        is_tensors = data[8:9] == b"{"  # a safetensors file begins with the length of its JSON header
        if data.startswith((b"PK", b"\x80")) and not is_tensors:
            found.append(path.name)
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_exactly_with_every_optimizer_and_no_pickle(name: str, tmp_path: Path) -> None:
    assert_goes_on_equally(OPTIMIZERS[name], SCHEDULERS["step"], tmp_path / "ck")
    assert pickles_in(tmp_path / "ck") == []


WITHOUT_STATE = needs_torch("2.13.0", "SWALR has a function in its state, which nothing but pickle can write")


@pytest.mark.parametrize("name", [pytest.param(n, marks=WITHOUT_STATE if n == "swa" else ()) for n in SCHEDULERS])
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_training_goes_on_exactly_with_every_scheduler_and_no_pickle(name: str, tmp_path: Path) -> None:
    assert_goes_on_equally(OPTIMIZERS["sgd-momentum"], SCHEDULERS[name], tmp_path / "ck")
    assert pickles_in(tmp_path / "ck") == []


def everything(folder: Path, **options: Any) -> dict[str, Any]:
    """A checkpoint with each kind of state twice."""
    models = [trained(OPTIMIZERS["adamw"]) for _ in range(2)]
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    write_checkpoint(
        folder,
        models=[model for model, _, _ in models],
        weights=[model.state_dict() for model, _, _ in models],
        optimizers=[optimizer for _, optimizer, _ in models],
        schedulers=[scheduler for _, _, scheduler in models],
        dataloaders=[Loader({"epoch": 1, "position": 7, "own": {"rank": 0}}), Loader({"epoch": 2}), object()],
        scaler=scaler,
        custom_objects=[Keeper({"a": torch.ones(2)}), Keeper([1, (2, 3)])],
        step=11,
        **options,
    )
    return {"models": [model for model, _, _ in models], "optimizers": [optimizer for _, optimizer, _ in models]}


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_files_have_the_documented_names(tmp_path: Path) -> None:
    everything(tmp_path / "ck")
    assert files(tmp_path / "ck") == [
        "custom_checkpoint_0.json",
        "custom_checkpoint_0.safetensors",
        "custom_checkpoint_1.json",
        "custom_checkpoint_1.safetensors",
        "manifest.json",
        "model.safetensors",
        "model_1.safetensors",
        "optimizer.json",
        "optimizer.safetensors",
        "optimizer_1.json",
        "optimizer_1.safetensors",
        "random_states_0.json",
        "sampler.json",
        "sampler_1.json",
        "scaler.json",
        "scheduler.json",
        "scheduler_1.json",
    ]
    assert pickles_in(tmp_path / "ck") == []


def test_the_classic_format_has_the_older_names_and_the_manifest_says_so(tmp_path: Path) -> None:
    classic = ProjectOptions(checkpoint_format="classic")
    everything(tmp_path / "ck", project=classic, safe_serialization=False)
    assert files(tmp_path / "ck") == [
        "custom_checkpoint_0.pkl",
        "custom_checkpoint_1.pkl",
        "dl_state_dict.bin",
        "dl_state_dict_1.bin",
        "manifest.json",
        "optimizer.bin",
        "optimizer_1.bin",
        "pytorch_model.bin",
        "pytorch_model_1.bin",
        "random_states_0.pkl",
        "scaler.pt",
        "scheduler.bin",
        "scheduler_1.bin",
    ]
    import json

    manifest = json.loads((tmp_path / "ck" / "manifest.json").read_text())
    assert manifest["checkpoint_format"] == "classic"
    assert sorted(manifest["pickled"]) == sorted(set(files(tmp_path / "ck")) - {"manifest.json"})
    streams = torch.load(tmp_path / "ck" / "random_states_0.pkl", weights_only=False)
    assert streams["numpy_random_seed"][1].dtype == np.random.get_state()[1].dtype


@pytest.mark.parametrize("checkpoint_format", ["safe", "classic"])
@pytest.mark.parametrize("safe_serialization", [True, False])
def test_everything_comes_back_from_both_formats(
    checkpoint_format: str, safe_serialization: bool, tmp_path: Path
) -> None:
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    saved = everything(
        tmp_path / "ck",
        project=ProjectOptions(checkpoint_format=checkpoint_format),
        safe_serialization=safe_serialization,
    )
    expected = (random.random(), np.random.rand(), torch.rand(1).item())
    fresh = [trained(OPTIMIZERS["adamw"], steps=0) for _ in range(2)]
    loaders = [Loader(), Loader(), object()]
    objects = [Keeper(), Keeper()]
    scaler = torch.amp.GradScaler("cpu")
    found = read_checkpoint(
        tmp_path / "ck",
        models=[model for model, _, _ in fresh],
        optimizers=[optimizer for _, optimizer, _ in fresh],
        schedulers=[scheduler for _, _, scheduler in fresh],
        dataloaders=loaders,
        scaler=scaler,
        custom_objects=objects,
    )
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected
    assert found.step == 11
    assert found.notes == []
    assert scaler.get_scale() == 512.0
    assert loaders[0].state == {"epoch": 1, "position": 7, "own": {"rank": 0}}
    assert loaders[1].state == {"epoch": 2}
    assert torch.equal(objects[0].state["a"], torch.ones(2))
    assert objects[1].state == [1, (2, 3)]
    for (model, optimizer, scheduler), before, state in zip(fresh, saved["models"], saved["optimizers"], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))
        assert str(optimizer.state_dict()) == str(state.state_dict())
        assert scheduler.last_epoch == 3


def test_the_documented_functions_save_and_load(tmp_path: Path) -> None:
    model, optimizer, scheduler = trained(OPTIMIZERS["adamw"])
    save_accelerator_state(str(tmp_path / "ck"), [model.state_dict()], [optimizer], [scheduler], [], 0, 4)
    other, other_optimizer, other_scheduler = trained(OPTIMIZERS["adamw"], steps=0)
    answer = load_accelerator_state(
        str(tmp_path / "ck"), [other], [other_optimizer], [other_scheduler], [], 0, map_location="cpu", strict=True
    )
    assert answer == {"step": 4}
    assert str(other.state_dict()) == str(model.state_dict())


def test_hooks_see_the_final_folder_and_may_take_over(tmp_path: Path) -> None:
    folder, model = tmp_path / "ck", trained(OPTIMIZERS["sgd"])[0]
    seen: list[str] = []

    def saving(models: list[Any], weights: list[Any], output_dir: str) -> None:
        assert models == [model]
        while weights:
            torch.save(weights.pop(), os.path.join(output_dir, "unet.bin"))
        seen.append(output_dir)

    def loading(models: list[Any], input_dir: str) -> None:
        models.pop().load_state_dict(torch.load(os.path.join(input_dir, "unet.bin")))

    state = model.state_dict()
    write_checkpoint(folder, models=[model], weights=[state], pre_hooks=[saving])
    assert seen == [str(folder)]
    assert files(folder) == ["manifest.json", "random_states_0.json", "unet.bin"]
    assert len(state) == 4
    other = trained(OPTIMIZERS["sgd"], steps=0)[0]
    models = [other]
    read_checkpoint(folder, models=models, pre_hooks=[loading])
    assert models == [other]
    assert str(other.state_dict()) == str(model.state_dict())


def test_a_failing_hook_leaves_nothing_behind(tmp_path: Path) -> None:
    def failing(*_: object) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        write_checkpoint(tmp_path / "ck", pre_hooks=[failing])
    assert list(tmp_path.iterdir()) == []


def test_an_object_that_cannot_be_written_is_named_with_the_path(tmp_path: Path) -> None:
    with pytest.raises(EncodingError, match=r"registered object 1 \(Keeper\)\.state_dict\(\)\['foo'\]\[3\]: <class"):
        write_checkpoint(tmp_path / "ck", custom_objects=[Keeper(1), Keeper({"foo": [1, 2, 3, object()]})])
    assert list(tmp_path.iterdir()) == []


def test_the_number_of_registered_objects_must_be_the_same(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "ck", custom_objects=[Keeper(1)])
    with pytest.raises(RuntimeError, match="holds 1 registered objects, but 2"):
        read_checkpoint(tmp_path / "ck", custom_objects=[Keeper(), Keeper()])


def test_objects_without_the_two_methods_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"item 1: builtins\.dict, item 2: builtins\.int"):
        check_registrable([Keeper(), {}, 3])


def test_a_broken_checkpoint_is_refused_with_the_reason(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "ck", weights=[{"w": torch.ones(3)}])
    (tmp_path / "ck" / "random_states_0.json").unlink()
    with pytest.raises(CheckpointError, match=r"random_states_0\.json: missing"):
        read_checkpoint(tmp_path / "ck")
    (tmp_path / "ck" / "manifest.json").unlink()
    (tmp_path / "ck" / "model.safetensors").rename(tmp_path / "ck" / "random_states_0.json")
    with pytest.raises(CheckpointError, match="never finished"):
        read_checkpoint(tmp_path / "ck")


def test_a_missing_folder_is_also_a_file_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no checkpoint folder at"):
        read_checkpoint(tmp_path / "nowhere")


def test_an_unknown_map_location_is_a_type_error(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="map_location='gpu'"):
        read_checkpoint(tmp_path, map_location="gpu")


def test_weights_left_by_another_program_do_not_shadow_the_new_ones(tmp_path: Path) -> None:
    folder = tmp_path / "ck"
    folder.mkdir()
    torch.save({"w": torch.zeros(3)}, folder / "pytorch_model.bin")
    (folder / "model.safetensors.index.json").write_text("{}")
    (folder / "notes.txt").write_text("stays")
    write_checkpoint(folder, weights=[{"w": torch.ones(3)}])
    assert files(folder) == ["manifest.json", "model.safetensors", "notes.txt", "random_states_0.json"]


# ------------------------------------------------------------------------------------------- single objects


def test_one_object_in_one_file(tmp_path: Path) -> None:
    tensor = torch.ones(3)
    save({"a": tensor, "n": 3}, tmp_path / "x.bin")
    assert str(load(tmp_path / "x.bin")) == str({"a": tensor, "n": 3})
    save({"a": tensor, "b": tensor}, tmp_path / "x.safetensors", safe_serialization=True)
    assert list(load(tmp_path / "x.safetensors")) == ["a"]
    with open(tmp_path / "y.bin", "wb") as file:
        save([1, 2], file)
    assert load(str(tmp_path / "y.bin"), map_location="cpu") == [1, 2]
    assert files(tmp_path) == ["x.bin", "x.safetensors", "y.bin"]
    with pytest.raises(CheckpointError, match="dict of tensors"):
        save([1], tmp_path / "z", safe_serialization=True)


def test_numpy_values_in_a_file_are_read_without_running_code(tmp_path: Path) -> None:
    value = {"scalar": np.float32(1.5), "array": np.arange(3), "state": np.random.get_state()}
    save(value, tmp_path / "x.bin")
    assert str(load(tmp_path / "x.bin")) == str(value)


def test_the_user_s_own_state_in_a_folder(tmp_path: Path) -> None:
    save_custom_state(Keeper({1: (2, float("nan"))}), tmp_path, index=3)
    assert files(tmp_path) == ["custom_checkpoint_3.json", "custom_checkpoint_3.safetensors"]
    keeper = Keeper()
    load_custom_state(keeper, str(tmp_path), index=3)
    assert str(keeper.state) == "{1: (2, nan)}"
    with pytest.raises(CheckpointNotFound):
        load_custom_state(keeper, tmp_path, index=4)


# ------------------------------------------------------------------------------------------ hostile pickles


class Hostile:
    """A pickle that leaves a mark where code of its own runs."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.mark),))


SLOTS = [
    "pytorch_model.bin",
    "optimizer.bin",
    "scheduler.bin",
    "dl_state_dict.bin",
    "scaler.pt",
    "random_states_0.pkl",
    "custom_checkpoint_0.pkl",
]


@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize("form", ["zip", "legacy", "bare"])
def test_a_hostile_pickle_in_any_slot_runs_nothing_unless_allowed(slot: str, form: str, tmp_path: Path) -> None:
    folder, mark = tmp_path / "ck", tmp_path / "mark"
    model, optimizer, scheduler = trained(OPTIMIZERS["adamw"])
    scaler = torch.amp.GradScaler("cpu")
    write_checkpoint(
        folder,
        project=ProjectOptions(checkpoint_format="classic"),
        safe_serialization=False,
        weights=[model.state_dict()],
        optimizers=[optimizer],
        schedulers=[scheduler],
        dataloaders=[Loader(1)],
        scaler=scaler,
        custom_objects=[Keeper(1)],
    )
    (folder / "manifest.json").unlink()  # a person who can plant files can fix the checksums too
    hostile = {"x": Hostile(mark)}
    if form == "bare":
        (folder / slot).write_bytes(pickle.dumps(hostile, protocol=2))
    else:
        torch.save(hostile, folder / slot, _use_new_zipfile_serialization=form == "zip")

    def attempt(**load_kwargs: Any) -> None:
        read_checkpoint(
            folder,
            models=[model],
            optimizers=[optimizer],
            schedulers=[scheduler],
            dataloaders=[Loader()],
            scaler=scaler,
            custom_objects=[Keeper()],
            load_kwargs=load_kwargs,
        )

    with pytest.raises(CheckpointError, match=r"could run code|can't be read"):
        attempt()
    assert not mark.exists()
    if form == "zip":
        with pytest.raises(Exception):  # (what the object does with it is its own affair)
            attempt(weights_only=False)
            raise AssertionError
        assert mark.exists()


# ------------------------------------------------------------------------------- folders of another program

WRITE_WITH_PEER = """
import sys, torch
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
loader = torch.utils.data.DataLoader(torch.randn(12, 4), batch_size=3, shuffle=True)
model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
class Keeper:
    def state_dict(self): return {"n": 3, "t": torch.ones(2)}
    def load_state_dict(self, state): pass
accelerator.register_for_checkpointing(Keeper())
for batch in loader:
    accelerator.backward(model(batch).square().sum()); optimizer.step(); scheduler.step(); optimizer.zero_grad()
accelerator.save_state(sys.argv[1], safe_serialization=sys.argv[2] == "safe")
torch.save([p.detach().clone() for p in model.parameters()] + [torch.rand(3)], sys.argv[1] + ".expected")
"""


@pytest.mark.skipif("PEER_PYTHON" not in os.environ, reason="PEER_PYTHON names no interpreter that has the peer")
@pytest.mark.parametrize("kind", ["safe", "bin"])
def test_a_folder_that_the_peer_wrote_loads(kind: str, tmp_path: Path) -> None:
    script = tmp_path / "write.py"
    script.write_text(textwrap.dedent(WRITE_WITH_PEER))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run(
        [os.environ["PEER_PYTHON"], str(script), str(tmp_path / "ck"), kind],
        check=True,
        env=environment,
        timeout=100,
        capture_output=True,
    )
    model, optimizer, scheduler = trained(OPTIMIZERS["adamw"], steps=0)
    keeper = Keeper()
    found = read_checkpoint(
        tmp_path / "ck", models=[model], optimizers=[optimizer], schedulers=[scheduler], custom_objects=[keeper]
    )
    expected = torch.load(tmp_path / "ck.expected")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected, strict=False))
    assert torch.equal(torch.rand(3), expected[-1])
    assert (scheduler.last_epoch, len(optimizer.state)) == (4, 4)
    assert keeper.state["n"] == 3
    assert "no manifest" in found.notes[0]


READ_WITH_PEER = """
import sys, torch
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
accelerator.load_state(sys.argv[1])
torch.save([p.detach().clone() for p in model.parameters()] + [torch.rand(3)], sys.argv[1] + ".read")
"""


@pytest.mark.skipif("PEER_PYTHON" not in os.environ, reason="PEER_PYTHON names no interpreter that has the peer")
def test_the_peer_loads_a_classic_folder(tmp_path: Path) -> None:
    model, optimizer, scheduler = trained(OPTIMIZERS["adamw"])
    write_checkpoint(
        tmp_path / "ck",
        project=ProjectOptions(checkpoint_format="classic"),
        weights=[model.state_dict()],
        optimizers=[optimizer],
        schedulers=[scheduler],
    )
    drawn = torch.rand(3)
    (tmp_path / "read.py").write_text(READ_WITH_PEER)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run(
        [os.environ["PEER_PYTHON"], str(tmp_path / "read.py"), str(tmp_path / "ck")],
        check=True,
        env=environment,
        timeout=100,
        capture_output=True,
    )
    read = torch.load(tmp_path / "ck.read")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), read, strict=False))
    assert torch.equal(read[-1], drawn)


class Moody:
    """An object whose state holds something that only a pickle can."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return {"value": self.value, "deep": [{"function": os.getcwd}]}

    def load_state_dict(self, state: Any) -> None:
        self.value = state["value"]


def test_what_cannot_be_written_is_refused_at_registration_by_name_and_place() -> None:
    with pytest.raises(EncodingError, match=r"registered object 1 \(Moody\).*\['deep'\]\[0\]\['function'\]"):
        check_registrable([Keeper({"fine": 1}), Moody()])
    with pytest.raises(EncodingError, match=r"registered object 5 "):
        check_registrable([Moody()], first=5)
    check_registrable([Moody()], may_pickle=True)


def test_an_object_without_a_state_yet_may_be_registered() -> None:
    class Unborn(Keeper):
        def state_dict(self) -> Any:
            raise RuntimeError("not yet")

    check_registrable([Unborn()])


def test_a_pickle_by_permission_is_recorded_and_read_only_by_permission(tmp_path: Path) -> None:
    moody, keeper = Moody(3), Keeper({"fine": 1})
    write_checkpoint(tmp_path / "ck", custom_objects=[keeper, moody], may_pickle=[moody])
    import json

    assert json.loads((tmp_path / "ck" / "manifest.json").read_text())["pickled"] == ["custom_checkpoint_1.pkl"]
    with pytest.raises(CheckpointError, match="could run code"):
        read_checkpoint(tmp_path / "ck", custom_objects=[Keeper(), Moody()])
    again = Moody()
    read_checkpoint(tmp_path / "ck", custom_objects=[Keeper(), again], may_pickle=[again])
    assert again.value == 3


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("safe", [False, True])
def test_what_is_no_regular_file_is_written_into_and_stays_what_it_is(tmp_path: Path, safe: bool) -> None:
    """As root, a file that replaced ``/dev/null`` would be everybody's."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE)
    save({"a": torch.ones(2)}, pipe, safe_serialization=safe)
    content, _ = reader.communicate(timeout=60)
    assert pipe.is_fifo()
    copy = tmp_path / ("a.safetensors" if safe else "a.bin")
    copy.write_bytes(content)
    assert torch.equal(load(copy)["a"], torch.ones(2))


def test_a_link_stays_one_and_its_target_is_written(tmp_path: Path) -> None:
    (tmp_path / "best").mkdir()
    for target in (tmp_path / "best" / "there.bin", tmp_path / "best" / "not_yet.bin"):
        link = tmp_path / f"{target.stem}.link"
        link.symlink_to(target)
        for value in (1, 2):
            save(value, link)
            assert link.is_symlink() and load(target) == value
    assert sorted(os.listdir(tmp_path / "best")) == ["not_yet.bin", "there.bin"]
