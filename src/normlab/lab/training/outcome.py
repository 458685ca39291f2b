"""The outcome of a run, judged by its rows of metrics, and the rules that stop it before its last step."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from normlab.base.metric import IGNORES_SOURCE, MOSTLY, Outcome
from normlab.lab.config import Config
from normlab.lab.runs.folder import Row

WINDOW = 0.1
"""Share of the steps over which the median NLL is taken: batches of short and of long sentences differ by
tenths of a nat, and a spike over a few batches is not a divergence."""
WINDOW_ROWS = 3
"""The least number of rows in a window, however short the run."""
STUCK_ABOVE = 0.93
"""Share of the unigram entropy above which a model knows little more than the frequencies of tokens."""
JUDGE_FROM = 0.5
"""Share of the steps before which no run is called stuck: some sit at the unigram entropy and then learn."""
FALLING_BY = 0.005
"""Share of the unigram entropy. A run is still falling if its last two windows reach lower than all earlier
ones by more than this. A slower one would not get below ``STUCK_ABOVE`` in the steps it has left."""
DIVERGED_ABOVE = 0.5
"""Nats above the first step's loss, far more than the difference between batches at the start."""
READS_BY = 0.05
"""Nats per token. If a model reads its source, exchanging sources raises the loss by at least this much."""
_NAMES = {"loss": "loss", "nll": "NLL", "grad_norm_l2": "gradient norm"}
"""What must be finite in a row, in words."""


def outcome(
    metrics: Sequence[Row],
    *,
    unigram_entropy_nats: float,
    total_steps: int,
    best_step: int | None,
    has_source: bool,
    final: bool,
) -> Outcome | None:
    """Judge whether a run is trained, stuck, diverged or ignores its source; None while that is open.

    NLLs are without label smoothing, in nats per target token. A run *diverged* if a loss or a gradient norm
    is not finite, or if every loss of the last ``WINDOW`` of the steps is above the first step's by
    ``DIVERGED_ABOVE``; before the end, it must also not be falling. From ``JUDGE_FROM`` of the steps on, a
    run is *stuck* if no window's median and no dev NLL was ever below ``STUCK_ABOVE`` of the unigram entropy
    and it is not falling. Nothing else is decided before the end.

    Once ``final``, the dev row of ``best_step``, measured without dropout, decides. These weights are kept,
    tested and compared; if the training ended worse, the evidence says so, and the verdict stays. Divergence
    is final, even if the run had learned something first.

    - *diverged*: the dev NLL is above the start by ``DIVERGED_ABOVE``
    - *stuck*: it is above ``STUCK_ABOVE`` of the unigram entropy, unless the loss has fallen all the time
    - *ignores its source*: ``nll_exchanged``, with sources exchanged among the examples, is higher than the
      NLL by less than ``READS_BY``; or one output makes up more than ``MOSTLY`` of all (``repeated_share``)
    - *trained*: the rest
    """
    rows = [row for row in metrics if row["kind"] == "train"]
    broken = _not_finite(metrics)
    if broken or not rows:
        return broken
    course = _Course(rows, unigram_entropy_nats, total_steps)
    if course.above_start and (final or not course.falling):
        return Outcome("diverged", course.step, _above(f"NLL {course.now:.2f}", course.start))
    dev = {row["step"]: row for row in metrics if row["kind"] == "dev"}
    if final:
        if best_step not in dev:
            return None
        return _ended(course, dev[best_step], has_source=has_source)
    lowest = min([course.now, *course.middles, *(row["nll"] for row in dev.values())])
    too_early = course.step < JUDGE_FROM * total_steps
    if too_early or course.falling or lowest <= course.limit:
        return None
    return Outcome("stuck", course.step, _stuck(f"NLL {course.now:.2f}", course.entropy))


class _Course:
    """The course of the training loss by window, the last window first."""

    def __init__(self, rows: Sequence[Row], entropy: float, total_steps: int) -> None:
        self.step, self.start, self.entropy = rows[-1]["step"], rows[0]["nll"], entropy
        self.limit = STUCK_ABOVE * entropy
        windows = _windows(rows, total_steps)
        self.middles = [statistics.median(row["nll"] for row in window) for window in windows]
        self.now = self.middles[0] if windows else self.start
        self.above_start = False
        """Whether every loss of the last window is above the start."""
        if windows:
            self.above_start = min(row["nll"] for row in windows[0]) > self.start + DIVERGED_ABOVE
        rates = [row["lr"] for row in rows[-2:] if "lr" in row]
        rising = len(rates) == 2 and rates[1] > rates[0]
        self.warming = "; its learning rate still rose" if rising else ""
        self.falling = self._fell(0)
        """Whether the loss is falling, or too young to tell."""
        self.trend = "; its training loss still fell" if self.falling and len(self.middles) >= 3 else ""
        """The end of a sentence if the loss is known to be falling, else empty."""
        late = sum(window[0]["step"] >= JUDGE_FROM * total_steps for window in windows)
        self.always_fell = bool(self.trend) and all(map(self._fell, range(late)))
        """Whether the loss is known to be falling, and has been ever since a run can be called stuck."""

    def _fell(self, back: int) -> bool:
        """Whether the loss fell, as seen ``back`` windows ago."""
        middles = self.middles[back:]
        if len(middles) < 3:
            return True
        return min(middles[:2]) < min(middles[2:]) - FALLING_BY * self.entropy


