"""The base of placeholders for objects that an engine creates."""

from __future__ import annotations

from typing import ClassVar


class Placeholder:
    """An argument of ``prepare`` that its engine replaces; every other strategy raises."""

    #: The role in ``prepare``, a value of `parallel.base.Role`.
    role: ClassVar[str]
    #: The name of the engine.
    engine: ClassVar[str]
    #: The stem of the Accelerator's argument and of the launch flag that ask for it.
    asked_by: ClassVar[str]
