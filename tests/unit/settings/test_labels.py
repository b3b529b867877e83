"""Labels behave as callers of the documented enums expect."""

from __future__ import annotations

from accelerate.settings.labels import (
    DDPCommunicationHookType,
    DistributedType,
    DynamoBackend,
    FP8BackendType,
    LoggerType,
    PrecisionType,
    RNGType,
)


def test_labels_equal_their_values() -> None:
    assert DistributedType.MULTI_GPU == "MULTI_GPU"
    assert DistributedType("MULTI_GPU") is DistributedType.MULTI_GPU


def test_membership_asks_for_values() -> None:
    assert "bf16" in PrecisionType and PrecisionType.BF16 in PrecisionType
    assert "fp4" not in PrecisionType and None not in PrecisionType


def test_base_enums_print_their_value_and_list_them() -> None:
    assert str(PrecisionType.NO) == "no" and f"{LoggerType.COMETML}" == "comet_ml"
    assert PrecisionType.list() == ["no", "fp8", "fp16", "bf16"]
    assert RNGType.list()[0] == "torch" and RNGType.list()[-1] == "generator"
    assert DDPCommunicationHookType.list() == ["no", "fp16", "bf16", "power_sgd", "batched_power_sgd"]
    assert len(DynamoBackend.list()) == 16


def test_plain_labels_print_their_name() -> None:
    assert str(DistributedType.NO) == "DistributedType.NO"
    assert str(FP8BackendType.TE) == "FP8BackendType.TE"
