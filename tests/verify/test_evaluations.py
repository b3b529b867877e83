"""`accelerate verify` compares what evaluations show: rows that are gathered, numbers that are logged or printed."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from accelerate.guests.scripts.verify.evaluations import Evaluation, Shown, differences, distance, own_values, parsed
from accelerate.guests.scripts.verify.layouts import chosen
from accelerate.guests.scripts.verify.prove import Outcome, Proof, prove
from accelerate.guests.scripts.verify.report import as_text
from tests.slow import slow_for
from tests.verify.corpus import BARE, PREPARE

pytestmark = pytest.mark.timeout(900)  # several runs of a script, one after another
slow = slow_for("several runs of a script", "corpus")

# -- the comparison ----------------------------------------------------------------------------------------


def shown(*numbers: float, unit: float = 0.0) -> Shown:
    return Shown(7, numbers=[[number, unit] for number in numbers])


def rows(*values: float) -> Shown:
    return wide_rows(len(values), *values)


def wide_rows(count: int, *values: float) -> Shown:
    return Shown(7, count, len(values), [[sum(values), 0.0], [sum(value * value for value in values), 0.0]])


def texts(before: list[Shown], after: list[Shown], bound: float | None = 1e-10) -> list[str]:
    reference, run = ([Evaluation(3, shown={"x": each}) for each in ranks] for ranks in (before, after))
    return [found.text for found in differences(reference, run, lambda _: bound)]


@pytest.mark.parametrize(
    ("text", "template", "numbers"),
    [
        ("epoch 3: 85.3% right", "epoch {}: {}% right", [[3.0, 0.0], [85.3, 0.1]]),
        ("loss: 0.1234, 98/100 (98%)", "loss: {}, {}/{} ({}%)", [[0.1234, 0.0001], [98, 0], [100, 0], [98, 0]]),
        ("1.2e-05 nan", "{} {}", [[1.2e-05, 1e-06], [float("nan"), 0.0]]),
        ("took 3.2 s at step 40, 7 batches", "took {} s at step {}, {} batches", []),
        ("elapsed: 12, lr=0.5", "elapsed: {}, lr={}", [[0.5, 0.1]]),
    ],
)
def test_numbers_of_a_printed_text_have_their_rounding(text: str, template: str, numbers: list[list[float]]) -> None:
    found, values = parsed(text)
    assert found == template and repr(values) == repr([[float(a), float(b)] for a, b in numbers])


def test_another_number_of_rows_is_found_and_each_rank_may_add_one_row() -> None:
    ones = [1.0] * 300
    assert texts([rows(*ones)], [rows(*ones, *[1.0] * 20)] * 2) == ["320 rows instead of 300"]
    assert texts([rows(*ones)], [rows(*ones[1:])]) == ["299 rows instead of 300"]
    assert texts([rows(1.0, 2.0)], [rows(1.0, 1.0, 2.0, 2.0)] * 2) == []  # a loss of each rank
    assert texts([rows(1.0, 2.0)], [rows(1.0, 1.0, 2.0, 3.0)] * 2) == ["1.75 instead of 1.5"]
    assert texts([rows(1.0, 2.0)], [rows(1.0, 2.0 + 1e-12)]) == []
    assert texts([rows(1.0, -1.0)], [rows(1.0 + 1e-13, -1.0)]) == []  # a mean near zero counts by the rows' size
    assert texts([rows(1.0, 2.0)], [rows(1.0, 3.0)], None) == []  # not compared
    values = [float(number) for number in range(12)]
    for before, after in ((1, 2), (3, 2), (12, 4)):  # the same values in rows of another size
        assert texts([wide_rows(before, *values)], [wide_rows(after, *values)] * 2) == []
        assert texts([wide_rows(before, *values)], [wide_rows(after, *values[1:], 99.0)] * 2) != []


def test_a_value_of_each_rank_counts_as_its_mean() -> None:
    assert texts([shown(2.0)], [shown(1.0), shown(3.0)]) == []
    assert texts([shown(2.0)], [shown(1.0), shown(2.0)]) == [
        "1.5 instead of 2 (the mean: each process shows a value of its own samples)"
    ]
    assert texts([shown(2.0)], [shown(2.5), shown(2.5)]) == ["2.5 instead of 2"]
    run = [Evaluation(3, shown={"x": shown(1.0)}), Evaluation(3, shown={"x": shown(3.0)})]
    assert list(own_values(run)) == [("x", 7)] and not list(own_values(run[:1])) and not list(own_values([]))


def test_a_reduced_value_may_differ_where_what_is_shown_of_it_agrees() -> None:
    """A sum over micro-batches is another one in each layout; a script shows it divided by their number."""

    def found(**after: Shown) -> list[str]:
        names = {
            "total": "reduce at line 7",
            "loss": "logged loss",
            "text": 'printed "{}"',
            "epoch": 'printed "epoch {}"',
        }
        before = {"total": shown(4.0), "loss": shown(2.0), "text": shown(2.0, unit=0.1), "epoch": shown(3.0)}
        reference, run = (
            [Evaluation(3, shown={names[name]: values[name] for name in after})] for values in (before, after)
        )
        return [each.name for each in differences(reference, run, lambda _: 1e-10)]

    total, other = shown(8.0), shown(5.0)
    assert found(total=total) == ["reduce at line 7"]
    assert found(total=total, loss=shown(2.0)) == found(total=total, text=shown(2.0, unit=0.1)) == []
    assert found(total=total, epoch=shown(3.0)) == ["reduce at line 7"]  # no result of it
    assert found(loss=shown(2.0), total=total) == ["reduce at line 7"]  # shown before
    assert found(total=total, loss=other) == ["reduce at line 7", "logged loss"]


def test_what_the_main_process_alone_shows_of_a_reduced_value_counts_for_it() -> None:
    total, loss = "reduce at line 7", "logged loss"
    reference = [Evaluation(3, shown={total: shown(4.0), loss: shown(2.0)})]

    def found(printed: float) -> list[tuple[str, bool]]:
        run = [Evaluation(3, shown={total: shown(8.0), loss: shown(printed)}), Evaluation(3, shown={total: shown(8.0)})]
        return [(each.name, each.is_alone) for each in differences(reference, run, lambda _: 1e-10)]

    assert found(2.0) == []
    assert found(4.0) == [(total, False), (loss, True)]


def test_rows_of_a_loss_of_each_batch_may_differ_in_all_but_their_mean() -> None:
    """`gather_for_metrics(loss.repeat(batch_size))`: on two processes there are more batches, with the same mean."""
    gathered, result = "gather_for_metrics at line 7", "logged loss"

    def found(rows_of_run: Shown, loss: float | None) -> list[str]:
        shown_after = {} if loss is None else {result: shown(loss)}
        reference = [
            Evaluation(3, shown={gathered: rows(2.0, 2.0, 4.0, 4.0), **({} if loss is None else {result: shown(3.0)})})
        ]
        run = [Evaluation(3, shown={gathered: rows_of_run, **shown_after})]
        return [each.text for each in differences(reference, run, lambda _: 1e-10)]

    same_mean, other = rows(1.0, 3.0, 3.0, 5.0), rows(1.0, 3.0, 3.0, 6.0)
    assert found(same_mean, 3.0) == []
    assert found(same_mean, None) == ["root mean square 3.31662 instead of 3.16228"]
    assert found(other, 3.0) == ["3.25 instead of 3"]
    assert found(same_mean, 3.5) == ["root mean square 3.31662 instead of 3.16228", "3.5 instead of 3"]


def test_what_only_some_ranks_show_is_compared_where_the_reference_is_alike() -> None:
    reference = [Evaluation(3, shown={"x": shown(1.0)}), Evaluation(3)]
    run = [Evaluation(3, shown={"x": shown(2.0)}), Evaluation(3)]
    assert len(list(differences(reference, run, lambda _: 0.0))) == 1
    (found,) = differences(reference[:1], run, lambda _: 0.0)
    assert found.is_alone  # of the other rank it isn't known
    assert not list(differences(run, [Evaluation(3, draws=True, shown={"x": shown(1.0)})], lambda _: 0.0))


def test_a_distance_is_what_rounding_does_not_explain() -> None:
    assert distance(shown(0.5, unit=0.1), shown(0.6, unit=0.1)) == 0.0
    assert distance(shown(0.5, unit=0.1), shown(0.8, unit=0.1)) == pytest.approx(0.199 / 0.8)
    assert distance(shown(float("nan")), shown(float("nan"))) == 0.0
    assert distance(shown(1.0), shown(float("nan"))) == float("inf")
    assert distance(shown(0.0), shown(1e-17)) < 1e-10


# -- scripts -----------------------------------------------------------------------------------------------

#: The loop with an evaluation of 30 samples, in batches of 8, after each epoch.
HELD_OUT: Final = "held_out = DataLoader(TensorDataset(x[:30], data.tensors[1][:30]), 8)\n"
EVALUATION: Final = """\
    model.eval()
    right = count = 0
    for inputs, targets in held_out:
        with torch.no_grad():
            found = model(inputs)
        found, targets = accelerator.gather_for_metrics((found, targets))
        right += ((found > 0) == (targets > 0)).sum().item()
        count += len(found)
    accelerator.print(f"epoch {epoch}: {right} of {count}")
    accelerator.log({"accuracy": right / count, "epoch": epoch, "eval_time": torch.rand(()).item()})
    model.train()
