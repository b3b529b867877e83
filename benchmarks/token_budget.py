"""How much longer the slowest rank of a step takes than the mean, with batches of equal tokens and with random ones.

    python benchmarks/token_budget.py                    8, 16, 32 and 64 pretended ranks
    python benchmarks/token_budget.py --ranks 512 --samples 1000000

Log-normal lengths (median 300 tokens, sigma 1), cut at the budget of 8,192. No process is started: the plan is the same
on every rank. Randomly assigned batches have as many samples as fill the budget on average. "Attention" adds the square
of the length divided by 4,096, as in a transformer about 700 wide; a wider one is nearer to the column before it.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from accelerate.data_loader.token_batches import TokenPlan

BUDGET, MEDIAN, SIGMA, WIDTH = 8192, 300, 1.0, 4096
Lengths = NDArray[np.int64]


@dataclass(frozen=True)
class Balance:
    """The figures of one epoch."""

    ratio: float  # the slowest rank over the mean, over all steps
    worst: float  # in the worst step
    with_attention: float
    padding: float  # of all tokens
    filled: float  # real tokens of a batch over the budget
    largest: float  # the tokens of the largest batch over the budget
    num_steps: int


def balance(batches: list[Lengths], packed: bool, num_ranks: int) -> Balance:
    """Return the figures of batches of these lengths, of which each step takes ``num_ranks``."""
    longest = np.array([batch.max() for batch in batches], dtype=np.float64)
    sizes = np.array([len(batch) for batch in batches])
    tokens = np.array([batch.sum() for batch in batches], dtype=np.float64)
    costs = tokens if packed else longest * sizes
    squares = np.array([(batch.astype(np.float64) ** 2).sum() for batch in batches]) if packed else longest**2 * sizes
    shape = (len(batches) // num_ranks, num_ranks)
    kept = shape[0] * num_ranks  # an incomplete last step is left out
    steps, attending = costs[:kept].reshape(shape), (costs + squares / WIDTH)[:kept].reshape(shape)
    return Balance(
        steps.max(1).sum() / steps.mean(1).sum(),
        (steps.max(1) / steps.mean(1)).max(),
        attending.max(1).sum() / attending.mean(1).sum(),
        1 - tokens.sum() / costs.sum(),
        tokens.mean() / BUDGET,
        costs.max() / BUDGET,
        shape[0],
    )


def planned(lengths: Lengths, plan: TokenPlan) -> tuple[list[Lengths], float]:
    """Return the batches of an epoch, and the CPU time that planning took, in microseconds a sample."""
    size = plan.window_size(len(lengths), float(lengths.mean()))
    start, batches = time.process_time(), list[Lengths]()
    for first in range(0, len(lengths), size):
        window = lengths[first : first + size]
        batches += [window[places] for places in plan.batches(window, first)]
    return batches, (time.process_time() - start) / len(lengths) * 1e6


def random_batches(lengths: Lengths) -> list[Lengths]:
    """Return batches of one number of samples, which fill the budget on average."""
    size = round(BUDGET / lengths.mean())
    return [lengths[start : start + size] for start in range(0, len(lengths) - size + 1, size)]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 16, 32, 64])
    parser.add_argument("--samples", type=int, default=300_000)
    arguments = parser.parse_args()
    drawn = np.random.default_rng(0).lognormal(np.log(MEDIAN), SIGMA, arguments.samples)
    lengths = np.clip(drawn, 1, BUDGET).astype(np.int64)
    names = ("max/mean", "worst", "attention", "padding", "filled", "largest", "steps", "us")
    widths = (8, 6, 9, 7, 6, 7, 6, 5)
    columns = " ".join(f"{name:>{width}}" for name, width in zip(names, widths, strict=True))
    print(f"{'ranks':>5}  {'batches':22} {columns}")
    for packed in (True, False):
        for num_ranks in arguments.ranks:
            batches, cost = planned(lengths, TokenPlan(BUDGET, packed, num_ranks))
            kind = "packed" if packed else "padded"
            _show(num_ranks, f"{kind}, equal tokens", balance(batches, packed, num_ranks), f"{cost:5.2f}")
            _show(num_ranks, f"{kind}, random", balance(random_batches(lengths), packed, num_ranks), "")


def _show(num_ranks: int, name: str, found: Balance, cost: str) -> None:
    print(
        f"{num_ranks:>5}  {name:22} {found.ratio:8.3f} {found.worst:6.2f} {found.with_attention:9.3f} "
        f"{found.padding:7.1%} {found.filled:6.1%} {found.largest:7.2f} {found.num_steps:6} {cost:>5}",
        flush=True,
    )


if __name__ == "__main__":
    main()
