"""Refuse gradients computed outside of the model's forward(): they aren't averaged over processes."""

from __future__ import annotations

import ast

from .distributed import is_trained
from .plan import Plan
from .source import Function, dotted, method


def bypassing(plan: Plan) -> ast.Call | None:
    """Return the first call of a prepared model's own method that runs its layers in the training loop."""
    for call in plan.script.nodes(ast.Call):
        found = method(call)
        if found is None or not dotted(found[1]) or found[0] not in plan.survey.functions or found[0] == "forward":
            continue
        own = [each for each in plan.survey.functions[found[0]] if _is_of_module(plan, each)]
        if (
            own
            and is_trained(plan, found[1])
            and plan.is_in_training(call)
            and _is_kept(plan, call)
            and _runs_layers(plan, own[0])
        ):
            return call
    return None


def _is_of_module(plan: Plan, function: Function) -> bool:
    owner = plan.script.parents.get(function)
    return isinstance(owner, ast.ClassDef) and plan.survey.is_module_class(owner.name)


def _is_kept(plan: Plan, call: ast.Call) -> bool:
    """Return whether a call's value is used."""
    return isinstance(plan.script.statement(call), (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return))


def _runs_layers(plan: Plan, function: Function) -> bool:
    """Return whether a method calls the module itself or one of its layers, with gradients."""
    if any(map(plan.is_without_gradients, function.decorator_list)):
        return False
    for call in plan.script.nodes(ast.Call, function):
        name = dotted(call.func)
        if name == "self" or name == "self.forward":
            return True
        is_layer = (
            name.startswith("self.") and name.count(".") == 1 and plan.survey.role_of(plan.survey.symbol(call.func))
        )
        if is_layer == "model":
            return True
    return False
