"""Objects in containers: dicts, lists, objects with attributes, and the targets of loops over them."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator
from typing import Final, final

from ..migrate.source import assigned_values, dotted, method, returned
from ..migrate.survey import PREPARED, Survey, Symbol

#: The ending of an item whose key isn't known.
_ANY: Final = "[*]"
_VIEWS: Final = ("values", "items")
_SEQUENCES: Final = ("list", "tuple", "reversed", "sorted", "iter")


@final
class Items:
    """The items of a script's containers that are models, optimizers, loaders or schedulers."""

    def __init__(self, survey: Survey) -> None:
        self._survey, self._script = survey, survey.script
        self._sources: dict[Symbol, list[ast.expr]] = {}  # by target of a loop: what its values are, or are items of
        self._asked: set[object] = set()
        survey.item_of, survey.sources_of, survey.follows_items = self.item, self.sources, True
        for node in self._script.nodes((ast.For, ast.comprehension)):
            self._record_loop(node.target, node.iter)
        for symbol, assigned in list(survey.assigned.items()):
            for statement, value, _ in list(assigned):
                for ending, made in self._entries(value):
                    self._record(symbol, ending, statement, made)
        for statement in self._script.nodes((ast.Assign, ast.AnnAssign)):
            for target, value, position in assigned_values(statement):
                self._record_target(statement, target, value, position)
        for call, owner in self._script.methods("append"):
            symbol = survey.symbol(owner)
            if symbol is not None and call.args:
                self._record(symbol, _ANY, self._script.statement(call), call.args[0])

    # -- questions -----------------------------------------------------------------------------------------

    def item(self, node: ast.AST) -> Symbol | None:
        """Return the symbol of ``parts["net"]``, ``parts[0]`` or ``parts.net``; None if it has no known role."""
        ending = _ending(node)
        with self._asking(node) as is_new:
            owner = node.value if is_new and isinstance(node, (ast.Subscript, ast.Attribute)) else None
            for items in self._containers(owner) if owner is not None else ():
                found = items.get(ending) or (items.get(_ANY) if ending[:1] == "[" else None)
                if found is not None:
                    return found
        return None

    def sources(self, symbol: Symbol) -> set[Symbol]:
        """Return the symbols whose values the target of a loop has."""
        with self._asking(symbol) as is_new:
            values = self._sources.get(symbol, ()) if is_new else ()
            return set[Symbol]().union(*map(self.all_in, values)) - {symbol}

    @contextlib.contextmanager
    def _asking(self, what: object) -> Iterator[bool]:
        """Give whether a question isn't part of its own answer, as in ``config = config.model``."""
        is_new = what not in self._asked
        self._asked.add(what)
        try:
            yield is_new
        finally:
            if is_new:
                self._asked.remove(what)

    def all_in(self, node: ast.AST) -> set[Symbol]:
        """Return the items of a container, with what a tuple of names has."""
        if isinstance(node, (ast.Tuple, ast.List)):
            return {each for each in map(self._survey.symbol, node.elts) if each is not None}
        return {each for items in self._containers(node) for each in items.values()}

    def _containers(self, node: ast.AST) -> Iterator[dict[str, Symbol]]:
        """Yield the items of what a name may be, or of an object of a class of the script."""
        for root in self._survey.roots_of(node):
            yield self._survey.items.get(root, {})
            for _, value, _ in self._survey.assignments(root):
                owner = self._survey.classes.get(dotted(value.func)) if isinstance(value, ast.Call) else None
                known = self._survey.assigned if owner is not None else {}
                yield {each.name.removeprefix("self"): each for each in known if each.scope is owner}

    # -- records -------------------------------------------------------------------------------------------

    def _record(
        self, container: Symbol, ending: str, statement: ast.stmt, value: ast.expr, position: int | None = None
    ) -> None:
        known = self._survey.items.get(container, {}).get(ending)
        is_recorded = known is not None and any(made is value for _, made, _ in self._survey.assignments(known))
        if not is_recorded and (known is not None or self._survey.role(value) in PREPARED):
            self._survey.record_item(container, ending, statement, value, position)

    def _record_target(self, statement: ast.stmt, target: ast.expr, value: ast.expr, position: int | None) -> None:
        """Record ``parts["net"] = ...`` and ``parts.net = ...``."""
        is_of_self = isinstance(target, ast.Attribute) and dotted(target.value) == "self"
        if is_of_self or not isinstance(target, (ast.Subscript, ast.Attribute)):
            return
        for root in self._survey.roots_of(target.value):
            self._record(root, _ending(target), statement, value, position)

    def _entries(self, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
        """Yield the endings and values of the items that an expression makes."""
        with self._asking(value) as is_new:
            yield from self._made_by(value) if is_new else ()

    def _made_by(self, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
        if isinstance(value, (ast.Tuple, ast.List)):
            yield from ((f"[{number}]", made) for number, made in enumerate(value.elts))
        elif isinstance(value, ast.Dict):
            yield from ((f'["{key.value}"]' if isinstance(key, ast.Constant) else _ANY, made)
                        for key, made in zip(value.keys, value.values, strict=True))  # fmt: skip
        elif isinstance(value, (ast.ListComp, ast.GeneratorExp)):
            yield _ANY, value.elt
        elif isinstance(value, ast.DictComp):
            yield _ANY, value.value
        elif isinstance(value, ast.Call):
            yield from self._entries_of_call(value)

    def _entries_of_call(self, call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
        name = dotted(call.func).rpartition(".")[2]
        function = self._survey.functions.get(name, [])
        result = returned(function[0]) if function else None
        owner = self._survey.classes.get(name)
        if name in _SEQUENCES and call.args:
            yield from self._entries(call.args[0])
        elif name == "dict":
            yield from ((f'["{each.arg}"]', each.value) for each in call.keywords)
        elif result is not None and not isinstance(result, ast.Tuple):
            symbol = self._survey.symbol(result)
            for value in [result, *(value for _, value, _ in self._survey.assignments(symbol))] if symbol else [result]:
                yield from self._entries(value)
        elif name == "SimpleNamespace" or owner is not None:
            body = owner.body if owner is not None else []
            fields = [dotted(each.target) for each in body if isinstance(each, ast.AnnAssign)]
            yield from ((f".{field}", value) for field, value in zip(fields, call.args, strict=False))
            yield from ((f".{each.arg}", each.value) for each in call.keywords)

    def _record_loop(self, target: ast.expr, read: ast.expr) -> None:
        """Record what the targets of a loop are: ``for net, optimizer in zip(nets, optimizers)``."""
        found, name = method(read), dotted(read.func) if isinstance(read, ast.Call) else ""
        names = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
        if found is not None and found[0] in _VIEWS:
            self._record_source(names[-1], found[1])
        elif isinstance(read, ast.Call) and name == "enumerate" and read.args and len(names) == 2:
            self._record_loop(names[1], read.args[0])
        elif isinstance(read, ast.Call) and name == "zip":
            for each, value in zip(names, read.args, strict=False):
                self._record_loop(each, value)
        elif isinstance(read, ast.Call) and name in _SEQUENCES and read.args:
            self._record_loop(target, read.args[0])
        elif isinstance(read, (ast.Tuple, ast.List)) and len(names) > 1:
            for row in read.elts:
                for each, value in zip(names, getattr(row, "elts", ()), strict=False):
                    self._record_source(each, ast.copy_location(ast.Tuple([value], ast.Load()), value))
        elif len(names) == 1:
            self._record_source(target, read)

    def _record_source(self, target: ast.expr, value: ast.expr) -> None:
        symbol = self._survey.symbol(target)
        if symbol is not None:
            self._sources.setdefault(symbol, []).append(value)


def _ending(node: ast.AST) -> str:
    """Return how an expression for an item ends: ``["net"]``, ``[0]``, ``.net``; ``[*]`` for other keys."""
    if isinstance(node, ast.Attribute):
        return f".{node.attr}"
    key = node.slice.value if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) else None
    return f'["{key}"]' if isinstance(key, str) else f"[{key}]" if type(key) is int else _ANY
