"""``accelerate migrate --verify`` trains with a script and with its conversion, and keeps nothing that differs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from accelerate.commands.main import main
from accelerate.guests.scripts.migrate import migrate
from accelerate.guests.scripts.verify import Comparison, Run, VerificationError, verify
from tests.migrate.test_migrated_scripts import CONVERTED, SCRIPTS
from tests.ranks import free_port
from tests.slow import slow_for

pytestmark = pytest.mark.timeout(900)  # programs are started one after another

ARGUMENTS = {
    "imagenet_spawn": "--multiprocessing-distributed --world-size 1 --rank 0 --dist-url tcp://127.0.0.1:{port}",
}

#: Batches of 3 with a rest, dropout, a shuffle, a GPU by name where there is one, arguments, and a file that it writes.
SCRIPT = """\
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

x = torch.randn(19, 4)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 3, shuffle=True)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 1)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
for epoch in range(100):
    for inputs, targets in loader:
        inputs, targets = inputs.to("cuda"), targets.to("cuda")
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        torch.save(model.state_dict(), "model.pt")
        print(loss.item())
"""


slow = slow_for("several runs of a script")


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_a_conversion_that_trains_the_same_is_written(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("model.pt").write_text("precious")
    assert main(["migrate", str(script), "--verify", "--num-steps", "7", "--write", "--", "0.05"]) == 0
    printed = capsys.readouterr().out
    assert "The converted script trains identically (1 process, 2 processes)." in printed
    rows = [line.split() for line in printed.splitlines() if line.split()[:1] == ["7"]]
    assert len(rows) == 1 and len(rows[0]) == 4, printed  # the last of seven steps, in three runs
    assert "accelerator.backward(loss)" in script.read_text()
    assert Path("model.pt").read_text() == "precious"
    assert sorted(path.name for path in script.parent.iterdir()) == ["model.pt", "train.py"]


@slow
def test_a_conversion_that_trains_otherwise_is_named(script: Path) -> None:
    found = migrate(SCRIPT, "train.py")
    wrong = dataclasses.replace(found, after=found.after.replace("float(sys.argv[1])", "2 * float(sys.argv[1])"))
    assert wrong.after != found.after
    (comparison,) = verify(wrong, script, ["0.05"], 3)
    assert [text.split(":")[0] for text in comparison.differences] == ["1 process", "2 processes"]
    assert "the loss of backward pass 2 is" in comparison.differences[0]


@slow
def test_a_model_that_stays_apart_on_each_process_is_found(script: Path) -> None:
    """The fault of `model = model.fit(...)` around a prepared model: what trains isn't what was prepared."""
    found = migrate(SCRIPT, "train.py")
    assert "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)" in found.after
    wrong = dataclasses.replace(
        found, after=found.after.replace("model, optimizer, loader = ", "_, optimizer, loader = ")
    )
    (comparison,) = verify(wrong, script, ["0.05"], 3)
    assert [text.split(":")[0] for text in comparison.differences] == ["2 processes"]


