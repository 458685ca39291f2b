"""The page of a ledger: every proposal with its level and gain, and what was kept, measured again."""

from __future__ import annotations

from typing import Final

from normlab.base.metric import Metric
from normlab.judging.difference import Interval
from normlab.judging.ledger import Ledger
from normlab.report.judge import TONES
from normlab.report.page import Cell, Page, PageTable, Section, Text

METHOD: Final = (
    "Each proposal is judged at a level of its own (LORD++, Ramdas et al. 2017): the levels of proposals "
    "without effect add up to at most 5%, and every keep after the first earns as much again, so that of all "
    "that is kept at most 5% are luck on average. A kept change is measured again on fresh seeds: it was "
    "kept because its gain looked large, so what was seen of it is too large on average."
)


def ledger_metric(ledger: Ledger) -> Metric:
    """The score of a ledger's proposals."""
    higher_is_better = ledger.score.higher_is_better
    return Metric("score", "score", higher_is_better=higher_is_better, digits=ledger.digits)


def ledger_page(ledger: Ledger) -> Page:
    """The page of a ledger."""
    metric = ledger_metric(ledger)
    headline, *others = ledger.lines()
    rows = [
        [
            Cell(str(proposal.number), proposal.text),
            Cell(proposal.verdict, tone=TONES[proposal.verdict]),
            _gain(proposal.gain, metric),
            _gain(proposal.measured, metric),
            Cell(str(proposal.seeds)),
            Cell(f"{proposal.level:.2g}"),
        ]
        for proposal in ledger.proposals
    ]
    header = ("proposal", "verdict", "gain", "on fresh seeds", "seeds", "level")
    return Page(
        title="Ledger of proposals",
        headline=headline.removesuffix("."),
        facts=[],
        lead=" ".join(others),
        blocks=[
            Section("Every proposal", [PageTable(header, rows, text_columns=2)], "proposals"),
            Section("How this was judged", [Text(METHOD)], "method"),
        ],
    )


def _gain(gain: Interval | None, metric: Metric) -> Cell:
    if gain is None:
        return Cell("–", tone="faint")
    if gain.low is None or gain.high is None:
        return Cell(metric.signed(gain.value))
    return Cell(metric.signed(gain.value), f"{metric.signed(gain.low)} to {metric.signed(gain.high)}")
