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
    once = {**nested, "batches": 1, "changes": 1}
    models, few = nested["models"], nested["deepest"]
    encoders = {depths[-1]: (models, nested), deepest: (few, once)}
    rows: list[Row] = []
    for placement, (layers, (count, draws)) in product(PLACEMENTS, encoders.items()):
        for seed in range(count):
            drawn = _encoder_on_batches(lab, size(model, placement, layers), text, seed, tokens, draws)
            named = {"placement": placement, "encoder": f"{layers} layers", "seed": seed}
            for kind, curve in _moved(drawn, draws["changes"], partial(torch.optim.Adam, lr=lr)).items():
                after_layers = curve[1::2]  # two sublayers each
                rows += [
                    {**named, "layers": layer, "kind": kind, "change": float(change)}
                    for layer, change in enumerate(after_layers, 1)
                ]
    measures: dict[str, Estimate] = {}
    exponents: dict[str, list[float]] = {}
    shallow = having(rows, encoder=f"{depths[-1]} layers")
    for placement, kind in product(PLACEMENTS, ("random", "update")):
        by_model = curves(shallow, "change", "layers", depths, models, placement=placement, kind=kind)
        measures |= {f"{placement}_{kind}_{law}": fit for law, fit in laws(depths, by_model).items()}
        if kind == "random":
            exponents[placement] = [log_slope(depths, [curve]).value for curve in by_model]
    for ending, layers in (("", depths[-1]), ("_deepest", deepest)):
        for placement, ratio in _update_over_pre(rows, layers, encoders[layers][0]).items():
            measures[f"{placement}_over_pre_update{ending}"] = ratio
    pairs = zip(exponents["admin"], exponents["pre"], strict=True)
    measures["admin_minus_pre_exponent"] = mean(admin - pre for admin, pre in pairs)
    counts = f"{models} models of {depths[-1]} layers and {few} of {deepest}, {_in_words(nested)}"
    facts = {"text": lab.text(text), "batch": f"{tokens:,} positions, {counts}", "update": f"Adam, lr {lr:g}"}
    return Measurement(measures, apart(rows, "kind"), facts)


def _update_over_pre(rows: Sequence[Row], layers: int, models: int) -> dict[str, Estimate]:
    """How many times as far an update moves the output of encoders of a depth as it does under Pre-LN."""
    changes = {
        placement: curves(
            having(rows, placement=placement, kind="update", encoder=f"{layers} layers"),
            *("change", "layers", (layers,), models),
        )
        for placement in PLACEMENTS
    }
    return {
        placement: mean_ratio(a / b for (a,), (b,) in zip(changes[placement], changes["pre"], strict=True))
        for placement in ("post", "admin")
    }


def _in_words(nested: Mapping[str, int]) -> str:
    return "{batches} batches of a model and {changes} changes in each, seeds from {first}".format(**nested)


