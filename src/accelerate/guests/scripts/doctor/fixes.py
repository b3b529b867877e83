"""Safe cures as edits by position: on one process a script computes the same after them.

A fix returns no edits where it isn't certain: the Accelerator may not exist yet, or the call has arguments that the
other one doesn't take.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection
from typing import Final, TypeAlias

from ..migrate.source import Edit, Placed, dotted, method, method_name, targets
from .processes import Processes
from .subject import Place, Subject

Fix: TypeAlias = Callable[[Subject, Processes, Place], list[Edit]]
CLIP_ARGUMENTS: Final = frozenset({"max_norm", "clip_value", "norm_type", "error_if_nonfinite", "parameters"})


def _replace(subject: Subject, node: Placed, text: str) -> Edit:
    return Edit(subject.script.start(node), subject.script.end(node), text, "", node.lineno)


def backward(subject: Subject, _: Processes, place: Place) -> list[Edit]:
    found, name = method(place.node), subject.accelerator_at(place.node)
    if not name or found is None or not isinstance(place.node, ast.Call):
        return []
    given = [subject.script.text_of(each) for each in (found[1], *place.node.keywords)]
    return [_replace(subject, place.node, f"{name}.backward({', '.join(given)})")]


def of_accelerator(method_name: str = "", *, takes: Collection[str] | None = None) -> Fix:
    """Return the fix that calls the Accelerator's method of this (or the same) name, with the same arguments.

    Args:
        takes: the keywords that the method takes; None for any.
    """

    def fix(subject: Subject, _: Processes, place: Place) -> list[Edit]:
        call, name = place.node, subject.accelerator_at(place.node)
        if not name or not isinstance(call, ast.Call):
            return []
        if takes is not None and any(each.arg not in takes for each in call.keywords):
            return []
        return [_replace(subject, call.func, f"{name}.{method_name or subject.script.last_name(call)}")]

    return fix


def save(subject: Subject, processes: Processes, place: Place) -> list[Edit]:
    if not isinstance(place.node, ast.Call) or subject.script.path(place.node.func) != "torch.save":
        return []
    return of_accelerator("save", takes=())(subject, processes, place)


def full_state(subject: Subject, processes: Processes, place: Place) -> list[Edit]:
    """Ask the Accelerator for the weights, where all processes come."""
    call, name = place.node, subject.accelerator_at(place.node)
    found = method(call)
    if not name or found is None or found[0] != "state_dict" or processes.is_of_one(call):
        return []
    return [_replace(subject, call, f"{name}.get_state_dict({subject.script.text_of(found[1])})")]


def unwrap(subject: Subject, _: Processes, place: Place) -> list[Edit]:
    name = subject.accelerator_at(place.node)
    if not name or not isinstance(place.node, ast.Attribute):
        return []
    return [_replace(subject, place.node, f"{name}.unwrap_model({subject.script.text_of(place.node.value)})")]


def only_where_synchronised(subject: Subject, _: Processes, place: Place) -> list[Edit]:
    statement, name = subject.script.statement(place.node), subject.accelerator_at(place.node)
    start = subject.script.start(statement)
    alone = not subject.script.text[subject.script.line_start(statement.lineno) : start].strip()
    if not name or not alone or not isinstance(statement, ast.Expr) or statement.lineno != statement.end_lineno:
        return []
    indentation = subject.script.indentation(statement)
    return [Edit(start, start, f"if {name}.sync_gradients:\n{indentation}    ", "", statement.lineno)]


def generator(subject: Subject, _: Processes, place: Place) -> list[Edit]:
    call = place.node
    if not isinstance(call, ast.Call) or not subject.script.path(call.func).endswith("random_split"):
        return []
    if subject.script.imported.get("torch") != "torch" or not call.args:
        return []
    return [_argument(subject, call, "generator=torch.Generator().manual_seed(0)")]


def quiet_bar(subject: Subject, _: Processes, place: Place) -> list[Edit]:
    name = subject.accelerator_at(place.node)
    if not name or not isinstance(place.node, ast.Call) or not (place.node.args or place.node.keywords):
        return []
    return [_argument(subject, place.node, f"disable=not {name}.is_local_main_process")]


def _argument(subject: Subject, call: ast.Call, text: str) -> Edit:
    """Return the edit that adds a keyword argument after the others of a call."""
    last = max(subject.script.end(each) for each in (*call.args, *call.keywords))
    return Edit(last, last, f", {text}", "", call.lineno)


def device(subject: Subject, _: Processes, place: Place) -> list[Edit]:
    """Use the Accelerator's device, in ``x.to("cuda")``, ``device="cuda"`` and ``x.cuda()``."""
    name, node, outer = subject.accelerator_at(place.node), place.node, subject.script.parents[place.node]
    if not name:
        return []
    if isinstance(node, ast.Call):
        owner = method(node)
        if owner is None or node.args or node.keywords:
            return []
        return [Edit(subject.script.end(owner[1]), subject.script.end(node), f".to({name}.device)", "", node.lineno)]
    is_argument = isinstance(outer, ast.Call) and method_name(outer) == "to"
    if is_argument or (isinstance(outer, ast.keyword) and outer.arg == "device"):
        return [_replace(subject, node, f"{name}.device")]
    return []


def prepare_too(subject: Subject, _: Processes, place: Place) -> list[Edit]:
    """Add an object to the one ``a, b = accelerator.prepare(a, b)`` that follows in its block."""
    made = subject.script.statement(place.node)
    name = place.words["name"]
    block = subject.script.block(made)
    found = [call for call in subject.prepares if subject.script.statement(call) in block]
    if len(found) != 1 or len(subject.prepares) != 1 or found[0].lineno < made.lineno or found[0].keywords:
        return []
    call, statement = found[0], subject.script.statement(found[0])
    names = statement.targets[0] if isinstance(statement, ast.Assign) else None
    same = [dotted(each) for each in targets(statement)] == [dotted(each) or None for each in call.args]
    if not isinstance(names, ast.Tuple) or not same or method_name(call) != "prepare":
        return []
    ends = [subject.script.end(names.elts[-1]), subject.script.end(call.args[-1])]
    return [Edit(end, end, f", {name}", "", made.lineno) for end in ends]
