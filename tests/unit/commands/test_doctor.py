"""``accelerate doctor`` finds what goes wrong on several processes, by line, and has nothing against what is right."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import permutations
from pathlib import Path

import pytest
import yaml

from accelerate.commands.main import main
from accelerate.guests.scripts.doctor import RULES, examine, fixed
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
    assert main(["doctor", str(script)]) == 0
    assert capsys.readouterr().out == f"{script}: no problems found.\n"
    script.write_text(RIGHT.replace("accelerator.backward(loss)", "loss.backward()"))
    assert main(["doctor", str(script)]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith(f"{script}:15: error: ") and printed[-1] == f"{script}: 1 error."
    script.write_text("import torch\n")
    assert main(["doctor", str(script)]) == 2
    assert "accelerate migrate" in capsys.readouterr().err


def test_an_optimizer_made_after_prepare_is_told_why() -> None:
    made = "optimizer = torch.optim.SGD(model.parameters(), lr=0.05)\n"
    prepared = "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\n"
    late = RIGHT.replace(made, "").replace(prepared, f"model, loader = accelerator.prepare(model, loader)\n{made}")
    assert findings(late) == [
        (
            10,
            "error: the optimizer `optimizer` is made after `prepare`, which never gets it. Make it before, and "
            "prepare it together with the model.",
        )
    ]


FAULTY = RIGHT.replace("accelerator.backward(loss)", "loss.backward()  # as before").replace(
    "        print(epoch)", "        print(epoch)\n    if loss < 0.1:\n        break"
)


def test_a_fix_is_written_where_it_is_safe_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_bytes(FAULTY.replace("\n", "\r\n").encode())
    assert main(["doctor", str(script), "--diff"]) == 1
    shown = capsys.readouterr().out
    assert script.read_bytes() == FAULTY.replace("\n", "\r\n").encode()  # nothing is written
    assert main(["doctor", str(script), "--fix"]) == 1
    written, printed = script.read_bytes().decode(), capsys.readouterr().out
    assert written == FAULTY.replace("loss.backward()", "accelerator.backward(loss)").replace("\n", "\r\n")
    for text in (shown, printed):
        assert "-        loss.backward()  # as before\n+        accelerator.backward(loss)  # as before\n" in text
    assert f"{script}:20: error: `break` depends on this process's own samples" in printed  # for the author
    assert "D301" in shown and "D301" not in printed
    assert main(["doctor", str(script), "--fix"]) == 1
    assert script.read_bytes().decode() == written


def test_nothing_is_fixed_where_no_accelerator_is_certain_to_exist() -> None:
    """The function may be called with any object, or before the Accelerator is there."""
    moved = RIGHT.replace("accelerator.backward(loss)", "train(loss)")
    helper = "def train(loss):\n    loss.backward()\n\n\n"
    inside = moved.replace("for epoch", f"{helper}for epoch", 1)
    assert "    accelerator.backward(loss)\n" in fixed(inside, "train.py")
    hidden = moved.replace("accelerator = Accelerator()", "if True:\n    accelerator = Accelerator()")
    hidden = hidden.replace("for epoch", f"{helper}for epoch", 1)
    assert "D301" in {each.code for each in examine(hidden, "train.py")}
    assert fixed(hidden, "train.py") == hidden


FAULT = "        loss.backward()"
BACKWARD = RIGHT.replace("        accelerator.backward(loss)", FAULT)
BREAK = "    if loss < 0.1:\n        break"
BROKEN = RIGHT.replace("        print(epoch)", f"        print(epoch)\n{BREAK}")


@pytest.mark.parametrize(
    "comment", ["ignore[D301]", "ignore", "ignore[D104, D301]", "ignore [d301]", "ignore[D301]  (a reason)"]
)
def test_a_comment_silences_the_findings_of_its_line(comment: str) -> None:
    silenced = BACKWARD.replace(FAULT, f"{FAULT}  # accelerate: {comment}")
    left = [(each.line, each.code) for each in examine(silenced, "train.py")]
    assert left == ([(15, "D001")] if "D104" in comment else [])
    assert fixed(silenced, "train.py") == silenced
    assert fixed(BACKWARD, "train.py") != BACKWARD


@pytest.mark.parametrize(
    ("comment", "remark"),
    [
        ("# accelerate: ignore[D604]", "`# accelerate: ignore[D604]` silences nothing in this line. Remove it."),
        ("# accelerate: ignore", "`# accelerate: ignore` silences nothing in this line. Remove it."),
        ("# accelerate: ignore[D999]", "`# accelerate: ignore[D999]` silences nothing in this line. Remove it."),
    ],
)
def test_a_comment_that_silences_nothing_is_remarked(comment: str, remark: str) -> None:
    right = RIGHT.replace("        print(epoch)", f"        print(epoch)  {comment}")
    assert [(each.line, each.severity, each.text, each.code) for each in examine(right, "train.py")] == [
        (18, "note", remark, "D001")
    ]
    other = BACKWARD.replace("        optimizer.step()", f"        optimizer.step()  {comment}")  # another line
    assert [(each.line, each.code) for each in examine(other, "train.py")] == [(15, "D301"), (16, "D001")]


def test_a_name_that_may_be_of_several_roles_has_none() -> None:
    """Which of them came first in a set once decided, and differed from run to run."""
    for names in permutations(("model", "optimizer", "loader")):
        loop = f"for each in ({', '.join(names)}):\n    print(each.state_dict())\n"
        assert not [found for found in examine(RIGHT + loop, "train.py") if found.code == "D604"]
    loop = "for each in (model,):\n    print(each.state_dict())\n"
    assert "D604" in [found.code for found in examine(RIGHT + loop, "train.py")]


def test_a_comment_in_a_string_silences_nothing() -> None:
    text = BACKWARD.replace(FAULT, f'{FAULT}; print("# accelerate: ignore")')
    assert [each.code for each in examine(text, "train.py") if each.code == "D301"] == ["D301"]


def test_the_command_counts_neither_silenced_findings_nor_fixes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    text = BROKEN.replace("        accelerator.backward(loss)", FAULT)
    script.write_text(text.replace("break", "break  # accelerate: ignore[D104]"))
    assert main(["doctor", str(script), "--fix"]) == 0
    assert "no problems found" in capsys.readouterr().out
    assert (
        "accelerator.backward(loss)\n" in script.read_text()
        and "break  # accelerate: ignore[D104]" in script.read_text()
    )
    script.write_text(
        text.replace("break", "break  # accelerate: ignore[D104]").replace(FAULT, f"{FAULT}  # accelerate: ignore")
    )
    before = script.read_text()
    assert main(["doctor", str(script), "--fix"]) == 0 and script.read_text() == before
    script.write_text(text)
    assert main(["doctor", str(script)]) == 1


def test_github_shows_findings_as_annotations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "50%, a:b"
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(FAULTY)
    assert main(["doctor", str(script), "--format", "github"]) == 1
    lines = capsys.readouterr().out.splitlines()
    name = str(script).replace("%", "%25").replace(",", "%2C").replace(":", "%3A")
    assert lines[0].startswith(f"::error file={name},line=15,title=accelerate doctor D301::`.backward()` of the loss")
    assert len(lines) == 2 and lines[1].startswith(f"::error file={name},line=20,")
    script.write_text(RIGHT.replace("    if accelerator.is_main_process:\n    ", ""))
    assert main(["doctor", str(script), "--format", "github"]) == 0
    assert capsys.readouterr().out.startswith("::notice file=")


def test_the_commit_hook_examines_what_is_accelerated(tmp_path: Path) -> None:
    hooks = yaml.safe_load((EXAMPLES.parent / ".pre-commit-hooks.yaml").read_text())
    entries = {hook["id"]: hook["entry"].split() for hook in hooks}
    for name, text in {"right.py": RIGHT, "faulty.py": FAULTY, "other.py": "import torch\n"}.items():
        (tmp_path / name).write_text(text)

    def run(hook: str, *names: str) -> subprocess.CompletedProcess[str]:
        program, *arguments = entries[hook]
        assert program == "accelerate"
        command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", *arguments, *names]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert run("accelerate-doctor", "right.py", "other.py").returncode == 0
    found = run("accelerate-doctor", "faulty.py", "right.py", "other.py")
    assert found.returncode == 1 and "faulty.py:15: error: " in found.stdout and "right.py: no prob" in found.stdout
    assert run("accelerate-doctor-fix", "faulty.py", "other.py").returncode == 1  # an error is left
    assert "accelerator.backward(loss)" in (tmp_path / "faulty.py").read_text()
    assert (tmp_path / "other.py").read_text() == "import torch\n"


def test_several_scripts_are_not_run_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(RIGHT)
    with pytest.raises(SystemExit) as left:
        main(["doctor", str(script), str(script), "--run"])
    assert left.value.code == 2
    assert capsys.readouterr().err == "accelerate doctor: --run compares the runs of one script. 2 were given.\n"


def test_the_guide_explains_each_rule() -> None:
    guide = (EXAMPLES.parent / "docs" / "reference" / "doctor_rules.md").read_text()
    listed = re.findall(r"^\| (D\d{3}) \| (\w+) \|", guide, re.MULTILINE)
    assert listed == [(rule.code, rule.severity.value) for rule in RULES]
    fixable = re.findall(r"^\| (D\d{3}) \| \w+ \|.*\| yes \|$", guide, re.MULTILINE)
    assert fixable == [rule.code for rule in RULES if rule.fix is not None]


@pytest.mark.timeout(900)  # programs are started one after another
@slow
def test_a_run_shows_what_reading_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    apart = RIGHT.replace("torch.nn.functional.mse_loss(model(", "torch.nn.functional.mse_loss(run(model, ")
    unwrapped = "def run(model, inputs):\n    return accelerator.unwrap_model(model)(inputs)\n\nfor epoch"
    script.write_text(apart.replace("for epoch", unwrapped))  # so DDP never averages
    assert main(["doctor", str(script), "--run", "--num_steps", "3"]) == 1
    printed = capsys.readouterr().out
    assert "2 processes: the loss of backward pass 2 is" in printed and "in the run of 1 process" in printed
