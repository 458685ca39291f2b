"""The documentation site: its pages, its notebook, and that it loads nothing from elsewhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HOME = Path(__file__).parents[1]
PLAN = (HOME / "mkdocs.yml").read_text(encoding="utf-8")


def test_every_page_is_in_the_navigation():
    folder = HOME / "docs"
    pages = {
        p.relative_to(folder).with_suffix("") for p in folder.rglob("*") if p.suffix in (".md", ".ipynb")
    }
    assert [page for page in sorted(pages) if not re.search(rf": {page}\.md$", PLAN, re.MULTILINE)] == []


def test_every_link_of_the_documentation_leads_somewhere():
    link = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")
    pages = [*HOME.glob("*.md"), *(HOME / "docs").rglob("*.md")]
    found = [(page, target) for page in pages for target in link.findall(page.read_text(encoding="utf-8"))]
    assert [f"{page.name}: {t}" for page, t in found if not (page.parent / t).exists()] == []


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cells = json.loads((HOME / "docs" / "first-steps.ipynb").read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert all(not cell.get("outputs") for cell in cells), "outputs are made when the site is built"
    exec("\n".join(code).replace('alt.renderers.enable("svg")', ""), {})  # noqa: S102 (the notebook's own code)
    said = capsys.readouterr().out
    assert "Post-LN\n" in said
    assert "output's variance" in said


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path):
    for package in ("mkdocs", "material", "mkdocstrings", "nbconvert", "ipykernel", "latex2mathml"):
        pytest.importorskip(package)
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(build, cwd=HOME, env=env, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    loaded = re.compile(r"<(?:script|img|link|iframe)[^>]*(?:src|href)=[\"']?(?:https?:)?//[^>]*>")
    package = HOME / "src" / "normlab"
    rooms = {path.parent.name for path in package.glob("*/__init__.py")}
    rooms |= {f"lab.{path.parent.name}" for path in package.glob("lab/*/__init__.py")}
    assert {path.stem for path in (tmp_path / "api").glob("*.html")} == {"index", *rooms}
    pages = {path: path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.html")}
    assert {path.name for path in pages} >= {"index.html", "catalogue.html", "papers.html", "nn.html"}
    found = [tag for page in pages.values() for tag in loaded.findall(page) if 'rel="canonical"' not in tag]
    assert found == []
    assert "<math" in pages[tmp_path / "catalogue.html"]
    assert ":math:" not in pages[tmp_path / "api" / "nn.html"]
