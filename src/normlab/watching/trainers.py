"""What the watches of all trainers share, and the watch of torchtitan's ``Trainer``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from torch import Tensor

from normlab.diagnosis import Probe
from normlab.errors import UserError
from normlab.trace.patching import replace
from normlab.watching.watcher import OUT, Watch


class WatchingCallback:
    """Base of the callbacks: it takes the options of the ``Watch`` that it holds, which the hooks of each
    trainer, under their own names, drive.
    """

    def __init__(self, probes: str | Sequence[Probe] = "standard", **options: Any) -> None:
        self.watch = Watch(probes, **options)

    def stepping(self, *_: Any, **__: Any) -> None:
        self.watch.stepping()

    def end(self, *_: Any, **__: Any) -> None:
        self.watch.end()

    def close(self, *_: Any, **__: Any) -> None:
        self.watch.close()


@contextmanager
def watched(
    trainer: Any,
    *,
    out: str | Path = OUT,
    every_steps: int = 50,
    probes: str | Sequence[Probe] = "standard",
    sinks: Sequence[Any] = (),
) -> Iterator[Watch]:
    """Watch a torchtitan trainer inside this block, in which you call ``trainer.train()``.

    It uses attributes of torchtitan's trainer: ``model_parts``, ``optimizers`` (a container),
    ``forward_backward_step``, whose losses go to the recorder, ``gradient_accumulation_steps``, by which
    these are divided, and ``step``, which counts from 1 and continues from a checkpoint. Raises UserError for
    a trainer without the first three, and for a model in several parts.
    """
    parts, container = getattr(trainer, "model_parts", None), getattr(trainer, "optimizers", None)
    own_step = getattr(trainer, "forward_backward_step", None)
    if parts is None or container is None or own_step is None:
        raise UserError(
            f"{type(trainer).__name__} has no model_parts, optimizers and forward_backward_step; for your "
            "own loop, call normlab.watch(model, optimizers)"
        )
    if len(parts) != 1:
        raise UserError(f"the model has {len(parts)} parts; pipelines of several parts cannot be watched")
    watching = Watch(probes, out=out, every_steps=every_steps, sinks=sinks)
    begun = False

    @wraps(own_step)
    def forward_backward_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal begun
        if not begun:  # a checkpoint is loaded in train(), and tells the step
            begun = True
            watching.start(max(getattr(trainer, "step", 1), 1) - 1)
            watching.attach(parts[0], list(getattr(container, "optimizers", container)))
            watching.count_steps()
        loss = own_step(*args, **kwargs)
        if isinstance(loss, Tensor):
            watching.loss(loss * getattr(trainer, "gradient_accumulation_steps", 1))
        return loss

    with ExitStack() as stack:
        stack.callback(watching.close)
        replace(stack, trainer, "forward_backward_step", forward_backward_step)
        yield watching
