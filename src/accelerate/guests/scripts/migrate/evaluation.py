"""Convert scripts that only evaluate: each process predicts its part, and all results are gathered."""

from __future__ import annotations

import ast
from typing import Final

from .plan import LOADER, MODEL, Plan
from .source import dotted, method
from .survey import Loop, Survey, Symbol

_ENDS: Final = frozenset({"cpu", "numpy", "tolist", "detach", "float", "clone"})


def collected(survey: Survey) -> list[tuple[Loop, ast.expr]]:
    """Return the names that a loop over a loader appends to lists: ``predictions.append(output.cpu().numpy())``."""
    found: list[tuple[Loop, ast.expr]] = []
    for loop in survey.loops:
        for call in survey.script.nodes(ast.Call, loop.node):
            method_call = method(call)
            if method_call is None or method_call[0] not in ("append", "extend") or len(call.args) != 1:
                continue
            value = call.args[0]
            while (inner := method(value)) is not None and inner[0] in _ENDS:
                value = inner[1]
            if isinstance(value, ast.Name):
                found.append((loop, value))
    return found


def adds_up(survey: Survey) -> ast.AST | None:
    """Return an augmented assignment in a loop over a loader, which would sum one process's samples only."""
    for loop in survey.loops:
        for node in survey.script.nodes(ast.AugAssign, loop.node):
            return node
    return None


def change(plan: Plan) -> None:
    """Gather the values that the loops collect, and prepare their loaders and models."""
    survey = plan.survey
    for _, value in collected(survey):
        text = f"{plan.accelerator}.gather_for_metrics({plan.script.text_of(value)})"
        plan.replace(value, text, "of all processes, each sample once")
    models: dict[Symbol, None] = {}
    for loop in survey.loops:
        plan.prepared[LOADER] += [each for each in loop.loaders if each not in plan.prepared[LOADER]]
        for call in plan.script.nodes(ast.Call, loop.node):
            if (dotted(call.func) and method(call) is None) or dotted(call.func).startswith("self."):
                for root in survey.roots(survey.symbol(call.func)):
                    named = not survey.is_defined(root) and root.name.rpartition(".")[2] in ("model", "net")
                    if survey.role_of(root) == MODEL or named:
                        models[root] = None
    plan.prepared[MODEL] += [each for each in models if each not in plan.prepared[MODEL]]
