"""How large every stream and branch is as it goes forward, with the theory beside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

from torch import Tensor

from normlab.diagnosis.probing.passes import Seen, look
from normlab.diagnosis.reading.structure import StackView
from normlab.diagnosis.reading.subject import Subject
from normlab.diagnosis.reading.taps import Tap
from normlab.diagnosis.reading.tokens import Real, real_tokens, rows
from normlab.diagnosis.rules.theory import LEMMA_2, bounded_fraction, ffn_gain, hidden_scales
from normlab.diagnosis.table import Row, Table

Place: TypeAlias = tuple[str | None, int | None]
"""Stack and index of a sublayer."""


def scales(subject: Subject, *, real: Real | None = None, seen: Seen | None = None) -> Table:
    r""":math:`\mathbb{E}\|x\|^2/d` over real tokens x: of the stream before each sublayer, of its branch, of
    their sum (``total``) and of the stream after it.

    ``spread`` is the standard deviation of :math:`\|x\|^2` over its mean, ``bounded`` the fraction of tokens
    with :math:`(\|x\|^2 - \mathbb{E})/\mathbb{E} \le 0.1`. ``theory`` is what Xavier's start, ReLU and
    uniform attention give from the mean square that the stack begins with; where only bounds are known it is
    empty and they stand in ``theory_low`` and ``theory_high``. ``real`` is found by ``real_tokens`` and
    ``seen`` by ``look`` if not given.

    Xiong et al. 2020, Lemma 2, Section 3.4 and Definition 1 (arXiv 2002.04745).
    """
    real = real or real_tokens(subject)
    seen = seen or look(subject)
    widths = _ffn_widths(subject, seen)
    stacks, found = subject.structure.stacks, seen.tensors
    return Table("scales", tuple(row for s in stacks for row in _rows(s, real[s.name], found, widths)))


def _rows(
    stack: StackView, real: Tensor, seen: Mapping[Tap, Tensor], widths: Mapping[Place, int]
) -> Iterator[Row]:
    first = rows(seen[stack.sublayers[0].before], real)
    known = [widths.get((stack.name, view.index)) for view in stack.sublayers]
    gains = [None if width is None else ffn_gain(first.shape[-1], width) for width in known]
    start = first.square().mean().item()
    predicted = hidden_scales(stack.sublayers, start=start, ffn_gains=gains)
    for view, expected in zip(stack.sublayers, predicted, strict=True):
        for signal in ("before", "branch", "total", "after"):
            x = rows(seen[getattr(view, signal)], real)
            z = x.square().sum(-1)
            mean_square, theory = (z.mean() / x.shape[-1]).item(), getattr(expected, signal)
            if view is stack.sublayers[0] and signal == "before":
                theory = None
            yield {
                "stack": stack.name,
                "index": view.index,
                "layer": view.layer,
                "role": view.role,
                "signal": signal,
                "mean_square": mean_square,
                "rms": mean_square**0.5,
                "spread": (z.std(correction=0) / z.mean()).item() if mean_square else None,
                "bounded": bounded_fraction(z).item(),
                "theory": theory and theory.known,
                "theory_low": theory and theory.low,
                "theory_high": theory and theory.high,
                "source": theory and LEMMA_2,
            }


def _ffn_widths(subject: Subject, seen: Seen) -> dict[Place, int]:
    """The inner width of every feed-forward sublayer with two or three matrices of its own."""
    found: dict[Place, int] = {}
    shapes = {path: tuple(p.shape) for path, p in subject.model.named_parameters() if p.ndim == 2}
    dims = {s.name: seen.tensors[s.sublayers[0].before].shape[-1] for s in subject.structure.stacks}
    for path, owner in seen.owned.items():
        if owner.role == "ffn" and path in shapes and owner.stack and dims[owner.stack] in shapes[path]:
            inner = sum(shapes[path]) - dims[owner.stack]
            key = owner.stack, owner.index
            # gated units pack two matrices [2 d_ff, d] beside one [d, d_ff]
            found[key] = min(inner, found.get(key, inner))
    return found
