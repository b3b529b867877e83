"""Pipelined inference: each process computes some of a model's layers, on micro-batches in turn.

Only the first process needs the inputs. The last one gets the output; with ``gather_output``, all processes do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, final

import torch
from torch import distributed as dist
from torch import nn

from .big_models.budget import DevicePlan, PlacementProblem, parts_of
from .big_models.device_map import place_greedily
from .big_models.sizes import compute_module_sizes, find_tied_parameters, no_split_classes, own_parts
from .distributed.collectives import world_or_joined
from .distributed.world import World
from .errors import SettingError
from .modules import moved
from .nested import ignorant_find_batch_size, pad_input_tensors, recursively_apply, split_batch
from .parallel.pipeline.partition import choose_split_points, split
from .parallel.pipeline.schedule import TensorMeta, broadcast_object
from .torch_private.tracing import tree_flatten, tree_unflatten


def generate_device_map(
    model: nn.Module,
    num_processes: int = 1,
    no_split_module_classes: Sequence[str] | None = None,
    max_memory: Mapping[Any, Any] | None = None,
) -> dict[str, Any]:
    """Assign modules to processes in order, each at most 10 % above an even share of the bytes.

    The last process gets the rest. ``max_memory`` sets the bytes of each process explicitly.
    """
    sizes = compute_module_sizes(model)
    even_limit = int(sizes[""] / num_processes * 1.1)
    limits = dict(max_memory or dict.fromkeys(range(num_processes), even_limit))
    limits[num_processes - 1] = float("inf")
    parts = parts_of(own_parts(model), sizes, {}, no_split_classes(no_split_module_classes))
    ties = tuple(map(frozenset, find_tied_parameters(model)))
    problem = PlacementProblem(tuple(parts), tuple(range(num_processes)), limits, ties)
    return dict(DevicePlan.of(problem, place_greedily(problem), "greedy"))


def find_pippy_batch_size(args: Sequence[object] | None, kwargs: Mapping[str, object] | None) -> int | None:
    """Return the number of samples in the first argument with tensors; None if there is none."""
    values = [*(args or ()), *(kwargs or {}).values()]
    return next((size for size in map(ignorant_find_batch_size, values) if size is not None), None)


@final
class PipelineStage:
    """The pipeline stage of this process, with its communication with the neighbouring stages."""

    def __init__(self, stage: nn.Module, world: World, num_chunks: int, kwargs: Sequence[str]) -> None:
        self.stage: nn.Module = stage
        self.num_chunks: int = num_chunks
        self._world, self._kwargs = world, tuple(kwargs)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Run one batch; return the output on the last process, else None. Only the first process reads inputs."""
        is_first, is_last = self._world.is_main, self._world.is_last
        parts = list(self._micro_batches(args, kwargs)) if is_first else []
        metadata: list[TensorMeta] = [] if is_first else self._receive_metadata()
        outputs: list[Any] = []
        sent: list[Any] = []
        with torch.no_grad():
            for number in range(self.num_chunks):
                values = parts[number] if is_first else [self._receive(tensor_meta) for tensor_meta in metadata]
                output = self.stage(*values)
                if is_last:
                    outputs.append(output)
                    continue
                leaves = tree_flatten(output)[0]
                if number == 0:
                    dist.send_object_list([list(map(TensorMeta.of, leaves))], self._world.rank + 1)
                for leaf in leaves:
                    contiguous = leaf.contiguous()
                    sent.append((dist.isend(contiguous, self._world.rank + 1), contiguous))
            for work, _ in sent:
                work.wait()
        return _concatenated(outputs) if is_last else None

    def _micro_batches(self, args: tuple[object, ...], kwargs: dict[str, Any]) -> Any:
        unknown = [name for name in kwargs if name not in self._kwargs]
        if unknown or len(kwargs) < len(self._kwargs):
            raise SettingError(
                f"The model was traced with the keyword arguments {list(self._kwargs)}, and is called with "
                f"{list(kwargs)}. Give prepare_pippy(example_kwargs=...) those that you call it with."
            )
        leaves = tree_flatten((args, [kwargs[name] for name in self._kwargs]))[0]
        leaves = recursively_apply(lambda tensor: tensor.to(self._world.device), leaves)
        size = find_pippy_batch_size(leaves, None) or 1
        return (part for part, _ in split_batch(leaves, size, self.num_chunks))

    def _receive_metadata(self) -> list[TensorMeta]:
        metadata: list[Any] = [None]
        dist.recv_object_list(metadata, self._world.rank - 1)
        return metadata[0]

    def _receive(self, meta: TensorMeta) -> torch.Tensor:
        value = torch.empty(meta.size, dtype=meta.dtype, device=self._world.device)
        dist.recv(value, self._world.rank - 1)
        return value


def _concatenated(outputs: Sequence[object]) -> Any:
    flat = [tree_flatten(output) for output in outputs]
    leaves = [torch.cat(parts) for parts in zip(*(parts for parts, _ in flat), strict=True)]
    return tree_unflatten(leaves, flat[0][1])


