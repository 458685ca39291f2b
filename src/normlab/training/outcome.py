"""The outcome of a run, judged from its rows of metrics."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from normlab.spec.outcome import Outcome

Row = dict[str, Any]

WINDOW = 0.1
"""Share of the steps over which the median NLL is taken: batches of short and of long sentences differ by
tenths of a nat, and a spike of a few batches is no divergence."""

WINDOW_ROWS = 3
"""The least number of rows in a window, however short the run."""

STUCK_ABOVE = 0.93
"""Share of the unigram entropy above which a model knows little more than the frequencies of tokens."""

JUDGE_FROM = 0.5
"""Share of the steps before which no run is called stuck: some sit at the unigram entropy and then learn."""

FALLING_BY = 0.005
"""Share of the unigram entropy. A run whose last two windows reach lower than all before by more than this is
still falling. A slower one would need more steps than it has left to come clear of ``STUCK_ABOVE``."""

DIVERGED_ABOVE = 0.5
"""Nats above the first step's loss: far more than batches differ by at the start."""

_NAMES = {"loss": "loss", "nll": "NLL", "grad_norm_l2": "gradient norm"}


def outcome(
    metrics: Sequence[Row], *, unigram_entropy_nats: float, total_steps: int, final: bool
) -> Outcome | None:
    """Judge whether a run is trained, stuck or diverged; None while that is open.

    ``now`` is the median NLL of the last ``WINDOW`` of the steps, without label smoothing, in nats per target
    token. *Diverged*: a loss or gradient norm that is not finite; or every loss of that window above
    the first step's by ``DIVERGED_ABOVE``, and not falling. *Stuck*: ``now`` above ``STUCK_ABOVE`` of the
    unigram entropy once ``final``; from ``JUDGE_FROM`` of the steps on if no window was lower and it is not
    falling. *Trained*: the rest, once ``final``.
    """
    rows = [row for row in metrics if row["kind"] == "train"]
    broken = _not_finite(metrics)
    if broken or not rows:
        return broken
    step, start = rows[-1]["step"], rows[0]["nll"]
    windows = _windows(rows, total_steps)
    middles = [statistics.median(window) for window in windows]
    now = middles[0] if middles else start
    enough = len(middles) >= 3
    falling = not enough or min(middles[:2]) < min(middles[2:]) - FALLING_BY * unigram_entropy_nats
    trend = ", still falling" if enough and falling else ""

    if middles and min(windows[0]) > start + DIVERGED_ABOVE and (final or not falling):
        return Outcome("diverged", step, f"NLL {now:.2f} nats per token, above the {start:.2f} it began with")
    limit = STUCK_ABOVE * unigram_entropy_nats
    hopeless = step >= JUDGE_FROM * total_steps and not falling and min(middles) > limit
    if now > limit and (final or hopeless):
        return Outcome("stuck", step, _stuck(now, min(middles, default=now), unigram_entropy_nats) + trend)
    if not final:
        return None
    return Outcome("trained", step, f"NLL {now:.2f} nats per token, from {start:.2f} at the start")


def _stuck(now: float, lowest: float, entropy: float) -> str:
    before = f" (it had been {lowest:.2f})" if lowest <= STUCK_ABOVE * entropy else ""
    return f"NLL {now:.2f} nats per token{before}, where token frequencies alone give {entropy:.2f}"


def _not_finite(metrics: Sequence[Row]) -> Outcome | None:
    """Return *diverged* for the first row, of training or of dev, that holds a value that is not finite."""
    for row in metrics:
        for name, said in _NAMES.items():
            if not math.isfinite(row.get(name, 0.0)):
                where = "dev " if row["kind"] == "dev" else ""
                return Outcome("diverged", row["step"], f"{where}{said} is {row[name]} at step {row['step']}")
    return None


def _windows(rows: Sequence[Row], total_steps: int) -> list[list[float]]:
    """The NLLs by window, the last one first; the first row is the start and belongs to none.

    Windows are counted back from the last row, so that they do not jump as a run goes on.
    """
    first, last = rows[0]["step"], rows[-1]["step"]
    cadence = (last - first) / max(1, len(rows) - 1)
    width = max(WINDOW * total_steps, WINDOW_ROWS * cadence, 1)
    found: dict[int, list[float]] = {}
    for row in reversed(rows[1:]):
        found.setdefault(int((last - row["step"]) / width), []).append(row["nll"])
    return list(found.values())
