"""The fingerprint of a run: one SHA-256 of all that training has changed, whatever ranks hold it; and the file of them.

Every tensor is hashed row by row, and the hashes of its rows together, so that a shard is hashed where it is and only
32 bytes of each row are sent. (Merkle, "A Digital Signature Based on a Conventional Encryption Function", 1987.) In the
file, one line each n updates shows the first update at which two runs differ.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Final, cast, final
from weakref import ref

import numpy as np
import torch
from torch import distributed as dist

from ...distributed.random import capture_host_streams
from ...errors import PreparationError, SettingError
from ...modules import is_sharded
from ...seams import LoopHook
from ...tracking.jsonl import JSONLTracker
from .fixed_order import place_of

if TYPE_CHECKING:
    from ...accelerator import Accelerator

_BYTES = 32


def fingerprint(run: Accelerator, streams: Mapping[str, object] | None = None) -> str:
    """Return the SHA-256, in hexadecimal, of what training has changed; a collective if parameters are sharded.

    State that optimizers of whole matrices hold on one rank is sharded before, as in a checkpoint.

    It covers parameters, buffers, optimizers, schedulers, the gradient scaler, the random streams and the positions of
    loaders.

    Args:
        streams: the states of the host's random streams; by default the current ones.

    Raises:
        PreparationError: a tensor is laid out in a way that has no whole rows.
    """
    state = run.strategy.state
    named = [parameter for model in run._wrapped_models for _, parameter in state.named_parameters(model)]
    if not state.is_whole() and not any(map(is_sharded, named)):
        raise PreparationError(
            f"fingerprint() under {run.distributed_type.value}: no rank holds whole rows of the parameters. Compare "
            "checkpoints, or use replicas or FSDP 2."
        )
    from ...parallel.matrix_optimizer import shard_state

    for optimizer in run._optimizers:
        shard_state(optimizer.optimizer)
    whole = hashlib.sha256()
    for name, value in _values(run):
        if isinstance(value, torch.Tensor) and value.is_meta:  # of another stage of a pipeline
            continue
        whole.update(f"{name} ".encode() + (_hash(name, value) if isinstance(value, torch.Tensor) else _plain(value)))
    for name, stream in sorted((streams or capture_host_streams()).items()):
        whole.update(f"stream {name} ".encode() + _plain(stream))
    stages = run.mesh.group("pp")
    return whole.hexdigest() if stages is None else _joined(whole.digest(), stages, run.device).hex()


def _joined(digest: bytes, group: dist.ProcessGroup, device: torch.device) -> bytes:
    """Return the hash of the ``digest`` of each rank of ``group``; a collective."""
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(device)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, mine, group=group)
    return hashlib.sha256(torch.cat(found).cpu().numpy().tobytes()).digest()


def _values(run: Accelerator) -> Iterator[tuple[str, object]]:
    """Iterate over all tensors and other values, by names that don't depend on the ranks."""
    from ...parallel.rebind import inner_optimizer

    optimizers = list(map(inner_optimizer, run._optimizers))
    for number, model in enumerate(run._wrapped_models):
        named = list(run.strategy.state.named_parameters(model))
        names = {id(parameter): name for name, parameter in named}
        for name, parameter in named:
            yield f"model {number} {name}", parameter
        for name, buffer in run.strategy.unwrap(model, keep_torch_compile=False).named_buffers():
            yield f"model {number} {name}", buffer
        for place, optimizer in enumerate(optimizers):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                        if id(parameter) in names:
                            yield f"optimizer {place} {names[id(parameter)]} {key}", value
    for place, optimizer in enumerate(optimizers):
        for number, group in enumerate(optimizer.param_groups):
            yield f"optimizer {place} {number}", {key: value for key, value in group.items() if key != "params"}
    for place, scheduler in enumerate(run._schedulers):
        yield f"scheduler {place}", scheduler.state_dict()
    if run.scaler is not None:
        yield "scaler", run.scaler.state_dict()
    for place, loader in enumerate(run._dataloaders):
        progress = getattr(loader, "progress", None)
        if progress is not None:
            info = progress.batch_info
            yield f"loader {place}", [progress.epoch, 0 if info is None else info.batches]


def _plain(value: object) -> bytes:
    """Return the bytes of a value of numbers, texts, containers, tensors and objects with attributes."""
    return json.dumps(_told(value)).encode()


