"""Sequences in parts through DeepSpeed (ALST, Ulysses): the documented loop on real ranks is that of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.nn import functional
from torch.utils.data import DataLoader

from accelerate import Accelerator, DeepSpeedPlugin, ParallelismConfig
from accelerate.data_loader.adapter import SequenceShardLoader
from accelerate.errors import PreparationError
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedSequenceParallelConfig
from tests.ranks import RankFailed, run_on_ranks

pytest.importorskip("transformers", reason="transformers isn't installed: make deepspeed")

LENGTH, ROWS, NUM_BATCHES = 16, 2, 8


def llama(num_stored_heads: int = 2, num_heads: int = 4, **options: Any) -> Any:
    """A tiny Llama with fewer heads of keys than of queries, always the same."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 4 * num_heads, "intermediate_size": 32, "num_attention_heads": num_heads}
    config = LlamaConfig(
        vocab_size=64, num_hidden_layers=2, num_key_value_heads=num_stored_heads, use_cache=False, **sizes
    )
    return LlamaForCausalLM._from_config(config, **{"attn_implementation": "sdpa", **options})


def texts() -> list[dict[str, torch.Tensor]]:
    """Token ids with their places, and prompts of several lengths, of which nothing is learned."""
    generator = torch.Generator().manual_seed(1)
    rows: list[dict[str, torch.Tensor]] = []
    for number in range(ROWS * NUM_BATCHES):
        ids = torch.randint(0, 64, (LENGTH,), generator=generator)
        labels = ids.clone()
        labels[: number % 11] = -100
        rows.append({"input_ids": ids, "labels": labels, "position_ids": torch.arange(LENGTH)})
    return rows


def batch_of(number: int) -> dict[str, torch.Tensor]:
    """The rows of one batch, whole."""
    rows = texts()[number * ROWS : (number + 1) * ROWS]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def shared_loss(model: Any, batch: Any) -> torch.Tensor:
    """The loss of whole sequences, as the documented loop computes it from the parts of all ranks."""
    from deepspeed.utils import groups

    group = groups._get_sequence_parallel_group()
    labels = batch["shift_labels"]
    logits = model(**{name: value for name, value in batch.items() if name != "shift_labels"}).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    count = (labels != -100).sum()
    losses: Any = functional.all_gather(loss, group=group)
    counts: Any = functional.all_gather(count, group=group)
    total: Any = sum(one * number for one, number in zip(losses, counts, strict=True) if number > 0)
    return total / sum(counts)


def own_loss(model: Any, batch: Any) -> torch.Tensor:
    """This rank's share of the loss: the mean of all ranks' is that of whole sequences. Nothing is gathered."""
    from deepspeed.utils import groups

    group = groups._get_sequence_parallel_group()
    labels = batch["shift_labels"]
    logits = model(**{name: value for name, value in batch.items() if name != "shift_labels"}).logits
    count = (labels != -100).sum()
    torch.distributed.all_reduce(count, group=group)
    total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total * torch.distributed.get_world_size(group) / count


def started(size: int, stage: int, num_steps: int = 1, **handler: Any) -> Accelerator:
    config = ParallelismConfig(
        sp_backend="deepspeed", sp_size=size, sp_handler=DeepSpeedSequenceParallelConfig(**handler)
    )
    # Built whole, as one process does: random numbers of models that are built in pieces are drawn otherwise.
    built: dict[str, Any] = {"zero3_init_flag": False, "zero3_save_16bit_model": True}
    plugin = DeepSpeedPlugin(zero_stage=stage, gradient_clipping=1.0, **built)
    return Accelerator(
        cpu=True, gradient_accumulation_steps=num_steps, deepspeed_plugin=plugin, parallelism_config=config
    )


