"""Prepares parallel text: a folder with the tokenizer, memory-mapped tokens and facts about them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from normlab.data.builtin import generate
from normlab.data.encode import encoded
from normlab.data.folder import (
    entropy_nats,
    id_type,
    prepared,
    target_vocab_of,
    whole_manifest,
    with_digest,
)
from normlab.data.lines import (
    Survey,
    paired_parts,
    raw,
    require_parallel,
    require_unchanged,
    survey,
)
from normlab.data.named import by_name
from normlab.data.ragged import Ragged, RaggedWriter, TokenPairs
from normlab.data.sources import open_lines
from normlab.data.text import Pairs, read_lines
from normlab.data.tokenizer import EOS, Tokenizer
from normlab.data.vocabulary import corpus_key, digests, load, vocabulary
from normlab.errors import UserError
from normlab.spec.config import PARALLEL_TEXTS, DataConfig
from normlab.spec.fields import flag_name


@dataclass(frozen=True)
class Corpus:
    """A prepared parallel text; token arrays stay on disk until they are read."""

    folder: Path
    tokenizer: Tokenizer
    train: TokenPairs
    dev: TokenPairs
    dev_text: Pairs
    test_text: Pairs
    unigram_entropy_nats: float
    """Entropy of the target tokens' distribution in training, EOS included: the loss of a model that knows
    only how frequent each token is."""
    target_vocab: NDArray[np.bool_]
    """``[V]``: vocabulary entries of the target side in training, and EOS."""
    facts: dict[str, str]
    """Facts for the terminal and the page, by their labels."""

    @classmethod
    def load(cls, folder: str | Path) -> Corpus:
        folder = Path(folder)
        manifest = whole_manifest(folder)
        tokenizer = load(folder / "tokenizer.json")
        return cls(
            folder=folder,
            tokenizer=tokenizer,
            train=_load_tokens(folder, "train"),
            dev=_load_tokens(folder, "dev"),
            dev_text=_load_text(folder, "dev"),
            test_text=_load_text(folder, "test"),
            unigram_entropy_nats=manifest["unigram_entropy_nats"],
            target_vocab=target_vocab_of(manifest, tokenizer.vocab_size),
            facts=manifest["facts"],
        )


def prepare(config: DataConfig, root: str | Path) -> tuple[DataConfig, Corpus]:
    """Read or generate the text and prepare it under ``root``, unless the same text is prepared there
    already.

    Training text is never in memory as a whole: it is read once for its digest, and twice more if it is not
    prepared yet, for the tokenizer and for its tokens. A unigram model is the exception: it is learned from
    the whole text in memory.

    Returns the config with ``digest`` and the texts of its data set filled in. Raises UserError if the text
    does not have the given digest, if files are missing from the config, if the sides of a text differ in
    their number of lines, if dev or test text has no word, if no training pair is left, or if the text
    changes meanwhile.
    """
    config, named = by_name(config)
    texts, origin = _read(config)
    surveys = {name: survey(lines) for name, lines in texts.items()}
    if config.train_src:
        _require_sound(config, surveys)
    texts_digests = [found.digest for found in surveys.values()]
    config = with_digest(config, [*texts_digests, *digests(config)])
    key = [config.digest, config.vocab_size, config.max_len, *corpus_key(config)]
    folder = prepared(root, key, partial(_fill, texts=texts, config=config, train=texts_digests[:2]))
    corpus = Corpus.load(folder)
    return config, replace(corpus, facts=named | origin | corpus.facts)


def _read(config: DataConfig) -> tuple[dict[str, Iterable[str]], dict[str, str]]:
    """Return the six texts, which can be iterated repeatedly, and facts about their origin."""
    flags = {name: flag_name(name) for name in PARALLEL_TEXTS}
    given = [name for name in PARALLEL_TEXTS if getattr(config, name)]
    if not given:
        splits = generate(config.builtin, pairs=config.builtin_pairs, seed=config.builtin_seed)
        sides = (side for pairs in (splits.train, splits.dev, splits.test) for side in vars(pairs).values())
        return dict(zip(PARALLEL_TEXTS, sides, strict=True)), {
            "Corpus": f"built-in {config.builtin}, seed {config.builtin_seed}"
        }
    needed = PARALLEL_TEXTS if config.test_src or config.test_tgt else PARALLEL_TEXTS[:4]
    missing = [name for name in needed if name not in given]
    if missing:
        raise UserError(
            f"only {', '.join(flags[name] for name in given)} came, but both sides of train and dev text are "
            f"needed, and of test text if there is any; pass {', '.join(flags[name] for name in missing)}"
        )
    opened = {name: open_lines(getattr(config, name)) for name in given}
    held_out = {name: list(lines) for name, lines in opened.items() if name not in PARALLEL_TEXTS[:2]}
    files = {name: Path(getattr(config, name)).name for name in given}
    origin = {
        "Training text": f"{files['train_src']}, {files['train_tgt']}",
        "Dev text": f"{files['dev_src']}, {files['dev_tgt']}",
        "Test text": "none given, so the dev text",
    }
    if config.test_src:
        origin["Test text"] = f"{files['test_src']}, {files['test_tgt']}"
    dev_for_test = {"test_src": held_out["dev_src"], "test_tgt": held_out["dev_tgt"]}
    return {**opened, **dev_for_test, **held_out}, origin


def _require_sound(config: DataConfig, surveys: dict[str, Survey]) -> None:
    """Raise UserError for sides of different length, and for dev or test text without a word."""
    for name in ("train", "dev", "test"):
        source, target = f"{name}_src", f"{name}_tgt"
        paths = getattr(config, source), getattr(config, target)
        if not paths[0]:
            continue
        require_parallel(paths, (surveys[source].lines, surveys[target].lines))
        for path, side in zip(paths, (source, target), strict=True):
            if name != "train" and surveys[side].blank:
                raise UserError(f"all {surveys[side].lines} lines of {path} are empty; give text with words")


def _fill(
    work: Path, *, texts: dict[str, Iterable[str]], config: DataConfig, train: list[bytes]
) -> dict[str, Any]:
    tokenizer = vocabulary(config, texts["train_src"], texts["train_tgt"])
    tokenizer.save(work / "tokenizer.json")
    tally = _encode_train(work, tokenizer, (texts["train_src"], texts["train_tgt"]), config.max_len)
    for name, before, now in zip(PARALLEL_TEXTS[:2], train, tally.digests, strict=True):
        require_unchanged(getattr(config, name), before, now)
    _require_some(config, tally)
    sizes = []
    for name in ("dev", "test"):
        sides = {side: list(texts[f"{name}_{side}"]) for side in ("src", "tgt")}
        sizes.append(len(sides["src"]))
        encoders = tokenizer.encode, tokenizer.encode_target
        for (side, lines), encode in zip(sides.items(), encoders, strict=True):
            (work / f"{name}.{side}.txt").write_bytes(raw(lines))
            if name == "dev":
                _save_tokens(work, f"dev.{side}", Ragged.of(encode(lines), tally.dtype))
    entropy = entropy_nats(tally.target_counts)
    return {
        "digest": config.digest,
        "max_len": config.max_len,
        "vocab_size": tokenizer.vocab_size,
        "pairs": {"read": tally.read, "kept": tally.kept, "left out": tally.left_out},
        "unigram_entropy_nats": entropy,
        "target_vocab": np.flatnonzero(tally.target_counts).tolist(),
        "facts": {
            "Training pairs": f"{tally.kept:,} kept of {tally.read:,}; left out: "
            f"{tally.left_out['empty side']:,} with an empty side, {tally.left_out['too long']:,} with a "
            f"side over {config.max_len} tokens",
            "Dev and test pairs": f"{sizes[0]:,} and {sizes[1]:,}",
            "Training tokens": f"{tally.tokens[0]:,} source, {tally.tokens[1]:,} target",
            "Vocabulary": f"{tokenizer.vocab_size:,} entries, joint {tokenizer.kind}",
            "Unigram entropy": f"{entropy:.3f} nats a target token",
        },
    }


@dataclass
class _Tally:
    """Counts of a training text that is encoded."""

    dtype: type[np.integer]
    target_counts: NDArray[np.int64]
    """``[V]``: how often each vocabulary entry occurs on the target side, EOS included."""
    read: int = 0
    kept: int = 0
    left_out: dict[str, int] = field(default_factory=lambda: {"empty side": 0, "too long": 0})
    tokens: tuple[int, int] = (0, 0)
    """Source and target tokens of the pairs that are kept."""
    digests: list[bytes] = field(default_factory=list)


def _encode_train(
    work: Path, tokenizer: Tokenizer, sides: tuple[Iterable[str], Iterable[str]], max_len: int
) -> _Tally:
    """Write the tokens of all pairs whose sides have 1 to ``max_len`` - 1 tokens."""
    dtype = id_type(tokenizer.vocab_size)
    tally = _Tally(dtype, np.zeros(tokenizer.vocab_size, np.int64))
    whole = hashlib.sha256(), hashlib.sha256()
    with ExitStack() as open_files:
        files = [
            open_files.enter_context(RaggedWriter(work / f"train.{side}", dtype)) for side in ("src", "tgt")
        ]
        for part, both in encoded(tokenizer, paired_parts(*sides), dtype):
            for hashed, lines in zip(whole, part, strict=True):
                hashed.update(raw(lines))
            kept = _keep(tally, both, max_len)
            for file, side in zip(files, kept, strict=True):
                file.append(side)
            tally.target_counts += np.bincount(kept[1].tokens, minlength=tokenizer.vocab_size)
        tally.tokens = files[0].tokens, files[1].tokens
    tally.target_counts[EOS] += tally.kept
    tally.digests = [hashed.digest() for hashed in whole]
    return tally


def _keep(tally: _Tally, both: list[Ragged], max_len: int) -> list[Ragged]:
    """Return the pairs of a part that are kept for training, and count both these and the others."""
    shorter = np.minimum(both[0].lengths, both[1].lengths)
    longer = np.maximum(both[0].lengths, both[1].lengths)
    kept = (shorter > 0) & (longer < max_len)
    empty = int((shorter == 0).sum())
    tally.read += len(kept)
    tally.kept += int(kept.sum())
    tally.left_out["empty side"] += empty
    tally.left_out["too long"] += len(kept) - int(kept.sum()) - empty
    return [side.only(kept) for side in both]


def _require_some(config: DataConfig, tally: _Tally) -> None:
    if tally.kept:
        return
    too_long = tally.left_out["too long"]
    hint = f"type a larger --max-len than {config.max_len}" if too_long else "give text with words"
    raise UserError(
        f"none of the {tally.read} training pairs is left: {tally.left_out['empty side']} have an empty "
        f"side, {too_long} are longer than max_len; {hint}"
    )


def _save_tokens(folder: Path, name: str, ragged: Ragged) -> None:
    with RaggedWriter(folder / name, ragged.tokens.dtype.type) as file:
        file.append(ragged)


def _load_tokens(folder: Path, name: str) -> TokenPairs:
    return TokenPairs(*(Ragged.mapped(folder / f"{name}.{side}") for side in ("src", "tgt")))


def _load_text(folder: Path, name: str) -> Pairs:
    return Pairs(read_lines(folder / f"{name}.src.txt"), read_lines(folder / f"{name}.tgt.txt"))
