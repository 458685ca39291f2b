"""Names of ``normlab.trace`` as the studies of ``preflight`` know them."""

from __future__ import annotations

from normlab.trace.step import Gradients, Weights, trainable
from normlab.trace.trace import at_weights

LossGradients = Gradients

__all__ = ["LossGradients", "Weights", "at_weights", "trainable"]
