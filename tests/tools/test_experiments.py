"""Regimes are readable, their seeds are fresh, and a run that has a line is not trained again."""

from __future__ import annotations

import json
import math
import re
from functools import cache
from pathlib import Path

import pytest

import experiments
from experiments import read_regime, regimes, run
from normlab.base.locks import reserved
from normlab.base.rows import read_lines
from normlab.errors import UserError
from normlab.lab.config import Config
from normlab.lab.runs import RunFolder
from normlab.papers import ARTEFACTS
from normlab.papers.experiments import PILOT_SEED, append_line, kept, key, train_curve
from normlab.papers.regimes import RUNS_FILE
from normlab.papers.trainings import LAPTOP
from planned import TOY, TrainedNothing

regime_of = cache(read_regime)
PILOTS = experiments.RESULTS / "pilots"
"""The kept lines of pilots."""


def text_of(config: Config) -> tuple[str, str]:
    """The training text of a configuration."""
    return config.data.train_src, config.data.train_text


@cache
def configs_of(name: str) -> tuple[tuple[str, int, Config], ...]:
    """The configurations of a regime, which take longer to resolve than what is asserted of them."""
    return tuple(regime_of(name).configs())


@cache
def keys_of(name: str) -> tuple[str, ...]:
    """The keys of a regime's configurations."""
    return tuple(key(config) for *_, config in configs_of(name))


@cache
def texts_of(name: str) -> set[tuple[str, str]]:
    """The training texts of a regime."""
    return {text_of(config) for *_, config in configs_of(name)}


@cache
def seeds_by_text() -> dict[tuple[str, str], set[int]]:
    """The seeds of all kept runs and of the artefacts' trainings, by their training text."""
    used: dict[tuple[str, str], set[int]] = {}
    for path in experiments.RESULTS.glob("*/*/config.json"):
        content = json.loads(path.read_text(encoding="utf-8"))["config"]
        data = content["data"]
        text = (data.get("train_src", ""), data.get("train_text", ""))
        used.setdefault(text, set()).add(content["seeds"]["init"])
    for artefact in ARTEFACTS.values():
        if LAPTOP in artefact.trainings:
            for _, seed, config in artefact.trainings[LAPTOP].configs():
                used.setdefault(text_of(config), set()).add(seed)
    return used


@pytest.mark.parametrize("name", regimes())
def test_a_regime_names_its_findings_and_resolves(name):
    regime = regime_of(name)
    assert all(re.fullmatch(r"[XNL]\d+", finding) for finding in regime.findings)
    keys = keys_of(name)
    assert len(set(keys)) == len(keys) == len(regime.seeds) * len(regime.cells)
    assert all(value > 0 for value in regime.margins.values())


@pytest.mark.parametrize("name", regimes())
def test_the_seeds_of_a_regime_are_fresh(name):
    regime = regime_of(name)
    texts, used = texts_of(name), seeds_by_text()
    known = set().union(*(used.get(text, set()) for text in texts))
    assert known <= set(regime.used_before)
    assert not set(regime.seeds) & set(regime.used_before)
    assert max(regime.seeds) < PILOT_SEED
    for other in map(regime_of, regimes()):
        if other.name in (name, regime.paired_with) or other.paired_with == name:
            continue
        if texts & texts_of(other.name):
            assert not set(regime.seeds) & set(other.seeds), other.name


def test_no_seed_of_a_pilot_is_one_that_counts():
    for file in PILOTS.glob("*.jsonl"):
        assert all(row["seed"] >= PILOT_SEED for _, row in read_lines(file))
    for artefact in ARTEFACTS.values():
        if LAPTOP in artefact.trainings:
            assert all(seed < PILOT_SEED for _, seed, _ in artefact.trainings[LAPTOP].configs())


def test_no_configuration_belongs_to_two_regimes():
    keys = [key for name in regimes() for key in keys_of(name)]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("name", regimes())
def test_every_kept_run_is_a_listed_configuration(name):
    """Its key is that of today's configuration of its cell and seed: it answers what would be trained now."""
    planned = {(cell, seed, key(config)) for cell, seed, config in configs_of(name)}
    rows = kept(experiments.RESULTS / name / RUNS_FILE)
    assert {(row["cell"], row["seed"], run_key) for run_key, row in rows.items()} <= planned


