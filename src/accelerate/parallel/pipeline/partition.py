"""Pipeline partition: a model split into stages at named modules, with about the same work in each stage.

A forward is traced symbolically (``torch.fx``) if possible, and its modules stay unchanged. Otherwise it is exported
(``torch.export``), and its graph is split where the named modules begin. Stages use the model's own parameters, under
their own names.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, final

import torch
from torch import fx, nn

from ...errors import PreparationError, SettingError
from ...modules import replace_tensors
from ...torch_private.tracing import TreeSpec, is_tracing_guard, tree_unflatten


@final
class SequentialStage(nn.Module):
    """Consecutive entries of an ``nn.Sequential``, under their names there."""

    def __init__(self, entries: Iterable[tuple[str, nn.Module]]) -> None:
        super().__init__()
        for name, entry in entries:
            self.add_module(name, entry)

    def forward(self, hidden: Any) -> Any:
        """Return the output of the last entry."""
        for entry in self.children():
            hidden = entry(hidden)
        return hidden


def balanced(sizes: Sequence[int], num_runs: int) -> list[int]:
    """Return the start indices that divide ``sizes`` into ``num_runs`` runs with the smallest possible largest sum."""
    count = len(sizes)
    sums = [0]
    for size in sizes:
        sums.append(sums[-1] + size)
    # best[end]: the smallest possible largest sum with the entries before `end` in as many runs as there were rounds.
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
    """Return the bytes of the parameters of ``module``, and 1 if it has none."""
    return max(1, sum(parameter.numel() * parameter.element_size() for parameter in module.parameters()))


def choose_split_points(model: nn.Module, num_stages: int, size: Callable[[nn.Module], int] = size_of) -> list[str]:
    """Return the names of the modules at which the second and later of ``num_stages`` stages begin.

    Raises:
        PreparationError: the model has no list of blocks, or fewer blocks than stages.
    """
    if isinstance(model, nn.Sequential):
        names, sizes = list(model._modules), [size(entry) for entry in model]
    else:
        prefix, blocks = _blocks(model)
        names, sizes = [f"{prefix}.{name}" for name, _ in blocks], [size(block) for _, block in blocks]
        rest = size(model) - sum(sizes)  # layers before and after the blocks: usually an embedding and a head
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
            f"{type(model).__name__} has no list of blocks to split between. Name the modules at which stages begin: "
            "PipelineParallelConfig(split_points=['encoder.layer.6', ...])."
        )
    return max(lists, key=lambda found: sum(size_of(block) for _, block in found[1]))


def check_split_points(model: nn.Module, points: Sequence[str]) -> None:
    """Raise unless ``points`` are names of modules.

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


def split_into_stages(model: nn.Module, points: Sequence[str], example_inputs: Sequence[Any] | None) -> list[Stage]:
    """Split ``model`` into stages for training and evaluation; the later ones begin at the modules ``points``.

    The forward is traced symbolically; if that fails, it is exported with ``example_inputs``.

    Raises:
        SettingError: a name that no module has, or modules that the forward doesn't call in this order.
        PreparationError: the forward can be neither traced symbolically nor exported.
    """
    check_split_points(model, points)
    try:
        return symbolic_stages(model, points, len(example_inputs) if example_inputs else None)
    except CannotTrace as reason:
        if not example_inputs:
            raise PreparationError(
                f"The forward of {type(model).__name__} can't be traced symbolically ({reason}), and has to be traced "
                "with inputs of one micro-batch. Give them: PipelineParallelConfig(example_inputs=(input_ids,))."
            ) from reason
    was_training = model.training
    trained = exported_stages(model.train(), points, tuple(example_inputs))
    evaluated = exported_stages(model.eval(), points, tuple(example_inputs))
    model.train(was_training)
    return [Stage(model, one, other) for one, other in zip(trained, evaluated, strict=True)]


def split(
    model: nn.Module, points: Sequence[str], example_inputs: Sequence[Any] | None, kwargs: dict[str, Any] | None = None
) -> list[nn.Module]:
    """Split ``model`` into stages; the later ones begin at the modules called ``points``.

    Raises:
        SettingError: a name that no module has, or that isn't an entry of the Sequential.
        PreparationError: a model that isn't a Sequential, without example inputs, or whose forward can't be traced.
    """
    check_split_points(model, points)
    if isinstance(model, nn.Sequential) and not kwargs and all("." not in point for point in points):
        return list(_runs(model, points))
    if not example_inputs and not kwargs:
        raise PreparationError(
            f"{type(model).__name__} isn't an nn.Sequential, so its forward has to be traced to be split into stages. "
            "Give its inputs for one micro-batch: PipelineParallelConfig(example_inputs=(input_ids,))."
        )
    return exported_stages(model, points, tuple(example_inputs or ()), kwargs)


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
        yield SequentialStage(entries[start:stop])


