"""Oracles of the two branches, attention and feed-forward: slow and obvious forms of the published equations.

One sentence at a time: ``x`` is ``[T, D]``; a matrix W is ``[out, in]`` and is applied as ``x @ W.T + b``; a
missing bias key means no bias. Nothing casts to real, so that a complex step can be sent through.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.special import erf

Bundle = dict[str, np.ndarray]
Norm = Callable[[np.ndarray, Bundle], np.ndarray]

COSINE_CLAMP = 1e-12
AFTER_ROPE = ("gain_free_after_rope", "unit_after_rope")
QK_NORMS = ("none", "cosine", "norm", "norm_per_head", "qkv_norm_per_head", *AFTER_ROPE)
BIASES = ("vector", "scalar")
ACTIVATIONS = ("relu", "gelu", "swiglu", "gelu_tanh", "geglu", "relu2", "ngptswiglu")
GATED = ("swiglu", "geglu", "ngptswiglu")
GATES = ("none", "headwise", "elementwise")


@dataclass(frozen=True)
class AttentionOptions:
    """The options of an attention; `norm` is the model's norm, read by qk_norm="norm" and by inner_norm."""

    heads: int
    kv_heads: int | None = None
    causal: bool = False
    qk_norm: str = "none"
    rope: bool = False
    head_gain: bool = False
    inner_norm: bool = False
    bias: str = "vector"
    norm: Norm | None = None
    gate: str = "none"
    theta: float = 10000.0


@dataclass(frozen=True)
class FeedForwardOptions:
    """The options of a feed-forward; `norm` is the model's norm, read by inner_norm."""

    activation: str = "relu"
    inner_norm: bool = False
    bias: str = "vector"
    norm: Norm | None = None


def sub_bundle(p: Bundle, prefix: str) -> Bundle:
    """The entries "prefix.key" of p, under "key"."""
    return {key[len(prefix) + 1 :]: value for key, value in p.items() if key.startswith(prefix + ".")}


def linear(x: np.ndarray, name: str, p: Bundle, bias: str) -> np.ndarray:
    """x W^T + b; with scalar biases (x + pre) W^T + post.

    Zhang et al. 2019, rule 3 (arXiv 1901.09321) for the scalar biases.
    """
    if bias not in BIASES:
        raise ValueError(f"bias {bias!r} is not one of {BIASES}")
    weight = p["W_" + name]
    if bias == "scalar":
        return (x + p["pre_" + name][0]) @ weight.T + p["post_" + name][0]
    y = x @ weight.T
    if "b_" + name in p:
        y = y + p["b_" + name]
    return y


def named_norm(x: np.ndarray, prefix: str, p: Bundle, norm: Norm | None) -> np.ndarray:
    """The model's norm with the parameters under "prefix."."""
    if norm is None:
        raise ValueError(f"{prefix} needs options.norm, the model's norm as a function of (x, p)")
    return norm(x, sub_bundle(p, prefix))


def softmax(scores: np.ndarray) -> np.ndarray:
    """exp(s_j) / sum_k exp(s_k) of one row, shifted by the largest real part."""
    powers = np.exp(scores - np.max(np.real(scores)))
    return powers / powers.sum()


