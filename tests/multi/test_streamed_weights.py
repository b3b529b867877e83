"""``stream_weights``: the weights of a saved model, on the ranks that ask for them, and no rank left waiting.

The fast part has some of the meshes; ``RUN_SLOW=1`` (``make meshes``) has them all.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from accelerate import Accelerator
from accelerate.errors import CollectiveError, NotBuilt, SettingError
from tests.live_bytes import LiveBytes
from tests.mesh_runs import LanguageModel, accelerator, prepared, steps
from tests.multi.test_meshes import IS_SLOW, MESHES, MIXTURES
from tests.ranks import RankFailed, run_on_ranks

# torch, of an output that is a view, under tensor parallelism
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")

#: Flat parameters, layers that are cut, stages of shards: each way in which weights lie.
FAST = ("fsdp1", "tp", "pp x fsdp")


def sharded(run: Accelerator, model: nn.Module) -> Any:
    """A model as it is trained."""
    return run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))[0]


def trained(arguments: dict[str, Any], **shape: bool) -> tuple[Any, Any]:
    """An accelerator and a model after one update."""
    run = accelerator(**arguments)
    objects = prepared(run, updates=1, **shape)
    steps(run, objects)
    return run, objects[0]


def compare(arguments: dict[str, Any], shape: dict[str, bool]) -> list[Any]:
    """What is streamed to the first and the last rank, beside the state dict of the main process."""
    run, model = trained(arguments, **shape)
    whole = run.get_state_dict(model)
    ranks = (0, run.num_processes - 1)
    found = dict(run.stream_weights(model, ranks=ranks, bucket_bytes=3000))
    half = dict(run.stream_weights(model, bucket_bytes=3000, dtype="bfloat16"))
    names = sorted(whole) if run.is_main_process() else []
    same = [name for name in names if torch.equal(found[name], whole[name])]
    rounded = [name for name in names if torch.equal(half[name], whole[name].bfloat16())]
    return [names, sorted(found), same, rounded, len(half), {name: value.sum().item() for name, value in found.items()}]


def check(ranks: int, arguments: dict[str, Any], **shape: bool) -> None:
    """Names and values are those of the state dict, on the ranks that asked."""
    found = run_on_ranks(lambda: compare(arguments, shape), ranks, timeout_seconds=180)
    names, streamed, same, rounded, _, sums = found[0]
    assert names and streamed == same == rounded == names
    assert found[-1][1] == names and found[-1][5] == sums
    assert all(not other[1] for other in found[1:-1]) and not any(other[4] for other in found[1:])


@pytest.mark.parametrize("name", MESHES if IS_SLOW else FAST)
def test_every_mesh_streams_what_a_saved_model_holds(name: str) -> None:
    """Whole tensors, under the user's own names."""
    check(*MESHES[name])


@pytest.mark.parametrize("name", MIXTURES if IS_SLOW else ["ep"])
def test_experts_leave_whole(name: str) -> None:
    """Wherever they are."""
    check(*MIXTURES[name], mixture=True)


@pytest.mark.parametrize("name", [name for name in MESHES if MESHES[name][0] < 8] if IS_SLOW else ["fsdp1"])
def test_tied_weights_leave_under_both_names(name: str) -> None:
    """Though they are sent once."""
    if "cut between" not in name:
        check(*MESHES[name], tied=True)


def test_models_that_came_sharded_leave_whole() -> None:
    """Some of their parameters, or all; buffers too."""

    def on_rank() -> list[Any]:
        run = Accelerator(cpu=True)
        torch.manual_seed(run.process_index)
        model = LanguageModel()
        model.register_buffer("steps", torch.arange(3))
        model.register_buffer("scratch", torch.zeros(1), persistent=False)
        for layer in model.layers:
            fully_shard(layer)  # pyright: ignore[reportArgumentType]
        model = run.prepare(model)
        whole = run.get_state_dict(model)
        found = dict(run.stream_weights(model, ranks=[1], bucket_bytes=1))
        return [{name: value.tolist() for name, value in one.items()} for one in (whole, found)]

    (whole, nothing), (_, streamed) = run_on_ranks(on_rank, 2)
    assert streamed == whole and "steps" in whole and not nothing


