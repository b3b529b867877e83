"""Find the Python state that a call of a model can change, and restore it.

Examples are a counter, a list of past outputs, or a ``random.Random`` in an attribute, which torch doesn't manage. They
are found by following references from the model: attributes of its modules, of the objects in them and of their
classes, closures of hooks and functions, and global variables used by functions in the model's own files. Contents are
restored in the same objects, so that other references to them see the restored state too.
"""

from __future__ import annotations

import array
import io
import json
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import CellType, CodeType, FunctionType, MappingProxyType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, Final, NamedTuple, final

import torch
from torch import nn

from ...torch_private.modules import gradient_hooks, num_changes
from .replica_check import has_bits

#: Packages whose objects have no state of a model, or are restored elsewhere.
_NO_STATE: Final = {"accelerate", "asyncio", "concurrent", "logging", "multiprocessing", "threading", "torch"}
_LEAVES: Final = (type(None), bool, int, float, complex, str, bytes, range, slice, ModuleType, random.SystemRandom)
_MISSING: Final = object()


class _Kind(NamedTuple):
    """The functions that read and write the content of one kind of object."""

    read: Callable[[Any], Any]
    write: Callable[[Any, Any], object]


def _write_tensor(value: torch.Tensor, content: torch.Tensor) -> None:
    with torch.inference_mode(value.is_inference()):
        value.data.copy_(content)


def _read_cell(cell: CellType) -> list[object]:
    try:
        return [cell.cell_contents]
    except ValueError:  # empty
        return []


def _write_cell(cell: CellType, content: list[object]) -> None:
    if content:
        cell.cell_contents = content[0]
    else:
        del cell.cell_contents


def _read_class(kind: type) -> dict[str, object]:
    """Return the data attributes of a class, without methods, descriptors and attributes of the interpreter."""
    names = [each for each in vars(kind) if not each.startswith(("__", "_abc_"))]
    return {each: vars(kind)[each] for each in names if getattr(type(vars(kind)[each]), "__get__", None) is None}


def _write_class(kind: type, content: dict[str, object]) -> None:
    for name in _read_class(kind).keys() - content.keys():
        delattr(kind, name)
    for name, value in content.items():
        if vars(kind).get(name, _MISSING) is not value:
            setattr(kind, name, value)


def _read_slots(value: object) -> dict[str, object]:
    own = [each for kind in type(value).__mro__ if "__slots__" in vars(kind) for each in vars(kind).items()]
    slots = {name: getattr(value, name, _MISSING) for name, each in own if isinstance(each, MemberDescriptorType)}
    return {name: each for name, each in slots.items() if each is not _MISSING}


def _write_slots(value: object, content: dict[str, object]) -> None:
    for name in _read_slots(value).keys() - content.keys():
        object.__delattr__(value, name)
    for name, each in content.items():
        object.__setattr__(value, name, each)


def _write_variables(variables: dict[str, object], content: dict[str, object]) -> None:
    for name, value in content.items():
        if value is not _MISSING:
            variables[name] = value
        else:
            variables.pop(name, None)


def _read_hooks(module: nn.Module) -> list[dict[int, object]]:
    return [dict(table) for table in _hook_tables(module)]


def _write_hooks(module: nn.Module, content: list[dict[int, object]]) -> None:
    for table, hooks in zip(_hook_tables(module), content, strict=True):
        table.clear()
        table.update(hooks)


def _hook_tables(module: nn.Module) -> list[OrderedDict[int, object]]:
    return [each for name, each in vars(module).items() if "_hooks" in name and isinstance(each, OrderedDict)]


def _as_json(state: object) -> str:
    """Return the state of a NumPy generator, which has numbers and arrays, as text to compare."""
    return json.dumps(state, default=lambda value: value.tolist())


_KINDS: Final[dict[type, _Kind]] = {
    list: _Kind(list, lambda value, content: list.__setitem__(value, slice(None), content)),
    OrderedDict: _Kind(dict, lambda value, new: (OrderedDict.clear(value), OrderedDict.update(value, new))),
    dict: _Kind(dict, lambda value, new: (dict.clear(value), dict.update(value, new))),
    set: _Kind(set, lambda value, new: (set.clear(value), set.update(value, new))),
    deque: _Kind(list, lambda value, new: (deque.clear(value), deque.extend(value, new))),
    bytearray: _Kind(bytes, lambda value, new: value.__setitem__(slice(None), new)),
    array.array: _Kind(lambda value: value[:], lambda value, new: value.__setitem__(slice(None), new)),
    random.Random: _Kind(random.Random.getstate, random.Random.setstate),
    torch.Generator: _Kind(torch.Generator.get_state, torch.Generator.set_state),
}
_DICT: Final = _KINDS[dict]
_CELL: Final = _Kind(_read_cell, _write_cell)
_CLASS: Final = _Kind(_read_class, _write_class)
_SLOTS: Final = _Kind(_read_slots, _write_slots)
_HOOKS: Final = _Kind(_read_hooks, _write_hooks)
_TENSOR: Final = _Kind(lambda value: value.detach().clone(), _write_tensor)
#: Type name of a NumPy generator -> how its state is read and written.
_OF_NUMPY: Final = {
    "ndarray": _Kind(lambda value: value.copy(), lambda value, new: value.__setitem__(..., new)),
    "Generator": _Kind(
        lambda value: _as_json(value.bit_generator.state),
        lambda value, new: setattr(value.bit_generator, "state", json.loads(new)),
    ),
    "RandomState": _Kind(
        lambda value: _as_json(value.get_state(legacy=False)), lambda value, new: value.set_state(json.loads(new))
    ),
}
#: Types that aren't written in Python and can be pickled.
_BY_STATE: Final = _Kind(lambda value: value.__getstate__(), lambda value, content: value.__setstate__(content))


