"""What a model says about the ranks that it was loaded for."""

from __future__ import annotations

from types import SimpleNamespace as Config
from typing import Any

import pytest
from torch import nn

from accelerate.parallel.tensor_parallel import check_size
from accelerate.utils import get_model_tp_size


def loaded(**attributes: Any) -> nn.Module:
    model = nn.Linear(1, 1)
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


@pytest.mark.parametrize(
    ("attributes", "size"),
    [
        ({}, None),
        ({"tp_size": 2}, 2),
        ({"config": Config()}, None),
        ({"config": Config(distributed_config=None)}, None),
        ({"config": Config(distributed_config=Config(tp_size=4))}, 4),
        ({"config": Config(distributed_config={"tp_size": 4})}, 4),
        ({"config": Config(distributed_config={})}, None),
        ({"tp_size": 2, "config": Config(distributed_config=Config(tp_size=4))}, 2),
        ({"tp_size": None, "config": Config(distributed_config=Config(tp_size=4))}, 4),
    ],
)
def test_the_tensor_parallel_size_is_known_from_the_model_or_its_distributed_config(
    attributes: dict[str, Any], size: int | None
) -> None:
    assert get_model_tp_size(loaded(**attributes)) == size


def test_a_model_that_was_loaded_for_another_size_is_refused_and_a_whole_one_is_not() -> None:
    check_size(loaded(config=Config(distributed_config=Config(tp_size=1))), 2)
    check_size(loaded(config=Config(distributed_config=Config(tp_size=2))), 2)
    with pytest.raises(ValueError, match=r"loaded for tp_size=4.*tp_size=2"):
        check_size(loaded(config=Config(distributed_config=Config(tp_size=4))), 2)