def _told(value: object) -> object:
    """Return a value as JSON can have it, without anything of this process: no address, no order of a set."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        return _rows_hash(value).hex()
    if isinstance(value, Mapping):
        return sorted(([_told(key), _told(one)] for key, one in value.items()), key=repr)
    if isinstance(value, (list, tuple)):
        return [_told(one) for one in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(_told, value), key=repr)
    if isinstance(value, (np.ndarray, np.generic)):
        return cast("Any", value).tolist()
    kind = value if isinstance(value, (type, FunctionType, BuiltinFunctionType, MethodType)) else type(value)
    attributes = {} if kind is value else getattr(value, "__dict__", {})
    text = "" if attributes or " at 0x" in repr(value) else repr(value)
    return [f"{kind.__module__}.{kind.__qualname__}", _told(attributes), text]


def _hash(name: str, tensor: torch.Tensor) -> bytes:
    """Return the hash of ``tensor`` with its dtype and shape; a collective if it is sharded."""
    from torch.distributed.tensor import DTensor

    head = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
    if not isinstance(tensor, DTensor):
        return hashlib.sha256(head + _rows_hash(tensor)).digest()
    mesh, place = tensor.device_mesh, place_of(tensor)
    if place is None:
        raise PreparationError(f"{name} has no whole rows on a rank ({tensor.placements}), so it has no fingerprint.")
    own = tensor.to_local()
    if place.axis is None:
        hashed = _rows_hash(own)
    else:
        hashes = torch.zeros(place.num_rows * _BYTES, dtype=torch.uint8)
        if own.numel():
            mine = torch.frombuffer(bytearray(_row_hashes(own)), dtype=torch.uint8)
            hashes[place.first * _BYTES : place.first * _BYTES + len(mine)] = mine
        hashes = hashes.to(own.device)
        dist.all_reduce(hashes, group=mesh.get_group(place.axis))  # each row is zero on all ranks but one
        hashed = hashlib.sha256(hashes.cpu().numpy().tobytes()).digest()
    if place.inner is not None:
        hashed = _joined(hashed, mesh.get_group(place.inner), own.device)
    return hashlib.sha256(head + hashed).digest()


def _rows_hash(tensor: torch.Tensor) -> bytes:
    return hashlib.sha256(_row_hashes(tensor)).digest()


def _row_hashes(tensor: torch.Tensor) -> bytes:
    """Return the hashes of the rows of dimension 0, one after the other."""
    if not tensor.numel():
        return b""
    rows = tensor.detach().cpu().contiguous()
    rows = rows.reshape(rows.shape[0] if rows.ndim else 1, -1).view(torch.uint8)
    return b"".join(hashlib.sha256(memoryview(row)).digest() for row in rows.numpy())


# --------------------------------------------------------------------------------------------------
# The file of fingerprints

#: The file is ``{logging_dir}/fingerprints.jsonl``; the monitor of a run reads it too.
_NAME: Final = "fingerprints"


@final
class FingerprintLog(LoopHook):
    """The fingerprints of a run, written where the body of the training loop has ended.

    So the fingerprint is the one of a checkpoint that the body saves; after an epoch's last batch, it is the one of a
    checkpoint saved after the epoch.

    Raises:
        SettingError: the run has no folder for the file.
    """

    def __init__(self, run: Accelerator, every: int) -> None:
        if run.logging_dir is None:
            raise SettingError(
                f"{run.settings.quote('fingerprints.fingerprint_every')}: the run has no folder for the file. Give "
                "Accelerator(project_dir=...)."
            )
        self._run, self._every = ref(run), every
        self._log = JSONLTracker(_NAME, run.logging_dir)
        self._log.start()
        self._last = 0  # the update that was noted last
        self._due = 0  # an update whose fingerprint isn't written; 0: none
        self._loader = 0  # the id of the loader whose loop made it

    def after_step(self, optimizer: object) -> None:
        """Note each n-th update."""
        run = self._run()
        assert run is not None, "it calls this"
        updates = max(prepared.num_updates for prepared in run._optimizers)
        if updates != self._last and updates % self._every == 0:
            self._last = self._due = updates
            self._loader = id(run.gradient_state.loaders.active)

    def begin_pass(self, loader: object) -> None:
        """Write the last fingerprint of a loop that ended by ``break``."""
        self.between_batches(loader)

    def between_batches(self, loader: object) -> None:
        """Write the fingerprint of the update that this batch completed."""
        if id(loader) == self._loader:
            self._write()

    def end_pass(self, loader: object) -> None:
        """Write the fingerprint of an epoch's last update."""
        if getattr(loader, "end_of_dataloader", False):  # else it may be one rank's
            self.between_batches(loader)

    def end_run(self) -> None:
        """Write the last fingerprint."""
        self._write()

    def _write(self) -> None:
        """Write the fingerprint that is due, if one is; a collective if parameters are sharded."""
        run = self._run()
        if not self._due or run is None:
            return
        updates, self._due = self._due, 0
        parts = getattr(run.strategy, "parts", None)
        if parts is not None:
            parts.before_save()
        self._log.log({"fingerprint": run.fingerprint()}, updates)
