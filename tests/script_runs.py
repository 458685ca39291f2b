"""Training scripts run as they are, without a recording of them."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook


class FirstStepError(BaseException):
    """A script's first optimizer is about to step."""


def run_to_first_step(file: Path, arguments: Sequence[str] = ()) -> Optimizer:
    """Run a script as ``python file arguments`` does until an optimizer is about to step, and return that."""

    def end(optimizer: Optimizer, args: object, kwargs: object) -> None:
        raise FirstStepError(optimizer)

    path, argv, environment = list(sys.path), list(sys.argv), dict(os.environ)
    random_state = torch.get_rng_state()
    hook = register_optimizer_step_pre_hook(end)
    sys.path.insert(0, str(file.parent))
    sys.argv[:] = [str(file), *arguments]
    try:
        with redirect_stdout(sys.stderr):
            runpy.run_path(str(file), run_name="__main__")
    except FirstStepError as reached:
        return reached.args[0]
    finally:
        hook.remove()
        sys.path[:], sys.argv[:] = path, argv
        os.environ.clear()
        os.environ.update(environment)
        torch.set_rng_state(random_state)
    raise AssertionError(f"{file.name} ended without a step")


def run_alone(file: Path, arguments: Sequence[str] = ()) -> list[torch.Tensor]:
    """Run a script to its first step, with nothing compiled, and return the gradients of that step."""
    with torch.compiler.set_stance("force_eager"):
        optimizer = run_to_first_step(file, arguments)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [p.grad for p in parameters if p.grad is not None]
