"""What enters is read strictly, and what is wrong is named with its place and what is allowed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, Unpack

import numpy as np
import pytest
import torch
from annotated_types import Gt
from torch import nn

import normlab
from cases import each
from normlab import diagnosis
from normlab.base.io import Count, from_json, from_plain, to_json, to_plain, validated
from normlab.base.metric import NLL, Metric, Outcome
from normlab.base.model_config import ModelConfig
from normlab.cli.presets import demo
from normlab.errors import UserError
from normlab.lab.comparison.result import (
    Comparison,
    Interval,
    RecipeDifference,
    RecipeResult,
    Sample,
    SweepRun,
)
from normlab.lab.config import (
    Config,
    DataConfig,
    DecodeConfig,
    MachineConfig,
    OptimConfig,
    SeedConfig,
    TrainConfig,
)
from normlab.lab.training.translate import n_best
from normlab.report.compare import write_compare_page
from normlab.report.diagnosis import write_diagnosis
from normlab.watching.watcher import Watch

MODEL, BATCH = nn.Linear(2, 2), torch.zeros(1, 2)
WATCH: dict[str, Any] = {"out": "x.jsonl", "every_steps": 5, "emit": None, "structure": None}

WRONG: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], tuple[str, ...]]] = [
    (
        OptimConfig,
        (),
        {"warmup_step": 2000},
        ("'warmup_step'", "did you mean 'warmup_steps'", "max_grad_norm"),
    ),
    (OptimConfig, (), {"max_gradnorm": 1}, ("'max_gradnorm'", "did you mean 'max_grad_norm'")),
    (OptimConfig, (), {"warmup_steps": -3}, ("warmup_steps", "at least 0", "-3")),
    (OptimConfig, (), {"max_grad_norm": math.nan}, ("max_grad_norm", "at least 0", "nan")),
    (normlab.diagnose, (MODEL, BATCH), {"warmup_step": 2000}, ("did you mean 'warmup_steps'", "batches")),
    (normlab.diagnose, (MODEL, BATCH), {"max_gradnorm": 1}, ("'max_gradnorm'", "branches")),
    (normlab.diagnose, (MODEL, BATCH), {"warmup_steps": -3}, ("warmup_steps", "at least 0", "-3")),
    (normlab.train, (demo(), "runs"), {"callback": []}, ("did you mean 'callbacks'",)),
    (normlab.compare, (normlab.CompareRequest(),), {"publsh": print}, ("did you mean 'publish'",)),
    (normlab.watch, (MODEL, None), {"every_step": 5}, ("did you mean 'every_steps'",)),
    (normlab.CompareRequest, (), {"recipe": ["post"]}, ("did you mean 'recipes'",)),
    (normlab.CompareRequest, (), {"recipes": "post"}, ("recipes", "list", "'post'", "['post']")),
    (normlab.CompareRequest, (), {"recipes": ("post", 5)}, ("recipes[1]", "text", "5")),
    (normlab.CompareRequest, (), {"lrs": 1e-3}, ("lrs", "list", "[0.001]")),
    (normlab.CompareRequest, (), {"lrs": ("1e-3",)}, ("lrs[0]", "number", "'1e-3'")),
    (normlab.CompareRequest, (), {"seeds": "3"}, ("seeds", "whole number", "'3'")),
    (normlab.CompareRequest, (), {"seeds": True}, ("seeds", "True")),
    (normlab.CompareRequest, (), {"first_seed": 1.5}, ("first_seed", "1.5")),
    (normlab.CompareRequest, (), {"base": "demo"}, ("base", "Config", "'demo'")),
    (normlab.CompareRequest, (), {"base": demo}, ("base", "Config", "function")),
    (normlab.CompareRequest, (), {"out": None}, ("out", "path", "None")),
    (normlab.CompareRequest, (), {"force": "yes"}, ("force", "True or False")),
    (normlab.compare, ("post",), {}, ("request", "CompareRequest", "'post'")),
    (normlab.compare, (normlab.CompareRequest(),), {"watch": 3}, ("watch", "function", "3")),
    (normlab.plan, (demo(),), {}, ("request", "CompareRequest", "Config")),
    (normlab.train, ("post", "runs"), {}, ("config", "Config", "'post'")),
    (normlab.train, (demo(), None), {}, ("root", "path", "None")),
    (normlab.train, (demo(), "runs"), {"callbacks": [3]}, ("callbacks[0]", "RunPart", "3")),
    (normlab.Config, (), {"model": {"dim": 8}}, ("model", "ModelConfig", "{'dim': 8}")),
    (normlab.Config, (), {"task": None}, ("task", "text", "None")),
    (ModelConfig, (), {"norm": 3}, ("norm", "text", "3")),
    (OptimConfig, (), {"betas": ("a", "b")}, ("betas[0]", "number", "'a'")),
    (DecodeConfig, (), {"sample": "no"}, ("sample", "True or False", "'no'")),
    (SeedConfig, ("a",), {}, ("init", "whole number", "'a'")),
    (MachineConfig, (), {"keep_checkpoints": "1,"}, ("keep_checkpoints", "log, all", "10,50", "'1,'")),
    (normlab.resolve, (["post"], demo()), {}, ("name", "text", "['post']")),
    (normlab.resolve, ("post", demo), {}, ("base", "Config", "function")),
    (normlab.score, ("a b", "a b"), {}, ("hypotheses", "list", "['a b']")),
    (normlab.score, (["a"], [1]), {}, ("references[0]", "text", "1")),
    (normlab.translate, ("run", "eins zwei"), {}, ("lines", "list", "['eins zwei']")),
    (normlab.translate, ("run", ["a"]), {"decode": {"beam": 3}}, ("decode", "DecodeConfig")),
    (normlab.translate, (None, ["a"]), {}, ("run", "path", "None")),
    (n_best, ("run", ["a"], "3"), {}, ("count", "whole number", "'3'")),
    (normlab.load_plugins, (["os"],), {}, ("names[0]", "text")),
    (write_compare_page, ("c.json", "runs", "c.html"), {}, ("comparison", "Comparison", "'c.json'")),
    (write_diagnosis, ("d.json", "."), {}, ("diagnosis", "object", "'d.json'")),
    (normlab.diagnose, ("model", BATCH), {}, ("model", "Module", "'model'")),
    (normlab.diagnose, (nn.Linear, BATCH), {}, ("model", "Module", "Linear")),
    (normlab.diagnose, (MODEL, BATCH), {"loss": 3}, ("loss", "function", "3")),
    (
        normlab.diagnose,
        (MODEL, BATCH),
        {"optimizer": "adam"},
        ("optimizer", "Optimizer", "function", "'adam'"),
    ),
    (normlab.diagnose, (MODEL, BATCH), {"lr": -1.0}, ("lr", "above 0", "-1.0")),
    (normlab.diagnose, (MODEL, BATCH), {"structure": "x"}, ("structure", "Structure", "'x'")),
    (diagnosis.read_structure, (MODEL, BATCH), {"branches": "x"}, ("branches", "['x']")),
    (Watch, (3,), WATCH, ("probes", "text", "list", "3")),
    (Watch, ("cheap",), {**WATCH, "emit": "x"}, ("emit", "function", "'x'")),
]


@each(("call", "given", "named", "facts"), WRONG)
def test_wrong_arguments_are_refused_by_name(
    call: Callable[..., Any], given: tuple[Any, ...], named: dict[str, Any], facts: tuple[str, ...]
):
    with pytest.raises(UserError) as refused:
        call(*given, **named)
    assert [fact for fact in facts if fact not in str(refused.value)] == []


class Options(TypedDict, total=False):
    steps: Count
    table: Mapping[str, int]


@validated
def everything(
    path: Path,
    numbers: Sequence[float] = (),
    *more: int,
    pair: tuple[int, str] = (1, "a"),
    rate: Annotated[float, Gt(0)] | None = None,
    word: Literal["a", "b"] = "a",
    anything: Any = None,
    **options: Unpack[Options],
) -> tuple[Any, ...]:
    """Every kind of argument."""
    return path, numbers, more, pair, rate, word, anything, options


def test_right_arguments_arrive_as_their_annotations_say():
    found = everything("folder", [1, 2.0], 3, 4, pair=[2, "b"], rate=1, anything=np.int64, steps=5)
    assert found == (Path("folder"), [1.0, 2.0], (3, 4), (2, "b"), 1.0, "a", np.int64, {"steps": 5})
    assert type(found[4]) is float
    assert everything(Path("folder"), np.array([1.0, 2.0]))[1] == [1.0, 2.0]
    assert everything(Path("folder"), range(3))[1] == [0.0, 1.0, 2.0]
    assert everything.__name__ == "everything"


@each(
    ("given", "facts"),
    [
        ({"table": {"a": "x"}}, "table"),
        ({"numbers": [1.0, None]}, "numbers[1]"),
        ({"rate": 0.0}, "above 0"),
        ({"rate": math.nan}, "above 0"),
        ({"steps": -1}, "at least 0"),
        ({"stepz": 1}, "did you mean 'steps'"),
        ({"word": "c"}, "'a' or 'b'"),
        ({"pair": (1,)}, "longer"),
        ({"pair": (1, "a", 2)}, "at most 2"),
    ],
)
def test_options_are_checked_inside(given: dict[str, Any], facts: str):
    with pytest.raises(UserError) as refused:
        everything("folder", **given)
    assert facts in str(refused.value)


def test_what_python_says_about_missing_arguments_stays():
    with pytest.raises(TypeError, match="path"):
        everything()


CONFIG = Config(
    recipe="enc:post/dec:pre+scalenorm",
    model=ModelConfig(dim=48, encoder_placement="post", decoder_placement="pre", dropout=0.25),
    data=DataConfig(train_src="Straße/ tränk.de", vocab_size=99, target_vocab_mask=True, digest="ab"),
    optim=OptimConfig(lr=1e-30, betas=(0.5, 0.75), max_grad_norm=math.inf),
    train=TrainConfig(steps=7, stop_early=False),
    seeds=SeedConfig(1, 2, 3),
)
COMPARISON = Comparison(
    title='Ünïcode and "quotes"\n',
    command="normlab compare",
    date="2026-11-21",
    machine="two cores",
    data={"Pairs": "20,000", "Größe": "4"},
    seeds=(1, 2),
    lrs=(1e-3, 2e-3),
    task="translation",
    metrics=(Metric("f1", "F1", digits=3, least=0.0, most=1.0), NLL),
    best_by="f1",
    signatures={"f1": "nrefs:1|case:mixed"},
    recipes=(
        RecipeResult(
            name="pre",
            resolves_to="pre; layernorm",
            trials=(
                SweepRun(1e-3, "r1", {"f1": 0.2}, "trained"),
                SweepRun(2e-3, "r2", {"nll": math.inf}, "diverged"),
            ),
            lr=1e-3,
            runs=("r1", "r3"),
            outcomes=("trained", "failed"),
            trains=Interval(1.0, 0.025, 1.0),
            scores={"f1": (0.2, None)},
            means={"f1": Interval(0.2)},
            train_seconds=61.0,
            total_seconds=183.0,
        ),
    ),
    margin=0.01,
    differences=(RecipeDifference("pre", "post", 2, "better", "so much", Interval(2.0, 0.5, 3.5), p=0.004),),
    sentences=("pre reaches 0.200 F1 with one seed",),
    samples=(Sample("ein", "a", {"pre": "a", "post": ""}),),
    failed=("r3: out of memory",),
)


@each("indent", [None, 2])
@each("value", [Config(), CONFIG, COMPARISON], ids=["default", "config", "comparison"])
def test_what_is_written_is_read_back_equal(value, indent):
    text = to_json(value, indent=indent)
    assert ("\n" in text) == (indent is not None), "one line is what the workers' protocol needs"
    assert from_json(type(value), text) == value


def test_tuples_come_back_as_tuples_and_text_stays_readable():
    read = from_json(Config, to_json(CONFIG))
    assert read.optim.betas == (0.5, 0.75)
    assert isinstance(read.optim.betas, tuple)
    assert "Straße/ tränk.de" in to_json(CONFIG)


@dataclass(frozen=True)
class Sum:
    value: float
    words: str = ""
    maybe: float | None = None
    table: dict[str, Interval] = field(default_factory=dict)


@each("value", [math.inf, -math.inf, 1e308, 5e-324, 0.1])
def test_every_number_survives(value):
    text = to_json(Sum(value, table={"a": Interval(value, value, 1.0)}))
    json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert from_json(Sum, text) == Sum(value, table={"a": Interval(value, value, 1.0)})


def test_not_a_number_survives_and_text_that_spells_it_stays_text():
    read = from_json(Sum, to_json(Sum(math.nan, words="nan")))
    assert math.isnan(read.value)
    assert read.words == "nan"


def test_absent_fields_take_their_defaults():
    assert from_json(Config, '{"optim": {"lr": 0.5}}') == Config(optim=OptimConfig(lr=0.5))
    assert from_json(Sum, '{"value": 1, "maybe": null}') == Sum(1.0)
    assert type(from_json(Sum, '{"value": 1}').value) is float


@each(
    ("kind", "text", "message"),
    [
        (Config, '{"optim": {"warmup_step": 3}}', "key 'optim.warmup_step', did you mean 'warmup_steps'"),
        (Config, '{"modle": {}}', "unknown key 'modle', did you mean 'model'"),
        (Outcome, '{"zzz": 1}', r"unknown key 'zzz' \(allowed: state, step, evidence\)"),
        (Config, '{"train": {"steps": 1.5}}', "train.steps must be a whole number, got 1.5"),
        (Config, '{"train": {"steps": true}}', "train.steps must be a whole number, got True"),
        (Config, '{"train": {"steps": "12"}}', "train.steps must be a whole number, got '12'"),
        (Config, '{"train": {"stop_early": 1}}', "train.stop_early must be True or False, got 1"),
        (Config, '{"optim": {"lr": "fast"}}', "optim.lr must be a number, got 'fast'"),
        (Config, '{"optim": {"lr": false}}', "optim.lr must be a number, got False"),
        (Config, '{"optim": {"lr": null}}', "optim.lr must be a number, got None"),
        (Config, '{"optim": {"betas": [0.9]}}', r"optim.betas lacks \[1\]"),
        (Config, '{"optim": {"betas": 0.9}}', "optim.betas must be a list, got 0.9"),
        (Config, '{"optim": {"betas": [0.9, "x"]}}', r"optim.betas\[1\] must be a number, got 'x'"),
        (Config, '{"model": 3}', "model must be an object, got 3"),
        (
            Config,
            '{"train": {"precision": "fp8"}}',
            "^train.precision must be one of 'auto', 'fp32', 'bf16' or 'fp16'",
        ),
        (OptimConfig, '{"lr": 0}', "^lr must be above 0, got 0"),
        (Config, '{"optim": {"betas": [0.9, 1]}}', r"^optim.betas\[1\] must be below 1, got 1"),
        (Config, "[]", r"the whole must be an object, got \[\]"),
        (Config, '{"recipe": 3}', "recipe must be text, got 3"),
        (Outcome, '{"state": "stuck"}', "Outcome lacks step; add what is missing"),
        (Sum, '{"value": 1, "table": {"a": {"low": 0}}}', "table.a lacks value"),
        (Sum, '{"value": 1, "table": []}', r"table must be an object, got \[\]"),
        (Config, '{"recipe": }', "not JSON: Expecting value in line 1, column 12"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(kind, text, message):
    with pytest.raises(ValueError, match=message):
        from_json(kind, text)


def test_long_values_are_cut_in_errors():
    with pytest.raises(ValueError, match=r"got .{57}\.\.\.$"):
        from_json(Config, json.dumps({"recipe": list(range(100))}))


@pytest.mark.parametrize("text", ["\0", "a\\\0", "\ud800"])
def test_text_that_no_path_can_hold_is_refused(text: str):
    with pytest.raises(UserError, match="surrogate"):
        from_plain(Config, {"recipe": text})
    assert from_plain(Config, {"recipe": "\\u0000"}).recipe == "\\u0000"


def test_plain_form_holds_only_what_json_can_say():
    assert to_plain({"a": (1, (2.0, math.nan)), "b": None}) == {"a": [1, [2.0, "nan"]], "b": None}
