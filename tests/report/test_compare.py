import dataclasses
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import polars as pl
import pytest
from markupsafe import Markup

from normlab.lab.comparison.compare import judge
from normlab.lab.comparison.result import TEST_IS_DEV, Comparison
from normlab.report.compare import compare_page, write_compare_page
from normlab.report.comparison_words import slug, words
from normlab.report.page import LIMIT_BYTES
from report import example
from report.shown import alarms, section, text_of

VOID = {"meta", "link", "br", "hr", "wbr", "line"}


class Document(HTMLParser):
    """Ids and links of a page; complains about elements that are not closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.cells: list[list[str]] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        if found.get("id"):
            self.ids.append(found["id"] or "")
        if tag == "a":
            self.links.append(found.get("href") or "")
        if tag == "td":
            self.cells.append([])
        if self.cells and tag == "a":
            self.cells[-1].append("a")

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


@pytest.fixture(scope="module")
def html(comparison: Comparison, root: Path) -> str:
    return compare_page(comparison, root).html()


@pytest.fixture(scope="module")
def otherwise(comparison: Comparison, root: Path) -> str:
    """A page of the other cases: lost runs, a forced recipe, dev as test text, no command."""
    lost = example.without_runs(comparison)
    said = {"in short": "what it is", "placement": "its equation"}
    forced = dataclasses.replace(lost.recipes[0], forced="nobody defines <it>", explained=said)
    exchanged = dataclasses.replace(lost.differences[0], models=0.71, p_models=0.0777)
    changed = dataclasses.replace(
        lost,
        recipes=(forced, *lost.recipes[1:]),
        differences=(exchanged, *lost.differences[1:]),
        test_is_dev=True,
        command="",
        signatures={},
    )
    return without_scripts(compare_page(changed, root).html())


def without_scripts(html: str) -> str:
    return re.sub(r"<script.*?</script>", "", html, flags=re.DOTALL)


@pytest.mark.slow
def test_every_link_leads_somewhere_and_every_run_is_there(html: str, comparison: Comparison) -> None:
    page = Document(without_scripts(html))
    assert len(page.ids) == len(set(page.ids))
    assert {link.removeprefix("#") for link in page.links} <= set(page.ids)
    runs = {run for r in comparison.recipes for run in (*r.runs, *(t.run for t in r.trials))}
    assert {f"run-{run}" for run in runs} <= set(page.ids)
    assert {slug(r.name) for r in comparison.recipes} <= set(page.ids)


@pytest.mark.slow
def test_every_number_of_the_results_leads_to_its_runs(html: str, comparison: Comparison) -> None:
    cells = Document(section(html, "results") + "</section>").cells
    assert len(cells) == 8 * len(comparison.recipes)
    assert all(cells)


@pytest.mark.slow
def test_order_of_the_page(html: str) -> None:
    anchors = [
        "glance",
        "training",
        "sweep",
        "cost",
        "results",
        "differences",
        "often",
        "samples",
        "runs",
        "method",
    ]
    places = [html.index(f'<section id="{a}"') for a in anchors]
    assert places == sorted(places)
    assert html.index("<h1>") < places[0]


def test_stuck_and_diverged_runs_are_called_so(html: str) -> None:
    body = without_scripts(html)
    assert body.count('class="tag stuck"') == 7
    assert body.count('class="tag diverged"') == 2
    assert any("stuck (3)" in alarm for alarm in alarms(body))
    assert "1 ✕" in section(body, "results")


def test_samples_mark_what_is_not_in_the_reference(html: str) -> None:
    samples = section(html, "samples")
    assert "&lt;anstarrt&gt; &amp; lacht" in samples
    assert "<mark>wearing</mark>" in samples
    assert "empty output" in samples
    assert "3 more samples" in samples


@pytest.mark.slow
def test_missing_runs_are_reported_and_the_page_goes_on(otherwise: str) -> None:
    (failed,) = [alarm for alarm in alarms(otherwise) if alarm.startswith("Run lost9 ")]
    assert failed.endswith(": out of memory")
    (missing,) = [alarm for alarm in alarms(otherwise) if alarm.startswith("4 run folders")]
    assert re.findall(r"lost\d", missing) == ["lost0", "lost1", "lost2", "lost9"]
    assert otherwise.count('class="tag missing"') == 4


@pytest.mark.slow
def test_a_test_text_of_its_own_and_one_that_is_dev(html: str, otherwise: str) -> None:
    apart, is_dev = words("recipe")["apart"], TEST_IS_DEV.format(noun="recipe")
    assert apart in section(html, "method")
    assert is_dev not in html
    assert apart not in otherwise
    assert is_dev in section(otherwise, "method")
    assert is_dev in otherwise[otherwise.index("<h1>") : otherwise.index("</header>")]


@pytest.mark.slow
def test_test_text_that_was_seen_before_is_said_with_its_share(comparison: Comparison, root: Path) -> None:
    overlap = {"dev in training": 0.5, "test in training": 0.031, "test in dev": 1.0}
    seen = dataclasses.replace(comparison, overlap=overlap)
    said = seen.seen_before
    assert re.findall(r"[\d.]+%", said) == ["3.1%", "100.0%"]
    assert "dev" not in dataclasses.replace(seen, overlap={"test in training": 0.1}).seen_before
    assert dataclasses.replace(seen, overlap={"test in training": 0.0}).seen_before == ""
    body = without_scripts(compare_page(seen, root).html())
    assert said in body[body.index("<h1>") : body.index("</header>")]
    assert words("recipe")["apart"] not in body


@pytest.mark.slow
def test_the_method_says_how_each_score_was_computed(
    html: str, otherwise: str, comparison: Comparison
) -> None:
    method = section(html, "method")
    assert all(said in method for said in comparison.signatures.values())
    assert comparison.headline.title in method
    assert "normlab compare" in method
    method = section(otherwise, "method")
    assert 'class="code"' not in method
    assert not any(said in method for said in comparison.signatures.values())


@pytest.mark.slow
def test_a_stale_run_is_called_so(tmp_path: Path) -> None:
    comparison = example.make(tmp_path, rows=20, plan={"pre": ((30.0, 31.0, 32.0), 2)})
    run = comparison.recipes[0].runs[0]
    file = tmp_path / run / "config.json"
    file.write_text(file.read_text("utf-8").replace(f'"{run}"', '"0ld"'), "utf-8")
    page = without_scripts(compare_page(comparison, tmp_path).html())
    assert page.count('class="tag stale"') == 1
    assert any(alarm.startswith("1 ") and run in alarm for alarm in alarms(page))


def test_one_recipe_one_learning_rate_one_seed_no_samples(comparison: Comparison, root: Path) -> None:
    only = dataclasses.replace(comparison.recipes[2], trials=(), runs=comparison.recipes[2].runs[:1])
    alone = dataclasses.replace(comparison, recipes=(only,), lrs=(2e-3,), seeds=(1,), samples=(), data={})
    small = judge(dataclasses.replace(alone, sweep_seed=None), root)
    body = without_scripts(compare_page(small, root).html())
    assert 'id="sweep"' not in body
    assert 'id="differences"' not in body
    assert text_of(body[body.index("<h1>") : body.index("</h1>")]).endswith(" one seed")
    assert words("recipe")["no_choice"] in section(body, "method")


def test_the_page_says_the_sentences_of_the_comparison(html: str, comparison: Comparison) -> None:
    text = Markup(without_scripts(html)).striptags().replace("\u200b", "")
    said = [*comparison.sentences, *(d.sentence for d in comparison.differences)]
    said += [d.trains_sentence for d in comparison.differences if d.trains_sentence]
    assert len(said) > 20
    assert [s for s in said if s[1:] not in text] == []


def test_every_seed_stands_beside_its_mean(html: str, comparison: Comparison) -> None:
    results = section(html, "results")
    for recipe in comparison.recipes:
        for metric in comparison.tested:
            assert recipe.by_seed(metric) in results


def test_what_is_said_of_the_very_models_stands_apart(html: str, otherwise: str) -> None:
    assert 'id="models"' not in html
    assert "p = 0.078" in section(otherwise, "models")
    assert "p = 0.078" not in section(otherwise, "differences")


def test_a_forced_recipe_is_marked_and_explained(otherwise: str) -> None:
    assert otherwise.count('class="tag forced"') == 1
    assert any(alarm.endswith("nobody defines <it>.") for alarm in alarms(otherwise))
    assert "its equation" in otherwise
    assert otherwise.count("What the recipe resolves to") == 1


@pytest.mark.slow
def test_nothing_was_scored(comparison: Comparison, root: Path) -> None:
    nowhere = {"runs": comparison.recipes[-1].runs}
    lost = tuple(dataclasses.replace(r, **nowhere) for r in comparison.recipes)
    judged = judge(dataclasses.replace(comparison, recipes=lost), root)
    body = without_scripts(compare_page(judged, root).html())
    assert not any(recipe.scores for recipe in judged.recipes)
    (answer,) = judged.sentences
    assert answer in text_of(body[body.index("<h1>") : body.index("</h1>")])


@pytest.mark.slow
def test_the_full_tables_lie_beside_the_page(comparison: Comparison, root: Path, tmp_path: Path) -> None:
    path = write_compare_page(comparison, root, tmp_path / "out" / "page.html")
    assert path.stat().st_size < LIMIT_BYTES / 2
    table = pl.read_csv(tmp_path / "out" / "page-figures" / "train-nll.csv")
    assert set(table["recipe"]) == set(example.PLAN)
    assert table.filter(pl.col("recipe") == "pre").height == 3 * 80
    assert len(list((tmp_path / "out" / "page-figures").iterdir())) == html_charts(path)


def html_charts(path: Path) -> int:
    return path.read_text("utf-8").count('<div class="chart"')


@pytest.mark.slow
def test_a_large_comparison_is_a_page_of_reasonable_size(tmp_path: Path) -> None:
    ends = ((30.0, 31.0, 32.0), (30.0, "stuck", "diverged"))
    plan = {f"recipe-number-{i}": (ends[i % 2], 0) for i in range(12)}
    large = example.make(tmp_path, rows=410, plan=plan)
    assert len(compare_page(large, tmp_path).html().encode()) < LIMIT_BYTES


@pytest.mark.slow
def test_pages_are_made_without_torch() -> None:
    code = "import sys, normlab.report.compare, normlab.report.run; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
