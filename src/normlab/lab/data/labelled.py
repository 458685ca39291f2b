"""Labelled pairs of sentences: three columns of a table, prepared as tokens and numbers of labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from normlab.base.model_config import derive
from normlab.base.units import count
from normlab.errors import UserError
from normlab.lab.config import DataConfig
from normlab.lab.data.corpus import (
    PreparedCorpus,
    count_facts,
    id_type,
    open_corpus,
    prepare_folder,
    with_digest,
)
from normlab.lab.data.draws import permutation
from normlab.lab.data.plain import SPLITS
from normlab.lab.data.ragged import Ragged, RaggedWriter, TokenPairs
from normlab.lab.data.sources import Column, HubColumn, open_text
from normlab.lab.data.text import Pairs, raw, read_lines, require_texts, survey
from normlab.lab.data.vocabulary import vocabulary

_SIDES = ("first", "second")
_Columns: TypeAlias = dict[str, list[str]]
"""The columns of a table of pairs: ``first``, ``second`` and ``label``."""
HELD_OUT = 0.1
"""The share of the training pairs that becomes dev if no dev pairs are given."""


@dataclass(frozen=True)
class Labelled:
    """Pairs of sentences as ids without special tokens, and the number of each pair's label."""

    pairs: TokenPairs
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, kw_only=True)
class LabelledCorpus(PreparedCorpus):
    """Prepared pairs; the unigram entropy is that of the labels."""

    train: Labelled
    dev: Labelled
    test: Labelled
    test_text: Pairs
    labels: tuple[str, ...]
    """The labels of the training pairs in alphabetical order, by which they are numbered."""

    @classmethod
    def load(cls, folder: Path) -> LabelledCorpus:
        """Load prepared pairs. Raises FileNotFoundError if the folder is missing or incomplete."""
        manifest, fields = open_corpus(folder)
        for name in SPLITS:
            pairs = TokenPairs(*(Ragged.mapped(folder / f"{name}.{side}") for side in _SIDES))
            labels = np.load(folder / f"{name}.labels.npy", allow_pickle=False)
            fields[name] = Labelled(pairs, labels)
        text = Pairs(*(read_lines(folder / f"test.{side}.txt") for side in _SIDES))
        return cls(test_text=text, labels=tuple(manifest["labels"]), **fields)


def prepare_labelled(config: DataConfig, root: str | Path) -> tuple[DataConfig, LabelledCorpus]:
    """Read the pairs and prepare them under ``root``, unless this was already done.

    Returns the config with ``digest`` filled in. Without dev pairs, a tenth of the training pairs becomes
    dev, the same for all seeds; without test pairs, dev is also the test. Raises UserError unless there are
    three columns of one length, for a label that no training pair has, and if there is only one label.
    """
    rows, origin = _read(config)
    surveys = [survey(column, name) for name, split in rows.items() for column in split.values()]
    config = with_digest(config, [facts.digest for facts in surveys])
    key = ["labelled pairs", config.digest, config.vocab_size]
    corpus = LabelledCorpus.load(prepare_folder(root, key, partial(_fill, rows=rows, config=config)))
    return config, replace(corpus, facts=origin | corpus.facts)


def columns_of(spec: str) -> _Columns:
    """Read the three columns that the path of pairs names, as in ``pairs.tsv#first,second,label``."""
    columns = open_text(spec)
    texts: list[Column | HubColumn] = []
    if isinstance(columns, Column):
        texts += [replace(columns, column=name) for name in columns.column.split(",")]
    elif isinstance(columns, HubColumn):
        *outer, names = columns.keys
        texts += [replace(columns, keys=(*outer, name)) for name in names.split(",")]
    if len(texts) != 3:
        raise UserError(
            f"{spec} names {count(len(texts), 'column')}, and a classification needs the first sentence, the "
            f"second and the label; type {spec.partition('#')[0]}#FIRST,SECOND,LABEL"
        )
    first, second, label = (list(text) for text in texts)
    if not len(first) == len(second) == len(label) > 0:
        raise UserError(
            f"the columns of {spec} have {len(first)}, {len(second)} and {len(label)} rows; give three of "
            "the same table, with at least one row"
        )
    return {"first": first, "second": second, "label": label}


