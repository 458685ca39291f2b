"""How large gradients are: in sublayer outputs, in parameters by layer, and on their way through a branch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from normlab.diagnosis.probing.passes import Pass, examine, parts_of
from normlab.diagnosis.probing.stepping import gradients_of, trainable
from normlab.diagnosis.reading.kinds import Part
from normlab.diagnosis.reading.structure import SublayerView
from normlab.diagnosis.reading.subject import Subject
from normlab.diagnosis.reading.taps import capture, leaves
from normlab.diagnosis.reading.tokens import FROZEN, Real, real_tokens, rows
from normlab.diagnosis.table import Row, Table
from normlab.errors import UserError

PARTS = 4
"""Mini-batches into which a single batch is split."""


def sublayer_gradients(subject: Subject, *, real: Real | None = None, passed: Pass | None = None) -> Table:
    r""":math:`\|\Delta x_i\| / \max_j \|\Delta x_j\|` with :math:`\Delta x_i = \partial L/\partial x_i`, the
    gradient of the loss in the output of sublayer i.

    The largest is that of the whole model. ``variance`` is :math:`\mathrm{Var}[\Delta x_i]` over the elements
    of real tokens, found by ``real_tokens`` if ``real`` is not given; ``passed`` is found by ``examine``. An
    output before which all is frozen has neither. Raises UserError where every parameter is frozen.

    Liu et al. 2020, Figure 3, Theorem 1 and Remark 1 (arXiv 2004.08249).
    """
    real = real or real_tokens(subject)
    views = _views(subject)
    gradients = (passed or examine(subject)).stream
    if not gradients:
        raise UserError(FROZEN)
    kept = [rows(gradients[v.after], real[stack]) if v.after in gradients else None for stack, v in views]
    lengths = [None if g is None else g.norm().item() for g in kept]
    largest = max((x for x in lengths if x is not None), default=0.0) or 1.0
    return Table(
        "sublayer_gradients",
        tuple(
            {
                **_place(stack, view),
                "grad_l2": length,
                "relative": None if length is None else length / largest,
                "variance": None if g is None else g.var(correction=0).item(),
            }
            for (stack, view), g, length in zip(views, kept, lengths, strict=True)
        ),
    )


def parameter_gradients(subject: Subject, *, batches: Sequence[Any] = (), first: Pass | None = None) -> Table:
    r""":math:`\|\frac{1}{B} \sum_b g_b\|` (``mean_grad_l2``) and :math:`\frac{1}{B} \sum_b \|g_b\|`
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
    first = first or examine(replace(subject, batch=mini[0]))
    parts = parts_of(subject, first.seen)
    sums = {path: g.clone() for path, g in first.slope.gradients.items()}
    lengths = {path: _lengths(g, parts[path]) for path, g in sums.items()}
    for batch in mini[1:]:
        for path, g in gradients_of(replace(subject, batch=batch).loss(), subject.model).items():
            sums[path] += g
            lengths[path] += _lengths(g, parts[path])
    found: list[Row] = []
    for path, p in trainable(subject.model).items():
        together = (_lengths(sums[path], parts[path]) / len(mini)).tolist()
        apart = (lengths[path] / len(mini)).tolist()
        for part, mean_grad_l2, grad_l2 in zip(parts[path], together, apart, strict=True):
            found.append(
                {
                    **first.seen.owned[path]._asdict(),
                    "kind": part.kind,
                    "parameter": path,
                    "shape": "x".join(map(str, part.of(p).shape)),
                    "mean_grad_l2": mean_grad_l2,
                    "grad_l2": grad_l2,
                }
            )
    return Table("parameter_gradients", tuple(found))


def _lengths(gradient: Tensor, parts: Sequence[Part]) -> Tensor:
    """The norm of each part, `[parts]`."""
    return torch.stack([part.of(gradient.to_dense()).norm() for part in parts])


def branch_jacobians(subject: Subject, *, real: Real | None = None, seed: int = 0) -> Table:
    r""":math:`\mathrm{Var}[\partial a/\partial x] = \|\partial a/\partial x\|_F^2 / n` of a branch a(x) of n
    elements (``jacobian_variance``) beside :math:`\sigma_b^2 = \mathrm{Var}[x + a]` (``total_variance``).

    The variance that a gradient of variance 1 has when it comes back through the branch to the stream before
    it, by one random gradient over the real tokens. Behind a norm of the sum the variance of a gradient goes
    with :math:`(1 + \mathrm{Var}[\partial a/\partial x]) / \sigma_b^2`, and vanishes where that is below 1.
    None where no gradient reaches the stream before the branch.

    Liu et al. 2020, Appendix A.3 (arXiv 2004.08249).
    """
    real = real or real_tokens(subject)
    views = _views(subject)
    with capture(subject.model, [tap for _, v in views for tap in (v.before, v.branch, v.total)]) as seen:
        subject.forward()
    found: list[Row] = []
    for i, (stack, view) in enumerate(views):
        before, branch = seen[view.before], seen[view.branch]
        gain: float | None = None
        if before.requires_grad and branch.requires_grad:
            generator = torch.Generator().manual_seed(seed * len(views) + i)
            drawn = torch.randn(branch.shape, generator=generator).to(branch)
            drawn = drawn * real[stack].to(drawn).reshape(*branch.shape[:-1], 1)
            (back,) = torch.autograd.grad(branch, before, drawn, retain_graph=True, materialize_grads=True)
            gain = (back.norm() / drawn.norm()).square().item()
        variance = rows(seen[view.total], real[stack]).var(correction=0).item()
        found.append({**_place(stack, view), "jacobian_variance": gain, "total_variance": variance})
    return Table("branch_jacobians", tuple(found))


def split(batch: Any, parts: int) -> list[Any]:
    """The batch as mini-batches of consecutive rows, at most ``parts``: every tensor in it whose first
    dimension is that of the first one is split, anything else goes to all of them.

    Raises UserError for a batch without a tensor.
    """
    count = next((len(x) for _, x in leaves(batch) if x.ndim), 0)
    if not count:
        raise UserError(f"a batch of type {type(batch).__name__} has no rows to split; pass batches=[…]")
    bounds = [round(i * count / min(parts, count)) for i in range(min(parts, count) + 1)]
    return [_cut(batch, count, slice(a, b)) for a, b in pairwise(bounds)]


def _cut(value: Any, count: int, part: slice) -> Any:
    if isinstance(value, Tensor):
        return value[part] if value.ndim and len(value) == count else value
    if isinstance(value, Mapping):
        return {key: _cut(item, count, part) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [_cut(item, count, part) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if is_dataclass(value) and not isinstance(value, type):
        given = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
        return replace(value, **{name: _cut(item, count, part) for name, item in given.items()})
    return value


def _views(subject: Subject) -> list[tuple[str, SublayerView]]:
    return [(stack.name, view) for stack in subject.structure.stacks for view in stack.sublayers]


def _place(stack: str, view: SublayerView) -> Row:
    return {"stack": stack, "index": view.index, "layer": view.layer, "role": view.role}
