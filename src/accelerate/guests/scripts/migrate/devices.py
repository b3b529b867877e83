"""Replace the devices named in a script by the Accelerator's."""

from __future__ import annotations

import ast
import re
from typing import Final

from .plan import LOADER, MODEL, Plan
from .source import assigned_values, dotted, method
from .survey import derived

_DEVICE: Final = re.compile(r"^(cuda|cpu|mps|xpu|npu|gpu)(:\d+)?$")
_RANK: Final = re.compile(r"(^|_)(rank|gpu|gpu_id|device_id)$", re.IGNORECASE)
_ASSIGNED = "the Accelerator picks each process's device"
_STRIPPED_BATCH = "a prepared loader gives batches that are on the device already"
_STRIPPED_MODEL = "prepare() puts the model on the device"
_MOVED = "the device of this process, whatever it is"


def is_device(plan: Plan, node: ast.expr | None, depth: int = 0) -> bool:
    """Return whether an expression names a device."""
    if node is None or depth > 4:
        return False
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and bool(_DEVICE.match(node.value))
    if isinstance(node, ast.JoinedStr):
        first = node.values[0] if node.values else None
        return isinstance(first, ast.Constant) and str(first.value).startswith(("cuda", "xpu", "npu"))
    if isinstance(node, ast.IfExp):
        return is_device(plan, node.body, depth + 1) or is_device(plan, node.orelse, depth + 1)
    if isinstance(node, ast.Call):
        return plan.script.path(node.func) in ("torch.device", "torch.cuda.current_device")
    name = dotted(node)
    if not name:
        return False
    if name.rpartition(".")[2] == "device" and "." in name and not name.startswith("self."):
        return True  # args.device
    roots = plan.survey.roots_of(node)
    values = [value for root in roots for _, value, _ in plan.survey.assignments(root)]
    if values:
        return any(is_device(plan, value, depth + 1) for value in values)
    return name.rpartition(".")[2].lower() in ("device", "dev")


def is_rank(name: ast.expr) -> bool:
    """Return whether a name is used as the index of a device, as in ``model.to(local_rank)``."""
    return bool(_RANK.search(dotted(name).rpartition(".")[2]))


def change(plan: Plan) -> None:
    """Replace the devices that the script names by the Accelerator's."""
    for call in plan.script.calls("torch.cuda.set_device"):
        plan.remove(plan.script.statement(call), "the Accelerator has picked each process's device")
    for call in plan.script.nodes(ast.Call):
        method_call = method(call)
        if method_call is not None and method_call[0] in ("to", "cuda") and not plan.is_removed(call):
            _moved(plan, call, *method_call)
        for keyword in call.keywords:
            if keyword.arg in ("device", "map_location") and (
                is_literal(plan, keyword.value) or (keyword.arg == "map_location" and _is_mapping(plan, keyword.value))
            ):
                plan.replace(keyword.value, f"{plan.accelerator}.device", _MOVED)
        for given in call.args:  # Trainer(model, "cuda" if torch.cuda.is_available() else "cpu")
            if isinstance(given, ast.IfExp) and is_device(plan, given) and not plan.is_removed(call):
                plan.replace(given, f"{plan.accelerator}.device", _MOVED)


def assigned(plan: Plan) -> None:
    """Assign the Accelerator's device to names of devices, and remove names that are no longer used."""
    for statement in plan.script.nodes((ast.Assign, ast.AnnAssign)):
        _assigned(plan, statement)
    for statement in plan.script.nodes(ast.Return):
        value = statement.value
        if isinstance(value, (ast.Call, ast.IfExp)) and is_device(plan, value) and not plan.is_removed(statement):
            plan.replace(value, f"{plan.accelerator}.device", _ASSIGNED)
    _compared(plan)


def is_literal(plan: Plan, node: ast.expr) -> bool:
    """Return whether a device is written as a literal, as opposed to a name whose assignment is changed."""
    if isinstance(node, (ast.Name, ast.Attribute)):
        name = dotted(node)
        return "." in name and not name.startswith("self.") and name.endswith(".device") and name != "torch.device"
    return is_device(plan, node)


def _is_mapping(plan: Plan, node: ast.expr) -> bool:
    """Return whether a value is ``{"cuda:0": "cuda:1"}``, directly or in the assignment of its name."""
    if isinstance(node, ast.Dict):
        return True
    assigned = plan.survey.assignments_to(node)
    return bool(assigned) and all(isinstance(value, ast.Dict) for _, value, _ in assigned)


def _moved(plan: Plan, call: ast.Call, how: str, what: ast.expr) -> None:
    if how == "to":
        arguments = [*call.args, *(each.value for each in call.keywords if each.arg == "device")]
        if len(arguments) != 1 or any(each.arg not in ("non_blocking", "device") for each in call.keywords):
            if arguments and is_literal(plan, arguments[0]):
                plan.replace(arguments[0], f"{plan.accelerator}.device", _MOVED)
            return
        if not (is_device(plan, arguments[0]) or is_rank(arguments[0])):
            return
    if is_model(plan, what) and not plan.is_after_training(plan.script.statement(call)):
        _model_moved(plan, call, what)
    elif is_in_prepared_loop(plan, call, what):
        _batch_moved(plan, call, what)
    elif how == "cuda":
        plan.cut(plan.script.end(what), plan.script.end(call), f".to({plan.accelerator}.device)", _MOVED, call)
        plan.users.append(call)
    else:
        argument = call.args[0] if call.args else call.keywords[0].value
        if is_literal(plan, argument) or is_rank(argument):
            plan.replace(argument, f"{plan.accelerator}.device", _MOVED)


