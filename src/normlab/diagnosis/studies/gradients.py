"""Measure gradients: in sublayer outputs, in parameters by layer, and on their way through a branch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import log
from typing import Any, Final

import torch
from torch import Tensor

from normlab.config.chart import ByDepth
from normlab.diagnosis.probing.passes import BackwardPass, backward_pass, parts_of
from normlab.diagnosis.reading.parameters import Part
from normlab.diagnosis.reading.structure import SublayerView
from normlab.diagnosis.reading.subject import PaddingMasks, Subject, find_padding_masks, rows, split
from normlab.diagnosis.rules.finding import LIU, XIONG, Finding, Tables, extremes, mean, number, said
from normlab.diagnosis.study import MINI_BATCHES, Study
from normlab.diagnosis.table import Row, Table
from normlab.errors import UserError
from normlab.trace.step import FROZEN, trainable

VANISHED: Final = 0.01
"""Share of a stack's largest gradient: more than adaptive optimisers even out in their first steps."""
SLOPED: Final = 10.0
"""Ratio of the last layer's gradients to the first's: one learning rate does not suit both under SGD."""

PARTS = 4
"""Mini-batches into which a single batch is split."""


def sublayer_gradients(
    subject: Subject, *, padding_masks: PaddingMasks | None = None, backward: BackwardPass | None = None
) -> Table:
    r"""Measure :math:`\|\Delta x_i\| / \max_j \|\Delta x_j\|` with :math:`\Delta x_i = \partial L/\partial
    x_i`, the gradient of the loss in the output of sublayer i.

    The largest is that of the whole model. ``variance`` is :math:`\mathrm{Var}[\Delta x_i]` over the elements
    of tokens that are no padding, by ``find_padding_masks`` if ``padding_masks`` is not given; ``backward``
    is found by ``backward_pass``. An output before which all is frozen has neither. Raises UserError where
    every parameter is frozen.

    Liu et al. 2020, Figure 3, Theorem 1 and Remark 1 (arXiv 2004.08249).
    """
    masks = padding_masks or find_padding_masks(subject)
    views = subject.structure.sublayers
    gradients = (backward or backward_pass(subject)).stream
    if not gradients:
        raise UserError(FROZEN)
    kept = [rows(gradients[v.after], masks[stack]) if v.after in gradients else None for stack, v in views]
    lengths = [None if g is None else g.norm().item() for g in kept]
    largest = max((x for x in lengths if x is not None), default=0.0) or 1.0
    found: list[Row] = []
    for (stack, view), g, length in zip(views, kept, lengths, strict=True):
        relative = None if length is None else length / largest
        variance = None if g is None else g.var(correction=0).item()
        found.append({**_place(stack, view), "grad_l2": length, "relative": relative, "variance": variance})
    return Table("sublayer_gradients", tuple(found))


def parameter_gradients(
    subject: Subject, *, batches: Sequence[Any] = (), first: BackwardPass | None = None
) -> Table:
    r"""Measure :math:`\|\frac{1}{B} \sum_b g_b\|` (``mean_grad_l2``) and :math:`\frac{1}{B} \sum_b \|g_b\|`
    (``grad_l2``) of the gradients of B mini-batches, for every parameter that is trained, by ``kind`` of
    matrix: query, key, value, output, ffn_in, ffn_out, norm, embedding, other. A packed matrix of queries,
    keys and values has a row for each.

    Without ``batches`` the subject's own batch is split by its rows into four. A loss that is a mean over
    tokens is taken as one over those of its mini-batch. ``role`` is ``shared`` for what several sublayers use
    and ``other`` outside of them. ``first`` is a pass on the first of the mini-batches, if there was one.
    Raises UserError where every parameter is frozen.

    Xiong et al. 2020, Figure 3 and Section 3.4 (arXiv 2002.04745).
    """
    mini = list(batches) or split(subject.batch, PARTS)
    first = first or backward_pass(replace(subject, batch=mini[0]))
    parts = parts_of(subject, first.forward)
    sums = {path: g.clone() for path, g in first.loss_gradients.gradients.items()}
    lengths = {path: _lengths(g, parts[path]) for path, g in sums.items()}
    for batch in mini[1:]:
        for path, g in subject.trace(batch=batch).slope.gradients.items():
            sums[path] += g
            lengths[path] += _lengths(g, parts[path])
    found: list[Row] = []
    for path, p in trainable(subject.model).items():
        together = (_lengths(sums[path], parts[path]) / len(mini)).tolist()
        apart = (lengths[path] / len(mini)).tolist()
        for part, mean_grad_l2, grad_l2 in zip(parts[path], together, apart, strict=True):
            shape = "x".join(map(str, part.of(p).shape))
            about = {"kind": part.kind, "parameter": path, "shape": shape}
            measured = {"mean_grad_l2": mean_grad_l2, "grad_l2": grad_l2}
            found.append({**first.forward.owned[path]._asdict(), **about, **measured})
    return Table("parameter_gradients", tuple(found))


def _lengths(gradient: Tensor, parts: Sequence[Part]) -> Tensor:
    """Return the norm of each part, `[parts]`."""
    return torch.stack([part.of(gradient.to_dense()).norm() for part in parts])


