from __future__ import annotations

import logging
import random
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from accelerate.big_models.budget import DevicePlan
from accelerate.big_models.device_map import (
    check_device_map,
    clean_device_map,
    fallback_allocate,
    infer_auto_device_map,
)
from accelerate.big_models.sizes import compute_module_sizes, device_of, find_tied_parameters
from accelerate.errors import SettingError
from tests.unit.big_models.models import random_case


def layers(*sizes: int) -> nn.Sequential:
    """Return layers of 4 bytes for each count."""
    return nn.Sequential(*(nn.Linear(size, 1, bias=False, device="meta") for size in sizes))


def infer(model: nn.Module, budget: dict[Any, Any], **options: Any) -> dict[str, Any]:
    return dict(infer_auto_device_map(model, budget, **options))


# ------------------------------------------------------------------------------------------ documented rules


def test_what_fits_is_one_entry() -> None:
    assert infer(layers(10, 10), {0: 1000}) == {"": 0}


def test_the_first_accelerator_keeps_room_for_the_largest_layer_that_waits() -> None:
    assert infer(layers(10, 10, 10), {0: 120, "cpu": 1000}) == {"": 0}, "nothing waits behind the last one"
    assert infer(layers(10, 10, 10), {0: 119, "cpu": 1000}) == {"0": 0, "1": "cpu", "2": "cpu"}


def test_no_room_is_kept_for_single_tensors() -> None:
    model = layers(4)
    model.register_buffer("scale", torch.ones(8))
    assert infer(model, {0: 16}, offload_buffers=True) == {"0": 0, "scale": "disk"}


def test_the_other_accelerators_keep_no_room() -> None:
    assert infer(layers(10, 10, 10, 10), {0: 80, 1: 80, "cpu": 1000}) == {"0": 0, "1": 1, "2": 1, "3": "cpu"}


def test_the_host_keeps_room_for_what_comes_from_disk() -> None:
    assert infer(layers(10, 10, 10), {"cpu": 80}) == {"0": "cpu", "1": "disk", "2": "disk"}


def test_a_device_that_was_left_is_not_visited_again() -> None:
    assert infer(layers(10, 100, 10), {0: 450, 1: 60, "cpu": 1000}) == {"0": 0, "1": "cpu", "2": "cpu"}


def test_a_module_that_does_not_fit_is_split() -> None:
    model = nn.Sequential(layers(10, 10), layers(10, 10))
    assert infer(model, {0: 160, 1: 160}) == {"": 0}
    assert infer(model, {0: 159, 1: 160}) == {"0": 0, "1": 1}
    assert infer(model, {0: 90, 1: 1000}) == {"0.0": 0, "0.1": 1, "1": 1}


def test_a_class_that_is_not_split_goes_as_a_whole() -> None:
    model = nn.Sequential(layers(10, 10), layers(10, 10))
    outer = nn.ModuleDict({"first": model[0], "second": model[1]})
    assert infer(outer, {0: 240, 1: 1000}, no_split_module_classes=["Sequential"]) == {"": 0}
    assert infer(outer, {0: 159, 1: 1000}, no_split_module_classes="Sequential") == {"": 1}
    assert infer(outer, {0: 160, 1: 80}, no_split_module_classes="Sequential") == {"": 0}
    assert infer(outer, {0: 150, 1: 1000}, no_split_module_classes=["Sequential"]) == {"": 1}


def test_own_parameters_and_buffers_of_a_split_module_are_placed_too() -> None:
    model = layers(10, 10)
    model.own = nn.Parameter(torch.empty(10, device="meta"))
    model.register_buffer("table", torch.empty(10, device="meta"))
    found = infer(nn.Sequential(model), {0: 120, 1: 1000})
    assert found == {"0.own": 0, "0.0": 0, "0.1": 0, "0.table": 1}
    check_device_map(nn.Sequential(model), found)


def test_tied_weights_go_together() -> None:
    model = layers(10, 10, 10, 10)
    model[3].weight = model[0].weight
    assert infer(model, {0: 80, "cpu": 1000}) == {"0": 0, "3": 0, "1": "cpu", "2": "cpu"}


def test_a_tied_partner_is_split_when_only_a_part_of_it_has_to_come_along() -> None:
    model = nn.ModuleDict({"embed": layers(10), "mid": layers(10), "head": layers(50, 10)})
    model["head"][1].weight = model["embed"][0].weight
    assert infer(model, {0: 250, 1: 1000}) == {"embed": 0, "head.1": 0, "mid.0": 1, "head.0": 1}


def test_a_name_that_only_contains_the_other_is_no_tie() -> None:
    model = nn.ModuleDict({"a": layers(10), "b": nn.ModuleDict({"a": layers(10)}), "c": layers(10)})
    model["c"][0].weight = model["b"]["a"][0].weight
    assert infer(model, {0: 0, 1: 40, 2: 40}) == {"a.0": 1, "b.a.0": 2, "c": 2}


