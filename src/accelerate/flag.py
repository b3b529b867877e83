"""A callable boolean, for scripts that call ``accelerator.is_main_process()``."""

from __future__ import annotations

from typing import final


@final
class Flag(int):
    """A boolean that also works as a function: ``if flag:`` and ``if flag():``."""

    def __new__(cls, value: bool) -> Flag:
        return super().__new__(cls, bool(value))

    def __call__(self) -> bool:
        return bool(self)

    def __repr__(self) -> str:
        return repr(bool(self))

    __str__ = __repr__
