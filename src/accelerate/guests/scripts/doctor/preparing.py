"""Rules for `prepare`: its arguments, their order, and the use of its results."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Final

from ..migrate.source import argument, dotted, method, targets
from ..migrate.survey import LOADER, MODEL, OPTIMIZER, SCHEDULER, Symbol
from .processes import Processes
from .subject import Place, Subject, arguments, at

Check = Callable[[Subject, Processes], Iterator[Place]]
_USED_BY: Final = ("step", "zero_grad", "parameters", "train", "eval")


def nothing_prepared(subject: Subject, _: Processes) -> Iterator[Place]:
    if subject.survey.backwards and not subject.prepares:
        yield at(subject.script.tree.body[0])


def unprepared(role: str) -> Check:
    """Return the rule for what `prepare` never gets, of one role."""

    def check(subject: Subject, processes: Processes) -> Iterator[Place]:
        for symbol in subject.survey.trained[role] if subject.prepares else ():
            assigned = subject.survey.assignments(symbol)
            if symbol in subject.prepared or not assigned or subject.survey.role_of(symbol) != role:
                continue
            if role == LOADER and any(processes.differs(value) for _, value, _ in assigned):
                continue  # it is divided by hand
            if role == SCHEDULER and not _steps_with_batches(subject, symbol):
                continue  # once per epoch, it is as right by itself
            if not _is_late(subject, assigned[-1][0]):
                yield at(assigned[0][0], name=symbol.name)

    return check


def _steps_with_batches(subject: Subject, scheduler: Symbol) -> bool:
    steps = [call for call, owner in subject.script.methods("step") if scheduler in subject.roots(owner)]
    return not steps or any(map(subject.is_in_batch_loop, steps))


def made_after_prepare(subject: Subject, _: Processes) -> Iterator[Place]:
    for role in (OPTIMIZER, SCHEDULER, LOADER):
        for symbol in subject.survey.trained[role]:
            made = [each for each, value, _ in subject.survey.assignments(symbol) if subject.survey.role(value) == role]
            if made and _is_late(subject, made[-1]) and not _is_prepared_after(subject, symbol, made[-1]):
                yield at(made[-1], role=_WORDS[role], name=symbol.name)


_WORDS: Final = {MODEL: "model", OPTIMIZER: "optimizer", LOADER: "data loader", SCHEDULER: "scheduler"}


def _is_late(subject: Subject, statement: ast.stmt) -> bool:
    """Return whether all calls of ``prepare`` in its function precede a statement, also in the next round of a loop."""
    lines = subject.prepared_lines(statement)
    loops = subject.loops_around(statement)
    again = any(call in ast.walk(loop) for loop in loops for call in subject.prepares)
    return bool(lines) and max(lines) < statement.lineno and not again


def _is_prepared_after(subject: Subject, symbol: Symbol, statement: ast.stmt) -> bool:
    later = [call for call in subject.prepares if call.lineno >= statement.lineno]
    return any(symbol in subject.roots(given) for call in later for given in call.args)


def _assigned(call: ast.Call, subject: Subject) -> tuple[list[ast.expr], list[ast.expr]]:
    """Return the targets of a call of ``prepare`` and its arguments; empty lists if their order isn't visible."""
    statement = subject.script.statement(call)
    found = targets(statement)
    is_plain = isinstance(statement, ast.Assign) and statement.value is call and len(statement.targets) == 1
    if not is_plain or len(found) != len(call.args) or any(isinstance(each, ast.Starred) for each in call.args):
        return [], []
    return found, call.args


def results_in_another_order(subject: Subject, _: Processes) -> Iterator[Place]:
    for call in subject.prepares:
        left, right = (list(map(ast.unparse, names)) for names in _assigned(call, subject))
        if left != right and sorted(left) == sorted(right):
            yield at(call, given=", ".join(right), taken=", ".join(left))


def results_dropped(subject: Subject, _: Processes) -> Iterator[Place]:
    for call in subject.prepares:
        if subject.script.is_statement(call) and call.args:
            yield at(call, name=ast.unparse(call.func))


