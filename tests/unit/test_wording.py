"""Messages that list ranks: one format everywhere, with verbs and pronouns that agree with the number of ranks."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest

import accelerate
from accelerate.distributed.failures import Failure, Traceback, ended_preempted, report
from accelerate.distributed.flight_record import Collective, RankRecord, compare
from accelerate.distributed.watchdog import StackPosition, verdict
from accelerate.guests.checks.replica_check import Difference
from accelerate.guests.fault_tolerance.launcher_members import ReplicaMembers
from accelerate.wording import by_number, some_ranks

SOURCE: Final = Path(accelerate.__file__).parent
#: Lists of ranks in a table, in the order of an axis and with the last one.
TABLES: Final = ("guests/pretend/report.py",)


def test_ranks_are_listed_with_and_and_many_are_counted() -> None:
    assert some_ranks([3]) == "rank 3"
    assert some_ranks([17, 3]) == "ranks 3 and 17"
    assert some_ranks(range(9)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 1 other"
    assert some_ranks(range(512), 3) == "ranks 0, 1, 2 and 509 others"
    assert some_ranks([4], num_ranks=1) == "rank 4" and some_ranks([4, 5], num_ranks=40) == "ranks 4, 5 and 38 others"
    assert some_ranks([]) == "no ranks"


def test_a_word_takes_the_number_of_a_count_or_of_a_list() -> None:
    assert [by_number(count, "runs", "run") for count in (0, 1, 2)] == ["run", "runs", "run"]
    assert [by_number(ranks, "it", "they") for ranks in ([], {5}, range(2))] == ["they", "it", "they"]


# -- the messages, for one rank and for several --------------------------------------------------------------


def stuck(rank: int) -> StackPosition:
    return StackPosition(rank, 60, "train.py:40", "loss.backward()", True)


def elsewhere(rank: int) -> StackPosition:
    return StackPosition(rank, 0, "train.py:12", "open(path)", False)


def of_hung_ranks(ranks: list[int]) -> str:
    return verdict([None if rank in ranks else stuck(rank) for rank in range(4)], 30)


def of_slow_ranks(ranks: list[int]) -> str:
    return verdict([elsewhere(rank) if rank in ranks else stuck(rank) for rank in range(4)], 30)


def of_ranks_in_a_collective(ranks: list[int]) -> str:
    inside = RankRecord((Collective("gloo:0", "default_pg", 1, "all_reduce", ((3,),), "Float", False),), None)
    return compare({rank: inside if rank in ranks else RankRecord((), None) for rank in range(4)}, 4)[0]


def of_different_replicas(ranks: list[int]) -> str:
    return str(Difference(("`weight`",), tuple(ranks), (0, 1, 2, 3, 4)))


def of_lost_replicas(ranks: list[int]) -> str:
    members = ReplicaMembers(4, 0)
    members.minimum = 4
    try:
        for rank in {0, 1, 2, 3} - set(ranks):
            members.members.discard(rank)
        members.members.add(3)
        members.lost(3)
        return members.ending
    finally:
        members.close()


def failure(rank: int, returncode: int = 1, seconds: float = 9.0, text: str = "", **more: object) -> Failure:
    trace = Traceback((), text) if text else None
    return Failure(rank, "h", 100 + rank, returncode, seconds, traceback=trace, **more)  # type: ignore[arg-type]


def of_stopped_ranks(ranks: list[int]) -> str:
    first = failure(3, seconds=1.0, text="ValueError: bad")
    return report([first, *(failure(rank, -15, stopped=True) for rank in ranks)], 4)


def of_preempted_ranks(ranks: list[int]) -> str:
    return ended_preempted([failure(rank, 75, is_preempted=True) for rank in ranks])


@pytest.mark.parametrize(
    ("message", "of_one", "of_two"),
    [
        (
            of_hung_ranks,
            "rank 0 doesn't respond: its process has ended, is stopped, or its host is cut off.",
            "ranks 0 and 2 don't respond: their processes have ended, are stopped, or their hosts are cut off.",
        ),
        (
            of_slow_ranks,
            "the others wait for rank 0, which still makes progress, at ",
            "the others wait for ranks 0 and 2, which still make progress, at ",
        ),
        (of_ranks_in_a_collective, "in which rank 0 waits. ", "in which ranks 0 and 2 wait. "),
        (
            of_different_replicas,
            "rank 0 holds other values than ranks 1, 2, 3 and 4 of `weight`",
            "ranks 0 and 2 hold other values than ranks 1, 3 and 4 of `weight`",
        ),
        (of_lost_replicas, "only rank 0 of 4 lives, fewer", "only ranks 0 and 2 of 4 live, fewer"),
        (of_stopped_ranks, "Rank 0 was stopped by the launcher", "Ranks 0 and 2 were stopped by the launcher"),
        (of_preempted_ranks, "rank 0 saved, and ended with", "ranks 0 and 2 saved, and ended with"),
    ],
)
def test_a_message_about_ranks_agrees_with_their_number(
    message: Callable[[list[int]], str], of_one: str, of_two: str
) -> None:
    assert of_one in message([0]) and of_two in message([0, 2])


def test_a_run_that_has_lost_all_its_replicas_says_so() -> None:
    assert of_lost_replicas([]).startswith("no ranks of 4 live, fewer")


# -- all other messages --------------------------------------------------------------------------------------

#: A rank, and then a verb for one, which doesn't agree with a list.
_VERB_OF_ONE: Final = re.compile(r"^(?: of)?(?: (?:still|now|never))? (?:[a-z]+s|[a-z]+sn't)\b")


def _calls(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call):
            yield inner.func.id if isinstance(inner.func, ast.Name) else getattr(inner.func, "attr", "")


def _names_of(tree: ast.AST, function: str) -> set[str]:
    """Return the variables and functions of a module whose value comes from a call of ``function``."""
    names = {function}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            returned = [one.value for one in ast.walk(node) if isinstance(one, ast.Return) and one.value is not None]
            if any(isinstance(one, ast.Call | ast.IfExp) and function in _calls(one) for one in returned):
                names.add(node.name)
        if isinstance(node, ast.Assign) and function in _calls(node.value):
            names |= {one.id for target in node.targets for one in ast.walk(target) if isinstance(one, ast.Name)}
    return names


def _is_from(value: ast.expr, names: set[str]) -> bool:
    return any(isinstance(one, ast.Name) and one.id in names for one in ast.walk(value)) or bool(
        names.intersection(_calls(value))
    )


def _wrong_lists(text: str) -> Iterator[str]:
    """Find strings of a module that list ranks in a way of their own, or give a list of them a verb for one."""
    tree = ast.parse(text)
    lists, joined = _names_of(tree, "some_ranks"), _names_of(tree, "join")
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.search(r"\branks \(?%s", node.value):
            yield f"{node.lineno}: {node.value}"
        if not isinstance(node, ast.JoinedStr):
            continue
        for before, value in pairwise(node.values):
            if not isinstance(before, ast.Constant) or not isinstance(value, ast.FormattedValue):
                continue
            said = str(before.value).lower()
            has_own_plural = said.endswith("rank") and isinstance(value.value, ast.IfExp)
            has_own_list = re.search(r"\branks? \(?$", said) and _is_from(value.value, joined)
            if has_own_plural or has_own_list or re.search(r"\branks $", said):
                yield f"{node.lineno}: {ast.unparse(node)}"
        for place, value in enumerate(node.values):
            if not isinstance(value, ast.FormattedValue) or not _is_from(value.value, lists):
                continue
            after = "".join(str(one.value) if isinstance(one, ast.Constant) else "" for one in node.values[place + 1 :])
            if _VERB_OF_ONE.search(re.sub(r"^ of  ?", " ", after)):
                yield f"{node.lineno}: {ast.unparse(node)}"


def test_every_message_that_lists_ranks_lists_them_alike_and_with_verbs_that_agree() -> None:
    wrong = [
        f"{path.relative_to(SOURCE)}:{found}"
        for path in sorted(SOURCE.rglob("*.py"))
        if path.relative_to(SOURCE).as_posix() not in ("wording.py", *TABLES)
        for found in _wrong_lists(path.read_text(encoding="utf-8"))
    ]
    assert not wrong, "\n".join(["Use some_ranks() and by_number() of accelerate/wording.py:", *wrong])


@pytest.mark.parametrize(
    "text",
    [
        """f"{some_ranks(running)} still runs." """,
        """f"only {some_ranks(members)} of {size} lives" """,
        """living = some_ranks(members); f"only {living} of {size} lives, fewer" """,
        """f"{some_ranks(absent)} doesn't respond" """,
        """f"on rank {', '.join(map(str, ranks))}" """,
        """shown = ", ".join(numbers); f"without the streams of rank {shown}" """,
        """f"sharded over ranks {ranks}" """,
        """f"rank{'s' if len(ranks) > 1 else ''} {shown}" """,
        """log.warning("the other ranks (%s) are absent", others)""",
    ],
)
def test_a_message_that_lists_ranks_in_its_own_way_is_found(text: str) -> None:
    assert list(_wrong_lists(text))
