from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate.errors import MissingDependency
from accelerate.torch_private import fsdp, names
from accelerate.torch_private import modules as optim
from accelerate.torch_private.names import PrivateName, uses
from tests import versions
from tests.private_names import OPERATORS, TorchFiles, problems, registered


def installed() -> TorchFiles:
    return TorchFiles(Path(torch.__file__).parent.parent)


def test_the_installed_torch_has_every_private_name() -> None:
    assert sum(map(len, registered().values())) > 80
    assert problems(installed()) == []


def test_the_newest_torch_has_every_private_name() -> None:
    """Read from a wheel that `make versions` has downloaded; nothing of it is installed."""
    wheel = next(iter(versions.HOME.glob(f"torch-{versions.NEWEST}-*.whl")), None)
    if wheel is None:
        pytest.skip(f"no wheel of torch {versions.NEWEST} in {versions.HOME.name}/: make versions downloads it")
    files = TorchFiles(wheel)
    assert files.version == versions.NEWEST == names.CHECKED[-1]
    assert problems(files) == []


@uses("torch.nn.functional:_gone_for_good")
def lost() -> Any:
    return torch.nn.functional._gone_for_good  # pyright: ignore[reportAttributeAccessIssue]


@uses("torch.nn.modules.module:._lost_attribute")
def lost_of(module: Any) -> Any:
    return module._lost_attribute


@pytest.mark.parametrize("call", [lost, lambda: lost_of(torch.nn.Linear(1, 1))])
def test_a_name_that_a_torch_lacks_is_named_with_what_to_install(call: Any) -> None:
    with pytest.raises(MissingDependency, match=r"relies on torch\.nn.*_(gone_for_good|lost_attribute)") as caught:
        call()
    assert f"torch>={names.CHECKED[0]},<={names.CHECKED[-1]}" in str(caught.value)
    assert torch.__version__ in str(caught.value)
    assert isinstance(caught.value.__cause__, AttributeError)


def test_another_error_comes_through_as_it_is() -> None:
    @uses("torch.nn.modules.module:._forward_hooks")
    def wrong(module: Any) -> Any:
        return module.no_such_thing

    with pytest.raises(AttributeError, match="no_such_thing"):
        wrong(torch.nn.Linear(1, 1))


def pretended(folder: Path, **files: str) -> TorchFiles:
    """A torch of the given files."""
    for name, text in {"torch/version.py": "__version__ = '9.9.0'\n", **files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return TorchFiles(folder)


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        (PrivateName("torch.a:_f", "x, y"), "def _f(x, y, more=None): ...\n", None),
        (PrivateName("torch.a:_f", "x, y"), "def _f(x, *, y): ...\n", None),
        (PrivateName("torch.a:_f", "x, y"), "def _f(x, y, more): ...\n", "takes (x, y, more)"),
        (PrivateName("torch.a:_f", "x, y"), "def _f(y, x): ...\n", "takes (y, x)"),
        (PrivateName("torch.a:_f", "x, y"), "def _f(x): ...\n", "takes (x)"),
        (PrivateName("torch.a:_f"), "def _g(): ...\n", "gone"),
        (PrivateName("torch.a:_f"), "if True:\n    from .b import _g as _f\n", None),
        (PrivateName("torch.a:_f", ""), "from torch.b import _h as _f\n", "gone"),
        (PrivateName("torch.a:C._m", "self"), "class C:\n    def _m(self): ...\n", None),
        (PrivateName("torch.a:C._m", "self"), "class C: ...\n", "gone"),
        (PrivateName("torch.a:._attribute"), "def f(x):\n    x._attribute = 1\n", None),
        (PrivateName("torch.a:._attribute"), "def f(x):\n    x._other = 1\n", "gone"),
        (PrivateName("torch.a:._old", None, "torch.a:._new"), "def f(x):\n    x._new = 1\n", None),
        (PrivateName("torch.ops.aten:_op", "self, scale"), "", None),
        (PrivateName("torch.ops.aten:_op", "self"), "", "takes"),
        (PrivateName("torch.ops.aten:_op", "scale, self"), "", "takes"),
        (PrivateName("torch.ops.aten:_operator"), "", "gone"),
    ],
)
def test_files_of_a_torch_are_compared_with_what_is_used(
    name: PrivateName, text: str, problem: str | None, tmp_path: Path
) -> None:
    files = pretended(
        tmp_path,
        **{
            "torch/a.py": text,
            "torch/b.py": "def _g(): ...\n",
            OPERATORS: "- func: _op(Tensor self, float scale, int n=1) -> Tensor\n",
        },
    )
    found = files.problem(name)
    assert found is None if problem is None else found is not None and found.startswith(problem)


