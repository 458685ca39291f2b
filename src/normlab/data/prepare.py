"""From text to a prepared corpus: a folder with tokenizer, memory-mapped tokens and the facts about them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from normlab.data.batches import Ragged, TokenPairs
from normlab.data.builtin import Splits, generate
from normlab.data.folder import (
    entropy_nats,
    id_type,
    prepared,
    types_of,
    whole_manifest,
    with_digest,
)
from normlab.data.text import Pairs, read_lines, read_parallel
from normlab.data.tokenizer import EOS, Tokenizer
from normlab.spec.config import DataConfig


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus; token arrays stay on disk until they are read."""

    folder: Path
    tokenizer: Tokenizer
    train: TokenPairs
    dev: TokenPairs
    dev_text: Pairs
    test_text: Pairs
    unigram_entropy_nats: float
    """Entropy of the target tokens' distribution in training, EOS included: the loss of a model that knows no
    more than how frequent each token is."""
    target_types: NDArray[np.bool_]
    """``[V]``: types of the target side in training, and EOS."""
    facts: dict[str, str]
    """In words, for people."""

    @classmethod
    def load(cls, folder: str | Path) -> Corpus:
        folder = Path(folder)
        manifest = whole_manifest(folder)
        tokenizer = Tokenizer.load(folder / "tokenizer.json")
        return cls(
            folder=folder,
            tokenizer=tokenizer,
            train=_load_tokens(folder, "train"),
            dev=_load_tokens(folder, "dev"),
            dev_text=_load_text(folder, "dev"),
            test_text=_load_text(folder, "test"),
            unigram_entropy_nats=manifest["unigram_entropy_nats"],
            target_types=types_of(manifest, tokenizer.vocab_size),
            facts=manifest["facts"],
        )


def prepare(config: DataConfig, root: str | Path) -> tuple[DataConfig, Corpus]:
    """Reads or generates the text and prepares it under ``root``, or takes what is there for the same text.

    Returns the config with ``digest`` filled. Raises ``ValueError`` if a digest was given and the text is not
    that text any more, if files are missing from the config, or if no training pair is left.
    """
    splits, origin = _read(config)
    texts = [
        side for pairs in (splits.train, splits.dev, splits.test) for side in (pairs.source, pairs.target)
    ]
    config = with_digest(config, texts)
    key = [config.digest, config.vocab_size, config.max_len]
    folder = prepared(root, key, partial(_fill, splits=splits, config=config))
    corpus = Corpus.load(folder)
    return config, replace(corpus, facts=origin | corpus.facts)


def _read(config: DataConfig) -> tuple[Splits, dict[str, str]]:
    """The six texts, and where they come from in words."""
    names = ("train_src", "train_tgt", "dev_src", "dev_tgt", "test_src", "test_tgt")
    flags = {name: f"--{name.replace('_', '-')}" for name in names}
    given = [name for name in names if getattr(config, name)]
    if not given:
        name = config.builtin
        splits = generate(name, pairs=config.builtin_pairs, seed=config.builtin_seed)
        return splits, {"Corpus": f"built-in {name}, seed {config.builtin_seed}"}
    wanted = names[:4] + (names[4:] if config.test_src or config.test_tgt else ())
    missing = [name for name in wanted if name not in given]
    if missing:
        raise ValueError(
            f"only {', '.join(flags[name] for name in given)} came, but both sides of train and dev text are "
            f"needed, and of test text if there is any; pass {', '.join(flags[name] for name in missing)}"
        )
    train = Pairs(*read_parallel(config.train_src, config.train_tgt))
    dev = Pairs(*read_parallel(config.dev_src, config.dev_tgt))
    test = Pairs(*read_parallel(config.test_src, config.test_tgt)) if config.test_src else dev
    for name, pairs in (("dev", dev), ("test", test)):
        for side, lines in (("src", pairs.source), ("tgt", pairs.target)):
            if not any(line.strip() for line in lines):
                path = getattr(config, f"{name}_{side}")
                raise ValueError(f"all {len(lines)} lines of {path} are empty; give text with words")
    files = {name: Path(getattr(config, name)).name for name in given}
    origin = {
        "Training text": f"{files['train_src']}, {files['train_tgt']}",
        "Dev text": f"{files['dev_src']}, {files['dev_tgt']}",
        "Test text": "none given, so the dev text",
    }
    if config.test_src:
        origin["Test text"] = f"{files['test_src']}, {files['test_tgt']}"
    return Splits(train, dev, test), origin