@slow
def test_what_a_failed_run_said_is_shown(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", str(script), "--verify", "--write"]) == 1  # without its argument
    said = capsys.readouterr().err
    assert "the run 'original' failed with exit code 1" in said and "IndexError" in said
    assert script.read_text() == SCRIPT
    with pytest.raises(VerificationError, match="nothing to compare"):
        script.write_text("import torch\n" + SCRIPT.replace("range(100)", "range(0)"))
        verify(migrate(script.read_text(), "train.py"), script, ["0.05"], 3)


def test_runs_that_differ_by_design_are_excused_by_name() -> None:
    one = Run("original", [1.0, 2.0], [(1.0, 2.0)])
    same = Run("1 process", [1.0, 2.0], [(1.0, 2.0)])
    other = Run("2 processes", [1.0, 2.5], [(1.0, 2.0)])
    assert Comparison([one, same, other]).differences == [
        "2 processes: the loss of backward pass 2 is 2.5, and 2 in the original"
    ]
    excused = Comparison([one, same, other], {"2 processes": "the loop draws random numbers"})
    assert not excused.differences
    assert excused.text("The converted script trains identically").splitlines()[-2:] == [
        "Not compared on 2 processes: the loop draws random numbers.",
        "The converted script trains identically (1 process).",
    ]
    for wrong in (
        dataclasses.replace(same, losses=[1.0]),
        dataclasses.replace(same, losses=[1.0, float("nan")]),
        dataclasses.replace(same, losses=[1.0, float("inf")]),
        dataclasses.replace(same, weights=[(float("inf"), float("inf"))]),
        dataclasses.replace(same, weights=[(1.001, 2.0)]),
        dataclasses.replace(same, weights=[(1.0, 2.0), (0.0, 0.0)]),
    ):
        assert len(Comparison([one, wrong]).differences) == 1
    diverged = [
        dataclasses.replace(run, losses=[1.0, float("inf")], weights=[(float("nan"),) * 2]) for run in (one, same)
    ]
    assert not Comparison(diverged).differences
    rounded = dataclasses.replace(other, losses=[1.0, 2.05], is_rounded=True)
    assert not Comparison([one, rounded]).differences


@slow
@pytest.mark.parametrize("name", CONVERTED)
def test_every_script_of_the_corpus_trains_the_same(name: str) -> None:
    path, arguments = SCRIPTS[name], ARGUMENTS.get(name, "").format(port=free_port()).split()
    for comparison in verify(migrate(path.read_text(), path.name), path, arguments, 6):
        assert not comparison.differences, comparison.table()


@slow
def test_a_loss_is_compared_before_a_scaler_scales_it(tmp_path: Path) -> None:
    scaled = SCRIPT.replace(".cuda()", "").replace('.to("cuda")', "").replace("nn.Dropout(0.5), ", "")
    scaled = scaled.replace("loss.backward()", "scaler.scale(loss).backward()").replace("float(sys.argv[1])", "0.05")
    scaled = scaled.replace("optimizer.step()", "scaler.step(optimizer)\n        scaler.update()")
    scaled = scaled.replace("for epoch", 'scaler = torch.amp.GradScaler("cpu")\nfor epoch', 1)
    path = tmp_path / "scaled.py"
    path.write_text(scaled)
    for comparison in verify(migrate(scaled, path.name), path, [], 4):
        assert not comparison.differences, comparison.table()


#: Each way to name a GPU by a number, and an evaluation of 30 samples that prints what it counts.
NUMBERED = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

rank = 0
device = torch.device(rank)
torch.cuda.set_device(rank)
torch.manual_seed(0)
x = torch.randn(64, 4)
y = x.sum(1, keepdim=True)
train_loader = DataLoader(TensorDataset(x, y), 8, shuffle=True)
test_loader = DataLoader(TensorDataset(x[:30], y[:30]), 8)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).cuda(rank)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(3):
    model.train()
    for inputs, targets in train_loader:
        inputs, targets = inputs.to(rank), targets.to(device)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
    model.eval()
    count, total = 0, 0.0
    with torch.no_grad():
        for inputs, targets in test_loader:
            inputs, targets = inputs.to("cuda:0"), targets.cuda(rank)
            total += nn.functional.mse_loss(model(inputs), targets, reduction="sum").item()
            count += len(inputs)
    print(f"epoch {epoch}: {total / count:.5f} of {count} samples")
"""


@slow
def test_numbers_of_gpus_are_the_cpu_and_evaluations_are_compared(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(NUMBERED)
    found = migrate(NUMBERED, path.name)
    (comparison,) = verify(found, path, [], 4)
    assert not comparison.differences, comparison.table()
    evaluations = [run.evaluations[4][0].shown for run in comparison.runs]
    assert [list(shown) for shown in evaluations] == [['printed "epoch {}: {} of {} samples"']] * 3
    assert evaluations[0].popitem()[1].numbers[-1] == [30.0, 0.0]  # with the last batch, which isn't full


@slow
def test_an_evaluation_that_counts_padding_is_named(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(NUMBERED)
    found = migrate(NUMBERED, path.name)
    prepared = "model, optimizer, train_loader = accelerator.prepare(model, optimizer, train_loader)"
    assert prepared in found.after
    counted = found.after.replace(prepared, f"{prepared}\ntest_loader = accelerator.prepare(test_loader)")
    shown = "    accelerator.print("
    counted = counted.replace(shown, f"    count = accelerator.reduce(torch.tensor(count)).item()\n{shown}")
    wrong = dataclasses.replace(found, after=counted)
    (comparison,) = verify(wrong, path, [], 4)
    (difference,) = comparison.differences
    assert difference.startswith("2 processes: the evaluation after step 4 (line ") and " instead of " in difference
