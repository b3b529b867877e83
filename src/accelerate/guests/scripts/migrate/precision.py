"""Mixed precision: replace autocast, wherever it is made, and give its dtype and its switch to the Accelerator."""

from __future__ import annotations

import ast
import builtins
from typing import Final

from .plan import Plan
from .source import Script, dotted, keyword, method, targets
from .survey import SCALER, Symbol

_HALVES: Final = {
    "torch.float16": "fp16", "torch.half": "fp16", "torch.bfloat16": "bf16", "torch.float32": "no", "torch.float": "no",
}  # fmt: skip
_AUTOCASTS: Final = ("torch.autocast", "torch.amp.autocast", "torch.cuda.amp.autocast", "torch.cpu.amp.autocast",
                     "torch.amp.autocast_mode.autocast", "torch.cuda.amp.autocast_mode.autocast")  # fmt: skip
_PARTIAL: Final = "functools.partial"
_ON_GPU: Final = "torch.cuda.is_available()"
_WHY: Final = "the Accelerator's precision, which the constructor names"


def is_autocast(script: Script, node: ast.AST) -> bool:
    """Return whether an expression calls one of torch's autocast contexts, or is a partial of one."""
    if not isinstance(node, ast.Call):
        return False
    path = script.path(node.func)
    return path in _AUTOCASTS or (path == _PARTIAL and bool(node.args) and script.path(node.args[0]) in _AUTOCASTS)


def change(plan: Plan) -> None:
    """Replace autocast in `with` statements by the Accelerator's, and note its precision as an argument."""
    found: list[ast.Call] = []
    for call in plan.script.nodes(ast.Call):
        if not is_autocast(plan.script, call):
            continue
        if isinstance(plan.script.parents[call], ast.withitem):
            plan.replace(call, f"{plan.accelerator}.autocast()", _WHY)
        elif not _entered_elsewhere(plan, call):
            plan.note(call, "autocast is used other than in a `with` statement; it is left as it is.")
            continue
        found.append(call)
    if found:
        plan.note(
            found[0], "a prepared model computes in the Accelerator's precision wherever it is called, not only here."
        )
        plan.arguments["mixed_precision"] = _precision(plan, found[0])


def _entered_elsewhere(plan: Plan, call: ast.Call) -> bool:
    """Replace a named autocast where it is entered (`with ctx:`), and return whether it is entered anywhere."""
    names = {plan.survey.symbol(each) for each in targets(plan.script.statement(call))} - {None}
    entered: list[ast.expr] = []
    for item in plan.script.nodes(ast.withitem):
        used = item.context_expr
        name = used.func if isinstance(used, ast.Call) and not used.args else used
        if dotted(name) and plan.survey.roots_of(name) & names:
            plan.replace(used, f"{plan.accelerator}.autocast()", _WHY)
            entered.append(name)
    if entered and all(node in entered for node in plan.survey.uses(names)):
        for symbol in names:
            for statement, value, _ in plan.survey.assignments(symbol):
                if getattr(statement, "value", None) is value:
                    plan.remove(statement, _WHY)
    return bool(entered)


# ------------------------------------------------------------------------------- the argument as text


def _precision(plan: Plan, call: ast.Call) -> str:
    conditions = _conditions(plan, call)
    text = _text_of_dtype(plan, call)
    for condition in conditions:
        if condition == "False":
            return '"no"'
        if condition != "True" and text != '"no"':
            text = f'{_bracketed(text)} if {condition} else "no"'
    return text


def _bracketed(text: str) -> str:
    return f"({text})" if " if " in text else text


