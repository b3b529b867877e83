from __future__ import annotations

import enum
import json
import math
import random
import string
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accelerate.checkpointing.codec import (
    EncodingError,
    decode,
    encode,
    envelope,
    inline,
    inlined_tensor,
    open_envelope,
)
from accelerate.checkpointing.layout import read_state, write_encoded
from accelerate.checkpointing.store import DurableFile
from accelerate.errors import CheckpointError


class Colour(enum.Enum):
    RED = 1
    BLUE = "blue"


class Size(enum.IntEnum):
    SMALL = 1


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


class Pair(NamedTuple):
    row: int
    column: Any


Point = namedtuple("Point", ["x", "y"])


def through_json(value: Any) -> Any:
    """The value after a trip through JSON text with its tensors inside."""
    content = json.loads(json.dumps(inline(encode(value))))
    return decode(open_envelope(content, "test")["state"], lambda key: inlined_tensor(content, key))


def through_files(value: Any, folder: Path) -> Any:
    """The value after a trip through a JSON and a safetensors file."""

    def create(name: str) -> Any:
        return _Created(folder / name)

    write_encoded(create, "state", encode(value), beside=True)
    return read_state(folder, "state")


class _Created:
    def __init__(self, path: Path) -> None:
        self.file = DurableFile(path)

    def __enter__(self) -> DurableFile:
        return self.file

    def __exit__(self, *_: object) -> None:
        self.file.fsync_and_close()


