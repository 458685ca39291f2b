"""Names of ``normlab.trace`` as the studies of ``preflight`` know them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from normlab.trace import trace
from normlab.trace.functions import Preserve
from normlab.trace.tensors import (
    Call,
    Place,
    Side,
    Tap,
    activations,
    at,
    call_model,
    call_of,
    forward_hooks,
    tensors_in,
)
from normlab.trace.untouched import undisturbed

leaves, watching = tensors_in, forward_hooks


@contextmanager
def capture(model: nn.Module, taps: Iterable[Tap]) -> Iterator[dict[Tap, Tensor]]:
    """Fill the dictionary with the tensors at these taps in one pass that runs inside this block."""
    watch = trace._Watch(model, list(taps), graph=True, events=False)
    with forward_hooks(watch.modules(events=False), watch.see), Preserve(watch.held):
        yield watch.held


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Keep the model in evaluation mode inside this block, without gradients."""
    with undisturbed(model, seed=None), torch.no_grad():
        yield


__all__ = ["Call", "Place", "Side", "Tap", "activations", "at", "call_model", "call_of"]
