"""Losses that aren't a mean over a batch's samples, and so depend on how samples are divided over processes."""

from __future__ import annotations

import ast
from typing import Final

from .distributed import is_by_hand
from .plan import Plan
from .source import dotted, method

_WEIGHTED: Final = (
    "the loss is a weighted mean, and processes have different weights",
    "the loss is a weighted mean (ignore_index leaves out padding, weight counts classes more): each process takes it "
    "over its own part, and the processes count the same. `accelerator.backward(sum_of_losses, weight=their_weight)` "
    "gives the mean over all parts.",
)
#: The position of the class weights in the arguments of these.
_WEIGHT_PLACES: Final = {"CrossEntropyLoss": 0, "NLLLoss": 0, "cross_entropy": 2, "nll_loss": 2}
_MEAN: Final = ast.Constant("mean")
_PAIRED: Final = (
    "the loss compares the samples of a batch with each other, and a process has its own only",
    "this compares the samples of a batch with each other: on several processes each with those of its own process.",
)


_SUMMED: Final = (
    "the loss is a sum over samples, and gradients are averaged over processes",
    "the loss is a sum over the samples of a batch, but gradients are averaged over processes: N processes step with "
    "1/N of the gradients of all samples together. Multiply it by accelerator.num_processes to have their sum.",
)


def note(plan: Plan) -> list[str]:
    """Add notes about results that differ on several processes by design, and return the reasons."""
    found: dict[str, None] = {}
    for node in plan.script.nodes((ast.Call, ast.BinOp)):
        reason = _WEIGHTED if _is_weighted(plan, node) else _PAIRED if _is_of_pairs(node) else None
        if reason is None and _is_summed(node) and plan.is_in_training(node) and not is_by_hand(plan):
            reason = _SUMMED
        if reason is not None and plan.survey.backwards:
            plan.note(node, reason[1])
            found[reason[0]] = None
    return list(found)


def _is_weighted(plan: Plan, node: ast.AST) -> bool:
    """Return whether a cross entropy is a weighted mean, because of ``ignore_index`` or class ``weight``."""
    if not isinstance(node, ast.Call):
        return False
    place = _WEIGHT_PLACES.get(plan.script.path(node.func).rpartition(".")[2])
    if place is None:
        return False
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    reduction = given.get("reduction", _MEAN)
    weight = node.args[place] if len(node.args) > place else given.get("weight")
    leaves_out = "ignore_index" in given or not (weight is None or _is_none(weight))
    return leaves_out and isinstance(reduction, ast.Constant) and reduction.value == _MEAN.value


def _is_summed(node: ast.AST) -> bool:
    """Return whether a loss is a sum: ``reduction="sum"``."""
    given = {keyword.arg: keyword.value for keyword in node.keywords} if isinstance(node, ast.Call) else {}
    reduction = given.get("reduction")
    return isinstance(reduction, ast.Constant) and reduction.value == "sum"


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_of_pairs(node: ast.AST) -> bool:
    """Return whether a matrix is multiplied by its own transpose: ``z @ z.t()``, ``torch.mm(z, z.T)``."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        one, other = node.left, node.right
    elif isinstance(node, ast.Call) and len(node.args) == 2 and dotted(node.func) in ("torch.mm", "torch.matmul"):
        one, other = node.args
    else:
        return False
    turned = method(other)
    inner = turned[1] if turned is not None and turned[0] in ("t", "transpose") else None
    if isinstance(other, ast.Attribute) and other.attr in ("T", "mT"):
        inner = other.value
    return inner is not None and ast.dump(inner) == ast.dump(one)
