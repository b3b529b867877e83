"""Run the tests that compute under each arithmetic that this processor can imitate: `make processors`.

An older processor adds in another order than a newer one, and two threads in another order than one; a test that
depends on it passes on one machine only. Each run limits the instructions of torch's own kernels
(ATEN_CPU_CAPABILITY), of oneDNN (ONEDNN_MAX_CPU_ISA) and of MKL (MKL_CBWR). What the processor lacks can't be
imitated and is named as not run.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

#: Name -> the flag of /proc/cpuinfo that it needs, and what limits torch, oneDNN and MKL to it.
ARITHMETICS: dict[str, tuple[str, dict[str, str]]] = {
    "default": ("", {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"}),
    "avx2": ("avx2", {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"}),
    "avx512": (
        "avx512f", {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "MKL_CBWR": "AVX512"}
    ),
}  # fmt: skip
NUM_THREADS = (1, 2)
FOLDERS = ("tests/unit", "tests/oracle")
#: What a test file has in it that trains, or compares what was computed.
COMPUTES = (".backward(", "assert_close(", "torch.equal(", "allclose(", "compare([")


def computing_files() -> list[str]:
    """Return the files of ``FOLDERS`` that compute, relative to the repository."""
    found = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("test_*.py"))
    texts = {path: path.read_text(encoding="utf-8") for path in found}
    return [str(path.relative_to(ROOT)) for path, text in texts.items() if any(word in text for word in COMPUTES)]


def processor_flags() -> frozenset[str]:
    """Return the instructions of this processor, as Linux names them; empty on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), []))


def run(variables: dict[str, str], num_threads: int, more: list[str]) -> int:
    """Return the exit status of the tests under these variables; without an instruction they end by SIGILL."""
    threads = {"OMP_NUM_THREADS": str(num_threads), "MKL_NUM_THREADS": str(num_threads)}
    command = [sys.executable, "-m", "pytest", "-q", *(more or computing_files())]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **variables, **threads}, check=False).returncode


def main() -> int:
    """Run the tests; return 0 when every setting that this processor has passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tests", nargs="*", help="tests to run instead of all that compute")
    tests = parser.parse_args().tests
    flags = processor_flags()
    rows: list[tuple[str, int, str]] = []
    failed = False
    for name, (flag, variables) in ARITHMETICS.items():
        for num_threads in NUM_THREADS:
            print(f"\n== {name}, {num_threads} threads", flush=True)
            if flag and flag not in flags:
                rows.append((name, num_threads, f"not run: this processor has no {flag}"))
                continue
            begin = time.monotonic()
            status = run(variables, num_threads, tests)
            failed = failed or status != 0
            outcome = "passed" if status == 0 else f"FAILED (exit status {status})"
            rows.append((name, num_threads, f"{outcome} in {time.monotonic() - begin:.0f} s"))
    print(f"\n== processors ({platform.machine()})")
    for name, num_threads, outcome in rows:
        print(f"{name:8s} {num_threads} threads  {outcome}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
