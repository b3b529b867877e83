"""Pipelines of diffusers with their parts off the device, in the ways that it offers, beside the whole pipeline."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from report import report
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast

from accelerate import cpu_offload, cpu_offload_with_hook
from accelerate.hooks import remove_hook_from_module


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "cat": 3, "red": 4}, unk_token="</s>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=8, **ends)


def pipeline() -> Any:
    """A small Stable Diffusion with random weights."""
    torch.manual_seed(0)
    text = CLIPTextModel(
        CLIPTextConfig(vocab_size=8, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                       max_position_embeddings=8, bos_token_id=0, eos_token_id=1, pad_token_id=1)
    )  # fmt: skip
    unet = UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16, attention_head_dim=4,
    )  # fmt: skip
    vae = AutoencoderKL(
        block_out_channels=(8, 16), norm_num_groups=4, latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, sample_size=16,
    )  # fmt: skip
    made = StableDiffusionPipeline(
        vae=vae, text_encoder=text, tokenizer=tokenizer(), unet=unet, scheduler=DDIMScheduler(num_train_timesteps=50),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    made.set_progress_bar_config(disable=True)
    return made


def image(made: Any) -> torch.Tensor:
    drawn = made(
        "a red cat", num_inference_steps=2, generator=torch.Generator().manual_seed(0), output_type="pt", height=16,
        width=16,
    )  # fmt: skip
    return drawn.images


def attempt(change: Any, whole: torch.Tensor) -> Any:
    """Whether the changed pipeline draws the same; or in what words diffusers refused."""
    made = pipeline()
    try:
        changed = change(made) or made
        return bool(torch.equal(image(changed), whole))
    except Exception as error:  # what this pipeline can't do on a CPU is a result as well
        return f"{type(error).__name__}: {str(error)[:100]}"


def parts_by_hand(made: Any) -> None:
    """Each part goes to the device when it is called, and the one before it leaves: as pipelines chain them."""
    hook = None
    for part in (made.text_encoder, made.unet, made.vae):
        _, hook = cpu_offload_with_hook(part, "cpu", prev_module_hook=hook)


def hooked_and_bare_again(made: Any) -> None:
    """What offloads leaf by leaf can be taken off again."""
    for part in (made.unet, made.text_encoder):
        cpu_offload(part, "cpu")
        remove_hook_from_module(part, recurse=True)


def loaded(folder: str, **options: Any) -> Any:
    made = StableDiffusionPipeline.from_pretrained(folder, safety_checker=None, **options)
    made.set_progress_bar_config(disable=True)
    return made


whole = image(pipeline())
saved = tempfile.mkdtemp()
pipeline().save_pretrained(saved)


def unet_in_pieces(made: Any) -> None:
    """A part that was loaded over the processor and the disk."""
    split = {name: "disk" if name.startswith("up") else "cpu" for name, _ in made.unet.named_children()}
    made.unet = UNet2DConditionModel.from_pretrained(
        saved, subfolder="unet", device_map=split, offload_folder=tempfile.mkdtemp()
    )


report(
    model_offload=attempt(lambda made: made.enable_model_cpu_offload(device="cpu"), whole),
    sequential_offload=attempt(lambda made: made.enable_sequential_cpu_offload(device="cpu"), whole),
    group_offload=attempt(
        lambda made: made.unet.enable_group_offload(torch.device("cpu"), torch.device("cpu"), "leaf_level"), whole
    ),
    balanced=attempt(lambda made: loaded(saved, device_map="balanced"), whole),
    on_cpu=attempt(lambda made: loaded(saved, device_map="cpu"), whole),
    low_memory=attempt(lambda made: loaded(saved, low_cpu_mem_usage=True), whole),
    plain_loading=attempt(lambda made: loaded(saved, low_cpu_mem_usage=False), whole),
    unet_in_pieces=attempt(unet_in_pieces, whole),
    parts_by_hand=attempt(parts_by_hand, whole),
    hooks_removed=attempt(hooked_and_bare_again, whole),
    sum=whole.double().sum().item(),
)
