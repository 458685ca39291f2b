"""Dependency on branches and what it does to a change of the weights: Liu et al. 2020, Section 4."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean

import numpy as np
import torch
from scipy import stats

from normlab.diagnosis.reading.subject import Subject
from normlab.diagnosis.studies.dependency import dependency, residual_dependency
from normlab.diagnosis.studies.output_change import output_change
from normlab.nn import Sublayer
from normlab.reproduce.intervals import (
    Array,
    exponential,
    jackknife,
    laws,
    log_slope,
    mean,
    mean_ratio,
    r_squared,
    slope,
)
from normlab.reproduce.lab import Lab, Row, apart, curves, having, padding_masks, size
from normlab.spec.artefact import Measurement
from normlab.spec.claim import Measure
from normlab.spec.config import ModelConfig

PLACEMENTS = ("post", "pre", "admin")


def over_depth(
    lab: Lab,
    *,
    text: str,
    model: str,
    depths: Sequence[int],
    deepest: int,
    tokens: int,
    lr: float,
    seeds: Sequence[int],
) -> Measurement:
    """Figure 4: the change of an encoder's output over its depth, for a random change of its sublayers'
    matrices and for one Adam update of them. The first N layers of an encoder are an encoder of N layers. Of
    encoders as deep as the last of ``depths`` and as the ``deepest``, there are two numbers of ``seeds``.
    """
    rows: list[Row] = []
    adam = partial(torch.optim.Adam, lr=lr)
    sizes = (("", depths[-1], seeds[0]), ("_deepest", deepest, seeds[1]))
    for placement in PLACEMENTS:
        for _, layers, count in sizes:
            for seed in range(count):
                subject = _encoder(lab, size(model, placement, layers), text, seed=seed, tokens=tokens)
                encoder, masks = subject.structure.stacks[0].name, padding_masks(subject)
                table = output_change(subject, optimiser=adam, seed=seed, stack=encoder, padding_masks=masks)
                named = {"placement": placement, "encoder": f"{layers} layers"}
                rows += [
                    {**named, "layers": int(r["depth"] or 0) // 2, **r}
                    for r in table
                    if int(r["depth"] or 0) % 2 == 0
                ]
    measures: dict[str, Measure] = {}
    shallow = having(rows, encoder=f"{depths[-1]} layers")
    for placement in PLACEMENTS:
        for kind in ("random", "update"):
            found = curves(shallow, "change", "layers", depths, seeds[0], placement=placement, kind=kind)
            measures |= {f"{placement}_{kind}_{law}": measure for law, measure in laws(depths, found).items()}
    for name, layers, count in sizes:
        ends = {"kind": "update", "encoder": f"{layers} layers"}
        post, pre, admin = (
            curves(rows, "change", "layers", (layers,), count, placement=p, **ends) for p in PLACEMENTS
        )
        for above, moved in (("post", post), ("admin", admin)):
            ratios = (a / b for (a,), (b,) in zip(moved, pre, strict=True))
            measures[f"{above}_over_pre_update{name}"] = mean_ratio(ratios)
    admin_, pre_ = (
        [log_slope(depths, [c]).value for c in curves(shallow, "change", "layers", depths, seeds[0], **where)]
        for where in ({"placement": "admin", "kind": "random"}, {"placement": "pre", "kind": "random"})
    )
    measures["admin_minus_pre_exponent"] = mean(a - b for a, b in zip(admin_, pre_, strict=True))
    count = f"{seeds[0]} seeds of {depths[-1]} layers, {seeds[1]} of {deepest}"
    facts = {"text": lab.text(text), "batch": f"{tokens:,} positions, {count}", "update": f"Adam, lr {lr:g}"}
    return Measurement(measures, apart(rows, "kind"), facts)


def _encoder(lab: Lab, config: ModelConfig, text: str, *, seed: int, tokens: int) -> Subject:
    """An encoder before a decoder of one layer; only the matrices of its sublayers are free to move."""
    subject = lab.subject(replace(config, decoder_layers=1), text, seed=seed, tokens=tokens)
    subject.model.requires_grad_(False)
    for sublayer in subject.model.get_submodule("encoder").modules():
        if isinstance(sublayer, Sublayer):
            for parameter in sublayer.f.parameters():
                parameter.requires_grad_(parameter.ndim > 1)
    return subject


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


def prefixes(
    lab: Lab, *, text: str, model: str, layers: int, tokens: int, followed: int, seeds: int
) -> Measurement:
    """Theorem 2 on the prefixes of one encoder: 1/β_ii² against i, and the output change after N sublayers
    against C times the sum of β_ii² up to N, C fitted where N is at most half of all.
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
                total += (beta := float(share["beta_sq"] or 0))
                named = {
                    "placement": placement,
                    "seed": seed,
                    "depth": change["depth"],
                    "role": share["role"],
                }
                rows.append({**named, "inverse": 1 / beta, "sum_own": total, "change": change["change"]})
    measures: dict[str, Measure] = {}
    tables: dict[str, list[Row]] = {"changes": []}
    depths = list(range(1, 2 * layers + 1))
    for placement, some in apart(rows, "placement").items():
        inverse = np.array(curves(some, "inverse", "depth", depths, seeds))
        both = np.stack([curves(some, y, "depth", depths, seeds) for y in ("sum_own", "change")], 1)
        measures |= {f"{placement}_{name}": m for name, m in _shares(inverse).items()}
        measures |= {f"{placement}_{name}": m for name, m in _theorem(both).items()}
        measures |= {f"{placement}_{name}": m for name, m in laws(depths, both[:, 1].tolist()).items()}
        factor = _factor(both.mean(0))
        tables["changes"] += [{**row, "predicted": factor * row["sum_own"]} for row in some]
    network = f"encoder of {layers} layers, {tokens:,} positions, {seeds} seeds"
    return Measurement(measures, tables, {"text": lab.text(text), "network": network})


