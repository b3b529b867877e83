"""The Accelerator in one process: what prepare returns, what a step does, what is refused."""

from __future__ import annotations

import copy
import itertools
import pickle
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, disk_offload
from accelerate.data_loader import ResumeWarning
from accelerate.errors import MissingDependency, PreparationError, SettingError
from accelerate.plugins.handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from accelerate.training.optimizer import AcceleratedOptimizer
from accelerate.training.scheduler import AcceleratedScheduler
from accelerate.utils import MegatronLMPlugin


def parts(size: int = 8, batch_size: int = 2) -> tuple[nn.Module, torch.optim.Optimizer, Any, Any]:
    """A model, its optimizer, its schedule and a loader."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(size, 3), torch.randn(size, 1))
    return model, optimizer, ExponentialLR(optimizer, 0.9), DataLoader(data, batch_size=batch_size)


# -- prepare ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_objects_come_back_in_the_order_given(order: tuple[int, ...]) -> None:
    objects = parts()
    prepared = Accelerator(cpu=True).prepare(*(objects[i] for i in order))
    kinds = (nn.Module, AcceleratedOptimizer, AcceleratedScheduler, DataLoader)
    assert all(isinstance(obj, kinds[i]) for obj, i in zip(prepared, order, strict=True))
    by_kind = dict(zip(order, prepared, strict=True))
    assert by_kind[2].optimizers == [by_kind[1]], "the scheduler follows its own optimizer"


def test_a_single_object_comes_back_bare_and_foreign_ones_untouched() -> None:
    accelerator = Accelerator(cpu=True)
    model, _, _, loader = parts()
    assert accelerator.prepare(model) is model
    assert isinstance(accelerator.prepare(loader), DataLoader)
    stranger = object()
    assert accelerator.prepare(stranger, 3, "text") == (stranger, 3, "text")


def test_preparing_twice_is_harmless() -> None:
    accelerator = Accelerator(cpu=True)
    once = accelerator.prepare(*parts())
    twice = accelerator.prepare(*once)
    assert all(first is second for first, second in zip(once, twice, strict=True))
    assert [len(held) for held in (accelerator._models, accelerator._optimizers, accelerator._dataloaders)] == [1, 1, 1]


def test_nothing_to_prepare_and_misfitting_placements_are_refused() -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(PreparationError, match="nothing to prepare"):
        accelerator.prepare()
    with pytest.raises(ValueError, match="device_placement"):
        accelerator.prepare(nn.Linear(1, 1), device_placement=[True, False])


def test_raw_objects_given_again_come_back_prepared_once() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, scheduler, _ = parts()
    once = accelerator.prepare(model, optimizer, scheduler)
    twice = accelerator.prepare(model, optimizer, scheduler)
    assert all(first is second for first, second in zip(once, twice, strict=True))
    assert len(accelerator._optimizers) == len(accelerator._schedulers) == 1


def test_several_models_optimizers_and_schedules_find_each_other() -> None:
    accelerator = Accelerator(cpu=True)
    (first, first_sgd, first_rate, loader), (second, second_sgd, second_rate, _) = parts(), parts()
    order = (second_rate, first, second_sgd, loader, second, first_rate, first_sgd)
    second_rate, first, second_sgd, loader, second, first_rate, first_sgd = accelerator.prepare(*order)
    assert first_rate.optimizers == [first_sgd] and second_rate.optimizers == [second_sgd]
    assert accelerator._models == [first, second] and accelerator._optimizers == [second_sgd, first_sgd]
    accelerator.backward(first(torch.ones(1, 3)).sum())
    before = second.weight.detach().clone()
    first_sgd.step()
    first_rate.step()
    assert torch.equal(second.weight, before) and second_rate.get_last_lr() == [0.1] != first_rate.get_last_lr()


def test_a_scheduler_built_on_the_prepared_optimizer_finds_it() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, _, _ = parts()
    _, other = accelerator.prepare(model, torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0))
    optimizer = accelerator.prepare(optimizer)
    scheduler = accelerator.prepare(LambdaLR(optimizer, lambda count: 0.5))
    assert scheduler.optimizers == [optimizer] and optimizer is not other


# -- a step ----------------------------------------------------------------------------------------------------


def train(accelerator: Accelerator | None, micro_batches: int = 1, clears_first: bool = True) -> torch.Tensor:
    """The weights after one epoch, with the Accelerator (clearing at the top or at the end) or with plain torch."""
    model, optimizer, _, loader = parts()
    if accelerator is not None:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                if clears_first:
                    optimizer.zero_grad()
                accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
                optimizer.step()
                if not clears_first:
                    optimizer.zero_grad()
        return model.weight.detach()
    for number, (inputs, targets) in enumerate(loader):
        (nn.functional.mse_loss(model(inputs), targets) / micro_batches).backward()
        if (number + 1) % micro_batches == 0 or number + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
    return model.weight.detach()


@pytest.mark.parametrize("clears_first", [True, False])
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_one_process_trains_exactly_like_the_plain_loop(steps: int, clears_first: bool) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    assert torch.equal(train(accelerator, clears_first=clears_first), train(None, steps))


def test_gradients_that_the_user_computed_are_kept_inside_a_window() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, _, _ = parts()
    model, optimizer = accelerator.prepare(model, optimizer)
    seen = []
    for _ in range(4):
        with accelerator.accumulate(model):
            model(torch.ones(1, 3)).sum().backward()  # not through the Accelerator
            seen.append(model.bias.grad.item())
            optimizer.step()
            optimizer.zero_grad()
    assert seen == [1.0, 2.0, 1.0, 2.0]


def test_a_restored_count_continues_the_window_it_was_in() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model = accelerator.prepare(nn.Linear(1, 1))
    accelerator.step = 2
    syncs = []
    for _ in range(4):
        with accelerator.accumulate(model):
            syncs.append(accelerator.sync_gradients)
    assert syncs == [True, False, False, True] and accelerator.step == 6


def test_accumulation_given_as_a_plugin_or_as_a_number_but_not_both() -> None:
    plugin = GradientAccumulationPlugin(num_steps=3)
    assert Accelerator(cpu=True, gradient_accumulation_plugin=plugin).gradient_accumulation_steps == 3
    with pytest.raises(ValueError, match="gradient_accumulation_steps"):
        Accelerator(cpu=True, gradient_accumulation_steps=2, gradient_accumulation_plugin=plugin)


def test_weights_divide_a_window_by_its_true_size() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, _, _ = parts()
    model, optimizer = accelerator.prepare(model, optimizer)
    torch.manual_seed(1)
    inputs, sizes = torch.randn(7, 3), (2, 5)
    for piece in inputs.split(sizes):
        with accelerator.accumulate(model):
            accelerator.backward(model(piece).sum(), weight=len(piece))
    expected = torch.autograd.grad(model(inputs).mean(), model.weight)[0]
    assert torch.allclose(model.weight.grad, expected, atol=1e-7)


def test_mixing_weighted_and_unweighted_micro_batches_is_refused() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(nn.Linear(1, 1))
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 1)).sum(), weight=1)
    with accelerator.accumulate(model), pytest.raises(PreparationError, match="weight"):
        accelerator.backward(model(torch.ones(1, 1)).sum())


def test_clipping_limits_the_norm_and_returns_what_it_was() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(3, 1))
    accelerator.backward(100 * model(torch.ones(1, 3)).sum())
    reference = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    assert accelerator.clip_grad_norm_(iter(model.parameters()), 1.0).item() == pytest.approx(reference.item())
    assert torch.stack([p.grad.norm() for p in model.parameters()]).norm().item() == pytest.approx(1.0, rel=1e-4)
    accelerator.clip_grad_value_(model.parameters(), 0.01)
    assert max(p.grad.abs().max() for p in model.parameters()) <= 0.01


def test_clipping_can_refuse_gradients_that_are_not_finite() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(1, 1))
    accelerator.backward(model(torch.full((1, 1), float("inf"))).sum())
    with pytest.raises(RuntimeError, match="non-finite"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


# -- precision -------------------------------------------------------------------------------------------------


class Spy(nn.Module):
    """Remembers the dtype in which it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.computed: torch.dtype | None = None

    def forward(self, inputs: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        """The documented signature stays visible."""
        outputs = self.linear(inputs) * scale
        self.computed = outputs.dtype
        return {"outputs": outputs}


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_mixed_precision_is_real_on_the_cpu_and_outputs_are_fp32(precision: str, dtype: torch.dtype) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    model = accelerator.prepare(Spy())
    outputs = model(torch.ones(1, 2), scale=2.0)["outputs"]
    assert model.computed is dtype and outputs.dtype is torch.float32
    assert (accelerator.scaler is not None) == (precision == "fp16")


def test_outputs_stay_in_the_compute_dtype_when_asked() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=[AutocastKwargs(output_dtype=None)])
    assert accelerator.prepare(Spy())(torch.ones(1, 2))["outputs"].dtype is torch.bfloat16


