"""Run the unit, contract, multi and oracle suites on other Pythons and torches, and read the newest torch.

This is `make versions`. Each row has an environment under .versions/ with its torch and none of the CUDA libraries;
tests/xla/stub_cuda.py provides dummies for them. A Python that isn't installed is named as not run. Nothing is
installed for the whole system.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / ".versions"
#: (Python, torch): what `pip install .` takes first, then the last but one, the oldest of both, and the other Pythons.
ROWS = (
    *(("3.11", "2.15.0"), ("3.11", "2.14.1"), ("3.10", "2.6.0")),
    *(("3.12", "2.15.0"), ("3.13", "2.15.0"), ("3.14", "2.15.0")),
)
#: The torch whose files are compared with what is used, on any system: the wheel for macOS is the smallest (139 MB).
NEWEST = "2.15.0"
#: What another release is needed of by an old torch than the newest, which can't be imported there.
OLDER = {"2.6.0": {"torchao": "torchao==0.10.0"}}
NAMES_ARE_GONE = 3  # the exit status of tests/private_names.py
SUITES = ("tests/unit", "tests/contract", "tests/multi", "tests/oracle")
#: What torch itself needs beside CUDA, and what the tests need; each Python takes the newest that supports it.
BESIDE = (
    "filelock", "typing_extensions", "sympy", "networkx", "jinja2", "fsspec", "numpy", "packaging", "pyyaml",
    "safetensors", "setuptools>=77", "psutil", "tqdm", "cloudpickle", "requests", "huggingface-hub",
    "pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "scikit-learn", "matplotlib", "pexpect", "nbclient",
    "nbformat", "ipykernel",
)  # fmt: skip


def interpreter(version: str) -> str | None:
    """Return a Python of this version that is installed here; None without one."""
    kept = sorted(Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob(f"versions/{version}.*/bin/python"))
    return str(kept[-1]) if kept else shutil.which(f"python{version}")


def pip(python: str | Path, *arguments: str) -> None:
    """Run pip of that interpreter; raise CalledProcessError if it fails."""
    subprocess.run([str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments], check=True)


def environment(python: str, version: str, torch: str) -> Path:
    """Return the interpreter of an environment that has this torch, which is made if missing."""
    home = HOME / f"python{version}-torch{torch}"
    inside = home / "bin" / "python"
    if not (home / ".installed").exists():
        subprocess.run([python, "-m", "venv", str(home)], check=True)
        pip(inside, "install", "--no-deps", f"torch=={torch}")
        asking = [OLDER.get(torch, {}).get(name, name) for name in ("torchdata", "torchao", "schedulefree")]
        pip(inside, "install", "--no-deps", *asking)  # each asks for a whole torch
        pip(inside, "install", *BESIDE)
        found = subprocess.run(
            [str(inside), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        stub = ROOT / "tests" / "xla" / "stub_cuda.py"
        subprocess.run([str(inside), str(stub), found.stdout.strip()], check=True, stdout=subprocess.DEVNULL)
        (home / ".installed").touch()
    pip(inside, "install", "--no-deps", "--editable", str(ROOT))  # its metadata are looked at too
    return inside


def run(version: str, torch: str, suites: list[str], num_workers: int) -> tuple[str, bool]:
    """Run the suites; return a summary, and whether that is a failure."""
    python = interpreter(version)
    if python is None:
        return f"not run: no Python {version} is installed here", False
    try:
        inside = environment(python, version, torch)
    except subprocess.CalledProcessError as error:
        return f"not run: the environment can't be made ({error})", False
    begin = time.monotonic()
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    report = HOME / f"python{version}-torch{torch}.xml"
    report.unlink(missing_ok=True)
    pytest = [str(inside), "-m", "pytest", "-q", "-n", str(num_workers), f"--junit-xml={report}", *suites]
    done = subprocess.run(pytest, cwd=ROOT, env=variables, check=False)
    counted = counts(report) if report.exists() else f"exit status {done.returncode}"
    return f"{counted}, in {time.monotonic() - begin:.0f} s", done.returncode != 0


def counts(report: Path) -> str:
    """Return how many tests of a JUnit report passed, failed and were skipped."""
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    num_tests, failed, broken, skipped = (
        sum(int(suite.get(name, "0")) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    )
    return f"{num_tests - failed - broken - skipped} passed, {failed + broken} failed, {skipped} skipped"


def read_newest() -> tuple[str, bool]:
    """Compare the newest torch's files; return a summary, and whether a name is gone or has another signature."""
    HOME.mkdir(exist_ok=True)
    if not list(HOME.glob(f"torch-{NEWEST}-*.whl")):
        system = ("--only-binary=:all:", "--platform=macosx_14_0_arm64", "--python-version=3.13", "--implementation=cp")
        try:
            pip(sys.executable, "download", "--no-deps", *system, "--dest", str(HOME), f"torch=={NEWEST}")
        except subprocess.CalledProcessError as error:
            return f"not read: {error}", False
    wheel = next(HOME.glob(f"torch-{NEWEST}-*.whl"))
    done = subprocess.run([sys.executable, str(ROOT / "tests" / "private_names.py"), str(wheel)], check=False)
    if done.returncode not in (0, NAMES_ARE_GONE):
        return "not read: tests/private_names.py failed", True
    return ("a private name is gone", True) if done.returncode else ("read: no private name is gone", False)


def main() -> int:
    """Run and compare everything; return 0 when nothing failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suites", nargs="*", default=list(SUITES), help="instead of the four suites")
    parser.add_argument("--only", nargs=2, metavar=("PYTHON", "TORCH"), help="one row, of any two versions")
    parser.add_argument("--num_workers", type=int, default=2, help="tests at a time")
    options = parser.parse_args()
    rows = [tuple(options.only)] if options.only else ROWS
    table = [("any", NEWEST, *read_newest())]
    table += [(version, torch, *run(version, torch, options.suites, options.num_workers)) for version, torch in rows]
    print("\n== versions")
    for version, torch, outcome, _ in table:
        print(f"Python {version:5s} torch {torch:7s} {outcome}")
    return int(any(failed for *_, failed in table))


if __name__ == "__main__":
    sys.exit(main())
