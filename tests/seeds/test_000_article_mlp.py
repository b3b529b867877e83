"""The article that trains a multilayer perceptron on CIFAR-10."""

from __future__ import annotations

import difflib
import importlib.metadata
import os
import re
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.state import AcceleratorState
from tests.fresh import run_fresh
from tests.python_path import python_path
from tests.ranks import run_on_ranks
from tests.seeds.tools import ACCELERATE, HERE, LISTINGS, ROOT, launcher, run
from tests.slow import slow

row = pytest.mark.row


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(3072, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def images(count: int = 40) -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    return TensorDataset(torch.rand(count, 3, 32, 32, generator=draw), torch.randint(0, 10, (count,), generator=draw))


def train(mixed_precision: str = "no", per_process: int = 10, num_epochs: int = 1) -> list[float]:
    """The article's loop; the mean loss over all processes of each step."""
    accelerator = Accelerator(mixed_precision=mixed_precision, cpu=True)
    torch.manual_seed(42)
    loader = DataLoader(images(), batch_size=per_process)
    mlp = MLP()
    optimizer = torch.optim.Adam(mlp.parameters(), lr=1e-3)
    mlp, optimizer, loader = accelerator.prepare(mlp, optimizer, loader)
    losses = []
    for _ in range(num_epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(mlp(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            losses.append(accelerator.reduce(loss.detach(), reduction="mean").item())
    return losses


@row("000-01", "002-01", "002-18")
def test_one_script_gives_one_result_on_one_and_two_processes_and_in_bf16() -> None:
    two = run_on_ranks(train, 2, "no", 5)
    one = train(per_process=10)
    assert two[0] == pytest.approx(one, abs=1e-5)
    assert two[0] == two[1]
    AcceleratorState._reset_state(True)
    assert train("bf16", per_process=10) == pytest.approx(one, rel=0.02)


@row("000-02", "001-02", "002-03", "002-34")
def test_the_conversion_is_a_few_lines_and_no_boilerplate() -> None:
    plain = (LISTINGS / "mlp.py").read_text().splitlines()[1:]
    converted = (LISTINGS / "mlp_accelerated.py").read_text().splitlines()[1:]
    changed = [line for line in difflib.ndiff(plain, converted) if line[0] == "+" and line[2:].strip()]
    statements = [line for line in changed if not line[2:].strip().startswith("#")]
    assert len(statements) <= 4, statements
    for example in (ROOT / "examples").glob("*.py"):
        text = example.read_text()
        for word in ("DistributedSampler", "DistributedDataParallel", "local_rank", "GradScaler", "init_process_group"):
            assert word not in text, f"{example.name} needs {word}"


@row("000-03", "000-05", "001-08", "001-56")
def test_the_wheel_installs_without_dependencies_and_brings_its_commands(tmp_path: Path) -> None:
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path, ROOT], timeout_seconds=110)
    (wheel,) = tmp_path.glob("accelerate-*.whl")
    (source,) = tmp_path.glob("accelerate-*.tar.gz")
    target = tmp_path / "installed"
    run(
        [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", "--target", target, wheel],
        PIP_DISABLE_PIP_VERSION_CHECK="1",
    )
    assert not (target / "torch").exists()
    said = run([sys.executable, target / "bin" / "accelerate", "--help"], PYTHONPATH=str(target)).stdout
    assert "launch" in said and "config" in said
    where = run([sys.executable, "-c", "import accelerate; print(accelerate.__file__)"], PYTHONPATH=str(target))
    assert Path(where.stdout.strip()).is_relative_to(target)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        commands = archive.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
        metadata = archive.read(next(name for name in names if name.endswith("METADATA"))).decode()
    for command in (
        "accelerate",
        "accelerate-launch",
        "accelerate-config",
        "accelerate-estimate-memory",
        "accelerate-merge-weights",
    ):
        assert re.search(rf"^{command} = accelerate\.", commands, re.MULTILINE), command
    assert "accelerate/py.typed" in names
    assert "Home-page: " in metadata and "independent-implementation-of-the-huggingface-accelerate" in metadata
    with tarfile.open(source) as archive:
        assert any(name.endswith("src/accelerate/__init__.py") for name in archive.getnames())


@row("000-04")
def test_supported_versions_are_stated_and_this_one_is_supported() -> None:
    metadata = importlib.metadata.metadata("accelerate")
    assert metadata["Requires-Python"] == ">=3.10"
    assert "torch>=2.6" in (importlib.metadata.requires("accelerate") or [])
    assert sys.version_info >= (3, 10)
    assert tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) >= (2, 6)


@row("000-06")
def test_importing_the_package_changes_nothing_in_torch() -> None:
    code = (
        "import torch\n"
        "watched = lambda: (torch.nn.Module.__call__, torch.Tensor.backward, torch.optim.Optimizer.step, "
        "torch.utils.data.DataLoader.__iter__, torch.get_rng_state().sum().item(), torch.get_num_threads())\n"
        "before = watched()\n"
        "import accelerate\n"
        "accelerate.Accelerator\n"
        "assert watched() == before\n"
    )
    done = run_fresh(code, environment={**os.environ, "PYTHONPATH": python_path()})
    assert done.returncode == 0, done.stderr


@row("000-07")
def test_accelerator_is_a_name_of_the_front_door() -> None:
    import accelerate
    import accelerate.accelerator

    assert accelerate.Accelerator is accelerate.accelerator.Accelerator


@row("000-08")
@pytest.mark.parametrize("method", [pytest.param("fork", marks=slow), "spawn"])
def test_the_constructor_is_safe_at_import_also_in_workers(method: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "from accelerate import Accelerator\n"
        "accelerator = Accelerator(cpu=True)\n"
        "if __name__ == '__main__':\n"
        "    data = torch.utils.data.TensorDataset(torch.arange(20.0))\n"
        f"    loader = torch.utils.data.DataLoader(data, 5, num_workers=1, multiprocessing_context='{method}')\n"
        "    print(sum(batch.sum().item() for batch, in accelerator.prepare(loader)))\n"
    )
    assert run([sys.executable, script]).stdout.strip() == "190.0"


@row("000-09")
def test_a_seed_set_after_construction_is_respected() -> None:
    def orders() -> list[list[int]]:
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(42)
        loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(30)), batch_size=6, shuffle=True))
        return [[int(i) for (batch,) in loader for i in batch] for _ in range(2)]

    first = orders()
    assert first == orders()
    assert first[0] != first[1]
    torch.manual_seed(42)
    bare = DataLoader(TensorDataset(torch.arange(30)), batch_size=6, shuffle=True)
    assert [int(i) for (batch,) in bare for i in batch] == first[0]


