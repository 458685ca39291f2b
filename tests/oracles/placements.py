"""Oracles of the placements: the stream of a whole stack, written out from each published equation.

x is the stream ``[T, D]``, F a sublayer's branch, LN the chosen norm.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Bundle = dict[str, np.ndarray]
Norm = Callable[[np.ndarray, Bundle], np.ndarray]


@dataclass(frozen=True)
class Sublayer:
    """One branch F with its role ("self_attention", "feed_forward", ...), its layer from 0, its parameters.

    p holds norm bundles ("norm", or "norm_in" and others) and the arrays "omega" [D], "alpha" [1], "s" [1],
    "a" [1], "lam" [D], "alpha_n" [D], "r" [1], "mu" [1] of the methods that have them.
    """

    f: Callable[[np.ndarray], np.ndarray]
    role: str
    layer: int
    p: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StackInfo:
    """The stack that the sublayers form: N encoder and M decoder layers of the model, 0 for none."""

    name: str
    N: int
    M: int
    norm: Norm
    begin: dict[str, Any] = field(default_factory=dict)
    end: dict[str, Any] = field(default_factory=dict)
    final: Norm | None = None
    steps: int = 0
    warmup_steps: int = 1000

    @property
    def layers(self) -> int:
        """N of an encoder, M of a decoder."""
        return {"encoder": self.N, "decoder": self.M}[self.name]


def _end(x: np.ndarray, stack: StackInfo) -> np.ndarray:
    """The final norm of a stack whose residual sum is never normed on the way."""
    return (stack.final or stack.norm)(x, stack.end["norm"])


def post(x: np.ndarray, sublayers: list[Sublayer], stack: StackInfo) -> np.ndarray:
    """x' = LN(x + F(x)). Vaswani et al. 2017 (arXiv 1706.03762)."""
    for sub in sublayers:
        x = stack.norm(x + sub.f(x), sub.p["norm"])
    return x


def pre(x: np.ndarray, sublayers: list[Sublayer], stack: StackInfo) -> np.ndarray:
    """x' = x + F(LN(x)), LN at the end. Xiong et al. 2020, Table 1 (arXiv 2002.04745)."""
    for sub in sublayers:
        x = x + sub.f(stack.norm(x, sub.p["norm"]))
    return _end(x, stack)


def admin(x: np.ndarray, sublayers: list[Sublayer], stack: StackInfo) -> np.ndarray:
    """x' = LN(omega * x + F(x)). Liu et al. 2020, Section 4.3 (arXiv 2004.08249)."""
    for sub in sublayers:
        x = stack.norm(sub.p["omega"] * x + sub.f(x), sub.p["norm"])
    return x


def rezero(x: np.ndarray, sublayers: list[Sublayer], stack: StackInfo) -> np.ndarray:
    """x' = x + alpha F(x), no norm. Bachlechner et al. 2020 (arXiv 2003.04887)."""
    del stack
    for sub in sublayers:
        x = x + sub.p["alpha"][0] * sub.f(x)
    return x


def rezero_post(x: np.ndarray, sublayers: list[Sublayer], stack: StackInfo) -> np.ndarray:
    """x' = LN(x + alpha F(x)). Liu et al. 2020, Table 3 (arXiv 2004.08249)."""
    for sub in sublayers:
        x = stack.norm(x + sub.p["alpha"][0] * sub.f(x), sub.p["norm"])
    return x


def fixup(x: np.ndarray, sublayers: list[Sublayer], stack: StackInfo) -> np.ndarray:
    """x' = x + s F(x), no norm. Zhang et al. 2019 (arXiv 1901.09321)."""
    del stack
    for sub in sublayers:
        x = x + sub.p["s"][0] * sub.f(x)
    return x


def tfixup(x: np.ndarray, sublayers: list[Sublayer], stack: StackInfo) -> np.ndarray:
    """x' = x + F(x), no norm. Huang et al. 2020 (ICML 2020)."""
    del stack
    for sub in sublayers:
        x = x + sub.f(x)
    return x