@pytest.mark.slow
def test_a_toy_regime_is_trained_once(tmp_path, monkeypatch):
    (tmp_path / "results/toy").mkdir(parents=True)
    (tmp_path / "results/toy/regime.toml").write_text(TOY, encoding="utf-8")
    run("toy", tmp_path / "runs", tmp_path / "results")
    rows = list(kept(tmp_path / "results/toy" / RUNS_FILE).values())
    assert [(row["cell"], row["seed"], row["steps"]) for row in rows] == [("post", 5, 2), ("pre", 5, 2)]
    for row in rows:
        assert [step for step, *_ in row["dev"]] == [1, 2]
        assert [step for step, *_ in row["train"]] == [1, 2]
        assert (tmp_path / "runs" / row["run"] / "config.json").exists()
        assert row["test"]["bleu"] >= 0
        assert [len(entry["dependency"]["encoder"]["i_beta_sq"]) for entry in row["measured"]] == [2, 2]
        assert not list((tmp_path / "runs" / row["run"]).glob("*/*.safetensors"))

    def refuse(*_: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr("normlab.papers.experiments.train", refuse)
    run("toy", tmp_path / "runs", tmp_path / "results")
    assert len((tmp_path / "results/toy" / RUNS_FILE).read_text(encoding="utf-8").splitlines()) == 2


def toy_in(results):
    """Write the toy regime into a folder of results; return its file of runs and the keys of its two runs."""
    (results / "toy").mkdir(parents=True)
    (results / "toy/regime.toml").write_text(TOY, encoding="utf-8")
    return results / "toy" / RUNS_FILE, [key(config) for *_, config in read_regime("toy", results).configs()]


def test_a_run_that_another_process_trains_is_left_out_and_named(tmp_path, monkeypatch, capsys):
    trained = TrainedNothing(monkeypatch)
    _, (post, _) = toy_in(tmp_path)
    with reserved(tmp_path / "runs/taken" / post):
        run("toy", tmp_path / "runs", tmp_path)
    assert trained.recipes == ["pre"]
    assert "toy post 5 left out" in capsys.readouterr().out
    run("toy", tmp_path / "runs", tmp_path)
    assert trained.recipes == ["pre", "post"]


def test_a_run_that_another_process_has_trained_meanwhile_is_left_out(tmp_path, monkeypatch):
    file, (_, pre) = toy_in(tmp_path)
    trained = TrainedNothing(monkeypatch, lambda: append_line(file, {"key": pre}))
    run("toy", tmp_path / "runs", tmp_path)
    assert trained.recipes == ["post"]


def test_the_commit_is_that_of_the_code_that_was_loaded(monkeypatch):
    commits = iter(["loaded", "later"])
    made_by = []
    monkeypatch.setattr(experiments, "commit", lambda: next(commits))
    monkeypatch.setattr(experiments, "require_committed", lambda _: None)
    monkeypatch.setattr(experiments, "run", lambda *_, **options: made_by.append(options["made_by"]))
    monkeypatch.setattr("sys.argv", ["experiments.py", *regimes()[:2]])
    experiments.main()
    assert made_by == [{"commit": "loaded"}] * 2


def test_a_curve_of_a_long_training_has_at_most_a_hundred_points(tmp_path):
    folder = RunFolder(tmp_path)
    for step in range(1, 252):
        norm = 7.0 if step == 100 else 1.0
        folder.append_metrics({"kind": "train", "step": step, "nll": float(step), "grad_norm_l2": norm})
    curve = train_curve(folder)
    assert len(curve) <= 100
    assert curve[0] == [3, 2.0, 1.0]
    assert curve[-1][0] == 251
    assert max(norm for *_, norm in curve) == 7.0


def test_a_curve_shows_that_its_run_diverged_and_norms_of_any_size(tmp_path):
    folder = RunFolder(tmp_path)
    for step in range(1, 204):
        norm = math.nan if step == 203 else 1.23456e-5
        folder.append_metrics({"kind": "train", "step": step, "nll": 1.0, "grad_norm_l2": norm})
    curve = train_curve(folder)
    assert curve[0][-1] == 1.235e-5
    assert math.isnan(curve[-1][-1])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('status = "ready"', 'status = "pilot first"'),
        ('status = "ready"', 'status = "soon"'),
        ('base = "demo"', 'base = "demos"'),
        ('question = "', 'answer = "" \nquestion = "'),
        ('"train.precision" = "fp32"', '"train.precision" = "auto"'),
        ('"model.dim"', '"model.width"'),
        ('pilot = "none"', ""),
        ("seeds = [5]", "seeds = 5"),
        ('measure = ["dependency"]', 'measure = ["dependencies"]'),
        ('"model.dim"', 'task = "bert"\n"model.dim"'),
    ],
)
def test_a_regime_that_cannot_count_is_refused(tmp_path: Path, before: str, after: str):
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy/regime.toml").write_text(TOY.replace(before, after), encoding="utf-8")
    with pytest.raises(UserError):
        run("toy", tmp_path / "runs", tmp_path)
    assert not (tmp_path / "runs").exists()
