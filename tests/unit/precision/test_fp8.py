"""Which package computes in fp8, what becomes of every module, and what is refused."""

from __future__ import annotations

import logging
import sys
import types
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

import accelerate.accelerator
from accelerate import Accelerator
from accelerate.devices import table as devices
from accelerate.errors import MissingDependency, NotBuilt, PreparationError, SettingError
from accelerate.plugins.fp8 import AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from accelerate.plugins.fsdp import FullyShardedDataParallelPlugin
from accelerate.precision.fp8 import Fp8Request, choose_backend
from accelerate.precision.fp8_ao import (
    convert_model_to_fp8_ao,
    filter_first_and_last_linear_layers,
    filter_linear_layers,
    find_first_last_linear_layers,
    has_ao_layers,
)
from accelerate.precision.fp8_te import (
    apply_fp8_autowrap,
    contextual_fp8_autocast,
    convert_model,
    has_transformer_engine_layers,
)
from accelerate.settings.env import patched
from accelerate.settings.labels import FP8BackendType


class Net(nn.Module):
    """Layers of all sorts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.norm = nn.LayerNorm(32)
        self.middle = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32, bias=False))
        self.odd = nn.Linear(32, 24)
        self.last = nn.Linear(24, 16)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Scores."""
        return self.last(self.odd(self.middle(self.norm(self.first(inputs)))))


def request(backend: str = "NO", **recipes: Any) -> Fp8Request:
    return Fp8Request(backend, f"ACCELERATE_FP8_BACKEND={backend}", lambda name: None, recipes)


# -- which backend -------------------------------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The words of the backends that count as installed."""
    words: set[str] = set()
    room = sys.modules["accelerate.precision.fp8"]
    rows = [(word, package, lambda word=word: word in words) for word, package, _ in room._BACKENDS]  # type: ignore[attr-defined]
    monkeypatch.setattr(room, "_BACKENDS", tuple(rows))
    return words


def test_the_recipe_decides_then_the_setting_then_what_is_installed(installed: set[str]) -> None:
    installed.update({"TE", "AO"})
    assert choose_backend(request("AO", TE=object())) == "TE"
    assert choose_backend(request("TE")) == "TE"
    assert choose_backend(request()) == "AO"
    installed.remove("AO")
    assert choose_backend(request()) == "TE"


def test_what_is_missing_is_named_with_the_way_out(installed: set[str]) -> None:
    with pytest.raises(MissingDependency, match=r'neither is installed.*pip install "accelerate\[fp8\]".*bf16'):
        choose_backend(request())
    installed.add("AO")
    with pytest.raises(MissingDependency, match=r"ACCELERATE_FP8_BACKEND=TE asks for fp8 by transformer_engine.*AO"):
        choose_backend(request("TE"))
    with pytest.raises(MissingDependency, match="the recipe in kwargs_handlers asks for fp8 by transformer_engine"):
        choose_backend(request(TE=object()))
    with pytest.raises(SettingError, match=r"several fp8 backends \(MSAMP, TE\)"):
        choose_backend(request(TE=object(), MSAMP=object()))


def test_a_backend_that_this_device_has_not_is_refused(installed: set[str]) -> None:
    installed.add("TE")
    with pytest.raises(SettingError, match=r"doesn't compute on cpu.*ACCELERATE_FP8_BACKEND=AO.*bf16"):
        Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs()])


