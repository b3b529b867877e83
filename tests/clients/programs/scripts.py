"""Six programs in the form of diffusers' training scripts, on tiny models.

python scripts.py NAME [resume]
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from diffusers import StableDiffusionPipeline, UNet2DConditionModel
from diffusers.training_utils import EMAModel
from diffusers.utils import convert_state_dict_to_diffusers, convert_unet_state_dict_to_peft
from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict
from report import weight_of
from script_loop import Batch, Hook, Script, digits, noised, run, stacked, text_encoder, unet

from accelerate import Accelerator


def guess(model: Any, encoder: Any, batch: Batch, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(the noise that ``model`` finds, the noise that is there)."""
    noisy, moments, noise = noised(batch["pixels"])
    words = encoder(batch["words"], return_dict=False)[0]
    return model(noisy, moments, words, return_dict=False, **more)[0], noise


def text_to_image(_accelerator: Accelerator) -> Script:
    """One model is trained, a text encoder is frozen; an average of the weights is kept and saved by hooks."""
    model, encoder = unet(), text_encoder().requires_grad_(False)

    def loss(batch: Batch, models: dict[str, Any]) -> torch.Tensor:
        found, noise = guess(models["unet"], encoder, batch)
        return torch.nn.functional.mse_loss(found.float(), noise.float())

    ema = EMAModel(model.parameters(), model_cls=UNet2DConditionModel, model_config=model.config)
    return Script("text_to_image", {"unet": model}, loss, digits(24), stacked, list(model.parameters()), ema)


def dreambooth(accelerator: Accelerator) -> Script:
    """Preserves the prior: pictures of the class are made first; the text encoder is trained beside the model."""
    model, encoder = unet(), text_encoder()
    mine, made = digits(12), []
    with accelerator.main_process_first():
        for index, each in enumerate(digits(12, start=40)):
            draw = torch.Generator().manual_seed(index)
            made.append({**each, "pixels": torch.randn(1, 8, 8, generator=draw)})

    def collate(rows: list[Any]) -> Batch:
        return stacked([one for one, _other in rows] + [other for _one, other in rows])

    def loss(batch: Batch, models: dict[str, Any]) -> torch.Tensor:
        found, noise = guess(models["unet"], models["text_encoder"], batch)
        found, found_prior = torch.chunk(found, 2)
        noise, noise_prior = torch.chunk(noise, 2)
        prior = torch.nn.functional.mse_loss(found_prior, noise_prior)
        return torch.nn.functional.mse_loss(found, noise) + prior

    both = [*model.parameters(), *encoder.parameters()]
    pairs = list(zip(mine, made, strict=True)) * 2
    return Script("dreambooth", {"unet": model, "text_encoder": encoder}, loss, pairs, collate, both)


def lora(_accelerator: Accelerator) -> Script:
    """Adapters in a frozen model; hooks save and load the adapters alone."""
    model, encoder = unet().requires_grad_(False), text_encoder().requires_grad_(False)
    model.add_adapter(LoraConfig(r=2, lora_alpha=2, init_lora_weights="gaussian", target_modules=["to_q", "to_v"]))

    def loss(batch: Batch, models: dict[str, Any]) -> torch.Tensor:
        found, noise = guess(models["unet"], encoder, batch)
        return torch.nn.functional.mse_loss(found, noise)

    def hooks(accelerator: Accelerator, _script: Script) -> tuple[Hook, Hook]:
        def save(models: list[Any], weights: list[Any], output_dir: str) -> None:
            if accelerator.is_main_process:
                for each in models:
                    adapters = convert_state_dict_to_diffusers(
                        get_peft_model_state_dict(accelerator.unwrap_model(each))
                    )
                    weights.pop()
                    StableDiffusionPipeline.save_lora_weights(output_dir, unet_lora_layers=adapters)

        def load(models: list[Any], input_dir: str) -> None:
            while models:
                plain = accelerator.unwrap_model(models.pop())
                stored, _alphas = StableDiffusionPipeline.lora_state_dict(input_dir)
                stored = {name.removeprefix("unet."): tensor for name, tensor in stored.items()}
                stored = convert_unet_state_dict_to_peft(stored)
                unknown = set_peft_model_state_dict(plain, stored, adapter_name="default").unexpected_keys
                assert not unknown, unknown

        return save, load

    def final(_accelerator: Accelerator, models: dict[str, Any], folder: str) -> dict[str, Any]:
        adapters = convert_state_dict_to_diffusers(get_peft_model_state_dict(models["unet"]))
        StableDiffusionPipeline.save_lora_weights(folder, unet_lora_layers=adapters)
        return {"adapters": sum(each.double().abs().sum().item() for each in adapters.values())}

    trained = [each for each in model.parameters() if each.requires_grad]
    return Script("lora", {"unet": model}, loss, digits(24), stacked, trained, hooks=hooks, final=final)


