"""The page of trials: its sentence, a picture of each kind for each setup, drawn in a browser."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

import normlab
from normlab.base.io import to_plain
from normlab.report.charts.rates import loss_by_rate
from normlab.report.trial import trial_page
from normlab.trials.scale import Scale
from normlab.trials.verdict import Trial, Trials
from trials.tiny import loss_of, setup


def trial(rate: float, end: float, stopped: str = "", steps: int = 40) -> Trial:
    steps_done = steps // 2 if stopped else steps
    losses = tuple(end + (4.0 - end) * math.exp(-i / 8) for i in range(steps_done))
    return Trial(rate, steps, losses, stopped, 1.5)


def trials() -> Trials:
    tried = [
        trial(1e-3, 2.5),
        trial(4e-3, 2.0),
        trial(8e-3, 2.02),
        trial(16e-3, 3.0, "loss not finite at step 20"),
    ]
    own = Trials(
        model="Decoder",
        steps=40,
        current_rate=1e-3,
        scale=Scale(start=4.0, unigram=3.2, uniform=4.0, targets=900),
        tried=(trial(1e-3, 3.9, steps=20), *tried),
        plan="10 min 00 s allows 20 trials of 40 steps, 30 s each: enough for a range",
        seconds=80.0,
        facts={"warm-up": "none"},
    )
    return replace(own, variants=(replace(own, change="betas=0.9,0.95", tried=tuple(tried[:3])),))


def test_the_page_says_the_sentence_and_holds_every_rate(tmp_path: Path):
    text = trials().page(tmp_path / "trial.html").read_text()
    for part in (
        'Up to <span class="whole">8e-3</span> trains',
        "1.6e-2 ended early (loss not finite at step 20)",
        "loss not finite at step 20",
        "allows 20 trials",
        "lower ones",
        "1.6e-2,1.6e-2,0,ended early,20,",  # the mark at the end of its curve
    ):
        assert part in text
    for name in ("rates-0", "steps-0", "rates-1", "steps-1"):
        assert f"figure-{name}" in text
    assert "with betas=0.9,0.95" in text


def test_the_picture_marks_the_usable_range_and_the_rate_of_today():
    rows = [
        {"rate": t.rate, "loss": None if t.stopped else t.loss, "ended": t.stopped} for t in trials().rates
    ]
    drawn = loss_by_rate(
        pl.DataFrame(rows), today=1e-3, usable=(4e-3, 8e-3), reference=3.2, words="unigram entropy"
    ).to_dict()
    held = drawn["datasets"]
    marks = [(one["mark"]["type"], held[one["data"]["name"]][0]) for one in drawn["layer"]]
    texts = [one["mark"].get("text") for one in drawn["layer"] if one["mark"]["type"] == "text"]
    assert ("rect", {"rate": 4e-3, "end": 8e-3}) in marks
    assert ("rule", {"rate": 1e-3, "words": "today"}) in marks
    assert ("rule", {"level": 3.2}) in marks
    assert "unigram entropy" in texts


def test_the_rate_of_today_is_named_once_where_the_range_ends():
    sentence = replace(trials(), current_rate=16e-3).sentence
    assert sentence.count("1.6e-2") == 1
    assert "your 1.6e-2 " in sentence


def test_the_legend_names_the_rates_that_are_drawn():
    own = trials()
    shorter = replace(own, tried=(*own.tried, Trial(0.5, own.steps // 2, (4.0, 3.9), "")))
    assert trial_page(shorter.to_dict()).series == trial_page(own.to_dict()).series


def test_a_page_is_drawn_from_json_with_losses_that_are_not_finite():
    own = trials()
    stopped = "loss not finite at step 3"
    wild = Trial(1.0, 40, (4.0, math.inf, math.nan), stopped)
    plain = to_plain(replace(own, tried=(*own.tried, wild)).to_dict())
    assert stopped in trial_page(json.loads(json.dumps(plain, allow_nan=False))).html()


@pytest.mark.parametrize("tried", [(), (trial(1.0, 9.0, "loss above its start at step 20"),)])
def test_a_page_is_drawn_where_nothing_trained(tried: tuple[Trial, ...]):
    none = replace(trials(), tried=tried, variants=(), ended_by="too short to tell")
    assert "<h1" in trial_page(none.to_dict()).html()


def test_a_loss_that_is_never_a_number_has_a_page_also_when_its_trials_were_kept(tmp_path: Path):
    own = setup(loss=lambda model, ids: math.nan * loss_of(model, ids))
    for _ in range(2):
        answer = normlab.trial(own, steps=16, rates=(1e-3, 1e-2), folder=tmp_path)
        assert math.isnan(answer.scale.start)
        (stopped,) = {trial.stopped for trial in answer.tried}
        assert stopped
        assert stopped in answer.page(tmp_path / "trial.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("width", "mode"), [(360, "dark"), (1280, "light")])
def test_every_picture_is_drawn_at_each_width(tmp_path: Path, width: int, mode: str):
    drawn = pytest.importorskip("report.test_browser")
    if not drawn.CHROMIUM:
        pytest.skip("needs Chromium")
    with drawn.sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=drawn.CHROMIUM, args=drawn.FLAGS)
        page, trouble = drawn.opened(browser, trials().page(tmp_path / "trial.html"), width=width, mode=mode)
        drawn.check(page, width)
        assert trouble == []
        browser.close()
