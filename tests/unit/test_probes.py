from __future__ import annotations

import inspect

import pytest

from accelerate.devices import hardware as probes
from accelerate.devices.table import CPU, available_kind, kind_of

DEVICE_QUESTIONS = {
    name: f"is_{name}_available" for name in ("cuda", "mps", "mlu", "musa", "npu", "sdaa", "hpu", "xpu", "neuron")
}

OTHER_QUESTIONS = (
    "is_torch_xla_available",
    "is_habana_gaudi1",
    "is_rocm_available",
    "is_xccl_available",
    "is_bf16_available",
    "is_fp16_available",
    "is_fp8_available",
)


@pytest.fixture(autouse=True)
def fresh_answers() -> None:
    probes._is_available.cache_clear()


@pytest.mark.parametrize(("name", "question"), DEVICE_QUESTIONS.items())
def test_a_question_about_a_device_is_answered_by_its_row(name: str, question: str) -> None:
    assert getattr(probes, question)() is kind_of(name).is_available()


@pytest.mark.parametrize("question", [*DEVICE_QUESTIONS.values(), *OTHER_QUESTIONS])
def test_every_question_answers_with_a_bool_and_without_arguments(question: str) -> None:
    function = getattr(probes, question)
    assert all(p.default is not p.empty for p in inspect.signature(function).parameters.values())
    assert isinstance(function(), bool)


def test_mps_needs_the_asked_version_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_is_available", lambda name: name == "mps")
    assert probes.is_mps_available()
    assert not probes.is_mps_available(min_version="99.0")


def test_xla_is_asked_for_one_hardware_at_a_time() -> None:
    with pytest.raises(ValueError, match="both at once"):
        probes.is_torch_xla_available(check_is_tpu=True, check_is_gpu=True)


def test_bfloat16_works_on_the_cpu() -> None:
    if available_kind() is not CPU:
        pytest.skip("there is an accelerator here")
    assert probes.is_bf16_available() and probes.is_bf16_available(ignore_tpu=True)
