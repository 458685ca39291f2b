"""Our modules' arrays in the words of the oracles: which equation a registered name is held to.

What a placement's source says of the branch (inner norms, head gains, …) is written out here once more, so
that a placement of ours that forgets it is found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from normlab.lab.config import ModelConfig
from oracles import branches, embeddings, norms, placements
from oracles.comparing import STEPS
from oracles.names import (
    ACTIVATIONS,
    BIASES,
    CHOICES,
    GATES,
    HEAD_GAINS,
    INNER_NORMS,
    NORM_KEYS,
    NORMED_SIDES,
    NORMS,
    QK_NORMS,
)

Array = np.ndarray
Bundle = dict[str, Array]


@dataclass(frozen=True)
class Place:
    """The oracle of one of our placements, and where its arrays are."""

    oracle: str
    keys: Mapping[str, str] = field(default_factory=dict)
    """Our parameter to the oracle's."""
    norms: tuple[tuple[str, str], ...] = (("norm", "norm"),)
    """Our norms and the oracle's, those that there are."""
    end: str = ""
    """Path of the final norm below the stack."""
    ends: Mapping[str, str] = field(default_factory=dict)
    """Paths of final norms where there are several, by the oracle's names."""
    begin: str = ""
    by_layer: bool = False
    """Whether the sublayers of a layer share their parameters."""
    branch: Mapping[str, str] = field(default_factory=dict)
    """The source's choices inside the branch."""


IN_AND_OUT = (("norm_in", "norm_in"), ("norm_out", "norm_out"))
PLACEMENTS = {
    "post": Place("post"),
    "pre": Place("pre", end="end"),
    "sandwich": Place("sandwich", norms=IN_AND_OUT, end="end"),
    "periln": Place("periln", norms=IN_AND_OUT, begin="begin", end="end"),
    "olmo2": Place("olmo2", end="end", branch={"qk_norm": "normed"}),
    "subln": Place("subln", end="end", branch={"inner_norm": "innernorm"}),
    "normformer": Place(
        "normformer",
        norms=(("norm", "norm"), ("norm_out", "norm_out")),
        end="end",
        branch={"inner_norm": "ffn_innernorm", "head_gain": "headgain"},
    ),
    "mixln": Place("mixln", norms=(("place.norm", "norm"),), end="end"),
    "lnscale": Place("lnscale", end="end"),
    "keel": Place("keel", norms=IN_AND_OUT),
    "b2t": Place("b2t"),
    "b2t_code": Place("b2t"),
    "residual": Place("residual", end="end.norm"),
    "admin": Place("admin", {"omega": "omega"}),
    "admin_code": Place("admin", {"omega": "omega"}),
    "admin_free": Place("admin", {"omega": "omega"}),
    "admin_rescaled": Place("post"),
    "deepnorm": Place("deepnorm"),
    "rezero": Place("rezero", {"alpha": "alpha"}, norms=(), by_layer=True),
    "rezero_post": Place("rezero_post", {"alpha": "alpha"}, by_layer=True),
    "skipinit": Place("skipinit", {"alpha": "a"}, norms=()),
    "fixup": Place("fixup", {"alpha": "s"}, norms=(), branch={"bias": "scalarbias"}),
    "tfixup": Place("tfixup", norms=()),
    "layerscale": Place("layerscale", {"lam": "lam"}, end="end"),
    "gpas": Place("gpas", {"a": "a"}, end="end", by_layer=True),
    "prores": Place("prores", end="end"),
    "ngpt": Place("ngpt", {"alpha": "alpha_n"}, norms=()),
    "hybridnorm": Place("hybridnorm", end="end", branch={"qk_norm": "qkvnormed"}),
    "siamese": Place(
        "siamese",
        norms=(("norm_x", "norm_x"), ("norm_y", "norm_y"), ("norm_in", "norm_in")),
        ends={"norm_x": "end.norm_x", "norm_y": "end.norm_y"},
    ),
    "x0lambdas": Place("x0lambdas", {"r": "r", "mu": "mu"}, end="end.norm", by_layer=True),
}


# ------------------------------------------------------------------------------------------- the arrays