def together(
    size: int, stage: int, num_steps: int = 1, num_epochs: int = 1, loss_of: Any = shared_loss, **handler: Any
) -> dict[str, Any]:
    """The documented loop; losses of this rank's groups, gradient norms, rates, and the weights."""
    accelerator = started(size, stage, num_steps, **handler)
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (2 * NUM_BATCHES))
    loader = DataLoader(texts(), batch_size=ROWS)  # pyright: ignore[reportArgumentType]
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    found: dict[str, Any] = {"loss": [], "norm": [], "rate": [], "shapes": [], "length": len(loader)}
    for _ in range(num_epochs):
        for batch in loader:
            found["shapes"].append([list(batch[name].shape) for name in ("input_ids", "shift_labels", "position_ids")])
            with accelerator.accumulate(model):
                loss = loss_of(model, batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    found["norm"].append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            found["loss"].append(float(loss.detach()))
            found["rate"].append(optimizer.param_groups[0]["lr"])
    assert isinstance(loader, SequenceShardLoader)
    found["weights"] = accelerator.get_state_dict(model)
    found["config"] = accelerator.state.deepspeed_plugin.deepspeed_config
    return found


def alone(num_groups: int = 1, size: int = 2, num_steps: int = 1, num_epochs: int = 1) -> dict[str, Any]:
    """The same run of one process in plain torch: what the groups compute at the same time is averaged."""
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (2 * NUM_BATCHES))
    batches = list(DataLoader(texts(), batch_size=ROWS))  # pyright: ignore[reportArgumentType]
    found: dict[str, Any] = {"loss": [], "norm": [], "rate": []}
    ranks = num_groups * size
    for _ in range(num_epochs):
        count = 0
        for start in range(0, NUM_BATCHES, ranks):
            for turn in range(size):
                count += 1
                mine = [batches[start + group * size + turn] for group in range(num_groups)]
                losses = [model(**batch).loss for batch in mine]
                (sum(losses) / len(losses) / num_steps).backward()  # pyright: ignore[reportAttributeAccessIssue]
                found["loss"].append([float(loss.detach()) for loss in losses])
                if count % num_steps == 0 or count == NUM_BATCHES // num_groups:
                    found["norm"].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
                    optimizer.step()
                    optimizer.zero_grad()
                    for _ in range(num_groups):  # a schedule is written for the batches of one process
                        schedule.step()
                found["rate"].append(optimizer.param_groups[0]["lr"])
    found["weights"] = {name: value.detach() for name, value in model.state_dict().items()}
    return found


