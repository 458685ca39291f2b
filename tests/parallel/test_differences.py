"""How tensors of two processes differ: which one first, and by which factor."""

from __future__ import annotations

import math

import pytest
import torch

from normlab.parallel.differences import (
    common_factor,
    differences,
    factor_in_words,
    first_difference,
    norm_of,
    where_known,
)


def gradients(dtype=torch.float64):
    torch.manual_seed(0)
    return {"a": torch.randn(3, 4, dtype=dtype), "b": torch.randn(5, dtype=dtype)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_rounding_leaves_is_no_difference(dtype):
    expected = gradients(dtype)
    rounded = {name: x * (1 + 4 * torch.finfo(dtype).eps) for name, x in expected.items()}
    assert first_difference(rounded, expected) is None


def test_a_gradient_that_is_zero_but_for_rounding_may_be_any_small_number():
    expected = {**gradients(), "c": torch.full((4,), 1e-17, dtype=torch.float64)}
    actual = {**expected, "c": -3 * expected["c"]}
    assert first_difference(actual, expected) is None


def test_the_first_one_that_differs_is_named_with_its_factor():
    expected = gradients()
    actual = {"a": expected["a"], "b": expected["b"] / 4}
    difference = first_difference(actual, expected)
    assert difference.name == "b"
    assert difference.factor == pytest.approx(0.25)
    assert difference.beside("the other") == "1/4 times the other"


def test_a_difference_that_is_no_factor_has_its_share():
    expected = gradients()
    actual = {**expected, "a": expected["a"].roll(1)}
    difference = first_difference(actual, expected)
    assert difference.factor is None
    assert difference.share == pytest.approx(
        float((actual["a"] - expected["a"]).norm() / expected["a"].norm())
    )


def test_one_that_is_missing_or_of_another_size_differs():
    expected = gradients()
    missing, other = differences({"b": torch.zeros(4, dtype=torch.float64)}, expected)
    assert (missing.name, missing.missing) == ("a", True)
    assert (other.name, math.isinf(other.share)) == ("b", True)


def test_a_factor_of_all_is_known():
    expected = gradients()
    assert common_factor({name: 2 * x for name, x in expected.items()}, expected) == pytest.approx(2)
    assert common_factor({"a": 2 * expected["a"], "b": 3 * expected["b"]}, expected) is None
    assert common_factor(expected, expected) is None


def test_the_update_of_a_gradient_that_is_zero_but_for_rounding_is_not_compared():
    of_keys = torch.tensor([1e-17, 0.5], dtype=torch.float64)
    updates = {**gradients(), "keys": torch.tensor([0.1, 0.1], dtype=torch.float64)}
    known = where_known(updates, {**gradients(), "keys": of_keys})
    assert known["keys"].tolist() == [0.0, 0.1]
    assert torch.equal(known["a"], updates["a"])


def test_factors_are_fractions_where_they_are():
    assert [factor_in_words(k) for k in (2.0, 0.5, 1 / 3, math.sqrt(0.5))] == ["2", "1/2", "1/3", "0.7071"]


def test_the_norm_is_that_of_one_vector():
    expected = gradients()
    together = torch.cat([x.flatten() for x in expected.values()])
    assert norm_of(expected) == pytest.approx(float(together.norm()))
