"""The first difference between two runs, and the likely cause that is named."""

from __future__ import annotations

from typing import Any

import pytest

from accelerate.guests.reproduce.runs import compare, differences, explain

LAUNCH: dict[str, Any] = {
    "updates": 0,
    "code": {"files": {"/w/train.py": "a" * 64, "/w/net.py": "b" * 64}},
    "inputs": {"/w/data.csv": "c" * 64},
    "packages": {"numpy": "2.0.0", "torch": "2.13.0"},
    "variables": {"NCCL_ALGO": "Ring"},
    "machine": {"processor": "A", "threads": 1},
    "switches": {"deterministic": False},
    "seeds": {"torch_seed": "1", "python": "aa"},
    "data": [{"dataset": "TensorDataset", "samples": 48, "global_batch": 4}],
    "ranks": 2,
    "strategy": "MULTI_CPU",
    "precision": "no",
    "accumulation": 1,
}
CHANGES = [
    ("code", {"code": {"files": {"/w/train.py": "d" * 64, "/w/net.py": "b" * 64}}}, "train.py has changed"),
    ("code", {"code": {"files": {"/w/train.py": "a" * 64}}}, "net.py isn't used any more"),
    ("inputs", {"inputs": {"/w/data.csv": "e" * 64}}, "data.csv has changed"),
    ("packages", {"packages": {"numpy": "2.1.0", "torch": "2.13.0"}}, "numpy: 2.1.0 now, 2.0.0 in the run"),
    ("variables", {"variables": {}}, "NCCL_ALGO: none now, Ring in the run"),
    ("machine", {"machine": {"processor": "B", "threads": 1}}, "processor: B now, A in the run"),
    ("machine", {"machine": {"processor": "A", "threads": 2}}, "threads: 2 now, 1 in the run"),
    ("switches", {"switches": {"deterministic": True}}, "deterministic: True now"),
    ("seeds", {"seeds": {"torch_seed": "2", "python": "aa"}}, "torch_seed: 2 now, 1 in the run"),
    ("data", {"data": [{"dataset": "TensorDataset", "samples": 40, "global_batch": 4}]}, "samples: 40 now"),
    ("layout", {"ranks": 4}, "ranks: 4 now, 2 in the run"),
]


@pytest.mark.parametrize(("kind", "change", "text"), CHANGES)
def test_a_single_change_is_named_as_the_cause(kind: str, change: dict[str, Any], text: str) -> None:
    now = {**LAUNCH, **change}
    assert list(differences(LAUNCH, now)) == [kind]
    for update, facts in ((0, ["weights"]), (4, ["weights"]), (4, ["order", "batch", "weights"])):
        lines = explain(LAUNCH, now, update, facts)
        assert lines[0].startswith("Likely cause: ") and text in lines[1] and len(lines) == 2


def test_the_likely_cause_depends_on_what_differs_first() -> None:
    now = {**LAUNCH, **CHANGES[0][1], **CHANGES[2][1], **CHANGES[8][1], **CHANGES[3][1]}
    assert explain(LAUNCH, now, 0, ["weights"])[0] == "Likely cause: the seed."
    assert explain(LAUNCH, now, 8, ["weights"])[0] == "Likely cause: the code."
    assert explain(LAUNCH, now, 8, ["batch", "weights"])[0] == "Likely cause: a file that the command names."
    assert "Also different:" in explain(LAUNCH, now, 8, ["weights"])


def test_without_a_recorded_difference_the_kind_of_cause_is_named() -> None:
    assert "seed" in explain(LAUNCH, LAUNCH, 0, ["weights"])[0]
    assert "data set" in explain(LAUNCH, LAUNCH, 4, ["order", "weights"])[0]
    assert "deterministic" in explain(LAUNCH, LAUNCH, 4, ["weights"])[0]


def test_a_launch_from_a_checkpoint_is_compared_without_the_states_of_streams() -> None:
    now = {**LAUNCH, "updates": 12, "seeds": {"torch_seed": "1", "python": "bb"}}
    assert not differences(LAUNCH, now)
    assert "register_for_checkpointing" in explain(LAUNCH, now, 16, ["weights"])[0]


def test_the_number_of_threads_is_compared_however_it_was_set() -> None:
    now = {**LAUNCH, "variables": {**LAUNCH["variables"], "OMP_NUM_THREADS": "1"}}
    assert not differences(LAUNCH, now)
    assert list(differences(LAUNCH, {**now, "machine": {"processor": "A", "threads": 2}})) == ["machine"]


def test_points_of_both_runs_are_compared_in_order() -> None:
    one = {
        0: {"weights": "a"},
        1: {"weights": "b", "batch": "x"},
        2: {"weights": "c", "batch": "y"},
        4: {"weights": "d"},
    }
    assert compare(one, one, 0, 4).update is None and compare(one, one, 0, 4).equal == [0, 1, 2, 4]
    two = {**one, 2: {"weights": "c", "batch": "z"}, 4: {"weights": "e"}}
    found = compare(one, two, 0, 4)
    assert (found.update, found.facts, found.equal) == (2, ["batch"], [0, 1])
    assert compare(one, two, 0, 1).update is None
    short = {0: {"weights": "a"}, 1: {"weights": "b"}}
    assert compare(one, short, 0, 4).missing == [2, 4]
