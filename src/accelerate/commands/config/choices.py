"""The entries of a menu, and which of them a typed text names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, final

Value = TypeVar("Value")


@final
@dataclass(frozen=True)
class Choice(Generic[Value]):
    """One entry of a menu: the value it stands for, how it is shown, and whether this machine has it."""

    value: Value
    label: str
    is_here: bool = True


def match(text: str, choices: Sequence[Choice[Value]]) -> Value | None:
    """Return the value of the choice that ``text`` names, or None when it names none or several."""
    typed = text.strip().lower()
    if typed.isdigit() and int(typed) < len(choices) and typed not in {str(choice.value) for choice in choices}:
        return choices[int(typed)].value
    exact = [choice.value for choice in choices if typed in (choice.label.lower(), str(choice.value).lower())]
    if len(exact) == 1:
        return exact[0]
    found = [
        choice.value
        for choice in choices
        if len(typed) > 1 and (typed in choice.label.lower() or typed in str(choice.value).lower())
    ]
    return found[0] if len(found) == 1 else None


def first_that_begins(typed: str, choices: Sequence[Choice[Value]]) -> int | None:
    """Return the index of the choice named by the typed text, or else of the first that begins with it."""
    value = match(typed, choices)
    for index, choice in enumerate(choices):
        if value is not None and choice.value == value:
            return index
    return next((index for index, each in enumerate(choices) if each.label.lower().startswith(typed.lower())), None)
