from __future__ import annotations

import torch

from accelerate.modules import (
    get_module_children_bottom_up,
    get_pretty_name,
    merge_dicts,
    model_has_dtensor,
    recursive_getattr,
)


def nested_model() -> torch.nn.Sequential:
    return torch.nn.Sequential(
        torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU()),
        torch.nn.Linear(2, 2),
        torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(3, 3))),
    )


def test_children_come_before_their_parents_and_the_model_last() -> None:
    model = nested_model()
    names = [name for name, _ in get_module_children_bottom_up(model, return_fqns=True)]
    assert names == ["0.0", "0.1", "0", "1", "2.0.0", "2.0", "2", ""]
    assert get_module_children_bottom_up(model)[-1] is model


def test_an_attribute_is_found_by_its_dotted_name() -> None:
    model = nested_model()
    assert recursive_getattr(model, "0.0.weight") is model[0][0].weight


def test_dicts_are_merged_into_the_destination_level_by_level() -> None:
    destination = {"zero": {"stage": 2}, "kept": 1}
    merged = merge_dicts({"zero": {"offload": {"device": "cpu"}}, "new": 3}, destination)
    assert merged is destination
    assert merged == {"zero": {"stage": 2, "offload": {"device": "cpu"}}, "kept": 1, "new": 3}


def test_names_to_show() -> None:
    model = nested_model()
    assert get_pretty_name(model) == "Sequential"
    assert get_pretty_name(torch.nn.Linear) == "Linear"
    assert get_pretty_name(model.forward) == "Sequential.forward"
    assert get_pretty_name(3) == "int"


def test_plain_models_have_no_distributed_tensors() -> None:
    assert not model_has_dtensor(nested_model())
