"""Exact encoding of state dicts as JSON and tensors without pickle, and restricted reading of old pickles.

A value becomes a *document* of JSON values, and its tensors, named by their path. A value without a JSON type is an
object with the key ``"$"``::

    {"step": tensor(3.), "betas": (0.9, float("inf"))}
    -> {"step": {"$": "tensor", "key": "step"},
        "betas": {"$": "tuple", "items": [0.9, {"$": "float", "text": "inf"}]}}

Reading a document imports no module and calls no function that the document names. Classes (of enum members,
namedtuples) are looked up in modules that are already imported, by plain dictionary access. No other module reads old
pickles.
"""

from __future__ import annotations

import base64
import pickle
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, EnumMeta, Flag
from fractions import Fraction
from io import BytesIO
from os import PathLike
from pathlib import Path, PurePath
from typing import IO, TYPE_CHECKING, Any, Final, TypeAlias, TypeGuard, cast, final
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import torch

from ..errors import CheckpointError
from .tensor_files import SAFETENSORS_NAMES, Writable, raw_bytes

if TYPE_CHECKING:
    from torch.serialization import MAP_LOCATION
    from torch.types import FileLike

    from ..nested import Json

FORMAT: Final = "accelerate-state"
FORMAT_VERSION: Final = 1
TAG: Final = "$"
#: Longer integers exceed Python's limit on decimal digits, so they are written in hexadecimal.
_JSON_INT_BITS: Final = 1024

#: A JSON object that was read. Its readers expect what the writer put there; :func:`decode` reports what is missing.
Document: TypeAlias = dict[str, Any]
_Items: TypeAlias = "list[object] | tuple[object, ...] | AbstractSet[object] | deque[object]"
_Array: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.generic]]"

#: Types that may be the default factory of a ``defaultdict``.
_FACTORY_TYPES: Final[tuple[type, ...]] = (
    *(bool, bytes, complex, dict, float, frozenset, int, list, set, str, tuple),
    *(OrderedDict, Counter, deque),
)
_FACTORIES: Final[dict[str, type]] = {kind.__name__: kind for kind in _FACTORY_TYPES}
_FACTORY_NAMES: Final[dict[object, str]] = {kind: name for name, kind in _FACTORIES.items()}


class EncodingError(CheckpointError, TypeError):
    """The error for a value that can't be encoded exactly without pickle; the text has its path."""


def refuse(path: str, value: object, why: str = "") -> EncodingError:
    """Return the error for a value at ``path`` of a state dict that can't be written without pickle."""
    reason = f" ({why})" if why else ""
    return EncodingError(
        f"{path}: {type(value)} can't be written without pickle{reason}. Let state_dict() return tensors, "
        "arrays, numbers, text, dates and containers of these; or allow a pickle, which runs code when it is read: "
        "register_for_checkpointing(..., allow_pickle=True) for one object, "
        'ProjectConfiguration(checkpoint_format="classic") for everything.'
    )


# ---------------------------------------------------------------------------------------------- encoding


