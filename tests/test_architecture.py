"""The rules of the house, held by reading the source (nothing of the package is imported here).

Each rule is one test, and each finding one line `file:line what`. An exception to a rule is an entry in a
table of this file, with its reason; a change of a rule is a decision record in docs/decisions/ in the same
commit.
"""

from __future__ import annotations

import ast
import functools
import gc
import importlib
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from benchmarks import structure

ROOT: Final = Path(__file__).resolve().parent.parent
SOURCE: Final = ROOT / "src"
PACKAGE: Final = SOURCE / "accelerate"

# -------------------------------------------------------------------------------------------- the plan

PLAN: Final = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
#: By package or module the number of its layer, as the plan of record says.
FLOORS: Final[dict[str, int]] = {
    room: int(number)
    for number, rooms in re.findall(r"^\| (\d) [^|]*\| ([^|]*) \|$", PLAN, re.MULTILINE)
    for room in re.findall(r"`(\w+)`", rooms)
}
DOOR: Final = 7
GUESTS: Final = "guests"
TOWER: Final = ("launch", "commands")

# Rooms that may look at a neighbour on their own floor. Inside one room every file may (without a circle).
NEIGHBOURS: Final[dict[str, tuple[str, ...]]] = {
    # foundation
    "nested": ("errors", "versions", "optional"),
    "optional": ("errors", "versions"),
    "versions": ("errors",),
    "torch_private": ("errors",),
    "seams": ("errors",),
    # a device, then the processes, then what is built on talking
    "distributed": ("devices",),
    "plugins": ("distributed", "devices"),
    "logging": ("distributed",),
    "progress": ("distributed",),
    # parts of training
    "training": ("checkpointing",),
    "data_loader": ("training",),
    "big_models": ("checkpointing",),
    "hooks": ("big_models",),
    # the Accelerator
    "accelerator": ("state", "construction"),
    "quantize": ("big_modeling",),
    "test_utils": ("accelerator", "state", "big_modeling", "inference"),
    # public addresses: importing is what they are for
    "accelerate": ("utils", "launchers", "parallelism_config"),
    "utils": ("launchers", "parallelism_config"),
    "memory_utils": ("utils",),
}

# Modules of parallel/ that other kinds of parallelism may import; a folder's own files see each other.
SHARED_STRATEGY_FILES: Final = frozenset(
    {
        "base", "ddp", "rebind", "compile", "tensor_parallel", "context_parallel", "expert_parallel", "gradient_norm",
        "sharded_strategy", "matrix_optimizer", "layout", "replicas",
        "fsdp.setup", "fsdp.wrapping", "fsdp.state", "gradients", "state",
    }
)  # fmt: skip

# Without torch at import, also through what they import.
TORCH_FREE: Final = (
    "errors", "optional", "versions", "names", "cores", "settings", "devices.table", "distributed.environment",
    "distributed.failures", "guests.scripts.migrate", "guests.monitor", *TOWER,
)  # fmt: skip
#: Files among them that only ranks import.
OF_RANKS: Final = ("guests.monitor.run_monitor", "guests.monitor.loop_watch", "guests.monitor.throughput")

#: Modules that take a tenth of a second or more (torch's sharding brings sympy).
HEAVY_IMPORTS: Final = (
    "torch.distributed.algorithms", "torch.distributed.checkpoint", "torch.distributed.fsdp",
    "torch.distributed.pipelining", "torch.distributed.tensor", "torch._dynamo", "torch._subclasses",
    "sympy", "transformers", "numpy.random",
)  # fmt: skip
#: Files that import them at module level, or import such a file: they are themselves imported when they are needed.
#: Everything else is imported by `from accelerate import Accelerator` or a name of `accelerate.utils`, and has to wait.
HEAVY_FILES: Final = frozenset(
    [
        "estimate.py",
        "guests/adopted/strategy.py",
        "guests/batch_parts/replicas.py",
        "guests/batch_parts/sharded.py",
        "guests/checks/",
        "guests/estimate/",
        "guests/fault_tolerance/sharded_strategy.py",
        "guests/pretend/",
        "inference.py",
        "parallel/expert_parallel.py",
        "parallel/fsdp/fsdp1.py",
        "parallel/fsdp/fsdp2.py",
        "parallel/fsdp/setup.py",
        "parallel/fsdp/state.py",
        "parallel/gradient_norm.py",
        "parallel/matrix_optimizer.py",
        "parallel/layout.py",
        "parallel/pipeline/schedule.py",
        "parallel/pipeline/state.py",
        "parallel/pipeline/strategy.py",
        "parallel/replicas.py",
        "parallel/sharded_strategy.py",
        "parallel/tensor_parallel.py",
        "training/averaging.py",
    ]
)

# launch/, and the launchers of guests: the environments of children.
ENVIRONMENT_FILES: Final = (
    "settings/env.py",
    "launch/",
    "guests/clusters/ray.py",
    "guests/deepspeed/encoded_command.py",
)

VENDOR_WORDS: Final = frozenset(
    {"cuda", "mps", "xpu", "npu", "mlu", "sdaa", "musa", "hpu", "neuron", "xla", "tpu"}
)  # fmt: skip
VENDOR_FILES: Final = (
    "devices/table.py",
    "devices/hardware.py",  # the questions that the table answers, under their old names
    # names that are data here:
    "settings/", "launch/", "guests/xla/", "commands/config", "guests/scripts/migrate/", "utils/", "optional.py", "test_utils/",
    "guests/scripts/doctor/", "guests/scripts/verify/surroundings.py",  # the devices that a script names
)  # fmt: skip

STATE_FILES: Final = ("state.py", "test_utils/")

OLD_ADDRESSES: Final = (
    "local_sgd.py",
    "__init__.py", "utils/", "launchers.py", "parallelism_config.py", "memory_utils.py",
    "optimizer.py", "scheduler.py", "offload.py", "mesh.py", "estimate.py",
    "commands/config_args.py", "commands/utils.py", "commands/menu.py", "commands/config/config.py",
    "commands/config/cluster.py", "commands/config/sagemaker.py", "commands/config/config_utils.py",
)  # fmt: skip

#: Addresses of guests' commands, which import them when they are first used: the launcher is free of torch.
COMMANDS_OF_GUESTS: Final = ("commands/estimate.py", "commands/tpu.py")

PICKLE_FILE: Final = "checkpointing/codec.py"
#: Reads with `weights_only=True`, which runs nothing.
WEIGHTS_FILE: Final = "guests/fault_tolerance/membership.py"

CORES_FILE: Final = "cores.py"
THREAD_FILES: Final = ("distributed/world.py", "launch/fork.py")

