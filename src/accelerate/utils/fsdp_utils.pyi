"""The names of this address, for editors, type checkers and `names_of_stub`: where each is defined."""

# isort: off
from ..checkpointing import merge_fsdp_weights as merge_fsdp_weights
from ..parallel.fsdp.files import disable_fsdp_ram_efficient_loading as disable_fsdp_ram_efficient_loading
from ..parallel.fsdp.files import enable_fsdp_ram_efficient_loading as enable_fsdp_ram_efficient_loading
from ..parallel.fsdp.files import fsdp2_apply_ac as fsdp2_apply_ac, fsdp2_canonicalize_names as fsdp2_canonicalize_names
from ..parallel.fsdp.files import fsdp2_load_full_state_dict as fsdp2_load_full_state_dict
from ..parallel.fsdp.files import fsdp2_prepare_auto_wrap_policy as fsdp2_prepare_auto_wrap_policy
from ..parallel.fsdp.files import fsdp2_prepare_model as fsdp2_prepare_model
from ..parallel.fsdp.files import fsdp2_switch_optimizer_parameters as fsdp2_switch_optimizer_parameters
from ..parallel.fsdp.files import get_fsdp2_grad_scaler as get_fsdp2_grad_scaler, load_fsdp_model as load_fsdp_model
from ..parallel.fsdp.files import load_fsdp_optimizer as load_fsdp_optimizer, save_fsdp_model as save_fsdp_model
from ..parallel.fsdp.files import save_fsdp_optimizer as save_fsdp_optimizer
from ..parallel.fsdp.wrapping import get_parameters_from_modules as get_parameters_from_modules
from ..parallel.rebind import ensure_weights_retied as ensure_weights_retied