@dataclass(frozen=True)
@final
class Encoded:
    """A value as a JSON document and the tensors that the document names."""

    document: Json
    tensors: dict[str, torch.Tensor]

    @property
    def num_tensor_bytes(self) -> int:
        """The size of the tensors in bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


@dataclass
@final
class _Encoder:
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    seen: dict[tuple[object, ...], str] = field(default_factory=dict)
    open: set[int] = field(default_factory=set)  # the containers being encoded, to detect cycles

    def encode(self, value: object, path: str, name: str) -> Json:
        if value is None or type(value) is bool or type(value) is str:
            return value
        if type(value) is int:
            return value if value.bit_length() <= _JSON_INT_BITS else {TAG: "int", "hex": hex(value)}
        if type(value) is float:
            finite = value - value == 0.0
            return value if finite else {TAG: "float", "text": repr(value)}
        if isinstance(value, torch.Tensor):
            return self.tensor(value, path, name)
        writer = _LEAVES.get(type(value))
        if writer is not None:
            return {TAG: writer[0], **writer[1](value)}
        if isinstance(value, (np.generic, np.ndarray)):
            return self.array(value, path, name)
        if isinstance(value, (Enum, PurePath, datetime, time)):
            return _special_leaf(value, path)
        if isinstance(value, (dict, list, tuple, set, frozenset, deque)):
            return self.container(value, path, name)
        raise refuse(path, value)

    def container(self, value: _Items | dict[object, object], path: str, name: str) -> Json:
        if id(value) in self.open:
            raise refuse(path, value, "it contains itself")
        self.open.add(id(value))
        try:
            if isinstance(value, dict):
                return self.mapping(cast("dict[object, object]", value), path, name)
            if _is_plain(value):
                return self.sequence(value, list(value), path)
            items = [self.encode(item, f"{path}[{i}]", f"{name}.{i}") for i, item in enumerate(value)]
            return self.sequence(value, items, path)
        finally:
            self.open.discard(id(value))

    def sequence(self, value: Collection[object], items: list[Json], path: str) -> Json:
        kind = type(value)
        if kind is list:
            return items
        if kind in (tuple, set, frozenset):
            return {TAG: kind.__name__, "items": items}
        if kind is torch.Size:
            return {TAG: "size", "items": items}
        if isinstance(value, deque) and kind is deque:
            return {TAG: "deque", "items": items, "limit": value.maxlen}
        if isinstance(value, tuple) and isinstance(getattr(kind, "_fields", None), tuple):
            return {TAG: "namedtuple", **_class_address(kind, path, value), "items": items}
        raise refuse(path, value)

    def mapping(self, value: dict[object, object], path: str, name: str) -> Json:
        kind = type(value)
        if kind is dict and TAG not in value and _TEXT.issuperset(map(type, value)):
            if _is_plain(value.values()):
                return dict(cast("dict[str, Json]", value))
            return {str(key): self.encode(item, f"{path}[{key!r}]", f"{name}.{key}") for key, item in value.items()}
        pairs: list[Json] = []
        for i, (key, item) in enumerate(value.items()):
            if isinstance(key, torch.Tensor):
                raise refuse(f"{path} key {i}", key, "tensors as keys are told apart by identity only")
            written = self.encode(key, f"{path} key {key!r}", f"{name}.key{i}")
            pairs.append([written, self.encode(item, f"{path}[{key!r}]", f"{name}.{key}")])
        if kind is dict:
            return {TAG: "dict", "items": pairs}
        if kind is OrderedDict:
            return {TAG: "ordered", "items": pairs}
        if kind is Counter:
            return {TAG: "counter", "items": pairs}
        if kind is defaultdict:
            factory = cast("defaultdict[Any, Any]", value).default_factory
            factory_name = None if factory is None else _FACTORY_NAMES.get(factory)
            if factory is not None and factory_name is None:
                raise refuse(path, value, f"its default factory is {factory!r}")
            return {TAG: "defaultdict", "factory": factory_name, "items": pairs}
        raise refuse(path, value)

    def tensor(self, value: torch.Tensor, path: str, name: str) -> Json:
        if type(value) not in plain_tensors:
            raise refuse(path, value, "only plain tensors have one form on disk")
        if value.is_meta:
            raise refuse(path, value, "it lies on the meta device and has no values")
        if value.layout is not torch.strided or value.is_quantized:
            raise refuse(path, value, f"its layout is {value.layout}, quantized: {value.is_quantized}")
        document: dict[str, Json] = {TAG: "tensor", "key": self.add_tensor(value.detach(), name)}
        if value.dtype not in SAFETENSORS_NAMES:  # stored as bytes
            document |= {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
        if isinstance(value, torch.nn.Parameter):
            document["parameter"] = True
        if value.requires_grad != isinstance(value, torch.nn.Parameter):
            document["requires_grad"] = value.requires_grad
        return document

    def add_tensor(self, tensor: torch.Tensor, name: str) -> str:
        """Store a tensor and return its key; a tensor stored before keeps its key, so aliases stay aliases."""
        identity = view_identity(tensor)
        if tensor.numel() and identity in self.seen:
            return self.seen[identity]
        key = name.lstrip(".") or "value"
        while key in self.tensors or key == "__metadata__":
            key += "'"
        if tensor.dtype not in SAFETENSORS_NAMES:
            tensor = tensor.contiguous().reshape(-1).view(torch.uint8)
        self.tensors[key] = tensor
        self.seen[identity] = key
        return key

    def array(self, value: np.generic | _Array, path: str, name: str) -> Json:
        # a subclass of ndarray (a matrix, a masked array) or of a scalar holds more than its numbers
        if isinstance(value, np.ndarray) and type(value) is not np.ndarray:
            raise refuse(path, value)
        if value.dtype.hasobject or value.dtype.fields is not None or not value.dtype.itemsize:
            raise refuse(path, value, f"its dtype is {value.dtype}")
        dtype = value.dtype.str
        if isinstance(value, np.generic):
            return {TAG: "number", "dtype": dtype, "data": _text(value.tobytes())}
        data = torch.from_numpy(np.frombuffer(bytearray(value.tobytes()), dtype=np.uint8)) if value.nbytes else None
        key = None if data is None else self.add_tensor(data, name)
        return {TAG: "array", "dtype": dtype, "shape": list(value.shape), "key": key}


#: The types of tensors that consist of their values only. A pretended run adds its tensors without values.
plain_tensors: tuple[type[torch.Tensor], ...] = (torch.Tensor, torch.nn.Parameter)
_TEXT: Final = frozenset((str,))
_PLAIN: Final = frozenset((type(None), bool, str, int, float))
_NESTED: Final = frozenset((list, dict))


def _is_plain(values: Collection[object]) -> TypeGuard[Collection[Json]]:
    """Return whether JSON can hold all values unchanged; one check for the many numbers of a random state."""
    if not _PLAIN.issuperset(map(type, values)):
        return False
    for value in values:
        if type(value) is int and value.bit_length() > _JSON_INT_BITS:
            return False
        if type(value) is float and value - value != 0.0:  # infinite, or not a number
            return False
    return True


def encode(value: object, name: str = "state") -> Encoded:
    """Encode ``value`` as a document and tensors; error messages call it ``name``.

    Raises:
        EncodingError: a part of it can't be encoded exactly; the text has its path, such as ``state['foo'][3]``.
    """
    encoder = _Encoder()
    try:
        document = encoder.encode(value, name, "")
    except RecursionError:
        raise EncodingError(f"{name}: nested too deeply to be written") from None
    return Encoded(document, encoder.tensors)


def view_identity(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a key that is equal for tensors of the same memory and view."""
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    # A tensor without an address (XLA) equals only itself.
    return (tensor.device, tensor.data_ptr() or id(tensor), shape, stride, tensor.dtype)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _class_address(kind: type, path: str, value: object) -> dict[str, str]:
    if _find_class(kind.__module__, kind.__qualname__) is not kind:
        raise refuse(path, value, "its class can't be found again by name")
    return {"module": kind.__module__, "class": kind.__qualname__}


