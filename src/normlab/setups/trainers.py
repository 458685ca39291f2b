"""Setups from trainers of other libraries, none of which is imported: they run up to their first steps."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from normlab.setups.named import NamedSetup


def is_trainer(value: Any) -> bool:
    """Return whether a value is something that trains a model of its own: a trainer with ``train()``, such as
    those of transformers, TRL and torchtitan, or a pair of a LightningModule and its loader.
    """
    return _is_pair(value) or _trains(value)


def setup_from_trainer(trainer: Any, *, batches: int = 1) -> NamedSetup:
    """Return the setup that a trainer shows in its first steps, with as many ``batches`` as are wanted. The
    trainer and the settings of the process are as they were before, and nothing that it saves is written.

    Raises UserError if it makes no step.
    """
    # imported here, since they take a while and few calls need them
    from normlab.setups.capture import capture
    from normlab.setups.process import same_process

    train = partial(_fit, *trainer) if _is_pair(trainer) else trainer.train
    changed = [] if _is_pair(trainer) else [trainer, *vars(trainer).values()]
    with same_process(), _same_attributes(*changed), capture(batches=batches) as captured:
        train()
    return captured.named


def _trains(value: Any) -> bool:
    is_object = not isinstance(value, (nn.Module, type))
    has_model = hasattr(value, "model") or hasattr(value, "model_parts")  # torchtitan's
    return is_object and has_model and callable(getattr(value, "train", None))


def _is_pair(value: Any) -> bool:
    is_pair = isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], nn.Module)
    return is_pair and _lightning(value[0]) is not None


def _lightning(module: nn.Module) -> Any:
    """Return the package of Lightning that a module's class comes from; there are two."""
    for kind in type(module).__mro__:
        if kind.__name__ == "LightningModule":
            return sys.modules.get(kind.__module__.removesuffix(".core.module"))
    return None


def _fit(module: Any, loader: Any) -> None:
    """Train a LightningModule with a plain trainer, on the device where it is."""
    make: Callable[..., Any] = _lightning(module).Trainer
    device = next(module.parameters()).device
    trainer = make(
        accelerator=device.type,
        devices=1 if device.index is None else [device.index],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)


@contextmanager
def _same_attributes(*objects: Any) -> Iterator[None]:
    """Put back the attributes of a trainer and of its parts after this block, and the entries of their lists.
    What these hold, such as a data set, is not searched.
    """
    parts = {id(x): x for x in objects if hasattr(x, "__dict__") and not isinstance(x, (nn.Module, type))}
    before = [(part, dict(vars(part))) for part in parts.values()]
    lists = [(x, list(x)) for _, attributes in before for x in attributes.values() if type(x) is list]
    try:
        yield
    finally:
        for part, attributes in before:
            vars(part).clear()
            vars(part).update(attributes)
        for entries, kept in lists:
            entries[:] = kept
