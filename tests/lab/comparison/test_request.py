import os
from pathlib import Path

import pytest

from cases import each
from normlab.lab.comparison.grid import on_backend
from normlab.lab.comparison.result import CompareRequest
from normlab.lab.config import Config, MachineConfig, run_id
from normlab.lab.recipes.grammar import resolve
from normlab.lab.training.devices import resolved_precision
from normlab.lab.training.jobs import usable_cores


@each(
    ("given", "sentence"),
    [
        ({"recipes": ()}, "at least one of recipes"),
        ({"lrs": ()}, "at least one of lrs"),
        ({"recipes": ("pre", "post", "pre")}, "recipes hold pre twice"),
        ({"recipes": ("post", "post ")}, "recipes hold post twice"),
        ({"setup": ("a.py", "a.py")}, "setups hold a.py twice"),
        ({"lrs": (1e-3, 1e-3)}, "lrs hold 0.001 twice"),
        ({"lrs": (1e-3, -1.0)}, "above 0, got -1"),
        ({"seeds": 0}, "seeds must be at least 1, got 0"),
        ({"jobs": -1}, "jobs must be at least 0, got -1"),
        ({"exchanges": 5}, "exchanges must be at least 100, got 5"),
        ({"margin": -1.0}, "margin must be at least 0"),
        ({"first_seed": 0}, "sweep_seed is 0, and the reported seeds are 0 to"),
        ({"sweep_seed": 3}, "type another --sweep-seed or --first-seed"),
    ],
)
def test_a_request_that_cannot_be_run_says_why(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        CompareRequest(**given)


def test_one_learning_rate_leaves_its_seed_to_be_reported():
    assert CompareRequest(lrs=(1e-3,), first_seed=0).sweep_seed == 0


def test_the_defaults_are_a_comparison():
    request = CompareRequest()
    assert len(request.recipes) >= 4
    assert len(request.lrs) >= 2
    assert request.seeds >= 2
    ids = {run_id(resolve(name, resolved_precision(request.base))) for name in request.recipes}
    assert len(ids) == len(request.recipes)


def test_what_people_type_is_tidied():
    request = CompareRequest(recipes=(" pre", "post "), out="there")  # pyrefly: ignore
    assert request.recipes == ("pre", "post")
    assert request.out == Path("there")


def test_a_job_for_each_core_that_may_be_used_and_one_on_a_gpu(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {2, 5, 7}, raising=False)
    assert usable_cores() == on_backend(CompareRequest()).jobs == 3
    on_gpu = Config(machine=MachineConfig(device="cuda:1"))
    assert on_backend(CompareRequest(base=on_gpu)).jobs == 1
    assert on_backend(CompareRequest(base=on_gpu, jobs=2)).jobs == 2
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores() == 1
