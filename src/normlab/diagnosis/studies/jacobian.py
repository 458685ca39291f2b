"""Measure the parameters of norms, and by how much norms scale the gradients that pass through them."""

from __future__ import annotations

from collections.abc import Iterator
from math import log
from typing import Final

import torch
from torch import Tensor, nn

from normlab.diagnosis.parameters import Owner, norms_of
from normlab.diagnosis.study import SMALL_BATCH, XIONG, Finding, Study
from normlab.diagnosis.subject import Subject
from normlab.diagnosis.tables import Row, Table, Tables, as_float, extremes
from normlab.diagnosis.theory import layer_norm_jacobian, rms_norm_jacobian
from normlab.diagnosis.wording import format_number
from normlab.errors import UserError
from normlab.trace.facts.stacks import within
from normlab.trace.record import Want, record
from normlab.trace.restore import undisturbed

ASKED: Final = 1
"""Tokens per norm in a diagnosis, each costing d rows; the Jacobian hardly differs between tokens."""
DEAD_GAIN: Final = 0.01
"""A norm with a gain below this shrinks its input a hundredfold; gains start at 1."""
LARGE_GAIN: Final = 100.0
"""A norm with a gain above this does the opposite."""

TOKENS = 4
"""Tokens per norm, evenly spaced in the order of their deviation from their mean."""
STEPS = 24
"""Iterations for a spectral norm."""
ROUNDING = 1e-4
"""A remainder below this share of a vector is a rounding error."""


def jacobian(subject: Subject, *, tokens: int = TOKENS) -> Table:
    r"""Measure :math:`\|J\|_2` of :math:`J = \partial\,\mathrm{norm}(x)/\partial x` over tokens x: its
    largest value and its mean (``spectral_mean``), measured on the full matrix, beside :math:`\sqrt{d}/\|x -
    \bar x\|` (``exact``, a LayerNorm of gain 1) and :math:`\sqrt{d}/\|x\|` (``published``, an RMSNorm of gain
    1).

    The last two are None if a token is constant or zero, respectively. ``spectral_square`` is
    :math:`\mathbb{E}\|J\|_2^2`, 2/3 after a Post-LN feed-forward sum of :math:`3d/2`; ``mean_square`` is
    :math:`\mathbb{E}\|J\|_F^2/d`, which lacks the two directions that a LayerNorm removes.
    There is a row for each norm that reads or writes a stream, at its first call, without padding. Raises
    UserError for fewer than one token.

    Xiong et al. 2020, Lemma 3 and Appendix F (arXiv 2002.04745).
    """
    if tokens < 1:
        raise UserError(f"tokens is {tokens}; give 1 or more, say {TOKENS}")
    places: dict[str, tuple[str, int | None]] = {}
    for stack in subject.structure.stacks:
        places |= {path: (stack.name, view.index) for view in stack.sublayers for path in view.norms}
        places |= {stack.final_norm: (stack.name, None)} if stack.final_norm is not None else {}
    with record(subject.model, [Want(path, "input", first=True) for path in places]) as seen:
        subject.calls().once(graph=torch.is_grad_enabled())
    first, rows = {one.tap.module: one.value for one in reversed(seen)}, list[Row]()
    with undisturbed(subject.model):
        for path, (name, index) in places.items():
            kept, norm = _spread(subject.tokens(name, first[path]), tokens), subject.model.get_submodule(path)
            measured = _measured(norm, kept.to(first[path].dtype), kept)
            rows.append({"module": path, "stack": name, "index": index, **measured})
    return Table("jacobian", tuple(rows))


def _spread(x: Tensor, count: int) -> Tensor:
    """Return ``count`` of the tokens `[N, D]`, or all: the middle ones of ``count`` equal parts, in the order
    of their deviation. A single token is the median, never a class token of zeros or an outlier.
    """
    count = min(count, len(x))
    order = layer_norm_jacobian(x).argsort(stable=True)
    middles = (torch.arange(count, device=x.device) * 2 + 1) * len(x) // (2 * count)
    return x[order[middles].sort().values]


