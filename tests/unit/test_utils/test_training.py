from __future__ import annotations

from typing import Any

import numpy as np
import torch

from accelerate.test_utils.training import (
    RegressionDataset,
    RegressionModel,
    mocked_dataloaders,
    mocked_dataloaders_for_autoregressive_models,
)

NO_ACCELERATOR: Any = None


def test_points_lie_on_a_line_with_noise_and_are_repeatable() -> None:
    dataset = RegressionDataset(a=2, b=3, length=500, seed=1)
    slope, intercept = np.polyfit(dataset.x, dataset.y, 1)
    assert abs(slope - 2) < 0.05 and abs(intercept - 3) < 0.05
    assert len(dataset) == 500
    again = RegressionDataset(a=2, b=3, length=500, seed=1)
    assert dataset[7] == again[7] and dataset[7] != RegressionDataset(length=500, seed=2)[7]


def test_the_model_is_a_line_once_or_twice() -> None:
    x = torch.tensor([1.0, 2.0])
    assert RegressionModel(a=2, b=1)(x).tolist() == [3.0, 5.0]
    first, second = RegressionModel(a=2, b=1, double_output=True)(x)
    assert torch.equal(first, second)
    assert [name for name, _ in RegressionModel().named_parameters()] == ["a", "b"]


def test_sentence_pairs_are_padded_and_masked() -> None:
    train, evaluation = mocked_dataloaders(NO_ACCELERATOR, batch_size=8)
    batch = next(iter(evaluation))
    shape = batch["input_ids"].shape
    assert shape[0] == 8 and batch["labels"].shape == (8,)
    assert batch["attention_mask"].shape == batch["token_type_ids"].shape == shape
    assert torch.equal(batch["attention_mask"] == 0, batch["input_ids"] == 0)
    assert set(torch.cat([each["labels"] for each in train]).tolist()) == {0, 1}


def test_a_token_to_predict_is_a_token_and_padding_is_ignored() -> None:
    _, evaluation = mocked_dataloaders_for_autoregressive_models(NO_ACCELERATOR)
    batch = next(iter(evaluation))
    padding = batch["attention_mask"] == 0
    assert bool((batch["labels"][padding] == -100).all())
    assert torch.equal(batch["labels"][~padding], batch["input_ids"][~padding])