def _shares(inverse: Array) -> dict[str, Measure]:
    """How 1/β_ii² `[seeds, sublayers]` goes with i: R² of a line for each role and for all, the slope through
    all, and the last layer's over the first one's.
    """

    def quality(which: slice) -> Measure:
        i = np.arange(inverse.shape[1])[which]
        return r_squared(inverse[:, which], lambda y: float(stats.linregress(i, y).rvalue) ** 2)

    return {
        "inverse_self_attention_r2": quality(slice(0, None, 2)),
        "inverse_ffn_r2": quality(slice(1, None, 2)),
        "inverse_r2": quality(slice(None)),
        "inverse_slope": slope(range(1, inverse.shape[1] + 1), inverse.tolist()),
        "inverse_last_over_first": mean_ratio(inverse[:, -2:].mean(1) / inverse[:, :2].mean(1)),
    }


def _theorem(both: Array) -> dict[str, Measure]:
    """C Σ β_ii² against the change, of sums and changes `[seeds, 2, depths]`: the predicted change over the
    measured one in the deep half, and R² at all depths.
    """

    def quality(mean_of: Array) -> float:
        sums, changes = mean_of
        return 1 - float(np.square(changes - _factor(mean_of) * sums).sum()) / float(
            np.square(changes - changes.mean()).sum()
        )

    def log_ratio(x: Array) -> float:
        sums, changes = (m := x.mean(0))[:, m.shape[1] // 2 :]
        return math.log(_factor(m) * float(sums.mean()) / float(changes.mean()))

    return {
        "predicted_over_measured": exponential(jackknife(both, log_ratio)),
        "r2_of_sum": r_squared(both, quality),
    }


def _factor(mean_of: Array) -> float:
    """C by least squares at the shallow half of the depths, of the mean sums and changes `[2, depths]`."""
    sums, changes = mean_of[:, : mean_of.shape[1] // 2]
    return float((sums * changes).sum() / np.square(sums).sum())


def theorem_constant(subject: Subject, *, tokens: int, seed: int) -> float:
    """C of Theorem 2 by least squares over the whole encoder, for a random change of 1% of each matrix's root
    mean square.
    """
    masks, encoder = padding_masks(subject), subject.structure.stacks[0].name
    changes = output_change(subject, seed=seed, stack=encoder, padding_masks=masks)
    table = dependency(subject, tokens=tokens, padding_masks=masks).where(stack=encoder)
    sums = np.cumsum([float(row["beta_sq"] or 0) for row in residual_dependency(subject, table)])
    measured = np.array([float(row["change"] or 0) for row in changes])
    return float((sums * measured).sum() / np.square(sums).sum())