def build_pipeline(
    model: nn.Module,
    split_points: Sequence[str],
    args: Sequence[object],
    kwargs: Mapping[str, object] | None,
    num_chunks: int,
) -> PipelineStage:
    """Return this process's stage of ``model``, on its device.

    Raises:
        SettingError: the number of stages isn't the number of processes.
    """
    world = world_or_joined(None)
    if len(split_points) + 1 != world.size:
        raise SettingError(
            f"split_points={list(split_points)} make {len(split_points) + 1} stages for {world.size} processes. Name "
            f"{world.size - 1} modules, or start {len(split_points) + 1} processes."
        )
    stages = split(model, split_points, args, dict(kwargs or {}))
    stage = moved(stages[world.rank], world.device)
    return PipelineStage(stage, world, num_chunks, list(kwargs or {}))


def pippy_forward(
    forward: Callable[..., object], num_chunks: int, gather_output: bool, *args: object, **kwargs: object
) -> Any:
    """Run one batch through all stages; return the output on the last process (all with ``gather_output``), else None.

    If ``num_chunks`` doesn't divide the batch, it is padded, and the output is cut to its size.
    """
    world = world_or_joined(None)
    size = None
    if world.is_main:
        size = find_pippy_batch_size(args, kwargs)
        if size is None:
            raise SettingError("The first process called the model without a tensor to compute with.")
        pad = partial(_padded, size=size, num_chunks=num_chunks)
        args, kwargs = recursively_apply(pad, args), recursively_apply(pad, kwargs)
    output = forward(*args, **kwargs) if world.is_main else forward()
    if world.size > 1:
        size = broadcast_object(size, 0)
    if output is not None:
        output = recursively_apply(lambda tensor: tensor[:size] if tensor.ndim else tensor, output)
    return _broadcast_output(output, world) if gather_output and world.size > 1 else output


def _padded(tensor: torch.Tensor, size: int, num_chunks: int) -> torch.Tensor:
    is_batch = tensor.ndim > 0 and tensor.shape[0] == size
    return pad_input_tensors(tensor, size, num_chunks) if is_batch else tensor


def _broadcast_output(output: object, world: World) -> Any:
    """Broadcast the output of the last process to all processes."""
    leaves, structure = tree_flatten(output)
    metadata, spec = broadcast_object(
        ([TensorMeta.of(leaf) for leaf in leaves], structure) if world.is_last else None, world.size - 1
    )
    if not world.is_last:
        leaves = [torch.empty(meta.size, dtype=meta.dtype, device=world.device) for meta in metadata]
    leaves = [leaf.contiguous() for leaf in leaves]
    for leaf in leaves:
        dist.broadcast(leaf, world.size - 1)
    return tree_unflatten(leaves, spec)


def _split_points_by_device_map(
    model: nn.Module, num_processes: int, no_split_module_classes: Sequence[str] | None
) -> list[str]:
    """Return the first module of every process but the first, by the device map, else by equal blocks."""
    device_map = generate_device_map(model, num_processes, no_split_module_classes)
    firsts = [[name for name, device in device_map.items() if device == rank][:1] for rank in range(num_processes)]
    return (
        [name for found in firsts[1:] for name in found] if all(firsts) else choose_split_points(model, num_processes)
    )


def prepare_pippy(
    model: nn.Module,
    split_points: str | Sequence[str] | None = "auto",
    no_split_module_classes: Sequence[str] | None = None,
    example_args: Sequence[object] | None = (),
    example_kwargs: Mapping[str, object] | None = None,
    num_chunks: int | None = None,
    gather_output: bool | None = False,
) -> nn.Module:
    """Make the forward of ``model`` run on all processes, each of which computes some layers.

    Args:
        split_points: names of the modules at which the second and later processes begin; ``"auto"`` makes parts of
            about equal size.
        no_split_module_classes: names of classes whose modules are never split.
        example_args: positional inputs to trace the forward, for one micro-batch.
        example_kwargs: keyword inputs to trace it.
        num_chunks: the number of micro-batches in a batch; by default, one per process.
        gather_output: whether all processes get the output, or only the last one.

    Raises:
        SettingError: the split points don't fit the processes, or no inputs were given.
        PreparationError: the forward can't be traced.
    """
    world = world_or_joined(None)
    args, kwargs = tuple(example_args or ()), dict(example_kwargs or {})
    if not args and not kwargs:
        raise SettingError(
            "prepare_pippy() traces the model's forward, and needs inputs to do so: give example_args=(...) or "
            "example_kwargs={...}, shaped as one part of a batch."
        )
    chunks = world.size if num_chunks is None else num_chunks
    if split_points == "auto" or split_points is None:
        points = _split_points_by_device_map(model, world.size, no_split_module_classes)
    else:
        points = [split_points] if isinstance(split_points, str) else list(split_points)
    was_training = model.training
    schedule = build_pipeline(model.eval(), points, args, kwargs, chunks)
    model.train(was_training)
    original = model.forward
    model.__dict__.update(_original_forward=original, hf_split_points=points, pippy_stage=schedule)

    @wraps(original)
    def forward(*inputs: Any, **named: Any) -> Any:
        return pippy_forward(schedule.step, schedule.num_chunks, bool(gather_output), *inputs, **named)

    model.forward = forward
    return model
