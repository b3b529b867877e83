"""The models named in ``accumulate``, found by their parameters, so that wrappers, lists and parts work too."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn, final

import torch

from ..errors import PreparationError

#: Identifies a window by its models: for each model, its number in the order of preparation; for a part, that number
#: and the indices of the part's parameters in the model. Empty: all models. A set of ids if the models are unknown.
WindowKey = tuple[int | tuple[int, ...], ...] | frozenset[int]

_MAX_KNOWN: Final = 64  # number of cached accumulate() calls


@final
@dataclass(frozen=True, slots=True)
class NamedModels:
    """The objects named in a call of ``accumulate``, and their prepared models.

    Args:
        named: the given objects; kept alive, so that no other object gets one of their ids.
        key: the key of their window.
        models: the numbers of the prepared models whose gradients the window has; None if unknown.
        unreduced: the modules whose gradients aren't reduced before the window ends.
    """

    named: tuple[object, ...]
    key: WindowKey
    models: Sequence[int] | None
    unreduced: Sequence[torch.nn.Module]

    @classmethod
    def find(cls, named: tuple[Any, ...], prepared: Sequence[torch.nn.Module]) -> NamedModels:
        """Find the models among ``prepared`` that share parameters with ``named``."""
        key: set[int | tuple[int, ...]] = set()
        unknown: list[Any] = []
        for given in named:
            found = set(_parts_in(given, prepared))
            key |= found
            if not found:
                unknown.append(given)
        numbers = numbers_in(key)
        modules = [one for one in unknown if isinstance(one, torch.nn.Module)]
        unreduced = [*modules, *(prepared[number] for number in numbers)]
        if unknown:
            return cls(named, frozenset(map(id, named)), None, unreduced)
        return cls(named, tuple(sorted(key, key=str)), numbers, unreduced)

    def refuse_weight(self) -> NoReturn:
        """Raise, because a weight can't divide gradients of unknown models.

        Raises:
            PreparationError: the text has the classes of the named objects.
        """
        raise PreparationError(
            f"backward(loss, weight=...) inside accumulate({', '.join(type(one).__name__ for one in self.named)}): not "
            "all of them contain, or are part of, a prepared model, so the gradients to divide by the window's total "
            "weight are unknown. Give accumulate() prepared models."
        )


@final
class NamedWindows:
    """The models named in the ``accumulate`` calls so far, and those of the last call."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, ...], NamedModels] = {}
        self.depth = 0  # number of accumulate() contexts that the loop is in
        self.forget()

    def forget(self) -> None:
        """Clear all models; the current window then has the gradients of any model."""
        self.known.clear()
        self.current: NamedModels = NamedModels((), (), (), ())

    def find(self, named: tuple[Any, ...], prepared: Sequence[torch.nn.Module]) -> NamedModels:
        """Find the models of ``named``, and cache them."""
        if len(self.known) > _MAX_KNOWN:  # the loop makes a new list or wrapper in each micro-batch
            self.known.clear()
        found = self.known[tuple(map(id, named))] = NamedModels.find(named, prepared)
        return found

    def unreduced_by(self, model: torch.nn.Module, prepared: Sequence[torch.nn.Module]) -> Sequence[torch.nn.Module]:
        """Return the modules in which ``no_sync(model)`` reduces no gradients; a part may be sharded by itself."""
        found = self.known.get((id(model),)) or self.find((model,), prepared)
        return [model] if any(isinstance(one, tuple) for one in found.key) else found.unreduced

    def parameters(
        self, prepared: Sequence[torch.nn.Module], windows: Iterable[Any], pending: Collection[Any]
    ) -> Iterator[torch.nn.Parameter]:
        """Iterate over the parameters of the current window's models, and of models not named in ``windows``.

        Args:
            pending: the other windows with weights.

        Raises:
            PreparationError: the window of a model's gradients is unknown.
        """
        current = self.current
        if current.models is None:
            current.refuse_weight()
        of_windows = {number for key in windows for number in numbers_in(key)}
        for number, model in enumerate(prepared):
            if current.key and number not in current.models:
                if number in of_windows:
                    continue
                if pending and any(parameter.grad is not None for parameter in model.parameters()):
                    raise PreparationError(
                        f"backward(loss, weight=...): no accumulate() names {type(model).__name__}, which has "
                        "gradients while two windows are open, so the total weight to divide them by is unknown. "
                        "Name it in the accumulate() of the losses that train it."
                    )
            yield from model.parameters()


def _parts_in(given: Any, prepared: Sequence[torch.nn.Module]) -> Iterator[int | tuple[int, ...]]:
    """Iterate over the models and parts of models in ``given``."""
    if not isinstance(given, torch.nn.Module):
        return
    inside, rest = list(given.modules()), set(map(id, given.parameters()))
    own = [list(map(id, model.parameters())) for model in prepared]
    whole = [
        number
        for number, model in enumerate(prepared)
        if any(model is one for one in inside) or (own[number] and rest.issuperset(own[number]))
    ]
    yield from whole
    rest.difference_update(*(own[number] for number in whole))  # tied parameters belong to the complete models
    for number, model in enumerate(prepared):
        is_inside = not rest.isdisjoint(own[number]) or any(given is one for one in model.modules())
        if number not in whole and is_inside:
            yield number, *(place for place, one in enumerate(own[number]) if one in rest)


def numbers_in(key: Iterable[Any]) -> list[int]:
    """Return the sorted numbers of the models in a :data:`WindowKey`."""
    return sorted({part[0] if isinstance(part, tuple) else part for part in key})


def overlap(one: WindowKey, other: WindowKey) -> bool:
    """Return whether two windows may have gradients of the same model."""
    return not one or not other or not set(numbers_in(one)).isdisjoint(numbers_in(other))
