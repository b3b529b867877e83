"""Rules for hangs: only some of the processes reach a collective call."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from .processes import CLOCK, RANK, SAMPLES, Processes
from .subject import Place, Subject, at


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
