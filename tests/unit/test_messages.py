"""Several tensors as one message: what comes out is what went in, in memory of its own."""

from __future__ import annotations

import pytest
import torch

from accelerate.messages import Message, message_for


def sent(message: Message, *ranks: list[torch.Tensor]) -> list[torch.Tensor] | None:
    """What rank 0 takes out when every rank has sent its tensors."""
    others = [Message(_described(tensors), len(ranks)).pack(tensors)[0] for tensors in ranks[1:]]
    own, joined = message.pack(ranks[0])
    joined.copy_(torch.cat([own, *others]))
    return message.unpack()


def _described(tensors: list[torch.Tensor]) -> tuple[tuple[torch.Size, torch.dtype, torch.device], ...]:
    return tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in tensors)


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
        monkeypatch.setattr("accelerate.messages._KEPT_BYTES", 0)
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
    assert message_for([torch.ones(2)], 2) is None
    assert message_for([torch.ones(2), torch.ones(2, dtype=torch.complex64)], 2) is None
    assert message_for([torch.ones(2 << 20), torch.ones(2)], 2) is None
    assert message_for([torch.ones(2), torch.ones(2, device="meta")], 2) is None
    assert message_for([torch.ones(2), torch.ones(2)], 2) is message_for([torch.ones(2), torch.ones(2)], 2)
