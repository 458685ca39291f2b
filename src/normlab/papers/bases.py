"""The configurations that the papers' trainings start from, at each scale, and the data sets that they name:
where they are looked for, and where to get them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from normlab.lab.config import (
    PARALLEL_TEXTS,
    Config,
    DataConfig,
    DecodeConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
    parallel_files,
)

LOCAL: Final = "$NORMLAB_DATA/"
"""The prefix of the paths of local data sets."""


@dataclass(frozen=True)
class DataSource:
    """A data set that is not part of normlab."""

    name: str
    get: str
    """Where to get it, in a clause."""


_FILE: Final = Path(__file__).with_name("sources.toml")
SOURCES: Final[Mapping[str, DataSource]] = {
    start: DataSource(**words) for start, words in tomllib.loads(_FILE.read_text(encoding="utf-8")).items()
}
"""Sources by the prefix of the paths of their texts, below ``$NORMLAB_DATA`` or on the Hub."""


def _hub(config: str, source: str, target: str) -> DataConfig:
    splits = ("train", "validation", "test")
    paths = (f"hf:wmt14:{config}#{split}.translation.{side}" for split in splits for side in (source, target))
    texts: dict[str, Any] = dict(zip(PARALLEL_TEXTS, paths, strict=True))
    return DataConfig(pretokenizer="moses", source_lang=source, target_lang=target, **texts)


def _multi30k(target: str) -> DataConfig:
    """Task 1 of Multi30k in Moses tokens, test2016 as its test."""
    data = DataConfig(pretokenizer="moses", source_lang="en", target_lang=target, vocab_size=10_000)
    return parallel_files(data, "multi30k", splits=("train", "val", "test2016"), source="en", target=target)


def _iwslt14(train: str) -> DataConfig:
    names = (train, "valid", "test")
    return parallel_files(
        DataConfig(vocab_size=10_000), "iwslt14.de-en", splits=names, source="de", target="en"
    )


IWSLT14: Final = _iwslt14("train")
IWSLT14_PART: Final = _iwslt14("train.partial")
WMT14_DE: Final = replace(_hub("de-en", "en", "de"), vocab_size=37_000)
WMT14_FR: Final = replace(_hub("fr-en", "en", "fr"), vocab_size=44_500)
"""WMT'14 with newstest2013 as dev and newstest2014 as test; joint vocabularies of the papers' sizes."""
MULTI30K_DE: Final = _multi30k("de")
MULTI30K_FR: Final = _multi30k("fr")
MULTI30K_SMALL: Final = parallel_files(
    DataConfig(vocab_size=2000), "multi30k", splits=("train", "val", "test2016"), source="de", target="en"
)
"""De-En without a pretokenizer, test2016 as its test, with a joint vocabulary for a small model."""
MULTI30K_QUARTER: Final = replace(
    MULTI30K_SMALL,
    train_src=f"{MULTI30K_SMALL.train_src}[:7250]",
    train_tgt=f"{MULTI30K_SMALL.train_tgt}[:7250]",
)
"""The first quarter of those pairs, on which a small model passes its best dev loss within minutes."""
EN_VI: Final = parallel_files(
    DataConfig(vocab_size=8000, word_dropout=0.1, target_vocab_mask=True),
    "iwslt15.en-vi",
    splits=("train", "tst2012", "tst2013"),
    source="en",
    target="vi",
)


def paths_of(data: DataConfig) -> list[str]:
    """Return the paths of all texts that a configuration names, without columns and parts of local files."""
    others = [f"{role}_{kind}" for kind in ("text", "pairs") for role in ("train", "dev", "test")]
    texts = [getattr(data, name) for name in (*PARALLEL_TEXTS, *others)]
    return [
        text if text.startswith("hf:") else text.partition("#")[0].partition("[")[0] for text in texts if text
    ]


def source_of(data: DataConfig) -> DataSource | None:
    """Return the source of a configuration's training text; None for the built-in corpus and other texts."""
    paths = paths_of(data)
    start = paths[0].removeprefix(LOCAL) if paths else ""
    return next((source for key, source in SOURCES.items() if start.startswith(key)), None)


def text_name(data: DataConfig) -> str:
    """Return the name of a configuration's text."""
    source, paths = source_of(data), paths_of(data)
    if source:
        return source.name
    return paths[0] if paths else f"the built-in corpus {data.builtin}"


LAPTOP: Final = Config(
    model=ModelConfig(dim=64, ffn_dim=256, heads=4, encoder_layers=6, decoder_layers=6, dropout=0.0),
    data=DataConfig(builtin="dates-de-en", vocab_size=200),
    optim=OptimConfig(schedule="constant", warmup_steps=60),
    train=TrainConfig(steps=200, max_tokens=1024, validate_every_steps=20, dev_decode_sentences=100),
    decode=DecodeConfig(beam=1),
)
"""6+6 layers of width 64 that translate the built-in corpus's dates: half a minute per run on one core."""

DATES: Final = replace(LAPTOP, train=replace(LAPTOP.train, steps=1200, validate_every_steps=200))
"""``LAPTOP``, six times as long: for claims about which recipes train, which 200 steps cannot show."""
MULTI30K_WIDTH_64: Final = replace(
    DATES,
    data=MULTI30K_SMALL,
    optim=replace(DATES.optim, schedule="inverse_sqrt"),
    train=replace(DATES.train, max_tokens=2048, stop_early=False),
)
"""The same model on Multi30k De-En, with 2,048 positions a step, and a joint vocabulary of 2,000."""

