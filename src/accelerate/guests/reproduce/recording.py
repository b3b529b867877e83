"""The hooks that write a run's record: its launch, a fingerprint every few updates, and its checkpoints.

Between fingerprints, an update costs one addition and one comparison. A fingerprint is a sum of the mixed bits of
tensors on their device, and a hash over all sums. The sums are of 64-bit integers, so their order doesn't matter: any
device and any number of threads give the same ones. Only one number per tensor is read from the device.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast, final
from uuid import uuid4
from weakref import ref

import torch

from ...checkpointing.manifest import updates_in
from ...checkpointing.storage import storage_of
from ...data_loader.sampling import order_fingerprint
from ...names import MANIFEST_NAME
from ...nested import named_tensors
from ...seams import LoopHook
from . import surroundings
from .chain import LOCK, ChainFile, hash_of, read_chain
from .runs import texts_of

if TYPE_CHECKING:
    from ...accelerator import Accelerator

#: The number of 64-bit words that are mixed at once; their temporary memory is twice 8 MB.
_NUM_WORDS: Final = 1 << 20
_FACTOR: Final = 0x9E3779B97F4A7C15
_DIGITS: Final = 32


def fingerprint(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return 32 hexadecimal digits for the bits, dtypes and shapes of tensors; "" if none has bits that can be read.

    A rank sees its own shard of a sharded tensor.
    """
    with torch.no_grad():
        found = [(name, tensor, flat) for name, tensor in named if (flat := _bytes_of(tensor)) is not None]
        if not found:
            return ""
        sums = [_sum(group) for group in _groups(flat for *_, flat in found)]
        values = torch.stack([one.to(sums[0].device) for one in sums]).tolist()
    heads = [(name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor, _ in found]
    return hashlib.sha256(repr((heads, values)).encode()).hexdigest()[:_DIGITS]


def weights_of(models: Iterable[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers of models by name."""
    for number, model in enumerate(models):
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            yield f"{number}.{name}", tensor


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the bytes of this rank's part of ``tensor``, of shape [bytes]; None if they can't be read."""
    to_local: Any = getattr(tensor, "to_local", None)
    plain: torch.Tensor = tensor if to_local is None else to_local()
    is_plain = type(plain) in (torch.Tensor, torch.nn.Parameter)
    if not is_plain or plain.is_meta or plain.is_quantized or plain.layout is not torch.strided:
        return None
    values = plain.detach()
    if values.is_conj() or values.is_neg():
        values = values.resolve_conj().resolve_neg()
    if values.is_complex():
        values = torch.view_as_real(values)
    return values.contiguous().view(-1).view(torch.uint8)


def _groups(flats: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Join the bytes of small tensors of one device, of which each would cost as much as a large one."""
    group: list[torch.Tensor] = []
    size = 0
    for flat in flats:
        if group and (flat.device != group[0].device or size + len(flat) > 8 * _NUM_WORDS):
            yield torch.cat(group) if len(group) > 1 else group[0]
            group, size = [], 0
        group.append(flat)
        size += len(flat)
    yield torch.cat(group) if len(group) > 1 else group[0]


def _sum(flat: torch.Tensor) -> torch.Tensor:
    """Return the sum of all words of ``flat``, each mixed with its place, of shape []."""
    flat = flat.clone() if flat.storage_offset() % 8 else flat
    end = len(flat) - len(flat) % 8
    words, places = flat[:end].view(torch.int64), _places(flat.device)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for number, part in enumerate((*words.split(_NUM_WORDS), flat[end:].long())):
        mixed = part * places[: len(part)]
        mixed ^= mixed >> 29  # else changes of the highest bits alone would cancel
        total += mixed.sum() * _signed((2 * number + 1) * _FACTOR)
    return total


@cache
def _places(device: torch.device) -> torch.Tensor:
    """Return an odd factor for each place, of shape [words]."""
    mixed = torch.arange(1, _NUM_WORDS + 1, device=device) * _signed(_FACTOR)
    mixed ^= mixed >> 32
    mixed *= _signed(0xBF58476D1CE4E5B9)
    return (mixed ^ (mixed >> 29)) | 1


def _signed(number: int) -> int:
    """Return the signed 64-bit integer with the lowest 64 bits of ``number``."""
    number %= 1 << 64
    return number - (1 << 64) if number >> 63 else number


# --------------------------------------------------------------------------------------------------
# The hooks of a run

_log = logging.getLogger(__name__)
#: Fingerprints are recorded at each power of two, and every so many updates.
EVERY: Final = 100
#: Numbers the recorded Accelerators of this process, to find the same one in another run of the script.
_numbers = count()


def next_mark(updates: int) -> int:
    """Return the next update after ``updates`` whose fingerprint is recorded."""
    return min(1 << updates.bit_length(), (updates // EVERY + 1) * EVERY)


@final
class Beginning(LoopHook):
    """The hook before the first update of a run: it begins the record, and is called no more."""

    def __init__(self, run: Accelerator) -> None:
        self._run = ref(run)
        self._loaded: str | None = None
        self._details: Mapping[str, object] = {}

    def after_load(self, folder: str, details: Mapping[str, object]) -> None:
        """Keep the checkpoint from which the run goes on."""
        self._loaded, self._details = folder, details

    def before_step(self, optimizer: object) -> None:
        """Record the launch, with the weights before the first update."""
        run = self._run()
        if run is None:
            return
        hooks = run.gradient_state.hooks
        hooks.remove(self)
        weights = fingerprint(weights_of(run._models))
        if weights:  # else a simulated run, or weights that aren't in this process
            recorder = Recorder(run, optimizer)
            hooks.add(recorder)
            if self._loaded is not None:
                recorder.continue_from(self._loaded, self._details)
            recorder.record_launch(run, weights)


@final
class Recorder(LoopHook):
    """The record of one Accelerator's training loop, written by the main process.

    Attributes:
        updates: the number of updates of this run, with those before it was resumed.
    """

    def __init__(self, run: Accelerator, optimizer: object) -> None:
        self._run = ref(run)
        self._counted: object = optimizer  # the optimizer that steps first; its steps are the updates
        self._folder = Path(str(run.project_configuration.project_dir)).absolute()
        self._file: ChainFile | None = ChainFile(self._folder / LOCK)
        # Entries wait until the script has its folder: it may test whether it is there.
        self._waiting: list[tuple[dict[str, Any], bool]] = []
        self._launch = uuid4().hex[:12]
        self.updates = self._last = 0
        self._next: float = next_mark(0)
        self._resumed: dict[str, object] | None = None
        self._unwritten: dict[str, Any] | None = None  # the checkpoint that is being written
        self._process_id = os.getpid()
        self._has_ended = False  # since the last update
        atexit.register(_end, ref(self))

    # -- the loop ------------------------------------------------------------------------------------------

    def after_step(self, optimizer: object) -> None:
        """Count an update."""
        if optimizer is self._counted:
            self.updates += 1
            if self.updates >= self._next:
                self.record_point("update")
        elif self._counted is None:
            self._counted = optimizer
            self.after_step(optimizer)

    def free_memory(self) -> None:
        """Count the steps of the next optimizer."""
        self._counted = None

    def after_save(self, folder: str, seconds: float, details: Mapping[str, object]) -> None:
        """Record the checkpoint, as soon as it is written."""
        run = self._run()
        self._settle()
        if run is not None:
            self._unwritten = {"folder": self._shown(folder), "weights": fingerprint(weights_of(run._models))}
            self._unwritten |= {"updates": self.updates}
            self._settle()

    def after_load(self, folder: str, details: Mapping[str, object]) -> None:
        """Count from the checkpoint's updates on."""
        self.continue_from(folder, details)
        self._append("load", **cast("dict[str, Any]", self._resumed))

    def end_run(self) -> None:
        """Record the last weights."""
        self._settle()
        self.record_point("end")

    # -- entries -------------------------------------------------------------------------------------------

    def record_launch(self, run: Accelerator, weights: str) -> None:
        """Record how the run was started, and the ``weights`` before its first update."""
        try:
            found, texts = surroundings.code()
            known = texts_of(read_chain(self._folder / LOCK).entries)
        except OSError as error:
            self._give_up(error)
            return
        self._append(
            "launch",
            number=next(_numbers),
            command=surroundings.command(),
            project=str(self._folder),
            ranks=run.num_processes,
            strategy=run.distributed_type.value,
            precision=run.mixed_precision,
            accumulation=run.gradient_accumulation_steps,
            resumed=self._resumed,
            code=found,
            texts={key: text for key, text in texts.items() if key not in known},
            inputs=surroundings.inputs(sys.argv[1:]),
            packages=surroundings.packages(),
            variables=surroundings.variables(),
            machine=surroundings.machine(run),
            switches=surroundings.switches(),
            seeds=surroundings.seeds(),
            data=surroundings.data(run),
            updates=self.updates,
            weights=weights,
        )

    def continue_from(self, folder: str, details: Mapping[str, object]) -> None:
        """Count from the updates of a checkpoint on."""
        self.updates = updates_in(details)
        identity = _manifest_hash(folder)
        for entry in read_chain(self._folder / LOCK).entries:  # it also counts steps that a gradient scaler skipped
            if entry["kind"] == "checkpoint" and entry["manifest"] == identity:
                self.updates = entry["updates"]
        self._last, self._next = self.updates, next_mark(self.updates)
        self._resumed = {"folder": self._shown(folder), "manifest": identity, "updates": self.updates}

    def record_point(self, kind: str) -> None:
        """Record the weights after this update, unless they were."""
        run = self._run()
        is_end = kind == "end" and not self._has_ended
        if run is not None and self._file is not None and (self.updates != self._last or is_end):
            self._has_ended = kind == "end"
            self._last, self._next = self.updates, next_mark(self.updates)
            self._settle()
            weights = fingerprint(weights_of(run._models))
            self._append(kind, is_durable=kind == "end", updates=self.updates, weights=weights, **_position(run))

    def record_failure(self, error: object) -> None:
        """Record that the program ended with an error."""
        self._append("failure", updates=self.updates, error=type(error).__name__)

    def _settle(self) -> None:
        """Record the checkpoint that was being written, if it is complete."""
        saved, run = self._unwritten, self._run()
        if saved is None or run is None or run._background.is_running:
            return
        self._unwritten = None
        identity = _manifest_hash(str(self._folder / str(saved["folder"])))
        if identity:
            self._append("checkpoint", manifest=identity, **saved)

    def _append(self, kind: str, *, is_durable: bool = True, **facts: object) -> None:
        if self._file is None or self._process_id != os.getpid():
            return
        entry = {"kind": kind, "launch": self._launch, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        self._waiting.append(({**entry, **facts}, is_durable))
        if self._folder.is_dir():
            self.write()

    def write(self) -> None:
        """Write the entries that wait; it makes the folder."""
        if self._file is None or self._process_id != os.getpid():
            return
        try:
            for entry, is_durable in self._waiting:
                self._file.append(entry, is_durable=is_durable)
        except OSError as error:
            self._give_up(error)
        self._waiting = []

    def _give_up(self, error: OSError) -> None:
        _log.warning("%s can't be written (%s). Training continues without a record.", self._folder / LOCK, error)
        self._file, self._next = None, math.inf

    def _shown(self, folder: str) -> str:
        """Return a folder as it is recorded: relative to the run's folder if it is inside."""
        path = Path(folder).absolute()
        inside = "://" not in folder and path.is_relative_to(self._folder)
        return str(path.relative_to(self._folder)) if inside else folder


def _position(run: Accelerator) -> dict[str, Any]:
    """Return the position in the data, with fingerprints of the last batch and of its sample ids."""
    loader: Any = run.gradient_state.loaders.active
    info = getattr(getattr(loader, "progress", None), "batch_info", None)
    if info is None:
        return {}
    order = order_fingerprint(info.last_batch)
    batch = fingerprint(named_tensors(loader.current_batch))
    return {"epoch": loader.progress.epoch, "batches": info.batches, "order": order, "batch": batch}


def _manifest_hash(folder: str) -> str:
    """Return the hash of a checkpoint's manifest, which has a checksum of each file; "" if there is none."""
    try:
        return hash_of(storage_of(folder).read(MANIFEST_NAME))
    except OSError:
        return ""


def _end(reference: ref[Recorder]) -> None:
    """Record the last weights at the interpreter's exit, if the script hasn't, and it didn't fail."""
    recorder, error = reference(), getattr(sys, "last_value", None)
    if recorder is not None and error is None:
        recorder.end_run()
        recorder.write()
    elif recorder is not None:
        recorder.record_failure(error)
