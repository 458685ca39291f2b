"""Straight-line NumPy float64 forms of every method, from the published equations. Slow and obvious.

Weights are a flat dictionary by parameter path. Sentences are rows of a batch, computed one by one, so that
padding cannot matter: it is cut off before anything is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Branch = Callable[[Array], Array]


@dataclass(frozen=True)
class Weights:
    """The arrays below one path."""

    arrays: dict[str, Array]
    path: str = ""

    def at(self, name: str) -> Weights:
        return Weights(self.arrays, f"{self.path}{name}.")

    def __getitem__(self, name: str) -> Array:
        return self.arrays[self.path + name]


@dataclass(frozen=True)
class Recipe:
    """What to compute: names and sizes."""

    encoder: str
    decoder: str
    norm: str
    embedding: str
    heads: int
    n: int
    m: int


# --------------------------------------------------------------------------------------------- norms


def layernorm(x: Array, w: Weights) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    variance = (centred**2).mean(-1, keepdims=True)
    return w["weight"] * centred / np.sqrt(variance + 1e-5) + w["bias"]


def rmsnorm(x: Array, w: Weights) -> Array:
    return w["weight"] * x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def scalenorm(x: Array, w: Weights) -> Array:
    return w["g"] * x / np.maximum(np.sqrt((x**2).sum(-1, keepdims=True)), 1e-5)


NORMS = {"layernorm": layernorm, "rmsnorm": rmsnorm, "scalenorm": scalenorm}


# ------------------------------------------------------------------------------------------ branches


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def attend(query: Array, key: Array, value: Array, heads: int, *, causal: bool) -> Array:
    """Queries `[T, D]` look at keys and values `[S, D]`, head by head, position by position."""
    width = query.shape[1] // heads
    out = np.zeros_like(query)
    for h in range(heads):
        part = slice(h * width, (h + 1) * width)
        for t in range(len(query)):
            last = t + 1 if causal else len(key)
            weights = softmax(key[:last, part] @ query[t, part] / math.sqrt(width))
            out[t, part] = weights @ value[:last, part]
    return out


def self_attention(w: Weights, heads: int, *, causal: bool) -> Branch:
    def f(x: Array) -> Array:
        q, k, v = np.split(x @ w["qkv.weight"].T + w["qkv.bias"], 3, axis=1)
        return attend(q, k, v, heads, causal=causal) @ w["out.weight"].T + w["out.bias"]

    return f


def cross_attention(w: Weights, heads: int, memory: Array) -> Branch:
    k, v = np.split(memory @ w["kv.weight"].T + w["kv.bias"], 2, axis=1)

    def f(x: Array) -> Array:
        q = x @ w["q.weight"].T + w["q.bias"]
        return attend(q, k, v, heads, causal=False) @ w["out.weight"].T + w["out.bias"]

    return f


def feed_forward(w: Weights) -> Branch:
    def f(x: Array) -> Array:
        hidden = np.maximum(0.0, x @ w["inner.weight"].T + w["inner.bias"])
        return hidden @ w["outer.weight"].T + w["outer.bias"]

    return f


# ---------------------------------------------------------------------------------------- placements


@dataclass(frozen=True)
class Layout:
    """The branches of one stack in order, the weights of their placements and of the stack's end."""

    f: list[Branch]
    place: list[Weights]
    end: Weights
    norm: Callable[[Array, Weights], Array]
    stack: str
    per_layer: int
    n: int
    m: int


def post(x: Array, s: Layout) -> Array:
    for f, w in zip(s.f, s.place, strict=True):
        x = s.norm(x + f(x), w.at("norm"))
    return x


def pre(x: Array, s: Layout) -> Array:
    for f, w in zip(s.f, s.place, strict=True):
        x = x + f(s.norm(x, w.at("norm")))
    return s.norm(x, s.end)


def admin(x: Array, s: Layout) -> Array:
    for f, w in zip(s.f, s.place, strict=True):
        x = s.norm(w["omega"] * x + f(x), w.at("norm"))
    return x


