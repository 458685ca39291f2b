from typing import Any

import altair as alt
import polars as pl
import pytest
from markupsafe import Markup

from normlab.errors import UserError
from normlab.report import page
from normlab.report.charts.drawing import Drawn, finish, rows
from normlab.report.charts.theme import MANY
from normlab.report.page import (
    Cell,
    Chart,
    Code,
    Columns,
    Details,
    Html,
    Notes,
    Page,
    PageTable,
    Section,
    Text,
)


def chart(name: str, points: int = 3) -> Chart:
    table = pl.DataFrame({"x": range(points), "y": ["</script><script>alert(1)"] * points})
    drawn = finish([alt.Chart(rows(table)).mark_point().encode(x="x:Q")], 100)
    return Chart(name, f"The {name}", "", lambda _: drawn)


def make(*blocks: page.Block, headline: str = "All is well") -> Page:
    return Page("title", headline, ["fact"], "", blocks)


def test_every_block_is_there_and_escaped() -> None:
    evil = "<script>alert('x')</script>"
    blocks = [
        Text(evil),
        Code(evil),
        PageTable([evil], [[Cell(evil, evil, "#a", title=evil)]], caption=evil),
        Details(evil, [Text("inside")], anchor="d"),
        Section(evil, [Columns([Text("in the grid")])], "s", intro=evil),
        Notes([Text(evil, "alarm")]),
        Html(Markup("<hr>")),
    ]
    html = make(*blocks, headline=evil).html()
    assert evil not in html
    assert html.count("&lt;script&gt;") >= 10
    for piece in ("inside", "in the grid", "<hr>", 'id="d"', 'id="s"'):
        assert piece in html


def test_data_cannot_leave_its_script_element() -> None:
    html = make(chart("a")).html()
    assert "</script><script>alert(1)" not in html
    assert "\\u003c/script>\\u003cscript>alert(1)" in html


def test_the_page_asks_the_network_for_nothing() -> None:
    html = make(chart("a")).html()
    head = html[: html.index("<body>")]
    assert "default-src 'none'" in head
    body = html.replace(page._vega(), "")
    assert "src=" not in body
    assert "url(" not in body
    assert "@import" not in body


def test_vega_only_where_there_is_a_chart() -> None:
    assert len(make(Text("x")).html()) < 30_000
    assert make(chart("a"), chart("b")).html().count(page._vega()) == 1


def test_without_javascript_only_a_page_with_charts_says_that_they_are_missing() -> None:
    assert make(chart("a"), chart("b")).html().count("<noscript>") == 1
    assert "<noscript>" not in make(Text("x")).html()


def test_charts_are_found_in_all_containers() -> None:
    found = make(Columns([chart("a")]), Section("s", [Details("d", [chart("b")])], "s")).charts()
    assert [c.name for c in found] == ["a", "b"]


def test_two_charts_of_one_name() -> None:
    with pytest.raises(ValueError, match="twice: a;"):
        make(chart("a"), chart("a")).html()


def test_a_page_that_is_too_large() -> None:
    with pytest.raises(ValueError, match="5,000,000"):
        make(Text("x" * 5_000_000)).html()


def drawn(points: int) -> Drawn:
    return finish([alt.Chart(rows(pl.DataFrame({"x": range(points)}))).mark_point().encode(x="x:Q")], 100)


def test_a_page_that_would_be_too_large_has_fewer_points_and_then_names_files(monkeypatch: Any) -> None:
    long = make(
        Chart("c", "C", "", drawn),
        Details("Exact", [Code("e" * 3000)], beside="abc/config.json"),
        Section("s", [Details("t", [Code("c" * 3000)], beside="comparison.json")], "s"),
        Details("Kept", [Code("k" * 3000)]),
    )
    sizes = []
    for _ in page.FORMS:
        html = long.html()
        sizes.append(len(html.encode()))
        kept = "e" * 3000 in html, "c" * 3000 in html
        assert kept == ("abc/config.json" not in html, "comparison.json" not in html)
        assert "k" * 3000 in html
        monkeypatch.setattr(page, "LIMIT_BYTES", sizes[-1] - 1)
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == len(page.FORMS)
    with pytest.raises(UserError, match="shortest"):
        long.html()


def test_the_legend_of_many_recipes_has_several_lines() -> None:
    few, many = (
        Page("t", "h", [], "", [], [f"recipe{i}" for i in range(n)]).html() for n in (MANY, MANY + 1)
    )
    assert 'class="legend"' in few
    assert 'class="legend many"' in many
