"""What the pieces of a model decide: blocks, counts and matrices; and the speed of ScaleNorm and LayerNorm,
alone and in a step (Nguyen and Salazar 2019, Section 3.2).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import product
from statistics import geometric_mean, median
from typing import Any, Final, TypeAlias, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normlab.nn import Attention, LayerNorm, Norm, ScaleNorm, Seq2Seq, Sublayer, stack_of, wrap
from normlab.papers.artefact import Measurement
from normlab.papers.estimate import Estimate, exponential, mean_ratio
from normlab.papers.intervals import lowest, simultaneous
from normlab.papers.lab import Lab, Row, TaskInputs, apart, generator, mean_loss, size
from normlab.papers.studies.lemmas import ROLES, TheoryNetwork


def table_1(lab: Lab, *, dim: int, layers: int, tokens: int, seeds: int) -> Measurement:
    """Compare both columns of Table 1, line by line in float64, with a stack of ours on the same weights."""
    rows: list[Row] = []
    columns = ("post", _post_column), ("pre", _pre_column)
    for (placement, column), seed in product(columns, range(seeds)):
        network = TheoryNetwork(placement, layers=layers, dim=dim, tokens=tokens, seed=seed).double()
        x = network.x.double()
        with torch.no_grad():
            ours, theirs = network.stack(x), column(x, [sublayer.f for sublayer in network.stack])
        rows.append(
            {
                "placement": placement,
                "seed": seed,
                "difference": (ours - theirs).abs().max().item(),
                "largest_output": theirs.abs().max().item(),
            }
        )
    facts = {"network": f"{layers} layers, d {dim}, float64, {seeds} seeds"}
    return Measurement(_differences(rows), {"differences": rows}, facts)


def _differences(rows: Sequence[Row]) -> dict[str, Estimate]:
    """Return the largest difference under each placement."""
    return {
        f"{placement}_difference": Estimate.exact(max(row["difference"] for row in of_placement))
        for placement, of_placement in apart(rows, "placement").items()
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
    """Compare the page's two blocks as written, around torch's modules, with ``nn.wrap`` of the same."""
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
            wrapped = wrap(deepcopy(branch), placement, next(stack_of(ROLES[:1], 1, dim)))
            wrapped.place.load_state_dict({f"norm.{key}": value for key, value in norm.state_dict().items()})
            with torch.no_grad():
                ours, theirs = wrapped(x), page(x, branch, norm)
            named = {"placement": placement, "sublayer": name, "shape": "x".join(map(str, ours.shape))}
            rows.append({**named, "difference": (ours - theirs).abs().max().item()})
    same_shape = all(row["shape"] == "x".join(map(str, shape)) for row in rows)
    measures = {**_differences(rows), "shape_kept": Estimate.exact(float(same_shape))}
    return Measurement(measures, {"differences": rows})


def parameter_counts(
    lab: Lab, *, models: Mapping[str, Sequence[int | str]], published: Mapping[str, float]
) -> Measurement:
    """Count parameters of whole models in millions, built on no device. ``models`` are size, layers of
    encoder and decoder, and types.
    """
    rows: list[Row] = []
    for name, (kind, encoder, decoder, types) in models.items():
        for placement in ("post", "pre", "admin"):
            config = size(str(kind), placement, int(encoder), int(decoder))
            with torch.device("meta"):
                millions = sum(p.numel() for p in Seq2Seq(config, int(types)).parameters()) / 1e6
            named = {"model": name, "placement": placement, "types": int(types)}
            rows.append({**named, "millions": millions, "published": published[name]})
    farthest = {
        name: Estimate.exact(max((float(row["millions"] - row["published"]) for row in of_model), key=abs))
        for name, of_model in apart(rows, "model").items()
    }
    return Measurement(farthest, {"counts": rows})


def attention_matrices(
    lab: Lab, *, text: str, model: str, layers: int, tokens: int, steps: int, lr: float, seeds: int
) -> Measurement:
    """Figures 5 and 11: norms of the gradients of self-attention matrices at initialisation, and of Adam's
    updates of them over some steps.
    """
    rows: list[Row] = []
    ratios = defaultdict[str, list[float]](list)
    for seed in range(1, seeds + 1):
        network = lab.model(size(model, "pre", layers), text, seed=seed, tokens=tokens).eval()
        matrices = _gradients_and_updates(network, lab.batches(text, tokens, steps), lr)
        rows += [{"seed": seed, **row} for row in matrices]
        by_kind = apart(matrices, "kind")
        for signal in ("gradient", "update"):
            norms = {kind: geometric_mean(row[signal] for row in by_kind[kind]) for kind in by_kind}
            ratio = norms["value"] * norms["output"] / norms["query"] / norms["key"]
            ratios[f"{signal}_values_over_queries"].append(ratio**0.5)
            lengths = [row[signal] for row in matrices]
            ratios[f"{signal}_spread"].append(max(lengths) / min(lengths))
        lab.log(f"model {seed} of {seeds}")
    facts = {"text": lab.text(text), "update": f"{steps} steps of Adam on {tokens:,} positions, lr {lr:g}"}
    measures = {name: mean_ratio(of_models) for name, of_models in ratios.items()}
    return Measurement(measures, {"matrices": rows}, facts)


def _gradients_and_updates(
    network: nn.Module, batches: Sequence[TaskInputs], lr: float
) -> list[dict[str, Any]]:
    """Return the norms of each matrix's gradient and of its update by a step of Adam on every batch."""
    matrices = [*_self_attention(network)]
    weights = [weight for _, weight, _ in matrices]
    gradients = torch.autograd.grad(mean_loss(network, batches[0]), weights)
    before = [weight.detach()[part].clone() for _, weight, part in matrices]
    optimizer = torch.optim.Adam(network.parameters(), lr=lr, betas=(0.9, 0.98))
    for batch in batches:
        optimizer.zero_grad()
        mean_loss(network, batch).backward()
        optimizer.step()
    rows: list[dict[str, Any]] = [
        {
            **where,
            "gradient": gradient[part].norm().item(),
            "update": (weight.detach()[part] - old).norm().item(),
        }
        for (where, weight, part), gradient, old in zip(matrices, gradients, before, strict=True)
    ]
    for signal in ("gradient", "update"):
        largest = max(row[signal] for row in rows)
        for row in rows:
            row[f"{signal}_relative"] = row[signal] / largest
    return rows


