"""The flags are few, named like the configuration's fields, and frozen here on purpose."""

import dataclasses
import inspect
import re
from typing import Literal, get_type_hints

import pytest
import tyro

from cases import each
from normlab.base.io import no_flag
from normlab.cli.compare import CompareCommand, RequestFlags
from normlab.cli.main import COMMANDS, main
from normlab.cli.main import load as load_command
from normlab.cli.options import ConfigFlags, config_name, flags_of, load, typed_value
from normlab.cli.presets import CONFIGS
from normlab.cli.train import TrainCommand
from normlab.cli.translate import DecodeFlags
from normlab.lab.comparison import grid
from normlab.lab.config import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig
from normlab.lab.recipes.grammar import parts
from normlab.lab.runs import RunFolder
from normlab.lab.training.timing import Seconds

DATA = (
    "train_src train_tgt dev_src dev_tgt test_src test_tgt train_text dev_text test_text train_pairs "
    "dev_pairs test_pairs dataset source_lang target_lang builtin pretokenizer tokenizer vocab_size max_len "
    "block_len document_mask word_dropout whole_word_masking target_vocab_mask"
)
MODEL = (
    "dim ffn_dim heads kv_heads qk_norm_len max_positions encoder_layers decoder_layers dropout base_dim "
    "base_layers head_dim rope_theta sliding_window layer_pattern logit_cap residual_warmup_steps"
)
OPTIM = (
    "warmup_steps decay_step decay_factor decay_patience decay_share final_lr_factor stop_lr weight_decay "
    "max_grad_norm roles label_smoothing z_loss betas eps weight_decay_on clip_by"
)
TRAIN = (
    "steps max_tokens grad_accum_steps precision validate_every_steps early_stopping_patience average_last "
    "ema_decay"
)
MACHINE = (
    "device threads num_workers shard compile checkpoint_every_steps probes probe_every_steps "
    "keep_checkpoints tensorboard"
)
SOURCE = "source module arguments recipe lr seed config out as_json runs force imports"
OWN = {
    "compare": "files asked config plan imports",
    "train": "recipe lr seed out config init_from force imports",
    "run translate": ("run_folder files weights step threads output n_best typed prefix runs imports"),
    "run sample": "run_folder text tokens samples temperature top_k top_p seed window weights runs imports",
    "run score": "hypotheses references tokenised target_lang against",
    "run list": "runs",
    "run report": "of page runs",
    "diagnose": f"{SOURCE} blocks branches tokens preset checkpoints step optimizer flight fail_on",
    "check": (
        f"{SOURCE} budget declared allow baseline checkpoints step optimizer tokens junit sarif "
        "trust_remote_code shrink no_shrink ranks trace"
    ),
    "judge": (
        "source metric take higher_is_better baseline candidate margin by seed_column name budget max_seeds"
        " first_seed patient jobs on depends folder ledger fresh_seeds out as_json"
    ),
    "explain": "properties imports as_json",
    "skill": "",
    "trial": f"{SOURCE} budget rates change folder",
    "transfer": f"{SOURCE} widths depths seeds rates decays target factor budget folder",
    "watch": "source module arguments out every_steps probes",
    "recipes": "names axis config force imports",
    "papers list": "names as_json scale runs paper imports",
    "papers show": "names as_json scale runs paper imports",
    "run export": "run_folder out to weights runs imports",
    "run fold": "run_folder out weights max_positions runs imports",
    "papers reproduce": "names runs data jobs on scale device budget without again paper imports",
}
"""A flag is a promise: think before adding one. A configuration or a recipe may be the better place."""


REQUEST = "recipes lrs seeds first_seed sweep_seed title jobs on out margin exchanges force"
DECODE = "beam length_penalty length_penalty_formula sample temperature top_k top_p sample_seed min_length"


def names(kind):
    return " ".join(f.name for f in dataclasses.fields(kind))


def test_the_set_of_flags_is_frozen():
    sections = {name: set(vars(section)) for name, section in vars(ConfigFlags.of(Config())).items()}
    frozen = {"data": DATA, "model": MODEL, "optim": OPTIM, "train": TRAIN, "machine": MACHINE}
    assert sections == {name: set(words.split()) for name, words in frozen.items()}
    own = {
        name: set(names(kind).split()) - {"flags"}
        for name, kind in zip(COMMANDS, map(load_command, COMMANDS), strict=True)
    }
    assert own == {name: set(words.split()) for name, words in OWN.items()}
    assert set(names(RequestFlags).split()) == set(REQUEST.split())
    assert set(names(DecodeFlags).split()) == set(DECODE.split())


def parse(kind, *args):
    return tyro.cli(kind, args=args, default=kind.defaults(args))


