"""Batches of real text for the evaluation of trials, from the folder in ``NORMLAB_DATA``.

Byte windows of the Brown corpus, whose last tenth is held out, and German-English pairs of Multi30k.
"""

from __future__ import annotations

import lzma
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

CONTEXT: Final = 48
ROWS: Final = 16
MASK: Final = 256
"""The token that hides a byte; as an end of a line, 1 is free, and 0 as padding: the texts have neither."""
VOCAB: Final = 257
HIDDEN: Final = 0.3
"""Share of the bytes that a masked model is asked for."""
PAD, EOS = 0, 1
LONGEST: Final = 48
"""Bytes of the longest line of a pair that is used."""
Batch = dict[str, Tensor]


def folder() -> Path:
    """The folder with the data."""
    return Path(os.environ["NORMLAB_DATA"])


@cache
def brown() -> tuple[Tensor, Tensor]:
    """Bytes to train on and bytes that are held out."""
    raw = lzma.decompress((folder() / "text/brown.txt.xz").read_bytes())
    text = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    cut = len(text) * 9 // 10
    return text[:cut], text[cut:]


@cache
def pairs(split: str) -> list[tuple[bytes, bytes]]:
    """German and English lines of at most ``LONGEST`` bytes."""
    sides = [
        lzma.decompress((folder() / f"multi30k/{split}.{side}.xz").read_bytes()).split(b"\n")
        for side in ("de", "en")
    ]
    return [(s, t) for s, t in zip(*sides, strict=True) if 0 < len(s) <= LONGEST and 0 < len(t) <= LONGEST]


def windows(at: torch.Generator, text: Tensor) -> Tensor:
    """Windows `[ROWS, CONTEXT]` from places that are drawn."""
    starts = torch.randint(len(text) - CONTEXT, (ROWS, 1), generator=at)
    return text[starts + torch.arange(CONTEXT)].long()


def causal(at: torch.Generator, split: int) -> Batch:
    """Every next byte is asked for; the model shifts the labels."""
    ids = windows(at, brown()[split])
    return {"input_ids": ids, "labels": ids}


def masked(at: torch.Generator, split: int) -> Batch:
    """The hidden bytes are asked for."""
    ids = windows(at, brown()[split])
    hidden = torch.rand(ids.shape, generator=at) < HIDDEN
    return {"input_ids": ids.masked_fill(hidden, MASK), "labels": ids.masked_fill(~hidden, -100)}


def translated(at: torch.Generator, split: int) -> Batch:
    """The English line of a German one is asked for, with its end."""
    lines = pairs(("train", "val")[split])
    drawn = [lines[i] for i in torch.randint(len(lines), (ROWS,), generator=at).tolist()]
    source, target = (_padded([line[side] for line in drawn]) for side in (0, 1))
    return {
        "input_ids": source,
        "attention_mask": (source != PAD).long(),
        "labels": target.masked_fill(target == PAD, -100),
    }


def _padded(lines: list[bytes]) -> Tensor:
    rows = [torch.tensor([*line, EOS]) for line in lines]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)


Draw = Callable[[torch.Generator, int], Batch]


@dataclass(frozen=True)
class Batches:
    """Batches that can be iterated over again and again; each follows from the seed and its number."""

    draw: Draw
    seed: int
    count: int = 8000
    split: int = 0
    """0 to train on, 1 held out."""

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Batch]:
        for index in range(self.count):
            yield self.draw(torch.Generator().manual_seed(1_000_003 * self.seed + index), self.split)

    def held_out(self) -> Batches:
        """The same held-out batches for every seed."""
        return replace(self, seed=7, count=64, split=1)


def unigram(batches: Batches, count: int = 200) -> float:
    """The entropy of the bytes that are asked for, in nats."""
    counts = torch.zeros(VOCAB)
    for _, batch in zip(range(count), batches, strict=False):
        labels = batch["labels"][:, 1:] if batches.draw is causal else batch["labels"]
        counts += torch.bincount(labels[labels >= 0], minlength=VOCAB)
    p = counts[counts > 0] / counts.sum()
    return -math.fsum((p * p.log()).tolist())
