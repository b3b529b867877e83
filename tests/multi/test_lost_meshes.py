"""Replicas with several axes of ranks inside, of which ranks are killed: tensor, context and pipeline parallelism."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from accelerate.guests.fault_tolerance.shared_epoch import SharedEpoch
from tests.multi.test_lost_replica import SHARDED, _check, _launch, _lines
from tests.slow import slow_for

pytestmark = [pytest.mark.timeout(320), slow_for("several generations of eight processes", "kills")]

SCRIPT = """
import json, os, signal, sys
from pathlib import Path
import torch
from accelerate import Accelerator
from tests.multi.test_lost_meshes import Attention, TOKENS, record_updates

folder, deaths = Path(sys.argv[1]), json.loads(sys.argv[2])
accelerator = Accelerator(cpu=True)
rank, members = accelerator.process_index, accelerator.world.members
is_new = members.is_joining
torch.manual_seed(rank)
model = Attention()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
data = torch.utils.data.TensorDataset(TOKENS, torch.arange(len(TOKENS)))
loader = torch.utils.data.DataLoader(data, batch_size=3, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
whole = lambda: {name: value.full_tensor() for name, value in model.state_dict().items()}
if not is_new:
    torch.save(whole(), folder / f"start_{rank}.pt")
record_updates(folder / f"log_{rank}_{os.getpid()}", optimizer, loader)
mean, losses = accelerator.streaming_mean(), []
for epoch in range(loader.iteration, 3):
    for tokens, indices in loader:
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        with accelerator.maybe_context_parallel(buffers=[inputs, targets], buffer_seq_dims=[1, 1]):
            if not is_new and deaths.get(str(rank)) == optimizer.num_updates:
                os.kill(os.getpid(), signal.SIGKILL)
            loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        while optimizer.num_updates >= 6 and len(members.members) + len(members.joining) < 8:
            members.exchange("wait")
found = [index for tokens, indices in loader for index in accelerator.gather_for_metrics(indices).tolist()]
mean.update(torch.ones(2))
torch.save([whole(), found, mean.sum_and_count()[1]], folder / f"end_{rank}.pt")
"""

PIPELINE = """
import json, os, signal, sys
from pathlib import Path
import torch
from accelerate import Accelerator
from tests.multi.test_lost_meshes import ROWS, blocks, record_updates

folder, deaths = Path(sys.argv[1]), json.loads(sys.argv[2])
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, project_dir=folder / "run")
rank, members = accelerator.process_index, accelerator.world.members
is_new = members.is_joining
model = blocks(rank)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.utils.data.TensorDataset(ROWS, ROWS.sum(1, keepdim=True), torch.arange(len(ROWS)))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
start = None if is_new else accelerator.get_state_dict(model)
if start:
    torch.save(start, folder / f"start_{rank}.pt")
record_updates(folder / f"log_{rank}_{os.getpid()}", optimizer, loader)
mean = accelerator.streaming_mean()
for epoch in range(loader.iteration, 3):
    for inputs, targets, indices in loader:
        if not is_new and deaths.get(str(rank)) == optimizer.num_updates:
            os.kill(os.getpid(), signal.SIGKILL)
        with accelerator.accumulate(model):
            accelerator.pipeline_step(model, (inputs, targets), torch.nn.functional.mse_loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        while accelerator.sync_gradients and optimizer.num_updates >= 6:
            if len(members.members) + len(members.joining) == accelerator.num_processes:
                break
            members.exchange("wait")
found = [index for _, _, indices in loader for index in accelerator.gather_for_metrics(indices).tolist()]
mean.update(torch.full((2,), float(accelerator.data_parallel_rank * 2 + accelerator.data_parallel_shard_rank)))
with torch.no_grad():
    outputs = model(ROWS[:3])
accelerator.save_state(folder / "saved")
accelerator.load_state(folder / "saved")
end = accelerator.get_state_dict(model)
sums = mean.sum_and_count()
torch.save([end, found, sums, outputs], folder / f"end_{rank}.pt")
"""

ISLANDS = """
import sys
from pathlib import Path
import torch
from accelerate import Accelerator, DiLoCo
from accelerate.utils import DataLoaderConfiguration
from tests.multi.test_lost_meshes import Attention, TOKENS

folder, batch_size = Path(sys.argv[1]), int(sys.argv[2])
accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(data_seed=3))
torch.manual_seed(0)
model = Attention()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
data = torch.utils.data.TensorDataset(TOKENS[:48])  # so that both islands always have as many
loader = torch.utils.data.DataLoader(data, batch_size=batch_size, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
with DiLoCo(accelerator, model, inner_steps=2, fragments=2, compression="none") as diloco:
    for epoch in range(2):
        for (tokens,) in loader:
            outputs = model(tokens[:, :-1]).flatten(0, 1)
            accelerator.backward(torch.nn.functional.cross_entropy(outputs, tokens[:, 1:].flatten()))
            optimizer.step()
            optimizer.zero_grad()
            diloco.step()
whole = lambda value: value.full_tensor() if hasattr(value, "full_tensor") else value
end = {name: whole(value) for name, value in model.state_dict().items()}
torch.save(end, folder / f"end_{accelerator.process_index}.pt")
"""

PIPELINES_APART = """
import sys
from pathlib import Path
import torch
from accelerate import Accelerator, DiLoCo
from accelerate.utils import DataLoaderConfiguration
from tests.multi.test_lost_meshes import ROWS, blocks

folder = Path(sys.argv[1])
accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(data_seed=3))
model = blocks(0).float()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
data = torch.utils.data.TensorDataset(ROWS[:64].float(), ROWS[:64].float().sum(1, keepdim=True))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
with DiLoCo(accelerator, model, inner_steps=2, fragments=2, compression="none") as diloco:
    for epoch in range(2):
        for inputs, targets in loader:
            accelerator.pipeline_step(model, (inputs, targets), torch.nn.functional.mse_loss)
            optimizer.step()
            optimizer.zero_grad()
            diloco.step()
