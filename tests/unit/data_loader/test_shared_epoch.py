"""The samples of an epoch that living ranks share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from accelerate import Accelerator
from accelerate.errors import CheckpointError, PreparationError
from accelerate.guests.fault_tolerance.membership import Membership
from accelerate.guests.fault_tolerance.shared_epoch import SharedEpoch, SharedLoader, own_share
from accelerate.training.accumulation import GradientState


def test_each_member_takes_a_batch_and_the_last_step_is_divided() -> None:
    epoch = SharedEpoch(2, range(7))
    assert epoch.draw([0, 1]) == {0: [0, 1], 1: [2, 3]}
    assert epoch.draw([0, 1]) == {0: [4, 5], 1: [6]}
    assert not epoch.has_step([0, 1])


def test_samples_of_a_rank_that_gave_no_gradient_come_back_first() -> None:
    epoch = SharedEpoch(2, range(8))
    epoch.draw([0, 1])
    epoch.commit([1])
    assert epoch.num_returns == 1
    assert epoch.draw([1]) == {1: [0, 1]}
    assert epoch.draw([1]) == {1: [4, 5]}
    epoch.commit([1])
    assert epoch.num_left == 2


def test_a_window_of_several_steps_is_committed_as_one() -> None:
    epoch = SharedEpoch(1, range(4))
    epoch.draw([0, 1])
    epoch.draw([0, 1])
    epoch.commit([0])
    assert epoch.draw([0]) == {0: [1]}
    assert epoch.draw([0]) == {0: [3]}


def test_a_rank_without_samples_reads_one_that_does_not_count() -> None:
    shares = SharedEpoch(2, range(2)).draw([0, 2, 5])
    assert shares == {0: [0], 2: [1], 5: []}
    assert own_share(shares, 5) == ([0], 0)
    assert own_share(shares, 2) == ([1], 1)


def test_a_copy_draws_ahead_and_a_state_goes_on() -> None:
    epoch = SharedEpoch(2, range(9))
    epoch.draw([0])
    epoch.commit([0])
    assert epoch.copy().draw([0]) == {0: [2, 3]}
    other = SharedEpoch(2)
    other.restore(epoch.state())
    assert other.draw([0]) == epoch.draw([0]) == {0: [2, 3]}


def test_drop_last_leaves_out_an_incomplete_step() -> None:
    epoch = SharedEpoch(2, range(7), drop_last=True)
    epoch.draw([0, 1])
    assert not epoch.has_step([0, 1])
    assert epoch.has_step([0])


class Alone:
    """The membership of one living rank."""

    members: tuple[int, ...] = (0,)
    rank, replica_size, num_copies, num_stages, is_joining, trains_apart = 0, 1, 1, 1, False, False
    reader_of, readers, _place = Membership.reader_of, Membership.readers, Membership._place


class Apart(Alone):
    """The membership of rank 0, whose replicas train apart; rank 1 is lost before the first exchange."""

    members = (0, 1)
    is_behind, trains_apart = False, True

    def exchange_apart(self, operation: str, own: object, loader: SharedLoader) -> list[object]:
        """Count the samples of rank 0 alone."""
        self.members = (0,)
        loader.epoch_shared.commit([0])
        return [own]

    def is_with(self, rank: int) -> bool:
        return rank == 0


class Halves(Alone):
    """The membership of rank 3, among two replicas of two ranks that read the same samples."""

    members = (0, 1, 2, 3)
    rank, replica_size, num_copies = 3, 2, 2


def loader(membership: Any = None) -> SharedLoader:
    membership = membership or Alone()
    data: Any = list(range(6))
    batches = BatchSampler(SequentialSampler(data), 2, drop_last=False)
    return SharedLoader(data, membership, None, batch_sampler=batches)


def test_a_loader_goes_on_with_what_is_left_of_its_epoch() -> None:
    first, second = loader(), loader()
    for batch in first:
        first.commit({0: (first.epoch_shared.checksum, first.epoch_shared.num_left)})
        assert batch.tolist() == [0, 1]
        break
    second.load_state_dict(first.state_dict())
    assert [batch.tolist() for batch in second] == [[2, 3], [4, 5]]
    assert second.iteration == 1
    assert [len(batch) for batch in second] == [2, 2, 2]


def test_checkpoints_of_other_runs_are_taken_between_two_epochs() -> None:
    taken = loader()
    taken.load_state_dict({"epoch": 3, "rounds": 0, "_iterator_finished": True})
    assert taken.iteration == 3
    taken.load_state_dict({"epoch": 3, "rounds": 9, "_iterator_finished": True})
    assert taken.iteration == 4
    with pytest.raises(CheckpointError, match="in the middle of an epoch"):
        taken.load_state_dict({"epoch": 3, "rounds": 2, "_iterator_finished": False})


def test_a_position_that_was_restored_is_given_on_before_a_pass_begins() -> None:
    first, second, third = loader(), loader(), loader()
    for _ in first:
        first.commit({0: (first.epoch_shared.checksum, first.epoch_shared.num_left)})
        break
    second.load_state_dict(first.state_dict())
    assert second.state_dict()["running"]["order"].tolist() == [2, 3, 4, 5]
    plain = Accelerator(cpu=True).prepare(DataLoader(torch.arange(6), batch_size=2))
    with pytest.raises(CheckpointError, match="under `accelerate launch --keep_replicas`"):
        plain.load_state_dict(second.state_dict())
    third.restore_shared(second.shared_state(begins=True))
    assert [batch.tolist() for batch in third] == [batch.tolist() for batch in second] == [[2, 3], [4, 5]]


def test_a_joiner_knows_of_batches_that_all_left_out() -> None:
    first, joined = SharedEpoch(2, range(12)), SharedEpoch(2)
    first.draw([0, 1])
    joined.restore(first.state())
    for epoch in (first, joined):
        epoch.draw([0, 1, 2])
        epoch.commit([0, 2])
    assert first.draw([0, 2]) == joined.draw([0, 2]) == {0: [2, 3], 2: [6, 7]}
    assert first.checksum == joined.checksum


def test_ranks_that_put_back_other_samples_hear_so() -> None:
    first, second = SharedEpoch(2, range(12)), SharedEpoch(2, range(12))
    for epoch, given in ((first, [0, 1]), (second, [1])):
        epoch.draw([0, 1])
        epoch.commit(given)
    assert first.checksum != second.checksum


def test_passes_that_others_have_finished_are_empty() -> None:
    others, joined = loader(), loader()
    others.gradient_state, joined.gradient_state = (GradientState.create() for _ in range(2))
    for _ in range(2):
        assert len(list(others)) == 3
    next(running := iter(others))
    assert others.shared_passes(begins=False) == (2, 0)
    running.close()
    assert others.shared_passes(begins=True) == (3, 0)
    joined.miss_passes(2, 0, is_trained=True)
    assert [len(list(joined)) for _ in range(3)] == [0, 0, 3]
    assert joined.shared_passes(begins=True) == (3, 0)
    resumed = loader()
    resumed.progress.epoch = 5  # of a newer checkpoint than that with which the others began, at 4
    resumed.miss_passes(2, 4, is_trained=True)
    assert [len(list(resumed)) for _ in range(2)] == [0, 3]


def test_skipped_batches_are_refused() -> None:
    skipping = loader()
    skipping.show(batch_sampler=[[0, 1]])
    with pytest.raises(PreparationError, match="skip_first_batches"):
        next(iter(skipping))


def test_replicas_that_train_apart_end_an_epoch_once_the_living_have_said_so() -> None:
    own = loader(Apart())
    read: list[list[int]] = []
    for batch in own:
        own.has_backward = True
        read.append(batch.tolist())
    # Six samples in batches of two: rank 0 reads two and one, then those that rank 1 had read.
    assert read == [[0, 1], [4], [2, 3], [5]]
    assert own.iteration == 1


def test_a_checkpoint_of_replicas_that_train_apart_returns_the_samples_of_the_others() -> None:
    own, resumed = loader(Apart()), loader()
    saved: dict[str, Any] = {}
    for batch in own:
        own.has_backward = own.is_trained = True
        assert batch.tolist() == [0, 1]
        saved = own.state_dict()
        break
    assert saved["running"]["order"].tolist() == [2, 3, 4, 5]
    resumed.load_state_dict(saved)
    assert [batch.tolist() for batch in resumed] == [[2, 3], [4, 5]]


def test_the_last_batch_of_an_epoch_does_not_end_it_in_such_a_checkpoint() -> None:
    own, resumed = loader(Apart()), loader()
    saved: dict[str, Any] = {}
    for number, _ in enumerate(own):
        own.has_backward = own.is_trained = True
        if number == 1:  # nothing is left to draw, and rank 1 has the samples 2, 3 and 5
            saved = own.state_dict()
            break
    assert saved["epoch"] == 0 and saved["running"]["order"].tolist() == [2, 3, 5]
    resumed.load_state_dict(saved)
    assert [batch.tolist() for batch in resumed] == [[2, 3], [5]]


def test_ranks_that_share_a_model_read_the_same_samples() -> None:
    read = [batch.tolist() for batch in loader(Halves())]
    assert read == [[2, 3], [5]]
    assert len(loader(Halves())) == 2
