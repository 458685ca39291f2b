"""The page of a transfer: its pictures, rates with one seed or none, the coordinate check and its fault."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
import pytest

from normlab.base.io import to_plain
from normlab.report.page import Columns, Details, Notes, Section, with_whole_rates
from normlab.report.transfer import transfer_page
from normlab.scaling.coordinates import Coordinates
from normlab.scaling.exponents import Row
from normlab.scaling.result import Transfer
from normlab.scaling.sweep import Decay, Sweep
from scaling.curves import draw, skewed
from scaling.test_verdict import SIZES, answer, edge, swept

GROWS = Row("hidden", "h.*.mlp", "update", 2, 0.9, 0.8, 1.0, 0.0, -0.5, False, path="h.3.mlp")
ROWS = (
    Row("embedding", "wte", "activation", 0, -0.7, -0.8, -0.6, 0.0, -math.inf, True, path="wte"),
    replace(GROWS, step=1, slope=0.1, low=-0.2, high=0.4, right=True),
    replace(GROWS, role="head", module="lm_head", step=3, path="lm_head"),
    GROWS,
    replace(GROWS, step=3),
    Row("hidden", "*", "update", 3, 0.8, 0.7, 0.9),
)
CHECK = Coordinates("width", SIZES, (1, 2, 3), 3, "", ROWS).to_dict()


def some_sweep(decay: Decay | None = None) -> Sweep:
    """The largest width lacks a seed at its highest rate; at that of the next one, both seeds ended early."""
    curves = draw([0.0, -1.0, -2.0, -3.0], skewed(0.5), 0.002, rng=np.random.default_rng(1))
    wide, widest = (dict(curves[size]) for size in SIZES[2:])
    del widest[max(widest)]
    own = swept({**curves, SIZES[3]: widest}, decay)
    top = max(x for x, _ in wide)
    ended = {
        key: replace(t, stopped="loss not finite at step 3") if key[0] == top else t
        for key, t in own.trials[SIZES[2]].items()
    }
    return replace(own, trials={**own.trials, SIZES[2]: ended})


def some_transfer(*others: Sweep, **parts: Any) -> Transfer:
    return answer(some_sweep(), *others, coordinates=CHECK, **parts)


def sections(transfer: Transfer) -> dict[str, list[Any]]:
    """The blocks of its page by the name of their section."""
    page = transfer_page(json.loads(json.dumps(transfer.to_dict(), allow_nan=False)))
    return {block.anchor: [*block.blocks] for block in page.blocks if isinstance(block, Section)}


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    """The sections of one page, with two weight decays."""
    return sections(some_transfer(some_sweep(Decay(4.0, independent=True)), target=1024))


def layers(blocks: list[Any], name: str) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Marks of a chart, with the rows that they draw."""
    (chart,) = (c for b in blocks if isinstance(b, Columns) for c in b.blocks if c.name == name)
    drawn = chart.drawn().to_dict()
    data = {
        key: rows if isinstance(rows, list) else pl.read_csv(rows.encode()).to_dicts()
        for key, rows in drawn["datasets"].items()
    }
    return [(one["mark"], data[one["data"]["name"]]) for one in drawn["layer"]]


def test_one_picture_has_a_curve_for_every_size_and_marks_best_rates_and_trials_that_ended(found):
    drawn = layers(found["glance"], "rates-0")
    lines = [{row["recipe"] for row in rows} for mark, rows in drawn if mark["type"] == "line"]
    assert lines == [{f"width {size}" for size in SIZES}] * 2
    of = {(mark.get("shape"), mark.get("filled")): rows for mark, rows in drawn if mark["type"] == "point"}
    assert [row["recipe"] for row in of["cross", None]] == ["width 256"]
    assert [(row["recipe"], row["seeds"]) for row in of[None, False]] == [("width 512", 1)]
    best = some_transfer().to_dict()["decays"][0]["sizes"]
    marked = [row["rate"] for row in of["diamond", True]]
    assert marked == pytest.approx([one["optimum"]["value"] for one in best], rel=1e-4)


