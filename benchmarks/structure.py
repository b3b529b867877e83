"""The size of the code and the length of its journeys: files, lines, words, and calls.

    python benchmarks/structure.py                              this package
    PEER_PYTHON=/path/to/python python benchmarks/structure.py  and another environment's accelerate beside it
    python benchmarks/picture.py                                draws the packages and their imports

Code lines are lines with code on them: neither blank, nor only a comment, nor part of a docstring. The ways are run,
on one process: calls of functions that the package defines, and the files they lie in.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import importlib.util
import io
import json
import os
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SMALL_FILE_LINES = 40
BLOCK_LINES = 8  # so many equal lines of code in a row, in two places, are a duplicate
RIDDLES = ("What", "Nothing", "Every", "As", "None")
Function = (ast.FunctionDef, ast.AsyncFunctionDef)


# ------------------------------------------------------------------------------------------------------- reading


def package_folder() -> Path:
    """Return the folder of this interpreter's `accelerate`."""
    spec = importlib.util.find_spec("accelerate")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def docstring_lines(tree: ast.Module) -> set[int]:
    """Return the numbers of the lines with docstrings."""
    found: set[int] = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            value = body[0].value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                found.update(range(body[0].lineno, (body[0].end_lineno or body[0].lineno) + 1))
    return found


def code_lines(text: str, tree: ast.Module) -> list[int]:
    """Return the numbers of the lines with code."""
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    return sorted(lines - docstring_lines(tree))


def stub_text(path: Path) -> str:
    """Return the stub of a module, which lists names that are imported on first use; empty without one."""
    stub = path.with_suffix(".pyi")
    return stub.read_text(encoding="utf-8") if stub.exists() else ""


def stub_lines(path: Path) -> int:
    """Return the number of code lines in the stub of a module."""
    text = stub_text(path)
    return len(code_lines(text, ast.parse(text)))


def first_words(tree: ast.Module) -> Iterator[str]:
    """Yield the first word of every docstring."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, *Function)):
            text = ast.get_docstring(node)
            if text:
                yield text.split()[0].strip(".,:;")


def annotations(tree: ast.Module) -> Iterator[ast.expr | None]:
    """Yield the annotation of every parameter and result of a function, None where there is none."""
    for node in ast.walk(tree):
        if isinstance(node, Function):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            arguments += [one for one in (node.args.vararg, node.args.kwarg) if one is not None]
            yield from (one.annotation for one in arguments if one.arg not in ("self", "cls"))
            yield node.returns


def is_any(annotation: ast.expr) -> bool:
    """Return whether `Any` itself is anywhere in the annotation."""
    return any(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(annotation))


def duplicated_blocks(codes: dict[str, list[str]]) -> int:
    """Return the number of runs of lines that occur twice, apart from their indentation."""
    seen: dict[tuple[str, ...], tuple[str, int]] = {}
    found, last = 0, ("", -BLOCK_LINES)
    for name, lines in codes.items():
        for start in range(len(lines) - BLOCK_LINES + 1):
            block = tuple(lines[start : start + BLOCK_LINES])
            if sum(len(line) for line in block) < 20 * BLOCK_LINES:
                continue  # brackets and names of a table
            first = seen.setdefault(block, (name, start))
            if first != (name, start) and not (last[0] == name and start - last[1] < BLOCK_LINES):
                found, last = found + 1, (name, start)
    return found


def read(folder: Path) -> dict[str, Any]:
    """Return all statistics that need no execution."""
    sizes: dict[str, int] = {}
    by_package: dict[str, int] = collections.defaultdict(int)
    functions: list[tuple[int, str]] = []
    riddles = docstrings = annotated = annotated_any = parameters = 0
    codes: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("*.py")):
        name, text = path.relative_to(folder).as_posix(), path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        numbers = code_lines(text, tree)
        lines = text.splitlines()
        sizes[name] = len(numbers) + stub_lines(path)
        by_package[name.partition("/")[0] if "/" in name else "(top)"] += sizes[name]
        codes[name] = [lines[number - 1].strip() for number in numbers]
        words = list(first_words(tree))
        docstrings, riddles = docstrings + len(words), riddles + sum(word in RIDDLES for word in words)
        for annotation in annotations(tree):
            parameters += 1
            annotated += annotation is not None
            annotated_any += annotation is not None and is_any(annotation)
        counted = set(numbers)
        for node in ast.walk(tree):
            if isinstance(node, Function):
                length = sum(number in counted for number in range(node.lineno, (node.end_lineno or 0) + 1))
                functions.append((length, f"{name}:{node.name}"))
    longest = max(sizes.items(), key=lambda item: item[1])
    return {
        "files": len(sizes),
        "code lines": sum(sizes.values()),
        f"files under {SMALL_FILE_LINES} code lines": sum(0 < size < SMALL_FILE_LINES for size in sizes.values()),
        "files without code": sum(size == 0 for size in sizes.values()),
        "longest file": f"{longest[1]} {longest[0]}",
        "longest function": "{} {}".format(*max(functions)),
        "annotated": f"{annotated / parameters:.1%}",
        "annotations with Any": f"{annotated_any / max(1, annotated):.1%}",
        "docstrings": docstrings,
        "docstrings that begin with " + "/".join(RIDDLES): riddles,
        f"duplicated blocks of {BLOCK_LINES} lines": duplicated_blocks(codes),
        "packages": dict(sorted(by_package.items(), key=lambda item: -item[1])),
    }


# ------------------------------------------------------------------------------------------------------- walking


def walk(folder: Path, action: Callable[[], Any]) -> tuple[Any, int, list[str]]:
    """Return the result of `action()`, the number of calls of the package's functions, and their files."""
    own, calls, files = str(folder), 0, set[str]()

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(own) and frame.f_code.co_name != "<module>":
            calls += 1
            files.add(file[len(own) + 1 :])

    sys.setprofile(count)
    try:
        result = action()
    finally:
        sys.setprofile(None)
    return result, calls, sorted(files)


