"""Gradients of the papers' own models at initialisation, on real text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from statistics import fmean
from typing import Any

import torch

from normlab.diagnosis.studies.gradients import branch_jacobians, parameter_gradients, sublayer_gradients
from normlab.diagnosis.studies.scales import scales
from normlab.diagnosis.subject import Subject
from normlab.diagnosis.tables import Table
from normlab.papers.artefact import Measurement
from normlab.papers.claim import Measure
from normlab.papers.intervals import geometric, highest, log_slope, lowest, mean, mean_ratio
from normlab.papers.lab import Lab, Row, apart, curves, having, size, train_only
from normlab.papers.measures import OfRuns
from normlab.papers.studies.statements import norm_factors
from normlab.papers.studies.theory import Setting
from normlab.papers.studies.trained import trainings
from normlab.trace.tensors import forward_hooks
from normlab.training.subjects import TaskInputs, mean_loss

BOTH = ("post", "pre")


def bounded_lengths(lab: Lab, *, text: str, model: str, layers: int, tokens: int, seeds: int) -> Measurement:
    """The share of real tokens whose ‖x‖² is at most 1.1 times its mean, where the last norm reads it."""
    rows: list[Row] = []
    for placement in BOTH:
        for seed in range(seeds):
            subject = lab.subject(size(model, placement, layers), text, seed=seed, tokens=tokens)
            with torch.no_grad():
                table = scales(subject)
            for stack in subject.structure.stacks:
                (last,) = table.where(stack=stack.name, index=len(stack.sublayers) - 1, signal="total")
                named = {"placement": placement, "stack": stack.name.partition(".")[0], "seed": seed}
                rows.append({**named, "bounded": last["bounded"], "spread": last["spread"]})
    own = apart(rows, "placement", "stack")
    measures = {name: mean(r["bounded"] for r in some) for name, some in own.items()}
    facts = {"text": lab.text(text), "batch": f"{tokens:,} positions"}
    return Measurement(measures, {"bounded": rows}, facts)


def last_matrix(
    lab: Lab, *, text: str, model: str, depths: Sequence[int], tokens: int, seeds: int
) -> Measurement:
    """‖∂L/∂W₂‖ of the decoder's last feed-forward over the depth of the model; all else stands still, so that
    the pass back ends there.
    """
    rows: list[Row] = []
    for placement in BOTH:
        for layers in depths:
            for seed in range(seeds):
                network = lab.model(size(model, placement, layers), text, seed=seed, tokens=tokens)
                network.requires_grad_(False).eval()
                last = network.get_parameter(f"decoder.sublayers.{3 * layers - 1}.f.outer.weight")
                last.requires_grad_()
                loss = mean_loss(network, lab.batches(text, tokens, 1)[0])
                (found,) = torch.autograd.grad(loss, [last])
                named = {"placement": placement, "layers": layers, "seed": seed}
                rows.append({**named, "grad_l2": found.norm().item()})
    measures: dict[str, Measure] = {}
    for placement, some in apart(rows, "placement").items():
        lengths = curves(some, "grad_l2", "layers", depths, seeds)
        measures[f"{placement}_exponent"] = log_slope(depths, lengths)
        measures[f"{placement}_level"] = mean(fmean(one) for one in lengths)
    facts = {"text": lab.text(text), "batch": f"{tokens:,} positions"}
    return Measurement(measures, {"gradients": rows}, facts)


def by_layer(
    lab: Lab, *, text: str, model: str, layers: int, tokens: int, batches: int, seeds: int, first: int
) -> Measurement:
    """The norm of the mean gradient over mini-batches, of both feed-forward matrices of every layer. Models
    have seeds from ``first`` up, and each has mini-batches of its own, of sentences of any length.
    """
    rows: list[Row] = []
    drawn = lab.random_batches(text, tokens, batches * seeds)
    for placement in BOTH:
        for seed in range(seeds):
            subject = lab.subject(size(model, placement, layers), text, seed=first + seed, tokens=tokens)
            found = _feed_forward(subject, drawn[batches * seed : batches * (seed + 1)])
            rows += [{"placement": placement, "seed": seed, **row} for row in found]
    measures: dict[str, Measure] = {}
    for name, own in apart(rows, "placement", "stack", "matrix").items():
        ends = curves(own, "mean_grad_l2", "layer", (1, layers), seeds)
        measures[name] = mean_ratio(last / first for first, last in ends)
    facts = {"text": lab.text(text), "mini-batches": f"{batches} of {tokens:,} positions, seeds from {first}"}
    return Measurement(measures, apart(rows, "stack", "matrix"), facts)


def _feed_forward(subject: Subject, batches: Sequence[TaskInputs]) -> list[Row]:
    """Gradients of both matrices of every feed-forward, over the batches."""
    for name, p in subject.model.named_parameters():
        p.requires_grad_(".f.inner.weight" in name or ".f.outer.weight" in name)
    return [
        {
            "stack": str(row["stack"]).partition(".")[0],
            "layer": int(row["layer"] or 0) + 1,
            "matrix": "W1" if ".inner." in str(row["parameter"]) else "W2",
            "mean_grad_l2": row["mean_grad_l2"],
            "grad_l2": row["grad_l2"],
        }
        for row in parameter_gradients(replace(subject, batches=batches))
    ]


def decay(
    lab: Lab,
    *,
    theory: Mapping[str, int],
    dims: Sequence[int],
    text: str,
    model: str,
    layers: int,
    tokens: int,
    seeds: int,
) -> Measurement:
    """Appendix F: E‖J‖² of the norm behind a feed-forward over its value at that width; and the gradients by
    layer, in the setting of the theory and in both stacks of a real model.
    """
    sizes = {name: theory[name] for name in ("layers", "tokens")}
    factors = [f for dim in dims for f in norm_factors(**sizes, dim=dim, seeds=theory["norm_seeds"])]
    measures = {"norm_factor_lowest": lowest(factors), "norm_factor_highest": highest(factors)}
    where_layer = [(dim, layer) for dim in dims for layer in range(1, theory["layers"] + 1)]
    tables: dict[str, Sequence[Row]] = {
        "norm_factors": [
            {"d": dim, "layer": layer, "over_expected": f.value, "low": f.low, "high": f.high}
            for (dim, layer), f in zip(where_layer, factors, strict=True)
        ]
    }
    rows: list[Row] = []
    for placement in BOTH:
        for seed in range(theory["seeds"]):
            rows += _theory_gradients(placement, seed, theory)
        for seed in range(seeds):
            subject = lab.subject(size(model, placement, layers), text, seed=seed, tokens=tokens)
            rows += _real_gradients(subject, placement, seed)
    for name, own in apart(rows, "placement", "where", "signal").items():
        depth = max(r["layer"] for r in own)
        ends = curves(own, "grad_l2", "layer", (1, depth), len({r["seed"] for r in own}))
        measures[f"{name}_last_over_first"] = mean_ratio(last / first for first, last in ends)
        said = (2 / 3) ** ((depth - 1) / 2)
        measures[f"{name}_decay_over_said"] = mean_ratio(first / last / said for first, last in ends)
    facts = {
        "theory": "d {dim}, {layers} layers, {tokens} tokens, {seeds} seeds, {norm_seeds} for norms".format(
            **theory
        ),
        "text": lab.text(text),
        "batch": f"{tokens:,} positions, {seeds} seeds",
    }
    return Measurement(measures, {**tables, **apart(rows, "where", "signal")}, facts)


def _theory_gradients(placement: str, seed: int, theory: Mapping[str, int]) -> list[Row]:
    sizes = {name: theory[name] for name in ("layers", "dim", "tokens")}
    setting = Setting(placement, **sizes, seed=seed)
    streams: list[torch.Tensor] = []

    def see(_: str, side: str, values: Any) -> None:
        if side == "output":
            streams.append(values)

    with forward_hooks({str(i): s for i, s in enumerate(setting.stack)}, see):
        loss = setting()
    matrices, after = setting.outer(), streams[1::2]
    found = torch.autograd.grad(loss, [*matrices, *after])
    lengths = [g.norm().item() for g in found]
    shared = {"placement": placement, "where": "theory", "seed": seed}
    return _decay_rows(shared, lengths[: len(matrices)], lengths[len(matrices) :])


def _decay_rows(shared: Row, matrices: Iterable[float], streams: Iterable[float]) -> list[Row]:
    """A row for the gradient's length at the second matrix, and in the stream behind it, of every layer."""
    return [
        {**shared, "signal": signal, "layer": layer, "grad_l2": length}
        for signal, lengths in (("W2", matrices), ("stream", streams))
        for layer, length in enumerate(lengths, 1)
    ]