def exported_stages(
    model: nn.Module, points: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> list[nn.Module]:
    """Export ``model`` with ``args`` by ``torch.export``, and split its graph at ``points``."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch.export's own
            program = torch.export.export(model, args, kwargs, strict=False)
            module = program.module()
    except Exception as error:  # whatever tracing raises, it means that this forward can't be split
        raise PreparationError(
            f"The forward of {type(model).__name__} can't be traced, so it can't be split into stages: "
            f"{error.__cause__ or error}\nWrite it without branches that depend on values, or make it an nn.Sequential."
        ) from error
    graph: fx.Graph = module.graph  # pyright: ignore[reportAssignmentType]
    for node in list(graph.nodes):
        # The stages compute on the device of their inputs, not on that of the trace.
        if is_tracing_guard(node.target):
            graph.erase_node(node)
    starts = [_first_node(model, graph, point) for point in points]
    stages = split_graph(graph, starts, graph_attributes(graph, model, module))
    structure = program.call_spec.out_spec
    assert structure is not None, "a program that was exported from a module has one"
    return [*stages[:-1], StructuredStage(stages[-1], structure)]


def _first_node(model: nn.Module, graph: fx.Graph, point: str) -> fx.Node:
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        if node.op == "call_function" and any(str(name).partition("@")[0] == point for name, _ in stack.values()):
            return node
    raise SettingError(
        f"split_points: the forward of {type(model).__name__} doesn't pass through {point!r}, or makes nothing there."
    )


@final
class StructuredStage(nn.Module):
    """The last stage of an exported model; it returns values in the structure of the model's output."""

    def __init__(self, stage: nn.Module, structure: TreeSpec) -> None:
        super().__init__()
        self.stage = stage
        self._structure = structure

    def forward(self, *values: object) -> Any:
        """Return the model's output."""
        return tree_unflatten(self.stage(*values), self._structure)


def drop_other_stages(model: nn.Module, kept: set[int]) -> None:
    """Replace the parameters and buffers of ``model`` by meta tensors, except those with an ``id`` in ``kept``."""

    def kept_or_empty(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in kept:
            return tensor
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")  # also of a DTensor
        return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made

    replace_tensors(model, kept_or_empty, buffers=True)


# --------------------------------------------------------------------------------------------------
# Symbolic trace
#
# Only the code around the modules is traced, so the code inside them (branches, dropout, hooks, sharded layers) works
# as before, and batches may have any shape. A forward that depends on values goes to ``exported_stages``.

#: The types of the defaults that arguments which aren't given may have.
_PLAIN = (type(None), bool, int, float, str)


@final
class Stage(nn.Module):
    """A pipeline stage: one module for training, and one for evaluation; ``model.training`` decides.

    Args:
        is_symbolic: the stage calls the model's own modules; otherwise, exported copies of them.
    """

    def __init__(
        self, model: nn.Module, trained: nn.Module, evaluated: nn.Module, *, is_symbolic: bool = False
    ) -> None:
        super().__init__()
        self.is_symbolic = is_symbolic
        self.trained: nn.Module = trained
        self.evaluated: nn.Module = evaluated
        self.__dict__["_model"] = model  # not a child: it includes the other stages

    def forward(self, *values: object) -> Any:
        """Return the values for the next stage, or the model's output from the last one."""
        return (self.trained if self.__dict__["_model"].training else self.evaluated)(*values)


class CannotTrace(Exception):
    """The error raised if a forward can't be traced symbolically."""


def symbolic_stages(model: nn.Module, points: Sequence[str], num_inputs: int | None = None) -> list[Stage]:
    """Trace ``model`` symbolically, and split it at the calls of the modules called ``points``.

    Args:
        num_inputs: the number of positional inputs; by default, that of the required ones.

    Raises:
        CannotTrace: this forward can't be traced symbolically.
        SettingError: the forward doesn't call ``points`` in this order.
    """
    if "forward" in model.__dict__:
        raise CannotTrace("its forward was replaced on the object")
    unused = _unused(model, num_inputs)
    was_training = model.training
    halves: list[list[nn.Module]] = []
    try:
        for mode in (True, False):
            model.train(mode)  # read by the code around the modules; the modules themselves aren't run
            halves.append(_trace_and_split(model, points, unused))
    finally:
        model.train(was_training)
    return [Stage(model, trained, evaluated, is_symbolic=True) for trained, evaluated in zip(*halves, strict=True)]


def _unused(model: nn.Module, num_inputs: int | None) -> dict[str, Any]:
    """Return the arguments of the forward that keep their defaults, with the defaults."""
    arguments = list(inspect.signature(model.forward).parameters.values())
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [argument for argument in arguments if argument.kind in kinds]
    if num_inputs is None:
        num_inputs = sum(argument.default is argument.empty for argument in positional)
    given = positional[:num_inputs]
    rest = [argument for argument in arguments if argument not in given]
    strange = [argument.name for argument in rest if type(argument.default) not in _PLAIN]
    if strange or len(given) < num_inputs:
        raise CannotTrace(f"it takes {', '.join(map(str, arguments))}")
    return {argument.name: argument.default for argument in rest}


@final
class _StageTracer(fx.Tracer):
    """A tracer that traces into a module only if a stage begins inside."""

    def __init__(self, points: Sequence[str]) -> None:
        super().__init__()
        self._points = points

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not any(point.startswith(f"{module_qualified_name}.") for point in self._points)


def _trace_and_split(model: nn.Module, points: Sequence[str], unused: dict[str, Any]) -> list[nn.Module]:
    known = set(model.__dict__) | set(model._buffers)
    try:
        graph = _StageTracer(points).trace(model, concrete_args=unused or None)
    except Exception as error:  # whatever the user's code raises when it is called with proxies
        raise CannotTrace(f"{type(error).__name__}: {error}") from error
    finally:
        made = [*(set(model.__dict__) | set(model._buffers)) - known]
        for name in made:
            delattr(model, name)
    if made:
        raise CannotTrace("it makes tensors of its own")
    _remove_unused_inputs(graph, unused)
    called = {node.target: node for node in reversed(graph.nodes) if node.op == "call_module"}
    missing = [point for point in points if point not in called]
    if missing:
        raise SettingError(
            f"split_points: the forward of {type(model).__name__} doesn't pass through {missing[0]!r}. It calls "
            f"{', '.join(map(str, reversed(called)))}."
        )
    starts = [called[point] for point in points]
    return split_graph(graph, starts, graph_attributes(graph, model))


def _remove_unused_inputs(graph: fx.Graph, unused: Iterable[str]) -> None:
    """Remove inputs left at their defaults, and the checks of these, from the graph."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    for node in inputs[len(inputs) - len(set(unused)) :]:  # they come last
        doomed = {node}
        for other in graph.nodes:
            if doomed.intersection(other.all_input_nodes):
                doomed.add(other)
        for other in [other for other in reversed(graph.nodes) if other in doomed]:
            graph.erase_node(other)


def graph_attributes(graph: fx.Graph, *owners: nn.Module) -> dict[str, Any]:
    """Return the modules, parameters and buffers that ``graph`` names, each from the first of ``owners`` with it."""
    found: dict[str, Any] = {}
    for node in graph.nodes:
        if node.op in ("call_module", "get_attr"):
            owner, _, leaf = str(node.target).rpartition(".")
            for owner_module in owners:
                try:
                    found[str(node.target)] = getattr(owner_module.get_submodule(owner), leaf)
                    break
                except AttributeError:
                    continue
    return found


def split_graph(graph: fx.Graph, starts: Sequence[fx.Node], named: dict[str, Any]) -> list[nn.Module]:
    """Split ``graph`` at ``starts`` into modules; each passes on all values for later ones.

    Args:
        named: the modules, parameters and buffers that the graph's nodes refer to.

    Raises:
        SettingError: a part would be empty, or the starts aren't in order.
    """
    nodes = list(graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    # Parameters and buffers are read where they are used, instead of being passed between stages.
    steps = [node for node in nodes if node.op not in ("placeholder", "output", "get_attr")]
    result = nodes[-1].args[0]
    used_at_last: list[fx.Node] = []
    fx.map_arg(result, used_at_last.append)
    edges = [0, *(steps.index(start) for start in starts), len(steps)]
    if any(start >= stop for start, stop in pairwise(edges)):
        raise SettingError(
            "split_points: a forward has to pass through each of the named modules, in this order, and has to compute "
            "something before the first of them."
        )
    made: list[nn.Module] = []
    takes = inputs
    for start, stop in pairwise(edges):
        part = fx.Graph()
        here: dict[fx.Node, fx.Node] = {node: part.placeholder(node.name) for node in takes}

        def local(node: fx.Node, part: fx.Graph = part, here: dict[fx.Node, fx.Node] = here) -> fx.Node:
            if node not in here:
                here[node] = part.node_copy(node)
            return here[node]

        for node in steps[start:stop]:
            here[node] = part.node_copy(node, local)
        later = {used for node in steps[stop:] for used in node.all_input_nodes} | set(used_at_last)
        takes = [node for node in here if node in later and node.op != "get_attr"]
        is_last = stop == len(steps)
        part.output(fx.map_arg(result, local) if is_last else tuple(here[node] for node in takes))
        made.append(fx.GraphModule(named, part))
    return made