def test_hardware_without_8_bit_floats_falls_back_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As documented: fp16 on NVIDIA devices before compute capability 8.9, bf16 on the first Gaudi."""
    assert devices.kind_of("cuda").fp8_fallback == "fp16" and devices.kind_of("hpu").fp8_fallback == "bf16"
    old = replace(devices.CPU, fp8="never", fp8_fallback="fp16")
    monkeypatch.setattr("accelerate.construction.expected_backend", lambda cpu: (None, old))
    with caplog.at_level(logging.WARNING):
        run = Accelerator(cpu=True, mixed_precision="fp8")
    assert run.mixed_precision == "fp16" and run.scaler is not None and not run.fp8_enabled and run.fp8_backend == "NO"
    assert "mixed_precision=fp8" in caplog.text and "computes in fp16" in caplog.text


# -- torchao -------------------------------------------------------------------------------------------------


def test_the_filters_tell_the_layers_that_are_converted() -> None:
    model = Net()
    assert find_first_last_linear_layers(model) == ("first", "last")
    assert find_first_last_linear_layers(nn.ReLU()) == (None, None)
    assert filter_linear_layers(model.middle[0], "middle.0", ["first", "last"])
    assert not filter_linear_layers(model.first, "first", ["first", "last"])
    assert not filter_linear_layers(model.odd, "odd", [])
    assert not filter_linear_layers(model.norm, "norm", [])
    assert not filter_first_and_last_linear_layers(model.first, "")


@pytest.fixture
def torchao() -> Any:
    return pytest.importorskip("torchao.float8")


def emulated(torchao: Any, **changes: Any) -> AORecipeKwargs:
    return AORecipeKwargs(config=torchao.Float8LinearConfig(emulate=True), **changes)


def test_a_second_accelerator_computes_in_the_fp8_of_the_first_and_may_bring_its_own_recipe(torchao: Any) -> None:
    Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[emulated(torchao)])
    second = Accelerator(cpu=True, kwargs_handlers=[emulated(torchao)])
    assert second.mixed_precision == "fp8" and has_ao_layers(second.prepare(Net()))


def test_every_module_is_reported_with_its_reason(torchao: Any, caplog: pytest.LogCaptureFixture) -> None:
    run = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[emulated(torchao)])
    with caplog.at_level(logging.INFO, logger="accelerate"):
        model = run.prepare(Net())
    assert has_ao_layers(model) and run.fp8_backend == FP8BackendType.AO
    report = run.conversions[-1]
    assert [module.name for module in report.modules] == [name for name, _ in Net().named_modules()]
    assert [module.name for module in report.converted] == ["middle.0", "middle.2"]
    reasons = {module.name: module.reason for module in report.kept}
    assert reasons["first"] == reasons["last"] == "the first or last linear layer"
    assert reasons["odd"] == "32 x 24: not both multiples of 16"
    assert reasons["norm"] == "not a kind of layer that is converted" and reasons["middle"] == "holds other modules"
    assert "middle.0  Linear -> Float8Linear" in str(report)
    assert caplog.text.count("2 of 9 modules of Net converted") == 1


def test_the_users_own_filter_decides_and_is_named(torchao: Any) -> None:
    recipe = emulated(torchao, module_filter_func=lambda module, name: name == "first")
    run = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[recipe])
    run.prepare(Net())
    report = run.conversions[-1]
    assert [module.name for module in report.converted] == ["first"]
    assert {m.reason for m in report.kept if m.kind == "Linear"} == {"left out by module_filter_func"}


def test_a_model_that_is_converted_already_stays(torchao: Any) -> None:
    model = convert_model_to_fp8_ao(Net(), config=torchao.Float8LinearConfig(emulate=True))
    run = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[emulated(torchao)])
    assert run.prepare(model) is model and not run.conversions


def test_replaced_functions_are_looked_up_at_every_use(torchao: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Axolotl puts its own function in accelerate.accelerator."""
    run = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[emulated(torchao)])
    calls: list[dict[str, Any]] = []

    def own(model: nn.Module, **options: Any) -> nn.Module:
        calls.append(options)
        return model

    monkeypatch.setattr(accelerate.accelerator, "convert_model_to_fp8_ao", own)
    run.prepare(Net())
    assert calls == [{"config": run.precision.config, "module_filter_func": None}]
    assert not run.conversions[-1].converted


def test_without_shards_weights_stay_plain_parameters(torchao: Any) -> None:
    config = torchao.Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=True)
    run = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs(config=config)])
    assert type(run.prepare(Net()).middle[0].weight.data) is torch.Tensor


def test_documented_contradictions_are_refused(torchao: Any) -> None:
    from accelerate import construction
    from accelerate.settings.run import collect

    sharded = types.SimpleNamespace(backend="gloo")
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=True)
    settings = collect({"mixed_precision": "fp8", "fsdp_plugin": plugin})
    handlers = construction.Handlers(ao=emulated(torchao))
    with pytest.raises(ValueError, match=r"cpu_ram_efficient_loading.*to false"):
        construction._fp8_request(settings, sharded, handlers)  # type: ignore[arg-type]