end = accelerator.get_state_dict(model)
if end:
    torch.save(end, folder / f"end_{accelerator.process_index}.pt")
"""

TOKENS = torch.randint(0, 24, (50, 9), generator=torch.Generator().manual_seed(3))
ROWS = torch.randn(70, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def blocks(seed: int) -> torch.nn.Module:
    """Return layers that a pipeline splits."""
    torch.manual_seed(seed)
    layers = [layer for _ in range(3) for layer in (torch.nn.Linear(8, 8), torch.nn.Tanh())]
    return torch.nn.Sequential(*layers, torch.nn.Linear(8, 1)).double()


def record_updates(path: Path, optimizer: Any, loader: Any) -> None:
    """Write the samples of each update of this process to ``path``, a line each."""
    log, commit = path.open("w"), SharedEpoch.commit

    def noted(self: SharedEpoch, contributors: Iterable[int]) -> None:
        given = set(contributors)
        samples = [index for reader, taken in sorted(self._open.items()) if reader in given for index in taken]
        found = {"update": optimizer.num_updates, "epoch": loader.progress.epoch, "samples": samples}
        log.write(json.dumps(found) + "\n")
        log.flush()
        commit(self, given)

    SharedEpoch.commit = noted


class Attention(torch.nn.Module):
    """One layer of attention between an embedding and a head."""

    _tp_plan: ClassVar = {"head": "colwise_gather_output"}

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.attention = torch.nn.Embedding(24, 16), torch.nn.Linear(16, 48)
        self.head = torch.nn.Linear(16, 24)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        heads = self.attention(hidden).unflatten(-1, (2, -1)).transpose(1, 2).chunk(3, dim=-1)
        mixed = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.head(hidden + mixed.transpose(1, 2).flatten(2))


def _flags(**sizes: int) -> tuple[str, ...]:
    """Return the flags of a mesh with these axes."""
    given = [(f"--parallelism_config_{axis}_size", str(size)) for axis, size in sizes.items()]
    return ("--use_parallelism_config", *(word for pair in given for word in pair))


@pytest.mark.parametrize("deaths", [{5: (2, "agreement")}, {0: (3, "forward"), 6: (9, "data")}], ids=str)
def test_ranks_that_share_layers_read_the_same_samples(tmp_path: Path, deaths: dict[int, tuple[int, str]]) -> None:
    options = (*SHARDED, "--parallelism_config_tp_size", "2")
    launched = _launch(tmp_path, 8, 2, "200", "2", "0", json.dumps(deaths), "8", options=options)
    _, errors = launched.communicate(timeout=300)
    assert launched.returncode == 0, errors
    assert errors.count("its replica is started again") == 3 * len(deaths), errors  # of its other ranks
    _check(tmp_path, 4, 8, 200, 2)  # four of the ranks read different samples


@pytest.mark.parametrize("axis", ["cp", "tp"])
def test_results_are_those_of_each_sample_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, axis: str) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    options = (*SHARDED, f"--parallelism_config_{axis}_size", "2")
    launched = _launch(tmp_path, 8, 2, json.dumps({5: 2}), options=options, script=SCRIPT)
    _, errors = launched.communicate(timeout=300)
    assert launched.returncode == 0, errors
    updates = {line["update"]: (line["epoch"], line["samples"]) for line in _lines(tmp_path) if line["epoch"] < 3}
    for epoch in range(3):
        assert sorted(i for at, samples in updates.values() if at == epoch for i in samples) == [*range(50)]
    model = Attention()
    model.load_state_dict(torch.load(tmp_path / "start_0.pt"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for number in range(len(updates)):
        tokens = TOKENS[updates[number][1]]
        torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    ends = [torch.load(path) for path in sorted(tmp_path.glob("end_*"))]
    assert len(ends) == 8
    for weights, found, count in ends:
        torch.testing.assert_close(weights, dict(model.state_dict()), rtol=1e-4, atol=1e-5)
        assert sorted(found) == [*range(50)] and count == 8  # four of the ranks read two each


def test_islands_of_several_axes_train_like_islands_of_one_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    ends: list[dict[str, torch.Tensor]] = []
    for num_ranks, batch_size, options in ((2, 4, ()), (8, 2, (*SHARDED, "--parallelism_config_tp_size", "2"))):
        folder = tmp_path / str(num_ranks)
        folder.mkdir()
        launched = _launch(folder, num_ranks, 1, str(batch_size), options=options, script=ISLANDS)
        _, errors = launched.communicate(timeout=300)
        assert launched.returncode == 0, errors
        ends += [torch.load(path) for path in folder.glob("end_*")]
    assert len(ends) == 10
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], rtol=1e-3, atol=1e-4)  # float32: other orders of sums add up


def test_islands_may_be_pipelines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    ends: list[dict[str, torch.Tensor]] = []
    for num_ranks, options in ((2, ()), (4, _flags(dp_replicate=2, pp=2))):
        folder = tmp_path / str(num_ranks)
        folder.mkdir()
        launched = _launch(folder, num_ranks, 1, options=options, script=PIPELINES_APART)
        _, errors = launched.communicate(timeout=300)
        assert launched.returncode == 0, errors
        ends += [torch.load(path) for path in folder.glob("end_*")]
    assert len(ends) == 4  # of each rank, and of the main process of each pipeline
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], rtol=1e-3, atol=1e-4)  # float32: other orders of sums add up


@pytest.mark.parametrize(
    ("size", "axes"),
    [(4, {"dp_replicate": 2, "pp": 2}), (8, {"dp_replicate": 2, "pp": 2, "dp_shard": 2})],
    ids=["stages", "shards of stages"],
)
def test_replicas_may_be_pipelines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, axes: dict[str, int]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    options = (*_flags(**axes), *(("--use_fsdp", "--fsdp_version", "2") if size == 8 else ()))
    launched = _launch(tmp_path, size, 2, json.dumps({1: 2}), options=options, script=PIPELINE)
    _, errors = launched.communicate(timeout=300)
    assert launched.returncode == 0, errors
    assert errors.count("its replica is started again") == size // 2 - 1, errors  # of its other ranks
    updates = {line["update"]: (line["epoch"], line["samples"]) for line in _lines(tmp_path) if line["epoch"] < 3}
    for epoch in range(3):
        assert sorted(i for at, samples in updates.values() if at == epoch for i in samples) == [*range(len(ROWS))]
    model = blocks(0)
    model.load_state_dict(torch.load(tmp_path / "start_0.pt"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(len(updates)):
        inputs = ROWS[updates[number][1]]
        torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    ends = [torch.load(path) for path in sorted(tmp_path.glob("end_*"))]
    assert len(ends) == size
    assert sum(bool(weights) for weights, *_ in ends) == 2  # the main process of each replica
    num_readers = size // 2
    for weights, found, sums, outputs in ends:
        if weights:
            torch.testing.assert_close(weights, dict(model.state_dict()), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(outputs, model(ROWS[:3]).detach(), rtol=1e-9, atol=1e-12)
        assert sorted(found) == [*range(len(ROWS))]
        assert sums == (2.0 * sum(range(num_readers)) if size == 8 else 2.0 * (0 + 2), 2.0 * num_readers)
