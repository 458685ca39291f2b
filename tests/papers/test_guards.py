"""What an interval says of a finding, and which answers may stand beside which evidence, on made-up rows."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from normlab.errors import UserError
from normlab.papers import finding, phrases
from normlab.papers.estimate import Estimate
from normlab.papers.finding import (
    Evidence,
    Expectation,
    Finding,
    Piece,
    Reviewed,
    faults,
    known_findings,
    measured,
    read_findings,
    reviewed,
)
from normlab.papers.regimes import ChosenRate, read_book

REGIMES = """
[settings.small]
short = "small"
says = "Two cells."
scale = "It is small."

[regimes.pair]
on = "small"
sources = ["pair"]
says = "One cell beside the other."
"""
REGIME = """
question = "Which is better?"
findings = ["Z1"]
seeds = [1, 2, 3, 4]
[margins]
bleu = 1.0
[cells.a]
recipe = "pre"
[cells.b]
recipe = "post"
"""
ENTRY = """
[[finding]]
id = "Z1"
short = "a beats b"
says = "a is better than b."
where = "Table 1"
published = "34 and 8"
answer = "supported"
because = "It is."
evidence = [{ says = "a over b", regime = "pair", effect = "difference", of = "a", over = "b", above = 0 }]
"""


def row(cell, seed, bleu):
    """A line of ``runs.jsonl``."""
    named = {"cell": cell, "seed": seed, "run": f"{cell}{seed}", "outcome": "trained"}
    dev = [[100, 4.0, bleu / 2], [200, 3.0, bleu]]
    return {**named, "test": {"bleu": bleu, "nll": 3.0}, "dev": dev, "train": [[100, 4.0, 1.0]]}


def rows(gap, seeds=4):
    """Runs of both cells, whose seeds differ by a BLEU each and whose cells differ by the gap."""
    both = (("a", 20 + gap), ("b", 20))
    return [row(cell, seed, level + seed) for cell, level in both for seed in range(1, seeds + 1)]


@pytest.fixture
def results(tmp_path):
    """A folder of results with a regime of two cells, and a way to write its runs."""
    from json import dumps

    folder = tmp_path / "results" / "pair"
    folder.mkdir(parents=True)
    (folder / "regime.toml").write_text(REGIME)
    (tmp_path / "regimes.toml").write_text(REGIMES)
    (tmp_path / "own.toml").write_text(ENTRY)

    def write(*rows):
        (folder / "runs.jsonl").write_text("".join(dumps(one) + "\n" for one in rows))
        book = read_book(tmp_path / "regimes.toml", roots=(tmp_path / "results",))
        return reviewed(read_findings(tmp_path / "own.toml")[0], book)

    return write


@pytest.mark.parametrize(
    ("bounds", "low", "high", "reading"),
    [
        ({"above": 0}, 0.1, 2.0, "agrees"),
        ({"above": 0}, -2.0, -0.1, "contradicts"),
        ({"above": 0}, -0.1, 2.0, "open"),
        ({"above": 0}, 0.0, 0.0, "open"),
        ({"below": 1}, 0.4, 0.8, "agrees"),
        ({"below": 1}, 0.4, math.inf, "open"),
        ({"below": 1}, 1.1, math.inf, "contradicts"),
        ({"within": (-1, 1)}, -0.9, 0.9, "agrees"),
        ({"within": (-1, 1)}, 1.1, 3.0, "contradicts"),
        ({"within": (-1, 1)}, 0.5, 1.5, "open"),
        ({"within": (-1, 1)}, -5.0, 5.0, "open"),
    ],
)
def test_an_interval_is_read_whole(bounds, low, high, reading):
    assert Expectation(**bounds).reading(Estimate((low + high) / 2, low, high, 6)) == reading


def test_two_runs_decide_nothing_and_two_of_two_are_a_share():
    assert Expectation(above=0).reading(Estimate(3, 2, 4, 2)) == "open"
    assert Expectation(above=0).reading(Estimate(3, 2, 4, 3)) == "agrees"
    assert Expectation(above=0.1).reading(Estimate(1, 0.16, 1, 2, share=True)) == "agrees"
    assert Expectation(above=0).reading(Estimate(3, 3, 3)) == "agrees"  # nothing was drawn
    assert Expectation(above=0).reading(Estimate(math.nan, -math.inf, math.inf)) == "open"


@pytest.mark.parametrize(
    ("readings", "answer"),
    [
        (["agrees", "agrees"], "supported"),
        (["contradicts"], "contradicted"),
        (["agrees", "contradicts"], "partly"),
        (["open"], "not tested here"),
        ([], "not tested here"),
        (["waits", "waits"], "not tested here"),
        (["agrees", "waits", "waits"], "supported"),
        (["agrees", "open"], "supported"),
        (["contradicts", "contradicts", "open"], "contradicted"),
        (["agrees", "open", "open"], "not tested here"),
        (["contradicts", "open", "open"], "not tested here"),
        (["agrees", "contradicts", "open", "open", "open"], "partly"),
    ],
)
def test_each_answer_follows_from_its_evidence(readings, answer):
    """What is open is counted, and withholds an answer only where it is the larger part."""
    for given in ("supported", "partly", "contradicted", "not tested here"):
        found = faults(claimed(given, readings))
        assert (found == []) == (given == answer), found


def test_what_was_tested_and_is_open_is_told_from_what_was_not_tested():
    assert claimed("not tested here", ["open", "waits"]).tested_and_open
    assert not claimed("not tested here", ["waits"]).tested_and_open
    assert not claimed("partly", ["agrees", "contradicts", "open"]).tested_and_open


def test_pieces_are_counted_by_what_they_say():
    counts = claimed("partly", ["agrees", "open", "contradicts", "open", "waits"]).counts
    assert counts == {"agrees": 1, "contradicts": 1, "open": 2, "waits": 1}


def claimed(answer, readings):
    """A finding with that answer and pieces of evidence that read so."""
    pieces = tuple(
        Piece("a over b", "pair", "difference", {"of": f"a{place}", "over": "b"}, Expectation(above=0))
        for place, _ in enumerate(readings)
    )
    needs = "a GPU" if answer == "not tested here" else ""
    finding = Finding("Z1", "", "", "", "", answer, "", pieces, needs=needs)
    measured = zip(pieces, readings, strict=True)
    evidence = tuple(Evidence(piece, None, Estimate(0, 0, 0), reading, 0) for piece, reading in measured)
    return Reviewed(finding, evidence, ())


@pytest.mark.parametrize(
    "again",
    [
        'of = "a", over = "b", above = 1, margin = "much"',
        'of = "b", over = "a", below = -1, margin = "much"',
        'of = "b", over = "a", metric = "bleu", below = 0',
        'of = ["a"], over = "b", above = 1, margin = "much"',
        'of = ["b"], over = ["a"], below = 0',
    ],
)
def test_one_number_is_read_against_one_expectation(results, tmp_path, again):
    """The same two cells the other way round, or a default written out, are the same number."""
    second = f'{{ says = "again", regime = "pair", effect = "difference", {again} }}'
    (tmp_path / "own.toml").write_text(ENTRY.replace("above = 0 }", f"above = 0 }}, {second}"))
    assert len(faults(results(*rows(5.0)))) == 1
    another = ENTRY.replace("above = 0 }", f"above = 0 }}, {second.replace('difference', 'best_difference')}")
    (tmp_path / "own.toml").write_text(another)
    assert faults(results(*rows(5.0))) == []


def test_runs_count_once_when_more_seeds_come_under_another_name(results):
    """A regime that another one contains is left out as soon as the other is whole."""
    (fewer,) = results(*rows(5.0)).evidence
    wider = replace(fewer.regime, name="wider", runs=[*fewer.regime.runs, *rows_as_runs(fewer, seed=5)])
    more = replace(fewer, regime=wider, piece=replace(fewer.piece, regime="wider"))
    finding = Finding("Z1", "", "", "", "", "supported", "", (fewer.piece, more.piece))
    assert len(faults(Reviewed(finding, (fewer, more), ()))) == 1
    unfinished = replace(more, reading="waits")
    assert faults(Reviewed(finding, (fewer, unfinished), ())) == []


def rows_as_runs(piece, seed):
    """The runs of a piece's first seed once more, at another seed."""
    return [replace(run, seed=seed, id=f"{run.cell}{seed}") for run in piece.regime.runs if run.seed == 1]


