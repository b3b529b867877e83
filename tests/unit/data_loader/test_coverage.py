"""Rows that were added to complete a batch leave what was gathered, and nothing else does."""

from __future__ import annotations

from accelerate.data_loader import BatchCoverage
from accelerate.data_loader.sampling import rows_to_keep

TAIL = BatchCoverage(valid=(4, 1, 0), size=(4, 4, 4))


def kept(rows: list[int], coverage: BatchCoverage | None) -> list[int] | None:
    """Which of the gathered rows stay, by number; None: all of them, as they are."""
    spans = rows_to_keep(rows, coverage)
    return None if spans is None else [row for span in spans for row in range(sum(rows))[span]]


def test_added_rows_leave_and_real_rows_stay_in_order() -> None:
    assert kept([4, 4, 4], TAIL) == [0, 1, 2, 3, 4]


def test_complete_batches_come_back_as_they_are() -> None:
    assert kept([4, 4, 4], BatchCoverage((4, 4, 4), (4, 4, 4))) is None
    assert kept([4, 4, 4], None) is None


def test_samples_may_have_several_rows_each() -> None:
    assert kept([8, 8, 8], TAIL) == list(range(10))


def test_values_per_rank_stay_where_the_rank_had_a_real_sample() -> None:
    assert kept([1, 1, 1], TAIL) == [0, 1]


def test_rows_that_arent_samples_stay_whole() -> None:
    assert kept([7, 7, 7], TAIL) is None
    assert kept([4, 4, 3], TAIL) is None


def test_shares_of_different_sizes_are_told_apart() -> None:
    uneven = BatchCoverage(valid=(3, 0), size=(3, 1))
    assert kept([3, 1], uneven) == [0, 1, 2]
    assert kept([3, 3], uneven) == [0, 1, 2], "padded to the largest batch before the gather"
    assert kept([12, 12, 12], BatchCoverage((4, 1, 1), (4, 1, 1))) == [*range(12), 12, 13, 14, 24, 25, 26]
    assert kept([8, 2, 2], BatchCoverage((4, 1, 1), (4, 1, 1))) == list(range(12)), "two rows per sample, not padded"


def test_a_batch_without_a_valid_row_leaves_nothing() -> None:
    assert kept([2, 2], BatchCoverage((0, 0), (2, 2))) == []
    assert kept([0, 0], BatchCoverage((0, 0), (0, 0))) is None


def test_the_ranks_that_have_a_batch_have_a_coverage_of_their_own() -> None:
    coverage = BatchCoverage((3, 1, 0), (3, 1, 0), num_absent=1)
    assert coverage.is_uneven and coverage.of_present() == BatchCoverage((3, 1), (3, 1))
    assert kept([3, 1], coverage.of_present()) == [0, 1, 2, 3]
    assert not TAIL.is_uneven and TAIL.of_present() is TAIL
