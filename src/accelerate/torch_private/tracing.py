"""Private names of torch's tracing: pytrees, dispatch modes, fake tensors, operators."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from .names import declare, uses

__all__ = [
    "TorchDispatchMode", "TreeSpec", "tree_flatten", "tree_leaves", "tree_map", "tree_unflatten",
    "attention_on_cpu", "attention_on_cpu_backward", "fake_tensor_class", "fake_tensor_mode", "grouped_mm_operator",
    "storage_key", "is_tracing_guard", "vector_instructions", "data_dependent_errors",
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

    return (
        fake.DataDependentOutputException,
        fake.DynamicOutputShapeException,
        fake.UnsupportedOperatorException,
    )


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