def test_autocast_can_be_switched_off_inside() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    with accelerator.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16
        with accelerator.autocast(AutocastKwargs(enabled=False)):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
    with accelerator.autocast(AutocastKwargs(enabled=False)):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32


def test_an_fp16_overflow_skips_the_step_and_says_so() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=8.0)])
    model, optimizer, scheduler, _ = accelerator.prepare(*parts())
    before = model.weight.detach().clone()
    accelerator.backward(model(torch.ones(1, 3)).sum() * float("inf"))
    optimizer.step()
    scheduler.step()
    assert accelerator.optimizer_step_was_skipped and torch.equal(model.weight, before)
    assert scheduler.get_last_lr() == [0.1] and accelerator.scaler.get_scale() == 4.0


def test_a_copy_of_a_prepared_model_computes_with_its_own_weights() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(Spy())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert twin(torch.ones(1, 2))["outputs"].abs().sum() == 0 and model(torch.ones(1, 2))["outputs"].abs().sum() > 0


def test_unwrapping_gives_the_users_object_and_can_restore_its_forward() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = Spy()
    prepared = accelerator.prepare(model)
    assert accelerator.unwrap_model(prepared) is model and "forward" in model.__dict__
    assert accelerator.unwrap_model(prepared, keep_fp32_wrapper=False) is model and "forward" not in model.__dict__
    assert pickle.loads(pickle.dumps(model))(torch.ones(1, 2))["outputs"].dtype is torch.float32