# The room that speaks of what torch doesn't promise, and the three tables of a module, which are exchanged in place.
TORCH_PRIVATE: Final = "torch_private/"
MODULE_TABLES: Final = frozenset({"_parameters", "_buffers", "_modules"})

# Private names of other libraries than torch: name -> whose it is.
FOREIGN_PRIVATE: Final[dict[str, str]] = {
    "_XLAC": "torch_xla, whose version `make xla` pins",
    "_xla_get_spmd_config_is_locked": "torch_xla",
    "_get_xla_sharding_spec": "torch_xla",
    "_get_device_type": "habana_frameworks",
    "_consolidated_16bit_state_dict": "deepspeed",
    "_release_sequence_parallel_groups": "deepspeed",
    "_is_fp8": "transformer_engine",
    "_new_buffer": "torchao: makes the state of its optimizers",
    "_subclass_zeros": "torchao: makes state in few bits",
    "_no_split_modules": "transformers: what its models say of themselves",
    "_tie_weights": "transformers",
    "_normal_accessor": "pathlib of Python 3.10: holds functions of os",
    "_tp_plan": "transformers",
    "_attn_implementation": "transformers",
    "_distributed": "datasets",
    "_core": "numpy",
    "_reconstruct": "numpy: what the pickles of its arrays name",
    "_actions": "argparse",
    "_option_string_actions": "argparse",
    "_patch": "unittest.mock",
    "_current_frames": "sys, documented",
    "_getframe": "sys, documented",
    "_exit": "os, documented",
    "_fields": "named tuples, documented",
    "_replace": "named tuples, documented",
}

# Words that once stood in names -> those to write. What they meant, only their authors knew.
NO_NAMES: Final = {
    "knock": "join request",
    "knocks": "join request",
    "courier": "request thread, store client",
    "errand": "request",
    "errands": "request",
    "seat": "process identity",
    "dealt": "sharded, assigned",
    "timetable": "schedule",
    "feeder": "prepared loader",
    "parcel": "encoded command",
    "guardian": "reaper",
    "outbox": "background queue",
    "letter": "item",
    "desk": "token dispatch",
    "tower": "launch, commands",
    "cellar": "foundation",
    "whereabouts": "location",
    "witness": "fingerprint",
    "timetables": "schedules",
}
RIDDLES: Final = ("What ", "Nothing ", "Every ", "As ", "None ")

CLAUSES: Final = re.compile(r"\b(?:what|which|(?<!on )that|whose)\b", re.IGNORECASE)
#: Their words are the library's of the same name.
PEERS_QUESTIONS: Final = (
    "What is the IP address of the machine that will host the main process?",
    "What is the name of the function in your script that every process should run?",
)

FILE_LIMIT: Final = 500
#: The Accelerator's file is its public interface: half of its lines are signatures.
FILE_LIMITS: Final = {"accelerator.py": 1095}
MEDIAN_LIMIT: Final = 140
FUNCTION_LIMIT: Final = 60
#: Constructors and functions whose documented arguments alone are half of that.
FUNCTION_LIMITS: Final = {("accelerator.py", "__init__"): 90, ("data_loader/prepare.py", "prepare_data_loader"): 88}
#: The sums of all budgets: (code lines, files). They only go down, but for a new power among the guests (decision 026).
CORE_LIMIT: Final = (39_750, 270)
GUESTS_LIMIT: Final = (24_548, 162)
#: The share of annotations with `Any` that was reached; it only goes down.
ANY_LIMIT: Final = 0.044

# Foreign objects that are asked what they can do: (file, attribute) -> whose object it is.
FOREIGN_HASATTR: Final[dict[tuple[str, str], str]] = {}

# Rooms whose classes are subclassed from outside; settings/ and options.py hold the options that plugins inherit.
PUBLIC_CLASS_ROOMS: Final = (
    "settings/",
    "plugins/",
    "tracking/",
    "hooks/",
    "test_utils/",
    "errors.py",
    "guests/deepspeed/options.py",
    "guests/megatron/options.py",
    "guests/preemption/policy.py",
)

# Internal classes that are concrete and subclassed all the same: class name -> why.
OPEN_CLASSES: Final[dict[str, str]] = {
    "AcceleratedOptimizer": "documented; libraries subclass and patch it",
    "AcceleratedScheduler": "documented; libraries subclass and patch it",
    "ConvertOutputsToFp32": "documented; libraries look for it around a forward",
    "CPUInformation": "documented",
    "CustomArgumentParser": "documented; programs build their own commands on it",
    "SubcommandHelpFormatter": "documented; argparse makes it",
    "DataLoaderAdapter": "documented; a subclass of the wrapped loader's class is made for each loader",
    "MultiProcessAdapter": "documented logger class",
    "RunCallback": "what users subclass",
    "LoopHook": "what guests subclass",
    "Retryable": "complete for plain models; strategies override what they do otherwise",
}


