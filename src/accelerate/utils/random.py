"""Old address: random numbers."""

from __future__ import annotations

from ..seeding import set_seed, synchronize_rng_state, synchronize_rng_states

__all__ = ["set_seed", "synchronize_rng_state", "synchronize_rng_states"]
