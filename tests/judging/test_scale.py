import numpy as np
import pytest

from normlab.base.metric import NLL, Metric
from normlab.judging.statistics import MetricScale

SCORE = Metric("score", "score", least=0.0, most=100.0)
GAIN = Metric("gain", "gain")
REGRET = Metric("regret", "regret", most=1.0, digits=3)


@pytest.mark.parametrize(
    ("metric", "scores"),
    [
        (SCORE, [0.1, 33.0, 99.9]),
        (NLL, [0.002, 1.0, 40.0]),
        (GAIN, [-9.0, 0.0, 3.0]),
        (REGRET, [-5.0, 0.0, 0.9]),
    ],
)
def test_there_and_back(metric, scores):
    scale, scores = MetricScale(metric), np.array(scores)
    values = scale.values(scores)
    assert scale.scores(values) == pytest.approx(scores)
    assert (np.diff(values) > 0).all()


@pytest.mark.parametrize("metric", [SCORE, NLL, GAIN, REGRET])
def test_no_value_leaves_the_metrics_range(metric):
    scores = MetricScale(metric).scores(np.array([-50.0, 0.0, 50.0]))
    assert all(metric.bounded(score) == score for score in scores)


def test_a_score_at_an_end_is_half_a_digit_away_from_it():
    assert MetricScale(SCORE).scores(MetricScale(SCORE).values(np.array([0.0, 100.0]))) == pytest.approx(
        [0.05, 99.95]
    )
    assert MetricScale(NLL).scores(MetricScale(NLL).values(np.array([0.0]))) == pytest.approx([0.0005])


@pytest.mark.parametrize("metric", [SCORE, NLL, GAIN, REGRET])
def test_a_difference_is_that_of_the_two_scores_and_turns_with_its_sign(metric):
    scale = MetricScale(metric)
    a, b = scale.values(np.array([0.8, 0.3]))
    found = scale.difference((a + b) / 2, a - b)
    assert found == pytest.approx(0.5)
    assert scale.difference((a + b) / 2, b - a) == -found
    assert scale.difference(a, np.array(0.0)) == 0
