"""Adds a paper of one's own to those of normlab; no torch."""

from __future__ import annotations

from pathlib import Path

from normlab.base.files import read_toml
from normlab.base.io import from_plain
from normlab.errors import UserError
from normlab.papers import PAPERS, finding, regimes
from normlab.papers.artefact import Paper


def add_paper(file: Path) -> None:
    """Add a paper of one's own from a TOML file: ``[paper]``, its settings, regimes and findings.

    The file's name is the paper's key. Raises UserError for a key that is taken, and a file without a paper.
    """
    words = read_toml(file).get("paper")
    if not isinstance(words, dict):
        raise UserError(f"{file} has no [paper]; give title, authors, url and about there")
    paper: Paper = from_plain(Paper, {**words, "key": file.stem}, f"{file}, paper")
    PAPERS[file.stem] = paper
    finding.FILES.append(file)
    regimes.FILES.append(file)
