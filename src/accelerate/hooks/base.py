"""The base class of hooks, and the code that puts a hook around a module's forward. Internal."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from ..devices.table import CPU, KINDS

M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")
P = ParamSpec("P")

#: Methods that dispatched models have in a guarded version; removing the hooks restores them.
_accelerate_added_attributes = ["to", *(kind.name for kind in KINDS if kind.select and kind is not CPU)]


class ModelHook:
    """A hook around the forward of a module that does nothing by itself; subclasses override its methods."""

    #: The forward, not the hook itself, runs without gradients.
    no_grad = False
    #: torch.compile may trace into the hook's methods; else it compiles only the forward between them.
    runs_compiled = True

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Prepare the module when the hook is added; return the module to use instead."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments for the forward."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Return the output for the caller of the module."""
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Undo the hook's changes to the module when it is removed."""
        return module


class SequentialHook(ModelHook):
    """Several hooks as one, called in the given order."""

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks
        self.runs_compiled: bool = all(getattr(hook, "runs_compiled", True) for hook in hooks)

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Call ``init_hook`` of all hooks."""
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(
        self, module: nn.Module, *args: object, **kwargs: object
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """Return the arguments after the ``pre_forward`` of all hooks."""
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: object) -> object:
        """Return the output after the ``post_forward`` of all hooks."""
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Call ``detach_hook`` of all hooks."""
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def hooked_forward(module: Any, *args: object, **kwargs: object) -> object:
    """Run the module's own forward between the ``pre_forward`` and ``post_forward`` of its hook."""
    # Both are looked up on the module, so that a copy of the module has its own, and a library may replace them.
    hook = module._hf_hook
    before, after = hook.pre_forward, hook.post_forward
    if is_dynamo_compiling() and not getattr(hook, "runs_compiled", True):  # compile only the forward between them
        if _call_outside is None:
            _load_compiler()
        before, after = functools.partial(_call_outside, before), functools.partial(_call_outside, after)
    args, kwargs = before(module, *args, **kwargs)
    if getattr(hook, "no_grad", False):
        with torch.no_grad():
            output = module._old_forward(*args, **kwargs)
    else:
        output = module._old_forward(*args, **kwargs)
    return after(module, output)


def _call(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    return function(*args, **kwargs)


#: `_call`, hidden from torch.compile; set once a compiler is in use.
_call_outside: Callable[..., Any] = None  # pyright: ignore[reportAssignmentType]


def _load_compiler() -> None:
    # Import it only once a compiler is in use, because that takes longer than importing the rest of this package.
    global _call_outside
    _call_outside = torch.compiler.disable(_call)


# The compiler calls this one without tracing into it; the decorator for that would import the compiler.
_load_compiler._torchdynamo_disable = True  # pyright: ignore[reportFunctionMemberAccess]
_load_compiler._torchdynamo_disable_msg = "loads the compiler"  # pyright: ignore[reportFunctionMemberAccess]


def add_hook_to_module(module: M, hook: Any, append: bool = False) -> M:
    """Run the module's forward inside ``hook``; with ``append``, inside the module's existing hook.

    A hook is any object with the four methods of :class:`ModelHook`. Without ``append``, an existing hook is replaced,
    but its changes to the module aren't undone.
    """
    before: Any = module.__dict__.get("_hf_hook")
    if append and before is not None:
        remove_hook_from_module(module)
        hook = SequentialHook(before, hook)
    old_forward = module.__dict__.get("_old_forward", module.forward)
    module._old_forward = old_forward
    module = hook.init_hook(module)
    module._hf_hook = hook
    _set_forward(module, functools.update_wrapper(functools.partial(hooked_forward, module), old_forward))
    return module


def _set_forward(module: nn.Module, forward: Callable[..., object]) -> None:
    if isinstance(module, torch.fx.GraphModule):
        # A traced module has a class of its own, and takes its forward from there; it is bound already, and Python 3.14
        # would bind a partial again.
        type(module).forward = staticmethod(forward)
    else:
        module.forward = forward


def remove_hook_from_module(module: M, recurse: bool = False) -> M:
    """Remove the module's hook and restore its own forward; with ``recurse``, in all submodules too."""
    hook: Any = module.__dict__.get("_hf_hook")
    if hook is not None:
        module = hook.detach_hook(module)
        del module._hf_hook
    if "_old_forward" in module.__dict__:
        _restore_forward(module)
    for name in _accelerate_added_attributes:
        module.__dict__.pop(name, None)
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse=True)
    return module


def _restore_forward(module: Any) -> None:
    old = module._old_forward
    del module._old_forward
    if isinstance(module, torch.fx.GraphModule):
        type(module).forward = getattr(old, "__func__", old)
        return
    module.__dict__.pop("forward", None)
    if module.forward != old:  # the module had a forward of its own before the hook
        module.forward = old


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Remove the hooks of the module and all its submodules."""
    remove_hook_from_module(module, recurse=True)
