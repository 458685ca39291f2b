"""Check before a run begins that every sentence fits into a batch and into the model."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np

from normlab.config.config import DataConfig
from normlab.data.plain import TextCorpus
from normlab.data.prepare import Corpus
from normlab.data.ragged import TokenPairs
from normlab.errors import UserError

LONGEST_SENTENCE: Final = 4096
"""Most tokens of a sentence that is translated, its end included: time and memory grow with their square."""


def require_room(corpus: object, data: DataConfig, *, max_tokens: int, max_positions: int | None) -> None:
    """Raise UserError at the first text with a sentence too long for a batch of ``max_tokens``, or for a
    model with ``max_positions``, None for one without a limit.
    """
    if isinstance(corpus, Corpus):
        _require_batch(corpus.train, max_tokens)
        _require_positions(corpus, data, max_positions)
    elif isinstance(corpus, TextCorpus) and max_positions is not None and data.block_len > max_positions:
        raise UserError(
            f"a block has {data.block_len} tokens, and the model has learned {max_positions} positions; "
            f"type --block-len {max_positions}, or --max-positions {data.block_len}"
        )


def _require_batch(pairs: TokenPairs, max_tokens: int) -> None:
    longest = [0, 0]
    for source, target in pairs.lengths_in_parts():
        row = int(np.argmax(source + target))
        if source[row] + target[row] + 2 > sum(longest):
            longest = [int(source[row]) + 1, int(target[row]) + 1]
    needed = sum(longest)
    if needed > max_tokens:
        raise UserError(
            f"the longest training pair has {longest[0]} + {longest[1]} tokens, and a batch holds "
            f"--max-tokens {max_tokens}; type --max-tokens {needed}, or leave such pairs out with --max-len "
            f"{max(2, max_tokens // 2)}"
        )


def _require_positions(corpus: Corpus, data: DataConfig, max_positions: int | None) -> None:
    """Check both sides of train and dev text, and the source of the test text."""
    most, why = LONGEST_SENTENCE, f"a translation takes at most {LONGEST_SENTENCE:,}"
    advice = "split it into sentences"
    if max_positions is not None:
        _require_training_positions(corpus, max_positions)
    if max_positions is not None and max_positions <= most:
        most, why = max_positions, f"the model has learned {max_positions} positions"
        advice = "type --max-positions {}, or shorten the line"
    tested = np.array([len(ids) for ids in corpus.tokenizer.encode(corpus.test_text.source)])
    sides = dict(zip(("dev_src", "dev_tgt", "test_src"), (*corpus.dev.lengths, tested), strict=True))
    for name, lengths in sides.items():
        line = int(np.argmax(lengths))
        longest = int(lengths[line]) + 1
        if longest > most:
            file = Path(getattr(data, name)).name or name
            raise UserError(
                f"{file}, line {line + 1} has {longest} tokens, and {why}; {advice.format(longest)}"
            )


def _require_training_positions(corpus: Corpus, max_positions: int) -> None:
    longest = max(int(max(s.max(), t.max())) + 1 for s, t in corpus.train.lengths_in_parts())
    if longest > max_positions:
        raise UserError(
            f"the longest training sentence has {longest} tokens, and the model has learned {max_positions} "
            f"positions; type --max-positions {longest}, or leave longer ones out: --max-len {max_positions}"
        )
