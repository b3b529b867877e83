"""Lists of ranks in messages, and words that agree with their number."""

from __future__ import annotations

from collections.abc import Iterable, Sized


def some_ranks(ranks: Iterable[int], num_shown: int = 8, *, num_ranks: int | None = None) -> str:
    """Format ranks as ``rank 3``, ``ranks 0 and 2``, ``ranks 3, 17, 20 and 509 others``, or ``no ranks``.

    Args:
        num_shown: the number of ranks to list; the others are counted.
        num_ranks: the number of all ranks, if ``ranks`` are only some of them.
    """
    numbers = sorted(ranks)
    shown = [str(number) for number in numbers[:num_shown]]
    total = len(numbers) if num_ranks is None else num_ranks
    if total == 0:
        return "no ranks"
    rest = total - len(shown)
    last = f"{rest} {by_number(rest, 'other', 'others')}" if rest else shown.pop()
    text = f"{', '.join(shown)} and {last}" if shown else last
    return f"{by_number(total, 'rank', 'ranks')} {text}"


def by_number(count: int | Sized, one: str, several: str) -> str:
    """Return the form of a word, such as a verb, that agrees with a number or with the length of a list."""
    return one if (count if isinstance(count, int) else len(count)) == 1 else several
