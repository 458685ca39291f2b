"""Dependency on branches and what it does to a change of the weights: Liu et al. 2020, Section 4."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import fmean

import torch

from normlab.diagnosis.reading.subject import Subject
from normlab.diagnosis.rules.fits import Fit, fits
from normlab.diagnosis.studies.dependency import dependency, residual_dependency
from normlab.diagnosis.studies.output_change import output_change, output_change_family
from normlab.papers import study
from normlab.reproduce.lab import Lab, Row, apart, log_slope, mean, mean_ratio, padding_masks, size
from normlab.spec.artefact import Measurement
from normlab.spec.claim import Measure

PLACEMENTS = ("post", "pre", "admin")


@study
def over_depth(
    lab: Lab, *, text: str, model: str, depths: Sequence[int], tokens: int, lr: float, seeds: int
) -> Measurement:
    """Figure 4: the output change of whole models, for a random change and one Adam update, over depth."""
    rows: list[Row] = []
    for placement in PLACEMENTS:
        for seed in range(seeds):

            def family(layers: int, placement: str = placement, seed: int = seed) -> Subject:
                return lab.subject(size(model, placement, layers), text, seed=seed, tokens=tokens)

            table = output_change_family(
                family, depths, optimiser=partial(torch.optim.Adam, lr=lr), seed=seed
            )
            # two sublayers in a layer of the encoder, three in the decoder's
            layers = {5 * n: n for n in depths}
            rows += [
                {"placement": placement, "layers": layers[int(row["depth"] or 0)], **row} for row in table
            ]
    measures: dict[str, Measure] = {}
    for placement in PLACEMENTS:
        for kind in ("random", "update"):
            laws = _laws(depths, _curves(rows, placement, kind, depths, seeds))
            measures[f"{placement}_{kind}_linear_r2"] = laws["linear_r2"]
            measures[f"{placement}_{kind}_log_r2"] = laws["log_r2"]
            measures[f"{placement}_{kind}_log_over_linear_aic"] = laws["advantage"]
            measures[f"{placement}_{kind}_exponent"] = laws["exponent"]
    deepest = [_curves(rows, placement, "update", depths, seeds) for placement in PLACEMENTS]
    post, pre, admin = ([curve[-1] for curve in curves] for curves in deepest)
    measures["post_over_pre_update"] = mean_ratio(a / b for a, b in zip(post, pre, strict=True))
    measures["admin_over_pre_update"] = mean_ratio(a / b for a, b in zip(admin, pre, strict=True))
    exponents = [
        [log_slope(depths, [curve]).value for curve in _curves(rows, placement, "random", depths, seeds)]
        for placement in ("admin", "pre")
    ]
    measures["admin_minus_pre_exponent"] = mean(a - b for a, b in zip(*exponents, strict=True))
    facts = {
        "text": lab.text(text),
        "batch": f"{tokens:,} positions, {seeds} seeds",
        "update": f"Adam, lr {lr:g}",
    }
    return Measurement(measures, apart(rows, "kind"), facts)


def _curves(
    rows: Sequence[Row], placement: str, kind: str, depths: Sequence[int], seeds: int
) -> list[list[float]]:
    kept = {
        (r["layers"], r["seed"]): float(r["change"])
        for r in rows
        if (r["placement"], r["kind"]) == (placement, kind)
    }
    return [[kept[n, seed] for n in depths] for seed in range(seeds)]


def _laws(depths: Sequence[float], curves: Sequence[Sequence[float]]) -> dict[str, Measure]:
    """Exponent, R² of both laws, and by how much AIC prefers log N to N: means over the curves."""
    alone: list[dict[str, Fit]] = [{fit.law: fit for fit in fits(depths, curve)} for curve in curves]
    return {
        "exponent": log_slope(depths, curves),
        "linear_r2": mean(one["linear"].r2 for one in alone),
        "log_r2": mean(one["log"].r2 for one in alone),
        "advantage": mean(one["linear"].aic - one["log"].aic for one in alone),
    }


@study
def dependencies(
    lab: Lab, *, text: str, model: str, depths: Sequence[int], tokens: int, followed: int, seeds: int
) -> Measurement:
    """Figures 7 and 8 at initialisation: the shares β_ij² of every branch in every sublayer's output, of the
    encoder. ``own_times_i`` is i β_ii² over the upper half, 1 where a layer leans evenly on all before it.
    """
    shares: list[Row] = []
    own: list[Row] = []
    for placement in PLACEMENTS:
        for layers in depths:
            for seed in range(seeds):
                config = replace(size(model, placement, layers), decoder_layers=1)
                subject = lab.subject(config, text, seed=seed, tokens=tokens)
                encoder = subject.structure.stacks[0].name
                table = dependency(subject, tokens=followed, padding_masks=padding_masks(subject)).where(
                    stack=encoder
                )
                named = {"placement": placement, "layers": layers, "seed": seed}
                if not seed:
                    shares += [
                        {**named, "of": r["of"], "on": r["on"], "beta_sq": r["beta_sq"]} for r in table
                    ]
                sums = residual_dependency(subject, table)
                own += [
                    {
                        **named,
                        "i": int(r["index"] or 0) + 1,
                        "role": r["role"],
                        "own": r["beta_sq"],
                        "total": r["total"],
                    }
                    for r in sums
                ]
    measures: dict[str, Measure] = {}
    for placement in PLACEMENTS:
        for layers in depths:
            mine = [r for r in own if (r["placement"], r["layers"]) == (placement, layers)]
            upper = [[r for r in mine if r["seed"] == s and r["i"] > layers] for s in range(seeds)]
            measures[f"{placement}_{layers}_own_times_i"] = mean(
                fmean(r["i"] * r["own"] for r in u) for u in upper
            )
            measures[f"{placement}_{layers}_total"] = mean(
                fmean(r["total"] for r in mine if r["seed"] == s) for s in range(seeds)
            )
    facts = {"text": lab.text(text), "tokens": f"{followed} of {tokens:,}, {seeds} seeds"}
    return Measurement(
        measures,
        {**{f"shares_{n}": [r for r in shares if r["layers"] == n] for n in depths}, "own": own},
        facts,
    )


@study
def prefixes(
    lab: Lab, *, text: str, model: str, layers: int, tokens: int, followed: int, seeds: int
) -> Measurement:
    """Theorem 2 on the prefixes of one encoder: the output change after N sublayers against N, log N, and
    the sum of β_ii² up to N.
    """
    rows: list[Row] = []
    for placement in PLACEMENTS:
        for seed in range(seeds):
            subject = lab.subject(
                replace(size(model, placement, layers), decoder_layers=1), text, seed=seed, tokens=tokens
            )
            encoder, masks = subject.structure.stacks[0].name, padding_masks(subject)
            changes = output_change(subject, seed=seed, stack=encoder, padding_masks=masks)
            table = dependency(subject, tokens=followed, padding_masks=masks).where(stack=encoder)
            own = residual_dependency(subject, table)
            total = 0.0
            for change, share in zip(changes, own, strict=True):
                total += float(share["beta_sq"] or 0)
                rows.append(
                    {
                        "placement": placement,
                        "seed": seed,
                        "depth": change["depth"],
                        "change": change["change"],
                        "sum_own": total,
                    }
                )
    measures: dict[str, Measure] = {}
    depths = list(range(1, 2 * layers + 1))
    for placement in PLACEMENTS:
        kept = {(r["depth"], r["seed"]): r for r in rows if r["placement"] == placement}
        changes = [[float(kept[n, s]["change"]) for n in depths] for s in range(seeds)]
        sums = [[float(kept[n, s]["sum_own"]) for n in depths] for s in range(seeds)]
        laws = _laws(depths, changes)
        measures[f"{placement}_exponent"] = laws["exponent"]
        measures[f"{placement}_log_over_linear_aic"] = laws["advantage"]
        measures[f"{placement}_r2_of_sum"] = mean(
            _proportional_r2(x, y) for x, y in zip(sums, changes, strict=True)
        )
        measures[f"{placement}_own_exponent"] = log_slope(
            depths, ([after - before for before, after in pairwise([0.0, *one])] for one in sums)
        )
    facts = {
        "text": lab.text(text),
        "network": f"encoder of {layers} layers, {tokens:,} positions, {seeds} seeds",
    }
    return Measurement(measures, {"changes": rows}, facts)


def _proportional_r2(x: Sequence[float], y: Sequence[float]) -> float:
    """R² of y = C x, C by least squares."""
    factor = sum(a * b for a, b in zip(x, y, strict=True)) / sum(a * a for a in x)
    middle = fmean(y)
    return 1 - sum((b - factor * a) ** 2 for a, b in zip(x, y, strict=True)) / sum(
        (b - middle) ** 2 for b in y
    )
