"""Fewer rows of a batch, for what is too dear on all of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from normlab.diagnosis.reading.subject import Subject
from normlab.diagnosis.reading.taps import capture, leaves
from normlab.diagnosis.studies.gradients import split
from normlab.errors import UserError


def cropped(subject: Subject, tokens: int) -> tuple[Subject, int]:
    """The subject on the first rows of its batch, so many that its longest stream has at most ``tokens``
    tokens, one row at least; and how many tokens that are.

    Raises UserError where the loss fails on fewer rows, as one does that holds targets of its own.
    """
    rows, used = _count(subject.batch), _tokens(subject)
    kept = max(1, rows * tokens // used)
    if kept >= rows:
        return subject, used
    small = replace(subject, batch=crop(subject.batch, kept))
    try:
        return small, _tokens(small)
    except Exception as error:
        raise UserError(
            f"on the first {kept} of the {rows} rows of the batch the loss fails with "
            f"{type(error).__name__}: {error}; give a batch of at most {tokens} tokens, or tokens={used} "
            "to use all of it"
        ) from error


def _tokens(subject: Subject) -> int:
    taps = [stack.sublayers[0].before for stack in subject.structure.stacks]
    with torch.no_grad(), capture(subject.model, taps) as seen:
        subject.loss()
    return max(x.numel() // x.shape[-1] for x in seen.values())


def crop(batch: Any, rows: int) -> Any:
    """At most so many of a batch's first rows: of every tensor with as many rows as its first one."""
    return split(batch, -(-_count(batch) // rows))[0]


def _count(batch: Any) -> int:
    return next((len(x) for _, x in leaves(batch) if x.ndim), 1)
