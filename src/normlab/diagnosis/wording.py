"""How findings write numbers, shares and the beginning of a warm-up."""

from __future__ import annotations

import math

from normlab.diagnosis.tables import Value


def format_number(value: Value) -> str:
    """Write a number with three significant digits, or all digits before the point."""
    if isinstance(value, float):
        return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"
    return str(value)


def format_share(share: float) -> str:
    """Write a share as a percentage, with two significant digits below one per cent."""
    return f"{100 * share:.2g}%" if 0 < abs(share) < 0.01 else f"{share:.0%}"


def format_cosine(value: float) -> str:
    """Write a cosine with two decimals, and zero without a sign."""
    return f"{round(value, 2) + 0.0:.2f}"  # -0.0 + 0.0 is 0.0


def at_peak(first: str, warmup_steps: int, first_share: float) -> str:
    """Say that a change is at the peak of the rate, and how large the first one of a warm-up is; empty
    without a warm-up.
    """
    if not warmup_steps:
        return ""
    return f" at the peak of the learning rate, and by {first} {start_of_warmup(warmup_steps, first_share)}"


def start_of_warmup(warmup_steps: int, first_share: float) -> str:
    """Say at what share of the learning rate the first step of a warm-up is."""
    in_proportion = math.isclose(first_share * warmup_steps, 1, rel_tol=1e-6)
    share = f"1/{warmup_steps}" if in_proportion else format_share(first_share)
    return f"at {share} of the learning rate, where the warm-up of {warmup_steps:,} steps begins"
