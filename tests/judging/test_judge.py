"""What is said of scores: verdicts against a baseline, what is missing, the table, the page and the JSON."""

from __future__ import annotations

import json
import math
import re
from html import escape
from importlib.resources import files
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from scipy import stats

import normlab
from cases import each
from normlab.cli.main import main
from normlab.judging.statistics import detectable, fisher, seeds_needed
from normlab.report import contract

DATA = Path(__file__).parent / "data"
SCHEMA = json.loads(files("normlab.report").joinpath(contract.JUDGE_SCHEMA).read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
BASE = [3.31, 3.29, 3.30, 3.32]


def moved(by, *, jitter=0.002):
    """The scores of a change whose differences from ``BASE`` are ``by``, give or take a jitter."""
    return [score + by + jitter * (-1) ** i for i, score in enumerate(BASE)]


def verdict_of(change, **how):
    return normlab.judge({"base": BASE, "change": change}, baseline="base", **how).verdict


@each(
    ("change", "how", "verdict"),
    [
        (moved(-0.1), {}, "keep"),
        (moved(0.1), {}, "discard"),
        (moved(-0.1), {"higher_is_better": True}, "discard"),
        (moved(0.1), {"higher_is_better": True}, "keep"),
        (moved(-0.1), {"margin": 0.05}, "keep"),
        (moved(-0.1), {"margin": 0.2}, "discard"),
        (moved(-0.1), {"margin": 0.1}, "undecided"),
        (moved(0.0, jitter=0.01), {}, "undecided"),
        (moved(-0.1)[:1], {}, "undecided"),
        (moved(-0.1)[:3], {}, "keep"),  # a run that is missing is none that failed
        ([*moved(-0.1)[:3], math.nan], {}, "undecided"),
    ],
)
def test_a_verdict_is_where_the_whole_interval_lies(change, how, verdict):
    assert verdict_of(change, **how) == verdict


def test_a_change_that_always_diverges_is_discarded_and_one_that_cures_it_is_kept():
    never, always = [math.nan] * 6, [3.0, 3.1, 3.2, 3.0, 3.1, 3.2]
    assert normlab.judge({"base": always, "change": never}, baseline="base").verdict == "discard"
    assert normlab.judge({"base": never, "change": always}, baseline="base").verdict == "keep"


def test_a_pair_is_judged_by_the_paired_t_test():
    a, b = np.random.default_rng(0).standard_normal((2, 6))
    (difference,) = normlab.judge({"a": a, "b": b}).differences
    test = stats.ttest_rel(a, b)
    interval = test.confidence_interval()
    found = difference.delta
    sign = 1 if difference.a == "a" else -1
    assert difference.p == pytest.approx(test.pvalue)
    assert sorted([sign * found.low, sign * found.high]) == pytest.approx([interval.low, interval.high])


def test_an_open_difference_says_how_many_seeds_would_show_it():
    a, b = np.random.default_rng(0).standard_normal((2, 6))
    (difference,) = normlab.judge({"a": a, "b": b}).differences
    assert difference.answer == "open"
    apart = a - b
    effect = abs(apart.mean()) * 2**0.5 / apart.std(ddof=1)  # in deviations of one of the two
    assert difference.seeds_needed == seeds_needed(2, effect, at_least=7)


def test_how_often_each_trains_is_corrected_for_the_number_of_pairs():
    scores = {"always": [3.0] * 6, "never": [math.nan] * 6, "as often": [3.1] * 6}
    found = {frozenset((d.a, d.b)): d.p_trains for d in normlab.judge(scores).differences}
    assert found[frozenset(("always", "never"))] == pytest.approx(3 * fisher((6, 6), (0, 6)))
    assert found[frozenset(("always", "as often"))] == 1.0


def test_seeds_pair_runs_in_any_order():
    one = normlab.judge({"a": {1: 1.0, 2: 2.0, 3: 3.1}, "b": {3: 3.0, 2: 2.1, 1: 1.2}})
    other = normlab.judge({"a": [1.0, 2.0, 3.1], "b": [1.2, 2.1, 3.0]})
    assert one.differences == other.differences


def test_missing_and_failed_runs_are_named_apart():
    judgement = normlab.judge({"a": {1: 1.0, 2: 2.0}, "b": {1: 1.5, 2: math.nan, 3: None}})
    outcomes = {change.name: change.outcomes for change in judgement.changes}
    assert outcomes == {"a": ("trained", "trained", "missing"), "b": ("trained", "diverged", "failed")}
    assert len(judgement.missing) == 1
    assert len(judgement.failed) == 2


def test_a_change_that_is_better_but_failed_is_undecided_and_says_why():
    scores = {"base": BASE, "change": [*moved(-0.1)[:3], math.nan]}
    (change,) = (c for c in normlab.judge(scores, baseline="base").changes if c.name == "change")
    assert change.verdict == "undecided"
    assert "3 of 4 seeds" in change.why
    assert not normlab.judge({"base": BASE, "change": moved(0.0)}, baseline="base").changes[1].why


@each(("by", "words"), [(0.1, "the same at all 4 seeds"), (0.0, "the same at all 4 seeds")])
def test_differences_without_a_spread_are_said_to_have_none(by, words):
    (difference,) = normlab.judge({"a": BASE, "b": [score + by for score in BASE]}).differences
    assert difference.answer == "open"
    assert words in difference.sentence


def test_without_a_baseline_nothing_is_decided():
    judgement = normlab.judge({"a": BASE, "b": moved(-0.1)})
    assert judgement.verdict == "described"
    assert {change.verdict for change in judgement.changes} == {""}


def test_noise_and_power_are_those_of_the_scores():
    values = np.random.default_rng(1).standard_normal((3, 5))
    judgement = normlab.judge(dict(zip("abc", values, strict=True)))
    spread = math.sqrt(values.var(axis=1, ddof=1).mean())
    assert judgement.noise == pytest.approx(2**0.5 * spread)
    assert list(judgement.can_tell) == [2, 3, 5, 10]
    assert judgement.can_tell[5] == pytest.approx(detectable(3, 5) * spread)
    assert judgement.can_tell[10] < judgement.can_tell[5] < judgement.can_tell[3]


def test_the_score_is_called_as_its_source_calls_it():
    assert normlab.judge(DATA / "long.csv").metric.name == "val_loss"
    assert normlab.judge(DATA / "logs", metric="val_loss: ([0-9.]+)").metric.name == "score"


def test_the_examples_of_the_page_decide_as_it_says(capsys):
    page = (Path(__file__).parents[2] / "docs/judge.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    exec("\n".join(blocks), {})  # noqa: S102 (the page's own code)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["keep", "keep"]


# --------------------------------------------------------------------------------------- the command line


def printed(capsys, *typed):
    """The exit code and the document of a judgement, which fits the schema."""
    try:
        code = main(["judge", *map(str, typed), "--json"])
    except SystemExit as stopped:
        code = stopped.code
    document = json.loads(capsys.readouterr().out)
    VALIDATOR.validate(document)
    assert document["exit_code"] == code
    return document


def table(tmp_path, **changes):
    """A table of scores in a file."""
    path = tmp_path / "scores.csv"
    rows = [f"{c},{s},{score}" for c, scores in changes.items() for s, score in enumerate(scores)]
    path.write_text("\n".join(["change,seed,loss", *rows]))
    return path


@each(("by", "verdict", "code"), [(-0.1, "keep", 0), (0.1, "discard", 3), (0.0, "undecided", 4)])
def test_a_verdict_has_its_exit_code(tmp_path, capsys, by, verdict, code):
    document = printed(
        capsys, table(tmp_path, base=BASE, change=moved(by, jitter=0.01)), "--baseline", "base"
    )
    assert (document["verdict"], document["exit_code"]) == (verdict, code)


def test_wrong_input_is_a_document_too(tmp_path, capsys):
    document = printed(capsys, "nowhere.csv")
    assert (document["verdict"], document["exit_code"]) == ("error", 2)


def test_the_schema_is_one_and_refuses_what_it_should(tmp_path, capsys):
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    document = printed(capsys, table(tmp_path, base=BASE, change=moved(-0.1)), "--baseline", "base")
    for wrong in ({"exit_code": 3}, {"verdict": "kept"}, {"changes": [{}]}, {"metric": None}):
        assert not VALIDATOR.is_valid(document | wrong)


def test_the_page_and_the_table_show_every_change(tmp_path, capsys):
    path = table(tmp_path, base=BASE, **{"<b>qk</b>": [*moved(-0.1)[:3], math.nan]})
    page = tmp_path / "page.html"
    with pytest.raises(SystemExit):
        main(["judge", str(path), "--baseline", "base", "--out", str(page)])
    shown, html = capsys.readouterr().out, page.read_text(encoding="utf-8")
    assert "<b>qk</b>" in shown
    assert "&lt;b&gt;qk&lt;/b&gt;" in html
    assert "<b>qk</b>" not in html.partition("<script")[0]
    assert "diverged" in html


def test_a_page_begins_with_the_name_that_the_user_chose(tmp_path):
    page = tmp_path / "page.html"
    normlab.judge({"qk": moved(-0.1), "base": BASE}).page(page)
    heading = re.search(r"<h1>(.*?)</h1>", page.read_text(encoding="utf-8"), re.DOTALL)
    assert heading[1].strip().startswith("qk ")


def test_the_terminal_shows_the_pairs_of_the_baseline_and_the_page_all(tmp_path, capsys):
    path = table(tmp_path, base=BASE, x=moved(-0.1), y=moved(-0.2), z=moved(-0.3))
    page = tmp_path / "page.html"
    assert main(["judge", str(path), "--baseline", "base", "--out", str(page)]) == 0
    shown, html = capsys.readouterr().out, page.read_text(encoding="utf-8")
    pairs = [d.sentence for d in normlab.judge(path, baseline="base").differences]
    assert sum(pair in shown for pair in pairs) == 3
    assert sum(escape(pair) in html for pair in pairs) == 6


def test_names_of_commands_are_shortened_by_the_words_that_they_share():
    charts = pytest.importorskip("normlab.report.charts.judge")
    assert charts.labels(["a b c", "a b"]) == ["… b c", "… b"]
    assert charts.labels(["base", "base wide"]) == ["base", "base wide"]
    assert charts.labels(["a b c"]) == ["a b c"]
