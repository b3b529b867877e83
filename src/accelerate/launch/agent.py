"""torch's elastic agent with this package's reports: ``python -m accelerate.launch.agent [torchrun's options] script``.

The agents that Slurm and Kubernetes start run it in place of ``torch.distributed.run``: a host whose ranks only lost
another host's says so in one line, and the exit code is the first cause's, or that of a run that saved.
"""

from __future__ import annotations

import sys


def main() -> int:
    """Run the agent of this host and return its exit code."""
    from .torchrun import run_agent

    return run_agent(sys.argv[1:], {})


if __name__ == "__main__":
    sys.exit(main())
