"""Checks that the launcher started as many processes as it was told to: each knows its place, and they can talk."""

from __future__ import annotations

import torch

from accelerate.state import PartialState


def main() -> None:
    """Print the number of processes, on the main one."""
    state = PartialState()
    total = torch.ones(1, device=state.device)
    if state.num_processes > 1:
        torch.distributed.all_reduce(total)
    assert int(total.item()) == state.num_processes, (total, state.num_processes)
    state.print(f"Successfully ran on {state.num_processes} process{'es' if state.num_processes > 1 else ''}")
    state.destroy_process_group()


if __name__ == "__main__":
    main()