def assert_same(ranks: list[dict[str, Any]], expected: dict[str, Any], size: int = 2, tolerance: float = 1e-5) -> None:
    """Losses, norms, learning rates and weights of all ranks are those of one process."""
    for rank, found in enumerate(ranks):
        losses = [group_losses[rank // size] for group_losses in expected["loss"]]
        assert found["loss"] == pytest.approx(losses, abs=tolerance)
        assert found["norm"] == pytest.approx(expected["norm"], abs=tolerance)
        assert found["rate"] == pytest.approx(expected["rate"])
    for name, value in ranks[0]["weights"].items():
        assert torch.allclose(value, expected["weights"][name], atol=tolerance), name


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_ranks_compute_sequences_together(stage: int) -> None:
    found = run_on_ranks(together, 2, 2, stage, timeout_seconds=100)
    assert_same(found, run_on_ranks(alone, 1)[0])
    part = [ROWS, LENGTH // 2]
    assert found[0]["shapes"] == [[part] * 3] * NUM_BATCHES and found[0]["length"] == NUM_BATCHES
    assert found[0]["config"]["train_batch_size"] == ROWS


def test_groups_of_ranks_read_different_sequences() -> None:
    # On gloo the gradient of torch's differentiable gather works among all ranks only, so each has its own loss here.
    found = run_on_ranks(together, 4, 2, 2, 1, 1, own_loss, timeout_seconds=110)
    for start in (0, 2):
        means = [sum(losses) / 2 for losses in zip(found[start]["loss"], found[start + 1]["loss"], strict=True)]
        found[start]["loss"] = found[start + 1]["loss"] = means
    assert_same(found, run_on_ranks(alone, 1, 2)[0])
    assert found[0]["config"]["train_batch_size"] == 2 * ROWS


def test_accumulation_goes_on_from_part_to_part() -> None:
    # Windows of three: the last one of a pass is short, and ends with the last part only.
    found = run_on_ranks(together, 2, 2, 1, 3, 2, timeout_seconds=100)
    assert_same(found, run_on_ranks(alone, 1, 1, 2, 3, 2)[0])


def test_sequences_of_one_length_may_be_announced() -> None:
    def run() -> dict[str, Any]:
        return together(2, 1, sp_seq_length=LENGTH, sp_seq_length_is_variable=False, sp_attn_implementation="sdpa")

    assert_same(run_on_ranks(run, 2, timeout_seconds=100), run_on_ranks(alone, 1)[0])


def test_evaluation_skipping_and_leaving() -> None:
    def run() -> None:
        accelerator = started(2, 1)
        model = llama()
        with torch.no_grad():
            expected = [model(**batch_of(number)).loss for number in range(NUM_BATCHES)]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(texts(), batch_size=ROWS)  # pyright: ignore[reportArgumentType]
        model, optimizer, parts = accelerator.prepare(model, optimizer, loader)
        whole = accelerator.prepare(DataLoader(texts(), batch_size=ROWS))  # pyright: ignore[reportArgumentType]
        assert accelerator.deepspeed_ulysses_dl_adapter(parts, model) is parts
        assert isinstance(accelerator.deepspeed_ulysses_dl_adapter(whole, model), SequenceShardLoader)
        assert parts.dataset is loader.dataset and parts.batch_sampler is not None
        rank, rows = accelerator.process_index, [row["input_ids"].tolist() for row in texts()]

        model.eval()
        with torch.no_grad():
            for number, batch in enumerate(whole):  # each rank by itself, with labels as ever
                assert torch.allclose(model(**batch).loss, expected[2 * number + rank], atol=1e-6)
            for number, batch in enumerate(parts):  # all together, although nothing is trained
                found = accelerator.gather(shared_loss(model, batch))
                assert torch.allclose(found, expected[number].expand(2), atol=1e-6)

        half = slice(rank * LENGTH // 2, (rank + 1) * LENGTH // 2)
        first = [batch["input_ids"].tolist() for batch in accelerator.skip_first_batches(parts, 3)]
        assert first == [
            [row[half] for row in rows[start : start + ROWS]] for start in range(3 * ROWS, len(rows), ROWS)
        ]
        for _ in parts:  # left at once
            break
        again = [batch["input_ids"].tolist() for batch in parts]
        assert len(again) == NUM_BATCHES and again[0] == [row[half] for row in rows[:ROWS]]

        accelerator.free_memory()
        assert torch.equal(llama()(**batch_of(rank)).loss, expected[rank])  # transformers' attention is its own again
        AcceleratorState._reset_state()
        repeated = started(2, 2)  # the groups were given back
        model = llama()
        repeated.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)

    run_on_ranks(run, 2, timeout_seconds=100)


def refusal(make: Callable[[], Any], **handler: Any) -> str:
    """What prepare() says to this model."""
    even_batches = handler.pop("even_batches", True)
    AcceleratorState._reset_state()
    accelerator = started(2, 1, **handler)
    accelerator.even_batches = even_batches
    model = make()
    with pytest.raises(PreparationError) as caught:
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(texts(), batch_size=ROWS))  # pyright: ignore[reportArgumentType]
    return str(caught.value)


def test_what_cannot_be_shared_out_is_refused_before_anything_changes() -> None:
    def run() -> dict[str, str]:
        return {
            "another attention": refusal(llama, sp_attn_implementation="flash_attention_2"),
            "masks": refusal(lambda: llama(attn_implementation="eager")),
            "no config": refusal(lambda: torch.nn.Linear(2, 2)),
            "length": refusal(llama, sp_seq_length=15, sp_seq_length_is_variable=False),
            "uneven": refusal(llama, even_batches=False),
            "heads": refusal(lambda: llama(num_stored_heads=3, num_heads=3)),
        }

    found = run_on_ranks(run, 2, timeout_seconds=100)[0]
    words = {
        "another attention": "attn_implementation='sdpa'",
        "masks": "'eager'",
        "no config": "sp_backend='torch'",
        "heads": "3 heads",
        "length": "sp_seq_length=15",
        "uneven": "even_batches=True",
    }
    assert found.keys() == words.keys()
    for name, part in words.items():
        assert part in found[name], f"{name}: {found[name]}"


def test_groups_of_ranks_divide_the_world() -> None:
    with pytest.raises(RankFailed, match="sp_size=3"):
        run_on_ranks(lambda: started(3, 1), 2)
