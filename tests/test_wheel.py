"""The wheel holds the kept results of the papers: an installed copy shows them in any folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from normlab.papers import ARTEFACTS
from normlab.papers.results import KEPT, SUPERSEDED

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


def test_the_wheel_holds_the_package_and_the_kept_results_of_the_papers(unpacked):
    inside = unpacked / "normlab/papers/results"
    kept, packed = (
        {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.json")}
        for folder in (KEPT, inside)
    )
    assert packed == kept
    assert any(name.startswith(SUPERSEDED) for name in packed)
    assert {path.name for path in unpacked.iterdir() if not path.name.endswith(".dist-info")} == {"normlab"}


@pytest.mark.slow
def test_an_installed_copy_shows_what_was_measured_in_an_empty_folder(unpacked, tmp_path):
    command = [sys.executable, "-m", "normlab", "papers", "--json"]
    env = {**os.environ, "PYTHONPATH": str(unpacked)}
    shown = subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True, text=True)
    states = {one["id"]: one["state"] for one in json.loads(shown.stdout)}
    assert states.keys() == ARTEFACTS.keys()
    measured = {id_ for id_, state in states.items() if state not in ("not run", "no study yet")}
    assert measured == {path.stem for path in KEPT.glob("*.json")}
    assert not list(tmp_path.iterdir())