"""
EVALUATED: Final = (
    BARE.replace(PREPARE, f"{HELD_OUT}{PREPARE}\nheld_out = accelerator.prepare(held_out)\n") + EVALUATION
)


def proof_of(folder: Path, text: str, layouts: str, num_steps: int = 3) -> tuple[Proof, dict[str, Outcome]]:
    path = folder / "train.py"
    path.write_text(text)
    proof = prove(path, [], num_steps, chosen(layouts))
    return proof, {outcome.layout.name: outcome for outcome in proof.outcomes}


def changed(old: str, new: str, text: str = EVALUATED) -> str:
    assert text.count(old) == 1, old
    return text.replace(old, new)


@slow
def test_a_right_evaluation_agrees_in_all_layouts(tmp_path: Path) -> None:
    proof, found = proof_of(tmp_path, EVALUATED, "ranks2,ranks4,parts2,fsdp2,resume,bf16")
    assert [outcome.state for outcome in found.values()] == ["agrees"] * 6, as_text(proof)
    assert proof.notes == []


def test_padding_that_is_counted_is_found(tmp_path: Path) -> None:
    """An epoch has eight batches: the evaluation is reached though three updates are compared."""
    text = changed("gather_for_metrics", "gather")
    proof, found = proof_of(tmp_path, text, "ranks2")
    finding = found["ranks2"].finding
    assert finding is not None and (finding.code, finding.quantity) == ("V16", "evaluation"), as_text(proof)
    assert finding.text == "32 rows instead of 30" and "accelerator.gather(" in text.splitlines()[finding.lines[0] - 1]
    assert "ranks2: after update 3, evaluation, gather at line" in as_text(proof) and proof.exit_code == 1


#: By fault: what is replaced, by what, the code, and the line that is named.
FAULTS: Final = {
    "nothing gathered": (
        "        found, targets = accelerator.gather_for_metrics((found, targets))\n", "", "V17", "accelerator.print"
    ),
    "mean of means": (
        "found, targets = accelerator.gather_for_metrics((found, targets))",
        "loss = accelerator.reduce(nn.functional.mse_loss(found, targets), 'mean')",
        "V17",
        "accelerator.reduce",
    ),
    "copies counted": ("held_out = accelerator.prepare(held_out)\n", "", "V17", "accelerator.print"),
    "left out": (
        "held_out:",
        "(held_out if accelerator.num_processes == 1 else []):",
        "V17",
        "accelerator.print",
    ),
    "fails": ("    model.eval()\n", "    model.eval()\n    1 // (2 - accelerator.num_processes)\n", "V18", ""),
}  # fmt: skip


@slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_an_evaluation_is_found(name: str, tmp_path: Path) -> None:
    old, new, code, place = FAULTS[name]
    text = changed(old, new)
    proof, found = proof_of(tmp_path, text, "ranks2")
    finding = found["ranks2"].finding
    assert finding is not None and finding.code == code, as_text(proof)
    assert place in text.splitlines()[finding.lines[0] - 1]


#: Evaluates without a loader, and prints a sum over the loop; its batches leave samples over in windows of three.
WITHOUT_LOADER: Final = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from accelerate import Accelerator

accelerator = Accelerator(gradient_accumulation_steps=3)
torch.manual_seed(0)
x = torch.randn(60, 4)
y = x.sum(1, keepdim=True)
model = nn.LSTM(4, 3, num_layers=2, dropout=0.5, proj_size=1)
loader = DataLoader(TensorDataset(x, y), batch_size=5, shuffle=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(2):
    model.train()
    total = 0.0
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(inputs[None])[0][0], targets)
            accelerator.backward(loss)
            total += loss.item()
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        held_out = nn.functional.mse_loss(model(x[None].to(loss.dtype))[0][0], y.to(loss.dtype)).item()
    accelerator.print(f"loss {total / len(loader):.4f}, held out {held_out:.4f}")
"""


