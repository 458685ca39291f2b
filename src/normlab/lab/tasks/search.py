"""Translations of lines: searched for or drawn in batches, each line with its candidates and their scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from normlab.base.model_config import derive
from normlab.base.units import count as number_of
from normlab.errors import UserError
from normlab.lab.config import DecodeConfig
from normlab.lab.data.parallel import LONGEST_SENTENCE
from normlab.lab.data.text import require_words
from normlab.lab.data.tokenizer import UNK, Tokenizer
from normlab.lab.tasks.task import choice_of
from normlab.nn import PAD, Seq2Seq
from normlab.nn.decode import EOS, FREE, Bounds, Hypothesis, sample, search
from normlab.nn.model import evaluating

SEARCH_POSITIONS = 4096
"""Source positions in a batch of the search, summed over its beams."""


@dataclass(frozen=True)
class Candidate:
    """A translation with its score: its log-probability, which beam search divides by the length penalty."""

    text: str
    score: float


def n_best_lines(
    model: Seq2Seq,
    tokenizer: Tokenizer,
    lines: Sequence[str],
    decode: DecodeConfig,
    *,
    count: int,
    prefixes: Sequence[str] | None = None,
    allowed: Tensor | None = None,
    on_done: Callable[[float], None] = lambda share: None,
) -> list[list[Candidate]]:
    """Return ``count`` translations of each raw line: the best of a search, best first, or samples.

    Each begins with its line's prefix. A line without words has one empty translation, and so does a line for
    which a diverged model finds none. Samples depend only on ``sample_seed``, the line's number and the
    sample's. ``on_done`` is called after each batch with the share of the lines translated so far.

    Raises UserError for a count that the search cannot give, for prefixes that cannot be produced, and for
    lines that are too long.
    """
    width = width_of(decode, count)
    require_words(lines, "the text")
    encoded = tokenizer.encode(list(lines))
    forced = _prefix_ids(tokenizer, [""] * len(lines) if prefixes is None else prefixes, allowed)
    if len(forced) != len(lines):
        noun = "prefix" if len(forced) == 1 else "prefixes"
        raise UserError(
            f"{number_of(len(lines), 'line')} but {len(forced):,} {noun}; give one for each, '' for none"
        )
    _require_short(encoded, "")
    _require_short(forced, " in its prefix")
    device = next(model.parameters()).device
    outputs = [[Candidate("", 0.0)] for _ in lines]
    finished = 0
    with evaluating(model):
        for rows, source in _search_batches(encoded, SEARCH_POSITIONS // width):
            prefix = _prefix([forced[row] for row in rows], device)
            bounds = Bounds(decode.max_len_ratio, decode.min_length, prefix, allowed)
            hypotheses = _search(model, source.to(device), decode, bounds, rows, width)
            for row, hypotheses_of_row in zip(rows, hypotheses, strict=True):
                best = hypotheses_of_row[:count]
                texts = tokenizer.decode([hypothesis.ids for hypothesis in best])
                outputs[row] = [Candidate(text, h.score) for text, h in zip(texts, best, strict=True)]
                if not best:
                    outputs[row] = [Candidate("", -math.inf)]
            finished += len(rows)
            on_done(finished / len(lines))
    return outputs


def _require_short(sentences: Sequence[Sequence[int]], where: str) -> None:
    for number, ids in enumerate(sentences, 1):
        if len(ids) >= LONGEST_SENTENCE:
            raise UserError(
                f"line {number:,} has {len(ids):,} tokens{where}, and a translation takes at most "
                f"{LONGEST_SENTENCE - 1:,}; split it into sentences"
            )


def width_of(decode: DecodeConfig, count: int) -> int:
    """Return how many hypotheses of a sentence are computed in parallel.

    Raises UserError for an impossible count.
    """
    if count < 1:
        raise UserError(f"n_best is at least 1, got {count}")
    if decode.sample:
        return count
    if count > decode.beam:
        raise UserError(
            f"n_best is {count}, but a search gives at most as many as it has beams, {decode.beam}; "
            f"type --beam {count}, or --sample to draw them"
        )
    return decode.beam


def _search(
    model: Seq2Seq, source: Tensor, decode: DecodeConfig, bounds: Bounds, lines: list[int], width: int
) -> list[list[Hypothesis]]:
    """Return up to ``width`` hypotheses of each source row, whose numbers are ``lines``."""
    if not decode.sample:
        alpha, formula = decode.length_penalty, decode.length_penalty_formula
        return search(model, source, bounds, beams=decode.beam, length_penalty=alpha, formula=formula)
    seeds = [[derive(decode.sample_seed, "sample", line, k) for k in range(width)] for line in lines]
    return sample(model, source, seeds, bounds, choice_of(decode))


def _prefix_ids(tokenizer: Tokenizer, prefixes: Sequence[str], allowed: Tensor | None) -> list[list[int]]:
    """Return the ids of the prefixes. Raises UserError for a prefix that no output can produce."""
    ids_of: dict[str, list[int]] = {}
    for text in dict.fromkeys(prefixes):
        (ids,) = tokenizer.encode_target([text])
        if UNK in ids:
            raise UserError(
                f"the prefix {text!r} has characters that the run's vocabulary does not have; leave them out"
            )
        masked = [i for i in ids if allowed is not None and not allowed[i]]
        if masked:
            raise UserError(
                f"the prefix {text!r} has {tokenizer.decode([masked])[0]!r}, which never occurs on the "
                f"target side of the training text, and target_vocab_mask rules out such pieces; leave it out"
            )
        ids_of[text] = ids
    return [ids_of[text] for text in prefixes]


def _prefix(ids: list[list[int]], device: torch.device) -> Tensor | None:
    """Return the prefixes `[B, P]`, padded with ``FREE``; None if all are empty."""
    width = max(map(len, ids))
    if not width:
        return None
    return torch.tensor([row + [FREE] * (width - len(row)) for row in ids], device=device)


def _search_batches(ids: list[list[int]], max_positions: int) -> Iterator[tuple[list[int], Tensor]]:
    """Yield batches of the non-empty rows, longest first: the rows' indices, and their ids `[B, S]` with EOS
    and padding.
    """
    order = sorted((i for i in range(len(ids)) if ids[i]), key=lambda i: -len(ids[i]))
    while order:
        width = len(ids[order[0]]) + 1
        count = max(1, max_positions // width)
        rows, order = order[:count], order[count:]
        source = torch.full((len(rows), width), PAD)
        for i, row in enumerate(rows):
            source[i, : len(ids[row]) + 1] = torch.tensor([*ids[row], EOS])
        yield rows, source
