"""The planted faults are there, the sound models beside them are sound, and every place exists."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from scripts import script

pytest.importorskip("transformers", reason="the extra normlab[hf] is not installed")

planted = script("planted")
BY_NAME = {fault.name: fault for fault in planted.FAULTS}
HEALTHY = {healthy.name: healthy for healthy in planted.HEALTHY}


def loss_of(case):
    case.model.eval()
    with torch.no_grad():
        return case.loss(case.model, case.batch).item()


NOT_FINITE = ("causal_mask_hides_the_token_itself", "every_label_ignored")
"""The faults whose loss is not a number."""


def paths(model: nn.Module) -> Iterator[str]:
    """Modules, parameters, buffers, and lists of modules that are not registered, with what they hold."""
    for path, module in model.named_modules(remove_duplicate=False):
        yield path
        for name, value in vars(module).items():
            if isinstance(value, list) and value and all(isinstance(item, nn.Module) for item in value):
                inside = f"{path}.{name}".lstrip(".")
                yield inside
                yield from (f"{inside}.{i}.{p}" for i, item in enumerate(value) for p in paths(item))
    yield from (path for path, _ in model.named_parameters(remove_duplicate=False))
    yield from (path for path, _ in model.named_buffers(remove_duplicate=False))


def facts(case):
    """Numbers of a case by what they measure, such as its weights after a step of its own optimiser."""
    found = {"loss in evaluation": loss_of(case)}
    with torch.no_grad():
        found |= {"weights": {n: p.double().norm().item() for n, p in case.model.named_parameters()}}
    case.model.train()
    torch.manual_seed(0)
    loss = case.loss(case.model, case.batch)
    loss.backward()
    parameters = list(case.model.parameters())
    grads = {n: p.grad is not None for n, p in case.model.named_parameters()}
    if case.max_grad_norm is not None:
        found["norm of gradients"] = clip_grad_norm_(parameters, case.max_grad_norm).item()
    case.optimiser(parameters).step()
    after = {n: p.detach().double().sum().item() for n, p in case.model.named_parameters()}
    return found | {"loss in training": loss.item(), "gradients": grads, "after a step": after}


@cache
def sound_facts(architecture):
    return facts(planted.build(architecture))


def test_the_faults_are_counted():
    blind = [
        planted.UNSEEN,
        planted.SECOND,
        planted.THIRD,
        planted.FOURTH,
        planted.FIFTH,
        planted.SIXTH,
        planted.SEVENTH,
    ]
    assert [len(faults.every) for faults in (planted.KNOWN, *blind)] == [27, *7 * [10]]
    assert len(BY_NAME) == len(planted.FAULTS) == 97
    for faults in blind[1:]:
        assert set(Counter(fault.architecture for fault in faults.every).values()) == {2, 3}
    assert {fault.architecture for fault in planted.FAULTS} == set(planted.ARCHITECTURES)
    spread = Counter(fault.architecture for fault in planted.FAULTS)
    assert len(spread) == 4
    assert min(spread.values()) >= 5
    assert len({fault.says for fault in planted.FAULTS}) == len(planted.FAULTS)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("name", BY_NAME)
def test_a_fault_changes_what_a_step_does_and_lies_where_it_says(name):
    fault = BY_NAME[name]
    case = fault.case()
    every = {*paths(case.model), planted.OPTIMISER, planted.LOSS, planted.BATCH}
    modules = [pattern for pattern in fault.module if not pattern.endswith(".*")]
    assert [p for p in modules if not any(fnmatchcase(path, p) for path in every)] == []
    found = facts(case)
    assert math.isfinite(found["loss in evaluation"]) == (name not in NOT_FINITE)
    assert math.isfinite(found["loss in training"]) == (name not in NOT_FINITE)
    assert found != sound_facts(fault.architecture)


def test_a_finding_elsewhere_is_not_a_correct_one():
    fault = BY_NAME["layer_times_thirty"]
    assert fault.named_by("model.layers.7.mlp.up_proj.weight", "")
    assert not fault.named_by("model.layers.8.mlp.up_proj.weight", "")
    assert not fault.named_by("model.layers", "")
    worded = BY_NAME["padding_leak"]
    assert worded.named_by("bert.encoder", "Padding moves the logits of words")
    assert not worded.named_by("bert.encoder", "the stream grows")


@pytest.mark.parametrize("name", planted.ARCHITECTURES)
def test_a_sound_architecture_begins_near_a_uniform_guess(name):
    case = planted.build(name)
    assert math.log(case.vocab_size) * 0.98 < loss_of(case) < math.log(case.vocab_size) + 1
    assert facts(case) == sound_facts(name)


def test_the_healthy_models_are_six_families_in_two_sizes():
    assert len(HEALTHY) == 12
    assert set(Counter(healthy.family for healthy in HEALTHY.values()).values()) == {2}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_model_begins_near_a_uniform_guess_and_declares_its_warm_up(name):
    case = HEALTHY[name].case()
    assert math.log(case.vocab_size) * 0.98 < loss_of(case) < math.log(case.vocab_size) + 1
    assert case.warmup_steps > 0
    assert case.lr == case.optimiser(list(case.model.parameters())).param_groups[0]["lr"]