def _self_attention(network: nn.Module) -> Iterator[tuple[Row, nn.Parameter, slice]]:
    """Yield stack, layer and kind of every matrix, with the parameter that holds it and its rows there."""
    for name, f in network.named_modules():
        if isinstance(f, Attention) and not f.from_memory:
            site = cast("Sublayer", network.get_submodule(name.rpartition(".")[0])).site
            for kind, view in f.matrices().items():
                # queries, keys and values are rows of one parameter
                weight = cast("nn.Parameter", (f.out if kind == "output" else f.qkv).weight)
                start = view.storage_offset() // view.shape[1]
                where = {"stack": site.stack, "layer": site.layer + 1, "kind": kind}
                yield where, weight, slice(start, start + len(view))


Run: TypeAlias = Callable[[], None]
Formula: TypeAlias = Callable[[Any, Tensor], Tensor]

VOCABULARY = 10_000
WARMING = 3
"""How many rounds are not counted."""
STEPS = 10
"""Number of steps over which the norms' share is the median."""
FASTER = 1.05
"""The speed-up of a whole step in the paper; steps are timed only if so much can be gained."""


class _Elementary(nn.Module):
    """A norm as a formula of elementary operations on its parameters."""

    def __init__(self, norm: nn.Module, formula: Formula) -> None:
        super().__init__()
        self.norm, self.formula = norm, formula

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `[..., D]`."""
        return self.formula(self.norm, x)


def _layer_normed(norm: LayerNorm, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    return centred * torch.rsqrt(variance + norm.eps) * norm.weight + norm.bias


def _scale_normed(norm: ScaleNorm, x: Tensor) -> Tensor:
    return x * (norm.g / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp(min=1e-5))


NORMS: Final[Mapping[str, tuple[type[nn.Module], Formula]]] = {
    "layernorm": (LayerNorm, _layer_normed),
    "scalenorm": (ScaleNorm, _scale_normed),
}


def speed(
    lab: Lab,
    *,
    shapes: Sequence[Sequence[int]],
    rounds: int,
    model: str,
    layers: int,
    tokens: int,
    steps: int,
) -> Measurement:
    """Time forward and backward passes of both norms alone, in elementary operations and as one kernel each;
    the share of norms in a step with LayerNorm, which bounds what any other norm can save (Amdahl); and the
    steps themselves if that bound allows what the paper reports.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[Row] = []
    measures: dict[str, Estimate] = {}
    for form in ("elementary", "fused"):
        ratios: list[list[float]] = []
        for count, dim in shapes:
            lab.log(f"{form}, {count} x {dim}")
            runs = {name: _passes(_built(name, dim, form, device), count, dim, device) for name in NORMS}
            seconds = _alternating(runs, rounds, device)
            for name, times in seconds.items():
                named = {"form": form, "shape": f"{count} x {dim}", "norm": name}
                rows += [{**named, "round": i, "microseconds": 1e6 * t} for i, t in enumerate(times)]
            ratios.append(np.log(np.divide(seconds["layernorm"], seconds["scalenorm"])).tolist())
        by_shape = [exponential(logarithm) for logarithm in simultaneous(np.transpose(ratios))]
        for (count, dim), ratio in zip(shapes, by_shape, strict=True):
            measures[f"{form}_{count}x{dim}"] = ratio
        measures[f"{form}_least"] = lowest(by_shape)
    networks = {norm: _network(model, layers, norm, device) for norm in NORMS}
    share, count = _share(networks["layernorm"], size(model, "pre", layers).dim, tokens, device)
    bound = 1 / (1 - share)
    measures |= {"share_of_norms": Estimate.exact(share), "most_that_can_be_gained": Estimate.exact(bound)}
    if bound >= FASTER:
        lab.log("whole steps")
        seconds = _alternating({n: _step(net, tokens, device) for n, net in networks.items()}, steps, device)
        of_steps = np.divide(seconds["layernorm"], seconds["scalenorm"]).tolist()
        measures["steps_layernorm_over_scalenorm"] = mean_ratio(of_steps)
    judged = f"the paper's {FASTER} {'is' if bound >= FASTER else 'cannot be'} judged"
    facts = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "rounds": f"{rounds} of each kernel in turn, one after the other",
        "step": f"{count} norms take {share:.1%} of a step of {tokens:,} positions a side; free norms would "
        f"make it {bound:.3f} times as fast: {judged}",
    }
    return Measurement(measures, {"kernels": rows}, facts)


