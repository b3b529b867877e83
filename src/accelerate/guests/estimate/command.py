"""``accelerate estimate-memory``: the memory of a model, in each precision and on each rank of a training run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from ...commands.parser import Subparsers, command_parser, count, run_command, spellings
from ...errors import NotBuilt
from ...optional import is_installed, require

if TYPE_CHECKING:
    from torch import nn

    from .plan import Layout

DTYPES = ("float32", "float16", "int8", "int4")
PRECISIONS: dict[str, str | None] = {"no": None, "bf16": "bfloat16", "fp16": "float16"}
_LAYOUTS = ("ddp", "zero2", "fsdp-grad", "fsdp", "tp")
_DESCRIPTION = "Say how much memory a model needs, stored and in training, alone and on several ranks."


def estimate_command_parser(subparsers: Subparsers | None = None) -> argparse.ArgumentParser:
    """Create the parser of ``accelerate estimate-memory``."""
    parser = command_parser("estimate-memory", _DESCRIPTION, subparsers)
    parser.add_argument(
        "model_name", help="A name on the hub, a folder, or a function that builds the model: 'module:function'."
    )
    parser.add_argument(
        *spellings("--library_name"),
        choices=("timm", "transformers"),
        help="The library of the model, if its configuration doesn't name it.",
    )
    parser.add_argument(
        "--dtypes",
        nargs="+",
        default=list(DTYPES),
        choices=("float32", "float16", "bfloat16", "int8", "int4"),
        help="Precisions of the first table.",
    )
    parser.add_argument(
        *spellings("--trust_remote_code"), action="store_true", help="Run the code that the model brings with it."
    )
    parser.add_argument("--batch", type=count, default=1, help="Samples of a micro-batch on one rank.")
    parser.add_argument("--sequence", type=count, default=512, help="Tokens of a sample.")
    parser.add_argument("--optimizer", default="adamw", help="A class of torch.optim, or torchao's AdamW8bit.")
    parser.add_argument(
        *spellings("--mixed_precision"), choices=tuple(PRECISIONS), default="no", help="The precision of the step."
    )
    parser.add_argument("--recompute", action="store_true", help="With activation checkpointing of the blocks.")
    parser.add_argument(
        *spellings("--num_processes"), type=count, nargs="+", default=[1, 8], metavar="N", help="Numbers of ranks."
    )
    parser.add_argument(
        "--layouts",
        nargs="+",
        default=list(_LAYOUTS),
        help="How several ranks share the work: ddp, zero1, zero2, zero3, fsdp, fsdp-grad, tp, cp, pp, joined with "
        "'+' and numbers, like tp2+fsdp.",
    )
    parser.add_argument("--json", action="store_true", help="Print one object for programs.")
    parser.add_argument("--plot", metavar="FILE", help="Draw the second table as bars into a PNG file.")
    parser.set_defaults(func=estimate_command)
    return parser


def add_timm_hub_prefix(model_name: str) -> str:
    """Return the name for timm: a hub model ("user/model") with a prefix, timm's own models unchanged."""
    is_of_hub = "/" in model_name and not model_name.startswith(("hf_hub:", "hf-hub:"))
    return f"hf-hub:{model_name}" if is_of_hub else model_name


def verify_on_hub(repo: str, token: str | None = None) -> Any:
    """Return the hub's information about the model; "gated" or "repo" if it isn't accessible, or False."""
    hub = require("huggingface_hub", "hub", purpose=f"Looking for the model {repo!r} on the hub")
    try:
        return hub.model_info(repo, token=token)
    except hub.errors.GatedRepoError:
        return "gated"
    except hub.errors.RepositoryNotFoundError:
        return "repo"
    except OSError:  # no network, or downloads are switched off
        return False


def check_has_model(error: BaseException) -> str:
    """Return the library that an error about a missing model comes from: "timm", "transformers", or "unknown"."""
    text = str(error)
    if isinstance(error, RuntimeError) and "Unknown model" in text and is_installed("timm"):
        return "timm"
    return (
        "transformers" if isinstance(error, OSError) and "does not appear to have a file named" in text else "unknown"
    )


