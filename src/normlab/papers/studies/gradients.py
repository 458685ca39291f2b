"""Gradients of the papers' own models at initialisation, on real text, and of a Post-LN encoder alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise, product
from statistics import fmean, geometric_mean
from typing import Any, Unpack, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normlab.diagnosis.reading import read_structure
from normlab.diagnosis.studies.gradients import branch_jacobians, parameter_gradients, sublayer_gradients
from normlab.diagnosis.studies.scales import scales
from normlab.diagnosis.subject import Subject
from normlab.diagnosis.tables import Table
from normlab.nn import PAD, Context, Seq2Seq
from normlab.papers.artefact import Measurement
from normlab.papers.estimate import Estimate, exponential, log_slope, mean, mean_ratio
from normlab.papers.intervals import highest, lowest, simultaneous
from normlab.papers.lab import (
    READING_TOKENS,
    Lab,
    Row,
    Sizes,
    TaskInputs,
    apart,
    curves,
    having,
    mean_loss,
    size,
)
from normlab.papers.studies.lemmas import TheoryNetwork, norm_factors
from normlab.papers.studies.trained import trainings
from normlab.trace.tensors import forward_hooks

BOTH = ("post", "pre")


def bounded_lengths(lab: Lab, **sizes: Unpack[Sizes]) -> Measurement:
    """Measure the share of real tokens whose ‖x‖² is at most 1.1 times its mean, at the last norm's input."""
    rows: list[Row] = []
    for placement, seed, subject in lab.subjects(BOTH, **sizes):
        with torch.no_grad():
            table = scales(subject)
        for stack in subject.structure.stacks:
            (last,) = table.where(stack=stack.name, index=len(stack.sublayers) - 1, signal="total")
            named = {"placement": placement, "stack": stack.name.partition(".")[0], "seed": seed}
            rows.append({**named, "bounded": last["bounded"], "spread": last["spread"]})
    by_stack = apart(rows, "placement", "stack")
    measures = {name: mean(row["bounded"] for row in of_stack) for name, of_stack in by_stack.items()}
    facts = {"text": lab.text(sizes["text"]), "batch": f"{sizes['tokens']:,} positions"}
    return Measurement(measures, {"bounded": rows}, facts)


def last_matrix(
    lab: Lab, *, text: str, model: str, depths: Sequence[int], tokens: int, seeds: int
) -> Measurement:
    """Measure ‖∂L/∂W₂‖ of the decoder's last feed-forward over the depth of the model; all else is frozen, so
    the backward pass ends there.
    """
    rows: list[Row] = []
    for placement, layers, seed in product(BOTH, depths, range(seeds)):
        network = lab.model(size(model, placement, layers), text, seed=seed, tokens=tokens)
        network.requires_grad_(False).eval()
        last = network.get_parameter(f"decoder.sublayers.{3 * layers - 1}.f.outer.weight")
        last.requires_grad_()
        loss = mean_loss(network, lab.batches(text, tokens, 1)[0])
        (gradient,) = torch.autograd.grad(loss, [last])
        named = {"placement": placement, "layers": layers, "seed": seed}
        rows.append({**named, "grad_l2": gradient.norm().item()})
    measures: dict[str, Estimate] = {}
    for placement, of_placement in apart(rows, "placement").items():
        by_seed = curves(of_placement, "grad_l2", "layers", depths, seeds)
        measures[f"{placement}_exponent"] = log_slope(depths, by_seed)
        measures[f"{placement}_level"] = mean(map(fmean, by_seed))
    facts = {"text": lab.text(text), "batch": f"{tokens:,} positions"}
    return Measurement(measures, {"gradients": rows}, facts)


