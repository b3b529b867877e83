"""The names of this address, for editors, type checkers and `names_of_stub`: where each is defined."""

# isort: off
from .guests.diloco.local_sgd import LocalSGD as LocalSGD
