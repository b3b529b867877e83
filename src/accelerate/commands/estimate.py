"""``accelerate estimate-memory``: the names stand; the estimate comes with big-model loading."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from ..errors import NotBuilt
from .parser import Parser, spellings

DTYPES = ("float32", "float16", "int8", "int4")


def estimate_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """A parser of ``accelerate estimate-memory``."""
    description = "Say how much memory a model of the hub needs."
    if subparsers is not None:
        parser = subparsers.add_parser("estimate-memory", description=description, allow_abbrev=False)
    else:
        parser = Parser(prog="accelerate estimate-memory", description=description)
    parser.add_argument("model_name", help="The model's name on the hub.")
    parser.add_argument(*spellings("--library_name"), dest="library_name", choices=("timm", "transformers"))
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument(*spellings("--trust_remote_code"), dest="trust_remote_code", action="store_true")
    parser.set_defaults(func=estimate_command)
    return parser


def _not_built() -> NoReturn:
    raise NotBuilt("`accelerate estimate-memory` isn't built yet in this version: it comes with big-model loading.")


def add_timm_hub_prefix(model_name: str) -> str:
    """The model's name as timm wants it for a model of the hub.

    Raises:
        NotBuilt: in this version.
    """
    _not_built()


def gather_data(args: argparse.Namespace) -> list[list[Any]]:
    """The rows of the table.

    Raises:
        NotBuilt: in this version.
    """
    _not_built()


def estimate_command(args: argparse.Namespace) -> None:
    """The table has been printed.

    Raises:
        NotBuilt: in this version.
    """
    _not_built()


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code of ``accelerate estimate-memory``."""
    from .launch import complain

    args = estimate_command_parser().parse_args(None if arguments is None else list(arguments))
    try:
        estimate_command(args)
    except NotBuilt as error:
        return complain("accelerate estimate-memory", error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
