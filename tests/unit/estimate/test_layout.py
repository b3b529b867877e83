"""What lies on one rank, by arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from accelerate.errors import SettingError
from accelerate.guests.estimate.plan import Layout, footprint, layouts, propose
from accelerate.guests.estimate.trace import Moment, TrainingTrace

GB = 10**9
#: Ten billion numbers: a tenth outside of ten blocks, four fifths in layers that tensor parallelism divides.
TRACE = TrainingTrace(
    name="it",
    batch=1,
    sequence=1,
    device_type="cuda",
    optimizer_name="AdamW",
    num_parameters=10 * GB,
    num_trainable=10 * GB,
    weights=40 * GB,
    buffers=0,
    gradients=40 * GB,
    optimizer=80 * GB,
    autocast_bytes=None,
    largest_block=36 * GB // 10,
    outside_blocks=4 * GB,
    divisible=32 * GB,
    moments=(Moment(0, 20 * GB), Moment(40 * GB, 2 * GB)),
    held_in_step=GB,
    step_temporaries=4 * GB,
)


@pytest.mark.parametrize(
    ("text", "ranks", "expected"),
    [
        ("single", 1, Layout()),
        ("ddp", 8, Layout(replicas=8)),
        ("fsdp", 8, Layout(shards=8, sharding="fsdp")),
        ("zero2", 4, Layout(shards=4, sharding="zero2")),
        ("tp4+fsdp", 16, Layout(tp=4, shards=4, sharding="fsdp")),
        ("fsdp8+ddp", 32, Layout(shards=8, sharding="fsdp", replicas=4)),
        ("cp2+pp2+zero3x2", 8, Layout(cp=2, pp=2, shards=2, sharding="zero3")),
        ("fsdp-grad", 2, Layout(shards=2, sharding="fsdp-grad")),
    ],
)
def test_a_layout_reads_as_it_is_written(text: str, ranks: int, expected: Layout) -> None:
    found = Layout.parse(text, ranks)
    assert found == expected
    assert found.ranks == ranks
    assert Layout.parse(found.name, ranks) == found


@pytest.mark.parametrize(
    ("text", "ranks", "message"),
    [
        ("fsdq", 8, "'fsdq' is no part of a layout"),
        ("tp3+fsdp", 8, "doesn't make 8 ranks: its numbers make 3"),
        ("tp2", 4, "doesn't make 4 ranks: its numbers make 2"),
        ("single", 2, "doesn't make 2 ranks"),
        ("fsdp+ddp", 4, "is no layout"),
        ("fsdp2+zero1x2", 4, "is no layout"),
        ("tp2+tp2", 4, "is no layout"),
    ],
)
def test_a_wrong_layout_is_refused_with_what_is_wrong(text: str, ranks: int, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        Layout.parse(text, ranks)


def test_numbers_and_names_of_a_layout_are_checked() -> None:
    with pytest.raises(SettingError, match=r"tp=0\): a number of ranks is at least 1"):
        Layout(tp=0)
    with pytest.raises(SettingError, match="choose from none, zero1"):
        Layout(sharding="some")  # pyright: ignore[reportArgumentType]


def test_alone_everything_is_there() -> None:
    found = footprint(TRACE, Layout())
    assert found.peak == TRACE.peak == 40 * GB + 80 * GB + 45 * GB  # the optimizer steps
    assert (found.gradients, found.activations, found.communication, found.host) == (40 * GB, 5 * GB, 0, 0)


def test_replicas_hold_all_gradients_twice() -> None:
    assert footprint(TRACE, Layout(replicas=2)).peak == TRACE.peak + 40 * GB
    assert footprint(TRACE, Layout(replicas=64)).peak == footprint(TRACE, Layout(replicas=2)).peak


@pytest.mark.parametrize(
    ("sharding", "weights", "optimizer"),
    [("zero1", 40, 10), ("zero2", 40, 10), ("zero3", 5, 10), ("fsdp", 5, 10), ("fsdp-grad", 5, 10)],
)
def test_each_way_of_sharding_cuts_what_it_says(sharding: str, weights: int, optimizer: int) -> None:
    found = footprint(TRACE, Layout.parse(sharding, 8))
    assert (found.weights, found.optimizer) == (weights * GB, optimizer * GB)


def test_gradients_are_cut_from_the_second_stage_on() -> None:
    late = replace(TRACE, moments=(Moment(40 * GB, 0),))
    kept = {name: footprint(late, Layout.parse(name, 8)).gradients for name in ("zero1", "zero2", "zero3", "fsdp")}
    assert kept == {"zero1": 40 * GB, "zero2": 5 * GB, "zero3": 5 * GB, "fsdp": 5 * GB}


def test_more_ranks_never_need_more() -> None:
    for name in ("zero1", "zero2", "zero3", "fsdp", "fsdp-grad", "tp", "cp", "pp"):
        peaks = [footprint(TRACE, Layout.parse(name, ranks)).peak for ranks in (2, 4, 8, 16)]
        assert peaks == sorted(peaks, reverse=True), name


def test_whole_weights_are_gathered_block_by_block_or_all_of_them() -> None:
    by_block, all_of_them = (
        footprint(replace(TRACE, moments=(Moment(0, 0),), held_in_step=0, step_temporaries=0), Layout.parse(name, 1000))
        for name in ("fsdp", "fsdp-grad")
    )
    assert by_block.communication == 4 * GB + 2 * TRACE.largest_block
    assert all_of_them.communication == 40 * GB


def test_deepspeed_sends_gradients_in_buckets_of_half_a_billion() -> None:
    late = replace(TRACE, moments=(Moment(40 * GB, 0),))
    assert footprint(late, Layout.parse("zero2", 8)).communication == 2 * GB  # in four bytes each


def test_tensor_ranks_stay_in_a_host_and_context_ranks_do_not() -> None:
    tried = list(layouts(64, 8))
    assert [each.tp for each in tried if each.tp > 1 and each.cp == 1] == [2, 4, 8]
    assert [each.cp for each in tried if each.tp == 1 and each.cp > 1] == [2, 4, 8, 16, 32]
    assert [(each.tp, each.cp) for each in tried if each.tp > 1 and each.cp > 1] == [(8, 8)]


def test_a_tenth_of_the_memory_is_left() -> None:
    assert propose("it", lambda recompute: TRACE, gpus=1, memory=1000 * GB).usable == 900 * GB


def test_tensor_ranks_divide_the_layers_that_can_be() -> None:
    found = footprint(TRACE, Layout(tp=4))
    assert found.weights == (8 + 32 / 4) * GB
    early = footprint(replace(TRACE, moments=(Moment(0, 340 * GB),)), Layout(tp=4))
    assert early.activations == (100 + 240 / 4) * GB


def test_context_ranks_divide_activations_only() -> None:
    found = footprint(replace(TRACE, moments=(Moment(0, 300 * GB),)), Layout(cp=4))
    assert (found.weights, found.activations) == (40 * GB, 75 * GB)


def test_pipeline_stages_divide_the_blocks() -> None:
    assert footprint(TRACE, Layout(pp=4)).weights == (4 + 36 / 4) * GB


def test_what_is_offloaded_waits_on_the_host() -> None:
    layout = Layout.parse("fsdp", 8)
    device, both = footprint(TRACE, layout), footprint(TRACE, replace(layout, offload_weights=True))
    assert (both.weights, both.gradients, both.optimizer) == (0, 0, 0)
    assert both.host == (5 + 5 + 10) * GB
    assert both.peak < device.peak
    state = footprint(TRACE, replace(layout, offload_optimizer=True))
    assert (state.host, state.optimizer, state.weights) == (10 * GB, 0, 5 * GB)


def test_deepspeed_keeps_full_weights_beside_low_ones() -> None:
    low = replace(TRACE, autocast_bytes=torch.bfloat16.itemsize)
    found = footprint(low, Layout.parse("zero1", 8))
    assert found.weights == 20 * GB
    assert found.optimizer == (80 + 40) * GB // 8
    assert footprint(low, Layout.parse("ddp", 8)).weights == 40 * GB


def test_sharded_ranks_have_no_autocast_copies() -> None:
    narrow = replace(TRACE, moments=(Moment(0, 3 * GB),))
    low = replace(TRACE, autocast_bytes=2, moments=(Moment(0, 100 * GB),), narrow=narrow)
    assert footprint(low, Layout()).activations == 100 * GB
    assert footprint(low, Layout.parse("fsdp", 8)).activations == 3 * GB