def _built(name: str, dim: int, form: str, device: torch.device) -> nn.Module:
    """Build a norm in its form; on a GPU, one kernel is what the compiler makes of elementary operations."""
    kind, formula = NORMS[name]
    norm = kind(dim).to(device)
    if form == "elementary":
        return _Elementary(norm, formula)
    if device.type == "cpu":
        return norm
    compiled = _Elementary(norm, formula)
    compiled.compile()
    return compiled


def _network(model: str, layers: int, norm: str, device: torch.device) -> Seq2Seq:
    torch.manual_seed(0)
    return Seq2Seq(replace(size(model, "pre", layers), norm=norm), VOCABULARY).to(device)


def _passes(norm: nn.Module, count: int, dim: int, device: torch.device) -> Run:
    x = torch.randn(count, dim, device=device, requires_grad=True)
    gradient = torch.randn(count, dim, device=device)

    def run() -> None:
        x.grad = None
        norm.zero_grad()
        norm(x).backward(gradient)

    return run


def _step(network: Seq2Seq, tokens: int, device: torch.device) -> Run:
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-4)
    source, target = torch.randint(4, VOCABULARY, (2, tokens // 32, 32), device=device)

    def run() -> None:
        optimizer.zero_grad()
        logits = network(source, target)
        F.cross_entropy(logits.flatten(0, 1), target.roll(-1, 1).flatten()).backward()
        optimizer.step()

    return run


def _alternating(runs: Mapping[str, Run], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Return the seconds of each, round by round. Which goes first alternates, because caches favour one."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs)
    for i in range(WARMING + rounds):
        for name in order if i % 2 else reversed(order):
            _wait(device)
            start = time.perf_counter()
            runs[name]()
            _wait(device)
            if i >= WARMING:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _share(network: Seq2Seq, dim: int, tokens: int, device: torch.device) -> tuple[float, int]:
    """Return the share of a step that its norms take, each timed alone at that shape, and their number."""
    count = sum(isinstance(module, Norm) for module in network.modules())
    alone = _passes(_built("layernorm", dim, "fused", device), tokens // 32 * 32, dim, device)
    runs = {"norm": alone, "step": _step(network, tokens, device)}
    seconds = {name: median(times) for name, times in _alternating(runs, STEPS, device).items()}
    return count * seconds["norm"] / seconds["step"], count
