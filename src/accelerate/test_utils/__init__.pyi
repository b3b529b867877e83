"""The names of this address, for editors, type checkers and `names_of_stub`: where each is defined."""

# isort: off
from .scripts import test_ops as test_ops, test_script as test_script, test_sync as test_sync
from .testing import are_the_same_tensors as are_the_same_tensors, assert_exception as assert_exception
from .testing import capture_call_output as capture_call_output, DEFAULT_LAUNCH_COMMAND as DEFAULT_LAUNCH_COMMAND
from .testing import device_count as device_count, execute_subprocess_async as execute_subprocess_async
from .testing import get_launch_command as get_launch_command, get_torch_dist_unique_port as get_torch_dist_unique_port
from .testing import memory_allocated_func as memory_allocated_func
from .testing import path_in_accelerate_package as path_in_accelerate_package
from .testing import pytest_xdist_worker_id as pytest_xdist_worker_id, require_bnb as require_bnb
from .testing import require_cpu as require_cpu, require_cuda as require_cuda
from .testing import require_cuda_or_hpu as require_cuda_or_hpu, require_cuda_or_xpu as require_cuda_or_xpu
from .testing import require_fp16 as require_fp16, require_fp8 as require_fp8
from .testing import require_huggingface_suite as require_huggingface_suite, require_mlu as require_mlu
from .testing import require_mps as require_mps, require_multi_device as require_multi_device
from .testing import require_multi_gpu as require_multi_gpu, require_multi_gpu_or_xpu as require_multi_gpu_or_xpu
from .testing import require_multi_xpu as require_multi_xpu, require_musa as require_musa
from .testing import require_non_cpu as require_non_cpu, require_non_hpu as require_non_hpu
from .testing import require_non_torch_xla as require_non_torch_xla, require_non_xpu as require_non_xpu
from .testing import require_npu as require_npu, require_pippy as require_pippy, require_sdaa as require_sdaa
from .testing import require_single_device as require_single_device, require_single_gpu as require_single_gpu
from .testing import require_single_xpu as require_single_xpu, require_torch_min_version as require_torch_min_version
from .testing import require_torchao as require_torchao, require_torchvision as require_torchvision
from .testing import require_tpu as require_tpu, require_transformer_engine as require_transformer_engine
from .testing import require_transformer_engine_mxfp8 as require_transformer_engine_mxfp8, require_xpu as require_xpu
from .testing import run_first as run_first, skip as skip, slow as slow, torch_device as torch_device
from .training import RegressionDataset as RegressionDataset, RegressionModel as RegressionModel