def _read(config: DataConfig) -> tuple[dict[str, _Columns], dict[str, str]]:
    """Return train, dev and test pairs, and facts about their origin."""
    paths = {name: getattr(config, f"{name}_pairs") for name in SPLITS}
    given = [f"{name}_pairs" for name in SPLITS if paths[name]]
    require_texts(given, ("train_pairs",), "training pairs are needed")
    rows = {name: columns_of(path) for name, path in paths.items() if path}
    origin = {f"{name.capitalize()} pairs": Path(path).name for name, path in paths.items() if path}
    if "dev" not in rows:
        rows["train"], rows["dev"] = _held_out(rows["train"])
        origin["Dev pairs"] = "a tenth of the training pairs"
    if "test" not in rows:
        rows["test"] = rows["dev"]
        origin["Test pairs"] = "none given, so the dev pairs"
    return {name: rows[name] for name in SPLITS}, origin


def _held_out(columns: _Columns) -> tuple[_Columns, _Columns]:
    """Return the pairs that are trained on and those that are held out, each in the order of the table."""
    order = permutation(len(columns["label"]), derive(0, "held-out pairs")).tolist()
    trained = len(order) - max(1, round(HELD_OUT * len(order)))

    def rows(numbers: list[int]) -> _Columns:
        return {name: [column[i] for i in sorted(numbers)] for name, column in columns.items()}

    return rows(order[:trained]), rows(order[trained:])


def _require_labels(rows: dict[str, _Columns], labels: Sequence[str]) -> None:
    """Raise UserError for a label that no training pair has, and if the training pairs have only one."""
    for name, split in rows.items():
        unknown = sorted(set(split["label"]) - set(labels))
        if unknown:
            raise UserError(
                f"the {name} pairs have the label {unknown[0]!r}, and the training pairs have only "
                f"{', '.join(labels)}; give pairs that have only these labels"
            )
    if len(labels) < 2:
        raise UserError(f"all training pairs have the label {labels[0]!r}; give pairs of two labels or more")


def _fill(work: Path, *, rows: dict[str, _Columns], config: DataConfig) -> dict[str, Any]:
    """Write the files of prepared pairs; return their manifest."""
    labels = sorted(set(rows["train"]["label"]))
    _require_labels(rows, labels)
    tokenizer = vocabulary(config, rows["train"]["first"], rows["train"]["second"])
    tokenizer.save(work / "tokenizer.json")
    dtype = id_type(tokenizer.vocab_size)
    seen = np.zeros(tokenizer.vocab_size, np.int64)
    for name, split in rows.items():
        for side in _SIDES:
            ragged = Ragged.of(tokenizer.encode(split[side]), dtype)
            with RaggedWriter.open(work / f"{name}.{side}", dtype) as file:
                file.append(ragged)
            if name == "train":
                seen += np.bincount(ragged.tokens, minlength=len(seen))
        numbers = np.array([labels.index(label) for label in split["label"]], np.int64)
        np.save(work / f"{name}.labels.npy", numbers, allow_pickle=False)
    for side in _SIDES:
        (work / f"test.{side}.txt").write_bytes(raw(rows["test"][side]))
    facts: dict[str, str] = {}
    for name, split in rows.items():
        amounts = [f"{split['label'].count(label):,} {label}" for label in labels]
        facts[f"{name.capitalize()} labels"] = ", ".join(amounts)
    facts["Vocabulary"] = f"{tokenizer.vocab_size:,} entries, {tokenizer.kind}"
    counts = count_facts(np.array([rows["train"]["label"].count(label) for label in labels]))
    # The entropy is that of the labels, and the vocabulary that of the sentences.
    counts |= {"target_vocab": np.flatnonzero(seen).tolist(), "vocab_size": len(seen)}
    return {"digest": config.digest, "labels": labels, "overlap": {}, **counts, "facts": facts}
