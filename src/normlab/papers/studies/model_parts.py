"""Blocks, counts and matrices: what is decided on the pieces of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import product
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from normlab.nn import Attention, LayerNorm, Seq2Seq, Sublayer, stack_of, wrap
from normlab.papers.artefact import Measurement
from normlab.papers.claim import Measure
from normlab.papers.intervals import geometric
from normlab.papers.lab import Lab, Row, apart, generator, size
from normlab.papers.studies.lemmas import ROLES, TheoryNetwork
from normlab.training.subjects import mean_loss


def table_1(lab: Lab, *, dim: int, layers: int, tokens: int, seeds: int) -> Measurement:
    """Both columns of Table 1 line by line in float64, against a stack of ours on the same weights."""
    rows: list[Row] = []
    columns = ("post", _post_column), ("pre", _pre_column)
    for (placement, column), seed in product(columns, range(seeds)):
        network = TheoryNetwork(placement, layers=layers, dim=dim, tokens=tokens, seed=seed).double()
        x = network.x.double()
        with torch.no_grad():
            ours, theirs = network.stack(x), column(x, [sublayer.f for sublayer in network.stack])
        found = {
            "difference": (ours - theirs).abs().max().item(),
            "largest_output": theirs.abs().max().item(),
        }
        rows.append({"placement": placement, "seed": seed, **found})
    facts = {"network": f"{layers} layers, d {dim}, float64, {seeds} seeds"}
    return Measurement(_differences(rows), {"differences": rows}, facts)


def _differences(rows: Sequence[Row]) -> dict[str, Measure]:
    """The largest difference under each placement."""
    return {
        f"{placement}_difference": Measure.exact(max(r["difference"] for r in own))
        for placement, own in apart(rows, "placement").items()
    }


def _normalised(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + LayerNorm(1).eps).sqrt()


def _post_column(x: Tensor, branches: Sequence[nn.Module]) -> Tensor:
    for attention, feed_forward in zip(branches[::2], branches[1::2], strict=True):
        x1 = attention(x)
        x2 = x + x1
        x3 = _normalised(x2)
        x4 = feed_forward(x3)
        x5 = x3 + x4
        x = _normalised(x5)
    return x


def _pre_column(x: Tensor, branches: Sequence[nn.Module]) -> Tensor:
    for attention, feed_forward in zip(branches[::2], branches[1::2], strict=True):
        x1 = _normalised(x)
        x2 = attention(x1)
        x3 = x + x2
        x4 = _normalised(x3)
        x5 = feed_forward(x4)
        x = x5 + x3
    return _normalised(x)


PAGE: Final[Mapping[str, Callable[[Tensor, nn.Module, nn.Module], Tensor]]] = {
    "post": lambda x, sublayer, norm: norm(x + sublayer(x)),
    "pre": lambda x, sublayer, norm: x + sublayer(norm(x)),
}
"""The page's definitions."""


def wrapped_blocks(lab: Lab, *, shape: Sequence[int]) -> Measurement:
    """The page's two blocks as written, around modules of torch's, against ``nn.wrap`` of the same."""
    batch, length, dim = shape
    branches: Mapping[str, nn.Module] = {
        "linear": nn.Linear(dim, dim),
        "mlp": nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)),
        "encoder layer": nn.TransformerEncoderLayer(dim, 8, batch_first=True, dropout=0.0),
    }
    x = torch.randn(batch, length, dim, generator=generator(seed=0))
    rows: list[Row] = []
    for name, branch in branches.items():
        for placement, page in PAGE.items():
            norm = nn.LayerNorm(dim)
            ours = wrap(deepcopy(branch), placement, next(stack_of(ROLES[:1], 1, dim)))
            for copy, original in ((ours.f, branch), (ours.place, norm)):
                for mine, theirs in zip(copy.parameters(), original.parameters(), strict=True):
                    mine.data.copy_(theirs.data)
            with torch.no_grad():
                written = page(x, branch, norm)
                found = ours(x)
            named = {"placement": placement, "sublayer": name, "shape": "x".join(map(str, found.shape))}
            rows.append({**named, "difference": (found - written).abs().max().item()})
    same_shape = all(r["shape"] == "x".join(map(str, shape)) for r in rows)
    measures = {**_differences(rows), "shape_kept": Measure.exact(float(same_shape))}
    return Measurement(measures, {"differences": rows})


