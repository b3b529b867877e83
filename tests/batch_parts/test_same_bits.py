"""The same bits on any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.batch_parts.training import MODELS, train
from tests.ranks import run_on_ranks
from tests.slow import IS_SLOW

#: (model and options, the layouts and numbers of ranks that have to give the bits of one process)
QUICK = [
    {"model": "Dense"},
    {"model": "Transformer", "num_steps": 2, "precision": "bf16"},
    {"model": "Convolutional", "num_workers": 2, "optimizer": "sgd", "weighted": True},
]
SLOW = [
    {"model": model, "optimizer": optimizer, "precision": precision, "weighted": weighted, "num_steps": num_steps}
    for model in MODELS
    for optimizer in ("adamw", "sgd")
    for precision in ("no", "bf16")
    for weighted in (False, True)
    for num_steps in (1, 2)
    if model != "Recurrent" or precision == "no"  # not every processor has an LSTM in bfloat16
]


#: FSDP 2 gives their BatchNorm weights in bfloat16 and statistics in float32, which torch takes on a GPU only.
NORMALISED = ("Dense", "Convolutional")
LAYOUTS = (("replicas", 3), ("replicas", 4), ("fsdp2", 2), ("fsdp2", 3), ("fsdp2", 4), ("hsdp", 4))


@pytest.mark.parametrize("case", [*QUICK, *(SLOW if IS_SLOW else [])], ids=str)
def test_any_number_of_ranks_computes_the_same_bits(case: dict[str, Any]) -> None:
    (whole,) = run_on_ranks(lambda: train(**case), 1, timeout_seconds=120)
    assert whole[3] == 19  # no sample of the evaluation twice
    assert run_on_ranks(lambda: train(**case), 2, timeout_seconds=240) == [whole] * 2
    sharded, layouts = whole, LAYOUTS if IS_SLOW else LAYOUTS[3:4]
    if case.get("precision", "no") != "no" and case["model"] in NORMALISED:
        layouts = [one for one in layouts if one[0] == "replicas"]
    elif case.get("precision", "no") != "no":  # FSDP 2 casts at other places than autocast
        sharded = run_on_ranks(lambda: train(**case, layout="fsdp2"), 2, timeout_seconds=240)[0]
    for layout, num_ranks in layouts:
        found = run_on_ranks(lambda layout=layout: train(**case, layout=layout), num_ranks, timeout_seconds=240)
        assert found == [whole if layout == "replicas" else sharded] * num_ranks, (layout, num_ranks)