def ways(folder: Path) -> dict[str, tuple[int, list[str]]]:
    """Measure the journeys through the code, each after a first run, so that imports don't count."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    def run() -> dict[str, tuple[int, list[str]]]:
        found: dict[str, tuple[int, list[str]]] = {}

        def take(name: str, action: Callable[[], Any]) -> Any:
            result, calls, files = walk(folder, action)
            found[name] = (calls, files)
            return result

        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=4)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
        accelerator = take("Accelerator()", lambda: Accelerator(cpu=True))
        objects = take("prepare", lambda: accelerator.prepare(model, optimizer, loader, scheduler))
        model, optimizer, loader, scheduler = objects
        batches = iter(loader)
        first = take("first batch", lambda: next(batches))
        take("next batch", lambda: next(batches))

        def step() -> None:
            with accelerator.accumulate(model):
                loss = model(first[0]).mean()
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

        step()
        take("step", step)
        for _ in batches:
            pass
        with tempfile.TemporaryDirectory() as scratch:
            target = os.path.join(scratch, "checkpoint")
            take("save_state", lambda: accelerator.save_state(target))
            take("load_state", lambda: accelerator.load_state(target))
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        return found

    run()
    found = run()
    found["launch"] = launch_way(folder)
    return found


def launch_way(folder: Path) -> tuple[int, list[str]]:
    """Measure the journey from the command line to the start of the process, without the process itself."""
    from accelerate.commands import accelerate_cli

    def command() -> None:
        sys.argv = ["accelerate", "launch", "--cpu", "--num_processes", "1", script.name]
        with contextlib.suppress(SystemExit):
            accelerate_cli.main()

    def stop(*_: object) -> None:  # one process needs no supervisor: the command becomes it
        raise SystemExit

    os.execv = os.execve = os.execvpe = stop
    with tempfile.NamedTemporaryFile(suffix=".py") as script:  # a script that does nothing
        return walk(folder, command)[1:]


# ------------------------------------------------------------------------------------------------------- showing


def measure(with_ways: bool) -> dict[str, Any]:
    folder = package_folder()
    figures = read(folder)
    figures["ways"] = ways(folder) if with_ways else {}
    return figures


def show(tables: dict[str, dict[str, Any]], with_files: bool) -> None:
    names = list(tables)
    print(f"{'':58s}" + "".join(f"{name:>30s}" for name in names))
    for key, value in tables[names[0]].items():
        if not isinstance(value, dict):
            print(f"{key:58s}" + "".join(f"{str(tables[name][key])[-30:]:>30s}" for name in names))
    print("\ncalls (files)")
    for key in tables[names[0]]["ways"]:
        cells = [tables[name]["ways"].get(key, (0, [])) for name in names]
        print(f"  {key:56s}" + "".join(f"{f'{calls} ({len(files)})':>30s}" for calls, files in cells))
        if with_files:
            print("".join(f"      {file}\n" for file in cells[0][1]), end="")
    print("\ncode lines by package")
    for name in names:
        packages = ", ".join(f"{package} {lines}" for package, lines in tables[name]["packages"].items())
        print(f"  {name}: {packages}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--files", action="store_true", help="name the files on each way")
    parser.add_argument("--no-ways", action="store_true", help="only count, run nothing")
    arguments = parser.parse_args()
    own = measure(not arguments.no_ways)
    if arguments.json:
        print(json.dumps(own))
        return
    tables = {"this package": own}
    if peer := os.environ.get("PEER_PYTHON"):
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        output = subprocess.run(
            [peer, str(Path(__file__).resolve()), "--json"],
            env=environment, check=True, capture_output=True, text=True, cwd=tempfile.gettempdir(),
        ).stdout  # fmt: skip
        tables["peer"] = json.loads(output.splitlines()[-1])
    show(tables, arguments.files)


if __name__ == "__main__":
    main()
