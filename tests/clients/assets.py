"""Tiny models, tokenizers and data, made here from configurations and a fixed seed; nothing is downloaded.

python assets.py FOLDER
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

WORDS = "the cat dog sat ran on a mat hill red blue big small fast slow and or not is was tree house".split()  # noqa: SIM905
CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
TASK = """task: cats
dataset_path: json
dataset_kwargs:
  data_files: {data}
test_split: train
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{label}}}}"
doc_to_choice: [" cat", " dog"]
metric_list:
  - metric: acc
"""


def sentences() -> list[str]:
    """400 sentences of a small language."""
    draw = random.Random(0)
    return [" ".join(draw.choice(WORDS) for _ in range(draw.randint(4, 9))) for _ in range(400)]


def word_tokenizer(text: list[str]) -> PreTrainedTokenizerFast:
    """A tokenizer of BERT's kind."""
    words = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words.train_from_iterator(text, trainers.WordPieceTrainer(vocab_size=200, special_tokens=special))
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"unk": "[UNK]", "pad": "[PAD]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    return PreTrainedTokenizerFast(
        tokenizer_object=words, model_max_length=32, **{f"{name}_token": token for name, token in names.items()}
    )


def byte_tokenizer(text: list[str]) -> PreTrainedTokenizerFast:
    """A tokenizer of GPT's kind, with a template for conversations."""
    pieces = Tokenizer(models.BPE())
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|endoftext|>", "<pad>"])
    pieces.train_from_iterator(text, trainer)
    ends = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<pad>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pieces, model_max_length=64, **ends)
    tokenizer.chat_template = CHAT
    return tokenizer


def write_lines(path: Path, rows: list[dict[str, object]]) -> None:
    """One JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(row) for row in rows))


def main(folder: Path) -> None:
    """``folder`` holds what the programs read."""
    text = sentences()
    torch.manual_seed(0)
    words, pieces = word_tokenizer(text), byte_tokenizer(text)
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    made = {
        "bert": BertForSequenceClassification(BertConfig(vocab_size=len(words), max_position_embeddings=64, **small)),
        "llama": LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(pieces), max_position_embeddings=128, num_key_value_heads=2, pad_token_id=1,
                tie_word_embeddings=False, **small, **ends,
            )
        ),
        "gpt2": GPT2LMHeadModel(
            GPT2Config(vocab_size=len(pieces), n_embd=32, n_layer=2, n_head=2, n_positions=128, **ends)
        ),
    }  # fmt: skip
    for name, model in made.items():
        model.save_pretrained(folder / name)
        (words if name == "bert" else pieces).save_pretrained(folder / name)
    write_lines(folder / "text" / "train.jsonl", [{"text": each} for each in text[:64]])
    pairs = zip(text[:48], text[48:96], strict=True)
    write_lines(folder / "pairs" / "train.jsonl", [{"anchor": one, "positive": other} for one, other in pairs])
    answers = zip(text[200:232], text[232:264], strict=True)
    told = [{"prompt": "the cat", "chosen": f" {good}", "rejected": f" {bad}"} for good, bad in answers]
    write_lines(folder / "choices" / "train.jsonl", told)
    labelled = [{"text": each, "label": int("dog" in each.split())} for each in text[100:140]]
    write_lines(folder / "task" / "cats.jsonl", labelled)
    (folder / "task" / "cats.yaml").write_text(TASK.format(data=folder / "task" / "cats.jsonl"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
