"""Bucket that each size falls into, and refusals of invalid buckets and inputs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from autopar.errors import InputError
from autopar.ir.sharding.mesh import Mesh
from autopar.runtime.lengths.inputs import Sizes, padded, random, roles_of, sizes_of
from autopar.runtime.lengths.length_buckets import Buckets, unit_of
from autopar.runtime.lengths.varying import Varying

IDS = torch.arange(1, 7).view(2, 3)


@pytest.mark.parametrize(
    ("length", "unit", "expected"), [(1, 1, 1), (3, 1, 4), (4, 4, 4), (5, 4, 8), (17, 4, 32), (7, 6, 12), (1, 16, 16)]
)
def test_without_stated_lengths_buckets_are_powers_of_two_that_divide(length: int, unit: int, expected: int) -> None:
    assert Buckets().length_for(length, unit) == expected


def test_stated_lengths_are_rounded_up_to_what_the_mesh_can_divide() -> None:
    unit = unit_of(Mesh({"dp": 2, "cp": 4}))
    assert unit == 8
    assert Buckets((60, 100)).multiples_of(unit) == (64, 104)
    assert [Buckets((100, 60)).length_for(each, unit) for each in (1, 64, 65, 104)] == [64, 64, 104, 104]


def test_one_device_divides_nothing() -> None:
    assert unit_of(Mesh({"dp": 1})) == 1


def test_batches_are_padded_to_the_largest_so_far_or_to_stated_ones() -> None:
    assert [Buckets(batches="largest").batch_for(each, 8) for each in (3, 8, 9)] == [8, 8, 9]
    assert [Buckets(batches=(4, 2)).batch_for(each, 0) for each in (1, 3)] == [2, 4]
    assert Buckets().batch_for(3, 8) == 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Buckets(()), "Buckets(lengths=()); give whole numbers above 0, as (128, 256)"),
        (lambda: Buckets((0,)), "Buckets(lengths=(0,)); give whole numbers"),
        (lambda: Buckets("often"), "Buckets(lengths='often'); give whole numbers"),  # type: ignore[arg-type]
        (lambda: Buckets(batches=(True,)), "Buckets(batches=(True,)); give whole numbers"),
        (lambda: Buckets(None), "pads nothing; give one of them"),
        (lambda: Buckets(padding={"x": math.nan}), "padding['x']=nan; give the number"),
        (lambda: Buckets(dims={"mask": 2}), "dims names 'mask', for which padding has no value; it has input_ids"),
        (lambda: Buckets(check_lengths=(8, 8)), "check_lengths=(8, 8); give a length and a longer one"),
        (lambda: Buckets.of("always"), 'Run(buckets=\'always\'); give "auto", "none" or autopar.Buckets'),
        (lambda: Buckets((4, 8)).length_for(9, 1), "9 positions is longer than the longest bucket, 8; add one"),
        (lambda: Buckets(batches=(4,)).batch_for(5, 0), "5 samples is larger than the largest bucket, 4; add one"),
        (lambda: Buckets().multiples_of(1), "states no lengths to prepare; give them"),
        (lambda: Buckets(dims={"labels": 2}).positions_of("labels", 2), "dims['labels']=2, and labels has 2 dims"),
    ],
)
def test_what_makes_no_sense_is_refused(make: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        make()
    assert message in str(caught.value)


def _fitted(buckets: Buckets, **inputs: Any) -> dict[str, Any]:
    (_, found), _ = Varying(buckets, Mesh({"dp": 1}), ()).fitted(((), inputs), lambda mine: [mine])
    return found


def test_inputs_are_padded_behind_with_the_values_that_were_stated() -> None:
    mask_B1SS = torch.ones(2, 1, 3, 3, dtype=torch.bool)
    buckets = Buckets(padding={"ids": 9, "mask": 0, "classes": -100}, dims={"mask": (2, 3)}, batches=(3,))
    found = _fitted(buckets, ids=IDS, mask=mask_B1SS, classes=torch.tensor([1, 2]), scale=torch.tensor(2.0), k=3)
    assert_close(found["ids"], torch.tensor([[1, 2, 3, 9], [4, 5, 6, 9], [9, 9, 9, 9]]))
    assert found["mask"].shape == (3, 1, 4, 4)
    assert found["mask"][:2, :, :3, :3].all() and found["mask"].sum() == 18
    assert_close(found["classes"], torch.tensor([1, 2, -100]))
    assert (found["scale"], found["k"]) == (torch.tensor(2.0), 3)


def test_inputs_that_fit_are_taken_as_they_are() -> None:
    assert _fitted(Buckets((3,)), input_ids=IDS)["input_ids"] is IDS


def test_one_row_for_all_samples_gets_no_rows_more() -> None:
    found = _fitted(Buckets(batches=(4,)), input_ids=IDS, position_ids=torch.arange(3)[None])
    assert found["position_ids"].tolist() == [[0, 1, 2, 0]]


def test_inputs_of_different_lengths_are_refused() -> None:
    with pytest.raises(InputError, match=r"different numbers of positions \(input_ids 3, labels 2\)"):
        _fitted(Buckets(), input_ids=IDS, labels=IDS[:, :2])


def test_samples_without_a_value_to_pad_them_with_are_refused() -> None:
    with pytest.raises(InputError, match=r"x has 2 samples and is to be padded to 3, with no value to pad it with"):
        _fitted(Buckets(batches=(3,)), input_ids=IDS, x=torch.ones(2, 5))


def test_parts_are_padded_to_the_longest_and_the_largest_of_all() -> None:
    varying = Varying(Buckets(batches="largest"), Mesh({"dp": 2, "tp": 2}), ("dp",))
    known = [Sizes(3, 2), Sizes(3, 2), Sizes(9, 1), Sizes(9, 1)]
    (_, found), padding = varying.fitted(((), {"input_ids": IDS}), lambda mine: known)
    assert found["input_ids"].shape == (2, 16)
    assert (padding.length, padding.padded_length, padding.samples, padding.padded_samples) == (9, 16, (2, 1), 2)


def test_made_up_inputs_are_valid_and_of_the_sizes_requested() -> None:
    arguments = (), {"input_ids": IDS, "attention_mask": torch.zeros(2, 3), "x": torch.zeros(2, 5), "flag": True}
    buckets = Buckets()
    roles = roles_of(arguments, buckets)
    assert sizes_of(arguments, roles) == Sizes(3, 2)
    _, found = random(arguments, roles, Sizes(8, 4))
    assert {name: tuple(each.shape) for name, each in found.items() if name != "flag"} == {
        "input_ids": (4, 8),
        "attention_mask": (4, 8),
        "x": (4, 5),
    }
    assert found["input_ids"].unique().tolist() == [0, 1]
    assert padded(((), found), roles, Sizes(8, 4))[1]["input_ids"] is found["input_ids"]