def test_a_bound_was_fixed_before_the_runs_only_where_a_plan_is_there(results, tmp_path):
    bound = ENTRY.replace("above = 0 }", 'above = -1, margin = "1 BLEU", fixed = true }')
    (tmp_path / "own.toml").write_text(bound)
    planned = results(*rows(5.0))
    assert faults(planned) == []
    assert planned.evidence[0].piece.fixed
    (piece,) = planned.evidence
    unplanned = replace(piece, regime=replace(piece.regime, margins={}))
    assert len(faults(replace(planned, evidence=(unplanned,)))) == 1


@pytest.mark.parametrize(
    ("bounds", "held"),
    [
        ("above = -1", True),
        ("below = 1.0", True),
        ("within = [-1, 1]", True),
        ("above = -0.9", False),
        ("within = [-1, 2]", False),
        ('metric = "nll", above = -1', False),
    ],
)
def test_a_fixed_bound_is_the_margin_of_its_metric(results, tmp_path, bounds, held):
    fixed = ENTRY.replace("above = 0 }", f'{bounds}, margin = "1 BLEU", fixed = true }}')
    (tmp_path / "own.toml").write_text(fixed)
    said = [one for one in faults(results(*rows(0.1))) if "regime.toml" in one]
    assert len(said) == (0 if held else 1)


