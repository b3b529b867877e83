"""The program that engines start in tests: each rank prints one JSON line about itself; options make it fail."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch

from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.settings import env


def main() -> None:
    """All ranks have added their numbers, as often as was asked for."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--fail_rank", type=int, help="this rank kills itself, with --out only the first time")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--patience", type=float, default=60.0, help="seconds that one operation may take")
    parser.add_argument("--out", type=Path, help="a folder for the line, too: launchers mix the outputs of ranks")
    args, others = parser.parse_known_args()
    patience = InitProcessGroupKwargs(timeout=timedelta(seconds=args.patience))
    accelerator = Accelerator(kwargs_handlers=[patience])
    attempt = int(env.read("TORCHELASTIC_RESTART_COUNT", "0") or 0)
    mark = None if args.out is None else args.out / "has_failed"
    if args.fail_rank == accelerator.process_index and (mark is None or not mark.exists()):
        if mark is not None:
            mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    total = torch.zeros(1)
    for _ in range(args.rounds):
        total = accelerator.reduce(torch.tensor([accelerator.process_index + 1.0]), reduction="sum")
        if accelerator.is_main_process:
            print("round", flush=True)
        time.sleep(args.pause)
    line = {
        "rank": accelerator.process_index,
        "size": accelerator.num_processes,
        "local_rank": accelerator.local_process_index,
        "sum": total.item(),
        "attempt": attempt,
        "precision": accelerator.mixed_precision,
        "arguments": others,
        "variable": env.read("WANDB_NOTES"),
    }
    text = json.dumps(line)
    print(text, flush=True)
    if args.out is not None:
        (args.out / f"{accelerator.process_index}.json").write_text(text)
    accelerator.end_training()


if __name__ == "__main__":
    sys.exit(main())