@row("000-10")
def test_a_prepared_loader_keeps_workers_shuffle_and_batch_size_and_shares_the_order() -> None:
    def mine() -> tuple[list[int], int, int | None]:
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(accelerator.process_index)  # the ranks' own seeds differ, the order must not
        loader = DataLoader(TensorDataset(torch.arange(40)), batch_size=10, shuffle=True, num_workers=1)
        loader = accelerator.prepare(loader)
        return [int(i) for (batch,) in loader for i in batch], loader.num_workers, loader.batch_size

    (first, workers, batch_size), (second, _, _) = run_on_ranks(mine, 2)
    assert (workers, batch_size) == (1, 10)
    assert not set(first) & set(second)
    assert sorted(first + second) == list(range(40))
    assert first + second != list(range(40))


@pytest.fixture
def prepared() -> tuple[Accelerator, Any, Any, Any]:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(42)
    mlp = MLP()
    optimizer = torch.optim.Adam(mlp.parameters(), lr=1e-4)
    return (accelerator, *accelerator.prepare(mlp, optimizer, DataLoader(images(), batch_size=10)))


@row("000-11")
def test_prepare_returns_the_same_count_and_order(prepared: tuple[Accelerator, Any, Any, Any]) -> None:
    _, mlp, optimizer, loader = prepared
    assert isinstance(mlp, nn.Module)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(loader, DataLoader)


@row("000-12")
def test_an_optimizer_built_before_prepare_updates_the_prepared_model() -> None:
    def step() -> tuple[bool, list[float]]:
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(accelerator.process_index)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        before = [p.detach().clone() for p in model.parameters()]
        accelerator.backward(model(torch.full((3, 4), float(accelerator.process_index + 1))).sum())
        optimizer.step()
        after = list(model.parameters())
        changed = all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
        return changed, torch.cat([p.detach().flatten() for p in after]).tolist()

    (changed_first, first), (changed_second, second) = run_on_ranks(step, 2)
    assert changed_first and changed_second
    assert first == second