@dataclass(frozen=True)
class Weights:
    """The arrays below one path."""

    arrays: Mapping[str, Array]
    path: str = ""

    def at(self, name: str) -> Weights:
        return Weights(self.arrays, f"{self.path}{name}." if name else self.path)

    def __getitem__(self, name: str) -> Array:
        return self.arrays[self.path + name]


def norm_bundle(w: Weights, norm: str) -> Bundle:
    """The parameters of the oracle's norm, from our arrays."""
    return {theirs: w[ours] for ours, theirs in NORM_KEYS[norm].items()}


def inside(prefix: str, bundle: Bundle) -> Bundle:
    return {f"{prefix}.{key}": value for key, value in bundle.items()}


@dataclass(frozen=True)
class Choices:
    """One stack's branches: the model's choices, and the placement's where it leaves them open."""

    config: ModelConfig
    placement: str

    def __getitem__(self, option: str) -> str:
        own = PLACEMENTS[self.placement].branch if self.placement else {}
        return getattr(self.config, option) or {**CHOICES, **own}[option]

    @property
    def norm(self) -> str:
        return NORMS[self.config.norm]

    def linear(self, w: Weights, names: str, n_out: list[int]) -> Bundle:
        """One packed projection as the oracle's matrices, one letter or word each."""
        bundle: Bundle = {}
        kind, vector = BIASES[self["bias"]]
        ends = np.cumsum(n_out)
        for i, (name, end, n) in enumerate(zip(names.split(), ends, n_out, strict=True)):
            bundle["W_" + name] = w["weight"][end - n : end]
            if vector:
                bundle["b_" + name] = w["bias"][end - n : end]
            if kind == "scalar":
                bundle |= {"pre_" + name: w["before"][[i]], "post_" + name: w["after"][[i]]}
        assert ends[-1] == len(w["weight"])
        return bundle


def attention_bundle(w: Weights, choices: Choices, role: str) -> Bundle:
    """The parameters of one of our attentions."""
    config, norm, d = choices.config, choices.norm, choices.config.dim
    width = config.head_dim or d // config.heads
    queries, keys = width * config.heads, width * (config.kv_heads or config.heads)
    gate = {"none": [], "headwise": [config.heads], "elementwise": [queries]}[GATES[config.attention_gate]]
    g = " g" if gate else ""
    if role == "cross_attention":
        p = choices.linear(w.at("q"), "q" + g, [queries, *gate])
        p |= choices.linear(w.at("kv"), "k v", [keys, keys])
    else:
        p = choices.linear(w.at("qkv"), "q k v" + g, [queries, keys, keys, *gate])
    p |= choices.linear(w.at("out"), "o", [d])
    if QK_NORMS[choices["qk_norm"]] == "cosine":
        p["g_qk"] = w["qk_norm.g"]
    if QK_NORMS[choices["qk_norm"]] == "unit_after_rope":
        p["s_qk"] = w["qk_norm.s"] * np.sqrt(d)
    for side in NORMED_SIDES.get(QK_NORMS[choices["qk_norm"]], ""):
        ours = {"q": "query", "k": "key", "v": "value"}[side]
        p |= inside(f"{side}_norm", norm_bundle(w.at(f"qk_norm.{ours}"), norm))
    if HEAD_GAINS[choices["head_gain"]]:
        p["gamma_h"] = w["head_gain.gain"]
    if role in INNER_NORMS[choices["inner_norm"]]:
        p |= inside("inner_norm", norm_bundle(w.at("inner_norm"), norm))
    return p


def feed_forward_bundle(w: Weights, choices: Choices) -> Bundle:
    """The parameters of one of our feed-forwards."""
    config = choices.config
    names = "in gate" if config.activation in branches.GATED else "in"
    p = choices.linear(w.at("inner"), names, [config.ffn_dim] * len(names.split()))
    p |= choices.linear(w.at("outer"), "out", [config.dim])
    if config.activation == "ngptswiglu":
        p["s_uv"] = w["activation.s"]
    if "ffn" in INNER_NORMS[choices["inner_norm"]]:
        p |= inside("inner_norm", norm_bundle(w.at("inner_norm"), choices.norm))
    return p


