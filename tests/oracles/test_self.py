"""Property checks of the oracles against closed forms and against each other."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from scipy.special import softmax
from scipy.stats import norm as gaussian

from cases import each, pairwise
from oracles.branches import AttentionOptions, FeedForwardOptions, attention, feed_forward, gelu, rotate
from oracles.derivative import central_difference, derivative
from oracles.embeddings import fixnorm_embed, fixnorm_logits, plain_embed, sinusoids
from oracles.initial import (
    MATRICES,
    admin_code,
    admin_data_free,
    admin_paper,
    embedding_gain,
    gain,
    looklinear_is_mirrored,
    scheme_std,
)
from oracles.norms import FINAL, NORMS, STARTS, layernorm, scalenorm
from oracles.placements import PLACEMENTS, StackInfo, Sublayer, mixln_post_layers, run_stack

Bundle = dict[str, np.ndarray]
Branch = Callable[[np.ndarray], np.ndarray]

T, D, LAYERS = 5, 8, 4
RNG = np.random.default_rng(7)
X = RNG.normal(size=(T, D))
MEMORY = RNG.normal(size=(T + 2, D))
ENDS_WITH_NORM = (
    "pre",
    "sandwich",
    "periln",
    "olmo2",
    "subln",
    "normformer",
    "mixln",
    "lnscale",
    "layerscale",
    "x0lambdas",
    "gpas",
    "prores",
    "hybridnorm",
    "siamese",
)


def attention_weights(
    heads: int = 4, kv_heads: int = 4, biased: tuple[str, ...] = ("q", "k", "v", "o")
) -> Bundle:
    """Weights of one attention, with vector biases for the named matrices."""
    width = D // heads
    sizes = {"q": (heads * width, D), "k": (kv_heads * width, D), "v": (kv_heads * width, D), "o": (D, D)}
    p = {"W_" + name: RNG.normal(size=size) for name, size in sizes.items()}
    p |= {"b_" + name: RNG.normal(size=sizes[name][0]) for name in biased}
    return p


def feed_forward_weights(hidden: int = 12) -> Bundle:
    """Weights and vector biases of one feed-forward, its gate included."""
    p = {"W_in": RNG.normal(size=(hidden, D)), "b_in": RNG.normal(size=hidden)}
    p |= {"W_gate": RNG.normal(size=(hidden, D)), "b_gate": RNG.normal(size=hidden)}
    return p | {"W_out": RNG.normal(size=(D, hidden)), "b_out": RNG.normal(size=D)}


def jittered(name: str, dim: int) -> Bundle:
    """A norm's start with noise on it."""
    return {key: value + 0.1 * RNG.normal(size=value.shape) for key, value in STARTS[name](dim).items()}


