import dataclasses

import pytest

from normlab.lab.comparison.result import Comparison
from normlab.report import comparison_charts


def test_a_chart_for_every_question(comparison: Comparison) -> None:
    sections = comparison_charts.chart_sections(comparison, {}, [])
    assert [s.anchor for s in sections] == ["glance", "training", "sweep", "cost"]
    names = [c.name for s in sections for grid in s.blocks[:1] for c in grid.blocks]
    assert names[:2] == ["test-bleu", "learning-rate"]
    assert [n for n in names if n.startswith("train-nll-lr-")] == [
        f"train-nll-lr-{n}" for n in ("5e-4", "1e-3", "2e-3")
    ]


def test_one_learning_rate_asks_nothing_of_sensitivity(comparison: Comparison) -> None:
    alone = comparison_charts.chart_sections(dataclasses.replace(comparison, lrs=(1e-3,)), {}, [])
    assert [s.anchor for s in alone] == ["glance", "training", "cost"]
    assert [chart.name for chart in alone[0].blocks[0].blocks] == ["test-bleu"]


@pytest.mark.slow
def test_the_unigram_entropy_is_drawn_where_it_is_known(comparison: Comparison) -> None:
    def drawn(shown: Comparison) -> list[str]:
        sections = comparison_charts.chart_sections(shown, {}, [])
        charts = [c for s in sections for grid in s.blocks[:1] for c in grid.blocks]
        spelt = {c.name: c.drawn() for c in charts}
        return [name for name, chart in spelt.items() if "unigram entropy" in chart.to_json()]

    assert drawn(comparison) == ["train-nll", *(f"train-nll-lr-{n}" for n in ("5e-4", "1e-3", "2e-3"))]
    assert drawn(dataclasses.replace(comparison, unigram_entropy_nats=None)) == []
