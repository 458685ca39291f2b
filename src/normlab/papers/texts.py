"""The data sets of the papers, and of the gpu scale: where they are looked for, and where to get them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from normlab.config.config import PARALLEL_TEXTS, DataConfig, parallel_files

LOCAL: Final = "$NORMLAB_DATA/"
"""The beginning of the paths of local data sets."""


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
"""Sources by the beginning of the paths of their texts, below ``$NORMLAB_DATA`` or on the Hub."""


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
"""WMT'14, newstest2013 as dev and newstest2014 as test; joint vocabularies of the papers' sizes."""
MULTI30K_DE: Final = _multi30k("de")
MULTI30K_FR: Final = _multi30k("fr")
EN_VI: Final = parallel_files(
    DataConfig(vocab_size=8000, word_dropout=0.1, target_vocab_mask=True),
    "iwslt15.en-vi",
    splits=("train", "tst2012", "tst2013"),
    source="en",
    target="vi",
)


def paths_of(data: DataConfig) -> list[str]:
    """The paths of all texts that a configuration names, without columns and parts of local files."""
    others = (f"{role}_{kind}" for kind in ("text", "pairs") for role in ("train", "dev", "test"))
    paths = filter(None, (getattr(data, name) for name in (*PARALLEL_TEXTS, *others)))
    return [p if p.startswith("hf:") else p.partition("#")[0].partition("[")[0] for p in paths]


def source_of(data: DataConfig) -> DataSource | None:
    """The source of a configuration's training text; None for the built-in corpus and for other texts."""
    paths = paths_of(data)
    start = paths[0].removeprefix(LOCAL) if paths else ""
    return next((source for key, source in SOURCES.items() if start.startswith(key)), None)


def text_name(data: DataConfig) -> str:
    """The name of a configuration's text."""
    source, paths = source_of(data), paths_of(data)
    return source.name if source else paths[0] if paths else f"the built-in corpus {data.builtin}"
