"""Import path kept for compatibility: the memory of each parallel layout, and the choice among the layouts."""

from __future__ import annotations

from ..guests.estimate.plan import Candidate, Footprint, Layout, Plan, footprint, layouts, propose

__all__ = ["Candidate", "Footprint", "Layout", "Plan", "footprint", "layouts", "propose"]
