"""Private names of torch to trace and to simulate: pytrees, dispatch modes, fake tensors, operators, fake groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, final

import torch
import torch.distributed as dist
from torch._ops import OpOverload as Operator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from .names import declare, uses

__all__ = [
    "TorchDispatchMode", "TreeSpec", "tree_flatten", "tree_leaves", "tree_map", "tree_unflatten",
    "attention_on_cpu", "attention_on_cpu_backward", "fake_tensor_class", "fake_tensor_mode", "grouped_mm_operator",
    "storage_key", "is_tracing_guard", "vector_instructions", "data_dependent_errors",
    "Chunks", "Operator", "fake_backend", "group_of_collective", "inner_tensors", "is_number_read", "local_part",
    "operator_name", "replicated_module", "returns_tensor", "returns_work_only", "sharded_module", "work_done",
]  # fmt: skip

_TREES = "torch.utils._pytree"
declare(
    __name__,
    "torch.utils._python_dispatch:TorchDispatchMode",
    f"{_TREES}:TreeSpec",
    (f"{_TREES}:tree_flatten", "tree, is_leaf"),
    (f"{_TREES}:tree_leaves", "tree, is_leaf"),
    (f"{_TREES}:tree_unflatten", "leaves, treespec"),
    f"{_TREES}:tree_map",
    "torch._ops:OpOverload",
)


@uses("torch.storage:._cdata")
def storage_key(storage: torch.UntypedStorage) -> int:
    """Return a number shared by all tensors over the same storage, even without an address."""
    return storage._cdata


@uses(("torch._subclasses.fake_tensor:FakeTensorMode.__init__", "self, allow_fallback_kernels, allow_non_fake_inputs"))
def fake_tensor_mode() -> AbstractContextManager[object]:
    """Enter a context in which operations return fake tensors, also for real ones."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


@uses("torch._subclasses.fake_tensor:FakeTensor")
def fake_tensor_class() -> type[torch.Tensor]:
    """Return the class of fake tensors."""
    from torch._subclasses.fake_tensor import FakeTensor

    return FakeTensor


@uses("torch.cpu:_is_avx2_supported", "torch.cpu:_is_avx512_supported")
def vector_instructions() -> str:
    """Return this processor's widest vector instructions that select kernels: AVX512, AVX2, or "" for neither."""
    return "AVX512" if torch.cpu._is_avx512_supported() else "AVX2" if torch.cpu._is_avx2_supported() else ""


@uses(
    "torch._subclasses.fake_tensor:DataDependentOutputException",
    "torch._subclasses.fake_tensor:DynamicOutputShapeException",
    "torch._subclasses.fake_tensor:UnsupportedOperatorException",
)
def data_dependent_errors() -> tuple[type[Exception], ...]:
    """Return the errors raised by operations that can't run on fake tensors."""
    from torch._subclasses import fake_tensor as fake

    return (fake.DataDependentOutputException, fake.DynamicOutputShapeException, fake.UnsupportedOperatorException)


@uses("torch.ops.aten:_assert_tensor_metadata")
def is_tracing_guard(target: object) -> bool:
    """Return whether a node of a traced graph only compares its inputs with the traced ones."""
    return target is torch.ops.aten._assert_tensor_metadata.default or target == "_guards_fn"


@uses(("torch.ops.aten:_grouped_mm", None, None, "2.8"))
def grouped_mm_operator() -> object:
    """Return the operator that multiplies groups of rows, each by its own matrix; None before torch 2.8."""
    return getattr(getattr(torch.ops.aten, "_grouped_mm", None), "default", None)