def _measured(norm: nn.Module, given: Tensor, x: Tensor) -> Row:
    """Return the columns of one norm, from tokens `[N, D]` as it receives them, and in float32 or wider."""
    matrices = torch.stack([token_jacobian(norm, token) for token in given]).to(x.dtype)
    largest = spectral_norm(matrices)
    exact, published = layer_norm_jacobian(x), rms_norm_jacobian(x)
    # at a constant token the norm's eps decides, which neither form has
    return {
        "spectral": largest.max().item(),
        "spectral_mean": largest.mean().item(),
        "exact": _finite(exact.max()),
        "exact_mean": _finite(exact.mean()),
        "published": _finite(published.max()),
        "spectral_square": largest.square().mean().item(),
        "mean_square": (matrices.square().sum((-2, -1)).mean() / x.shape[-1]).item(),
        "tokens": len(x),
    }


def _finite(value: Tensor) -> float | None:
    return value.item() if value.isfinite() else None


def token_jacobian(norm: nn.Module, token: Tensor) -> Tensor:
    r"""Return :math:`J_{ij} = \partial\,\mathrm{norm}(x)_i / \partial x_j`, `[D, D]`, at a token `[D]`.

    Every row has its own copy of the token, so one backward pass gives them all.
    """
    dim = len(token)
    with torch.enable_grad():
        copies = token.detach().expand(1, dim, dim).clone().requires_grad_()
        selected = norm(copies)[0].diagonal().sum()
    return torch.autograd.grad(selected, copies)[0][0]


def spectral_norm(matrices: Tensor) -> Tensor:
    r"""Return :math:`\max_{v \in K} \|A v\| / \|v\|` over the Krylov space :math:`K = \mathrm{span}\{v_0,
    A^\top A v_0, (A^\top A)^2 v_0, \dots\}` of a fixed random vector.

    `[N, D, D]` to `[N]`. It is exact for D up to ``STEPS``, otherwise below the largest singular value. A
    LayerNorm of gain 1 has only one nonzero value and needs one step. Far cheaper than all singular values.
    """
    count, dim, _ = matrices.shape
    drawn = torch.randn(dim, 1, generator=torch.Generator().manual_seed(0)).to(matrices)
    basis = (drawn / drawn.norm()).expand(count, dim, 1)
    for _ in range(min(STEPS, dim) - 1):
        image = matrices.mT @ (matrices @ basis[..., -1:])
        new = image - basis @ (basis.mT @ image)
        new = new - basis @ (basis.mT @ new)  # again, for what rounding left behind
        lengths = new.norm(dim=-2, keepdim=True)
        goes_on = lengths > ROUNDING * image.norm(dim=-2, keepdim=True)
        if not goes_on.any():
            break
        basis = torch.cat([basis, torch.where(goes_on, new / lengths, 0.0)], dim=-1)
    images = matrices @ basis
    return torch.linalg.eigvalsh(images.mT @ images)[:, -1].clamp(min=0).sqrt()


def _gains(tables: Tables) -> Iterator[Finding]:
    """Report norms whose gain, measured by their Jacobian, is near zero or far above one."""
    effective = _effective(tables)
    for name, words, limit, some in (
        ("dead_gain", "less than", DEAD_GAIN, {k: v for k, v in effective.items() if v < DEAD_GAIN}),
        ("large_gain", "more than", LARGE_GAIN, {k: v for k, v in effective.items() if v > LARGE_GAIN}),
    ):
        if some:
            worst = max(some, key=lambda k: abs(log(some[k] or 1e-45)))
            yield Finding(
                name,
                "warning",
                f"{len(some)} of {len(effective)} norms scale by {words} {limit:g} times what a gain of 1 "
                f"does, above all {worst}",
                "jacobian",
                {"norms": len(some), "gain": some[worst]},
            )


