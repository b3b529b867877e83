"""The parts of a rank's report: axes of groups, bytes of collectives, contradictions, and the text."""

from __future__ import annotations

from accelerate.distributed.mesh import Mesh
from accelerate.distributed.world import World
from accelerate.guests.pretend.communication import Traffic, axes_of
from accelerate.guests.pretend.records import LoaderShare
from accelerate.guests.pretend.report import Report, Share, WrittenFile, _data, _hosts

MESH = Mesh.of(World.pretend(7777, 16384, local_rank=1, local_size=8), None, dp_replicate=32, dp_shard=64, tp=8)


def test_a_group_lies_along_the_axes_in_which_its_ranks_differ() -> None:
    for axes in (("tp",), ("dp_shard",), ("dp_replicate",), ("dp_replicate", "dp_shard"), ("dp_shard", "tp")):
        assert axes_of(MESH, MESH.ranks(*axes)) == axes
    assert axes_of(MESH, [7777]) == ()


def test_a_group_of_tensor_parallelism_over_hosts_is_found() -> None:
    assert _hosts(MESH) == []
    wide = Mesh.of(World.pretend(7777, 16384, local_rank=1, local_size=8), None, dp_shard=1024, tp=16)
    (text,) = _hosts(wide)
    assert text.startswith("tp_size=16: the group of this rank lies on 2 hosts of 8 processes (972 to 973)")


def test_too_little_data_is_found() -> None:
    assert _data(0, LoaderShare([[0]], 25, 100_000, 4096)) == []
    (text,) = _data(1, LoaderShare([[0]], 1, 1000, 4096))
    assert text.startswith("Loader 1: a step of all ranks takes 4096 samples, and there are 1000")
    (text,) = _data(0, LoaderShare([], 0, 1000, 4096))
    assert "this rank reads no sample in an epoch" in text
    assert _data(0, LoaderShare(None, None, None, None)) == []


def test_the_report_is_read_from_top_to_bottom() -> None:
    report = Report(
        MESH.world,
        MESH,
        2,
        "FullyShard",
        [Share("parameters", 1600, 529_400), Share("optimizer state", 3200)],
        [LoaderShare([[5, 3], list(range(20))], 25, 100_000, 4096), LoaderShare(None, None, None, None)],
        [],
        [Traffic("all-reduce", ("tp",), 8, 1, 8.0, 3600.0)],
        [WrittenFile("optimizer_0/__7777_0.distcp", 3200, 32)],
        ["save_state(out)"],
        ["Give more data."],
    )
    text = str(report)
    for part in (
        "Rank 7777 of 16384 (local rank 1 of 8 on host 972), FullyShard: 2 steps, simulated alone",
        "dp_shard          12 of 64      ranks 7681, 7689, 7697, ..., 8185, on 64 hosts",
        "1.6 kB of 529.4 kB",
        "batch 0: 5, 3",
        "batch 1: 0, 1, 2, ..., 19 (20)",
        "an epoch is 25 batches here, of 100000 samples of all ranks; 4096 samples a step",
        "not read by index",
        "Collectives of a step (of 2)",
        "all-reduce           8 x      3.6 kB  (8 ranks on 1 host)",
        "with the other 31 replicas",
        "not done, though the script called save_state(out)",
        "Found at this size\n  Give more data.",
    ):
        assert part in text, part
    order = ["Coordinates", "Memory", "Samples", "Collectives", "Files", "Found"]
    assert [text.index(each) for each in order] == sorted(text.index(each) for each in order)