def branch_jacobians(subject: Subject, *, padding_masks: PaddingMasks | None = None, seed: int = 0) -> Table:
    r"""Measure :math:`\mathrm{Var}[\partial a/\partial x] = \|\partial a/\partial x\|_F^2 / n` of a branch
    a(x) of n elements (``jacobian_variance``) beside :math:`\sigma_b^2 = \mathrm{Var}[x + a]`
    (``total_variance``).

    The variance that a gradient of variance 1 has when it comes back through the branch to the stream before
    it, by one random gradient over the tokens. Behind a norm of the sum the variance of a gradient goes
    with :math:`(1 + \mathrm{Var}[\partial a/\partial x]) / \sigma_b^2`, and vanishes where that is below 1.
    None where no gradient reaches the stream before the branch.

    Liu et al. 2020, Appendix A.3 (arXiv 2004.08249).
    """
    masks = padding_masks or find_padding_masks(subject)
    views = subject.structure.sublayers
    found: list[Row] = []
    with subject.calls(t for _, v in views for t in (v.before, v.branch, v.total)).with_graph() as passed:
        for i, (stack, view) in enumerate(views):
            generator = torch.Generator().manual_seed(seed * len(views) + i)
            before, branch = passed.taps[view.before], passed.taps[view.branch]
            gain = _gain(before, branch, masks[stack], generator)
            variance = rows(passed.taps[view.total], masks[stack]).var(correction=0).item()
            found.append({**_place(stack, view), "jacobian_variance": gain, "total_variance": variance})
    return Table("branch_jacobians", tuple(found))


def _gain(before: Tensor, branch: Tensor, mask: Tensor, generator: torch.Generator) -> float | None:
    """Send a random gradient over the tokens back through a branch, and return what its square grows by."""
    if not before.requires_grad or not branch.requires_grad:
        return None
    drawn = torch.randn(branch.shape, generator=generator).to(branch)
    drawn = drawn * mask.to(drawn).reshape(*branch.shape[:-1], 1)
    (back,) = torch.autograd.grad(branch, before, drawn, retain_graph=True, materialize_grads=True)
    return (back.norm() / drawn.norm()).square().item()


def _place(stack: str, view: SublayerView) -> Row:
    return {"stack": stack, "index": view.index, "layer": view.layer, "role": view.role}


def gradients_of_sublayers(tables: Tables) -> Iterator[Finding]:
    """Say whether gradients of sublayer outputs vanish or grow on their way to the input."""
    for stack, table in tables.stacks("sublayer_gradients"):
        silent = sum(value == 0 for value in table.column("relative"))
        if (found := extremes(table, "relative")) is None:
            continue
        small, large = found
        least, most = float(small["relative"] or 0), float(large["relative"] or 1)
        vanished = least / most < VANISHED
        if vanished:
            trend = f"{'vanish' if _small_below(table.rows) else 'grow'} towards the input of {stack}"
        else:
            trend = f"stay within a factor of {said(most / least)} in {stack}"
        yield Finding(
            "sublayer_gradients",
            "warning" if vanished else "note",
            f"the gradients of sublayer outputs {trend}: that of {tables.module(small)} is "
            f"{said(least / most)} times that of {tables.module(large)}"
            + (f"; {silent} sublayers receive none" if silent else ""),
            "sublayer_gradients",
            {"smallest": least, "largest": most, "ratio": least / most, "without_gradient": silent},
            LIU.format("Section 3.1, Figure 3"),
        )


def _small_below(rows: Sequence[Row]) -> bool:
    """Whether the gradients are smaller in the half of the sublayers that is nearer the input."""
    logs = [log(x) for row in rows if (x := number(row["relative"])) is not None and x > 0]
    half = len(logs) // 2
    return half > 0 and mean(logs[:half]) <= mean(logs[half:])


def gradients_of_parameters(tables: Tables) -> Iterator[Finding]:
    """Compare the gradients of the feed-forward matrices in the last layer and in the first."""
    for stack, table in tables.stacks("parameter_gradients"):
        squares: dict[int, float] = defaultdict(float)
        for row in table.where(role="ffn"):
            squares[int(number(row["layer"]) or 0)] += (number(row["grad_l2"]) or 0.0) ** 2
        layers = {layer: square**0.5 for layer, square in squares.items() if square > 0}
        if len(layers) < 2:
            continue
        first, last = layers[min(layers)], layers[max(layers)]
        ratio = last / first
        steep = max(ratio, 1 / ratio) > SLOPED
        yield Finding(
            "parameter_gradients",
            "warning" if steep else "note",
            f"the gradients of the last feed-forward sublayer of {stack} are {said(ratio)} times those of "
            "the first",
            "parameter_gradients",
            {"first": first, "last": last, "ratio": ratio},
            XIONG.format("Theorem 1 and Section 3.3"),
        )


SUBLAYER_GRADIENTS: Final = Study(
    "sublayer_gradients",
    lambda c: [sublayer_gradients(c.subject, padding_masks=c.padding_masks, backward=c.backward)],
    "cheap",
    rules=(gradients_of_sublayers,),
    title="Gradients of outputs",
    intro="Gradient of the loss in the output of each sublayer, relative to the largest one of the "
    "model, on a log scale (Liu et al. 2020, Figure 3).",
    charts=(
        ByDepth("sublayer_gradients", "Gradients of outputs", "relative", "relative gradient", log=True),
    ),
    order=10,
)
PARAMETER_GRADIENTS: Final = Study(
    "parameter_gradients",
    lambda c: [
        parameter_gradients(c.subject, batches=c.batches, first=c.small_backward if c.batches else None)
    ],
    "standard",
    rules=(gradients_of_parameters,),
    title="Gradients of parameters",
    intro="L2 norm of the gradient of each sublayer's parameters, averaged over mini-batches, on a log "
    "scale (Xiong et al. 2020, Figure 3).",
    charts=(
        ByDepth(
            "parameter_gradients", "Gradients of parameters", "grad_l2", "L2 norm", log=True, sum_squares=True
        ),
    ),
    batch=MINI_BATCHES,
    order=50,
)
