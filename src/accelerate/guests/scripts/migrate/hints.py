"""What changes with the number of processes: the global batch, random numbers, losses, and lengths of progress bars."""

from __future__ import annotations

import ast
from typing import Final

from .plan import LOADER, Plan
from .source import Scope, argument, dotted, is_constant, keyword, method, method_name

_DRAWS: Final = frozenset(
    {
        "rand", "randn", "randint", "randperm", "normal", "bernoulli", "rand_like", "randn_like", "randint_like",
        "multinomial", "uniform", "choice", "shuffle", "sample", "random",
    }
)  # fmt: skip
_DRAWING_METHODS: Final = frozenset({"normal_", "uniform_", "bernoulli_", "random_"})
_SEEDS: Final = frozenset({"manual_seed", "manual_seed_all", "seed", "set_seed", "seed_everything", "seed_all"})
_BARS: Final = ("tqdm", "trange")
_SPLIT: Final = "DataLoaderConfiguration"


def note_draws(plan: Plan) -> None:
    """Note where a seeded script draws random numbers in training: all processes draw the same."""
    seeds = [call for call in plan.script.nodes(ast.Call) if dotted(call.func).rpartition(".")[2] in _SEEDS]
    found = [call for call in plan.script.nodes(ast.Call) if _draws(plan, call) and plan.is_in_training(call)]
    if not seeds or not found:
        return
    others = list(dict.fromkeys(call.lineno for call in found[1:] if call.lineno != found[0].lineno))
    also = f" (and in line {', '.join(map(str, others))})" if others else ""
    plan.note(
        found[0],
        f"line {seeds[0].lineno} gives all processes the same seed, so all of them draw the same numbers here{also}. "
        "`accelerate.utils.set_seed(seed, device_specific=True)` after prepare() gives each its own.",
    )


def _draws(plan: Plan, call: ast.Call) -> bool:
    if keyword(call, "generator") is not None:
        return False
    path = plan.script.path(call.func)
    if path.startswith(("torch.", "numpy.random.", "random.")):
        return path.rpartition(".")[2] in _DRAWS and path.count(".") <= 2
    return method_name(call) in _DRAWING_METHODS and not path.startswith("torch.nn.init")


def global_batch(plan: Plan, *, keeps: bool) -> None:
    """Share each batch over the processes if the global batch is kept, else note that it grows with them."""
    values = (value for symbol in plan.prepared[LOADER] for _, value, _ in plan.survey.assignments(symbol))
    made = [value for value in values if isinstance(value, ast.Call)]
    if not made or not plan.survey.backwards:
        return
    if keeps:
        plan.arguments["dataloader_config"] = f"{_SPLIT}(split_batches=True)"
        plan.imports["accelerate"].append(_SPLIT)
        plan.note(
            made[0],
            "the processes share each batch of this size, which has to be a multiple of their number. They take the "
            "steps of one process.",
        )
        return
    plan.note(
        made[0],
        "each process takes batches of this size, so N processes take N times as many samples in a step, and 1/N of "
        "the steps in an epoch. `accelerate migrate --keep_batch` divides each batch over the processes instead.",
    )


def bars(plan: Plan, is_visible: set[Scope], after: int, prepared_at: dict[Scope, int]) -> None:
    """Give progress bars the length of the prepared loader, and draw them on one process."""
    for call in plan.script.nodes(ast.Call):
        if plan.script.last_name(call) not in _BARS or plan.is_removed(call):
            continue
        scope = plan.script.scope(call)
        start = plan.script.start(call)
        if start > prepared_at.get(scope, start):
            for name in _lengths(call):
                _measure_again(plan, name)
        is_late = not isinstance(scope, ast.Module) or start > after
        given = [*call.args, *call.keywords]
        if scope in is_visible and is_late and given and keyword(call, "disable") is None:
            end = max(map(plan.script.end, given))
            text = f", disable=not {plan.accelerator}.is_local_main_process"
            plan.cut(end, end, text, "drawn once, not once a process", call)


