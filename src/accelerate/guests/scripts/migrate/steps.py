"""The training step: backward, clipping, mixed precision, and printing."""

from __future__ import annotations

import ast
from typing import Final

from .plan import LOADER, OPTIMIZER, SCHEDULER, Plan
from .source import Script, dotted, method
from .survey import SCALER, Symbol

_CLIPPERS: Final = {
    "torch.nn.utils.clip_grad_norm_": "clip_grad_norm_", "torch.nn.utils.clip_grad_norm": "clip_grad_norm_",
    "torch.nn.utils.clip_grad_value_": "clip_grad_value_",
}  # fmt: skip
_ONCE: Final = "printed once, not once a process"
_HALVES: Final = {"torch.float16": "fp16", "torch.half": "fp16", "torch.bfloat16": "bf16"}
_AUTOCASTS: Final = ("torch.autocast", "torch.amp.autocast", "torch.cuda.amp.autocast", "torch.cpu.amp.autocast",
                     "torch.amp.autocast_mode.autocast", "torch.cuda.amp.autocast_mode.autocast")  # fmt: skip


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
    _autocast(plan)
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
    roots = plan.survey.roots(symbol)
    made = any(plan.survey.role_of(root) == SCALER for root in roots)
    return made or (
        symbol is not None and symbol.name.rpartition(".")[2].endswith("scaler") and not _is_made(plan, roots)
    )


def _is_made(plan: Plan, roots: set[Symbol]) -> bool:
    return any(plan.survey.is_defined(root) for root in roots)


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
    made = [symbol for symbol in list(plan.survey._assigned) if plan.survey.role_of(symbol) == SCALER]
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


def _scaler_made(plan: Plan, symbol: Symbol, statement: ast.stmt, value: ast.expr) -> None:
    if not isinstance(value, ast.Call) or plan.survey.role(value) != SCALER:
        return
    options = [keyword for keyword in value.keywords if keyword.arg not in ("enabled", "device", None)]
    if options:
        plan.handlers["GradScalerKwargs"] = [
            f"{keyword.arg}={plan.script.text_of(keyword.value)}" for keyword in options
        ]
    known = ("scale", "step", "update", "unscale_")
    others = [
        node
        for node in plan.script.nodes((ast.Name, ast.Attribute))
        if isinstance(node.ctx, ast.Load)
        and plan.survey.symbol(node) == symbol
        and not (isinstance(outer := plan.script.parents[node], ast.Attribute) and outer.attr in known)
    ]
    if others:
        plan.replace(value, f"{plan.accelerator}.scaler", "the Accelerator's own scaler; None unless it runs in fp16")
        plan.note(others[0], f"`{symbol.name}` is used here besides stepping. It is None unless the run is in fp16.")
    else:
        plan.remove(statement, "the Accelerator scales losses where fp16 needs it")


# --------------------------------------------------------------------------------------------- precision


def is_autocast(script: Script, node: ast.AST) -> bool:
    """Return whether an expression calls one of torch's autocast contexts."""
    return isinstance(node, ast.Call) and script.path(node.func) in _AUTOCASTS


def _autocast(plan: Plan) -> None:
    found = [call for call in plan.script.nodes(ast.Call) if is_autocast(plan.script, call)]
    switches: list[tuple[str, ast.expr | None]] = []
    for call in found:
        if not isinstance(plan.script.parents[call], ast.withitem):
            plan.note(call, "autocast is used other than in a `with` statement; it is left as it is.")
            continue
        precision = _precision_of(plan, call)
        enabled = next((keyword.value for keyword in call.keywords if keyword.arg == "enabled"), None)
        switches.append((precision, enabled))
        plan.replace(call, f"{plan.accelerator}.autocast()", "the Accelerator's precision, which the constructor names")
    if not switches:
        return
    plan.note(
        found[0], "a prepared model computes in the Accelerator's precision wherever it is called, not only here."
    )
    precision, enabled = switches[0]
    if isinstance(enabled, ast.Constant):
        enabled, precision = None, precision if enabled.value else "no"
    if enabled is None:
        plan.arguments["mixed_precision"] = f'"{precision}"'
    else:
        plan.arguments["mixed_precision"] = f'"{precision}" if {plan.script.text_of(enabled)} else "no"'
        plan.needs.append(enabled)


