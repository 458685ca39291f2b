"""What pages read of results: plain values, as they come from Python and from a JSON file."""

from __future__ import annotations

import json
import math

from normlab.base.io import to_plain
from normlab.report.page import Columns
from normlab.report.results.check import CheckResult
from normlab.report.results.transfer import TransferResult
from normlab.report.results.trial import TrialsResult
from normlab.report.trial import trial_page
from report.test_ci_formats import REPORTS
from report.test_transfer import some_transfer
from trials.test_page import trials


def test_a_report_that_does_not_tell_apart_what_applies_takes_all_for_applying():
    result = CheckResult.of(REPORTS[0])
    assert result.unjudged is None
    assert list(result.applying) == ["meta"]
    assert list(CheckResult.of({**REPORTS[0], "unjudged": []}).applying) == []


def test_a_key_that_no_page_shows_is_left_out():
    assert CheckResult.of({**REPORTS[1], "ok": True}) == CheckResult.of(REPORTS[1])


def test_failures_hold_those_that_they_explain():
    first, second = CheckResult.of(REPORTS[0]).failures
    assert [effect.property for effect in first.follows] == ["reach"]
    assert list(second.follows) == []


def test_a_result_is_the_same_from_python_and_from_a_file():
    plain = some_transfer().to_dict()
    stored = json.loads(json.dumps(to_plain(plain)))
    assert TransferResult.of(stored).decays == TransferResult.of(plain).decays
    assert TransferResult.of(stored).coordinates == TransferResult.of(plain).coordinates


def test_trials_without_a_finite_reference_have_a_page():
    plain = {**to_plain(trials().to_dict()), "reference": "nan"}
    assert math.isnan(TrialsResult.of(plain).reference)
    (charts,) = [block for block in trial_page(plain).blocks[0].blocks if isinstance(block, Columns)]
    by_rate = charts.blocks[0]
    assert [row["learning rate"] for row in by_rate.rows] == ["1e-3", "4e-3", "8e-3", "1.6e-2"]