def test_fallback_places_the_first_that_fits_on_an_empty_device() -> None:
    model = layers(100, 10, 10)
    assert infer(model, {0: 0, 1: 50, "cpu": 10_000}) == {"": "cpu"}
    assert infer(model, {0: 0, 1: 50, "cpu": 10_000}, fallback_allocation=True) == {"1": 1, "0": "cpu", "2": "cpu"}


def test_a_dtype_makes_the_model_smaller() -> None:
    assert infer(layers(10, 10), {0: 40, "cpu": 1000}, dtype="float16") == {"": 0}
    assert infer(layers(10, 10), {0: 60, "cpu": 1000}, dtype="float16", special_dtypes={"0.weight": torch.float32}) == {
        "": 0
    }


def test_the_disk_takes_what_is_left_unless_it_has_a_limit() -> None:
    assert infer(layers(10, 10), {"cpu": 0}) == {"": "disk"}
    with pytest.raises(SettingError, match=r"too small for the model: 1 \(40 bytes\) has no device"):
        infer(layers(10, 10), {"cpu": 0, "disk": 40})


def test_buffers_that_stay_on_a_full_accelerator_are_told() -> None:
    model = nn.Sequential(nn.Linear(10, 1, bias=False), nn.BatchNorm1d(50), nn.Linear(10, 1, bias=False))
    with pytest.warns(UserWarning, match="offload_buffers=True"):
        infer(model, {0: 300, "cpu": 10_000}, no_split_module_classes=["BatchNorm1d"])
    infer(model, {0: 300, "cpu": 10_000}, offload_buffers=True)


