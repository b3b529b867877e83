"""The steps of a script: training, evaluating, printing, saving and loading."""

from __future__ import annotations

import ast
from typing import Final

from . import precision
from .distributed import is_trained
from .plan import LOADER, MODEL, OPTIMIZER, SCHEDULER, Plan
from .setup import ahead, insert
from .source import Scope, dotted, keyword, method, method_name
from .survey import SCALER, Loop, Survey, Symbol

_CLIPPERS: Final = {
    "torch.nn.utils.clip_grad_norm_": "clip_grad_norm_", "torch.nn.utils.clip_grad_norm": "clip_grad_norm_",
    "torch.nn.utils.clip_grad_value_": "clip_grad_value_",
}  # fmt: skip


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
    name, owner = method(loss) or ("", loss)
    if name != "scale" or not isinstance(loss, ast.Call) or not loss.args or not is_scaler(plan, owner):
        return None
    return loss.args[0]


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
    keywords = ", ".join(f"{each.arg}={script.text_of(each.value)}" for each in call.keywords)
    rest = "".join(f", {each}" for each in (given and f"gradient={given}", keywords) if each)
    plan.cut(script.start(call), script.start(loss), f"{plan.accelerator}.backward(", why, call)
    plan.cut(script.end(loss), script.end(call), f"{rest})", "", call)
    plan.users.append(call)


# ---------------------------------------------------------------------------------------- loss scaling


def _scaling(plan: Plan) -> None:
    made = [symbol for symbol in list(plan.survey.assigned) if plan.survey.role_of(symbol) == SCALER]
    for call, owner in plan.script.methods("update", "unscale_"):
        if is_scaler(plan, owner) and plan.script.is_statement(call):
            plan.remove(plan.script.statement(call), "the optimizer and clip_grad_norm_ do it")
    for call, owner in plan.script.methods("step"):
        if is_scaler(plan, owner) and call.args:
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
    scaler, why = f"{plan.accelerator}.scaler", "the Accelerator's own scaler"
    for call, owner in plan.script.methods("state_dict", "load_state_dict"):
        if plan.survey.symbol(owner) != symbol or plan.is_removed(call):
            continue
        if method_name(call) == "state_dict":
            plan.replace(call, f"({scaler}.state_dict() if {scaler} else {{}})", why)
        elif call.args and plan.script.is_statement(call):
            state = plan.script.text_of(call.args[0])
            plan.replace(call, f"if {scaler}: {scaler}.load_state_dict({state})", why)


def _scaler_made(plan: Plan, symbol: Symbol, statement: ast.stmt, value: ast.expr) -> None:
    is_choice = isinstance(value, ast.IfExp)  # GradScaler() if args.amp else None
    value = value.body if isinstance(value, ast.IfExp) else value
    if not isinstance(value, ast.Call) or plan.survey.role(value) != SCALER:
        return
    options = [each for each in value.keywords if each.arg not in ("enabled", "device", None)]
    if options:
        plan.handlers["GradScalerKwargs"] = [f"{each.arg}={plan.script.text_of(each.value)}" for each in options]
    _scaler_state(plan, symbol)
    known = ("scale", "step", "update", "unscale_", "state_dict", "load_state_dict")
    uses = [(node, plan.script.parents[node]) for node in plan.survey.uses([symbol])]
    others = [node for node, outer in uses if not (isinstance(outer, ast.Attribute) and outer.attr in known)]
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


def schedule(plan: Plan, *, keeps_batch: bool) -> None:
    """Choose the scheduler's mode so that learning rates follow the same curve on any number of processes.

    A schedule that steps once per epoch doesn't change. One that steps in every batch is made either for the number of
    batches of one process (then it takes one step per process at once, which is the default), or, in a hand-written
    distributed script, for a number of updates. The mode applies to all schedulers: if some step in every batch and
    others once per epoch, one call stays one step.
    """
    if not plan.prepared[SCHEDULER] or keeps_batch:  # one step is that of one process then
        return
    made = plan.survey.assignments(plan.prepared[SCHEDULER][0])
    location: ast.AST = made[0][0] if made else plan.script.tree
    per_batch = _stepping_per_batch(plan)
    if not set(plan.prepared[SCHEDULER]) <= per_batch or (plan.is_by_hand and not _counts_batches(plan)):
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
            found |= plan.survey.roots_of(owner)
    return found


