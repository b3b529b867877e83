"""``accelerate doctor`` finds what goes wrong on several processes, by line, and has nothing against what is right."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelerate.guests.scripts.doctor import examine
from accelerate.guests.scripts.doctor_command import main
from accelerate.guests.scripts.migrate import Refused
from tests.slow import slow

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"

RIGHT = """\
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
x = torch.randn(32, 4)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), shuffle=True)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(2):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
    if accelerator.is_main_process:
        print(epoch)
"""


def findings(text: str) -> list[tuple[int, str]]:
    return [(finding.line, f"{finding.severity}: {finding.text}") for finding in examine(text, "train.py")]


@pytest.mark.parametrize(
    ("before", "after", "line", "said"),
    [
        ("    accelerator.backward(loss)", "    loss.backward()", 15, "error: `.backward()` of the loss itself"),
        ("        print(epoch)", "        accelerator.gather(loss)", 18, "error: `accelerator.gather` is called"),
        ("model, optimizer, loader = accelerator.prepare(model, ", "optimizer, loader = accelerator.prepare(", 8,
         "error: the model `model` isn't prepared: its gradients aren't averaged"),
        ("model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
         "model, optimizer = accelerator.prepare(model, optimizer)", 7, "error: the data loader `loader`"),
        ("model, optimizer, loader = accelerator.prepare(model, optimizer, loader)", "", 1, "error: nothing is"),
        ("model = torch.nn.Linear(4, 1)",
         "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))", 8, "error: `torch.nn.parallel."),
        ("Linear(4, 1)", "Linear(4, 1).cuda()", 8, "warning: `.cuda()` needs a GPU"),
        ("    if accelerator", "    x = x.to('cuda:0')\n    if accelerator", 17, "warning: 'cuda:0' is one device"),
        ("        optimizer.step()", "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)", 16,
         "warning: `clip_grad_norm_` of torch"),
        ("    if accelerator", "    print(model.module.weight)\n    if accelerator", 17,
         "warning: `model.module` is there only where"),
        ("    if accelerator", "    torch.save(loss, 'loss.pt')\n    if accelerator", 17,
         "warning: `torch.save` is called by all processes"),
        ("        print(epoch)", "        torch.save(model.state_dict(), 'model.pt')", 18, "warning: `model` is"),
        ("Accelerator()", "Accelerator(gradient_accumulation_steps=2)", 5, "warning: gradient_accumulation_steps"),
        ("    if accelerator.is_main_process:\n    ", "", 17, "note: every process prints this"),
        ("shuffle=True", "batch_size=8", 7, "note: the batch size 8 is that of one process"),
        ("shuffle=True", "sampler=torch.utils.data.distributed.DistributedSampler(x)", 7,
         "warning: `DistributedSampler` divides the data by hand"),
        ("in loader:", "in __import__('tqdm').tqdm(loader):", 0, ""),
    ],
)  # fmt: skip
def test_each_fault_is_found_at_its_line(before: str, after: str, line: int, said: str) -> None:
    assert before in RIGHT
    found = findings(RIGHT.replace(before, after))
    if not line:  # what can't be read for certain isn't reported
        assert not found
        return
    assert [(at, text) for at, text in found if at == line and text.startswith(said)], found


def test_a_right_script_has_no_findings() -> None:
    assert findings(RIGHT) == []
    guarded = RIGHT.replace("    if accelerator.is_main_process:\n        print(epoch)", "    report(epoch)").replace(
        "for epoch",
        "@accelerator.on_main_process\ndef report(epoch):\n    print(epoch)\n    torch.save(0, 'e.pt')\n\nfor epoch",
    )
    assert findings(guarded) == []
    early = guarded.replace("@accelerator.on_main_process\n", "").replace(
        "(epoch):\n", "(epoch):\n    if not accelerator.is_main_process:\n        return\n"
    )
    assert findings(early) == []


def test_bars_and_evaluation_are_found() -> None:
    bars = RIGHT.replace("import torch\n", "import torch\nfrom tqdm.auto import tqdm\n", 1)
    assert [line for line, _ in findings(bars.replace("in loader:", "in tqdm(loader):"))] == [13]
    assert not findings(bars.replace("in loader:", "in tqdm(loader, disable=not accelerator.is_main_process):"))
    evaluates = RIGHT + "right = 0\nfor inputs, targets in loader:\n    right += model(inputs).eq(targets).sum()\n"
    assert [line for line, text in findings(evaluates) if "gather_for_metrics" in text] == [20]
    assert not findings(evaluates.replace("model(inputs).eq", "accelerator.gather_for_metrics(model(inputs)).eq"))


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("**/*.py")), ids=lambda path: path.stem)
def test_the_examples_are_right(path: Path) -> None:
    text = path.read_text()
    if "import accelerate" not in text and "from accelerate" not in text:
        with pytest.raises(Refused, match="doesn't use accelerate"):
            examine(text, path.name)
        return
    assert [each for each in findings(text) if not each[1].startswith("note")] == []


def test_the_command_counts_and_fails_for_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(RIGHT)
    assert main([str(script)]) == 0
    assert capsys.readouterr().out == f"{script}: no problems found.\n"
    script.write_text(RIGHT.replace("accelerator.backward(loss)", "loss.backward()"))
    assert main([str(script)]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith(f"{script}:15: error: ") and printed[-1] == f"{script}: 1 error."
    script.write_text("import torch\n")
    assert main([str(script)]) == 2
    assert "accelerate migrate" in capsys.readouterr().err


@pytest.mark.timeout(900)  # programs are started one after another
@slow
def test_a_run_shows_what_reading_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    apart = RIGHT.replace("torch.nn.functional.mse_loss(model(", "torch.nn.functional.mse_loss(run(model, ")
    unwrapped = "def run(model, inputs):\n    return accelerator.unwrap_model(model)(inputs)\n\nfor epoch"
    script.write_text(apart.replace("for epoch", unwrapped))  # so DDP never averages
    assert main([str(script), "--run", "--num_steps", "3"]) == 1
    printed = capsys.readouterr().out
    assert "2 processes: the loss of backward pass 2 is" in printed and "in the run of 1 process" in printed
