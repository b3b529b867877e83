"""Where the ranks of a world find each other, leave word, and ask what became of the others.

`roll_call` agrees on who takes part, `group` forms the process group, `seat` is one rank's place while the world lasts,
and `courier` makes the calls that may never return.
"""

from .courier import Courier, Silence
from .seat import Meeting

__all__ = ["Courier", "Meeting", "Silence"]