def skipinit(x: np.ndarray, sublayers: list[Sublayer], stack: StackInfo) -> np.ndarray:
    """x' = x + a F(x), no norm. De and Smith 2020 (arXiv 2002.10444)."""
    del stack
    for sub in sublayers:
        x = x + sub.p["a"][0] * sub.f(x)
    return x


def deepnorm_alpha(stack: StackInfo) -> float:
    """Encoder of a pair 0.81 (N^4 M)^(1/16), its decoder (3M)^(1/4); one stack of L layers (2L)^(1/4).

    Wang et al. 2022, Figure 2 (arXiv 2203.00555).
    """
    if stack.N == 0 or stack.M == 0:
        return (2.0 * stack.layers) ** (1 / 4)
    if stack.name == "encoder":
        return 0.81 * (stack.N**4 * stack.M) ** (1 / 16)
    return (3.0 * stack.M) ** (1 / 4)


def deepnorm(x: np.ndarray, sublayers: list[Sublayer], stack: StackInfo) -> np.ndarray:
    """x' = LN(alpha x + F(x)). Wang et al. 2022 (arXiv 2203.00555)."""
    alpha = deepnorm_alpha(stack)
    for sub in sublayers:
        x = stack.norm(alpha * x + sub.f(x), sub.p["norm"])
    return x


def sandwich(x: np.ndarray, sublayers: list[Sublayer], stack: StackInfo) -> np.ndarray:
    """x' = x + LN_out(F(LN_in(x))), LN at the end. Ding et al. 2021 (arXiv 2105.13290)."""
    for sub in sublayers:
        x = x + stack.norm(sub.f(stack.norm(x, sub.p["norm_in"])), sub.p["norm_out"])
    return _end(x, stack)


def periln(x: np.ndarray, sublayers: list[Sublayer], stack: StackInfo) -> np.ndarray:
    """x_0 = LN(embedding), x' = x + LN_out(F(LN_in(x))), LN at the end.

    Kim et al. 2025 (arXiv 2502.02732).
    """
    x = stack.norm(x, stack.begin["norm"])
    for sub in sublayers:
        x = x + stack.norm(sub.f(stack.norm(x, sub.p["norm_in"])), sub.p["norm_out"])
    return _end(x, stack)


def olmo2(x: np.ndarray, sublayers: list[Sublayer], stack: StackInfo) -> np.ndarray:
    """x' = x + LN(F(x)), LN at the end. OLMo et al. 2025 (arXiv 2501.00656)."""
    for sub in sublayers:
        x = x + stack.norm(sub.f(x), sub.p["norm"])
    return _end(x, stack)


def subln(x: np.ndarray, sublayers: list[Sublayer], stack: StackInfo) -> np.ndarray:
    """x' = x + F(LN(x)), LN at the end; the second norm is inside F. Wang et al. 2022 (arXiv 2210.06423)."""
    return pre(x, sublayers, stack)


def normformer(x: np.ndarray, sublayers: list[Sublayer], stack: StackInfo) -> np.ndarray:
    """Attention: x' = x + LN_out(F(LN_in(x))); feed-forward: x' = x + F(LN_in(x)); LN at the end.

    Head gains and the feed-forward's inner norm are inside F. A sublayer with one norm may call it "norm".

    Shleifer et al. 2021 (arXiv 2110.09456).
    """
    for sub in sublayers:
        first = sub.p["norm_in"] if "norm_in" in sub.p else sub.p["norm"]
        y = sub.f(stack.norm(x, first))
        if sub.role.endswith("attention"):
            y = stack.norm(y, sub.p["norm_out"])
        x = x + y
    return _end(x, stack)


def residual(x: np.ndarray, sublayers: list[Sublayer], stack: StackInfo) -> np.ndarray:
    """x' = LN(x + F(x)), r' = r + F(x) from r_0 = x_0; the stack gives x + LN(r).

    Xie et al. 2023 (arXiv 2304.14802).
    """
    r = x
    for sub in sublayers:
        y = sub.f(x)
        r = r + y
        x = stack.norm(x + y, sub.p["norm"])
    return x + _end(r, stack)


