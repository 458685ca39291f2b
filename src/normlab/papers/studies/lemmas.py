"""Lemmas and bounds of Xiong et al. 2020 (arXiv 2002.04745), and the setting of their proofs (Section 3.3):
uniform single-head attention, because queries and keys are initialised to 0, and Gaussian inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normlab.diagnosis.studies.jacobian import spectral_norm, token_jacobian
from normlab.diagnosis.theory import (
    chi_square_tail,
    ffn_gain,
    layer_norm_jacobian,
    relu_mean_square,
    rms_norm_jacobian,
)
from normlab.nn import LayerNorm, Placement, Stack, stack_of
from normlab.papers.artefact import Measurement
from normlab.papers.estimate import Estimate, exponential, log_slope, mean
from normlab.papers.intervals import simultaneous
from normlab.papers.lab import Lab, Row, apart, curves, generator, having

ROLES = ("self_attention", "ffn")
CLASSES: Final = 1000
"""The number of classes that a ``TheoryNetwork`` tells apart."""


class _UniformAttention(nn.Module):
    r""":math:`\frac{1}{n} \sum_j x_j W_V`, the same for every position; :math:`W_V \sim N(0, 1/d)`."""

    def __init__(self, dim: int, random: torch.Generator) -> None:
        super().__init__()
        self.value = _xavier(dim, dim, random)

    def forward(self, x: Tensor) -> Tensor:
        return (x.mean(-2, keepdim=True) @ self.value).expand_as(x)


class _FeedForward(nn.Module):
    r""":math:`\mathrm{ReLU}(x W_1) W_2`, both drawn from :math:`N(0, 2/(d + d_{ff}))`."""

    def __init__(self, dim: int, ffn_dim: int, random: torch.Generator) -> None:
        super().__init__()
        self.inner, self.outer = _xavier(dim, ffn_dim, random), _xavier(ffn_dim, dim, random)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x @ self.inner) @ self.outer


def _xavier(n_in: int, n_out: int, random: torch.Generator) -> nn.Parameter:
    return nn.Parameter(torch.randn(n_in, n_out, generator=random) * (2 / (n_in + n_out)) ** 0.5)


class TheoryNetwork(nn.Module):
    """A network of the theory with inputs `[1, T, D]`, a target for each position, and an output matrix."""

    def __init__(
        self, placement: str, *, layers: int, dim: int, tokens: int, seed: int, ffn_dim: int = 0
    ) -> None:
        super().__init__()
        random = generator(seed=seed)
        branches: list[nn.Module] = []
        for _ in range(layers):
            branches += [_UniformAttention(dim, random), _FeedForward(dim, ffn_dim or dim, random)]
        first = next(stack_of(ROLES, layers, dim))
        self.stack = Stack.of(branches, Placement.registry[placement], first)
        self.output = torch.randn(dim, CLASSES, generator=random) * dim**-0.5
        self.x = torch.randn(1, tokens, dim, generator=random)
        self.target = torch.randint(CLASSES, (tokens,), generator=random)

    def forward(self) -> Tensor:
        """Return the mean over positions of the negative log-likelihood."""
        return F.cross_entropy((self.stack(self.x) @ self.output)[0], self.target)

    def outer(self) -> list[nn.Parameter]:
        r""":math:`W^{2,l}` of every layer, first layer first."""
        return [sublayer.f.outer for sublayer in self.stack if isinstance(sublayer.f, _FeedForward)]

    @torch.no_grad()
    def totals(self) -> list[Tensor]:
        """Return x + f(x) `[T, D]` of every feed-forward sublayer: in Post-LN its norm's input, in Pre-LN the
        stream after it.
        """
        totals: list[Tensor] = []
        stream = self.stack.begin(self.x)
        for sublayer in self.stack:
            y = sublayer.f(sublayer.place.read(stream))
            totals.append((stream + y)[0])
            stream = sublayer.place.write(stream, y)
        return totals[1::2]


def mean_field_scales(tokens: int, depths: Sequence[int]) -> list[float]:
    r"""Return the mean square of a Pre-LN's stream after each of ``depths`` layers, for wide networks.

    With the mean square s and the overlap c of two tokens, :math:`\rho = c/s`, uniform attention over n
    tokens adds :math:`(1 + (n - 1)\rho)/n` to both, since every token gets the same; a feed-forward adds 1/2
    to s and half of ReLU's arc-cosine kernel, :math:`(\sqrt{1 - \rho^2} + \rho(\pi - \arccos\rho))/\pi`,
    to c (Cho and Saul 2009, Section 2).
    """
    square, overlap = 1.0, 0.0
    squares: dict[int, float] = {}
    for layer in range(1, max(depths) + 1):
        added = (1 + (tokens - 1) * overlap / square) / tokens
        square, overlap = square + added, overlap + added
        rho = min(1.0, overlap / square)
        kernel = (math.sqrt(1 - rho**2) + rho * (math.pi - math.acos(rho))) / math.pi
        square, overlap = square + 0.5, overlap + 0.5 * kernel
        squares[layer] = square
    return [squares[depth] for depth in depths]


def relu_scale(
    lab: Lab, *, dims: Sequence[int], sigmas: Sequence[float], draws: int, seeds: int
) -> Measurement:
    """Lemma 1: the mean of ‖ReLU(X)‖² over the lemma's value, at every width and deviation."""
    rows: list[Row] = []
    for dim, sigma in product(dims, sigmas):
        expected = relu_mean_square(sigma**2) * dim
        drawn = (sigma * torch.randn(draws, dim, generator=generator(seed=s)) for s in range(seeds))
        ratio = mean(x.relu().square().sum(-1).mean().item() / expected for x in drawn)
        rows.append({"d": dim, "sigma": sigma, "expected": expected, **ratio.columns("ratio")})
    extremes = {
        "lowest_ratio": min(rows, key=lambda row: row["low"]),
        "highest_ratio": max(rows, key=lambda row: row["high"]),
    }
    measures = {name: Estimate(row["ratio"], row["low"], row["high"]) for name, row in extremes.items()}
    return Measurement(measures, {"ratios": rows}, {"draws": f"{seeds} times {draws:,} vectors"})


