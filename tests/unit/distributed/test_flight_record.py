"""The comparison of the ranks' flight records: who is behind, and in which collective."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from accelerate.distributed import flight_record
from accelerate.distributed.flight_record import Collective, RankRecord, collectives_of, compare, last_collective

KINDS = ("gloo", "nccl")


def call(
    number: int, operation: str = "all_reduce", elements: int = 10, is_done: bool = True, group: str = "0"
) -> Collective:
    description = "default_pg" if group == "0" else "mesh_dp"
    return Collective(f"gloo:{group}", description, number, operation, ((elements,),), "Float", is_done)


def done_until(number: int) -> list[Collective]:
    return [call(one) for one in range(1, number + 1)]


def record(*collectives: Collective, members: dict[str, tuple[int, ...]] | None = None) -> RankRecord:
    return RankRecord(tuple(collectives), members)


def test_the_rank_that_is_behind_is_named_with_the_collective_it_lacks() -> None:
    there = record(*done_until(811), call(812, elements=1048576, is_done=False))
    (sentence,) = compare({0: there, 1: there, 2: there, 3: record(*done_until(811))}, 4)
    assert sentence == (
        "rank 3 is one collective behind: it hasn't entered all_reduce #812 (4.2 MB, Float [1048576]) of the default "
        "group, in which ranks 0, 1 and 2 wait. Its last one there: all_reduce #811."
    )


def test_the_furthest_behind_is_named_first_and_a_rank_that_runs_ahead_waits_in_its_first_open_one() -> None:
    ahead = record(*done_until(3), *(call(number, is_done=False) for number in (4, 5, 6)))
    (sentence,) = compare({0: ahead, 1: record(*done_until(3)), 2: record(*done_until(1))}, 3)
    assert sentence.startswith("rank 2 is 3 collectives behind: it hasn't entered all_reduce #4 ")
    assert "(rank 1 too), in which rank 0 waits" in sentence


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (call(2, elements=12, is_done=False), "rank 1 in all_reduce (48 B, Float [12])"),
        (call(2, "broadcast", is_done=False), "rank 1 in broadcast (40 B, Float [10])"),
    ],
)
def test_calls_of_one_number_that_differ_are_both_named(other: Collective, words: str) -> None:
    (sentence,) = compare({0: record(call(1), call(2, is_done=False)), 1: record(call(1), other)}, 2)
    assert sentence == (
        "collective #2 of the default group isn't the same on all ranks: "
        f"rank 0 in all_reduce (40 B, Float [10]); {words}."
    )


def test_shapes_that_may_differ_are_not_compared() -> None:
    ranks = {rank: record(call(1, "all_to_all", 5 + rank, is_done=False)) for rank in range(2)}
    assert compare(ranks, 2) == ["ranks 0 and 1 wait in all_to_all #1 (20 B, Float [5]) of the default group."]


def test_groups_are_compared_among_their_own_ranks() -> None:
    """A rank that waits in another group is behind in the first one, and the first ones there in the other."""
    zero = record(call(1, is_done=False, group="3"), members={"gloo:3": (0, 2)})
    (sentence,) = compare({0: zero, 1: record(call(1)), 2: record(call(1))}, 4)
    assert sentence.startswith("rank 2 is one collective behind") and "group 3 (mesh_dp)" in sentence
    assert sentence.endswith("Its last one there: none.")
    one = record(call(1), call(2, is_done=False))
    assert len(compare({0: zero, 1: one, 2: one}, 3)) == 2


def test_of_a_group_whose_ranks_are_unknown_only_those_that_wait_are_told() -> None:
    ranks = {rank: record(call(4, is_done=False, group="3")) for rank in range(2)}
    assert compare(ranks, 4) == ["ranks 0 and 1 wait in all_reduce #4 (40 B, Float [10]) of group 3 (mesh_dp)."]


def test_nothing_is_said_without_a_record_or_where_nobody_waits() -> None:
    assert compare({}, 4) == [] and compare({0: record(), 1: record(call(1))}, 2) == []


def test_what_travels_is_short_and_holds_the_first_open_call_and_the_last_of_each_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    everything = [
        call(7, group="3"), call(1, is_done=False), *(call(number, is_done=False) for number in range(2, 60)),
        *(call(number, group="4") for number in range(1, 60)),
    ]  # fmt: skip
    monkeypatch.setattr(flight_record, "own_collectives", lambda: everything)
    monkeypatch.setattr(flight_record, "ranks_of_group", lambda name: range(0, 16384, 8))
    own = RankRecord.own()
    assert len(own.collectives) == 20 and {call(1, is_done=False), call(7, group="3")} <= set(own.collectives)
    text = json.dumps(own.encoded())
    assert RankRecord.of(json.loads(text)) == own and len(text) < 2000


@pytest.mark.parametrize("ranks", [(0, 8, 16), (3,), (1, 2, 5), (), (2, 1)])
def test_the_ranks_of_a_group_travel(ranks: tuple[int, ...]) -> None:
    sent = record(call(1, is_done=False, group="3"), members={"gloo:3": ranks})
    assert RankRecord.of(json.loads(json.dumps(sent.encoded()))) == sent


def test_what_torch_writes_is_read() -> None:
    entry = {
        "is_p2p": False, "profiling_name": "nccl:all_reduce", "process_group": ["0", "default_pg"],
        "input_sizes": [[2, 3]],
        "collective_seq_id": 4, "input_dtypes": ["BFloat16"], "retired": False, "state": "started",
    }  # fmt: skip
    dump = json.dumps(
        {"entries": [entry, {**entry, "collective_seq_id": 5, "state": "completed"}, {**entry, "is_p2p": True}]}
    )
    waits, ended = collectives_of(dump)
    assert str(waits) == "all_reduce #4 (12 B, BFloat16 [2, 3]) of the default group"
    assert ended.is_done and last_collective([waits, ended]) == waits and last_collective([ended]) == ended
    assert collectives_of("{}") == [] and last_collective([]) is None


def test_a_part_of_a_coalesced_collective_ends_with_the_whole() -> None:
    """torch records both under one number, and marks the whole alone."""
    whole = {**nccl_entry(3, "completed"), "profiling_name": "nccl:coalesced"}
    entries = [nccl_entry(3, "scheduled"), nccl_entry(3, "scheduled"), whole]
    waits = record(*collectives_of(json.dumps({"entries": [*entries, nccl_entry(4, "started")]})))
    (sentence,) = compare({0: waits, 1: record(*collectives_of(json.dumps({"entries": entries})))}, 2)
    assert sentence.startswith("rank 1 is one collective behind: it hasn't entered _all_gather_base #4 ")


def nccl_entry(number: int, state: str) -> dict[str, object]:
    """An entry as torch's recorder of NCCL's process groups writes it (version 2.10 of the form)."""
    return {
        "record_id": number - 1, "pg_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": number,
        "p2p_seq_id": 0, "op_id": number, "profiling_name": "nccl:_all_gather_base",
        "time_created_ns": 1721856000000000000 + number, "input_sizes": [[1024, 256]], "input_dtypes": ["BFloat16"],
        "output_sizes": [[8192, 256]], "output_dtypes": ["BFloat16"], "state": state, "retired": state == "completed",
        "time_discovered_started_ns": 0 if state == "scheduled" else 1721856000000000100,
        "time_discovered_completed_ns": 1721856000000000200 if state == "completed" else 0,
        "timeout_ms": 600000, "is_p2p": False, "thread_name": "pt_autograd_0", "thread_id": "140", "frames": [],
    }  # fmt: skip


def test_collectives_on_a_device_are_read_beside_those_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps a recorder for each: with a group on CUDA, the host's alone would be empty."""
    entries = [nccl_entry(7, "completed"), nccl_entry(8, "started"), nccl_entry(9, "scheduled")]
    dump = json.dumps({
        "version": "2.10", "comm_lib_version": "2.29.3", "nccl_comm_state": {}, "entries": entries,
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
        "pg_status": {"0": {"last_enqueued_collective": "9", "last_started_collective": "8"}},
    })  # fmt: skip
    module = sys.modules["torch._C._distributed_c10d"]
    monkeypatch.setattr(module, "_dump_nccl_trace_json", lambda collectives, active: dump.encode(), raising=False)
    monkeypatch.setattr(module, "_dump_fr_trace_json", lambda collectives, active: b'{"entries": []}', raising=False)
    own = RankRecord.own()
    assert [one.is_done for one in own.collectives if one.group == "nccl:0"] == [False, False, True]
    (sentence,) = compare({0: own, 1: record(*collectives_of(json.dumps({"entries": entries[:1]})))}, 2)
    assert sentence == (
        "rank 1 is one collective behind: it hasn't entered _all_gather_base #8 (524.3 kB, BFloat16 [1024, 256]) of "
        "the default group, in which rank 0 waits. Its last one there: _all_gather_base #7."
    )


@pytest.mark.parametrize("backends", [(), ("gloo",), ("nccl",), ("gloo", "nccl")])
def test_a_rank_writes_the_records_that_have_collectives(
    backends: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A torch with CUDA has a recorder of NCCL's on the CPU too, which stays empty there."""
    dumps = {name: {"entries": [{"profiling_name": f"{name}:all_reduce"}] * (name in backends)} for name in KINDS}
    monkeypatch.setattr(flight_record, "flight_records", lambda: [json.dumps(dump) for dump in dumps.values()])
    flight_record.write_own(tmp_path, 3)
    path = tmp_path / "rank_3.json"
    written = json.loads(path.read_text()) if path.exists() else []
    expected = [dumps[name] for name in backends]
    assert written == (expected[0] if len(expected) == 1 else expected)
