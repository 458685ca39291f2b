"""Pairs of sentences: from plain text, consecutive or from two documents, and labelled ones from a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final, TypeAlias

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
from normlab.lab.data.draws import permutation, uniform
from normlab.lab.data.plain import SPLITS
from normlab.lab.data.ragged import Ints, Ragged, RaggedWriter, TokenArray, TokenPairs
from normlab.lab.data.sources import Column, HubColumn, open_text
from normlab.lab.data.text import Pairs, document_starts, raw, read_lines, require_texts, survey
from normlab.lab.data.tokenizer import BOS, EOS, PAD, Tokenizer
from normlab.lab.data.vocabulary import vocabulary

SPECIAL_TOKENS = 3
"""[CLS], which is BOS, and two [SEP], which are EOS, in each row."""
WIDTH_STEP = 32
"""Rows are padded to a multiple of this, so that batches have few shapes."""

Tokens: TypeAlias = Sequence[int] | Ints


class Shuffled:
    """Endless micro-batches of ``rows`` of ``count`` examples; in each epoch every example occurs once.

    The order depends only on the seed and the epoch. A micro-batch may hold the end of one epoch and the
    beginning of the next, so that all have the same size.
    """

    def __init__(self, count: int, *, rows: int, seed: int) -> None:
        self._count, self._rows = count, rows
        self._order = lru_cache(2)(lambda epoch: permutation(count, derive(seed, "shuffle", epoch)))

    def at(self, index: int) -> Ints:
        """Return the numbers of the examples of a micro-batch, `[rows]`."""
        places = np.arange(index * self._rows, (index + 1) * self._rows)
        return np.array([self._order(p // self._count)[p % self._count] for p in places.tolist()], np.int64)


@dataclass(frozen=True)
class Spans:
    """A text cut into spans of at most ``span_len`` tokens, each within one document.

    Each span is cut into A and the following B at the beginning of one of its lines, or anywhere if it is
    part of a single line. Ends of lines are left out.
    """

    text: Ints
    lines: Ints
    """The index of the first token of each line."""
    bounds: Ints
    """First token of each span and its end, `[spans, 2]`."""
    document: Ints
    """The number of each span's document, ascending, `[spans]`."""
    document_ends: Ints
    span_len: int

    @classmethod
    def of(cls, stream: TokenArray, *, span_len: int) -> Spans:
        """Cut a ``Stream`` of tokens into the documents of ``text.document_sizes`` and their spans; a
        remainder of one token is left out.

        Raises UserError for a text of one document, which has no other to draw a random segment from.
        """
        tokens = np.asarray(stream)
        sizes = np.diff(np.flatnonzero(tokens == EOS)) - 1
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        edges = np.append(offsets[document_starts(sizes == 0)], offsets[-1])
        if len(edges) < 3:
            raise UserError(
                "next-sentence prediction needs a text of several documents, and this is one; separate "
                "documents by blank lines"
            )
        spans = -(-np.diff(edges) // span_len)
        document = np.repeat(np.arange(len(spans)), spans)
        number = np.arange(len(document)) - np.repeat(np.cumsum(spans) - spans, spans)
        starts = edges[document] + number * span_len
        bounds = np.stack([starts, np.minimum(starts + span_len, edges[document + 1])], axis=1)
        whole = np.diff(bounds)[:, 0] > 1
        text, lines = tokens[tokens != EOS], offsets[:-1][sizes > 0]
        return cls(text, lines, bounds[whole], document[whole], edges[1:], span_len)

    def __len__(self) -> int:
        return len(self.bounds)

    def pairs(self, chosen: Ints, seed: int) -> tuple[Ints, Ints, Ints]:
        """Return A of the chosen spans `[B]` and, with a probability of one half each, either its B or as
        many tokens after the cut of a span in another document.

        Ids and segments `[B, W]` are those of ``joined``; a third array `[B]` is 1 if B comes from another
        document, 0 if it follows A. Devlin et al. 2019, Section 3.1 (arXiv 1810.04805). The draws depend only
        on the seed.
        """
        where, follows, other, elsewhere = uniform(seed, 4, len(chosen))
        cut = self._cuts(chosen, where)
        random = follows >= 0.5
        strangers = self._of_another_document(chosen, other)
        lengths = self.bounds[chosen, 1] - cut
        begin = np.where(random, self._cuts(strangers, elsewhere), cut)
        home = np.where(random, strangers, chosen)
        end = np.minimum(begin + lengths, self.document_ends[self.document[home]])
        first = (self.text[a:b] for a, b in zip(self.bounds[chosen, 0], cut, strict=True))
        second = (self.text[a:b] for a, b in zip(begin, end, strict=True))
        ids, segments = joined(list(zip(first, second, strict=True)), most=self.span_len + SPECIAL_TOKENS)
        return ids, segments, random.astype(np.int64)

    def _cuts(self, chosen: Ints, draw: NDArray[np.float64]) -> Ints:
        """Return the first token of B in each span."""
        start, stop = self.bounds[chosen].T
        low, high = np.searchsorted(self.lines, start, "right"), np.searchsorted(self.lines, stop, "left")
        line = self.lines[np.minimum(low + (draw * (high - low)).astype(np.int64), len(self.lines) - 1)]
        return np.where(high > low, line, start + 1 + (draw * (stop - start - 1)).astype(np.int64))

    def _of_another_document(self, chosen: Ints, draw: NDArray[np.float64]) -> Ints:
        """Return a span of another document for each, all equally likely."""
        first = np.searchsorted(self.document, self.document[chosen], "left")
        own = np.searchsorted(self.document, self.document[chosen], "right") - first
        index = (draw * (len(self) - own)).astype(np.int64)
        return index + own * (index >= first)


def joined(pairs: Sequence[tuple[Tokens, Tokens]], *, most: int) -> tuple[Ints, Ints]:
    """Return ids and segments `[B, W]` of rows ``[CLS] A [SEP] B [SEP]``, padded on the right; W is a
    multiple of ``WIDTH_STEP``, or ``most``. Segments are 1 in B and the [SEP] after it, else 0.
    """
    longest = max(len(a) + len(b) for a, b in pairs) + SPECIAL_TOKENS
    ids = np.full((len(pairs), min(most, -(-longest // WIDTH_STEP) * WIDTH_STEP)), PAD, np.int64)
    segments = np.zeros_like(ids)
    for row, segment, (a, b) in zip(ids, segments, pairs, strict=True):
        end = len(a) + len(b) + SPECIAL_TOKENS
        row[:end] = np.concatenate([[BOS], a, [EOS], b, [EOS]])
        segment[len(a) + 2 : end] = 1
    return ids, segments


SHARE: Final = 0.15
"""The share of the tokens that are predicted."""
MASKED: Final = 0.8
"""The share of these that the mask replaces in training. Random vocabulary entries replace half of the
others, and the rest stays as it is.
"""


def predictions(tokens: int) -> int:
    """Return how many of ``tokens`` tokens are predicted: 15%, rounded, and at least one."""
    return max(1, round(SHARE * tokens))


def mask_tokens(
    ids: Ints, *, mask: int, begins: NDArray[np.bool_] | None, seed: int, masked: float = MASKED
) -> tuple[Ints, Ints, Ints]:
    """Choose ``predictions`` of the tokens of each row `[B, W]`, and replace the share ``masked`` of them by
    ``mask``, and half of the others by random vocabulary entries.

    Returns the rows with replacements `[B, W]`; the places that are predicted `[B, P]`, ascending, then 0;
    and the original tokens there `[B, P]`, then PAD. Devlin et al. 2019, Section 3.1 and Appendix A.1 (arXiv
    1810.04805). Special and unknown tokens are never chosen, nor used as replacements. With ``begins`` `[V]`,
    which marks the entries that begin a word, all tokens of a word are chosen or none, as in the authors'
    later code; a word that would exceed the number is skipped. ``mask`` is the number of vocabulary entries.
    The draws depend only on the seed.
    """
    order, kind, entry = uniform(seed, 3, *ids.shape)
    words = EOS + 1 + (entry * (mask - EOS - 1)).astype(np.int64)
    noisy = np.where(kind < masked, mask, np.where(kind < (1 + masked) / 2, words, ids))
    most = predictions(ids.shape[1] - SPECIAL_TOKENS)
    replaced, positions = ids.copy(), np.zeros((len(ids), most), np.int64)
    targets = np.full_like(positions, PAD)
    for row, original in enumerate(ids):
        places = _chosen(original, order[row], begins)
        replaced[row, places] = noisy[row, places]
        positions[row, : len(places)], targets[row, : len(places)] = places, original[places]
    return replaced, positions, targets


def _chosen(ids: Ints, order: NDArray[np.float64], begins: NDArray[np.bool_] | None) -> list[int]:
    """Return the predicted places of a row, choosing words in the order of their first tokens' draws."""
    places = np.flatnonzero(ids > EOS)
    if not len(places):
        return []
    first = np.ones(len(places), bool) if begins is None else begins[ids[places]].copy()
    first[0] = True
    first[1:] |= np.diff(places) > 1  # no word continues across a special token
    edges = np.flatnonzero(first)
    ends = np.append(edges[1:], len(places))
    wanted, chosen = predictions(len(places)), list[int]()
    for word in np.argsort(order[places[edges]], kind="stable"):
        if len(chosen) + ends[word] - edges[word] <= wanted:
            chosen.extend(places[edges[word] : ends[word]].tolist())
        if len(chosen) == wanted:
            break
    return sorted(chosen)


def word_beginnings(tokenizer: Tokenizer) -> NDArray[np.bool_]:
    """Return which entries begin a word, `[V]`: those that decode with a space before them after another."""
    entries = range(EOS + 1, tokenizer.vocab_size)
    alone = tokenizer.decode([[entry] for entry in entries])
    before = next(entry for entry, text in zip(entries, alone, strict=True) if text.strip())
    (text,) = tokenizer.decode([[before]])
    after = tokenizer.decode([[before, entry] for entry in range(tokenizer.vocab_size)])
    return np.array([line.removeprefix(text).startswith(" ") for line in after])


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
    all_three = open_text(spec)
    texts: list[Column | HubColumn] = []
    if isinstance(all_three, Column):
        texts += [replace(all_three, column=name) for name in all_three.column.split(",")]
    elif isinstance(all_three, HubColumn):
        *outer, names = all_three.keys
        texts += [replace(all_three, keys=(*outer, name)) for name in names.split(",")]
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
        whole = rows["train"]
        order = permutation(len(whole["label"]), derive(0, "held-out pairs")).tolist()
        kept = len(order) - max(1, round(HELD_OUT * len(order)))
        for name, part in (("train", order[:kept]), ("dev", order[kept:])):
            rows[name] = {side: [column[i] for i in sorted(part)] for side, column in whole.items()}
        origin["Dev pairs"] = "a tenth of the training pairs"
    if "test" not in rows:
        rows["test"], origin["Test pairs"] = rows["dev"], "none given, so the dev pairs"
    return {name: rows[name] for name in SPLITS}, origin


def _fill(work: Path, *, rows: dict[str, _Columns], config: DataConfig) -> dict[str, Any]:
    labels = sorted(set(rows["train"]["label"]))
    for name, split in rows.items():
        if unknown := sorted({*split["label"]} - {*labels}):
            raise UserError(
                f"the {name} pairs have the label {unknown[0]!r}, and the training pairs have only "
                f"{', '.join(labels)}; give pairs with labels of these"
            )
    if len(labels) < 2:
        raise UserError(f"all training pairs have the label {labels[0]!r}; give pairs of two labels or more")
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
    shares = {name: [split["label"].count(label) for label in labels] for name, split in rows.items()}
    counts = count_facts(np.array(shares["train"]))
    counts |= {"target_vocab": np.flatnonzero(seen).tolist(), "vocab_size": len(seen)}
    sizes = {
        f"{name.capitalize()} labels": ", ".join(
            f"{n:,} {label}" for n, label in zip(numbers, labels, strict=True)
        )
        for name, numbers in shares.items()
    }
    vocab = {"Vocabulary": f"{tokenizer.vocab_size:,} entries, {tokenizer.kind}"}
    return {"digest": config.digest, "labels": labels, "overlap": {}, **counts, "facts": sizes | vocab}