def test_a_version_before_a_name_is_not_asked_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tests.private_names.REGISTERED", {"accelerate.user": (PrivateName("torch.a:_f", None, None, "9.10"),)}
    )
    files = pretended(tmp_path, **{"torch/a.py": ""})
    assert problems(files) == []
    assert problems(files, at_least="9.10") == ["torch.a:_f, which accelerate.user uses, is gone"]


def test_gradients_of_shards_are_put_back_where_torch_keeps_whole_ones_on_the_parameter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch 2.15's records have no accumulated gradient of their own that could be set."""

    class Record:
        def __init__(self) -> None:
            self._unsharded_param = torch.nn.Parameter(torch.ones(2))
            self.sharded_param = torch.nn.Parameter(torch.ones(1))

        @property
        def unsharded_accumulated_grad(self) -> torch.Tensor | None:
            return self._unsharded_param.grad

    record = Record()
    record._unsharded_param.grad = torch.tensor([1.0, 2.0])
    monkeypatch.setattr(fsdp, "managed_parameters", lambda model: [record])
    from accelerate.training.oom_retry import snapshot_gradients

    model: Any = torch.nn.Linear(1, 1)
    restore = fsdp.snapshot_sharded_gradients(model, snapshot_gradients)
    record._unsharded_param.grad += 5
    restore()
    assert torch.equal(record._unsharded_param.grad, torch.tensor([1.0, 2.0]))


def test_operations_on_lists_are_torchs() -> None:
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor([1.0])]
    assert [float(norm) for norm in optim.norm_of_each(tensors, 2.0, torch.float64)] == [5.0, 1.0]
    optim.scale_each(tensors, torch.tensor(2.0))
    optim.move_each(tensors, [torch.zeros(2), torch.zeros(1)], 0.5)
    assert [tensor.tolist() for tensor in tensors] == [[3.0, 4.0], [1.0]]


class RecordOfOldTorch:
    """Of `fully_shard` until torch 2.14: a gradient of another dtype moves here from the whole parameter."""

    def __init__(self) -> None:
        self.sharded_param = torch.nn.Parameter(torch.ones(2))
        self._unsharded_param = torch.nn.Parameter(torch.ones(4))
        self.unsharded_accumulated_grad: torch.Tensor | None = None


class RecordOfNewTorch:
    """From torch 2.15 on: it stays on the whole parameter, and can only be read here."""

    def __init__(self) -> None:
        self.sharded_param = torch.nn.Parameter(torch.ones(2))
        self._unsharded_param = torch.nn.Parameter(torch.ones(4))

    @property
    def unsharded_accumulated_grad(self) -> torch.Tensor | None:
        return self._unsharded_param.grad


@pytest.mark.parametrize("kind", [RecordOfOldTorch, RecordOfNewTorch])
def test_whole_gradients_are_found_and_given_back_where_a_torch_keeps_them(
    monkeypatch: pytest.MonkeyPatch, kind: type[RecordOfOldTorch | RecordOfNewTorch]
) -> None:
    records: list[RecordOfOldTorch | RecordOfNewTorch] = [kind(), kind(), kind()]
    monkeypatch.setattr(fsdp, "_records", lambda modules: records)
    first, second = torch.arange(4.0), torch.arange(4.0) + 4
    records[0]._unsharded_param.grad = first
    if isinstance(records[1], RecordOfOldTorch):
        records[1].unsharded_accumulated_grad = second
    else:
        records[1]._unsharded_param.grad = second
    found = fsdp.unsharded_gradients([])
    assert [id(piece) for piece, _ in found] == [id(record.sharded_param) for record in records[:2]]
    assert [gradient.tolist() for _, gradient in found] == [first.tolist(), second.tolist()]

    given = {id(piece): gradient for piece, gradient in found}
    fsdp.set_unsharded_gradients([], lambda piece, whole: None)
    assert fsdp.unsharded_gradients([]) == []
    fsdp.set_unsharded_gradients([], lambda piece, whole: given.get(id(piece)))
    assert [gradient.tolist() for _, gradient in fsdp.unsharded_gradients([])] == [first.tolist(), second.tolist()]
    assert [record.unsharded_accumulated_grad is None for record in records] == [False, False, True]