@row("000-13", "000-14", "000-16", "000-17")
def test_the_loop_of_the_article(prepared: tuple[Accelerator, Any, Any, Any]) -> None:
    accelerator, mlp, optimizer, loader = prepared
    for inputs, targets in loader:
        assert inputs.device == targets.device == accelerator.device
        optimizer.zero_grad()
        assert all(parameter.grad is None or not parameter.grad.any() for parameter in mlp.parameters())
        outputs = mlp(inputs)
        assert outputs.shape == (10, 10)
        loss = nn.functional.cross_entropy(outputs, targets)
        accelerator.backward(loss)
        optimizer.step()
        assert isinstance(loss.item(), float)


@row("000-16")
def test_the_loss_is_a_plain_fp32_scalar_in_bf16() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(MLP())
    loss = nn.functional.cross_entropy(model(torch.rand(2, 3, 32, 32)), torch.tensor([1, 2]))
    assert loss.dtype == torch.float32 and loss.dim() == 0
    assert isinstance(loss.item(), float)


@row("000-15", "003-10")
def test_backward_gives_the_gradient_of_the_plain_call(prepared: tuple[Accelerator, Any, Any, Any]) -> None:
    accelerator, mlp, _, _ = prepared
    inputs, targets = images(10).tensors
    nn.functional.cross_entropy(mlp(inputs), targets).backward()
    plain = [parameter.grad.clone() for parameter in mlp.parameters()]
    mlp.zero_grad()
    accelerator.backward(nn.functional.cross_entropy(mlp(inputs), targets))
    for parameter, expected in zip(mlp.parameters(), plain, strict=True):
        assert torch.equal(parameter.grad, expected)


@row("000-18")
@slow
def test_the_printed_loss_falls(tmp_path: Path) -> None:
    said = run([*launcher("python"), HERE / "run_listings.py", tmp_path, "mlp_accelerated"], STUB_CIFAR_SAMPLES="5000")
    assert not said.stdout
    import json

    printed = json.loads((tmp_path / "rank_0.json").read_text())["mlp_accelerated"]["printed"]
    losses = re.findall(r"^Loss after mini-batch   500: (\d\.\d{3})$", printed, re.MULTILINE)
    assert len(losses) == 5
    assert float(losses[-1]) < float(losses[0])


@row("000-19")
@pytest.mark.parametrize(
    ("present", "chosen"),
    [(set(), "cpu"), *(({name}, name) for name in ("cuda", "xla", "mps", "xpu", "npu", "hpu"))],
)
def test_the_device_is_chosen_by_what_is_there(present: set[str], chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.devices import table as devices

    monkeypatch.setattr(devices.DeviceKind, "is_available", lambda kind: kind.name in present or kind.name == "cpu")
    assert devices.available_kind().name == chosen


@row("000-20", "001-29")
@pytest.mark.usefixtures("fake_device")
def test_placement_reaches_batches_model_and_loaded_optimizer_state() -> None:
    accelerator = Accelerator()
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    loader = DataLoader(TensorDataset(torch.ones(4, 4)), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    assert accelerator.device.type == "meta"
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert {state["momentum_buffer"].device.type for state in optimizer.state.values()} == {"meta"}
    assert {batch.device.type for (batch,) in loader} == {"meta"}


@row("000-21")
def test_the_example_has_a_local_stand_in_for_the_data(tmp_path: Path) -> None:
    said = run(
        [sys.executable, ROOT / "examples" / "cifar10_mlp.py", "--cpu", "--num_epochs", "2", "--data_dir", tmp_path],
        folder=tmp_path,
        PYTHONPATH=python_path(),
    ).stdout
    first, last = re.findall(r"loss (\d\.\d+), accuracy", said)
    assert float(last) < float(first)


@row("000-22")
@slow
def test_a_script_of_two_processes_ends_cleanly(tmp_path: Path) -> None:
    for _ in range(6):  # an abort at exit would show in about one run of six
        finished = run([*launcher("torchrun"), HERE / "run_listings.py", tmp_path, "mlp_accelerated"])
        assert not re.search("terminate called|leaked|destroy_process_group|SIGABRT", finished.stderr)


def test_the_commands_help_is_there_without_arguments() -> None:
    assert "launch" in run(ACCELERATE, expect=1).stdout
