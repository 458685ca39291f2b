"""The design of the survey: which models, and which rates."""

from __future__ import annotations

import math
from collections import Counter
from itertools import islice

import pytest

from normlab.spec.config import run_id
from normlab.survey.design import (
    AROUND,
    AXES,
    EARLY,
    GRID,
    MOST,
    SEEDS,
    WIDE,
    Model,
    drawn_rates,
    edge,
    models,
    next_rate,
    runs_of,
)


def searched(top: float, start: float) -> dict[float, bool]:
    """A search of a model that trains at all rates up to one."""
    tried: dict[float, bool] = {}
    while (rate := next_rate(tried, start)) is not None:
        assert rate not in tried
        tried[rate] = rate <= top
    return tried


@pytest.mark.parametrize("top", [3e-4, 9e-4, 8e-3, 0.011, 0.05, 0.19])
def test_a_search_closes_in_on_the_edge(top):
    tried = searched(top, 8e-3)
    low, high = edge(tried)
    assert len(tried) <= MOST
    assert low is not None
    assert high is not None
    assert low <= top < high
    assert high / low <= max(GRID * 1.01, 4 ** (1 if len(tried) == MOST else 0))


def test_a_search_without_an_edge_ends():
    never, always = searched(0.0, 1.0), searched(math.inf, 1.0)
    assert len(never) == len(always) == MOST
    assert edge(never)[0] is None
    assert edge(always)[1] is None
    assert min(never) < 0.001 < 1000 < max(always)


def test_the_edge_is_above_all_that_trained():
    assert edge({0.1: False, 0.2: True, 0.8: False, 1.6: False}) == (0.2, 0.8)


def test_the_sequence_is_the_same_each_time_and_covers_every_value():
    some = list(islice(models(), 200))
    assert some == list(islice(models(), 200))
    assert len({model.name for model in some}) == 200
    for axis, values in AXES.items():
        seen = Counter(model.choices[axis] for model in some)
        assert set(seen) == set(values), axis
        assert min(seen.values()) >= 4, axis


def test_the_runs_of_a_model_are_one_by_one_and_then_around_the_edge():
    model = next(models())
    (first,) = runs_of(model, {})
    assert first.seeds.init == 1
    assert first.machine.keep_checkpoints == ",".join(map(str, EARLY))
    tried = searched(2 * first.optim.lr, first.optim.lr)
    low, high = edge(tried)
    assert low is not None
    assert high is not None
    runs = runs_of(model, tried)
    assert len({run_id(run) for run in runs}) == 4
    assert {run.seeds.init for run in runs} == set(SEEDS)
    middle = math.sqrt(low * high)
    assert all(1 / AROUND < run.optim.lr / middle < AROUND for run in runs)


def test_wide_models_are_trained_around_the_edge_of_the_narrow_ones():
    narrow, wide = next(models()), next(models("wide"))
    assert wide.name[1:] == narrow.name[1:]
    assert wide.choices == narrow.choices | {"width": WIDE, "layers": wide.choices["layers"]}
    runs = runs_of(wide, {0.1: True, 0.2: False})
    assert {run.model.dim for run in runs} == {int(WIDE)}
    assert len(runs) == 3


def test_rates_are_drawn_by_the_name_of_the_model():
    choices = next(models()).choices
    one, other = (drawn_rates(Model(name, choices), {0.1: True, 0.2: False}) for name in ("s1", "s2"))
    assert one != other