def _special_leaf(value: Enum | PurePath | datetime | time, path: str) -> dict[str, Json]:
    if isinstance(value, Enum):
        address = _class_address(type(value), path, value)
        name = value.name
        if name is not None and name in type(value).__members__:
            return {TAG: "enum", **address, "name": name}
        if isinstance(value, Flag):
            return {TAG: "enum", **address, "flags": value.value}
    elif isinstance(value, Path):
        return {TAG: "path", "text": str(value)}
    elif isinstance(value, (datetime, time)) and type(value) in (datetime, time):
        zone = value.tzinfo
        document: dict[str, Json] = {TAG: type(value).__name__, "text": value.replace(tzinfo=None).isoformat()}
        if value.fold:
            document["fold"] = 1
        if zone is None:
            return document
        if isinstance(zone, ZoneInfo) and zone.key:
            return {**document, "zone": zone.key}
        if type(zone) is timezone:
            offset = zone.utcoffset(None)
            return {**document, "offset": [offset.days, offset.seconds, offset.microseconds]}
    raise refuse(path, value)


def _duration(value: timedelta) -> dict[str, Json]:
    return {"parts": [value.days, value.seconds, value.microseconds]}


#: Exact types of leaves: the tag, and the function that returns the other fields.
_LEAVES: Final[dict[type, tuple[str, Callable[[Any], dict[str, Json]]]]] = {
    complex: ("complex", lambda value: {"text": [repr(value.real), repr(value.imag)]}),
    bytes: ("bytes", lambda value: {"data": _text(value)}),
    bytearray: ("bytearray", lambda value: {"data": _text(bytes(value))}),
    range: ("range", lambda value: {"parts": [value.start, value.stop, value.step]}),
    torch.dtype: ("dtype", lambda value: {"name": str(value).removeprefix("torch.")}),
    torch.device: ("device", lambda value: {"name": str(value)}),
    timedelta: ("timedelta", _duration),
    date: ("date", lambda value: {"text": value.isoformat()}),
    Decimal: ("decimal", lambda value: {"text": str(value)}),
    Fraction: ("fraction", lambda value: {"parts": [value.numerator, value.denominator]}),
    UUID: ("uuid", lambda value: {"text": str(value)}),
}