def by_layer(
    lab: Lab, *, text: str, model: str, layers: int, tokens: int, batches: int, seeds: int, first: int
) -> Measurement:
    """Measure the norm of the mean gradient over mini-batches, for both feed-forward matrices of every layer.
    Models have seeds from ``first`` up, and each has its own mini-batches, of sentences of any length.
    """
    rows: list[Row] = []
    drawn = lab.random_batches(text, tokens, batches * seeds)
    for placement, seed in product(BOTH, range(seeds)):
        subject = lab.subject(size(model, placement, layers), text, seed=first + seed, tokens=tokens)
        for name, p in subject.model.named_parameters():
            p.requires_grad_(".f.inner.weight" in name or ".f.outer.weight" in name)
        mini_batches = drawn[batches * seed : batches * (seed + 1)]
        for row in parameter_gradients(replace(subject, batches=mini_batches)):
            where = {
                "stack": str(row["stack"]).partition(".")[0],
                "layer": int(row["layer"] or 0) + 1,
                "matrix": "W1" if ".inner." in str(row["parameter"]) else "W2",
            }
            lengths = {name: row[name] for name in ("mean_grad_l2", "grad_l2")}
            rows.append({"placement": placement, "seed": seed, **where, **lengths})
    measures: dict[str, Estimate] = {}
    for name, of_matrix in apart(rows, "placement", "stack", "matrix").items():
        ends = curves(of_matrix, "mean_grad_l2", "layer", (1, layers), seeds)
        measures[name] = mean_ratio(last / first for first, last in ends)
    facts = {"text": lab.text(text), "mini-batches": f"{batches} of {tokens:,} positions, seeds from {first}"}
    return Measurement(measures, apart(rows, "stack", "matrix"), facts)


