"""Add the import, the Accelerator and ``prepare``, and remove unused imports.

The Accelerator is made before its first use, and after the values of its arguments are known.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

from .plan import LOADER, PREPARED, Plan, UsePoint
from .precision import note_unknown
from .source import Edit, Function, Placed, Scope, chosen, dotted, first_line, parameters
from .survey import Symbol

_WIDTH: Final = 100
_ENDS_IMPORTS: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.For, ast.While, ast.With)
_WHY_PREPARE: Final = "each object in the form that this run needs, on one process or many"
_WHY_MADE: Final = "the Accelerator gets the device, the processes and the precision from the launcher or this line"


@final
@dataclass
class InsertionPoint:
    """A position between two statements."""

    offset: int
    indentation: str
    line: int
    before: bool  # whether it is the beginning of a line with other code


def after(plan: Plan, statement: ast.stmt) -> InsertionPoint:
    """Return the start of the line after a statement."""
    line = statement.end_lineno or statement.lineno
    return InsertionPoint(plan.script.line_start(line + 1), plan.script.indentation(statement), line, False)


def ahead(plan: Plan, statement: ast.stmt) -> InsertionPoint:
    """Return the start of a statement's first line, or of the comments directly above it."""
    line, indentation = first_line(statement), plan.script.indentation(statement)
    while line > 1 and plan.script.lines[line - 2].startswith(f"{indentation}#"):
        line -= 1
    return InsertionPoint(plan.script.line_start(line), indentation, first_line(statement), True)


def insert(plan: Plan, point: InsertionPoint, text: str, why: str) -> None:
    """Insert ``text``, of one line or several, at a position."""
    whole = "".join(f"{point.indentation}{line}\n" if line else "\n" for line in text.split("\n"))
    if point.offset >= len(plan.script.text) and plan.script.text and not plan.script.text.endswith("\n"):
        whole = "\n" + whole
    plan.edits.append(Edit(point.offset, point.offset, whole, why, point.line))


# ---------------------------------------------------------------------------------------------- prepare


def prepare(plan: Plan) -> dict[Scope, int]:
    """Insert ``prepare`` after the last of its objects in each scope, and return its offset by scope."""
    groups: dict[Scope, list[Symbol]] = {}
    for symbol in (symbol for role in PREPARED for symbol in plan.prepared[role]):
        groups.setdefault(_prepare_scope(plan, symbol), []).append(symbol)
    found: dict[Scope, int] = {}
    for scope, symbols in groups.items():
        point = _insertion_point(plan, scope, symbols)
        names = ", ".join(dict.fromkeys(symbol.name for symbol in symbols))
        text = f"{names} = {plan.accelerator}.prepare({names})"
        if len(point.indentation) + len(text) > _WIDTH:
            unit = "\t" if "\t" in point.indentation else "    "
            text = f"{names} = {plan.accelerator}.prepare(\n{unit}{names}\n)"
        if point.before:
            text += "\n"
        insert(plan, point, text, _WHY_PREPARE)
        found[scope] = point.offset
        plan.users.append(UsePoint(scope, point.offset))
    if not plan.prepared[LOADER] and plan.survey.backwards and not plan.is_by_hand:
        plan.note(
            plan.survey.backwards[0],
            "no DataLoader was found in the training loop, so every process would train on the same data. Give the "
            "data to a DataLoader and prepare it.",
        )
    return found


def _prepare_scope(plan: Plan, symbol: Symbol) -> Scope:
    """Return the function, or the module, in which the name is prepared."""
    made = plan.survey.assignments(symbol)
    if made:
        return plan.script.scope(made[-1][0])
    return plan.script.tree if isinstance(symbol.scope, ast.ClassDef) else symbol.scope


def _insertion_point(plan: Plan, scope: Scope, symbols: list[Symbol]) -> InsertionPoint:
    made = [statement for symbol in symbols for statement, _, _ in plan.survey.assignments(symbol)]
    made = [statement for statement in made if plan.script.scope(statement) is scope]
    made = [each for each in made if not plan.is_after_training(each)] or made
    if not made:
        return _insertion_point_of_arguments(plan, scope, symbols)
    block, anchor = _common(plan, made)
    for number in range(anchor + 1, len(block)):
        if plan.survey.trains(block[number]) and isinstance(block[number], (ast.For, ast.While)):
            break
        if _loads(plan, block[number], symbols):
            anchor = number
    return after(plan, block[anchor])


def _insertion_point_of_arguments(plan: Plan, scope: Scope, symbols: list[Symbol]) -> InsertionPoint:
    """Return the position for objects passed as arguments: the top of the function, or before the training loop."""
    body = scope.body
    if not isinstance(scope, ast.Module) and any(symbol.name in parameters(scope) for symbol in symbols):
        return ahead(plan, body[1] if _is_text(body[0]) and len(body) > 1 else body[0])
    used = [loop.node for loop in plan.survey.loops if loop.loaders & set(symbols)]
    first = next((each for each in body if plan.survey.trains(each) or each in used), body[-1])
    return ahead(plan, first)