# ---------------------------------------------------------------------------------------------- decoding


@dataclass(frozen=True)
@final
class _Decoder:
    tensor_of: Callable[[str], torch.Tensor]
    made: dict[str, torch.Tensor] = field(default_factory=dict)

    def decode(self, document: Json) -> Any:
        if isinstance(document, list):
            items = cast("list[Any]", document)
            return items if _NESTED.isdisjoint(map(type, items)) else [self.decode(item) for item in items]
        if not isinstance(document, dict):
            return document
        tagged = cast("dict[str, Any]", document)
        if TAG not in tagged:
            if _NESTED.isdisjoint(map(type, tagged.values())):
                return tagged
            return {key: self.decode(item) for key, item in tagged.items()}
        tag = tagged[TAG]
        if tag == "tensor":
            return self.tensor(tagged)
        if tag == "array":
            return self.array(tagged)
        if tag in _READERS:
            return _READERS[tag](tagged)
        if tag in _SEQUENCES:
            return _SEQUENCES[tag](tagged, self.decode(tagged["items"]))
        if tag in _MAPPINGS:
            pairs = [(self.decode(key), self.decode(item)) for key, item in tagged["items"]]
            return _MAPPINGS[tag](tagged, pairs)
        raise ValueError(f"unknown tag {tag!r}")

    def tensor(self, document: Document) -> torch.Tensor:
        key = document["key"]
        if key not in self.made:
            tensor = self.tensor_of(key)
            if "dtype" in document:
                tensor = tensor.view(_dtype(document["dtype"])).reshape(document["shape"])
            if document.get("parameter"):
                tensor = torch.nn.Parameter(tensor, requires_grad=document.get("requires_grad", True))
            elif document.get("requires_grad"):
                tensor.requires_grad_(True)
            self.made[key] = tensor
        return self.made[key]

    def array(self, document: Document) -> _Array:
        dtype = _numpy_dtype(document["dtype"])
        if document["key"] is None:
            return np.empty(document["shape"], dtype=dtype)
        data = self.tensor_of(document["key"]).numpy().tobytes()
        return np.frombuffer(bytearray(data), dtype=dtype).reshape(document["shape"])


def decode(document: Json, tensor_of: Callable[[str], torch.Tensor], name: str = "state") -> Any:
    """Reverse :func:`encode`; the result keeps the tensors from ``tensor_of(key)``.

    Raises:
        CheckpointError: the document isn't one that this version can read.
    """
    try:
        return _Decoder(tensor_of).decode(document)
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(
            f"{name}: not a state that this version can read ({type(error).__name__}: {error})"
        ) from error


def _find_class(module: str, qualified_name: str) -> type | None:
    """Return the class of that name from an imported module, without importing or calling anything."""
    found: Any = sys.modules.get(module)
    if found is None:
        raise CheckpointError(f"class {module}.{qualified_name}: import {module} before loading this state")
    for part in qualified_name.split("."):
        found = vars(found).get(part)
        if not isinstance(found, type):
            return None
    return found


def _dtype(name: str) -> torch.dtype:
    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {name!r}")
    return dtype


def _numpy_dtype(name: str) -> np.dtype[np.generic]:
    dtype = np.dtype(name)
    if dtype.hasobject:
        raise ValueError(f"dtype {name!r} holds Python objects")
    return dtype


def _read_enum(document: Document) -> Enum:
    kind = _find_class(document["module"], document["class"])
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise ValueError(f"{document['module']}.{document['class']} is no enum")
    if "flags" in document:
        if not issubclass(kind, Flag) or type(document["flags"]) is not int:
            raise ValueError(f"{document['class']} has no flags")
        return kind(document["flags"])
    return kind.__members__[document["name"]]


def _read_namedtuple(document: Document, items: list[object]) -> tuple[object, ...]:
    kind = _find_class(document["module"], document["class"])
    fields = vars(kind).get("_fields") if isinstance(kind, type) and issubclass(kind, tuple) else None
    if not isinstance(fields, tuple) or len(fields) != len(items):
        raise ValueError(f"{document['module']}.{document['class']} is no namedtuple of {len(items)} fields")
    return tuple.__new__(cast("type[tuple[Any, ...]]", kind), items)