def test_free_memory_gives_everything_back() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model, optimizer, _, loader = parts()
    accelerator.prepare(model, optimizer, loader)
    assert accelerator.free_memory(model, optimizer) == [None, None]
    assert not accelerator._models and not accelerator._optimizers and "forward" not in model.__dict__


def test_a_model_trains_in_its_precision_again_after_free_memory() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(Spy())
    accelerator.free_memory()
    again = accelerator.prepare(model)
    again(torch.ones(1, 2))
    assert again is model and model.computed is torch.bfloat16 and accelerator._models == [model]


def test_a_model_prepared_for_evaluation_can_be_prepared_for_training() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = Spy()
    evaluated = accelerator.prepare_model(model, evaluation_mode=True)
    assert evaluated is model and not accelerator._prepared_models, "nothing says that it is ready for training"
    assert accelerator.prepare(model) is model and accelerator._models == [model]


def test_autocast_is_off_where_a_script_says_so() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    assert accelerator.native_amp
    accelerator.native_amp = False
    model = accelerator.prepare(Spy())
    model(torch.ones(1, 2))
    assert model.computed is torch.float32 and not accelerator.native_amp
    with accelerator.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32


def test_handlers_may_be_assigned_later() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    accelerator.autocast_handler = AutocastKwargs(enabled=False)
    with accelerator.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
    accelerator.profile_handler = handler = ProfileKwargs(activities=["cpu"])
    assert accelerator.profile_handler is handler


def test_a_scaler_that_a_library_assigns_is_the_one_that_steps() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, _, _ = parts()
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    assert optimizer.scaler is accelerator.scaler
    accelerator.backward(model(torch.ones(1, 3)).sum())
    assert model.bias.grad.item() == 8.0
    norm = accelerator.clip_grad_norm_(model.parameters(), 100.0)
    assert model.bias.grad.item() == 1.0 and norm.item() == pytest.approx(2.0)
    optimizer.step()
    assert accelerator.scaler.get_scale() == 16.0 and not accelerator.optimizer_step_was_skipped
    optimizer.scaler = None  # per optimizer, as some libraries do
    accelerator.scaler = None
    optimizer.zero_grad()
    accelerator.backward(model(torch.ones(1, 3)).sum())
    optimizer.step()
    assert model.bias.grad.item() == 1.0


def test_the_context_of_the_documented_function_is_the_accelerators_precision() -> None:
    from accelerate.utils import get_mixed_precision_context_manager

    with pytest.raises(ValueError, match="Accelerator"):
        get_mixed_precision_context_manager(native_amp=True)
    Accelerator(cpu=True, mixed_precision="bf16")
    for native_amp, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        with get_mixed_precision_context_manager(native_amp):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is dtype