def bundle(w: Weights, choices: Choices, role: str) -> Bundle:
    """The parameters of one of our branches."""
    return feed_forward_bundle(w, choices) if role == "ffn" else attention_bundle(w, choices, role)


def attention(
    w: Weights, choices: Choices, role: str, first: dict[str, Array] | None = None
) -> Callable[[Array, Array | None], Array]:
    """f(x, memory) of one of our attentions; ``first`` keeps the values of the stack's first one."""
    config, p = choices.config, attention_bundle(w, choices, role)
    options = branches.AttentionOptions(
        heads=config.heads,
        kv_heads=config.kv_heads or config.heads,
        causal=role == "causal_attention",
        qk_norm=QK_NORMS[choices["qk_norm"]],
        rope=config.position_encoding == "rope",
        head_gain=HEAD_GAINS[choices["head_gain"]],
        inner_norm=role in INNER_NORMS[choices["inner_norm"]],
        bias=BIASES[choices["bias"]][0],
        norm=norms.NORMS[choices.norm],
        gate=GATES[config.attention_gate],
        theta=config.rope_theta,
    )
    reads, kept = role == "cross_attention", {} if first is None else first

    def f(x: Array, memory: Array | None) -> Array:
        values = None
        if config.value_residual == "valueresidual" and not reads:
            own = branches.linear(x, "v", p, options.bias)
            kept.setdefault("v", own)
            values = (kept["v"] + own) / 2
        return branches.attention(x, memory if reads else None, p, options, values)

    return f


def feed_forward(w: Weights, choices: Choices) -> Callable[[Array, Array | None], Array]:
    """f(x, memory), which does not look at the memory."""
    config, p = choices.config, feed_forward_bundle(w, choices)
    options = branches.FeedForwardOptions(
        activation=ACTIVATIONS[config.activation],
        inner_norm="ffn" in INNER_NORMS[choices["inner_norm"]],
        bias=BIASES[choices["bias"]][0],
        norm=norms.NORMS[choices.norm],
    )
    return lambda x, memory: branches.feed_forward(x, p, options)


# ------------------------------------------------------------------------------------ stacks and models


def roles_of(name: str, config: ModelConfig) -> tuple[str, ...]:
    """The roles of the sublayers of one layer."""
    if name == "encoder":
        return "self_attention", "ffn"
    return (
        ("causal_attention", "cross_attention", "ffn")
        if config.encoder_layers
        else ("causal_attention", "ffn")
    )


@dataclass(frozen=True)
class StackOracle:
    """One of our stacks, by its arrays; ``memory`` is what its cross-attentions read."""

    w: Weights
    name: str
    config: ModelConfig
    memory: Array | None = None

    @property
    def placement(self) -> str:
        return self.config.encoder_placement if self.name == "encoder" else self.config.decoder_placement

    @property
    def layers(self) -> int:
        return self.config.encoder_layers if self.name == "encoder" else self.config.decoder_layers

    def branch(
        self, role: str, index: int, first: dict[str, Array] | None = None
    ) -> Callable[[Array, Array | None], Array]:
        """f(x, memory) of a sublayer."""
        w, choices = self.w.at(f"sublayers.{index}.f"), Choices(self.config, self.placement)
        return feed_forward(w, choices) if role == "ffn" else attention(w, choices, role, first)

    def bundles(self, role: str, index: int, first_of_layer: int) -> dict[str, Bundle | Array]:
        """The placement's parameters of a sublayer."""
        place, norm = PLACEMENTS[self.placement], NORMS[self.config.norm]
        w = self.w.at(f"sublayers.{index}.place")
        owner = self.w.at(f"sublayers.{first_of_layer}.place") if place.by_layer else w
        p: dict[str, Bundle | Array] = {theirs: owner[ours] for ours, theirs in place.keys.items()}
        roles = roles_of(self.name, self.config)
        before_ffn = roles[(index + 1) % len(roles)] == "ffn"
        for ours, theirs in place.norms:
            there = {"normformer": ours == "norm" or role.endswith("attention"), "hybridnorm": before_ffn}
            if there.get(place.oracle, True):
                p[theirs] = norm_bundle(w.at(ours), norm)
        return p

    def sublayers(self) -> list[placements.Sublayer]:
        roles, found, first = roles_of(self.name, self.config), [], {}
        for layer in range(self.layers):
            for i, role in enumerate(roles):
                index = layer * len(roles) + i
                f, p = self.branch(role, index, first), self.bundles(role, index, layer * len(roles))
                found.append(placements.Sublayer(partial(f, memory=self.memory), role, layer, p))
        return found

    def info(self) -> placements.StackInfo:
        place, norm = PLACEMENTS[self.placement], NORMS[self.config.norm]
        final = norms.FINAL[norm]
        return placements.StackInfo(
            self.name,
            self.config.encoder_layers,
            self.config.decoder_layers,
            norms.NORMS[norm],
            {"norm": norm_bundle(self.w.at(place.begin), norm)} if place.begin else {},
            {
                name: norm_bundle(self.w.at(path), final)
                for name, path in ({"norm": place.end} if place.end else place.ends).items()
            },
            norms.NORMS[final],
            STEPS,
            self.config.residual_warmup_steps,
        )

    def __call__(self, x: Array) -> Array:
        return placements.run_stack(PLACEMENTS[self.placement].oracle, x, self.sublayers(), self.info())