@slow
def test_an_evaluation_that_reads_no_loader_is_compared_too(tmp_path: Path) -> None:
    proof, found = proof_of(tmp_path, WITHOUT_LOADER, "ranks2,parts2", 4)
    assert [outcome.state for outcome in found.values()] == ["agrees"] * 2, as_text(proof)
    text = changed(
        ".item()\n    accelerator", ".item() / accelerator.gradient_accumulation_steps\n    accelerator", WITHOUT_LOADER
    )
    proof, found = proof_of(tmp_path, text, "parts2", 4)
    finding = found["parts2"].finding
    assert finding is not None and finding.code == "V17", as_text(proof)
    assert "accelerator.print" in text.splitlines()[finding.lines[0] - 1]


@slow
def test_an_evaluation_between_updates_is_compared_too(tmp_path: Path) -> None:
    inner = "".join(f"        {line}\n" for line in EVALUATION.replace("epoch", "number").splitlines())
    inside = f"        number += 1\n        if number % 2 == 0:\n{inner}"
    text = changed(EVALUATION, inside).replace("for epoch", "number = 0\nfor epoch", 1)
    proof, found = proof_of(tmp_path, text, "ranks2,fsdp2", 5)
    assert [outcome.state for outcome in found.values()] == ["agrees"] * 2, as_text(proof)
    proof, found = proof_of(tmp_path, text.replace("gather_for_metrics", "gather"), "ranks4", 5)
    finding = found["ranks4"].finding
    assert finding is not None and (finding.code, finding.update) == ("V16", 2), as_text(proof)


