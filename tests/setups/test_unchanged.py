"""Recording a script leaves the process, its weights and its files as they were, for each of the forty."""

from __future__ import annotations

import gc
import hashlib
import os
import random
import signal
import sys
import types
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import optimizer as optimizers
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import normlab
from cases import mostly_wide
from forty_scripts import OF_EACH_KIND, REPEATED, SCRIPTS, UNREPEATABLE, recorded_script
from normlab.errors import UserError
from script_runs import run_to_first_step

pytestmark = [
    # What torch imports to compile warns of itself.
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
]

NAMESPACES = (
    "torch",
    "torch.amp",
    "torch.autograd",
    "torch.autograd.function",
    "torch.cuda.amp",
    "torch.func",
    "torch.nn",
    "torch.nn.functional",
    "torch.nn.modules.module",
    "torch.nn.parallel",
    "torch.nn.utils",
    "torch.nn.utils.clip_grad",
    "torch.optim",
    "torch.optim.lr_scheduler",
    "torch.optim.optimizer",
    "torch.utils.checkpoint",
    "torch.utils.data",
    "torch.utils.data.dataloader",
    "numpy",
    "random",
    "builtins",
)


def named_objects() -> Iterator[tuple[str, Any]]:
    """Every value in the namespaces, and every attribute of the classes in them."""
    for space in NAMESPACES:
        for name, value in list(vars(sys.modules[space]).items()):
            yield f"{space}.{name}", value
            if isinstance(value, type):
                for attribute, member in list(vars(value).items()):
                    yield f"{space}.{name}.{attribute}", member


def functions_and_classes() -> dict[str, Any]:
    """What can be called, by its path; the objects themselves, so that none of them is freed."""
    kinds = (type, staticmethod, classmethod, property)
    return {path: value for path, value in named_objects() if callable(value) or isinstance(value, kinds)}


def replaced(before: dict[str, Any]) -> list[str]:
    """The paths at which another object, or none, now stands."""
    now = functions_and_classes()
    return [path for path, value in before.items() if now.get(path) is not value]


def random_states() -> list[Any]:
    """The random states of torch, numpy and Python."""
    return [torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()]  # noqa: NPY002


def modes() -> dict[str, Any]:
    """The modes of torch that hold in this thread."""
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "autocast_cache": torch.is_autocast_cache_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "threads": torch.get_num_threads(),
        "function_modes": len(torch.overrides._get_current_function_mode_stack()),
        "dispatch_modes": len(_get_current_dispatch_mode_stack()),
        "saved_tensors_hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
    }


def global_hooks() -> list[int]:
    """How many hooks hold for every module and every optimizer."""
    of_modules = [value for name, value in vars(nn.modules.module).items() if name.startswith("_global_")]
    of_optimizers = [optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks]
    return [len(hooks) for hooks in chain(of_modules, of_optimizers) if isinstance(hooks, dict)]


def process() -> dict[str, Any]:
    """What a script and those who run it share of the process."""
    return {
        "argv": list(sys.argv),
        "path": list(sys.path),
        "environment": dict(os.environ),
        "folder": Path.cwd(),
        "streams": [sys.stdin, sys.stdout, sys.stderr],
        "main": sys.modules["__main__"],
        "hooks": [sys.gettrace(), sys.getprofile(), sys.displayhook],  # torch.distributed sets sys.excepthook
        "interrupt": signal.getsignal(signal.SIGINT),
        "garbage": gc.isenabled(),
    }


def files() -> dict[str, str]:
    """A hash of each file in the folder of the scripts, except what Python compiles."""
    return {
        str(path.relative_to(SCRIPTS)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(SCRIPTS.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def fingerprints(tensors: Iterator[torch.Tensor] | list[torch.Tensor]) -> set[bytes]:
    """The numbers of each tensor."""
    return {tensor.detach().float().numpy().tobytes() for tensor in tensors}


def hooks_of(module: nn.Module) -> list[str]:
    """The kinds of hooks that a module has, and the methods that it has for itself."""
    hooks = [name for name, value in vars(module).items() if name.endswith("_hooks") and value]
    return hooks + [name for name, value in vars(module).items() if isinstance(value, types.MethodType)]


def gradients_of(setup: normlab.Setup) -> torch.Tensor:
    """Compute the loss and its gradients, as a step of L-BFGS wants it; the other optimizers accept it."""
    setup.model.zero_grad()
    loss = setup.loss(setup.model, setup.batches)
    loss.backward()
    return loss


each_script = pytest.mark.parametrize(
    "script", mostly_wide([*REPEATED, *UNREPEATABLE], OF_EACH_KIND), ids=lambda script: script.name
)


@each_script
def test_the_process_and_the_files_are_as_before(script):
    # torch patches classes of optimizers when they are first used; one script never steps
    with suppress(AssertionError), torch.compiler.set_stance("force_eager"):
        run_to_first_step(SCRIPTS / f"{script.name}.py", getattr(script, "arguments", ()))
    functions = functions_and_classes()
    states = [random_states(), modes(), global_hooks(), process(), files()]
    may_be_refused = suppress(UserError) if script in UNREPEATABLE else nullcontext()
    with may_be_refused, recorded_script(script):
        pass
    assert [random_states(), modes(), global_hooks(), process(), files()] == states
    assert replaced(functions) == []


@pytest.mark.parametrize("script", mostly_wide(REPEATED, OF_EACH_KIND), ids=lambda script: script.name)
def test_the_weights_are_those_of_the_script_alone_and_can_be_trained(script):
    with torch.compiler.set_stance("force_eager"):
        alone = run_to_first_step(SCRIPTS / f"{script.name}.py", script.arguments)
    with recorded_script(script) as named:
        setup = named.setup
        stepped = [each for each in setup.optimizers if each is not None]
        held = [p for each in stepped for group in each.param_groups for p in group["params"]]
        parameters = [*setup.model.parameters(), *held]
        wanted = fingerprints([p for group in alone.param_groups for p in group["params"]])
        assert wanted <= fingerprints(parameters)
        assert not any(each.state for each in stepped)
        assert [hooks_of(module) for module in setup.model.modules()] == [[] for _ in setup.model.modules()]
        before = fingerprints(held)
        for optimizer in stepped:
            optimizer.step(lambda: gradients_of(setup))
        assert (fingerprints(held) != before) == bool(stepped)
