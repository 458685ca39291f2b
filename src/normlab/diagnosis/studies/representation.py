"""Measure how alike depth makes tokens, and the gains of norms and shortcuts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor, nn

from normlab.config.chart import ByDepth
from normlab.diagnosis.reading.parameters import Owner, norms_of
from normlab.diagnosis.studies.attention import is_sequence_first
from normlab.diagnosis.study import Finding, Study, format_cosine, format_number
from normlab.diagnosis.subject import Subject
from normlab.diagnosis.tables import Row, Table, Tables, as_float

ALIKE: Final = 0.95
"""Mean cosine of two tokens' states beyond which less than a tenth of their energy distinguishes tokens."""


def similarity(subject: Subject) -> Table:
    r"""Measure :math:`\cos(x_i, x_j)`, the mean over pairs :math:`i \ne j` of tokens of a sequence, and the
    effective rank :math:`\exp(-\sum_k p_k \ln p_k)` with :math:`p_k = \sigma_k / \sum_l \sigma_l` of a
    sequence's singular values.

    Of the stream `[B, T, D]` that a stack begins with, index -1, and after each sublayer; the mean over
    sequences of more than one token, without padding. A stream `[N, D]` is one sequence.

    Dong et al. 2021, Section 2 (arXiv 2103.03404) for tokens that grow alike; Roy and Vetterli 2007, Section
    2 (EUSIPCO) for the rank.
    """
    turned, rows = is_sequence_first(subject.model), list[Row]()
    for stack in subject.structure.stacks:
        taps = {-1: stack.sublayers[0].before} | {view.index: view.after for view in stack.sublayers}
        for index, tap in taps.items():
            x = subject.forward.tensors[tap]
            mask = subject.masks[stack.name].reshape(x.shape[:-1]).to(x.device)
            if turned and x.ndim == 3:
                x, mask = x.transpose(0, 1), mask.T
            rows.append({"stack": stack.name, "index": index, **_alike(x, mask)})
    return Table("similarity", tuple(rows))


def _alike(x: Tensor, mask: Tensor) -> Row:
    x = x.to(torch.promote_types(x.dtype, torch.float32)) * mask[..., None]
    sequences = x.reshape(-1, *x.shape[-2:])[(mask.sum(-1) > 1).reshape(-1)]
    if not len(sequences):
        return {"cosine": None, "effective_rank": None}
    tokens = mask.reshape(-1, x.shape[-2]).sum(-1)
    pairs = (tokens * (tokens - 1))[tokens > 1]
    unit = nn.functional.normalize(sequences, dim=-1)
    together = unit.sum(-2).square().sum(-1) - unit.square().sum((-2, -1))
    means = {"cosine": (together / pairs).mean(), "effective_rank": effective_rank(sequences).mean()}
    return {name: value.item() if value.isfinite() else None for name, value in means.items()}


def effective_rank(x: Tensor) -> Tensor:
    r"""Return :math:`\exp(-\sum_k p_k \ln p_k)` with :math:`p_k = \sigma_k / \sum_l \sigma_l`, from the
    singular values :math:`\sigma` of each matrix `[..., T, D]`.

    1 for a matrix of rank one or zero, min(T, D) for one with equal singular values; NaN for one whose
    squares are not finite. Roy and Vetterli 2007, Section 2 (EUSIPCO).
    """
    x = x.double()
    gram = x @ x.mT if x.shape[-2] < x.shape[-1] else x.mT @ x
    finite = gram.isfinite().all(-1).all(-1)
    values = torch.linalg.eigvalsh(gram.where(finite[..., None, None], 0.0)).clamp(min=0).sqrt()
    shares = values / values.sum(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
    return torch.special.entr(shares).sum(-1).exp().where(finite, torch.nan)


def norm_parameters(subject: Subject) -> Table:
    r"""Measure :math:`\frac{1}{n} \sum_i w_i`, :math:`\min_i w_i` and :math:`\max_i w_i` of the gains, biases
    and scalars w of every norm, and of what scales streams and branches: :math:`g, \gamma, \beta, \omega,
    \alpha, \lambda`.

    That is, of all parameters with at most one dimension of norms anywhere, which their numbers tell, and of
    modules without a matrix in the sublayers but outside their branches. ``parameter`` is the path from the
    model, ``module`` that of its module; stack and index are None outside of all sublayers, and index is the
    first sublayer's for what those of a layer share, such as ReZero's :math:`\alpha`.

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
    return not matrix and not any(f"{holder}.".startswith(f"{branch}.") for branch in branches)


def _index(subject: Subject, owner: Owner) -> int | None:
    """Return the sublayer in which a parameter acts, or the first of the layer that shares it."""
    views = subject.structure.sublayers
    shared = (v.index for stack, v in views if (stack, v.layer) == (owner.stack, owner.layer))
    return next(shared, None) if owner.index is None else owner.index


def similarity_of_tokens(tables: Tables) -> Iterator[Finding]:
    """Say whether depth makes tokens alike."""
    for stack, table in tables.stacks("similarity"):
        rows = [row for row in table if as_float(row["cosine"]) is not None]
        if not rows:
            continue
        first, last = float(rows[0]["cosine"] or 0), float(rows[-1]["cosine"] or 0)
        rank = as_float(rows[-1]["effective_rank"])
        yield Finding(
            "similarity",
            "warning" if last > ALIKE else "note",
            f"the mean cosine between the states of two tokens goes from {format_cosine(first)} to "
            f"{format_cosine(last)} through {stack}"
            + ("" if rank is None else f", whose output has an effective rank of {format_number(rank)}")
            + ("; its tokens are nearly alike" if last > ALIKE else ""),
            "similarity",
            {"first": first, "last": last, "effective_rank": rank},
            "Dong et al. 2021, Section 2 (arXiv 2103.03404)",
        )


SIMILARITY: Final = Study(
    "similarity",
    similarity,
    "cheap",
    rules=(similarity_of_tokens,),
    title="Similarity",
    intro="Mean cosine between the states of two tokens, and the effective rank of a sequence's states, "
    "which counts the directions that they use.",
    charts=(
        ByDepth("similarity", "Cosine of tokens", "cosine", "mean cosine"),
        ByDepth("similarity", "Directions in use", "effective_rank", "effective rank"),
    ),
    order=80,
)
NORM_PARAMETERS: Final = Study("norm_parameters", norm_parameters, "cheap", order=85)
