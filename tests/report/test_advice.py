"""The page of advice."""

from __future__ import annotations

import json

import pytest

from examine.test_advice import LR, advice, answer
from normlab.errors import UserError
from normlab.report.advice import advice_page, write_advice


def test_a_page_has_a_line_for_each_plan_and_a_column_for_each_rate(tmp_path):
    plain = advice(answer(0.2), pre=answer(0.75), admin=answer(None)).to_plain()
    page = write_advice({**plain, "command": "normlab advise --recipe post"}, tmp_path)
    text = page.read_text(encoding="utf-8")
    assert "Change the plan: at a learning rate of 4e-3" in text
    assert "<code>normlab advise --recipe post</code>" in text or "normlab advise --recipe post" in text
    for said in ("the plan", "pre", "--recipe pre", "0.75", "cannot say", "1e-3", "4e-3"):
        assert said in text
    stored = json.loads((tmp_path / "advice.json").read_text(encoding="utf-8"))
    assert stored["lr"] == LR


def test_a_plan_without_a_forecast_has_no_empty_chart():
    text = advice_page(advice(None).to_plain())
    assert "no stream" in text
    assert "Probability over learning rates" not in text


def test_half_of_it_is_refused(tmp_path):
    with pytest.raises(UserError, match="the advice has no lr, alternatives; give that of"):
        write_advice({"title": "a", "verdict": "b", "changes": "c"}, tmp_path / "none")
    assert not (tmp_path / "none").exists()
