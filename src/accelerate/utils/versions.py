"""Import path kept for compatibility: version comparisons."""

from __future__ import annotations

from ..versions import compare_versions, is_torch_version

__all__ = ["compare_versions", "is_torch_version"]