def controlled(_accelerator: Accelerator) -> Script:
    """A network beside a frozen model is trained on conditions; its checkpoints hold it alone."""
    from diffusers import ControlNetModel

    base, encoder = unet().requires_grad_(False), text_encoder().requires_grad_(False)
    control = ControlNetModel.from_unet(base, conditioning_channels=1, conditioning_embedding_out_channels=(8, 8))

    def loss(batch: Batch, models: dict[str, Any]) -> torch.Tensor:
        noisy, moments, noise = noised(batch["pixels"])
        words = encoder(batch["words"], return_dict=False)[0]
        edges = torch.nn.functional.interpolate((batch["pixels"] > 0).float(), scale_factor=2)
        down, middle = models["control"](noisy, moments, words, controlnet_cond=edges, return_dict=False)
        found = base(noisy, moments, words, down_block_additional_residuals=down,
                     mid_block_additional_residual=middle, return_dict=False)[0]  # fmt: skip
        return torch.nn.functional.mse_loss(found, noise)

    def hooks(accelerator: Accelerator, _script: Script) -> tuple[Hook, Hook]:
        def save(models: list[Any], weights: list[Any], output_dir: str) -> None:
            if accelerator.is_main_process:
                left = len(weights) - 1
                while len(weights) > 0:
                    weights.pop()
                    models[left].save_pretrained(os.path.join(output_dir, "controlnet"))
                    left -= 1

        def load(models: list[Any], input_dir: str) -> None:
            while len(models) > 0:
                each = models.pop()
                stored = ControlNetModel.from_pretrained(input_dir, subfolder="controlnet")
                each.register_to_config(**stored.config)
                each.load_state_dict(stored.state_dict())

        return save, load

    return Script("controlled", {"control": control}, loss, digits(24), stacked, list(control.parameters()),
                  hooks=hooks)  # fmt: skip


def textual_inversion(accelerator: Accelerator) -> Script:
    """One row of the embeddings is trained, the others are put back after every update; no hooks."""
    model, encoder = unet().requires_grad_(False), text_encoder()
    encoder.requires_grad_(False)
    table = encoder.get_input_embeddings().weight.requires_grad_(True)
    original, new = table.detach().clone(), 12

    def loss(batch: Batch, models: dict[str, Any]) -> torch.Tensor:
        found, noise = guess(model, models["text_encoder"], batch)
        return torch.nn.functional.mse_loss(found, noise)

    def restore(models: dict[str, Any]) -> None:
        others = torch.arange(len(original)) != new
        with torch.no_grad():
            weights = accelerator.unwrap_model(models["text_encoder"]).get_input_embeddings().weight
            weights[others] = original[others]

    def final(_accelerator: Accelerator, models: dict[str, Any], folder: str) -> dict[str, Any]:
        learned = models["text_encoder"].get_input_embeddings().weight[new].detach().cpu()
        accelerator.save({"word": learned}, os.path.join(folder, "learned.safetensors"), safe_serialization=True)
        return {"learned": learned.tolist()}

    return Script("textual_inversion", {"text_encoder": encoder}, loss, digits(24), stacked, [table],
                  after_step=restore, final=final)  # fmt: skip


def consistency(accelerator: Accelerator) -> Script:
    """A student is trained against a teacher and against its own average, which a hook saves as a model of its own."""
    teacher, encoder, student, target = unet(), text_encoder(), unet(), unet()
    target.load_state_dict(student.state_dict())
    for each in (teacher, encoder, target):
        each.requires_grad_(False)

    def loss(batch: Batch, models: dict[str, Any]) -> torch.Tensor:
        found, noise = guess(models["unet"], encoder, batch)
        with torch.no_grad(), accelerator.autocast():
            taught, _noise = guess(teacher, encoder, batch)
            before, _noise = guess(target, encoder, batch)
        return torch.nn.functional.huber_loss(found, (taught + before) / 2 + 0.1 * noise)

    def follow(models: dict[str, Any]) -> None:
        trained = accelerator.unwrap_model(models["unet"]).parameters()
        with torch.no_grad():
            for one, other in zip(target.parameters(), trained, strict=True):
                one.lerp_(other, 0.1)

    def hooks(accelerator: Accelerator, _script: Script) -> tuple[Hook, Hook]:
        def save(models: list[Any], weights: list[Any], output_dir: str) -> None:
            if accelerator.is_main_process:
                target.save_pretrained(os.path.join(output_dir, "unet_target"))
                for each in models:
                    accelerator.unwrap_model(each).save_pretrained(os.path.join(output_dir, "unet"))
                    weights.pop()

        def load(models: list[Any], input_dir: str) -> None:
            stored = UNet2DConditionModel.from_pretrained(os.path.join(input_dir, "unet_target"))
            target.load_state_dict(stored.state_dict())
            for _ in range(len(models)):
                each = models.pop()
                stored = UNet2DConditionModel.from_pretrained(input_dir, subfolder="unet")
                each.register_to_config(**stored.config)
                each.load_state_dict(stored.state_dict())

        return save, load

    def final(_accelerator: Accelerator, _models: dict[str, Any], _folder: str) -> dict[str, Any]:
        return {"target": weight_of(target)}

    return Script("consistency", {"unet": student}, loss, digits(24), stacked, list(student.parameters()),
                  hooks=hooks, after_step=follow, final=final)  # fmt: skip


if __name__ == "__main__":
    scripts: dict[str, Callable[[Accelerator], Script]] = {
        "text_to_image": text_to_image, "dreambooth": dreambooth, "lora": lora, "controlled": controlled,
        "textual_inversion": textual_inversion, "consistency": consistency,
    }  # fmt: skip
    run(scripts[sys.argv[1]], sys.argv[1], "resume" in sys.argv)