def _lengths(call: ast.Call) -> list[ast.Name]:
    """Return the names in a bar's length: of ``tqdm(total=n)``, ``tqdm(range(n))`` and ``trange(n)``."""
    places: list[ast.expr] = [each.value for each in call.keywords if each.arg == "total"]
    places += [each for each in call.args if dotted(call.func).endswith("trange") or isinstance(each, ast.Call)]
    return [name for place in places for name in ast.walk(place) if isinstance(name, ast.Name)]


def _measure_again(plan: Plan, name: ast.Name) -> None:
    """Replace a number of steps, counted before ``prepare``, by the expression itself."""
    made = plan.survey.assignments_to(name)
    if len(made) != 1 or made[0][2] is not None:
        return
    value = made[0][1]
    calls = [call for call in plan.script.nodes(ast.Call, value) if dotted(call.func) == "len"]
    is_near = plan.script.scope(value) is plan.script.scope(name)
    if is_near and any(plan.is_prepared(each, LOADER) for call in calls for each in call.args[:1]):
        why = "the steps of one process, counted again after prepare()"
        plan.replace(name, plan.script.text_of(value), why, uses=False)


_WEIGHTED: Final = (
    "the loss is a weighted mean, and processes have different weights",
    "the loss is a weighted mean (ignore_index leaves out padding, weight counts classes more): each process takes it "
    "over its own part, and the processes count the same. `accelerator.backward(sum_of_losses, weight=their_weight)` "
    "gives the mean over all parts.",
)
#: The position of the class weights in the arguments of these.
_WEIGHT_PLACES: Final = {"CrossEntropyLoss": 0, "NLLLoss": 0, "cross_entropy": 2, "nll_loss": 2}
_PAIRED: Final = (
    "the loss compares the samples of a batch with each other, and a process has its own only",
    "this compares the samples of a batch with each other: on several processes each with those of its own process.",
)


_SUMMED: Final = (
    "the loss is a sum over samples, and gradients are averaged over processes",
    "the loss is a sum over the samples of a batch, but gradients are averaged over processes: N processes step with "
    "1/N of the gradients of all samples together. Multiply it by accelerator.num_processes to have their sum.",
)


# -- losses that aren't a mean over a batch's samples, and so depend on how samples are divided over processes --------


def note_losses(plan: Plan) -> list[str]:
    """Add notes about results that differ on several processes by design, and return the reasons."""
    found: dict[str, None] = {}
    for node in plan.script.nodes((ast.Call, ast.BinOp)) if plan.survey.backwards else ():
        reason = _WEIGHTED if _is_weighted(plan, node) else _PAIRED if _is_of_pairs(node) else None
        if reason is None and _is_summed(node) and plan.is_in_training(node) and not plan.is_by_hand:
            reason = _SUMMED
        if reason is not None:
            plan.note(node, reason[1])
            found[reason[0]] = None
    return list(found)


def _is_weighted(plan: Plan, node: ast.AST) -> bool:
    """Return whether a cross entropy is a weighted mean, because of ``ignore_index`` or class ``weight``."""
    place = _WEIGHT_PLACES.get(plan.script.last_name(node)) if isinstance(node, ast.Call) else None
    if place is None or not isinstance(node, ast.Call):
        return False
    reduction, weight = keyword(node, "reduction"), argument(node, "weight", place)
    is_unweighted = weight is None or is_constant(weight, None)
    leaves_out = not is_unweighted or keyword(node, "ignore_index") is not None
    return leaves_out and (reduction is None or is_constant(reduction, "mean"))


def _is_summed(node: ast.AST) -> bool:
    """Return whether a loss is a sum: ``reduction="sum"``."""
    return isinstance(node, ast.Call) and is_constant(keyword(node, "reduction"), "sum")


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
