"""Rules for output, trackers, downloads and devices: what each process does, and one is to do."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from ..migrate.source import dotted, keyword, method
from .processes import RANK, Processes
from .subject import Place, Subject, at

_TRACKERS: Final = frozenset({"wandb.init", "mlflow.start_run", "SummaryWriter", "neptune.init_run", "Task.init"})


def is_bar(subject: Subject, *calls: ast.Call) -> bool:
    """Return whether one of these calls draws a progress bar of tqdm."""
    names = [subject.script.path(call.func).split(".") for call in calls]
    return any(name[0] == "tqdm" and name[-1] in ("tqdm", "trange") for name in names)


def printed_by_all(subject: Subject, processes: Processes) -> Iterator[Place]:
    for call in subject.calls:
        if dotted(call.func) != "print" or processes.is_of_one(call):
            continue
        if not any(RANK in processes.differs(each) for each in call.args):
            yield at(call)


def drawn_by_all(subject: Subject, processes: Processes) -> Iterator[Place]:
    for call in subject.calls:
        if is_bar(subject, call) and keyword(call, "disable") is None and not processes.is_of_one(call):
            yield at(call)


def tracked_by_all(subject: Subject, processes: Processes) -> Iterator[Place]:
    for call in subject.calls:
        path = subject.script.path(call.func)
        is_tracker = path in _TRACKERS or path.rpartition(".")[2] in _TRACKERS
        if is_tracker and not processes.is_of_one(call):
            yield at(call, name=ast.unparse(call.func))


def logged_nowhere(subject: Subject, _: Processes) -> Iterator[Place]:
    for call in subject.calls_of("log") if not subject.uses("init_trackers") else ():
        yield at(call)
        return


def downloaded_by_all(subject: Subject, processes: Processes) -> Iterator[Place]:
    for call in subject.calls:
        wants = keyword(call, "download")
        if wants is None or subject.constant(wants) is not True or processes.is_of_one(call):
            continue
        around = [each for each in subject.script.ancestors(call) if isinstance(each, ast.With)]
        if not any("process_first" in ast.unparse(item.context_expr) for each in around for item in each.items):
            yield at(call, name=ast.unparse(call.func))


def device_by_name(subject: Subject, _: Processes) -> Iterator[Place]:
    for node in subject.script.nodes(ast.Constant):
        if isinstance(node.value, str) and (node.value == "cuda" or node.value.startswith("cuda:")):
            outer = subject.script.parents.get(node)
            if isinstance(outer, ast.Call) and subject.last_name(outer) in ("autocast", "GradScaler"):
                continue
            if isinstance(outer, (ast.Call, ast.keyword, ast.Assign, ast.IfExp)):
                yield at(node, device=repr(node.value))


def cuda_by_hand(subject: Subject, _: Processes) -> Iterator[Place]:
    for call in subject.calls:
        found = method(call)
        if found is not None and found[0] == "cuda" and dotted(found[1]) != "torch":
            yield at(call)