def _real_gradients(subject: Subject, placement: str, seed: int) -> list[Row]:
    """Gradients at the second matrices and in the streams behind them, from one pass."""
    matrices = {
        stack.name: [
            f"{stack.name}.{view.index}.f.outer.weight" for view in stack.sublayers if view.role == "ffn"
        ]
        for stack in subject.structure.stacks
    }
    train_only(subject.model, *chain(*matrices.values()))
    streams = sublayer_gradients(subject)
    found: list[Row] = []
    for stack, paths in matrices.items():
        shared = {"placement": placement, "where": stack.partition(".")[0], "seed": seed}
        lengths = (subject.backward.slope.gradients[path].norm().item() for path in paths)
        after = (float(r["grad_l2"] or 0) for r in streams.where(stack=stack, role="ffn"))
        found += _decay_rows(shared, lengths, after)
    return found


def sublayer_outputs(
    lab: Lab,
    *,
    text: str,
    model: str,
    layers: int,
    tokens: int,
    seeds: int,
    placements: Sequence[str] = BOTH,
    training: Mapping[str, OfRuns] | None = None,
) -> Measurement:
    """Gradients of sublayer outputs relative to the model's largest, and how they change from one sublayer to
    the one before it, in length and in variance; with measures of the artefact's ``training``.
    """
    rows: list[Row] = []
    for placement in placements:
        for seed in range(seeds):
            subject = lab.subject(size(model, placement, layers), text, seed=seed, tokens=tokens)
            train_only(subject.model)
            rows += _named(sublayer_gradients(subject), placement, seed)
    measures: dict[str, Measure] = {}
    for placement in placements:
        for stack in ("encoder", "decoder"):
            steps = [_Steps(rows, placement, stack, seed) for seed in range(seeds)]
            name = f"{placement}_{stack}"
            measures[f"{name}_first_over_last"] = mean_ratio(s.first_over_last() for s in steps)
            measures[f"{name}_variance_first_over_last"] = mean_ratio(s.first_over_last() ** 2 for s in steps)
            measures[f"{name}_least_variance_step"] = mean_ratio(s.least_variance_step() for s in steps)
        crossing = [_Steps(rows, placement, "decoder", seed) for seed in range(seeds)]
        measures[f"{placement}_cross_attention_step"] = mean_ratio(
            s.through("cross_attention") for s in crossing
        )
        measures[f"{placement}_other_step"] = mean_ratio(
            geometric([s.through("self_attention"), s.through("ffn")]) for s in crossing
        )
    found = trainings(lab, measures=training) if training else Measurement({})
    facts = {**found.facts, **lab.facts(text, tokens, seeds)}
    return Measurement({**measures, **found.measures}, {**apart(rows, "stack"), **found.tables}, facts)


