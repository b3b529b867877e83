"""Rules for evaluation: gathering, padding, and the mode of the model."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from ..migrate.source import dotted, method
from ..migrate.survey import MODEL, Loop
from .processes import SAMPLES, Processes
from .subject import Place, Subject, at

_GATHERS: Final = ("gather", "gather_for_metrics", "reduce", "streaming_mean", "all_reduce", "all_gather")
_COLLECTS: Final = ("append", "extend", "add_batch", "update")
_SHOWS: Final = frozenset({"print", "log", "info", "add_scalar"})
_TWO_MODES: Final = ("Dropout", "BatchNorm", "from_pretrained", "torchvision.models", "create_model")


def _evaluations(subject: Subject) -> Iterator[Loop]:
    """Yield the loops over a prepared loader that neither train nor pass its batches on."""
    for loop in subject.survey.loops:
        passes_on = any(isinstance(node, ast.Yield) for node in ast.walk(loop.node))  # as a progress bar does
        if not loop.trains and not passes_on and loop.loaders & subject.prepared:
            yield loop


def part_of_the_data(subject: Subject, processes: Processes) -> Iterator[Place]:
    for loop in _evaluations(subject):
        scope = subject.script.scope(loop.node)
        adds = any(isinstance(node, ast.AugAssign) for node in ast.walk(loop.node))
        collects = adds or any(subject.script.methods(*_COLLECTS, inside=loop.node))
        names = {(method(call) or (dotted(call.func),))[0] for call in processes.run_by(scope)}
        if collects and not names & set(_GATHERS):
            yield at(loop.node)


def padding_counted(subject: Subject, _: Processes) -> Iterator[Place]:
    for loop in _evaluations(subject):
        cuts = [
            node
            for node in subject.script.nodes(ast.Slice, subject.script.scope(loop.node))
            if node.upper is not None and ("len(" in ast.unparse(node.upper) or "num" in ast.unparse(node.upper))
        ]
        for call in subject.calls_of("gather") if not cuts else ():
            given = ast.unparse(call.args[0]) if call.args else "loss"
            if call in ast.walk(loop.node) and "loss" not in given:
                yield at(call, name=ast.unparse(call.func))


def never_evaluating(subject: Subject, _: Processes) -> Iterator[Place]:
    if subject.uses("eval") or not any(word in subject.script.text for word in _TWO_MODES):
        return
    for loop in _evaluations(subject):
        for call in subject.script.nodes(ast.Call, loop.node):
            if subject.role(call.func) == MODEL and subject.roots(call.func) & subject.prepared:
                yield at(loop.node, name=ast.unparse(call.func))
                break


def sum_of_one(subject: Subject, processes: Processes) -> Iterator[Place]:
    added = [node for loop in subject.batch_loops for node in subject.script.nodes(ast.AugAssign, loop)]
    symbols = [subject.survey.symbol(node.target) for node in added if SAMPLES in processes.differs(node.value)]
    sums = subject.derived({each for each in symbols if each is not None}, lambda node: _is_gathered(subject, node))
    for call in subject.calls:
        inner = [name for each in (*call.args, *call.keywords) for name in ast.walk(each)]
        shows = dotted(call.func).rpartition(".")[2] in _SHOWS
        used = [name for name in inner if isinstance(name, ast.Name) and subject.survey.symbol(name) in sums]
        for name in used if shows else ():
            if SAMPLES in processes.differs(name) and not _is_gathered(subject, name):
                yield at(call, name=name.id)
                break


def _is_gathered(subject: Subject, node: ast.AST) -> bool:
    return any((method(outer) or (subject.last_name(outer),))[0] in _GATHERS for outer in subject.calls_around(node))
