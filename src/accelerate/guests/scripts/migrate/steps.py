"""The steps of a script: training, evaluating, printing, saving and loading."""

from __future__ import annotations

import ast
from typing import Final

from . import precision
from .distributed import is_trained
from .plan import LOADER, MODEL, OPTIMIZER, SCHEDULER, Plan
from .setup import ahead, insert
from .source import dotted, method
from .survey import SCALER, Loop, Survey, Symbol

_CLIPPERS: Final = {
    "torch.nn.utils.clip_grad_norm_": "clip_grad_norm_", "torch.nn.utils.clip_grad_norm": "clip_grad_norm_",
    "torch.nn.utils.clip_grad_value_": "clip_grad_value_",
}  # fmt: skip
_ONCE: Final = "printed once, not once a process"


def change(plan: Plan) -> None:
    """Replace backward, clipping, loss scaling and autocast by the Accelerator's."""
    for call in plan.survey.backwards:
        _backward(plan, call)
    for call in plan.script.nodes(ast.Call):
        name = _CLIPPERS.get(plan.script.path(call.func))
        if name is not None:
            plan.replace(
                call.func, f"{plan.accelerator}.{name}", "the norm is that of all processes, in true units under fp16"
            )
    _scaling(plan)
    precision.change(plan)
    _accumulation(plan)


def _scaled(plan: Plan, loss: ast.expr) -> ast.expr | None:
    """Return ``loss`` of ``scaler.scale(loss)``; None for other expressions."""
    method_call = method(loss)
    if method_call is None or method_call[0] != "scale" or not isinstance(loss, ast.Call) or not loss.args:
        return None
    return loss.args[0] if is_scaler(plan, method_call[1]) else None


def is_scaler(plan: Plan, node: ast.AST) -> bool:
    """Return whether a name refers to a gradient scaler."""
    symbol = plan.survey.symbol(node)
    is_named = symbol is not None and symbol.name.rpartition(".")[2].endswith("scaler")
    is_unknown = is_named and not any(map(plan.survey.is_defined, plan.survey.roots(symbol)))
    return is_unknown or plan.survey.may_be(node, SCALER)


def _backward(plan: Plan, call: ast.Call) -> None:
    assert isinstance(call.func, ast.Attribute)
    script, loss = plan.script, call.func.value
    why = "gradients are scaled, reduced and accumulated as the run needs it"
    inner = _scaled(plan, loss)
    if inner is not None:
        why += "; scaling included"
    loss = inner or loss
    given = ", ".join(script.text_of(each) for each in call.args)
    keywords = ", ".join(f"{keyword.arg}={script.text_of(keyword.value)}" for keyword in call.keywords)
    rest = "".join(f", {each}" for each in (given and f"gradient={given}", keywords) if each)
    plan.cut(script.start(call), script.start(loss), f"{plan.accelerator}.backward(", why, call)
    plan.cut(script.end(loss), script.end(call), f"{rest})", "", call)
    plan.users.append(call)


# ---------------------------------------------------------------------------------------- loss scaling


def _scaling(plan: Plan) -> None:
    made = [symbol for symbol in list(plan.survey.assigned) if plan.survey.role_of(symbol) == SCALER]
    for call in plan.script.nodes(ast.Call):
        method_call = method(call)
        if method_call is None or not is_scaler(plan, method_call[1]):
            continue
        statement = plan.script.statement(call)
        is_whole = isinstance(statement, ast.Expr) and statement.value is call
        if method_call[0] in ("update", "unscale_") and is_whole:
            plan.remove(statement, "the optimizer and clip_grad_norm_ do it")
        elif method_call[0] == "step" and call.args:
            _scaled_step(plan, call)
    for symbol in made:
        for statement, value, _ in plan.survey.assignments(symbol):
            _scaler_made(plan, symbol, statement, value)


def _scaled_step(plan: Plan, call: ast.Call) -> None:
    optimizer = call.args[0]
    rest = ", ".join(plan.script.text_of(each) for each in call.args[1:])
    plan.cut(plan.script.start(call), plan.script.start(optimizer), "", "a prepared optimizer scales by itself", call)
    plan.cut(plan.script.end(optimizer), plan.script.end(call), f".step({rest})", "", call)


def _scaler_state(plan: Plan, symbol: Symbol) -> None:
    """Save and load the state of the Accelerator's scaler, which exists in fp16 only."""
    scaler = f"{plan.accelerator}.scaler"
    for call in plan.script.nodes(ast.Call):
        found = method(call)
        if found is None or plan.survey.symbol(found[1]) != symbol or plan.is_removed(call):
            continue
        if found[0] == "state_dict":
            plan.replace(call, f"({scaler}.state_dict() if {scaler} else {{}})", "the Accelerator's own scaler")
        elif found[0] == "load_state_dict" and call.args:
            state = plan.script.text_of(call.args[0])
            if isinstance(plan.script.parents[call], ast.Expr):
                plan.replace(call, f"if {scaler}: {scaler}.load_state_dict({state})", "the Accelerator's own scaler")