def create_empty_model(
    model_name: str, library_name: str | None = None, trust_remote_code: bool = False, access_token: str | None = None
) -> nn.Module:
    """Build the model from the hub or a folder, without memory for its weights.

    Raises:
        AccelerateError: the model is unknown, or can't be built on this machine.
    """
    from ...settings import env
    from .subject import find_subject

    with env.patched(**({} if access_token is None else {"HF_TOKEN": access_token})):
        return find_subject(model_name, cast("Any", library_name), trust_remote_code).build()


def create_ascii_table(headers: Sequence[str], rows: Sequence[Sequence[object]], title: str) -> str:
    """Return a framed table with a title and centred cells."""
    widths = [max(len(str(row[column])) for row in (headers, *rows)) for column in range(len(headers))]
    width = sum(widths) + len(widths) - 1
    if len(title) + 2 > width:
        widths[-1] += len(title) + 2 - width
        width = len(title) + 2

    def rule(left: str, between: str, right: str) -> str:
        return left + between.join("─" * each for each in widths) + right

    def line(cells: Sequence[object]) -> str:
        return "│" + "│".join(str(cell).center(each) for cell, each in zip(cells, widths, strict=True)) + "│"

    head = [f"┌{'─' * width}┐", f"│{title.center(width)}│", rule("├", "┬", "┤"), line(headers), rule("├", "┼", "┤")]
    return "\n".join([*head, *map(line, rows), rule("└", "┴", "┘")])


def estimate_training_usage(bytes: int, mixed_precision: str, msamp_config: str | None = None) -> dict[str, int]:
    """Return the bytes for training with Adam, by purpose; -1 if models aren't trained in this precision.

    ``bytes`` is the size of the weights in float32.
    """
    if msamp_config is not None:
        raise NotBuilt("What MS-AMP takes isn't known here. Leave msamp_config out.")
    if mixed_precision == "float32":
        found = {"model": bytes, "gradients": bytes, "optimizer": bytes * 2, "step": bytes * 4}
    elif mixed_precision in ("float16", "bfloat16"):
        found = {"model": bytes, "gradients": bytes + bytes // 2, "optimizer": bytes * 2, "step": bytes * 2}
    else:
        found = {"model": -1, "gradients": -1, "optimizer": -1, "step": -1}
    return found


def gather_data(args: argparse.Namespace) -> list[list[str | int | None]]:
    """Return the rows of the first table: precision, and bytes of the largest layer, the model, and training with Adam.

    Raises:
        AccelerateError: the model is unknown, or can't be built on this machine.
    """
    from .report import stored_sizes
    from .subject import find_subject

    subject = find_subject(args.model_name, args.library_name, args.trust_remote_code)
    stored = stored_sizes(subject.build(), args.dtypes)
    return [[size.dtype, size.largest_layer, size.total, size.training] for size in stored]


def estimate_command(args: argparse.Namespace) -> None:
    """Print the tables, and draw the chart if requested.

    Raises:
        AccelerateError: the model is unknown, or can't be built on this machine.
    """
    import torch

    from .report import as_text, draw, estimate
    from .subject import find_subject

    subject = find_subject(args.model_name, args.library_name, args.trust_remote_code)
    precision = PRECISIONS[args.mixed_precision]
    found = estimate(
        subject,
        args.dtypes,
        _layouts(args),
        batch=args.batch,
        sequence=args.sequence,
        optimizer=args.optimizer,
        dtype=torch.float32,
        autocast=None if precision is None else getattr(torch, precision),
        recompute=args.recompute,
    )
    print(json.dumps(found.as_json(), indent=2) if args.json else as_text(found))
    if args.plot is not None:
        draw(found, args.plot)


def _layouts(args: argparse.Namespace) -> list[Layout]:
    from .plan import Layout

    found: list[Layout] = []
    for ranks in args.num_processes:
        found += [Layout()] if ranks == 1 else [Layout.parse(text, ranks) for text in args.layouts]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``accelerate estimate-memory`` and return its exit code."""
    return run_command(estimate_command_parser(), arguments)
