"""Pairs of sentences with a label, from three columns of a table or of a Hugging Face data set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from normlab.config.config import DataConfig
from normlab.config.randomness import derive
from normlab.config.units import count
from normlab.data.batches import permutation
from normlab.data.folder import described, id_type, opened, prepared, with_digest
from normlab.data.hub import HubColumn
from normlab.data.lines import require_texts, survey
from normlab.data.ragged import Ragged, RaggedWriter, TokenPairs
from normlab.data.sources import Column, open_text
from normlab.data.text import Pairs, read_lines
from normlab.data.tokenizer import Tokenizer
from normlab.data.vocabulary import digests, vocabulary
from normlab.errors import UserError

SPLITS = ("train", "dev", "test")
HELD_OUT = 0.1
"""The share of the training pairs that are dev if no other is given."""


@dataclass(frozen=True)
class Labelled:
    """Pairs of sentences as ids without special tokens, and the number of each one's label."""

    pairs: TokenPairs
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class LabelledCorpus:
    """Prepared pairs; tokens stay on disk until they are read."""

    folder: Path
    tokenizer: Tokenizer
    train: Labelled
    dev: Labelled
    test: Labelled
    test_text: Pairs
    labels: tuple[str, ...]
    """The labels of the training pairs in alphabetical order, by which they are numbered."""
    unigram_entropy_nats: float
    """Entropy of the labels' distribution in training."""
    target_vocab: NDArray[np.bool_]
    """``[V]``: vocabulary entries that occur in training."""
    facts: dict[str, str]
    overlap: dict[str, float]

    @classmethod
    def load(cls, folder: Path) -> LabelledCorpus:
        """Load prepared pairs. Raises FileNotFoundError if the folder is missing or incomplete."""
        manifest, fields = opened(folder)
        for name in SPLITS:
            pairs = TokenPairs(*(Ragged.mapped(folder / f"{name}.{side}") for side in ("first", "second")))
            labels = np.load(folder / f"{name}.labels.npy", allow_pickle=False)
            fields[name] = Labelled(pairs, labels)
        text = Pairs(*(read_lines(folder / f"test.{side}.txt") for side in ("first", "second")))
        return cls(test_text=text, labels=tuple(manifest["labels"]), **fields)


@dataclass(frozen=True)
class Rows:
    """The columns of a table of pairs."""

    first: list[str]
    second: list[str]
    label: list[str]

    def __len__(self) -> int:
        return len(self.label)

    def only(self, chosen: Sequence[int]) -> Rows:
        return Rows(*([column[i] for i in chosen] for column in vars(self).values()))


def prepare_labelled(config: DataConfig, root: str | Path) -> tuple[DataConfig, LabelledCorpus]:
    """Read the pairs and prepare them under ``root``, unless the same ones are prepared there already.

    Returns the config with ``digest`` filled in. Without dev pairs, a tenth of the training pairs is dev,
    the same whatever the seeds; without test pairs, dev is the test. Raises UserError for columns that are
    not three or differ in length, for a label that no training pair has, and for a single label.
    """
    rows, origin = _read(config)
    surveys = [survey(column, name) for name, split in rows.items() for column in vars(split).values()]
    config = with_digest(config, [*(found.digest for found in surveys), *digests(config)])
    key = ["labelled pairs", config.digest, config.vocab_size]
    corpus = LabelledCorpus.load(prepared(root, key, partial(_fill, rows=rows, config=config)))
    return config, replace(corpus, facts=origin | corpus.facts)


def columns_of(spec: str) -> Rows:
    """Read the three columns that a path of pairs names, such as ``pairs.tsv#first,second,label``."""
    found = open_text(spec)
    texts: list[Column | HubColumn] = []
    if isinstance(found, Column):
        texts += [replace(found, column=name) for name in found.column.split(",")]
    elif isinstance(found, HubColumn):
        texts += [replace(found, keys=(*found.keys[:-1], name)) for name in found.keys[-1].split(",")]
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
    return Rows(first, second, label)


def _read(config: DataConfig) -> tuple[dict[str, Rows], dict[str, str]]:
    """Return train, dev and test pairs, and facts about their origin."""
    paths = {name: getattr(config, f"{name}_pairs") for name in SPLITS}
    given = [f"{name}_pairs" for name in SPLITS if paths[name]]
    require_texts(given, ("train_pairs",), "training pairs are needed")
    rows = {name: columns_of(path) for name, path in paths.items() if path}
    origin = {f"{name.capitalize()} pairs": Path(path).name for name, path in paths.items() if path}
    if "dev" not in rows:
        order = permutation(len(rows["train"]), derive(0, "held-out pairs")).tolist()
        kept = len(order) - max(1, round(HELD_OUT * len(order)))
        whole = rows["train"]
        rows["train"], rows["dev"] = (whole.only(sorted(part)) for part in (order[:kept], order[kept:]))
        origin["Dev pairs"] = "a tenth of the training pairs"
    if "test" not in rows:
        rows["test"], origin["Test pairs"] = rows["dev"], "none given, so the dev pairs"
    return {name: rows[name] for name in SPLITS}, origin


def _fill(work: Path, *, rows: dict[str, Rows], config: DataConfig) -> dict[str, Any]:
    labels = sorted(set(rows["train"].label))
    for name, split in rows.items():
        if unknown := sorted({*split.label} - {*labels}):
            raise UserError(
                f"the {name} pairs have the label {unknown[0]!r}, and the training pairs have only "
                f"{', '.join(labels)}; give pairs with labels of these"
            )
    if len(labels) < 2:
        raise UserError(f"all training pairs have the label {labels[0]!r}; give pairs of two labels or more")
    tokenizer = vocabulary(config, rows["train"].first, rows["train"].second)
    tokenizer.save(work / "tokenizer.json")
    dtype = id_type(tokenizer.vocab_size)
    seen = np.zeros(tokenizer.vocab_size, np.int64)
    for name, split in rows.items():
        for side in ("first", "second"):
            ragged = Ragged.of(tokenizer.encode(getattr(split, side)), dtype)
            with RaggedWriter.open(work / f"{name}.{side}", dtype) as file:
                file.append(ragged)
            if name == "train":
                seen += np.bincount(ragged.tokens, minlength=len(seen))
        numbers = np.array([labels.index(label) for label in split.label], np.int64)
        np.save(work / f"{name}.labels.npy", numbers, allow_pickle=False)
    for side in ("first", "second"):
        text = "".join(f"{line}\n" for line in getattr(rows["test"], side))
        (work / f"test.{side}.txt").write_text(text, "utf-8", newline="\n")
    shares = {name: [split.label.count(label) for label in labels] for name, split in rows.items()}
    told = described(np.array(shares["train"]))
    told |= {"target_vocab": np.flatnonzero(seen).tolist(), "vocab_size": len(seen)}
    sizes = {
        f"{name.capitalize()} labels": ", ".join(
            f"{n:,} {label}" for n, label in zip(numbers, labels, strict=True)
        )
        for name, numbers in shares.items()
    }
    vocab = {"Vocabulary": f"{tokenizer.vocab_size:,} entries, {tokenizer.kind}"}
    return {"digest": config.digest, "labels": labels, "overlap": {}, **told, "facts": sizes | vocab}
