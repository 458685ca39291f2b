"""English words of the standard library's help text, as token ids: real batches without a download."""

from __future__ import annotations

from collections import Counter
from functools import cache

import torch
from torch import Tensor

PAD, BOS, EOS, UNK = 0, 1, 2, 3
VOCAB = 600
"""The four special tokens and the most common words."""


@cache
def sentences() -> list[list[int]]:
    """Return the sentences of 5 to 40 words, each between ``BOS`` and ``EOS``."""
    from pydoc_data.topics import topics  # 700 kB of text

    texts = (topic.replace("\n", " ") for topic in topics.values())
    words = [sentence.split() for text in texts for sentence in text.split(". ")]
    counts = Counter(word for sentence in words for word in sentence)
    ids = {word: i for i, (word, _) in enumerate(counts.most_common(VOCAB - 4), start=4)}
    return [
        [BOS, *(ids.get(w, UNK) for w in sentence), EOS] for sentence in words if 5 <= len(sentence) <= 40
    ]


def padded(rows: list[list[int]]) -> Tensor:
    """Return the sentences as one batch `[B, T]`, padded on the right."""
    return torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(row) for row in rows], batch_first=True, padding_value=PAD
    )


def stream(rows: int, length: int) -> Tensor:
    """Return the first sentences one after the other, cut into rows of one length."""
    flat = [word for sentence in sentences() for word in sentence]
    return torch.tensor(flat[: rows * length]).view(rows, length)