def b2t(x: np.ndarray, sublayers: list[Sublayer], stack: StackInfo) -> np.ndarray:
    """Post-LN, but the last sublayer of a layer gives LN(x + F(x) + input of the layer).

    Takase et al. 2022 (arXiv 2206.00330).
    """
    layer_input = x
    for i, sub in enumerate(sublayers):
        if i == 0 or sublayers[i - 1].layer != sub.layer:
            layer_input = x
        total = x + sub.f(x)
        if i == len(sublayers) - 1 or sublayers[i + 1].layer != sub.layer:
            total = total + layer_input
        x = stack.norm(total, sub.p["norm"])
    return x


def mixln_post_layers(layers: int) -> int:
    """floor(L / 4) layers are Post-LN, at least 1."""
    return max(1, layers // 4)


def mixln(x: np.ndarray, sublayers: list[Sublayer], stack: StackInfo) -> np.ndarray:
    """LN(x + F(x)) in the first quarter of the layers, x + F(LN(x)) in the rest, LN at the end.

    Li et al. 2024 (arXiv 2412.13795).
    """
    for sub in sublayers:
        if sub.layer < mixln_post_layers(stack.layers):
            x = stack.norm(x + sub.f(x), sub.p["norm"])
        else:
            x = x + sub.f(stack.norm(x, sub.p["norm"]))
    return _end(x, stack)


def lnscale(x: np.ndarray, sublayers: list[Sublayer], stack: StackInfo) -> np.ndarray:
    """x' = x + F(LN(x) / sqrt(l)), l the layer's number from 1, LN at the end.

    Sun et al. 2025 (arXiv 2502.05795).
    """
    for sub in sublayers:
        x = x + sub.f(stack.norm(x, sub.p["norm"]) / np.sqrt(sub.layer + 1))
    return _end(x, stack)


def layerscale(x: np.ndarray, sublayers: list[Sublayer], stack: StackInfo) -> np.ndarray:
    """x' = x + lam * F(LN(x)), lam per channel, LN at the end. Touvron et al. 2021 (arXiv 2103.17239)."""
    for sub in sublayers:
        x = x + sub.p["lam"] * sub.f(stack.norm(x, sub.p["norm"]))
    return _end(x, stack)


def x0lambdas(x: np.ndarray, sublayers: list[Sublayer], stack: StackInfo) -> np.ndarray:
    """x' = r x + mu x_0 before each layer, x' = x + F(LN(x)) in each sublayer, a last LN, as in nanochat."""
    first = x
    for i, sub in enumerate(sublayers):
        if i == 0 or sublayers[i - 1].layer != sub.layer:
            x = sub.p["r"][0] * x + sub.p["mu"][0] * first
        x = x + sub.f(stack.norm(x, sub.p["norm"]))
    return _end(x, stack)


def gpas(x: np.ndarray, sublayers: list[Sublayer], stack: StackInfo) -> np.ndarray:
    """x' = h - silu(a) sg(h) with h = x + F(LN(x)), LN at the end. Chen et al. 2025 (arXiv 2506.22049).

    A complex step does not pass through a real part, which so stands in for the stopped gradient.
    """
    for sub in sublayers:
        h = x + sub.f(stack.norm(x, sub.p["norm"]))
        a = sub.p["a"][0]
        x = h - a / (1.0 + np.exp(-a)) * np.real(h)
    return _end(x, stack)


def prores(x: np.ndarray, sublayers: list[Sublayer], stack: StackInfo) -> np.ndarray:
    """x' = x + min(t / (T (l + 1)), 1) F(LN(x)), LN at the end; t steps, layer l from 0.

    Chen et al. 2026 (arXiv 2603.05369).
    """
    for sub in sublayers:
        alpha = min(stack.steps / (stack.warmup_steps * (sub.layer + 1)), 1.0)
        x = x + alpha * sub.f(stack.norm(x, sub.p["norm"]))
    return _end(x, stack)


def hybridnorm(x: np.ndarray, sublayers: list[Sublayer], stack: StackInfo) -> np.ndarray:
    """Attention x' = x + F(x); feed-forward x' = y + F(y) with y = LN(x); LN at the end.

    The feed-forward's norm is kept with the sublayer before it. Zhuo et al. 2025 (arXiv 2503.04598).
    """
    for i, sub in enumerate(sublayers):
        if not sub.role.endswith("attention"):
            x = stack.norm(x, sublayers[i - 1].p["norm"])
        x = x + sub.f(x)
    return _end(x, stack)


def unit(x: np.ndarray) -> np.ndarray:
    """Each row over its length, at least 1e-5."""
    lengths = [np.sqrt((row * row).sum()) for row in x]
    return np.stack([row / (n if np.real(n) > 1e-5 else 1e-5) for row, n in zip(x, lengths, strict=True)])


def ngpt(x: np.ndarray, sublayers: list[Sublayer], stack: StackInfo) -> np.ndarray:
    """h <- n(n(h) + |alpha| (n(F(h)) - n(h))); alpha is stored as 1/sqrt(d), and 0.05 there.

    Loshchilov et al. 2024 (arXiv 2410.01131), NVIDIA/ngpt.
    """
    del stack
    for sub in sublayers:
        alpha = sub.p["alpha_n"] * (0.05 / (1 / np.sqrt(x.shape[1])))
        size = np.where(np.real(alpha) < 0, -alpha, alpha)
        h = unit(x)
        x = unit(h + size * (unit(sub.f(x)) - h))
    return x


def siamese(x: np.ndarray, sublayers: list[Sublayer], stack: StackInfo) -> np.ndarray:
    """x <- N1(x), z = F(N3(x + N2(y))), x <- x + z / sqrt(2 (l + 1)), y <- y + z; in the end N(x) + N(y).

    l counts layers from 0. Li et al. 2026 (arXiv 2602.08064).
    """
    y = x
    for sub in sublayers:
        x = stack.norm(x, sub.p["norm_x"])
        z = sub.f(stack.norm(x + stack.norm(y, sub.p["norm_y"]), sub.p["norm_in"]))
        x, y = x + z / np.sqrt(2.0 * (sub.layer + 1)), y + z
    final = stack.final or stack.norm
    return final(x, stack.end["norm_x"]) + final(y, stack.end["norm_y"])


def keel(x: np.ndarray, sublayers: list[Sublayer], stack: StackInfo) -> np.ndarray:
    """x' = LN_out(a x + F(LN_in(x))), a the number of sublayers. Chen and Wei 2026 (arXiv 2601.19895)."""
    a = len(sublayers)
    for sub in sublayers:
        x = stack.norm(a * x + sub.f(stack.norm(x, sub.p["norm_in"])), sub.p["norm_out"])
    return x


PLACEMENTS: dict[str, Callable[[np.ndarray, list[Sublayer], StackInfo], np.ndarray]] = {
    "post": post,
    "pre": pre,
    "admin": admin,
    "rezero": rezero,
    "rezero_post": rezero_post,
    "fixup": fixup,
    "deepnorm": deepnorm,
    "sandwich": sandwich,
    "periln": periln,
    "olmo2": olmo2,
    "subln": subln,
    "normformer": normformer,
    "residual": residual,
    "b2t": b2t,
    "mixln": mixln,
    "lnscale": lnscale,
    "layerscale": layerscale,
    "skipinit": skipinit,
    "tfixup": tfixup,
    "keel": keel,
    "x0lambdas": x0lambdas,
    "gpas": gpas,
    "prores": prores,
    "hybridnorm": hybridnorm,
    "siamese": siamese,
    "ngpt": ngpt,
}


def run_stack(method: str, x0: np.ndarray, sublayers: list[Sublayer], stack: StackInfo) -> np.ndarray:
    """The stream x0 sent through all sublayers by the placement's equation, with its begin and end."""
    return PLACEMENTS[method](x0, sublayers, stack)
