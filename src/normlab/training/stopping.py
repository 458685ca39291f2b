"""The end of a run: its last step, a rule that stops it before, or an outcome that is clear."""

from __future__ import annotations

from normlab.config.config import Config
from normlab.config.outcome import Outcome
from normlab.training.outcome import outcome
from normlab.training.rows import Rows
from normlab.training.trainer import Trainer


def why_stop(config: Config, *, step: int, waited: int, next_lr: float) -> str:
    """Return the reason to end the run after this step although nothing went wrong; empty if there is none.

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


class Ending:
    """Tells whether a run has ended, and its outcome so far."""

    def __init__(self, trainer: Trainer, rows: Rows) -> None:
        self._trainer, self._rows = trainer, rows
        self.outcome: Outcome | None = None
        self.judge(final=self.over)

    @property
    def over(self) -> bool:
        """Whether the last step is done, or a rule has stopped the run."""
        progress = self._trainer.progress
        return progress.step >= self._trainer.config.train.steps or bool(progress.stopped)

    @property
    def reached(self) -> bool:
        """Whether the run makes no further step: it is over, or it failed and stops early."""
        failed = self.outcome is not None and self.outcome.state != "trained"
        return self.over or (failed and self._trainer.config.train.stop_early)

    def judge(self, *, final: bool) -> None:
        """Judge the outcome by the rows so far."""
        progress = self._trainer.progress
        self.outcome = outcome(
            self._rows.written,
            unigram_entropy_nats=self._trainer.task.corpus.unigram_entropy_nats,
            total_steps=progress.step if progress.stopped else self._trainer.config.train.steps,
            best_step=progress.best_step,
            has_source=self._trainer.task.has_source,
            final=final,
        )

    def consider_stopping(self) -> None:
        """Note in the progress whether a rule stops the run here."""
        progress = self._trainer.progress
        if not self.over:
            next_lr = self._trainer.learning_rate(1)
            progress.stopped = why_stop(
                self._trainer.config, step=progress.step, waited=progress.waited, next_lr=next_lr
            )
