"""The features of a forecast: what a diagnosis measured, as a few numbers that are free of scale."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import fmean, median
from typing import Final

from normlab.diagnosis.rules.finding import Tables, number, numbers
from normlab.diagnosis.table import Row, Table, Value

VERSION: Final = 2
"""Raised when a feature changes its meaning: a forecaster is of one version."""
STUDIES: Final = (
    *("start", "first_step", "critical_lr", "updates", "output_change", "scales", "similarity"),
    *("sublayer_gradients", "parameter_gradients", "dependency", "attention", "structure"),
    *("preconditioned_sharpness", "rehearsal"),
)
"""Studies whose tables the features are made of."""
BY_RATE: Final = ("critical", "update", "largest_update", "sharpness")
"""Features that are the logarithm of something proportional to the learning rate of an Adam."""
TABLES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("loss", "logits"), "start"),
    **dict.fromkeys(("critical", "sharpness"), "curvature"),
    **dict.fromkeys(("update", "largest_update", "way"), "updates"),
    **dict.fromkeys(("change", "first_change", "amplification", "growth"), "output_change"),
    **dict.fromkeys(("first_gradient", "least_gradient"), "sublayer_gradients"),
    **dict.fromkeys(("attention_logit", "attention_entropy"), "attention"),
    "downhill": "first_step",
    "similarity": "similarity",
    "stream": "scales",
    "dependency": "residual_dependency",
    "agreement": "parameter_gradients",
    "sublayers": "structure",
}
"""The table that a feature is made of, by its name; no finding is drawn from those of the others."""
MATRICES: Final = ("query", "key", "value", "output", "ffn_in", "ffn_out")
LEAST: Final = 1e-12
UNBOUNDED: Final = -5.0
"""``critical`` where no step raises the loss."""
BURST: Final = 2.0
"""The logarithm of a loss over that of guessing where it is not finite, and the most that it can be."""


def features(tables: Tables, *, steps: int) -> dict[str, float]:
    r"""Return the features of a model, its optimiser and its warm-up, for a training of so many steps; one
    that was not measured is left out. Logarithms are decimal.

    - ``loss``: the loss at the start over that of guessing, ln V; ``logits``: the deviation of the logits
    - ``critical``: log of the learning rate over the one from which a step raises the loss
    - ``sharpness``: log of the largest eigenvalue of the Hessian, preconditioned by the step
    - ``update``, ``largest_update``: log of :math:`\|u\| / \|w\|` of a step, median and maximum of matrices
    - ``change``, ``first_change``: log of the share of the output's mean square that a step changes, at the
      peak of the learning rate and at the first step of the warm-up
    - ``amplification``: log of the same for a random change of the matrices, over its relative size squared;
      ``growth``: the exponent with which it grows with depth
    - ``similarity``: the largest mean cosine of two tokens at the end of a stack
    - ``stream``: log of the growth of the stream's mean square in a stack
    - ``first_gradient``, ``least_gradient``: log of the gradient in the first sublayer's output over that in
      the last's, and of the least one over the largest
    - ``agreement``: log of the norm of the mean gradient of mini-batches over their mean norm
    - ``dependency``: the largest :math:`\sum \beta^2` of a stack over the sum of 1/i
    - ``attention_logit``: log of the largest; ``attention_entropy``: the mean over that of uniform attention
    - ``downhill``: the cosine of the step with the negative gradient
    - after some steps at the full learning rate on copies of the weights: ``rehearsed_loss``, log of the loss
      over that of guessing, ``rehearsed_worst``, that of the largest loss on the way,
      ``rehearsed_similarity``, ``rehearsed_logit`` and ``rehearsed_entropy`` as without ``rehearsed_``,
      ``rehearsed_gradient``, log of the last gradient's norm over the first one's, and ``moved``, log of
      :math:`\|w - w_0\| / \|w_0\|`, the median of matrices
    - ``sublayers``: log of their number; ``warmup``: log of the steps of the warm-up plus one,
      ``warmup_share``: their share of all steps; ``steps``: log of these; ``way``: log of the steps times
      the median update

    Liu et al. 2020, Sections 3 and 4 (arXiv 2004.08249) for amplification and dependency; Kalra and Barkeshli
    2024 (arXiv 2406.09405) for the critical rate; Cohen et al. 2022 (arXiv 2207.14484) for the sharpness;
    Zhai et al. 2023 (arXiv 2303.06296) for the entropy.
    """
    warmup = tables.warmup_steps
    found: dict[str, float | None] = {
        **_start(tables),
        **_steps(tables),
        **_changes(tables),
        **_streams(tables),
        **_gradients(tables),
        **_attention(tables),
        **_rehearsed(tables),
        "sublayers": math.log10(max(len(tables.table("structure")), 1)),
        "warmup": math.log10(1 + warmup),
        "warmup_share": warmup / steps,
        "steps": math.log10(steps),
    }
    if (update := found["update"]) is not None:
        found["way"] = update + math.log10(steps)
    return {name: value for name, value in found.items() if value is not None}


def _log(value: float | None) -> float | None:
    return None if value is None else math.log10(max(value, LEAST))


def _ratio(a: Value, b: Value) -> float | None:
    x, y = number(a), number(b)
    return x / y if x is not None and y else None


def _start(tables: Tables) -> dict[str, float | None]:
    row: Row = next(iter(tables.table("start")), {})
    return {"loss": _ratio(row.get("loss"), row.get("guessing")), "logits": number(row.get("logits_std"))}


def _steps(tables: Tables) -> dict[str, float | None]:
    curvature = tables.table("curvature")
    rows = curvature.where(quantity="critical_lr").rows
    sharpness = numbers(curvature.where(quantity="preconditioned_sharpness"), "value")
    critical = _log(_ratio(tables.lr, rows[0]["value"])) if rows else None
    matrices = [row for row in tables.table("updates") if row["kind"] in MATRICES]
    shares = numbers(matrices, "update_over_weight")
    downhill = numbers(tables.table("first_step"), "downhill")
    return {
        "critical": UNBOUNDED if rows and rows[0]["value"] is None else critical,
        "sharpness": _log(sharpness[0]) if sharpness else None,
        "update": _log(median(shares)) if shares else None,
        "largest_update": _log(max(shares)) if shares else None,
        "downhill": downhill[0] if downhill else None,
    }


def _changes(tables: Tables) -> dict[str, float | None]:
    changes = tables.table("output_change")
    last = changes.rows[-1]["stack"] if changes.rows else None
    size = _size(tables, last)
    shares = {
        kind: fmean(found) / size
        for kind in ("update", "first", "random")
        if (found := _deepest(changes.where(stack=last, kind=kind)))
    }
    power = tables.table("output_change_fit").where(stack=last, kind="random", law="power").rows
    return {
        "change": _log(shares.get("update")),
        "first_change": _log(shares.get("first", shares.get("update"))),
        "amplification": None if "random" not in shares else _log(shares["random"] * 1e4),
        "growth": number(power[0]["exponent"]) if power else None,
    }


def _size(tables: Tables, stack: Value) -> float:
    """The mean square of the output of a stack: 1 behind a norm, otherwise as measured."""
    own = tables.table("structure").where(stack=stack).rows
    scales = tables.table("scales").where(stack=stack, signal="after").rows
    normed = not own or own[-1]["norm_write"] is not None or own[-1]["final_norm"] is not None
    return 1.0 if normed or not scales else number(scales[-1]["mean_square"]) or 1.0


def _deepest(changes: Table) -> list[float]:
    depth = max((number(row["depth"]) or 0.0 for row in changes), default=0.0)
    return numbers(changes.where(depth=int(depth)), "change") if len(changes) else []


def _streams(tables: Tables) -> dict[str, float | None]:
    alike = [table.rows[-1] for _, table in tables.stacks("similarity")]
    cosines = numbers(alike, "cosine")
    grown = list[float]()
    for _, table in tables.stacks("scales"):
        sizes = numbers(table.where(signal="after"), "mean_square")
        if len(sizes) > 1 and sizes[0] > 0:
            grown.append(math.log10(max(sizes[-1] / sizes[0], LEAST)))
    leaning = [
        sum(shares) / sum(1 / i for i in range(1, len(shares) + 1))
        for _, table in tables.stacks("residual_dependency")
        if (shares := numbers(table, "beta_sq"))
    ]
    return {
        "similarity": max(cosines, default=None),
        "stream": max(grown, key=abs, default=None),
        "dependency": max(leaning, default=None),
    }


def _gradients(tables: Tables) -> dict[str, float | None]:
    first, least = list[float](), list[float]()
    for _, table in tables.stacks("sublayer_gradients"):
        if len(relative := numbers(table, "relative")) > 1 and relative[-1] > 0:
            first.append(math.log10(max(relative[0] / relative[-1], LEAST)))
            least.append(math.log10(max(min(relative), LEAST)))
    rows = tables.table("parameter_gradients").rows
    apart = _norm(numbers(rows, "grad_l2"))
    return {
        "first_gradient": min(first, default=None),
        "least_gradient": min(least, default=None),
        "agreement": _log(_norm(numbers(rows, "mean_grad_l2")) / apart) if apart else None,
    }


def _attention(tables: Tables) -> dict[str, float | None]:
    rows = tables.table("attention").rows
    logits = [abs(x) for x in numbers(rows, "max_logit")]
    shares = [x for row in rows if (x := _ratio(row["entropy"], row["uniform"])) is not None]
    return {
        "attention_logit": _log(max(logits)) if logits else None,
        "attention_entropy": fmean(shares) if shares else None,
    }


def _rehearsed(tables: Tables) -> dict[str, float | None]:
    rows, start = tables.table("rehearsed").rows, tables.table("start").rows
    guessing = number(start[0]["guessing"]) if start else None
    if not rows or not guessing:
        return {}
    after, steps = rows[-1], tables.table("rehearsal")
    losses, norms = numbers(steps, "loss"), numbers(steps, "grad_l2")
    last = _over(number(after["loss"]), guessing)
    return {
        "rehearsed_loss": last,
        "rehearsed_worst": max([last, *(_over(loss, guessing) for loss in losses)]),
        "rehearsed_similarity": number(after["cosine"]),
        "rehearsed_logit": _log(number(after["max_logit"])),
        "rehearsed_entropy": number(after["entropy"]),
        "rehearsed_gradient": _log(norms[-1] / norms[0]) if norms and norms[0] else None,
        "moved": _log(number(after["moved"])),
    }


def _over(loss: float | None, guessing: float) -> float:
    """The logarithm of a loss over that of guessing."""
    return BURST if loss is None else min(math.log10(max(loss / guessing, LEAST)), BURST)


def _norm(values: Iterable[float]) -> float:
    return math.sqrt(sum(x * x for x in values))
