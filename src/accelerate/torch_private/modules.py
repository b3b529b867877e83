"""Of torch.nn: what a module saves of itself, and what torch.compile puts around it.

Its three tables ``_parameters``, ``_buffers`` and ``_modules`` are used in place by every file that has to exchange
an entry: torch's pickles and state dicts rest on them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import nn

from .names import declare, uses

_MODULE = "torch.nn.modules.module"
declare(__name__, f"{_MODULE}:._parameters", f"{_MODULE}:._buffers", f"{_MODULE}:._modules")


@uses(f"{_MODULE}:._non_persistent_buffers_set")
def non_persistent_buffers(module: nn.Module) -> set[str]:
    """The names of the module's own buffers that no state dict holds."""
    return set(module._non_persistent_buffers_set)


@uses((f"{_MODULE}:Module._save_to_state_dict", "self, destination, prefix, keep_vars"))
def save_own(module: nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Put what ``module`` itself, without its parts, saves into ``state``."""
    module._save_to_state_dict(state, prefix, keep_vars=False)


@uses(f"{_MODULE}:_IncompatibleKeys")
def loaded(missing: Sequence[str], unexpected: Sequence[str]) -> Any:
    """What ``load_state_dict`` returns."""
    return nn.modules.module._IncompatibleKeys(list(missing), list(unexpected))


@uses("torch._dynamo.eval_frame:OptimizedModule")
def is_compiled(module: object) -> bool:
    """Whether ``module`` is what torch.compile returned."""
    compiler: Any = sys.modules.get("torch._dynamo.eval_frame")  # costly to import; not there: nothing is compiled
    return compiler is not None and isinstance(module, compiler.OptimizedModule)


@uses("torch._dynamo.eval_frame:._orig_mod")
def original_of(compiled: Any) -> Any:
    """The module that torch.compile was given."""
    return compiled._orig_mod


@uses("torch._dynamo.eval_frame:._orig_mod", "torch._dynamo.eval_frame:.dynamo_ctx")
def compiled_alike(compiled: Any, module: nn.Module) -> Any:
    """``module`` compiled as ``compiled`` was."""
    return type(compiled)(module, compiled.dynamo_ctx)


@uses(f"{_MODULE}:._compiled_call_impl")
def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called."""
    return module._compiled_call_impl is not None
