"""Fit a forecaster to runs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from normlab.errors import UserError
from normlab.forecast.forecaster import LEAF, Features, Forecaster, Tree, matrix

TREES: Final = 60
RUNS_IN_A_LEAF: Final = 5
SHARE_TRIED: Final = 0.5
"""Share of the features among which each split is chosen."""
LEAST: Final = 1e-3
DIGITS: Final = 4


def fit(
    rows: Sequence[Features],
    trained: Sequence[bool],
    names: Sequence[str],
    *,
    feature_version: int = 0,
    card: Mapping[str, Any] | None = None,
) -> Forecaster:
    """Fit a forest of extremely randomised trees: each split is the best of random ones, one for each of
    half of the features, until a leaf has few runs (Geurts et al. 2006, Machine Learning 63). The same runs
    give the same forest.

    Raises UserError where scikit-learn is not installed.
    """
    try:
        from sklearn.ensemble import ExtraTreesClassifier
    except ImportError as error:
        raise UserError(
            "a forecaster is fitted by scikit-learn, which is not installed; type pip install "
            "'normlab[forecast]'"
        ) from error
    known, y = matrix(rows, names), np.array(trained, dtype=bool)
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # of features nobody has
        median = np.nan_to_num(np.nanmedian(known, axis=0))
    x = np.where(np.isnan(known), median, known).round(DIGITS)
    forest = ExtraTreesClassifier(
        TREES, min_samples_leaf=RUNS_IN_A_LEAF, max_features=SHARE_TRIED, random_state=0
    ).fit(x, y)
    return Forecaster(
        feature_version,
        list(names),
        median.round(DIGITS).tolist(),
        x.min(axis=0).tolist(),
        x.max(axis=0).tolist(),
        np.maximum(x.std(axis=0), LEAST).round(DIGITS).tolist(),
        [_tree(estimator.tree_, forest.classes_.tolist()) for estimator in forest.estimators_],
        card or {},
    )


def _tree(tree: Any, classes: Sequence[bool]) -> Tree:
    """A tree of scikit-learn's as columns."""
    shares = tree.value[:, 0, :] / tree.value[:, 0, :].sum(axis=1, keepdims=True)
    p = shares[:, classes.index(True)] if True in classes else np.zeros(len(shares))
    leaf = tree.children_left < 0
    return Tree(
        np.where(leaf, LEAF, tree.feature).tolist(),
        np.where(leaf, 0.0, tree.threshold).round(DIGITS + 2).tolist(),
        np.where(leaf, 0, tree.children_left).tolist(),
        np.where(leaf, 0, tree.children_right).tolist(),
        np.where(leaf, p, 0.0).round(DIGITS).tolist(),
    )
