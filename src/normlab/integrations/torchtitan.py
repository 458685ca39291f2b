"""The watch of a training by torchtitan's ``Trainer``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from torch import Tensor

from normlab.diagnosis import Probe
from normlab.errors import UserError
from normlab.integrations.watch import OUT, Watch, watch


@contextmanager
def watched(
    trainer: Any,
    *,
    out: str | Path = OUT,
    every_steps: int = 50,
    probes: str | Sequence[Probe] = "standard",
    sinks: Sequence[Any] = (),
) -> Iterator[Watch]:
    """Watch a trainer of torchtitan inside this block, in which ``trainer.train()`` is called.

    It is seen through attributes that torchtitan's trainer has: ``model_parts``, ``optimizers`` (a container)
    and ``forward_backward_step``, whose losses the recorder is given. Steps count from 0 at the
    beginning of the block. Raises UserError for a trainer without these, and for a model in several parts.
    """
    parts, optimisers = (getattr(trainer, name, None) for name in ("model_parts", "optimizers"))
    if parts is None or optimisers is None:
        raise UserError(
            f"{type(trainer).__name__} has no model_parts and optimizers; for a loop of your own, call "
            "normlab.watch(model, optimizers)"
        )
    if len(parts) != 1:
        raise UserError(f"the model has {len(parts)} parts; a pipeline is not watched, one part is")
    with watch(
        parts[0],
        list(getattr(optimisers, "optimizers", optimisers)),
        out=out,
        every_steps=every_steps,
        probes=probes,
        sinks=sinks,
    ) as watching:
        given = getattr(trainer, "forward_backward_step", None)
        if given is not None:
            trainer.forward_backward_step = _shown(given, watching)
        try:
            yield watching
        finally:
            if given is not None:
                trainer.forward_backward_step = given


def _shown(given: Callable[..., Any], watching: Watch) -> Callable[..., Any]:
    """Show the watch the loss that this step of the trainer returns."""

    @wraps(given)
    def forward_backward_step(*args: Any, **kwargs: Any) -> Any:
        loss = given(*args, **kwargs)
        if isinstance(loss, Tensor):
            watching.loss(loss)
        return loss

    return forward_backward_step
