"""A script as text and syntax tree, and edits of the text that keep all other characters.

Positions come from the tree, but the text is edited. So quotes, comments, blank lines and indentation don't change.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar, final

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
Scope: TypeAlias = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef
#: A node that has a place in the text.
Placed: TypeAlias = ast.stmt | ast.expr | ast.keyword | ast.alias | ast.arg | ast.excepthandler
Kind = TypeVar("Kind", bound=ast.AST)
_BLOCKS: Final = ("body", "orelse", "finalbody", "handlers")


@final
@dataclass(frozen=True)
class Edit:
    """The replacement of characters ``start`` to ``end`` by ``text``, with the reason and the line it concerns."""

    start: int
    end: int
    text: str
    why: str
    line: int


@final
class Script:
    """One script as text and syntax tree.

    Raises:
        SyntaxError: it isn't Python (3.10 or newer, whatever runs this).
    """

    def __init__(self, text: str, name: str) -> None:
        self.name = name
        self.text = text
        self.tree: ast.Module = ast.parse(text, name)
        self.lines: list[str] = text.splitlines(keepends=True)
        self.parents: dict[ast.AST, ast.AST] = {}
        for node in ast.walk(self.tree):
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node
        self._found: dict[Any, list[Any]] = {}  # by kind, of the whole script
        self._starts = [0]
        for line in self.lines:
            self._starts.append(self._starts[-1] + len(line))

    # -- positions ---------------------------------------------------------------------------------------------

    def _offset(self, line: int, column: int) -> int:
        """Convert (line, column in bytes) to an offset in the text."""
        before = self.lines[line - 1].encode()[:column].decode() if line <= len(self.lines) else ""
        return self._starts[line - 1] + len(before)

    def start(self, node: Placed) -> int:
        """Return the offset at which the node begins."""
        return self._offset(node.lineno, node.col_offset)

    def end(self, node: Placed) -> int:
        """Return the offset at which the node ends."""
        assert node.end_lineno is not None and node.end_col_offset is not None  # the tree is of a text
        return self._offset(node.end_lineno, node.end_col_offset)

    def line_start(self, line: int) -> int:
        """Return the offset at which a line (counted from 1) begins."""
        return self._starts[min(line - 1, len(self._starts) - 1)]

    def text_of(self, node: Placed) -> str:
        """Return the text of a node, exactly as written."""
        return self.text[self.start(node) : self.end(node)]

    def indentation(self, statement: ast.stmt) -> str:
        """Return the white space before a statement that begins its line."""
        line = self.lines[first_line(statement) - 1]
        return line[: len(line) - len(line.lstrip())]

    # -- context ---------------------------------------------------------------------------------------------

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes that contain this one, from the inside out."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def statement(self, node: ast.AST) -> ast.stmt:
        """Return the statement that contains this expression, or the node itself if it is a statement."""
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def is_statement(self, node: ast.expr) -> bool:
        """Return whether an expression is a statement of its own, whose value isn't used."""
        return isinstance(self.parents[node], ast.Expr)

    def scope(self, node: ast.AST) -> Scope:
        """Return the function (or the module) whose local names this node sees."""
        for outer in self.ancestors(node):
            if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)):
                return outer
        return self.tree

    def owner(self, scope: Scope) -> ast.ClassDef | None:
        """Return the class of the method that a function is, or is nested in."""
        return next((outer for outer in self.ancestors(scope) if isinstance(outer, ast.ClassDef)), None)

    def block(self, statement: ast.stmt) -> list[ast.stmt]:
        """Return the list of statements that this one is in."""
        parent = self.parents[statement]
        for name in _BLOCKS:
            block = getattr(parent, name, None)
            if isinstance(block, list) and statement in block:
                return block
        for case in getattr(parent, "cases", ()):
            if statement in case.body:
                return case.body
        return [statement]

    def nodes(self, kind: type[Kind] | tuple[type[Kind], ...], inside: ast.AST | None = None) -> list[Kind]:
        """Return all nodes of a kind, in the order of the text."""
        if inside is None and kind in self._found:
            return self._found[kind]
        found = [node for node in ast.walk(inside or self.tree) if isinstance(node, kind)]
        found.sort(key=lambda node: (getattr(node, "lineno", 0), getattr(node, "col_offset", 0)))
        if inside is None:
            self._found[kind] = found
        return found

    @functools.cached_property
    def reads(self) -> list[ast.Name | ast.Attribute]:
        """The names and attributes that the script reads, in the order of the text."""
        return [node for node in self.nodes((ast.Name, ast.Attribute)) if isinstance(node.ctx, ast.Load)]

    def methods(self, *names: str, inside: ast.AST | None = None) -> Iterator[tuple[ast.Call, ast.expr]]:
        """Yield the calls of methods with these names, each with its object."""
        for call in self.nodes(ast.Call, inside):
            found = method(call)
            if found is not None and found[0] in names:
                yield call, found[1]

    def calls(self, *paths: str) -> list[ast.Call]:
        """Return the calls of functions with these full paths."""
        return [call for call in self.nodes(ast.Call) if self.path(call.func) in paths]

    def values_of(self, name: str) -> list[ast.expr]:
        """Return the values that statements anywhere in the script assign to a name."""
        found = (each for statement in self.nodes((ast.Assign, ast.AnnAssign)) for each in assigned_values(statement))
        return [value for target, value, _ in found if dotted(target) == name]

    # -- names ---------------------------------------------------------------------------------------------

    @functools.cached_property
    def imported(self) -> dict[str, str]:
        """Local name -> dotted path, for all imports anywhere in the script."""
        names: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    first = alias.name.split(".")[0]
                    names[alias.asname or first] = alias.name if alias.asname else first
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        return names

    def path(self, node: ast.AST | None) -> str:
        """Resolve a chain of names to its full path (``optim.SGD`` to ``torch.optim.SGD``), else return ''."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        return ".".join([self.imported.get(node.id, node.id), *reversed(parts)])

    def last_name(self, call: ast.Call) -> str:
        """Return the last part of the path of the function that is called."""
        return self.path(call.func).rpartition(".")[2]


def first_line(statement: ast.stmt) -> int:
    """Return the first line of a statement, its decorators included."""
    decorators = getattr(statement, "decorator_list", ())
    return min([statement.lineno, *(each.lineno for each in decorators)])


def dotted(node: ast.AST) -> str:
    """Return a chain of names as written, such as ``self.model``; '' for other expressions."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def method(call: ast.AST) -> tuple[str, ast.expr] | None:
    """Return (name of the method, object) of a call ``object.name(...)``; None for other expressions."""
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
        return call.func.attr, call.func.value
    return None


