"""The names of this address, for editors, type checkers and `names_of_stub`: where each is defined."""

# isort: off
from ..precision.fp8_te import apply_fp8_autowrap as apply_fp8_autowrap
from ..precision.fp8_te import contextual_fp8_autocast as contextual_fp8_autocast, convert_model as convert_model
from ..precision.fp8_te import has_transformer_engine_layers as has_transformer_engine_layers