# --------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class SourceFile:
    path: Path
    text: str
    tree: ast.Module

    @functools.cached_property
    def name(self) -> str:
        """`data_loader/shard.py`"""
        return self.path.relative_to(PACKAGE).as_posix()

    @property
    def module(self) -> str:
        """`data_loader.shard`; the package itself is the empty string."""
        parts = list(self.path.relative_to(PACKAGE).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        return ".".join(parts)

    @property
    def package(self) -> str:
        """The module that a relative import with one dot starts from."""
        if self.path.name == "__init__.py":
            return self.module
        return self.module.rpartition(".")[0]

    @functools.cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @functools.cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Every node of the tree: twenty rules read them, and walking costs more than a rule."""
        return tuple(ast.walk(self.tree))

    @functools.cached_property
    def functions(self) -> tuple[tuple[ast.FunctionDef | ast.AsyncFunctionDef, bool], ...]:
        """Each function and whether it is public: reachable by names without a leading underscore."""
        return tuple(_functions(self.tree))

    def at(self, node: ast.AST, what: str) -> str:
        return f"src/accelerate/{self.name}:{getattr(node, 'lineno', 1)} {what}"


@functools.cache
def files() -> tuple[SourceFile, ...]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        found.append(SourceFile(path, text, ast.parse(text, str(path))))
    gc.freeze()  # half a million nodes stay, and each later collection would look at all of them
    return tuple(found)


@functools.cache
def modules() -> dict[str, SourceFile]:
    return {file.module: file for file in files()}


@dataclass(frozen=True)
class Import:
    """One edge: `file` imports `target` (a module of this package, or an outer one)."""

    file: SourceFile
    node: ast.AST
    target: str
    ours: bool
    lazy: bool  # inside a function
    typing_only: bool


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _import_nodes(tree: ast.Module) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool, bool]]:
    def walk(node: ast.AST, lazy: bool, typing_only: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool, bool]]:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node, lazy, typing_only
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            for child in ast.iter_child_nodes(node):
                yield from walk(child, True, typing_only)
        elif isinstance(node, ast.If) and _is_type_checking(node.test):
            for child in node.body:
                yield from walk(child, lazy, True)
            for child in node.orelse:
                yield from walk(child, lazy, typing_only)
        else:
            for child in ast.iter_child_nodes(node):
                yield from walk(child, lazy, typing_only)

    yield from walk(tree, False, False)


def _ours(module: str) -> str | None:
    """The module inside the package, the empty string for the package itself, or None for a foreign one."""
    if module == "accelerate":
        return ""
    return module.removeprefix("accelerate.") if module.startswith("accelerate.") else None


def _deepest(module: str, name: str) -> str:
    """`from a import b` depends on `a.b` where that is a module, else on `a`."""
    inner = f"{module}.{name}" if module else name
    return inner if inner in modules() else module


@functools.cache
def imports() -> tuple[Import, ...]:
    found = []
    for file in files():
        listed = ast.parse(structure.stub_text(file.path)).body
        stub = [(node, True, True) for node in listed if isinstance(node, ast.ImportFrom) and node.module]
        for node, lazy, typing_only in [*_import_nodes(file.tree), *stub]:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    target = _ours(alias.name)
                    found.append(
                        Import(
                            file,
                            node,
                            target if target is not None else alias.name,
                            target is not None,
                            lazy,
                            typing_only,
                        )
                    )
                continue
            if node.level:
                base = file.package.split(".") if file.package else []
                base = base[: len(base) - (node.level - 1)]
                start: str | None = ".".join([*base, *([node.module] if node.module else [])])
            else:
                start = _ours(node.module or "")
            if start is None:
                found.append(Import(file, node, node.module or "", False, lazy, typing_only))
                continue
            # __version__ is a literal of the front door, which is imported before any part of it anyway.
            names = [alias.name for alias in node.names if alias.name != "__version__"]
            for target in sorted({_deepest(start, name) for name in names}):
                found.append(Import(file, node, target, True, lazy, typing_only))
    return tuple(found)


def room(module: str) -> str:
    """`data_loader` for `data_loader.shard`; the front door's room is the package's name."""
    return module.split(".")[0] or "accelerate"


def is_in(file: SourceFile, places: tuple[str, ...]) -> bool:
    return any(file.name == place or (not place.endswith(".py") and file.name.startswith(place)) for place in places)


def holds(findings: list[str], rule: str) -> None:
    if findings:
        pytest.fail(f"{rule}\n  " + "\n  ".join(sorted(set(findings))), pytrace=False)


def calls(nodes: Iterable[ast.AST]) -> Iterator[ast.Call]:
    return (node for node in nodes if isinstance(node, ast.Call))


def dotted(node: ast.AST) -> str:
    """`torch.cuda` for the attribute chain, the empty string for anything that is not a plain chain."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


# ---------------------------------------------------------------------------------------------- floors


def test_every_room_has_a_floor() -> None:
    unknown = [
        file.at(file.tree, f"room '{room(file.module)}' is on no floor")
        for file in files()
        if room(file.module) not in FLOORS and room(file.module) not in TOWER
    ]
    holds(unknown, "A new package is a change of plan: give it a layer in docs/architecture.md.")


def test_every_name_of_the_plan_exists() -> None:
    missing = [f"docs/architecture.md: no package or module '{name}'" for name in FLOORS if name not in _rooms()]
    places = re.findall(r"\| `([\w/]+\.py):([\w.]+)` \|", PLAN)  # of the journeys, and of "Where do I find ..."
    assert len(places) > 35 and len(FLOORS) > 20
    for name, path in places:
        found: list[ast.AST] = [file.tree for file in files() if file.name == name]
        for part in path.split("."):
            found = [node for outer in found for node in getattr(outer, "body", ()) if part in _defined_names(node)]
        if not found:
            missing.append(f"docs/architecture.md: no {name}:{path}")
    holds(missing, "The plan of record names what is there.")


def _defined_names(node: ast.AST) -> set[str]:
    """The name of a function, a class or a constant."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {str(getattr(node, "name", "")), *(one.id for one in targets if isinstance(one, ast.Name))}


@pytest.fixture
def picture(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    yield importlib.import_module("picture")
    sys.modules.pop("picture")


def test_the_picture_is_that_of_the_imports(picture: Any) -> None:
    changed = picture.difference(picture.TARGET.read_text(encoding="utf-8"), picture.picture())
    assert not changed, f"{changed}; draw it again: python benchmarks/picture.py"


def test_a_picture_of_other_imports_is_found_out(picture: Any) -> None:
    today = picture.drawn({"a": {"b"}, "b": set()}, {"a": 900, "b": 900}, {"a": 1, "b": 0}, {0: "", 1: ""})
    reverse = picture.drawn({"a": set(), "b": set()}, {"a": 900, "b": 900}, {"a": 1, "b": 0}, {0: "", 1: ""})
    assert "imports have changed" in picture.difference(today, reverse)
    assert not picture.difference(today, today.replace("900", "980", 1))
    assert "900 code lines has 1,200" in picture.difference(today, today.replace("900", "1,200", 1))
    triangle = {"a": {"b", "c"}, "b": {"c"}, "c": set()}
    assert picture.reduced(triangle) == {"a": {"b"}, "b": {"c"}, "c": set()}


def _rooms() -> set[str]:
    return {room(file.module) for file in files()}


def _upward(edge: Import) -> str | None:
    source, target = room(edge.file.module), room(edge.target)
    if source == target or source not in FLOORS:
        return None
    if target in TOWER:
        return None if FLOORS[source] >= FLOORS[GUESTS] else f"imports the tower ({edge.target})"
    if target not in FLOORS:
        return None
    if FLOORS[target] == DOOR:
        if FLOORS[source] == DOOR and target in NEIGHBOURS.get(source, ()):
            return None
        return f"imports the door '{target}': import from its home"
    if FLOORS[target] > FLOORS[source]:
        return f"(floor {FLOORS[source]}) imports {edge.target} (floor {FLOORS[target]})"
    if FLOORS[target] == FLOORS[source] and target not in NEIGHBOURS.get(source, ()):
        return f"imports its neighbour {edge.target}, which the table does not list"
    return None


def _is_program(file: SourceFile) -> bool:
    """The scripts that `accelerate test` runs are users of the package, so they come in by the front door."""
    return file.name.startswith("test_utils/scripts/")


def test_imports_go_down() -> None:
    findings = []
    for edge in imports():
        if edge.ours and not _is_program(edge.file):
            problem = _upward(edge)
            if problem:
                findings.append(edge.file.at(edge.node, problem))
    holds(findings, "A file imports lower floors only, lazily too.")


def _guest(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == GUESTS and len(parts) > 1 else None


def _names_a_guest(edge: Import) -> bool:
    """Whether the core, or another guest, imports a guest: public addresses may."""
    target, source = _guest(edge.target), _guest(edge.file.module)
    return target is not None and target != source and not is_in(edge.file, (*OLD_ADDRESSES, *COMMANDS_OF_GUESTS))


def test_the_core_names_no_guest() -> None:
    findings = [
        edge.file.at(edge.node, f"imports {edge.target}") for edge in imports() if edge.ours and _names_a_guest(edge)
    ]
    holds(findings, "A guest attaches through a seam; nothing of the core, and no other guest, imports it.")


def test_tower_imports_only_torch_free_floors_at_module_level() -> None:
    findings = []
    for edge in imports():
        source, target = room(edge.file.module), room(edge.target)
        if not edge.ours or source not in TOWER or source == target:
            continue
        if target in TOWER:
            if source == "launch":
                findings.append(
                    edge.file.at(edge.node, f"launch/ imports {edge.target}: commands stand on launch, not under it")
                )
            continue
        floor = FLOORS.get(target, 0)
        if floor == DOOR:
            findings.append(edge.file.at(edge.node, f"imports the door '{target}'"))
        elif not edge.lazy and not edge.typing_only and floor > 1 and edge.target not in (
            "devices.table", "distributed.environment", "distributed.failures",
        ):  # fmt: skip
            findings.append(edge.file.at(edge.node, f"imports {edge.target} at module level"))
    holds(
        findings,
        "launch/ and commands/ import layers 0-1, devices.table, distributed.environment and distributed.failures; the "
        "rest lazily.",
    )


def test_strategies_share_only_the_shared_files() -> None:
    findings = []
    for edge in imports():
        if not edge.ours or room(edge.file.module) != "parallel" or room(edge.target) != "parallel":
            continue
        source, _, target = edge.file.module.partition(".")[2], *edge.target.partition(".")[1:]
        if not target:
            findings.append(edge.file.at(edge.node, "imports the tuple of all strategies"))
        is_own = "." in source and target.partition(".")[0] == source.partition(".")[0]
        if source and target and not is_own and target not in SHARED_STRATEGY_FILES:
            findings.append(edge.file.at(edge.node, f"imports {edge.target}"))
    holds(findings, f"Between two strategies only {sorted(SHARED_STRATEGY_FILES)} are shared.")


def test_no_import_circle() -> None:
    graph: dict[str, set[str]] = {module: set() for module in modules()}
    for edge in imports():
        if edge.ours and edge.target in graph and edge.target != edge.file.module and not edge.typing_only:
            graph[edge.file.module].add(edge.target)
    circles = [circle for circle in _strong_components(graph) if len(circle) > 1]
    holds(
        [" <-> ".join(sorted(circle)) for circle in circles],
        "Modules import each other in a circle (lazy imports count).",
    )


def test_the_table_of_neighbours_has_no_circle() -> None:
    graph = {room: set(NEIGHBOURS.get(room, ())) for room in FLOORS}
    circles = [" <-> ".join(sorted(circle)) for circle in _strong_components(graph) if len(circle) > 1]
    holds(circles, "A circle between rooms is allowed by the table.")


def _strong_components(graph: dict[str, set[str]]) -> list[list[str]]:
    order: list[str] = []
    seen: set[str] = set()

    def visit(start: str, edges: dict[str, set[str]], out: list[str]) -> None:
        stack: list[tuple[str, Iterator[str]]] = [(start, iter(sorted(edges[start])))]
        seen.add(start)
        while stack:
            node, rest = stack[-1]
            for following in rest:
                if following not in seen:
                    seen.add(following)
                    stack.append((following, iter(sorted(edges[following]))))
                    break
            else:
                stack.pop()
                out.append(node)

    for node in sorted(graph):
        if node not in seen:
            visit(node, graph, order)
    reverse: dict[str, set[str]] = {node: set() for node in graph}
    for node, targets in graph.items():
        for target in targets:
            reverse[target].add(node)
    seen.clear()
    components = []
    for node in reversed(order):
        if node not in seen:
            component: list[str] = []
            visit(node, reverse, component)
            components.append(component)
    return components


# ----------------------------------------------------------------------------------------------- torch


@functools.cache
def eager_imports() -> dict[str, list[Import]]:
    """What each module imports as soon as it is imported itself."""
    found: dict[str, list[Import]] = {module: [] for module in modules()}
    for edge in imports():
        if not edge.lazy and not edge.typing_only:
            found[edge.file.module].append(edge)
    return found


def _with_parents(module: str) -> list[str]:
    """Importing `a.b.c` runs the packages `a` and `a.b` first (and the front door before them)."""
    parts = module.split(".") if module else []
    return ["", *(".".join(parts[: index + 1]) for index in range(len(parts)))]


def test_torch_free_files_do_not_reach_torch_at_import() -> None:
    findings = []
    for file in files():
        if not any(file.module == place or file.module.startswith(place + ".") for place in TORCH_FREE):
            continue
        if file.module in OF_RANKS:
            continue
        waiting = [(module, module) for module in _with_parents(file.module)]
        reached = {module for module, _ in waiting}
        while waiting:
            module, road = waiting.pop()
            for edge in eager_imports()[module]:
                if not edge.ours:
                    if room(edge.target) == "torch":
                        findings.append(
                            edge.file.at(
                                edge.node,
                                f"imports {edge.target}; {file.name} reaches it ({road or 'accelerate'})",
                            )
                        )
                    continue
                for following in _with_parents(edge.target):
                    if following in modules() and following not in reached:
                        reached.add(following)
                        waiting.append((following, f"{road} -> {following}"))
    holds(findings, "These rooms are imported where torch must not be: `accelerate --help`, config, launch.")


def _is_heavy(target: str) -> bool:
    return any(target == heavy or target.startswith(heavy + ".") for heavy in HEAVY_IMPORTS)


def test_heavy_imports_wait_until_they_are_needed() -> None:
    allowed, needed = tuple(HEAVY_FILES), set[str]()
    findings = []
    for edge in imports():
        if edge.lazy or edge.typing_only or _is_program(edge.file):
            continue
        target = modules().get(edge.target) if edge.ours else None
        if _is_heavy(edge.target) if not edge.ours else target is not None and is_in(target, allowed):
            needed |= {place for place in allowed if is_in(edge.file, (place,))}
            if not is_in(edge.file, allowed):
                findings.append(edge.file.at(edge.node, f"imports {edge.target} at module level"))
    findings += [f"{place} is listed in HEAVY_FILES and imports nothing heavy" for place in HEAVY_FILES - needed]
    holds(
        findings,
        "`from accelerate import Accelerator` costs at most a tenth of a second: import these in the function that "
        "needs them, or load the file when it is chosen (HEAVY_FILES).",
    )


# --------------------------------------------------------------------------------------- one home each


def test_environment_is_read_in_one_file() -> None:
    names = {"os.environ", "os.getenv", "os.putenv", "os.unsetenv", "os.environb"}
    findings = []
    for file in files():
        if is_in(file, ENVIRONMENT_FILES):
            continue
        for node in file.nodes:
            if isinstance(node, ast.Attribute) and dotted(node) in names:
                findings.append(file.at(node, f"{dotted(node)}"))
            if isinstance(node, ast.ImportFrom) and node.module == "os":
                findings += [file.at(node, f"from os import {a.name}") for a in node.names if f"os.{a.name}" in names]
    holds(
        findings,
        "The environment belongs to settings/env.py (read, set_variables, patched), and launch/ for children.",
    )


def _vendor_constants(node: ast.AST) -> list[str]:
    return [
        part.value
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value.lower() in VENDOR_WORDS
    ]


def _vendor_findings(file: SourceFile) -> Iterator[str]:
    for node in file.nodes:
        if isinstance(node, ast.Compare):
            for word in _vendor_constants(node):
                yield file.at(node, f"compares with '{word}'")
            for part in ast.walk(node):
                if isinstance(part, ast.Attribute) and dotted(part.value).split(".")[-1] == "DistributedType":
                    yield file.at(node, f"branches on DistributedType.{part.attr}")
        elif isinstance(node, ast.MatchValue):
            for word in _vendor_constants(node):
                yield file.at(node, f"matches '{word}'")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("startswith", "endswith"):
                for word in _vendor_constants(node):
                    yield file.at(node, f"asks whether a name starts with '{word}'")
        elif isinstance(node, ast.Dict):
            for key in node.keys:
                if isinstance(key, ast.Constant) and key.value in VENDOR_WORDS:
                    yield file.at(key, f"table keyed by '{key.value}'")
        elif isinstance(node, ast.Attribute) and dotted(node).startswith("torch."):
            vendor = dotted(node).split(".")[1]
            if vendor in VENDOR_WORDS:
                yield file.at(node, f"calls into torch.{vendor}")


def test_behaviour_does_not_branch_on_a_vendor() -> None:
    findings = [line for file in files() if not is_in(file, VENDOR_FILES) for line in _vendor_findings(file)]
    holds(findings, "A vendor is a row of devices/table.py; DistributedType is a label for callers.")


def test_old_states_are_built_only_in_their_file() -> None:
    findings = [
        file.at(call, f"{dotted(call.func)}(")
        for file in files()
        if not is_in(file, STATE_FILES)
        for call in calls(file.nodes)
        if dotted(call.func).split(".")[-1] in ("PartialState", "AcceleratorState")
    ]
    holds(findings, "Inside the house facts come from World and Settings; the old states are views for callers.")


def test_pickle_has_one_home() -> None:
    findings = []
    for file in files():
        if file.name in (PICKLE_FILE, WEIGHTS_FILE):
            continue
        for node in file.nodes:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            if {"pickle", "dill"} & set(names):
                findings.append(file.at(node, "imports pickle"))
            if isinstance(node, ast.Attribute) and dotted(node) in (
                "torch.load",
                "np.load",
                "numpy.load",
                "joblib.load",
            ):
                findings.append(file.at(node, dotted(node)))
    holds(findings, f"Reading a pickle runs what it says, so only {PICKLE_FILE} may.")


def test_cores_are_counted_in_one_file() -> None:
    counters = {"cpu_count", "process_cpu_count", "sched_getaffinity", "hardware_concurrency"}
    sources = ("/proc/cpuinfo", "/sys/devices/system/cpu", "cpu.max", "cpu.cfs_")
    findings = []
    for file in files():
        if file.name == CORES_FILE:
            continue
        for node in file.nodes:
            if isinstance(node, ast.Attribute) and node.attr in counters:
                findings.append(file.at(node, node.attr))
            elif isinstance(node, ast.alias) and node.name in counters:
                findings.append(file.at(node, node.name))
            elif isinstance(node, ast.Constant) and str(node.value).startswith((*counters, *sources)):
                findings.append(file.at(node, str(node.value)))
            if isinstance(node, ast.Attribute) and node.attr == "set_num_threads" and not is_in(file, THREAD_FILES):
                findings.append(file.at(node, node.attr))
    holds(
        findings, f"What a rank may use is counted in {CORES_FILE}, and told to torch in {' and '.join(THREAD_FILES)}."
    )


def test_no_shell() -> None:
    findings = []
    for file in files():
        for call in calls(file.nodes):
            if dotted(call.func) in (
                "os.system",
                "os.popen",
                "subprocess.getoutput",
                "subprocess.getstatusoutput",
            ):
                findings.append(file.at(call, dotted(call.func)))
            for keyword in call.keywords:
                given = keyword.arg == "shell"
                if given and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False):
                    findings.append(file.at(call, "shell="))
    holds(findings, "A program is started with an argument list, never through a shell.")


# --------------------------------------------------------------------------- behind torch's interface


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@functools.cache
def _own_private_names() -> frozenset[str]:
    """Private names that this package itself gives: to functions, classes, variables, attributes."""
    found: set[str] = set()
    for file in files():
        for node in file.nodes:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and not is_in(file, (TORCH_PRIVATE,))
            ):
                found.add(node.attr)  # also what is noted on an object of somebody else's
    return frozenset(found)


def _strings(file: SourceFile) -> Iterator[str]:
    return (node.value for node in file.nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))


@functools.cache
def _names_behind_torch() -> frozenset[str]:
    """The names in the places that torch_private/ gives to uses() and declare()."""
    places = (text for file in files() if is_in(file, (TORCH_PRIVATE,)) for text in _strings(file) if " " not in text)
    names = (place.partition(":")[2].rpartition(".")[2] for place in places)
    return frozenset(name for name in names if _is_private(name)) - MODULE_TABLES


def _private_uses(file: SourceFile) -> Iterator[tuple[ast.AST, str]]:
    """Private names of objects that aren't ``self``: read, set, or asked for by getattr."""
    for node in file.nodes:
        if isinstance(node, ast.Attribute) and _is_private(node.attr) and dotted(node.value) not in ("self", "cls"):
            yield node, node.attr
        elif (
            isinstance(node, ast.Call) and dotted(node.func) in ("getattr", "hasattr", "setattr") and len(node.args) > 1
        ):
            name = node.args[1]
            if isinstance(name, ast.Constant) and isinstance(name.value, str) and _is_private(name.value):
                yield node, name.value


def _private_imports(file: SourceFile) -> Iterator[tuple[ast.AST, str]]:
    for node in file.nodes:
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{name}" for name in names] if not node.level else []
        for name in names:
            if name.split(".")[0] == "torch" and any(map(_is_private, name.split("."))):
                yield node, name


def test_what_torch_does_not_promise_has_one_room() -> None:
    findings = []
    for file in files():
        if is_in(file, (TORCH_PRIVATE,)):
            continue
        findings += [file.at(node, f"imports {name}") for node, name in _private_imports(file)]
        for node, name in _private_uses(file):
            is_known = name in MODULE_TABLES or name in FOREIGN_PRIVATE
            if not is_known and (name not in _own_private_names() or name in _names_behind_torch()):
                findings.append(file.at(node, f"{name} is private, and not ours"))
    holds(
        findings,
        "What torch doesn't promise is named in torch_private/ only; another library's name stands in FOREIGN_PRIVATE.",
    )


def test_what_torch_does_not_promise_is_declared_where_it_is_used() -> None:
    findings = []
    for file in files():
        if is_in(file, (TORCH_PRIVATE,)):
            words = {word for text in _strings(file) for word in text.replace(":", ".").split(".")}
            used = [*_private_uses(file), *((node, name.rpartition(".")[2]) for node, name in _private_imports(file))]
            findings += [
                file.at(node, f"{name} is used and not declared")
                for node, name in used
                if name not in words and name not in _own_private_names()
            ]
    holds(
        findings,
        "Each private name of torch stands in a uses() or a declare(), and so is compared with each new torch.",
    )


# --------------------------------------------------------------------------------------- old addresses


def _only_imports(statement: ast.stmt) -> bool:
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return True
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return True  # a docstring
    if isinstance(statement, (ast.Assign, ast.AnnAssign)):
        # __all__, __version__, the table of lazy names
        return all(dotted(call.func) in ("names_from", "names_of_stub") for call in calls(ast.walk(statement)))
    if isinstance(statement, ast.If) and _is_type_checking(statement.test):
        return all(_only_imports(inner) for inner in statement.body)
    if isinstance(statement, ast.FunctionDef):
        return statement.name in ("__getattr__", "__dir__")  # PEP 562
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return dotted(statement.value.func) in ("warnings.warn", "warn_of_old_spelling")  # "this address is old"
    return False


def test_old_addresses_only_import() -> None:
    findings = [
        file.at(statement, "is more than an import")
        for file in files()
        if is_in(file, OLD_ADDRESSES)
        for statement in file.tree.body
        if not _only_imports(statement)
    ]
    holds(findings, "An old address re-exports; what it names lives in its room.")


def test_old_addresses_do_not_star() -> None:
    findings = [
        file.at(node, f"from {node.module} import *")
        for file in files()
        for node in file.nodes
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names)
    ]
    holds(findings, "Explicit imports only.")