def _scaler_made(plan: Plan, symbol: Symbol, statement: ast.stmt, value: ast.expr) -> None:
    is_choice = isinstance(value, ast.IfExp)  # GradScaler() if args.amp else None
    value = value.body if isinstance(value, ast.IfExp) else value
    if not isinstance(value, ast.Call) or plan.survey.role(value) != SCALER:
        return
    options = [keyword for keyword in value.keywords if keyword.arg not in ("enabled", "device", None)]
    if options:
        plan.handlers["GradScalerKwargs"] = [
            f"{keyword.arg}={plan.script.text_of(keyword.value)}" for keyword in options
        ]
    _scaler_state(plan, symbol)
    known = ("scale", "step", "update", "unscale_", "state_dict", "load_state_dict")
    others = [
        node
        for node in plan.script.nodes((ast.Name, ast.Attribute))
        if isinstance(node.ctx, ast.Load)
        and plan.survey.symbol(node) == symbol
        and not (isinstance(outer := plan.script.parents[node], ast.Attribute) and outer.attr in known)
    ]
    if others or is_choice:
        plan.replace(value, f"{plan.accelerator}.scaler", "the Accelerator's own scaler; None unless it runs in fp16")
        for node in [] if is_choice else others[:1]:
            plan.note(node, f"`{symbol.name}` is used here besides stepping. It is None unless the run is in fp16.")
    else:
        plan.remove(statement, "the Accelerator scales losses where fp16 needs it")


# -------------------------------------------------------------------- accumulation, schedules, printing


def _accumulation(plan: Plan) -> None:
    """Add a note about hand-written accumulation, which stays correct but synchronises in every micro-batch."""
    for node in plan.script.nodes(ast.If):
        counts = any(isinstance(each, ast.Mod) for each in ast.walk(node.test))
        stepped = [owner for each in node.body for _, owner in plan.script.methods("step", inside=each)]
        steps = any(plan.is_prepared(owner, OPTIMIZER) for owner in stepped)
        if counts and steps:
            plan.note(
                node,
                "gradients are accumulated by hand, which stays right. On several processes they are exchanged in "
                "every micro-batch; `with accelerator.accumulate(model):` and gradient_accumulation_steps would do it "
                "once an update.",
            )


def schedule(plan: Plan, *, by_hand: bool, keeps_batch: bool = False) -> None:
    """Choose the scheduler's mode so that learning rates follow the same curve on any number of processes.

    A schedule that steps once per epoch doesn't change. One that steps in every batch is made either for the number of
    batches of one process (then it takes one step per process at once, which is the default), or, in a hand-written
    distributed script, for a number of updates. The mode applies to all schedulers: if some step in every batch and
    others once per epoch, one call stays one step.
    """
    if not plan.names(SCHEDULER) or keeps_batch:  # one step is that of one process then
        return
    made = plan.survey.assignments(plan.names(SCHEDULER)[0])
    location: ast.AST = made[0][0] if made else plan.script.tree
    per_batch = _stepping_per_batch(plan)
    if not set(plan.names(SCHEDULER)) <= per_batch or (by_hand and not _counts_batches(plan)):
        plan.arguments["scheduler_mode"] = '"updates"'
        plan.note(
            location, 'scheduler_mode="updates" keeps the scheduler at one step a call, on any number of processes.'
        )
    else:
        plan.note(
            location,
            "the scheduler steps in every batch. On N processes it takes N steps at once, because an epoch has N times "
            'fewer updates. Accelerator(scheduler_mode="updates") makes it one step an update.',
        )


def _stepping_per_batch(plan: Plan) -> set[Symbol]:
    found: set[Symbol] = set()
    for call, owner in plan.script.methods("step"):
        is_inside = any(loop.trains and loop.node in plan.script.ancestors(call) for loop in plan.survey.loops)
        if is_inside and plan.is_prepared(owner, SCHEDULER):
            found |= plan.survey.roots(plan.survey.symbol(owner))
    return found


def _counts_batches(plan: Plan) -> bool:
    """Return whether the script uses the length of a training loader."""
    loaders = set(plan.names(LOADER))
    return any(
        dotted(call.func) == "len" and any(plan.survey.roots(plan.survey.symbol(each)) & loaders for each in call.args)
        for call in plan.script.nodes(ast.Call)
    )


def prints(plan: Plan, is_visible: set[int], after: int) -> None:
    """Replace ``print`` by the Accelerator's, which prints once, wherever the Accelerator is in scope."""
    for call in plan.script.nodes(ast.Call):
        if dotted(call.func) != "print" or id(plan.script.scope(call)) not in is_visible or plan.is_removed(call):
            continue
        start = plan.script.start(call)
        if start < after and isinstance(plan.script.scope(call), ast.Module):
            continue
        if any(keyword.arg == "file" for keyword in call.keywords):
            continue
        plan.cut(start, start, f"{plan.accelerator}.", _ONCE, call)


_ENDS: Final = frozenset({"cpu", "numpy", "tolist", "detach", "float", "clone"})


# --------------------------------------------- scripts that only evaluate: each process predicts its part


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


def gather(plan: Plan) -> None:
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


_WRITTEN = "the main process has written the file by then"
_UNWRAPPED = "the model's own names, without what prepare() put around it"


# ----------------------------- files, which are written once, with the names of the user's own model


def save(plan: Plan, prepared_at: dict[int, int]) -> None:
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