def _fill(work: Path, *, splits: Splits, config: DataConfig) -> dict[str, Any]:
    train = splits.train
    tokenizer = Tokenizer.train([*train.source, *train.target], config.vocab_size)
    tokenizer.save(work / "tokenizer.json")
    tokens = tokenizer.encode(train.source), tokenizer.encode(train.target)
    source, target, left_out = _keep(*tokens, config.max_len)
    if not source:
        hint = (
            f"type a larger --max-len than {config.max_len}"
            if left_out["too long"]
            else "give text with words"
        )
        raise ValueError(
            f"none of the {len(train)} training pairs is left: {left_out['empty side']} have an empty side, "
            f"{left_out['too long']} are longer than max_len; {hint}"
        )
    dtype = id_type(tokenizer.vocab_size)
    target_train = Ragged.of(target, dtype)
    _save_tokens(work, "train", Ragged.of(source, dtype), target_train)
    dev = [Ragged.of(tokenizer.encode(lines), dtype) for lines in (splits.dev.source, splits.dev.target)]
    _save_tokens(work, "dev", *dev)
    for name, pairs in (("dev", splits.dev), ("test", splits.test)):
        for side, lines in (("src", pairs.source), ("tgt", pairs.target)):
            (work / f"{name}.{side}.txt").write_bytes("".join(f"{line}\n" for line in lines).encode())
    counts = np.bincount(target_train.tokens, minlength=tokenizer.vocab_size)
    counts[EOS] += len(target)
    entropy = entropy_nats(counts)
    return {
        "digest": config.digest,
        "max_len": config.max_len,
        "vocab_size": tokenizer.vocab_size,
        "pairs": {"read": len(train), "kept": len(source), "left out": left_out},
        "unigram_entropy_nats": entropy,
        "target_types": np.flatnonzero(counts).tolist(),
        "facts": {
            "Training pairs": f"{len(source):,} kept of {len(train):,}; left out: {left_out['empty side']:,} "
            f"with an empty side, {left_out['too long']:,} with a side over {config.max_len} tokens",
            "Dev and test pairs": f"{len(splits.dev):,} and {len(splits.test):,}",
            "Training tokens": f"{sum(map(len, source)):,} source, {len(target_train.tokens):,} target",
            "Vocabulary": f"{tokenizer.vocab_size:,} types, joint byte-pair encoding",
            "Unigram entropy": f"{entropy:.3f} nats a target token",
        },
    }


def _keep(
    source: list[list[int]], target: list[list[int]], max_len: int
) -> tuple[list[list[int]], list[list[int]], dict[str, int]]:
    """Pairs with two sides of 1 to ``max_len`` - 1 tokens, and how many were left out for what reason."""
    empty = [not s or not t for s, t in zip(source, target, strict=True)]
    long = [max(len(s), len(t)) >= max_len for s, t in zip(source, target, strict=True)]
    kept = [i for i in range(len(source)) if not empty[i] and not long[i]]
    left_out = {"empty side": sum(empty), "too long": len(source) - len(kept) - sum(empty)}
    return [source[i] for i in kept], [target[i] for i in kept], left_out


def _save_tokens(folder: Path, name: str, source: Ragged, target: Ragged) -> None:
    for side, ragged in (("src", source), ("tgt", target)):
        np.save(folder / f"{name}.{side}.tokens.npy", ragged.tokens, allow_pickle=False)
        np.save(folder / f"{name}.{side}.offsets.npy", ragged.offsets, allow_pickle=False)


def _load_tokens(folder: Path, name: str) -> TokenPairs:
    def load(side: str, what: str) -> Any:
        return np.load(folder / f"{name}.{side}.{what}.npy", mmap_mode="r", allow_pickle=False)

    return TokenPairs(*(Ragged(load(side, "tokens"), load(side, "offsets")) for side in ("src", "tgt")))


def _load_text(folder: Path, name: str) -> Pairs:
    return Pairs(read_lines(folder / f"{name}.src.txt"), read_lines(folder / f"{name}.tgt.txt"))