ON_GPU: Final = {"train.grad_accum_steps": 1, "train.precision": "auto", "train.validate_every_steps": 500}
"""How the gpu scale differs from most of the papers' trainings, besides text and steps."""
TO_THE_END: Final = {"train.stop_early": False}
"""For cells in which a run may get stuck: it has until the last step to leave its plateau."""
_PRE: Final = {"encoder_placement": "pre", "decoder_placement": "pre"}
_BROWN: Final = "$NORMLAB_DATA/text/brown.txt"
BERT: Final = Config(
    recipe="pre",
    task="bert_pretraining",
    model=replace(
        LAPTOP.model,
        encoder_layers=4,
        decoder_layers=0,
        position_encoding="rope",
        embedding_norm=True,
        activation="gelu",
        **_PRE,
    ),
    data=DataConfig(
        train_text=f"{_BROWN}[:46368]",
        dev_text=f"{_BROWN}[46368:50518]",
        test_text=f"{_BROWN}[50518:]",
        vocab_size=500,
        block_len=32,
    ),
    optim=OptimConfig(
        lr=3e-3,
        eps=1e-6,
        optimiser="adamw",
        weight_decay=0.01,
        weight_decay_on="matrices",
        max_grad_norm=1.0,
        schedule="linear",
        warmup_steps=400,
        label_smoothing=0.0,
    ),
    train=TrainConfig(steps=8000, max_tokens=512, validate_every_steps=400),
)
"""A small BERT on the Brown corpus: its first 425 documents, then 25 as dev and 50 as test, all fiction."""
BERT_SHORT: Final = replace(
    BERT,
    data=replace(BERT.data, dev_text=f"{_BROWN}[46368:48391]"),
    optim=replace(BERT.optim, warmup_steps=300),
    train=replace(BERT.train, steps=6000, validate_every_steps=300),
)
"""``BERT`` for three quarters of its steps, and the first 12 of its dev documents: 3 minutes on one core."""
LANGUAGE_MODEL: Final = Config(
    recipe="pre",
    task="language_model",
    model=replace(LAPTOP.model, ffn_dim=168, encoder_layers=0, decoder_layers=4, **_PRE),
    data=replace(
        BERT_SHORT.data,
        test_text=f"{_BROWN}[50518:53466]",
        tokenizer="byte_bpe",
        vocab_size=1000,
        block_len=128,
    ),
    optim=replace(BERT.optim, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, warmup_steps=50),
    train=TrainConfig(steps=500, max_tokens=1024, validate_every_steps=125, stop_early=False),
)
"""A small decoder on the Brown corpus: its first 425 documents, then 12 as dev, and the first 20 of its last
50 as test. A gated feed-forward has as many parameters as a plain one of width 252.
"""
SMALL: Final = Config(
    model=ModelConfig(dim=512, ffn_dim=1024, heads=4, encoder_layers=6, decoder_layers=6),
    data=IWSLT14,
    train=TrainConfig(max_tokens=8192),
    decode=DecodeConfig(beam=5),
)
"""Transformer-small on IWSLT'14 De-En, 37 million parameters. A batch of 4096 tokens has that many on each
side, as in fairseq: 8192 in all.
"""
BASE: Final = Config(
    model=ModelConfig(dim=512, ffn_dim=2048, heads=8, encoder_layers=6, decoder_layers=6),
    data=WMT14_DE,
    train=TrainConfig(max_tokens=16_384),
    decode=DecodeConfig(beam=5),
)
"""Transformer-base on WMT'14 En-De. A batch of 8192 tokens has that many on each side: 16,384 in all."""
BERT_BASE: Final = replace(
    BERT,
    model=replace(
        BERT.model,
        dim=768,
        ffn_dim=3072,
        heads=12,
        encoder_layers=12,
        position_encoding="learned",
        max_positions=512,
        dropout=0.1,
        attention_dropout=0.1,
    ),
    data=DataConfig(
        train_text="$NORMLAB_DATA/wikipedia-books/train.txt",
        dev_text="$NORMLAB_DATA/wikipedia-books/dev.txt",
        vocab_size=30_522,
        block_len=512,
    ),
    optim=replace(BERT.optim, lr=1e-4, betas=(0.9, 0.999), warmup_steps=10_000),
    train=TrainConfig(steps=1_000_000, max_tokens=32 * 512, grad_accum_steps=8, validate_every_steps=10_000),
)
"""BERT-base: a million steps of 256 rows of 512 tokens (Devlin et al. 2019, Appendix A.2, arXiv 1810.04805).
"""


def _pairs(columns: str, **files: str) -> DataConfig:
    paths: dict[str, Any] = {name: f"$NORMLAB_DATA/{file}#{columns}" for name, file in files.items()}
    return DataConfig(tokenizer="", block_len=128, **paths)


GLUE: Final = {
    "MRPC": _pairs(
        "#1 String,#2 String,Quality",
        train_pairs="glue.mrpc/msr_paraphrase_train.txt",
        test_pairs="glue.mrpc/msr_paraphrase_test.txt",
    ),
    "RTE": _pairs(
        "sentence1,sentence2,label", train_pairs="glue.rte/train.tsv", test_pairs="glue.rte/dev.tsv"
    ),
}
"""Sentence pairs from two GLUE tasks (Wang et al. 2019, arXiv 1804.07461): MRPC with its official test, RTE
with GLUE's dev as the test; a tenth of the training pairs is dev.
"""


def fine_tuning(data: DataConfig, *, steps: int) -> Config:
    """Fine-tuning of ``BERT`` with its optimizer and a warm-up over a tenth of the steps (Devlin et al. 2019,
    Appendix A.3, arXiv 1810.04805).
    """
    return replace(
        BERT,
        recipe="pre+warmup",
        task="classification",
        data=data,
        optim=replace(BERT.optim, lr=3e-4, warmup_steps=steps // 10),
        train=replace(
            BERT.train, steps=steps, max_tokens=2048, validate_every_steps=steps // 3, stop_early=False
        ),
    )
