"""Find the roles of a script's names (model, optimizer, loader, ...) from their creation and use.

A name is followed from the training loop, through the parameters of functions, to the creation of its value: its root.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, final

from .source import (
    Function,
    Scope,
    Script,
    argument,
    assigned_values,
    dotted,
    method,
    method_name,
    parameters,
    returned,
    targets,
)

MODEL: Final = "model"
OPTIMIZER: Final = "optimizer"
SCHEDULER: Final = "scheduler"
LOADER: Final = "loader"
SCALER: Final = "scaler"
SAMPLER: Final = "sampler"
Role: TypeAlias = str | None

#: The roles of ``prepare``'s arguments, in their order.
PREPARED: Final = (MODEL, OPTIMIZER, LOADER, SCHEDULER)
_BY_NAME: Final = {"DataLoader": LOADER, "GradScaler": SCALER, "DistributedSampler": SAMPLER}
_WRAPPERS: Final = ("DistributedDataParallel", "DataParallel")
_KEEPS_ROLE: Final = frozenset({"to", "cuda", "cpu", "train", "eval", "half", "float", "double", "bfloat16", "apply"})
_SCHEDULE: Final = re.compile(r"get_\w*schedule\w*$|^transformers\.get_scheduler$|LRScheduler$|Scheduler$")
_LOSS: Final = re.compile(r"Loss(\d+d)?$|^torch\.nn\.(functional|init|utils|parallel)\b")
_BACKWARD: Final = "loss.backward()"
_OF_AUTOGRAD: Final = ("torch.autograd.backward", "super.backward")
_PASSES_ON: Final = frozenset({"enumerate", "tqdm", "iter", "islice", "zip", "track", "progress"})
#: Calls that yield the items of their argument, also with a named result: ``bar = tqdm(loader)``.
_BARS: Final = frozenset({"tqdm", "enumerate", "track", "progress"})
_FOR_EVALUATION: Final = re.compile(
    r"(^|[._])(val|valid|validation|test|eval|evaluation|dev)(?=[._\d]|loader|dl|$)", re.I
)
_NAMED_LIKE_OPTIMIZERS: Final = re.compile(r"optim|(^|[._])opt(_|$)", re.IGNORECASE)
_NAMED_LIKE_MODELS: Final = re.compile(r"(^|\.|_)(model|net|network|module)\w*$", re.IGNORECASE)


@final
@dataclass(frozen=True)
class Symbol:
    """A name in its scope: a function, the module, or (``self.x``) a class."""

    scope: Any
    name: str


@final
@dataclass
class Loop:
    """A ``for`` loop over batches."""

    node: ast.For
    loaders: set[Symbol]
    trains: bool
    batch_names: set[str]


@final
class Survey:
    """The analysis of a script: its loops, and the roles of its names in training."""

    def __init__(self, script: Script) -> None:
        self.script = script
        #: Set by an analysis that also follows objects into containers, for ``parts["net"]`` and ``for net in nets``.
        self.item_of: Callable[[ast.AST], Symbol | None] = lambda _: None
        self.sources_of: Callable[[Symbol], set[Symbol]] = lambda _: set()
        self.follows_items = False
        self.functions: dict[str, list[Function]] = {}
        self.classes: dict[str, ast.ClassDef] = {}
        for node in ast.walk(script.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                self.functions.setdefault(node.name, []).append(node)
            elif isinstance(node, ast.ClassDef):
                self.classes[node.name] = node
        self.assigned: dict[Symbol, list[tuple[ast.stmt, ast.expr, int | None]]] = {}
        for statement in script.nodes((ast.Assign, ast.AnnAssign)):
            for target, value, position in assigned_values(statement):
                symbol = self.symbol(target)
                if symbol is not None:
                    self.assigned.setdefault(symbol, []).append((statement, value, position))
        #: By container: its items, by how an expression for one ends, as in ``loaders["train"]``.
        self.items: dict[Symbol, dict[str, Symbol]] = {}
        for symbol, assigned in list(self.assigned.items()):
            for statement, value, _ in assigned:
                for ending, made in self._entries(value):  # {"train": DataLoader(...), ...}
                    if self.role(made) == LOADER:
                        self.record_item(symbol, ending, statement, made)

    def record_item(
        self, container: Symbol, ending: str, statement: ast.stmt, value: ast.expr, position: int | None = None
    ) -> None:
        """Record a value that is given to an item of a container."""
        item = self.items.setdefault(container, {}).setdefault(ending, Symbol(container.scope, container.name + ending))
        self.assigned.setdefault(item, []).append((statement, value, position))

    def _entries(self, value: ast.expr | None) -> Iterator[tuple[str, ast.expr]]:
        """Yield the endings and values of a dict with literal keys, or of one that a function returns."""
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in self.functions:
            function = self.functions[value.func.id][0]
            value = returned(function)
            if isinstance(value, ast.Name):
                named = self.assigned.get(Symbol(function, value.id), [])
                value = named[-1][1] if named else None
        if isinstance(value, ast.Dict):
            for key, made in zip(value.keys, value.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    yield f'["{key.value}"]', made
        elif isinstance(value, ast.DictComp) and isinstance(value.generators[0].iter, (ast.List, ast.Tuple)):
            for each in value.generators[0].iter.elts:
                if isinstance(each, ast.Constant) and isinstance(each.value, str):
                    yield f'["{each.value}"]', value.value

    # -- symbols -------------------------------------------------------------------------------------------

    def symbol(self, node: ast.AST) -> Symbol | None:
        """Return the symbol to which a name or ``self.name`` refers."""
        name = dotted(node)
        if not name:
            return self.item_of(node)
        scope = self.script.scope(node)
        first = name.split(".")[0]
        if "." in name:
            owner = self.script.owner(scope) if first == "self" and name.count(".") == 1 else None
            return self.item_of(node) if owner is None else Symbol(owner, name)
        while not isinstance(scope, ast.Module):
            if first in self.locals(scope):
                return Symbol(scope, name)
            scope = self.script.scope(scope)
        return Symbol(scope, name)

    @functools.cache  # noqa: B019  (a survey lives as long as the command)
    def locals(self, scope: Scope) -> set[str]:
        """Return the names bound by a function: its parameters and assigned names."""
        names = set(parameters(scope))
        outside: set[str] = set()
        for node in ast.walk(scope):
            if isinstance(node, (ast.Global, ast.Nonlocal)) and self.script.scope(node) is scope:
                outside.update(node.names)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and self.script.scope(node) is scope:
                names.add(node.id)
        return names - outside

    def assignments(self, symbol: Symbol | None) -> list[tuple[ast.stmt, ast.expr, int | None]]:
        """Return the statements that assign a symbol, with the value, and its index if a call returns several."""
        return [] if symbol is None else self.assigned.get(symbol, [])

    def assignments_to(self, node: ast.AST) -> list[tuple[ast.stmt, ast.expr, int | None]]:
        """Return the assignments of the symbol that an expression refers to."""
        return self.assignments(self.symbol(node))

    def uses(self, symbols: Collection[Symbol | None]) -> list[ast.Name | ast.Attribute]:
        """Return where the script reads one of these symbols."""
        return [node for node in self.script.reads if self.symbol(node) in symbols]

    def roots(self, symbol: Symbol | None, seen: frozenset[Symbol] = frozenset()) -> set[Symbol]:
        """Return the symbols whose values a name may have, followed through callers' arguments and other names."""
        if symbol is None or symbol in seen:
            return set()
        seen |= {symbol}
        if not isinstance(symbol.scope, (ast.Module, ast.ClassDef)) and symbol.name in parameters(symbol.scope):
            handed = [self.roots(each, seen) for each in self.arguments(symbol)]
            found = set[Symbol]().union(*handed)
            return found or {symbol}
        values = [_inside(each, _BARS) for _, value, _ in self.assignments(symbol) for each in _choices(value)]
        names = [value for value in values if self._is_name(value)]
        copies = set[Symbol]().union(*(self.roots(self.symbol(value), seen) for value in names))
        made = [value for value in values if not self._is_name(value)]
        copies |= set[Symbol]().union(*(self.roots(each, seen) for each in self.sources_of(symbol)))
        return copies if copies and not made else {symbol}

    def roots_of(self, node: ast.AST) -> set[Symbol]:
        """Return the symbols whose values an expression may have."""
        return self.roots(self.symbol(node))

    def _is_name(self, value: ast.expr) -> bool:
        """Return whether an expression is a name, or an item that has a symbol."""
        is_item = isinstance(value, ast.Subscript) and self.symbol(value) is not None
        return is_item or isinstance(value, (ast.Name, ast.Attribute))

    def arguments(self, symbol: Symbol) -> Iterator[Symbol | None]:
        """Yield the symbols that callers pass for a parameter."""
        function, name = symbol.scope, symbol.name
        if name not in parameters(function):
            return
        owner = self.script.parents.get(function)
        is_method = isinstance(owner, ast.ClassDef)
        position = parameters(function).index(name) - is_method
        called = owner.name if is_method and function.name == "__init__" else function.name
        for call in self._calls_by_name.get(called, ()) if position >= 0 else ():
            given = argument(call, name, position)
            if given is not None and not isinstance(given, ast.Starred):
                yield self.symbol(given)

    @functools.cached_property
    def _calls_by_name(self) -> dict[str, list[ast.Call]]:
        found: dict[str, list[ast.Call]] = {}
        for call in self.script.nodes(ast.Call):
            found.setdefault(dotted(call.func).rpartition(".")[2], []).append(call)
        return found

    # -- roles ---------------------------------------------------------------------------------------------

    def is_module_class(self, name: str, seen: tuple[str, ...] = ()) -> bool:
        """Return whether a class of the script is a torch module."""
        node = self.classes.get(name)
        if node is None or name in seen:
            return False
        bases = [self.script.path(base) for base in node.bases]
        return any(
            base.startswith("torch.nn.")
            or base.endswith(("nn.Module", "PreTrainedModel"))
            or self.is_module_class(base, (*seen, name))
            for base in bases
        )

    def role(self, value: ast.expr | None, depth: int = 0) -> Role | list[Role]:
        """Return the role of an expression's value; a list for a tuple."""
        value = None if value is None else _inside(value, _BARS)
        if value is None or depth > 6:
            return None
        if isinstance(value, (ast.Tuple, ast.List)):
            return [_single(self.role(each, depth + 1)) for each in value.elts]
        if isinstance(value, ast.IfExp):
            return self.role(value.body, depth + 1) or self.role(value.orelse, depth + 1)
        if isinstance(value, (ast.Name, ast.Attribute, ast.Subscript)):
            return self.role_of(self.symbol(value), depth + 1)
        return self._role_of_call(value, depth) if isinstance(value, ast.Call) else None

    def _role_of_call(self, call: ast.Call, depth: int) -> Role | list[Role]:
        path = self.script.path(call.func)
        last = path.rpartition(".")[2]
        found = self._role_by_path(path, last)
        if found is not None:
            return found
        if last in _WRAPPERS or path in ("torch.compile", "torch.nn.SyncBatchNorm.convert_sync_batchnorm"):
            return self.role(call.args[0], depth + 1) if call.args else None
        name, owner = method(call) or ("", call)
        if name in _KEEPS_ROLE:
            return self.role(owner, depth + 1)
        if name == "from_pretrained" and _NAMED_LIKE_MODELS.search(dotted(owner)):
            return MODEL
        if last in self.functions and (path == last or path.startswith("self.") or self._is_own_method(last)):
            return self.role(returned(self.functions[last][0]), depth + 1)
        if name and last in ("configure_optimizers", "configure_optimizer"):
            return OPTIMIZER  # of a model that another file defines
        takes_parameters = any(is_parameters_call(inner) for each in call.args for inner in ast.walk(each))
        if takes_parameters and (last[:1].isupper() or _NAMED_LIKE_OPTIMIZERS.search(ast.unparse(call.func))):
            return OPTIMIZER
        return None

    def _is_own_method(self, name: str) -> bool:
        """Return whether one class of the script, a torch module, has the only function of this name."""
        functions = self.functions[name]
        owner = self.script.parents.get(functions[0])
        return len(functions) == 1 and isinstance(owner, ast.ClassDef) and self.is_module_class(owner.name)

    def _role_by_path(self, path: str, last: str) -> Role:
        if path.startswith("torch.optim.lr_scheduler.") or _SCHEDULE.search(path):
            return SCHEDULER
        if path.startswith(("torch.optim.", "bitsandbytes.optim.")):
            return None if last == "swa_utils" else OPTIMIZER
        if last in _BY_NAME:
            return _BY_NAME[last]
        if self.is_module_class(path):
            return MODEL
        if path.startswith("torch.nn.") and last[:1].isupper() and not _LOSS.search(path) and last not in _WRAPPERS:
            return None if last == "Parameter" else MODEL
        return MODEL if path.startswith(("torchvision.models.", "timm.create_model")) else None

    def role_of(self, symbol: Symbol | None, depth: int = 0) -> Role:
        """Return the role of a name, by the values assigned to it."""
        if symbol is None or depth > 6:
            return None
        for _, value, position in self.assignments(symbol):
            found = self.role(value, depth + 1)
            if isinstance(found, list):
                found = found[position] if position is not None and position < len(found) else None
            if found is not None:
                return found
        roles = {self.role_of(each, depth + 1) for each in self.sources_of(symbol)} - {None}
        return roles.pop() if len(roles) == 1 else None  # of several, as in `for one in (model, optimizer)`, none

    def result_of(self, value: ast.expr, position: int | None) -> ast.expr:
        """Return the value of a name: of ``a, b = f()``, the item that the script's function ``f`` returns for it."""
        if position is None or not isinstance(value, ast.Call):
            return value
        functions = self.functions.get(dotted(value.func).rpartition(".")[2], [])
        result = returned(functions[0]) if functions else None
        if isinstance(result, ast.Tuple) and position < len(result.elts):
            return result.elts[position]
        return value

    def is_defined(self, symbol: Symbol) -> bool:
        """Return whether the script itself assigns to the name."""
        return bool(self.assignments(symbol))

    def may_be(self, node: ast.AST, role: Role) -> bool:
        """Return whether a name may have a value of this role."""
        return any(self.role_of(root) == role for root in self.roots_of(node))

    # -- the loops -----------------------------------------------------------------------------------------

    @functools.cached_property
    def backwards(self) -> list[ast.Call]:
        """The calls of ``loss.backward()``, however the loss is written."""
        found = self.script.methods("backward")
        return [call for call, _ in found if self.script.path(call.func) not in _OF_AUTOGRAD]

    @functools.cached_property
    def training_functions(self) -> set[str]:
        """The functions in which a backward runs, directly or in a called function."""
        names: set[str] = set()
        called = {name: set[str]().union(*map(self._called_in, each)) for name, each in self.functions.items()}
        while new := {name for name, calls in called.items() if name not in names and calls & {_BACKWARD, *names}}:
            names |= new
        return names

    @functools.cached_property
    def called_in_training(self) -> set[str]:
        """The functions that training loops call, directly or in a called function, with the models' ``forward``."""
        loops = [loop for loop in self.script.nodes((ast.For, ast.While)) if self.trains(loop)]
        names = set[str]().union(*(self._called_in(loop) for loop in loops)) & set(self.functions)
        names |= {"forward"} & set(self.functions)
        waiting = list(names)
        while waiting:
            for function in self.functions[waiting.pop()]:
                new = (set(self._called_in(function)) & set(self.functions)) - names
                names |= new
                waiting += new
        return names

    def trains(self, node: ast.AST) -> bool:
        """Return whether a backward runs in ``node``, or in a function that it calls."""
        return bool(self._called_in(node) & {_BACKWARD, *self.training_functions})

    @functools.cache  # noqa: B019  (a survey lives as long as the command)
    def _called_in(self, node: ast.AST) -> frozenset[str]:
        """Return the last names of all calls in ``node``, without the backward of a loss."""
        calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
        names = {dotted(call.func).rpartition(".")[2] for call in calls}
        return frozenset(names | (set() if set(calls).isdisjoint(self.backwards) else {_BACKWARD}))

    @functools.cached_property
    def loops(self) -> list[Loop]:
        """All loops over a loader."""
        found: list[Loop] = []
        for node in self.script.nodes(ast.For):
            symbols: set[Symbol] = set()
            for name in _names_in(node.iter) if not self._is_over_containers(node.iter) else ():
                roots = self.roots_of(name)
                symbols |= {root for root in roots if self._is_loader(root, node, name)}
                symbols |= self._loaders_by_key(name, roots)
            if symbols:
                found.append(Loop(node, symbols, self.trains(node), self._batch_names(node)))
        return found

    def _is_over_containers(self, node: ast.expr) -> bool:
        """Return whether a loop has loaders as targets, not batches: it goes through lists of them."""
        parts = node.args if isinstance(node, ast.Call) and dotted(node.func) in ("zip", "enumerate") else [node]
        return self.follows_items and any(isinstance(each, (ast.List, ast.Tuple)) for each in parts)

    def _loaders_by_key(self, name: ast.AST, roots: set[Symbol]) -> set[Symbol]:
        """Return the possible loaders of ``loaders[key]``: one if the key is a literal, else all."""
        parent = self.script.parents.get(name)
        index = parent.slice if isinstance(parent, ast.Subscript) else None
        ending = f'["{index.value}"]' if isinstance(index, ast.Constant) and isinstance(index.value, str) else None
        found: set[Symbol] = set()
        for root in roots:
            entries = {key: each for key, each in self.items.get(root, {}).items() if self.role_of(each) == LOADER}
            found |= {entries[ending]} if ending in entries else set(entries.values()) if ending is None else set()
        return found if not self.follows_items else set[Symbol]().union(*map(self.roots, found))

    def _is_loader(self, symbol: Symbol, loop: ast.For, name: ast.AST) -> bool:
        if self.is_defined(symbol):
            return self.role_of(symbol) == LOADER
        # Passed by a caller outside of this script: a loader if a training loop iterates over it, or by its name.
        called = self.script.parents.get(name)
        if (isinstance(called, ast.Call) and called.func is name) or symbol.name in self.script.imported:
            return False
        return "loader" in symbol.name.lower() or (self.trains(loop) and name is _inside(loop.iter, _PASSES_ON))

    def _batch_names(self, loop: ast.For) -> set[str]:
        names = {each.id for each in targets(loop) if isinstance(each, ast.Name)}
        if isinstance(loop.iter, ast.Call) and dotted(loop.iter.func) == "enumerate":
            first = loop.target.elts[0] if isinstance(loop.target, (ast.Tuple, ast.List)) else None
            names -= {first.id} if isinstance(first, ast.Name) else set()
        for statement in self.script.nodes((ast.Assign, ast.AnnAssign), loop):
            for target, value, _ in assigned_values(statement):
                if isinstance(target, ast.Name) and derived(value, names):
                    names.add(target.id)
        return names

    # -- what is prepared ----------------------------------------------------------------------------------

    @functools.cached_property
    def trained(self) -> dict[str, list[Symbol]]:
        """The roots to pass to ``prepare``, by role, in the script's order of creation."""
        found: dict[str, dict[Symbol, None]] = {role: {} for role in PREPARED}
        for symbol in self.assigned:
            role = self.role_of(symbol)
            if role in (OPTIMIZER, SCHEDULER) and self.roots(symbol) == {symbol} and not self._is_only_returned(symbol):
                found[role][symbol] = None
        for call in self.script.nodes(ast.Call):
            if not isinstance(call.func, ast.Attribute):
                continue
            base = call.func.value
            makes = self._is_asked_for_optimizer(call) or (is_parameters_call(call) and self._makes_optimizer(call))
            scope = self.script.scope(call) if dotted(base) == "self" else self.script.tree
            if makes and (isinstance(scope, ast.Module) or not self._is_optimizer(returned(scope), 1)):
                found[MODEL].update(dict.fromkeys(self._outermost(self.roots_of(base))))
        for loop in self.loops:
            if loop.trains:
                found[LOADER].update(dict.fromkeys(self._outermost(_for_training(loop.loaders))))
        self._add_iterated(found)
        self._add_undefined(found)
        return {role: list(symbols) for role, symbols in found.items()}

    def _is_asked_for_optimizer(self, call: ast.Call) -> bool:
        """Return whether a call is ``model.configure_optimizers()``, whatever its name."""
        name, owner = method(call) or ("", call)
        if not dotted(owner) or name in _KEEPS_ROLE:
            return False
        is_of_module = name in self.functions and self._is_own_method(name)
        return (is_of_module or name.startswith("configure_optimizer")) and self._is_optimizer(call)

    def _is_optimizer(self, value: ast.expr | None, depth: int = 0) -> bool:
        """Return whether a value is an optimizer, or a tuple with one."""
        role = self.role(value, depth)
        return OPTIMIZER in role if isinstance(role, list) else role == OPTIMIZER

    def _is_only_returned(self, symbol: Symbol) -> bool:
        """Return whether a function creates it for its callers, which have their own name for it."""
        if isinstance(symbol.scope, (ast.Module, ast.ClassDef)):
            return False
        returns = self.script.nodes(ast.Return, symbol.scope)
        is_returned = any(dotted(each) == symbol.name for node in returns for each in ast.walk(node))
        return is_returned and not self.trains(symbol.scope)

    def _outermost(self, symbols: Iterable[Symbol]) -> Iterator[Symbol]:
        """Yield the symbols; for one created and returned by a function, its callers' names for it."""
        for symbol in symbols:
            if not self._is_only_returned(symbol):
                yield symbol
                continue
            for other, position in self._results_of(symbol.scope):
                given = returned(symbol.scope)
                if position is not None and isinstance(given, ast.Tuple):
                    given = given.elts[position] if position < len(given.elts) else None
                if given is not None and dotted(given) == symbol.name:
                    yield other

    def _results_of(self, function: Function) -> Iterator[tuple[Symbol, int | None]]:
        """Yield the names that get the result of a function, or the item of it at this index."""
        for symbol, assigned in self.assigned.items():
            for _, value, position in assigned:
                if isinstance(value, ast.Call) and dotted(value.func).rpartition(".")[2] == function.name:
                    yield symbol, position

    def bound(self, call: ast.Call) -> Iterator[Symbol]:
        """Yield the names to which a call's value is assigned, by its statement or by the callers of its function."""
        statement = self.script.statement(call)
        for target in targets(statement):
            yield from self._outermost(self.roots_of(target))
        function = self.script.scope(call)
        if not isinstance(statement, ast.Return) or isinstance(function, ast.Module):
            return
        place = statement.value.elts.index(call) if isinstance(statement.value, ast.Tuple) else None
        yield from (symbol for symbol, position in self._results_of(function) if position == place)

    def _makes_optimizer(self, call: ast.Call) -> bool:
        for outer in self.script.ancestors(call):
            if isinstance(outer, ast.Call) and self.role(outer) == OPTIMIZER:
                return True
            if isinstance(outer, ast.stmt):  # parameters = filter(..., model.parameters())
                is_assigned = isinstance(outer, (ast.Assign, ast.AnnAssign))
                return is_assigned and any(map(self._is_passed_to_optimizer, targets(outer)))
        return False

    def _is_passed_to_optimizer(self, name: ast.expr) -> bool:
        symbol = self.symbol(name)
        calls = [call for call in self.script.nodes(ast.Call) if self.role(call) == OPTIMIZER]
        names = (each for call in calls for each in self.script.nodes(ast.Name, call))
        return symbol is not None and any(self.symbol(each) == symbol for each in names)

    def _add_iterated(self, found: dict[str, dict[Symbol, None]]) -> None:
        """Add loaders that a training loop reads by hand: ``next(batches)`` after ``batches = iter(loader)``."""
        for call in self.script.nodes(ast.Call):
            name = dotted(call.func)
            if name in ("iter", "cycle", "itertools.cycle") and call.args and self.trains(self.script.scope(call)):
                found[LOADER].update(dict.fromkeys(self._training_loaders(call.args[0])))
        for loop in self.script.nodes((ast.ListComp, ast.GeneratorExp)):  # [training_step(batch) for batch in loader]
            for name in _names_in(loop.generators[0].iter) if self.trains(loop) else ():
                found[LOADER].update(dict.fromkeys(self._training_loaders(name)))

    def _training_loaders(self, name: ast.AST) -> list[Symbol]:
        roots = [root for root in self.roots_of(name) if self.role_of(root) == LOADER]
        return [root for root in roots if not _FOR_EVALUATION.search(root.name)]

    def _add_undefined(self, found: dict[str, dict[Symbol, None]]) -> None:
        """Add names that are used like an optimizer, a scheduler or a model but defined outside of this script."""
        used: dict[Symbol, set[str]] = {}
        for call in self.script.nodes(ast.Call):
            name, owner = method(call) or ("()", call.func)
            for root in self.roots_of(owner) if name != "()" or isinstance(owner, ast.Name) else ():
                used.setdefault(root, set()).add(name)
        known = {symbol for symbols in found.values() for symbol in symbols}
        made_by_statements = {*self.functions, *self.classes, *self.script.imported}
        for symbol, calls in used.items():
            if symbol in known or self.is_defined(symbol) or symbol.name in made_by_statements:
                continue
            if {"zero_grad", "step"} <= calls and "parameters" not in calls:
                found[OPTIMIZER][symbol] = None
            elif "step" in calls and re.search(r"sched", symbol.name, re.IGNORECASE):
                found[SCHEDULER][symbol] = None
            elif (
                ("()" in calls or "parameters" in calls)
                and _NAMED_LIKE_MODELS.search(symbol.name)
                and (isinstance(symbol.scope, ast.ClassDef) or self.trains(symbol.scope))
            ):
                found[MODEL][symbol] = None


