"""Which equation of the oracles a registered name of ours is held to."""

from __future__ import annotations

from functools import partial

from oracles import branches, initial, norms

RENAMED = {
    "fixedscalenorm": "scalenorm_fixed",
    "rmsnorm1p": "rmsnorm_zero_centred",
    "rmsnorm_nogain": "rmsnorm_gain_free",
}
NORMS = {name: name for name in norms.NORMS if name not in RENAMED.values()} | RENAMED
NORM_KEYS: dict[str, dict[str, str]] = {
    "layernorm": {"weight": "gamma", "bias": "beta"},
    "rmsnorm": {"weight": "g"},
    "rmsnorm_zero_centred": {"offset": "w"},
    "rmsnorm_gain_free": {},
    "scalenorm": {"g": "g"},
    "scalenorm_fixed": {},
    "dyt": {"weight": "gamma", "bias": "beta", "alpha": "alpha"},
    "derf": {"weight": "gamma", "bias": "beta", "alpha": "alpha", "shift": "s"},
}
"""The oracle's norm: our key to its key."""

QK_NORMS = {
    "scaled": "none",
    "qknorm": "cosine",
    "normed": "norm",
    "headnormed": "norm_per_head",
    "qkvnormed": "qkv_norm_per_head",
    "ropenormed": "gain_free_after_rope",
    "ngptnormed": "unit_after_rope",
}
NORMED_SIDES = {"norm": "qk", "norm_per_head": "qk", "qkv_norm_per_head": "qkv"}
"""Sides of an attention that have a norm of the model's kind; ours are called query, key and value."""
GATES = {"ungated": "none", "headgate": "headwise", "elementgate": "elementwise"}
BIASES = {"bias": ("vector", True), "nobias": ("vector", False), "scalarbias": ("scalar", False)}
"""The oracle's name, and whether there is a vector."""
INNER_NORMS = {
    "noinnernorm": (),
    "innernorm": ("self_attention", "causal_attention", "ffn"),
    "ffn_innernorm": ("ffn",),
}
"""The roles whose branches have one."""
HEAD_GAINS = {"noheadgain": False, "headgain": True}
ACTIVATIONS = {name: name for name in branches.ACTIVATIONS}
SCHEMES = {
    name: partial(initial.scheme_std, name)
    for name in (
        *("xavier", "xavier_uniform", "smallinit", "looklinear", "uniformattention"),
        *initial.LANGUAGE_MODEL_STARTS,
    )
}
"""Standard deviation of (matrix, n_out, n_in)."""

CHOICES = {"qk_norm": "scaled", "bias": "bias", "inner_norm": "noinnernorm", "head_gain": "noheadgain"}
