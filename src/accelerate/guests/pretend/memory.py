"""The memory of a simulated rank during its steps: weights, gradients, optimizer state and activations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, final

import torch

from ...devices.allocations import AllocationTracker
from ...torch_private.pretended import inner_tensors, local_part
from ...torch_private.tracing import tree_leaves
from .replacing import replaced

if TYPE_CHECKING:
    from ...torch_private.pretended import Operator


@final
class MemoryRecord:
    """The live bytes of tensors without values, and their peak."""

    def __init__(self) -> None:
        self.tracker: AllocationTracker = AllocationTracker(torch.device("cpu"))
        self.tracker.on_growth = self._note_peak
        #: The peak of each kind since the last `prepare`, independently of the others.
        self.peak_activations: int = 0
        self.peak_gathered: int = 0
        self.peak_total: int = 0
        #: The peak of all kinds together until then.
        self.peak_of_preparation: int = 0

    def prepared(self) -> None:
        """Start to record the steps; memory allocated before the end of `prepare` is counted separately."""
        self.peak_of_preparation = max(self.peak_of_preparation, self.peak_total)
        self.peak_activations = self.peak_gathered = self.peak_total = 0

    def made(self, func: Operator, args: object, kwargs: dict[str, object], result: object) -> None:
        """Count the result of an operation; FSDP's own operations gather weights and copy gradients."""
        if func.namespace == "fsdp":
            self.tracker.count(tree_leaves([args, kwargs.get("out"), result]), "gathered")
            self._note_peak()
        elif self.tracker.count(tree_leaves(result)):
            self._note_peak()

    def gradients(self, tensors: Iterable[object]) -> None:
        """Count these tensors as gradients."""
        self.tracker.count(tensors, "gradients")

    def gathered(self, tensors: Iterable[object]) -> None:
        """Count these tensors as gathered weights and buffers of collectives."""
        self.tracker.count(tensors, "gathered")

    def _note_peak(self) -> None:
        found = self.tracker.num_bytes
        self.peak_activations = max(self.peak_activations, found["other"])
        self.peak_gathered = max(self.peak_gathered, found["gathered"])
        self.peak_total = max(self.peak_total, sum(found.values()))

    def count_model(self, model: torch.nn.Module) -> None:
        """Count the model's own tensors as weights and buffers."""
        self.tracker.count(map(local_part, model.parameters()), "weights")
        self.tracker.count(map(local_part, model.buffers()), "buffers")

    def count_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the optimizer's state and the gradients that it used."""
        state = map(local_part, tree_leaves(list(optimizer.state.values())))
        self.tracker.count((part for value in state for part in inner_tensors(value)), "optimizer")
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.gradients(local_part(each.grad) for each in parameters if each.grad is not None)

    @contextmanager
    def following_storages(self) -> Iterator[None]:
        """Enter a context in which a storage is counted again when it is resized, as FSDP does."""
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, num_bytes: int) -> object:
            result = resize(storage, num_bytes)
            self.tracker.resized(storage)
            self._note_peak()
            return result

        with replaced(torch.UntypedStorage, "resize_", resize_):
            yield


def num_bytes_of(tensors: Iterable[object]) -> int:
    """Return the bytes of this rank's parts of the tensors; each tensor counts once."""
    parts = {id(part): part for part in map(local_part, tensors) if isinstance(part, torch.Tensor)}
    return sum(part.numel() * part.element_size() for part in parts.values())