def _effective(tables: Tables) -> dict[str, float]:
    """Return the gain of each norm: the measured value over that of a gain of 1."""
    read = (
        (str(r["module"]), as_float(r["spectral"]), as_float(r["exact"])) for r in tables.table("jacobian")
    )
    return {name: measured / exact for name, measured, exact in read if measured is not None and exact}


def _scaling_of_gradients(tables: Tables) -> Iterator[Finding]:
    """Say by how much the norms scale gradients, and compare it with the exact form of Lemma 3."""
    ends = extremes(tables.table("jacobian"), "spectral")
    ratios = [ratio for ratio in _effective(tables).values() if ratio]
    if not ends or not ratios:
        return
    (small, large), off = ends, max(ratios, key=lambda r: abs(log(r)))
    low, high = small["spectral"], large["spectral"]
    yield Finding(
        "jacobian",
        "note",
        f"norms multiply gradients by at most {format_number(low)} ({small['module']}) to "
        f"{format_number(high)} ({large['module']}); sqrt(d) / ||x - mean|| predicts this within a factor of "
        f"{max(off, 1 / off):.3f}",
        "jacobian",
        {"smallest": low, "largest": high, "measured_over_exact": off},
        XIONG.format("Lemma 3"),
    )


JACOBIAN: Final = Study(
    "jacobian",
    lambda subject: jacobian(subject.small, tokens=ASKED),
    "standard",
    rules=(_gains, _scaling_of_gradients),
    batch=SMALL_BATCH,
    order=90,
)


def norm_parameters(subject: Subject) -> Table:
    r"""Measure :math:`\frac{1}{n} \sum_i w_i`, :math:`\min_i w_i` and :math:`\max_i w_i` of the gains, biases
    and scalars w of every norm, and of what scales streams and branches: :math:`g, \gamma, \beta, \omega,
    \alpha, \lambda`.

    These are all parameters with at most one dimension, of norms anywhere, which their numbers tell, and of
    modules without a matrix that are in sublayers but outside branches. ``parameter`` is the path from the
    model, ``module`` that of its module. Stack and index are None outside all sublayers; for what the
    sublayers of a layer share, such as ReZero's :math:`\alpha`, index is the first one's.

    Nguyen and Salazar 2019, Figure 3 (arXiv 1910.05895) for the g of ScaleNorm by depth.
    """
    model, structure = subject.model, subject.structure
    _, owned, widths = subject.forward
    norms = norms_of(model, widths)
    by_structure = {  # of frozen parameters, which no graph shows
        path: Owner(stack, v.index, v.layer, v.role) for stack, v in structure.sublayers for path in v.norms
    }
    finals = {stack.final_norm: stack.name for stack in structure.stacks if stack.final_norm}
    rows: list[Row] = []
    for path, p in model.named_parameters():
        holder = path.rpartition(".")[0]
        owner = owned[path] if owned[path].role != "other" else by_structure.get(holder, Owner())
        if p.ndim < 2 and (holder in norms or (owner.role != "other" and _scales(subject, holder))):
            stack, index = finals.get(holder, owner.stack), _index(subject, owner)
            wide = p.detach().to(torch.promote_types(p.dtype, torch.float32))
            levels = {"mean": wide.mean().item(), "low": wide.min().item(), "high": wide.max().item()}
            rows.append({"module": holder, "parameter": path, "stack": stack, "index": index, **levels})
    return Table("norm_parameters", tuple(rows))


def _scales(subject: Subject, holder: str) -> bool:
    matrix = any(p.ndim > 1 for p in subject.model.get_submodule(holder).parameters(recurse=False))
    branches = (view.branch.module for _, view in subject.structure.sublayers)
    return not matrix and not any(within(holder, branch) for branch in branches)


def _index(subject: Subject, owner: Owner) -> int | None:
    """Return the sublayer in which a parameter acts, or the first of the layer that shares it."""
    views = subject.structure.sublayers
    shared = (v.index for stack, v in views if (stack, v.layer) == (owner.stack, owner.layer))
    return next(shared, None) if owner.index is None else owner.index


NORM_PARAMETERS: Final = Study("norm_parameters", norm_parameters, "cheap", order=85)