def stack_of(
    norm_name: str, f: Branch | None = None, layers: int = LAYERS, name: str = "encoder"
) -> tuple[list[Sublayer], StackInfo]:
    """Sublayers with every bundle that any method reads, at values other than the start."""
    subs = []
    for i in range(2 * layers):
        p = {key: jittered(norm_name, D) for key in ("norm", "norm_in", "norm_out", "norm_x", "norm_y")}
        p |= {"omega": 1 + RNG.random(D), "lam": RNG.random(D), "alpha_n": RNG.normal(size=D)}
        p |= {key: np.array([0.3 + RNG.random()]) for key in ("alpha", "s", "a", "r", "mu")}
        weight = RNG.normal(size=(D, D)) / 3
        branch = f or (lambda x, weight=weight: np.tanh(x @ weight.T))
        subs.append(Sublayer(branch, ("self_attention", "feed_forward")[i % 2], i // 2, p))
    depth = {"encoder": (layers, 0), "decoder": (0, layers)}[name]
    begin = {"norm": jittered(norm_name, D)}
    end = {key: jittered(FINAL[norm_name], D) for key in ("norm", "norm_x", "norm_y")}
    return subs, StackInfo(name, *depth, NORMS[norm_name], begin, end, NORMS[FINAL[norm_name]])


def test_norms_at_their_starts() -> None:
    """Each norm has its known initial scale; ScaleNorm clamps a short row."""
    y = NORMS["layernorm"](X, STARTS["layernorm"](D))
    assert np.allclose(y.mean(1), 0, atol=1e-12)
    assert np.allclose(y.var(1), 1, atol=1e-4)
    assert np.allclose(np.linalg.norm(NORMS["scalenorm"](X, STARTS["scalenorm"](D)), axis=1), np.sqrt(D))
    assert np.allclose(NORMS["scalenorm_fixed"](X, {}), NORMS["rmsnorm"](X, STARTS["rmsnorm"](D)), atol=1e-5)
    assert np.allclose(NORMS["dyt"](X, STARTS["dyt"](D)), np.tanh(X / 2))
    assert np.allclose(NORMS["derf"](X, STARTS["derf"](D)), 2 * gaussian.cdf(X / np.sqrt(2)) - 1)
    assert np.allclose(scalenorm(np.full((1, D), 1e-9), {"g": np.ones(1)}), 1e-4)


@pytest.mark.parametrize("memory", [None, MEMORY])
def test_attention_in_matrix_form(memory: np.ndarray | None) -> None:
    """The loops give softmax(Q K^T / sqrt(width)) V."""
    p = attention_weights()
    source = X if memory is None else memory
    q, k, v = (s @ p["W_" + n].T + p["b_" + n] for s, n in ((X, "q"), (source, "k"), (source, "v")))
    q, k, v = (a.reshape(len(a), 4, 2).transpose(1, 0, 2) for a in (q, k, v))
    weights = softmax(q @ k.transpose(0, 2, 1) / np.sqrt(2), axis=-1)
    expected = (weights @ v).transpose(1, 0, 2).reshape(T, D) @ p["W_o"].T + p["b_o"]
    assert np.allclose(attention(X, memory, p, AttentionOptions(heads=4)), expected, atol=1e-12)


def test_causal_rows_do_not_see_the_future() -> None:
    """A change from position 3 on leaves rows 0 to 2 alone."""
    p, options = attention_weights(), AttentionOptions(heads=4, causal=True, rope=True)
    changed = X.copy()
    changed[3:] += 1.0
    first, second = attention(X, None, p, options), attention(changed, None, p, options)
    assert np.allclose(first[:3], second[:3], atol=1e-13)
    assert not np.allclose(first[3:], second[3:])


def test_grouped_queries_are_repeated_key_value_heads() -> None:
    """Grouped queries equal full heads with keys and values repeated."""
    p = attention_weights(heads=4, kv_heads=2)
    full = dict(p)
    for key in ("W_k", "W_v", "b_k", "b_v"):
        pairs = p[key].reshape(2, 2, *p[key].shape[1:])
        full[key] = np.stack([pairs[0], pairs[0], pairs[1], pairs[1]]).reshape(-1, *p[key].shape[1:])
    grouped = attention(X, None, p, AttentionOptions(heads=4, kv_heads=2))
    assert np.allclose(grouped, attention(X, None, full, AttentionOptions(heads=4)), atol=1e-13)


def test_rotation_sees_only_the_distance() -> None:
    """Rotated scores depend on the distance of two positions; position 0 is not turned."""
    q, k = (np.repeat(RNG.normal(size=(1, 6)), 9, axis=0) for _ in range(2))
    scores = rotate(q) @ rotate(k).T
    assert np.isclose(scores[2, 5], scores[4, 7])
    assert not np.isclose(scores[2, 5], scores[2, 6])
    assert np.allclose(rotate(q)[0], q[0])
    assert np.allclose(np.linalg.norm(rotate(q), axis=1), np.linalg.norm(q[0]))


def test_qk_norms() -> None:
    """Both QK-norms undo a rescaling of W_q and W_k, and meet where there is one head."""
    p = attention_weights(biased=()) | {"g_qk": np.array([3.0])}
    cosine = AttentionOptions(heads=4, qk_norm="cosine")
    scaled = p | {"W_q": 5 * p["W_q"], "W_k": 0.2 * p["W_k"]}
    assert np.allclose(attention(X, None, p, cosine), attention(X, None, scaled, cosine), atol=1e-12)
    p |= {f"{side}_norm.g": np.array([2.0]) for side in "qk"}
    full = replace(cosine, qk_norm="norm", norm=scalenorm)
    scaled = p | {"W_q": 5 * p["W_q"], "W_k": 0.2 * p["W_k"]}
    assert np.allclose(attention(X, None, p, full), attention(X, None, scaled, full), atol=1e-12)
    one = replace(cosine, heads=1)
    assert np.allclose(
        attention(X, None, p | {"g_qk": np.array([4 / np.sqrt(D)])}, one),
        attention(X, None, p, replace(full, heads=1)),
        atol=1e-12,
    )


def test_head_gains_and_inner_norm_and_scalar_biases() -> None:
    """Head gains fold into W_o; scalar biases into vector biases."""
    p = attention_weights(biased=()) | {
        "gamma_h": np.array([1.0, 2.0, 0.0, -1.0]),
        "inner_norm.g": np.array([3.0]),
    }
    gains = np.repeat(p["gamma_h"], 2)
    folded = p | {"W_o": p["W_o"] * gains}
    expected = attention(X, None, folded, AttentionOptions(heads=4))
    assert np.allclose(attention(X, None, p, AttentionOptions(heads=4, head_gain=True)), expected, atol=1e-12)
    joined = attention(X, None, p | {"W_o": np.diag(gains)}, AttentionOptions(heads=4))
    both = AttentionOptions(heads=4, head_gain=True, inner_norm=True, norm=scalenorm)
    assert np.allclose(
        attention(X, None, p, both), scalenorm(joined, {"g": np.array([3.0])}) @ p["W_o"].T, atol=1e-12
    )
    scalars = {f"{side}_{name}": RNG.normal(size=1) for side in ("pre", "post") for name in "qkvo"}
    vectors = {"b_" + n: p["W_" + n].sum(1) * scalars["pre_" + n] + scalars["post_" + n] for n in "qkvo"}
    scalar = attention(X, MEMORY, p | scalars, AttentionOptions(heads=4, bias="scalar"))
    assert np.allclose(scalar, attention(X, MEMORY, p | vectors, AttentionOptions(heads=4)), atol=1e-12)


def test_feed_forward() -> None:
    """GELU and SwiGLU by other forms; a mirrored ReLU feed-forward is linear."""
    assert np.allclose(gelu(X), X * gaussian.cdf(X), atol=1e-14)
    p = feed_forward_weights()
    u, v = X @ p["W_gate"].T + p["b_gate"], X @ p["W_in"].T + p["b_in"]
    expected = (u / (1 + np.exp(-u)) * v) @ p["W_out"].T + p["b_out"]
    assert np.allclose(feed_forward(X, p, FeedForwardOptions("swiglu")), expected, atol=1e-12)
    w, v = RNG.normal(size=(6, D)), RNG.normal(size=(D, 6))
    mirrored = {"W_in": np.concatenate([w, -w]), "W_out": np.concatenate([v, -v], axis=1)}
    assert looklinear_is_mirrored(mirrored["W_in"], mirrored["W_out"])
    assert not looklinear_is_mirrored(mirrored["W_in"], np.concatenate([v, v], axis=1))
    assert np.allclose(feed_forward(X, mirrored, FeedForwardOptions("relu")), X @ w.T @ v.T, atol=1e-12)
    normed = FeedForwardOptions("relu", inner_norm=True, norm=scalenorm)
    once = feed_forward(X, p | {"inner_norm.g": np.array([1.0]), "b_out": np.zeros(D)}, normed)
    twice = feed_forward(X, p | {"inner_norm.g": np.array([2.0]), "b_out": np.zeros(D)}, normed)
    assert np.allclose(2 * once, twice, atol=1e-12)


@each("method", PLACEMENTS)
def test_every_stack_runs_and_uses_its_norm_at_the_end(method: str) -> None:
    """A changed end norm shows in the stacks that have one, and only there."""
    for norm_name in NORMS:
        subs, stack = stack_of(norm_name)
        y = run_stack(method, X, subs, stack)
        assert y.shape == X.shape
        assert np.isfinite(y).all(), norm_name
        end = {n: {key: 3 * value for key, value in p.items()} for n, p in stack.end.items()}
        changed = run_stack(method, X, subs, replace(stack, end=end))
        reads = method in (*ENDS_WITH_NORM, "residual") and bool(end["norm"])
        assert np.allclose(y, changed) != reads, norm_name


def test_streams_of_silent_branches() -> None:
    """If F = 0, the stream ends as its norm, or unchanged."""
    subs, stack = stack_of("layernorm", f=np.zeros_like)
    end = layernorm(X, stack.end["norm"])
    for method in ("pre", "olmo2", "subln", "lnscale", "layerscale"):
        shift = sum(sub.p["norm"]["beta"] for sub in subs) if method == "olmo2" else 0.0
        assert np.allclose(
            run_stack(method, X, subs, stack), layernorm(X + shift, stack.end["norm"]), atol=1e-12
        )
    for method in ("rezero", "fixup", "tfixup", "skipinit"):
        assert np.array_equal(run_stack(method, X, subs, stack), X)
    assert np.allclose(
        run_stack("residual", X, subs, stack) - run_stack("post", X, subs, stack), end, atol=1e-12
    )


def test_methods_that_meet_at_special_values() -> None:
    """Equations that coincide for some value of their parameters do so."""
    subs, stack = stack_of("layernorm")
    ones = [replace(s, p=s.p | {k: np.ones(1) for k in ("alpha", "s", "a", "omega", "lam")}) for s in subs]
    run = {method: run_stack(method, X, ones, stack) for method in PLACEMENTS}
    for first, second in (
        ("admin", "post"),
        ("rezero_post", "post"),
        ("layerscale", "pre"),
        ("subln", "pre"),
    ):
        assert np.allclose(run[first], run[second], atol=1e-13)
    for method in ("fixup", "rezero", "skipinit"):
        assert np.allclose(run[method], run["tfixup"], atol=1e-13)
    plain = [replace(s, p=s.p | {"r": np.ones(1), "mu": np.zeros(1)}) for s in subs]
    assert np.allclose(run_stack("x0lambdas", X, plain, stack), run["pre"], atol=1e-13)
    still = [replace(s, p=s.p | {"a": np.zeros(1)}) for s in subs]
    assert np.allclose(run_stack("gpas", X, still, stack), run["pre"], atol=1e-13)
    opened = replace(stack, steps=LAYERS * stack.warmup_steps)
    assert np.allclose(run_stack("prores", X, subs, opened), run["pre"], atol=1e-13)
    assert np.allclose(run["prores"], layernorm(X, stack.end["norm"]), atol=1e-13)
    alpha = (2 * LAYERS) ** 0.25
    omegas = [replace(s, p=s.p | {"omega": np.full(D, alpha)}) for s in subs]
    assert np.allclose(run_stack("admin", X, omegas, stack), run["deepnorm"], atol=1e-13)
    one_layer = [replace(s, layer=0) for s in subs]
    assert np.allclose(run_stack("lnscale", X, one_layer, stack), run["pre"], atol=1e-13)
    doubled = replace(subs[0], p=subs[0].p | {"omega": np.full(D, 2.0)})
    assert np.allclose(
        run_stack("b2t", X, [subs[0]], stack), run_stack("admin", X, [doubled], stack), atol=1e-13
    )
    assert [mixln_post_layers(layers) for layers in (1, 3, 4, 7, 8, 12)] == [1, 1, 1, 1, 2, 3]


def test_gains() -> None:
    """The gains of 6-6 and 12-layer models, by powers computed another way."""
    assert all(gain("post", "encoder", matrix, 6, 6) == 1.0 for matrix in MATRICES)
    assert np.isclose(gain("deepnorm", "encoder", "value", 6, 6), 0.87 / 7776 ** (1 / 16))
    assert np.isclose(gain("deepnorm", "decoder", "ffn_in", 6, 6) ** 4, 1 / 72)
    assert np.isclose(gain("deepnorm", "decoder", "output", 0, 12) ** 4, 1 / 96)
    assert gain("deepnorm", "encoder", "query", 6, 6) == 1.0
    assert np.isclose(gain("subln", "encoder", "value", 12, 0) ** 2, np.log(24))
    assert np.isclose(gain("fixup", "decoder", "ffn_in", 6, 6), 30**-0.5)
    assert np.isclose(gain("fixup", "decoder", "value", 0, 6), 12**-0.5)
    assert gain("fixup", "encoder", "output", 6, 6) == 0.0
    assert gain("fixup", "encoder", "key", 6, 6) == 1.0
    assert np.isclose(gain("tfixup", "encoder", "output", 6, 6), 0.67 * 6**-0.25)
    assert np.isclose(embedding_gain("tfixup", 6, 6), 54**-0.25)
    assert np.isclose(
        scheme_std("smallinit", "query", 512, 512) / scheme_std("xavier", "query", 512, 512), 0.4**0.5
    )
    assert np.isclose(
        scheme_std("xavier_uniform", "ffn_in", 2048, 512), scheme_std("xavier", "ffn_in", 2048, 512)
    )


def test_admin_profiles() -> None:
    """Omegas of constant or given branch outputs, by hand."""
    x0, outputs = [2 * X, MEMORY], [[X, MEMORY], [3 * X, MEMORY], [X, X]]
    variances = [np.var(np.concatenate([a, b])) for a, b in outputs]
    first = np.var(np.concatenate(x0))
    omegas = admin_paper(x0, outputs)
    assert np.allclose(omegas**2, [first, first + variances[0], first + variances[0] + variances[1]])
    coded = admin_code(x0, [lambda x, n: np.ones_like(x)] * 3, [lambda x: x] * 3)
    assert np.allclose(coded, [1, np.sqrt(first), np.sqrt(first * np.var(np.concatenate(x0)))])
    assert np.isclose(admin_data_free(12) ** 2, 13 / np.log(13) - 1)


def test_embeddings() -> None:
    """Lengths, scale invariance and one known angle."""
    table, ids = RNG.normal(size=(11, D)), np.array([3, 0, 3])
    assert np.allclose(plain_embed(ids, table) ** 2, D * table[ids] ** 2)
    assert np.allclose(np.linalg.norm(fixnorm_embed(ids, table), axis=1), np.sqrt(D))
    assert np.allclose(fixnorm_logits(X, 9 * table), fixnorm_logits(X, table), atol=1e-12)
    positions = sinusoids(T, D)
    assert np.allclose(positions[:, ::2] ** 2 + positions[:, 1::2] ** 2, 1)
    assert np.allclose(positions[3, 4:6], [np.sin(0.03), np.cos(0.03)])


def full_model(method: str, norm_name: str, activation: str) -> Callable[[complex], complex]:
    """A function of a real or complex move of the embedding, through real branches."""
    subs, stack = stack_of(norm_name, layers=2)
    attend = AttentionOptions(heads=4, causal=True, rope=True, qk_norm="cosine")
    attention_p, ffn_p = attention_weights() | {"g_qk": np.array([3.0])}, feed_forward_weights()
    branches = [
        lambda x: attention(x, None, attention_p, attend),
        lambda x: feed_forward(x, ffn_p, FeedForwardOptions(activation)) / 4,
    ]
    subs = [replace(sub, f=branches[i % 2]) for i, sub in enumerate(subs)]
    move, readout = RNG.normal(size=(T, D)), RNG.normal(size=(T, D))
    return lambda t: (readout * run_stack(method, X + t * move, subs, stack)).sum()


@pytest.mark.slow
@each(
    ("method", "norm_name", "activation"),
    pairwise(["post", "pre", "residual", "normformer"], NORMS, ["gelu", "swiglu"]),
)
def test_two_derivatives_agree(method: str, norm_name: str, activation: str) -> None:
    """The complex step through a whole stack against central differences."""
    f = full_model(method, norm_name, activation)
    exact, slow = derivative(f), central_difference(f)
    assert np.isclose(exact, slow, rtol=1e-7, atol=1e-8)


def test_derivative_of_layernorm_and_relu() -> None:
    """The complex step against Jacobians written by hand."""
    x, move = X[:1], MEMORY[:1]
    start = STARTS["layernorm"](D)
    gradient = [derivative(lambda t, i=i: layernorm(x + t * move, start)[0, i]) for i in range(D)]
    centred, sigma = x[0] - x[0].mean(), np.sqrt(x[0].var() + 1e-5)
    moved = move[0] - move[0].mean()
    expected = moved / sigma - centred * (centred @ moved) / (D * sigma**3)
    assert np.allclose(gradient, expected, rtol=1e-13, atol=1e-14)
    p = feed_forward_weights()
    kinked = derivative(lambda t: feed_forward(x + t * move, p, FeedForwardOptions("relu"))[0, 0])
    active = (x @ p["W_in"].T + p["b_in"] > 0)[0]
    assert np.isclose(kinked, p["W_out"][0] @ (active * (move @ p["W_in"].T)[0]), rtol=1e-13)
    with pytest.raises(TypeError, match="central_difference"):
        derivative(lambda t: 1.0)
