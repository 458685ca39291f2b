"""The trainings, diagnoses, watched loops and identities that ``tools/same_numbers.py`` compares.

Fields are written in their newest names, ``section.field``; ``RENAMES`` in ``same_numbers.py`` has the older
ones. Models are small, and together they reach every place where numbers are made: each random draw, each
kind of placement, each optimizer and schedule, the averages of weights, the search and the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

Fields = dict[str, Any]


@dataclass(frozen=True)
class Training:
    """A run of 20 steps where no other number is given, its validations and its test."""

    recipe: str
    fields: Fields = field(default_factory=dict)
    init_from: str = ""
    """The name of the training whose weights this one starts from."""
    ranks: int = 1


@dataclass(frozen=True)
class DiagnosisOf:
    """A diagnosis of one of our models at its start, or of a foreign model where no recipe is given."""

    recipe: str = ""
    fields: Fields = field(default_factory=dict)
    model: str = ""
    """A name in ``same_numbers_foreign.MODELS``."""


@dataclass(frozen=True)
class Watched:
    """A plain loop under watch: its rows, its report, its losses and its weights at the end."""

    model: str
    """A name in ``same_numbers_foreign.MODELS``."""
    probes: str = "standard"
    every_steps: int = 4
    lrs: tuple[float, ...] = (1e-3,) * 10
    """The learning rate of each step."""


@dataclass(frozen=True)
class Identities:
    """The run ids of all presets and of every cell of the papers, and the effects of the findings."""

    scales: tuple[str, ...] = ("laptop", "gpu", "paper")


@dataclass(frozen=True)
class Starts:
    """The starting weights of several recipes, and logits and gradients of one fixed batch."""

    model: str
    """The class of the model."""
    recipes: tuple[str, ...]
    fields: Fields = field(default_factory=dict)


_BASE: Final[Fields] = {
    "model.dim": 32,
    "model.ffn_dim": 64,
    "model.encoder_layers": 2,
    "model.decoder_layers": 2,
    "data.vocab_size": 120,
    "optim.lr": 5e-3,
    "optim.warmup_steps": 4,
    "train.steps": 20,
    "train.max_tokens": 512,
    "train.validate_every_steps": 10,
    "train.dev_decode_sentences": 8,
    "train.stop_early": False,
    "decode.beam": 2,
    "machine.threads": 1,
    "machine.log_every_steps": 1,
    "machine.checkpoint_every_steps": 100,
    "machine.probes": "",
}
_PLAIN_TEXT: Final[Fields] = {
    "task": "language_model",
    "model.encoder_layers": 0,
    "data.block_len": 24,
    "optim.label_smoothing": 0.0,
    "train.best_by": "nll",
}


_BERT: Final[Fields] = {
    "model.decoder_layers": 0,
    "model.embedding_norm": True,
    "model.max_positions": 32,
    "data.block_len": 32,
    "optim.label_smoothing": 0.0,
    "optim.weight_decay": 0.01,
    "optim.weight_decay_on": "matrices",
    "train.best_by": "nll",
}

_PLACEMENTS: Final = (
    "post pre sandwich periln olmo2 subln normformer mixln lnscale keel b2t residual admin admin_code "
    "admin_free deepnorm rezero rezero_post skipinit fixup+untied tfixup layerscale"
)
_PARTS: Final = (
    "rmsnorm scalenorm fixedscalenorm dyt derf untied fixnorm xavier_uniform smallinit looklinear learned "
    "rope gelu swiglu qknorm normed nobias scalarbias innernorm ffn_innernorm headgain"
)


def translation(recipe: str, fields: Fields, **more: Any) -> Training:
    """A training on pairs of sentences."""
    return Training(recipe, _BASE | fields, **more)


def language_model(recipe: str, fields: Fields, **more: Any) -> Training:
    """A training on plain text."""
    return Training(recipe, _BASE | _PLAIN_TEXT | fields, **more)


def bert(recipe: str, fields: Fields, **more: Any) -> Training:
    """A training of a BERT: its pre-training, or a classification that starts from one."""
    return Training(recipe, _BASE | _BERT | fields, **more)


CONFIGURATIONS: Final[dict[str, Training | DiagnosisOf | Starts | Watched | Identities]] = {
    "post": translation("post+warmup", {"machine.probes": "standard"}),
    "learns": translation(  # or BLEU would be 0 everywhere
        "pre+untied+warmup",
        {
            "model.encoder_layers": 1,
            "model.decoder_layers": 1,
            "model.dropout": 0.0,
            "optim.lr": 1e-2,
            "optim.label_smoothing": 0.0,
            "train.steps": 120,
            "train.validate_every_steps": 60,
            "machine.log_every_steps": 20,
        },
    ),
    "pre-adamw": translation(
        "pre+untied+gelu+adamw+cosine",
        {
            "model.attention_dropout": 0.1,
            "model.ffn_dropout": 0.1,
            "data.word_dropout": 0.1,
            "data.target_vocab_mask": True,
            "optim.weight_decay": 0.1,
            "optim.max_grad_norm": 0.5,
        },
    ),
    "fixnorm-scalenorm": translation(
        "pre+fixnorm+scalenorm+smallinit+inverse_sqrt+warmup",
        {"train.grad_accum_steps": 3, "machine.num_workers": 2, "machine.log_every_steps": 4},
    ),
    "admin-average": translation("admin+warmup", {"train.average_last": 3, "train.validate_every_steps": 5}),
    "deepnorm-ema": translation(
        "deepnorm+constant",
        {
            "data.pretokenizer": "moses",
            "data.source_lang": "de",
            "data.target_lang": "en",
            "train.ema_decay": 0.8,
            "train.best_by": "nll",
            "decode.sample": True,
            "decode.top_k": 20,
        },
    ),
    "hybrid-val-decay": translation(
        "enc:post/dec:pre+val_decay",
        {
            "optim.lr": 0.1,
            "optim.decay_patience": 1,
            "train.validate_every_steps": 2,
            "train.early_stopping_patience": 6,
            "decode.length_penalty_formula": "gnmt",
        },
    ),
    "mixln-bf16": translation("mixln+radam+step_decay", {"optim.decay_step": 9, "train.precision": "bf16"}),
    "b2t-sgd": translation("b2t+qknorm+sgd+linear", {"optim.lr": 0.3, "optim.momentum": 0.9}),
    "tfixup-unigram": translation(
        "tfixup+step_decay_inverse_sqrt", {"data.tokenizer": "unigram", "optim.decay_step": 6}
    ),
    "normformer-learned": translation(
        "normformer+learned+dyt+warmup", {"model.max_positions": 64, "seeds.init": 7, "seeds.data": 8}
    ),
    "diverging": translation(
        "rezero+sgd+constant",
        {"optim.lr": 1e4, "machine.probes": "full", "machine.log_every_steps": 3, "train.stop_early": True},
    ),
    "init-from": translation(
        "pre+untied+gelu", {"seeds.dropout": 5, "data.target_vocab_mask": True}, init_from="pre-adamw"
    ),
    "lm-rope": language_model(
        "pre+rmsnorm+rope+swiglu+nobias+normed+warmup",
        {"model.kv_heads": 2, "data.word_dropout": 0.1, "machine.num_workers": 1, "train.average_last": 2},
    ),
    "lm-admin-bf16": language_model(
        "admin+learned+warmup", {"train.precision": "bf16", "train.grad_accum_steps": 2}
    ),
    "bert": bert("pre+learned+gelu+adamw+warmup", {"task": "bert_pretraining"}),
    "bert-whole-words": bert(
        "post+rope+adamw+warmup",
        {"task": "bert_pretraining", "data.whole_word_masking": True, "train.grad_accum_steps": 2},
    ),
    "classification": bert(
        "pre+learned+gelu+adamw+warmup", {"task": "classification", "data.tokenizer": ""}, init_from="bert"
    ),
    "two-ranks": translation(
        "residual+warmup",
        {"train.grad_accum_steps": 4, "train.ema_decay": 0.8, "optim.max_grad_norm": 0.5},
        ranks=2,
    ),
    "two-ranks-shard": language_model(
        "subln+adamw", {"train.grad_accum_steps": 2, "machine.shard": True}, ranks=2
    ),
    "starts": Starts(
        "Seq2Seq", (*_PLACEMENTS.split(), *(f"enc:pre/dec:post+{part}" for part in _PARTS.split())), _BASE
    ),
    "starts-encoder": Starts(
        "Encoder", ("post", "pre+learned", "deepnorm", "subln+gelu"), _BASE | {"model.decoder_layers": 0}
    ),
    "diagnosis-pre": DiagnosisOf("pre", _BASE),
    "diagnosis-admin": DiagnosisOf("admin", _BASE | _PLAIN_TEXT | {"model.decoder_layers": 4}),
    "diagnosis-torch": DiagnosisOf(model="torch"),
    "diagnosis-llama": DiagnosisOf(model="llama"),
    "diagnosis-gpt2": DiagnosisOf(model="gpt2"),
    "watch": Watched("gpt2"),
    "watch-diverging": Watched("llama", "full", 5, lrs=(1e-3,) * 24 + (3.0,) * 12),
    "identities": Identities(),
}