def test_a_bound_of_ones_own_and_what_is_left_out_need_a_reason():
    bound = Piece("a over b", "pair", "difference", {"of": "a", "over": "b"}, Expectation(above=-1))
    other = replace(bound, arguments={"of": "a", "over": "c"})
    counting, left_out = (Evidence(one, None, Estimate(2, 1, 3, 4), "agrees", 0) for one in (bound, other))
    finding = Finding("Z1", "", "", "", "", "supported", "", (bound,), (other,))
    said = faults(Reviewed(finding, (counting,), (left_out,)))
    assert sum("without saying" in one for one in said) == 2
    assert sum("left out" in one for one in said) == 1


def test_an_estimate_grows_with_the_rows_and_counts_when_all_are_there(results):
    none = results()
    assert (none.evidence[0].reading, none.evidence[0].missing) == ("waits", 8)
    assert math.isnan(none.evidence[0].estimate.value)
    half = results(*rows(5.0, seeds=3))
    assert (half.evidence[0].reading, half.evidence[0].missing) == ("waits", 2)
    assert half.evidence[0].estimate.runs == 3
    assert half.evidence[0].estimate.value == pytest.approx(5.0, abs=0.1)
    assert faults(half) != []  # nothing counts yet
    whole = results(*rows(5.0))
    assert (whole.evidence[0].reading, whole.evidence[0].missing) == ("agrees", 0)
    assert faults(whole) == []
    assert faults(results(*rows(-5.0))) != []