LEMMA_2: Final[Mapping[str, Callable[[int, float], tuple[float, float]]]] = {
    "post": lambda layer, gain: (1 + gain, 1 + gain),
    "pre": lambda layer, gain: (1 + layer / 2, 1 + 3 * layer / 2),
}
"""Bounds of the mean square after layer l, given the gain of a feed-forward."""


def hidden_scales(
    lab: Lab, *, dim: int, layers: int, tokens: int, seeds: int, ffn_dims: Sequence[int]
) -> Measurement:
    """Lemma 2, and the formula for other widths of the feed-forward: mean squares over d by layer."""
    rows: list[Row] = []
    measures: dict[str, Estimate] = {}
    for placement, ffn_dim in [("post", dim), ("pre", dim), *(("post", f) for f in ffn_dims)]:
        lab.log(f"{placement}, d_ff {ffn_dim}")
        by_seed: list[list[float]] = []
        for seed in range(seeds):
            sizes = {"layers": layers, "dim": dim, "tokens": tokens, "ffn_dim": ffn_dim}
            network = TheoryNetwork(placement, **sizes, seed=seed)
            by_seed.append([total.square().mean().item() for total in network.totals()])
        of_network: list[Row] = []
        for layer, squares in enumerate(map(mean, zip(*by_seed, strict=True)), 1):
            low, high = LEMMA_2[placement](layer, ffn_gain(dim, ffn_dim))
            where = {"placement": placement, "d_ff": ffn_dim, "layer": layer, "mean_square": squares.value}
            ends = {"interval_low": squares.low, "interval_high": squares.high}
            of_network.append({**where, **ends, "theory_low": low, "theory_high": high})
        rows += of_network
        name = placement if ffn_dim == dim else f"post_d_ff_{ffn_dim}"
        measures[f"{name}_lowest"] = _worst(of_network, "theory_low", lowest=True)
        measures[f"{name}_highest"] = _worst(of_network, "theory_high", lowest=False)
    facts = {"network": f"d {dim}, {layers} layers, {tokens} tokens, {seeds} seeds"}
    return Measurement(measures, {"scales": rows}, facts)