def rezero(x: Array, s: Layout) -> Array:
    for i, f in enumerate(s.f):
        first_of_layer = i - i % s.per_layer
        x = x + s.place[first_of_layer]["alpha"] * f(x)
    return x


def deepnorm_constants(stack: str, n: int, m: int) -> tuple[float, float]:
    """Alpha and beta of a stack; n or m is 0 where the model has one stack only."""
    if n == 0 or m == 0:
        return math.pow(2 * (n + m), 1 / 4), math.pow(8 * (n + m), -1 / 4)
    if stack == "encoder":
        return 0.81 * math.pow(n**4 * m, 1 / 16), 0.87 / math.pow(n**4 * m, 1 / 16)
    return math.pow(3 * m, 1 / 4), math.pow(12 * m, -1 / 4)


def deepnorm(x: Array, s: Layout) -> Array:
    alpha, _ = deepnorm_constants(s.stack, s.n, s.m)
    for f, w in zip(s.f, s.place, strict=True):
        x = s.norm(alpha * x + f(x), w.at("norm"))
    return x


def residual(x: Array, s: Layout) -> Array:
    r = x
    for f, w in zip(s.f, s.place, strict=True):
        y = f(x)
        x, r = s.norm(x + y, w.at("norm")), r + y
    return x + s.norm(r, s.end.at("norm"))


PLACEMENTS = {
    "post": post,
    "pre": pre,
    "admin": admin,
    "rezero": rezero,
    "deepnorm": deepnorm,
    "residual": residual,
}


# -------------------------------------------------------------------------------------- whole models


