"""The pages of instruments without the extra ``charts``: whole, with a table in the place of each chart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from cases import each
from normlab.base.io import to_plain
from normlab.report import page as page_module
from normlab.report.charts import INSTALL
from normlab.report.page import Chart, Columns, Details, Page, Section, Text, number_cell
from normlab.report.watch import module_sections, sublayer_sections
from report import bare
from report.test_ci_formats import REPORTS
from report.test_diagnosis import plain
from report.test_flight import OUTSIDE, REPORT, rows
from report.test_transfer import some_transfer
from trials.test_page import trials

PAGES = ("check", "trial", "diagnosis", "watch", "transfer")
LABORATORY = ("normlab.lab", "normlab.nn", "normlab.optim", "normlab.papers", "torch")
"""What trains and compares; a page of an instrument loads nothing of it, and no torch."""


def write_made(folder: Path) -> None:
    """Write results made by hand, which hold what a small measurement has no reason to hold."""
    made = {"check": {**REPORTS[0], "facts": {}}, "trial": trials().to_dict(), "diagnosis": plain()}
    for name, result in made.items():
        (folder / f"{name}.json").write_text(json.dumps(to_plain(result)), encoding="utf-8")
    (folder / "watch.jsonl").write_text("\n".join(json.dumps(row) for row in [*rows(), OUTSIDE]))
    (folder / "watch.flight.json").write_text(json.dumps({"reports": [REPORT], "notes": ["no <stream>"]}))


def run_bare(what: str, folder: Path) -> None:
    tests = Path(__file__).resolve().parents[1]
    known = os.pathsep.join([str(tests), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, bare.__file__, what, str(folder)]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": known}, timeout=300)


@pytest.fixture(scope="module", params=["made", pytest.param("measured", marks=pytest.mark.slow)])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results, their pages without charts in ``drawn``, and those with charts in ``charts``."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "made":
        write_made(folder)
    else:
        run_bare("measure", folder)
    (folder / "transfer.json").write_text(json.dumps(to_plain(some_transfer(target=1024).to_dict())))
    run_bare("draw", folder)
    bare.write_pages(folder, folder / "charts")
    return folder


class Read(HTMLParser):
    """The texts of a page outside its charts and their legend, and the cells of each table in their place."""

    EMPTY = frozenset({"meta", "link", "br", "wbr"})

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.cells: dict[str, list[str]] = {}
        self.figures: list[str] = []
        self._open: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page.read_text(encoding="utf-8").replace("<wbr>", ""))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self.EMPTY:
            return
        self._open.append((tag, dict(attrs)))
        name = dict(attrs).get("id") or ""
        if tag == "figure":
            self.figures.append(name)
        elif name.startswith("figure-"):
            self.cells[name] = []

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        tags = [tag for tag, _ in self._open]
        hidden = {"figure", "script", "style", "noscript"} & set(tags)
        if not data.strip() or hidden or any("legend" in (a.get("class") or "") for _, a in self._open):
            return
        self.texts.append(data.strip())
        for _, attributes in self._open:
            name = attributes.get("id") or ""
            if name in self.cells and {"td", "th"} & set(tags):
                self.cells[name].append(data.strip())


@pytest.fixture(scope="module")
def with_charts(folder: Path) -> dict[str, Read]:
    return {name: Read(folder / "charts" / f"{name}.html") for name in PAGES}


@pytest.fixture(scope="module")
def without(folder: Path) -> dict[str, Read]:
    return {name: Read(folder / "drawn" / f"{name}.html") for name in PAGES}


def rows_of(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "watch.jsonl").read_text(encoding="utf-8").splitlines()]


def about_lines(folder: Path) -> set[str]:
    """What the page of a watched training says about its charts' lines, and only beside charts."""
    sections = [*sublayer_sections(rows_of(folder)), *module_sections(rows_of(folder))]
    return {section.marks for section in sections}


@pytest.mark.slow
@each("name", PAGES)
def test_every_text_outside_the_charts_is_there(
    folder: Path, with_charts: dict[str, Read], without: dict[str, Read], name: str
) -> None:
    expected = [text for text in with_charts[name].texts if text not in about_lines(folder)]
    remaining = iter(without[name].texts)  # an iterator: the texts must come in the same order
    missing = [text for text in expected if text not in remaining]
    assert len(expected) > 10
    assert missing == []


@pytest.mark.slow
@each("name", PAGES)
def test_a_table_stands_in_the_place_of_each_chart(
    with_charts: dict[str, Read], without: dict[str, Read], name: str
) -> None:
    assert without[name].figures == []
    assert list(without[name].cells) == with_charts[name].figures
    assert all(cells for cells in without[name].cells.values())


@each("name", PAGES)
def test_a_page_whose_charts_are_missing_says_once_what_to_install(
    with_charts: dict[str, Read], without: dict[str, Read], name: str
) -> None:
    assert without[name].texts.count(INSTALL) == (name != "check")
    assert INSTALL not in with_charts[name].texts


def test_a_page_that_has_no_charts_is_the_same(folder: Path) -> None:
    drawn, charts = ((folder / kind / "check.html").read_text() for kind in ("drawn", "charts"))
    assert drawn == charts