@each("name", CONFIGS)
def test_flags_left_alone_change_nothing(name):
    config = CONFIGS[name]()
    assert ConfigFlags.of(config).applied_to(config) == config


def test_what_is_typed_replaces_the_configuration(tmp_path):
    text = ["--train-src", "a.de", "--train-tgt", "a.en", "--dev-src", "b.de", "--dev-tgt", "b.en"]
    command = parse(
        CompareCommand,
        *text,
        *["--recipes", "post", "pre+scalenorm", "--lrs", "5e-4", "2e-3", "--seeds", "3", "--jobs", "4"],
        *["--dim", "128", "--warmup-steps", "50", "--steps", "70", "--precision", "fp32", "--threads", "2"],
        *["--out", str(tmp_path), "--force"],
    )
    request = command.request("normlab compare …")
    assert (request.recipes, request.lrs) == (("post", "pre+scalenorm"), (5e-4, 2e-3))
    assert (request.seeds, request.jobs, request.out, request.force) == (3, 4, tmp_path, True)
    assert request.command == "normlab compare …"
    base = CONFIGS["text"]()
    expected = dataclasses.replace(
        base,
        data=dataclasses.replace(
            base.data, train_src="a.de", train_tgt="a.en", dev_src="b.de", dev_tgt="b.en"
        ),
        model=dataclasses.replace(base.model, dim=128),
        optim=dataclasses.replace(base.optim, warmup_steps=50),
        train=dataclasses.replace(base.train, steps=70, precision="fp32"),
        machine=dataclasses.replace(base.machine, threads=2),
    )
    assert request.base == expected


@each(
    ("args", "name"),
    [
        ([], "demo"),
        (["--train-src", "a.de"], "text"),
        (["--train_src=a.de"], "text"),
        (["--train-text", "a.txt"], "language_model"),
        (["--train-pairs", "a.tsv#1,2,3"], "classification"),
        (["--train-src", "a.de", "--config", "multi30k"], "multi30k"),
        (["--config=runs/x/config.json"], "runs/x/config.json"),
    ],
)
def test_which_configuration_gives_the_defaults(args, name):
    assert config_name(args) == name


def test_the_last_of_equal_flags_counts():
    assert typed_value(["--config", "demo", "--config=text"], "--config") == "text"


def test_a_run_is_repeated_from_its_file_exactly(tmp_path):
    config = Config(
        recipe="pre+rmsnorm+smallinit",
        model=ModelConfig(
            encoder_placement="pre", decoder_placement="pre", norm="rmsnorm", scheme="smallinit"
        ),
        data=DataConfig(digest="abc"),
        optim=OptimConfig(warmup_steps=7, lr=3e-4),
        train=TrainConfig(precision="bf16"),
    )
    file = RunFolder.create(tmp_path / "id", config).path / "config.json"
    assert load(str(file)) == config
    assert parse(TrainCommand, "--config", str(file)).resolved() == config
    longer = parse(TrainCommand, "--config", str(file), "--steps", "5").resolved()
    assert longer == dataclasses.replace(config, train=dataclasses.replace(config.train, steps=5))


def test_other_text_loses_the_digest_of_the_old_text():
    config = Config(data=DataConfig(digest="abc"))
    flags = ConfigFlags.of(config)
    other = dataclasses.replace(flags, data=dataclasses.replace(flags.data, train_src="new.de"))
    smaller = dataclasses.replace(flags, data=dataclasses.replace(flags.data, vocab_size=99))
    assert other.applied_to(config).data.digest == ""
    assert smaller.applied_to(config).data.digest == "abc"


def test_a_recipe_and_a_seed_at_the_prompt_are_resolved():
    config = parse(
        TrainCommand, "--recipe", "enc:pre/dec:post+scalenorm", "--seed", "5", "--precision", "fp32"
    ).resolved()
    model, seeds = config.model, config.seeds
    assert (model.encoder_placement, model.decoder_placement, model.norm) == ("pre", "post", "scalenorm")
    assert (seeds.init, seeds.data, seeds.dropout) == (5, 5, 5)
    assert config.optim.warmup_steps == 0


def test_a_forced_run_is_marked_and_its_repetition_too(tmp_path):
    with pytest.raises(ValueError, match="--force"):
        parse(TrainCommand, "--recipe", "deepnorm+smallinit").resolved()
    config = parse(
        TrainCommand, "--recipe", "deepnorm+smallinit", "--force", "--precision", "fp32"
    ).resolved()
    assert config.forced.startswith("DeepNorm's beta is a gain on Xavier")
    file = RunFolder.create(tmp_path / "id", config).path / "config.json"
    assert parse(TrainCommand, "--config", str(file)).resolved() == config
    assert parse(TrainCommand, "--config", str(file), "--recipe", "post").resolved().forced == ""