class Quantized(nn.Linear):
    """A model as a quantizing loader leaves it: it refuses to be moved."""

    is_loaded_in_8bit = True

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Not supported."""
        raise ValueError("`.to` is not supported for 8-bit models")


def test_a_quantized_model_stays_where_it_was_loaded() -> None:
    accelerator = Accelerator(cpu=True)
    model = Quantized(2, 2)
    model.hf_device_map = {"": "cpu"}
    assert accelerator.prepare(model) is model
    elsewhere = Quantized(2, 2, device="meta")
    elsewhere.hf_device_map = {"": "meta"}
    with pytest.raises(PreparationError, match=r"8 or 4 bits.*device_map"):
        accelerator.prepare(elsewhere)


def test_an_offloaded_model_stays_where_it_is_and_gives_its_whole_state(tmp_path: Any) -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    disk_offload(model, tmp_path, execution_device="cpu")
    assert accelerator.prepare(model) is model and model[0].weight.device.type == "meta"
    state = accelerator.get_state_dict(model)
    assert state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in state)


def test_a_compiled_model_unwraps_to_the_users() -> None:
    accelerator = Accelerator(cpu=True, dynamo_plugin=TorchDynamoPlugin(backend="eager"))
    model = nn.Linear(2, 2)
    prepared = accelerator.prepare(model)
    assert prepared is not model and torch.equal(prepared(torch.ones(1, 2)), model(torch.ones(1, 2)))
    assert accelerator.unwrap_model(prepared, keep_torch_compile=False) is model
    assert accelerator.unwrap_model(prepared) is prepared, "compiled stays compiled unless asked"
    assert list(accelerator.get_state_dict(prepared)) == ["weight", "bias"]


# -- checkpoints -----------------------------------------------------------------------------------------------


def trained(folder: Any, **saving: Any) -> tuple[Accelerator, torch.Tensor]:
    """An Accelerator that has saved one and a half windows of two micro-batches into ``folder``, and its weights."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, scheduler, loader = accelerator.prepare(*parts())
    for inputs, _ in itertools.islice(loader, 3):
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).sum())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResumeWarning)  # the gradients of the open window are part of the checkpoint
        accelerator.save_state(folder, **saving)
    return accelerator, model.weight.detach().clone()


@pytest.mark.parametrize("saving", [{}, {"asynchronous": True}, {"exclude_frozen_parameters": True}])
def test_a_new_run_resumes_weights_and_the_place_in_the_window(tmp_path: Any, saving: dict[str, Any]) -> None:
    first, weight = trained(tmp_path / "one", **saving)
    with torch.no_grad():
        first._models[0].weight.zero_()  # what is trained on meanwhile isn't what was saved
    first.wait_for_checkpoint()
    again = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, _, _, loader = again.prepare(*parts())
    assert again.resume(tmp_path) == str(tmp_path / "one")
    assert torch.equal(model.weight, weight) and again.step == 3
    synced = []
    for inputs, _ in loader:
        with again.accumulate(model):
            again.backward(model(inputs).sum())
            synced.append(again.sync_gradients)
    assert synced == [True], "the fourth of four micro-batches completes the second window"


def test_a_new_run_has_nothing_to_resume(tmp_path: Any) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(*parts())
    assert accelerator.resume(tmp_path) is None


# -- the constructor -------------------------------------------------------------------------------------------


def test_main_process_flags_are_values_and_calls() -> None:
    accelerator = Accelerator(cpu=True)
    assert accelerator.is_main_process and accelerator.is_main_process() is True
    assert accelerator.is_local_main_process() and accelerator.is_last_process()
    assert str(accelerator.is_main_process) == "True"


def test_old_spellings_work_and_say_so_once() -> None:
    with pytest.warns(FutureWarning, match="old spelling"):
        accelerator = Accelerator(cpu=True, fp16=True, split_batches=True, even_batches=False, logging_dir="logs")
    assert accelerator.mixed_precision == "fp16" and accelerator.split_batches and not accelerator.even_batches
    assert accelerator.logging_dir == "logs"
    with pytest.raises(TypeError, match="no_such_argument"):
        Accelerator(no_such_argument=1)


