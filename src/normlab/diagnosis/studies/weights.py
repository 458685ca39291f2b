"""Tabulate every parameter as it is, and compare those that are alike in all layers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor, nn

from normlab.diagnosis.probing.passes import ForwardPass, forward_pass, parts_of
from normlab.diagnosis.reading.naming import innermost, layer_of, template
from normlab.diagnosis.reading.subject import Subject
from normlab.diagnosis.rules.finding import Finding, Tables, number, said
from normlab.diagnosis.study import Study
from normlab.diagnosis.table import Row, Table
from normlab.trace.tensors import activations, forward_hooks

LEAST_SIBLINGS: Final = 4
"""Parameters that are alike, below which none is called unlike the others."""
AROUND: Final = 2
"""Layers before and after one with which its parameters are compared: an initialisation may change slowly
with depth.
"""
UNLIKE: Final = 3.0
"""Factor between a parameter and those of the layers around it that no initialisation has."""
FAR: Final = 10.0
"""Factor that stops a training."""
LARGE_GAIN: Final = 7.0
"""Deviation times the square root of the width of a matrix, at most 1.4 in usual initialisations, above which
it may be drawn from a wrong distribution, such as torch.randn's; and the growth of the root mean square in a
linear map above which it is.
"""
LINEAR: Final = ("Linear", "NonDynamicallyQuantizableLinear", "Conv1D")
"""Classes that multiply by their matrix and do nothing else; one that inherits from them may scale it."""
FEW: Final = 0.5
"""Share of the rows of a matrix below which those that are unlike the others are exceptions."""
LEAST_WIDTH: Final = 8
"""Length of a row below which its size is chance."""
ENDLESS: Final = 1e9
"""The factor between zero and anything else."""


def weights(subject: Subject, *, forward: ForwardPass | None = None) -> Table:
    r"""Tabulate every parameter; a packed matrix of queries, keys and values has a row for each.

    ``std`` is its standard deviation, ``rms`` its root mean square, ``tail`` its largest magnitude in
    standard deviations, ``zeros`` the share of its entries that are 0. ``tied`` is the path under which the
    same parameter comes first, if it has several. ``trainable`` and ``constant`` are 1 or 0. ``layer`` is the
    first number in the path where no structure was read. ``width`` is the smaller dimension of a matrix;
    ``odd_rows`` is the number of rows whose root mean square is at least ``FAR`` times that of the median
    row, and ``odd`` the mean of theirs over that. ``amplifies`` is the root mean square of what a linear map
    puts out over that of what it reads, measured where its matrix has a suspiciously large deviation.
    """
    forward = forward or forward_pass(subject)
    amplified = _amplified(subject)
    parts, names = parts_of(subject, forward), dict[int, str]()
    rows = list[Row]()
    for path, p in subject.model.named_parameters(remove_duplicate=False):
        if not p.numel():
            continue
        first = names.setdefault(id(p), path)
        owner = forward.owned[first]
        for part in parts[first]:
            x = part.of(p.detach())
            rows.append(
                {
                    "module": path.rpartition(".")[0],
                    "parameter": path,
                    "stack": owner.stack,
                    "layer": layer_of(path) if owner.layer is None else owner.layer,
                    "role": part.kind,
                    "shape": "×".join(map(str, x.shape)),
                    "dtype": str(x.dtype).removeprefix("torch."),
                    "device": str(x.device),
                    "trainable": int(p.requires_grad),
                    **_statistics(x),
                    "amplifies": amplified.get(path.rpartition(".")[0]) if p.ndim == 2 else None,
                    "tied": "" if first == path else first,
                }
            )
    return Table("weights", tuple(rows))


def _amplified(subject: Subject) -> dict[str, float]:
    """Measure the linear maps whose matrix has a deviation far above 1/√n, by their path. One that is tied to
    an embedding is drawn as that is.
    """
    tied = {id(m.weight) for m in subject.model.modules() if isinstance(m, nn.Embedding)}

    def suspicious_weight(module: nn.Module) -> bool:
        w = getattr(module, "weight", None)
        if type(module).__name__ not in LINEAR or not isinstance(w, Tensor) or w.ndim != 2 or id(w) in tied:
            return False
        return bool(w.numel()) and w.detach().float().std().item() * math.sqrt(min(w.shape)) > LARGE_GAIN

    suspicious = {path: m for path, m in subject.model.named_modules() if suspicious_weight(m)}
    entered, found = dict[str, float](), dict[str, float]()

    def see(path: str, side: str, values: Any) -> None:
        x = next((x for _, x in activations(values)), None)
        size = 0.0 if x is None else x.detach().float().square().mean().sqrt().item()
        if side == "input":
            entered.setdefault(path, size)
        elif entered.get(path):
            found.setdefault(path, size / entered[path])

    if suspicious:
        with forward_hooks(suspicious, see):
            subject.calls().once()
    return found


def _statistics(x: Tensor) -> Row:
    wide = x.to(torch.promote_types(x.dtype, torch.float32)).to_dense() if x.is_sparse else x.float()
    std = wide.std(correction=0).item() if x.numel() else 0.0
    largest = wide.abs().max().item() if x.numel() else 0.0
    return {
        "std": std,
        "mean": wide.mean().item(),
        "rms": wide.square().mean().sqrt().item(),
        "tail": largest / std if std else 0.0,
        "zeros": (wide == 0).float().mean().item(),
        "constant": int(bool((wide == wide.flatten()[0]).all())),
        **_rows(wide),
    }


def _rows(x: Tensor) -> Row:
    """What is said of the rows of a matrix; 0 of what is none."""
    if x.ndim != 2 or not x.numel():
        return {"width": 0, "odd_rows": 0, "odd": 0.0}
    sizes = x.square().mean(1).sqrt()
    middle = sizes.median().item()
    odd = sizes[sizes >= FAR * middle] if middle else sizes[:0]
    return {
        "width": min(x.shape),
        "odd_rows": len(odd),
        "odd": (odd.mean() / middle).item() if len(odd) else 0.0,
    }


def siblings(table: Table, path: str) -> Iterator[list[Row]]:
    """Yield the rows whose path, in that column, differs in its numbers alone, with one shape and role."""
    groups: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    for row in table:
        groups[template(str(row[path])), row["shape"], row.get("role")].append(row)
    yield from (rows for rows in groups.values() if len(rows) >= LEAST_SIBLINGS)


def unlike_siblings(tables: Tables) -> Iterator[Finding]:
    """Name the layer whose parameters are much larger or smaller than those of the layers around it."""
    odd: dict[str, list[tuple[Row, float]]] = defaultdict(list)
    for rows in siblings(tables.table("weights"), "parameter"):
        for row, factor in _outliers(rows):
            odd[_block(str(row["parameter"]))].append((row, factor))
    for block, found in sorted(odd.items(), key=lambda one: -max(abs(math.log(f)) for _, f in one[1])):
        matrices = [one for one in found if not str(one[0]["parameter"]).endswith("bias")]
        row, factor = max(matrices or found, key=lambda one: abs(math.log(one[1])))
        module = innermost([str(r["module"]) for r, _ in found]) or block
        much = max(factor, 1 / factor)
        what = f"{row['parameter']}" if len(found) == 1 else f"{len(found)} parameters of {module}"
        verb = "is" if len(found) == 1 else "are"
        how = f"{said(much)} times {'larger' if factor > 1 else 'smaller'} than those of the layers around"
        if much > ENDLESS / 2:
            how = (
                "zero, and those of the other layers are not" if factor < 1 else "not zero, as in the others"
            )
        yield Finding(
            "unlike_siblings",
            "problem" if much >= FAR else "warning",
            f"{what} {verb} {how}",
            "weights",
            {"parameter": row["parameter"], "rms": row["rms"], "factor": factor, "parameters": len(found)},
            module=module,
            do=f"initialise {module} like the same module of the other layers: its initialisation may have "
            "been skipped, or applied twice",
            explains=(*CONSEQUENCES, "drawn_too_large"),
        )


def drawn_too_large(tables: Tables) -> Iterator[Finding]:
    """Name the matrices of linear maps whose outputs are many times larger than their inputs."""
    large = [row for row in tables.table("weights") if (number(row["amplifies"]) or 0.0) > LARGE_GAIN]
    if large:
        row, more = large[0], len(large) - 1
        others = f" and {more:,} other {'matrix' if more == 1 else 'matrices'}" if more else ""
        yield Finding(
            "drawn_too_large",
            "problem",
            f"{row['parameter']}{others} {'have' if more else 'has'} entries of deviation "
            f"{said(row['std'])}: what the first puts out is {said(row['amplifies'])} times as large as what "
            "it reads",
            "weights",
            {"std": row["std"], "amplifies": row["amplifies"], "matrices": len(large)},
            "LeCun et al. 1998, Section 4.6 (Efficient BackProp)",
            module=str(row["module"]),
            do="draw them with a deviation of 1/√n for n inputs, or 0.02, and not by torch.randn alone",
            explains=(*CONSEQUENCES, "rotary", "no_scale", "attention_logits"),
        )


def odd_rows(tables: Tables) -> Iterator[Finding]:
    """Name the embedding of which some rows are many times larger than the others, as those of new words."""
    for row in tables.table("weights"):
        odd, rows = int(number(row["odd_rows"]) or 0), int(str(row["shape"]).partition("×")[0] or 0)
        wide = (number(row["width"]) or 0) >= LEAST_WIDTH and row["role"] == "embedding" and row["trainable"]
        if row["tied"] or not wide or not 0 < odd < FEW * rows:
            continue
        yield Finding(
            "odd_rows",
            "problem",
            f"{odd:,} of the {rows:,} rows of {row['parameter']} {'is' if odd == 1 else 'are'} "
            f"{said(row['odd'])} times as large as the median row",
            "weights",
            {"rows": odd, "factor": row["odd"]},
            module=str(row["module"]),
            do="draw rows that were added, as for new words, like those that were there",
            explains=CONSEQUENCES,
        )


CONSEQUENCES: Final = (
    "hidden_scale",
    "updates",
    "large_update",
    "initial_loss",
    "attention",
    "jump",
)
"""Findings that follow where weights are of a wrong size."""


def _outliers(rows: Sequence[Row]) -> Iterator[tuple[Row, float]]:
    """Yield the rows whose size is unlike that of most of those around, with the factor to their median.
    Where most are zero on purpose, those that are not are unlike.
    """
    sizes = [number(row["rms"]) or 0.0 for row in rows]
    zeros = sum(not size for size in sizes)
    for i, (row, size) in enumerate(zip(rows, sizes, strict=True)):
        near = [x for j, x in enumerate(sizes) if j != i and x and abs(j - i) <= AROUND]
        if 2 * zeros >= len(sizes) or not near:
            if size and 2 * zeros > len(sizes):
                yield row, ENDLESS
            continue
        factor = size / median(near) if size else 1 / ENDLESS
        above, below = sum(size > UNLIKE * x for x in near), sum(UNLIKE * size < x for x in near)
        if 2 * max(above, below) > len(near):
            yield row, factor


def _block(path: str) -> str:
    """The path up to its first number: the layer that the parameter is of."""
    parts = path.split(".")
    ends = [i for i, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[: ends[0] + 1]) if ends else path


WEIGHTS: Final = Study(
    "weights",
    lambda c: [weights(c.subject, forward=c.backward.forward)],
    "preflight",
    rules=(drawn_too_large, odd_rows, unlike_siblings),
    batch="the model alone",
    order=-50,
)
