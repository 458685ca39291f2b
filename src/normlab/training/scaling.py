r"""Scaling of the loss, where gradients are in fp16 and would underflow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from normlab.errors import UserError
from normlab.spec.serialise import from_plain

_SKIPPED: Final = "skipped_steps"


def scaling_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """What ``Scaling.state`` gave, as a checkpoint says it. Raises UserError for anything else."""
    kinds = {name: type(v) for name, v in {**torch.amp.GradScaler("cpu").state_dict(), _SKIPPED: 0}.items()}
    if state and state.keys() != kinds.keys():
        raise UserError(f"scaling has {', '.join(kinds)}, got {', '.join(state)}")
    return {name: from_plain(kinds[name], value, f"scaling.{name}") for name, value in state.items()}


class Scaling:
    r""":math:`g = \nabla(s L) / s`, and no step where g is not finite.

    s halves at such a step, and doubles after 2000 steps without one. Micikevicius et al. 2018, Section 3.2
    (arXiv 1710.03740). Without scaling, every method passes on what it is given.
    """

    def __init__(self, scaler: torch.amp.GradScaler, device: torch.device) -> None:
        self._scaler = scaler
        self._skipped = torch.zeros((), dtype=torch.int64, device=device)

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss to differentiate."""
        scaled: Tensor = self._scaler.scale(loss)
        return scaled

    def unscale(self, optimiser: torch.optim.Optimizer) -> None:
        """Divide the gradients of the optimiser's parameters, once a step."""
        self._scaler.unscale_(optimiser)
        if self._scaler.is_enabled():
            for found in self._scaler._found_inf_per_device(optimiser).values():
                found.squeeze_()  # that of shards has an axis, which no fused optimiser takes

    def step(self, optimiser: torch.optim.Optimizer, norm: Tensor) -> Tensor:
        """The optimiser's step or none; the gradient's norm, 0 where the step was skipped."""
        self._scaler.step(optimiser)
        self._scaler.update()
        if not self._scaler.is_enabled():
            return norm
        finite = norm.isfinite()
        self._skipped += ~finite
        return torch.where(finite, norm, 0.0)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps; empty without scaling."""
        return {**self._scaler.state_dict(), **self._counted()}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from ``state()``; an empty one, of a run in another precision, changes nothing."""
        if state and self._scaler.is_enabled():
            self._skipped.fill_(state[_SKIPPED])
            self._scaler.load_state_dict({key: value for key, value in state.items() if key != _SKIPPED})

    def row(self) -> dict[str, float]:
        """For a row of metrics: the scale, and the steps that were skipped so far."""
        if not self._scaler.is_enabled():
            return {}
        return {"loss_scale": self._scaler.get_scale(), **self._counted()}

    def _counted(self) -> dict[str, int]:
        return {_SKIPPED: int(self._skipped)} if self._scaler.is_enabled() else {}
