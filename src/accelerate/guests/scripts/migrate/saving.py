"""Saving and loading: files are written once, with the names of the user's own model."""

from __future__ import annotations

import ast

from .distributed import is_trained
from .plan import Plan
from .setup import ahead, insert
from .source import dotted, method

_WRITTEN = "the main process has written the file by then"
_UNWRAPPED = "the model's own names, without what prepare() put around it"


def change(plan: Plan, prepared_at: dict[int, int]) -> None:
    """Save on one process, and load into the model without its wrapper.

    Args:
        prepared_at: the offset in the text where models are prepared, by the id of the scope.
    """
    for call in plan.script.nodes(ast.Call):
        if plan.script.path(call.func) == "torch.save" and not plan.is_removed(call):
            plan.replace(call.func, f"{plan.accelerator}.save", "written once, by the main process")
            if call.args and dotted(call.args[0]) and is_trained(plan, call.args[0]):
                _unwrap(plan, call.args[0])
    for call in plan.script.nodes(ast.Call):
        method_call = method(call)
        if method_call is None or method_call[0] not in ("state_dict", "load_state_dict", "save_pretrained"):
            continue
        if dotted(method_call[1]) and is_trained(plan, method_call[1]) and not plan.is_removed(call):
            offset = prepared_at.get(id(plan.script.scope(call)))
            if offset is None or plan.script.start(call) > offset:
                _unwrap(plan, method_call[1])


def wait_before_loading(plan: Plan) -> None:
    """Wait before a script loads its own file: the main process writes it, and all of them read it."""
    saves = [call for call in plan.script.nodes(ast.Call) if plan.script.path(call.func) == "torch.save"]
    for call in plan.script.nodes(ast.Call):
        if plan.script.path(call.func) != "torch.load":
            continue
        statement = plan.script.statement(call)
        scope = plan.script.scope(call)
        is_later = any(each.lineno < call.lineno and plan.script.scope(each) is scope for each in saves)
        guards = [outer for outer in plan.script.ancestors(statement) if isinstance(outer, ast.If)]
        if saves and (is_later or plan.is_after_training(statement)) and not guards:
            insert(plan, ahead(plan, statement), f"{plan.accelerator}.wait_for_everyone()", _WRITTEN)
            plan.users.append(call)


def _unwrap(plan: Plan, node: ast.expr) -> None:
    plan.replace(node, f"{plan.accelerator}.unwrap_model({plan.script.text_of(node)})", _UNWRAPPED)