def decay(lab: Lab, *, theory: Mapping[str, int], dims: Sequence[int], **sizes: Unpack[Sizes]) -> Measurement:
    """Appendix F: E‖J‖² of the norm after a feed-forward over its value at that width, and the gradients by
    layer, in the setting of the theory and in both stacks of a real model.
    """
    factors: list[Estimate] = []
    of_norms: list[Row] = []
    for dim in dims:
        by_layer = norm_factors(theory["layers"], dim, theory["tokens"], theory["norm_seeds"])
        for layer, factor in enumerate(by_layer, 1):
            of_norms.append({"d": dim, "layer": layer, **factor.columns("over_expected")})
        factors += by_layer
    rows: list[Row] = []
    for placement in BOTH:
        for seed in range(theory["seeds"]):
            rows += _theory_gradients(placement, seed, theory)
        for _, seed, subject in lab.subjects((placement,), **sizes):
            rows += _real_gradients(subject, placement, seed)
    measures = {"norm_factor_lowest": lowest(factors), "norm_factor_highest": highest(factors)}
    for name, of_signal in apart(rows, "placement", "where", "signal").items():
        depth = max(row["layer"] for row in of_signal)
        seeds = len({row["seed"] for row in of_signal})
        by_seed = curves(of_signal, "grad_l2", "layer", (1, depth // 2, depth), seeds)
        of_the_bound = (2 / 3) ** ((depth - 1) / 2)
        measures[f"{name}_last_over_first"] = mean_ratio(last / first for first, _, last in by_seed)
        measures[f"{name}_last_over_middle"] = mean_ratio(last / middle for _, middle, last in by_seed)
        measures[f"{name}_decay_over_said"] = mean_ratio(
            first / last / of_the_bound for first, _, last in by_seed
        )
    in_theory = "d {dim}, {layers} layers, {tokens} tokens, {seeds} seeds, {norm_seeds} for norms"
    facts = {"theory": in_theory.format(**theory), **lab.facts(**sizes)}
    return Measurement(measures, {"norm_factors": of_norms, **apart(rows, "where", "signal")}, facts)


def _theory_gradients(placement: str, seed: int, theory: Mapping[str, int]) -> list[Row]:
    sizes = {name: theory[name] for name in ("layers", "dim", "tokens")}
    setting = TheoryNetwork(placement, **sizes, seed=seed)
    streams: list[torch.Tensor] = []

    def see(_: str, side: str, values: Any) -> None:
        if side == "output":
            streams.append(values)

    with forward_hooks({str(i): s for i, s in enumerate(setting.stack)}, see):
        loss = setting()
    matrices, after = setting.outer(), streams[1::2]
    lengths = [gradient.norm().item() for gradient in torch.autograd.grad(loss, [*matrices, *after])]
    shared = {"placement": placement, "where": "theory", "seed": seed}
    return _decay_rows(shared, lengths[: len(matrices)], lengths[len(matrices) :])


def _decay_rows(shared: Row, matrices: Iterable[float], streams: Iterable[float]) -> list[Row]:
    """Return a row per layer for the gradient's length at the second matrix and in the stream after it."""
    return [
        {**shared, "signal": signal, "layer": layer, "grad_l2": length}
        for signal, lengths in (("W2", matrices), ("stream", streams))
        for layer, length in enumerate(lengths, 1)
    ]


def _real_gradients(subject: Subject, placement: str, seed: int) -> list[Row]:
    """Return gradients at the second matrices and in the streams after them, from one pass."""
    matrices: dict[str, list[str]] = {}
    for stack in subject.structure.stacks:
        feed_forwards = [view for view in stack.sublayers if view.role == "ffn"]
        matrices[stack.name] = [f"{stack.name}.{view.index}.f.outer.weight" for view in feed_forwards]
    _train_only(subject.model, *chain(*matrices.values()))
    streams = sublayer_gradients(subject)
    rows: list[Row] = []
    for stack_name, paths in matrices.items():
        shared = {"placement": placement, "where": stack_name.partition(".")[0], "seed": seed}
        lengths = (subject.backward.slope.gradients[path].norm().item() for path in paths)
        after = (float(row["grad_l2"] or 0) for row in streams.where(stack=stack_name, role="ffn"))
        rows += _decay_rows(shared, lengths, after)
    return rows


def sublayer_outputs(lab: Lab, *, placements: Sequence[str] = BOTH, **sizes: Unpack[Sizes]) -> Measurement:
    """Measure gradients of sublayer outputs relative to the model's largest, and how they change from one
    sublayer to the one before it, in length and in variance. The tables of the artefact's trainings, if it
    has any, come beside them.
    """
    rows: list[Row] = []
    for placement, seed, subject in lab.subjects(placements, **sizes):
        _train_only(subject.model)
        for row in sublayer_gradients(subject):
            stack = str(row["stack"]).partition(".")[0]
            rows.append({**row, "stack": stack, "placement": placement, "seed": seed})
    measures: dict[str, Estimate] = {}
    for placement in placements:
        for stack in ("encoder", "decoder"):
            models = [_Steps(rows, placement, stack, seed) for seed in range(sizes["seeds"])]
            ends = [model.first_over_last() for model in models]
            name = f"{placement}_{stack}"
            measures[f"{name}_first_over_last"] = mean_ratio(ends)
            measures[f"{name}_variance_first_over_last"] = mean_ratio(ratio**2 for ratio in ends)
            measures[f"{name}_least_variance_step"] = mean_ratio(m.least_variance_step() for m in models)
        # the models are now those of the decoder, which alone has all three roles
        steps = {
            role: [model.through(role) for model in models]
            for role in ("cross_attention", "self_attention", "ffn")
        }
        others = map(geometric_mean, zip(steps["self_attention"], steps["ffn"], strict=True))
        measures[f"{placement}_cross_attention_step"] = mean_ratio(steps["cross_attention"])
        measures[f"{placement}_other_step"] = mean_ratio(others)
    trained = trainings(lab) if lab.runs else Measurement()
    return Measurement(measures, {**apart(rows, "stack"), **trained.tables}, lab.facts(**sizes))


class _Steps:
    """The gradients of one stack of one model from its input up."""

    def __init__(self, rows: Sequence[Row], placement: str, stack: str, seed: int) -> None:
        of_stack = having(rows, placement=placement, stack=stack, seed=seed)
        self.rows = sorted(of_stack, key=lambda row: row["index"])

    def first_over_last(self) -> float:
        """Return the geometric mean over the first layer's outputs divided by that over the last layer's."""
        layers = self.rows[-1]["layer"]
        first, last = ([r["grad_l2"] for r in self.rows if r["layer"] == n] for n in (0, layers))
        return geometric_mean(first) / geometric_mean(last)

    def through(self, role: str) -> float:
        """Return the geometric mean of ‖Δx_{i−1}‖ / ‖Δx_i‖ over the sublayers i of a role."""
        steps = pairwise(self.rows)
        return geometric_mean(a["grad_l2"] / b["grad_l2"] for a, b in steps if b["role"] == role)

    def least_variance_step(self) -> float:
        """Return the smallest Var[Δx_{i−1}] / Var[Δx_i]."""
        return min(a["variance"] / b["variance"] for a, b in pairwise(self.rows))


def _train_only(model: nn.Module, *paths: str) -> None:
    """Freeze all of a model but its embedding, where its streams begin, and the parameters at these paths, so
    a backward pass computes no gradients that nobody reads.
    """
    for path, parameter in model.named_parameters():
        parameter.requires_grad_(path in {"embedding.weight", *paths})


def cross_attention(lab: Lab, **sizes: Unpack[Sizes]) -> Measurement:
    """Compare Var[∂a/∂x] + 1 with σ_b² at the cross-attention of every decoder layer of a Post-LN model."""
    rows: list[Row] = []
    for _, seed, subject in lab.subjects(("post",), **sizes):
        for row in branch_jacobians(subject, seed=seed).where(role="cross_attention"):
            ratio = (1 + float(row["jacobian_variance"] or 0)) / float(row["total_variance"] or 1)
            rows.append({**row, "seed": seed, "ratio": ratio})
    largest = mean(max(r["ratio"] for r in having(rows, seed=seed)) for seed in range(sizes["seeds"]))
    return Measurement({"largest_ratio": largest}, {"jacobians": rows}, lab.facts(**sizes))


class _EncoderAlone(nn.Module):
    """The encoder of an encoder-decoder by itself, with logits over the vocabulary for every token."""

    def __init__(self, model: Seq2Seq) -> None:
        super().__init__()
        self.embedding, self.encoder = model.embedding, model.encoder
        self.position_encoding = model.position_encoding

    def forward(self, source: Tensor, target_in: Tensor) -> Tensor:
        x = self.position_encoding(self.embedding(source), None)
        return self.embedding.logits(self.encoder(x, Context(padding_mask=source != PAD)))


def _token_loss(model: nn.Module, inputs: TaskInputs) -> Tensor:
    """Return the mean of the negative log-likelihood of the next token, over tokens that have one."""
    logits, next_tokens = model(**inputs)[:, :-1], inputs["source"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), next_tokens.flatten(), ignore_index=PAD)


def _pooled_loss(model: nn.Module, inputs: TaskInputs) -> Tensor:
    """Return the cross-entropy of one label per sentence, its first token, under the mean of its logits."""
    is_real = (inputs["source"] != PAD)[..., None]
    pooled = (model(**inputs) * is_real).sum(1) / is_real.sum(1)
    return F.cross_entropy(pooled, inputs["source"][:, 0])


def encoder_gradients(lab: Lab, **sizes: Unpack[Sizes]) -> Measurement:
    """Measure Var[Δx_{i−1}] / Var[Δx_i] through a Post-LN encoder: geometric means over the sublayers of a
    role and over all, in an encoder-decoder, and alone with a loss of every token or of the tokens' mean.
    """
    rows: list[Row] = []
    for _, seed, subject in lab.subjects(("post",), **sizes):
        for where, table in _tables(lab, subject, sizes["text"]):
            for before, now in pairwise(table):
                step = float(before["variance"] or 0) / float(now["variance"] or 0)
                columns = {name: now[name] for name in ("index", "role", "variance")}
                rows.append({"where": where, "seed": seed, **columns, "step": step})
    measures: dict[str, Estimate] = {}
    steps: list[Row] = []
    for where, of_place in apart(rows, "where").items():
        role_at = {row["index"]: row["role"] for row in of_place}
        indices = sorted(role_at)
        roles = np.array([role_at[index] for index in indices])
        logs = np.log(curves(of_place, "step", "index", indices, sizes["seeds"]))
        means = {role: logs[:, roles == role].mean(1) for role in dict.fromkeys(roles.tolist())}
        means["all"] = logs.mean(1)
        together = simultaneous(np.stack([*means.values()], 1))
        (whole_stack,) = simultaneous(logs.sum(1)[:, None])
        for name, estimate in zip((*means, "first_over_last"), (*together, whole_stack), strict=True):
            measures[f"{where}_{name}"] = exponential(estimate)
        for index, estimate in zip(indices, simultaneous(logs), strict=True):
            ratio = exponential(estimate).columns("ratio")
            steps.append({"where": where, "index": index, "role": role_at[index], **ratio})
    return Measurement(measures, {"gradients": rows, "steps": steps}, lab.facts(**sizes))


def _tables(lab: Lab, in_model: Subject, text: str) -> Iterator[tuple[str, Table]]:
    """Yield the gradients of the encoder's sublayers, in each of the three places."""
    encoder = in_model.structure.stacks[0].name
    _train_only(in_model.model)
    yield "in_model", sublayer_gradients(in_model).where(stack=encoder)
    alone = _EncoderAlone(cast("Seq2Seq", in_model.model))
    structure = read_structure(alone, lab.batches(text, READING_TOKENS, 1)[0])
    (stack,) = structure.stacks
    mask = {stack.name: in_model.batch["source"] != PAD}
    for where, loss in (("alone_token_loss", _token_loss), ("alone_pooled_loss", _pooled_loss)):
        yield where, sublayer_gradients(Subject(alone, in_model.batch, loss, structure, mask))
