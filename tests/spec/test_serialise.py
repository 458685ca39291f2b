import json
import math
from dataclasses import dataclass, field

import pytest

from normlab.spec.comparison import Comparison, Difference, Interval, RecipeResult, Sample, Trial
from normlab.spec.config import Config, DataConfig, ModelConfig, OptimConfig, SeedConfig, TrainConfig
from normlab.spec.metric import NLL, Metric
from normlab.spec.outcome import Outcome
from normlab.spec.serialise import from_json, from_plain, to_json, to_plain

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
                Trial(1e-3, "r1", {"f1": 0.2}, "trained"),
                Trial(2e-3, "r2", {"nll": math.inf}, "diverged"),
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
    differences=(Difference("pre", "post", 2, "better", "so much", Interval(2.0, 0.5, 3.5), p=0.004),),
    sentences=("pre reaches 0.200 F1 with one seed",),
    samples=(Sample("ein", "a", {"pre": "a", "post": ""}),),
    failed=("r3: out of memory",),
)


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("value", [Config(), CONFIG, COMPARISON], ids=["default", "config", "comparison"])
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


@pytest.mark.parametrize("value", [math.inf, -math.inf, 1e308, 5e-324, 0.1])
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


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (Config, '{"optim": {"warmup_step": 3}}', "key 'optim.warmup_step', did you mean 'warmup_steps'"),
        (Config, '{"modle": {}}', "unknown key 'modle', did you mean 'model'"),
        (Outcome, '{"zzz": 1}', r"unknown key 'zzz' \(allowed: state, step, evidence\)"),
        (Config, '{"train": {"steps": 1.5}}', "train.steps must be a whole number, got 1.5"),
        (Config, '{"train": {"steps": true}}', "train.steps must be a whole number, got true"),
        (Config, '{"train": {"steps": "12"}}', 'train.steps must be a whole number, got "12"'),
        (Config, '{"train": {"stop_early": 1}}', "train.stop_early must be true or false, got 1"),
        (Config, '{"optim": {"lr": "fast"}}', 'optim.lr must be a number, got "fast"'),
        (Config, '{"optim": {"lr": false}}', "optim.lr must be a number, got false"),
        (Config, '{"optim": {"lr": null}}', "optim.lr must be a number, got null"),
        (Config, '{"optim": {"betas": [0.9]}}', r"optim.betas must be a list of 2, got \[0.9\]"),
        (Config, '{"optim": {"betas": 0.9}}', "optim.betas must be a list, got 0.9"),
        (Config, '{"optim": {"betas": [0.9, "x"]}}', r'optim.betas\[1\] must be a number, got "x"'),
        (Config, '{"model": 3}', "model must be an object, the fields of ModelConfig, got 3"),
        (Config, '{"train": {"precision": "fp8"}}', "^train: precision is one of auto, fp32, bf16, fp16"),
        (OptimConfig, '{"lr": 0}', "^lr is above 0, got 0.0"),
        (Config, '{"optim": {"betas": [0.9, 1]}}', "^optim: betas is at least 0 and below 1, got 1.0"),
        (Config, "[]", r"the whole must be an object, the fields of Config, got \[\]"),
        (Config, '{"recipe": 3}', "recipe must be text, got 3"),
        (Outcome, '{"state": "stuck"}', "Outcome lacks step, evidence"),
        (Sum, '{"value": 1, "table": {"a": {"low": 0}}}', "table.a lacks value"),
        (Sum, '{"value": 1, "table": []}', r"table must be an object, got \[\]"),
        (Config, '{"recipe": }', "this is not JSON: Expecting value in line 1, column 12"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(kind, text, message):
    with pytest.raises(ValueError, match=message):
        from_json(kind, text)


def test_long_values_are_cut_in_errors():
    with pytest.raises(ValueError, match=r"got .{57}\.\.\.$"):
        from_json(Config, json.dumps({"recipe": list(range(100))}))


def test_a_type_without_a_json_form_is_refused_by_name():
    @dataclass(frozen=True)
    class Wrong:
        path: bytes = b""

    with pytest.raises(TypeError, match=r"path: a field of type .*bytes.* has no JSON form"):
        from_plain(Wrong, {"path": "x"})


def test_plain_form_holds_only_what_json_can_say():
    assert to_plain({"a": (1, (2.0, math.nan)), "b": None}) == {"a": [1, [2.0, "nan"]], "b": None}
