"""Real data that needs no network: handwritten digits, Python's documentation and source."""

from __future__ import annotations

import ast
import random
import re
import sysconfig
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset

NUM_HELD_OUT_DIGITS = 360
FILE_LIMIT_BYTES = 200_000


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1437 training and 360 held-out images of handwritten digits, 1 x 8 x 8, with their labels.

    They come with scikit-learn (the test set of the UCI "Optical Recognition of Handwritten Digits").
    """
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise SystemExit('The digits come with scikit-learn. Install it: pip install ".[examples]"') from error

    bunch = load_digits()
    images = torch.tensor(bunch.images / 16.0, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(bunch.target, dtype=torch.long)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, held_out = order[:-NUM_HELD_OUT_DIGITS], order[-NUM_HELD_OUT_DIGITS:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[held_out], labels[held_out])


def digits_as_colour_images() -> tuple[TensorDataset, TensorDataset]:
    """The digits in the shape of CIFAR-10: 3 x 32 x 32, ten classes."""

    def enlarge(dataset: TensorDataset) -> TensorDataset:
        images, labels = dataset.tensors
        large = torch.nn.functional.interpolate(images, size=32, mode="bilinear", align_corners=False)
        return TensorDataset(large.expand(-1, 3, -1, -1).contiguous(), labels)

    train, held_out = digits()
    return enlarge(train), enlarge(held_out)


def standard_library_files(limit: int | None = None) -> list[Path]:
    """The source files of Python's standard library, sorted, tests and very large tables left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "__pycache__"}
    found = [
        path
        for path in sorted(root.rglob("*.py"))
        if not skipped.intersection(path.relative_to(root).parts) and 2_000 < path.stat().st_size < FILE_LIMIT_BYTES
    ]
    return found[:limit]


# ------------------------------------------------------------------------------------------- sentence pairs

_WORD = re.compile(r"[a-z]+|[0-9]+")
# Parts of the standard library that say much about themselves, in every version of Python.
PAGES = ("asyncio", "email", "logging", "turtle", "unittest")
WORDS_PER_PASSAGE = 40


def _paragraphs(source: str) -> list[str]:
    """The paragraphs of prose in the documentation strings of one file."""
    return [
        " ".join(paragraph.split())
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        for paragraph in re.split(r"\n\s*\n", ast.get_docstring(node) or "")
        if paragraph.strip()[:1].isupper() and len(paragraph.split()) >= 8
    ]


def _passages(page: str) -> list[str]:
    """What one part of the library says about itself, cut into pieces of a few sentences."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted((root / page).rglob("*.py")) if (root / page).is_dir() else [root / f"{page}.py"]
    paragraphs = dict.fromkeys(
        paragraph for file in files for paragraph in _paragraphs(file.read_text(encoding="utf-8"))
    )
    passages, words = [], []
    for paragraph in paragraphs:
        words += paragraph.split()
        if len(words) >= WORDS_PER_PASSAGE:
            passages.append(" ".join(words[: 2 * WORDS_PER_PASSAGE]))
            words = []
    return passages


def sentence_pairs(
    num_train: int = 6_000, num_held_out: int = 600
) -> tuple[list[tuple[str, str, int]], list[tuple[str, str, int]]]:
    """Pairs of English passages, with label 1 if both document the same part of Python, else 0; half of each.

    Training and held-out pairs share no passage.
    """
    shuffle = random.Random(0)
    pages = []
    for page in PAGES:
        passages = _passages(page)
        shuffle.shuffle(passages)
        cut = len(passages) // 5
        pages.append((passages[cut:], passages[:cut]))

    def pairs(part: int, count: int) -> list[tuple[str, str, int]]:
        drawn: list[tuple[str, str, int]] = []
        while len(drawn) < count:
            here, there = shuffle.sample(pages, 2)
            first, second = shuffle.sample(here[part], 2)
            drawn.append((first, second, 1))
            drawn.append((first, shuffle.choice(there[part]), 0))
        return drawn

    return pairs(0, num_train), pairs(1, num_held_out)


class PairTokens(Dataset[dict[str, torch.Tensor]]):
    """Pairs as a BERT-shaped model reads them: [CLS] first [SEP] second [SEP], with segments and a mask."""

    PAD, CLS, SEP, UNKNOWN = range(4)

    def __init__(self, pairs: list[tuple[str, str, int]], vocabulary: dict[str, int], max_length: int = 96):
        self.labels = [label for _, _, label in pairs]
        self.rows = [self._encode(first, second, vocabulary, max_length) for first, second, _ in pairs]

    @classmethod
    def _encode(
        cls, first: str, second: str, vocabulary: dict[str, int], max_length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        half = (max_length - 3) // 2
        ids = [
            [vocabulary.get(word, cls.UNKNOWN) for word in _WORD.findall(text.lower())[:half]]
            for text in (first, second)
        ]
        tokens = [cls.CLS, *ids[0], cls.SEP, *ids[1], cls.SEP]
        segments = [0] * (len(ids[0]) + 2) + [1] * (len(ids[1]) + 1)
        padding = [0] * (max_length - len(tokens))
        return torch.tensor(tokens + padding), torch.tensor(segments + padding)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens, segments = self.rows[index]
        return {
            "input_ids": tokens,
            "token_type_ids": segments,
            "attention_mask": (tokens != self.PAD).long(),
            "labels": torch.tensor(self.labels[index]),
        }


def vocabulary_of(pairs: list[tuple[str, str, int]], size: int = 4_000) -> dict[str, int]:
    """The most frequent words of the pairs, numbered after the four special tokens."""
    counts = Counter(word for first, second, _ in pairs for word in _WORD.findall(f"{first} {second}".lower()))
    return {word: number for number, (word, _) in enumerate(counts.most_common(size - 4), start=4)}


# ------------------------------------------------------------------------------------------ language model


class SourceWindows(Dataset[torch.Tensor]):
    """Windows of `length + 1` bytes of Python source: the first `length` predict the last `length`."""

    def __init__(self, files: list[Path], length: int, num_windows: int, seed: int):
        text = b"\n".join(path.read_bytes() for path in files)
        self.bytes = torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())
        self.length = length
        draw = torch.Generator().manual_seed(seed)
        self.starts = torch.randint(len(self.bytes) - length - 1, (num_windows,), generator=draw)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> torch.Tensor:
        start = int(self.starts[index])
        return self.bytes[start : start + self.length + 1].long()


def python_source(length: int, num_train: int, num_held_out: int) -> tuple[SourceWindows, SourceWindows]:
    """Windows over the standard library's source; one file in ten is held out whole."""
    files = standard_library_files()
    random.Random(0).shuffle(files)
    cut = len(files) // 10
    return (
        SourceWindows(files[cut:], length, num_train, seed=1),
        SourceWindows(files[:cut], length, num_held_out, seed=2),
    )
