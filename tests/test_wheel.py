"""The wheel holds the kept results of the papers: an installed copy shows them in any folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path
from zipfile import ZipFile

import pytest

from normlab.papers import ARTEFACTS
from normlab.papers.regimes import read_book, read_source
from normlab.papers.results import KEPT

HOME = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=HOME, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with ZipFile(wheel) as packed:
        packed.extractall(folder / "site")
    return folder / "site"


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_the_kept_results_of_the_papers(unpacked):
    inside = unpacked / "normlab/papers/results"
    read = {source for regime in read_book().regimes.values() for source in regime.sources}
    assert {source: read_source(source, (inside,)) for source in read} == {
        source: read_source(source) for source in read
    }
    kept, packed = (
        {path.name: path.read_bytes() for path in folder.glob("*.json")}
        for folder in (KEPT, inside / "papers")
    )
    assert packed == kept
    for name in ("checks/properties.toml", "cli/SKILL.md", "report/check.schema.json"):
        assert (unpacked / "normlab" / name).is_file()
    (entries,) = unpacked.glob("*.dist-info/entry_points.txt")
    points = ConfigParser()
    points.read(entries, encoding="utf-8")
    assert dict(points["pytest11"]) == {"normlab": "normlab.pytest_plugin"}
    assert {path.name for path in unpacked.iterdir() if not path.name.endswith(".dist-info")} == {"normlab"}


@pytest.mark.slow
def test_an_installed_copy_shows_what_was_measured_in_an_empty_folder(unpacked, tmp_path):
    command = [sys.executable, "-m", "normlab", "papers", "--json"]
    env = {**os.environ, "PYTHONPATH": str(unpacked)}
    shown = subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True, text=True)
    states = {one["id"]: one["state"] for one in json.loads(shown.stdout)["artefacts"]}
    assert states.keys() == ARTEFACTS.keys()
    measured = {id_ for id_, state in states.items() if state in ("measured", "not all runs")}
    assert measured == {path.stem for path in KEPT.glob("*.json")}
    assert not list(tmp_path.iterdir())
