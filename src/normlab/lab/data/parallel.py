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
    key = [config.digest, config.vocab_size, config.max_len]
    if config.pretokenizer:
        key += [config.pretokenizer, config.source_lang, config.target_lang]
    folder = prepare_folder(root, key, partial(_fill, texts=texts, config=config, train=digests[:2]))
    corpus = Corpus.load(folder)
    return config, replace(corpus, facts=dataset | origin | corpus.facts)


def _read(config: DataConfig) -> tuple[dict[str, Iterable[str]], dict[str, str]]:
    """Return the six texts, which can be iterated again and again, and facts about their origin."""
    given = [name for name in PARALLEL_TEXTS if getattr(config, name)]
    if not given:
        splits = generate(config.builtin, pairs=config.builtin_pairs, seed=config.builtin_seed)
        sides = (side for pairs in (splits.train, splits.dev, splits.test) for side in vars(pairs).values())
        origin = {"Corpus": f"built-in {config.builtin}, seed {config.builtin_seed}"}
        return dict(zip(PARALLEL_TEXTS, sides, strict=True)), origin
    needed = PARALLEL_TEXTS if config.test_src or config.test_tgt else PARALLEL_TEXTS[:4]
    text.require_texts(given, needed, "both sides of train and dev text are needed, and of test text if any")
    texts = {name: open_text(getattr(config, name)) for name in given}
    held_out = {name: list(lines) for name, lines in texts.items() if name not in PARALLEL_TEXTS[:2]}
    files = [Path(getattr(config, name)).name for name in given]
    origin = {
        f"{split} text": f"{source}, {target}"
        for split, source, target in zip(("Training", "Dev", "Test"), files[::2], files[1::2], strict=False)
    }
    origin.setdefault("Test text", "none given, so the dev text")
    dev_for_test = {"test_src": held_out["dev_src"], "test_tgt": held_out["dev_tgt"]}
    return {**texts, **dev_for_test, **held_out}, origin


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
    tokenizer = vocabulary(config, texts["train_src"], texts["train_tgt"])
    tokenizer.save(work / "tokenizer.json")
    overlap = text.Overlap(texts["dev_src"], texts["test_src"])
    tally = _encode_train(work, tokenizer, (texts["train_src"], texts["train_tgt"]), config.max_len, overlap)
    for name, before, now in zip(PARALLEL_TEXTS[:2], train, tally.digests, strict=True):
        text.require_unchanged(getattr(config, name), before, now)
    empty, too_long = tally.left_out.values()
    if not tally.kept:
        hint = f"type a larger --max-len than {config.max_len}" if too_long else "give text with words"
        raise UserError(
            f"none of the {tally.read} training pairs is left: {empty} have an empty side, {too_long} are "
            f"longer than max_len; {hint}"
        )
    for name in PARALLEL_TEXTS[2:]:
        (work / f"{name.replace('_', '.')}.txt").write_bytes(text.raw(list(texts[name])))
    dtype = id_type(tokenizer.vocab_size)
    for side, encode in zip(SIDES, (tokenizer.encode, tokenizer.encode_target), strict=True):
        with RaggedWriter.open(work / f"dev.{side}", dtype) as file:
            file.append(Ragged.of(encode(list(texts[f"dev_{side}"])), dtype))
    sizes = [len(list(texts[f"{name}_src"])) for name in ("dev", "test")]
    counts = count_facts(tally.target_counts)
    shares = overlap.shares()
    return {
        "digest": config.digest,
        "max_len": config.max_len,
        "pairs": {"read": tally.read, "kept": tally.kept, "left out": tally.left_out},
        "overlap": shares,
        **counts,
        "facts": {
            "Training pairs": f"{tally.kept:,} kept of {tally.read:,}; left out: {empty:,} with an empty "
            f"side, {too_long:,} with a side over {config.max_len} tokens",
            "Dev and test pairs": f"{sizes[0]:,} and {sizes[1]:,}",
            "Same source sentences": text.describe_shares(shares),
            "Training tokens": f"{tally.tokens[0]:,} source, {tally.tokens[1]:,} target",
            "Vocabulary": f"{tokenizer.vocab_size:,} entries, joint {tokenizer.kind}",
            "Unigram entropy": f"{counts['unigram_entropy_nats']:.3f} nats a target token",
        },
    }


