"""``tools/same_numbers.py`` finds planted differences, follows renames, and knows today's names."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import same_numbers
from cases import each
from normlab.cli.presets import CONFIGS
from normlab.papers import ARTEFACTS
from normlab.papers.finding import known_findings
from normlab.papers.trainings import SCALES
from same_numbers_comparing import Names, difference, load, same, shared
from same_numbers_configurations import CONFIGURATIONS, DiagnosisOf, Starts, Training, Watched
from same_numbers_driver import TABLES, Driver, collected, configured, shuffle_generators, without_prose
from same_numbers_foreign import MODELS

NO_NAMES: dict[str, Any] = {"tables": {}, "columns": {}, "words": {}, "tensors": {}, "left_out": ["seconds"]}
METRICS = [{"step": 1, "loss": 5.25, "seconds": 0.1}, {"step": 2, "loss": 4.5, "seconds": 0.2}]


@pytest.fixture
def result(tmp_path):
    """A function (tables, weights) -> what the comparison reads of them."""

    def write(tables: Any = None, weights: Any = None, names: Any = NO_NAMES) -> Any:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        (folder / TABLES).write_text(json.dumps({"metrics.train": METRICS} if tables is None else tables))
        save_file(
            {"a.weight": ones(), "b.weight": ones()} | (weights or {}), folder / "last.model.safetensors"
        )
        return load(folder, Names(names))

    return write


def ones() -> np.ndarray:
    return np.ones((2, 3), np.float32)


def changed(row: int, **cells: Any) -> dict[str, Any]:
    rows = [dict(r) for r in METRICS]
    rows[row] |= cells
    return {"metrics.train": rows}


# ------------------------------------------------------------------------------------------- differences


def test_the_same_is_identical_whatever_the_time(result):
    assert difference(result(), result(changed(0, seconds=9.9))) == ""


def test_the_last_bit_of_one_loss_is_a_difference(result):
    other = math.nextafter(4.5, 5)
    found = difference(result(), result(changed(1, loss=other)))
    for said in ("metrics.train", "step 2", "loss", "4.5", repr(other), "1 cells"):
        assert said in found
    assert "tensors" not in found


def test_a_column_that_was_added_is_compared_where_both_have_it(result):
    old, new = result(), result(changed(0, nll_exchanged=4.5))
    assert "nll_exchanged" in difference(old, new)
    assert difference(old, new, ["nll_exchanged"]) == ""
    assert "'nothing'" in difference(new, old, ["nll_exchanged"]), "a column that is lost is a difference"
    assert "4.5 became 5.0" in difference(new, result(changed(0, nll_exchanged=5.0)), ["nll_exchanged"])


def test_one_bit_of_one_weight_is_a_difference(result):
    weight = ones()
    weight[1, 2] = np.nextafter(np.float32(1), np.float32(2))
    found = difference(result(), result(weights={"b.weight": weight}))
    assert "1 of 2 tensors" in found
    assert "last.model.b.weight" in found
    assert f"{weight[1, 2] - 1:.3g}" in found


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ({}, {"c.bias": ones()}, "only HEAD has"),
        ({}, {"a.weight": ones().T.copy()}, "[3, 2]"),
        ({}, {"a.weight": ones().astype(np.float64)}, "F64"),
        ({"a.weight": 0.0 * ones()}, {"a.weight": -0.0 * ones()}, "1 of 2 tensors"),
    ],
    ids=["set", "shape", "type", "sign"],
)
def test_another_set_shape_type_or_sign_of_weights_is_a_difference(result, before, after, told):
    assert told in difference(result(weights=before), result(weights=after))


@each(
    ("tables", "said"),
    [
        ({"metrics.train": METRICS[:1]}, "number of rows"),
        ({"metrics.train": []}, "number of rows"),
        ({}, "number of rows"),
        (changed(0, nll=1.0), "nll: 'nothing' became 1.0"),
        (changed(0, loss="nan"), "'nan'"),
        (changed(0, loss=None), "None"),
    ],
)
def test_a_missing_row_table_column_or_value_is_a_difference(result, tables, said):
    assert said in difference(result(), result(tables))


@each(
    ("one", "other", "equal"),
    [
        (math.nan, math.nan, True),
        (1, 1.0, True),
        (2**53, 2**53 + 1, False),
        (0.0, -0.0, False),
        (1, True, False),
        ("1", 1, False),
        (None, 0, False),
    ],
)
def test_cells_are_compared_to_the_last_bit(one, other, equal):
    assert same(one, other) == equal


# ----------------------------------------------------------------------------- studies that come and go

JUMP = {"name": "jump", "table": "scales", "factor": 3.0}
START = {"name": "dropout", "table": "dropouts", "probability": 0.9}
DIAGNOSIS = {
    "study.scales": [{"applied": True}],
    "study.start": [{"applied": True}],
    "scales": [{"mean_square": 1.5}],
    "dropouts": [{"probability": 0.9}],
    "findings": [JUMP, START],
}
WITHOUT_START = {"study.scales": [{"applied": True}], "scales": [{"mean_square": 1.5}], "findings": [JUMP]}


def test_a_study_that_is_gone_is_listed_and_no_difference(result):
    base, head, alone = shared(result(DIAGNOSIS), result(WITHOUT_START))
    assert difference(base, head) == ""
    assert base.cells == head.cells == 5
    assert alone == "only BASE has dropouts, findings.dropout.dropouts, study.start"
    assert shared(result(WITHOUT_START), result(DIAGNOSIS))[2] == alone.replace("BASE", "HEAD")


@each(
    ("table", "rows"),
    [
        ("scales", [{"mean_square": math.nextafter(1.5, 2)}]),
        ("scales", []),
        ("study.scales", [{"applied": False}]),
        ("findings", [JUMP | {"factor": 3.5}]),
        ("findings", [JUMP, JUMP]),
    ],
)
def test_what_both_diagnoses_have_is_compared(result, table, rows):
    base, head, alone = shared(result(DIAGNOSIS), result(WITHOUT_START | {table: rows}))
    assert table in difference(base, head)
    assert "scales" not in alone


def test_diagnoses_with_nothing_in_common_are_not_identical(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(CONFIGURATIONS, "one", DiagnosisOf(model="torch"))
    sides = [same_numbers.Side(label, tmp_path, tmp_path / label) for label in ("BASE", "HEAD")]
    for side, tables in zip(sides, ({"scales": METRICS}, {"read": METRICS}), strict=True):
        (side.results / "one").mkdir(parents=True)
        (side.results / "one" / TABLES).write_text(json.dumps(tables))
    assert not same_numbers._report("one", sides, Names(NO_NAMES))
    assert re.search(r"\bBASE .*\bscales; .*\bHEAD .*\bread\b", capsys.readouterr().out)


# --------------------------------------------------------------------------------------------------- names


def test_renames_are_no_differences(result):
    names = NO_NAMES | {
        "tables": {"dependency": ["own_share"]},
        "columns": {"grad_norm": ["grad_norm_l2"], "dependency.index": ["dependency.at"]},
        "words": {"stream": ["after"]},
        "tensors": {r"\.place\.": ".placement."},
    }
    old = {
        "own_share": [{"at": 3, "grad_norm_l2": 0.5, "signal": "after", "module": "x.place.norm"}],
        "at": [{"at": 1}],
    }
    new = {
        "dependency": [{"index": 3, "grad_norm": 0.5, "signal": "stream", "module": "x.placement.norm"}],
        "at": [{"at": 1}],
    }
    before = result(old, {"x.place.norm": ones()}, names)
    assert difference(before, result(new, {"x.placement.norm": ones()}, names)) == ""
    new["dependency"][0]["grad_norm"] = 0.25
    assert "grad_norm: 0.5 became 0.25" in difference(before, result(new, {"x.place.norm": ones()}, names))


@dataclass(frozen=True)
class Section:
    new: int = 1
    pair: tuple[float, float] = (0.0, 1.0)


@dataclass(frozen=True)
class Whole:
    task: str = "a"
    section: Section = field(default_factory=Section)


def test_a_field_is_set_under_the_name_that_is_there():
    older = {"section.newest": ["section.newer", "section.new"]}
    found = configured(Whole(), {"task": "b", "section.newest": 2}, older)
    assert found == replace(Whole(), task="b", section=Section(new=2))


def test_a_field_that_is_nowhere_is_an_error():
    with pytest.raises(LookupError, match=r"section\.gone"):
        configured(Whole(), {"section.gone": 1}, {})


def test_of_a_sentence_the_numbers_count():
    assert without_prose("a step at 0.32 raises it 5.1e-02") == "0.32 5.1e-02"
    assert without_prose("encoder.sublayers.0") == "encoder.sublayers.0"


def test_files_of_a_run_become_tables(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"kind": "dev", "step": 1}\n{"kind": "train", "step": 1}\n')
    (tmp_path / "status.json").write_text(
        '{"step": 3, "seconds": 1, "outcome": {"state": "stuck", "step": 2}}'
    )
    files = {"metrics": ["new.jsonl", "rows.jsonl"], "status": ["status.json"], "flight": ["flight.json"]}
    tables = collected(tmp_path, files, tmp_path)
    assert set(tables) == {"metrics.dev", "metrics.train", "status"}
    assert tables["status"] == [{"step": 3, "best_step": None, "outcome.state": "stuck", "outcome.step": 2}]


def test_a_file_that_every_run_has_must_be_found(tmp_path):
    with pytest.raises(LookupError, match=r"last/model\.safetensors"):
        collected(tmp_path, {"last.model": ["last/model.safetensors"]}, tmp_path)


# -------------------------------------------------------------------------------------------------- driving


@pytest.mark.slow
def test_every_name_is_known_to_the_code_as_it_is(tmp_path):
    """A rename without its line in ``RENAMES`` fails here."""
    driver = Driver(same_numbers.told(), tmp_path / "runs", tmp_path)
    for what in same_numbers.RENAMES["homes"]:
        assert driver.home(what)
    for one in CONFIGURATIONS.values():
        recipes = one.recipes if isinstance(one, Starts) else [getattr(one, "recipe", "")]
        for recipe in filter(None, recipes):
            assert driver.config(recipe, one.fields).recipe == recipe
        if isinstance(one, Watched) or (isinstance(one, DiagnosisOf) and not one.recipe):
            assert one.model in MODELS


def test_what_is_drawn_without_a_seed_differs_from_run_to_run():
    draws = []
    for _ in range(2):
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        torch.manual_seed(1)
        shuffle_generators()
        draws.append((random.random(), np.random.random(), torch.rand(()).item()))  # noqa: NPY002
    assert all(one != other for one, other in zip(*draws, strict=True))


@pytest.mark.slow
def test_every_artefact_and_preset_has_its_identity(tmp_path):
    driver = Driver(same_numbers.told(), tmp_path / "runs", tmp_path)
    tables = driver.give("identities", tmp_path)
    assert {column.split()[0] for column in tables["run_ids"][0]} == set(CONFIGS)
    assert {column.split()[0] for column in tables["effects"][0]} <= set(known_findings())
    for scale in SCALES:
        cells = sum(len(a.trainings[scale].cells) for a in ARTEFACTS.values() if scale in a.trainings)
        assert len(tables[f"run_ids.{scale}"][0]) == cells


@pytest.mark.slow
def test_a_watched_loop_gives_its_rows_its_report_and_its_weights(tmp_path):
    pytest.importorskip("transformers", reason="the extra normlab[hf] is not installed")
    driver = Driver(same_numbers.told(), tmp_path / "runs", tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the recorder says that the loss rose
        tables = driver.give("watch-diverging", tmp_path)
    one = CONFIGURATIONS["watch-diverging"]
    assert len(tables["losses"]) == len(one.lrs)
    assert {row["step"] for row in tables["watch"]} == set(range(0, len(one.lrs), one.every_steps))
    assert tables["watch.flight"][0]["reports.0.trigger.kind"] == "diverged"
    assert (tmp_path / "last.model.safetensors").exists()


@pytest.mark.parametrize("count", [1, 2, 40])
def test_each_configuration_is_run_once_with_what_it_starts_from(count):
    groups = same_numbers.parts([*CONFIGURATIONS], count)
    assert sorted(name for group in groups for name in group) == sorted(CONFIGURATIONS)
    for group in groups:
        found = [one for name in group if isinstance(one := CONFIGURATIONS[name], Training)]
        assert len(group) == 1 or all(one.ranks == 1 for one in found)
        assert all(not one.init_from or one.init_from in group for one in found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param(
            "config.betas, config.eps",
            "config.betas, 2 * config.eps",
            id="Adam's epsilon",
            marks=pytest.mark.wide,
        ),
        pytest.param(
            'seeds.data, "word_dropout"', 'seeds.data, "words"', id="a word that seeds are derived from"
        ),
    ],
)
def test_a_planted_change_is_caught(tmp_path, capsys, old, new):
    source = Path(same_numbers.ROOT) / "src"
    for side in ("as it is", "planted"):
        shutil.copytree(source, tmp_path / side / "src", ignore=shutil.ignore_patterns("__pycache__"))
    files = [p for p in (tmp_path / "planted").rglob("*.py") if old in p.read_text(encoding="utf-8")]
    assert files
    for path in files:
        path.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    sides = [str(tmp_path / "as it is"), str(tmp_path / "planted")]
    assert same_numbers.main([*sides, "--only", "lm-rope", "diagnosis-torch"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("lm-rope")
    assert "DIFFERENT  metrics.train" in said[0]
    assert "identical" in said[1]
