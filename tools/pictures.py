"""Draw the README's two pictures anew: ``python tools/pictures.py`` writes docs/pictures/*.png.

They are the top of two pages: of the README's own check, and of a kept comparison. Needs Chromium, see
tests/report/test_browser.py.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import chdir, suppress
from pathlib import Path

from checkout import HOME, readme_script
from normlab.base.files import read_json
from normlab.base.io import from_plain
from normlab.cli.main import main as command
from normlab.lab.comparison.result import Comparison

PICTURES = HOME / "docs" / "pictures"
KEPT = HOME / "results" / "multi30k-recipes"
WIDTH = 1000
HEIGHTS = {"check": 480, "compare": 600}
"""Pixels of each page that are shown, from the top."""


def draw(pages: dict[str, Path]) -> None:
    """Photograph the top of each page."""
    from playwright.sync_api import sync_playwright

    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for name, path in pages.items():
            page = browser.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme="light")
            page.goto(path.as_uri())
            page.wait_for_function("document.documentElement.dataset.drawn === 'yes'", timeout=300_000)
            top = {"x": 0, "y": 0, "width": WIDTH, "height": HEIGHTS[name]}
            page.screenshot(path=PICTURES / f"{name}.png", timeout=300_000, clip=top)
            page.close()
        browser.close()


def pages(folder: Path) -> dict[str, Path]:
    """Write the two pages into a folder."""
    (folder / "train.py").write_text(readme_script(), encoding="utf-8")
    with chdir(folder), suppress(SystemExit):  # its check finds a mistake
        command(["check", "train.py", "--out", "check.html"])
    comparison = from_plain(Comparison, read_json(KEPT / "comparison.json"))
    return {"check": folder / "check.html", "compare": comparison.page(folder / "compare.html", KEPT)}


def main() -> None:
    """Write the pictures."""
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        draw(pages(Path(folder)))


if __name__ == "__main__":
    main()
