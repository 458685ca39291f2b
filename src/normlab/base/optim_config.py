"""The settings of an optimizer, its schedule and the loss, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le

from normlab.base.io import Amount, Count, Positive, Share, Size, no_flag, since, validated
from normlab.errors import UserError


@validated
@dataclass(frozen=True)
class OptimConfig:
    """Optimizer, learning-rate schedule and loss."""

    optimiser: str = no_flag("adam")
    lr: Positive = no_flag(1e-3)
    """Peak learning rate of the schedule."""
    betas: tuple[Share, Share] = (0.9, 0.98)
    """Decay rates of Adam's two averages."""
    eps: Positive = 1e-9
    """What Adam adds to the root of the second average."""
    momentum: Share = no_flag(0.0)
    """Momentum of sgd."""
    weight_decay: Amount = 0.0
    """Weight decay: added to the gradient by adam and sgd, decoupled from it in adamw and radam."""
    weight_decay_on: Literal["all", "matrices"] = "all"
    """Parameters that decay: all, or only matrices, without biases and norms, as in BERT."""
    max_grad_norm: Annotated[float, Ge(0)] = 0.0
    """Largest norm of the gradient, beyond which it is clipped; 0: no clipping."""
    clip_by: Literal["all", "role"] = "all"
    """What max_grad_norm bounds: the gradient of all parameters together, or of each role separately."""
    roles: str = ""
    """Optimizer settings by role of the parameters: jordan, nanochat, olmo2 or your own table; '': none."""
    schedule: str = since("linear", introduced="inverse_sqrt", flag=False)
    warmup_steps: Count = 0
    """Length of the warm-up in steps; recipes that warm up take it from a preset, and refuse 0."""
    decay_step: Count = 0
    """Step at which step_decay and step_decay_inverse_sqrt lower the learning rate."""
    decay_factor: Annotated[float, Ge(0), Le(1)] = 0.0
    """Factor of step_decay, step_decay_inverse_sqrt and val_decay; 0: as published (0.1, 0.1 and 0.8)."""
    decay_patience: Size = 3
    """Validations in a row without a new best dev score after which val_decay lowers the learning rate."""
    decay_share: Share = 0.1
    """Share of the steps, at the end, in which wsd and wsd_sqrt lower the learning rate."""
    final_lr_factor: Share = 0.0
    """Factor of the peak learning rate at which linear, cosine, wsd and wsd_sqrt end."""
    stop_lr: Amount = 0.0
    """Learning rate, such as 1e-6, below which the run ends once it has warmed up; 0: never."""
    label_smoothing: Share = 0.1
    """Probability mass that label smoothing spreads over the vocabulary."""
    z_loss: Amount = 0.0
    """Coefficient of the mean square of the logits' log-sum-exp, added to a language model's loss."""

    def __post_init__(self) -> None:
        if self.stop_lr >= self.lr:
            raise UserError(
                f"stop_lr must be below lr, {self.lr!r}, or no run would begin; got {self.stop_lr!r}"
            )
