"""The forecaster, fitted to runs whose probabilities are known."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import check_grad
from scipy.special import expit

from normlab.errors import UserError
from normlab.forecast import fit as module
from normlab.forecast.fit import fit
from normlab.forecast.forecaster import load

EDGE, SHARP, NAMES = -1.5, 6.0, ["critical", "way", "depth"]


def runs(n: int, seed: int = 0) -> tuple[list[dict[str, float]], list[bool]]:
    """Runs that fail above an edge which falls with the depth, and below a way of 0."""
    rng = np.random.default_rng(seed)
    rows, trained = [], []
    for _ in range(n):
        depth, lr = rng.uniform(0, 1), rng.uniform(-3, 0)
        row = {"critical": lr, "way": lr + 2.5, "depth": depth}
        p = expit(SHARP * (EDGE + 1 - depth - lr)) * expit(SHARP * row["way"])
        rows.append(row)
        trained.append(bool(rng.uniform() < p))
    return rows, trained


def test_the_edge_and_its_dependence_on_the_depth_are_found():
    found = fit(*runs(4000), NAMES, penalty=0.1)
    for depth in (0.2, 0.8):
        edge = EDGE + 1 - depth
        swept = {10**lr: {"critical": lr, "way": lr + 2.5, "depth": depth} for lr in (-3.0, -2.0, -1.0, 0.0)}
        ceiling = found.ceiling(swept)
        assert ceiling is not None
        assert np.log10(ceiling) == pytest.approx(edge, abs=0.1)
        row = {"critical": edge, "way": edge + 2.5, "depth": depth}
        assert found.bearable(row) == pytest.approx(0.5, abs=0.06)
        low, high = ({lr: swept[lr] for lr in some} for some in ((1e-3, 1e-2), (1.0,)))
        assert found.ceiling(low) is None, "all of them are bearable"
        assert found.ceiling(high) is None, "none of them is"
    sure, too_large, too_small = (
        found.probability({"critical": lr, "way": lr + 2.5, "depth": 0.2}) for lr in (-1.8, 0.0, -3.0)
    )
    assert sure > 0.9
    assert max(too_large, too_small) < 0.15


def test_the_gradient_is_that_of_the_likelihood():
    rng = np.random.default_rng(1)
    zu, zl, y = rng.normal(size=(30, 4)), rng.normal(size=(30, 2)), rng.integers(0, 2, 30).astype(float)
    w = rng.normal(size=8)
    loss = (lambda w: module._loss(w, zu, zl, y, 2.0)[0]), (lambda w: module._loss(w, zu, zl, y, 2.0)[1])
    assert check_grad(*loss, w) < 1e-4


def test_what_was_not_measured_counts_as_the_mean():
    rows, trained = runs(500)
    found = fit(rows, trained, NAMES)
    mean = found.centre["depth"]
    known, unknown = {"critical": -1.0, "way": 1.0, "depth": mean}, {"critical": -1.0, "way": 1.0}
    assert found.probability(unknown) == pytest.approx(found.probability(known))


def test_it_is_read_as_it_was_written_and_refused_for_other_features(tmp_path):
    found = fit(*runs(300), NAMES, feature_version=3, card={"runs": 300})
    path = tmp_path / "forecaster.json"
    path.write_text(found.to_json())
    assert load(path, feature_version=3) == found
    with pytest.raises(UserError, match=r"version 3 .* version 4"):
        load(path, feature_version=4)
