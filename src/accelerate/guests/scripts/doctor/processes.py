"""What differs between processes: conditions on the rank, values of a rank's own samples, and who waits for whom.

With the rules for hangs: only some of the processes reach a collective call.

A value that was gathered, reduced or broadcast is the same on all processes. A value of unknown origin counts as
the same, so that it causes no finding.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from typing import Final, TypeAlias, final

from ..migrate.source import Function, Script, dotted, method, parameters
from .subject import Place, Subject, arguments, at

RANK: Final = "rank"
SAMPLES: Final = "samples"
CLOCK: Final = "clock"

_RANK_NAMES: Final = frozenset(
    {
        "is_main_process", "is_local_main_process", "is_last_process", "on_main_process", "on_local_main_process",
        "process_index", "local_process_index", "rank", "local_rank", "global_rank",
    }
)  # fmt: skip
_RANK_CALLS: Final = frozenset({"get_rank", "get_local_rank", "get_node_local_rank", "get_global_rank"})
_CLOCKS: Final = frozenset({"time.time", "time.monotonic", "time.perf_counter", "datetime.datetime.now"})
#: Methods of an Accelerator, and functions of accelerate.utils, that all processes have to call.
_COLLECTIVE: Final = frozenset(
    {
        "gather", "gather_for_metrics", "reduce", "pad_across_processes", "wait_for_everyone", "prepare", "backward",
        "prepare_model", "clip_grad_norm_", "check_trigger", "broadcast", "gather_object", "broadcast_object_list",
    }
)  # fmt: skip
_COLLECTIVE_OF_TORCH: Final = frozenset(
    {
        "barrier", "all_reduce", "all_gather", "all_gather_object", "broadcast", "broadcast_object_list", "reduce",
        "gather", "gather_object", "scatter", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all",
    }
)  # fmt: skip
#: Their results are the same on all processes.
_AGREED: Final = (_COLLECTIVE - {"backward"}) | {"gather_object", "sync_and_compute", "all_gather", "streaming_mean"}
_SIZES: Final = frozenset({"len", "size", "dim", "numel", "isinstance", "type", "hasattr", "is_tensor"})
_SHAPES: Final = frozenset({"shape", "device", "dtype", "ndim", "dataset", "num_processes"})
_READS: Final = frozenset({"iter", "next", "cycle", "tqdm", "enumerate", "zip", "islice"})
#: Where the search ends, in functions that call each other and in expressions.
_DEEPEST: Final = 5
_MOST: Final = 2000
_Calls: TypeAlias = tuple[ast.Call, ...]
_Seen: TypeAlias = set[tuple[ast.AST, tuple[ast.Call, ...]]]
_LEAVES: Final = (ast.Return, ast.Raise, ast.Continue, ast.Break)


@final
class Processes:
    """The differences between the processes that run a script."""

    def __init__(self, subject: Subject) -> None:
        self.subject: Subject = subject
        self.script: Script = subject.script

    # -- values --------------------------------------------------------------------------------------------

    @functools.cache  # noqa: B019  (it lives as long as the command)
    def differs(self, node: ast.AST) -> frozenset[str]:
        """Return why an expression has another value on each process: RANK, SAMPLES, CLOCK; empty if it has not."""
        return frozenset(self._sources(node, (), set()))

    def _sources(self, node: ast.AST | None, within: _Calls, seen: _Seen) -> Iterator[str]:
        """Yield the sources of an expression, in functions that these calls have entered."""
        if node is None or (node, within) in seen or len(seen) > _MOST:
            return
        seen.add((node, within))
        if isinstance(node, (ast.Name, ast.Attribute)):
            yield from self._sources_of_name(node, within, seen)
        elif isinstance(node, ast.Call):
            yield from self._sources_of_call(node, within, seen)
        elif isinstance(node, ast.Constant):
            if node.value in ("RANK", "LOCAL_RANK"):  # os.environ["RANK"]
                yield RANK
        elif not isinstance(node, ast.Lambda) and not _is_unset(node):
            for child in ast.iter_child_nodes(node):
                yield from self._sources(child, within, seen)

    def _sources_of_name(self, node: ast.Name | ast.Attribute, within: _Calls, seen: _Seen) -> Iterator[str]:
        last = node.attr if isinstance(node, ast.Attribute) else node.id
        given, caller = self._given(node, within)
        if caller is not None:
            yield from self._sources(given, caller, seen)
            return
        getter = self.subject.property_of(node)
        if getter is not None:
            yield from self._sources_of_result(getter, None, within, seen)
            return
        definitions = self.subject.definitions(node)
        if not definitions and last in _RANK_NAMES and not self.subject.constant(node):  # that of LoRA is a number
            yield RANK
        for definition in definitions:
            value = definition.value
            if isinstance(definition.node, ast.For) and value is not None and self._reads(value, within):
                yield SAMPLES
            yield from self._sources_at(value, definition.position, within, seen)
            yield from self._sources_of_conditions(definition.node, within, seen)
        if not definitions and isinstance(node, ast.Attribute) and node.attr not in _SHAPES:
            yield from self._sources(node.value, within, seen)

    def _given(self, node: ast.AST, within: _Calls) -> tuple[ast.expr | None, _Calls | None]:
        """Return what the innermost call gives for a parameter, and the calls around it; None if it isn't one."""
        symbol = self.subject.survey.symbol(node)
        for depth in reversed(range(len(within))):
            function = self.subject.callee(within[depth])
            if symbol is not None and symbol.scope is function and symbol.name in parameters(symbol.scope):
                return dict(arguments(symbol.scope, within[depth])).get(symbol.name), within[:depth]
        return None, None

    def _reads(self, node: ast.AST, within: _Calls) -> bool:
        """Return whether an expression names a prepared loader."""
        for name in self.subject.read_names(node):
            given, caller = self._given(name, within)
            if self.subject.reads_prepared(name) if caller is None else given and self._reads(given, caller):
                return True
        return False

    def _sources_of_conditions(self, node: ast.AST, within: _Calls, seen: _Seen) -> Iterator[str]:
        """Yield the sources of the conditions under which a statement runs."""
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):  # a parameter
            return
        scope = self.script.scope(node)
        for outer in self.script.ancestors(node):
            if outer is scope:
                return
            if isinstance(outer, ast.If):
                yield from self._sources(outer.test, within, seen)

    def _sources_at(self, value: ast.expr | None, place: int | None, within: _Calls, seen: _Seen) -> Iterator[str]:
        if isinstance(value, ast.Call) and place is not None:
            function = self.subject.callee(value)
            if function is not None:
                yield from self._sources_of_result(function, place, (*within, value), seen)
                return
        yield from self._sources(value, within, seen)

    def _sources_of_call(self, call: ast.Call, within: _Calls, seen: _Seen) -> Iterator[str]:
        path, found = self.script.path(call.func), method(call)
        names = {path, path.rpartition(".")[2], found[0] if found else path}
        if names & _RANK_CALLS:
            yield RANK
        if path in _CLOCKS:
            yield CLOCK
        if names & (_AGREED | _SIZES):
            return
        function = self.subject.callee(call)
        if function is not None:
            yield from self._sources_of_result(function, None, (*within, call), seen)
            return
        if names & _READS and self._reads(call, within):
            yield SAMPLES
        for child in (*call.args, *call.keywords, found[1] if found else None):
            yield from self._sources(child.value if isinstance(child, ast.keyword) else child, within, seen)

    def _sources_of_result(self, function: Function, place: int | None, within: _Calls, seen: _Seen) -> Iterator[str]:
        if len(within) > _DEEPEST:
            return
        for node in self.script.nodes(ast.Return, function):
            value = node.value
            if place is not None and isinstance(value, ast.Tuple) and place < len(value.elts):
                value = value.elts[place]
            yield from self._sources(value, within, seen)

    # -- places --------------------------------------------------------------------------------------------

    def guard(self, node: ast.AST, *reasons: str) -> ast.If | None:
        """Return the condition in the function of `node` that lets only some processes reach it."""
        wanted, inner = set(reasons or (RANK,)), node
        for outer in self.script.ancestors(node):
            if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)):
                return self._left_early(outer.body, inner, wanted)
            if isinstance(outer, (ast.If, ast.IfExp)) and inner is not outer.test and self.differs(outer.test) & wanted:
                return outer if isinstance(outer, ast.If) else ast.If(outer.test, [], [])
            for block in (getattr(outer, "body", None), getattr(outer, "orelse", None)):
                found = self._left_early(block, inner, wanted) if isinstance(block, list) else None
                if found is not None:
                    return found
            inner = outer
        return None

    def _left_early(self, block: list[ast.stmt], node: ast.AST, reasons: set[str]) -> ast.If | None:
        """Return the `if not accelerator.is_main_process: return` that precedes `node` in its block."""
        for statement in block if node in block else ():
            if statement is node:
                return None
            if not isinstance(statement, ast.If) or not isinstance(statement.body[-1], _LEAVES):
                continue
            if not statement.orelse and self.differs(statement.test) & reasons:
                return statement
        return None

    def is_of_one(self, node: ast.AST, seen: frozenset[ast.AST] = frozenset()) -> bool:
        """Return whether one process runs `node`: by a condition, by a decorator, or because all callers have one."""
        if self.guard(node) is not None:
            return True
        function = self.script.scope(node)
        if isinstance(function, ast.Module) or function in seen:
            return False
        if any(self.differs(decorator) for decorator in function.decorator_list):
            return True
        calls = self.subject.callers.get(function, [])
        return bool(calls) and all(self.is_of_one(call, seen | {function}) for call in calls)

    # -- calls that wait -----------------------------------------------------------------------------------

    def collective(self, call: ast.Call) -> str:
        """Return the name of the collective operation that a call is, or ''."""
        found, path = method(call), self.script.path(call.func)
        last = path.rpartition(".")[2]
        is_ours = found is not None and found[0] in _COLLECTIVE and dotted(found[1]) in self.subject.accelerators
        is_ours |= path.startswith("accelerate.") and last in _COLLECTIVE
        is_torch = path.startswith("torch.distributed.") and last in _COLLECTIVE_OF_TORCH
        is_by_hand = call in self.subject.survey.backwards  # of a prepared model, it averages gradients too
        return (dotted(call.func) or "backward") if is_ours or is_torch or is_by_hand else ""

    def reached(self, node: ast.AST) -> str:
        """Return the first collective operation in `node` or in a function that it calls, or ''."""
        return next((name for name in map(self.collective, self.run_by(node)) if name), "")

    def run_by(self, node: ast.AST, seen: frozenset[ast.AST] = frozenset()) -> Iterator[ast.Call]:
        """Yield the calls in `node` and in the functions of the script that it calls."""
        for call in self.script.nodes(ast.Call, node):
            yield call
            function = self.subject.callee(call)
            if function is not None and function not in seen and function is not node:
                yield from self.run_by(function, seen | {function})

    def is_answered(self, call: ast.Call, guard: ast.If) -> bool:
        """Return whether the other branch of a condition makes the same call."""
        mine = self.script.last_name(call)
        others = [branch for branch in (guard.body, guard.orelse) if not any(call in ast.walk(each) for each in branch)]
        statements = [statement for branch in others for statement in branch]
        calls = (each for statement in statements for each in self.script.nodes(ast.Call, statement))
        return any(self.script.last_name(each) == mine for each in calls)


