"""Copies of a model that run their own modules and weights, and the proof that one does.

Python does not show all that a function holds, so no copying is known to be complete. Whether a copy may
stand in for its model is measured: one pass of each is run, and what they use is compared.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Final, NamedTuple

from torch import nn

from normlab.setups.setup import Loss
from normlab.trace.autograd import Weights
from normlab.trace.budget import require_time
from normlab.trace.reach import deep_copy
from normlab.trace.rebinding import lead_to_copies
from normlab.trace.restore import undisturbed
from normlab.trace.tensors import unwrap
from normlab.trace.trace import Trace
from normlab.trace.use import Use, use_of
from normlab.trace.weights import put_back_weights, weights_apart

OTHER_MODEL: Final = (
    "the loss runs another model than it is given: call the one that loss(model, batch) receives"
)


def copied_model(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Return a copy of a model; ``memo`` is that of ``copy.deepcopy``.

    Locks and modules of Python, which have no copies, are shared. Functions that its modules hold lead to the
    copy wherever they led to the model: hooks, and a ``forward`` that was wrapped by a closure, a partial or
    ``torch.compile``. They are followed as far as Python shows what they hold; ``proof_of`` says whether that
    was enough.

    Inside ``passes_until``, no copying begins after the deadline: it raises OutOfTimeError instead.
    """
    require_time()
    memo = {} if memo is None else memo
    copy = deep_copy(model, memo)
    lead_to_copies(memo)
    return copy


class Proof(NamedTuple):
    """Whether a loss runs the model that it is given, and whether a copy of that model runs by itself."""

    loss_runs_model: bool
    refusal: str = ""
    """Why no copy of the model may stand in for it, and what to do; empty if one may."""
    copy: nn.Module | None = None
    """The copy that was run, with the model's weights, if it may stand in for the model."""
    copy_s: float = 0.0
    """Seconds that copying took."""


def proof_of(model: nn.Module, batch: Any, loss_of: Loss) -> Proof:
    """Run a model once, then a copy of it, and compare what is used of the two.

    A copy may stand in for the model if its pass uses nothing of the original, and uses of the copy all that
    the model's own pass uses of the model. What the model's own pass raises is not caught.
    """
    kind = type(model).__name__
    begun = time.monotonic()
    copy, failure = None, None
    try:
        copy = copied_model(model)
    except Exception as error:  # the model may be anyone's
        failure = error
    copy_s = time.monotonic() - begun

    # the copy is made first, since a pass may write to weights: the copy holds what is put back then
    weights = weights_apart(model, copy)
    (needed,) = _uses_in_pass(model, weights, batch, loss_of, watched=[model])
    if not needed.paths:
        return Proof(loss_runs_model=False, refusal=OTHER_MODEL)
    if copy is None:
        return Proof(loss_runs_model=True, refusal=_not_made_or_run(kind, failure))
    try:
        strayed, used = uses_of_copy(copy, model, batch, loss_of)
    except Exception as error:
        return Proof(loss_runs_model=True, refusal=_not_made_or_run(kind, error))
    if strayed.paths:
        return Proof(loss_runs_model=True, refusal=refusal_of(model, strayed, used))

    missing = needed.missing_from(used)
    if missing:
        # the model's first pass may have made a table that all later ones read
        (needed_later,) = _uses_in_pass(model, weights, batch, loss_of, watched=[model])
        missing &= needed_later.missing_from(used)
    if missing:
        why = f"a copy of {kind} does not use {min(missing) or 'the module itself'}, as {kind} does"
        return Proof(loss_runs_model=True, refusal=why)
    return Proof(loss_runs_model=True, copy=copy, copy_s=copy_s)


def uses_of_copy(copy: nn.Module, model: nn.Module, batch: Any, loss_of: Loss) -> tuple[Use, Use]:
    """Run one pass of a copy, and return what it uses of the model that it was made from, and of the copy."""
    weights = weights_apart(copy, model)
    with undisturbed(model):  # a copy that strays runs modules of the model
        strayed, used = _uses_in_pass(copy, weights, batch, loss_of, watched=[model, copy])
    return strayed, used


def _uses_in_pass(
    model: nn.Module, weights: Weights, batch: Any, loss_of: Loss, *, watched: Sequence[nn.Module]
) -> list[Use]:
    """Run one pass of a model, and return what it uses of each model that is watched.

    Its own weights are put back after it: a pass may write to them, as a table with ``max_norm`` does.
    """
    uses = list[Use]()

    def watched_loss(model: nn.Module, batch: Any) -> Any:
        with ExitStack() as stack:
            uses[:] = [stack.enter_context(use_of(each)) for each in watched]
            return loss_of(model, batch)

    try:
        Trace(model, batch, watched_loss).once()
    finally:
        put_back_weights(model, weights)
    return uses


def refusal_of(model: nn.Module, strayed: Use, used: Use) -> str:
    """Say what a pass of a copy used of the original, and what to do about it."""
    kind = type(unwrap(model)).__name__
    if not used.paths:
        return OTHER_MODEL
    where = strayed.paths[0] or "the module itself"
    return (
        f"a copy of {kind} still uses {where} of the original: call only the model that the loss, or the "
        "step, receives, define forward in its class, and hold what that wraps as a submodule"
    )


def _not_made_or_run(kind: str, error: Exception | None) -> str:
    return f"a copy of {kind} cannot be made or run: {type(error).__name__}: {error}"