def test_buffers_are_told_where_none_of_the_accelerators_has_room_for_them() -> None:
    model = nn.Sequential(nn.Linear(10, 1, bias=False), nn.BatchNorm1d(50), nn.Linear(10, 1, bias=False))
    with pytest.warns(UserWarning, match=r"requires 408 bytes of buffer for offloaded layers"):
        infer(model, {0: 300, "cpu": 10_000}, no_split_module_classes=["BatchNorm1d"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        infer(model, {0: 300, "cpu": 10_000}, no_split_module_classes=["BatchNorm1d"], offload_buffers=True)
        infer(model, {0: 300, 1: 10_000, "cpu": 0}, no_split_module_classes=["BatchNorm1d"])


@pytest.mark.parametrize(("limit", "fits"), [(40 + 200 + 120, True), (40 + 200 + 119, False)])
def test_buffers_of_offloaded_layers_leave_room_for_the_layer_that_runs(limit: int, fits: bool) -> None:
    """The device holds its own layer, 200 bytes of buffers that stay, and the 120 bytes of weights of one layer."""
    model = nn.Sequential(*(nn.Linear(size, 1, bias=False) for size in (10, 30, 25)))
    for layer in (model[1], model[2]):
        layer.register_buffer("table", torch.zeros(25))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        placed = infer(model, {0: limit, "cpu": 10_000}, method="greedy")
    assert placed == {"0": 0, "1": "cpu", "2": "cpu"}
    assert [("offload_buffers=True" in str(one.message)) for one in told] == [True] * (not fits)


def test_a_device_that_gets_nothing_for_lack_of_memory_is_told(caplog: pytest.LogCaptureFixture) -> None:
    def said(budget: dict[Any, Any]) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            infer(layers(10, 10), budget)
        return [text for record in caplog.records if "insufficient memory" in (text := record.getMessage())]

    (text,) = said({0: 30, "cpu": 1000})
    assert "No modules could be assigned to device 0 due to insufficient memory: its limit is 30 bytes" in text
    assert "80 bytes required" in text, "40 of the first layer, and as many for the layers that wait"
    assert said({0: 80, "cpu": 1000}) == []
    assert said({0: 1000, 1: 0, "cpu": 1000}) == [], "nothing waited for device 1"


def test_a_plan_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    model = layers(10, 10, 10)
    model[2].weight = model[1].weight
    plan = infer_auto_device_map(model, {0: 79, 1: 100}, clean_result=False, verbose=True)
    text = str(plan)
    assert capsys.readouterr().out == text + "\n"
    assert "0     Linear  40 bytes  1       0 has 39 bytes left" in text
    assert "tied to 1" in text and "1     80 bytes of 100 bytes" in text and "disk  0 bytes of no limit" in text
    assert plan == {"0": 1, "1": 1, "2": 1}


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(SettingError, match="'greedy' or 'exact'"):
        infer_auto_device_map(layers(1), {"cpu": 1}, method="best")  # pyright: ignore[reportArgumentType]


# ---------------------------------------------------------------------------------------------- exact search


def test_exact_fills_better_out_of_order() -> None:
    model = layers(30, 60, 40)
    budget = {0: 240, 1: 280, "cpu": 1000}
    assert infer(model, budget) == {"0": 1, "1": "cpu", "2": "cpu"}
    assert infer(model, budget, method="exact") == {"0": 1, "1": 0, "2": 1}


def test_exact_keeps_no_room_when_everything_fits() -> None:
    # The documented rule keeps 200 bytes free for the last layer until it is placed: then it can't be placed.
    model = layers(10, 50, 50)
    budget = {0: 240, 1: 201, "cpu": 10_000}
    assert "cpu" not in infer(model, budget, method="exact").values()


def test_exact_is_the_greedy_map_where_that_is_as_good() -> None:
    model = layers(10, 10, 10)
    assert list(infer_auto_device_map(model, {0: 80, 1: 80}, method="exact").items()) == list(
        infer_auto_device_map(model, {0: 80, 1: 80}).items()
    )


def test_exact_is_quick_for_many_layers() -> None:
    rng = random.Random(0)
    model = nn.Sequential(*(layers(*(rng.choice([40, 41, 160, 500]) for _ in range(7))) for _ in range(80)))
    total = compute_module_sizes(model)[""]
    plan = infer_auto_device_map(model, {0: total // 3, 1: total // 4, "cpu": total // 5}, method="exact")
    assert plan.num_bytes_on([0, 1]) > 0.9 * (total // 3 + total // 4)


# ------------------------------------------------------------------------------------------- 200 random models


def cost(plan: DevicePlan, budget: dict[Any, int]) -> int:
    fast = [place for place in budget if place != "cpu"] or ["cpu"]
    assert plan.problem is not None
    return sum(part.num_bytes for part in plan.problem.parts) - plan.num_bytes_on(fast)


def bytes_by_device(model: nn.Module, device_map: dict[str, Any]) -> dict[Any, int]:
    """Return the bytes on each device, measured on the model itself, each tensor once per device."""
    seen: dict[Any, dict[int, int]] = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers()):
        place = device_of(name, device_map)
        seen.setdefault(place, {})[id(tensor)] = tensor.numel() * tensor.element_size()
    return {place: sum(sizes.values()) for place, sizes in seen.items()}


@pytest.mark.filterwarnings("ignore:Current model requires:UserWarning")
@pytest.mark.parametrize("first_seed", range(0, 200, 25))
def test_any_map_is_whole_within_the_limits_and_keeps_ties(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 25):
        model, budget, no_split = random_case(seed)
        plans = [
            infer_auto_device_map(model, budget, no_split, clean_result=False, **options)
            for options in ({}, {"fallback_allocation": True}, {"method": "exact"})
        ]
        for plan in plans:
            cleaned = clean_device_map(dict(plan))
            check_device_map(model, cleaned)
            used = bytes_by_device(model, cleaned)
            over = {place: size for place, size in used.items() if place != "disk" and size > budget[place]}
            assert not over, (seed, over, budget)
            for group in find_tied_parameters(model):
                assert len({device_of(name, cleaned) for name in group}) == 1, (seed, group)
            for name, module in model.named_modules():
                if no_split and type(module).__name__ in no_split and name:
                    inside = [n for n, _ in module.named_parameters(prefix=name)]
                    assert len({device_of(each, cleaned) for each in inside}) <= 1, (seed, name)
        assert cost(plans[2], budget) <= cost(plans[0], budget), seed


def test_exact_is_better_somewhere() -> None:
    wins = 0
    for seed in range(40):
        model, budget, no_split = random_case(seed)
        greedy, exact = (
            infer_auto_device_map(model, budget, no_split, offload_buffers=True, clean_result=False, method=method)
            for method in ("greedy", "exact")
        )
        wins += cost(exact, budget) < cost(greedy, budget)
    assert wins > 10


# -------------------------------------------------------------------------------------------- small functions


def test_cleaning_merges_what_agrees() -> None:
    given = {"a": 0, "b.c.1": 0, "b.c.2": 0, "b.d": 1, "b.e.x": 1, "b.e.y": 1}
    assert list(clean_device_map(given).items()) == [("a", 0), ("b.c", 0), ("b.d", 1), ("b.e", 1)]
    assert clean_device_map({"a": 0, "b.c": 0}) == {"": 0}
    assert clean_device_map({"a.b": 0, "a.c": 0, "ab": 1, "a": 0}, "a") == {"a": 0, "ab": 1}
    assert clean_device_map({}) == {}


def test_uncovered_tensors_are_refused_and_unknown_names_told() -> None:
    model = layers(3, 3)
    with pytest.raises(ValueError, match=r"1 tensors of Sequential: 1\.weight"):
        check_device_map(model, {"0": "cpu"})
    with pytest.warns(UserWarning, match="hasn't: 2, x"):
        check_device_map(model, {"": "cpu", "2": 0, "x": 1})
    check_device_map(model, {"0.weight": 0, "1": 1})


def test_fallback_finds_the_first_that_fits_breadth_first() -> None:
    model = nn.Sequential(layers(20, 5), layers(10))
    sizes = compute_module_sizes(model)
    name, module, rest = fallback_allocate(list(model.named_children()), sizes, 40)
    assert (name, module) == ("1", model[1]) and [each for each, _ in rest] == ["0"]
    name, module, rest = fallback_allocate(list(model.named_children()), sizes, 39)
    assert (name, module) == ("0.1", model[0][1]) and [each for each, _ in rest] == ["0.0", "1"]
    assert fallback_allocate(list(model.named_children()), sizes, 1)[:2] == (None, None)
