"""What a log says of a metric: whole numbers, in the place that the regular expression names."""

from __future__ import annotations

import math
import re

import pytest

from cases import each
from normlab.errors import UserError
from normlab.judging.logs import compiled, read_log, values_in_log

LOSS = r"loss[: =-]+([0-9.]+)"


def values(text, metric=LOSS):
    return values_in_log(text, compiled(metric))


@each(
    ("text", "value"),
    [
        ("loss: 3.25", 3.25),
        ("loss: 3.25.", 3.25),
        ("loss: 3.25, lr 1", 3.25),
        ("loss: 1.25e-05", 1.25e-05),
        ("loss: 2E+3", 2000.0),
        ("loss: 1,234.5", 1234.5),
        ("loss: 3,4", 3.0),
        ("loss: -3.25", -3.25),
        ("loss-3.25", 3.25),
        ("loss=.5", 0.5),
    ],
)
def test_a_number_is_read_whole_though_the_group_matches_a_part(text, value):
    assert values(text) == [value]


@each("metric", [r"elbo.*?([0-9.]+)", r"elbo (-?[0-9.]+)", r"(?:elbo) (\S+)", r"[(elbo ]+ (?P<x>[-0-9]+)"])
def test_groups_of_every_kind_find_the_same_number(metric):
    assert values("elbo -3.25", metric) == [-3.25]


@each("text", ["loss: 3.1\nloss: nan", "loss: NaN", "loss: 3.1\nloss: -inf", "loss: 3.1\ntrain_nll nan"])
def test_a_run_whose_loss_is_not_finite_in_the_end_has_no_finite_score(text):
    assert not math.isfinite(values(text)[-1])


@each(
    "text", ["loss: nan\nloss: 3.1", "loss: 3.1\ngrad_norm: inf", "loss: 3.1\nno nans", "best inf\nloss: 3.1"]
)
def test_what_is_not_finite_elsewhere_does_not_end_a_run(text):
    assert values(text)[-1] == 3.1


def test_no_value_is_found_where_there_is_none():
    assert values("accuracy 3") == []


@each("metric", [r"[)(\]]loss\) (\d)", r"[^]](?:a|b(?:c)) loss\) (\d+)(?=x)?", r"(?P<loss>\d+)"])
def test_the_place_of_the_group_is_found_whatever_stands_before_it(metric):
    assert re.compile(metric).groups == 1
    texts = {r"[)(\]]": "(loss) nan", r"[^]](": "-a loss) nan", r"(?P<": "nan"}
    text = next(text for start, text in texts.items() if metric.startswith(start))
    assert math.isnan(values(text, metric)[-1])


def test_colours_and_bytes_that_are_no_text_do_not_matter(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"mod\xe8le \0\r\n\x1b[32mloss: \x1b[1m3.25\x1b[0m\r\n")
    assert values(read_log(log)) == [3.25]


@each(
    ("metric", "words"), [("val_loss", "no group"), ("(a)(b)", "2 groups"), ("loss (", "regular expression")]
)
def test_a_regular_expression_without_one_group_is_refused(metric, words):
    with pytest.raises(UserError, match=words):
        compiled(metric)
