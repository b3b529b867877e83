"""The names of this address, for editors, type checkers and `names_of_stub`: where each is defined."""

# isort: off
from ..precision.fp8_ao import convert_model_to_fp8_ao as convert_model_to_fp8_ao
from ..precision.fp8_ao import filter_first_and_last_linear_layers as filter_first_and_last_linear_layers
from ..precision.fp8_ao import filter_linear_layers as filter_linear_layers
from ..precision.fp8_ao import find_first_last_linear_layers as find_first_last_linear_layers
from ..precision.fp8_ao import has_ao_layers as has_ao_layers