def test_an_old_spelling_leaves_the_configuration_beside_it_as_it_is() -> None:
    config = DataLoaderConfiguration()
    with pytest.warns(FutureWarning, match="old spelling"):
        accelerator = Accelerator(cpu=True, split_batches=True, dataloader_config=config)
    assert accelerator.split_batches and not config.split_batches


def test_project_folders_are_filled_in() -> None:
    accelerator = Accelerator(cpu=True, project_dir="here")
    assert accelerator.project_dir == "here" and accelerator.logging_dir == "here"
    config = ProjectConfiguration(project_dir="there", logging_dir="logs")
    assert Accelerator(cpu=True, project_dir="here", project_config=config).project_dir == "there"


def test_handlers_are_checked() -> None:
    with pytest.raises(AssertionError, match="kwargs handler"):
        Accelerator(cpu=True, kwargs_handlers=["scaler"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="one GradScalerKwargs"):
        Accelerator(cpu=True, kwargs_handlers=[GradScalerKwargs(), GradScalerKwargs()])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mixed_precision": "fp61"}, "fp61"),
        ({"dynamo_backend": "eager", "dynamo_plugin": TorchDynamoPlugin()}, "dynamo"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps"),
        ({"gradient_accumulation_steps": "two"}, "gradient_accumulation_steps"),
        ({"scheduler_mode": "update"}, "'samples' or in 'updates'"),
        ({"rng_types": ["tensor"]}, "no such random number stream"),
        ({"rng_types": "torch"}, r"rng_types=\['torch'\]"),
    ],
)
def test_impossible_values_are_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Accelerator(cpu=True, **arguments)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("fsdp_plugin", "yes please"),
        ("dataloader_config", {"even_batches": False}),
        ("project_config", "folder"),
        ("project_dir", 3),
        ("kwargs_handlers", AutocastKwargs()),
    ],
)
def test_an_object_of_the_wrong_type_is_refused(argument: str, value: Any) -> None:
    with pytest.raises(TypeError, match=argument):
        Accelerator(cpu=True, **{argument: value})


@pytest.mark.parametrize("steps", [0, -1, 1.5, "2", None])
def test_the_accumulation_steps_can_only_be_set_to_a_count(steps: Any) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    with pytest.raises(SettingError, match=r"gradient_accumulation_steps=.* at least 1"):
        accelerator.gradient_accumulation_steps = steps
    assert accelerator.gradient_accumulation_steps == 2


def test_a_learning_rate_for_backward_needs_an_optimizer_that_steps_there() -> None:
    with pytest.raises(PreparationError, match="needs a LOMO optimizer"):
        Accelerator(cpu=True).backward(torch.ones((), requires_grad=True), learning_rate=0.1)


def test_a_save_between_windows_warns_of_nothing(tmp_path: Any) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, _, loader = accelerator.prepare(*parts())
    for inputs, _ in itertools.islice(loader, 2):
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).sum())
            optimizer.step()
            optimizer.zero_grad()
    accelerator.save_state(tmp_path / "whole")


def test_an_engine_that_is_not_installed_is_refused_by_name() -> None:
    with pytest.raises(MissingDependency, match=r"Megatron-LM, asked for by .*megatron_lm_plugin.*ParallelismConfig"):
        Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin())


def test_an_argument_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    accelerator = Accelerator(cpu=True)
    assert (accelerator.mixed_precision, accelerator.gradient_accumulation_steps) == ("bf16", 4)


def test_two_accelerators_share_the_world_and_not_the_clock() -> None:
    first, second = Accelerator(cpu=True, gradient_accumulation_steps=2), Accelerator(gradient_accumulation_steps=3)
    assert first.world is second.world and first.state.__dict__ == second.state.__dict__
    assert (first.gradient_accumulation_steps, second.gradient_accumulation_steps) == (2, 3)
    assert copy.deepcopy(first) is first


def test_it_survives_pickling_with_what_it_holds() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    accelerator.prepare(*parts())
    again = pickle.loads(pickle.dumps(accelerator))
    assert again.device == accelerator.device and again.world is accelerator.world
    assert [len(held) for held in (again._models, again._optimizers, again._schedulers, again._dataloaders)] == [1] * 4
    (model,), (optimizer,), (loader,) = again._models, again._optimizers, again._dataloaders
    assert again.prepare(model) is model and again.gradient_accumulation_steps == 2
    before = model.weight.detach().clone()
    for inputs, _ in loader:
        with again.accumulate(model):
            again.backward(model(inputs).sum())
            optimizer.step()
    assert not torch.equal(model.weight, before)


