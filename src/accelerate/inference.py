"""Inference through a pipeline: each process computes some of a model's layers, parts of the batch follow each other.

Only the first process needs the inputs; the last one has the output, or all have it with ``gather_output``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, final

import torch
from torch import distributed as dist
from torch import nn

from .collectives import world_or_joined
from .device_map.greedy import place_greedily
from .device_map.parts import DevicePlan, Problem, parts_of
from .device_map.sizes import compute_module_sizes, no_split_classes, own_parts
from .device_map.tied import find_tied_parameters
from .errors import SettingError
from .nested import ignorant_find_batch_size, pad_input_tensors, recursively_apply, split_batch
from .strategies.stages import choose_points, split
from .strategies.timetable import Shape, told
from .torch_private.tracing import tree_flatten, tree_unflatten
from .world import World


def generate_device_map(
    model: nn.Module,
    num_processes: int = 1,
    no_split_module_classes: Sequence[str] | None = None,
    max_memory: Mapping[Any, Any] | None = None,
) -> dict[str, Any]:
    """Which of ``num_processes`` has which module: filled in order, to a tenth more than the even share at most.

    The last process takes what is left. ``max_memory`` gives the bytes of each process itself.
    """
    sizes = compute_module_sizes(model)
    share = int(sizes[""] / num_processes * 1.1)
    limits = dict(max_memory or dict.fromkeys(range(num_processes), share))
    limits[num_processes - 1] = float("inf")
    parts = parts_of(own_parts(model), sizes, {}, no_split_classes(no_split_module_classes))
    ties = tuple(map(frozenset, find_tied_parameters(model)))
    problem = Problem(tuple(parts), tuple(range(num_processes)), limits, ties)
    return dict(DevicePlan.of(problem, place_greedily(problem), "greedy"))


def find_pippy_batch_size(args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None) -> int | None:
    """The number of samples in the first argument that has any; None where there is none."""
    values = [*(args or ()), *(kwargs or {}).values()]
    return next((size for size in map(ignorant_find_batch_size, values) if size is not None), None)


@final
class StageByStage:
    """This process's stage of a model, and its place between those of the neighbours."""

    def __init__(self, stage: nn.Module, world: World, num_chunks: int, kwargs: Sequence[str]) -> None:
        self.stage, self.num_chunks = stage, num_chunks
        self._world, self._kwargs = world, tuple(kwargs)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The output on the last process, None on the others; inputs are read on the first one."""
        is_first, is_last = self._world.is_main, self._world.is_last
        parts = list(self._parts(args, kwargs)) if is_first else []
        shapes: list[Shape] = [] if is_first else self._received()
        outputs: list[Any] = []
        sent: list[Any] = []
        with torch.no_grad():
            for number in range(self.num_chunks):
                values = parts[number] if is_first else [self._receive(shape) for shape in shapes]
                output = self.stage(*values)
                if is_last:
                    outputs.append(output)
                    continue
                leaves = tree_flatten(output)[0]
                if number == 0:
                    dist.send_object_list([list(map(Shape.of, leaves))], self._world.rank + 1)
                for leaf in leaves:
                    whole = leaf.contiguous()
                    sent.append((dist.isend(whole, self._world.rank + 1), whole))
            for work, _ in sent:
                work.wait()
        return _joined(outputs) if is_last else None

    def _parts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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

    def _received(self) -> list[Shape]:
        shapes: list[Any] = [None]
        dist.recv_object_list(shapes, self._world.rank - 1)
        return shapes[0]

    def _receive(self, shape: Shape) -> torch.Tensor:
        value = torch.empty(shape.size, dtype=shape.dtype, device=self._world.device)
        dist.recv(value, self._world.rank - 1)
        return value


def _joined(outputs: list[Any]) -> Any:
    flat = [tree_flatten(output) for output in outputs]
    leaves = [torch.cat(parts) for parts in zip(*(parts for parts, _ in flat), strict=True)]
    return tree_unflatten(leaves, flat[0][1])


def build_pipeline(
    model: nn.Module,
    split_points: Sequence[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    num_chunks: int,
) -> StageByStage:
    """The stage of ``model`` that belongs to this process, on its device.

    Raises:
        SettingError: the points make another number of stages than there are processes.
    """
    world = world_or_joined(None)
    if len(split_points) + 1 != world.size:
        raise SettingError(
            f"split_points={list(split_points)} make {len(split_points) + 1} stages for {world.size} processes. Name "
            f"{world.size - 1} modules, or start {len(split_points) + 1} processes."
        )
    stages = split(model, split_points, args, dict(kwargs or {}))
    stage = stages[world.rank]
    for tensor in [*stage.parameters(), *stage.buffers()]:  # in place: the model has the same objects
        tensor.data = tensor.data.to(world.device)
    return StageByStage(stage.to(world.device), world, num_chunks, list(kwargs or {}))


def pippy_forward(forward: Callable[..., Any], num_chunks: int, gather_output: bool, *args: Any, **kwargs: Any) -> Any:
    """The output of one batch through all stages: on the last process, on all with ``gather_output``; None elsewhere.

    A batch that ``num_chunks`` doesn't divide is filled up, and the output cut to its size.
    """
    world = world_or_joined(None)
    size = None
    if world.is_main:
        size = find_pippy_batch_size(args, kwargs)
        if size is None:
            raise SettingError("The first process called the model without a tensor to compute with.")
        fill = partial(_filled, size=size, num_chunks=num_chunks)
        args, kwargs = recursively_apply(fill, args), recursively_apply(fill, kwargs)
    output = forward(*args, **kwargs) if world.is_main else forward()
    if world.size > 1:
        size = told(size, 0)
    if output is not None:
        output = recursively_apply(lambda tensor: tensor[:size] if tensor.ndim else tensor, output)
    return _everywhere(output, world) if gather_output and world.size > 1 else output


def _filled(tensor: torch.Tensor, size: int, num_chunks: int) -> torch.Tensor:
    is_batch = tensor.ndim > 0 and tensor.shape[0] == size
    return pad_input_tensors(tensor, size, num_chunks) if is_batch else tensor


def _everywhere(output: Any, world: World) -> Any:
    """What the last process has, on all."""
    leaves, structure = tree_flatten(output)
    shapes, spec = told(([Shape.of(leaf) for leaf in leaves], structure) if world.is_last else None, world.size - 1)
    if not world.is_last:
        leaves = [torch.empty(shape.size, dtype=shape.dtype, device=world.device) for shape in shapes]
    leaves = [leaf.contiguous() for leaf in leaves]
    for leaf in leaves:
        dist.broadcast(leaf, world.size - 1)
    return tree_unflatten(leaves, spec)


def _points(model: nn.Module, num_processes: int, no_split_module_classes: Sequence[str] | None) -> list[str]:
    """The first module of every process but the first, by the device map; by blocks, where the map leaves one idle."""
    places = generate_device_map(model, num_processes, no_split_module_classes)
    firsts = [[name for name, place in places.items() if place == rank][:1] for rank in range(num_processes)]
    return [name for found in firsts[1:] for name in found] if all(firsts) else choose_points(model, num_processes)


def prepare_pippy(
    model: nn.Module,
    split_points: str | Sequence[str] | None = "auto",
    no_split_module_classes: Sequence[str] | None = None,
    example_args: Sequence[Any] | None = (),
    example_kwargs: Mapping[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool | None = False,
) -> nn.Module:
    """``model``, whose forward now goes through all processes, each of which computes some of its layers.

    Args:
        split_points: names of the modules at which the second and later processes begin; ``"auto"``: about equal
            parts by size.
        no_split_module_classes: names of classes whose modules stay in one piece.
        example_args: positional inputs to trace the forward with, of one part of a batch.
        example_kwargs: keyword inputs to trace it with.
        num_chunks: into how many parts a batch is cut; by default one for each process.
        gather_output: whether all processes get the output, instead of only the last.

    Raises:
        SettingError: the points and the processes don't fit, or no inputs were given.
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
        points = _points(model, world.size, no_split_module_classes)
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