@slow
def test_a_value_of_each_process_is_noted(tmp_path: Path) -> None:
    text = changed("    model.eval()\n", "    accelerator.print(f'loss {loss.item():.6f}')\n    model.eval()\n")
    text = text.replace("    model.train()\n", "    accelerator.log({'train_loss': loss.item()})\n    model.train()\n")
    proof, found = proof_of(tmp_path, text, "ranks2")
    assert found["ranks2"].state == "agrees", as_text(proof)
    (note,) = proof.notes
    assert note.startswith("ranks2: each process shows its own value of logged train_loss (")


@slow
def test_an_evaluation_that_fails_everywhere_is_not_compared(tmp_path: Path) -> None:
    text = changed("    model.eval()\n", "    model.eval()\n    raise OSError('no data')\n")
    proof, found = proof_of(tmp_path, text, "ranks2")
    line = next(number for number, code in enumerate(text.splitlines(), start=1) if "raise OSError" in code)
    assert found["ranks2"].state == "agrees", as_text(proof)
    assert proof.notes == [f"The evaluation after the last update isn't compared: line {line}: OSError: no data."]


#: Prints the mean loss of an evaluation on the main process, of a reduced sum.
REDUCED: Final = """\
    model.eval()
    total = count = 0.0
    for inputs, targets in held_out:
        with torch.no_grad():
            total = total + nn.functional.mse_loss(model(inputs), targets)
        count += 1
    mean = accelerator.reduce(total / count, reduction="sum") / accelerator.num_processes
    if accelerator.is_main_process:
        print(f"epoch {epoch}: {mean.item():.6f}")
    model.train()
"""


