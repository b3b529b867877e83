"""The changes to one script: edits, removed statements, the Accelerator's arguments, and notes to the author."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, final

from .source import Edit, Function, Placed, Scope, Script, dotted, first_line
from .survey import LOADER, MODEL, OPTIMIZER, PREPARED, SCHEDULER, Survey, Symbol

_WRAPPING: Final = (ast.If, ast.With, ast.AsyncWith)
Block = ast.If | ast.With | ast.AsyncWith | Function


@final
@dataclass(frozen=True)
class Note:
    """A message to the author about code that was left unchanged or needs review."""

    line: int
    text: str


@final
class UsePoint(ast.expr):
    """A position that needs the Accelerator, in a scope without a node of its own for that."""

    def __init__(self, scope: Scope, offset: int) -> None:
        super().__init__()
        self.scope, self.offset = scope, offset


@final
@dataclass
class Plan:
    """The changes to one script.

    Attributes:
        users: nodes whose new text uses the Accelerator, so that it must be created before them.
        arguments: the Accelerator's arguments by name, as source text.
        needs: the names in those arguments. inlined: the text of those that have one value, known from the start.
        switches: the conditions that those came from.
        handlers: keyword handlers of the Accelerator: class name -> arguments as source text. prepared: the arguments
            of ``prepare``, by role.
        aliases: names of wrapped models -> the names that were wrapped.
        imports: names to import beside the Accelerator, by module.
        kept_samplers: the calls that create a DistributedSampler which stays. divided: the loaders of those.
    """

    script: Script
    survey: Survey
    edits: list[Edit] = field(default_factory=list[Edit])
    removed: dict[ast.stmt, str] = field(default_factory=dict[ast.stmt, str])
    notes: list[Note] = field(default_factory=list[Note])
    users: list[Placed] = field(default_factory=list[Placed])
    arguments: dict[str, str] = field(default_factory=dict[str, str])
    needs: list[Symbol] = field(default_factory=list[Symbol])
    switches: list[ast.expr] = field(default_factory=list[ast.expr])
    inlined: dict[Symbol, str] = field(default_factory=dict[Symbol, str])
    handlers: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    imports: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict[str, list[str]](list))
    stripped: set[ast.AST] = field(default_factory=set[ast.AST])
    aliases: dict[Symbol, Symbol] = field(default_factory=dict[Symbol, Symbol])
    kept_samplers: set[ast.Call | None] = field(default_factory=set[ast.Call | None])
    divided: set[Symbol] = field(default_factory=set[Symbol])
    everywhere: bool = False  # the Accelerator has to be created at module level
    accelerator: str = "accelerator"

    def __post_init__(self) -> None:
        if any(node.id == self.accelerator for node in self.script.nodes(ast.Name)):
            self.accelerator = "the_accelerator"
        self.prepared: dict[str, list[Symbol]] = {role: list(found) for role, found in self.survey.trained.items()}

    # -- changes -------------------------------------------------------------------------------------------

    def replace(self, node: Placed, text: str, why: str, *, uses: bool = True) -> None:
        """Replace the text of ``node`` by ``text``."""
        self.cut(self.script.start(node), self.script.end(node), text, why, node)
        if uses:
            self.users.append(node)

    def cut(self, start: int, end: int, text: str, why: str, node: Placed) -> None:
        """Replace characters ``start`` to ``end`` by ``text``; ``node`` is the reason."""
        self.edits.append(Edit(start, end, text, why, node.lineno))

    def remove(self, statement: ast.stmt, why: str) -> None:
        """Remove the statement with its lines; a block that becomes empty is removed too."""
        self.removed.setdefault(statement, why)

    def prepare(self, role: str, symbols: Iterable[Symbol]) -> None:
        """Add objects to those that are prepared."""
        self.prepared[role] = list(dict.fromkeys([*self.prepared[role], *symbols]))

    def note(self, node: ast.AST, text: str) -> None:
        """Add a message about the position of ``node``."""
        note = Note(getattr(node, "lineno", 1), text)
        if note not in self.notes:
            self.notes.append(note)

    def strip(self, call: ast.Call, base: ast.expr, why: str) -> None:
        """Replace ``base.to(device)`` by ``base``."""
        self.cut(self.script.end(base), self.script.end(call), "", why, call)
        self._strip(*call.args, *call.keywords)

    def strip_around(self, call: ast.Call, inner: ast.expr, why: str) -> None:
        """Replace ``wrapper(inner, ...)`` by ``inner``."""
        self.cut(self.script.start(call), self.script.start(inner), "", why, call)
        self.cut(self.script.end(inner), self.script.end(call), "", "", call)
        self._strip(*call.args[1:], *call.keywords)

    def _strip(self, *arguments: ast.AST) -> None:
        self.stripped.update(*map(ast.walk, arguments))

    # -- queries -------------------------------------------------------------------------------------------

    @functools.cached_property
    def is_by_hand(self) -> bool:
        """Whether the script sets up processes itself."""
        ends = ("DistributedDataParallel", "DistributedSampler")
        paths = [self.script.path(call.func) for call in self.script.nodes(ast.Call)]
        return any(path.startswith("torch.distributed.") or path.endswith(ends) for path in paths)

    def is_prepared(self, node: ast.AST, role: str) -> bool:
        """Return whether a name refers to a prepared object, through parameters and aliases."""
        roots = self.survey.roots_of(node)
        return bool(roots) and roots <= set(self.prepared[role])

    def is_removed(self, node: ast.AST) -> bool:
        """Return whether the node is part of something that is removed."""
        return any(each in self.removed or each in self.stripped for each in (node, *self.script.ancestors(node)))

    def is_in_training(self, node: ast.AST) -> bool:
        """Return whether a node runs with gradients in a training loop, or in a function that such a loop calls."""
        is_inside = False
        for outer in self.script.ancestors(node):
            if isinstance(outer, (ast.With, ast.AsyncWith)) and any(
                self.is_without_gradients(item.context_expr) for item in outer.items
            ):
                return False
            if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
                if any(map(self.is_without_gradients, outer.decorator_list)):
                    return False
                is_inside |= outer.name in self.survey.called_in_training
            is_inside |= isinstance(outer, (ast.For, ast.While)) and self.survey.trains(outer)
        return is_inside

    def is_without_gradients(self, node: ast.expr) -> bool:
        """Return whether an expression is ``torch.no_grad()`` or ``torch.inference_mode()``, called or not."""
        node = node.func if isinstance(node, ast.Call) else node
        return self.script.path(node).rpartition(".")[2] in ("no_grad", "inference_mode")

    def is_after_training(self, statement: ast.stmt) -> bool:
        """Return whether the last training of a scope is over before a statement, so that it makes a fresh object."""
        ends = [each.end_lineno or each.lineno for each in self.training_in(self.script.scope(statement))]
        return bool(ends) and max(ends) < statement.lineno

    def training_in(self, scope: Scope) -> Iterator[ast.stmt]:
        """Yield the statements of a scope in which a backward runs, without nested functions."""
        for statement in self.script.nodes(ast.stmt, scope):
            is_definition = isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            if not is_definition and self.script.scope(statement) is scope and self.survey.trains(statement):
                yield statement

    def scope_of(self, user: Placed) -> Scope:
        """Return the function, or the module, that a use is in."""
        return user.scope if isinstance(user, UsePoint) else self.script.scope(user)

    def offset(self, user: Placed) -> int:
        """Return the offset of a use in the text."""
        return user.offset if isinstance(user, UsePoint) else self.script.start(user)

    # -- edits ---------------------------------------------------------------------------------------------

    def empty_blocks(self) -> None:
        """Remove blocks without remaining statements, and empty functions together with their calls."""
        changed = True
        while changed:
            before = len(self.removed)
            for node in self.script.nodes(_WRAPPING):
                if self._is_empty(node) and node not in self.removed:
                    self.remove(node, self._why_inside(node))
            for function in (each for functions in self.survey.functions.values() for each in functions):
                if function not in self.removed and self._is_empty(function):
                    self._remove_function(function)
            changed = len(self.removed) != before

    def _is_empty(self, node: Block) -> bool:
        body = [each for each in node.body if not _is_docstring(each)]
        return self._is_removed_block(body) and all(each in self.removed for each in getattr(node, "orelse", ()))

    def _is_removed_block(self, block: list[ast.stmt]) -> bool:
        all_removed = all(each in self.removed or isinstance(each, ast.Pass) for each in block)
        return all_removed and any(each in self.removed for each in block)

    def _why_inside(self, node: Block) -> str:
        return next(self.removed[each] for each in node.body if each in self.removed)

    def _remove_function(self, function: Function) -> None:
        """Remove a function with its calls, if no statement needs their value."""
        uses = [self.script.statement(node) for node in self.script.nodes(ast.Name) if node.id == function.name]
        if all(isinstance(statement, ast.Expr) for statement in uses):
            self.remove(function, self._why_inside(function))
            for statement in uses:
                self.remove(statement, f"{function.name}() is gone")

    def removals(self) -> list[Edit]:
        """Return the removed statements as edits."""
        found = [edit for node in self.script.nodes(ast.If) for edit in self._else_branch(node)]
        for statement, why in self.removed.items():
            if not any(outer in self.removed for outer in self.script.ancestors(statement)):
                found.append(self._removal(statement, why))
        return found

    def _else_branch(self, node: ast.If) -> list[Edit]:
        """Return the edit for an ``else`` without remaining statements next to a branch that stays."""
        block, script = node.orelse, self.script
        is_elif = len(block) == 1 and isinstance(block[0], ast.If) and script.text_of(block[0]).startswith("elif")
        if node in self.removed or is_elif or not block or not self._is_removed_block(block):
            return []
        line = first_line(block[0]) - 1
        while line > (node.body[-1].end_lineno or 0) and not script.lines[line - 1].lstrip().startswith("else"):
            line -= 1
        end = block[-1].end_lineno or line
        if line <= (node.body[-1].end_lineno or 0):
            return []
        return [Edit(script.line_start(line), script.line_start(end + 1), "", self.removed[block[0]], block[0].lineno)]

    def _removal(self, statement: ast.stmt, why: str) -> Edit:
        script = self.script
        start, end = script.start(statement), script.end(statement)
        block = [each for each in script.block(statement) if not _is_docstring(each)]
        line_start = script.line_start(first_line(statement))
        last_line = statement.end_lineno or statement.lineno
        alone = not script.text[line_start : script.start(statement)].strip(" \t@").strip()
        if script.text.startswith("elif", start):
            return Edit(line_start, script.line_start(last_line + 1), "", why, statement.lineno)
        if all(each in self.removed for each in block) and block[-1] is statement:
            return Edit(start, end, "pass", why, statement.lineno)
        beside = self._beside(statement)
        if beside is not None:  # a; b on one line
            return Edit(*beside, "", why, statement.lineno)
        if not alone:
            return Edit(start, end, "pass", why, statement.lineno)
        end = script.line_start(last_line + 1)
        if script.text[end : end + 1] == "\n" and self._opens(statement, block):
            return Edit(line_start, end + 1, "", why, statement.lineno)  # the first line of a block isn't blank
        if line_start >= 2 and script.text[:line_start].endswith("\n\n") and script.text[end : end + 1] == "\n":
            end += 1  # one of two blank lines around it
        return Edit(line_start, end, "", why, statement.lineno)

    def _beside(self, statement: ast.stmt) -> tuple[int, int] | None:
        """Return the range to remove for a statement that shares its line with another one."""
        block = self.script.block(statement)
        at = block.index(statement)
        if at + 1 < len(block) and block[at + 1].lineno == statement.end_lineno:
            return self.script.start(statement), self.script.start(block[at + 1])
        if at and block[at - 1].end_lineno == statement.lineno:
            return self.script.end(block[at - 1]), self.script.end(statement)
        return None

    def _opens(self, statement: ast.stmt, block: list[ast.stmt]) -> bool:
        """Return whether the statement precedes all remaining statements of its block."""
        if isinstance(self.script.parents[statement], ast.Module):
            return False
        at = block.index(statement)
        stays = at + 1 < len(block) and block[at + 1] not in self.removed
        return stays and all(each in self.removed for each in block[:at])


def _is_docstring(statement: ast.stmt) -> bool:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


__all__ = ["LOADER", "MODEL", "OPTIMIZER", "PREPARED", "SCHEDULER", "Note", "Plan", "UsePoint", "dotted"]