# -- Transformer Engine: a stand-in with its documented interface ---------------------------------------------


class EngineLinear(nn.Module):
    """transformer_engine.pytorch.Linear, as far as the interface is documented."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, params_dtype: Any = None) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.zeros(out_features, in_features, dtype=params_dtype))
        self.bias = nn.Parameter(torch.zeros(out_features, dtype=params_dtype)) if bias else None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The product, computed in full precision here."""
        return nn.functional.linear(inputs, self.weight, self.bias)


class EngineNorm(nn.LayerNorm):
    """transformer_engine.pytorch.LayerNorm."""

    def __init__(self, shape: Any, eps: float = 1e-5, params_dtype: Any = None) -> None:
        super().__init__(shape, eps=eps, dtype=params_dtype)


@dataclass
class DelayedScaling:
    """transformer_engine.common.recipe.DelayedScaling."""

    margin: int = 0
    fp8_format: str = "hybrid"
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"


@dataclass
class MXFP8BlockScaling:
    """transformer_engine.common.recipe.MXFP8BlockScaling."""

    margin: int = 0
    fp8_format: str = "e4m3"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, Any]]:
    """Transformer Engine as a stand-in; the list records every context: (enabled, recipe)."""
    contexts: list[tuple[bool, Any]] = []

    @contextmanager
    def fp8_autocast(enabled: bool, fp8_recipe: Any) -> Any:
        contexts.append((enabled, fp8_recipe))
        yield

    layers = types.ModuleType("transformer_engine.pytorch")
    layers.Linear, layers.LayerNorm, layers.fp8_autocast = EngineLinear, EngineNorm, fp8_autocast  # type: ignore[attr-defined]
    recipes = types.ModuleType("transformer_engine.common.recipe")
    recipes.DelayedScaling, recipes.MXFP8BlockScaling = DelayedScaling, MXFP8BlockScaling  # type: ignore[attr-defined]
    recipes.Format = types.SimpleNamespace(HYBRID="hybrid!", E4M3="e4m3!")  # type: ignore[attr-defined]
    room = sys.modules["accelerate.precision.fp8_te"]
    monkeypatch.setattr(room, "_engine", lambda: (layers, recipes))
    monkeypatch.setattr(room, "is_transformer_engine_mxfp8_available", lambda: False)
    chooser = sys.modules["accelerate.precision.fp8"]
    rows = [(word, package, lambda: True) for word, package, _ in chooser._BACKENDS]  # type: ignore[attr-defined]
    monkeypatch.setattr(chooser, "_BACKENDS", tuple(rows))
    everywhere = replace(devices.CPU, fp8_backends="AO TE")
    monkeypatch.setattr(sys.modules["accelerate.precision.choose"], "kind_of", lambda name: everywhere)
    return contexts


def test_layers_are_exchanged_with_their_weights_and_back(engine: list[Any]) -> None:
    del engine
    model, inputs = Net().eval(), torch.randn(4, 16)
    model.middle[0].weight.requires_grad_(False)
    expected = model(inputs)
    convert_model(model)
    assert has_transformer_engine_layers(model)
    assert isinstance(model.first, EngineLinear) and isinstance(model.norm, EngineNorm)
    assert isinstance(model.odd, nn.Linear), "24 is no multiple of 16"
    assert model.middle[2].bias is None and not model.middle[0].weight.requires_grad and not model.first.training
    torch.testing.assert_close(model(inputs), expected)
    convert_model(model, to_transformer_engine=False)
    assert not has_transformer_engine_layers(model)
    torch.testing.assert_close(model(inputs), expected)


def test_layers_that_share_a_weight_stay(engine: list[Any]) -> None:
    del engine
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    model[2].weight = model[0].weight
    convert_model(model)
    assert [type(layer) for layer in model] == [nn.Linear, EngineLinear, nn.Linear]
    assert model[2].weight is model[0].weight


