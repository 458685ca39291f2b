"""Measure what norms put out, whether feed-forward layers bend, and which tokens matter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from normlab.diagnosis.probing.passes import BackwardPass, parts_of
from normlab.diagnosis.reading.naming import layer_of
from normlab.diagnosis.reading.subject import Subject, undisturbed
from normlab.diagnosis.reading.taps import activations, call_model, leaves, watching
from normlab.diagnosis.rules.finding import Finding, Tables, number, percent, said
from normlab.diagnosis.study import Study
from normlab.diagnosis.table import Row, Table

SILENT: Final = 0.01
"""Root mean square of a norm's output over that of its gains, below which it does not normalise."""
LOUD: Final = 1.5
"""The same, above which it does not: what is normalised has a root mean square of 1 at most."""
PADDED: Final = 0.8
"""Share of one id above which tokens are padding."""


def signals(subject: Subject, backward: BackwardPass) -> tuple[Table, ...]:
    """Tabulate as ``norms`` the root mean square of what each norm puts out over that of its gains; as
    ``activations`` whether what leaves the first matrix of a feed-forward layer enters the last one as it is
    (``linear``, 1 or 0); and as ``influence``, for each stack, the number of tokens whose embedding has a
    gradient and of those without, with the share of the commonest id among both.
    """
    model, parts = subject.model, parts_of(subject, backward.forward)
    roles = {path.rpartition(".")[0]: own[0].kind for path, own in parts.items() if path.endswith("weight")}
    roles |= {p: "norm" for p, m in model.named_modules() if "norm" in type(m).__name__.lower()}
    wanted = {
        p: m for p, m in model.named_modules() if roles.get(p) in ("norm", "ffn_in", "ffn_out", "other")
    }
    first: dict[tuple[str, str], Tensor] = {}

    def see(path: str, side: str, values: Any) -> None:
        for _, x in activations(values):
            first.setdefault((path, side), x.detach())
            return

    with torch.no_grad(), undisturbed(model), watching(wanted, see):
        call_model(model, subject.batch)
    norms = [_norm(path, m, first) for path, m in wanted.items() if roles[path] == "norm"]
    rows = [row for row in norms if row]
    return (
        Table("norms", tuple(rows)),
        Table("activations", tuple(_activations(wanted, roles, first))),
        Table("influence", tuple(_influence(subject, backward))),
    )


def _norm(path: str, module: nn.Module, seen: Mapping[tuple[str, str], Tensor]) -> Row:
    gains, output = getattr(module, "weight", None), seen.get((path, "output"))
    if not isinstance(gains, Tensor) or gains.numel() < 2 or output is None or not gains.any():
        return {}
    return {"module": path, "output_over_gain": _rms(output) / _rms(gains)}


def _rms(x: Tensor) -> float:
    return x.detach().float().square().mean().sqrt().item()


def _activations(
    wanted: Mapping[str, nn.Module], roles: Mapping[str, str], seen: Mapping[tuple[str, str], Tensor]
) -> Iterator[Row]:
    """Yield a row for each matrix that is fed by one that widens the stream, in the same layer."""
    before = ""
    for path in wanted:
        if roles[path] == "norm" or (path, "input") not in seen:
            continue
        x = seen[path, "input"]
        if before and x.shape[-1] > seen[before, "input"].shape[-1] and layer_of(before) == layer_of(path):
            y = seen.get((before, "output"))
            same = y is not None and y.shape == x.shape and torch.equal(y, x) and bool(x.any())
            yield {"module": before, "into": path, "linear": int(same)}
        before = path


def _influence(subject: Subject, backward: BackwardPass) -> Iterator[Row]:
    tokens = [x for _, x in leaves(subject.batch) if not x.is_floating_point() and x.ndim == 2]
    for stack in subject.structure.stacks:
        gradient = backward.stream.get(stack.sublayers[0].before)
        if gradient is None or gradient.ndim != 3:
            continue
        ids = next((x for x in tokens if x.shape == gradient.shape[:2] and len(x.unique()) > 2), None)
        if ids is None:
            continue
        matters = gradient.abs().amax(-1) > 0
        yield {
            "stack": stack.name,
            "tokens": int(matters.sum()),
            "commonest": _commonest(ids[matters]),
            "tokens_without": int((~matters).sum()),
            "commonest_without": _commonest(ids[~matters]),
        }


def _commonest(ids: Tensor) -> float:
    """The share of the commonest id."""
    return int(ids.unique(return_counts=True)[1].max()) / len(ids) if len(ids) else 0.0


def no_norm(tables: Tables) -> Iterator[Finding]:
    """Name the norms that put out next to nothing, or more than their gains, as no norm does."""
    rows = list(tables.table("norms"))
    outputs = [number(row["output_over_gain"]) or 0.0 for row in rows]
    for name, odd in (
        ("silent_norm", [r for r, x in zip(rows, outputs, strict=True) if x < SILENT]),
        ("loud_norm", [r for r, x in zip(rows, outputs, strict=True) if x > LOUD]),
    ):
        if not odd:
            continue
        row, count = odd[0], f" and of {len(odd) - 1} other norms" if len(odd) > 1 else ""
        yield Finding(
            name,
            "problem",
            f"the output of {row['module']}{count} does not have the root mean square of the gains, but "
            f"{said(row['output_over_gain'])} times that: it is not normalised",
            "norms",
            {"output_over_gain": row["output_over_gain"], "norms": len(odd), "of": len(rows)},
            module=str(row["module"]),
            do=NORMALISING[name],
            explains=("dead_gain", "jacobian", "hidden_scale", "jump", "initial_loss"),
        )


NORMALISING: Final = {
    "silent_norm": "look at the epsilon, which belongs far below the mean square of the input: 1e-5 or 1e-6",
    "loud_norm": "divide by the root of the mean square, or by the deviation",
}


def linear_layer(tables: Tables) -> Iterator[Finding]:
    """Name the feed-forward layers without an activation."""
    rows = tables.table("activations")
    straight = [row for row in rows if row["linear"]]
    if straight:
        row, count = straight[0], f" and of {len(straight) - 1} others" if len(straight) > 1 else ""
        yield Finding(
            "no_activation",
            "problem",
            f"the output of {row['module']}{count} enters {row['into']} as it is: without an activation the "
            "two matrices are one linear map",
            "activations",
            {"layers": len(straight), "of": len(rows)},
            module=str(row["module"]),
            do="put an activation between the two matrices",
        )


def inverted_mask(tables: Tables) -> Iterator[Finding]:
    """Name the stack in which only padding is looked at."""
    for row in tables.table("influence"):
        most, rest = number(row["commonest"]) or 0.0, number(row["commonest_without"]) or 1.0
        if most > PADDED > 2 * rest:
            yield Finding(
                "inverted_mask",
                "problem",
                f"of what {row['stack']} reads, {row['tokens']} tokens matter, {percent(most)} of them the "
                f"same one, and {row['tokens_without']} others do not: its padding mask is inverted",
                "influence",
                {name: row[name] for name in ("tokens", "commonest", "tokens_without", "commonest_without")},
                module=_stack(str(row["stack"])),
                do="a padding mask is True where this model expects a token; turn it round",
            )


def _stack(name: str) -> str:
    """The module that a container of blocks belongs to."""
    return name.rpartition(".")[0] or name


SIGNALS: Final = Study(
    "signals",
    lambda c: signals(c.subject, c.backward),
    "preflight",
    rules=(no_norm, linear_layer, inverted_mask),
    order=-43,
)