@final
class PythonState:
    """The content of all objects that a call of a model can reach and change, except parameters and buffers.

    Attributes:
        obstacle: an object whose state can't be read and restored, as "`name` (kind)"; "" if there is none.
    """

    def __init__(self, model: nn.Module) -> None:
        self.obstacle: str = ""
        self._held: dict[int, tuple[object, _Kind, Any]] = {}
        self._versions: dict[int, int] = {}  # of tensors
        modules = dict(model.named_modules())
        self._modules = {id(module) for module in modules.values()}
        self._seen: dict[int, object] = {id(each): each for each in [*model.parameters(), *model.buffers()]}
        files = {each.__module__ for kind in {type(each) for each in modules.values()} for each in kind.__mro__}
        self._files = {each for each in files if not _is_foreign(each)} | {"__main__"}
        self._waiting: list[tuple[str, object]] = list(modules.items())
        self._waiting += [(name, hook) for name, each in model.named_parameters() for hook in gradient_hooks(each)]
        while self._waiting:
            self._look(*self._waiting.pop())

    def put_back(self) -> None:
        """Restore the recorded content of each changed object."""
        for value, kind, content in self._held.values():
            if not _is_same(kind.read(value), content):
                kind.write(value, content)

    def without_tensors(self) -> PythonState:
        """Drop the tensors and keep only how often each was changed, which is enough to compare."""
        self._held = {key: each for key, each in self._held.items() if each[1] is not _TENSOR}
        return self

    def differs(self, other: PythonState) -> bool:
        """Return whether an object recorded in both differs; hooks may be added and removed."""
        held = [
            (content, other._held[key][2])
            for key, (_, kind, content) in self._held.items()
            if key in other._held and kind is not _TENSOR and kind is not _HOOKS
        ]
        versions = [(version, other._versions.get(key, version)) for key, version in self._versions.items()]
        return any(one != there for one, there in versions) or not all(_is_same(*pair) for pair in held)

    # -- looking -------------------------------------------------------------------------------------------

    def _look(self, where: str, value: object) -> None:
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        kind = type(value)
        known = _KINDS.get(kind) or next((_KINDS[each] for each in kind.__mro__ if each in _KINDS), None)
        of_numpy = next((_OF_NUMPY.get(each.__name__) for each in kind.__mro__ if _root(each) == "numpy"), None)
        if isinstance(value, nn.Module):
            self._look_at_module(where, value)
        elif isinstance(value, torch.Tensor):
            self._look_at_tensor(value)
        elif known is not None:
            self._wait(where, _items(self._hold(value, known)))
            if kind not in _KINDS:
                self._wait(where, [("", _own(value)), ("", kind)])
        elif isinstance(value, type):
            self._look_at_class(where, value)
        elif isinstance(value, FunctionType):
            self._look_at_function(where, value)
        elif isinstance(value, (tuple, frozenset)):
            self._wait(where, enumerate(value))
        elif isinstance(value, MethodType):
            self._wait(where, [("", value.__self__), ("", value.__func__)])
        elif isinstance(value, partial):
            self._wait(where, [("", value.func), ("", value.args), ("", value.keywords)])
        elif of_numpy is not None:
            content = self._hold(value, of_numpy)
            if getattr(getattr(value, "dtype", None), "hasobject", False):
                self._wait(where, enumerate(content.ravel().tolist()))
        elif _root(kind) not in _NO_STATE:
            self._look_at_object(where, value)

    def _hold(self, value: object, kind: _Kind) -> Any:
        content = kind.read(value)
        self._held[id(value)] = value, kind, content
        return content

    def _wait(self, where: str, found: Iterable[tuple[object, object]]) -> None:
        for name, value in found:
            if not isinstance(value, _LEAVES):
                part = f".{name}" if isinstance(name, str) and name else "" if name == "" else f"[{name!r:.40}]"
                self._waiting.append((f"{where}{part}".removeprefix("."), value))

    def _look_at_module(self, where: str, module: nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            return self._refuse(where, module)
        own = vars(module)
        content = _DICT.read(own)
        self._held[id(own)] = own, _DICT, content
        for table in self._hold(module, _HOOKS):
            self._wait(where, [("", hook) for hook in table.values()])
        # FSDP swaps parameters between forward and backward; a recomputed pass gets its own buffers.
        left_out = ("_parameters", "_buffers") if id(module) in self._modules else ("_parameters",)
        self._wait(where, [each for each in content.items() if "_hooks" not in each[0] and each[0] not in left_out])
        self._wait(where, [("", type(module))])

    def _look_at_tensor(self, value: torch.Tensor) -> None:
        if has_bits(value) and not isinstance(value, nn.Parameter):
            self._hold(value, _TENSOR)
            self._versions[id(value)] = -1 if value.is_inference() else num_changes(value)

    def _look_at_class(self, where: str, kind: type) -> None:
        for each in kind.__mro__:
            if not _is_foreign_class(each) and (each is kind or id(each) not in self._seen):
                self._seen[id(each)] = each
                self._wait(where, self._hold(each, _CLASS).items())
                if each.__module__ in self._files:
                    self._wait(where, [("", _function(value)) for value in vars(each).values()])

    def _look_at_function(self, where: str, function: FunctionType) -> None:
        variables = function.__globals__
        self._wait(where, [("", vars(function))])
        if _is_foreign(variables.get("__name__", "")):
            return
        self._wait(where, [("", function.__defaults__), ("", function.__kwdefaults__)])
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._wait(where, [(name, each) for each in self._hold(cell, _CELL)])
        names = [each for each in set(_names(function.__code__)) if self._is_followed(variables.get(each, function))]
        named = _Kind(lambda variables: {name: variables.get(name, _MISSING) for name in names}, _write_variables)
        content = named.read(variables)
        self._held[id(function)] = variables, named, content
        self._wait("", [(f"the global variable {name}", value) for name, value in content.items()])

    def _is_followed(self, variable: object) -> bool:
        """Return whether a global variable is followed; functions and classes only if the model's files define them."""
        return not isinstance(variable, (FunctionType, type)) or variable.__module__ in self._files

    def _look_at_object(self, where: str, value: object) -> None:
        kind, own, slots = type(value), _own(value), _read_slots(value)
        is_read = not value.closed and value.readable() if isinstance(value, io.IOBase) else isinstance(value, Iterator)
        if is_read:
            return self._refuse(where, value)
        if slots:
            self._wait(where, self._hold(value, _SLOTS).items())
        if own is not None or slots:
            self._wait(where, [("", own), ("", kind)])
        elif isinstance(value, MappingProxyType):
            self._wait(where, _items(dict(value)))
        elif (of := getattr(value, "__self__", None)) is not None:  # of a method that isn't written in Python
            self._wait(where, [("", of)])
        elif getattr(kind, "__setstate__", None) is not None:
            self._hold(value, _BY_STATE)
        elif kind.__hash__ in (None, object.__hash__) and not _is_foreign(kind.__module__):
            self._refuse(where, value)

    def _refuse(self, where: str, value: object) -> None:
        kind = type(value)
        self.obstacle = self.obstacle or f"`{where}` ({kind.__module__}.{kind.__qualname__})"


def _root(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _is_foreign(module: str) -> bool:
    """Return whether a module belongs to torch, to us or to the standard library, and isn't followed."""
    root = module.partition(".")[0]
    return root in _NO_STATE or root == "numpy" or root in sys.stdlib_module_names


def _is_foreign_class(kind: type) -> bool:
    """Return whether a class is foreign like :func:`_is_foreign`; FSDP2's dynamic subclasses of user classes aren't."""
    return _is_foreign(kind.__module__) and getattr(sys.modules.get(kind.__module__), kind.__name__, None) is kind


def _own(value: object) -> dict[str, object] | None:
    own = getattr(value, "__dict__", None)
    return own if type(own) is dict else None


def _function(value: object) -> object:
    return getattr(value, "__func__", getattr(value, "fget", value))


def _names(code: CodeType) -> Iterator[str]:
    """Iterate over the names that a function's code, or code nested in it, looks up."""
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names(each)


def _items(content: object) -> Iterator[tuple[object, object]]:
    if isinstance(content, (list, set)):
        yield from enumerate(content)
    elif isinstance(content, dict):
        yield from content.items()
        yield from (("", key) for key in content)


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two contents are equal: the same objects in containers, the same bits in tensors."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if not isinstance(one, (dict, list, set)):
        return one.tobytes() == other.tobytes() if getattr(one, "tobytes", None) is not None else one == other
    if len(one) != len(other):
        return False
    if isinstance(one, dict) and not _is_same([*one], [*other]):
        return False
    values = (one.values(), other.values()) if isinstance(one, dict) else (one, other)
    return all(
        x is y or (type(x) is type(y) and (x == y if isinstance(x, (int, str)) else type(x) is dict and _is_same(x, y)))
        for x, y in zip(*values, strict=True)
    )
