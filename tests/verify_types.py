"""How much of the installed package an editor knows the types of: `pyright --verifytypes`, at least 98 %.

    python tests/verify_types.py            fails below the limit
    python tests/verify_types.py --list     prints each symbol whose type isn't known, and why

The package is built as a wheel and unpacked into an environment of its own, which borrows what else it needs from
the one that runs this: what is checked is what a user installs, `py.typed` included. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
LIMIT: Final = 0.98
#: What a wheel is built from. A copy is built: a build folder that lies about would add files that are gone.
SOURCES: Final = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "src")


def build_wheel(scratch: Path) -> Path:
    """Build the wheel from a copy of the sources; return its path."""
    copy = scratch / "source"
    copy.mkdir()
    for name in SOURCES:
        (copy / name).symlink_to(ROOT / name)
    (copy / "src").unlink()
    (copy / "src").mkdir()
    (copy / "src" / "accelerate").symlink_to(ROOT / "src" / "accelerate")
    command = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    subprocess.run([*command, "--disable-pip-version-check", "--wheel-dir", scratch, copy], check=True)
    return next(scratch.glob("*.whl"))


def install(wheel: Path, environment: Path) -> Path:
    """Unpack the wheel into a new environment beside this one; return the folder of its programs."""
    venv.create(environment)
    paths = {"base": str(environment), "platbase": str(environment)}
    packages = Path(sysconfig.get_path("purelib", vars=paths))
    zipfile.ZipFile(wheel).extractall(packages)
    # torch and the others are found in this interpreter's environment.
    (packages / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return Path(sysconfig.get_path("scripts", vars=paths))


def verify() -> dict[str, Any]:
    """Return pyright's report on the installed package's types."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        programs = install(build_wheel(scratch), scratch / "environment")
        # pyright takes the environment of the `python` that it finds.
        environment = {**os.environ, "PATH": os.pathsep.join([str(programs), os.environ["PATH"]])}
        environment.pop("PYTHONPATH", None)
        command = (sys.executable, "-m", "pyright", "--verifytypes", "accelerate", "--ignoreexternal", "--outputjson")
        done = subprocess.run(command, cwd=scratch, env=environment, capture_output=True, text=True)
        report = json.loads(done.stdout or "{}").get("typeCompleteness")
        if report is None or "pyTypedPath" not in report:
            raise SystemExit(f"pyright found no typed package `accelerate`:\n{done.stdout}{done.stderr}")
        return report


def unknown(report: dict[str, Any]) -> list[str]:
    """Return a line for each exported symbol whose type isn't known because of itself."""
    lines = []
    for symbol in report["symbols"]:
        for found in symbol["diagnostics"] if symbol["isExported"] and not symbol["isTypeKnown"] else ():
            reason = " ".join(found["message"].split())
            if "partially unknown" not in reason.partition(".")[0][:60]:
                file = found["file"].rpartition("site-packages/")[2]
                line = f":{found['range']['start']['line'] + 1}" if "range" in found else ""  # not of a whole file
                lines.append(f"{file}{line} {symbol['name']}: {reason}")
    return sorted(set(lines))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print each symbol whose type isn't known")
    arguments = parser.parse_args()
    report = verify()
    score, counts = report["completenessScore"], report["exportedSymbolCounts"]
    if arguments.list or score < LIMIT:
        print("\n".join(unknown(report)))
    total = sum(counts.values())
    print(f"{score:.2%} of {total} public symbols have a known type (at least {LIMIT:.0%}).")
    return int(score < LIMIT)


if __name__ == "__main__":
    sys.exit(main())
