from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load as read_with_the_library
from safetensors.torch import save as write_with_the_library

from accelerate.checkpointing.tensor_files import SAFETENSORS_NAMES, open_tensors, write_tensors
from accelerate.errors import CheckpointError


def written(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> bytes:
    file = io.BytesIO()
    write_tensors(file, tensors, metadata)
    return file.getvalue()


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def sample() -> dict[str, torch.Tensor]:
    made = {f"{dtype}": torch.ones(3, 2).to(dtype) for dtype in SAFETENSORS_NAMES}
    return {**made, "scalar": torch.tensor(2.0), "empty": torch.empty(0, 4), "transposed": torch.rand(3, 2).t()}


def test_the_format_s_own_library_reads_every_dtype() -> None:
    tensors = sample()
    back = read_with_the_library(written(tensors))
    assert set(back) == set(tensors)
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(raw(back[name]), raw(tensor)), name


def test_the_bytes_are_those_of_the_library() -> None:
    tensors = {"b": torch.rand(3), "a": torch.rand(2, 2), "h": torch.rand(5).half(), "i": torch.arange(4)}
    assert written(tensors, {"format": "pt"}) == write_with_the_library(tensors, {"format": "pt"})


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    tensors = sample()
    (tmp_path / "x.safetensors").write_bytes(written(tensors, {"format": "pt"}))
    with open_tensors(tmp_path / "x.safetensors") as file:
        assert set(file.keys()) == set(tensors)
        assert torch.equal(file.owned("transposed"), tensors["transposed"])
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(written({"a": torch.rand(100)})[:-4])
    with pytest.raises(CheckpointError, match="not a whole safetensors file"), open_tensors(path):
        pass


@pytest.mark.parametrize(
    "tensor", [torch.eye(2).to_sparse(), torch.ones(2, dtype=torch.complex128)], ids=["sparse", "complex"]
)
def test_a_tensor_without_a_place_in_the_format_is_named(tensor: torch.Tensor) -> None:
    with pytest.raises(CheckpointError, match="odd one"):
        written({"odd one": tensor})