@pytest.mark.parametrize("version", [1, 2])
def test_buffers_and_odd_shapes_leave_as_they_are(version: int) -> None:
    """A scalar, an empty tensor, rows that ranks can't divide, a layout of its own, whole numbers."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Parameter(torch.randn(3, 2))
            layout = torch.channels_last if version == 1 else torch.contiguous_format  # torch's FSDP2 takes no other
            self.swapped = nn.Parameter(torch.randn(2, 3, 2, 2).to(memory_format=layout))
            self.one = nn.Parameter(torch.randn(1))
            self.register_buffer("count", torch.tensor(7))
            self.register_buffer("nothing", torch.zeros(0, 3))

    def on_rank() -> list[Any]:
        run = accelerator(fsdp={"fsdp_version": version})
        torch.manual_seed(0)
        model = sharded(run, Odd())
        whole = run.get_state_dict(model)
        found = dict(run.stream_weights(model, dtype=torch.float16))
        return [sorted(whole), {name: torch.equal(value, whole[name].to(value.dtype)) for name, value in found.items()}]

    names, same = run_on_ranks(on_rank, 2)[0]
    assert sorted(same) == names == ["count", "nothing", "one", "rows", "swapped"] and all(same.values())


def test_one_process_streams_copies() -> None:
    """What is done to them, the model doesn't see."""
    run = Accelerator(cpu=True)
    model = run.prepare(nn.Linear(2, 2))
    with run.stream_weights(model, bucket_bytes=1) as stream:
        for _, tensor in stream:
            tensor.zero_()
    assert not torch.equal(model.weight, torch.zeros(2, 2))
    stream = run.stream_weights(model)
    assert next(stream)[0] == "weight"
    stream.close()
    assert list(stream) == []


def test_what_cannot_be_is_refused() -> None:
    """Before any rank waits for another."""
    run, model = Accelerator(cpu=True), nn.Linear(2, 2)
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"ranks": [1]}, "from 0 to 0"),
        ({"ranks": []}, "at least one rank"),
        ({"bucket_bytes": 0}, "at least 1"),
        ({"dtype": "float17"}, "no such dtype"),
        ({"adapters": "some"}, "'kept', 'merged', 'only'"),
        ({"adapters": "merged"}, "no model with adapters"),
    )
    for options, said in cases:
        with pytest.raises(SettingError, match=said):
            run.stream_weights(model, **options)


def test_ranks_with_different_models_are_told() -> None:
    """Instead of taking one's bytes for the other's."""

    def on_rank() -> str:
        run = Accelerator(cpu=True)
        with pytest.raises(CollectiveError) as caught:
            run.stream_weights(nn.Linear(2, 2 + run.process_index))
        return str(caught.value)

    assert all("has a model of 2 tensors" in said for said in run_on_ranks(on_rank, 2))


@pytest.mark.parametrize("argument", ["dtype", "ranks", "bucket_bytes"])
def test_ranks_with_different_arguments_are_told(argument: str) -> None:
    """As under `if accelerator.is_main_process`, where the weights arrive."""

    def on_rank() -> str:
        run = Accelerator(cpu=True)
        values: dict[str, Any] = {"dtype": ["bfloat16", None], "ranks": [(0,), (1,)], "bucket_bytes": [100, 200]}
        with pytest.raises(CollectiveError) as caught:
            run.stream_weights(nn.Linear(2, 2), **{argument: values[argument][run.process_index]})
        return str(caught.value)

    said = run_on_ranks(on_rank, 2)
    assert all("give the same ones on all ranks" in text and argument in text for text in said if text), said


# -- memory ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 2])
def test_memory_is_own_shards_and_two_buckets(version: int) -> None:
    """On every rank, whatever the size of the model; and the messages in which the ranks say what they hold."""

    def on_rank() -> tuple[int, int, int]:
        run = accelerator(fsdp={"fsdp_version": version})
        model = sharded(run, nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(32))))
        shards = [getattr(one, "to_local", lambda one=one: one)() for one in model.parameters()]

        bucket = 4 * 64 * 64 * 4
        with LiveBytes(shards) as streaming:
            weights = run.stream_weights(model, bucket_bytes=bucket)
            while next(weights, None) is not None:  # a loop's variables would keep one weight more
                pass
        with LiveBytes(shards) as whole:
            run.get_state_dict(model)
        return bucket, streaming.peak, whole.peak

    ranks = run_on_ranks(on_rank, 2)
    assert all(0 < streamed <= 2 * bucket + 16384 for bucket, streamed, _ in ranks), ranks
    assert ranks[0][2] >= 8 * ranks[0][0]  # all of the model


# -- a receiver that doesn't take all --------------------------------------------------------------------------


def small_model(run: Accelerator) -> nn.Module:
    """Eight weights of 256 bytes, sharded."""
    return sharded(run, nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(8))))


def leave(how: str) -> list[Any]:
    """Rank 0 takes three weights of eight and leaves; what the ranks are told, and what comes afterwards."""
    run = accelerator(fsdp={"fsdp_version": 2})
    model = small_model(run)
    said = ""
    try:
        if how == "with":
            with run.stream_weights(model, bucket_bytes=256) as kept:
                for _ in range(3):
                    next(kept, None)
        else:
            for number, _ in enumerate(run.stream_weights(model, bucket_bytes=256)):
                if number == 2 and how == "raise":
                    raise ValueError("no room")
                if number == 2:
                    break
    except (CollectiveError, ValueError) as error:
        said = f"{type(error).__name__}: {error}"
    run.wait_for_everyone()
    taken = len(list(run.stream_weights(model, bucket_bytes=600)))
    assert run.world.coordinator is not None and not run.world.coordinator.exits.is_watching
    return [said, taken]