def plain_embedding(w: Weights, ids: Array) -> Array:
    return embeddings.plain_embed(ids, w["embedding.weight"])


EMBEDDING_SCALES = {"embedscale": lambda dim: 1.0, "noembedscale": lambda dim: dim**-0.5}
"""On embeddings that are scaled by the root of the width."""
LOGITS: dict[str, Callable[[Array, ModelConfig], Array]] = {
    "rawlogits": lambda z, config: z,
    "softcap": lambda z, config: embeddings.soft_capped(z, config.logit_cap),
}


EMBEDDINGS: dict[str, tuple[Callable[[Weights, Array], Array], Callable[[Weights, Array], Array]]] = {
    "plain": (plain_embedding, lambda w, x: embeddings.plain_logits(x, w["embedding.weight"])),
    "untied": (plain_embedding, lambda w, x: embeddings.plain_logits(x, w["embedding.output"])),
    "fixnorm": (
        lambda w, ids: embeddings.fixnorm_embed(ids, w["embedding.weight"]),
        lambda w, x: embeddings.fixnorm_logits(x, w["embedding.weight"]),
    ),
}
"""Ids to vectors, and vectors to logits."""

POSITIONS: dict[str, Callable[[Weights, int, int], Array]] = {
    "sinusoidal": lambda w, length, dim: embeddings.sinusoids(length, dim),
    "learned": lambda w, length, dim: embeddings.learned_positions(length, w["position_encoding.weight"]),
    "rope": lambda w, length, dim: np.zeros((length, dim)),
}
"""The table that is added to the embeddings."""


def embed(w: Weights, config: ModelConfig, ids: list[int]) -> Array:
    vectors = EMBEDDINGS[config.embedding][0](w, np.array(ids))
    vectors = vectors * EMBEDDING_SCALES[config.embedding_scale](config.dim)
    return embeddings.embed_with_positions(
        vectors, POSITIONS[config.position_encoding](w, len(ids), config.dim)
    )


def logits(w: Weights, config: ModelConfig, hidden: Array) -> Array:
    if config.logit_map == "logitscale":
        return EMBEDDINGS[config.embedding][1](w, hidden) * w["logit_map.s"] * np.sqrt(config.dim)
    return LOGITS[config.logit_map](EMBEDDINGS[config.embedding][1](w, hidden), config)


def seq2seq_logits(w: Weights, config: ModelConfig, source: list[int], target: list[int]) -> Array:
    """`[T, V]` of one sentence without padding."""
    memory = StackOracle(w.at("encoder"), "encoder", config)(embed(w, config, source))
    hidden = StackOracle(w.at("decoder"), "decoder", config, memory)(embed(w, config, target))
    return logits(w, config, hidden)


def decoder_logits(w: Weights, config: ModelConfig, ids: list[int]) -> Array:
    """`[T, V]` of a language model on one sentence without padding."""
    hidden = StackOracle(w.at("decoder"), "decoder", config)(embed(w, config, ids))
    return logits(w, config, hidden)
