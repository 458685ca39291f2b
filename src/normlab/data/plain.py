"""Plain text for language models: one stream of tokens for each of train, dev and test, memory-mapped."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from normlab.config.config import DataConfig
from normlab.data.arrays import ArrayWriter
from normlab.data.builtin import generate
from normlab.data.documents import document_sizes
from normlab.data.folder import described, id_type, opened, prepared, with_digest
from normlab.data.lines import parts, raw, require_texts, require_unchanged, survey
from normlab.data.overlap import Overlap, said, shares
from normlab.data.ragged import Ints, Ragged
from normlab.data.sources import open_text
from normlab.data.tokenizer import EOS, UNK, Tokenizer
from normlab.data.vocabulary import digests, vocabulary
from normlab.errors import UserError

SPLITS = ("train", "dev", "test")

_DOCUMENTS = "test.documents.npy"


@dataclass(frozen=True)
class Stream:
    """A text as one array of tokens: EOS, and then the tokens of each line with EOS at its end.

    An empty line is an EOS of its own, so the layout of the text is kept.
    """

    tokens: Ints
    """The text begins at index 1; each token is predicted from those before it."""
    words: int
    """Number of words between white space; the end of a line counts as one."""
    bytes: int
    """Bytes of the text in UTF-8, ends of lines included."""

    @property
    def predicted(self) -> int:
        """Number of tokens to predict."""
        return len(self.tokens) - 1


@dataclass(frozen=True)
class TextCorpus:
    """A prepared plain text; tokens stay on disk until they are read."""

    folder: Path
    tokenizer: Tokenizer
    train: Stream
    dev: Stream
    test: Stream
    unigram_entropy_nats: float
    """Entropy of the tokens' distribution in training, EOS included."""
    target_vocab: NDArray[np.bool_]
    """``[V]``: vocabulary entries that occur in training."""
    facts: dict[str, str]
    """Facts for the terminal and the page, by their labels."""
    documents: NDArray[np.int64]
    """Lines, words and bytes of each document of the test text, `[documents, 3]`."""
    overlap: dict[str, float] = field(default_factory=dict)
    """The shares of lines that stand in another text as well, as ``overlap.shares`` names them."""

    @classmethod
    def load(cls, folder: str | Path) -> TextCorpus:
        """Load a prepared text. Raises FileNotFoundError if the folder is missing or incomplete."""
        folder = Path(folder)
        manifest, fields = opened(folder)
        for name in SPLITS:
            tokens = np.load(folder / f"{name}.tokens.npy", mmap_mode="r", allow_pickle=False)
            fields[name] = Stream(tokens, **manifest["sizes"][name])
        return cls(documents=np.load(folder / _DOCUMENTS, allow_pickle=False), **fields)


def prepare_text(config: DataConfig, root: str | Path) -> tuple[DataConfig, TextCorpus]:
    """Read or generate the text and prepare it under ``root``, unless the same text is prepared there
    already.

    Returns the config with ``digest`` filled in. Without files the text is the target side of the built-in
    corpus; without test text, dev text is the test text. Raises UserError if the text does not have the given
    digest, if train or dev text is missing from the config, if a text has no word, or if one changes
    meanwhile. No text is in memory as a whole.
    """
    texts, origin = _read(config)
    paths = {name: getattr(config, f"{name}_text") for name in texts}
    surveys = {name: survey(lines, paths[name] or name) for name, lines in texts.items()}
    for name, found in surveys.items():
        if paths[name] and found.blank:
            raise UserError(f"{paths[name]} holds no word; pass a file of text")
    before = {name: found.digest for name, found in surveys.items()}
    config = with_digest(config, [*before.values(), *digests(config)])
    key = ["plain, documents", config.digest, config.vocab_size]
    folder = prepared(root, key, partial(_fill, texts=texts, config=config, before=before))
    corpus = TextCorpus.load(folder)
    return config, replace(corpus, facts=origin | corpus.facts)


