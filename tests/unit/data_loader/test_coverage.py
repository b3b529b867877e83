"""Rows that were added to complete a batch leave what was gathered, and nothing else does."""

from __future__ import annotations

import torch

from accelerate.data_loader import BatchCoverage, keep_real

TAIL = BatchCoverage(real=(4, 1, 0), size=(4, 4, 4))


def test_added_rows_leave_and_real_rows_stay_in_order() -> None:
    assert keep_real(torch.arange(12), TAIL).tolist() == [0, 1, 2, 3, 4]


def test_complete_batches_come_back_as_they_are() -> None:
    rows = torch.arange(12)
    assert keep_real(rows, BatchCoverage((4, 4, 4), (4, 4, 4))) is rows
    assert keep_real(rows, None) is rows


def test_nested_outputs_are_cut_leaf_by_leaf() -> None:
    gathered = {"logits": torch.arange(24).reshape(12, 2), "labels": (torch.arange(12), [torch.arange(12)])}
    kept = keep_real(gathered, TAIL)
    assert kept["logits"].shape == (5, 2)
    assert kept["labels"][1][0].tolist() == [0, 1, 2, 3, 4]


def test_samples_may_have_several_rows_each() -> None:
    assert keep_real(torch.arange(24), TAIL).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_values_per_rank_stay_where_the_rank_had_a_real_sample() -> None:
    assert keep_real(torch.tensor([0.5, 0.25, 9.0]), TAIL).tolist() == [0.5, 0.25]


def test_rows_that_arent_samples_stay_whole() -> None:
    assert keep_real(torch.arange(7), TAIL).tolist() == list(range(7))
    assert keep_real(torch.tensor(3.0), TAIL).item() == 3.0


def test_objects_are_cut_like_rows() -> None:
    assert keep_real([f"sample {i}" for i in range(12)], TAIL) == [f"sample {i}" for i in range(5)]
    assert keep_real([torch.tensor(i) for i in range(12)], TAIL, as_objects=True) == [torch.tensor(i) for i in range(5)]


def test_shares_of_different_sizes_are_told_apart() -> None:
    uneven = BatchCoverage(real=(3, 0), size=(3, 1))
    assert keep_real(torch.arange(4), uneven).tolist() == [0, 1, 2]
    # padded to the largest batch before the gather
    assert keep_real(torch.arange(6), uneven).tolist() == [0, 1, 2]


def test_a_batch_without_a_real_sample_leaves_nothing() -> None:
    assert keep_real(torch.arange(4), BatchCoverage((0, 0), (2, 2))).shape == (0,)


def test_a_mean_that_was_repeated_for_each_usual_row_counts_once_per_sample() -> None:
    """The Trainer of transformers gathers `loss.repeat(batch_size)`, in the short last batch too."""
    short = BatchCoverage((2,), (2,))
    assert keep_real(torch.full((8,), 0.5), short, nominal=8).tolist() == [0.5, 0.5]
    two_ranks = BatchCoverage((3, 1), (3, 3))
    losses = torch.tensor([0.5] * 8 + [0.25] * 8)
    assert keep_real({"loss": losses}, two_ranks, nominal=8)["loss"].tolist() == [0.5, 0.5, 0.5, 0.25]
    # Batches of 8 are split between two ranks, and both repeat their mean 8 times.
    assert keep_real(losses, BatchCoverage((1, 1), (1, 1)), nominal=4).tolist() == [0.5, 0.5, 0.25, 0.25]


def test_rows_that_differ_belong_to_the_samples_however_many_they_are() -> None:
    short = BatchCoverage((2,), (2,))
    assert keep_real(torch.arange(8), short, nominal=8).tolist() == list(range(8))  # four rows for each sample
    assert keep_real(torch.zeros(8, 3), short, nominal=8).shape == (8, 3)
    full = BatchCoverage((8,), (8,))
    assert keep_real(torch.zeros(8), full, nominal=8).shape == (8,)