def numbers_of_trials(trials: Any) -> Iterator[tuple[str, float]]:
    for trial in trials["trials"]:
        if trial["steps"] == trials["steps"]:
            yield "rates-0", trial["loss"]
            yield "steps-0", trial["losses"][0]


def numbers_of_transfer(transfer: Any) -> Iterator[tuple[str, float]]:
    for size in transfer["decays"][0]["sizes"]:
        for trial in size["rates"]:
            if trial["loss"] is not None:
                yield "rates-0", trial["loss"]


def numbers_of_diagnosis(diagnosis: Any) -> Iterator[tuple[str, float]]:
    for table, column in (("sublayer_gradients", "relative"), ("similarity", "cosine")):
        for row in diagnosis["tables"][table]:
            yield f"{table}-{column}-{diagnosis['stacks'][row['stack']]}", row[column]


def numbers_of_watch(rows: Any) -> Iterator[tuple[str, float]]:
    for row in rows:
        if (row["signal"], row["statistic"]) == ("after", "rms"):
            yield f"after-rms-{row['stack'].rpartition('.')[0]}", row["value"]


NUMBERS = {
    "trial": numbers_of_trials,
    "transfer": numbers_of_transfer,
    "diagnosis": numbers_of_diagnosis,
    "watch": numbers_of_watch,
}
"""Of the result of each instrument, names of charts with numbers that they show."""


@each("name", NUMBERS)
def test_the_tables_hold_the_numbers_of_the_charts(folder: Path, without: dict[str, Read], name: str) -> None:
    result = rows_of(folder) if name == "watch" else bare.result(folder, name)
    numbers = list(NUMBERS[name](result))
    assert len(numbers) >= 6
    for chart, number in numbers:
        assert number_cell(number) in without[name].cells[f"figure-{chart}"], (chart, number)


def test_pages_of_instruments_load_nothing_of_the_laboratory(folder: Path) -> None:
    loaded = json.loads((folder / "loaded.json").read_text())
    assert "normlab.report.page" in loaded
    assert [name for name in loaded if f"{name}.".startswith(tuple(f"{room}." for room in LABORATORY))] == []


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["measured"], indirect=True)
@each("name", ("check", "trial", "diagnosis", "watch"))
def test_an_instrument_writes_the_same_page(folder: Path, name: str) -> None:
    drawn, measured = ((folder / kind / f"{name}.html").read_text() for kind in ("drawn", "measured"))
    assert drawn == measured


@pytest.mark.slow
def test_such_pages_fit_a_phone_and_a_desk(folder: Path) -> None:
    drawn = pytest.importorskip("report.test_browser")
    if not drawn.CHROMIUM:
        pytest.skip("needs Chromium")
    with drawn.sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=drawn.CHROMIUM, args=drawn.FLAGS)
        for name, width in product(PAGES, (390, 1200)):
            page, trouble = drawn.opened(browser, folder / "drawn" / f"{name}.html", width=width)
            page.evaluate("document.querySelectorAll('details').forEach((d) => (d.open = true))")
            assert page.evaluate("document.documentElement.scrollWidth") == width, name
            assert trouble == []
            page.close()
        browser.close()


# ------------------------------------------------------------------------------------- parts of such a page


def bare_page(monkeypatch: pytest.MonkeyPatch, *blocks: page_module.Block) -> str:
    monkeypatch.setattr(page_module, "installed", lambda: False)
    return Page("title", "headline", [], "", blocks, series=["one", "two"]).html()


def undrawn(points: int) -> Any:
    raise AssertionError("this chart must not be drawn")


def chart(name: str, **parts: Any) -> Chart:
    return Chart(name, f"The {name}", "", undrawn, **parts)


def test_charts_in_all_containers_are_tables_and_there_is_no_legend(monkeypatch: pytest.MonkeyPatch) -> None:
    charts = [chart(name, rows=[{"x": i}]) for i, name in enumerate("abc")]
    section = Section("s", [charts[1], Details("d", [charts[2]])], "s", marks="Dots.")
    text = bare_page(monkeypatch, Columns([charts[0]]), section)
    assert [f'id="figure-{name}"' in text for name in "abc"] == [True] * 3
    assert "<figure" not in text
    assert 'class="legend' not in text
    assert "Dots." not in text


def test_many_rows_are_thinned_from_the_first_to_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    text = bare_page(monkeypatch, chart("a", rows=[{"x": i / 8} for i in range(1000)]))
    assert text.count("<tr>") == page_module.POINTS + 1
    assert f"{page_module.POINTS} of 1,000 " in text
    assert ">0<" in text
    assert ">124.9<" in text


def test_a_wide_table_has_fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = [{f"m{column}": 1.0 for column in range(200)} for _ in range(300)]
    assert bare_page(monkeypatch, chart("a", rows=wide)).count("<td") <= page_module.MOST_CELLS


def test_a_chart_without_a_number_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    text = bare_page(monkeypatch, chart("a"), Text("after"))
    assert "No finite" in text
    assert "<table" not in text
