"""Batches that the cases share, all drawn from seeds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

VOCAB = 211
PAD, BOS, EOS = 0, 1, 2
MASK = 4
"""The id that stands in the place of a masked word."""
FIRST = 5
"""The first id of a word; those below are special."""
ROWS, LENGTH = 4, 24
LENGTHS = (LENGTH, LENGTH - 5, LENGTH - 9, LENGTH - 2)
"""Tokens of each row of a padded batch."""

# -------------------------------------------------------------------------------------------------- token ids


def generator(seed: int) -> torch.Generator:
    """Return random numbers that begin with a seed."""
    return torch.Generator().manual_seed(seed)


def tokens(rows: int = ROWS, length: int = LENGTH, *, vocab: int = VOCAB, seed: int = 0) -> Tensor:
    """Return ids `[B, T]` that are drawn evenly from the words."""
    return torch.randint(FIRST, vocab, (rows, length), generator=generator(seed))


def text(rows: int = ROWS, length: int = 32, *, vocab: int = VOCAB, seed: int = 0) -> Tensor:
    """Return ids `[B, T]` whose frequencies fall like those of words."""
    draw = generator(seed)
    words = vocab - FIRST
    weights = 1.0 / torch.arange(2, words + 2)
    drawn = torch.multinomial(weights, rows * length, replacement=True, generator=draw)
    return torch.randperm(words, generator=draw)[drawn].reshape(rows, length) + FIRST


def inside(lengths: Sequence[int], length: int) -> Tensor:
    """Return which tokens `[B, T]` of rows of these lengths are real."""
    return torch.arange(length) < torch.tensor(lengths)[:, None]


def padded_text(lengths: Sequence[int], *, vocab: int = VOCAB, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return rows of text that end with EOS and are padded on the right, and the mask of real tokens."""
    length = max(lengths)
    ids = text(len(lengths), length, vocab=vocab, seed=seed)
    ids[torch.arange(len(lengths)), torch.tensor(lengths) - 1] = EOS
    real = inside(lengths, length)
    return ids.masked_fill(~real, PAD), real.long()


def left_padded_text(lengths: Sequence[int], *, vocab: int = VOCAB, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return rows of text that are padded on the left, and the mask of real tokens."""
    length = max(lengths)
    real = inside(lengths, length).flip(1)
    return text(len(lengths), length, vocab=vocab, seed=seed).masked_fill(~real, PAD), real.long()


def documents_text(ends: Sequence[Sequence[int]], length: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return rows of several texts with an EOS at each end, and the document `[B, T]` of each token."""
    ids = text(len(ends), length, seed=seed)
    for row, columns in enumerate(ends):
        ids[row, list(columns)] = EOS
    return ids, documents_of(ids)


def documents_of(ids: Tensor) -> Tensor:
    """Number the documents of packed rows; an EOS belongs to the document that it ends."""
    is_end = (ids == EOS).long()
    return is_end.cumsum(1) - is_end


# ---------------------------------------------------------------------------------------------------- batches


def shifted_tokens() -> tuple[Tensor, Tensor]:
    """Return token ids and the token after each."""
    ids = tokens(length=LENGTH + 1)
    return ids[:, :-1], ids[:, 1:]


def language_batch(ids: Tensor | None = None) -> dict[str, Tensor]:
    """Return a batch of a Hugging Face decoder, which shifts the labels itself."""
    ids = tokens() if ids is None else ids
    return {"input_ids": ids, "labels": ids.clone()}


def padded_batch() -> dict[str, Tensor]:
    """Return a batch that is padded on the right."""
    real = inside(LENGTHS, LENGTH)
    ids = tokens().masked_fill(~real, PAD)
    return {"input_ids": ids, "labels": ids.masked_fill(~real, -100), "attention_mask": real.long()}


def masked_batch() -> dict[str, Tensor]:
    """Return a padded batch in which a quarter of the words is masked and predicted."""
    batch = padded_batch()
    ids = batch["input_ids"]
    predicted = (torch.rand(ids.shape, generator=generator(3)) < 0.25) & batch["attention_mask"].bool()
    labels = ids.masked_fill(~predicted, -100)
    return batch | {"input_ids": ids.masked_fill(predicted, MASK), "labels": labels}


def classified_batch() -> dict[str, Tensor]:
    """Return a padded batch with a class for each row."""
    return padded_batch() | {"labels": torch.tensor([0, 1, 2, 1])}


def translation_batch() -> dict[str, Tensor]:
    """Return a batch of a Hugging Face encoder-decoder."""
    return {"input_ids": tokens(), "labels": tokens(length=14, seed=5)}


def image_batch() -> dict[str, Tensor]:
    """Return four random images with a class each."""
    return {
        "pixel_values": torch.randn(ROWS, 3, 32, 32, generator=generator(1)),
        "labels": torch.arange(ROWS),
    }
