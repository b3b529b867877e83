"""Warnings about old spellings."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import ModuleType

import pytest

from accelerate import Accelerator


def shown(calls: list[str], path: str, times: int = 1) -> list[warnings.WarningMessage]:
    """The warnings of a program that makes these calls, one a line, ``times`` over."""
    code = compile("\n".join(calls), path, "exec")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            exec(code, {"__name__": "program", "Accelerator": Accelerator})
    return caught


def test_an_old_spelling_is_named_with_what_to_write_and_nothing_else_is(tmp_path: Path) -> None:
    path = str(tmp_path / "train.py")
    [first, second] = shown(["Accelerator(cpu=True, fp16=False)", "Accelerator(split_batches=True)"], path)
    assert str(first.message) == "Accelerator(fp16=) is an old spelling. Use mixed_precision='fp16'."
    assert "split_batches=True" not in str(first.message)
    assert str(second.message) == (
        "Accelerator(split_batches=) is an old spelling. "
        "Use dataloader_config=DataLoaderConfiguration(split_batches=...)."
    )
    assert [(warning.filename, warning.lineno) for warning in (first, second)] == [(path, 1), (path, 2)]


def test_each_place_of_the_users_code_is_warned_of_once(tmp_path: Path) -> None:
    path = str(tmp_path / "train.py")
    calls = ["Accelerator(cpu=True, fp16=False)"] * 2
    assert [warning.lineno for warning in shown(calls, path, times=3)] == [1, 2]
    assert shown(calls, path) == []


def test_code_that_the_user_cannot_edit_is_warned_of_once_in_all(tmp_path: Path) -> None:
    folder = tmp_path / "lib" / "python3.11" / "site-packages"
    calls = ["Accelerator(cpu=True, logging_dir='logs', fp16=False)"] * 2
    assert len(shown(calls, str(folder / "one.py"), times=2)) == 1
    assert shown(calls, str(folder / "other.py")) == []


def test_the_warning_obeys_the_filters(tmp_path: Path) -> None:
    program = ModuleType("program")
    code = compile("Accelerator(cpu=True, fp16=False)", str(tmp_path / "train.py"), "exec")
    with warnings.catch_warnings(), pytest.raises(FutureWarning, match="old spelling"):
        warnings.simplefilter("error")
        exec(code, {**vars(program), "Accelerator": Accelerator})