def _named(table: Table, placement: str, seed: int, **more: str) -> list[Row]:
    stacks = {row["stack"]: str(row["stack"]).partition(".")[0] for row in table}
    return [
        {**row, "stack": stacks[row["stack"]], "placement": placement, "seed": seed, **more} for row in table
    ]


class _Steps:
    """The gradients of one stack of one model from its input up."""

    def __init__(self, rows: Sequence[Row], placement: str, stack: str, seed: int) -> None:
        own = having(rows, placement=placement, stack=stack, seed=seed)
        self.rows = sorted(own, key=lambda r: r["index"])

    def first_over_last(self) -> float:
        """Mean over the first layer's outputs over that of the last layer's."""
        layers = self.rows[-1]["layer"]
        first, last = ([r["grad_l2"] for r in self.rows if r["layer"] == n] for n in (0, layers))
        return geometric(first) / geometric(last)

    def through(self, role: str) -> float:
        """‖Δx_{i−1}‖ / ‖Δx_i‖ of the sublayers i of a role, the geometric mean."""
        pairs = zip(self.rows, self.rows[1:], strict=False)
        return geometric(a["grad_l2"] / b["grad_l2"] for a, b in pairs if b["role"] == role)

    def least_variance_step(self) -> float:
        """The smallest Var[Δx_{i−1}] / Var[Δx_i]."""
        return min(a["variance"] / b["variance"] for a, b in zip(self.rows, self.rows[1:], strict=False))


def cross_attention(lab: Lab, *, text: str, model: str, layers: int, tokens: int, seeds: int) -> Measurement:
    """Var[∂a/∂x] + 1 against σ_b² at the cross-attention of every decoder layer of a Post-LN model."""
    rows: list[Row] = []
    for seed in range(seeds):
        subject = lab.subject(size(model, "post", layers), text, seed=seed, tokens=tokens)
        table = branch_jacobians(subject, seed=seed)
        for row in table.where(role="cross_attention"):
            ratio = (1 + float(row["jacobian_variance"] or 0)) / float(row["total_variance"] or 1)
            rows.append({**row, "seed": seed, "ratio": ratio})
    largest = mean(max(r["ratio"] for r in having(rows, seed=seed)) for seed in range(seeds))
    return Measurement({"largest_ratio": largest}, {"jacobians": rows}, lab.facts(text, tokens, seeds))
