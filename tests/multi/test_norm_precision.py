"""Gradients are clipped in their own precision in every layout, by any norm and by value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

from accelerate import Accelerator
from accelerate.parallel.gradient_norm import clip_sharded_grad_norm, clip_sharded_grad_value
from accelerate.plugins.parallelism import PipelineParallelConfig
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig
from tests.ranks import run_on_ranks
from tests.slow import mostly_slow, slow_for

INFINITY: Final = float("inf")
#: Norm type and limit; the last one clamps values.
CLIPS: Final = [(2.0, 0.3), (1.0, 0.3), (3.0, 0.3), (INFINITY, 0.05), (-INFINITY, 1e-4), (2.0, 1e9), (None, 0.02)]


class Model(nn.Module):
    tp_plan = {"wide": "colwise", "back": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.back = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.back(self.wide(rows).relu()) * 1.0  # no view, of which FSDP2 warns


def flat(**how: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"auto_wrap_policy": "size_based_wrap", "min_num_params": 30, "use_orig_params": True}
    return {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=1, **options | how)}


def mesh(**degrees: Any) -> dict[str, Any]:
    stages = PipelineParallelConfig(split_points="back") if "pp_size" in degrees else None
    return {"parallelism_config": ParallelismConfig(**degrees, pp_handler=stages)}


def shards(**degrees: Any) -> dict[str, Any]:
    plugin = {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)}
    return plugin | mesh(**degrees) if degrees else plugin


LAYOUTS: Final[dict[str, Callable[[], dict[str, Any]]]] = {
    "replicas": dict,
    "fsdp2": shards,
    "fsdp1": flat,
    "fsdp1, flat": lambda: flat(use_orig_params=False),
    "fsdp1, whole": lambda: flat(reshard_after_forward="NO_SHARD"),
    "tensor": lambda: mesh(tp_size=2),
    "pipeline": lambda: mesh(pp_size=2),
}
LARGE: Final[dict[str, Callable[[], dict[str, Any]]]] = {
    "hybrid": lambda: shards(dp_replicate_size=2, dp_shard_size=2),
    "fsdp2 of tensors": lambda: shards(tp_size=2, dp_shard_size=2),
    "pipeline of shards": lambda: shards(pp_size=2, dp_shard_size=2),
}


def start(dtype: torch.dtype) -> tuple[Model, torch.Tensor]:
    torch.manual_seed(3)
    return Model().to(dtype), torch.randn(6, 4, dtype=torch.float64).to(dtype)


def plain(dtype: torch.dtype, norm_type: float | None, limit: float) -> tuple[float | None, dict[str, torch.Tensor]]:
    """The norm, and the clipped gradients, of one process."""
    model, rows = start(dtype)
    model(rows).square().mean().backward()
    norm = None
    if norm_type is None:
        nn.utils.clip_grad_value_(model.parameters(), limit)
    else:
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), limit, norm_type))
    return norm, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: (v.full_tensor() if isinstance(v, DTensor) else v).clone() for name, v in state.items()}


def clipped(layout: str, dtype: torch.dtype, norm_type: float | None, limit: float) -> Any:
    """The norm and its dtype, and the weights before and after a step along the clipped gradients."""
    accelerator = Accelerator(cpu=True, **(LAYOUTS | LARGE)[layout]())
    model, rows = start(dtype)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    before = whole(accelerator.get_state_dict(model))
    if "pipeline" in layout:
        accelerator.pipeline_step(model, (rows, rows), lambda output, _: output.square().mean())
    else:
        accelerator.backward(model(rows).square().mean())
    norm = None
    if norm_type is None:
        accelerator.clip_grad_value_(model.parameters(), limit)
    else:
        norm = accelerator.clip_grad_norm_(model.parameters(), limit, norm_type)
    optimizer.step()
    after = whole(accelerator.get_state_dict(model))
    accelerator.free_memory()
    AcceleratorState._reset_state()
    return None if norm is None else (float(norm), norm.dtype), {name: before[name] - after[name] for name in after}


def all_of(layouts: list[str]) -> list[Any]:
    return [clipped(layout, dtype, *clip) for layout in layouts for dtype in DTYPES for clip in CLIPS]


DTYPES: Final = {torch.float64: 1e-14, torch.float32: 5e-7}


QUICK: Final = ("replicas", "fsdp2", "fsdp1", "tensor", "pipeline")


@pytest.mark.parametrize("layout", mostly_slow([*LAYOUTS, *LARGE], QUICK, slow_for("many layouts", "meshes")))
def test_gradients_are_clipped_in_their_own_precision(layout: str) -> None:
    cases = [(dtype, *clip) for dtype in DTYPES for clip in CLIPS]
    answers = run_on_ranks(all_of, 4 if layout in LARGE else 2, [layout])
    for rank, answer in enumerate(answers):
        for (dtype, norm_type, limit), (found, update) in zip(cases, answer, strict=True):
            norm, gradients = plain(dtype, norm_type, limit)
            if found is not None:
                assert found[1] is dtype
                # The smallest gradient is what others leave when they cancel out.
                largest = max(float(gradient.abs().max()) for gradient in gradients.values())
                error = DTYPES[dtype] * largest if norm_type == -INFINITY else 0.0
                assert found[0] == pytest.approx(norm, rel=DTYPES[dtype], abs=error), (layout, dtype, norm_type)
            if rank == 0:
                assert set(update) == set(gradients)
            for name, ours in update.items():
                # A difference of weights near 1 has their rounding.
                torch.testing.assert_close(ours, gradients[name].to(ours.dtype), rtol=0, atol=DTYPES[dtype] / 2)


def test_gradients_of_half_precision_are_added_up_in_float32() -> None:
    parameter = nn.Parameter(torch.zeros(4096, dtype=torch.bfloat16))
    parameter.grad = torch.full_like(parameter, 1.0 + 2**-7)
    norm = clip_sharded_grad_norm([parameter], 1e9, 2.0, False, torch.device("cpu"))
    assert norm.dtype is torch.float32
    assert norm.item() == pytest.approx(64 * (1.0 + 2**-7), rel=1e-6)


def summands() -> tuple[list[float], list[float]]:
    Accelerator(cpu=True)
    mesh_of_ranks = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh_of_ranks))
    own = torch.tensor([3.0, -1.0]) if dist.get_rank() == 0 else torch.tensor([-2.5, -1.0])
    gradient: Any = DTensor.from_local(own, mesh_of_ranks, [Partial()])
    parameter.grad = gradient
    clip_sharded_grad_value([parameter], 1.5)
    found: Any = parameter.grad
    return found.full_tensor().tolist(), own.tolist()


def test_values_are_clamped_after_the_ranks_summands_are_added_up() -> None:
    assert [found for found, _ in run_on_ranks(summands, 2)] == [[0.5, -1.5]] * 2
