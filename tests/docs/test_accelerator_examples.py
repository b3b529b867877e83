"""Each public method of the Accelerator has an example in its docstring, and the example runs."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.state import AcceleratorState
from tests.docs.pages import Block, blocks_of
from tests.ranks import run_on_ranks

SOURCE = Path(inspect.getfile(Accelerator))
#: What each example takes for granted, as docs/reference/accelerator.md says.
SETUP = (
    Path(__file__).with_name("prelude.py").read_text()
    + """
from accelerate import Accelerator

accelerator = Accelerator(project_dir=".")
inputs, targets = next(iter(loader))
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
loss = loss_function(model(inputs), targets)
"""
)


def methods() -> dict[str, Callable[..., object]]:
    found = {name: getattr(Accelerator, name) for name in vars(Accelerator) if not name.startswith("_")}
    return {name: value for name, value in found.items() if inspect.isfunction(value)}


def examples(method: Callable[..., object]) -> list[Block]:
    return [block for block in blocks_of(inspect.getdoc(method) or "", SOURCE) if block.language == "python"]


def run_examples(folder: str, names: list[str]) -> dict[str, str]:
    """What each of the methods' examples raised, by the method's name."""
    failures: dict[str, str] = {}
    for name in names:
        place = Path(folder, name)
        place.mkdir()
        os.chdir(place)
        AcceleratorState._reset_state(True)
        try:
            known: dict[str, Any] = {"__name__": "__main__"}
            exec(SETUP, known)
            for block in examples(methods()[name]):
                if block.reason is None:
                    exec(compile(block.code, f"example of Accelerator.{name}", "exec"), known)
        except Exception as error:  # a report of all is worth more than the first
            failures[name] = f"{type(error).__name__}: {error}"
    return failures


def test_every_method_has_an_example_or_a_reason_why_it_is_not_run() -> None:
    assert len(methods()) > 55
    missing = [name for name, method in methods().items() if not examples(method)]
    assert not missing
    idle = [name for name, method in methods().items() for block in examples(method) if block.reason is not None]
    assert idle == ["lomo_backward", "export_model"]
    for method in methods().values():
        for block in examples(method):
            compile(block.code, "example", "exec")


def test_the_examples_run(tmp_path: Path) -> None:
    assert run_on_ranks(lambda: run_examples(str(tmp_path), sorted(methods())), 1, timeout_seconds=100) == [{}]
