"""Run a PyTorch training loop on one process or many, on any device, in any precision.

These names are the public interface. Each is imported on first use, so that `import accelerate` itself is fast and
doesn't import torch.
"""

from __future__ import annotations

from .lazy import names_of_stub

__version__ = "1.15.0"
__getattr__, __dir__ = names_of_stub(__name__)
