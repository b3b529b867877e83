"""The facts of a launch: its command and code, packages, variables, machine, seeds and data.

The code is the files of its script and of local modules, with their hashes and copies.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from ...distributed.random import capture_host_streams
from ...settings import env
from ...settings.option import options_of
from ...settings.tree import GROUPS, Settings, encode_settings
from .chain import hash_of
from .masking import MASK, masked, masked_arguments, secret_line

if TYPE_CHECKING:
    from ...accelerator import Accelerator

_GIT_SECONDS: Final = 10
#: Files that arguments name are hashed up to this size; of larger ones, the size is recorded.
_MAX_INPUT_BYTES: Final = 100_000_000
_LIBRARY_PARTS: Final = frozenset({"site-packages", "dist-packages"})


def command() -> dict[str, Any]:
    """Return how this process was started: words after ``python``, the folder, and whether a command can repeat it."""
    main: Any = sys.modules["__main__"]
    spec, script = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        words = ["-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]]
    else:
        words = [os.path.abspath(script) if script else "", *sys.argv[1:]]
    is_notebook = "ipykernel" in sys.modules
    return {
        "words": masked_arguments(words) if script and not is_notebook else [],
        "folder": os.getcwd(),
        "started_in": "a notebook" if is_notebook else "a script" if script else "an interactive session",
    }


def code() -> tuple[dict[str, Any], dict[str, str]]:
    """Return the files of the script and of local modules with hashes, and the commit; and the texts to keep, by hash.

    Files that aren't in a commit are to be kept, except one that seems to hold a secret.
    """
    texts: dict[str, str] = {}
    found: dict[str, Any] = {"files": {}, "copies": [], "without_copy": {}}
    contents = {str(path): path.read_bytes() for path in _files()}
    if (cells := _cells()) is not None:
        contents["notebook cells"] = cells.encode()
    root, commit = _commit(contents)
    changed = set(contents)
    if root is not None:
        own = [name for name in contents if Path(name).is_relative_to(root)]
        changed -= set(own)
        for listed in (("diff", "--name-only", "-z", "HEAD"), ("ls-files", "--others", "-z")) if own else ():
            changed |= {str(root / name) for name in (_git(root, *listed, "--", *own) or "").split("\0") if name}
        found["commit"] = commit
        diff = _git(root, "diff", "HEAD", "--", *own) if own else ""
        if diff:
            contents["uncommitted changes"] = diff.encode()
            changed.add("uncommitted changes")
    for name, data in sorted(contents.items()):
        found["files"][name] = hash_of(data)
        if name in changed:
            text = data.decode(errors="surrogateescape")  # the bytes can be made again
            line = secret_line(text)
            if line is None:
                found["copies"].append(name)
                texts[hash_of(data)] = text
            else:
                found["without_copy"][name] = f"line {line} seems to hold a secret"
    return found, texts


def inputs(words: Iterable[str]) -> dict[str, str]:
    """Return the files that arguments name, each with its hash, or with its size if it is large."""
    found: dict[str, str] = {}
    for word in words:
        path = Path(word.partition("=")[2] if word.startswith("-") else word)
        try:
            if path.name and path.is_file() and masked(str(path)) == str(path):
                size = path.stat().st_size
                found[str(path.resolve())] = hash_of(path.read_bytes()) if size <= _MAX_INPUT_BYTES else f"{size} bytes"
        except (OSError, ValueError):  # an argument that is no path
            continue
    return found


def _files() -> list[Path]:
    """Return the Python files of the script and of modules that are neither of a library nor of this package."""
    places = (*sysconfig.get_paths().values(), Path(__file__).parents[2])
    others = tuple({os.path.join(form, "") for place in places for form in (str(place), os.path.realpath(place))})
    names = {getattr(module, "__dict__", {}).get("__file__") for module in list(sys.modules.values())}
    own = {name for name in names if isinstance(name, str) and name.endswith(".py") and not name.startswith(others)}
    found = {Path(name).resolve() for name in own if not _LIBRARY_PARTS & set(Path(name).parts)}
    return sorted(path for path in found if path.is_file() and not str(path).startswith(others))


def _cells() -> str | None:
    """Return the cells that a notebook has run; None outside of one."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", None)  # not while another thread imports it
    kernel = None if shell is None else shell()
    return None if kernel is None else "\n\n".join(map(str, kernel.user_ns.get("In", ())))