def _encoder_on_batches(
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
    random kind also over several changes in each, whose seeds are that batch's own.
    """
    drawn_curves: dict[str, list[list[float]]] = {}
    for number, subject in enumerate(drawn):
        seeds = range(changes * number, changes * (number + 1))
        table = output_change(subject, stacks=[_encoder(subject)], optimizer=optimizer, seeds=seeds)
        for kind in dict.fromkeys(table.column("kind")):
            rows = table.where(kind=kind)
            for seed in dict.fromkeys(rows.column("seed")):
                curve = [float(row["change"] or 0) for row in rows.where(seed=seed)]
                drawn_curves.setdefault(str(kind), []).append(curve)
    return {kind: np.mean(some, axis=0) for kind, some in drawn_curves.items()}


def _encoder(subject: Subject) -> str:
    """The name of the encoder's stack, the first one."""
    return subject.structure.stacks[0].name


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
        table = dependency(subject, tokens=followed).where(stack=_encoder(subject))
        named = {"placement": placement, "layers": layers, "seed": seed}
        if seed == 0:
            shares += [{**named, **{name: row[name] for name in ("of", "on", "beta_sq")}} for row in table]
        for row in residual_dependency(subject, table):
            number = int(row["index"] or 0) + 1
            own.append(
                {**named, "i": number, "role": row["role"], "own": row["beta_sq"], "total": row["total"]}
            )
    measures: dict[str, Estimate] = {}
    roles = dict.fromkeys(row["role"] for row in own)
    for placement, layers in product(PLACEMENTS, depths):
        models = [having(own, placement=placement, layers=layers, seed=seed) for seed in range(seeds)]
        for role in roles:
            # a layer has two sublayers, so the upper half begins behind number N
            measures[f"{placement}_{layers}_{role}"] = mean(
                fmean(row["i"] * row["own"] for row in having(rows, role=role) if row["i"] > layers)
                for rows in models
            )
        measures[f"{placement}_{layers}_total"] = mean(fmean(row["total"] for row in rows) for rows in models)
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
        config = size(model, placement, layers)
        for seed in range(count):
            drawn = [*_encoder_on_batches(lab, config, text, seed, tokens, nested)]
            changes = _moved(drawn, nested["changes"])["random"]
            of_batches = [_own_shares(subject, followed) for subject in drawn]
            for depth, (role, _) in enumerate(of_batches[0], 1):
                betas = [[beta for _, beta in shares[:depth]] for shares in of_batches]
                rows.append(
                    {
                        "placement": placement,
                        "seed": seed,
                        "depth": depth,
                        "role": role,
                        "inverse": fmean(1 / upto[-1] for upto in betas),
                        "sum_own": fmean(map(sum, betas)),
                        "change": float(changes[depth - 1]),
                    }
                )
    measures: dict[str, Estimate] = {}
    predicted: list[Row] = []
    depths = list(range(1, 2 * layers + 1))
    for placement, of_placement in apart(rows, "placement").items():
        inverse, sums, changes = (
            np.array(curves(of_placement, column, "depth", depths, models[placement]))
            for column in ("inverse", "sum_own", "change")
        )
        both = np.stack([sums, changes], 1)
        found = {**_shares(inverse), **_theorem(both), **laws(depths, changes.tolist())}
        measures |= {f"{placement}_{name}": measure for name, measure in found.items()}
        factor = _factor(both.mean(0))
        predicted += [{**row, "predicted": factor * row["sum_own"]} for row in of_placement]
    counts = ", ".join(f"{count} {placement}" for placement, count in models.items())
    network = f"encoder of {layers} layers, {tokens:,} positions, {counts}, {_in_words(nested)}"
    return Measurement(measures, {"changes": predicted}, {"text": lab.text(text), "network": network})


def _own_shares(subject: Subject, followed: int) -> list[tuple[str, float]]:
    """Role and β_ii² of every sublayer of the encoder."""
    table = dependency(subject, tokens=followed).where(stack=_encoder(subject))
    return [(str(row["role"]), float(row["beta_sq"] or 0)) for row in residual_dependency(subject, table)]


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
        left = float(np.square(changes - _factor(mean_of) * sums).sum())
        return 1 - left / float(np.square(changes - changes.mean()).sum())

    def log_ratio(x: Array) -> float:
        mean_of = x.mean(0)
        sums, changes = mean_of[:, mean_of.shape[1] // 2 :]
        return math.log(_factor(mean_of) * float(sums.mean()) / float(changes.mean()))

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
    table = output_change(subject, seeds=[seed], stacks=[_encoder(subject)])
    return [float(row["change"] or 0) for row in table]


def theorem_constant(subject: Subject, *, tokens: int, seed: int) -> float:
    """Fit C of Theorem 2 by least squares over the whole encoder, for a random change of 1% of each matrix's
    root mean square.
    """
    measured = np.array(_change(subject, seed))
    sums = np.cumsum([beta for _, beta in _own_shares(subject, tokens)])
    return float((sums * measured).sum() / np.square(sums).sum())


def profiles(
    lab: Lab, *, text: str, model: str, layers: int, tokens: int, batches: int, seeds: int
) -> Measurement:
    """Estimate ω of an Admin encoder over batches of sentences of any length and over seeds of the weights,
    and how far the output moves under the profile of the first batch and under that of all.
    """
    rows: list[Row] = []
    changes: list[Row] = []
    omegas: list[list[list[float]]] = []
    moved: list[list[float]] = []
    drawn = lab.random_batches(text, tokens, batches)
    for seed in range(seeds):
        subject = lab.subject(size(model, "admin", layers), text, seed=seed, tokens=tokens)
        network = cast("Seq2Seq", subject.model)
        profiled = [
            profile_(network, partial(network.hidden, batch["source"], batch["target_in"])) for batch in drawn
        ]
        paths = [path for path in profiled[0] if path.startswith("encoder.")]
        omegas.append([[variances[path] ** 0.5 for path in paths] for variances in profiled])
        for i, over_batches in enumerate(zip(*omegas[-1], strict=True)):
            ends = {"low": min(over_batches), "high": max(over_batches), "deviation": stdev(over_batches)}
            rows.append({"seed": seed, "sublayer": i, "omega": fmean(over_batches), **ends})
        of_all = {path: fmean(variances[path] for variances in profiled) for path in profiled[0]}
        moved.append([_moved_under(subject, profile, seed) for profile in (profiled[0], of_all)])
        for profiled_on, change in zip(("1 batch", f"{batches} batches"), moved[-1], strict=True):
            changes.append({"seed": seed, "profiled_on": profiled_on, "change": change})
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
    of_one_batch, of_all = logs.T
    return float((of_one_batch - of_all).mean() / of_all.std(ddof=1))
