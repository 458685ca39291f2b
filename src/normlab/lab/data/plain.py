"""Plain text: a memory-mapped token stream for each of train, dev and test, and its blocks for language
models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from normlab.base.model_config import derive
from normlab.errors import UserError
from normlab.lab.config import Config, DataConfig
from normlab.lab.data.batches import TensorBatch
from normlab.lab.data.builtin import generate
from normlab.lab.data.corpus import (
    Encoded,
    PreparedCorpus,
    count_facts,
    open_corpus,
    prepare_folder,
    with_digest,
)
from normlab.lab.data.draws import drop_words, permutation
from normlab.lab.data.files import AnyText, ShardTokens, apart, open_files
from normlab.lab.data.ragged import Ints, Read, TokenArray, reader_of
from normlab.lab.data.readings import TextReading, reading_of
from normlab.lab.data.text import LineList, describe_shares, require_texts, require_unchanged
from normlab.lab.data.tokenizer import PAD, UNK
from normlab.lab.data.vocabulary import vocabulary

SPLITS = ("train", "dev", "test")
_DOCUMENTS = "test.documents.npy"


@dataclass(frozen=True)
class Stream:
    """A text as one array of tokens: each document after an EOS, if the tokenizer takes text verbatim or the
    text comes as token shards.

    Otherwise: an EOS, then the tokens of each line with an EOS at its end; an empty line is just an EOS.
    """

    tokens: TokenArray
    """The text begins at index 1; each token is predicted from those before it."""
    words: int
    """Number of words between white space; the end of a line counts as one."""
    bytes: int
    """Bytes of the text in UTF-8, ends of lines included."""

    def __len__(self) -> int:
        """Number of tokens to predict."""
        return len(self.tokens) - 1


@dataclass(frozen=True, kw_only=True)
class TextCorpus(PreparedCorpus):
    """A prepared plain text."""

    train: Stream
    dev: Stream
    test: Stream
    documents: NDArray[np.int64]
    """Predicted tokens, words and bytes of each document of the test text, `[documents, 3]`."""
    lost: str = ""
    """Why bits per byte are not known: what decoding does not restore of the dev or test text."""

    @property
    def by_line(self) -> bool:
        """Whether an EOS ends each line, and not only each document."""
        return not (self.tokenizer.verbatim or isinstance(self.train.tokens, ShardTokens))

    @classmethod
    def load(cls, folder: Path, tokens: Mapping[str, TokenArray]) -> TextCorpus:
        """Load a prepared text with the ``tokens`` of its splits, which may lie elsewhere. Raises
        FileNotFoundError if the folder is missing or incomplete.
        """
        manifest, fields = open_corpus(folder)
        for name in SPLITS:
            fields[name] = Stream(tokens[name], **manifest["sizes"][name])
        documents = np.load(folder / _DOCUMENTS, allow_pickle=False)
        return cls(documents=documents, lost=manifest["lost"], **fields)


def prepare_text(
    config: DataConfig, root: str | Path, reading: TextReading | None = None
) -> tuple[DataConfig, TextCorpus]:
    """Read or generate the text and prepare it under ``root``, unless this was already done.

    Returns the config with ``digest`` filled in. Without files the text is the target side of the built-in
    corpus; without test text, dev text is the test text. Raises UserError if the text does not have the given
    digest, if train or dev text is missing from the config, if a text has no words, or if one changes in the
    meantime. No text is in memory as a whole.
    """
    texts, origin = _read(config)
    reading = reading or reading_of(config, texts.values())
    paths = {name: getattr(config, f"{name}_text") for name in texts}
    surveys = {name: reading.survey(text, paths[name] or name) for name, text in texts.items()}
    for name, facts in surveys.items():
        if paths[name] and facts.blank:
            raise UserError(f"{paths[name]} holds no word; pass a file of text")
    digests = {name: facts.digest for name, facts in surveys.items()}
    config = with_digest(config, digests.values())
    key = [reading.key, config.digest, config.vocab_size]
    fill = partial(_fill, reading=reading, texts=texts, config=config, digests=digests)
    folder = prepare_folder(root, key, fill)
    tokens = {name: reading.tokens(folder / f"{name}.tokens.npy", text) for name, text in texts.items()}
    corpus = TextCorpus.load(folder, tokens)
    return config, replace(corpus, facts=origin | corpus.facts)


def _read(config: DataConfig) -> tuple[dict[str, AnyText], dict[str, str]]:
    """Return train, dev and test, which can be iterated again and again, and facts about their origin."""
    paths = {name: getattr(config, f"{name}_text") for name in SPLITS}
    given = [name for name in SPLITS if paths[name]]
    texts: dict[str, AnyText]
    if not given:
        name, seed = config.builtin, config.builtin_seed
        splits = generate(name, pairs=config.builtin_pairs, seed=seed)
        texts = {split: LineList(split, getattr(splits, split).target) for split in SPLITS}
        return texts, {"Corpus": f"target side of built-in {name}, seed {seed}"}
    fields = [f"{name}_text" for name in given]
    require_texts(fields, ("train_text", "dev_text"), "train and dev text are needed")
    texts = apart({name: open_files(paths[name]) for name in given})
    origin = {f"{name.capitalize()} text": Path(paths[name]).name for name in given}
    return {"test": texts["dev"], **texts}, {"Test text": "none given, so the dev text", **origin}


def _fill(
    work: Path,
    *,
    reading: TextReading,
    texts: dict[str, AnyText],
    config: DataConfig,
    digests: dict[str, bytes],
) -> dict[str, Any]:
    """Write the files of a prepared text; return its manifest. ``digests`` are those of the survey."""
    tokenizer = vocabulary(config, reading.content(texts["train"]), ())
    tokenizer.save(work / "tokenizer.json")
    encoded: dict[str, Encoded] = {}
    for name, text in texts.items():
        encoded[name] = reading.encode(work / f"{name}.tokens.npy", tokenizer, text)
        require_unchanged(getattr(config, f"{name}_text"), digests[name], encoded[name].digest)
    tokens = reading.tokens(work / "test.tokens.npy", texts["test"])
    documents = reading.documents(texts["test"], tokens, tokenizer)
    np.save(work / _DOCUMENTS, documents, allow_pickle=False)
    shares = reading.overlap(texts)
    train_facts = count_facts(encoded["train"].counts)
    return {
        "digest": config.digest,
        "sizes": {name: facts.size for name, facts in encoded.items()},
        "overlap": shares,
        "lost": encoded["dev"].lost or encoded["test"].lost,
        **train_facts,
        "facts": {
            "Same lines": describe_shares(shares),
            **_sizes(encoded),
            "Test documents": f"{len(documents):,}",
            "Vocabulary": f"{tokenizer.vocab_size:,} entries, {tokenizer.kind}",
            "Unigram entropy": f"{train_facts['unigram_entropy_nats']:.3f} nats a token",
        },
    }


def _sizes(encoded: Mapping[str, Encoded]) -> dict[str, str]:
    """Say how large each text is, in the units that are known: words and bytes of shards may not be."""
    sizes: dict[str, str] = {}
    for name, label in (("train", "Training"), ("dev", "Dev"), ("test", "Test")):
        facts = encoded[name]
        amounts = [f"{amount:,} {unit}" for unit, amount in facts.size.items() if amount]
        if name == "train":
            amounts.append(f"{int(facts.counts.sum()):,} tokens")
        else:
            amounts.append(f"{facts.counts[UNK]:,} unknown characters")
        sizes[f"{label} size"] = ", ".join(amounts)
    return sizes


@dataclass(frozen=True)
class TextBatch(TensorBatch):
    """One micro-batch of blocks, `[B, L]`."""

    ids: Tensor
    """Inputs; the first of a row is the last target of the block before it."""
    target: Tensor
    """Targets: at each place the token that comes next."""
    tokens: int
    """Tokens of ``target`` without PAD."""

    @property
    def padded_tokens(self) -> int:
        return self.ids.numel()

    def recounted(self) -> TextBatch:
        """Return the batch with its tokens counted anew, after it was cut or changed from another."""
        return replace(self, tokens=int((self.target != PAD).sum()))


class Blocks:
    """Endless training batches: index i is the i-th micro-batch over all epochs, so resuming needs only i.

    Block k has the tokens k L + 1 to (k + 1) L of the stream as targets; token 0 is only an input. In every
    epoch each block occurs once, so each token is predicted once; the end of the stream is padded. All
    batches have ``rows`` rows, and only the last one of an epoch has empty ones.
    """

    def __init__(self, stream: TokenArray, *, block_len: int, rows: int, seed: int) -> None:
        self.block_len, self.rows = block_len, rows
        self._stream = stream
        self._count = block_count(stream, block_len)
        self._read = reader_of(stream)
        # Two epochs, since batches that are made ahead may belong to the next one.
        self._order = lru_cache(2)(lambda epoch: permutation(self._count, derive(seed, "shuffle", epoch)))

    @property
    def steps_per_epoch(self) -> int:
        return -(-self._count // self.rows)

    def at(self, index: int, *, word_dropout: float = 0.0, seed: int = 0) -> TextBatch:
        """Return the micro-batch ``index``, counted from 0 over all epochs.

        With ``word_dropout`` each input token becomes UNK with that probability, drawn from a generator of
        (``seed``, ``index``); the targets are left as they are.
        """
        epoch, step = divmod(index, self.steps_per_epoch)
        chosen = self._order(epoch)[step * self.rows : (step + 1) * self.rows].astype(np.int64)
        ids, target = _cut(self._read, len(self._stream), chosen, self.block_len)
        if word_dropout:
            drop_words([ids], word_dropout, derive(seed, "word_dropout", index))
        return _batch(ids, target, self.rows)


def blocks_in_order(stream: TokenArray, *, block_len: int, rows: int) -> Iterator[TextBatch]:
    """Yield every block once, ``rows`` at a time, from the beginning of the text to its end."""
    read, count = reader_of(stream), block_count(stream, block_len)
    for start in range(0, count, rows):
        chosen = np.arange(start, min(start + rows, count))
        yield _batch(*_cut(read, len(stream), chosen, block_len), len(chosen))


def require_block_len(config: Config, corpus: object, max_positions: int | None) -> None:
    """Raise UserError if inputs of ``data.block_len`` tokens, whatever their text, exceed ``max_positions``
    (None: no limit).
    """
    length = config.data.block_len
    if max_positions is not None and length > max_positions:
        raise UserError(
            f"block_len is {length}, and the model has learned {max_positions} positions; type "
            f"--block-len {max_positions}, or --max-positions {length}"
        )


def block_count(stream: TokenArray, block_len: int) -> int:
    """Return the number of blocks of a stream; the last one may be shorter."""
    return -(-(len(stream) - 1) // block_len)


def _cut(read: Read, length: int, chosen: Ints, block_len: int) -> tuple[Ints, Ints]:
    """Return ``[B, L]`` inputs and targets of chosen blocks; PAD follows the stream's ``length`` tokens."""
    window = np.full((len(chosen), block_len + 1), PAD, np.int64)
    for line, start in zip(window, (chosen * block_len).tolist(), strict=True):
        part = read(start, min(start + block_len + 1, length))
        line[: len(part)] = part
    ids, target = window[:, :-1].copy(), window[:, 1:].copy()
    ids[target == PAD] = PAD  # the stream's last token has no target, so it is no input either
    return ids, target


def _batch(ids: Ints, target: Ints, rows: int) -> TextBatch:
    empty_rows = ((0, rows - len(ids)), (0, 0))
    padded = [np.pad(side, empty_rows, constant_values=PAD) for side in (ids, target)]
    return TextBatch(*map(torch.from_numpy, padded), tokens=int((target != PAD).sum()))