@slow
@pytest.mark.parametrize("is_divided", [True, False])
def test_what_the_main_process_prints_is_compared_with_the_reference(tmp_path: Path, is_divided: bool) -> None:
    text = EVALUATED.replace(EVALUATION, REDUCED).replace(
        "x[:30], data.tensors[1][:30]", "x[:32], data.tensors[1][:32]"
    )
    if not is_divided:
        text = changed(" / accelerator.num_processes\n    if", "\n    if", text)
    proof, found = proof_of(tmp_path, text, "ranks2")
    finding = found["ranks2"].finding
    if is_divided:
        assert finding is None and proof.notes == [], as_text(proof)
    else:
        assert finding is not None and finding.code == "V17" and finding.factor == pytest.approx(2), as_text(proof)
        assert "accelerator.reduce" in text.splitlines()[finding.lines[0] - 1]


@slow
def test_a_wrong_number_that_the_main_process_alone_prints_is_noted(tmp_path: Path) -> None:
    text = changed("    accelerator.print(", "    if accelerator.is_main_process: print(")
    text = changed("gather_for_metrics", "gather", text.replace("{right} of {count}", "{right / count:.6f}"))
    text = text.replace("TensorDataset(x[:30], data.tensors[1][:30])", "TensorDataset(x[:32], data.tensors[1][:32])")
    text = changed("count += len(found)", "count += len(found) * accelerator.num_processes", text)
    text = changed(
        '    accelerator.log({"accuracy": right / count, "epoch": epoch', '    accelerator.log({"epoch": epoch', text
    )
    proof, found = proof_of(tmp_path, text, "ranks2")
    assert found["ranks2"].finding is None, as_text(proof)
    (note,) = proof.notes
    assert note.startswith('ranks2: only some processes show printed "epoch {}: {}" ('), note


@slow
@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_a_run_of_few_updates_is_resumed_with_its_evaluation(tmp_path: Path, num_steps: int) -> None:
    proof, found = proof_of(tmp_path, EVALUATED, "resume", num_steps)
    assert found["resume"].state == ("skipped" if num_steps == 1 else "agrees"), as_text(proof)


@slow
def test_a_gathered_loss_of_each_batch_is_no_finding_where_its_mean_agrees(tmp_path: Path) -> None:
    repeated = EVALUATION.replace(
        "        found, targets = accelerator.gather_for_metrics((found, targets))\n"
        "        right += ((found > 0) == (targets > 0)).sum().item()\n        count += len(found)\n",
        "        losses = accelerator.gather_for_metrics(nn.functional.mse_loss(found, targets).repeat(len(found)))\n"
        "        right += losses.sum().item()\n        count += len(losses)\n",
    )
    text = EVALUATED.replace(EVALUATION, repeated.replace("{right} of {count}", "{right / count:.6f}"))
    text = text.replace("x[:30], data.tensors[1][:30]", "x[:32], data.tensors[1][:32]")
    proof, found = proof_of(tmp_path, text, "ranks2,fsdp2")
    assert [outcome.state for outcome in found.values()] == ["agrees"] * 2, as_text(proof)
