import copy
import dataclasses
import math
from dataclasses import dataclass, field, replace
from typing import get_type_hints

import pytest

from cases import each
from normlab.base.io import from_json, since, to_json
from normlab.errors import UserError
from normlab.lab import config as module
from normlab.lab.config import (
    Config,
    DataConfig,
    DecodeConfig,
    MachineConfig,
    ModelConfig,
    OptimConfig,
    SeedConfig,
    TrainConfig,
    machine,
    numbers,
    run_id,
)

STAYS_OUT = {
    "recipe",
    "forced",
    *(f"data.{side}" for side in ("train_src", "train_tgt", "dev_src", "dev_tgt", "test_src", "test_tgt")),
    *(f"data.{pairs}" for pairs in ("train_pairs", "dev_pairs", "test_pairs")),
    *("data.train_text", "data.dev_text", "data.test_text"),
    *("data.dataset", "data.builtin", "data.builtin_pairs", "data.builtin_seed"),
    "data.tokenizer",  # its content is in the digest
    *("machine.device", "machine.threads", "machine.log_every_steps", "machine.checkpoint_every_steps"),
    *("machine.probes", "machine.probe_every_steps"),
    *("machine.num_workers", "machine.shard", "machine.compile"),
    *("machine.keep_checkpoints", "machine.tensorboard"),
    "train.init_from",  # train.init_digest stands for it
}


def leaves(config, prefix=""):
    """Dotted names of all fields that are not dataclasses themselves."""
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{prefix}{f.name}.")
        else:
            yield f"{prefix}{f.name}"


def changed(config, name):
    """The configuration with another value of the same type in one field, allowed today or not."""
    head, _, rest = name.partition(".")
    value = getattr(config, head)
    other = (
        changed(value, rest)
        if rest
        else {
            bool: lambda: not value,
            int: lambda: value + 1,
            float: lambda: value + 0.125,
            str: lambda: value + "x",
            tuple: lambda: (0.5, *value[1:]),
        }[type(value)]()
    )
    new = copy.copy(config)
    object.__setattr__(new, head, other)
    return new


@each("name", sorted(leaves(Config())))
def test_what_changes_numbers_changes_the_id_and_nothing_else_does(name):
    assert (run_id(changed(Config(), name)) == run_id(Config())) == (name in STAYS_OUT)


def test_every_change_gives_an_id_of_its_own():
    names = set(leaves(Config())) - STAYS_OUT
    assert len({run_id(changed(Config(), name)) for name in names}) == len(names)


def test_a_revised_part_changes_the_ids_of_the_runs_that_have_it(monkeypatch):
    with_it, without = Config(optim=OptimConfig(optimiser="radam")), Config()
    before = run_id(with_it), run_id(without)
    monkeypatch.setitem(module.REVISED, "radam", module.REVISED["radam"] + 1)
    assert run_id(with_it) != before[0]
    assert run_id(without) == before[1]


def test_ids_of_finished_runs_stay():
    """These two are on people's disks. A changed default needs ``since``, a changed computation SEMANTICS."""
    assert run_id(Config(optim=OptimConfig(schedule="inverse_sqrt"))) == "0376b9543702"
    other = Config(
        model=ModelConfig(encoder_placement="pre", decoder_placement="pre", dropout=0.2),
        data=DataConfig(digest="d" * 64, vocab_size=5000),
        optim=OptimConfig(lr=2e-3, schedule="linear", warmup_steps=500, betas=(0.9, 0.999)),
        train=TrainConfig(precision="bf16"),
        seeds=SeedConfig(3, 3, 3),
    )
    assert run_id(other) == "f6560b7f9cf7"


def test_the_id_is_twelve_hex_digits_and_depends_on_the_semantics(monkeypatch):
    before = run_id(Config())
    assert len(before) == 12
    int(before, 16)
    monkeypatch.setattr(module, "SEMANTICS", module.SEMANTICS + 1)
    assert run_id(Config()) != before


def test_only_what_differs_from_the_introduction_counts():
    @dataclass(frozen=True)
    class Before:
        width: int = 4

    @dataclass(frozen=True)
    class After:
        width: int = since(8, introduced=4)
        depth: int = 2
        folder: str = machine("here")

    assert numbers(Before()) == {}
    assert numbers(After(width=4)) == {}, "a run made with the old default keeps its id"
    assert numbers(After()) == {"width": 8}, "the new default is told from the old one"
    assert numbers(After(width=4, folder="there")) == numbers(Before())
    assert numbers(After(width=4, depth=3)) == {"depth": 3}


