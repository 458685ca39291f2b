"""Dependency on branches, changes of the weights, and Admin's profile (Liu et al. 2020, Section 4)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import fmean, stdev
from typing import cast

import numpy as np
import torch
from scipy import stats

from normlab.diagnosis.studies.dependency import dependency, residual_dependency
from normlab.diagnosis.studies.output_change import output_change
from normlab.diagnosis.subject import Subject
from normlab.lab.config import ModelConfig
from normlab.nn import ProfiledPlacement, Seq2Seq, Sublayer
from normlab.nn.init import profile_
from normlab.papers.artefact import Measurement
from normlab.papers.estimate import Estimate, exponential, jackknife, log_slope, mean, mean_ratio, slope
from normlab.papers.intervals import Array, laws, r_squared
from normlab.papers.lab import Lab, Row, apart, curves, having, size, subject_on
from normlab.trace.autograd import OptimizerFactory

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
    nested: Mapping[str, int],
) -> Measurement:
    """Figure 4: the change of an encoder's output over its depth, for a random change of its sublayers'
    matrices and for one Adam update of them. The first N layers of an encoder are an encoder of N layers.
    ``nested`` says how many models are as deep as the last of ``depths``, where a curve is the mean over
    batches and over changes in each, and how many have ``deepest`` layers, with one draw each.
    """
    rows: list[Row] = []
    once = {**nested, "batches": 1, "changes": 1}
    seeds = nested["models"], nested["deepest"]
    sizes = (("", depths[-1], seeds[0], nested), ("_deepest", deepest, seeds[1], once))
    for placement in PLACEMENTS:
        for _, layers, count, draws in sizes:
            for seed in range(count):
                drawn = encoder_on_batches(lab, size(model, placement, layers), text, seed, tokens, draws)
                moved = _moved(drawn, draws["changes"], partial(torch.optim.Adam, lr=lr))
                named = {"placement": placement, "encoder": f"{layers} layers", "seed": seed}
                rows += [
                    {**named, "layers": layer, "kind": kind, "change": float(curve[2 * layer - 1])}
                    for kind, curve in moved.items()
                    for layer in range(1, layers + 1)
                ]
    measures: dict[str, Estimate] = {}
    exponents: dict[tuple[str, str], list[float]] = {}
    shallow = having(rows, encoder=f"{depths[-1]} layers")
    for placement, kind in product(PLACEMENTS, ("random", "update")):
        own = curves(shallow, "change", "layers", depths, seeds[0], placement=placement, kind=kind)
        measures |= {f"{placement}_{kind}_{law}": measure for law, measure in laws(depths, own).items()}
        exponents[placement, kind] = [log_slope(depths, [one]).value for one in own]
    for name, layers, count, _ in sizes:
        ends = {"kind": "update", "encoder": f"{layers} layers"}
        post, pre, admin = (
            curves(rows, "change", "layers", (layers,), count, placement=p, **ends) for p in PLACEMENTS
        )
        for above, moved in (("post", post), ("admin", admin)):
            ratios = (a / b for (a,), (b,) in zip(moved, pre, strict=True))
            measures[f"{above}_over_pre_update{name}"] = mean_ratio(ratios)
    both = zip(exponents["admin", "random"], exponents["pre", "random"], strict=True)
    measures["admin_minus_pre_exponent"] = mean(a - b for a, b in both)
    counts = f"{seeds[0]} models of {depths[-1]} layers and {seeds[1]} of {deepest}, {_said(nested)}"
    facts = {"text": lab.text(text), "batch": f"{tokens:,} positions, {counts}", "update": f"Adam, lr {lr:g}"}
    return Measurement(measures, apart(rows, "kind"), facts)


def _said(nested: Mapping[str, int]) -> str:
    return "{batches} batches of a model and {changes} changes in each, seeds from {first}".format(**nested)


def encoder_on_batches(
    lab: Lab, config: ModelConfig, text: str, seed: int, tokens: int, nested: Mapping[str, int]
) -> Iterator[Subject]:
    """Yield an encoder with a decoder of one layer on batch after batch of sentences of any length; only the
    matrices of its sublayers are free to move. ``nested`` has the ``first`` seed and the number of
    ``batches``.
    """
    shallow = replace(config, decoder_layers=1)
    subject = lab.subject(shallow, text, seed=nested["first"] + seed, tokens=tokens)
    subject.model.requires_grad_(False)
    for sublayer in subject.model.get_submodule("encoder").modules():
        if isinstance(sublayer, Sublayer):
            for parameter in sublayer.f.parameters():
                parameter.requires_grad_(parameter.ndim > 1)
    for batch in lab.random_batches(text, tokens, nested["batches"]):
        yield subject_on(subject.model, batch, subject.structure)


def _moved(
    drawn: Iterable[Subject], changes: int, optimizer: OptimizerFactory | None = None
) -> dict[str, Array]:
    """Return the mean change of the encoder's output after every sublayer, by kind: over batches, and for the
    random kind also over several changes in each.
    """
    found: dict[str, list[list[float]]] = {}
    for number, subject in enumerate(drawn):
        for kind, moved in encoder_changes(subject, number, changes, optimizer).items():
            found.setdefault(kind, []).extend(moved)
    return {kind: np.mean(curves_, axis=0) for kind, curves_ in found.items()}


def encoder_changes(
    subject: Subject, batch: int, changes: int, optimizer: OptimizerFactory | None = None
) -> dict[str, list[list[float]]]:
    """Return the change of the encoder's output after every sublayer, by kind: a curve for each of the random
    changes, whose seeds are this batch's own, and one for an update by the optimizer.
    """
    encoder, seeds = subject.structure.stacks[0].name, range(changes * batch, changes * (batch + 1))
    table = output_change(subject, stacks=[encoder], optimizer=optimizer, seeds=seeds)
    found: dict[str, list[list[float]]] = {}
    for kind in dict.fromkeys(table.column("kind")):
        rows = table.where(kind=kind)
        own = (rows.where(seed=seed) for seed in dict.fromkeys(rows.column("seed")))
        found[str(kind)] = [[float(row["change"] or 0) for row in one] for one in own]
    return found


def dependencies(
    lab: Lab,
    *,
    text: str,
    model: str,
    depths: Sequence[int],
    tokens: int,
    followed: int,
    seeds: int,
    first: int,
) -> Measurement:
    """Figures 7 and 8 at initialisation: the shares β_ij² of every branch in every sublayer's output, in the
    encoder, and by role the mean of i β_ii² over the upper half: 1 if its sublayers lean evenly on all before
    them. Models have seeds from ``first`` up.
    """
    shares: list[Row] = []
    own: list[Row] = []
    for placement, layers, seed in product(PLACEMENTS, depths, range(seeds)):
        subject = lab.subject(size(model, placement, layers, 1), text, seed=first + seed, tokens=tokens)
        table = dependency(subject, tokens=followed).where(stack=subject.structure.stacks[0].name)
        named = {"placement": placement, "layers": layers, "seed": seed}
        if not seed:
            shares += [{**named, **{name: r[name] for name in ("of", "on", "beta_sq")}} for r in table]
        for r in residual_dependency(subject, table):
            i = int(r["index"] or 0) + 1
            own.append({**named, "i": i, "role": r["role"], "own": r["beta_sq"], "total": r["total"]})
    measures: dict[str, Estimate] = {}
    for placement, layers in product(PLACEMENTS, depths):
        mine = [having(own, placement=placement, layers=layers, seed=seed) for seed in range(seeds)]
        for role in dict.fromkeys(r["role"] for r in own):
            measures[f"{placement}_{layers}_{role}"] = mean(
                fmean(r["i"] * r["own"] for r in one if r["i"] > layers and r["role"] == role) for one in mine
            )
        measures[f"{placement}_{layers}_total"] = mean(fmean(r["total"] for r in one) for one in mine)
    facts = {"text": lab.text(text), "tokens": f"{followed} of {tokens:,}, {seeds} seeds"}
    tables = {f"shares_{layers}": having(shares, layers=layers) for layers in depths}
    return Measurement(measures, {**tables, "own": own}, facts)


def prefixes(
    lab: Lab,
    *,
    text: str,
    model: str,
    layers: int,
    tokens: int,
    followed: int,
    models: Mapping[str, int],
    nested: Mapping[str, int],
) -> Measurement:
    """Theorem 2 on the prefixes of one encoder: 1/β_ii² against i, and the output change after N sublayers
    against C times the sum of β_ii² up to N, with C fitted where N is at most half of all. ``models`` gives
    their number by placement; each is a mean over batches and over changes in each, as in ``over_depth``.
    """
    rows: list[Row] = []
    for placement, count in models.items():
        for seed in range(count):
            config = size(model, placement, layers)
            drawn = [*encoder_on_batches(lab, config, text, seed, tokens, nested)]
            moved = _moved(drawn, nested["changes"])["random"]
            own = [_own(subject, followed) for subject in drawn]
            for depth, shares in enumerate(zip(*own, strict=True), 1):
                betas = [beta for _, beta in shares]
                sums = [sum(beta for _, beta in one[:depth]) for one in own]
                named = {"placement": placement, "seed": seed, "depth": depth, "role": shares[0][0]}
                means = {"inverse": fmean(1 / beta for beta in betas), "sum_own": fmean(sums)}
                rows.append({**named, **means, "change": float(moved[depth - 1])})
    measures: dict[str, Estimate] = {}
    tables: dict[str, list[Row]] = {"changes": []}
    depths = list(range(1, 2 * layers + 1))
    for placement, some in apart(rows, "placement").items():
        count = models[placement]
        inverse = np.array(curves(some, "inverse", "depth", depths, count))
        both = np.stack([curves(some, y, "depth", depths, count) for y in ("sum_own", "change")], 1)
        found = {**_shares(inverse), **_theorem(both), **laws(depths, both[:, 1].tolist())}
        measures |= {f"{placement}_{name}": m for name, m in found.items()}
        factor = _factor(both.mean(0))
        tables["changes"] += [{**row, "predicted": factor * row["sum_own"]} for row in some]
    counts = ", ".join(f"{count} {placement}" for placement, count in models.items())
    network = f"encoder of {layers} layers, {tokens:,} positions, {counts}, {_said(nested)}"
    return Measurement(measures, tables, {"text": lab.text(text), "network": network})


def _own(subject: Subject, followed: int) -> list[tuple[str, float]]:
    """Role and β_ii² of every sublayer of the encoder."""
    table = dependency(subject, tokens=followed).where(stack=subject.structure.stacks[0].name)
    return [(str(r["role"]), float(r["beta_sq"] or 0)) for r in residual_dependency(subject, table)]


def _shares(inverse: Array) -> dict[str, Estimate]:
    """Measure how 1/β_ii² `[seeds, sublayers]` grows with i: R² of a line for each role and for all, the
    slope through all, and the last layer's over the first one's.
    """

    def quality(which: slice) -> Estimate:
        i = np.arange(inverse.shape[1])[which]
        return r_squared(inverse[:, which], lambda y: float(stats.linregress(i, y).rvalue) ** 2)

    return {
        "inverse_self_attention_r2": quality(slice(0, None, 2)),
        "inverse_ffn_r2": quality(slice(1, None, 2)),
        "inverse_r2": quality(slice(None)),
        "inverse_slope": slope(range(1, inverse.shape[1] + 1), inverse.tolist()),
        "inverse_last_over_first": mean_ratio(inverse[:, -2:].mean(1) / inverse[:, :2].mean(1)),
    }


def _theorem(both: Array) -> dict[str, Estimate]:
    """Compare C Σ β_ii² with the change, from sums and changes `[seeds, 2, depths]`: the predicted change
    over the measured one in the deep half, and R² at all depths.
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
    """Fit C by least squares at the shallow half of the depths, to mean sums and changes `[2, depths]`."""
    sums, changes = mean_of[:, : mean_of.shape[1] // 2]
    return float((sums * changes).sum() / np.square(sums).sum())


def _change(subject: Subject, seed: int) -> list[float]:
    """Return the change of the encoder's output after every sublayer, for a random change of the weights."""
    table = output_change(subject, seeds=[seed], stacks=[subject.structure.stacks[0].name])
    return [float(row["change"] or 0) for row in table]


def theorem_constant(subject: Subject, *, tokens: int, seed: int) -> float:
    """Fit C of Theorem 2 by least squares over the whole encoder, for a random change of 1% of each matrix's
    root mean square.
    """
    measured = np.array(_change(subject, seed))
    sums = np.cumsum([beta for _, beta in _own(subject, tokens)])
    return float((sums * measured).sum() / np.square(sums).sum())


def profiles(
    lab: Lab, *, text: str, model: str, layers: int, tokens: int, batches: int, seeds: int
) -> Measurement:
    """Estimate ω of an Admin encoder over batches of sentences of any length and over seeds of the weights,
    and how far the output moves under the profile of the first batch and under that of all.
    """
    rows: list[Row] = []
    moved: list[tuple[float, float]] = []
    omegas: list[list[list[float]]] = []
    fed = lab.random_batches(text, tokens, batches)
    for seed in range(seeds):
        subject = lab.subject(size(model, "admin", layers), text, seed=seed, tokens=tokens)
        network = cast("Seq2Seq", subject.model)
        found = [profile_(network, partial(network.hidden, one["source"], one["target_in"])) for one in fed]
        paths = [path for path in found[0] if path.startswith("encoder.")]
        omegas.append([[one[path] ** 0.5 for path in paths] for one in found])
        for i, over in enumerate(zip(*omegas[-1], strict=True)):
            ends = {"low": min(over), "high": max(over), "deviation": stdev(over)}
            rows.append({"seed": seed, "sublayer": i, "omega": fmean(over), **ends})
        whole = {path: fmean(one[path] for one in found) for path in found[0]}
        moved.append((_moved_under(subject, found[0], seed), _moved_under(subject, whole, seed)))
    changes = [{"seed": s, "profiled_on": n, "change": c} for s, both in enumerate(moved)
               for n, c in zip(("1 batch", f"{batches} batches"), both, strict=True)]  # fmt: skip
    measures = {
        "batches_over_seeds": exponential(jackknife(np.log(omegas), _log_spread_ratio)),
        "change_in_deviations": jackknife(np.log(moved), _deviations),
    }
    facts = {"text": lab.text(text), "batches": f"{batches} of {tokens:,} positions, {seeds} seeds"}
    return Measurement(measures, {"omegas": rows, "changes": changes}, facts)


def _moved_under(subject: Subject, variances: dict[str, float], seed: int) -> float:
    """Return the change of the encoder's output under a random change of the weights, with this profile."""
    for path, variance in variances.items():
        place = cast("Sublayer", subject.model.get_submodule(path)).place
        cast("ProfiledPlacement", place).init_(variance)
    return _change(subject, seed)[-1]


def _log_spread_ratio(logs: Array) -> float:
    """Return ln of ln ω's deviation over batches over that over seeds, from `[seeds, batches, sublayers]`."""
    within = logs.var(1, ddof=1).mean()
    between = logs.mean(1).var(0, ddof=1).mean() - within / logs.shape[1]
    return 0.5 * math.log(within / max(between, 1e-12))


def _deviations(logs: Array) -> float:
    """Return the mean difference of ln change under both profiles `[seeds, 2]`, in deviations over seeds."""
    one, all_ = logs.T
    return float((one - all_).mean() / all_.std(ddof=1))