def rotate(head: np.ndarray, theta: float = 10000.0) -> np.ndarray:
    """Turn the pair (2i, 2i+1) of position t by the angle t / theta^(2i / width), positions from 0.

    Su et al. 2021 (arXiv 2104.09864).
    """
    positions, width = head.shape
    if width % 2:
        raise ValueError(f"the head width must be even to form pairs, not {width}")
    turned = head.copy()
    for t in range(positions):
        for i in range(width // 2):
            angle = t / theta ** (2 * i / width)
            first, second = head[t, 2 * i], head[t, 2 * i + 1]
            turned[t, 2 * i] = first * np.cos(angle) - second * np.sin(angle)
            turned[t, 2 * i + 1] = first * np.sin(angle) + second * np.cos(angle)
    return turned


def cosine_rows(head: np.ndarray) -> np.ndarray:
    """Each row divided by its length (clamped at 1e-12)."""
    rows = []
    for row in head:
        length = np.sqrt((row * row).sum())
        rows.append(row / (length if np.real(length) > COSINE_CLAMP else COSINE_CLAMP))
    return np.stack(rows)


def normed_head(head: np.ndarray, side: str, p: Bundle, options: AttentionOptions) -> np.ndarray:
    """A head's queries, keys or values under the norms that stand over each head.

    "norm_per_head": the model's norm with a gain of the head's width, for q and k (Qwen3, Gemma 3);
    "qkv_norm_per_head": for v as well (Zhuo et al. 2025, arXiv 2503.04598); "gain_free_after_rope": 1.2 times
    x / rms(x) for q and k (nanochat); "unit_after_rope": x / max(||x||, 1e-5) for q and k, then times
    s_qk, under a softmax of scale sqrt(width) (nGPT, Loshchilov et al. 2024, arXiv 2410.01131).
    """
    if options.qk_norm == "gain_free_after_rope" and side != "v":
        return np.stack([1.2 * row / np.sqrt((row * row).sum() / row.size + 1e-6) for row in head])
    if options.qk_norm == "unit_after_rope" and side != "v":
        lengths = [np.sqrt((row * row).sum()) for row in head]
        return np.stack(
            [row / (n if np.real(n) > 1e-5 else 1e-5) for row, n in zip(head, lengths, strict=True)]
        )
    normed = {"norm_per_head": "qk", "qkv_norm_per_head": "qkv"}.get(options.qk_norm, "")
    return named_norm(head, f"{side}_norm", p, options.norm) if side in normed else head


def turned_and_normed(
    head: np.ndarray, side: str, p: Bundle, options: AttentionOptions, *, turned: bool
) -> np.ndarray:
    """A head's queries or keys as they meet: nanochat and nGPT norm behind the rotation, others before it."""
    if options.qk_norm in AFTER_ROPE:
        return normed_head(rotate(head, options.theta) if turned else head, side, p, options)
    normed = normed_head(head, side, p, options)
    return rotate(normed, options.theta) if turned else normed


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)); toys stay far from overflow."""
    return 1.0 / (1.0 + np.exp(-x))


def one_head(q: np.ndarray, k: np.ndarray, v: np.ndarray, visible: Callable[[int], int]) -> np.ndarray:
    """Row t is sum_j softmax_j(q_t . k_j) v_j over the first visible(t) keys; q carries the scale."""
    rows = []
    for t in range(q.shape[0]):
        seen = visible(t)
        scores = np.array([(q[t] * k[j]).sum() for j in range(seen)])
        weights = softmax(scores)
        rows.append(sum(weights[j] * v[j] for j in range(seen)))
    return np.stack(rows)


def _queries_and_keys(
    x: np.ndarray, source: np.ndarray, p: Bundle, options: AttentionOptions
) -> tuple[np.ndarray, np.ndarray]:
    """The projected queries and keys over their full width, after OLMo-2's norm where it is asked for.

    OLMo et al. 2025 (arXiv 2501.00656).
    """
    queries = linear(x, "q", p, options.bias)
    keys = linear(source, "k", p, options.bias)
    if options.qk_norm == "norm":
        queries = named_norm(queries, "q_norm", p, options.norm)
        keys = named_norm(keys, "k_norm", p, options.norm)
    return queries, keys


def attention(
    x: np.ndarray,
    memory: np.ndarray | None,
    p: Bundle,
    options: AttentionOptions,
    values: np.ndarray | None = None,
) -> np.ndarray:
    """concat_h( gamma_h softmax(s q_h k_h^T) v_h ) W_o^T + b_o, with s = 1/sqrt(width) or, over cosines, g.

    memory None is self-attention; `causal` and `rope` concern self-attention only. Query head h reads the
    key-value head h // (heads / kv_heads). Order: projection, QK-norm, rotation, scale, softmax, head gains,
    gates, inner norm, W_o; the QK-norms of nanochat and nGPT follow the rotation. `values` replaces W_v's
    output. A gate is sigma(W_g x), one for a head ("headwise") or for each of its elements ("elementwise"):
    Qiu et al. 2025 (arXiv 2505.06708).

    Vaswani et al. 2017 (arXiv 1706.03762); Ainslie et al. 2023 (arXiv 2305.13245) for grouped queries; Henry
    et al. 2020 (arXiv 2010.04245) for cosines; Shleifer et al. 2021 (arXiv 2110.09456) for head gains; Wang
    et al. 2022 (arXiv 2210.06423) for the inner norm.
    """
    if options.qk_norm not in QK_NORMS:
        raise ValueError(f"qk_norm {options.qk_norm!r} is not one of {QK_NORMS}")
    source = x if memory is None else memory
    kv_heads = options.heads if options.kv_heads is None else options.kv_heads
    group = options.heads // kv_heads
    queries, keys = _queries_and_keys(x, source, p, options)
    values = linear(source, "v", p, options.bias) if values is None else values
    gates = sigmoid(linear(x, "g", p, options.bias)) if options.gate != "none" else None
    width = queries.shape[1] // options.heads
    masked = options.causal and memory is None

    outputs = []
    for h in range(options.heads):
        j = h // group
        q = queries[:, h * width : (h + 1) * width]
        k = keys[:, j * width : (j + 1) * width]
        v = values[:, j * width : (j + 1) * width]
        scale = 1.0 / np.sqrt(width)
        if options.qk_norm == "unit_after_rope":
            scale = np.sqrt(width)
        if options.qk_norm == "cosine":
            q, k, scale = cosine_rows(q), cosine_rows(k), p["g_qk"][0]
        turned = options.rope and memory is None
        q, k = (turned_and_normed(a, s, p, options, turned=turned) for a, s in ((q, "q"), (k, "k")))
        v = normed_head(v, "v", p, options)
        if options.qk_norm == "unit_after_rope":
            first = j * group
            q = p["s_qk"][h * width : (h + 1) * width] * q
            k = p["s_qk"][first * width : (first + 1) * width] * k
        y = one_head(scale * q, k, v, (lambda t: t + 1) if masked else (lambda t: source.shape[0]))
        if options.head_gain:
            y = p["gamma_h"][h] * y
        columns = {"headwise": 1, "elementwise": width}.get(options.gate, 0)
        if gates is not None:
            y = gates[:, h * columns : (h + 1) * columns] * y
        outputs.append(y)

    joined = np.concatenate(outputs, axis=1)
    if options.inner_norm:
        joined = named_norm(joined, "inner_norm", p, options.norm)
    return linear(joined, "o", p, options.bias)


def relu(x: np.ndarray) -> np.ndarray:
    """max(x, 0), by the sign of the real part."""
    return np.where(np.real(x) > 0, x, 0.0)


def gelu(x: np.ndarray) -> np.ndarray:
    """x Phi(x) = x (1 + erf(x / sqrt 2)) / 2.

    Hendrycks and Gimpel 2016 (arXiv 1606.08415).
    """
    return x * (1.0 + erf(x / np.sqrt(2.0))) / 2.0


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    """x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))). Hendrycks and Gimpel 2016 (arXiv 1606.08415)."""
    return x * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3))) / 2.0


def silu(x: np.ndarray) -> np.ndarray:
    """x / (1 + exp(-x)), with the exponential taken of the side that cannot overflow."""
    positive = np.real(x) >= 0
    small = np.exp(np.where(positive, -x, x))
    return x * np.where(positive, 1.0, small) / (1.0 + small)


def feed_forward(x: np.ndarray, p: Bundle, options: FeedForwardOptions) -> np.ndarray:
    """W_out phi(W_in x + b_in) + b_out; SwiGLU: W_out (silu(W_gate x + b_gate) * (W_in x + b_in)) + b_out.

    GeGLU has GELU's tanh form in place of silu, ReLU squared is max(x, 0)^2.

    An inner norm stands between the activation and W_out.

    Vaswani et al. 2017 (arXiv 1706.03762); Shazeer 2020 (arXiv 2002.05202) for SwiGLU.
    """
    if options.activation not in ACTIVATIONS:
        raise ValueError(f"activation {options.activation!r} is not one of {ACTIVATIONS}")
    hidden = linear(x, "in", p, options.bias)
    if options.activation == "relu":
        hidden = relu(hidden)
    elif options.activation == "gelu":
        hidden = gelu(hidden)
    elif options.activation == "gelu_tanh":
        hidden = gelu_tanh(hidden)
    elif options.activation == "relu2":
        hidden = relu(hidden) ** 2
    elif options.activation == "ngptswiglu":
        u, v = np.split(p["s_uv"] * np.sqrt(x.shape[1]), 2)
        hidden = (u * hidden) * silu(v * linear(x, "gate", p, options.bias))
    elif options.activation == "geglu":
        hidden = gelu_tanh(linear(x, "gate", p, options.bias)) * hidden
    else:
        hidden = silu(linear(x, "gate", p, options.bias)) * hidden
    if options.inner_norm:
        hidden = named_norm(hidden, "inner_norm", p, options.norm)
    return linear(hidden, "out", p, options.bias)
