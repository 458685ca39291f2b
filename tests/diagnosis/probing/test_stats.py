from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from normlab.diagnosis import STATISTICS, measure

X = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(1)) + 0.5


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def test_every_statistic_equals_its_formula():
    x = X.numpy().astype(np.float64)
    p = np.exp(x) / np.exp(x).sum(-1, keepdims=True)
    pairs = [cosine(s[i], s[j]) for s in x for i in range(5) for j in range(5) if i != j]
    holes = X.clone()
    holes[0, 0, :2], holes[1, 1, 1] = 0.0, float("inf")
    expected = {
        "mean": (X, x.sum() / x.size),
        "variance": (X, ((x - x.mean()) ** 2).sum() / x.size),
        "mean_square": (X, (x**2).sum() / x.size),
        "rms": (X, math.sqrt((x**2).sum() / x.size)),
        "l2": (X, math.sqrt((x**2).sum())),
        "max_abs": (X, max(abs(v) for v in x.ravel())),
        "fraction_nonfinite": (holes, 1 / 105),
        "fraction_zero": (holes, 2 / 105),
        "entropy": (torch.tensor(p, dtype=torch.float32), -(p * np.log(p)).sum() / 15),
        "similarity": (X, sum(pairs) / len(pairs)),
    }
    assert set(expected) == set(STATISTICS)
    measured = {name: float(measure(name, given)) for name, (given, _) in expected.items()}
    assert measured == pytest.approx({name: value for name, (_, value) in expected.items()}, rel=1e-5)


@pytest.mark.parametrize("name", STATISTICS)
def test_a_statistic_is_a_scalar_that_never_waits_for_the_device(name):
    there_are_no_numbers = torch.empty(2, 4, 3, device="meta", dtype=torch.bfloat16)
    measured = measure(name, there_are_no_numbers)
    assert (measured.shape, measured.dtype) == ((), torch.float32)


def test_half_precision_is_measured_without_overflow():
    assert float(measure("rms", torch.full((4, 8), 300.0, dtype=torch.float16))) == pytest.approx(300)
