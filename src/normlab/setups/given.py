"""The setup in what a user hands over: a ``Setup``, a mapping, a model with its batch, or a trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from normlab.errors import UserError
from normlab.setups.setup import Loss, Setup, refuse_unknown
from normlab.setups.trainers import is_trainer, setup_from_trainer


def setup_in(value: Any, where: str = "setup()") -> Setup:
    """Return the setup that a user's function returned, or that of the trainer that it returned.

    Raises UserError if it returned anything else; ``where`` names the function.
    """
    return setup_from_trainer(value).setup if is_trainer(value) else Setup.of(value, where)


def setup_of(
    where: str,
    model: Any,
    batch: Any,
    loss: Loss | None,
    keywords: Mapping[str, Any],
    others: Sequence[str] = (),
    *,
    batches: int = 1,
) -> Setup:
    """Return the setup in the arguments that one of normlab's functions was called with.

    Args:
        where: The function, for errors.
        model: A ``Setup``, a trainer, or a model.
        batch: The model's batch.
        loss: Its loss function.
        keywords: The other arguments: fields of a ``Setup``.
        others: Names among these that are the function's own, and no field.
        batches: How many batches of a trainer are wanted.

    Raises UserError for a Setup or a trainer that comes with other arguments, and for an unknown keyword.
    """
    allowed = [f.name for f in fields(Setup) if f.name not in ("model", "batches", "loss")]
    for word in keywords:
        refuse_unknown(word, [*allowed, *others], where)
    parts = {word: value for word, value in keywords.items() if word not in others}
    if not isinstance(model, Setup) and not is_trainer(model):
        return Setup(model, batch, loss, **parts)
    if batch is not None or loss is not None or parts:
        raise UserError(
            "give a Setup or a trainer alone, or a model with its batch; dataclasses.replace changes a Setup"
        )
    return model if isinstance(model, Setup) else setup_from_trainer(model, batches=batches).setup