def _precision_of(plan: Plan, call: ast.Call) -> str:
    given = next((keyword.value for keyword in call.keywords if keyword.arg == "dtype"), None)
    if given is None and len(call.args) > 1:
        given = call.args[1]
    found = _half(plan, given)
    if found is not None:
        return found
    device = call.args[0] if call.args else next((w.value for w in call.keywords if w.arg == "device_type"), None)
    if given is None:
        on_host = isinstance(device, ast.Constant) and device.value == "cpu"
        return "bf16" if on_host or ".cpu." in plan.script.path(call.func) else "fp16"
    scales = any(plan.survey.role_of(symbol) == SCALER for symbol in plan.survey._assigned)
    guess = "fp16" if scales else "bf16"
    plan.note(call, f"`{plan.script.text_of(given)}` isn't known before the script runs; {guess} is taken. Change the "
              "constructor's mixed_precision if that is wrong.")  # fmt: skip
    return guess


def _half(plan: Plan, node: ast.expr | None) -> str | None:
    if node is None:
        return None
    path = plan.script.path(node)
    if path in _HALVES:
        return _HALVES[path]
    symbol = plan.survey.symbol(node)
    values = [] if symbol is None else [value for _, value, _ in plan.survey.assignments(symbol)]
    return _half(plan, values[0]) if len(values) == 1 and isinstance(values[0], ast.Attribute) else None


# -------------------------------------------------------------------- accumulation, schedules, printing


def _accumulation(plan: Plan) -> None:
    """Add a note about hand-written accumulation, which stays correct but synchronises in every micro-batch."""
    for node in plan.script.nodes(ast.If):
        counts = any(isinstance(each, ast.Mod) for each in ast.walk(node.test))
        steps = any(
            (method_call := method(call)) is not None
            and method_call[0] == "step"
            and plan.is_prepared(method_call[1], OPTIMIZER)
            for each in node.body
            for call in ast.walk(each)
            if isinstance(call, ast.Call)
        )
        if counts and steps:
            plan.note(
                node,
                "gradients are accumulated by hand, which stays right. On several processes they are exchanged in "
                "every micro-batch; `with accelerator.accumulate(model):` and gradient_accumulation_steps would do it "
                "once an update.",
            )


def schedule(plan: Plan, *, by_hand: bool) -> None:
    """Choose the scheduler's mode so that learning rates follow the same curve on any number of processes.

    A schedule that steps once per epoch doesn't change. One that steps in every batch is made either for the number of
    batches of one process (then it takes one step per process at once, which is the default), or, in a hand-written
    distributed script, for a number of updates. The mode applies to all schedulers: if some step in every batch and
    others once per epoch, one call stays one step.
    """
    if not plan.names(SCHEDULER):
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
    for call in plan.script.nodes(ast.Call):
        method_call = method(call)
        if method_call is not None and method_call[0] == "step" and plan.is_prepared(method_call[1], SCHEDULER):
            ancestors = set(map(id, plan.script.ancestors(call)))
            if any(loop.trains and id(loop.node) in ancestors for loop in plan.survey.loops):
                found |= plan.survey.roots(plan.survey.symbol(method_call[1]))
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
        inside_module = isinstance(plan.script.scope(call), ast.Module)
        if inside_module and plan.script.start(call) < after:
            continue
        if any(keyword.arg == "file" for keyword in call.keywords):
            continue
        plan.cut(
            plan.script.start(call), plan.script.start(call), f"{plan.accelerator}.", _ONCE,
            call,
        )  # fmt: skip
