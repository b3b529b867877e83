"""Models in 8 and 4 bits. What needs bitsandbytes or torchao is skipped where they aren't installed."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accelerate import init_empty_weights, optional, quantize
from accelerate.errors import CheckpointNotFound, MissingDependency, SettingError
from accelerate.optional import is_installed
from accelerate.plugins.quantization import BnbQuantizationConfig, TorchAoQuantizationConfig
from accelerate.quantize import (
    get_keys_to_not_convert,
    get_parameter_device,
    get_quantized_model_device_map,
    has_4bit_bnb_layers,
    load_and_quantize_model,
    replace_with_bnb_layers,
)

needs_bnb = pytest.mark.skipif(not is_installed("bitsandbytes"), reason="needs bitsandbytes")
needs_torchao = pytest.mark.skipif(not is_installed("torchao"), reason="needs torchao")
pytestmark = pytest.mark.filterwarnings("ignore:.*torchao.*", "ignore::DeprecationWarning")


class Net(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 64)
        self.first = nn.Linear(64, 64)
        self.norm = nn.LayerNorm(64)
        self.second = nn.Linear(64, 64)
        self.head = nn.Linear(64, 32, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        dtype = self.norm.weight.dtype
        hidden = self.norm(torch.relu(self.first(hidden)).to(dtype))
        return self.head(self.second(hidden).to(self.head.weight.dtype))


TOKENS = torch.arange(32).reshape(4, 8)


@pytest.fixture
def plain() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def checkpoint(plain: Net, tmp_path: Path) -> Path:
    save_file(plain.state_dict(), tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path


def empty(tied: bool = False) -> Net:
    with init_empty_weights():
        return Net(tied)


def eight(**options: Any) -> BnbQuantizationConfig:
    return BnbQuantizationConfig(load_in_8bit=True, torch_dtype=torch.float32, **options)


def four(**options: Any) -> BnbQuantizationConfig:
    return BnbQuantizationConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32, **options
    )


def outputs(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS)


# --------------------------------------------------------------------------- without a library that quantises


def test_the_head_and_what_is_tied_to_it_are_kept() -> None:
    assert get_keys_to_not_convert(Net()) == ["head"]
    assert sorted(get_keys_to_not_convert(Net(tied=True))) == ["embedding", "head"]


def test_a_bare_model_has_no_head_to_keep() -> None:
    model = Net()
    model.base_model_prefix = "transformer"  # pyright: ignore[reportArgumentType]
    assert get_keys_to_not_convert(model) == []
    model.transformer = nn.Linear(2, 2)
    assert get_keys_to_not_convert(model) == ["transformer"]


def test_the_map_reckons_with_the_quantised_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, weights = empty(), 64 * 64
    # One device: the embedding and the head in fp32, two layers of one byte a number, little else.
    room = 2 * 32 * 64 * 4 + 2 * weights + 4 * 4 * 64 * 4
    places = get_quantized_model_device_map(model, eight(), "sequential", max_memory={"cpu": room})
    assert set(places.values()) == {"cpu"}
    tight = get_quantized_model_device_map(model, eight(), "sequential", max_memory={"cpu": room // 2})
    assert "disk" in tight.values()


def test_4_bit_layers_are_never_offloaded_unasked() -> None:
    with pytest.raises(SettingError, match=r"4-bit layers can't be offloaded.*second.*skip_modules"):
        get_quantized_model_device_map(
            empty(), four(skip_modules=["head"]), "sequential", max_memory={"cpu": 2 * 32 * 64 * 4 + 64 * 64}
        )
    given = {"embedding": "cpu", "first": "cpu", "norm": "cpu", "second": "disk", "head": "disk"}
    assert get_quantized_model_device_map(empty(), four(), given) == given


def test_an_unknown_map_is_refused() -> None:
    with pytest.raises(SettingError, match=r"device_map='somewhere': choose one of 'auto', 'balanced'"):
        get_quantized_model_device_map(empty(), eight(), "somewhere")
    assert list(get_quantized_model_device_map(empty(), eight())) == [""]


def test_where_a_module_lies_is_asked_of_its_first_parameter() -> None:
    assert get_parameter_device(Net()) == torch.device("cpu")
    assert get_parameter_device(empty()) == torch.device("meta")


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(module: str, *_: Any, purpose: str = "", **__: Any) -> Any:
        raise MissingDependency(f"{purpose} needs {module}")

    monkeypatch.setattr(quantize, "require", missing)
    with pytest.raises(MissingDependency, match="BnbQuantizationConfig needs bitsandbytes"):
        load_and_quantize_model(empty(), eight())


def test_a_library_that_cant_compute_here_is_refused_as_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    old = SimpleNamespace(__version__="0.44")
    monkeypatch.setattr(quantize, "require", lambda *_, **__: old)
    monkeypatch.setattr(quantize, "available_kind", lambda: SimpleNamespace(name="cpu"))
    with pytest.raises(RuntimeError, match=r"No GPU: this version of bitsandbytes computes on cuda.*is cpu"):
        load_and_quantize_model(empty(), eight())


def test_a_library_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optional, "installed_version", lambda _module: "0.38")
    expected = r"to 4 bits .* needs 'bitsandbytes>=0\.39\.0', but version 0\.38 is installed"
    with pytest.raises(MissingDependency, match=expected):
        load_and_quantize_model(empty(), four())


def test_a_configuration_of_another_library_is_refused() -> None:
    with pytest.raises(SettingError, match=r"one of torchao\.quantization's is needed"):
        TorchAoQuantizationConfig(config=8)


# ------------------------------------------------------------------------------------------- bitsandbytes


@needs_bnb
@pytest.mark.parametrize(("config", "error"), [(eight(), 0.05), (four(), 0.5)], ids=["8 bits", "4 bits"])
def test_a_checkpoint_is_quantised_while_it_is_read(
    plain: Net, checkpoint: Path, config: BnbQuantizationConfig, error: float
) -> None:
    model = load_and_quantize_model(empty(), config, weights_location=checkpoint)
    assert (
        type(model.first).__name__
        == type(model.second).__name__
        == ("Linear8bitLt" if config.load_in_8bit else "Linear4bit")
    )
    assert type(model.head) is nn.Linear and type(model.embedding) is nn.Embedding
    assert model.first.weight.dtype is (torch.int8 if config.load_in_8bit else torch.uint8)
    assert model.first.weight.numel() * model.first.weight.element_size() == (
        64 * 64 // (1 if config.load_in_8bit else 2)
    )
    assert (model.is_loaded_in_8bit, model.is_loaded_in_4bit) == (config.load_in_8bit, config.load_in_4bit)
    assert has_4bit_bnb_layers(model) is config.load_in_4bit
    expected, got = outputs(plain), outputs(model)
    assert 0 < (expected - got).abs().max() < error


@needs_bnb
def test_what_is_skipped_keeps_its_values_bit_for_bit(plain: Net, checkpoint: Path) -> None:
    config = eight(skip_modules=["first"], keep_in_fp32_modules=["norm"])
    model = load_and_quantize_model(empty(), config, weights_location=checkpoint)
    assert type(model.first) is nn.Linear and type(model.head).__name__ == "Linear8bitLt"
    for name in ("first.weight", "first.bias", "norm.weight", "embedding.weight", "second.bias"):
        assert torch.equal(model.get_parameter(name), plain.get_parameter(name)), name


@needs_bnb
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_rest_has_the_asked_dtype(checkpoint: Path, dtype: torch.dtype) -> None:
    config = BnbQuantizationConfig(load_in_8bit=True, torch_dtype=dtype, keep_in_fp32_modules=["norm"])
    model = load_and_quantize_model(empty(), config, weights_location=checkpoint)
    assert model.embedding.weight.dtype is model.head.weight.dtype is dtype
    assert model.norm.weight.dtype is (torch.float32 if dtype is torch.float16 else dtype)


@needs_bnb
def test_8_bit_layers_on_disk_give_the_same_outputs(checkpoint: Path, tmp_path: Path) -> None:
    here = load_and_quantize_model(empty(), eight(), weights_location=checkpoint)
    expected = outputs(here)
    folder = tmp_path / "offload"
    room = 2 * 32 * 64 * 4 + 64 * 64
    model = load_and_quantize_model(
        empty(), eight(), checkpoint, device_map="sequential", max_memory={"cpu": room}, offload_folder=folder
    )
    on_disk = [name for name, place in model.hf_device_map.items() if place == "disk"]
    assert "second" in on_disk
    assert (folder / "second.weight.dat").stat().st_size == 64 * 64
    assert (folder / "second.SCB.dat").stat().st_size == 64 * 4
    for _ in range(2):
        assert torch.equal(outputs(model), expected)
        assert model.second.weight.is_meta and model.second.state.CB is None


@needs_bnb
def test_layers_that_are_placed_away_by_hand_stay_whole(plain: Net, checkpoint: Path, tmp_path: Path) -> None:
    places = {"embedding": "cpu", "first": "cpu", "norm": "cpu", "second": "disk", "head": "cpu"}
    model = load_and_quantize_model(empty(), four(), checkpoint, device_map=places, offload_folder=tmp_path / "offload")
    assert type(model.first).__name__ == "Linear4bit" and type(model.second) is nn.Linear
    assert 0 < (outputs(plain) - outputs(model)).abs().max() < 0.5


@needs_bnb
def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tied = Net(tied=True)
    state = {name: value for name, value in tied.state_dict().items() if name != "head.weight"}
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    model = load_and_quantize_model(empty(tied=True), eight(), weights_location=tmp_path)
    assert model.head.weight is model.embedding.weight
    assert type(model.second).__name__ == "Linear8bitLt"


@needs_bnb
def test_a_model_with_values_is_quantised_with_a_warning(plain: Net) -> None:
    expected = outputs(plain)
    with pytest.warns(UserWarning, match="Net has its values already"):
        model = load_and_quantize_model(plain, eight())
    assert 0 < (expected - outputs(model)).abs().max() < 0.05


@needs_bnb
def test_a_model_without_values_needs_a_checkpoint() -> None:
    with pytest.raises(CheckpointNotFound, match="`weights_location` doesn't say where they are"):
        load_and_quantize_model(empty(), eight())
    with pytest.raises(RuntimeError):
        load_and_quantize_model(empty(), eight())


@needs_bnb
def test_a_model_without_linear_layers_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        replace_with_bnb_layers(nn.Sequential(nn.ReLU()), eight(), ["head"])
    assert "no linear layer to quantise" in caplog.text


@needs_bnb
def test_layers_in_other_layers_are_replaced_unless_they_are_named() -> None:
    model = nn.ModuleDict({"a": nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), "ab": nn.Linear(8, 8)})
    replace_with_bnb_layers(model, four(), ["a.1"])
    kinds = {name: type(module).__name__ for name, module in model.named_modules() if "Linear" in type(module).__name__}
    assert kinds == {"a.0": "Linear4bit", "a.1": "Linear", "ab": "Linear4bit"}


# ------------------------------------------------------------------------------------------------ torchao


@needs_torchao
def test_torchao_quantises_each_weight_as_it_comes(plain: Net, checkpoint: Path) -> None:
    from torchao.quantization import Int8WeightOnlyConfig

    model = load_and_quantize_model(empty(), TorchAoQuantizationConfig(Int8WeightOnlyConfig()), checkpoint)
    assert type(model.first.weight.data).__module__.startswith("torchao")
    assert type(model.head.weight.data) is torch.Tensor
    assert torch.equal(model.norm.weight, plain.norm.weight)
    assert 0 < (outputs(plain) - outputs(model)).abs().max() < 0.05


@needs_torchao
def test_torchao_quantises_a_model_with_values(plain: Net) -> None:
    from torchao.quantization import Int8WeightOnlyConfig

    expected, config = (
        outputs(plain),
        TorchAoQuantizationConfig(Int8WeightOnlyConfig(), skip_modules=["second", "head"]),
    )
    with pytest.warns(UserWarning, match="Net has its values already"):
        model = load_and_quantize_model(plain, config)
    assert type(model.first.weight.data).__module__.startswith("torchao")
    assert type(model.second.weight.data) is torch.Tensor
    assert 0 < (expected - outputs(model)).abs().max() < 0.05
