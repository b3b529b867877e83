"""Where the ranks of a world find each other, leave word, and ask what became of the others.

`roll_call` agrees on who takes part, `group` forms the process group, `seat` is one rank's place while the world lasts,
`rendezvous` finds out who makes a call that the main process may make alone, and `courier` makes the calls that may
never return.
"""

from .courier import Courier, Silence
from .rendezvous import Attendance
from .seat import Meeting

__all__ = ["Attendance", "Courier", "Meeting", "Silence"]
