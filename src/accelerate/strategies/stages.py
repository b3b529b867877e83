"""A model as stages: runs of its layers, cut at named modules so that each has about the same work.

A forward is followed where that is possible, and its modules stay as they are. Any other is traced (``torch.export``),
and its graph is cut where the named modules begin. Stages hold the model's own parameters, under their own names.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, final

import torch
from torch import fx, nn

from ..errors import PreparationError, SettingError
from ..torch_private.tracing import TreeSpec, is_check_of_tracing, tree_unflatten
from .following import CannotFollow, Stage, attributes, follow, segments


@final
class Run(nn.Module):
    """Some of the entries of an ``nn.Sequential``, one after the other, under the names they have there."""

    def __init__(self, entries: Iterable[tuple[str, nn.Module]]) -> None:
        super().__init__()
        for name, entry in entries:
            self.add_module(name, entry)

    def forward(self, hidden: Any) -> Any:
        """What the last entry makes of it."""
        for entry in self.children():
            hidden = entry(hidden)
        return hidden


def balanced(sizes: Sequence[int], num_runs: int) -> list[int]:
    """Where each of ``num_runs`` runs of ``sizes`` begins, so that the largest sum of a run is as small as can be."""
    count = len(sizes)
    sums = [0]
    for size in sizes:
        sums.append(sums[-1] + size)
    # best[end]: the smallest largest sum of the entries before `end` in as many runs as there were rounds.
    best: list[float] = [float("inf")] * (count + 1)
    best[0] = 0
    cuts: list[list[int]] = []
    for _ in range(num_runs):
        following, cut = [float("inf")] * (count + 1), [0] * (count + 1)
        for end in range(1, count + 1):
            for start in range(end):
                largest = max(best[start], sums[end] - sums[start])
                if largest < following[end]:
                    following[end], cut[end] = largest, start
        best = following
        cuts.append(cut)
    starts, end = [], count
    for cut in reversed(cuts):
        end = cut[end]
        starts.append(end)
    return starts[::-1]


def size_of(module: nn.Module) -> int:
    """Bytes of parameters; one for a module that has none, so that it counts at all."""
    return max(1, sum(parameter.numel() * parameter.element_size() for parameter in module.parameters()))


def choose_points(model: nn.Module, num_stages: int, size: Callable[[nn.Module], int] = size_of) -> list[str]:
    """The names of the modules at which the second and later of ``num_stages`` stages begin.

    Raises:
        PreparationError: the model has no list of blocks, or fewer blocks than stages.
    """
    if isinstance(model, nn.Sequential):
        names, sizes = list(model._modules), [size(entry) for entry in model]
    else:
        prefix, blocks = _blocks(model)
        names, sizes = [f"{prefix}.{name}" for name, _ in blocks], [size(block) for _, block in blocks]
        rest = size(model) - sum(sizes)  # what lies before and after the blocks: usually an embedding and a head
        sizes[0] += rest // 2
        sizes[-1] += rest - rest // 2
    if len(names) < num_stages:
        raise PreparationError(
            f"{type(model).__name__} has {len(names)} blocks, too few for {num_stages} stages of a pipeline. Lower "
            "ParallelismConfig(pp_size=...) or PipelineParallelConfig(stages_per_rank=...), or name split_points."
        )
    return [names[start] for start in balanced(sizes, num_stages)[1:]]


def _blocks(model: nn.Module) -> tuple[str, list[tuple[str, nn.Module]]]:
    lists = [
        (name, list(module.named_children()))
        for name, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1
    ]
    if not lists:
        raise PreparationError(
            f"{type(model).__name__} has no list of blocks to cut between. Name the modules at which stages begin: "
            "PipelineParallelConfig(split_points=['encoder.layer.6', ...])."
        )
    return max(lists, key=lambda found: sum(size_of(block) for _, block in found[1]))


def check_points(model: nn.Module, points: Sequence[str]) -> None:
    """Raises unless ``points`` are names of modules.

    Raises:
        SettingError: a name that no module has.
    """
    known = dict(model.named_modules())
    unknown = [point for point in points if point not in known or not point]
    if unknown:
        raise SettingError(
            f"split_points: {type(model).__name__} has no module {unknown[0]!r}. Use names as model.named_modules() "
            f"gives them, such as {', '.join(repr(name) for name in list(known)[1:4])}."
        )


def stages_of(model: nn.Module, points: Sequence[str], example_inputs: Sequence[Any] | None) -> list[Stage]:
    """``model`` as stages that train and evaluate; the second and later begin at the modules called ``points``.

    Its forward is followed; one that can't be is traced with ``example_inputs``.

    Raises:
        SettingError: a name that no module has, or through which the forward doesn't pass in this order.
        PreparationError: the forward can't be followed, and not be traced.
    """
    check_points(model, points)
    try:
        return follow(model, points, len(example_inputs) if example_inputs else None)
    except CannotFollow as reason:
        if not example_inputs:
            raise PreparationError(
                f"The forward of {type(model).__name__} can't be followed to cut it into stages ({reason}), and has to "
                "be traced. Give its inputs for one micro-batch: PipelineParallelConfig(example_inputs=(input_ids,))."
            ) from reason
    was_training = model.training
    trained = traced(model.train(), points, tuple(example_inputs))
    evaluated = traced(model.eval(), points, tuple(example_inputs))
    model.train(was_training)
    return [Stage(model, one, other) for one, other in zip(trained, evaluated, strict=True)]


def split(
    model: nn.Module, points: Sequence[str], example_inputs: Sequence[Any] | None, kwargs: dict[str, Any] | None = None
) -> list[nn.Module]:
    """``model`` as stages; the second and later begin at the modules called ``points``.

    Raises:
        SettingError: a name that no module has, or that isn't an entry of the Sequential.
        PreparationError: a model that isn't a Sequential, without example inputs, or whose forward can't be traced.
    """
    check_points(model, points)
    if isinstance(model, nn.Sequential) and not kwargs and all("." not in point for point in points):
        return list(_runs(model, points))
    if not example_inputs and not kwargs:
        raise PreparationError(
            f"{type(model).__name__} isn't an nn.Sequential, so its forward has to be traced to be cut into stages. "
            "Give its inputs for one micro-batch: PipelineParallelConfig(example_inputs=(input_ids,))."
        )
    return traced(model, points, tuple(example_inputs or ()), kwargs)


def _runs(model: nn.Sequential, points: Sequence[str]) -> Iterator[nn.Module]:
    entries = list(model.named_children())
    names = [name for name, _ in entries]
    starts = [0, *(names.index(point) for point in points), len(entries)]
    for start, stop in pairwise(starts):
        if start >= stop:
            raise SettingError(
                f"split_points={list(points)}: stages begin in the order of the model's modules ({', '.join(names)}), "
                "and none is empty."
            )
        yield Run(entries[start:stop])


def traced(
    model: nn.Module, points: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> list[nn.Module]:
    """``model`` traced with ``args`` and cut at ``points``."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch.export's own
            program = torch.export.export(model, args, kwargs, strict=False)
            module = program.module()
    except Exception as error:  # whatever tracing raises, it means that this forward can't be cut
        raise PreparationError(
            f"The forward of {type(model).__name__} can't be traced, so it can't be cut into stages: "
            f"{error.__cause__ or error}\nWrite it without branches that depend on values, or make it an nn.Sequential."
        ) from error
    graph: fx.Graph = module.graph  # pyright: ignore[reportAssignmentType]
    for node in list(graph.nodes):
        # The stages compute where their inputs lie, not where they were traced.
        if is_check_of_tracing(node.target):
            graph.erase_node(node)
    starts = [_beginning(model, graph, point) for point in points]
    stages = segments(graph, starts, attributes(graph, model, module))
    structure = program.call_spec.out_spec
    assert structure is not None, "a program that was exported from a module has one"
    return [*stages[:-1], Structured(stages[-1], structure)]


def _beginning(model: nn.Module, graph: fx.Graph, point: str) -> fx.Node:
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        if node.op == "call_function" and any(str(name).partition("@")[0] == point for name, _ in stack.values()):
            return node
    raise SettingError(
        f"split_points: the forward of {type(model).__name__} doesn't pass through {point!r}, or makes nothing there."
    )


@final
class Structured(nn.Module):
    """The last stage of a traced model: its values in the structure of the model's output."""

    def __init__(self, stage: nn.Module, structure: TreeSpec) -> None:
        super().__init__()
        self.stage = stage
        self._structure = structure

    def forward(self, *values: Any) -> Any:
        """The model's output."""
        return tree_unflatten(self.stage(*values), self._structure)


def drop_foreign(model: nn.Module, kept: set[int]) -> None:
    """Parameters and buffers of ``model`` whose ``id`` isn't in ``kept`` have a shape and no memory."""
    replaced: dict[int, torch.Tensor] = {}

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in replaced:
            made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")  # also of a tensor in pieces
            is_parameter = isinstance(tensor, nn.Parameter)
            replaced[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if is_parameter else made
        return replaced[id(tensor)]

    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None and id(tensor) not in kept:
                    held[name] = empty(tensor)  # pyright: ignore[reportArgumentType]
