"""Configurations by name: whole, resolvable, and the same everywhere."""

from __future__ import annotations

from cases import each
from normlab.base.io import from_json, to_json
from normlab.cli.presets import CONFIGS
from normlab.lab.comparison.result import CompareRequest
from normlab.lab.config import Config, run_id
from normlab.lab.recipes.grammar import resolve
from normlab.lab.training.devices import resolved_precision


@each("name", CONFIGS)
def test_a_configuration_can_be_compared_and_written(name):
    config = CONFIGS[name]()
    assert config == CONFIGS[name](), "calling it twice gives the same"
    assert config.train.precision == "auto", "what the device does best; it is not a property of the task"
    assert from_json(Config, to_json(config)) == config
    for recipe in CompareRequest().recipes:
        assert run_id(resolve(recipe, resolved_precision(config)))


def test_they_are_called_as_their_functions_are():
    assert all(function.__name__ == name and function.__doc__ for name, function in CONFIGS.items())
