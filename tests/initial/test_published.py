"""The published constants as numbers, worked out by hand from the papers' formulas for 6 and 18 layers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cases import each
from normlab.nn import Placement, Site
from oracles import initial, placements

SCALED = ("value", "output", "ffn_in", "ffn_gate", "ffn_out")
PUBLISHED = {
    # Wang et al. 2022, Figure 2 (arXiv 2203.00555): 0.87 (N^4 M)^(-1/16), (12M)^(-1/4), (8L)^(-1/4)
    ("deepnorm", "encoder", 6, 6): 0.496989,
    ("deepnorm", "decoder", 6, 6): 0.343295,
    ("deepnorm", "encoder", 18, 18): 0.352571,
    ("deepnorm", "decoder", 18, 18): 0.260847,
    ("deepnorm", "encoder", 6, 0): 0.379918,
    ("deepnorm", "decoder", 0, 6): 0.379918,
    ("deepnorm", "encoder", 18, 0): 0.288675,
    ("deepnorm", "decoder", 0, 18): 0.288675,
    # Wang et al. 2022, Section 3 (arXiv 2210.06423): sqrt(ln 3M ln 2N / 3), sqrt(ln 3M), sqrt(ln 2L)
    ("subln", "encoder", 6, 6): 1.547288,
    ("subln", "decoder", 6, 6): 1.700109,
    ("subln", "encoder", 18, 18): 2.182857,
    ("subln", "decoder", 18, 18): 1.997244,
    ("subln", "encoder", 6, 0): 1.576359,
    ("subln", "decoder", 0, 6): 1.576359,
    ("subln", "encoder", 18, 0): 1.893018,
    ("subln", "decoder", 0, 18): 1.893018,
    # Huang et al. 2020, Section 3.2 (ICML 2020): 0.67 N^(-1/4), (9M)^(-1/4)
    ("tfixup", "encoder", 6, 6): 0.428092,
    ("tfixup", "decoder", 6, 6): 0.368894,
    ("tfixup", "encoder", 18, 18): 0.325279,
    ("tfixup", "decoder", 18, 18): 0.280299,
    ("tfixup", "encoder", 6, 0): 0.428092,
    ("tfixup", "decoder", 0, 18): 0.280299,
}
"""The factor on value, output and feed-forward matrices."""

QUERY_AND_KEY = {"deepnorm": 1.0, "subln": 1.0, "tfixup": 0.707107}
"""The factor on the matrices inside the softmax; T-Fixup's is that of its released code."""

ALPHA = {
    ("encoder", 6, 6): 1.417938,
    ("decoder", 6, 6): 2.059767,
    ("encoder", 18, 18): 1.998746,
    ("decoder", 18, 18): 2.710806,
    ("encoder", 6, 0): 1.861210,
    ("decoder", 0, 6): 1.861210,
    ("encoder", 18, 0): 2.449490,
    ("decoder", 0, 18): 2.449490,
}
"""DeepNorm's 0.81 (N^4 M)^(1/16), (3M)^(1/4), (2L)^(1/4). Wang et al. 2022, Figure 2 (arXiv 2203.00555)."""

EMBEDDINGS = {(6, 6): 0.368894, (18, 18): 0.280299, (12, 2): 0.310202, (6, 0): 0.428092, (0, 18): 0.280299}
"""T-Fixup's factor on the embeddings, by the encoder's depth. Huang et al. 2020, Section 3.2 (ICML 2020), and
the released code.
"""

FIXUP = {(6, 6): 0.182574, (18, 18): 0.105409}
"""K^(-1/2) for the 30 and 90 branches of 6-6 and 18-18. Zhang et al. 2019, Section 3 (arXiv 1901.09321)."""

OMEGA = {
    ("encoder", 6, 6): 2.017009,
    ("decoder", 6, 6): 2.335132,
    ("encoder", 18, 18): 3.040839,
    ("decoder", 18, 18): 3.567189,
}
"""Admin's data-free sqrt((S+1)/ln(S+1) - 1), for 12, 18, 36 and 54 sublayers."""


def site(stack: str, encoder_layers: int, decoder_layers: int) -> Site:
    roles = ("self_attention", "ffn")
    if stack == "decoder":
        roles = (
            ("causal_attention", "cross_attention", "ffn") if encoder_layers else ("causal_attention", "ffn")
        )
    return Site(stack, roles[0], 0, 0, 8, encoder_layers, decoder_layers, roles=roles)


def published(number: float) -> object:
    return pytest.approx(number, abs=6e-7)


@each(("method", "stack", "n", "m"), PUBLISHED)
def test_gains(method, stack, n, m):
    number, placement = PUBLISHED[method, stack, n, m], Placement.registry[method]
    for matrix in SCALED:
        assert placement.gain(site(stack, n, m), matrix) == published(number)
        assert initial.gain(method, stack, matrix, n, m) == published(number)
    for matrix in ("query", "key"):
        assert placement.gain(site(stack, n, m), matrix) == published(QUERY_AND_KEY[method])
        assert initial.gain(method, stack, matrix, n, m) == published(QUERY_AND_KEY[method])


def test_cross_attention_has_no_gain_of_subln():
    cross = replace(site("decoder", 6, 6), role="cross_attention")
    for matrix in ("query", "key", "value", "output"):
        assert Placement.registry["subln"].gain(cross, matrix) == 1.0
        assert initial.gain("subln", "decoder", matrix, 6, 6, "cross_attention") == 1.0


@each(("stack", "n", "m"), ALPHA)
def test_deepnorm_alpha(stack, n, m):
    info = placements.StackInfo(stack, n, m, norm=lambda x, p: x)
    assert Placement.registry["deepnorm"](site(stack, n, m)).alpha == published(ALPHA[stack, n, m])
    assert placements.deepnorm_alpha(info) == published(ALPHA[stack, n, m])


@each(("n", "m"), EMBEDDINGS)
def test_tfixup_embeddings(n, m):
    for stack in ("encoder",) * bool(n) + ("decoder",) * bool(m):
        factor = Placement.registry["tfixup"].embedding_gain(site(stack, n, m))
        assert factor == published(EMBEDDINGS[n, m])
    assert initial.embedding_gain("tfixup", n, m) == published(EMBEDDINGS[n, m])


@pytest.mark.parametrize(("n", "m"), FIXUP)
@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_fixup(stack, n, m):
    expected = {"query": 1.0, "key": 1.0, "output": 0.0, "ffn_out": 0.0}
    for matrix in initial.MATRICES:
        number = published(expected.get(matrix, FIXUP[n, m]))
        assert Placement.registry["fixup"].gain(site(stack, n, m), matrix) == number
        assert initial.gain("fixup", stack, matrix, n, m) == number


@pytest.mark.parametrize(("stack", "n", "m"), OMEGA)
def test_admin_without_data(stack, n, m):
    omega = Placement.registry["admin_free"](site(stack, n, m)).omega.detach().numpy()
    assert omega.tolist() == [published(OMEGA[stack, n, m])] * 8
    sublayers = 2 * n if stack == "encoder" else 3 * m
    assert initial.admin_data_free(sublayers) == published(OMEGA[stack, n, m])