def _common(plan: Plan, statements: list[ast.stmt]) -> tuple[list[ast.stmt], int]:
    """Return the innermost block that contains all the statements, and the index of the last one in it."""
    chains = [_chain(plan, statement) for statement in statements]
    depth = min(map(len, chains))
    level = 0
    while level + 1 < depth and all(chain[level + 1][0] is chains[0][level + 1][0] for chain in chains):
        level += 1
    return chains[0][level][0], max(chain[level][1] for chain in chains)


def _chain(plan: Plan, statement: ast.stmt) -> list[tuple[list[ast.stmt], int]]:
    """Return the blocks of its scope that contain a statement, from the outside in, each with the index in it."""
    scope = plan.script.scope(statement)
    outer = itertools.takewhile(lambda node: node is not scope, plan.script.ancestors(statement))
    inside = [each for each in (statement, *outer) if isinstance(each, ast.stmt)]
    blocks = [(plan.script.block(each), each) for each in reversed(inside)]
    return [(block, block.index(each)) for block, each in blocks]


def _loads(plan: Plan, statement: ast.stmt, symbols: Sequence[Symbol]) -> bool:
    """Return whether a statement loads saved state into one of the objects."""
    names = [symbol.name for symbol in symbols]
    owners = (owner for _, owner in plan.script.methods("load_state_dict", inside=statement))
    return any(plan.survey.symbol(owner) in symbols or dotted(owner) in names for owner in owners)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


# ------------------------------------------------------------------------------------- the Accelerator


def create(plan: Plan) -> tuple[set[Scope], int]:
    """Create the Accelerator before its first use, import it, and return (the scopes that see it, its offset)."""
    users = [user for user in plan.users if isinstance(user, UsePoint) or not plan.is_removed(user)]
    scope: Scope = plan.script.tree if plan.everywhere else _common_scope(plan, users)
    last = _last_import(plan)
    home = _find_home(plan, scope, users)
    text = f"{plan.accelerator} = Accelerator({_arguments(plan)})"
    _import(plan, last)
    at_head = home is None and isinstance(scope, ast.Module) and not plan.needs
    if home is not None:
        point = ahead(plan, _code(home.scope)[0]) if home.after is None else after(plan, home.after)
        lines = [f"global {plan.accelerator}"] if home.is_global else []
        text = "\n".join([*lines, text, *(f"{name} = {plan.accelerator}.device" for name in home.moved)])
    elif at_head:
        point = _insertion_point_at_head(plan, last)
        text = "\n" + text if last is not None else text + "\n"
    else:
        point = ahead(plan, _first_user(plan, scope, users))
    insert(plan, point, text, _WHY_MADE)
    if not at_head:  # a use at the same offset (prepare) comes after it
        plan.edits.insert(0, plan.edits.pop())
    functions = plan.script.nodes((ast.FunctionDef, ast.AsyncFunctionDef))
    is_global = isinstance(scope, ast.Module)
    inside = (function for function in functions if is_global or scope in plan.script.ancestors(function))
    return {scope, *inside}, point.offset


def _code(scope: Scope) -> list[ast.stmt]:
    """Return the statements of a scope, without its docstring."""
    return [statement for statement in scope.body if not _is_text(statement)]


def _scopes(plan: Plan, user: Placed) -> list[Scope]:
    found: list[Scope] = [plan.scope_of(user)]
    while not isinstance(found[-1], ast.Module):
        found.append(plan.script.scope(found[-1]))
    return found


def _common_scope(plan: Plan, users: Sequence[Placed]) -> Scope:
    chains = [_scopes(plan, user) for user in users]
    return next((scope for scope in chains[0] if all(scope in chain for chain in chains)), plan.script.tree)


def _first_user(plan: Plan, scope: Scope, users: Sequence[Placed]) -> ast.stmt:
    """Return the first statement of a scope that needs the Accelerator."""
    first = min(map(plan.offset, users))
    body = _code(scope)
    for statement in body:
        if plan.script.end(statement) >= first or plan.script.line_start((statement.end_lineno or 0) + 1) > first:
            return statement
    return body[-1]


def _arguments(plan: Plan) -> str:
    """Return the constructor's arguments."""
    arguments = [f"{name}={value}" for name, value in plan.arguments.items()]
    if plan.handlers:
        made = ", ".join(f"{name}({', '.join(values)})" for name, values in plan.handlers.items())
        arguments.append(f"kwargs_handlers=[{made}]")
    return ", ".join(arguments)


def _last_import(plan: Plan) -> ast.stmt | None:
    """Return the last import at the head of the module."""
    found: ast.stmt | None = None
    for statement in plan.script.tree.body:
        tries = isinstance(statement, ast.Try) and all(map(_is_import, statement.body)) and not _defines(statement)
        if _is_import(statement) or tries:
            found = statement
        elif isinstance(statement, _ENDS_IMPORTS) or plan.survey.trains(statement):
            break
    return found


def _is_import(statement: ast.stmt) -> bool:
    return isinstance(statement, (ast.Import, ast.ImportFrom))


def _defines(statement: ast.Try) -> bool:
    """Return whether a missing import is defined by hand: ``except ImportError: class SummaryWriter: ...``."""
    return any(isinstance(each, (ast.ClassDef, ast.FunctionDef)) for each in ast.walk(statement))


