"""The names of this address, for editors, type checkers and `names_of_stub`: where each is defined."""

# isort: off
from ..quantize import get_keys_to_not_convert as get_keys_to_not_convert, get_parameter_device as get_parameter_device
from ..quantize import get_quantized_model_device_map as get_quantized_model_device_map
from ..quantize import has_4bit_bnb_layers as has_4bit_bnb_layers, load_and_quantize_model as load_and_quantize_model
from ..quantize import quantize_and_offload_8bit as quantize_and_offload_8bit
from ..quantize import replace_with_bnb_layers as replace_with_bnb_layers
