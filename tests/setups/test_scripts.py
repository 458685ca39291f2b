"""Forty small scripts are recorded and repeated, or the call that cannot be repeated is named."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
import torch

import normlab
from cases import mostly_wide
from forty_scripts import OF_EACH_KIND, REPEATED, SCRIPTS, UNREPEATABLE, recorded_script
from normlab.errors import UserError
from script_runs import run_alone

# What torch imports to compile warns of itself.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")


def names_of(value: object) -> list[str]:
    """The classes of one object or several, none for None."""
    several = value if isinstance(value, (list, tuple)) else [value]
    return [type(each).__name__ for each in several if each is not None]


def relative_norms(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """The norms of gradients other than zero, sorted, as shares of the largest."""
    norms = torch.stack([gradient.float().norm() for gradient in gradients]).sort().values
    norms = norms[norms > 1e-6 * norms[-1]]
    return norms / norms[-1]


REFUSED = ("evolving", "no_optimizer")
"""Scripts that show no step at all: no setup is made of them. The others that cannot be repeated have one."""
STEPPING = [script for script in REPEATED if script.whole_step]
each_repeated = pytest.mark.parametrize("script", REPEATED, ids=lambda script: script.name)
each_unrepeatable = pytest.mark.parametrize("script", UNREPEATABLE, ids=lambda script: script.name)


def test_there_are_forty():
    assert (len(REPEATED), len(UNREPEATABLE)) == (30, 10)
    assert len({script.name for script in [*REPEATED, *UNREPEATABLE]}) == 40


@each_repeated
def test_a_recording_shows_what_the_script_does(script):
    with recorded_script(script) as named:
        setup = named.setup
        assert list(setup.cannot) == list(script.cannot)
        shapes = {name: tuple(tensor.shape) for name, tensor in setup.batches.items()}
        assert shapes == shapes | dict(script.batch)  # and there may be more
        assert int(named.facts["recorded"].split()[0]) == script.micro_batches
        assert names_of(setup.optimizer) == list(script.optimizers)
        schedulers = getattr(setup.scheduler, "schedulers", setup.scheduler)
        assert names_of(schedulers) == list(script.schedulers)


@pytest.mark.parametrize("script", mostly_wide(STEPPING, OF_EACH_KIND), ids=lambda script: script.name)
def test_the_loss_has_the_gradients_of_the_script_alone(script):
    wanted = run_alone(SCRIPTS / f"{script.name}.py", script.arguments)
    with recorded_script(script) as named:
        setup = named.setup
        setup.model.zero_grad()
        setup.loss(setup.model, setup.batches).backward()
        got = [p.grad for p in setup.model.parameters() if p.grad is not None]
    tolerance = 1e-2 if any(gradient.dtype == torch.bfloat16 for gradient in got) else 1e-4
    torch.testing.assert_close(relative_norms(got), relative_norms(wanted), rtol=tolerance, atol=tolerance)


@each_unrepeatable
def test_the_first_call_that_cannot_be_repeated_is_named(script):
    if script.name in REFUSED:
        with pytest.raises(UserError) as refusal, recorded_script(script):
            pass
        reasons = str(refusal.value)
    else:
        with recorded_script(script) as named:
            reasons = " ".join(named.setup.cannot.values())
    assert re.search(rf"\b{script.function}\b", reasons), reasons
    if script.code:
        assert f"{script.name}.py:{script.line}" in reasons


@pytest.mark.parametrize("script", mostly_wide(REPEATED, OF_EACH_KIND), ids=lambda script: script.name)
def test_a_sound_script_has_no_failing_property(script):
    with recorded_script(script) as named:
        report = normlab.check(named.setup)
    assert [(failure.property, failure.module) for failure in report.failures] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "script", [s for s in UNREPEATABLE if s.name not in REFUSED], ids=lambda script: script.name
)
def test_a_script_that_cannot_be_repeated_gets_no_wrong_verdict(script):
    with recorded_script(script) as named:
        report = normlab.check(named.setup)
        assert [(failure.property, failure.module) for failure in report.failures] == []


@pytest.mark.slow
def test_a_part_of_an_accumulated_batch_has_rows_of_every_micro_batch():
    script = next(script for script in REPEATED if script.name == "accumulating")
    with recorded_script(script) as named:
        step, batch = named.setup.step, named.setup.batches
        part = step.part_of_each({name: x[:2] for name, x in batch.items()})
        each = min(2, *step.rows)
        begin = step.rows[0]
        for name, x in part.items():
            assert len(x) == each * len(step.flows)
            assert torch.equal(x[each : 2 * each], batch[name][begin : begin + each])
