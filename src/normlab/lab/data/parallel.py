"""Parallel text: prepared as memory-mapped tokens of both sides, and checked against a model's limits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from normlab.base.units import count
from normlab.errors import UserError
from normlab.lab.config import PARALLEL_TEXTS, Config, DataConfig
from normlab.lab.data import text
from normlab.lab.data.builtin import generate
from normlab.lab.data.corpus import (
    PreparedCorpus,
    count_facts,
    id_type,
    open_corpus,
    prepare_folder,
    with_digest,
)
from normlab.lab.data.datasets import SIDES, by_name
from normlab.lab.data.ragged import Ragged, RaggedWriter, TokenPairs
from normlab.lab.data.sources import open_text
from normlab.lab.data.tokenizer import EOS, Tokenizer
from normlab.lab.data.vocabulary import vocabulary

LONGEST_SENTENCE: Final = 4096
"""Most tokens, including the end, of a sentence to translate: time and memory grow with their square."""


@dataclass(frozen=True, kw_only=True)
class Corpus(PreparedCorpus):
    """A prepared parallel text; its predicted tokens are those of the target side."""

    train: TokenPairs
    dev: TokenPairs
    dev_text: text.Pairs
    test_text: text.Pairs

    @classmethod
    def load(cls, folder: str | Path) -> Corpus:
        """Load a prepared text. Raises FileNotFoundError if the folder is missing or incomplete."""
        folder = Path(folder)
        _, fields = open_corpus(folder)
        return cls(
            train=TokenPairs(*(Ragged.mapped(folder / f"train.{side}") for side in SIDES)),
            dev=TokenPairs(*(Ragged.mapped(folder / f"dev.{side}") for side in SIDES)),
            dev_text=text.Pairs(*(text.read_lines(folder / f"dev.{side}.txt") for side in SIDES)),
            test_text=text.Pairs(*(text.read_lines(folder / f"test.{side}.txt") for side in SIDES)),
            **fields,
        )


def prepare(config: DataConfig, root: str | Path) -> tuple[DataConfig, Corpus]:
    """Read or generate the text and prepare it under ``root``, unless this was already done.

    Training text is never in memory as a whole: it is read once for its digest and, if it is not prepared
    yet, twice more, for the tokenizer and for its tokens. The exception is a unigram model, which is learned
    from the whole text in memory.

    Returns the config with ``digest`` and the texts of its data set filled in. Raises UserError if the text
    does not have the given digest, if files are missing from the config, if the sides of a text differ in
    their number of lines, if dev or test text has no words, if no training pair is left, or if the text
    changes in the meantime.
    """
    config, dataset = by_name(config)
    texts, origin = _read(config)
    surveys = {name: text.survey(lines, getattr(config, name) or name) for name, lines in texts.items()}
    _require_sound(config, surveys)
    digests = [facts.digest for facts in surveys.values()]
    config = with_digest(config, digests)
    key: list[Any] = [config.digest, config.vocab_size, config.max_len]
    if config.pretokenizer:
        key += [config.pretokenizer, config.source_lang, config.target_lang]
    folder = prepare_folder(root, key, partial(_fill, texts=texts, config=config, train=digests[:2]))
    corpus = Corpus.load(folder)
    return config, replace(corpus, facts=dataset | origin | corpus.facts)


def _read(config: DataConfig) -> tuple[dict[str, Iterable[str]], dict[str, str]]:
    """Return the six texts, which can be iterated again and again, and facts about their origin."""
    given = [name for name in PARALLEL_TEXTS if getattr(config, name)]
    if not given:
        return _generated(config), {"Corpus": f"built-in {config.builtin}, seed {config.builtin_seed}"}
    needed = PARALLEL_TEXTS if config.test_src or config.test_tgt else PARALLEL_TEXTS[:4]
    text.require_texts(given, needed, "both sides of train and dev text are needed, and of test text if any")
    texts: dict[str, Iterable[str]] = {}
    for name in given:
        lines = open_text(getattr(config, name))
        # Training text is too large for memory; the others are needed as a whole.
        texts[name] = lines if name in PARALLEL_TEXTS[:2] else list(lines)
    files = [Path(getattr(config, name)).name for name in given]
    origin: dict[str, str] = {}
    for split, source, target in zip(("Training", "Dev", "Test"), files[::2], files[1::2], strict=False):
        origin[f"{split} text"] = f"{source}, {target}"
    if "test_src" not in texts:
        texts["test_src"], texts["test_tgt"] = texts["dev_src"], texts["dev_tgt"]
        origin["Test text"] = "none given, so the dev text"
    return texts, origin


def _generated(config: DataConfig) -> dict[str, Iterable[str]]:
    """Return the six texts of the built-in corpus."""
    splits = generate(config.builtin, pairs=config.builtin_pairs, seed=config.builtin_seed)
    sides: list[Iterable[str]] = []
    for pairs in (splits.train, splits.dev, splits.test):
        sides += [pairs.source, pairs.target]
    return dict(zip(PARALLEL_TEXTS, sides, strict=True))


def _require_sound(config: DataConfig, surveys: dict[str, text.Survey]) -> None:
    """Raise UserError for sides of different length, and for dev or test text without a word."""
    for source, target in zip(PARALLEL_TEXTS[::2], PARALLEL_TEXTS[1::2], strict=True):
        paths = getattr(config, source), getattr(config, target)
        if not paths[0]:
            continue
        sides = surveys[source], surveys[target]
        text.require_parallel(paths, (sides[0].lines, sides[1].lines))
        for path, side in zip(paths, sides, strict=True):
            if source != "train_src" and side.blank:
                empty = "is empty" if side.lines == 1 else "are all empty"
                raise UserError(f"the {count(side.lines, 'line')} of {path} {empty}; give text with words")


def _fill(
    work: Path, *, texts: dict[str, Iterable[str]], config: DataConfig, train: list[bytes]
) -> dict[str, Any]:
    """Write the files of a prepared text; return its manifest. ``train`` are the digests of its training text
    when it was surveyed.
    """
    tokenizer = vocabulary(config, texts["train_src"], texts["train_tgt"])
    tokenizer.save(work / "tokenizer.json")
    overlap = text.Overlap(texts["dev_src"], texts["test_src"])
    tally = _encode_train(work, tokenizer, (texts["train_src"], texts["train_tgt"]), config.max_len, overlap)
    for name, before, now in zip(PARALLEL_TEXTS[:2], train, tally.digests, strict=True):
        text.require_unchanged(getattr(config, name), before, now)
    _require_pairs(tally, config.max_len)
    for name in PARALLEL_TEXTS[2:]:
        (work / f"{name.replace('_', '.')}.txt").write_bytes(text.raw(list(texts[name])))
    _encode_dev(work, tokenizer, (texts["dev_src"], texts["dev_tgt"]))
    counts = count_facts(tally.target_counts)
    shares = overlap.shares()
    dev_pairs, test_pairs = len(list(texts["dev_src"])), len(list(texts["test_src"]))
    empty, too_long = tally.left_out.values()
    return {
        "digest": config.digest,
        "max_len": config.max_len,
        "pairs": {"read": tally.read, "kept": tally.kept, "left out": tally.left_out},
        "overlap": shares,
        **counts,
        "facts": {
            "Training pairs": f"{tally.kept:,} kept of {tally.read:,}; left out: {empty:,} with an empty "
            f"side, {too_long:,} with a side over {config.max_len} tokens",
            "Dev and test pairs": f"{dev_pairs:,} and {test_pairs:,}",
            "Same source sentences": text.describe_shares(shares),
            "Training tokens": f"{tally.tokens[0]:,} source, {tally.tokens[1]:,} target",
            "Vocabulary": f"{tokenizer.vocab_size:,} entries, joint {tokenizer.kind}",
            "Unigram entropy": f"{counts['unigram_entropy_nats']:.3f} nats a target token",
        },
    }


@dataclass(frozen=True)
class _Tally:
    """What was counted while a training text was encoded, in pairs unless it says otherwise."""

    read: int
    kept: int
    left_out: dict[str, int]
    """By the reason."""
    tokens: tuple[int, int]
    """Source and target tokens in the pairs that are kept."""
    target_counts: NDArray[np.int64]
    """``[V]``: how often each vocabulary entry occurs on the target side, EOS included."""
    digests: list[bytes]


def _encode_train(
    work: Path,
    tokenizer: Tokenizer,
    sides: tuple[Iterable[str], Iterable[str]],
    max_len: int,
    overlap: text.Overlap,
) -> _Tally:
    """Write the tokens of all pairs whose sides have 1 to ``max_len`` - 1 tokens; ``overlap`` sees all."""
    dtype = id_type(tokenizer.vocab_size)
    read = kept = empty = 0
    counts = np.zeros(tokenizer.vocab_size, np.int64)
    digests = hashlib.sha256(), hashlib.sha256()
    with (
        RaggedWriter.open(work / "train.src", dtype) as src,
        RaggedWriter.open(work / "train.tgt", dtype) as tgt,
    ):
        for source_lines, target_lines in text.paired_parts(*sides):
            digests[0].update(text.raw(source_lines))
            digests[1].update(text.raw(target_lines))
            overlap.see(source_lines)
            source = Ragged.of(tokenizer.encode(source_lines), dtype)
            target = Ragged.of(tokenizer.encode_target(target_lines), dtype)
            shorter = np.minimum(source.lengths, target.lengths)
            longer = np.maximum(source.lengths, target.lengths)
            chosen = (shorter > 0) & (longer < max_len)
            source, target = source.only(chosen), target.only(chosen)
            src.append(source)
            tgt.append(target)
            counts += np.bincount(target.tokens, minlength=len(counts))
            read += len(chosen)
            kept += len(source)
            empty += int((shorter == 0).sum())
    counts[EOS] += kept
    left_out = {"empty side": empty, "too long": read - kept - empty}
    tokens = src.tokens.length, tgt.tokens.length
    return _Tally(read, kept, left_out, tokens, counts, [sha.digest() for sha in digests])


def _require_pairs(tally: _Tally, max_len: int) -> None:
    """Raise UserError if no training pair is left."""
    if tally.kept:
        return
    empty, too_long = tally.left_out.values()
    hint = f"type a larger --max-len than {max_len}" if too_long else "give text with words"
    raise UserError(
        f"none of the {tally.read} training pairs is left: {empty} have an empty side, {too_long} are "
        f"longer than max_len; {hint}"
    )


def _encode_dev(work: Path, tokenizer: Tokenizer, sides: tuple[Iterable[str], Iterable[str]]) -> None:
    """Write the tokens of all dev pairs."""
    dtype = id_type(tokenizer.vocab_size)
    encoders = (tokenizer.encode, tokenizer.encode_target)
    for side, lines, encode in zip(SIDES, sides, encoders, strict=True):
        with RaggedWriter.open(work / f"dev.{side}", dtype) as file:
            file.append(Ragged.of(encode(list(lines)), dtype))


def require_lengths(config: Config, corpus: Corpus, max_positions: int | None) -> None:
    """Raise UserError at the first sentence that is too long for a batch of ``train.max_tokens``, or for a
    model with ``max_positions`` (None: no limit).

    Only the source of a test text is checked.
    """
    _require_room_in_batch(corpus, config.train.max_tokens)
    if max_positions is not None:
        _require_positions(corpus, max_positions)
    _require_short_lines(config, corpus, max_positions)


def _require_room_in_batch(corpus: Corpus, max_tokens: int) -> None:
    """Raise UserError if the longest training pair is longer than a batch."""
    longest_source = longest_target = 0
    for source, target in corpus.train.lengths_in_parts():
        row = int(np.argmax(source + target))
        if source[row] + target[row] + 2 > longest_source + longest_target:
            longest_source, longest_target = int(source[row]) + 1, int(target[row]) + 1
    needed = longest_source + longest_target
    if needed > max_tokens:
        raise UserError(
            f"the longest training pair has {longest_source} + {longest_target} tokens, and a batch holds "
            f"--max-tokens {max_tokens}; type --max-tokens {needed}, or leave such pairs out with --max-len "
            f"{max(2, max_tokens // 2)}"
        )


def _require_positions(corpus: Corpus, max_positions: int) -> None:
    """Raise UserError if the longest training sentence has more tokens than the model has positions."""
    longest = 0
    for source, target in corpus.train.lengths_in_parts():
        longest = max(longest, int(source.max()) + 1, int(target.max()) + 1)
    if longest > max_positions:
        raise UserError(
            f"the longest training sentence has {longest} tokens, and the model has learned {max_positions} "
            f"positions; type --max-positions {longest}, or leave longer ones out: --max-len {max_positions}"
        )


def _require_short_lines(config: Config, corpus: Corpus, max_positions: int | None) -> None:
    """Raise UserError at the longest line of dev, or of the test's source, if it is too long."""
    limit, why = LONGEST_SENTENCE, f"a translation takes at most {LONGEST_SENTENCE:,}"
    advice = "split it into sentences"
    if max_positions is not None and max_positions <= limit:
        limit, why = max_positions, f"the model has learned {max_positions} positions"
        advice = "type --max-positions {}, or shorten the line"
    dev_source, dev_target = corpus.dev.lengths
    test_source = np.array([len(ids) for ids in corpus.tokenizer.encode(corpus.test_text.source)])
    lengths_of = {"dev_src": dev_source, "dev_tgt": dev_target, "test_src": test_source}
    for name, lengths in lengths_of.items():
        line = int(np.argmax(lengths))
        length = int(lengths[line]) + 1
        if length > limit:
            file = Path(getattr(config.data, name)).name or name
            raise UserError(
                f"{file}, line {line + 1} has {length} tokens, and {why}; {advice.format(length)}"
            )