# --------------------------------------------------------------------------------------------- manners


def _catches_everything(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(dotted(kind) in ("Exception", "BaseException") for kind in types)


def test_broad_except_states_its_reason() -> None:
    findings = []
    for file in files():
        for node in file.nodes:
            if isinstance(node, ast.ExceptHandler) and _catches_everything(node):
                written = file.lines[node.lineno - 1].partition("#")[2]
                reason = written.replace("noqa", "").strip(" :").removeprefix("BLE001").strip(" -:,")
                if len(reason) < 10:
                    findings.append(file.at(node, "except Exception without a reason on its line"))
    holds(findings, "`except Exception:  # why everything is caught here`")


def test_hasattr_asks_only_foreign_objects() -> None:
    findings = []
    used: set[tuple[str, str]] = set()
    for file in files():
        # `hasattr(os, "fork")`: what a foreign module offers on this platform, in this version.
        foreign = {
            alias.asname or alias.name
            for node in file.nodes
            if isinstance(node, ast.Import)
            for alias in node.names
            if _ours(alias.name) is None
        }
        for call in calls(file.nodes):
            if dotted(call.func) != "hasattr" or len(call.args) != 2 or dotted(call.args[0]) in foreign:
                continue
            name = call.args[1].value if isinstance(call.args[1], ast.Constant) else ast.unparse(call.args[1])
            key = (file.name, str(name))
            used.add(key)
            if key not in FOREIGN_HASATTR:
                findings.append(file.at(call, f"hasattr(..., {name!r})"))
    findings += [
        f"{file}: hasattr {name!r} is listed but no longer there" for file, name in FOREIGN_HASATTR.keys() - used
    ]
    holds(
        findings,
        "Our own objects have what their class says. Foreign ones stand in FOREIGN_HASATTR, with whose they are.",
    )


def _class_names(classes: dict[str, ast.ClassDef], node: ast.ClassDef) -> set[str]:
    """The last names of all bases, followed as far as this package defines them."""
    found: set[str] = set()
    for base in node.bases:
        expression = base.value if isinstance(base, ast.Subscript) else base
        name = dotted(expression).split(".")[-1]
        if name and name not in found:
            found.add(name)
            if name in classes and classes[name] is not node:
                found |= _class_names(classes, classes[name])
    return found


ABSTRACT_BASES: Final = frozenset({"ABC", "Protocol", "TypedDict", "NamedTuple"})
ENUM_BASES: Final = frozenset({"Enum", "StrEnum", "IntEnum", "Flag", "IntFlag", "BaseEnum", "EnumWithContains"})


def _old_class_names() -> set[str]:
    frozen = ROOT / "tests" / "contract" / "old_names.txt"
    lines = frozen.read_text(encoding="utf-8").splitlines() if frozen.exists() else []
    return {line.split(":")[1] for line in lines if ":" in line}


def _is_decorated(node: ast.ClassDef, name: str) -> bool:
    return any(dotted(d.func if isinstance(d, ast.Call) else d).split(".")[-1] == name for d in node.decorator_list)


def _has_abstract_method(node: ast.ClassDef) -> bool:
    return any(
        isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef))
        and any(dotted(d).split(".")[-1] == "abstractmethod" for d in item.decorator_list)
        for item in node.body
    )


