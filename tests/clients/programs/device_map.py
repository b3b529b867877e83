"""from_pretrained with device maps: what is loaded computes, generates and saves as the whole model; PEFT on top."""

from __future__ import annotations

import tempfile

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from report import ASSETS, report
from transformers import AutoModelForCausalLM, AutoTokenizer

LLAMA = f"{ASSETS}/llama"
SPLIT = {
    "model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu",
    "model.rotary_emb": "cpu", "lm_head": "disk",
}  # fmt: skip

inputs = AutoTokenizer.from_pretrained(LLAMA)("the cat sat", return_tensors="pt")
inputs.pop("token_type_ids", None)
whole = AutoModelForCausalLM.from_pretrained(LLAMA)
expected = whole(**inputs).logits
generated = whole.generate(**inputs, max_new_tokens=4, do_sample=False)

automatic = AutoModelForCausalLM.from_pretrained(LLAMA, device_map="auto")
split = AutoModelForCausalLM.from_pretrained(LLAMA, device_map=SPLIT, offload_folder=tempfile.mkdtemp())
folder = tempfile.mkdtemp()
split.save_pretrained(folder)
saved = AutoModelForCausalLM.from_pretrained(folder).state_dict()

adapter = tempfile.mkdtemp()
with_adapter = get_peft_model(whole, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
adapted = with_adapter(**inputs).logits
with_adapter.save_pretrained(adapter)
base = AutoModelForCausalLM.from_pretrained(LLAMA, device_map=SPLIT, offload_folder=tempfile.mkdtemp())
offloaded = PeftModel.from_pretrained(base, adapter, max_memory={"cpu": 60_000}, offload_folder=tempfile.mkdtemp())

report(
    automatic=bool(torch.equal(automatic(**inputs).logits, expected)),
    split=bool(torch.equal(split(**inputs).logits, expected)),
    offloaded_device=str(split.model.layers[1].self_attn.q_proj.weight.device),
    generates=bool(torch.equal(split.generate(**inputs, max_new_tokens=4, do_sample=False), generated)),
    saves=all(
        torch.equal(tensor, saved[name])
        for name, tensor in AutoModelForCausalLM.from_pretrained(LLAMA).state_dict().items()
    ),
    adapter_offloaded=bool(torch.allclose(offloaded(**inputs).logits, adapted, atol=1e-6)),
)
