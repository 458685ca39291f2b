"""Hooks of the documentation site (``make docs``): pages that other files hold, links, and equations.

README, CONTRIBUTING and CHANGELOG become pages; the API has a page for each room; the notebook is
executed; kept comparisons and the pages of the papers are copied. TeX becomes MathML, which needs no script.
"""

from __future__ import annotations

import posixpath
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree.ElementTree import Element

import nbformat
from latex2mathml.converter import convert
from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter
from nbconvert.preprocessors import ExecutePreprocessor

HOME = Path(__file__).resolve().parents[1]
PACKAGE = HOME / "src" / "normlab"
NOTEBOOK = HOME / "docs" / "first-steps.ipynb"
PAGES = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
"""Pages of the site that lie elsewhere in the repository."""
API = {
    "Instruments": (
        *("setups", "trace", "checks", "parallel", "trials", "scaling", "diagnosis", "watching", "judging"),
    ),
    "Laboratory": (
        *("nn", "optim", "lab", "lab.recipes", "lab.data", "lab.tasks", "lab.training", "lab.runs"),
        *("lab.comparison", "papers"),
    ),
    "Shared": ("base", "report", "cli"),
}
"""The packages that have a page of their own, by heading, in the order of the navigation."""
LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")
SECONDS = 900
"""The most seconds that one cell of the notebook may take."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the extension for equations, and the pages of the API, instruments first."""
    config.markdown_extensions.append(Equations())  # pyrefly: ignore
    (reference,) = (item["Reference"] for item in config.nav or [] if "Reference" in item)
    (api,) = (item for item in reference if "API" in item)
    api["API"] = [
        "api/index.md",
        *({heading: [f"api/{name}.md" for name in packages]} for heading, packages in API.items()),
    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what does not lie in the folder of the documentation."""
    for uri, text in generated():
        files.append(File.generated(config, uri, content=text))
    files.remove(files.src_uris[NOTEBOOK.name])
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links that leave the documentation into links to the site's pages, or into plain text."""
    source = PAGES.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def rewritten(match: re.Match[str]) -> str:
        text, link, anchor = match[1], match[2], match[3] or ""
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
        found = site_uri(target, files)
        if found is not None:
            uri = posixpath.relpath(found, posixpath.dirname(page.file.src_uri) or ".")
            return f"[{text}]({uri}{anchor})"
        return match[0] if target.startswith("docs/") else text

    return LINK.sub(rewritten, markdown)


def site_uri(target: str, files: Files) -> str | None:
    """The page or file of the site that shows a path of the repository; None where there is none."""
    shown = {source: uri for uri, source in PAGES.items()} | {"results/papers": "results/papers/papers.html"}
    candidates = [shown.get(target, ""), target.removeprefix("docs/"), f"{target}/comparison.html"]
    if target.startswith("src/normlab/"):
        names = target.removeprefix("src/normlab/").removesuffix(".py").split("/")
        # the page of the innermost package that has one
        candidates += [f"api/{'.'.join(names[:depth])}.md" for depth in range(len(names), 0, -1)]
    return next((uri for uri in candidates if files.get_file_from_path(uri)), None)


# ------------------------------------------------------------------------------------------ generated pages


def api_page(name: str) -> str:
    """The page of a package: all of its modules, without the packages in it that have pages of their own."""
    if not any(other.startswith(f"{name}.") for packages in API.values() for other in packages):
        return f"# {name}\n\n::: normlab.{name}\n"
    modules = sorted(path.stem for path in (PACKAGE / name).glob("*.py") if path.stem != "__init__")
    lines = [f"# {name}", f"::: normlab.{name}\n    options: {{show_submodules: false}}"]
    return "\n\n".join([*lines, *(f"::: normlab.{name}.{module}" for module in modules), ""])


def generated() -> Iterator[tuple[str, str | bytes]]:
    """Every page and file that is not in the folder of the documentation, with its content."""
    for uri, source in PAGES.items():
        yield uri, (HOME / source).read_text(encoding="utf-8")
    yield "api/index.md", "# normlab\n\n::: normlab\n    options: {show_submodules: false}\n"
    for packages in API.values():
        for name in packages:
            yield f"api/{name}.md", api_page(name)
    for path in sorted((HOME / "results").glob("*/comparison.html")):
        yield path.relative_to(HOME).as_posix(), path.read_text(encoding="utf-8")
    for path in linked_files():
        yield path.relative_to(HOME).as_posix(), path.read_bytes()
    yield "results.md", results_page()
    yield from paper_pages()
    yield from notebook_page()


def linked_files() -> list[Path]:
    """Tables of results that the documentation links to."""
    pages = list((HOME / "docs").rglob("*.md"))
    links = {(p.parent, link) for p in pages for _, link, _ in LINK.findall(p.read_text(encoding="utf-8"))}
    found = {(home / link).resolve() for home, link in links if link.endswith((".json", ".jsonl"))}
    return sorted(path for path in found if path.is_file() and not path.is_relative_to(HOME / "docs"))


def results_page() -> str:
    """The list of pages with kept results."""
    comparisons = [path.parent.name for path in sorted((HOME / "results").glob("*/comparison.html"))]
    lines = [f"- [The comparison `{name}`](results/{name}/comparison.html)" for name in comparisons]
    papers = "- [The papers' findings](results/papers/papers.html), and what was measured for each table"
    intro = "Pages of `normlab compare` and `normlab papers reproduce`: one file each, with every chart."
    return "\n".join(["# Pages", "", intro, "", papers, *lines, ""])


def paper_pages() -> Iterator[tuple[str, str]]:
    """The page of all findings, and the page of each kept reproduction."""
    from normlab.papers import ARTEFACTS
    from normlab.papers.finding import known_findings, reviewed
    from normlab.papers.regimes import read_book
    from normlab.papers.results import KEPT, at_other_scales, result_name, standing
    from normlab.report.papers import papers_page
    from normlab.report.reproduction import reproduction_page

    standings = [standing(artefact, [KEPT]) for artefact in ARTEFACTS.values()]
    others = at_other_scales(ARTEFACTS.values(), [KEPT])
    measured = {result_name(s.artefact.id, s.scale): s for s in (*standings, *others) if s.found is not None}
    book = read_book()
    findings = [reviewed(finding, book) for finding in known_findings().values()]
    yield "results/papers/papers.html", papers_page(findings, standings, set(measured), others)
    for name, one in measured.items():
        resting = [finding for finding in findings if one.artefact.id in finding.finding.artefacts]
        yield f"results/papers/{name}.html", reproduction_page(one, resting)


def notebook_page() -> Iterator[tuple[str, str | bytes]]:
    """The notebook, executed in an empty folder, as Markdown with its pictures."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        quiet = ["--log-level=ERROR"]
        cells = ExecutePreprocessor(timeout=SECONDS, kernel_name="python3", extra_arguments=quiet)
        cells.preprocess(notebook, {"metadata": {"path": folder}})
    name = NOTEBOOK.stem
    text, resources = MarkdownExporter().from_notebook_node(notebook, {"output_files_dir": name})
    yield f"{name}.md", text
    yield from resources["outputs"].items()


# ------------------------------------------------------------------------------------------------ equations


class Equation(InlineProcessor):
    """TeX as MathML."""

    def handleMatch(self, m: re.Match[str], data: str) -> tuple[Element | str, int, int]:
        return self.md.htmlStash.store(convert(m[1])), m.start(0), m.end(0)


class Equations(Extension):
    """Equations as docstrings write them, ``:math:`x```, and as Markdown does, ``$`x`$``."""

    def extendMarkdown(self, md: Markdown) -> None:
        md.inlinePatterns.register(Equation(r":math:`([^`]+)`", md), "math-role", 200)
        md.inlinePatterns.register(Equation(r"\$`([^`]+)`\$", md), "math-code", 200)
