"""The names of this address, for editors, type checkers and `names_of_stub`: where each is defined."""

# isort: off
from ..guests.xla.launcher import install_xla as install_xla
