"""Admin's three initialisations on sentences of different length, against oracles without padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from normlab.nn import Decoder, Norm, Seq2Seq, TokenModel
from normlab.nn.init import initialise_, profile_
from oracles import initial, norms
from oracles.adapter import NORMS, StackOracle, Weights, embed, norm_bundle, roles_of
from oracles.comparing import arrays_of, ours_alone
from oracles.placements import Sublayer, run_stack
from oracles.toys import SENTENCES, VOCAB, exactly_placed, padded, under

Array = np.ndarray
FLOAT32 = 16 * float(np.finfo(np.float32).eps)
"""Variances are summed in float32."""

SOURCES, TARGETS = (list(side) for side in zip(*SENTENCES, strict=True))


def at_one(model: TokenModel) -> TokenModel:
    """Return the model with every omega at 1."""
    for name, parameter in model.named_parameters():
        if name.endswith("omega"):
            torch.nn.init.ones_(parameter)
    return model


def omegas(model: TokenModel, stack: str) -> list[Array]:
    return [a for name, a in arrays_of(model).items() if name.startswith(stack) and name.endswith("omega")]


def recorded(sublayer: Sublayer, outputs: list[Array]) -> Sublayer:
    def f(x: Array) -> Array:
        outputs.append(sublayer.f(x))
        return outputs[-1]

    return replace(sublayer, f=f)


def by_paper(stacks: list[StackOracle], inputs: list[Array]) -> tuple[Array, list[Array]]:
    """Omegas of one stack, which comes once for each sentence, and its outputs with every omega 1."""
    outputs: list[list[Array]] = [[] for _ in stacks[0].sublayers()]
    ends = []
    for stack, x in zip(stacks, inputs, strict=True):
        sublayers = [recorded(s, outputs[i]) for i, s in enumerate(stack.sublayers())]
        ends.append(run_stack("admin", x, sublayers, stack.info()))
    return initial.admin_paper(inputs, outputs), ends


def by_code(stacks: list[StackOracle], inputs: list[Array]) -> tuple[Array, list[Array]]:
    """Omegas of one stack, and its outputs with these in force."""
    first, norm = stacks[0], NORMS[stacks[0].config.norm]
    roles = roles_of(first.name, first.config)
    count = len(first.sublayers())

    def branch(x: Array, n: int, index: int) -> Array:
        return first.branch(roles[index % len(roles)], index)(x, stacks[n].memory)

    def normed(x: Array, index: int) -> Array:
        return norms.NORMS[norm](x, norm_bundle(first.w.at(f"sublayers.{index}.place.norm"), norm))

    each = [partial(branch, index=i) for i in range(count)], [partial(normed, index=i) for i in range(count)]
    found = initial.admin_code(inputs, *each)
    ends = []
    for stack, x in zip(stacks, inputs, strict=True):
        started = [
            replace(s, p={**s.p, "omega": np.array(omega)})
            for s, omega in zip(stack.sublayers(), found, strict=True)
        ]
        ends.append(run_stack("admin", x, started, stack.info()))
    return found, ends


PROFILES: dict[str, Callable[[list[StackOracle], list[Array]], tuple[Array, list[Array]]]] = {
    "admin": by_paper,
    "admin_code": by_code,
}
profiled = pytest.mark.parametrize("placement", PROFILES)


def assert_started(model: TokenModel, stack: str, expected: Array) -> None:
    found = omegas(model, stack)
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, np.full(6, theirs), rtol=FLOAT32)


@profiled
@pytest.mark.parametrize("norm", ours_alone(Norm.registry))
def test_profiles_of_an_encoder_and_a_decoder(placement, norm):
    config = under(placement, norm=norm)
    model = at_one(exactly_placed(Seq2Seq(config, VOCAB), config))
    w, profile = Weights(arrays_of(model)), PROFILES[placement]
    given = profile_(model, lambda: model(padded(SOURCES), padded(TARGETS)))
    encoder = [StackOracle(w.at("encoder"), "encoder", config) for _ in SOURCES]
    expected, memories = profile(encoder, [embed(w, config, ids) for ids in SOURCES])
    assert_started(model, "encoder", expected)
    decoder = [StackOracle(w.at("decoder"), "decoder", config, memory) for memory in memories]
    expected_too, _ = profile(decoder, [embed(w, config, ids) for ids in TARGETS])
    assert_started(model, "decoder", expected_too)
    np.testing.assert_allclose(list(given.values()), [*expected**2, *expected_too**2], rtol=FLOAT32)


@profiled
def test_profiles_of_a_decoder_alone(placement):
    config = under(placement, encoder_layers=0)
    model = at_one(exactly_placed(Decoder(config, VOCAB), config))
    w = Weights(arrays_of(model))
    profile_(model, lambda: model(padded(TARGETS)))
    stacks = [StackOracle(w.at("decoder"), "decoder", config) for _ in TARGETS]
    expected, _ = PROFILES[placement](stacks, [embed(w, config, ids) for ids in TARGETS])
    assert_started(model, "decoder", expected)


def test_rescaled_matrices_begin_as_the_same_function():
    """A norm takes out the scale of its input: LN(ω x + f(x)) = LN(x + f(x) / ω), but for the norm's ε."""
    models = [Seq2Seq(under(placement), VOCAB).double() for placement in ("admin_free", "admin_rescaled")]
    for model in models:
        initialise_(model, "xavier", 1)
    with torch.no_grad():
        weighted, rescaled = (model(padded(SOURCES), padded(TARGETS)) for model in models)
    assert (rescaled - weighted).abs().max() < 1e-4 * weighted.abs().max()


def test_a_start_without_data():
    model = Seq2Seq(under("admin_free"), VOCAB)
    assert_started(model, "encoder", np.full(4, initial.admin_data_free(4)))
    assert_started(model, "decoder", np.full(9, initial.admin_data_free(9)))
    alone = Decoder(under("admin_free", encoder_layers=0), VOCAB)
    assert_started(alone, "decoder", np.full(6, initial.admin_data_free(6)))
    assert profile_(model, lambda: model(padded(SOURCES), padded(TARGETS))) == {}
