"""Blocks of plain text: a stream cut at equal lengths, shuffled by the seed and the epoch alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from normlab.config.randomness import derive
from normlab.data.arrays import Ints, Read, reader_of
from normlab.data.batches import drop_words, permutation
from normlab.data.tokenizer import PAD


@dataclass(frozen=True)
class TextBatch:
    """One micro-batch `[B, L]`, int64. Empty rows are PAD throughout and count no token."""

    ids: Tensor
    """Inputs; the first of a row is the last target of the block before it."""
    target: Tensor
    """Targets: at each place the token that comes next."""
    tokens: int
    """Tokens of ``target``, PAD not counted."""

    @property
    def padded_tokens(self) -> int:
        """Tokens of ``ids``, padding included."""
        return self.ids.numel()

    def to(self, device: torch.device | str) -> TextBatch:
        ids, target = (side.to(device, non_blocking=True) for side in (self.ids, self.target))
        return replace(self, ids=ids, target=target)

    def recounted(self) -> TextBatch:
        """The same with its own number of tokens, where it is a part or a change of another."""
        return replace(self, tokens=int((self.target != PAD).sum()))


class Blocks:
    """Endless training batches: index i is the i-th micro-batch over all epochs, so resuming needs only i.

    Block k has the tokens k L + 1 to (k + 1) L of the stream as targets; token 0 is an input alone. In every
    epoch each block occurs once, so each token is predicted once; the end of the stream is padded. All
    batches have ``rows`` rows, and only the last one of an epoch has empty ones.
    """

    def __init__(self, stream: Ints, *, block_len: int, rows: int, seed: int) -> None:
        self.block_len, self.rows = block_len, rows
        self._stream, self._seed = stream, seed
        self._count = block_count(stream, block_len)
        self._read = reader_of(stream)
        self._epoch = -1
        self._order: Ints = np.empty(0, np.uint32)
        self._planning = threading.Lock()

    @property
    def steps_per_epoch(self) -> int:
        return -(-self._count // self.rows)

    def at(self, index: int, *, word_dropout: float = 0.0, seed: int = 0) -> TextBatch:
        """Return the micro-batch ``index``, counted from 0 over all epochs.

        With ``word_dropout`` each input token becomes UNK with that probability, drawn from a generator of
        (``seed``, ``index``); the targets are left as they are.
        """
        epoch, step = divmod(index, self.steps_per_epoch)
        with self._planning:
            if epoch != self._epoch:
                self._epoch = epoch
                self._order = permutation(self._count, derive(self._seed, "shuffle", epoch))
            chosen = self._order[step * self.rows : (step + 1) * self.rows].astype(np.int64)
        ids, target = _cut(self._read, len(self._stream), chosen, self.block_len)
        if word_dropout:
            drop_words([ids], word_dropout, derive(seed, "word_dropout", index))
        return _batch(ids, target, self.rows)


def blocks_in_order(stream: Ints, *, block_len: int, rows: int) -> Iterator[TextBatch]:
    """Yield every block once, ``rows`` at a time, from the beginning of the text to its end."""
    read = reader_of(stream)
    for start in range(0, block_count(stream, block_len), rows):
        chosen = np.arange(start, min(start + rows, block_count(stream, block_len)))
        yield _batch(*_cut(read, len(stream), chosen, block_len), len(chosen))


def block_count(stream: Ints, block_len: int) -> int:
    """Return the number of blocks of a stream; the last one may be shorter."""
    return -(-(len(stream) - 1) // block_len)


def _cut(read: Read, length: int, chosen: Ints, block_len: int) -> tuple[Ints, Ints]:
    """Return ``[B, L]`` inputs and targets of chosen blocks; after the stream's ``length`` tokens is PAD."""
    window = np.full((len(chosen), block_len + 1), PAD, np.int64)
    for line, start in zip(window, (chosen * block_len).tolist(), strict=True):
        part = read(start, min(start + block_len + 1, length))
        line[: len(part)] = part
    ids, target = window[:, :-1].copy(), window[:, 1:].copy()
    ids[target == PAD] = PAD
    return ids, target


def _batch(ids: Ints, target: Ints, rows: int) -> TextBatch:
    empty = ((0, rows - len(ids)), (0, 0))
    padded = (torch.from_numpy(np.pad(side, empty, constant_values=PAD)) for side in (ids, target))
    return TextBatch(*padded, tokens=int((target != PAD).sum()))
