"""Registries: a name once, and sentences for names that are not there."""

from __future__ import annotations

import pytest

from cases import each
from normlab.errors import nearest
from normlab.nn import Embedding, LayerNorm, Norm, Placement, PlainEmbedding
from normlab.nn.init import SCHEMES
from normlab.nn.registry import Registry
from normlab.optim import OPTIMIZERS, SCHEDULES

EVERY = [Norm.registry, Embedding.registry, Placement.registry, SCHEMES, SCHEDULES, OPTIMIZERS]


@each("registry", EVERY, ids=lambda registry: registry.kind)
def test_a_name_is_taken_once_and_an_unknown_one_is_told(registry):
    name, variant = next(iter(registry.items()))
    with pytest.raises(ValueError, match=f"'{name}' is taken by {variant.__name__}$"):
        registry[name] = object()
    assert registry[name] is variant
    wrong = name[:-1]
    with pytest.raises(
        ValueError, match=rf"^unknown {registry.kind} '{wrong}', did you mean '{name}'\? \(allowed: "
    ):
        registry[wrong]
    assert wrong not in registry
    assert registry.get(wrong) is None


def test_a_class_whose_name_is_taken_is_refused():
    with pytest.raises(ValueError, match=r"'layernorm' is taken by LayerNorm$"):

        class AgainNorm(LayerNorm, name="layernorm"):
            pass

    with pytest.raises(ValueError, match=r"'plain' is taken by PlainEmbedding$"):

        class AgainEmbedding(PlainEmbedding, name="plain"):
            pass


def test_the_nearest_name_is_offered_if_there_is_one():
    registry: Registry[int] = Registry("number")
    registry["three"] = 3
    assert nearest("tree", registry) == ", did you mean 'three'? (allowed: three)"
    assert nearest("xyz", ["a", "b"]) == " (allowed: a, b)"
