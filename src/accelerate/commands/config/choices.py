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

    @property
    def shown(self) -> str:
        """The label, with a remark if this machine doesn't have it."""
        return self.label if self.is_here else f"{self.label} (not on this machine)"


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