def test_a_run_that_diverged_counts_with_what_it_has(results):
    diverged = {**row("b", 1, 21.0), "outcome": "diverged", "dev": [[100, "nan", 2.0], [200, "inf", 0.0]]}
    diverged["test"]["nll"] = "nan"
    (piece,) = results(diverged, *rows(5.0)[:4], *rows(5.0)[5:]).evidence
    assert piece.estimate.runs == 4
    assert piece.reading == "agrees"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('effect = "difference"', 'effect = "differenc"', "Z1: unknown effect 'differenc', did you mean"),
        ('regime = "pair"', 'regime = "pairs"', "Z1: there is no regime 'pairs'"),
        ('of = "a"', 'of = "aa"', "Z1: the regime pair has no cell 'aa'"),
        ('over = "b"', 'ovr = "b"', "Z1: difference takes no 'ovr'"),
        ("above = 0", "above = 0, below = 1", "Z1: 'a over b' needs one of above, below and within"),
        ("above = 0", "above = -inf", r"^(?s:Z1\b.*\babove, below and within)"),
        ("above = 0", "above = nan", r"^(?s:Z1\b.*\babove, below and within\b.*\bnan\b)"),
        ("above = 0", "within = [-1, inf]", r"^(?s:Z1\b.*\babove, below and within\b.*\binf\b)"),
        ("above = 0", "within = [6, 4]", r"^(?s:Z1\b.*\bwithin\b.*\[6, 4\])"),
        ('answer = "supported"', 'answer = "true"', r"^(?s:Z1\b.*\banswer\b.*'supported'.*'true')"),
        ('because = "It is."', 'becuase = "It is."', r"'Z1\.becuase'.*'because'"),
        ("[[finding]]", "[[findings]]", r"(?s:own\.toml\b.*'findings'.*'finding')"),
    ],
)
def test_what_is_written_wrong_is_refused_by_the_finding_s_name(results, tmp_path, old, new, said):
    (tmp_path / "own.toml").write_text(ENTRY.replace(old, new))
    with pytest.raises(UserError, match=said):
        results(*rows(5.0))


@pytest.mark.parametrize(
    ("gap", "rates", "untuned"),
    [
        (5.0, (2e-3, 5e-4), "b"),
        (-5.0, (5e-4, 2e-3), "a"),
        (5.0, (5e-4, 1e-3), ""),  # what wins at an edge may only be better
        (5.0, (5e-4, 5e-4), ""),  # one rate for both
        (5.0, (1e-3, 1e-3), ""),
    ],
)
def test_a_loser_at_the_edge_of_its_sweep_decides_nothing(results, gap, rates, untuned):
    (piece,) = results(*rows(gap)).evidence
    tried = (5e-4, 1e-3, 2e-3)
    chosen = {cell: ChosenRate(rate, tried) for cell, rate in zip("ab", rates, strict=True)}
    of_book = replace(piece.regime, rates=chosen)
    found = measured(piece.piece, SimpleNamespace(regime=lambda _: of_book))
    assert found.untuned == untuned
    assert found.reading == ("open" if untuned else piece.reading)


def test_a_test_that_is_too_weak_can_agree_and_cannot_contradict(results, tmp_path):
    weak = ENTRY.replace("above = 0 }", 'above = 0, weak = "it is small" }')
    (tmp_path / "own.toml").write_text(weak)
    assert results(*rows(5.0)).evidence[0].reading == "agrees"
    assert results(*rows(-5.0)).evidence[0].reading == "open"


@pytest.mark.parametrize(("key", "value"), [("artefacts", "xiong2020.fig2"), ("rest", "X19")])
def test_a_finding_names_only_what_exists(tmp_path, monkeypatch, key, value):
    named = ENTRY.replace('because = "It is."', f'because = "It is."\n{key} = ["{value}"]')
    (tmp_path / "own.toml").write_text(named)
    monkeypatch.setattr(finding, "FILES", [*finding.FILES, tmp_path / "own.toml"])
    with pytest.raises(UserError, match=f"Z1.*{key}.*'{value}'"):
        known_findings()


def test_only_a_loser_of_scores_can_be_untuned(results):
    """A share of seeds that gain is above 0 for every winner, so its size does not say who loses."""
    (piece,) = results(*rows(-5.0)).evidence
    chosen = {"a": ChosenRate(5e-4, (5e-4, 1e-3)), "b": ChosenRate(1e-3, (5e-4, 1e-3))}
    of_book = SimpleNamespace(regime=lambda _: replace(piece.regime, rates=chosen))
    both = {"of": "a", "over": "b", "metric": "nll"}
    assert measured(replace(piece.piece, effect="gains", arguments=both), of_book).untuned == ""
    ratio = {"of": ["a", "b"], "over": ["a", "b"], "metric": "bleu"}
    assert measured(replace(piece.piece, effect="penalty_ratio", arguments=ratio), of_book).untuned == ""
    assert measured(piece.piece, of_book).untuned == "a"


