"""Build the extension once per machine and version of torch, with the compiler of the system."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import torch
from torch.utils.cpp_extension import include_paths

SOURCES = Path(__file__).parent
UNITS = ("streams", "memory", "operators", "collectives")


def why_not() -> str | None:
    """Return why the extension can't be built here, or None."""
    if os.name != "posix" or not hasattr(os, "fork"):
        return "the imitated accelerator needs POSIX"
    if compiler() is None:
        return "no C++ compiler (g++ or clang++)"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "Python's headers aren't installed"
    return None


def compiler() -> str | None:
    """Return the C++ compiler: that of CXX, or the first that is installed."""
    return next(
        (found for name in (os.environ.get("CXX"), "g++", "clang++") if name and (found := shutil.which(name))), None
    )


def library() -> Path:
    """Return the built extension, building it where it isn't there for these sources and this torch."""
    texts = b"".join(file.read_bytes() for file in sorted(SOURCES.glob("*.[ch]*")))
    identity = f"{torch.__version__} {sysconfig.get_config_var('EXT_SUFFIX')} {sysconfig.get_paths()['include']}"
    key = hashlib.sha256(texts + identity.encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "accelerate-sim"
    cache.mkdir(parents=True, exist_ok=True)
    target = cache / key / "_sim.so"
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test processes ask at once
        if not target.exists():
            _build(target)
    return target


def _build(target: Path) -> None:
    folder = target.with_name("building")
    folder.mkdir(parents=True, exist_ok=True)
    flags = ["-std=gnu++20", "-O1", "-fPIC", "-w", "-fvisibility=hidden", "-DTORCH_EXTENSION_NAME=_sim"]
    flags += [f"-I{path}" for path in [*include_paths(), sysconfig.get_paths()["include"]]]

    def compile_one(unit: str) -> None:
        _run([str(compiler()), *flags, "-c", str(SOURCES / f"{unit}.cpp"), "-o", str(folder / f"{unit}.o")])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compile_one, UNITS))
    libraries = Path(torch.__file__).parent / "lib"
    names = [f"-l{name}" for name in ("torch", "torch_cpu", "torch_python", "c10")]
    objects = [str(folder / f"{unit}.o") for unit in UNITS]
    built = folder / "_sim.so"
    _run([str(compiler()), "-shared", *objects, "-o", str(built), f"-L{libraries}", *names, f"-Wl,-rpath,{libraries}"])
    os.replace(built, target)
    shutil.rmtree(folder)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:1] + command[-3:])} failed:\n{done.stderr[-4000:]}")


def load() -> ModuleType:
    """Return the extension as a module."""
    spec = importlib.util.spec_from_file_location("_sim", library())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