def method_name(call: ast.AST) -> str:
    """Return the name of the method that is called; '' for other expressions."""
    return call.func.attr if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else ""


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """Return the value of a keyword argument, if it is given."""
    return next((each.value for each in call.keywords if each.arg == name), None)


def argument(call: ast.Call, name: str, position: int) -> ast.expr | None:
    """Return an argument that is given by its name or its position."""
    return keyword(call, name) or (call.args[position] if position < len(call.args) else None)


def is_constant(node: ast.expr | None, value: object) -> bool:
    """Return whether an expression is this constant; ``True`` isn't 1."""
    return isinstance(node, ast.Constant) and type(node.value) is type(value) and node.value == value


def targets(statement: ast.AST) -> list[ast.expr]:
    """Return the targets of an assignment or a loop, without nesting."""
    if isinstance(statement, ast.Assign):
        found = list(statement.targets)
    elif isinstance(statement, (ast.AnnAssign, ast.AugAssign, ast.For, ast.AsyncFor)):
        found = [statement.target]
    else:
        return []
    flat: list[ast.expr] = []
    while found:
        target = found.pop(0)
        if isinstance(target, (ast.Tuple, ast.List)):
            found = [*target.elts, *found]
        else:
            flat.append(target.value if isinstance(target, ast.Starred) else target)
    return flat


def assigned_values(statement: ast.Assign | ast.AnnAssign) -> Iterator[tuple[ast.expr, ast.expr, int | None]]:
    """Yield each target with its value, and its index among those that get parts of one value, else None.

    ``a, b = x, y`` gives ``x`` and ``y``, each as a whole; ``a, b = f()`` gives ``f()`` twice, with the indices 0, 1.
    """
    value = statement.value
    if value is None:
        return
    for target in [statement.target] if isinstance(statement, ast.AnnAssign) else statement.targets:
        if not isinstance(target, (ast.Tuple, ast.List)):
            yield target, value, None
        elif isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts):
            yield from ((each, one, None) for each, one in zip(target.elts, value.elts, strict=True))
        else:
            yield from ((each, value, place) for place, each in enumerate(target.elts))


def parameters(scope: Scope) -> list[str]:
    """Return the names of a function's parameters, in order."""
    arguments = getattr(scope, "args", None)
    if not isinstance(arguments, ast.arguments):
        return []
    return [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def returned(function: Function) -> ast.expr | None:
    """Return the value of a function's last ``return``."""
    returns = [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value is not None]
    return returns[-1] if returns else None


def apply(script: Script, edits: list[Edit]) -> str:
    """Apply the edits; of overlapping edits, only the outer one."""
    text, at = [], 0
    for edit in chosen(edits):
        text += [script.text[at : edit.start], edit.text]
        at = edit.end
    return "".join([*text, script.text[at:]])


def chosen(edits: list[Edit]) -> list[Edit]:
    """Return the edits to apply, in the order of the text; insertions at one offset in the order of the list."""
    done: list[Edit] = []
    for edit in sorted(edits, key=lambda each: (each.start, each.end > each.start, -each.end)):
        if done and edit.start < done[-1].end:
            continue
        done.append(edit)
    return done