def parameter_counts(
    lab: Lab, *, models: Mapping[str, Sequence[int | str]], published: Mapping[str, float]
) -> Measurement:
    """Parameters of whole models in millions, built on no device. ``models``: size, layers of encoder and
    decoder, types.
    """
    rows: list[Row] = []
    for name, (kind, encoder, decoder, types) in models.items():
        for placement in ("post", "pre", "admin"):
            config = replace(size(str(kind), placement, int(encoder)), decoder_layers=int(decoder))
            with torch.device("meta"):
                millions = sum(p.numel() for p in Seq2Seq(config, int(types)).parameters()) / 1e6
            named = {"model": name, "placement": placement, "types": int(types)}
            rows.append({**named, "millions": millions, "published": published[name]})
    farthest = {
        name: max((float(r["millions"] - r["published"]) for r in own), key=abs)
        for name, own in apart(rows, "model").items()
    }
    return Measurement({name: Measure.exact(d) for name, d in farthest.items()}, {"counts": rows})


def attention_matrices(
    lab: Lab, *, text: str, model: str, layers: int, tokens: int, steps: int, lr: float, seed: int
) -> Measurement:
    """Figures 5 and 11: norms of the gradients of the self-attention's matrices at initialisation, and of
    Adam's updates of them over some steps.
    """
    network = lab.model(size(model, "pre", layers), text, seed=seed, tokens=tokens).eval()
    batches = lab.batches(text, tokens, steps)
    matrices = dict(_self_attention(network))
    weights = [weight for weight, _ in matrices.values()]
    found = torch.autograd.grad(mean_loss(network, batches[0]), weights)
    pairs = zip(matrices.items(), found, strict=True)
    gradients = {key: gradient[part].norm().item() for (key, (_, part)), gradient in pairs}
    before = {key: weight.detach()[rows].clone() for key, (weight, rows) in matrices.items()}
    optimiser = torch.optim.Adam(network.parameters(), lr=lr, betas=(0.9, 0.98))
    for i, batch in enumerate(batches):
        optimiser.zero_grad()
        mean_loss(network, batch).backward()
        optimiser.step()
        lab.log(f"step {i + 1} of {steps}")
    rows: list[dict[str, Any]] = [
        {
            "stack": stack,
            "layer": layer,
            "kind": kind,
            "gradient": gradients[stack, layer, kind],
            "update": (weight.detach()[part] - before[stack, layer, kind]).norm().item(),
        }
        for (stack, layer, kind), (weight, part) in matrices.items()
    ]
    for row in rows:
        for what in ("gradient", "update"):
            row[f"{what}_relative"] = row[what] / max(r[what] for r in rows)
    measures: dict[str, Measure] = {}
    for what in ("gradient", "update"):
        by = {kind: geometric(r[what] for r in own) for kind, own in apart(rows, "kind").items()}
        ratio = (by["value"] * by["output"] / by["query"] / by["key"]) ** 0.5
        measures[f"{what}_values_over_queries"] = Measure.exact(ratio)
        measures[f"{what}_spread"] = Measure.exact(max(r[what] for r in rows) / min(r[what] for r in rows))
    spread = measures["gradient_spread"].value / measures["update_spread"].value
    measures["spread_ratio"] = Measure.exact(spread)
    facts = {"text": lab.text(text), "update": f"{steps} steps of Adam on {tokens:,} positions, lr {lr:g}"}
    return Measurement(measures, {"matrices": rows}, facts)


def _self_attention(network: nn.Module) -> Iterator[tuple[tuple[str, int, str], tuple[nn.Parameter, slice]]]:
    """Stack, layer and kind of every matrix, with the parameter that holds it and its rows there."""
    for name, f in network.named_modules():
        if isinstance(f, Attention) and not f.from_memory:
            site = cast("Sublayer", network.get_submodule(name.rpartition(".")[0])).site
            for kind, view in f.matrices().items():
                weight = cast("nn.Parameter", (f.out if kind == "output" else f.qkv).weight)
                start = view.storage_offset() // view.shape[1]
                where = site.stack, site.layer + 1, kind
                yield where, (weight, slice(start, start + len(view)))
