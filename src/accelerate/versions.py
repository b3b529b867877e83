"""Version comparisons of installed packages, of torch, and of the operating system's kernel."""

from __future__ import annotations

import logging
import operator
import platform
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Final

from .errors import MissingDependency, SettingError

if TYPE_CHECKING:
    from packaging.version import Version

XPU_PROFILING_AVAILABLE_PYTORCH_VERSION: Final = "2.4.0"
MITA_PROFILING_AVAILABLE_PYTORCH_VERSION: Final = "2.1.0"
FSDP_PYTORCH_VERSION: Final = "2.1.0"
FSDP2_PYTORCH_VERSION: Final = "2.6.0"
BETA_TP_AVAILABLE_PYTORCH_VERSION: Final = "2.3.0"
BETA_TP_AVAILABLE_TRANSFORMERS_VERSION: Final = "4.52.0"
BETA_CP_AVAILABLE_PYTORCH_VERSION: Final = "2.6.0"
BETA_SP_AVAILABLE_DEEPSPEED_VERSION: Final = "0.18.2"

OLDEST_GOOD_LINUX_KERNEL: Final = "5.5.0"

_COMPARISONS: Final[dict[str, Callable[[Version, Version], bool]]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}


def compare_versions(library_or_version: str | Version, operation: str, requirement_version: str) -> bool:
    """Return whether a version, or an installed library's, compares to the required one as ``operation`` says.

    The local part of a version (``+cpu``, ``+cu126``) is ignored: ``2.6.0+cpu`` equals ``2.6.0``.

    Raises:
        SettingError: ``operation`` isn't one of ``> >= == != <= <``.
        MissingDependency: the named library isn't installed.
    """
    from packaging.version import Version

    if operation not in _COMPARISONS:
        raise SettingError(f"The comparison {operation!r} is unknown; use one of {', '.join(_COMPARISONS)}.")
    version = _version_of(library_or_version) if isinstance(library_or_version, str) else library_or_version
    return _COMPARISONS[operation](Version(version.public), Version(requirement_version))


def is_torch_version(operation: str, version: str) -> bool:
    """Return whether the installed torch compares to ``version`` as ``operation`` says; torch isn't imported."""
    return compare_versions("torch", operation, version)


@cache
def _version_of(library: str) -> Version:
    import importlib.metadata

    from packaging.version import Version

    try:
        return Version(importlib.metadata.version(library))
    except importlib.metadata.PackageNotFoundError as error:
        raise MissingDependency(
            f"The version of {library!r} was asked for, but no such package is installed. "
            f"Install it with: pip install {library}"
        ) from error


def check_os_kernel() -> None:
    """Log a warning if the Linux kernel is so old that multi-process training can hang."""
    if platform.system() != "Linux":
        return
    # "5.4.0-150-generic" -> "5.4.0"; vendors write all kinds of suffixes after the numbers.
    numbers = platform.release().split("-")[0].split("+")[0]
    parts = numbers.split(".")[:3]
    if not all(part.isdigit() for part in parts):
        return
    oldest = [int(part) for part in OLDEST_GOOD_LINUX_KERNEL.split(".")]
    if [int(part) for part in parts] < oldest:
        logging.getLogger(__name__).warning(
            "This Linux kernel is %s; below %s training processes are known to hang. Upgrade the kernel.",
            numbers,
            OLDEST_GOOD_LINUX_KERNEL,
        )