def _worst(rows: Sequence[Row], bound: str, *, lowest: bool) -> Estimate:
    """Return the mean square over its bound, in the layer where it is lowest or highest."""
    choose = min if lowest else max
    row = choose(rows, key=lambda row: row["mean_square"] / row[bound])
    return Estimate(*(row[name] / row[bound] for name in ("mean_square", "interval_low", "interval_high")))


def norm_jacobian(
    lab: Lab, *, dims: Sequence[int], lengths: Sequence[float], mean_over_sd: float, seeds: int
) -> Measurement:
    """Lemma 3 on full Jacobian matrices in float64: its exact form, and the published one."""
    rows: list[Row] = []
    wanted = torch.tensor(lengths, dtype=torch.float64)[:, None]
    for dim in dims:
        norm = LayerNorm(dim).double()
        norm.eps = 0.0
        for seed in range(seeds):
            drawn = torch.randn(len(lengths), dim, generator=generator(seed=seed), dtype=torch.float64)
            drawn = drawn - drawn.mean(-1, keepdim=True)
            scaled = drawn / drawn.norm(dim=-1, keepdim=True) * wanted
            for shift in (0.0, mean_over_sd):
                x = scaled + shift * scaled.square().mean(-1, keepdim=True).sqrt()
                rows += [_jacobian_row(norm, vector, seed=seed, shift=shift) for vector in x]
    centred = having(rows, shift=0.0)
    by_length = [
        [row["spectral"] for row in having(centred, d=dim, seed=seed)]
        for dim, seed in product(dims, range(seeds))
    ]
    farthest = max(abs(row["spectral"] / row["exact"] - 1) for row in rows)
    of_centred = [row["spectral"] / row["published"] for row in centred]
    of_shifted = [row["spectral"] / row["published"] for row in having(rows, shift=mean_over_sd)]
    return Measurement(
        {
            "exact_error": Estimate.exact(farthest),
            "slope": log_slope(lengths, by_length),
            "published_ratio_centred": Estimate.exact(max(of_centred)),
            "published_ratio_shifted": Estimate.exact(min(of_shifted)),
        },
        {"jacobians": rows},
        {"vectors": f"d {', '.join(map(str, dims))}; mean 0 or {mean_over_sd:g} deviations; float64"},
    )


def _jacobian_row(norm: LayerNorm, x: Tensor, *, seed: int, shift: float) -> Row:
    return {
        "d": len(x),
        "seed": seed,
        "shift": shift,
        "length": (x - x.mean()).norm().item(),
        "spectral": spectral_norm(token_jacobian(norm, x)[None]).item(),
        "exact": layer_norm_jacobian(x).item(),
        "published": rms_norm_jacobian(x).item(),
    }


