"""The setup in what a user hands over: a ``Setup``, a mapping, a model with its batch, or a trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from normlab.errors import UserError
from normlab.setups.setup import Loss, Setup, refuse_unknown
from normlab.setups.trainers import is_trainer, setup_from_trainer


def setup_in(value: Any, where: str = "setup()") -> Setup:
    """Return the setup that a function of the user's returned, or that the trainer shows that it returned.

    Raises UserError for anything else; ``where`` names the function.
    """
    return setup_from_trainer(value).setup if is_trainer(value) else Setup.of(value, where)


def setup_of(
    where: str,
    model: Any,
    batch: Any,
    loss: Loss | None,
    rest: Mapping[str, Any],
    others: Sequence[str] = (),
    *,
    batches: int = 1,
) -> Setup:
    """Return the Setup that a function was given, the one that a trainer shows, with as many ``batches`` as
    are wanted, or one made of a model, its batch and ``rest``; ``others`` are the function's own words.

    Raises UserError for a Setup or a trainer with more, and for a word that neither has.
    """
    allowed = [f.name for f in fields(Setup) if f.name not in ("model", "batches", "loss")]
    for word in rest:
        refuse_unknown(word, [*allowed, *others], where)
    parts = {word: value for word, value in rest.items() if word not in others}
    if not isinstance(model, Setup) and not is_trainer(model):
        return Setup(model, batch, loss, **parts)
    if batch is not None or loss is not None or parts:
        raise UserError(
            "give a Setup or a trainer alone, or a model with its batch; dataclasses.replace changes a Setup"
        )
    return model if isinstance(model, Setup) else setup_from_trainer(model, batches=batches).setup
