"""Break the source in random places, one at a time, and count how often the tests that execute the place fail.

    python -m tests.mutations --seed 27 --select src/accelerate/checkpointing --tests tests/unit/checkpointing

It needs the package `coverage`, which is no dependency of the project: install it into an environment beside. Nothing
in the checkout changes, because the tests run in a copy. Lines that only other processes execute (forked ranks,
launched programs) count as not executed.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ["checkpointing", "data_loader", "training", "parallel", "distributed", "settings"]
MAX_TESTS = 60
#: Tests whose place is broken may hang. The chosen ones take a fifth of this at most where nothing is broken.
LIMIT_SECONDS = 300
_PLUGIN = "mutations_plugin"
_DATA = "MUTATIONS_DATA"

_OPPOSITE: dict[type[ast.AST], type[ast.AST]] = {}
for _one, _other in (
    (ast.Eq, ast.NotEq),
    (ast.Lt, ast.GtE),
    (ast.LtE, ast.Gt),
    (ast.Is, ast.IsNot),
    (ast.In, ast.NotIn),
    (ast.And, ast.Or),
    (ast.Add, ast.Sub),
):
    _OPPOSITE |= {_one: _other, _other: _one}


@dataclass(frozen=True)
class Place:
    """A change to the source, named such that it is found again where its function moved to another file."""

    file: str
    line: int
    function: str
    statement: str
    kind: str
    index: int  # among the changes of this kind in this statement
    change: str

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.function.rpartition(".")[2], self.statement, self.kind, self.index

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}: {self.kind}: {self.change}"


@dataclass(frozen=True)
class Mutant:
    """A place of this checkout, the bytes to write there, and the tests that execute it."""

    place: Place
    begin: int
    end: int
    text: str
    tests: tuple[str, ...]


def functions(node: ast.AST, outer: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield each function with its qualified name."""
    for child in ast.iter_child_nodes(node):
        name = outer
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = f"{outer}.{child.name}".lstrip(".")
            if not isinstance(child, ast.ClassDef):
                yield name, child
        yield from functions(child, name)


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements of a function, without those of functions inside it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        if isinstance(child, ast.stmt):
            yield child
        if isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case)):
            yield from statements(child)


def expressions(node: ast.AST) -> Iterator[tuple[ast.AST, ast.expr]]:
    """Yield the expressions of a statement, each with its parent, without annotations and the statements inside."""
    for child in ast.iter_child_nodes(node):
        # Python 3.11 doesn't know the columns of what an f-string holds.
        is_left_out = isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case, ast.JoinedStr))
        if is_left_out or child is getattr(node, "annotation", None):
            continue
        if isinstance(child, ast.expr):
            yield node, child
        yield from expressions(child)


