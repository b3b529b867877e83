"""What Megatron-LM is told: degrees of parallelism, and arguments that follow from the prepared objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..errors import SettingError
from ..optional import require
from ..settings.env import fill_unset
from ..settings.megatron import MegatronOptions
from .megatron_models import network_size

#: Options that Megatron-LM knows under another name.
_RENAMED = {
    "tp_degree": "tensor_model_parallel_size",
    "pp_degree": "pipeline_model_parallel_size",
    "sequence_parallelism": "sequence_parallel",
    "gradient_clipping": "clip_grad",
}
_TAKEN_OVER = (
    "pipeline_model_parallel_split_rank",
    "num_layers_per_virtual_pipeline_stage",
    "use_distributed_optimizer",
    "num_micro_batches",
    "consumed_samples",
    "no_wd_decay_cond",
    "scale_lr_cond",
    "lr_mult",
    "megatron_dataset_flag",
    "eval_iters",
    "eval_interval",
    "use_custom_fsdp",
    "no_load_optim",
    "eod_mask_loss",
    "no_save_optim",
    "optimizer_cpu_offload",
    "overlap_cpu_optimizer_d2h_h2d",
    "use_precision_aware_optimizer",
    "decoder_last_pipeline_num_layers",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "attention_backend",
    "expert_model_parallel_size",
    "context_parallel_size",
    "attention_dropout",
    "hidden_dropout",
    "attention_softmax_in_fp32",
    "expert_tensor_parallel_size",
    "calculate_per_token_loss",
    "use_rotary_position_embeddings",
)
_SCHEDULE = (
    "lr_decay_iters",
    "lr_decay_samples",
    "lr_decay_style",
    "lr_warmup_fraction",
    "lr_warmup_iters",
    "lr_warmup_samples",
    "min_lr",
    "start_weight_decay",
    "end_weight_decay",
    "train_iters",
    "train_samples",
    "weight_decay_incr_style",
)


@dataclass
class MegatronLMPlugin(MegatronOptions):
    """Megatron-LM's arguments: ``megatron_lm_default_args`` is the dictionary that it gets."""

    def __post_init__(self) -> None:
        fill_unset(self)
        samples = list(self.consumed_samples or [])
        if samples:  # train, evaluation, test
            self.consumed_samples = [*samples, 0, 0, 0][: max(3, len(samples))]
        self._set_ddp_implementation(local=self.pp_degree > 1 or self.use_distributed_optimizer)
        self.megatron_lm_default_args: dict[str, Any] = {
            **{theirs: getattr(self, ours) for ours, theirs in _RENAMED.items()},
            **{name: getattr(self, name) for name in _TAKEN_OVER},
            "DDP_impl": self.DDP_impl,
        }
        if self.recompute_activations:
            # Megatron takes a method and a number of layers for full recomputation only.
            for name, value in (("granularity", "selective"), ("method", None), ("num_layers", None)):
                self.megatron_lm_default_args[f"recompute_{name}"] = value
        if self.tensorboard_dir is not None:
            self.megatron_lm_default_args["tensorboard_dir"] = self.tensorboard_dir
            if self.set_all_logging_options:
                self.set_tensorboard_logging_options()
        self.megatron_lm_default_args.update(self.other_megatron_args or {})

    def _set_ddp_implementation(self, *, local: bool) -> None:
        self.DDP_impl = "local" if local else "torch"

    def set_network_size_args(self, model: Any, batch_data: Any = None) -> None:
        """The arguments say the size of ``model``, read from its configuration.

        Raises:
            SettingError: no parser is registered for the model's type.
        """
        self.megatron_lm_default_args.update(network_size(self, model, batch_data))

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """The model computes in ``mixed_precision``."""
        if mixed_precision in ("fp16", "bf16"):
            self.megatron_lm_default_args[mixed_precision] = True
        if mixed_precision == "bf16":  # gradients are accumulated in fp32 by Megatron's own implementation
            self._set_ddp_implementation(local=True)
            self.megatron_lm_default_args["DDP_impl"] = self.DDP_impl

    def set_training_args(self, micro_batch_size: int, dp_degree: int) -> None:
        """The arguments say the size of a micro-batch, and of all of them on all data-parallel ranks."""
        self.data_parallel_size = dp_degree
        self.micro_batch_size = micro_batch_size
        self.global_batch_size = dp_degree * micro_batch_size * self.num_micro_batches
        for name in ("data_parallel_size", "micro_batch_size", "global_batch_size"):
            self.megatron_lm_default_args[name] = getattr(self, name)

    def set_optimizer_type(self, optimizer: torch.optim.Optimizer) -> None:
        """Megatron-LM makes an optimizer like ``optimizer``, which has to be of the Adam or SGD family."""
        name, defaults = type(optimizer).__name__.lower(), optimizer.defaults
        arguments = self.megatron_lm_default_args
        if "adam" in name:
            arguments["optimizer"] = "adam"
            arguments["adam_beta1"], arguments["adam_beta2"] = defaults["betas"]
            arguments["adam_eps"] = defaults["eps"]
        elif "sgd" in name:
            arguments["optimizer"] = "sgd"
            arguments["sgd_momentum"] = defaults["momentum"]
        else:
            raise SettingError(f"Optimizer {name} is not supported by Megatron-LM: use one of the Adam or SGD family.")
        arguments["lr"] = defaults["lr"]
        arguments["weight_decay"] = defaults["weight_decay"]

    def set_scheduler_args(self, scheduler: Any) -> None:
        """The arguments say how long the run is and how the learning rate goes: by options, else by ``scheduler``."""
        if self.train_iters is None:
            self.train_iters = scheduler.total_num_steps // self.megatron_lm_default_args["data_parallel_size"]
            self.train_samples = None  # the length of a run is given once
        if self.lr_warmup_iters is None:
            self.lr_warmup_iters = scheduler.warmup_num_steps // self.megatron_lm_default_args["data_parallel_size"]
        if self.lr_warmup_samples is None:
            self.lr_warmup_samples = 0
        self.megatron_lm_default_args.update({name: getattr(self, name) for name in _SCHEDULE})

    def set_tensorboard_logging_options(self) -> None:
        """Megatron-LM logs all that it can log."""
        library = require("megatron.training.arguments", purpose="set_all_logging_options")
        import argparse

        parser = library._add_logging_args(argparse.ArgumentParser())
        known, _ = parser.parse_known_args([])
        everything = {name: True for name, value in vars(known).items() if value is False}
        self.megatron_lm_default_args.update(everything)
