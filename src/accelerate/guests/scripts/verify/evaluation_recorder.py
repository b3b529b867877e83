"""What a script shows of its evaluations through the Accelerator, recorded by hooks."""

from __future__ import annotations

import builtins
import hashlib
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from types import FrameType
from typing import Any, Final, final

import torch

from ....accelerator import Accelerator
from ....data_loader.gathering import tensors_of
from ....torch_private.modules import batch_fetchers
from .evaluations import LOGGED, REDUCED, Evaluation, Shown, is_compared, parsed
from .record import Record
from .wrapping import Call, wrap

_GATHERING: Final = ("gather_for_metrics", "gather")
#: Larger tensors that are reduced are no metrics.
_MOST_NUMBERS: Final = 16
#: How often a script may ask for batches to train on after the last step.
_MOST_READS: Final = 1000


@final
class EvaluationRecorder:
    """A recorder of evaluations: of what a script shows before the next backward.

    An evaluation begins with a batch that isn't trained on, or with `eval()` of a trained model.

    Args:
        record: the record to add to.
        datasets: the datasets of the script's loaders, in the order of their creation.
        line_of: returns the line of the script that is being run in a frame.
        end: writes the record and ends the process.
    """

    def __init__(
        self,
        record: Record,
        datasets: list[object],
        line_of: Callable[[FrameType | None], int],
        end: Callable[[], None],
    ) -> None:
        self._record, self._datasets, self._line_of, self._end = record, datasets, line_of, end
        self._running: Evaluation | None = None
        self._read: list[tuple[object, bool]] = []  # since the last backward pass: datasets, and whether to evaluate
        self._trained: list[object] = []
        self._state = b""  # of the random numbers, at the last batch
        self._is_inside = False  # of a call that is recorded
        self._is_eval = False  # the last call of `train` or `eval` was `eval`
        self._reads_loader = True  # the running evaluation has read a batch
        self._num_left = _MOST_READS
        self.is_awaited: bool = False  # the last step is done

    def install(self) -> None:
        """Begin to record this process."""
        for name in _GATHERING:
            wrap(Accelerator, name, partial(self._gathering, name))
        wrap(Accelerator, "reduce", self._reducing)
        wrap(Accelerator, "log", self._logging)
        wrap(Accelerator, "print", partial(self._printing, True))
        wrap(builtins, "print", partial(self._printing, False))
        wrap(torch.nn.Module, "train", self._switching)
        for fetcher in batch_fetchers():
            wrap(fetcher, "fetch", self._reading)

    def begin_pass(self) -> None:
        """Note the begin of a pass over a loader: it draws the order of its samples."""
        self._state = b""

    def note_backward(self) -> None:
        """Note a backward pass: the script trains on the batches since the last one."""
        if self.is_awaited:
            self._end()
        if self._running is not None and not self._running.shown:
            self._record.evaluations.remove(self._running)
        self._running = None
        trained = [dataset for dataset, evaluates in self._read if not evaluates] or [one for one, _ in self._read[:1]]
        for dataset in trained:
            if not _holds(self._trained, dataset):
                self._trained.append(dataset)
                self._record.evaluated = [n for n in self._record.evaluated if self._datasets[n] is not dataset]
        self._read.clear()

    def ends_pass(self, dataset: object) -> bool:
        """Return whether a loader over this dataset gives no more batches, because the last step is done."""
        return self.is_awaited and _holds(self._trained, _of_script(dataset))

    def wait(self, seconds: float) -> None:
        """Let the script go on after the last step, to an evaluation of at most so many seconds."""
        self.is_awaited = True
        constants: Any = sys.modules.get("huggingface_hub.constants")
        if constants is not None:
            constants.HF_HUB_OFFLINE = True  # it may also upload what it has trained

        def give_up() -> None:
            self._record.failure = f"it took longer than {seconds:.0f} s"
            self._end()

        timer = threading.Timer(seconds, give_up)
        timer.daemon = True
        timer.start()

    def _reading(self, fetch: Call, fetcher: Any, index: object) -> object:
        """Fetch a batch: note evaluated data, and give no training data after the last step."""
        dataset = _of_script(fetcher.dataset)
        if self.ends_pass(dataset):
            self._num_left -= 1
            if self._running is not None or not self._num_left:
                self._end()
            raise StopIteration
        evaluates = not _holds(self._trained, dataset) and (self._is_eval or not torch.is_grad_enabled())
        self._read.append((dataset, evaluates))
        if evaluates:
            self._note_evaluated(dataset)
        return fetch(fetcher, index)

    def _note_evaluated(self, dataset: object) -> None:
        if not self._reads_loader:
            self._reads_loader, self._state = True, b""  # the loader has drawn its order since `eval()`
        self._begin_or_go_on()
        for number, each in enumerate(self._datasets):
            if each is dataset and number not in self._record.evaluated:
                self._record.evaluated.append(number)

    def _begin_or_go_on(self) -> None:
        """Begin an evaluation, or note whether the running one has drawn random numbers since the last call."""
        state = random_state()
        if self._running is None:
            self._running = Evaluation(self._record.num_steps)
            self._record.evaluations.append(self._running)
        else:
            self._running.draws |= self._state not in (b"", state)
        self._state = state

    # -- hooks -----------------------------------------------------------------------------------------

    def _switching(self, train: Call, module: torch.nn.Module, mode: bool = True) -> object:
        self._is_eval = not mode
        is_trained = self._record.num_steps and any(p.requires_grad for p in module.parameters())
        if is_trained and not mode and self._running is None:
            self._reads_loader = False
            self._begin_or_go_on()
        return train(module, mode)

    def _gathering(self, name: str, gather: Call, *args: object, **kwargs: object) -> object:
        result = gather(*args, **kwargs)
        line = self._line_of(sys._getframe(1))
        for number, tensor in enumerate(tensors_of(result)):
            self._add_rows(f"{name} at line {line}" + (f", item {number}" if number else ""), line, tensor)
        return result

    def _add_rows(self, name: str, line: int, tensor: torch.Tensor) -> None:
        if self._running is None or tensor.is_complex():
            return
        values = tensor.detach().double()
        shown = self._running.shown.setdefault(name, Shown(line, numbers=[[0.0, 0.0], [0.0, 0.0]]))
        shown.rows += len(values) if values.ndim else 1
        shown.num_values += values.numel()
        shown.numbers[0][0] += float(values.sum())
        shown.numbers[1][0] += float(values.square().sum())

    def _reducing(self, reduce: Call, *args: object, **kwargs: object) -> object:
        result = reduce(*args, **kwargs)
        tensors = tensors_of(result)
        if self._running is not None and sum(tensor.numel() for tensor in tensors) <= _MOST_NUMBERS:
            values = [value for tensor in tensors for value in tensor.detach().double().flatten().tolist()]
            line = self._line_of(sys._getframe(1))
            self._add_numbers(f"{REDUCED}{line}", line, [[value, 0.0] for value in values])
        return result

    def _logging(
        self, log: Call, accelerator: object, values: Mapping[str, Any], *args: object, **kwargs: object
    ) -> object:
        line = self._line_of(sys._getframe(1))
        for key, value in values.items():
            is_number = isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)
            if is_number and is_compared(key):
                self._add_numbers(f"{LOGGED}{key}", line, [[float(value), 0.0]])
        return log(accelerator, values, *args, **kwargs)

    def _printing(self, is_method: bool, show: Call, *args: object, **kwargs: object) -> object:
        if self._running is not None and not self._is_inside and kwargs.get("file") in (None, sys.stdout):
            text, numbers = parsed(" ".join(map(str, args[is_method:])))
            line = self._line_of(sys._getframe(1))
            if numbers and line:
                self._add_numbers(f'printed "{text}"', line, numbers)
        before, self._is_inside = self._is_inside, True
        try:
            return show(*args, **kwargs)
        finally:
            self._is_inside = before

    def _add_numbers(self, name: str, line: int, numbers: list[list[float]]) -> None:
        if self._running is not None:
            if not self._reads_loader:
                self._begin_or_go_on()
            self._running.shown.setdefault(name, Shown(line)).numbers.extend(numbers)


def random_state() -> bytes:
    """Return a hash of the state of torch's random numbers."""
    return hashlib.sha256(torch.get_rng_state().numpy().tobytes()).digest()


def _of_script(dataset: Any) -> object:
    """Return the script's own dataset inside of the Accelerator's, which read a part of it."""
    while type(dataset).__module__.partition(".")[0] == "accelerate":
        inner = vars(dataset).get("dataset", vars(dataset).get("shard"))
        if inner is None:
            break
        dataset = inner
    return dataset


def _holds(objects: list[object], wanted: object) -> bool:
    """Return whether one of the objects is this one; datasets may compare in their own way."""
    return any(each is wanted for each in objects)
