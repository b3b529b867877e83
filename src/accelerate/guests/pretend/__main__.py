"""The command ``python -m accelerate.guests.pretend STEPS [-m] PROGRAM [ARGUMENTS]``, started by the launcher."""

from __future__ import annotations

import sys

from .run import run_as_rank


def main() -> int:
    """Run the program as one rank, and print the report."""
    steps, *program = sys.argv[1:]
    is_module = program[0] == "-m"
    print(run_as_rank(program[is_module:], int(steps), is_module=is_module))
    return 0


if __name__ == "__main__":
    sys.exit(main())
