"""The names of this address, for editors, type checkers and `names_of_stub`: where each is defined."""

# isort: off
from ..devices.hardware import is_bf16_available as is_bf16_available, is_cuda_available as is_cuda_available
from ..devices.hardware import is_fp16_available as is_fp16_available, is_fp8_available as is_fp8_available
from ..devices.hardware import is_habana_gaudi1 as is_habana_gaudi1, is_hpu_available as is_hpu_available
from ..devices.hardware import is_mlu_available as is_mlu_available, is_mps_available as is_mps_available
from ..devices.hardware import is_musa_available as is_musa_available, is_neuron_available as is_neuron_available
from ..devices.hardware import is_npu_available as is_npu_available, is_rocm_available as is_rocm_available
from ..devices.hardware import is_sdaa_available as is_sdaa_available, is_torch_xla_available as is_torch_xla_available
from ..devices.hardware import is_xccl_available as is_xccl_available, is_xpu_available as is_xpu_available
from ..optional import is_4bit_bnb_available as is_4bit_bnb_available, is_8bit_bnb_available as is_8bit_bnb_available
from ..optional import is_aim_available as is_aim_available, is_amdsmi_available as is_amdsmi_available
from ..optional import is_bitsandbytes_multi_backend_available as is_bitsandbytes_multi_backend_available
from ..optional import is_bnb_available as is_bnb_available, is_boto3_available as is_boto3_available
from ..optional import is_clearml_available as is_clearml_available, is_comet_ml_available as is_comet_ml_available
from ..optional import is_datasets_available as is_datasets_available, is_deepspeed_available as is_deepspeed_available
from ..optional import is_dvclive_available as is_dvclive_available
from ..optional import is_import_timer_available as is_import_timer_available, is_lomo_available as is_lomo_available
from ..optional import is_matplotlib_available as is_matplotlib_available
from ..optional import is_megatron_lm_available as is_megatron_lm_available, is_mlflow_available as is_mlflow_available
from ..optional import is_msamp_available as is_msamp_available, is_numpy_available as is_numpy_available
from ..optional import is_pandas_available as is_pandas_available, is_peft_available as is_peft_available
from ..optional import is_pippy_available as is_pippy_available, is_pynvml_available as is_pynvml_available
from ..optional import is_pytest_available as is_pytest_available, is_rich_available as is_rich_available
from ..optional import is_sagemaker_available as is_sagemaker_available
from ..optional import is_schedulefree_available as is_schedulefree_available
from ..optional import is_swanlab_available as is_swanlab_available
from ..optional import is_tensorboard_available as is_tensorboard_available, is_timm_available as is_timm_available
from ..optional import is_torch_distributed_available as is_torch_distributed_available
from ..optional import is_torchao_available as is_torchao_available, is_torchdata_available as is_torchdata_available
from ..optional import is_torchdata_stateful_dataloader_available as is_torchdata_stateful_dataloader_available
from ..optional import is_torchvision_available as is_torchvision_available, is_tqdm_available as is_tqdm_available
from ..optional import is_trackio_available as is_trackio_available
from ..optional import is_transformer_engine_available as is_transformer_engine_available
from ..optional import is_transformer_engine_mxfp8_available as is_transformer_engine_mxfp8_available
from ..optional import is_transformers_available as is_transformers_available
from ..optional import is_triton_available as is_triton_available, is_wandb_available as is_wandb_available
from ..optional import is_weights_only_available as is_weights_only_available, torchao_required as torchao_required
