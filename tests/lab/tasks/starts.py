"""What the start of a model depends on: the same task with other seeds."""

from __future__ import annotations

from dataclasses import replace

import torch

from normlab.lab.training.trainer import AnyTask


def with_seeds(task: AnyTask, **seeds: int) -> AnyTask:
    """The task with some of its seeds changed."""
    config = replace(task.config, seeds=replace(task.config.seeds, **seeds))
    return type(task)(config, task.corpus, task.device)


def unequal_in_start(one: AnyTask, other: AnyTask) -> list[str]:
    """The names of the parameters that differ between the starts of two tasks."""
    starts = []
    for number, task in enumerate((one, other)):
        torch.manual_seed(number)  # which a start must not depend on
        starts.append(dict(task.build().named_parameters()))
    first, second = starts
    assert first.keys() == second.keys()
    return [name for name, parameter in first.items() if not torch.equal(parameter, second[name])]
