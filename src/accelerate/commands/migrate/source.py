"""A script as text and as a tree, and edits of the text that leave every other character alone.

Positions come from the tree; what is written back is the text. So quotes, comments, blank lines and the width of the
indentation stay the author's own.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, final

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
Scope: TypeAlias = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef
_BLOCKS: Final = ("body", "orelse", "finalbody", "handlers")


@final
@dataclass(frozen=True)
class Edit:
    """Characters ``start`` to ``end`` become ``text``; ``why`` says it to the author of line ``line``."""

    start: int
    end: int
    text: str
    why: str
    line: int


@final
class Script:
    """One script.

    Raises:
        SyntaxError: it isn't Python (3.10 or newer, whatever runs this).
    """

    def __init__(self, text: str, name: str) -> None:
        self.name = name
        self.text = text
        self.tree = ast.parse(text, name)
        self.lines = text.splitlines(keepends=True)
        self.parents: dict[ast.AST, ast.AST] = {}
        for node in ast.walk(self.tree):
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node
        self._found: dict[Any, list[Any]] = {}  # by kind, of the whole script
        self._starts = [0]
        for line in self.lines:
            self._starts.append(self._starts[-1] + len(line))

    # -- where ---------------------------------------------------------------------------------------------

    def _offset(self, line: int, column: int) -> int:
        """The place in the text; the tree counts columns in bytes."""
        before = self.lines[line - 1].encode()[:column].decode() if line <= len(self.lines) else ""
        return self._starts[line - 1] + len(before)

    def start(self, node: Any) -> int:
        """Where the node begins."""
        return self._offset(node.lineno, node.col_offset)

    def end(self, node: Any) -> int:
        """Where the node ends."""
        return self._offset(node.end_lineno, node.end_col_offset)

    def line_start(self, line: int) -> int:
        """Where a line (counted from 1) begins."""
        return self._starts[min(line - 1, len(self._starts) - 1)]

    def of(self, node: Any) -> str:
        """The text of a node, exactly as written."""
        return self.text[self.start(node) : self.end(node)]

    def indentation(self, statement: ast.stmt) -> str:
        """The white space before a statement that begins its line."""
        line = self.lines[first_line(statement) - 1]
        return line[: len(line) - len(line.lstrip())]

    def where(self, node: Any) -> str:
        """``train.py:31``"""
        return f"{self.name}:{getattr(node, 'lineno', 1)}"

    # -- around --------------------------------------------------------------------------------------------

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes that contain this one, from the inside out."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def statement(self, node: ast.AST) -> ast.stmt:
        """The statement that this expression is a part of; a statement itself."""
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def scope(self, node: ast.AST) -> Scope:
        """The function (or the module) whose local names this node sees."""
        for outer in self.around(node):
            if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)):
                return outer
        return self.tree

    def owner(self, scope: Scope) -> ast.ClassDef | None:
        """The class whose method a function is, or is inside of."""
        return next((outer for outer in self.around(scope) if isinstance(outer, ast.ClassDef)), None)

    def block(self, statement: ast.stmt) -> list[ast.stmt]:
        """The statements among which this one stands."""
        parent = self.parents[statement]
        for name in _BLOCKS:
            block = getattr(parent, name, None)
            if isinstance(block, list) and statement in block:
                return block
        for case in getattr(parent, "cases", ()):
            if statement in case.body:
                return case.body
        return [statement]

    def nodes(self, kind: Any, inside: ast.AST | None = None) -> list[Any]:
        """All nodes of a kind, in the order of the text."""
        if inside is None and kind in self._found:
            return self._found[kind]
        found = [node for node in ast.walk(inside or self.tree) if isinstance(node, kind)]
        found.sort(key=lambda node: (getattr(node, "lineno", 0), getattr(node, "col_offset", 0)))
        if inside is None:
            self._found[kind] = found
        return found

    # -- names ---------------------------------------------------------------------------------------------

    @functools.cached_property
    def imported(self) -> dict[str, str]:
        """Local name -> dotted path, for everything that is imported anywhere in the script."""
        names: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    names[alias.asname or alias.name.split(".")[0]] = (
                        alias.name if alias.asname else alias.name.split(".")[0]
                    )
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        return names

    def path(self, node: ast.AST | None) -> str:
        """``torch.optim.SGD`` for ``optim.SGD`` after ``from torch import optim``; '' for anything but a chain."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        return ".".join([self.imported.get(node.id, node.id), *reversed(parts)])

    def is_used(self, name: str) -> bool:
        """Whether the script has this name for something."""
        return any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(self.tree))


def first_line(statement: ast.stmt) -> int:
    """The first line of a statement, its decorators included."""
    decorators = getattr(statement, "decorator_list", ())
    return min([statement.lineno, *(each.lineno for each in decorators)])


def dotted(node: ast.AST) -> str:
    """``self.model`` for a chain of names as it is written; '' for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def method(call: ast.AST) -> tuple[str, ast.expr] | None:
    """The name of the method and the object, for a call ``object.name(...)``."""
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
        return call.func.attr, call.func.value
    return None


def targets(statement: ast.AST) -> list[ast.expr]:
    """What a statement binds: the left sides of an assignment, flat."""
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


def pairs(statement: ast.Assign | ast.AnnAssign) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Each target beside its value; ``a, b = x, y`` gives two, ``a, b = f()`` gives ``f()`` twice."""
    if isinstance(statement, ast.AnnAssign):
        if statement.value is not None:
            yield statement.target, statement.value
        return
    for target in statement.targets:
        if not isinstance(target, (ast.Tuple, ast.List)):
            yield target, statement.value
        elif isinstance(statement.value, (ast.Tuple, ast.List)) and len(statement.value.elts) == len(target.elts):
            yield from zip(target.elts, statement.value.elts, strict=True)
        else:
            for element in target.elts:
                yield element, statement.value


def apply(script: Script, edits: list[Edit]) -> str:
    """The text with the edits made. Of edits that overlap, the one that covers the other is made."""
    text, at = [], 0
    for edit in chosen(edits):
        text += [script.text[at : edit.start], edit.text]
        at = edit.end
    return "".join([*text, script.text[at:]])


def chosen(edits: list[Edit]) -> list[Edit]:
    """The edits that are made, in the order of the text; insertions at one place in the order they were asked for."""
    done: list[Edit] = []
    for edit in sorted(edits, key=lambda each: (each.start, each.end > each.start, -each.end)):
        if done and edit.start < done[-1].end:
            continue
        done.append(edit)
    return done