def _with(node: ast.AST, **fields: Any) -> Any:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def changes(parent: ast.AST, node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Yield what may stand in place of an expression, each with the kind of the change."""
    is_condition = getattr(parent, "test", None) is node or node in getattr(parent, "ifs", [])
    is_negated = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    if is_condition and not is_negated and not (isinstance(node, ast.Compare) and len(node.ops) == 1):
        yield "condition negated", ast.UnaryOp(ast.Not(), node)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "`not` removed", node.operand
    elif isinstance(node, ast.Compare):
        yield "comparison flipped", _with(node, ops=[_OPPOSITE[type(node.ops[0])](), *node.ops[1:]])
    elif isinstance(node, ast.BoolOp):
        yield "and/or swapped", _with(node, op=_OPPOSITE[type(node.op)]())
    elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
        if not _is_text(node.left) and not _is_text(node.right):
            yield "+/- swapped", _with(node, op=_OPPOSITE[type(node.op)]())
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield "constant changed", ast.Constant(node.value + 1)
        yield "constant changed", ast.Constant(node.value - 1)
    elif isinstance(node, ast.Call):
        for keyword in node.keywords:  # without a positional one, most calls fail in any test
            if keyword.arg is not None:
                kept = [other for other in node.keywords if other is not keyword]
                yield "argument dropped", _with(node, keywords=kept)


def _header(statement: ast.stmt) -> str:
    if hasattr(statement, "body"):
        parts = [child for child in ast.iter_child_nodes(statement) if isinstance(child, (ast.expr, ast.withitem))]
        return f"{type(statement).__name__} {', '.join(map(ast.unparse, parts))}"
    return ast.unparse(statement)


def _early_return(function: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.stmt | None:
    """The statement before which ``return None`` changes the function; None where there is none."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    first = body[0] if body else None
    if first is None or isinstance(first, (ast.Pass, ast.Raise)) or first.lineno == function.lineno:
        return None
    if getattr(first, "decorator_list", None):  # it begins above its line
        return None
    return None if ast.unparse(first) in ("return", "return None", "...") else first


def mutants(root: Path, file: str, tests_of: dict[int, list[str]]) -> Iterator[Mutant]:
    """Yield each change that can be made to the functions of a file."""
    source = (root / file).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def at(line: int, column: int) -> int:
        return starts[line - 1] + column

    for name, function in functions(ast.parse(source)):
        first = _early_return(function)
        if first is not None:
            begin = at(first.lineno, first.col_offset)
            place = Place(file, first.lineno, name, f"def {function.name}", "early return", 0, "return None")
            text = f"return None\n{' ' * first.col_offset}"
            yield Mutant(place, begin, begin, text, tuple(tests_of.get(first.lineno, ())))
        for statement in statements(function):
            counts: dict[str, int] = {}
            for parent, node in expressions(statement):
                for kind, changed in changes(parent, node):
                    index = counts[kind] = counts.get(kind, -1) + 1
                    change = f"{ast.unparse(node)} -> {ast.unparse(changed)}"
                    place = Place(file, node.lineno, name, _header(statement), kind, index, change)
                    tests = tests_of.get(node.lineno) or tests_of.get(statement.lineno) or ()
                    end = at(node.end_lineno or 0, node.end_col_offset or 0)
                    text = f"({ast.unparse(changed)})"
                    yield Mutant(place, at(node.lineno, node.col_offset), end, text, tuple(tests))


# The plugin of pytest: this file, loaded in the copy under the name `_PLUGIN` by `record`.


class _Recorder:
    """Record which test executes which lines, whether it passes, and its seconds."""

    def __init__(self, folder: Path, root: Path) -> None:
        import coverage  # pyright: ignore[reportMissingImports]

        self.folder = folder
        self.outcomes: dict[str, dict[str, Any]] = {}
        self.coverage = coverage.Coverage(
            data_file=str(folder / "lines"), include=[f"{root}/src/*"], config_file=False, messages=False
        )
        self.coverage.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.coverage.switch_context(nodeid)

    def pytest_runtest_logfinish(self) -> None:
        self.coverage.switch_context("")

    def pytest_runtest_logreport(self, report: Any) -> None:
        outcome = self.outcomes.setdefault(report.nodeid, {"passed": True, "seconds": 0.0})
        outcome["passed"] = outcome["passed"] and report.outcome == "passed"
        outcome["seconds"] += report.duration

    def pytest_sessionfinish(self) -> None:
        self.coverage.stop()
        self.coverage.save()
        (self.folder / "outcomes.json").write_text(json.dumps(self.outcomes), encoding="utf-8")


def pytest_configure(config: Any) -> None:
    """Record the lines of each test where `record` asked for it."""
    if _DATA in os.environ and __name__ == _PLUGIN:
        config.pluginmanager.register(_Recorder(Path(os.environ[_DATA]), Path(config.rootpath)))


def run_pytest(root: Path, arguments: list[str], limit_seconds: float, **variables: str) -> tuple[int | None, str]:
    """Run pytest on a copy in a forked process; return its exit status, None past the time limit, and its output.

    This process has imported torch, which takes longer than most tests.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        child = os.fork()
        if not child:
            _become_pytest(root, arguments, output.fileno(), variables)
        end = time.monotonic() + limit_seconds
        ended, status = os.waitpid(child, os.WNOHANG)
        while not ended and time.monotonic() < end:
            time.sleep(0.1)
            ended, status = os.waitpid(child, os.WNOHANG)
        if not ended:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
        output.seek(0)
        return os.waitstatus_to_exitcode(status) if ended else None, output.read()


def _become_pytest(root: Path, arguments: list[str], output: int, variables: dict[str, str]) -> NoReturn:
    status = 1
    try:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(root)
        path = [str(root / "src"), str(root / ".mutations")]
        os.environ.update(variables, PYTHONPATH=os.pathsep.join(path))
        # Without this checkout, from which `python -m` imported this program.
        sys.path[:] = [*path, *(entry for entry in sys.path if Path(entry).resolve() not in (ROOT, ROOT / "src"))]
        for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "accelerate")]:
            del sys.modules[name]
        status = pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments])
        sys.stdout.flush()
    finally:
        os._exit(status)


def record(root: Path, tests: list[str]) -> None:
    """Run the tests once, and leave the lines and outcomes of each in the copy's `.mutations`."""
    folder = root / ".mutations"
    folder.mkdir(exist_ok=True)
    shutil.copy(__file__, folder / f"{_PLUGIN}.py")
    _, output = run_pytest(root, ["-p", _PLUGIN, *tests], LIMIT_SECONDS * 60, **{_DATA: str(folder)})
    (folder / "output.txt").write_text(output, encoding="utf-8")
    print(output.strip().rpartition("\n")[2], flush=True)


class Lines:
    """The tests that execute a line, of those that pass."""

    def __init__(self, root: Path) -> None:
        import coverage  # pyright: ignore[reportMissingImports]

        folder = root / ".mutations"
        self.root = root
        self.data = coverage.CoverageData(str(folder / "lines"))
        self.data.read()
        outcomes = json.loads((folder / "outcomes.json").read_text(encoding="utf-8"))
        self.seconds = {test: outcome["seconds"] for test, outcome in outcomes.items() if outcome["passed"]}
        self.num_lines = dict.fromkeys(self.seconds, 0)
        for file in self.data.measured_files():
            for tests in self.data.contexts_by_lineno(file).values():
                for test in self.num_lines.keys() & set(tests):
                    self.num_lines[test] += 1

    def of(self, file: str) -> dict[int, list[str]]:
        found = self.data.contexts_by_lineno(str(self.root / file))
        return {line: [test for test in tests if test in self.seconds] for line, tests in found.items()}

    def chosen(self, tests: tuple[str, ...]) -> list[str]:
        """At most `MAX_TESTS`, with one of each test function first.

        Tests that execute fewer lines precede, since these are about this place.
        """
        turns: Counter[str] = Counter()
        ranked: list[tuple[int, int, str]] = []
        for num_lines, test in sorted((self.num_lines[test], test) for test in tests):
            function = test.partition("[")[0]
            ranked.append((turns[function], num_lines, test))
            turns[function] += 1
        chosen, seconds = [], 0.0
        for _, _, test in sorted(ranked):
            if len(chosen) < MAX_TESTS and seconds + self.seconds[test] <= LIMIT_SECONDS / 5:
                chosen.append(test)
                seconds += self.seconds[test]
        return chosen


def choose(found: list[Mutant], wanted: list[Place], count: int, seed: int) -> list[tuple[Mutant, str]]:
    """Choose mutants: those of the wanted places that are here, then others; each with how it was chosen.

    A wanted place is the same statement of a function of the same name, else another of the same function. The rest are
    drawn by line, one for each function.
    """
    generator = random.Random(seed)
    lines: dict[tuple[str, int], list[Mutant]] = {}
    by_key: dict[tuple[str, str, str, int], list[Mutant]] = {}
    for mutant in found:
        by_key.setdefault(mutant.place.key, []).append(mutant)
        if mutant.tests:
            lines.setdefault((mutant.place.file, mutant.place.line), []).append(mutant)

    def drawn(among: list[Mutant]) -> Mutant:
        kind = generator.choice(sorted({mutant.place.kind for mutant in among}))
        return generator.choice([mutant for mutant in among if mutant.place.kind == kind])

    chosen: list[tuple[Mutant, str]] = []
    for place in wanted[:count]:

        def differs(mutant: Mutant, place: Place = place) -> tuple[bool, bool]:
            here = mutant.place
            return here.function != place.function, Path(here.file).name != Path(place.file).name

        same = sorted(by_key.get(place.key, []), key=differs)
        if same:
            chosen.append((same[0], "same statement"))
            continue
        of_function = [m for m in found if m.tests and m.place.function == place.function]
        of_function = [m for m in of_function if not differs(m)[1]] or of_function
        if len({m.place.file for m in of_function}) == 1:
            of_kind = [m for m in of_function if m.place.kind == place.kind]
            chosen.append((drawn(of_kind or of_function), "same function"))
    used = {(mutant.place.file, mutant.place.function) for mutant, _ in chosen}
    order = sorted(lines)
    generator.shuffle(order)
    for line in order:
        mutant = drawn(lines[line])
        function = (mutant.place.file, mutant.place.function)
        if len(chosen) < count and function not in used:
            used.add(function)
            chosen.append((mutant, "drawn"))
    return chosen


def verdict(root: Path, mutant: Mutant, tests: list[str]) -> tuple[bool, str]:
    """Run the tests on one mutant; return whether one noticed, and which."""
    if not tests:
        return False, "no test executes it"
    file = root / mutant.place.file
    source = file.read_bytes()
    try:
        file.write_bytes(source[: mutant.begin] + mutant.text.encode() + source[mutant.end :])
        status, output = run_pytest(root, ["-x", "-rfE", *tests], LIMIT_SECONDS)
    finally:
        file.write_bytes(source)
    if status == 0:
        return False, f"{len(tests)} tests"
    failed = [test for test in failures(output) if test in tests]
    return True, failed[0] if failed else f"exit status {status}" if status else "the time limit"


def failures(output: str) -> list[str]:
    """The tests of pytest's output that failed, or couldn't be set up."""
    return re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)


