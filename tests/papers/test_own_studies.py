"""Every study of the papers at a size that takes a moment: findings find their measures, drawings their
columns, and planted numbers come out.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from typing import Any

import pytest

from normlab.lab.config import DataConfig
from normlab.nn import Placement
from normlab.papers import ARTEFACTS, lab
from normlab.papers.exact import known_statements
from normlab.papers.regimes import read_source
from normlab.papers.reproduce import each, reproduce
from reviewed_findings import BOOK, FINDINGS

SMALL: dict[str, Any] = {
    "dim": 16, "dims": (16, 32, 64), "layers": 3, "tokens": 128, "seeds": 2, "seed": 0, "batches": 2,
    "draws": 200, "steps": 2, "followed": 8, "rounds": 4, "shapes": ((8, 16), (16, 16)), "deepest": 4,
}  # fmt: skip
DEPTHS = {"last_gradient": (2, 3, 4), "last_matrix": (1, 2, 3), "over_depth": (1, 2, 3)}
AS_THEY_ARE = ("parameter_counts", "wrapped_blocks", "norm_jacobian")
LONG = (
    "liu2020.fig3", "liu2020.fig4", "liu2020.fig7_8", "liu2020.parameters", "liu2020.profiling",
    "liu2020.theorem1", "liu2020.theorem2", "nguyen2019.speed", "xiong2020.appendixF",
    "xiong2020.concentration", "xiong2020.fig3ab",
)  # fmt: skip
DECIDED = [a for a in ARTEFACTS.values() if a.study and not a.trainings]
BARE = replace(ARTEFACTS["apx.blocks"], id="apx.bare", study=None)


def measures_named() -> dict[str, set[str]]:
    """The measures of studies that findings and exact statements name, by artefact."""
    named: dict[str, set[str]] = {}
    for statement in known_statements():
        named.setdefault(statement.artefact, set()).update(statement.measures)
    read = cache(read_source)
    for finding in FINDINGS.values():
        for piece in (*finding.evidence, *finding.left_out):
            if piece.effect not in ("measure", "measured_ratio", "quotient"):
                continue
            for measure in (piece.arguments[side] for side in ("of", "over") if side in piece.arguments):
                sources = BOOK.regimes[piece.regime].sources
                (source,) = [name for name in sources if measure in read(name).measures]
                named.setdefault(source.removeprefix("papers/"), set()).add(measure)
    return named


NAMED = measures_named()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.delenv("NORMLAB_DATA", raising=False)
    sizes = {name: replace(model, dim=32, ffn_dim=64) for name, model in lab.SIZES.items()}
    monkeypatch.setattr(lab, "SIZES", sizes)
    monkeypatch.setattr(lab, "DataConfig", partial(DataConfig, builtin_pairs=300, vocab_size=300))


def shrunk(artefact):
    """The artefact with small settings; numbers of layers by which measures are named stay."""
    if artefact.study_name in AS_THEY_ARE:
        return artefact
    settings = {name: SMALL.get(name, value) for name, value in artefact.settings.items()}
    if artefact.study_name in DEPTHS:
        settings["depths"] = DEPTHS[artefact.study_name]
    if artefact.study_name == "hidden_scales":
        settings |= {"dim": 512, "tokens": 4}
    if artefact.study_name == "last_gradient":
        settings["dim"] = 16
    if "nested" in settings:
        settings["nested"] = dict.fromkeys(settings["nested"], 2)
    if "models" in settings:
        settings["models"] = dict.fromkeys(settings["models"], 2)
    if "theory" in settings:
        settings["theory"] = {"layers": 2, "dim": 16, "tokens": 4, "seeds": 2, "norm_seeds": 2}
    return replace(artefact, settings=settings)


@pytest.mark.parametrize(
    "artefact",
    [pytest.param(a, marks=[pytest.mark.slow] * (a.id in LONG)) for a in DECIDED],
    ids=lambda artefact: artefact.id,
)
def test_findings_find_their_measures_and_drawings_their_columns(artefact, root, monkeypatch):
    if artefact.study_name == "parameter_counts":
        monkeypatch.undo()
    found = reproduce(shrunk(artefact), root)
    if "shapes" not in artefact.settings:  # other shapes have other names
        assert NAMED.get(artefact.id, set()) <= found.measures.keys()
    for drawing in artefact.drawings:
        assert not set(drawing.columns) - found.tables[drawing.table][0].keys()


def test_what_has_no_study_says_so(root):
    with pytest.raises(ValueError, match=BARE.id):
        reproduce(BARE, root)


def test_every_study_belongs_to_an_artefact():
    own = {artefact.study for artefact in ARTEFACTS.values() if artefact.study}
    for study in own:
        assert callable(getattr(import_module(f"normlab.papers.studies.{study.module}"), study.__name__))
    modules = {study.module: import_module(f"normlab.papers.studies.{study.module}") for study in own}
    functions = {
        (module, name)
        for module, found in modules.items()
        for name, value in inspect.getmembers(found, inspect.isfunction)
        if value.__module__ == found.__name__
        and inspect.signature(value).return_annotation == "Measurement"
        and "lab" in inspect.signature(value).parameters
    }
    assert functions == {(study.module, study.__name__) for study in own}


def holding(artefact, root):
    """Whether each exact statement about an artefact holds of what its study measures."""
    measured = reproduce(artefact, root).measures
    return [one.holds(measured) for one in known_statements() if one.artefact == artefact.id]


def test_a_wrong_block_is_seen(root, monkeypatch):
    blocks = [shrunk(ARTEFACTS[id_]) for id_ in ("xiong2020.table1", "apx.blocks")]
    assert all(all(holding(artefact, root)) for artefact in blocks)
    monkeypatch.setattr(Placement.registry["post"], "write", lambda self, stream, y: self.norm(stream - y))
    assert not any(all(holding(artefact, root)) for artefact in blocks)


@pytest.mark.slow
def test_a_wrong_count_is_seen(root, monkeypatch):
    monkeypatch.undo()
    artefact = ARTEFACTS["liu2020.parameters"]
    models = {**artefact.settings["models"], "WMT'14 En-De 6L-6L": ("base", 7, 6, 37_000)}
    changed = replace(artefact, settings={**artefact.settings, "models": models})
    assert holding(changed, root) == [False]


@pytest.mark.slow
def test_several_are_measured_side_by_side_and_timings_come_last_and_alone(tmp_path, monkeypatch):
    """One that fails raises where it is asked for, and stops nothing else."""
    monkeypatch.undo()
    quick = ["xiong2020.lemma3", "apx.blocks", "xiong2020.table1"]
    timed = replace(ARTEFACTS["apx.blocks"], id="timed", alone=True)
    wanted = [timed, BARE, *(ARTEFACTS[i] for i in quick)]
    found, failed = [], []
    for artefact, measure in each(wanted, tmp_path, jobs=2):
        if artefact.study:
            found.append((artefact.id, bool(measure().measures)))
        else:
            failed.append(artefact.id)
            with pytest.raises(ValueError, match=BARE.id):
                measure()
    assert sorted(found[:-1]) == sorted((i, True) for i in quick)
    assert found[-1] == ("timed", True)
    assert failed == [BARE.id]


@pytest.mark.parametrize("jobs", [1, 2])
def test_nothing_is_measured_once_the_time_is_spent(tmp_path, monkeypatch, jobs):
    """Of several side by side, those that have begun by then are measured."""
    monkeypatch.undo()
    wanted = [replace(ARTEFACTS["apx.blocks"], id=f"one{i}") for i in range(9)]
    found = [measure().id for _, measure in each(wanted, tmp_path, jobs=jobs, until=0.0)]
    assert len(found) < 9 if jobs > 1 else not found
