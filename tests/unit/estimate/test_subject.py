"""Which model is asked about."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from accelerate.errors import CheckpointNotFound, MissingDependency, SettingError
from accelerate.guests.estimate.subject import find_subject, inputs_of_timm
from accelerate.guests.estimate.trace import trace_training
from accelerate.optional import is_installed

PROGRAM = """
import torch
from torch import nn

def with_inputs():
    return nn.Linear(8, 2), lambda batch, sequence: torch.zeros(batch, sequence, 8)

def bare():
    return nn.Linear(8, 2)

def wrong():
    return 3
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "estimated_models.py"
    path.write_text(PROGRAM, encoding="utf-8")
    return path


@pytest.mark.parametrize("address", ["estimated_models:with_inputs", "estimated_models.py:with_inputs"])
def test_a_function_builds_the_model_and_its_inputs(program: Path, address: str) -> None:
    subject = find_subject(address)
    model = subject.build()
    assert all(parameter.is_meta for parameter in model.parameters())
    inputs = subject.inputs(model, 3, 5)
    assert isinstance(inputs, tuple) and inputs[0].shape == (3, 5, 8)
    assert trace_training(subject, batch=2, sequence=4, device="cpu").weights == 4 * (8 * 2 + 2)


def test_a_function_may_leave_out_the_inputs(program: Path) -> None:
    subject = find_subject("estimated_models:bare")
    with pytest.raises(ValueError, match=r"what Linear is called with isn't known"):
        trace_training(subject)
    assert trace_training(subject, activations=False).gradients == 4 * (8 * 2 + 2)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("estimated_models:missing", "has no function 'missing'; it has bare, with_inputs, wrong"),
        ("no_such_module_of_models:bare", "no_such_module_of_models can't be imported"),
        ("missing.py:bare", "missing.py can't be imported"),
        ("estimated_models:wrong", "returned 3, which is no torch module"),
    ],
)
def test_a_wrong_function_is_refused_with_what_is_wrong(program: Path, address: str, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        find_subject(address).build()


def test_a_folder_of_weights_tells_its_sizes(tmp_path: Path) -> None:
    save_file(
        {"a.weight": torch.zeros(3, 5), "a.steps": torch.zeros(2, dtype=torch.int64)}, tmp_path / "model.safetensors"
    )
    subject = find_subject(str(tmp_path))
    model = subject.build()
    assert dict(model.named_parameters()).keys() == {"a.weight", "a.steps"}
    trace = trace_training(subject, activations=False)
    assert (trace.weights, trace.gradients) == (3 * 5 * 4 + 2 * 8, 3 * 5 * 4)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="holds no weights"):
        find_subject(str(tmp_path))
    with pytest.raises(CheckpointNotFound, match="is no folder"):
        find_subject(str(tmp_path / "missing"))


def test_a_model_that_isnt_downloaded_is_refused_with_where_was_looked() -> None:
    with pytest.raises(CheckpointNotFound, match=r"'some/model' is no folder here.*hub.*HF_HUB_OFFLINE"):
        find_subject("some/model")


def test_without_a_client_of_the_hub_a_name_is_refused_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingDependency, match=r"'some/model' on the hub needs 'huggingface_hub'.*pip install"):
        find_subject("some/model")


def test_a_broken_configuration_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(SettingError, match=r"config.json can't be read"):
        find_subject(str(tmp_path))


def test_code_of_the_model_is_run_only_when_it_is_trusted(tmp_path: Path) -> None:
    config = {"model_type": "x", "auto_map": {"AutoModel": "theirs.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(SettingError, match=r"brings code of its own \(theirs.Model\).*--trust_remote_code"):
        find_subject(str(tmp_path))
    find_subject(str(tmp_path), trust_remote_code=True)


@pytest.mark.parametrize(
    ("config", "library"), [({"model_type": "llama"}, "transformers"), ({"architecture": "resnet18"}, "timm")]
)
def test_the_library_that_builds_the_model_is_named_where_it_is_missing(
    tmp_path: Path, config: dict[str, str], library: str
) -> None:
    if is_installed(library):
        pytest.skip(f"{library} is here")
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(MissingDependency, match=f"needs '{library}', but it isn't installed"):
        find_subject(str(tmp_path)).build()


def test_a_downloaded_model_is_found_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    snapshot = tmp_path / "models--some--model" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    (tmp_path / "models--some--model" / "refs").mkdir()
    (tmp_path / "models--some--model" / "refs" / "main").write_text("0" * 40, encoding="utf-8")
    real = hub.hf_hub_download
    monkeypatch.setattr(hub, "hf_hub_download", lambda *args: real(*args, cache_dir=tmp_path, local_files_only=True))
    assert find_subject("some/model").name == "some/model"


def test_images_are_those_of_imagenet_where_the_model_tells_nothing() -> None:
    (images,) = inputs_of_timm(torch.nn.Identity(), 2)
    assert images.shape == (2, 3, 224, 224)