def main() -> int:
    """Break, test, and end with a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout")
    parser.add_argument("--places", type=Path, help="places in JSON: broken again if the file exists, else written")
    parser.add_argument(
        "--select",
        nargs="+",
        default=[f"src/accelerate/{name}" for name in FOLDERS],
        help="source files or folders to break",
    )
    parser.add_argument("--tests", nargs="+", default=["tests/unit", "tests/contract"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--copy", type=Path, help="keep the copy and what its tests execute here, for the next time")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # torch reads it when it is imported
    import torch._dynamo
    import torch.distributed.fsdp  # noqa: F401

    with tempfile.TemporaryDirectory() as temporary:
        root = (options.copy or Path(temporary) / "copy").resolve()
        if not (root / ".mutations" / "outcomes.json").exists():
            left_out = shutil.ignore_patterns(".*", "__pycache__")
            shutil.copytree(options.root, root, ignore=left_out, symlinks=True, dirs_exist_ok=True)
            record(root, options.tests)
        lines = Lines(root)
        files = [path for part in options.select for path in [root / part, *sorted((root / part).rglob("*.py"))]]
        names = [path.relative_to(root).as_posix() for path in files if path.is_file()]
        found = [mutant for name in names for mutant in mutants(root, name, lines.of(name))]
        wanted: list[Place] = []
        if options.places and options.places.exists():
            wanted = [Place(**place) for place in json.loads(options.places.read_text(encoding="utf-8"))]
        chosen = choose(found, wanted, options.count, options.seed)
        if options.places and not wanted:
            text = json.dumps([asdict(mutant.place) for mutant, _ in chosen], indent=1)
            options.places.write_text(text, encoding="utf-8")
        verdicts = []
        for number, (mutant, _) in enumerate(chosen, 1):
            begin = time.monotonic()
            is_noticed, by = verdict(root, mutant, lines.chosen(mutant.tests))
            verdicts.append((is_noticed, by))
            word = "noticed" if is_noticed else "survived"
            print(f"{number} {word} ({by}, {time.monotonic() - begin:.0f} s): {mutant.place}", flush=True)
        noticed_by = sorted({by for is_noticed, by in verdicts if is_noticed and by in lines.seconds})
        unsure = failures(run_pytest(root, ["-rfE", *noticed_by], LIMIT_SECONDS * 60)[1]) if noticed_by else []
    print("\n| | place | chosen | verdict | by |\n|---|---|---|---|---|")
    for number, ((mutant, how), (is_noticed, by)) in enumerate(zip(chosen, verdicts, strict=True), 1):
        word = "unsure" if by in unsure else "noticed" if is_noticed else "survived"
        print(f"| {number} | {mutant.place} | {how} | {word} | {by} |")
    num_noticed = sum(is_noticed and by not in unsure for is_noticed, by in verdicts)
    print(f"\n{num_noticed} of {len(chosen)} noticed")
    if unsure:
        print(f"Unsure, because these tests fail without the change too: {', '.join(unsure)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
