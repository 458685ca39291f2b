"""The table of placements: what is asked, what the library refuses, and the page that is generated."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import normlab
from normlab.base.locks import hold
from normlab.errors import UserError
from normlab.scaling import coordinates
from normlab.scaling.family import family_of
from scaling.sums import STEPS, setup

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks/transfer"


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    """The benchmark, whose folder is on the path of its scripts alone."""
    before = list(sys.path)
    sys.path.insert(0, str(FOLDER))
    try:
        import placements

        yield placements
    finally:
        sys.path[:] = before
        for name in ("placements", "brown"):
            sys.modules.pop(name, None)


# ------------------------------------------------------------------------------------------ what is kept
def test_the_tables_are_the_generated_ones(script: ModuleType):
    text = script.PAGE.read_text(encoding="utf-8")
    assert script.BEGIN in text
    again = "python benchmarks/transfer/placements.py --write"
    assert text == script.filled(text), f"docs/placements.md is old; type: {again}"


def test_the_page_names_what_is_fixed(script: ModuleType):
    text = script.PAGE.read_text(encoding="utf-8")

    def listed(sizes: tuple[int, ...]) -> str:
        return f"{', '.join(map(str, sizes[:-1]))} and {sizes[-1]}"

    for axis, sizes in script.SIZES.items():
        assert f"{axis}s {listed(sizes)};" in text
    for axis in ("width", "depth"):
        steps, seeds = script.STEPS[axis], {2: "two", 3: "three"}[script.SEEDS[axis]]
        assert re.search(rf"\b{axis} .*\b{steps} steps .*\b{seeds} seeds\b", text)
    assert f"Of {sum(not row.refusals for row in script.ROWS)} intervals" in text


# ------------------------------------------------------------------------------------------ what is asked
def test_every_placement_has_both_axes_both_parametrisations_and_both_optimizers(script: ModuleType):
    assert script.PLACEMENTS == ("post", "pre", "admin", "deepnorm", "periln", "keel", "lnscale")
    columns = {(r.axis, r.parametrisation, r.optimizer) for r in script.ROWS}
    assert columns == {
        (axis, name, rule)
        for axis, own in (("width", "mup"), ("depth", "completep"))
        for name in ("standard", own)
        for rule in ("adamw", "muon")
    }
    assert len(script.ROWS) == len({row.name for row in script.ROWS}) == 7 * len(columns)


def test_a_recipe_is_refused_where_its_parametrisation_is_not_derived(script: ModuleType):
    """For Muon, and CompleteP where the stream is no plain sum of its branches."""
    summed = ("pre", "lnscale")
    for row in script.ROWS:
        derived = row.parametrisation == "standard" or row.optimizer == "adamw"
        wanted = derived and (row.parametrisation != "completep" or row.placement in summed)
        assert wanted == (not row.refusals), row.name
        assert bool(script.EXPECTED[row.axis, row.parametrisation, row.optimizer]) == derived
    for row in (row for row in script.ROWS if row.placement == "post"):
        if row.refusals:
            with pytest.raises(UserError, match=re.escape("; ".join(row.refusals))):
                normlab.resolve(row.recipe, script.base())
        else:
            config = normlab.resolve(row.recipe, script.base())
            assert (config.model.parametrisation, config.optim.optimiser) == (
                row.parametrisation,
                row.optimizer,
            )


# ------------------------------------------------------------------------------------------- how it is run
@pytest.fixture
def small(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Rows of a model whose best rate goes with one over its width, and results in another folder."""

    def sized(_recipe: str, _root: Path, *, widths: tuple[int, ...]) -> Any:
        return family_of(setup, "sum", widths=widths)

    own = {"family": sized, "SIZES": {"width": (4, 8, 16)}, "STEPS": {"width": STEPS}}
    for name, value in {**own, "RESULTS": tmp_path / "placements.json"}.items():
        monkeypatch.setattr(script, name, value)
    monkeypatch.setattr(script, "ROWS", script.ROWS[:2])
    monkeypatch.setattr(coordinates, "SHARE", 0.0)
    return script


@pytest.mark.slow
def test_a_row_that_is_stopped_goes_on_and_is_kept(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (row, other), trials = small.ROWS, tmp_path / "width/post+standard+adamw/trials.jsonl"
    ticks = iter(range(10**6))
    with monkeypatch.context() as patch:
        patch.setattr(small, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
        assert not small.measure(row, tmp_path, until=5 * STEPS)
    before = trials.read_bytes()
    assert before.count(b'"trial"') == 5
    assert small.kept() == {}

    assert small.measure(row, tmp_path, until=float("inf"))
    assert trials.read_bytes().startswith(before)
    assert list(small.kept()) == [row.name]
    assert re.fullmatch(r"0\.50x \(.*\): \*\*shifts\*\*", small.cell(row, small.kept()))
    assert small.cell(other, small.kept()) == small.NOT_MEASURED
    monkeypatch.setitem(small.SEEDS, "width", 4)
    assert small.kept() == {}  # what was kept under another plan does not count


def test_a_row_that_another_process_has_is_left_to_it(small: Any, tmp_path: Path):
    row = small.ROWS[0]
    (folder := tmp_path / row.name).mkdir(parents=True)
    with hold(folder):
        assert small.measure(row, tmp_path, until=float("inf"))
    assert not (folder / "trials.jsonl").exists()


def test_two_that_keep_at_once_lose_nothing(small: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(small, "small", lambda found: found)
    with ThreadPoolExecutor(2) as both:
        list(both.map(small.keep, small.ROWS, ({"slope": None},) * 2))
    assert list(small.kept()) == [row.name for row in small.ROWS]


def test_a_cell_says_what_is_not_known(script: ModuleType):
    row = next(row for row in script.ROWS if not row.refusals)
    known = {"value": 1.0, "low": 0.5, "high": 2.0, "why": ""}
    by_size = [{"optimum": known}] * 3 + [{"optimum": {**known, "high": None}}]
    found = {**row.plan, "verdict": "cannot say", "by_size": by_size}
    slope = {"value": 0.9, "low": 0.6, "high": 1.3}
    noisy = script.cell(row, {row.name: {**found, "sizes": [1] * 4, "slope": slope}})
    assert noisy == "0.90x (0.60 to 1.30x), from 3 widths: too noisy to decide"
    assert script.cell(row, {row.name: {**found, "slope": None}}) == script.NO_LINE