def test_collectives_are_valid_in_one_process() -> None:
    accelerator = Accelerator(cpu=True)
    tensor = torch.arange(3)
    assert torch.equal(accelerator.gather(tensor), tensor)
    assert torch.equal(accelerator.reduce(tensor), tensor)
    assert torch.equal(accelerator.pad_across_processes(tensor), tensor)
    assert accelerator.gather_for_metrics(["a", "b"]) == ["a", "b"]
    with accelerator.split_between_processes([1, 2, 3]) as mine:
        assert mine == [1, 2, 3]
    accelerator.set_trigger()
    assert accelerator.check_trigger() and not accelerator.check_trigger()


@pytest.mark.parametrize("as_objects", [False, True])
def test_a_loss_that_is_repeated_for_each_usual_row_counts_once_per_sample_of_a_short_last_batch(
    as_objects: bool,
) -> None:
    """As the Trainer of transformers gathers losses: `loss.repeat(batch_size)`, whatever the rows of the batch."""
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(6.0)), batch_size=4))
    gather = partial(accelerator.gather_for_metrics, use_gather_object=as_objects)
    losses = [gather(rows.mean().repeat(4)) for (rows,) in loader]
    assert torch.cat(losses).tolist() == [1.5] * 4 + [4.5] * 2


def test_the_profiler_writes_a_trace_per_process(tmp_path: Any) -> None:
    accelerator = Accelerator(cpu=True)
    with accelerator.profile(ProfileKwargs(activities=["cpu"], output_trace_dir=str(tmp_path))) as profiler:
        torch.ones(2) + 1
    assert (tmp_path / "profile_0.json").stat().st_size > 0 and profiler.key_averages()


def test_loader_settings_reach_the_loader() -> None:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))
    assert accelerator.split_batches
    accelerator.even_batches = False
    assert not accelerator.dataloader_config.even_batches


def test_contradicting_old_and_new_precision_is_refused() -> None:
    with pytest.raises(SettingError, match="contradict"):
        Accelerator(cpu=True, fp16=True, mixed_precision="bf16")


def test_an_error_while_a_model_is_prepared_is_what_the_caller_hears(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the model has lost parameters by then that the optimizer trains."""
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fail(model: nn.Module, *_: object) -> nn.Module:
        del model.bias
        raise RuntimeError("no room on the device")

    monkeypatch.setattr(accelerator.strategy, "place_model", fail)
    with pytest.raises(RuntimeError, match="no room on the device"):
        accelerator.prepare(model, optimizer)


def test_a_traced_model_with_tied_weights_is_prepared() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    inputs = torch.ones(1, 2)
    traced = torch.jit.trace(model, inputs)
    assert torch.equal(Accelerator(cpu=True).prepare(traced)(inputs), model(inputs))


PREPARED_ALONE = {
    "prepare_model": (nn.Linear, lambda: torch.optim.SGD([torch.zeros(1)])),
    "prepare_optimizer": (torch.optim.SGD, lambda: nn.Linear(1, 1)),
    "prepare_scheduler": (torch.optim.lr_scheduler.StepLR, lambda: DataLoader(range(2))),
    "prepare_data_loader": (DataLoader, lambda: nn.Linear(1, 1)),
}


@pytest.mark.parametrize("given", [None, "model.pt", b"", 3, 0.5, True], ids=repr)
@pytest.mark.parametrize("method", PREPARED_ALONE)
def test_a_plain_value_is_refused_where_one_object_is_prepared(method: str, given: object) -> None:
    with pytest.raises(PreparationError) as refusal:
        getattr(Accelerator(cpu=True), method)(given)
    assert f"{method}() got {given!r}, not a" in str(refusal.value) and "Pass a" in str(refusal.value)


@pytest.mark.parametrize("method", PREPARED_ALONE)
def test_a_class_and_another_kind_are_refused_where_one_object_is_prepared(method: str) -> None:
    cls, other = PREPARED_ALONE[method]
    accelerator = Accelerator(cpu=True)
    with pytest.raises(PreparationError, match=rf"{method}\(\) got the class {cls.__name__}, not an object of it"):
        getattr(accelerator, method)(cls)
    wrong = other()
    with pytest.raises(
        PreparationError, match=rf"{method}\(\) got {type(wrong).__name__}, which is an? .*Use prepare_"
    ):
        getattr(accelerator, method)(wrong)