def _commit(contents: Iterable[str]) -> tuple[Path | None, str]:
    """Return the root and the commit of the work tree with the script, or else with the current folder."""
    script: Any = getattr(sys.modules["__main__"], "__file__", None)
    if script and str(Path(script).resolve()) not in contents:
        return None, ""  # a program of a library
    folder = Path(script).resolve().parent if script else Path.cwd()
    answer = _git(folder, "rev-parse", "--show-toplevel", "HEAD")
    if answer is None:
        return None, ""
    root, commit = answer.splitlines()
    return Path(root).resolve(), commit


def _git(folder: Path, *words: str) -> str | None:
    """Return what git prints; None if there is no git, or no commit."""
    try:
        ended = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(folder), *words],
            capture_output=True, text=True, errors="replace", timeout=_GIT_SECONDS, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ended.stdout if ended.returncode == 0 else None


def script_of(words: Sequence[str]) -> Path | None:
    """Return the script of a recorded command; None for a module or a notebook."""
    return Path(words[0]) if words and words[0] not in ("", "-m") else None


# --------------------------------------------------------------------------------------------------
# Packages, variables, machine, seeds and data

#: Variables of others that change results, by their beginning.
_PREFIXES: Final = (
    "OMP_", "MKL_", "KMP_", "OPENBLAS_", "BLIS_", "VECLIB_", "NUMEXPR_", "DNNL_", "ONEDNN_", "ATEN_CPU_CAPABILITY",
    "PYTHONHASHSEED", "CUDA_", "CUBLAS_", "CUDNN_", "NVIDIA_TF32_OVERRIDE", "HIP_", "ROCR_", "ZE_", "XLA_", "NCCL_",
    "TORCH_", "TORCHINDUCTOR_", "PYTORCH_",
)  # fmt: skip


def variables() -> dict[str, str]:
    """Return the variables that matter, except defaults: those of the settings, and those by which others compute."""
    options = [option for group in GROUPS.values() for option in options_of(group)]
    secret = {name for option in options if option.secret for name in option.env}
    own = {name for option in options for name in option.env} - secret
    found = {
        name: masked(value, name)
        for name, value in sorted(env.snapshot().items())
        if name in own or (name.startswith(_PREFIXES) and name not in secret and not name.endswith("_CACHE_DIR"))
    }
    defaults = encode_settings(Settings())  # a launcher sets them too
    return {name: value for name, value in found.items() if MASK not in value and defaults.get(name) != value}


def packages() -> dict[str, str]:
    """Return the installed packages with their versions, and Python, by the names of their folders."""
    found: dict[str, str] = {}
    for folder in filter(os.path.isdir, sys.path):
        for entry in os.listdir(folder):
            stem, kind = os.path.splitext(entry)
            if kind in (".dist-info", ".egg-info"):
                name, _, version = stem.partition("-")
                found.setdefault(name, version.partition("-")[0])
    return {"python": platform.python_version()} | {name: found[name] for name in sorted(found)}


def machine(run: Accelerator) -> dict[str, Any]:
    """Return the machine's properties on which the bits of a result may depend."""
    kind, world = run.world.kind, run.world
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "device": f"{run.device.type} {kind.device_name(run.device.index or 0)}".strip(),
        "ranks_per_host": world.local_size,
    }


def _processor() -> str:
    try:
        lines = Path("/proc", "cpuinfo").read_text(errors="replace").splitlines()  # its name; `cores` counts them
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):  # another system, or another architecture
        return platform.processor()


def switches() -> dict[str, Any]:
    """Return torch's own switches that choose between computations."""
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "benchmark": torch.backends.cudnn.benchmark,
        "default_dtype": str(torch.get_default_dtype()),
    }


def seeds() -> dict[str, str]:
    """Return torch's seed, and a hash of the state of each random stream of the host."""

    def plain(value: object) -> object:
        return value.tolist() if isinstance(value, torch.Tensor) else repr(value)

    states = capture_host_streams()
    hashes = {
        name: hashlib.sha256(json.dumps(state, default=plain).encode()).hexdigest()[:16]
        for name, state in states.items()
    }
    return {"torch_seed": str(torch.initial_seed()), **hashes}


def data(run: Accelerator) -> list[dict[str, Any]]:
    """Return the type and sizes of the data of each prepared loader."""
    return [
        {
            "dataset": type(getattr(loader, "dataset", loader)).__qualname__,
            "samples": _number(loader, "total_dataset_length"),
            "global_batch": _number(loader, "total_batch_size"),
        }
        for loader in run._dataloaders
    ]


def _number(loader: object, name: str) -> int | None:
    try:
        return int(getattr(loader, name))
    except (TypeError, ValueError, AttributeError, NotImplementedError):  # a dataset without a length
        return None
