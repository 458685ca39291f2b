"""Registries: a name is taken once, whatever it names, and errors say which names there are."""

from __future__ import annotations

import pytest

import normlab.checks.check  # noqa: F401  registers the properties
from cases import each
from normlab.base.registry import Registry
from normlab.checks.property import PROPERTIES, property_of
from normlab.cli.presets import CONFIGS
from normlab.diagnosis import STATISTICS
from normlab.diagnosis.study import Study, register, registered, studies_named
from normlab.errors import UserError, nearest
from normlab.judging.runner import PLACES
from normlab.lab.tasks import TASKS
from normlab.nn import Embedding, LayerNorm, Norm, Placement, PlainEmbedding
from normlab.nn.init import SCHEMES
from normlab.optim import OPTIMIZERS, SCHEDULES
from normlab.papers import PAPERS
from normlab.papers.effects import EFFECTS
from normlab.parallel import properties

VARIANTS = [Norm.registry, Embedding.registry, Placement.registry, SCHEMES, SCHEDULES, OPTIMIZERS]
EVERY = [*VARIANTS, PROPERTIES, properties.PROPERTIES, EFFECTS, PLACES, CONFIGS, PAPERS, STATISTICS, TASKS]


@each("registry", EVERY, ids=lambda registry: registry.kind)
def test_a_name_is_taken_once_and_an_unknown_one_is_told(registry):
    name, part = next(iter(registry.items()))
    with pytest.raises(UserError, match=f"{registry.kind} .*'{name}'") as doubled:
        registry[name] = object()
    registry[name] = part  # the same once more, as where two modules bind it
    assert registry[name] is part
    wrong = f"{name}x"
    with pytest.raises(UserError, match=f"^unknown {registry.kind} '{wrong}'") as unknown:
        registry[wrong]
    assert f"mean '{name}'?" in str(unknown.value)
    for other in registry:
        assert other in str(doubled.value)
        assert other in str(unknown.value)
    assert wrong not in registry
    assert registry.get(wrong) is None


def test_a_class_whose_name_is_taken_is_refused():
    with pytest.raises(UserError, match=r"'layernorm' .*LayerNorm"):

        class AgainNorm(LayerNorm, name="layernorm"):
            pass

    with pytest.raises(UserError, match=r"'plain' .*PlainEmbedding"):

        class AgainEmbedding(PlainEmbedding, name="plain"):
            pass


def test_a_property_whose_name_is_taken_is_refused():
    own = PROPERTIES["causality"]
    with pytest.raises(UserError, match=r"property .*'causality'"):

        @property_of("tokens")
        def causality(step):
            """Another statement."""

    assert PROPERTIES["causality"] is own


def test_a_study_whose_name_is_taken_is_refused_and_an_unknown_one_is_told():
    taken = registered()[0].name
    with pytest.raises(UserError, match=f"study .*'{taken}'"):
        register(Study(taken, lambda subject: [], "cheap"))
    with pytest.raises(UserError, match=f"study '{taken}x', .*'{taken}'"):
        studies_named([f"{taken}x"])


def test_a_decorator_returns_what_it_registers_and_enters_what_is_made_of_it():
    registry: Registry[object] = Registry("number")

    @registry.register()
    def three():
        """Its own name."""

    @registry.register("vier", "digits")
    def four():
        """Another name, and the field that it reads."""

    @registry.register_made(lambda function: function.__doc__)
    def five():
        """What is made of it."""

    assert registry == {"three": three, "vier": four, "five": "What is made of it."}
    assert four.options == ("digits",)


def test_the_nearest_name_is_offered_if_there_is_one():
    registry: Registry[int] = Registry("number")
    registry["three"] = 3
    assert nearest("tree", registry) == ", did you mean 'three'? (allowed: three)"
    assert nearest("xyz", ["a", "b"]) == " (allowed: a, b)"