def test_nested_parts_are_named_and_left_out_when_they_say_nothing():
    config = Config(model=ModelConfig(heads=2), machine=MachineConfig(threads=3))
    assert numbers(replace(config, optim=OptimConfig(schedule="inverse_sqrt"))) == {"model": {"heads": 2}}


def test_a_field_of_a_part_counts_from_its_own_default():
    @dataclass(frozen=True)
    class Outer:
        inner: ModelConfig = field(default=ModelConfig(heads=2))

    assert numbers(Outer()) == {"inner": {"heads": 2}}


def test_a_whole_number_where_a_fraction_is_meant_is_the_same_run():
    written = Config(optim=OptimConfig(max_grad_norm=1))
    read = from_json(Config, to_json(written))
    assert run_id(written) == run_id(read) == run_id(Config(optim=OptimConfig(max_grad_norm=1.0)))


def test_configurations_cannot_be_changed_and_can_be_compared():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().recipe = "pre"  # ty: ignore
    assert Config() == Config()
    assert len({Config(), Config(recipe="pre"), Config()}) == 2


SECTIONS = [ModelConfig, DataConfig, OptimConfig, TrainConfig, DecodeConfig, MachineConfig]
NUMBERS = [
    (section, name)
    for section in SECTIONS
    for name, kind in get_type_hints(section).items()
    if kind in (int, float) and name != "builtin_seed"
]


@each(("section", "name"), NUMBERS, ids=[f"{s.__name__}.{name}" for s, name in NUMBERS])
def test_every_number_has_a_range(section, name):
    for value in (-1, math.nan, "4"):
        with pytest.raises(UserError, match=rf"^{name} must "):
            section(**{name: value})


@each(
    ("section", "given", "sentence"),
    [
        (
            TrainConfig,
            {"precision": "bf61"},
            "precision must be one of 'auto', 'fp32', 'bf16' or 'fp16' (did you mean 'bf16'?), got 'bf61'",
        ),
        (TrainConfig, {"steps": 1.5}, "steps must be a whole number, got 1.5"),
        (TrainConfig, {"steps": 2**63}, f"steps must be below {2**63:,}, got {2**63}"),
        (ModelConfig, {"heads": 0}, "heads must be at least 1, got 0"),
        (ModelConfig, {"dropout": 1.0}, "dropout must be below 1, got 1.0"),
        (DataConfig, {"vocab_size": 4}, "vocab_size must be at least 5, got 4"),
        (OptimConfig, {"lr": math.inf}, "lr must be finite, got inf"),
        (OptimConfig, {"betas": (0.9, 1.0)}, "betas[1] must be below 1, got 1.0"),
        (OptimConfig, {"betas": (0.9,)}, "betas[1] must be a longer list, got (0.9,)"),
        (
            OptimConfig,
            {"lr": 1e-3, "stop_lr": 1e-3},
            "stop_lr must be below lr, 0.001, or no run would begin; got 0.001",
        ),
        (DecodeConfig, {"max_len_ratio": 1e300}, "max_len_ratio must be below 100, got 1e+300"),
        (DecodeConfig, {"temperature": 1e-320}, "temperature must be at least 1e-100, got 1e-320"),
        (SeedConfig, {"init": -1}, "the seed init must be at least 0 and below 2**63, got -1"),
    ],
    ids=str,
)
def test_what_cannot_be_trained_is_refused_in_a_sentence(section, given, sentence):
    with pytest.raises(UserError, match="got") as refusal:
        section(**given)
    assert str(refusal.value) == sentence


def test_the_digest_of_initial_weights_needs_their_run():
    with pytest.raises(ValueError, match=r"init_digest .*'ab'.*init_from"):
        TrainConfig(init_digest="ab")
    assert TrainConfig(init_from="runs/abc", init_digest="ab").init_digest == "ab"


def test_an_endless_clip_is_none():
    assert OptimConfig(max_grad_norm=math.inf).max_grad_norm == math.inf


def test_a_precision_that_is_still_open_gives_no_id():
    with pytest.raises(ValueError, match="resolved_precision"):
        run_id(Config(train=TrainConfig(precision="auto")))
