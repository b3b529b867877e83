"""A forward followed symbolically and cut between its modules, which stay the user's own.

Only the code around the modules is followed, so what is inside them (branches, dropout, hooks, layers in pieces) works
as ever, and batches may have any shape. Forwards that look at values can't be followed; ``stages.traced`` takes those.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, final

from torch import fx, nn

from ..errors import SettingError

#: What an argument that nobody gives may be by default.
_PLAIN = (type(None), bool, int, float, str)


@final
class Stage(nn.Module):
    """A part of a model: what it computes while ``model`` trains, and while it doesn't.

    Args:
        is_followed: it calls the model's own modules, instead of what a trace has made of them.
    """

    def __init__(
        self, model: nn.Module, trained: nn.Module, evaluated: nn.Module, *, is_followed: bool = False
    ) -> None:
        super().__init__()
        self.is_followed = is_followed
        self.trained, self.evaluated = trained, evaluated
        self.__dict__["_model"] = model  # not a child: the other stages are in it too

    def forward(self, *values: Any) -> Any:
        """The values for the next stage; the model's output, from the last one."""
        return (self.trained if self.__dict__["_model"].training else self.evaluated)(*values)


class CannotFollow(Exception):
    """Why a forward can't be followed."""


def follow(model: nn.Module, points: Sequence[str], num_inputs: int | None = None) -> list[Stage]:
    """``model`` as stages; the second and later begin where the modules called ``points`` are called.

    Args:
        num_inputs: how many positional inputs there will be; by default those that the forward can't do without.

    Raises:
        CannotFollow: this forward isn't of the kind that can be followed.
        SettingError: the forward doesn't pass through ``points`` in this order.
    """
    if "forward" in model.__dict__:
        raise CannotFollow("its forward was replaced on the object")
    unused = _unused(model, num_inputs)
    was_training = model.training
    halves: list[list[nn.Module]] = []
    try:
        for mode in (True, False):
            model.train(mode)  # what the code around the modules asks for; the modules themselves aren't run
            halves.append(_cut(model, points, unused))
    finally:
        model.train(was_training)
    return [Stage(model, trained, evaluated, is_followed=True) for trained, evaluated in zip(*halves, strict=True)]


def _unused(model: nn.Module, num_inputs: int | None) -> dict[str, Any]:
    """The arguments of the forward that keep their defaults."""
    arguments = list(inspect.signature(model.forward).parameters.values())
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [argument for argument in arguments if argument.kind in kinds]
    if num_inputs is None:
        num_inputs = sum(argument.default is argument.empty for argument in positional)
    given = positional[:num_inputs]
    rest = [argument for argument in arguments if argument not in given]
    strange = [argument.name for argument in rest if type(argument.default) not in _PLAIN]
    if strange or len(given) < num_inputs:
        raise CannotFollow(f"it takes {', '.join(map(str, arguments))}")
    return {argument.name: argument.default for argument in rest}


@final
class _Outline(fx.Tracer):
    """Looks into no module but those that a stage begins inside of."""

    def __init__(self, points: Sequence[str]) -> None:
        super().__init__()
        self._points = points

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not any(point.startswith(f"{module_qualified_name}.") for point in self._points)


def _cut(model: nn.Module, points: Sequence[str], unused: dict[str, Any]) -> list[nn.Module]:
    known = set(model.__dict__) | set(model._buffers)
    try:
        graph = _Outline(points).trace(model, concrete_args=unused or None)
    except Exception as error:  # whatever the user's code says to stand-ins for tensors
        raise CannotFollow(f"{type(error).__name__}: {error}") from error
    finally:
        made = [*(set(model.__dict__) | set(model._buffers)) - known]
        for name in made:
            delattr(model, name)
    if made:
        raise CannotFollow("it makes tensors of its own")
    _forget(graph, unused)
    called = {node.target: node for node in reversed(graph.nodes) if node.op == "call_module"}
    missing = [point for point in points if point not in called]
    if missing:
        raise SettingError(
            f"split_points: the forward of {type(model).__name__} doesn't pass through {missing[0]!r}. It calls "
            f"{', '.join(map(str, reversed(called)))}."
        )
    starts = [called[point] for point in points]
    return segments(graph, starts, attributes(graph, model))


def _forget(graph: fx.Graph, unused: Iterable[str]) -> None:
    """The graph has no inputs that keep their defaults, and doesn't check that they do."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    for node in inputs[len(inputs) - len(set(unused)) :]:  # they come last
        doomed = {node}
        for other in graph.nodes:
            if doomed.intersection(other.all_input_nodes):
                doomed.add(other)
        for other in [other for other in reversed(graph.nodes) if other in doomed]:
            graph.erase_node(other)


def attributes(graph: fx.Graph, *homes: nn.Module) -> dict[str, Any]:
    """What ``graph`` names: modules, parameters and buffers, each from the first of ``homes`` that has it."""
    found: dict[str, Any] = {}
    for node in graph.nodes:
        if node.op in ("call_module", "get_attr"):
            owner, _, leaf = str(node.target).rpartition(".")
            for home in homes:
                try:
                    found[str(node.target)] = getattr(home.get_submodule(owner), leaf)
                    break
                except AttributeError:
                    continue
    return found


def segments(graph: fx.Graph, starts: Sequence[fx.Node], named: dict[str, Any]) -> list[nn.Module]:
    """``graph`` in parts, the second and later of which begin at ``starts``; each hands on all that later ones use.

    Args:
        named: what the graph's nodes name.

    Raises:
        SettingError: a part would be empty, or the starts aren't in order.
    """
    nodes = list(graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    # What lies in the model is taken where it is used, instead of being handed on.
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