@pytest.mark.parametrize(
    ("words", "gap", "held_open_by"),
    [
        ('weak = "it is small"', -5.0, "weak"),
        ('weak = "it is small"', 0.0, ""),
        ('weak = "it is small"', 5.0, ""),
        ('edge = "b has the highest"', 5.0, "edge"),
        ('edge = "b has the highest"', 0.0, ""),
        ("claimed = 1", 0.0, ""),
    ],
)
def test_a_reason_is_given_only_where_it_is_the_reason(results, tmp_path, words, gap, held_open_by):
    (tmp_path / "own.toml").write_text(ENTRY.replace("above = 0 }", f"above = 0, {words} }}"))
    spread = zip("ab" * 2, (1, 1, 2, 2), (20 + gap, 21, 22 + gap, 21), strict=True)
    wide = [row(cell, seed, bleu) for cell, seed, bleu in spread]
    close = [row(cell, seed, level) for cell, level in (("a", 21 + gap), ("b", 21)) for seed in (3, 4)]
    (piece,) = results(*wide, *close).evidence
    assert piece.held_open_by == held_open_by
    assert (piece.reading == "open") == (bool(held_open_by) or gap == 0)


def test_planned_runs_of_other_cells_do_not_hold_a_piece_up(results, tmp_path):
    (tmp_path / "results/pair/regime.toml").write_text(REGIME + '[cells.c]\nrecipe = "admin"\n')
    assert results(*rows(5.0)).evidence[0].reading == "agrees"


@pytest.mark.parametrize(("claimed", "reading"), [(0.3, "open"), (3.0, "contradicts")])
def test_an_interval_that_contains_the_published_effect_does_not_contradict(
    results, tmp_path, claimed, reading
):
    """The bound, 5 BLEU, is more than what is claimed; the interval ends between 0.3 and 3."""
    bound = f'above = 5, margin = "much", claimed = {claimed} }}'
    (tmp_path / "own.toml").write_text(ENTRY.replace("above = 0 }", bound))
    (piece,) = results(*rows(0.1, seeds=3), row("a", 4, 23.0), row("b", 4, 24.0)).evidence
    assert 0.3 < piece.estimate.high < 3
    assert piece.reading == reading
    assert piece.held_open_by == ("claimed" if reading == "open" else "")


def test_what_is_decided_stands_for_a_finding_only_where_it_is_answered():
    assert claimed("partly", ["open", "agrees", "contradicts"]).main.reading == "agrees"
    assert claimed("not tested here", ["open", "open", "agrees"]).main.reading == "open"


def test_a_side_at_the_edge_of_the_rates_tried_decides_nothing(results, tmp_path):
    edge = 'above = 0, edge = "b has the highest" }'
    (tmp_path / "own.toml").write_text(ENTRY.replace("above = 0 }", edge))
    assert {results(*rows(gap)).evidence[0].reading for gap in (5.0, -5.0)} == {"open"}


def test_a_run_that_keeps_nothing_to_read_leaves_its_effect_open_with_the_reason(results, tmp_path):
    (tmp_path / "own.toml").write_text(ENTRY.replace('"difference"', '"dev_difference"'))
    lost = [{**line, "dev": []} if line["cell"] == "a" else line for line in rows(10.0)]
    review = results(*lost)
    (read,) = review.evidence
    assert (read.reading, read.held_open_by) == ("open", "")
    assert phrases.in_a_line(review) == read.unmeasured
    assert math.isnan(read.estimate.value)
    assert "of a keeps no nll on dev" in read.unmeasured
    assert read.unmeasured in phrases.reading(read)
