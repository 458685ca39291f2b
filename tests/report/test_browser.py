"""The pages in headless Chromium: no error, no request, every chart drawn, usable at phone width."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from normlab.lab.comparison.result import Comparison
from normlab.report.compare import write_compare_page
from normlab.report.run import run_page
from report import example
from report.test_transfer import some_transfer

sync_api = pytest.importorskip("playwright.sync_api")

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
DRAWN = "document.documentElement.dataset.drawn === 'yes'"
PHONE, DESK = 360, 1280

pytestmark = pytest.mark.skipif(
    not CHROMIUM, reason="needs Chromium (apt install chromium, or set $CHROMIUM)"
)


@pytest.fixture(scope="module")
def browser() -> Iterator["sync_api.Browser"]:
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield found
        found.close()


@pytest.fixture(scope="module")
def page_file(comparison: Comparison, root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_compare_page(comparison, root, tmp_path_factory.mktemp("page") / "compare.html")


def opened(
    browser: "sync_api.Browser", path: Path, *, width: int, mode: str = "light"
) -> tuple["sync_api.Page", list[str]]:
    """The page with its charts drawn, and a list that fills with what it complains about or asks for."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=mode)
    trouble: list[str] = []
    page.on("console", lambda message: trouble.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on(
        "request", lambda r: None if r.url.startswith(("file:", "data:", "blob:")) else trouble.append(r.url)
    )
    page.goto(path.as_uri())
    page.wait_for_function(DRAWN)
    return page, trouble


@pytest.fixture(scope="module")
def desk(browser: "sync_api.Browser", page_file: Path) -> Iterator["sync_api.Page"]:
    """One page for all that only click in it."""
    page, trouble = opened(browser, page_file, width=DESK)
    yield page
    page.close()
    assert trouble == []


def check(page: "sync_api.Page", width: int) -> None:
    charts = page.evaluate("""() => [...document.querySelectorAll('.chart')].map((box) => ({
        name: box.dataset.chart,
        marks: box.querySelectorAll('svg .mark-line path, svg .mark-symbol path, svg .mark-rect path').length,
        width: box.querySelector('svg')?.getBoundingClientRect().width ?? 0,
        room: box.getBoundingClientRect().width,
        broken: /NaN|undefined/.test(box.innerHTML),
    }))""")
    assert charts
    for chart in charts:
        assert chart["marks"] > 0, chart
        assert 200 < chart["width"] <= chart["room"] + 1, chart
        assert not chart["broken"], chart
    assert page.evaluate("document.documentElement.scrollWidth") == width


@pytest.fixture(scope="module")
def transfer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return some_transfer().page(tmp_path_factory.mktemp("page") / "transfer.html")


@pytest.mark.slow
@pytest.mark.parametrize("file", ["page_file", "transfer_file"])
@pytest.mark.parametrize(("width", "mode"), [(PHONE, "dark"), (DESK, "light")])
def test_every_chart_is_drawn_and_nothing_is_wrong(
    browser: "sync_api.Browser", request: pytest.FixtureRequest, file: str, width: int, mode: str
) -> None:
    page, trouble = opened(browser, request.getfixturevalue(file), width=width, mode=mode)
    check(page, width)
    assert trouble == []
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(15, 18, 22)"
    assert dark == (mode == "dark")
    page.close()


@pytest.mark.slow
def test_long_names_fit_a_phone(browser: "sync_api.Browser", tmp_path: Path) -> None:
    names = ("post+smallinit+warmup", "pre+fixnorm+scalenorm+smallinit+warmup")
    ends = dict.fromkeys(names, ((31.2, 33.0, 32.0), 1))
    runs = tmp_path / "runs"
    path = write_compare_page(example.make(runs, rows=20, plan=ends), runs, tmp_path / "compare.html")
    page, _ = opened(browser, path, width=PHONE)
    check(page, PHONE)
    labels = page.locator("figure#figure-test-bleu svg", has_text="scalenorm+")
    assert labels.get_by_text("smallinit+warmup").count()
    page.close()


@pytest.mark.slow
def test_everything_fits_a_phone_when_opened(browser: "sync_api.Browser", page_file: Path) -> None:
    page, trouble = opened(browser, page_file, width=PHONE)
    page.evaluate("document.querySelectorAll('details').forEach((d) => (d.open = true))")
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE
    wide = page.evaluate(
        "[...document.querySelectorAll('.scroll')].some((s) => s.scrollWidth > s.clientWidth)"
    )
    assert wide  # tables scroll inside their box instead
    assert trouble == []
    page.close()


@pytest.mark.slow
def test_charts_follow_the_window(desk: "sync_api.Page") -> None:
    desk.set_viewport_size({"width": PHONE, "height": 800})
    desk.wait_for_function("document.querySelector('.chart svg').getBoundingClientRect().width < 340")
    check(desk, PHONE)
    desk.set_viewport_size({"width": DESK, "height": 800})
    desk.wait_for_function("document.querySelector('.chart svg').getBoundingClientRect().width > 340")


@pytest.mark.slow
def test_the_mode_can_be_switched(desk: "sync_api.Page") -> None:
    line = "document.querySelector('.chart[data-chart=dev-bleu] .mark-line path').getAttribute('stroke')"
    before = desk.evaluate(line)
    desk.click("#mode")
    desk.wait_for_function(f"{DRAWN} && {line} !== '{before}'")
    check(desk, DESK)


def test_a_recipe_can_be_picked_out(desk: "sync_api.Page") -> None:
    bars = "[...document.querySelectorAll('.chart[data-chart=time] .mark-rect path')]"
    strong = f"{bars}.filter((p) => +p.getAttribute('opacity') > 0.5).length"
    assert desk.evaluate(strong) == 7
    desk.click(".legend [data-recipe='pre+scalenorm']")
    desk.wait_for_function(f"{strong} === 1")
    desk.click(".legend [data-recipe='pre+scalenorm']")
    desk.wait_for_function(f"{strong} === 7")


def test_a_link_opens_its_run(desk: "sync_api.Page", comparison: Comparison) -> None:
    run = comparison.recipes[0].runs[1]
    details = desk.locator(f"#run-{run}")
    assert details.get_attribute("open") is None
    desk.click(f"#results a[href='#run-{run}']")
    desk.wait_for_function(f"document.getElementById('run-{run}').open")
    assert details.locator(".tag").first.is_visible()


def test_a_chart_gives_its_points(desk: "sync_api.Page") -> None:
    with desk.expect_download() as download:
        desk.click("a.csv[data-chart='dev-bleu']")
    text = Path(download.value.path()).read_text("utf-8")
    assert download.value.suggested_filename == "dev-bleu.csv"
    assert text.splitlines()[0].startswith("recipe,step,mean,low,high,runs")
    assert len(text.splitlines()) > 20


@pytest.mark.slow
def test_the_pages_of_runs(
    browser: "sync_api.Browser", comparison: Comparison, root: Path, tmp_path: Path
) -> None:
    """One that trained, in both widths, and one that diverged."""
    trained, diverged = comparison.recipes[2].runs[0], comparison.recipes[0].trials[2].run
    path = tmp_path / "run.html"
    for run, widths in ((trained, (PHONE, DESK)), (diverged, (DESK,))):
        path.write_text(run_page(root / run), "utf-8")
        for width in widths:
            page, trouble = opened(browser, path, width=width)
            if run == trained:
                check(page, width)
            assert trouble == []
            page.close()