@pytest.mark.parametrize("how", ["break", "raise", "with"] if IS_SLOW else ["raise", "with"])
def test_all_ranks_hear_of_a_receiver_that_leaves_and_can_go_on(how: str) -> None:
    """A loop that ends early, by an error too, is told to the others; then they are in step again."""
    (own, after), *others = run_on_ranks(leave, 3, how)
    assert own == ("ValueError: no room" if how == "raise" else "") and after == 8
    for said, taken in others:
        assert said.startswith("CollectiveError") and "rank 0 goes no further in its iteration" in said
        assert "'2.weight'" in said and taken == 0


def test_an_error_inside_of_the_context_is_named_to_all() -> None:
    """What it was, and after which weight."""

    def on_rank() -> str:
        run = accelerator(fsdp={"fsdp_version": 2})
        model = small_model(run)
        with pytest.raises((CollectiveError, OSError)) as caught, run.stream_weights(model, ranks=[1]) as stream:
            for _ in stream:
                raise OSError("disk full")
        return str(caught.value)

    assert "goes no further in its iteration: OSError: disk full (after '0.weight')" in run_on_ranks(on_rank, 2)[0]


def die_half_way(folder: str, receiver: int) -> None:
    """The receiver's process is killed after two weights; the others write what they are told."""
    run = accelerator(fsdp={"fsdp_version": 2})
    model = small_model(run)
    try:
        for number, _ in enumerate(run.stream_weights(model, ranks=[receiver], bucket_bytes=256)):
            if number == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    except CollectiveError as error:
        Path(folder, str(run.process_index)).write_text(str(error))


@pytest.mark.parametrize("receiver", [1, 2] if IS_SLOW else [1])
def test_all_ranks_hear_of_a_receiver_whose_process_is_killed(receiver: int, tmp_path: Path) -> None:
    """By a connection that its kernel closes; rank 0's own end is that of the store, which all notice."""
    with pytest.raises(RankFailed, match=f"rank {receiver}: died"):
        run_on_ranks(die_half_way, 3, str(tmp_path), receiver)
    others = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert sorted(others) == [str(rank) for rank in range(3) if rank != receiver]
    assert all(f"rank {receiver} has ended (or left the world)" in said for said in others.values())


# -- a receiver outside of the run -----------------------------------------------------------------------------

SERVER = """
import json, socket, struct, sys, time
listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
stream = listening.accept()[0].makefile("rwb")
found = []
while header := stream.read(4):
    name, size = json.loads(stream.read(struct.unpack("<I", header)[0]))
    if len(found) == int(sys.argv[1]):
        sys.exit(1)
    found.append([name, sum(stream.read(size))])
    stream.write(b"!")
    stream.flush()
print(json.dumps(found), flush=True)
"""


def send_all(port: int) -> list[Any]:
    """Rank 1 sends the weights over TCP to a process that trains nothing."""
    run = accelerator(fsdp={"fsdp_version": 2})
    torch.manual_seed(0)
    model = sharded(run, nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8))))
    server, said = None, ""
    try:
        with run.stream_weights(model, ranks=[1], bucket_bytes=2 << 20) as stream:
            for name, tensor in stream:
                server = server or socket.create_connection(("127.0.0.1", port))
                values = tensor.view(torch.uint8).flatten().numpy().tobytes()
                header = f'["{name}", {len(values)}]'.encode()
                server.sendall(len(header).to_bytes(4, "little") + header)
                server.sendall(values)
                if not server.recv(1):
                    raise ConnectionError("the server has ended")
    except (CollectiveError, OSError) as error:
        said = type(error).__name__
    if server is not None:
        server.close()
    sums = [[name, int(value.view(torch.uint8).sum())] for name, value in run.get_state_dict(model).items()]
    return [said, sums]


@pytest.mark.parametrize("takes", [8, 4])
def test_an_inference_server_gets_all_or_its_death_is_told_to_all(takes: int) -> None:
    """A plain process at the other end of a connection; here it dies after four weights, or doesn't."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, str(takes)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        assert server.stdout is not None
        try:
            ranks = run_on_ranks(send_all, 2, int(server.stdout.readline()))
            received = server.stdout.read()
        finally:
            server.kill()
    if takes == 8:
        assert json.loads(received) == ranks[0][1] and [said for said, _ in ranks] == ["", ""]
    else:
        assert ranks[0][0] == "CollectiveError" and ranks[1][0].startswith(("Conn", "BrokenPipe"))


# -- engines ---------------------------------------------------------------------------------------------------


def test_an_exchange_of_overlapping_regions_is_refused() -> None:
    """As one that can't be read."""
    from accelerate.distributed.world import World
    from accelerate.parallel.state import HeldTensor
    from accelerate.parallel.streaming import BucketExchange, WeightExchange

    part = HeldTensor(("w",), (4,), torch.float32, torch.zeros(2), ((0, 2),))
    exchange = WeightExchange(World(), [part], [0], "")
    with pytest.raises(NotBuilt, match="don't make the whole"):
        BucketExchange(exchange, {0: torch.float32})