@dataclass(frozen=True)
class _Tally:
    read: int
    kept: int
    left_out: dict[str, int]
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
    whole = hashlib.sha256(), hashlib.sha256()
    encoders = tokenizer.encode, tokenizer.encode_target
    with (
        RaggedWriter.open(work / "train.src", dtype) as src,
        RaggedWriter.open(work / "train.tgt", dtype) as tgt,
    ):
        for part in text.paired_parts(*sides):
            for hashed, lines in zip(whole, part, strict=True):
                hashed.update(text.raw(lines))
            overlap.see(part[0])
            both = [Ragged.of(encode(lines), dtype) for encode, lines in zip(encoders, part, strict=True)]
            lengths = np.stack([side.lengths for side in both])
            chosen = (lengths.min(0) > 0) & (lengths.max(0) < max_len)
            source, target = (side.only(chosen) for side in both)
            src.append(source)
            tgt.append(target)
            counts += np.bincount(target.tokens, minlength=len(counts))
            read, kept = read + len(chosen), kept + len(source)
            empty += int((lengths.min(0) == 0).sum())
    counts[EOS] += kept
    left_out = {"empty side": empty, "too long": read - kept - empty}
    tokens = src.tokens.length, tgt.tokens.length
    return _Tally(read, kept, left_out, tokens, counts, [hashed.digest() for hashed in whole])


def require_lengths(config: Config, corpus: Corpus, max_positions: int | None) -> None:
    """Raise UserError at the first sentence that is too long for a batch of ``train.max_tokens``, or for a
    model with ``max_positions`` (None: no limit).

    Only the source of a test text is checked.
    """
    longest, max_tokens = [0, 0], config.train.max_tokens
    for source, target in corpus.train.lengths_in_parts():
        row = int(np.argmax(source + target))
        if source[row] + target[row] + 2 > sum(longest):
            longest = [int(source[row]) + 1, int(target[row]) + 1]
    if (needed := sum(longest)) > max_tokens:
        raise UserError(
            f"the longest training pair has {longest[0]} + {longest[1]} tokens, and a batch holds "
            f"--max-tokens {max_tokens}; type --max-tokens {needed}, or leave such pairs out with --max-len "
            f"{max(2, max_tokens // 2)}"
        )
    if max_positions is not None:
        most = max(int(max(s.max(), t.max())) + 1 for s, t in corpus.train.lengths_in_parts())
        if most > max_positions:
            raise UserError(
                f"the longest training sentence has {most} tokens, and the model has learned {max_positions} "
                f"positions; type --max-positions {most}, or leave longer ones out: --max-len {max_positions}"
            )
    limit, why = LONGEST_SENTENCE, f"a translation takes at most {LONGEST_SENTENCE:,}"
    advice = "split it into sentences"
    if max_positions is not None and max_positions <= limit:
        limit, why = max_positions, f"the model has learned {max_positions} positions"
        advice = "type --max-positions {}, or shorten the line"
    tested = np.array([len(ids) for ids in corpus.tokenizer.encode(corpus.test_text.source)])
    for name, lengths in zip(("dev_src", "dev_tgt", "test_src"), (*corpus.dev.lengths, tested), strict=True):
        line = int(np.argmax(lengths))
        if (length := int(lengths[line]) + 1) > limit:
            file = Path(getattr(config.data, name)).name or name
            raise UserError(
                f"{file}, line {line + 1} has {length} tokens, and {why}; {advice.format(length)}"
            )