def test_internal_classes_are_abstract_or_final() -> None:
    classes = {n.name: n for file in files() for n in file.nodes if isinstance(n, ast.ClassDef)}
    public = _old_class_names()
    findings = []
    for file in files():
        if is_in(file, OLD_ADDRESSES) or is_in(file, PUBLIC_CLASS_ROOMS):
            continue
        for node in file.nodes:
            if not isinstance(node, ast.ClassDef) or node.name in public or node.name in OPEN_CLASSES:
                continue
            bases = _class_names(classes, node)
            is_abstract = "ABC" in {dotted(base).split(".")[-1] for base in node.bases} or _has_abstract_method(node)
            is_closed = bool(bases & (ENUM_BASES | {"Protocol", "TypedDict", "NamedTuple"})) or any(
                base.endswith(("Error", "Exception", "Warning")) for base in bases
            )
            if not (is_abstract or is_closed or _is_decorated(node, "final")):
                findings.append(file.at(node, f"class {node.name} is concrete, internal and not @final"))
    holds(findings, "Internal classes are an ABC or @final; nothing concrete is overridden.")


def _functions(tree: ast.AST) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, bool]]:
    """Yield what `SourceFile.functions` keeps."""

    def walk(node: ast.AST, public: bool) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                named = not child.name.startswith("_") or child.name in ("__init__", "__call__", "__enter__")
                yield child, public and named
                yield from walk(child, False)
            elif isinstance(child, ast.ClassDef):
                yield from walk(child, public and not child.name.startswith("_"))
            else:
                yield from walk(child, public)

    yield from walk(tree, True)


