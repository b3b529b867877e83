"""The names of this address, for editors, type checkers and `names_of_stub`: where each is defined."""

# isort: off
from ..big_models.offload import extract_submodules_state_dict as extract_submodules_state_dict
from ..big_models.offload import load_offloaded_weight as load_offloaded_weight
from ..big_models.offload import offload_state_dict as offload_state_dict, offload_weight as offload_weight
from ..big_models.offload import OffloadedWeightsLoader as OffloadedWeightsLoader, PrefixedDataset as PrefixedDataset
from ..big_models.offload import save_offload_index as save_offload_index