def unprepared_name_used(subject: Subject, _: Processes) -> Iterator[Place]:
    for call in subject.prepares:
        taken, had = _assigned(call, subject)
        if sorted(map(ast.unparse, taken)) == sorted(map(ast.unparse, had)):
            continue
        for target, given in zip(taken, had, strict=True):
            old, new, line = ast.unparse(given), ast.unparse(target), call.end_lineno or call.lineno
            if old == new:
                continue
            for node in subject.script.nodes((ast.For, ast.Call), subject.script.scope(call)):
                if node.lineno > line and _uses(subject, node, given):
                    yield at(node, name=old, prepared=new)
                    break


def _uses(subject: Subject, node: ast.For | ast.Call, name: ast.expr) -> bool:
    symbol = subject.survey.symbol(name)
    if symbol is None:
        return False
    if isinstance(node, ast.For):
        read = node.iter
        while isinstance(read, ast.Call) and read.args:
            read = read.args[0]
        return subject.survey.symbol(read) == symbol
    called, owner = method(node) or ("", node)
    if called in _USED_BY:
        return subject.survey.symbol(owner) == symbol and called == "step"
    return subject.survey.symbol(node.func) == symbol or _runs_it(subject, node, symbol)


def _runs_it(subject: Subject, call: ast.Call, symbol: Symbol) -> bool:
    """Return whether a function of the script gets this object, and calls it or loops over it."""
    function = subject.callee(call)
    for name, value in arguments(function, call) if function is not None else ():
        runs = [each.func for each in subject.script.nodes(ast.Call, function)]
        runs += [each.iter for each in subject.script.nodes(ast.For, function)]
        if subject.survey.symbol(value) == symbol and name in map(dotted, runs):
            return True
    return False


def prepared_twice(subject: Subject, _: Processes) -> Iterator[Place]:
    for call in subject.prepares:
        inside = [each for each in subject.loops_around(call)[:1] if subject.survey.trains(each)]
        for given in call.args if inside else ():
            symbol = subject.survey.symbol(given)
            made = [] if symbol is None else subject.survey.assignments(symbol)
            others = [each for each, value, _ in made if value is not call]
            if others and not any(each in ast.walk(loop) for loop in inside for each in others):
                yield at(call, name=ast.unparse(given))
                break


def group_by_hand(subject: Subject, _: Processes) -> Iterator[Place]:
    for call in subject.calls:
        path = subject.script.path(call.func)
        wraps = path.endswith(("DistributedDataParallel", "FullyShardedDataParallel", "nn.DataParallel"))
        if path.startswith("torch.") and wraps:
            yield at(call, name=ast.unparse(call.func))


def batch_norm_of_few(subject: Subject, _: Processes) -> Iterator[Place]:
    if subject.uses("convert_sync_batchnorm"):
        return
    sizes = [subject.constant(size) for _, size in _batch_sizes(subject)]
    few = min((size for size in sizes if isinstance(size, int)), default=None)
    for call in subject.calls if few is not None and few <= 4 else ():
        if subject.script.path(call.func).startswith("torch.nn.BatchNorm"):
            yield at(call, name=subject.script.last_name(call), size=str(few))
            return


def _batch_sizes(subject: Subject) -> Iterator[tuple[ast.Call, ast.expr | None]]:
    """Yield the calls that make prepared loaders for training, each with its batch size."""
    trained = subject.prepared & set(subject.survey.trained[LOADER])
    for call in subject.calls:
        if subject.script.last_name(call) == "DataLoader" and subject.bound(call) & trained:
            yield call, argument(call, "batch_size", 1)


def batch_of_each(subject: Subject, _: Processes) -> Iterator[Place]:
    shares = any(each.arg == "split_batches" for each in subject.script.nodes(ast.keyword))
    for call, size in _batch_sizes(subject) if not shares else ():
        if size is not None and not _is_share(subject, size):
            yield at(call, size=ast.unparse(size))


def _is_share(subject: Subject, size: ast.expr) -> bool:
    """Return whether ``size``, or a value of a name in it, is computed from the number of processes."""
    read = list(ast.walk(size))
    named = [node for node in read if isinstance(node, (ast.Name, ast.Attribute))]
    defined = [definition.value for node in named for definition in subject.definitions(node)]
    read += [node for value in defined if value is not None for node in ast.walk(value)]
    names = {node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "") for node in read}
    return bool(names & {"num_processes", "world_size", "get_world_size"})
