"""DiLoCo: islands of ranks train alone for many steps, and exchange compressed changes of their weights. Internal.

- `diloco`: the context around a training loop.
- `islands`: which ranks form an island, and how gradients stay inside of it.
- `fragments`: the outer weights, and their exchange, one fragment of the model at a time.
- `compression`: changes of weights in 8 or 2 bits.
- `state`: what a checkpoint holds.
- `local_sgd`: replicas that average their weights, whole and uncompressed.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023; "Streaming DiLoCo with
overlapping communication", 2025.
"""

from __future__ import annotations

from typing import Final

from ...seams import Guest

GUEST: Final = Guest()