def _counts_batches(plan: Plan) -> bool:
    """Return whether the script uses the length of a training loader."""
    loaders = set(plan.prepared[LOADER])
    measured = (each for call in plan.script.calls("len") for each in call.args)
    return any(plan.survey.roots_of(each) & loaders for each in measured)


def prints(plan: Plan, is_visible: set[Scope], after: int) -> None:
    """Replace ``print`` by the Accelerator's, which prints once, wherever the Accelerator is in scope."""
    for call in plan.script.nodes(ast.Call):
        start, scope = plan.script.start(call), plan.script.scope(call)
        is_late = start >= after or not isinstance(scope, ast.Module)
        is_own = dotted(call.func) == "print" and keyword(call, "file") is None and not plan.is_removed(call)
        if is_own and is_late and scope in is_visible:
            plan.cut(start, start, f"{plan.accelerator}.", "printed once, not once a process", call)


_ENDS: Final = frozenset({"cpu", "numpy", "tolist", "detach", "float", "clone"})


# --------------------------------------------- scripts that only evaluate: each process predicts its part


def collected(survey: Survey) -> list[tuple[Loop, ast.expr]]:
    """Return the names that a loop over a loader appends to lists: ``predictions.append(output.cpu().numpy())``."""
    found: list[tuple[Loop, ast.expr]] = []
    for loop in survey.loops:
        for call, _ in survey.script.methods("append", "extend", inside=loop.node):
            value = call.args[0] if len(call.args) == 1 else call
            while (inner := method(value)) is not None and inner[0] in _ENDS:
                value = inner[1]
            if isinstance(value, ast.Name):
                found.append((loop, value))
    return found


def adds_up(survey: Survey) -> ast.AST | None:
    """Return an augmented assignment in a loop over a loader, which would sum one process's samples only."""
    return next((node for loop in survey.loops for node in survey.script.nodes(ast.AugAssign, loop.node)), None)


def gather(plan: Plan) -> None:
    """Gather the values that the loops collect, and prepare their loaders and models."""
    survey = plan.survey
    for _, value in collected(survey):
        text = f"{plan.accelerator}.gather_for_metrics({plan.script.text_of(value)})"
        plan.replace(value, text, "of all processes, each sample once")
    for loop in survey.loops:
        plan.prepare(LOADER, loop.loaders)
        for call in plan.script.nodes(ast.Call, loop.node):
            if (dotted(call.func) and method(call) is None) or dotted(call.func).startswith("self."):
                for root in survey.roots_of(call.func):
                    named = not survey.is_defined(root) and root.name.rpartition(".")[2] in ("model", "net")
                    if survey.role_of(root) == MODEL or named:
                        plan.prepare(MODEL, [root])


_WRITTEN = "the main process has written the file by then"
_UNWRAPPED = "the model's own names, without what prepare() put around it"


# ----------------------------- files, which are written once, with the names of the user's own model


def save(plan: Plan, prepared_at: dict[Scope, int]) -> None:
    """Save on one process, and load into the model without its wrapper.

    Args:
        prepared_at: the offset in the text where models are prepared, by scope.
    """
    for call in plan.script.calls("torch.save"):
        if not plan.is_removed(call):
            plan.replace(call.func, f"{plan.accelerator}.save", "written once, by the main process")
            if call.args and dotted(call.args[0]) and is_trained(plan, call.args[0]):
                _unwrap(plan, call.args[0])
    for call, owner in plan.script.methods("state_dict", "load_state_dict", "save_pretrained"):
        if dotted(owner) and is_trained(plan, owner) and not plan.is_removed(call):
            offset = prepared_at.get(plan.script.scope(call))
            if offset is None or plan.script.start(call) > offset:
                _unwrap(plan, owner)


def wait_before_loading(plan: Plan) -> None:
    """Wait before a script loads its own file: the main process writes it, and all of them read it."""
    saves = plan.script.calls("torch.save")
    for call in plan.script.calls("torch.load"):
        statement, scope = plan.script.statement(call), plan.script.scope(call)
        is_later = any(each.lineno < call.lineno and plan.script.scope(each) is scope for each in saves)
        guards = [outer for outer in plan.script.ancestors(statement) if isinstance(outer, ast.If)]
        if saves and (is_later or plan.is_after_training(statement)) and not guards:
            insert(plan, ahead(plan, statement), f"{plan.accelerator}.wait_for_everyone()", _WRITTEN)
            plan.users.append(call)


def _unwrap(plan: Plan, node: ast.expr) -> None:
    plan.replace(node, f"{plan.accelerator}.unwrap_model({plan.script.text_of(node)})", _UNWRAPPED)
