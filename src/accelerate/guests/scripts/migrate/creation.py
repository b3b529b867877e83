"""Find where to create the Accelerator: before its first use, and after the values of its arguments are known."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import final

from .plan import Plan
from .precision import note_unknown
from .source import Function, Placed, Scope, dotted, parameters
from .survey import Symbol


@final
@dataclass(frozen=True)
class Home:
    """A place for the Accelerator in a function other than the module's top level, or after assignments there.

    Attributes:
        after: the statement to follow; None means the beginning of the function.
        is_global: other functions use the Accelerator too, so the function declares it global.
        moved: names to assign the Accelerator's device to, instead of where the script does so.
    """

    scope: Scope
    after: ast.stmt | None
    is_global: bool = False
    moved: tuple[str, ...] = ()


def find_home(plan: Plan, scope: Scope, users: list[Placed]) -> Home | None:
    """Return the place at which all names in the arguments are known; None if there is none, or if ``scope`` will do.

    Names that are known nowhere in time are replaced by their values if those are written down; else mixed precision
    is taken to be on.
    """
    if not plan.needs:
        return None
    local = {id(symbol.scope): symbol.scope for symbol in plan.needs if not isinstance(symbol.scope, ast.Module)}
    if not local or (len(local) == 1 and scope in local.values()):
        home = _home_in(plan, scope, users)
    else:
        home = _home_in_function(plan, next(iter(local.values())), users) if len(local) == 1 else None
    if home is None and not _is_known_at_once(plan, scope, users):
        _give_up(plan)
    return home


def _home_in(plan: Plan, scope: Scope, users: list[Placed]) -> Home | None:
    """Return the place after the last assignment of the names in this scope, if every use follows."""
    last = _last_assignment(plan, scope)
    if last is None:
        return None
    end = plan.script.end(last)
    early = [user for user in users if plan.offset(user) < end]
    moved = [_movable(plan, user, last) for user in early]
    if not early or not isinstance(scope, ast.Module) or None in moved:
        return None
    for user in early:
        plan.edits = [edit for edit in plan.edits if edit.start != plan.offset(user)]
    plan.users = [user for user in plan.users if user not in early]
    return Home(scope, _before_the_first_use(plan, scope, last, users, early), moved=tuple(map(str, moved)))


def _before_the_first_use(
    plan: Plan, scope: Scope, last: ast.stmt, users: list[Placed], early: list[Placed]
) -> ast.stmt:
    """Return the statement before the first use that isn't moved."""
    first = min((plan.offset(user) for user in users if user not in early), default=plan.script.end(last))
    done = [statement for statement in scope.body if plan.script.end(statement) < first]
    return max([last, *done], key=plan.script.end)


def _last_assignment(plan: Plan, scope: Scope) -> ast.stmt | None:
    made = [
        statement
        for symbol in plan.needs
        if symbol.scope is scope
        for statement, _, _ in plan.survey.assignments(symbol)
    ]
    inside = [each for each in scope.body if any(statement in ast.walk(each) for statement in made)]
    return inside[-1] if inside else None


def _movable(plan: Plan, user: Placed, last: ast.stmt) -> str | None:
    """Return the name of a device that the module assigns, if nothing uses it up to the statement ``last``."""
    parent = plan.script.parents.get(user)
    if not isinstance(parent, ast.Assign) or parent not in plan.script.tree.body or len(parent.targets) != 1:
        return None
    name = dotted(parent.targets[0])
    used = any(
        isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
        for statement in plan.script.tree.body
        if parent.lineno < statement.lineno <= last.lineno
        and not isinstance(statement, (ast.FunctionDef, ast.ClassDef))
        for node in ast.walk(statement)
    )
    return None if used or not name else name


def _home_in_function(plan: Plan, function: Function, users: list[Placed]) -> Home | None:
    """Return the place in a function before all uses of the Accelerator."""
    if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)) or plan.script.owner(function) is not None:
        return None
    at_top = [user for user in users if isinstance(plan.scope_of(user), ast.Module)]
    if at_top or plan.everywhere:
        return None
    using = {scope.name for scope in map(plan.scope_of, users) if not isinstance(scope, ast.Module)}
    called = [name for statement in plan.script.tree.body for name in _called_at_once(plan, statement)]
    if [name for name in called if name in using or name == function.name] != [function.name]:
        return None
    last = _last_assignment(plan, function)
    ahead = [statement for statement in function.body if last is not None and statement.lineno < last.lineno]
    begins = plan.script.start(function), plan.script.end(last) if last is not None else plan.script.start(function)
    if any(begins[0] < plan.offset(user) < begins[1] for user in users):
        return None
    if any(_names_called(plan, statement) & using for statement in ahead):
        return None
    return Home(function, last, is_global=any(plan.scope_of(user) is not function for user in users))


def _called_at_once(plan: Plan, statement: ast.stmt) -> list[str]:
    """Return the script's functions that a statement of the module calls, without those in definitions."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return []
    calls = plan.script.nodes(ast.Call, statement)
    return [name for call in calls if (name := dotted(call.func).rpartition(".")[2]) in plan.survey.functions]


def _names_called(plan: Plan, statement: ast.stmt) -> set[str]:
    return {dotted(call.func).rpartition(".")[2] for call in plan.script.nodes(ast.Call, statement)}


def _is_known_at_once(plan: Plan, scope: Scope, users: list[Placed]) -> bool:
    """Return whether all names have their values before the first use; write the values of others if they can be."""
    first = min(map(plan.offset, users), default=0)
    for symbol in dict.fromkeys(plan.needs):
        made = plan.survey.assignments(symbol)
        is_parameter = symbol.scope is scope and symbol.name in parameters(scope)
        is_earlier = bool(made) and plan.script.end(made[-1][0]) <= first and symbol.scope is scope
        is_outside = bool(made) and isinstance(symbol.scope, ast.Module) and not isinstance(scope, ast.Module)
        if is_parameter or is_earlier or is_outside:
            continue
        if symbol not in plan.inlined:
            return False
        _write_value(plan, symbol)
    return True


def _write_value(plan: Plan, symbol: Symbol) -> None:
    value = plan.inlined[symbol]
    text = re.sub(
        rf"(?<![\w.\"']){re.escape(symbol.name)}(?![\w\"'])", lambda _: value, plan.arguments["mixed_precision"]
    )
    always = re.fullmatch(r'\(?("\w+")\)? if (True|False) else ("\w+")', text)
    plan.arguments["mixed_precision"] = text if always is None else always[1 if always[2] == "True" else 3]


def _give_up(plan: Plan) -> None:
    """Take mixed precision to be on, and say so."""
    for node in plan.switches[:1]:
        note_unknown(plan, node)
    found = re.search(r'"(fp16|bf16)"', plan.arguments["mixed_precision"])
    plan.arguments["mixed_precision"] = found[0] if found else '"no"'
