"""Scaling of the loss, where gradients are in fp16 and would underflow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from normlab.config.io import from_plain
from normlab.errors import UserError

_SKIPPED: Final = "skipped_steps"


class Scaling:
    r""":math:`g = \nabla(s L) / s`, and no step where g is not finite.

    s halves at such a step, and doubles after 2000 steps without one. Micikevicius et al. 2018, Section 3.2
    (arXiv 1710.03740). Without scaling, every method passes its argument on.
    """

    def __init__(self, scaler: torch.amp.GradScaler, device: torch.device) -> None:
        self._scaler = scaler
        self._skipped = torch.zeros((), dtype=torch.int64, device=device)

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss to differentiate."""
        scaled: Tensor = self._scaler.scale(loss)
        return scaled

    def unscale(self, optimiser: torch.optim.Optimizer) -> None:
        """Divide the gradients of the optimiser's parameters, once a step."""
        self._scaler.unscale_(optimiser)
        if self._scaler.is_enabled():
            for found in self._scaler._found_inf_per_device(optimiser).values():
                found.squeeze_()  # that of shards has an axis, which no fused optimiser takes

    def step(self, optimiser: torch.optim.Optimizer, norm: Tensor) -> Tensor:
        """Let the optimiser step, or skip it; return the gradient's norm, 0 where the step was skipped."""
        self._scaler.step(optimiser)
        self._scaler.update()
        if not self._scaler.is_enabled():
            return norm
        finite = norm.isfinite()
        self._skipped += ~finite
        return torch.where(finite, norm, 0.0)

    def state_dict(self) -> dict[str, Any]:
        """The scale, its history and the skipped steps; empty without scaling."""
        return {**self._scaler.state_dict(), **self._counted()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict()``; an empty one, of a run in another precision, changes nothing.

        Raises UserError for anything else.
        """
        kinds = {n: type(v) for n, v in {**torch.amp.GradScaler("cpu").state_dict(), _SKIPPED: 0}.items()}
        if state and state.keys() != kinds.keys():
            raise UserError(f"scaling has {', '.join(kinds)}, got {', '.join(state)}")
        read = {name: from_plain(kinds[name], value, f"scaling.{name}") for name, value in state.items()}
        if read and self._scaler.is_enabled():
            self._skipped.fill_(read.pop(_SKIPPED))
            self._scaler.load_state_dict(read)

    def row(self) -> dict[str, float]:
        """Return the scale and the number of skipped steps, for a row of metrics."""
        if not self._scaler.is_enabled():
            return {}
        return {"loss_scale": self._scaler.get_scale(), **self._counted()}

    def _counted(self) -> dict[str, int]:
        return {_SKIPPED: int(self._skipped)} if self._scaler.is_enabled() else {}
