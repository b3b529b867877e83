"""This very package as a wheel, for machines that shall run what runs here: its name on an index is another program."""

from __future__ import annotations

import base64
import hashlib
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Final

_PACKAGE: Final = Path(__file__).resolve().parent.parent
_NEEDS: Final = ("torch>=2.6", "numpy", "packaging", "pyyaml", "safetensors")
_SCRIPTS: Final = (("accelerate", "main"), ("accelerate-launch", "launch"), ("accelerate-config", "config"))


def version() -> str:
    """Return the version of the package that runs here."""
    return str(sys.modules[_PACKAGE.name].__version__)


def wheel_name() -> str:
    """Return the file name of the wheel."""
    return f"{_PACKAGE.name}-{version()}-py3-none-any.whl"


def build_wheel(folder: Path) -> Path:
    """Write the wheel into ``folder``, and return its path."""
    path = folder / wheel_name()
    records: list[str] = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:

        def add(name: str, content: bytes) -> None:
            wheel.writestr(name, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            records.append(f"{name},sha256={digest},{len(content)}")

        for file in sorted(_PACKAGE.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                add(file.relative_to(_PACKAGE.parent).as_posix(), file.read_bytes())
        information = "-".join(path.name.split("-")[:2]) + ".dist-info"
        add(f"{information}/METADATA", _metadata().encode())
        add(f"{information}/WHEEL", b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        scripts = "".join(f"{name} = {_PACKAGE.name}.commands.{module}:main\n" for name, module in _SCRIPTS)
        add(f"{information}/entry_points.txt", f"[console_scripts]\n{scripts}".encode())
        wheel.writestr(f"{information}/RECORD", "\n".join([*records, f"{information}/RECORD,,", ""]))
    return path


def _metadata() -> str:
    """What pip reads: that of the installed package, or the least of it where this one isn't the installed one."""
    try:
        found = metadata.distribution(_PACKAGE.name)
    except metadata.PackageNotFoundError:
        found = None
    text = found.read_text("METADATA") if found is not None and found.version == version() else None
    needs = "".join(f"Requires-Dist: {name}\n" for name in _NEEDS)
    head = f"Metadata-Version: 2.1\nName: {_PACKAGE.name}\nVersion: {version()}\nRequires-Python: >=3.10\n"
    return text or head + needs