def _read_moment(document: Document) -> datetime | time:
    kind = datetime if document[TAG] == "datetime" else time
    moment = kind.fromisoformat(document["text"]).replace(fold=document.get("fold", 0))
    if "zone" in document:
        return moment.replace(tzinfo=ZoneInfo(document["zone"]))
    if "offset" in document:
        return moment.replace(tzinfo=timezone(timedelta(*document["offset"])))
    return moment


def _read_number(document: Document) -> np.generic:
    return np.frombuffer(base64.b64decode(document["data"]), dtype=_numpy_dtype(document["dtype"]))[0]


def _bytes(document: Document) -> bytes:
    return base64.b64decode(document["data"], validate=True)


_READERS: Final[dict[str, Callable[[Document], object]]] = {
    "int": lambda d: int(d["hex"], 16),
    "float": lambda d: float(d["text"]),
    "complex": lambda d: complex(float(d["text"][0]), float(d["text"][1])),
    "bytes": _bytes,
    "bytearray": lambda d: bytearray(_bytes(d)),
    "range": lambda d: range(*d["parts"]),
    "dtype": lambda d: _dtype(d["name"]),
    "device": lambda d: torch.device(d["name"]),
    "timedelta": lambda d: timedelta(*d["parts"]),
    "date": lambda d: date.fromisoformat(d["text"]),
    "datetime": _read_moment,
    "time": _read_moment,
    "decimal": lambda d: Decimal(d["text"]),
    "fraction": lambda d: Fraction(*d["parts"]),
    "uuid": lambda d: UUID(d["text"]),
    "path": lambda d: Path(d["text"]),
    "enum": _read_enum,
    "number": _read_number,
}
_SEQUENCES: Final[dict[str, Callable[[Document, list[Any]], object]]] = {
    "tuple": lambda _, items: tuple(items),
    "set": lambda _, items: set(items),
    "frozenset": lambda _, items: frozenset(items),
    "size": lambda _, items: torch.Size(items),
    "deque": lambda d, items: deque(items, d["limit"]),
    "namedtuple": _read_namedtuple,
}
_MAPPINGS: Final[dict[str, Callable[[Document, list[tuple[Hashable, Any]]], object]]] = {
    "dict": lambda _, pairs: dict(pairs),
    "ordered": lambda _, pairs: OrderedDict(pairs),
    "counter": lambda _, pairs: Counter(dict(pairs)),
    "defaultdict": lambda d, pairs: defaultdict(None if d["factory"] is None else _FACTORIES[d["factory"]], pairs),
}


# ----------------------------------------------------------------------------------------------- state files


def inline(encoded: Encoded) -> dict[str, Json]:
    """Return one JSON value that holds the document and the bytes of its tensors."""
    tensors = {
        key: {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "data": _text(bytes(raw_bytes(tensor))),
        }
        for key, tensor in encoded.tensors.items()
    }
    return envelope(encoded.document, inlined=tensors)


def envelope(
    document: Json, *, inlined: Mapping[str, Json] | None = None, beside: str | None = None
) -> dict[str, Json]:
    """Return the content of a state file: format, version, the document, and where its tensors are."""
    header: dict[str, Json] = {"format": FORMAT, "version": FORMAT_VERSION}
    if beside is not None:
        header["tensors_in"] = beside
    if inlined:
        header["tensors"] = dict(inlined)
    return {**header, "state": document}


def open_envelope(content: object, name: str) -> Document:
    """Return ``content`` after checking that it is a state file of a known version.

    Raises:
        CheckpointError: it is something else, or newer.
    """
    if not isinstance(content, dict) or content.get("format") != FORMAT or "state" not in content:
        raise CheckpointError(f"{name}: not a state file of this library")
    if content.get("version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{name}: written in version {content.get('version')} of the state format; this library reads "
            f"version {FORMAT_VERSION}. Use the accelerate version that wrote it, or a newer one."
        )
    return cast("dict[str, Any]", content)


def inlined_tensor(content: Document, key: str) -> torch.Tensor:
    """Return a tensor whose bytes are in the JSON file itself."""
    entry = content["tensors"][key]
    dtype, data = _dtype(entry["dtype"]), bytearray(_bytes(entry))
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(entry["shape"])


# --------------------------------------------------------------------------------------------------- pickles

