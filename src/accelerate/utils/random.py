"""Import path kept for compatibility: random numbers."""

from __future__ import annotations

from ..distributed.random import set_seed, synchronize_rng_state, synchronize_rng_states

__all__ = ["set_seed", "synchronize_rng_state", "synchronize_rng_states"]