def test_public_functions_are_annotated() -> None:
    findings = []
    for file in files():
        for function, public in file.functions:
            if not public:
                continue
            arguments = function.args
            named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            named += [extra for extra in (arguments.vararg, arguments.kwarg) if extra is not None]
            missing = [a.arg for a in named if a.annotation is None and a.arg not in ("self", "cls")]
            if function.returns is None:
                missing.append("return")
            if missing:
                findings.append(file.at(function, f"{function.name}: no annotation for {', '.join(missing)}"))
    holds(findings, "Public functions say what they take and give.")


def test_any_is_rare() -> None:
    annotated, unknown = 0, []
    for file in files():
        for function, _ in file.functions:
            arguments = function.args
            named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            named += [extra for extra in (arguments.vararg, arguments.kwarg) if extra is not None]
            for annotation in (*(one.annotation for one in named), function.returns):
                annotated += annotation is not None
                if annotation is not None and "Any" in {dotted(node) for node in ast.walk(annotation)}:
                    unknown.append(file.at(annotation, f"{function.name}: {ast.unparse(annotation)}"))
    limit = int(annotated * ANY_LIMIT)
    if len(unknown) > limit:
        holds(
            unknown,
            f"{len(unknown)} of {annotated} annotations say Any, at most {limit}: object, a TypeVar, a Protocol.",
        )


