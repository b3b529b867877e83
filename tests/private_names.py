"""Whether the files of a torch that isn't installed have the private names that this package uses.

    python tests/private_names.py torch-2.15.0-cp313-cp313-macosx_14_0_arm64.whl

Nothing of the torch in question is imported: its Python files, its stubs and its list of operators are read.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT / "src") not in sys.path:
    sys.path.insert(0, str(ROOT / "src"))

from accelerate.torch_private.names import REGISTERED, PrivateName  # noqa: E402

PACKAGE = ROOT / "src" / "accelerate" / "torch_private"
OPERATORS = "torchgen/packaged/ATen/native/native_functions.yaml"
NAMES_ARE_GONE = 3  # an exit status; Python's own for an error is 1
_STUBS = {"torch": "torch/_C/_VariableFunctions.pyi"}


def registered() -> dict[str, tuple[PrivateName, ...]]:
    """Every private name that this package uses, by its user."""
    import importlib

    for path in sorted(PACKAGE.glob("*.py")):
        importlib.import_module(f"accelerate.torch_private.{path.stem}")
    return {user: names for user, names in REGISTERED.items() if user.startswith("accelerate.")}


class TorchFiles:
    """The files of a torch: of a wheel, or of a folder that holds ``torch/`` and ``torchgen/``."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._read: Callable[[str], str | None]
        if place.is_dir():
            self._read = lambda name: (place / name).read_text("utf-8") if (place / name).is_file() else None
        else:
            wheel = zipfile.ZipFile(place)
            names = set(wheel.namelist())
            self._read = lambda name: wheel.read(name).decode() if name in names else None
        self.text = functools.cache(self._read)
        self.tree = functools.cache(self._tree)
        found = re.search(r"__version__ = '([^'+]+)", self._read("torch/version.py") or "")
        self.version = found[1] if found else "unknown"

    def _tree(self, module: str) -> ast.Module | None:
        path = module.replace(".", "/")
        for name in (
            f"{path}.py",
            f"{path}/__init__.py",
            _STUBS.get(module, ""),
            f"{path}.pyi",
            f"{path}/__init__.pyi",
        ):
            text = self.text(name) if name else None
            if text is not None:
                return ast.parse(text)
        return None

    def problem(self, name: PrivateName) -> str | None:
        """What is wrong with ``name`` here; None where it is as it is used."""
        places = [name.place, *([name.instead] if name.instead else [])]
        problems = [self._problem(PrivateName(place, name.parameters)) for place in places]
        return None if None in problems else problems[0]

    def _problem(self, name: PrivateName) -> str | None:
        if name.module == "torch.ops.aten":
            return self._problem_of_operator(name)
        if name.is_attribute:
            tree = self.tree(name.module)
            return None if tree is not None and name.name in set(_words(tree)) else "gone"
        found = self.find(name.module, name.name)
        if found is None:
            return "gone"
        if name.parameters is None:
            return None
        if not any(isinstance(one, ast.FunctionDef) for one in found):
            return "no function"
        functions = [one for one in found if isinstance(one, ast.FunctionDef)]
        if any(_takes(function.args, name.parameters) for function in functions):
            return None
        return f"takes ({ast.unparse(functions[0].args)}), not ({name.parameters})"

    def _problem_of_operator(self, name: PrivateName) -> str | None:
        found = re.search(rf"^- func: {name.name}\((.*?)\) ->", self.text(OPERATORS) or "", re.MULTILINE)
        if found is None:
            return "gone"
        parts = [part for part in found[1].split(", ") if part != "*"]
        taken = [part.split("=")[0].split()[-1] for part in parts]
        wanted = name.parameters.split(", ") if name.parameters else []
        rest_has_defaults = all("=" in part for part in parts[len(wanted) :])
        if taken[: len(wanted)] == wanted and (name.parameters is None or rest_has_defaults):
            return None
        return f"takes ({found[1]}), not ({name.parameters})"

    def find(self, module: str, name: str, depth: int = 0) -> list[ast.AST] | None:
        """The definitions of ``name`` that ``module`` makes or imports; None where there is none."""
        first, _, rest = name.partition(".")
        tree = self.tree(module)
        if depth > 5:
            return None
        if tree is None:  # a module of the C extension, whose stub its parent's may hold
            return None
        made = [node for node in _statements(tree.body) if first in _bound(node)]
        if not made:
            made_by_stub = self.text(_STUBS.get(module, "")) if module in _STUBS else None
            made = [n for n in ast.parse(made_by_stub).body if first in _bound(n)] if made_by_stub else []
        if not rest and made and not all(isinstance(node, ast.ImportFrom) for node in made):
            return list(made)
        for node in made:
            if isinstance(node, ast.ClassDef) and rest:
                members = [member for member in _statements(node.body) if rest in _bound(member)]
                if members:
                    return list(members)
            if isinstance(node, ast.ImportFrom):
                origin = _absolute(node, module, self.text(module.replace(".", "/") + "/__init__.py") is not None)
                alias = next(alias for alias in node.names if (alias.asname or alias.name) == first)
                return self.find(origin, f"{alias.name}.{rest}".rstrip("."), depth + 1)
        return None


def _absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".") if is_package else module.split(".")[:-1]
    parts = parts[: len(parts) - (node.level - 1)]
    return ".".join([*parts, *([node.module] if node.module else [])])


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Also those under ``if`` and ``try``."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody"):
            if isinstance(node, (ast.If, ast.Try, ast.With)):
                yield from _statements(getattr(node, part, []))


def _bound(node: ast.AST) -> set[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return {node.target.id}
    return set()


def _words(tree: ast.AST) -> Iterator[str]:
    """Attributes that a module speaks of: set, read, declared, or named by a string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _takes(arguments: ast.arguments, wanted: str) -> bool:
    """Whether a function with these arguments can be called as one that takes ``wanted``."""
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    named = [argument.arg for argument in arguments.kwonlyargs]
    names = wanted.split(", ") if wanted else []
    first = positional[: len(names)]
    rest = names[len(first) :]
    if first != names[: len(first)] or rest != named[: len(rest)]:
        return False
    unset = max(0, len(positional) - len(first) - len(arguments.defaults))
    missing = [
        name for name, default in zip(named, arguments.kw_defaults, strict=True) if default is None and name not in rest
    ]
    return unset == 0 and not missing


def problems(files: TorchFiles, *, at_least: str | None = None) -> list[str]:
    """A line for each name that is gone, or is called with other arguments."""
    from packaging.version import Version

    version = Version(at_least or files.version)
    return [
        f"{name.module}:{name.name}, which {user} uses, {found if found.startswith('takes') else f'is {found}'}"
        for user, names in sorted(registered().items())
        for name in names
        if version >= Version(name.since) and (found := files.problem(name)) is not None
    ]


def main() -> int:
    """The exit status: 0 when each file that was named has all names, else ``NAMES_ARE_GONE``."""
    status = 0
    for argument in sys.argv[1:]:
        files = TorchFiles(Path(argument))
        found = problems(files)
        count = sum(map(len, registered().values()))
        print(f"torch {files.version}: {count - len(found)} of {count} private names are as they are used")
        for line in found:
            print(f"  {line}")
        if found:
            status = NAMES_ARE_GONE
    return status


if __name__ == "__main__":
    sys.exit(main())
