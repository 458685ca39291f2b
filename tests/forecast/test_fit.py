"""The forecaster, fitted to runs whose probabilities are known."""

from __future__ import annotations

import builtins
import json

import numpy as np
import pytest
from scipy.special import expit
from sklearn.ensemble import ExtraTreesClassifier

from normlab.errors import UserError
from normlab.forecast import fit as module
from normlab.forecast.fit import fit
from normlab.forecast.forecaster import LEAF, Forecaster, Tree, load, matrix

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


@pytest.fixture(scope="module")
def fitted() -> Forecaster:
    return fit(*runs(3000), NAMES, feature_version=3, card={"runs": 3000})


def test_the_edge_and_its_dependence_on_the_depth_are_found(fitted):
    for depth in (0.2, 0.8):
        edge = EDGE + 1 - depth
        swept = {10**lr: {"critical": lr, "way": lr + 2.5, "depth": depth} for lr in np.arange(-3, 0.1, 0.25)}
        ceiling = fitted.ceiling(swept)
        assert ceiling is not None
        assert np.log10(ceiling) == pytest.approx(edge, abs=0.2)
        low, high = ({lr: row for lr, row in swept.items() if keep(lr)} for keep in (low_end, high_end))
        assert fitted.ceiling(low) is None, "the largest of them trains"
        assert fitted.ceiling(high) is None, "none of them does"
    sure, too_large, too_small = (
        fitted.probability({"critical": lr, "way": lr + 2.5, "depth": 0.2}) for lr in (-1.6, -0.1, -2.9)
    )
    assert sure > 0.8
    assert max(too_large, too_small) < 0.25


def low_end(lr: float) -> bool:
    return 1e-2 < lr < 10**-1.8


def high_end(lr: float) -> bool:
    return lr > 10**-0.2


def test_probabilities_are_those_of_scikit_learn():
    rows, trained = runs(400)
    x = matrix(rows, NAMES).round(module.DIGITS)
    theirs = ExtraTreesClassifier(
        module.TREES, min_samples_leaf=module.RUNS_IN_A_LEAF, max_features=module.SHARE_TRIED, random_state=0
    ).fit(x, np.array(trained))
    ours = fit(rows, trained, NAMES).probabilities([dict(zip(NAMES, row, strict=True)) for row in x])
    assert ours == pytest.approx(theirs.predict_proba(x)[:, 1], abs=1e-3)


def test_a_tree_is_followed_from_its_root_to_a_leaf():
    tree = Tree([0, LEAF, 1, LEAF, LEAF], [0.5, 0, 2, 0, 0], [1, 0, 3, 0, 0], [2, 0, 4, 0, 0], [0] * 5)
    assert tree.leaves(np.array([[0.5, 9.0], [0.6, 2.0], [0.6, 2.1]])).tolist() == [1, 3, 4]


def test_what_was_not_measured_counts_as_the_median():
    rows, trained = runs(500)
    found = fit(rows, trained, NAMES)
    median = found.median[NAMES.index("depth")]
    known, unknown = {"critical": -1.0, "way": 1.0, "depth": median}, {"critical": -1.0, "way": 1.0}
    assert found.probability(unknown) == found.probability(known)


def test_a_feature_far_from_all_that_was_seen_is_named(fitted):
    seen = {"critical": -1.0, "way": 1.5, "depth": 0.5}
    assert fitted.outside(seen) == []
    assert fitted.outside({**seen, "depth": 1.05}) == [], "half a deviation more is still near"
    [one] = fitted.outside({**seen, "depth": 3.0})
    assert (one.name, one.value) == ("depth", 3.0)
    assert one.high == pytest.approx(1.0, abs=0.01)
    assert [one.name for one in fitted.outside({**seen, "way": -9.0})] == ["way"]
    assert not fitted.abstains({**seen, "depth": 3.0, "way": -9.0})
    assert fitted.abstains({"critical": 9.0, "depth": 3.0, "way": -9.0})


def test_the_nearest_runs_are_those_in_the_same_leaves(fitted):
    rows, _ = runs(200, seed=1)
    near = fitted.nearness(rows[7], rows)
    assert near[7] == near.max() == 1.0
    close = sorted(range(200), key=lambda i: -near[i])[1:6]
    assert max(abs(rows[i]["critical"] - rows[7]["critical"]) for i in close) < 0.5


def test_runs_that_all_end_alike_are_forecast_so():
    rows, _ = runs(30)
    assert fit(rows, [True] * 30, NAMES).probability(rows[0]) == 1.0
    assert fit(rows, [False] * 30, NAMES).probability(rows[0]) == 0.0


def test_it_is_read_as_it_was_written_and_refused_for_other_features(fitted, tmp_path):
    path = tmp_path / "forecaster.json"
    path.write_text(fitted.to_json())
    again = load(path, feature_version=3)
    assert again.to_json() == fitted.to_json()
    assert again.probability(runs(1)[0][0]) == fitted.probability(runs(1)[0][0])
    assert json.loads(path.read_text())["card"] == {"runs": 3000}
    with pytest.raises(UserError, match=r"version 3 .* version 4"):
        load(path, feature_version=4)


def test_without_scikit_learn_it_says_what_to_type(monkeypatch):
    known = builtins.__import__

    def missing(name, *rest):
        if name.startswith("sklearn"):
            raise ImportError(name)
        return known(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(UserError, match=r"pip install 'normlab\[forecast\]'"):
        fit(*runs(10), NAMES)
