"""The copies of one model: whether they may stand in for it, and who gets them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from torch import nn

from normlab.setups.setup import Loss
from normlab.trace.copies import Proof, copied_model, proof_of
from normlab.trace.facts import Unknown


class ModelCopies:
    """Copies of a model, once it is proved that they may stand in for it.

    The proof runs a copy. Whoever asks for a copy first gets that one: of a large model, every copy counts.
    """

    def __init__(self, model: nn.Module, batches: Sequence[Any], loss_of: Loss) -> None:
        """Prepare the proof, which runs on the first batch that the model accepts. What it raises on the last
        one is raised.
        """
        self.model, self.loss_of = model, loss_of
        self._batches = batches
        self._spare: nn.Module | None = None

    @cached_property
    def _proof(self) -> Proof:
        """What the proof showed, without the copy that it ran, which is kept apart until it is handed out."""
        proof = self._prove()
        self._spare = proof.copy
        return proof._replace(copy=None)

    def _prove(self) -> Proof:
        *parts, last = self._batches
        for part in parts:
            with suppress(Exception):  # the model may accept no part of its batch
                return proof_of(self.model, part, self.loss_of)
        return proof_of(self.model, last, self.loss_of)

    @property
    def refusal(self) -> str:
        """Why no copy may stand in for the model, and what to do; empty if one may."""
        return self._proof.refusal

    @property
    def may_stand_in(self) -> bool:
        """Whether copies may stand in for the model. If not, passes are those of the model itself."""
        return not self.refusal

    @property
    def loss_runs_model(self) -> bool:
        """Whether the loss runs the model that it is given."""
        return self._proof.loss_runs_model

    @property
    def seconds(self) -> float:
        """How long making a copy takes."""
        return self._proof.copy_s

    @property
    def spare(self) -> nn.Module | None:
        """The copy that the proof has run, with the model's weights, unless it has been handed out."""
        _ = self._proof
        return self._spare

    def require(self) -> None:
        """Raise Unknown, with the reason, if copies may not stand in for the model."""
        if not self.may_stand_in:
            raise Unknown(self.refusal)

    def make(self) -> nn.Module:
        """Return a copy of the model, without gradients, which may be changed.

        Raises Unknown if copies may not stand in for the model.
        """
        self.require()
        copy = self.spare
        if copy is None:
            copy = copied_model(self.model)
        self._spare = None
        nn.Module.zero_grad(copy)  # also if the class has a method of its own by this name
        return copy
