"""A store that answers for missing ranks, to simulate a single rank of a world."""

from __future__ import annotations

import json
import threading
from typing import Final, final

from ..torch_private.distributed import Store

#: By the last part of a key: the value that the other ranks would have set.
_ANSWERS: Final = {
    "open": "1",
    "decision": json.dumps({"all": True, "moment": "", "names": [], "address": ""}),
    "outcome": json.dumps({"identity": "", "error": ""}),
}


@final
class AnsweringStore(Store):
    """An in-memory store that acts as if every other rank had just done the same as this one.

    The others are at each barrier already, agree in each comparison, give the same values, and take part in each call.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: str | bytes) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Set the value of a key."""
        self._values[_shared(key)] = _as_bytes(value)

    def get(self, key: str) -> bytes:
        """Return the value of a key, or the other ranks' answer if it isn't set."""
        found = self._values.get(_shared(key))
        if found is None:
            found = _ANSWERS.get(_leaf(key), "").encode()
        return found

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of several keys."""
        return [self.get(key) for key in keys]

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have a value."""
        return all(_shared(key) in self._values or _leaf(key) in _ANSWERS for key in keys)

    def wait(self, keys: list[str], timeout: object = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return at once, without waiting."""

    def add(self, key: str, amount: int) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Add to a number and return it; a count of arrivals includes all other ranks."""
        with self._lock:
            number = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(number).encode()
        others = self._size - 1 if _leaf(key) == "arrived" and "/agreement/" not in key else 0
        return number + others

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Set the key if it has no value and none is expected; return its value, or else the one that was expected."""
        if expected and key not in self._values:
            return _as_bytes(_ANSWERS.get(_leaf(key), expected))
        with self._lock:
            return self._values.setdefault(key, _as_bytes(desired))

    def delete_key(self, key: str) -> bool:
        """Delete a key and return whether there was one."""
        return self._values.pop(key, None) is not None


def _leaf(key: str) -> str:
    return key.rpartition("/")[2]


def _shared(key: str) -> str:
    """Return one key for the values of all ranks in an exchange, since all give the same; other keys as they are."""
    parent = key.rpartition("/")[0]
    return parent if _leaf(parent) == "given" else key


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