def _read(config: DataConfig) -> tuple[dict[str, Iterable[str]], dict[str, str]]:
    """Return train, dev and test, which can be iterated repeatedly, and facts about their origin."""
    paths = {name: getattr(config, f"{name}_text") for name in SPLITS}
    given = [name for name in SPLITS if paths[name]]
    if not given:
        name, seed = config.builtin, config.builtin_seed
        splits = generate(name, pairs=config.builtin_pairs, seed=seed)
        texts = {split: getattr(splits, split).target for split in SPLITS}
        return texts, {"Corpus": f"target side of built-in {name}, seed {seed}"}
    fields = [f"{name}_text" for name in given]
    require_texts(fields, ("train_text", "dev_text"), "train and dev text are needed")
    texts = {name: open_text(paths[name]) for name in given}
    origin = {f"{name.capitalize()} text": Path(paths[name]).name for name in given}
    return {"test": texts["dev"], **texts}, {"Test text": "none given, so the dev text", **origin}


def _fill(
    work: Path, *, texts: dict[str, Iterable[str]], config: DataConfig, before: dict[str, bytes]
) -> dict[str, Any]:
    tokenizer = vocabulary(config, texts["train"], ())
    tokenizer.save(work / "tokenizer.json")
    sizes: dict[str, dict[str, int]] = {}
    counts: dict[str, NDArray[np.int64]] = {}
    again = {name: Overlap(texts[name]) for name in ("dev", "test")}
    for name, lines in texts.items():
        seen_by = again.values() if name == "train" else ()
        sizes[name], counts[name], now = _encode(work / f"{name}.tokens.npy", tokenizer, lines, seen_by)
        require_unchanged(getattr(config, f"{name}_text"), before[name], now)
    documents = document_sizes(texts["test"])
    np.save(work / _DOCUMENTS, documents, allow_pickle=False)
    read = {name: f"{size['words']:,} words, {size['bytes']:,} bytes" for name, size in sizes.items()}
    told = described(counts["train"])
    overlap = shares(again, texts["dev"], texts["test"])
    return {
        "digest": config.digest,
        "sizes": sizes,
        "overlap": overlap,
        **told,
        "facts": {
            "Same lines": said(overlap),
            "Training size": f"{read['train']}, {int(counts['train'].sum()):,} tokens",
            "Dev size": f"{read['dev']}, {int(counts['dev'][UNK]):,} unknown characters",
            "Test size": f"{read['test']}, {int(counts['test'][UNK]):,} unknown characters",
            "Test documents": f"{len(documents):,}",
            "Vocabulary": f"{tokenizer.vocab_size:,} entries, {tokenizer.kind}",
            "Unigram entropy": f"{told['unigram_entropy_nats']:.3f} nats a token",
        },
    }


def _encode(
    path: Path, tokenizer: Tokenizer, lines: Iterable[str], seen_by: Iterable[Overlap]
) -> tuple[dict[str, int], NDArray[np.int64], bytes]:
    """Write a text's stream; return its words and bytes, how often each entry is predicted, its digest."""
    words = size = 0
    counts = np.zeros(tokenizer.vocab_size, np.int64)
    whole = hashlib.sha256()
    dtype = id_type(tokenizer.vocab_size)
    with ArrayWriter.open(path, dtype) as file:
        file.append(np.array([EOS], dtype))
        for part in parts(lines):
            content = raw(part)
            whole.update(content)
            for overlap in seen_by:
                overlap.see(part)
            size += len(content)
            words += sum(len(line.split()) + 1 for line in part)
            ragged = Ragged.of(tokenizer.encode(part), dtype)
            stream = np.insert(ragged.tokens, ragged.offsets[1:], EOS)
            counts += np.bincount(stream, minlength=len(counts))
            file.append(stream)
    return {"words": words, "bytes": size}, counts, whole.digest()