def _is_unset(node: ast.AST) -> bool:
    """Return whether an expression asks whether there is a rank: ``local_rank != -1``."""
    others = node.comparators if isinstance(node, ast.Compare) else []
    return any(isinstance(each, ast.UnaryOp) and isinstance(each.op, ast.USub) for each in others)


# -- rules for hangs ----------------------------------------------------------------------------------------


def collective_of_one(subject: Subject, processes: Processes) -> Iterator[Place]:
    for call in subject.calls:
        name, guard = processes.collective(call), processes.guard(call)
        decorators = getattr(subject.script.scope(call), "decorator_list", [])
        if guard is None and not any(processes.differs(each) for each in decorators):
            continue
        if name and not (guard is not None and processes.is_answered(call, guard)):
            yield at(call, name=name)


def helper_of_one(subject: Subject, processes: Processes) -> Iterator[Place]:
    for function, calls in subject.callers.items():
        name = processes.reached(function)
        for call in calls if name else ():
            guard = processes.guard(call)
            if guard is not None and not processes.is_answered(call, guard):
                yield at(call, name=ast.unparse(call.func), collective=name)


def collective_by_own_value(subject: Subject, processes: Processes) -> Iterator[Place]:
    for call in subject.calls:
        name = processes.collective(call)
        if name and processes.guard(call) is None:
            guard = processes.guard(call, SAMPLES, CLOCK)
            if guard is not None and not isinstance(guard.body[-1] if guard.body else None, (ast.Continue, ast.Break)):
                yield at(call, name=name, condition=ast.unparse(guard.test), why=_why(processes, guard.test))