def last_gradient(
    lab: Lab, *, depths: Sequence[int], dims: Sequence[int], dim: int, tokens: int, seeds: int, first: int
) -> Measurement:
    """Theorem 1: the gradient of the last feed-forward matrix over depth, Pre-LN's over Post-LN's of the same
    draws at each depth, and over width; plus the scale of what the last norm reads. Seeds begin at ``first``.
    """
    rows: list[Row] = []
    grid = [(layers, dim) for layers in depths] + [(depths[0], d) for d in dims if d != dim]
    for placement, (layers, width), seed in product(("post", "pre"), grid, range(seeds)):
        lab.log(f"{placement}, {layers} layers, d {width}, seed {seed}")
        network = TheoryNetwork(placement, layers=layers, dim=width, tokens=tokens, seed=first + seed)
        (gradient,) = torch.autograd.grad(network(), [network.outer()[-1]])
        where = {"placement": placement, "layers": layers, "d": width, "seed": seed}
        inverse_rms = network.totals()[-1].square().mean().item() ** -0.5
        rows.append({**where, "grad_l2": gradient.norm().item(), "inverse_rms": inverse_rms})
    measures: dict[str, Estimate] = {}
    by_depth: dict[str, list[list[float]]] = {}
    for placement, of_placement in apart(rows, "placement").items():
        by_depth[placement] = curves(of_placement, "grad_l2", "layers", depths, seeds, d=dim)
        scales = curves(of_placement, "inverse_rms", "layers", depths, seeds, d=dim)
        by_width = curves(of_placement, "grad_l2", "d", dims, seeds, layers=depths[0])
        measures[f"{placement}_exponent_in_layers"] = log_slope(depths, by_depth[placement])
        measures[f"{placement}_exponent_of_inverse_rms"] = log_slope(depths, scales)
        measures[f"{placement}_exponent_in_d"] = log_slope(dims, by_width)
    logarithms = simultaneous(np.log(by_depth["pre"]) - np.log(by_depth["post"]))
    mean_field = [math.sqrt(1.5 / scale) for scale in mean_field_scales(tokens, depths)]
    # computed, so the slope of its one curve has no spread
    measures["mean_field_exponent"] = Estimate.exact(log_slope(depths, [mean_field]).value)
    lines = {
        "measured": map(exponential, logarithms),
        "ratio of the proof's bounds": (
            Estimate.exact(math.sqrt(1.5 / (1 + layers / 2))) for layers in depths
        ),
        "mean field": map(Estimate.exact, mean_field),
    }
    shown: list[Row] = []
    for name, ratios in lines.items():
        for layers, ratio in zip(depths, ratios, strict=True):
            shown.append({"layers": layers, "what": name, **ratio.columns("ratio")})
    facts = {"network": f"{tokens} tokens, {seeds} seeds, {CLASSES:,} classes"}
    return Measurement(measures, {"ratios": shown, "gradients": rows}, facts)


def chi_square(lab: Lab, *, dim: int, epsilon: float, draws: int, seeds: int) -> Measurement:
    """Appendix G: how often ‖Y‖² of a normal vector exceeds (1 + ε)d, and the bound for that."""
    bound = chi_square_tail(dim, epsilon)
    drawn = (torch.randn(draws, dim, generator=generator(seed=seed)) for seed in range(seeds))
    tails = [(x.square().sum(-1) >= (1 + epsilon) * dim).double().mean().item() for x in drawn]
    return Measurement(
        {
            "bound": Estimate.exact(bound),
            "tail": mean(tails),
            "tail_over_bound": mean(t / bound for t in tails),
        },
        {"tails": [{"seed": s, "tail": t, "bound": bound} for s, t in enumerate(tails)]},
        {"draws": f"{seeds} times {draws:,} vectors of width {dim}, epsilon {epsilon:g}"},
    )


def norm_factors(layers: int, dim: int, tokens: int, seeds: int) -> list[Estimate]:
    r"""Appendix F: the mean of ‖J_LN‖² where a Post-LN feed-forward sum is normed, in every layer
    simultaneously, over :math:`\frac{2}{3}(1 + \frac{2}{d})`, its value for d_ff = d up to :math:`O(1/d^2)`.

    With x of length √d and mean 0, and f given its hidden layer normal of variance a, :math:`\|x + f\|^2 / d`
    without its mean is :math:`1 + 2 g \sqrt{a/d} + a \chi^2_{d-1}/d`: mean 3/2 − 1/(2d), variance 15/(4d).
    """
    expected = 2 / 3 * (1 + 2 / dim)
    by_seed: list[list[float]] = []
    for seed in range(seeds):
        network = TheoryNetwork("post", layers=layers, dim=dim, tokens=tokens, seed=seed)
        squares = [layer_norm_jacobian(x).square().mean().item() for x in network.totals()]
        by_seed.append([square / expected for square in squares])
    return simultaneous(by_seed)
