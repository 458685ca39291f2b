"""``watch``: watch a plain loop, or whatever a trainer trains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from normlab.base.io import validated
from normlab.diagnosis import Probe, Structure
from normlab.errors import UserError
from normlab.setups.setup import shown
from normlab.setups.trainers import is_trainer
from normlab.watching.watcher import OUT, Watch, innermost


@validated
def watch(
    model: Any,
    optimizer: Any = None,
    *,
    out: str | Path = OUT,
    every_steps: int = 50,
    probes: str | Sequence[Probe] = "standard",
    sinks: Sequence[Any] = (),
    structure: Structure | None = None,
    first_step: int = 0,
) -> Watch:
    """Watch a plain training loop: ``with normlab.watch(model, optimizer) as watch: …``, or a trainer:
    ``with normlab.watch(trainer) as watch: trainer.train()``.

    A step is one or more calls of the model in training mode, and the step of the optimizer, or of each in a
    list, that follows. ``watch.loss(loss)`` gives the recorder the loss, unless the model returns it: as
    ``loss``, or as the only number in a tuple. ``first_step`` is the number of steps that a resumed training
    has done. The page is drawn at the end of the block, or by ``watch.close()``. If ranks hold parts of the
    weights, as under ``fully_shard``, each of them has to watch, because their norms are added.

    Raises UserError for a wrong optimizer, an unknown preset or sink, steps below 1, a first step below 0.

    >>> with normlab.watch(model, optimizer, out="watch") as watch:
    ...     watch.loss(loss(model, batch))  # and the rest of your loop
    >>> watch.page.name
    'watch.html'
    """
    options: dict[str, Any] = {"out": out, "every_steps": every_steps, "structure": structure, "sinks": sinks}
    if optimizer is None and is_trainer(model):
        from normlab.watching.training import follow  # it takes a while, and few need it

        watch_of_trainer = Watch(probes, **options)
        follow(watch_of_trainer)
        return watch_of_trainer
    if not isinstance(model, nn.Module):
        raise UserError(f"the model is {shown(model)}, and must be a torch.nn.Module, or a trainer")
    optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    for given in optimizers:
        innermost(given)  # since nothing raises once the watch has begun
    if first_step < 0:
        raise UserError(
            f"first_step is {first_step}, and must be 0 or more: the number of steps already done"
        )
    watch_of_loop = Watch(probes, **options)
    watch_of_loop.start(first_step)
    watch_of_loop.attach(model, optimizers)
    watch_of_loop.count_steps()
    return watch_of_loop