def _insertion_point_at_head(plan: Plan, last: ast.stmt | None) -> InsertionPoint:
    """Return the position after the last import; without imports, after the leading comments and docstring."""
    if last is not None:
        return after(plan, last)
    first = plan.script.tree.body[0]
    if _is_text(first):
        return after(plan, first)
    line = 1
    while line < first_line(first) and plan.script.lines[line - 1].startswith("#"):
        line += 1
    return InsertionPoint(plan.script.line_start(line), "", line, True)


def _import(plan: Plan, last: ast.stmt | None) -> None:
    names = ", ".join(sorted({"Accelerator", *plan.handlers, *plan.imports.pop("accelerate", [])}))
    text = f"from accelerate import {names}"
    for module, others in sorted(plan.imports.items()):
        text += f"\nfrom {module} import {', '.join(sorted(set(others)))}"
    insert(plan, _insertion_point_at_head(plan, last), text if last is not None else text + "\n", "imports the package")


# ------------------------------------------------------------------------- the Accelerator's place


@final
@dataclass(frozen=True)
class _Home:
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


def _find_home(plan: Plan, scope: Scope, users: list[Placed]) -> _Home | None:
    """Return the place at which all names in the arguments are known; None if there is none, or if ``scope`` will do.

    Names that are known nowhere in time are replaced by their values if those are written down; else mixed precision
    is taken to be on.
    """
    if not plan.needs:
        return None
    local = {symbol.scope for symbol in plan.needs if not isinstance(symbol.scope, ast.Module)}
    if local <= {scope}:
        home = _home_in(plan, scope, users)
    else:
        home = _home_in_function(plan, local.pop(), users) if len(local) == 1 else None
    if home is None and not _is_known_at_once(plan, scope, users):
        _give_up(plan)
    return home


def _home_in(plan: Plan, scope: Scope, users: list[Placed]) -> _Home | None:
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
    return _Home(scope, _before_the_first_use(plan, scope, last, users, early), moved=tuple(map(str, moved)))


def _before_the_first_use(
    plan: Plan, scope: Scope, last: ast.stmt, users: list[Placed], early: list[Placed]
) -> ast.stmt:
    """Return the statement before the first use that isn't moved."""
    first = min((plan.offset(user) for user in users if user not in early), default=plan.script.end(last))
    done = [statement for statement in scope.body if plan.script.end(statement) < first]
    return max([last, *done], key=plan.script.end)


def _last_assignment(plan: Plan, scope: Scope) -> ast.stmt | None:
    needs = (symbol for symbol in plan.needs if symbol.scope is scope)
    made = [statement for symbol in needs for statement, _, _ in plan.survey.assignments(symbol)]
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


def _home_in_function(plan: Plan, function: Function, users: list[Placed]) -> _Home | None:
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
    if any(name in using for statement in ahead for name in _names_called(plan, statement)):
        return None
    return _Home(function, last, is_global=any(plan.scope_of(user) is not function for user in users))


def _called_at_once(plan: Plan, statement: ast.stmt) -> list[str]:
    """Return the script's functions that a statement of the module calls, without those in definitions."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return []
    return [name for name in _names_called(plan, statement) if name in plan.survey.functions]


def _names_called(plan: Plan, statement: ast.stmt) -> list[str]:
    return [dotted(call.func).rpartition(".")[2] for call in plan.script.nodes(ast.Call, statement)]


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


# --------------------------------------------------------------------------------------------- imports


def drop_imports(plan: Plan) -> None:
    """Remove imports that only removed code needed."""
    edits = [edit for edit in chosen([*plan.edits, *plan.removals()]) if edit.end > edit.start]
    for statement in plan.script.nodes((ast.Import, ast.ImportFrom)):
        if statement in plan.removed or (isinstance(statement, ast.ImportFrom) and statement.module == "__future__"):
            continue
        unused = [alias for alias in statement.names if _lost_its_uses(plan, alias, edits)]
        if not unused:
            continue
        why = "nothing uses it any more"
        if len(unused) == len(statement.names):
            plan.remove(statement, why)
        elif isinstance(statement, ast.ImportFrom) and statement.lineno == statement.end_lineno:
            kept = [plan.script.text_of(alias) for alias in statement.names if alias not in unused]
            plan.replace(statement, f"from {statement.module} import {', '.join(kept)}", why, uses=False)


def _lost_its_uses(plan: Plan, alias: ast.alias, edits: list[Edit]) -> bool:
    name = (alias.asname or alias.name).split(".")[0]
    uses = [n for n in plan.script.nodes(ast.Name) if n.id == name]
    if not uses:
        return False
    pattern = re.compile(rf"\b{re.escape(name)}\b")
    for use in uses:
        start = plan.script.start(use)
        covering = [edit for edit in edits if edit.start <= start < edit.end]
        if not covering or any(pattern.search(edit.text) for edit in covering):
            return False
    # `import torch.distributed as dist` beside `import torch`: the path is used, the name isn't.
    return alias.asname is not None or "." not in alias.name
