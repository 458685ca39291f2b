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
from normlab.reproduce.lab import (
    Lab,
    Row,
    apart,
    curves,
    having,
    log_slope,
    mean,
    mean_ratio,
    padding_masks,
    size,
)
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

            adam = partial(torch.optim.Adam, lr=lr)
            table = output_change_family(family, depths, optimiser=adam, seed=seed)
            # two sublayers in a layer of the encoder, three in the decoder's
            rows += [{"placement": placement, "layers": int(row["depth"] or 0) // 5, **row} for row in table]
    found = {
        (placement, kind): curves(rows, "change", "layers", depths, seeds, placement=placement, kind=kind)
        for placement in PLACEMENTS
        for kind in ("random", "update")
    }
    measures: dict[str, Measure] = {}
    for placement in PLACEMENTS:
        for kind in ("random", "update"):
            laws = _laws(depths, found[placement, kind])
            measures |= {f"{placement}_{kind}_{law}": measure for law, measure in laws.items()}
    post, pre, admin = ([curve[-1] for curve in found[placement, "update"]] for placement in PLACEMENTS)
    measures["post_over_pre_update"] = mean_ratio(a / b for a, b in zip(post, pre, strict=True))
    measures["admin_over_pre_update"] = mean_ratio(a / b for a, b in zip(admin, pre, strict=True))
    exponents = [
        [log_slope(depths, [curve]).value for curve in found[placement, "random"]]
        for placement in ("admin", "pre")
    ]
    measures["admin_minus_pre_exponent"] = mean(a - b for a, b in zip(*exponents, strict=True))
    facts = {**lab.facts(text, tokens, seeds), "update": f"Adam, lr {lr:g}"}
    return Measurement(measures, apart(rows, "kind"), facts)


def _laws(depths: Sequence[float], changes: Sequence[Sequence[float]]) -> dict[str, Measure]:
    """R² of both laws, by how much AIC prefers log N to N, and the exponent: means over the curves."""
    alone: list[dict[str, Fit]] = [{fit.law: fit for fit in fits(depths, curve)} for curve in changes]
    return {
        "linear_r2": mean(one["linear"].r2 for one in alone),
        "log_r2": mean(one["log"].r2 for one in alone),
        "log_over_linear_aic": mean(one["linear"].aic - one["log"].aic for one in alone),
        "exponent": log_slope(depths, changes),
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
                table = dependency(subject, tokens=followed, padding_masks=padding_masks(subject))
                table = table.where(stack=subject.structure.stacks[0].name)
                named = {"placement": placement, "layers": layers, "seed": seed}
                if not seed:
                    shares += [
                        {**named, **{name: r[name] for name in ("of", "on", "beta_sq")}} for r in table
                    ]
                for r in residual_dependency(subject, table):
                    i = int(r["index"] or 0) + 1
                    own.append({**named, "i": i, "role": r["role"], "own": r["beta_sq"], "total": r["total"]})
    measures: dict[str, Measure] = {}
    for placement in PLACEMENTS:
        for layers in depths:
            mine = [having(own, placement=placement, layers=layers, seed=seed) for seed in range(seeds)]
            measures[f"{placement}_{layers}_own_times_i"] = mean(
                fmean(r["i"] * r["own"] for r in one if r["i"] > layers) for one in mine
            )
            measures[f"{placement}_{layers}_total"] = mean(fmean(r["total"] for r in one) for one in mine)
    facts = {"text": lab.text(text), "tokens": f"{followed} of {tokens:,}, {seeds} seeds"}
    tables = {f"shares_{layers}": having(shares, layers=layers) for layers in depths}
    return Measurement(measures, {**tables, "own": own}, facts)


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
            config = replace(size(model, placement, layers), decoder_layers=1)
            subject = lab.subject(config, text, seed=seed, tokens=tokens)
            encoder, masks = subject.structure.stacks[0].name, padding_masks(subject)
            changes = output_change(subject, seed=seed, stack=encoder, padding_masks=masks)
            table = dependency(subject, tokens=followed, padding_masks=masks).where(stack=encoder)
            own = residual_dependency(subject, table)
            total = 0.0
            for change, share in zip(changes, own, strict=True):
                total += float(share["beta_sq"] or 0)
                named = {"placement": placement, "seed": seed, "depth": change["depth"]}
                rows.append({**named, "change": change["change"], "sum_own": total})
    measures: dict[str, Measure] = {}
    depths = list(range(1, 2 * layers + 1))
    for placement in PLACEMENTS:
        changes = curves(rows, "change", "depth", depths, seeds, placement=placement)
        sums = curves(rows, "sum_own", "depth", depths, seeds, placement=placement)
        laws = _laws(depths, changes)
        for law in ("exponent", "log_over_linear_aic"):
            measures[f"{placement}_{law}"] = laws[law]
        measures[f"{placement}_r2_of_sum"] = mean(
            _proportional_r2(x, y) for x, y in zip(sums, changes, strict=True)
        )
        measures[f"{placement}_own_exponent"] = log_slope(
            depths, ([after - before for before, after in pairwise([0.0, *one])] for one in sums)
        )
    network = f"encoder of {layers} layers, {tokens:,} positions, {seeds} seeds"
    return Measurement(measures, {"changes": rows}, {"text": lab.text(text), "network": network})


def _proportional_r2(x: Sequence[float], y: Sequence[float]) -> float:
    """R² of y = C x, C by least squares."""
    factor = sum(a * b for a, b in zip(x, y, strict=True)) / sum(a * a for a in x)
    middle = fmean(y)
    return 1 - sum((b - factor * a) ** 2 for a, b in zip(x, y, strict=True)) / sum(
        (b - middle) ** 2 for b in y
    )