def positions(length: int, dim: int) -> Array:
    table = np.zeros((length, dim))
    for t in range(length):
        for i in range(dim // 2):
            table[t, 2 * i] = math.sin(t / 10000 ** (2 * i / dim))
            table[t, 2 * i + 1] = math.cos(t / 10000 ** (2 * i / dim))
    return table


def vectors(w: Weights, embedding: str) -> Array:
    table = w["embedding.weight"]
    return table / np.linalg.norm(table, axis=1, keepdims=True) if embedding == "fixnorm" else table


def embed(w: Weights, recipe: Recipe, ids: list[int]) -> Array:
    table = vectors(w, recipe.embedding)
    dim = table.shape[1]
    return math.sqrt(dim) * table[ids] + positions(len(ids), dim)


def layout(w: Weights, recipe: Recipe, stack: str, memory: Array | None = None) -> Layout:
    """The encoder's branches, or the decoder's where there is a memory."""
    inside, h, f = w.at(stack), recipe.heads, []
    for i in range((recipe.n if memory is None else recipe.m) * (2 if memory is None else 3)):
        own = inside.at(f"sublayers.{i}.f")
        if memory is None:
            f.append(feed_forward(own) if i % 2 else self_attention(own, h, causal=False))
        elif i % 3 == 1:
            f.append(cross_attention(own, h, memory))
        else:
            f.append(feed_forward(own) if i % 3 else self_attention(own, h, causal=True))
    place = [inside.at(f"sublayers.{i}.place") for i in range(len(f))]
    per_layer = 2 if memory is None else 3
    return Layout(f, place, inside.at("end"), NORMS[recipe.norm], stack, per_layer, recipe.n, recipe.m)


def logits(w: Weights, recipe: Recipe, source: list[int], target: list[int]) -> Array:
    """`[T, V]` of one sentence without padding."""
    encoder = layout(w, recipe, "encoder")
    memory = PLACEMENTS[recipe.encoder](embed(w, recipe, source), encoder)
    decoder = layout(w, recipe, "decoder", memory)
    hidden = PLACEMENTS[recipe.decoder](embed(w, recipe, target), decoder)
    return hidden @ vectors(w, recipe.embedding).T


def admin_profile(
    w: Weights, recipe: Recipe, pairs: list[tuple[list[int], list[int]]]
) -> dict[str, list[float]]:
    """Omega of each sublayer: root of Var[x_0] + sum over j < i of Var[f_j], with every omega 1 meanwhile."""
    seen: dict[str, list[list[Array]]] = {"encoder": [], "decoder": []}
    for source, target in pairs:
        x, signals = _post_with_signals(embed(w, recipe, source), layout(w, recipe, "encoder"))
        seen["encoder"].append(signals)
        decoder = layout(w, recipe, "decoder", x)
        seen["decoder"].append(_post_with_signals(embed(w, recipe, target), decoder)[1])
    omegas = {}
    for stack, sentences in seen.items():
        variances = [np.var(np.concatenate(signal)) for signal in zip(*sentences, strict=True)]
        omegas[stack] = [math.sqrt(sum(variances[:i])) for i in range(1, len(variances))]
    return omegas


def _post_with_signals(x: Array, s: Layout) -> tuple[Array, list[Array]]:
    """The stack's output, and [x_0, f_1, f_2, ...]."""
    signals = [x]
    for f, w in zip(s.f, s.place, strict=True):
        signals.append(f(x))
        x = s.norm(x + signals[-1], w.at("norm"))
    return x, signals


def label_smoothed(
    scores: Array, target: list[int], smoothing: float, allowed: list[bool]
) -> tuple[float, float]:
    """Loss and negative log-likelihood summed over the tokens of `[T, V]` scores; target 0 is padding."""
    loss = nll = 0.0
    kinds = [v for v, ok in enumerate(allowed) if ok]
    for row, y in zip(scores, target, strict=True):
        if y == 0:
            continue
        total = math.log(sum(math.exp(row[v]) for v in kinds))
        log_p = {v: row[v] - total for v in kinds}
        nll -= log_p[y]
        loss -= (1 - smoothing) * log_p[y] + smoothing * sum(log_p.values()) / len(kinds)
    return loss, nll


# ------------------------------------------------------------------------------------------ searches

NextLogP = Callable[[list[int]], Array]
"""A prefix with BOS in front, to log-probabilities `[V]` of the next token."""

BOS, EOS = 2, 3


def beam_search(log_p: NextLogP, beams: int, limit: int, alpha: float) -> list[tuple[float, list[int]]]:
    """Ended hypotheses (score, ids without BOS and EOS), best first, in plain Python.

    Of the 2K best continuations, those among the first K that end are put aside; the K best others go on. The
    search ends with K hypotheses put aside, or at ``limit`` tokens, where EOS is all that may follow.
    """
    alive: list[tuple[float, list[int]]] = [(0.0, [BOS])]
    ended: list[tuple[float, list[int]]] = []
    for length in range(1, limit + 1):
        grown = [
            (score + lp, [*ids, word])
            for score, ids in alive
            for word, lp in enumerate(log_p(ids).tolist())
            if math.isfinite(lp) and (length < limit or word == EOS)
        ]
        grown.sort(key=lambda item: -item[0])
        ended += [(s / length**alpha, ids[1:-1]) for s, ids in grown[:beams] if ids[-1] == EOS]
        if len(ended) >= beams:
            ended = ended[:beams]
            break
        alive = [item for item in grown[: 2 * beams] if item[1][-1] != EOS][:beams]
    return sorted(ended, key=lambda item: -item[0])


def exhaustive_search(log_p: NextLogP, words: list[int], limit: int, alpha: float) -> tuple[float, list[int]]:
    """The best of all hypotheses of at most ``limit`` tokens, EOS counted."""
    best, level = (-math.inf, [0]), [(0.0, [BOS])]
    for length in range(1, limit + 1):
        following = []
        for score, ids in level:
            row = log_p(ids)
            best = max(best, ((score + float(row[EOS])) / length**alpha, ids[1:]))
            following += [(score + float(row[word]), [*ids, word]) for word in words]
        level = following
    return best


def central_difference(f: Callable[[float], float], h: float = 1e-6) -> float:
    """The derivative of f at 0."""
    return (f(h) - f(-h)) / (2 * h)