@uses(
    (
        "torch.ops.aten:_scaled_dot_product_flash_attention_for_cpu",
        "query, key, value, dropout_p, is_causal, attn_mask, scale",
    )
)
def attention_on_cpu(*arguments: torch.Tensor | float | bool, scale: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention without dropout over one block of keys and values, and the log-sum-exp of its weights."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*arguments, scale=scale)


@uses(
    (
        "torch.ops.aten:_scaled_dot_product_flash_attention_for_cpu_backward",
        "grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, attn_mask, scale",
    )
)
def attention_on_cpu_backward(
    *arguments: torch.Tensor | float | bool, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of query, keys and values."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*arguments, scale=scale)


# --------------------------------------------------------------------------------------------------
# One rank of a job, simulated: groups without communication, and their work objects


@uses("torch.testing._internal.distributed.fake_pg:FakeProcessGroup")
def fake_backend() -> str:
    """Return the name of the backend without communication, which is part of torch's tests."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers)

    return "fake"


# -- operators ---------------------------------------------------------------------------------------------


def operator_name(func: Operator) -> str:
    """Return an operator's name without its namespace."""
    return func.name().partition("::")[2].partition(".")[0]


@uses("torch._ops:._schema")
def returns_tensor(func: Operator) -> bool:
    """Return whether the operator's only result is a tensor."""
    returns = func._schema.returns
    return len(returns) == 1 and str(returns[0].type) == "Tensor"


@uses("torch._ops:._schema")
def returns_work_only(func: Operator) -> bool:
    """Return whether a collective's operator returns its work without its tensors."""
    return len(func._schema.returns) == 1


@uses("torch.ops.aten:_local_scalar_dense")
def is_number_read(func: Operator) -> bool:
    """Return whether the operator reads a tensor's value as a Python number."""
    return func is torch.ops.aten._local_scalar_dense.default


@uses("torch.distributed.distributed_c10d:_resolve_process_group")
def group_of_collective(args: Iterable[object]) -> dist.ProcessGroup | None:
    """Return the group in the arguments of a collective's operator: the group itself, or its name."""
    name: str | None = None
    for arg in args:
        if isinstance(arg, torch.ScriptObject):  # before the reduction, which is one too
            return dist.ProcessGroup.unbox(arg)
        name = arg if isinstance(arg, str) else name
    resolve: Any = dist.distributed_c10d._resolve_process_group  # pyright: ignore[reportPrivateImportUsage]
    return None if name is None else resolve(name)


@uses(("torch.testing._internal.distributed.multi_threaded_pg:ret_work", "ret"))
def work_done() -> object:
    """Return a completed work object of a collective, as operators return it."""
    from torch.testing._internal.distributed.multi_threaded_pg import ret_work

    return ret_work(None).boxed()


# -- shards and replicas -----------------------------------------------------------------------------------


@uses("torch.distributed.tensor._api:._local_tensor")
def local_part(tensor: object) -> object:
    """Return this rank's part of a DTensor; any other object is returned unchanged."""
    return getattr(tensor, "_local_tensor", tensor)


def inner_tensors(value: object) -> list[object]:
    """Return the inner tensors of a tensor subclass, as in torchao's low-bit ones; else ``value`` alone."""
    flatten: Any = getattr(value, "__tensor_flatten__", None)
    return [value] if flatten is None else [getattr(value, name) for name in flatten()[0]]


@uses(("torch.nn.parallel.distributed:_verify_param_shape_across_processes", "process_group, tensors, logger"))
def replicated_module() -> ModuleType:
    """Return the module in which DistributedDataParallel compares the parameters of all ranks."""
    import torch.nn.parallel.distributed as module

    return module


@uses(("torch.distributed.fsdp._fully_shard._fsdp_param:_chunk_with_empty", "tensor, num_chunks, dim"))
def sharded_module() -> ModuleType:
    """Return the FSDP module that creates the shards of all ranks to take one."""
    import torch.distributed.fsdp._fully_shard._fsdp_param as module

    return module


@final
class Chunks(Sequence[torch.Tensor]):
    """The shards of a tensor over many ranks, each created on access; ranks past the end have an empty one."""

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._num_chunks, self._dim = tensor, num_chunks, dim
        self._length = -(-tensor.size(dim) // num_chunks)

    def __len__(self) -> int:
        return self._num_chunks

    def __getitem__(self, rank: int) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        size = self._tensor.size(self._dim)
        start = rank * self._length
        if start >= size:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(self._length, size - start))
