"""The speed of ScaleNorm and LayerNorm, alone and in a step (Nguyen and Salazar 2019, Section 3.2)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, Final, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normlab.nn import LayerNorm, Norm, ScaleNorm, Seq2Seq
from normlab.papers.artefact import Measurement
from normlab.papers.claim import Measure
from normlab.papers.intervals import exponential, lowest, mean_ratio, simultaneous
from normlab.papers.lab import Lab, Row, size

Run: TypeAlias = Callable[[], None]
Formula: TypeAlias = Callable[[Any, Tensor], Tensor]

VOCABULARY = 10_000
WARMING = 3
"""Rounds that are not counted."""
STEPS = 10
"""Steps of which the share of the norms is the median."""
FASTER = 1.05
"""What the paper reports of a whole step, which is measured only where so much can be gained."""


class Elementary(nn.Module):
    """A norm as a formula of elementary operations on its parameters."""

    def __init__(self, norm: nn.Module, formula: Formula) -> None:
        super().__init__()
        self.norm, self.formula = norm, formula

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `[..., D]`."""
        return self.formula(self.norm, x)


def layer_normed(norm: LayerNorm, x: Tensor) -> Tensor:
    """LayerNorm as its equation is written."""
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    return centred * torch.rsqrt(variance + norm.eps) * norm.weight + norm.bias


def scale_normed(norm: ScaleNorm, x: Tensor) -> Tensor:
    """ScaleNorm as its equation is written."""
    return x * (norm.g / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp(min=1e-5))


NORMS: Final[Mapping[str, tuple[type[nn.Module], Formula]]] = {
    "layernorm": (LayerNorm, layer_normed),
    "scalenorm": (ScaleNorm, scale_normed),
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
    """Forward and backward pass of both norms alone, in elementary operations and as one kernel each; the
    share of the norms in a step with LayerNorm, which bounds what any other norm can save (Amdahl); and the
    steps themselves where that bound allows what the paper reports.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[Row] = []
    measures: dict[str, Measure] = {}
    for form in ("elementary", "fused"):
        ratios: list[list[float]] = []
        for count, dim in shapes:
            lab.log(f"{form}, {count} x {dim}")
            runs = {name: _passes(_built(name, dim, form, device), count, dim, device) for name in NORMS}
            seconds = _alternating(runs, rounds, device)
            shape = {"form": form, "shape": f"{count} x {dim}"}
            rows += [
                {**shape, "norm": name, "round": i, "microseconds": 1e6 * taken}
                for name, all_ in seconds.items()
                for i, taken in enumerate(all_)
            ]
            ratios.append(
                [np.log(a / b) for a, b in zip(seconds["layernorm"], seconds["scalenorm"], strict=True)]
            )
        found = [exponential(m) for m in simultaneous(np.transpose(ratios))]
        measures |= {f"{form}_{c}x{d}": m for (c, d), m in zip(shapes, found, strict=True)}
        measures[f"{form}_least"] = lowest(found)
    networks = {norm: _network(model, layers, norm, device) for norm in NORMS}
    share, count = _share(networks["layernorm"], size(model, "pre", layers).dim, tokens, device)
    bound = 1 / (1 - share)
    measures |= {"share_of_norms": Measure.exact(share), "most_that_can_be_gained": Measure.exact(bound)}
    if bound >= FASTER:
        lab.log("whole steps")
        seconds = _alternating({n: _step(net, tokens, device) for n, net in networks.items()}, steps, device)
        pairs = zip(seconds["layernorm"], seconds["scalenorm"], strict=True)
        measures["steps_layernorm_over_scalenorm"] = mean_ratio(a / b for a, b in pairs)
    judged = f"the paper's {FASTER} {'is' if bound >= FASTER else 'cannot be'} judged"
    facts = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "rounds": f"{rounds} of each kernel in turn, one after the other",
        "step": f"{count} norms take {share:.1%} of a step of {tokens:,} positions a side; free norms would "
        f"make it {bound:.3f} times as fast: {judged}",
    }
    return Measurement(measures, {"kernels": rows}, facts)


def _built(name: str, dim: int, form: str, device: torch.device) -> nn.Module:
    """A norm in its form; on a GPU one kernel is what the compiler makes of the elementary operations."""
    kind, formula = NORMS[name]
    norm = kind(dim).to(device)
    if form == "elementary":
        return Elementary(norm, formula)
    if device.type == "cpu":
        return norm
    (compiled := Elementary(norm, formula)).compile()
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
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-4)
    source, target = torch.randint(4, VOCABULARY, (2, tokens // 32, 32), device=device)

    def run() -> None:
        optimiser.zero_grad()
        logits = network(source, target)
        F.cross_entropy(logits.flatten(0, 1), target.roll(-1, 1).flatten()).backward()
        optimiser.step()

    return run


def _alternating(runs: Mapping[str, Run], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of each, round by round; none is always the first."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(WARMING + rounds):
        for name in list(runs)[:: 1 if i % 2 else -1]:
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
    """The share of a step that its norms take, each timed alone at the step's shape, and their number."""
    count = sum(isinstance(module, Norm) for module in network.modules())
    alone = _passes(_built("layernorm", dim, "fused", device), tokens // 32 * 32, dim, device)
    runs = {"norm": alone, "step": _step(network, tokens, device)}
    seconds = {name: median(some) for name, some in _alternating(runs, STEPS, device).items()}
    return count * seconds["norm"] / seconds["step"], count