def _text_of_dtype(plan: Plan, call: ast.Call) -> str:
    arguments = call.args[1:] if plan.script.path(call.func) == _PARTIAL else call.args
    given = keyword(call, "dtype") or (arguments[1] if len(arguments) > 1 else None)
    if given is None:
        device = arguments[0] if arguments else keyword(call, "device_type")
        on_host = isinstance(device, ast.Constant) and device.value == "cpu"
        return '"bf16"' if on_host or ".cpu." in plan.script.path(call.func) else '"fp16"'
    found = _half(plan, given)
    if found is not None:
        return found
    guess = "fp16" if any(plan.survey.role_of(symbol) == SCALER for symbol in plan.survey.assigned) else "bf16"
    plan.note(call, f"`{plan.script.text_of(given)}` isn't known before the script runs; {guess} is taken. Change the "
              "constructor's mixed_precision if that is wrong.")  # fmt: skip
    return f'"{guess}"'


def _half(plan: Plan, node: ast.expr, depth: int = 0) -> str | None:
    """Return a dtype's precision as text: a constant, a choice, or an item of a dictionary."""
    path = plan.script.path(node)
    if path in _HALVES:
        return f'"{_HALVES[path]}"'
    if isinstance(node, ast.IfExp):
        return _choice(plan, node.test, _half(plan, node.body, depth + 1), _half(plan, node.orelse, depth + 1))
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Dict):
        values = [_half(plan, each, depth + 1) for each in node.value.values]
        keys = [None if key is None else plan.script.text_of(key) for key in node.value.keys]
        key = text_at_root(plan, node.slice)
        items = [f"{name}: {value}" for name, value in zip(keys, values, strict=True) if name and value]
        return f"{{{', '.join(items)}}}[{key}]" if key and len(items) == len(values) else None
    made = plan.survey.assignments_to(node) if depth < 4 else []
    if len(made) == 2 and isinstance(test := plan.script.parents[made[1][0]], ast.If):
        return _choice(plan, test.test, *(_half(plan, value, depth + 1) for _, value, _ in reversed(made)))
    return _half(plan, made[0][1], depth + 1) if len(made) == 1 else None


def _choice(plan: Plan, test: ast.expr, first: str | None, second: str | None) -> str | None:
    condition = _condition(plan, test)
    if first is None or second is None or condition is None:
        return None
    return f"{_bracketed(first)} if {condition} else {second}"


def _conditions(plan: Plan, call: ast.Call) -> list[str]:
    """Return the conditions of an autocast: its `enabled`, and those of the branches around it."""
    enabled = keyword(call, "enabled")
    tests: list[tuple[ast.expr, bool]] = [] if enabled is None else [(enabled, True)]
    node: ast.AST = call
    for outer in plan.script.ancestors(call):
        if isinstance(outer, ast.IfExp):
            tests.append((outer.test, node is outer.body))
        elif isinstance(outer, ast.stmt):
            parent = plan.script.parents[outer]
            if isinstance(parent, ast.If) and not isinstance(plan.script.parents[call], ast.withitem):
                tests.append((parent.test, outer in parent.body))
            break
        node = outer
    found: list[str] = []
    for test, is_on in tests:
        plan.switches.append(test)
        text = _condition(plan, test)
        if text is None:
            note_unknown(plan, test)
            continue
        turned = {"True": "False", "False": "True"}.get(text, text.removeprefix("not ") if text.startswith("not ")
                                                        else f"not {_in_brackets(text)}")  # fmt: skip
        found.append(text if is_on else turned)
    return list(dict.fromkeys(found))


def _in_brackets(text: str) -> str:
    return text if text.replace(".", "").replace("()", "").isidentifier() else f"({text})"


def note_unknown(plan: Plan, test: ast.expr) -> None:
    """Say that mixed precision is on, whatever ``test`` will be."""
    plan.note(
        test,
        f"`{plan.script.text_of(test)}` switches mixed precision here, but isn't known where the Accelerator is made. "
        "It is on. Change the Accelerator's argument mixed_precision to switch it off.",
    )


