"""Tiny problems to train on in tests: a noisy line, and synthetic sentence pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

if TYPE_CHECKING:
    from ..accelerator import Accelerator

Sample = dict[str, torch.Tensor]


class RegressionDataset(Dataset[Any]):
    """A dataset of ``length`` points ``(x, a * x + b + noise)``; the same ``seed`` gives the same points."""

    def __init__(self, a: float = 2, b: float = 3, length: int = 64, seed: int | None = None) -> None:
        generator = np.random.default_rng(seed)
        self.length = length
        self.x: np.ndarray = generator.normal(size=(length,)).astype(np.float32)
        self.y: np.ndarray = a * self.x + b + generator.normal(scale=0.1, size=(length,)).astype(np.float32)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index], "y": self.y[index]}


class RegressionModel(torch.nn.Module):
    """The model ``x * a + b``; with ``double_output`` it returns a pair of it."""

    def __init__(self, a: float = 0, b: float = 0, double_output: bool = False) -> None:
        super().__init__()
        self.a: torch.nn.Parameter = torch.nn.Parameter(torch.tensor(a).float())
        self.b: torch.nn.Parameter = torch.nn.Parameter(torch.tensor(b).float())
        self.double_output = double_output

    def forward(self, x: Any = None) -> Any:
        """Return the value of the line at ``x``."""
        y = x * self.a + self.b
        return (y, y) if self.double_output else y


class _SentencePairs(Dataset[Sample]):
    """Pairs of token sequences of different lengths; the label says whether the second repeats the first."""

    def __init__(self, length: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.samples = [self._sample(generator) for _ in range(length)]

    @staticmethod
    def _sample(generator: torch.Generator) -> Sample:
        def draw(low: int, high: int, size: int) -> torch.Tensor:
            return torch.randint(low, high, (size,), generator=generator)

        first = draw(5, 100, int(draw(3, 10, 1)))
        label = int(draw(0, 2, 1))
        second = first if label else draw(5, 100, int(draw(3, 10, 1)))
        start, separator = torch.tensor([1]), torch.tensor([2])
        return {
            "input_ids": torch.cat([start, first, separator, second, separator]),
            "token_type_ids": torch.tensor([0] * (len(first) + 2) + [1] * (len(second) + 1)),
            "labels": torch.tensor(label),
        }

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]


def _pad(samples: list[Sample]) -> Sample:
    def padded(key: str) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence([sample[key] for sample in samples], batch_first=True)

    tokens = padded("input_ids")
    return {
        "input_ids": tokens,
        "attention_mask": (tokens != 0).long(),
        "token_type_ids": padded("token_type_ids"),
        "labels": torch.stack([sample["labels"] for sample in samples]),
    }


def _predict_next(samples: list[Sample]) -> Sample:
    batch = _pad(samples)
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    del batch["token_type_ids"]
    return batch


def mocked_dataloaders(accelerator: Accelerator, batch_size: int = 16) -> tuple[DataLoader[Sample], DataLoader[Sample]]:
    """Return a training and an evaluation loader of tokenised sentence pairs, without a download."""
    del accelerator  # documented; nothing here depends on the device
    train = DataLoader(_SentencePairs(64, seed=0), shuffle=True, collate_fn=_pad, batch_size=batch_size)
    evaluation = DataLoader(_SentencePairs(24, seed=1), shuffle=False, collate_fn=_pad, batch_size=batch_size)
    return train, evaluation


def mocked_dataloaders_for_autoregressive_models(
    accelerator: Accelerator, batch_size: int = 16
) -> tuple[DataLoader[Sample], DataLoader[Sample]]:
    """Return such loaders for a model that predicts the next token: ``labels`` are the tokens, padding -100."""
    del accelerator
    train = DataLoader(_SentencePairs(64, seed=0), shuffle=True, collate_fn=_predict_next, batch_size=batch_size)
    evaluation = DataLoader(_SentencePairs(24, seed=1), collate_fn=_predict_next, batch_size=batch_size)
    return train, evaluation
