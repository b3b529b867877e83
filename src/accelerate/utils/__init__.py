"""Import path kept for compatibility: all utilities, each imported from its module when it is first used."""

from __future__ import annotations

from ..lazy import names_of_stub

# At once, because the name of the function is also the name of its file: a later import of the file alone would put
# the module in the function's place.
from .tqdm import tqdm as tqdm

__getattr__, __dir__ = names_of_stub(__name__)
