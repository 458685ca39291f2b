"""When a run ends before its last step although nothing went wrong."""

from __future__ import annotations

from normlab.spec.config import Config


def why_stop(config: Config, *, step: int, waited: int, next_lr: float) -> str:
    """Why the run ends after this step; empty where it goes on.

    ``waited`` validations in a row brought no new best dev score, and the step after this one would take
    ``next_lr``. A rate below ``optim.stop_lr`` ends a run after its warm-up.

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