def loop_left_by_one(subject: Subject, processes: Processes) -> Iterator[Place]:
    for node in subject.script.nodes((ast.Break, ast.Continue, ast.Return)):
        loops = subject.loops_around(node)
        waiting = [loop for loop in loops if processes.reached(loop)]
        if not waiting or (not isinstance(node, ast.Return) and waiting[0] is not loops[0]):
            continue
        for outer in subject.script.ancestors(node):
            if outer is waiting[0]:
                break
            if isinstance(outer, ast.If) and processes.differs(outer.test):
                word = type(node).__name__.lower()
                yield at(node, word=word, condition=ast.unparse(outer.test), why=_why(processes, outer.test))
                break
    for loop in subject.script.nodes(ast.While):
        if processes.differs(loop.test) and processes.reached(loop):
            yield at(loop, word="while", condition=ast.unparse(loop.test), why=_why(processes, loop.test))


def step_of_one(subject: Subject, processes: Processes) -> Iterator[Place]:
    for call, owner in subject.script.methods("step"):
        if subject.role(owner) in ("optimizer", "scheduler") and processes.guard(call) is not None:
            yield at(call, name=ast.unparse(call.func))


def prepared_loader_of_one(subject: Subject, processes: Processes) -> Iterator[Place]:
    for loop in subject.survey.loops:
        if loop.loaders & subject.prepared and not loop.trains and processes.is_of_one(loop.node):
            yield at(loop.node, name=ast.unparse(loop.node.iter))


def sharded_state_of_one(subject: Subject, processes: Processes) -> Iterator[Place]:
    for call in subject.calls_of("get_state_dict", "save_state", "save_model"):
        if processes.is_of_one(call):
            yield at(call, name=ast.unparse(call.func))


def _why(processes: Processes, test: ast.expr) -> str:
    sources = processes.differs(test)
    if RANK in sources:
        return "the rank"
    return "this process's own samples" if SAMPLES in sources else "this process's own clock"
