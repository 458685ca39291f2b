"""The loss of a step, from what a loop gives or from what the model puts out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class Losses:
    """Collects the losses of the micro-batches of a step, on the device.

    Those that a loop gives count before those in the model's output. Where the model is told over how many
    tokens of all micro-batches it averages (``num_items_in_batch``, by Hugging Face's trainer), its losses
    are shares that add up to that of the step; else the step's is their mean.
    """

    def __init__(self) -> None:
        self._given: list[Tensor] = []
        self._seen: list[Tensor] = []
        self._shares = False

    def __bool__(self) -> bool:
        return bool(self._given or self._seen)

    def give(self, loss: Tensor | float) -> None:
        """Take note of the loss of a micro-batch that the loop gives."""
        self._given.append(torch.as_tensor(loss).detach().mean())

    def see(self, output: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
        """Take note of the loss in the model's output, if it has one; return it if it is no share.

        It is called ``loss``, as in those of Hugging Face, or it is the only tensor without dimensions, as
        in the ``(logits, loss)`` of nanoGPT, and has a gradient.
        """
        if (loss := loss_in(output)) is None or not loss.requires_grad:
            return None
        self._shares = kwargs.get("num_items_in_batch") is not None
        self._seen.append(loss.detach().mean())
        return None if self._shares else loss

    def of_step(self) -> Tensor | None:
        """The loss of the step, or None if none was seen."""
        known = self._given or self._seen
        if not known:
            return None
        together = torch.stack(known)
        return together.sum() if self._shares and not self._given else together.mean()

    def clear(self) -> None:
        """Forget the losses of a step that is over."""
        self._given.clear()
        self._seen.clear()


def loss_in(output: Any) -> Tensor | None:
    """Return the loss in a model's output, if it has one; see ``Losses.see``."""
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(named, Tensor):
        return named
    among = output if isinstance(output, (tuple, list)) else [output]
    numbers = [x for x in among if isinstance(x, Tensor) and x.ndim == 0]
    return numbers[0] if len(numbers) == 1 else None