def _condition(plan: Plan, test: ast.expr) -> str | None:
    """Return a condition as text for the Accelerator's place: about devices, about a scaler, or about options."""
    if isinstance(test, ast.Constant):
        return str(bool(test.value))
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        sides = (test.left, test.comparators[0])
        named = [each.value for each in sides if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        if named and named[0] in ("cpu", "cuda") and any("device" in dotted(each) for each in sides):
            is_cuda = (named[0] == "cuda") == isinstance(test.ops[0], (ast.Eq, ast.In))
            return _ON_GPU if is_cuda else f"not {_ON_GPU}"
        if isinstance(test.ops[0], ast.IsNot) and plan.survey.may_be(test.left, SCALER):
            return _scaler_condition(plan, test.left)
    if plan.survey.may_be(test, SCALER):
        return _scaler_condition(plan, test)
    return text_at_root(plan, test)


def _scaler_condition(plan: Plan, scaler: ast.expr) -> str | None:
    """Return the condition under which a scaler is made."""
    for root in plan.survey.roots_of(scaler):
        for statement, value, _ in plan.survey.assignments(root):
            parent = plan.script.parents[statement]
            if isinstance(value, ast.IfExp) and plan.survey.role(value.body) == SCALER:
                return _condition(plan, value.test)
            if plan.survey.role(value) == SCALER:
                return _condition(plan, parent.test) if isinstance(parent, ast.If) else "True"
    return None


def text_at_root(plan: Plan, node: ast.expr) -> str | None:
    """Return an expression with each name as it is called where its value is made, and note those as needed.

    Return None if a name has several values, or stands for a value without a name.
    """
    pieces: list[tuple[int, int, str]] = []
    symbols: list[Symbol] = []
    waiting: list[ast.AST] = [node]
    while waiting:
        each = waiting.pop()
        if not dotted(each):
            waiting += ast.iter_child_nodes(each)
            continue
        assert isinstance(each, ast.expr)
        owner = each
        while plan.survey.symbol(owner) is None and isinstance(owner, ast.Attribute):
            owner = owner.value
        first = dotted(owner).split(".")[0]
        if first in plan.script.imported or (
            first in dir(builtins) and not plan.survey.assignments(Symbol(plan.script.tree, first))
        ):
            continue
        roots = {_as_entered(plan, root, owner) for root in plan.survey.roots_of(owner)}
        if len(roots) != 1 or isinstance((root := next(iter(roots))).scope, ast.ClassDef):
            return None
        made = plan.survey.assignments(root)
        if len(made) == 1 and (pure := _pure(plan, made[0][1])):
            plan.inlined[root] = pure
        pieces.append((plan.script.start(owner), plan.script.end(owner), root.name))
        symbols.append(root)
    text, begin = plan.script.text_of(node), plan.script.start(node)
    for start, end, name in sorted(pieces, reverse=True):
        text = text[: start - begin] + name + text[end - begin :]
    plan.needs += symbols
    return text


def _as_entered(plan: Plan, root: Symbol, node: ast.expr) -> Symbol:
    """Return the parameter of the function to which `if __name__ == "__main__":` passes a name."""
    made = plan.survey.assignments(root)
    symbol = plan.survey.symbol(node)
    if not isinstance(root.scope, ast.Module) or any(each in plan.script.tree.body for each, _, _ in made):
        return root
    while symbol is not None and symbol != root:
        given = list(plan.survey.arguments(symbol))
        if len(given) != 1 or given[0] == root:
            return symbol
        symbol = given[0]
    return root


def _pure(plan: Plan, value: ast.expr) -> str:
    """Return the text of a constant, or of an expression of imported functions; '' for others."""
    calls = plan.script.nodes(ast.Call, value)
    if any(method(each) is not None and plan.script.path(each.func).startswith("argparse") for each in calls):
        return ""
    names = [each.id for each in plan.script.nodes(ast.Name, value)]
    return _in_brackets(plan.script.text_of(value)) if all(name in plan.script.imported for name in names) else ""
