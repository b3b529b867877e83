"""The script under examination: its Accelerator, the arguments of `prepare`, and the values of names."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, final

from ..migrate.source import (
    Function,
    Placed,
    Scope,
    Script,
    assigned_values,
    dotted,
    keyword,
    method_name,
    parameters,
    returned,
    targets,
)
from ..migrate.survey import LOADER, Survey, Symbol
from .items import Items

_PREPARING: Final = ("prepare", "prepare_model", "prepare_optimizer", "prepare_data_loader", "prepare_scheduler")
_IN_PLACE: Final = ("all_reduce", "broadcast", "broadcast_object_list")
_GROWS: Final = frozenset({"append", "extend", "add"})


class Place(NamedTuple):
    """A place in the script that a rule objects to, and the words for its text."""

    node: Placed
    words: dict[str, str]


def at(node: Placed, **words: str) -> Place:
    """Return the place of `node`, with the words for the rule's text."""
    return Place(node, words)


class Definition(NamedTuple):
    """Where a name gets a value.

    Attributes:
        value: None if all processes get the same one, whatever they had.
        position: of the value in a tuple that `value` gives; None if it is the whole.
        adds: to the value before.
    """

    node: Placed
    value: ast.expr | None
    position: int | None = None
    adds: bool = False


@final
class Subject:
    """A script whose Accelerator and prepared names are known."""

    def __init__(self, script: Script) -> None:
        self.script: Script = script
        self.survey: Survey = Survey(script)
        self.items: Items = Items(self.survey)
        self.calls: list[ast.Call] = script.nodes(ast.Call)
        self.made: list[ast.Call] = [call for call in self.calls if script.last_name(call) == "Accelerator"]
        named = {dotted(target) for call in self.made for target in targets(script.statement(call))}
        self.accelerators: set[str] = named | {"accelerator", "self.accelerator"}
        self.prepares: list[ast.Call] = list(self.calls_of(*_PREPARING))
        self.prepared: set[Symbol] = set()
        for call in self.prepares:
            for node in [*call.args, *targets(script.statement(call))]:
                value = node.value if isinstance(node, ast.Starred) else node
                self.prepared |= self.roots(value) | self.items.all_in(value)
        self._follow_results()

    def _follow_results(self) -> None:
        """Add the names for what a function of the script has prepared and returned."""
        before = -1
        while before < len(self.prepared):
            before = len(self.prepared)
            for symbol, assigned in self.survey.assigned.items():
                values = (self._returned(value, position) for _, value, position in assigned)
                if any(not isinstance(value, ast.Call) and self.roots(value) & self.prepared for value in values):
                    self.prepared.add(symbol)

    def _returned(self, value: ast.expr, position: int | None) -> ast.expr:
        """Return what a call of a function of the script returns, or its item; other values are returned unchanged."""
        function = self.callee(value) if isinstance(value, ast.Call) and position is None else None
        return (None if function is None else returned(function)) or self.survey.result_of(value, position)

    # -- names ---------------------------------------------------------------------------------------------

    def roots(self, node: ast.AST) -> set[Symbol]:
        """Return the symbols whose values a name may have."""
        symbol = self.survey.symbol(node)
        if symbol is None and isinstance(node, ast.Subscript):  # loaders[phase], or an item that isn't known
            owner = self.survey.symbol(node.value)
            if owner is None or not isinstance(node.slice, ast.Constant):
                return self.items.all_in(node.value)
            return {Symbol(owner.scope, f'{owner.name}["{node.slice.value}"]')}
        return set() if symbol is None else {symbol, *self.survey.roots(symbol)}

    def role(self, node: ast.AST) -> object:
        """Return the role of a name's value: model, optimizer, loader or scheduler; None if it may be of several."""
        roles = {self.survey.role_of(symbol) or self._trained.get(symbol) for symbol in self.roots(node)} - {None}
        return roles.pop() if len(roles) == 1 else None

    @functools.cached_property
    def _trained(self) -> dict[Symbol, str]:
        """The roles of trained objects, some of them known by their use only."""
        return {symbol: role for role, symbols in self.survey.trained.items() for symbol in symbols}

    def is_prepared(self, node: ast.AST, role: str) -> bool:
        """Return whether a name's value has this role and is passed to `prepare`."""
        assigned = self.survey.assignments_to(node)
        if any(method_name(value) == "unwrap_model" for _, value, _ in assigned):
            return False
        return bool(self.roots(node) & self.prepared) and self.role(node) == role

    def bound(self, call: ast.Call) -> set[Symbol]:
        """Return the names assigned the value of a call, also through the return value of a function."""
        statement = self.script.statement(call)
        given = statement.value if isinstance(statement, ast.Return) else None
        if given is not None and given is not call and call not in getattr(given, "elts", ()):
            return set()
        return set(self.survey.bound(call))

    def calls_of(self, *names: str) -> Iterator[ast.Call]:
        """Return the calls of these methods of an Accelerator."""
        return (call for call, owner in self.script.methods(*names) if dotted(owner) in self.accelerators)

    def uses(self, *names: str) -> bool:
        """Return whether the script calls a function or a method with one of these names."""
        return any(self.script.last_name(call) in names or method_name(call) in names for call in self.calls)

    def accelerator_at(self, node: Placed) -> str:
        """Return the name of an Accelerator that is certain to exist at `node`, or ''."""
        scope = self.script.scope(node)
        for call in self.made:
            statement = self.script.statement(call)
            for target in targets(statement):
                symbol, home = self.survey.symbol(target), self.script.parents[statement]
                is_seen = symbol is not None and symbol == self.survey.symbol(_named(dotted(target), node, self.script))
                is_before = statement.lineno < node.lineno if home is scope else isinstance(home, ast.Module)
                if is_seen and (is_before or (home is not scope and dotted(target).startswith("self."))):
                    return dotted(target)
        return next((name for name in parameters(scope) if name in self.accelerators), "")

    # -- functions -----------------------------------------------------------------------------------------

    @functools.cache  # noqa: B019  (it lives as long as the command)
    def callee(self, call: ast.Call) -> Function | None:
        """Return the function of the script that is called, by its name or by `self.name`."""
        return self._function(call.func)

    def property_of(self, node: ast.AST) -> Function | None:
        """Return the method whose result `self.name` is."""
        found = self._function(node)
        return found if found is not None and "property" in map(dotted, found.decorator_list) else None

    def _function(self, node: ast.AST) -> Function | None:
        name = dotted(node)
        found = self.survey.functions.get(name.removeprefix("self."), [])
        if name.startswith("self."):
            owner = self.script.owner(self.script.scope(node))
            found = [each for each in found if self.script.parents[each] is owner] or found
        return found[0] if len(found) == 1 else None

    @functools.cached_property
    def callers(self) -> dict[Function, list[ast.Call]]:
        """The calls of each function of the script."""
        found: dict[Function, list[ast.Call]] = {}
        for call in self.calls:
            function = self.callee(call)
            if function is not None:
                found.setdefault(function, []).append(call)
        return found

    # -- values --------------------------------------------------------------------------------------------

    @functools.cached_property
    def _definitions(self) -> dict[Symbol, list[Definition]]:
        found: dict[Symbol, list[Definition]] = {}

        def define(target: ast.AST, definition: Definition) -> None:
            symbol = self._key(target)
            if symbol is not None:
                found.setdefault(symbol, []).append(definition)

        for node in self.script.nodes((ast.Assign, ast.AnnAssign)):
            for target, value, position in assigned_values(node):
                define(target, Definition(node, value, position))
        for node in self.script.nodes((ast.AugAssign, ast.NamedExpr)):
            define(node.target, Definition(node, node.value, None, isinstance(node, ast.AugAssign)))
        for node in self.script.nodes((ast.For, ast.AsyncFor)):
            counted = isinstance(node.iter, ast.Call) and dotted(node.iter.func) == "enumerate"
            for place, target in enumerate(targets(node)):
                define(target, Definition(node, None if counted and place == 0 else node.iter))
        for call, owner in self.script.methods(*_GROWS):
            if call.args:
                define(owner, Definition(call, call.args[0], None, True))
        for call in self.calls:
            if self.script.last_name(call) in _IN_PLACE and self.script.is_statement(call):
                define(call.args[0] if call.args else call, Definition(call, None))
        for function, calls in self.callers.items():
            for call in calls:
                for name, value in arguments(function, call):
                    found.setdefault(Symbol(function, name), []).append(Definition(function, value))
        return found

    def _is_certain(self, node: ast.AST, outer: set[ast.AST]) -> bool:
        """Return whether a definition is made whenever what these nodes contain is reached."""
        branches = (each for each in self.script.ancestors(node) if isinstance(each, (ast.If, ast.Try)))
        return all(branch in outer for branch in branches)

    @functools.cache  # noqa: B019  (it lives as long as the command)
    def _key(self, node: ast.AST) -> Symbol | None:
        """Return the symbol of a name; an attribute of another object is one in the whole script."""
        found, name = self.survey.symbol(node), dotted(node)
        return Symbol(self.script.tree, name) if found is None and name else found

    @functools.cache  # noqa: B019  (it lives as long as the command)
    def definitions(self, node: ast.AST) -> list[Definition]:
        """Return the definitions of a name's possible values at `node`: the last one before it, and additions to it."""
        symbol = self._key(node)
        known = [] if symbol is None else self._definitions.get(symbol, [])
        line, outer = getattr(node, "lineno", 0), set(self.script.ancestors(node))
        loops = {each for each in outer if isinstance(each, (ast.For, ast.While))}
        here = symbol is not None and symbol.scope is self.script.scope(node) and "." not in symbol.name
        sets = [each for each in known if not each.adds]
        before = [each for each in sets if each.node.lineno < line and _is_done(each.node, outer)] if here else sets
        certain = [each.node.lineno for each in before or sets if self._is_certain(each.node, outer)]
        last = max(certain, default=0)
        values = [each for each in before if each.node.lineno >= last] if here and before else sets
        added = [each for each in known if each.adds and each.node.lineno >= last]
        if here:
            added = [each for each in added if each.node.lineno <= line or loops & {*self.script.ancestors(each.node)}]
        return values + added

    def derived(self, names: set[Symbol], ends: Callable[[ast.AST], bool]) -> set[Symbol]:
        """Return these names and all names computed from them, except through uses for which `ends` is true."""
        found, before = set(names), 0
        while len(found) > before:
            before = len(found)
            for node in self.script.nodes((ast.Name, ast.Attribute)):
                statement = self.script.statement(node)
                if self.survey.symbol(node) not in found or not isinstance(statement, (ast.Assign, ast.AnnAssign)):
                    continue
                if isinstance(node.ctx, ast.Load) and not ends(node):
                    symbols = [self.survey.symbol(target) for target in targets(statement)]
                    found |= {each for each in symbols if each is not None and self.survey.role_of(each) is None}
        return found

    def constant(self, node: ast.AST | None, depth: int = 0) -> Any:
        """Return the value of a literal, of a name for one, or of an option's default; None for others."""
        if isinstance(node, ast.Constant):
            return node.value
        if node is None or depth > 3:
            return None
        for definition in self.definitions(node):
            if not definition.adds and definition.position is None and not isinstance(definition.node, ast.For):
                return self.constant(definition.value, depth + 1)
        name = dotted(node).rpartition(".")[2]
        for call, _ in self.script.methods("add_argument") if isinstance(node, ast.Attribute) else ():
            flag = self.constant(call.args[0]) if call.args else ""
            if isinstance(flag, str) and flag.lstrip("-").replace("-", "_") == name:
                return self.constant(keyword(call, "default"), depth + 1)
        return None

    # -- order ---------------------------------------------------------------------------------------------

    def is_ahead_of_prepare(self, node: Placed) -> bool:
        """Return whether the function that contains `node` calls ``prepare`` after it."""
        lines = self.prepared_lines(node)
        return bool(lines) and node.lineno < min(lines)

    def is_behind_prepare(self, node: Placed, seen: frozenset[ast.AST] = frozenset()) -> bool:
        """Return whether ``prepare`` is called before `node`: in its function, a called one, or by its callers."""
        function = self.script.scope(node)
        homes = {self.script.scope(call) for call in self.prepares} - {function}
        calls = (call for home, calls in self.callers.items() if home in homes for call in calls)
        lines = self.prepared_lines(node) + [call.lineno for call in calls if self.script.scope(call) is function]
        if lines:
            return node.lineno > min(lines)
        callers = [] if isinstance(function, ast.Module) or function in seen else self.callers.get(function, [])
        return bool(callers) and all(self.is_behind_prepare(call, seen | {function}) for call in callers)

    def prepared_lines(self, node: ast.AST) -> list[int]:
        """Return the lines of the calls of ``prepare`` in the function that contains `node`."""
        scope = self.script.scope(node)
        return [call.lineno for call in self.prepares if self.script.scope(call) is scope]

    @functools.cached_property
    def batch_loops(self) -> set[ast.AST]:
        """The loops that train on one batch in each round."""
        found: set[ast.AST] = {loop.node for loop in self.survey.loops if loop.trains}
        reads = (self.loops_around(call)[:1] for call in self.calls if dotted(call.func) == "next")
        return found | {loop for loops in reads for loop in loops if self.survey.trains(loop)}

    def is_in_batch_loop(self, call: ast.Call) -> bool:
        """Return whether a training loop runs a call, directly or in a called function."""
        places: list[ast.AST] = [call]
        for place in places:
            function = self.script.scope(place)
            if not isinstance(function, ast.Module):
                places += [each for each in self.callers.get(function, []) if each not in places]
        return any(outer in self.batch_loops for place in places for outer in self.script.ancestors(place))

    def calls_around(self, node: ast.AST) -> list[ast.Call]:
        """Return the calls that get this value, from the inside out."""
        return [outer for outer in self.script.ancestors(node) if isinstance(outer, ast.Call)]

    def loops_around(self, node: ast.AST) -> list[ast.For | ast.While]:
        """Return the loops of its function that contain `node`, from the inside out."""
        scope = self.script.scope(node)
        around = [each for each in self.script.ancestors(node) if isinstance(each, (ast.For, ast.While))]
        return [each for each in around if self.script.scope(each) is scope]

    def read_names(self, node: ast.AST) -> list[ast.expr]:
        """Return the names of loaders, and of values without a known role, in an expression."""
        found = [each for each in ast.walk(node) if isinstance(each, (ast.Name, ast.Attribute, ast.Subscript))]
        return [each for each in found if self.role(each) in (LOADER, None)]

    def reads_prepared(self, node: ast.AST) -> bool:
        """Return whether an expression names a prepared loader."""
        return any(self.roots(name) & self.prepared for name in self.read_names(node))


def _is_done(node: ast.AST, outer: set[ast.AST]) -> bool:
    """Return whether a definition isn't the statement whose value is being asked for."""
    return node not in outer or isinstance(node, (ast.For, ast.FunctionDef, ast.AsyncFunctionDef))


def arguments(function: Function, call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    """Yield the parameters of a function with what a call gives for them."""
    names = parameters(function)
    positional = names[1:] if names[:1] == ["self"] else names
    for name, value in zip(positional, call.args, strict=False):
        if isinstance(value, ast.Starred):
            break
        yield name, value
    yield from ((each.arg, each.value) for each in call.keywords if each.arg in names)


def _named(name: str, node: ast.AST, script: Script) -> ast.expr:
    """Return a name (or `self.name`) as if it were written beside `node`."""
    expression = ast.parse(name, mode="eval").body
    script.parents[expression] = script.parents.get(node, script.tree)
    return expression


__all__ = ["Definition", "Place", "Scope", "Subject", "arguments", "at"]