# ----------------------------------------------------------------------------------------------- words


def _given_names(file: SourceFile) -> Iterator[tuple[ast.AST, str]]:
    """Names that this package itself gives: to modules, functions, classes, arguments, variables, attributes."""
    yield file.tree, file.module.rpartition(".")[2]
    for node in file.nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node, node.name
        elif isinstance(node, ast.arg):
            yield node, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node, node.attr


def test_names_are_words_of_the_field() -> None:
    findings = []
    for file in files():
        for node, name in _given_names(file):
            words = {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}
            findings += [file.at(node, f"{name}: '{word}'") for word in words & NO_NAMES.keys()]
    holds(findings, "Names are torch's and the field's words (docs/architecture.md, Glossary); instead: NO_NAMES.")


def test_docstrings_are_no_riddles() -> None:
    findings = []
    for file in files():
        for node in file.nodes:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                summary = (ast.get_docstring(node) or "").partition("\n")[0]
                if summary.startswith(RIDDLES):
                    findings.append(file.at(node, f"{node.name}: {summary[:60]}"))
    holds(findings, "A docstring says in the imperative what a function does, and with a noun what an object is.")


def test_messages_are_read_once() -> None:
    """No sentence of a message has two clauses (docs/architecture.md, English): what has to be read twice is two."""
    findings = []
    for file in files():
        inside = {id(part) for node in file.nodes if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
        for node in file.nodes:
            if isinstance(node, ast.JoinedStr):
                text = "".join(part.value if isinstance(part, ast.Constant) else "x" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
                text = node.value
            else:
                continue
            for sentence in re.split(r"(?<=[.!?:;])\s+", "" if "\n" in text else text):
                if len(CLAUSES.findall(sentence)) > 1 and sentence not in PEERS_QUESTIONS:
                    findings.append(file.at(node, sentence))
    holds(findings, "A sentence of a message has at most one clause with what, which, that or whose.")


# ------------------------------------------------------------------------------------------------ size


def _span(first: ast.AST, last: int) -> range:
    return range(getattr(first, "lineno", 1), last + 1)


@functools.cache
def code_lines(file: SourceFile) -> frozenset[int]:
    """Line numbers that hold code, by the counter of benchmarks/structure.py: all but docstrings, comments and blanks."""
    return frozenset(structure.code_lines(file.text, file.tree))


def _budget() -> dict[str, tuple[int, int]]:
    """By package, guest or module the code lines and files that the plan of record allows."""
    rows = re.findall(r"^\| `([\w/.]+)` \| ([\d,]+) \| (\d+) \|$", PLAN, re.MULTILINE)
    return {name: (int(lines.replace(",", "")), int(num_files)) for name, lines, num_files in rows}


def _budgeted(file: SourceFile) -> str:
    parts = file.name.split("/")
    if parts[0] == GUESTS and len(parts) > 2:
        return "/".join(parts[:2])
    return parts[0] if len(parts) > 1 else "modules"


def test_every_package_keeps_within_its_budget() -> None:
    used: dict[str, list[int]] = {}
    for file in files():
        one = used.setdefault(_budgeted(file), [0, 0])
        one[0] += len(code_lines(file)) + structure.stub_lines(file.path)
        one[1] += 1
    budget, findings = _budget(), []
    for name, (lines, num_files) in sorted(used.items()):
        max_lines, max_files = budget.get(name, (0, 0))
        if lines > max_lines or num_files > max_files:
            findings.append(
                f"docs/architecture.md: {name} has {lines} code lines in {num_files} files, its budget is {max_lines} "
                f"in {max_files}"
            )
    findings += [f"docs/architecture.md: {name} isn't there any more" for name in budget.keys() - used.keys()]
    holds(findings, "What grows takes from something else: lower another package's budget by as much.")
    for is_guest, (max_lines, max_files) in ((False, CORE_LIMIT), (True, GUESTS_LIMIT)):
        rows = [row for name, row in budget.items() if name.startswith(f"{GUESTS}/") == is_guest]
        lines, num_files = sum(row[0] for row in rows), sum(row[1] for row in rows)
        assert lines <= max_lines and num_files <= max_files, (
            f"the budgets add up to {lines} lines in {num_files} files"
        )


def test_files_are_small() -> None:
    findings = []
    for file in files():
        size, limit = len(code_lines(file)), FILE_LIMITS.get(file.name, FILE_LIMIT)
        if size > limit:
            findings.append(f"src/accelerate/{file.name}:1 {size} code lines, limit {limit}")
    holds(findings, "One idea per file: split it along its ideas (the file becomes a package of the same name).")


def test_functions_are_small() -> None:
    findings = []
    for file in files():
        lines = code_lines(file)
        for function, _ in file.functions:
            size = sum(line in lines for line in _span(function, function.end_lineno or function.lineno))
            limit = FUNCTION_LIMITS.get((file.name, function.name), FUNCTION_LIMIT)
            if size > limit:
                findings.append(file.at(function, f"{function.name}: {size} code lines, limit {limit}"))
    holds(findings, "A function does one thing.")


def test_the_usual_file_is_one_screen_or_two() -> None:
    sizes = [len(code_lines(file)) for file in files() if code_lines(file)]
    assert not sizes or statistics.median(sizes) <= MEDIAN_LIMIT, f"median {statistics.median(sizes)} code lines a file"


def test_no_room_waits_empty() -> None:
    findings = [
        file.at(file.tree, "holds nothing")
        for file in files()
        if file.path.name != "__init__.py" and not code_lines(file)
    ]
    holds(findings, "Rooms appear when they have something in them.")


# ---------------------------------------------------------------------------------- the rules can fail


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., None]]:
    """A pretended package made of the given files, read by the same rules."""
    package = tmp_path / "src" / "accelerate"
    caches = (files, modules, imports, eager_imports, code_lines, _own_private_names, _names_behind_torch)

    def build(**sources: str) -> None:
        for name, text in {"__init__": "", **sources}.items():
            path = package / (name.replace("__", "/") + ".py" if name != "__init__" else "__init__.py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        for cache in caches:
            cache.cache_clear()

    monkeypatch.setitem(globals(), "PACKAGE", package)
    yield build
    for cache in caches:
        cache.cache_clear()


BROKEN: Final[list[tuple[Callable[[], None], dict[str, str]]]] = [
    (test_every_room_has_a_floor, {"attic": "x = 1\n"}),
    (test_imports_go_down, {"modules": "def f():\n    from accelerate.state import PartialState\n", "state": "x = 1\n"}),
    (test_imports_go_down, {"modules": "from . import utils\n", "utils": "x = 1\n"}),
    (test_tower_imports_only_torch_free_floors_at_module_level, {"launch": "from .modules import x\n", "modules": "x = 1\n"}),
    (test_the_core_names_no_guest, {"modules": "from .guests.a import x\n", "guests__a__b": "x = 1\n"}),
    (test_the_core_names_no_guest, {"guests__c__d": "from ..a.b import x\n", "guests__a__b": "x = 1\n"}),
    (test_strategies_share_only_the_shared_files, {"parallel__ddp": "from .pipeline import x\n", "parallel__pipeline": "x = 1\n"}),
    (test_no_import_circle, {"modules": "def f():\n    from .logging import x\n", "logging": "from .modules import f\n"}),
    (test_torch_free_files_do_not_reach_torch_at_import, {"commands": "from .nested import x\n", "nested": "import torch\n"}),
    (test_heavy_imports_wait_until_they_are_needed, {"modules": "from torch.distributed.fsdp import x\n"}),
    (test_heavy_imports_wait_until_they_are_needed, {"modules": "from .inference import x\n", "inference": "import sympy\n"}),
    (test_environment_is_read_in_one_file, {"modules": "import os\nx = os.environ['RANK']\n"}),
    (test_behaviour_does_not_branch_on_a_vendor, {"modules": "def f(d):\n    return d.type == 'cuda'\n"}),
    (test_behaviour_does_not_branch_on_a_vendor, {"accelerator": "def f(t):\n    return t in (DistributedType.FSDP,)\n"}),
    (test_old_states_are_built_only_in_their_file, {"logging": "x = PartialState()\n"}),
    (test_pickle_has_one_home, {"nested": "import torch\nx = torch.load('f')\n"}),
    (test_what_torch_does_not_promise_has_one_room, {"modules": "from torch._C import x\n"}),
    (test_what_torch_does_not_promise_has_one_room, {"modules": "from torch.nn import _reduction\n"}),
    (test_what_torch_does_not_promise_has_one_room, {"modules": "def f(model):\n    return model._ddp_params\n"}),
    (test_what_torch_does_not_promise_has_one_room, {"modules": "x = getattr(1, '_orig_mod', None)\n"}),
    (test_what_torch_does_not_promise_is_declared_where_it_is_used, {"torch_private__optim": "def f(o):\n    return o._hooks\n"}),
    (test_cores_are_counted_in_one_file, {"modules": "from os import cpu_count\n"}),
    (test_cores_are_counted_in_one_file, {"modules": "import os\nx = getattr(os, 'sched_getaffinity', None)\n"}),
    (test_cores_are_counted_in_one_file, {"plugins": "import torch\ntorch.set_num_threads(2)\n"}),
    (test_no_shell, {"launch": "import subprocess\nsubprocess.run('ls', shell=True)\n"}),
    (test_old_addresses_only_import, {"launchers": "def f():\n    pass\n"}),
    (test_old_addresses_do_not_star, {"launchers": "from os import *\n"}),
    (test_broad_except_states_its_reason, {"modules": "try:\n    pass\nexcept Exception:\n    pass\n"}),
    (test_hasattr_asks_only_foreign_objects, {"modules": "x = hasattr(1, 'y')\n"}),
    (test_internal_classes_are_abstract_or_final, {"modules": "class Helper:\n    pass\n"}),
    (test_public_functions_are_annotated, {"modules": "def f(x) -> None:\n    pass\n"}),
    (test_any_is_rare, {"modules": "def f(x: Any) -> list[Any]:\n    return [x]\n"}),
    (test_names_are_words_of_the_field, {"modules": "def knock() -> None:\n    pass\n"}),
    (test_docstrings_are_no_riddles, {"modules": 'def f() -> None:\n    """What it does."""\n'}),
    (test_messages_are_read_once, {"modules": "raise ValueError('a file that says what is wrong')\n"}),
    (test_files_are_small, {"modules": "x = 1\n" * 501}),
    (test_every_package_keeps_within_its_budget, {"attic": "x = 1\n"}),
    (test_functions_are_small, {"modules": "def f():\n" + "    x = 1\n" * 61}),
    (test_no_room_waits_empty, {"modules": '"""Some day."""\n'}),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "sources"), BROKEN, ids=lambda value: getattr(value, "__name__", ""))
def test_each_rule_can_fail(house: Callable[..., None], rule: Callable[[], None], sources: dict[str, str]) -> None:
    house(**sources)
    with pytest.raises(pytest.fail.Exception):
        rule()


def test_docstrings_and_comments_do_not_count(house: Callable[..., None]) -> None:
    house(world='"""Doc."""\n\n\ndef f(\n    x,\n):\n    """Doc.\n\n    More.\n    """\n    # why\n    return x\n')
    assert len(code_lines(modules()["world"])) == 4
