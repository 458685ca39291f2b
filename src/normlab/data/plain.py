"""Plain text for language models: one stream of tokens for each of train, dev and test, memory-mapped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from normlab.data.batches import Ints
from normlab.data.builtin import generate
from normlab.data.folder import entropy_nats, id_type, prepared, types_of, whole_manifest, with_digest
from normlab.data.text import read_lines
from normlab.data.tokenizer import EOS, UNK, Tokenizer
from normlab.spec.config import DataConfig

SPLITS = ("train", "dev", "test")

_LINES_AT_A_TIME = 20_000


@dataclass(frozen=True)
class Stream:
    """A text from its first line to its last: EOS, and then each line's tokens with EOS at its end.

    An empty line is an EOS of its own, so nothing of the text's layout is lost.
    """

    tokens: Ints
    """Text begins at 1; what stands at i is predicted from what stands before it."""
    words: int
    """Separated by white space; the end of a line counts as one."""
    bytes: int
    """Of the raw text in UTF-8, ends of lines included."""

    @property
    def predicted(self) -> int:
        """How many tokens of the text there are to predict."""
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
    target_types: NDArray[np.bool_]
    """``[V]``: types that occur in training."""
    facts: dict[str, str]
    """In words, for people."""

    @classmethod
    def load(cls, folder: str | Path) -> TextCorpus:
        """Raises FileNotFoundError if the folder is not there or not whole."""
        folder = Path(folder)
        manifest = whole_manifest(folder)
        tokenizer = Tokenizer.load(folder / "tokenizer.json")

        def stream(name: str) -> Stream:
            tokens = np.load(folder / f"{name}.tokens.npy", mmap_mode="r", allow_pickle=False)
            return Stream(tokens, **manifest["sizes"][name])

        return cls(
            folder=folder,
            tokenizer=tokenizer,
            train=stream("train"),
            dev=stream("dev"),
            test=stream("test"),
            unigram_entropy_nats=manifest["unigram_entropy_nats"],
            target_types=types_of(manifest, tokenizer.vocab_size),
            facts=manifest["facts"],
        )


def prepare_text(config: DataConfig, root: str | Path) -> tuple[DataConfig, TextCorpus]:
    """Reads or generates the text and prepares it under ``root``, or takes what is there for the same text.

    Returns the config with ``digest`` filled. Without files it is the target side of the built-in corpus;
    where no test text is given, dev serves. Raises ``ValueError`` if a digest was given and the text is not
    that text any more, if train or dev text is missing from the config, or if a text has no word.
    """
    texts, origin = _read(config)
    config = with_digest(config, texts.values())
    key = ["plain", config.digest, config.vocab_size]
    folder = prepared(root, key, partial(_fill, texts=texts, config=config))
    corpus = TextCorpus.load(folder)
    return config, replace(corpus, facts=origin | corpus.facts)


def _read(config: DataConfig) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Lines of train, dev and test, and where they come from in words."""
    paths = {name: getattr(config, f"{name}_text") for name in SPLITS}
    given = [name for name in SPLITS if paths[name]]
    if not given:
        name, seed = config.builtin, config.builtin_seed
        splits = generate(name, pairs=config.builtin_pairs, seed=seed)
        texts = {split: getattr(splits, split).target for split in SPLITS}
        return texts, {"Corpus": f"target side of built-in {name}, seed {seed}"}
    missing = [name for name in SPLITS[:2] if name not in given]
    if missing:
        raise ValueError(
            f"only {', '.join(f'--{name}-text' for name in given)} came, but train and dev text are needed; "
            f"pass {', '.join(f'--{name}-text' for name in missing)}"
        )
    texts = {name: read_lines(paths[name]) for name in given}
    for name, lines in texts.items():
        if not any(line.strip() for line in lines):
            raise ValueError(f"{paths[name]} holds no word; pass a file of text")
    origin = {f"{name.capitalize()} text": Path(paths[name]).name for name in given}
    return {"test": texts["dev"], **texts}, {"Test text": "none given, so the dev text", **origin}


def _fill(work: Path, *, texts: dict[str, list[str]], config: DataConfig) -> dict[str, Any]:
    tokenizer = Tokenizer.train(texts["train"], config.vocab_size)
    tokenizer.save(work / "tokenizer.json")
    streams = {name: _tokens(tokenizer, lines) for name, lines in texts.items()}
    for name, tokens in streams.items():
        np.save(work / f"{name}.tokens.npy", tokens, allow_pickle=False)
    sizes = {
        name: {
            "words": sum(len(line.split()) + 1 for line in lines),
            "bytes": sum(len(line.encode()) + 1 for line in lines),
        }
        for name, lines in texts.items()
    }
    unknown = {name: int((tokens == UNK).sum()) for name, tokens in streams.items()}
    counts = np.bincount(streams["train"][1:], minlength=tokenizer.vocab_size)
    entropy = entropy_nats(counts)
    read = {name: f"{sizes[name]['words']:,} words, {sizes[name]['bytes']:,} bytes" for name in SPLITS}
    return {
        "digest": config.digest,
        "vocab_size": tokenizer.vocab_size,
        "sizes": sizes,
        "unigram_entropy_nats": entropy,
        "target_types": np.flatnonzero(counts).tolist(),
        "facts": {
            "Training size": f"{read['train']}, {int(counts.sum()):,} tokens",
            "Dev size": f"{read['dev']}, {unknown['dev']:,} unknown characters",
            "Test size": f"{read['test']}, {unknown['test']:,} unknown characters",
            "Vocabulary": f"{tokenizer.vocab_size:,} types, byte-pair encoding",
            "Unigram entropy": f"{entropy:.3f} nats a token",
        },
    }


def _tokens(tokenizer: Tokenizer, lines: Sequence[str]) -> Ints:
    """The stream of some lines, a part at a time: lists of ids take many times the room of the stream."""
    dtype = id_type(tokenizer.vocab_size)
    parts = [np.array([EOS], dtype)]
    for start in range(0, len(lines), _LINES_AT_A_TIME):
        encoded = tokenizer.encode(lines[start : start + _LINES_AT_A_TIME])
        parts.append(np.array([token for ids in encoded for token in (*ids, EOS)], dtype))
    return np.concatenate(parts)
