"""`notebook_launcher` where it is called: cells typed into IPython, and a real Jupyter kernel."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.python_path import python_path
from tests.slow import slow_for

pytest.importorskip("IPython")
nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).resolve().parents[2]

IMPORTS = """
import torch
from accelerate import Accelerator, notebook_launcher
base = 10
class Answer:
    def __init__(self, value): self.value = value
"""
TRAIN = """
def train(x):
    accelerator = Accelerator(cpu=True)
    print(f"rank {accelerator.process_index} says hello")
    total = accelerator.gather(torch.tensor([accelerator.process_index + x + base])).tolist()
    return total, Answer(accelerator.process_index)
"""
SHOW = """
print("results", [total for total, _ in results], [answer.value for _, answer in results])
print("types", all(type(answer) is Answer for _, answer in results))
"""
FAIL = """
def fail():
    accelerator = Accelerator(cpu=True)
    if accelerator.process_index == 1:
        raise KeyError(f"sample {base}")
    accelerator.wait_for_everyone()
notebook_launcher(fail, num_processes=2, use_port=0)
"""


def run(x: int) -> str:
    return f"results = notebook_launcher(train, ({x},), num_processes=2, use_port=0)" + SHOW


@slow_for("as a kernel below, once more")
def test_cells_of_ipython_close_over_each_other_return_results_and_show_the_cause(tmp_path: Path) -> None:
    program = tmp_path / "cells.py"
    program.write_text(
        f"""
import json, sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in {[IMPORTS, TRAIN + run(5)]!r}:
    shell.run_cell(cell).raise_error()
error = shell.run_cell({FAIL!r}).error_in_exec
print("ERROR", json.dumps([type(error).__name__, str(error)]))
"""
    )
    done = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, timeout=60, cwd=tmp_path, env=_environment(tmp_path)
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    # Two ranks that write at once may share a line.
    assert all(text in done.stdout for text in ("rank 0 says hello", "rank 1 says hello", "types True"))
    assert "results [[15, 16], [15, 16]] [0, 1]" in lines
    kind, text = json.loads(next(line for line in lines if line.startswith("ERROR"))[len("ERROR ") :])
    _assert_names_the_cause(kind, text)


def _assert_names_the_cause(kind: str, text: str) -> None:
    assert kind == "LaunchError"
    assert text.startswith("First cause: rank 1 of 2")
    assert ", in fail" in text
    assert 'raise KeyError(f"sample {base}")' in text
    assert "KeyError: 'sample 10'" in text


def _environment(folder: Path) -> dict[str, str]:
    """A new interpreter finds this source and writes its configuration into ``folder``."""
    path = os.pathsep.join([python_path(), *filter(None, [os.environ.get("PYTHONPATH")])])
    settings = {f"{name}_DIR": str(folder / name) for name in ("IPYTHON", "JUPYTER_CONFIG", "JUPYTER_DATA")}
    return {**os.environ, **settings, "IPYTHONDIR": str(folder / "IPYTHON"), "PYTHONPATH": path, "HOME": str(folder)}


BARS = """
import tqdm.notebook
from IPython.display import HTML, display
class Widgets(tqdm.notebook.tqdm_notebook): pass
def train_with_bar():
    accelerator = Accelerator(cpu=True)
    for _ in Widgets(range(3), disable=accelerator.process_index == 1): pass
    if accelerator.process_index == 0: display(HTML("<b>bold</b>"))
notebook_launcher(train_with_bar, num_processes=2, use_port=0)
"""
INTERRUPT = """
import os, signal, threading, time
def sleep():
    print("asleep", flush=True)
    time.sleep(60)
threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
notebook_launcher(sleep, num_processes=2, use_port=0)
"""
INITIALISED = "torch.cuda.is_initialized = lambda: True\n"
CELLS = {
    "imports": IMPORTS,
    "first": TRAIN + run(5),
    "second": "base = 20\n" + run(5) + "base = 10",
    "alone": "print(notebook_launcher(train, (5,), num_processes=1)[0])",
    "after alone": run(5),
    "failing": FAIL,
    "after a failure": run(6),
    "bar": BARS,
    "interrupted": INTERRUPT,
    "initialised": INITIALISED + "import os\nkernel = os.getpid()\n" + run(7),
    "initialised, failing": FAIL,
    "initialised, restarts": run(8).replace("use_port=0", "rdzv_backend='c10d', rdzv_endpoint='127.0.0.1:0'"),
    "not to be packed": "import threading\nlock = threading.Lock()\n"
    "notebook_launcher(lambda: lock.locked(), num_processes=2, use_port=0)",
    "existing after one": "notebook_launcher(train, (5,), num_processes=1)\naccelerator = Accelerator(cpu=True)\n"
    + run(9),
    "existing state": "torch.cuda.is_initialized = lambda: False\naccelerator = Accelerator(cpu=True)\n" + run(9),
}


class Cell:
    """What a reader of the notebook sees under a cell."""

    def __init__(self, outputs: list[Any]) -> None:
        errors = [output for output in outputs if output.output_type == "error"]
        self.error: tuple[str, str] | None = (errors[0].ename, errors[0].evalue) if errors else None
        self.stdout, self.stderr = (
            "".join(output.text for output in outputs if output.get("name") == name) for name in ("stdout", "stderr")
        )


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Cell]]:
    """The cells of one notebook, after a kernel has run them all."""
    folder = tmp_path_factory.mktemp("notebook")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS.values()])
    client = nbclient.NotebookClient(
        notebook, timeout=60, kernel_name="python3", allow_errors=True, resources={"metadata": {"path": str(folder)}}
    )
    client.execute(env=_environment(folder))
    yield {name: Cell(cell.outputs) for name, cell in zip(CELLS, notebook.cells, strict=True)}


def assert_ran(cell: Cell, results: str) -> None:
    assert cell.error is None, cell.error
    assert "Launching training on 2 CPU processes." in cell.stdout
    assert "rank 0 says hello\n" in cell.stdout
    assert "rank 1 says hello\n" in cell.stdout
    assert f"results {results} [0, 1]\ntypes True" in cell.stdout


def test_a_cell_shows_what_its_ranks_print_and_gets_their_results(cells: dict[str, Cell]) -> None:
    assert_ran(cells["first"], "[[15, 16], [15, 16]]")


def test_a_second_launch_sees_what_cells_have_changed_since(cells: dict[str, Cell]) -> None:
    assert_ran(cells["second"], "[[25, 26], [25, 26]]")


def test_a_failing_rank_is_shown_with_its_cause_and_the_next_launch_works(cells: dict[str, Cell]) -> None:
    failing = cells["failing"]
    assert failing.error is not None
    _assert_names_the_cause(*failing.error)
    assert "KeyError: 'sample 10'" in failing.stderr
    assert_ran(cells["after a failure"], "[[16, 17], [16, 17]]")


def test_bars_made_of_widgets_and_displayed_objects_become_text(cells: dict[str, Cell]) -> None:
    cell = cells["bar"]
    assert cell.error is None, cell.error
    assert re.search(r"100%\|█+\| 3/3", cell.stderr)
    assert "<IPython.core.display.HTML object>" in cell.stdout


def test_interrupting_the_kernel_ends_the_ranks_and_the_cell(cells: dict[str, Cell]) -> None:
    cell = cells["interrupted"]
    assert cell.stdout.count("asleep") == 2
    assert cell.error is not None
    assert cell.error[0] == "KeyboardInterrupt"


def test_with_an_initialised_device_fresh_processes_run_the_function(cells: dict[str, Cell]) -> None:
    assert_ran(cells["initialised"], "[[17, 18], [17, 18]]")


def test_a_failure_in_a_fresh_process_shows_the_line_of_the_cell(cells: dict[str, Cell]) -> None:
    failing = cells["initialised, failing"]
    assert failing.error is not None
    _assert_names_the_cause(*failing.error)


def test_with_an_initialised_device_the_elastic_agent_gets_the_function_by_value(cells: dict[str, Cell]) -> None:
    cell = cells["initialised, restarts"]
    assert cell.error is None, cell.error
    assert "results [[18, 19], [18, 19]] [0, 1]\ntypes True" in cell.stdout


def test_what_cant_be_pickled_for_fresh_processes_is_refused_with_the_way_out(cells: dict[str, Cell]) -> None:
    kind, text = cells["not to be packed"].error or ("", "")
    assert kind == "LaunchError"
    assert "can't be pickled for fresh processes" in text
    assert "inside the function" in text


def test_a_launch_of_one_process_does_not_forbid_a_later_one_of_several(cells: dict[str, Cell]) -> None:
    assert "[15]" in cells["alone"].stdout
    assert "results [[15, 16], [15, 16]] [0, 1]" in cells["after alone"].stdout


@pytest.mark.parametrize("cell", ["existing state", "existing after one"])
def test_a_launch_after_an_accelerator_was_created_in_a_cell_is_refused(cells: dict[str, Cell], cell: str) -> None:
    kind, text = cells[cell].error or ("", "")
    assert kind == "SettingError"  # a ValueError
    assert "already created in this process" in text
    assert "restart the notebook's kernel" in text