def _ended(course: _Course, best: Row, *, has_source: bool) -> Outcome:
    """Judge a run that ended without diverging in training, by the dev row of the weights it keeps."""
    nll, reached = best["nll"], f"dev NLL {best['nll']:.2f}"
    if nll > course.start + DIVERGED_ABOVE:
        return Outcome("diverged", course.step, _above(reached, course.start))
    if nll > course.limit and not course.always_fell:
        return Outcome("stuck", course.step, _stuck(reached, course.entropy) + course.trend + course.warming)
    gap = best.get("nll_exchanged", math.nan) - nll
    share = best.get("repeated_share", 0.0)
    where = f" at step {best['step']:,}" if best["step"] != course.step else ""
    evidence = [f"{reached} nats per token{where}, from {course.start:.2f} at the start"]
    if not math.isnan(gap):
        evidence.append(f"{gap:+.2f} with sources exchanged")
    elif has_source:
        evidence.append("source not exchanged")
    if share > MOSTLY:
        evidence.append(f"{math.floor(100 * share)}% of the outputs are one and the same")
    if nll <= course.limit < course.now:
        evidence.append(f"{course.now:.2f} at the end of training")
    state = IGNORES_SOURCE if ignores_source(best) else "trained"
    return Outcome(state, course.step, "; ".join(evidence) + course.trend)


def ignores_source(validation: Row) -> bool:
    """Whether a validation says that outputs do not depend on the source, see ``outcome``."""
    gap = validation.get("nll_exchanged", math.nan) - validation["nll"]
    return bool(gap < READS_BY or validation.get("repeated_share", 0.0) > MOSTLY)


def _above(reached: str, start: float) -> str:
    return f"{reached} nats per token, above the {start:.2f} it began with"


def _stuck(reached: str, entropy: float) -> str:
    return f"{reached} nats per token, where token frequencies alone give {entropy:z.2f}"


def _not_finite(metrics: Sequence[Row]) -> Outcome | None:
    """Return *diverged* for the first row, of training or dev, with a value that is not finite."""
    for row in metrics:
        for name, label in _NAMES.items():
            if math.isfinite(row.get(name, 0.0)):
                continue
            where = "dev " if row["kind"] == "dev" else ""
            return Outcome("diverged", row["step"], f"{where}{label} is {row[name]} at step {row['step']}")
    return None


def _windows(rows: Sequence[Row], total_steps: int) -> list[list[Row]]:
    """Return the rows by window, the last window first; the first row is the start and belongs to none.

    Windows are counted back from the last row, so they do not jump as a run goes on.
    """
    first, last = rows[0]["step"], rows[-1]["step"]
    cadence = (last - first) / max(1, len(rows) - 1)
    width = max(WINDOW * total_steps, WINDOW_ROWS * cadence, 1)
    windows: dict[int, list[Row]] = {}
    for row in reversed(rows[1:]):
        windows.setdefault(int((last - row["step"]) / width), []).append(row)
    return list(windows.values())


def why_stop(config: Config, *, step: int, waited: int, next_lr: float) -> str:
    """Return the reason to end the run after this step although nothing is wrong; empty if there is none.

    The run ends once ``waited``, the number of validations since the best one, reaches
    ``train.early_stopping_patience``, or, after the warm-up, once ``next_lr``, the learning rate of the next
    step, is below ``optim.stop_lr``.

    Both rules are from Nguyen and Salazar 2019, Appendix A (arXiv 1910.05895), who use a limit of 1e-6 and a
    patience of 20 validations, or 50 for their smallest pair.
    """
    patience, least = config.train.early_stopping_patience, config.optim.stop_lr
    if patience and waited >= patience:
        many = f"{waited} validations in a row" if waited > 1 else "a validation"
        return f"{many} brought no new best dev score"
    if step >= max(1, config.optim.warmup_steps) and next_lr < least:
        return f"the learning rate fell to {next_lr:.3g}, below {least:.3g}"
    return ""
