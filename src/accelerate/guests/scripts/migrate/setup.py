"""Add the import, the Accelerator and ``prepare``, and remove unused imports."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from .creation import Home, find_home
from .distributed import is_by_hand
from .plan import LOADER, PREPARED, Plan, UsePoint
from .source import Edit, Placed, Scope, chosen, dotted, first_line, parameters
from .survey import Symbol

_WIDTH: Final = 100
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


def prepare(plan: Plan) -> dict[int, int]:
    """Insert ``prepare`` after the last of its objects in each scope, and return its offset by the id of the scope."""
    groups: dict[int, tuple[Scope, list[tuple[str, Symbol]]]] = {}
    for role in PREPARED:
        for symbol in plan.names(role):
            scope = _prepare_scope(plan, symbol)
            groups.setdefault(id(scope), (scope, []))[1].append((role, symbol))
    found: dict[int, int] = {}
    for key, (scope, members) in groups.items():
        point = _insertion_point(plan, scope, [symbol for _, symbol in members])
        names = ", ".join(dict.fromkeys(symbol.name for _, symbol in members))
        text = f"{names} = {plan.accelerator}.prepare({names})"
        if len(point.indentation) + len(text) > _WIDTH:
            unit = "\t" if "\t" in point.indentation else "    "
            text = f"{names} = {plan.accelerator}.prepare(\n{unit}{names}\n)"
        if point.before:
            text += "\n"
        insert(plan, point, text, _WHY_PREPARE)
        found[key] = point.offset
        plan.users.append(UsePoint(scope, point.offset))
    if not plan.names(LOADER) and plan.survey.backwards and not is_by_hand(plan):
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
    body = list(scope.body)
    if not isinstance(scope, ast.Module) and any(symbol.name in parameters(scope) for symbol in symbols):
        first = body[1] if _is_text(body[0]) and len(body) > 1 else body[0]
        return ahead(plan, first)
    used = [loop.node for loop in plan.survey.loops if loop.loaders & set(symbols)]
    for statement in body:
        if plan.survey.trains(statement) or any(each is statement for each in used):
            return ahead(plan, statement)
    return ahead(plan, body[-1])


def _common(plan: Plan, statements: list[ast.stmt]) -> tuple[list[ast.stmt], int]:
    """Return the innermost block that contains all the statements, and the index of the last one in it."""
    chains = [_chain(plan, statement) for statement in statements]
    depth = min(map(len, chains))
    level = 0
    while level + 1 < depth and all(chain[level + 1][0] is chains[0][level + 1][0] for chain in chains):
        level += 1
    return chains[0][level][0], max(chain[level][1] for chain in chains)


def _chain(plan: Plan, statement: ast.stmt) -> list[tuple[list[ast.stmt], int]]:
    found: list[tuple[list[ast.stmt], int]] = []
    node: Any = statement
    scope = plan.script.scope(statement)
    while node is not scope:
        if isinstance(node, ast.stmt):
            block = plan.script.block(node)
            found.insert(0, (block, block.index(node)))
        node = plan.script.parents[node]
    return found


def _loads(plan: Plan, statement: ast.stmt, symbols: Sequence[Symbol]) -> bool:
    """Return whether a statement loads saved state into one of the objects."""
    names = [symbol.name for symbol in symbols]
    owners = (owner for _, owner in plan.script.methods("load_state_dict", inside=statement))
    return any(plan.survey.symbol(owner) in symbols or dotted(owner) in names for owner in owners)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


# ------------------------------------------------------------------------------------- the Accelerator


def create(plan: Plan) -> tuple[set[int], int]:
    """Create the Accelerator before its first use, import it, and return (ids of scopes that see it, its offset)."""
    users = [user for user in plan.users if isinstance(user, UsePoint) or not plan.is_removed(user)]
    scope: Scope = plan.script.tree if plan.everywhere else _common_scope(plan, users)
    last = _last_import(plan)
    home = find_home(plan, scope, users)
    text = f"{plan.accelerator} = Accelerator({_arguments(plan)})"
    _import(plan, last)
    if home is not None:
        point = _insertion_point_at_home(plan, home)
        lines = [f"global {plan.accelerator}"] if home.is_global else []
        lines += [text, *(f"{name} = {plan.accelerator}.device" for name in home.moved)]
        insert(plan, point, "\n".join(lines), _WHY_MADE)
        plan.edits.insert(0, plan.edits.pop())
    elif isinstance(scope, ast.Module) and not plan.needs:
        point = _insertion_point_at_head(plan, last)
        insert(plan, point, "\n" + text if last is not None else text + "\n", _WHY_MADE)
    else:
        point = ahead(plan, _first_user(plan, scope, users))
        insert(plan, point, text, _WHY_MADE)
        # A use at the same offset (prepare) comes after it.
        plan.edits.insert(0, plan.edits.pop())
    visible = {id(scope)}
    for function in plan.script.nodes((ast.FunctionDef, ast.AsyncFunctionDef)):
        if isinstance(scope, ast.Module) or scope in plan.script.ancestors(function):
            visible.add(id(function))
    return visible, point.offset


def _insertion_point_at_home(plan: Plan, home: Home) -> InsertionPoint:
    if home.after is not None:
        return after(plan, home.after)
    body = [statement for statement in home.scope.body if not _is_text(statement)]
    return ahead(plan, body[0])


def _scopes(plan: Plan, user: Placed) -> list[Scope]:
    found: list[Scope] = [plan.scope_of(user)]
    while not isinstance(found[-1], ast.Module):
        found.append(plan.script.scope(found[-1]))
    return found


def _common_scope(plan: Plan, users: Sequence[Placed]) -> Scope:
    chains = [_scopes(plan, user) for user in users]
    for scope in chains[0]:
        if all(any(scope is each for each in chain) for chain in chains):
            return scope
    return plan.script.tree


def _first_user(plan: Plan, scope: Scope, users: Sequence[Placed]) -> ast.stmt:
    """Return the first statement of a scope that needs the Accelerator."""
    first = min(map(plan.offset, users))
    body = [statement for statement in scope.body if not _is_text(statement)]
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
        if isinstance(statement, (ast.Import, ast.ImportFrom)) or (
            isinstance(statement, ast.Try) and all(map(_is_import, statement.body)) and not _defines(statement)
        ):
            found = statement
        elif isinstance(
            statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.For, ast.While, ast.With)
        ) or plan.survey.trains(statement):
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
