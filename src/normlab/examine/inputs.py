"""A task's batch in the form that a diagnosis takes: the model's keyword arguments, and the loss on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from normlab.errors import UserError
from normlab.tasks.task import Task
from normlab.trace.tensors import Side, arguments_of, forward_hooks


class TaskInputs(dict[str, Any]):
    """The keyword arguments of a model, with the task and the micro-batch that give its loss."""

    def __init__(self, task: Task[Any, Any, Any], batch: Any, arguments: Mapping[str, Any]) -> None:
        super().__init__(arguments)
        self.task, self.batch = task, batch


def task_inputs(task: Task[Any, Any, Any], model: nn.Module, batch: Any) -> TaskInputs:
    """Find the arguments of a model by watching how the task's loss calls it on a micro-batch.

    Raises UserError if the loss does not call the model itself.
    """
    calls: list[Mapping[str, Any]] = []

    def see(_: str, side: Side, values: Any) -> None:
        if side == "input":
            calls.append(arguments_of(model, values))

    with torch.no_grad(), forward_hooks({"": model}, see):
        task.loss(model, batch)
    if not calls:
        raise UserError(
            f"the loss of the task {task.name} does not call the model as a whole; diagnose the model from "
            "Python: normlab.diagnose(model, batch, loss=…)"
        )
    return TaskInputs(task, batch, calls[0])


def mean_loss(model: nn.Module, inputs: TaskInputs) -> Tensor:
    """Return the task's loss on its micro-batch, as a mean over the tokens that it predicts."""
    return inputs.task.loss(model, inputs.batch).loss / inputs.batch.tokens
