"""What a model costs, as data: parameters, and the floating-point operations of a training step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """Parameters of a model, and the multiplications and additions of matrix products in training.

    ``flops`` are those of the forward and backward pass of one batch, in which ``tokens`` are predicted.
    """

    parameters: int
    without_embeddings: int
    """Parameters outside the embeddings and without tied heads."""
    flops: int
    tokens: int = 0
    """0 if not known."""

    @property
    def flops_per_token(self) -> float | None:
        """FLOPs for each predicted token; None if the tokens are not known."""
        return self.flops / self.tokens if self.tokens else None


def amount(number: float) -> str:
    """Return a large number in three digits: ``12.6M``, ``1.04e+15``."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size <= number < 1000 * size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def ratio(a: float, b: float) -> str:
    """Return how ``a`` compares with ``b``: ``+3.1%``, ``equal``."""
    return "equal" if a == b else f"{100 * (a - b) / b:+.2g}%" if b else "more than none"
