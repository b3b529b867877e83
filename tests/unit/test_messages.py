"""Several tensors as one message: what comes out is what went in, in memory of its own."""

from __future__ import annotations

import pytest
import torch

from accelerate.distributed.messages import (
    Description,
    Message,
    MessageLengths,
    describe,
    joined_message_for,
    message_for,
)


def sent(message: Message, *ranks: list[torch.Tensor]) -> list[torch.Tensor] | None:
    """What rank 0 takes out when every rank has sent its tensors."""
    others = [_packed(tensors, len(ranks)) for tensors in ranks[1:]]
    buffers = message.buffers()
    buffers.pack(ranks[0])
    buffers.joined.copy_(torch.cat([buffers.own, *others]))
    return buffers.unpack() if buffers.agree() else None


def _packed(tensors: list[torch.Tensor], size: int) -> torch.Tensor:
    buffers = Message(_described(tensors), size).buffers()
    buffers.pack(tensors)
    return buffers.own


def _described(tensors: list[torch.Tensor]) -> Description:
    return describe(tensors, plain=True)


def batch(seed: int) -> list[torch.Tensor]:
    """Tensors of every kind of shape, layout and width."""
    torch.manual_seed(seed)
    return [
        torch.randn(3, 5),
        torch.randn(5, 3).t(),
        torch.randint(9, (3,)),
        torch.randn(1, 4),
        torch.tensor(seed),
        torch.rand(3) > 0.5,
        torch.empty(0, 2),
        torch.empty(3, 0),
        torch.randn(7).to(torch.bfloat16),
        torch.randn(2, 3, dtype=torch.float64, requires_grad=True),
    ]


@pytest.mark.parametrize("kept", [True, False])
def test_every_tensor_is_joined_rank_after_rank(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kept:
        monkeypatch.setattr("accelerate.distributed.messages._REUSED_BYTES", 0)
    ranks = [batch(seed) for seed in range(3)]
    message = Message(_described(ranks[0]), 3)
    for _ in range(2):
        joined = sent(message, *ranks)
        assert joined is not None
        for number, tensor in enumerate(joined):
            parts = [tensors[number].detach().reshape(tensors[number].shape or (1,)) for tensors in ranks]
            assert torch.equal(tensor, torch.cat(parts))
            assert tensor.dtype == parts[0].dtype
            assert tensor.is_contiguous()
            assert not tensor.requires_grad


def test_results_lie_in_memory_of_their_own() -> None:
    first, second = batch(0), batch(1)
    message = Message(_described(first), 1)
    before = sent(message, first)
    assert before is not None
    copies = [tensor.clone() for tensor in before]
    after = sent(message, second)
    assert after is not None
    assert all(map(torch.equal, before, copies))
    memory = [tensor.untyped_storage().data_ptr() for tensor in [*before, *after] if tensor.numel()]
    assert len(set(memory)) == len(memory)


def test_tensors_of_other_shapes_and_equal_bytes_are_noticed() -> None:
    mine, other = [torch.ones(2, 3), torch.ones(2)], [torch.ones(3, 2), torch.ones(2)]
    assert sent(Message(_described(mine), 2), mine, other) is None


def test_one_tensor_complex_ones_large_ones_and_two_devices_travel_alone() -> None:
    assert joined_message_for([torch.ones(2)], 2) is None
    assert joined_message_for([torch.ones(2), torch.ones(2, dtype=torch.complex64)], 2) is None
    assert joined_message_for([torch.ones(2 << 20), torch.ones(2)], 2) is None
    assert joined_message_for([torch.ones(2), torch.ones(2, device="meta")], 2) is None
    two = [torch.ones(2), torch.ones(2)]
    assert joined_message_for(two, 2) is joined_message_for(two, 2) is not None


def test_a_message_of_a_given_length_carries_what_fits_and_its_checksum_always() -> None:
    short, long = _described([torch.ones(8)]), _described([torch.ones(2000)])
    for description, is_whole in ((short, True), (long, False)):
        message = message_for(description, 2, "gather", 4096)
        assert message.is_whole is is_whole
        assert message.buffers().own.numel() == 4096
    first, second = (message_for(short, 1, operation, 4096).buffers() for operation in ("gather", "reduce"))
    assert not torch.equal(first.own[:8], second.own[:8])


def test_the_length_of_the_next_message_follows_from_what_was_agreed_on() -> None:
    """In a loop that takes turns, every message after the first round has the length that it needs."""
    lengths = MessageLengths()
    needed = {1: 8, 2: 130_000, 3: 700_000}
    seen = []
    for kind in (1, 2, 3) * 3:
        seen.append(needed[kind] <= lengths.next < 1.2 * max(needed[kind], 4096))
        lengths.note(kind, needed[kind])
    assert seen == [True, False, False, True] + [True] * 5