def test_every_size_and_step_that_a_recipe_needs_can_be_typed():
    typed = ["--kv-heads", "2", "--decay-step", "200", "--weight-decay", "0.1", "--warmup-steps", "20"]
    config = parse(TrainCommand, *typed, "--recipe", "pre+rope+adamw+step_decay").resolved()
    assert (config.model.kv_heads, config.model.position_encoding) == (2, "rope")
    assert (config.optim.decay_step, config.optim.weight_decay) == (200, 0.1)


@each(
    ("recipe", "flag", "owners"),
    [
        ("post", "--logit-cap 30", "softcap"),
        ("pre+softcap", "--logit-cap 30", ""),
        ("pre+mup", "--base-layers 2", "completep, depth_mup"),
        ("pre+depth_mup", "--base-layers 2", ""),
        ("enc:pre/dec:prores", "--residual-warmup-steps 50", ""),
        ("pre+learned", "--rope-theta 5e5", "rope"),
        ("post+normed", "--qk-norm-len 20", "qknorm"),
        ("post", "--warmup-steps 50", "warmup"),
        ("post+warmup", "--warmup-steps 50", ""),
        ("post", "--warmup-steps 0", ""),
        ("post+cosine", "--decay-step 50", "step_decay, step_decay_inverse_sqrt"),
        ("post+wsd", "--decay-share 0.2 --final-lr-factor 0.1", ""),
        ("post+val_decay", "--decay-factor 0.5 --decay-patience 2", ""),
        ("post+sgd", "--eps 1e-8", "adam, adamw, radam, radam_sgd, muon, muon_original"),
        ("post+muon", "--eps 1e-8", ""),
    ],
)
def test_a_flag_that_no_part_of_the_recipe_reads_is_named(capsys, recipe, flag, owners):
    parse(TrainCommand, "--recipe", recipe, *flag.split()).resolved()
    note = f"{flag.split()[0]} changes nothing in {recipe}; it belongs to {owners}\n"
    assert capsys.readouterr().err == (note if owners else "")


@pytest.mark.slow
def test_a_comparison_names_what_none_of_its_recipes_reads(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(grid, "measure_side_by_side", lambda *asked: Seconds(1.0, 1.0, 100.0))
    asked = ["--out", str(tmp_path), "--plan", "--lrs", "1e-3", "--logit-cap", "30"]
    assert main(["compare", "--recipes", "post", "like:gpt2", *asked]) == 0
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("like:gpt2 was published for the task language_model, but the task is translat")
    assert said[1] == "--logit-cap changes nothing in post, like:gpt2; it belongs to softcap"
    assert main(["compare", "--recipes", "post", "pre+softcap", *asked]) == 0
    assert "changes nothing" not in capsys.readouterr().err


def test_parts_name_only_fields_that_can_be_typed():
    named = {option for part in parts() for option in getattr(part.source, "options", ())}
    assert named <= {*MODEL.split(), *OPTIM.split()}


def test_a_run_with_somebody_elses_placement_says_how_to_import_it(tmp_path):
    model = ModelConfig(encoder_placement="mine", decoder_placement="mine")
    file = RunFolder.create(tmp_path / "id", Config(model=model)).path / "config.json"
    with pytest.raises(ValueError, match=r"'mine'.* --import my_package\.my_module$"):
        parse(TrainCommand, "--config", str(file)).resolved()


def test_automatic_precision_is_resolved_before_anything_is_trained():
    assert parse(TrainCommand).flags.train.precision == "auto"
    assert parse(TrainCommand).resolved().train.precision in ("fp32", "bf16")


def test_every_flag_has_a_help_text():
    flags = ConfigFlags.of(Config())
    for section in vars(flags).values():
        hints = get_type_hints(type(section), include_extras=True)
        assert [name for name, hint in hints.items() if not hint.__metadata__[0].help] == []


@dataclasses.dataclass(frozen=True)
class Section:
    """A section of a configuration."""

    shown: Literal["", "much"] = ""
    """How much is
    ``shown``.
    """
    hidden: int = no_flag(2)
    """A field that the command line does not offer."""


def test_a_new_option_is_one_field(capsys):
    kind = flags_of(Section)
    assert vars(tyro.cli(kind, args=["--shown", "much"], default=kind(""))) == {"shown": "much"}
    with pytest.raises(SystemExit):
        tyro.cli(kind, args=["--help"], default=kind(""))
    said = " ".join(capsys.readouterr().out.split())
    assert inspect.getdoc(Section) in said
    assert re.search(r"--shown \{,much\} [\w │]+\. \(default: ''\)", said)
    assert "hidden" not in said