def test_the_path_of_the_best_rate_reaches_the_target_and_names_its_slope(found):
    blocks = found["glance"]
    (path,) = (c for c in blocks[0].blocks if c.name == "path-0")
    slope = some_transfer().first.slope
    assert slope is not None
    assert f"{slope.value:.2f}x ({slope.low:.2f} to {slope.high:.2f}x)" in path.caption
    points = [rows for mark, rows in layers(blocks, "path-0") if mark["type"] == "point"]
    assert [[row["size"] for row in rows] for rows in points] == [[*SIZES], [1024]]


def test_the_path_ends_at_the_largest_size_where_one_contradicts_the_line():
    curves = draw([0.1] * 4, skewed(0.5), 0.002, rng=np.random.default_rng(1))
    blocks = sections(answer(swept(edge(curves))))["glance"]
    (path,) = (c for c in blocks[0].blocks if c.name == "path-0")
    assert "Circle" not in path.caption
    points = [rows for mark, rows in layers(blocks, "path-0") if mark["type"] == "point"]
    assert [[row["size"] for row in rows] for rows in points] == [[*SIZES[:3]]]


def test_a_rate_with_one_seed_shows_its_loss_and_only_one_that_ended_early_is_an_alarm(found):
    (table,) = found["losses"]
    cells = [cell for row in table.rows for cell in row[1:]]
    (quiet,) = (cell for cell in cells if cell.small == "one seed")
    assert float(quiet.text) > 3
    assert quiet.tone == "faint"
    assert [(cell.text, cell.small) for cell in cells if cell.tone == "alarm"] == [
        ("stopped", "loss not finite at step 3")
    ]


def test_the_fault_of_the_coordinate_check_is_marked_and_first_below_what_to_do(found):
    remedy, _, table, right, by_role = found["coordinate_check"]
    assert remedy.tone == "alarm"
    assert "`h.3.mlp`" in remedy.text
    assert "divide" in remedy.text
    first, second = table.rows
    assert {cell.tone for cell in first} == {"alarm"}
    assert [cell.text for cell in first] == [
        "h.<wbr>*.<wbr>mlp",
        "update",
        "2",
        "0.90",
        "-0.50 to 0.00",
        "wrong",
    ]
    assert [cell.tone for cell in second] == [""] * 5 + ["alarm"]
    (fine,) = right.blocks[0].rows
    assert [cell.text for cell in fine][-2:] == ["at most 0.00", "right"]
    (hidden,) = by_role.blocks[0].rows
    assert [cell.text for cell in hidden] == ["hidden", "update", "3", "0.80"]  # after the last step


def test_other_weight_decays_are_named_in_words_and_shown_on_request(found):
    (details,) = found["other_weight_decays"]
    assert isinstance(details, Details)
    assert not details.open
    assert details.summary == "With 4x the weight decay, independent of the rate: shifts"
    assert "rates-1" in [chart.name for chart in details.blocks[0].blocks]


def test_rates_of_a_setup_with_a_rate_of_its_own_at_every_size_are_multiples():
    (table,) = sections(some_transfer(rates={size: 1e-3 * 64 / size for size in SIZES}))["losses"]
    assert table.header[0] == "rate, times the setup's own"
    assert "1x" in [row[0].text for row in table.rows]
    assert [cell.text for cell in table.rows[0][1:]] == ["1x", "0.5x", "0.25x", "0.12x"]


def test_a_page_is_made_where_nothing_was_tried():
    few = sections(answer(swept({}), ended_by="too short to tell"))
    assert [type(block) for block in few["glance"]] == [Notes]
    assert "coordinate_check" not in few


def test_a_rate_is_not_broken_at_its_hyphen():
    assert with_whole_rates("take 3.6e-3 <b>") == 'take <span class="whole">3.6e-3</span> &lt;b&gt;'


def test_a_page_is_drawn_where_no_loss_is_a_number():
    own = some_sweep()
    stopped = "loss not finite at step 1"
    lost = {
        size: {key: replace(t, losses=(math.nan,), stopped=stopped) for key, t in some.items()}
        for size, some in own.trials.items()
    }
    scales = {size: replace(scale, start=math.nan, unigram=None) for size, scale in own.scales.items()}
    plain = to_plain(answer(replace(own, trials=lost, scales=scales)).to_dict())
    assert stopped in transfer_page(plain).html()
