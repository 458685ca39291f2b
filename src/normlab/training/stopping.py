"""Rules that end a run before its last step although nothing went wrong."""

from __future__ import annotations

from normlab.spec.config import Config


def why_stop(config: Config, *, step: int, waited: int, next_lr: float) -> str:
    """Return the reason to end the run after this step; empty if it should go on.

    The run ends once ``waited``, the number of validations since the best one, reaches
    ``train.early_stopping_patience``, or, after the warm-up, once ``next_lr``, the learning rate of the next
    step, is below ``optim.stop_lr``.

    Both are rules of Nguyen and Salazar 2019, Appendix A (arXiv 1910.05895), whose limit is 1e-6 and whose
    patience is 20 validations, 50 for their smallest pair.
    """
    patience, least = config.train.early_stopping_patience, config.optim.stop_lr
    if patience and waited >= patience:
        many = f"{waited} validations in a row" if waited > 1 else "a validation"
        return f"{many} brought no new best dev score"
    if step >= max(1, config.optim.warmup_steps) and next_lr < least:
        return f"the learning rate fell to {next_lr:.3g}, below {least:.3g}"
    return ""
