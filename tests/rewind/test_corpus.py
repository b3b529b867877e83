"""`accelerate bisect` finds planted causes: the first update, the samples and the module, with few replays."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from accelerate.guests.rewind import rerun
from accelerate.guests.rewind.bisect_command import search_of
from accelerate.guests.rewind.run_folder import Condition
from accelerate.guests.rewind.search import Found
from tests.rewind import forked
from tests.rewind.corpus import CAUSES, OTHERS, SAMPLE, Cause
from tests.rewind.training import hashes, script, train
from tests.slow import mostly_slow, slow_for

pytestmark = [pytest.mark.timeout(900), pytest.mark.nonfinite]  # several runs of a script, one after another
slow = slow_for("several runs of a script", "corpus")


@pytest.fixture(autouse=True)
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork ranks from this process, in place of a launch."""
    monkeypatch.setattr(rerun, "start", forked.start)


def expected(cause: Cause, condition: Condition, path: Path) -> int:
    """The first update at which the condition holds, by a file of all updates beside the script."""
    if cause.update is not None:
        return cause.update
    updates = [json.loads(line) for line in path.with_suffix(".updates").read_text().splitlines()]
    return next(one["update"] for one in updates if condition.holds(one))


def check(cause: Cause, found: Found, update: int) -> None:
    assert found.number == update, found
    assert not found.checks, found.checks
    finding = found.finding
    if not cause.what:
        return
    assert finding is not None and cause.what in finding.what, finding
    assert finding.module == cause.module or not cause.module, finding
    if cause.samples is not None:
        assert finding.samples == ([SAMPLE] if cause.samples else []), finding
    assert cause.rank is None or finding.rank == cause.rank, finding


def trained(cause: Cause, folder: Path, number: int = 0, *, is_planted: bool = True) -> tuple[Path, Path, list[str]]:
    """Train with a cause or without; return the script, the run's folder and the command of the run."""
    numbers = {"SAMPLES": 160 * cause.ranks, **cause.numbers}  # each sample is read once in 40 updates
    path = script(folder, *(cause.planted if is_planted else ()), name=f"train_{number}.py", **numbers)
    run, arguments = folder / f"run_{number}", cause.arguments if is_planted else ()
    train(path, run, *arguments, ranks=cause.ranks, flags=cause.flags)
    return path, run, ["--cpu", *cause.flags, str(path), "--project", str(run), *arguments]


@pytest.mark.parametrize("name", mostly_slow(CAUSES, ["outlier"], slow))
def test_a_cause_is_found_in_a_run(name: str, tmp_path: Path) -> None:
    cause = CAUSES[name]
    (tmp_path / "run").mkdir()
    path, run, command = trained(cause, tmp_path / "run")
    before = hashes(tmp_path / "run")
    condition = Condition.parse(cause.when)
    search = search_of(run, command, cause.ranks, tmp_path / "work")
    found = search.first(condition)
    check(cause, found, expected(cause, condition, path))
    assert search.num_replays <= math.log2(40) + 2, found.how
    assert hashes(tmp_path / "run") == before


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Cause], tuple[Path, list[str]]]:
    """Runs without a cause by ranks and flags, each made once."""
    made: dict[object, tuple[Path, list[str]]] = {}

    def base(cause: Cause) -> tuple[Path, list[str]]:
        key = cause.ranks, cause.flags
        if key not in made:
            made[key] = trained(cause, tmp_path_factory.mktemp("base"), is_planted=False)[1:]
        return made[key]

    return base


@slow
@pytest.mark.parametrize("name", OTHERS)
def test_a_cause_is_found_between_two_runs(
    name: str, tmp_path: Path, bases: Callable[[Cause], tuple[Path, list[str]]]
) -> None:
    cause = OTHERS[name]
    base, base_command = bases(cause)
    (tmp_path / "run").mkdir()
    _, run, command = trained(cause, tmp_path / "run", 1)
    before = hashes(base), hashes(tmp_path / "run")
    first = search_of(base, base_command, cause.ranks, tmp_path / "work_1")
    second = search_of(run, command, cause.ranks, tmp_path / "work_2")
    found = first.first_against(second)
    update = cause.update
    if update is None:  # that in which the changed sample is read
        texts = (next(one.glob("*.jsonl")).read_text() for one in (base, run))
        logs = [[json.loads(line) for line in text.splitlines()] for text in texts]
        update = next(one["step"] for one, other in zip(*logs, strict=True) if one.get("loss") != other.get("loss"))
    check(cause, found, update)
    assert [search.num_replays for search in (first, second)] == [1, 1]
    assert (hashes(base), hashes(tmp_path / "run")) == before


@slow
def test_what_hardware_did_is_found_by_comparison_with_the_replay(tmp_path: Path) -> None:
    flip = (
        "pass  # updated",
        "_ = accelerator.unwrap_model(model).last.weight.data.view(torch.int32)[0, 3].bitwise_xor_(1 << 30) "
        "if progress.update == 23 and __import__('os').environ.get('FLIP') else None",
    )
    path, run = script(tmp_path, flip), tmp_path / "run"
    train(path, run, FLIP="1")
    search = search_of(run, ["--cpu", str(path), "--project", str(run)], 1, tmp_path / "work")
    found = search.first(Condition.parse("not finite"))
    assert found.number == 24 and found.finding is None, found
    assert "in the replay, and" in found.checks[0] and "hardware" in found.checks[1]


@slow
@pytest.mark.parametrize("save_every", [10, 16])
def test_a_check_of_states_is_halved(save_every: int, tmp_path: Path) -> None:
    explodes = CAUSES["exploding_layer"].planted
    path, run = script(tmp_path, *explodes, SAVE_EVERY=save_every), tmp_path / "run"
    train(path, run)
    judge = tmp_path / "check.py"
    judge.write_text(
        "import sys\nfrom pathlib import Path\nfrom safetensors.numpy import load_file\n"
        "weights = load_file(next(Path(sys.argv[1]).glob('model*.safetensors')))\n"
        "sys.exit(int(max(abs(one).max() for one in weights.values()) > 10))\n"
    )
    search = search_of(run, ["--cpu", str(path), "--project", str(run)], 1, tmp_path / "work")
    found = search.first_by_script(judge)
    assert found.number == 23, found
    assert search.num_replays <= math.log2(40) + 2


@slow
def test_a_launched_run_is_searched_by_launches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    cause = CAUSES["outlier_2_ranks"]
    path, run, command = trained(cause, tmp_path)
    condition = Condition.parse(cause.when)
    found = search_of(run, command, 2, tmp_path / "work").first(condition)
    check(cause, found, expected(cause, condition, path))
