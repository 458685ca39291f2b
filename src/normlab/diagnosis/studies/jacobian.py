"""Measure the parameters of norms, and by how much norms scale the gradients that pass through them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf
from typing import Final

import torch
from torch import Tensor, nn

from normlab.diagnosis.parameters import Owner, norms_of
from normlab.diagnosis.structure import Structure
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
"""A norm with a gain above this enlarges its input more than a hundredfold."""

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
    places = _places(subject.structure)
    with record(subject.model, [Want(path, "input", first=True) for path in places]) as seen:
        subject.calls().once(graph=torch.is_grad_enabled())
    inputs: dict[str, Tensor] = {}
    for call in seen:
        inputs.setdefault(call.tap.module, call.value)  # the first one's
    rows = list[Row]()
    with undisturbed(subject.model):
        for path, (stack, index) in places.items():
            x = _spread(subject.tokens(stack, inputs[path]), tokens)
            norm = subject.model.get_submodule(path)
            measured = _measured(norm, x.to(inputs[path].dtype), x)
            rows.append({"module": path, "stack": stack, "index": index, **measured})
    return Table("jacobian", tuple(rows))


def _places(structure: Structure) -> dict[str, tuple[str, int | None]]:
    """Return stack and index of each norm of a stream, by path; a final norm has no index."""
    places: dict[str, tuple[str, int | None]] = {}
    for stack in structure.stacks:
        for view in stack.sublayers:
            for path in view.norms:
                places[path] = stack.name, view.index
        if stack.final_norm is not None:
            places[stack.final_norm] = stack.name, None
    return places


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
    gains = _effective_gains(tables)
    dead = {name: gain for name, gain in gains.items() if gain < DEAD_GAIN}
    large = {name: gain for name, gain in gains.items() if gain > LARGE_GAIN}
    if dead:
        yield _extreme_gain("dead_gain", f"less than {DEAD_GAIN:g}", dead, len(gains))
    if large:
        yield _extreme_gain("large_gain", f"more than {LARGE_GAIN:g}", large, len(gains))


def _extreme_gain(name: str, limit: str, gains: Mapping[str, float], norms: int) -> Finding:
    worst = max(gains, key=lambda path: _factor(gains[path]))
    return Finding(
        name,
        "warning",
        f"{len(gains)} of {norms} norms scale by {limit} times what a gain of 1 does, above all {worst}",
        "jacobian",
        {"norms": len(gains), "gain": gains[worst]},
    )


def _factor(ratio: float) -> float:
    """Return how far a ratio is from 1, up or down; a ratio of 0 is farthest."""
    if not ratio:
        return inf
    return max(ratio, 1 / ratio)


def _effective_gains(tables: Tables) -> dict[str, float]:
    """Return the gain of each norm by path: the measured value over that of a gain of 1."""
    gains: dict[str, float] = {}
    for row in tables.table("jacobian"):
        measured, exact = as_float(row["spectral"]), as_float(row["exact"])
        if measured is not None and exact:
            gains[str(row["module"])] = measured / exact
    return gains


def _scaling_of_gradients(tables: Tables) -> Iterator[Finding]:
    """Say by how much the norms scale gradients, and compare it with the exact form of Lemma 3."""
    ends = extremes(tables.table("jacobian"), "spectral")
    ratios = [ratio for ratio in _effective_gains(tables).values() if ratio]
    if not ends or not ratios:
        return
    smallest, largest = ends
    low, high = smallest["spectral"], largest["spectral"]
    farthest = max(ratios, key=_factor)
    yield Finding(
        "jacobian",
        "note",
        f"norms multiply gradients by at most {format_number(low)} ({smallest['module']}) to "
        f"{format_number(high)} ({largest['module']}); sqrt(d) / ||x - mean|| predicts this within a factor "
        f"of {_factor(farthest):.3f}",
        "jacobian",
        {"smallest": low, "largest": high, "measured_over_exact": farthest},
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
    _, owned, widths = subject.forward
    norms = norms_of(subject.model, widths)
    owner_of_norm = {
        path: Owner(stack, view.index, view.layer, view.role)
        for stack, view in subject.structure.sublayers
        for path in view.norms
    }
    finals = {stack.final_norm: stack.name for stack in subject.structure.stacks if stack.final_norm}
    rows: list[Row] = []
    for path, p in subject.model.named_parameters():
        holder, owner = path.rpartition(".")[0], owned[path]
        if owner.role == "other":  # as of a frozen parameter, which no graph shows
            owner = owner_of_norm.get(holder, Owner())
        if p.ndim < 2 and (holder in norms or _scales(subject, holder, owner)):
            stack, index = finals.get(holder, owner.stack), _index(subject, owner)
            wide = p.detach().to(torch.promote_types(p.dtype, torch.float32))
            levels = {"mean": wide.mean().item(), "low": wide.min().item(), "high": wide.max().item()}
            rows.append({"module": holder, "parameter": path, "stack": stack, "index": index, **levels})
    return Table("norm_parameters", tuple(rows))


def _scales(subject: Subject, holder: str, owner: Owner) -> bool:
    """Return whether a module without a matrix scales a stream or a branch, outside the branch itself."""
    has_matrix = any(p.ndim > 1 for p in subject.model.get_submodule(holder).parameters(recurse=False))
    if owner.role == "other" or has_matrix:
        return False
    return not any(within(holder, view.branch.module) for _, view in subject.structure.sublayers)


def _index(subject: Subject, owner: Owner) -> int | None:
    """Return the sublayer in which a parameter acts, or the first of the layer that shares it."""
    if owner.index is not None:
        return owner.index
    for stack, view in subject.structure.sublayers:
        if (stack, view.layer) == (owner.stack, owner.layer):
            return view.index
    return None


NORM_PARAMETERS: Final = Study("norm_parameters", norm_parameters, "cheap", order=85)