def is_model(plan: Plan, node: ast.expr) -> bool:
    """Return whether an expression is a prepared model, or creates one."""
    if dotted(node):
        return plan.is_prepared(node, MODEL)
    statement = plan.script.statement(node)
    if not isinstance(statement, (ast.Assign, ast.AnnAssign)):
        return False
    for target, value, _ in assigned_values(statement):
        if any(each is node for each in ast.walk(value)) and plan.survey.role(node) == "model":
            return plan.is_prepared(target, MODEL)
    return False


def _model_moved(plan: Plan, call: ast.Call, what: ast.expr) -> None:
    statement, name = plan.script.statement(call), dotted(what)
    same = isinstance(statement, ast.Assign) and statement.value is call and dotted(statement.targets[0]) == name
    if plan.script.is_statement(call) or (same and name):
        plan.remove(statement, _STRIPPED_MODEL)
    else:
        plan.strip(call, what, _STRIPPED_MODEL)


def is_in_prepared_loop(plan: Plan, node: ast.AST, what: ast.expr) -> bool:
    """Return whether ``what`` is part of a batch of a prepared loader."""
    for loop in plan.survey.loops:
        is_inside = loop.node in plan.script.ancestors(node) and loop.loaders <= set(plan.prepared[LOADER])
        if is_inside and derived(what, loop.batch_names | _comprehended(plan, node, loop.batch_names)):
            return True
    return False


def _comprehended(plan: Plan, node: ast.AST, names: set[str]) -> set[str]:
    """Return the names of comprehensions around the node that iterate over parts of a batch."""
    found: set[str] = set()
    for outer in plan.script.ancestors(node):
        if isinstance(outer, (ast.DictComp, ast.ListComp, ast.GeneratorExp)):
            for each in outer.generators:
                if derived(each.iter, names):
                    found |= {name.id for name in ast.walk(each.target) if isinstance(name, ast.Name)}
    return found


def _batch_moved(plan: Plan, call: ast.Call, what: ast.expr) -> None:
    statement = plan.script.statement(call)
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and _only_moves(plan, statement):
        plan.remove(statement, _STRIPPED_BATCH)
    else:
        plan.strip(call, what, _STRIPPED_BATCH)


def _only_moves(plan: Plan, statement: ast.Assign) -> bool:
    """Return whether a statement only moves names: ``x, y = x.to(d), y.to(d)``, ``batch = {k: v.to(d) for ...}``."""
    for target, value, _ in assigned_values(statement):
        if isinstance(value, (ast.DictComp, ast.ListComp)) and len(value.generators) == 1:
            source = value.generators[0].iter
            of = method(source)
            name = dotted(of[1] if of is not None and of[0] == "items" else source)
            moved = value.value if isinstance(value, ast.DictComp) else value.elt
            if name != dotted(target) or method(moved) is None or value.generators[0].ifs:
                return False
            continue
        how, what = method(value) or ("", value)
        if how not in ("to", "cuda") or dotted(what) != dotted(target) or not dotted(target):
            return False
    return True


def _assigned(plan: Plan, statement: ast.Assign | ast.AnnAssign) -> None:
    if plan.is_removed(statement):
        return
    for target, value, _ in assigned_values(statement):
        name = dotted(target)
        if not name or not is_device(plan, value) or isinstance(value, ast.Name):
            continue
        made = value.body if isinstance(value, ast.IfExp) else value
        if "device" not in name.lower() and not isinstance(made, (ast.Call, ast.JoinedStr)):
            continue
        if value is not statement.value and not isinstance(statement.value, ast.Tuple):
            continue
        uses = [node for node in plan.script.reads if dotted(node) == name]
        if uses and all(plan.is_removed(use) for use in uses) and statement.value is value:
            plan.remove(statement, "`device` is no longer used")
        elif not (isinstance(value, ast.Attribute) and name == dotted(value)):
            is_text = isinstance(statement, ast.AnnAssign) and dotted(statement.annotation) == "str"
            device = f"{plan.accelerator}.device{'.type' * _is_type(name)}"
            plan.replace(value, f"str({device})" if is_text else device, _ASSIGNED)


def _is_type(name: str) -> bool:
    """Return whether a name is for the type of a device: ``device_type``."""
    return name.lower().endswith("type")


def _compared(plan: Plan) -> None:
    """Replace ``device`` by ``device.type`` where the script uses it as a string."""
    for node in plan.script.nodes((ast.Compare, ast.keyword, ast.Attribute)):
        if isinstance(node, ast.keyword):  # torch.autocast(device_type=device)
            name, is_text = node.value, node.arg == "device_type"
        elif isinstance(node, ast.Attribute):  # device.startswith("cuda")
            name, is_text = node.value, node.attr in ("startswith", "split", "lower")
        elif isinstance(node.ops[0], (ast.In, ast.NotIn)):  # "cuda" in device
            name, is_text = node.comparators[0], _is_name(node.left)
        else:
            name, is_text = node.left, _is_name(node.comparators[0])
        if not is_text or not dotted(name) or _is_type(dotted(name)) or not is_device(plan, name):
            continue
        if not plan.is_removed(node) and not _is_written_as_text(plan, name):
            end = plan.script.end(name)
            plan.cut(end, end, ".type", "a device, not its name", name)


def _is_name(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and bool(_DEVICE.match(node.value))


def _is_written_as_text(plan: Plan, name: ast.expr) -> bool:
    """Return whether a name is declared as a string, and so becomes one."""
    made = plan.survey.assignments_to(name)
    return any(isinstance(each, ast.AnnAssign) and dotted(each.annotation) == "str" for each, _, _ in made)