#: The data classes that an old checkpoint's pickles may name, besides tensors and plain containers; never code.
_NUMPY_DTYPES: Final = tuple(
    type(np.dtype(code)) for code in ("?", "b", "B", "h", "H", "i", "I", "l", "L", "q", "Q", "e", "f", "d", "U", "S")
)


def _safe_globals() -> list[Callable[..., object] | tuple[Callable[..., object], str]]:
    core: Any = np._core if hasattr(np, "_core") else np.core  # type: ignore[attr-defined]  # numpy 1 and 2
    reconstruct, scalar = core.multiarray._reconstruct, core.multiarray.scalar
    # a file has the module path of the numpy version that wrote it
    spelled = [
        (function, f"numpy.{package}.multiarray.{function.__name__}")
        for function in (reconstruct, scalar)
        for package in ("core", "_core")
    ]
    return [
        np.ndarray,
        np.dtype,
        *dict.fromkeys(_NUMPY_DTYPES),
        *spelled,
        OrderedDict,
        defaultdict,
        Counter,
        set,
    ]


def read_pickle(
    file: str | PathLike[str] | IO[bytes],
    *,
    map_location: MAP_LOCATION = "cpu",
    allow_pickle: bool = False,
    **load_kwargs: Any,
) -> Any:
    """Read the object in an old file through an allow-list of data classes; ``allow_pickle`` lets code run.

    Raises:
        CheckpointError: the file is broken, or names something that isn't on the list.
    """
    weights_only = bool(load_kwargs.pop("weights_only", not allow_pickle)) and not allow_pickle
    try:
        with torch.serialization.safe_globals(_safe_globals()):
            return torch.load(file, map_location=map_location, weights_only=weights_only, **load_kwargs)
    except FileNotFoundError:
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{file}: refused, because reading it could run code ({_first_line(error)}). If you trust where "
            "it comes from, say so: load_state(load_kwargs={'weights_only': False})."
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError, OSError, AttributeError, ImportError) as error:
        raise CheckpointError(f"{file}: can't be read ({type(error).__name__}: {_first_line(error)})") from error


@final
class _DescribedReader(pickle.Unpickler):
    """An unpickler that accepts only the classes of ``allowed``."""

    def __init__(self, source: IO[bytes], allowed: Mapping[str, tuple[str, ...]]) -> None:
        super().__init__(source)
        self._allowed = allowed

    def find_class(self, module_name: str, global_name: str, /) -> object:
        if (module_name, global_name) == ("builtins", "getattr"):
            return _member
        found = _attribute(module_name, global_name)
        if global_name in self._allowed.get(module_name, ()) or isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(f"Unsupported class {module_name}.{global_name}")


def read_described_pickle(data: bytes, allowed: Mapping[str, tuple[str, ...]], name: str) -> Any:
    """Read the object in a pickle that may name only the classes of ``allowed``: module -> names; errors say ``name``.

    Raises:
        CheckpointError: it is broken, or names something else.
    """
    try:
        return _DescribedReader(BytesIO(data), allowed).load()
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{name}: refused, because reading it could run code ({error})") from error
    except (EOFError, ValueError, KeyError, TypeError, AttributeError, ImportError, IndexError) as error:
        raise CheckpointError(f"{name}: can't be read ({type(error).__name__}: {_first_line(error)})") from error


def _member(kind: object, name: str) -> object:
    """Return the member ``name`` of an enum, which Python 3.11.0 to 3.11.3 pickle as ``getattr(kind, name)``."""
    if not isinstance(kind, EnumMeta) or name not in kind.__members__:
        raise pickle.UnpicklingError(f"Unsupported attribute {name!r} of {kind!r}")
    return kind.__members__[name]


def _attribute(module_name: str, name: str) -> object:
    """Return the attribute ``name`` of an already imported module; None if the module isn't imported."""
    module = sys.modules.get(module_name)
    return None if module is None else vars(module).get(name)


def write_pickle(obj: object, file: Writable | FileLike, **save_kwargs: Any) -> None:
    """Write ``obj`` to ``file`` as ``torch.save`` does."""
    torch.save(obj, cast("FileLike", file), **save_kwargs)


def plain_pickle(obj: object) -> bytes:
    """Return ``obj`` as a pickle for :func:`read_described_pickle`."""
    return pickle.dumps(obj)


def _first_line(error: BaseException) -> str:
    text = str(error)
    found = [line for line in text.splitlines() if "Unsupported" in line or "GLOBAL" in line]
    return (found or text.splitlines() or [""])[0].strip()
