"""The condition that a bisection looks for: ``grad_norm > 10``, ``not finite``."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, final

from ...errors import SettingError

_COMPARISONS: Final[dict[str, Callable[[float, float], bool]]] = {
    ">=": operator.ge, "<=": operator.le, "==": operator.eq, "!=": operator.ne, ">": operator.gt, "<": operator.lt,
}  # fmt: skip
_COMPARED: Final = re.compile(r"([\w./-]+)\s*(>=|<=|==|!=|>|<)\s*([-+\w.]+)")
_NOT_FINITE: Final = re.compile(r"(?:([\w./-]+)\s+)?not\s+finite")
_SAME: Final = {"gradient_norm": "grad_norm", "learning_rate": "lr"}


@final
@dataclass(frozen=True)
class Condition:
    """A comparison of one number of an update; without a name, of all of them.

    Attributes:
        sign: a comparison; "" looks for a number that isn't finite.
    """

    text: str
    name: str
    sign: str = ""
    value: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Read a condition.

        Raises:
            SettingError: it is none.
        """
        found = _NOT_FINITE.fullmatch(text.strip())
        if found:
            return cls(text, standard_name(found[1] or ""))
        found = _COMPARED.fullmatch(text.strip())
        try:
            if found:
                return cls(text, standard_name(found[1]), found[2], float(found[3]))
        except ValueError:
            pass
        raise SettingError(
            f'--when "{text}": this is no condition. Write a name of the log, a comparison and a number, such as '
            '"grad_norm > 10", or "not finite".'
        )

    def holds(self, values: Mapping[str, float]) -> bool | None:
        """Return whether the condition holds for an update; None if its number isn't known.

        A value that isn't a number holds any comparison, because it is past each limit.
        """
        known = {standard_name(name): value for name, value in values.items()}
        if not self.sign:
            looked = [value for name, value in known.items() if self.name in ("", name)]
            return not all(map(math.isfinite, looked)) if looked else None
        value = known.get(self.name)
        return None if value is None else math.isnan(value) or _COMPARISONS[self.sign](value, self.value)


def standard_name(name: str) -> str:
    """Return the shortest of the names that a quantity has in logs."""
    return _SAME.get(name, name)
