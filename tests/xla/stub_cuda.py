"""Makes a torch that was built for CUDA importable where no CUDA is: `python stub_cuda.py SITE_PACKAGES`.

torch_xla needs the torch of PyPI, which is linked against 3 GB of CUDA libraries that an XLA device never calls.
Each of them gets a stand-in of a few kB, in which every function that torch could call returns an error.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

#: What the system or torch itself has.
PRESENT = re.compile(r"lib(c10|torch|shm|pthread|m|dl|rt|gomp|stdc\+\+|gcc_s|c|caffe2)[._+-]|libc10|libtorch|ld-linux")
CUDA_ERROR = 100  # cudaErrorNoDevice, and an error in the other libraries too


def read_elf(option: str, library: Path) -> list[str]:
    """What `readelf` says of the library, by line."""
    found = subprocess.run(["readelf", "-W", option, str(library)], capture_output=True, text=True, check=True)
    return found.stdout.splitlines()


def needed(library: Path) -> list[str]:
    """The libraries that it is linked against and that are absent."""
    names = [match[1] for line in read_elf("-d", library) if (match := re.search(r"NEEDED.*\[(.*?)\]", line))]
    return [name for name in names if not PRESENT.match(name) and not (library.parent / name).exists()]


def homes_of_versions(library: Path) -> dict[str, str]:
    """Symbol version -> the library that it is expected in."""
    homes: dict[str, str] = {}
    home = ""
    for line in read_elf("-V", library):
        if match := re.search(r"Version: 1\s+File: (\S+)", line):
            home = match[1]
        elif match := re.search(r"Name: (\S+)\s+Flags", line):
            homes[match[1]] = home
    return homes


def symbols(library: Path) -> Iterator[tuple[str, str, bool]]:
    """(name, version or "", whether it is defined here) of every dynamic symbol."""
    for line in read_elf("--dyn-syms", library):
        columns = line.split()
        if len(columns) < 8 or columns[4] not in ("GLOBAL", "WEAK") or not columns[0].endswith(":"):
            continue
        name, _, version = columns[7].partition("@")
        is_defined = columns[6] != "UND"
        # What is weak may stay undefined; Python and the C++ library bring their own, and CUDA is C.
        if is_defined or (columns[4] == "GLOBAL" and not name.startswith(("_Z", "Py", "_Py"))):
            yield name, version.lstrip("@"), is_defined


def plan(folder: Path) -> dict[str, dict[str, set[str]]]:
    """Absent library -> version ("" for none) -> the functions that it has to have."""
    libraries = sorted(folder.glob("lib*.so"))
    wanted: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    defined = {name for library in libraries for name, _, is_defined in symbols(library) if is_defined}
    for library in libraries:
        absent = needed(library)
        homes = homes_of_versions(library)
        for name in absent:
            wanted[name][""].update()
        for name, version, is_defined in symbols(library):
            if is_defined or name in defined:
                continue
            home = homes.get(version, "") if version else next(iter(absent), "")
            if home in wanted or home in absent:
                wanted[home][version].add(name)
    return wanted


def build(folder: Path, name: str, versions: dict[str, set[str]]) -> None:
    """The stand-in lies beside torch's own libraries."""
    functions = sorted(set().union(*versions.values()))
    with tempfile.TemporaryDirectory() as scratch:
        source, script = Path(scratch, "stub.c"), Path(scratch, "stub.map")
        source.write_text("".join(f"int {function}(void) {{ return {CUDA_ERROR}; }}\n" for function in functions))
        named = {version: members for version, members in versions.items() if version and members}
        script.write_text(
            "".join(f"{version} {{ global: {' '.join(f'{one};' for one in sorted(members))} }};\n"
                    for version, members in named.items())
        )  # fmt: skip
        command = ["gcc", "-shared", "-fPIC", "-w", "-fno-builtin", "-o", str(folder / name), str(source)]
        command += [f"-Wl,-soname,{name}", *([f"-Wl,--version-script={script}"] if named else [])]
        subprocess.run(command, check=True)


def main() -> None:
    """torch can be imported."""
    folder = Path(sys.argv[1]) / "torch" / "lib"
    for name, versions in plan(folder).items():
        build(folder, name, versions)
        print(f"{name}: {len(set().union(*versions.values()))} functions")


if __name__ == "__main__":
    main()
