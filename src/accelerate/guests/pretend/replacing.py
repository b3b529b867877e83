"""Replace an attribute within a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Enter a context in which the attribute of ``owner`` is replaced; restore it afterwards."""
    own = vars(owner)
    missing = object()
    before = own.get(name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