def same(left: Any, right: Any) -> bool:
    """Equal in type, order and every bit that a program could see."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return (
            left.dtype == right.dtype
            and left.shape == right.shape
            and left.requires_grad == right.requires_grad
            and left.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
            == right.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
        )
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, np.generic):
        return left.dtype == right.dtype and left.tobytes() == right.tobytes()
    if isinstance(left, float):
        return math.copysign(1, left) == math.copysign(1, right) if left == right else left != left and right != right
    if isinstance(left, complex):
        return same(left.real, right.real) and same(left.imag, right.imag)
    if isinstance(left, dict):
        if isinstance(left, defaultdict) and left.default_factory is not right.default_factory:
            return False
        pairs = zip(left.items(), right.items(), strict=True)
        return len(left) == len(right) and all(same(k, i) and same(v, j) for (k, v), (i, j) in pairs)
    if isinstance(left, deque) and left.maxlen != right.maxlen:
        return False
    if isinstance(left, (list, tuple, deque)):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, (datetime, time)):
        return left == right and left.tzinfo == right.tzinfo and left.fold == right.fold
    return bool(left == right)


DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
]


def tensor_of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    size = torch.empty(shape, dtype=dtype).element_size() * math.prod(shape)
    numbers = bytearray(random.Random(size).randbytes(size))
    if dtype is torch.bool:
        numbers = bytearray(byte & 1 for byte in numbers)
    flat = torch.frombuffer(numbers, dtype=dtype) if size else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(),
    st.binary(),
    st.sampled_from([Colour.RED, Colour.BLUE, Size.SMALL, Rights.READ | Rights.WRITE, Rights(0)]),
    st.datetimes(timezones=st.none() | st.just(timezone.utc) | st.just(ZoneInfo("UTC"))),
    st.dates(),
    st.times(),
    st.timedeltas(),
    st.fractions(),
    st.decimals(allow_nan=False),
    st.uuids(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.device("cpu"), torch.device("cuda", 1), torch.Size([2, 3])]),
    st.sampled_from([np.float32(1.5), np.int64(7), np.bool_(True), np.datetime64("2024-01-02"), np.str_("abc")]),
    st.builds(lambda d, n: tensor_of(d, n), st.sampled_from(DTYPES), st.integers(0, 5)),
)
KEYS = st.one_of(st.text(), st.integers(), st.booleans(), st.none(), st.tuples(st.integers(), st.text()), st.just("$"))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(st.text(), inner, max_size=4).map(OrderedDict),
        st.dictionaries(st.integers(), inner, max_size=3).map(lambda d: defaultdict(list, d)),
        st.lists(inner, max_size=3).map(lambda items: deque(items, maxlen=5)),
        st.sets(st.one_of(st.integers(), st.text()), max_size=4),
        st.frozensets(st.integers(), max_size=4),
        st.builds(Point, inner, inner),
    ),
    max_leaves=12,
)


@settings(max_examples=250, deadline=None)
@given(VALUES)
def test_any_value_survives_a_trip_through_json(value: Any) -> None:
    assert same(through_json(value), value)


@settings(max_examples=60, deadline=None)
@given(VALUES)
def test_any_value_survives_a_trip_through_files(value: Any) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        assert same(through_files(value, Path(folder)), value)


@pytest.mark.parametrize(
    "value",
    [
        {1: "int key", "1": "text key"},
        {"$": "a key that looks like a tag", "items": []},
        {True: 1, 2: 2},
        (1, (2, [3, (4,)])),
        {(1, "a"): {None: [float("inf"), float("-inf"), float("nan"), -0.0]}},
        Counter({3: 1, 5: 2}),
        defaultdict(None, a=1),
        defaultdict(dict, {1: {"x": 1}}),
        Pair(1, [2]),
        bytearray(b"abc"),
        range(1, 10, 3),
        10**5000,
        "\ud800 lone surrogate",
        datetime(2024, 10, 27, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1),
        datetime(2024, 1, 1, tzinfo=timezone(timedelta(hours=-3, minutes=-30))),
        date(2024, 2, 29),
        timedelta(days=-1, microseconds=3),
        Decimal("1.10"),
        Fraction(1, 3),
        UUID(int=5),
        Path("a/b"),
        complex(-0.0, float("nan")),
        np.arange(6, dtype=">i4").reshape(2, 3).T,
        np.array("2024-01-01", dtype="M8[D]"),
        np.zeros((0, 3)),
        np.array(["ab", "c"]),
    ],
    ids=lambda value: f"{type(value).__name__}",
)
def test_values_that_json_has_no_word_for_come_back_exactly(value: Any) -> None:
    assert same(through_json(value), value)


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype_and_shape_come_back_bit_for_bit(
    dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path
) -> None:
    value = {"t": tensor_of(dtype, *shape)}
    assert same(through_json(value), value)
    assert same(through_files(value, tmp_path), value)


def test_a_transposed_tensor_comes_back_with_its_values(tmp_path: Path) -> None:
    value = torch.arange(6.0).reshape(2, 3).t()
    assert torch.equal(through_files([value], tmp_path)[0], value)


def test_a_slice_of_a_large_tensor_is_written_alone(tmp_path: Path) -> None:
    large = torch.zeros(1_000_000)
    through_files([large[5:8]], tmp_path)
    assert (tmp_path / "state.safetensors").stat().st_size < 1000


def test_one_tensor_in_two_places_stays_one_tensor(tmp_path: Path) -> None:
    shared = torch.ones(3)
    back = through_files({"a": shared, "b": [shared], "other": torch.ones(3)}, tmp_path)
    assert back["a"] is back["b"][0]
    assert back["a"] is not back["other"]


def test_parameters_and_gradients_flags_are_kept() -> None:
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    back = through_json([torch.nn.Parameter(torch.ones(2)), frozen, torch.ones(1, requires_grad=True)])
    assert [type(item).__name__ for item in back] == ["Parameter", "Parameter", "Tensor"]
    assert [item.requires_grad for item in back] == [True, False, True]


def test_what_was_loaded_is_in_memory_of_its_own(tmp_path: Path) -> None:
    back = through_files({"t": torch.ones(1000)}, tmp_path)
    with open(tmp_path / "state.safetensors", "r+b") as file:
        file.seek(-4000, 2)
        file.write(b"\0" * 4000)
    assert torch.equal(back["t"], torch.ones(1000))


class Odd:
    pass


class MyInt(int):
    pass


class MyDict(dict):  # type: ignore[type-arg]
    pass


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"foo": [1, 2, 3, Odd()]}, r"state\['foo'\]\[3\]: <class '.*Odd'>"),
        ({"a": {1: Odd()}}, r"state\['a'\]\[1\]: "),
        ({Odd: 1}, r"state key "),
        ([lambda: 1], r"state\[0\]: <class 'function'>"),
        ((MyInt(3),), r"state\[0\]: "),
        ({"d": MyDict()}, r"state\['d'\]: "),
        (defaultdict(lambda: 1), r"its default factory is"),
        (np.array([object()]), r"state: .*object"),
        ({"g": torch.Generator()}, r"state\['g'\]: <class 'torch._C.Generator'>"),
        (torch.empty(2, device="meta"), r"meta device"),
        (torch.eye(2).to_sparse(), r"layout"),
        ({"m": torch.nn.Linear(1, 1)}, r"state\['m'\]: .*Linear"),
    ],
)
def test_what_has_no_exact_form_is_refused_with_its_path(value: Any, path: str) -> None:
    with pytest.raises(EncodingError, match=path):
        encode(value)


def test_a_container_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(EncodingError, match=r"state\[0\].*contains itself"):
        encode(loop)


def test_nesting_without_end_is_refused_and_not_a_crash() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(EncodingError, match="nested too deeply"):
        encode(deep)


@pytest.mark.parametrize(
    "document",
    [
        {"$": "no such tag"},
        {"$": "enum", "module": "os", "class": "system", "name": "x"},
        {"$": "enum", "module": "subprocess", "class": "Popen", "name": "x"},
        {"$": "namedtuple", "module": "subprocess", "class": "Popen", "items": [["true"]]},
        {"$": "namedtuple", "module": "not.imported.anywhere", "class": "X", "items": []},
        {"$": "defaultdict", "factory": "eval", "items": []},
        {"$": "dtype", "name": "load"},
        {"$": "number", "dtype": "O", "data": "AAAAAAAAAAA="},
        {"$": "array", "dtype": "O", "shape": [1], "key": "x"},
        {"$": "tensor", "key": "missing"},
        {"$": "tuple"},
        {"$": ["unhashable"]},
        {"$": "set", "items": [[1]]},
    ],
    ids=str,
)
def test_a_document_made_by_hand_is_refused_and_runs_nothing(document: Any) -> None:
    def tensor_of(key: str) -> torch.Tensor:
        return {"x": torch.zeros(8, dtype=torch.uint8)}[key]

    with pytest.raises(CheckpointError):
        decode(document, tensor_of, "test")


def test_a_newer_state_format_is_refused_by_version() -> None:
    content = {**envelope(1), "version": 99}
    with pytest.raises(CheckpointError, match="version 99"):
        open_envelope(content, "x.json")


def test_text_of_every_kind_is_a_key() -> None:
    value = {character: torch.ones(1) * i for i, character in enumerate(string.printable + "\0äß漢")}
    assert same(through_json(value), value)


def test_a_document_keeps_nothing_of_the_value_that_may_still_change() -> None:
    numbers, names = [1, 2.5, None], {"a": 1}
    document = encode({"numbers": numbers, "names": names, "both": {"numbers": numbers}}).document
    numbers.append(3)
    names["b"] = 2
    assert document == {"numbers": [1, 2.5, None], "names": {"a": 1}, "both": {"numbers": [1, 2.5, None]}}


@pytest.mark.parametrize("odd", [1 << 2000, -(1 << 2000), float("inf"), float("nan"), (1,), b"x"], ids=str)
def test_one_odd_value_among_plain_ones_comes_back_exactly(odd: Any) -> None:
    value = {"list": [1, 2.5, odd, "x"], "dict": {"a": None, "b": odd}, "tuple": (True, odd)}
    assert same(through_json(value), value)
