"""Arguments of public functions are checked against their annotations, and wrong types are named."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn

import normlab
from normlab import diagnosis
from normlab.configs import demo
from normlab.errors import UserError
from normlab.report.compare import compare_page
from normlab.report.diagnosis import diagnosis_page, write_diagnosis
from normlab.report.flight import write_probes_page
from normlab.report.papers import write_papers_page
from normlab.report.reproduction import write_reproduction_page
from normlab.report.run import run_page
from normlab.spec.arguments import validate_arguments
from normlab.spec.config import DataConfig, DecodeConfig, MachineConfig, OptimConfig, SeedConfig
from normlab.spec.model import ModelConfig
from normlab.store.folder import find_run
from normlab.training.translate import n_best
from normlab.watching.watch import Watch

MODEL, BATCH = nn.Linear(2, 2), torch.zeros(1, 2)
WATCH: dict[str, Any] = {"out": "x.jsonl", "every_steps": 5, "emit": None, "structure": None}

WRONG: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], tuple[str, ...]]] = [
    (normlab.CompareRequest, (), {"recipes": "post"}, ("recipes", "list", "'post'", "['post']")),
    (normlab.CompareRequest, (), {"recipes": ("post", 5)}, ("recipes", "texts", "5")),
    (normlab.CompareRequest, (), {"lrs": 1e-3}, ("lrs", "list of numbers", "[0.001]")),
    (normlab.CompareRequest, (), {"lrs": ("1e-3",)}, ("lrs", "'1e-3'")),
    (normlab.CompareRequest, (), {"seeds": "3"}, ("seeds", "whole number", "'3'")),
    (normlab.CompareRequest, (), {"seeds": True}, ("seeds", "True")),
    (normlab.CompareRequest, (), {"first_seed": 1.5}, ("first_seed", "1.5")),
    (normlab.CompareRequest, (), {"base": "demo"}, ("base", "Config", "'demo'")),
    (normlab.CompareRequest, (), {"base": demo}, ("base", "Config", "function")),
    (normlab.CompareRequest, (), {"out": None}, ("out", "path", "None")),
    (normlab.CompareRequest, (), {"force": "yes"}, ("force", "True or False")),
    (normlab.compare, ("post",), {}, ("request", "CompareRequest", "'post'")),
    (normlab.compare, ({"recipes": ["post"]},), {}, ("request", "dict")),
    (normlab.compare, (normlab.CompareRequest(),), {"watch": 3}, ("watch", "function", "3")),
    (normlab.plan, (demo(),), {}, ("request", "CompareRequest", "Config")),
    (normlab.train, ("post", "runs"), {}, ("config", "Config", "'post'")),
    (normlab.train, (demo(), None), {}, ("root", "path", "None")),
    (normlab.train, (demo(), "runs"), {"callbacks": [3]}, ("callbacks", "Callback", "3")),
    (normlab.Config, (), {"model": {"dim": 8}}, ("model", "ModelConfig", "dict")),
    (normlab.Config, (), {"task": None}, ("task", "text", "None")),
    (ModelConfig, (), {"norm": 3}, ("norm", "text", "3")),
    (OptimConfig, (), {"betas": ("a", "b")}, ("betas", "numbers", "'a'")),
    (OptimConfig, (), {"schedule": None}, ("schedule", "None")),
    (DataConfig, (), {"train_src": 3}, ("train_src", "3")),
    (DecodeConfig, (), {"sample": "no"}, ("sample", "True or False", "'no'")),
    (SeedConfig, ("a",), {}, ("init", "whole number", "'a'")),
    (MachineConfig, (), {"device": 0}, ("device", "text", "0")),
    (normlab.resolve, (["post"], demo()), {}, ("name", "text", "list")),
    (normlab.resolve, ("post", demo), {}, ("base", "Config", "function")),
    (normlab.score, ("a b", "a b"), {}, ("hypotheses", "['a b']")),
    (normlab.score, (["a"], [1]), {}, ("references", "texts", "1")),
    (normlab.translate, ("run", "eins zwei"), {}, ("lines", "list of texts", "['eins zwei']")),
    (normlab.translate, ("run", ["a"]), {"decode": {"beam": 3}}, ("decode", "DecodeConfig", "dict")),
    (normlab.translate, ("run", ["a"]), {"prefixes": "a"}, ("prefixes", "['a']")),
    (normlab.translate, (None, ["a"]), {}, ("run", "path", "None")),
    (n_best, ("run", ["a"], "3"), {}, ("count", "whole number", "'3'")),
    (normlab.load_plugins, (["os"],), {}, ("names", "text", "list")),
    (normlab.RunFolder, (None,), {}, ("path", "None")),
    (normlab.Runs, (3,), {}, ("root", "path", "3")),
    (normlab.Runs("runs").find, (3,), {}, ("prefix", "text", "3")),
    (find_run, (3, "runs"), {}, ("name", "text", "3")),
    (normlab.write_compare_page, ("c.json", "runs", "c.html"), {}, ("comparison", "Comparison", "'c.json'")),
    (compare_page, (None, "runs"), {}, ("comparison", "None")),
    (run_page, (3,), {}, ("folder", "path", "3")),
    (write_diagnosis, ("d.json", "."), {}, ("diagnosis", "dict", "'d.json'")),
    (diagnosis_page, ({"model": "x"},), {}, ("findings", "to_plain")),
    (write_probes_page, (3, "x.html"), {}, ("file", "path", "3")),
    (write_papers_page, ("x", "."), {}, ("standings", "list", "'x'")),
    (write_reproduction_page, ("x", "."), {}, ("standing", "'x'")),
    (normlab.diagnose, ("model", BATCH), {}, ("model", "Module", "'model'")),
    (normlab.diagnose, (nn.Linear, BATCH), {}, ("model", "Module", "Linear")),
    (normlab.diagnose, (MODEL, BATCH), {"loss": 3}, ("loss", "function", "3")),
    (normlab.diagnose, (MODEL, BATCH), {"optimiser": "adam"}, ("optimiser", "'adam'")),
    (normlab.diagnose, (MODEL, BATCH), {"lr": -1.0}, ("lr", "above 0", "-1.0")),
    (normlab.diagnose, (MODEL, BATCH), {"preset": ["cheap"]}, ("preset", "text", "list")),
    (normlab.diagnose, (MODEL, BATCH), {"structure": "x"}, ("structure", "Structure", "'x'")),
    (normlab.diagnose, (MODEL, BATCH), {"warmup_steps": "x"}, ("warmup_steps", "whole number", "'x'")),
    (diagnosis.read_structure, (MODEL, BATCH), {"branches": "x"}, ("branches", "['x']")),
    (diagnosis.observe, (MODEL, "cheap", print), {}, ("probes", "Probes", "'cheap'")),
    (diagnosis.observe, (MODEL, [], 3), {}, ("emit", "function", "3")),
    (diagnosis.Probe, (3,), {}, ("modules", "text", "3")),
    (diagnosis.measure, (3, BATCH), {}, ("statistic", "3")),
    (diagnosis.register, ("x",), {}, ("study", "Study", "'x'")),
    (diagnosis.find, ({"a": 3},), {}, ("tables", "dict", "3")),
    (diagnosis.Table, ("t", [{"a": 1}, {"b": 1}]), {}, ("'t'", "'a'", "'b'")),
    (diagnosis.Table("t", ({"a": 1},)).column, ("b",), {}, ("'b'", "'a'")),
    (diagnosis.Finding, ("x", "bad", "s", "t", {}), {}, ("severity", "warning", "'bad'")),
    (diagnosis.Study, ("x", 3, "cheap"), {}, ("measure", "function", "3")),
    (Watch, (3,), WATCH, ("probes", "Probes", "3")),
    (Watch, ("cheap",), {**WATCH, "every_steps": "5"}, ("every_steps", "whole number", "'5'")),
    (Watch, ("cheap",), {**WATCH, "emit": "x"}, ("emit", "function", "'x'")),
]


def test_only_what_can_be_spelt_is_shown_as_something_to_type():
    with pytest.raises(UserError) as refusal:
        normlab.diagnose(MODEL, BATCH, batches=(batch for batch in [BATCH]))
    assert "[a value" not in str(refusal.value)
    with pytest.raises(UserError, match="UTF-8 cannot hold it"):
        normlab.score(["a"], ["\ud800"])
    assert DataConfig(train_src="é").train_src == "é"


@pytest.mark.parametrize(("call", "given", "named", "facts"), WRONG)
def test_wrong_arguments_are_refused_by_name(
    call: Callable[..., Any], given: tuple[Any, ...], named: dict[str, Any], facts: tuple[str, ...]
):
    with pytest.raises(UserError) as refused:
        call(*given, **named)
    assert [fact for fact in facts if fact not in str(refused.value)] == []


@validate_arguments
def everything(
    path: Path,
    numbers: Sequence[float] = (),
    *more: int,
    pair: tuple[int, str] = (1, "a"),
    table: Mapping[str, int] | None = None,
    lazy: Iterable[str] = (),
    word: Literal["a", "b"] = "a",
    anything: Any = None,
) -> tuple[Any, ...]:
    return path, numbers, more, pair, table, lazy, word, anything


def test_right_arguments_arrive_as_their_annotations_say():
    numbers, lazy = np.array([1.0, 2.0]), (word for word in "ab")
    found = everything(
        "folder", numbers, 3, np.int64(4), pair=[2, "b"], table={"a": 1}, lazy=lazy, anything=all
    )
    assert found == (Path("folder"), numbers, (3, 4), (2, "b"), {"a": 1}, lazy, "a", all)
    assert list(lazy) == ["a", "b"]


def test_items_are_checked_inside_lists_and_dicts():
    for named in ({"table": {"a": "x"}}, {"lazy": ["x", 3]}, {"numbers": [1.0, None]}, {"table": "a"}):
        with pytest.raises(UserError, match=next(iter(named))):
            everything("folder", **named)
    with pytest.raises(UserError, match="more"):
        everything("folder", (), 1, "2")


def test_what_python_says_about_missing_arguments_stays():
    with pytest.raises(TypeError, match="path"):
        everything()
    with pytest.raises(TypeError, match="unknown"):
        everything("folder", unknown=3)


def test_a_dataclass_is_checked_and_stays_itself():
    @validate_arguments
    @dataclass(frozen=True)
    class Sizes:
        dims: tuple[int, ...]

    assert Sizes([1, 2]) == Sizes(dims=(1, 2))
    assert everything.__name__ == "everything"
    with pytest.raises(UserError, match=r"dims=\[8\]"):
        Sizes(8)  # type: ignore[arg-type]