def is_parameters_call(node: ast.AST) -> bool:
    """Return whether a node is ``model.parameters()`` or ``model.named_parameters()``."""
    return method_name(node) in ("parameters", "named_parameters")


def derived(value: ast.expr, names: set[str]) -> bool:
    """Return whether a value consists of parts of these names only: ``batch["x"].view(-1).to(d)``."""
    if isinstance(value, ast.Name):
        return value.id in names
    if isinstance(value, (ast.Attribute, ast.Subscript, ast.Starred)):
        return derived(value.value, names)
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Attribute) and derived(value.func.value, names)
    if isinstance(value, (ast.Tuple, ast.List)):
        return bool(value.elts) and all(derived(each, names) for each in value.elts)
    if isinstance(value, (ast.DictComp, ast.ListComp, ast.GeneratorExp)):
        return all(derived(each.iter, names) for each in value.generators)
    return False


def _choices(value: ast.expr) -> list[ast.expr]:
    """Return the models in ``model.module if ddp else model``; other expressions are returned unchanged."""
    found = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
    inner = [_inside_wrapper(each) for each in found]
    return inner if all(dotted(each) for each in inner) else [value]


def _inside_wrapper(node: ast.expr) -> ast.expr:
    """Return ``model`` of ``model.module`` and of ``accelerator.unwrap_model(model)``."""
    if isinstance(node, ast.Attribute) and node.attr == "module":
        return node.value
    found = method(node)
    return node.args[0] if found and found[0] == "unwrap_model" and isinstance(node, ast.Call) and node.args else node


def _for_training(loaders: set[Symbol]) -> list[Symbol]:
    """Return the loaders for training among those of a loop that both trains and evaluates."""
    ordered = sorted(loaders, key=lambda each: each.name)
    by_key = [each for each in ordered if "[" in each.name and "train" in each.name.lower()]
    return by_key or [each for each in ordered if not _FOR_EVALUATION.search(each.name)] or ordered


def _single(role: Role | list[Role]) -> Role:
    return None if isinstance(role, list) else role


def _names_in(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the names and ``self.names`` of an expression, longest chains only, without those that are called."""
    if dotted(node):
        yield node
        return
    for child in ast.iter_child_nodes(node):
        if not (isinstance(node, ast.Call) and child is node.func):
            yield from _names_in(child)


def _inside(node: ast.expr, functions: Collection[str]) -> ast.expr:
    """Return the loader inside of calls of these functions: ``tqdm(loader)``, ``enumerate(tqdm(loader), 1)``."""
    while isinstance(node, ast.Call) and node.args and dotted(node.func).rpartition(".")[2] in functions:
        node = node.args[0]
    return node