def test_training_is_in_fp8_and_evaluation_where_asked(engine: list[tuple[bool, Any]]) -> None:
    model = Net()
    recipe = TERecipeKwargs(fp8_format="E4M3", amax_history_len=16, use_autocast_during_eval=False)
    assert apply_fp8_autowrap(model, recipe) is model
    model(torch.ones(1, 16))
    model.eval()(torch.ones(1, 16))
    assert [enabled for enabled, _ in engine] == [True, False]
    assert engine[0][1] == DelayedScaling(fp8_format="e4m3!", amax_history_len=16)
    contextual_fp8_autocast(model.forward, "recipe", use_during_eval=True)(torch.ones(1, 16))
    assert engine[2] == (True, "recipe")


def test_block_scaling_is_refused_where_it_cannot_be(engine: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingError, match="no MXFP8"):
        apply_fp8_autowrap(Net(), TERecipeKwargs(use_mxfp8_block_scaling=True))
    room = sys.modules["accelerate.precision.fp8_te"]
    monkeypatch.setattr(room, "is_transformer_engine_mxfp8_available", lambda: True)
    with pytest.raises(SettingError, match="amax_history_len would have no effect"):
        apply_fp8_autowrap(Net(), TERecipeKwargs(use_mxfp8_block_scaling=True, amax_history_len=4))
    with pytest.raises(SettingError, match=r"interval=2.*has no such option any more"):
        apply_fp8_autowrap(Net(), TERecipeKwargs(interval=2))
    model = apply_fp8_autowrap(Net(), TERecipeKwargs(use_mxfp8_block_scaling=True, margin=1))
    model(torch.ones(1, 16))
    assert engine[-1] == (True, MXFP8BlockScaling(margin=1))


def test_transformer_engine_trains_through_the_accelerator(engine: list[tuple[bool, Any]]) -> None:
    run = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs()])
    assert run.fp8_backend == FP8BackendType.TE and not run.delayed_fp8_autocast
    model: nn.Module = Net()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = run.prepare(model, optimizer)
    before = model.first.weight.detach().clone()
    run.backward(model(torch.ones(2, 16)).pow(2).mean())
    optimizer.step()
    assert engine == [(True, DelayedScaling())]
    assert isinstance(model.first, EngineLinear) and not torch.equal(model.first.weight, before)
    converted = [module.name for module in run.conversions[-1].converted]
    assert converted == ["first", "norm", "middle.0", "middle.2"]
    with pytest.raises(PreparationError, match=r"a model without its optimizer.*together"):
        run.prepare(Net())


def test_the_deprecated_recipe_still_chooses(engine: list[Any]) -> None:
    del engine
    with pytest.warns(FutureWarning, match="TERecipeKwargs or AORecipeKwargs"):
        recipe = FP8RecipeKwargs(backend="TE", margin=2)
    run = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[recipe])
    assert run.fp8_recipe_handler is recipe and run.fp8_backend == FP8BackendType.TE


def test_the_backend_of_the_environment_is_used(engine: list[Any]) -> None:
    del engine
    with patched(ACCELERATE_FP8_BACKEND="TE", ACCELERATE_MIXED_PRECISION="fp8"):
        assert Accelerator(cpu=True).fp8_backend == FP8BackendType.TE


# -- MS-AMP: asked for, and refused --------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["recipe", "old recipe", "environment"])
def test_msamp_is_refused_with_what_to_use_instead(way: str) -> None:
    if way == "environment":
        with patched(ACCELERATE_FP8_BACKEND="MSAMP"), pytest.raises(NotBuilt, match=r"ACCELERATE_FP8_BACKEND.*torchao"):
            Accelerator(cpu=True, mixed_precision="fp8")
        return
    if way == "recipe":
        recipe: Any = MSAMPRecipeKwargs(opt_level="O1")
    else:
        with pytest.warns(FutureWarning):
            recipe = FP8RecipeKwargs(backend="MSAMP")
    with pytest.raises(NotBuilt, match=r"kwargs_handlers asks for .*MS-AMP, which isn't supported.*torchao"):
        Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[recipe])
