"""training-doctor: its detectors on the log of a short run, told step by step."""

from __future__ import annotations

from training import STEPS_OF_A_LOG, Finding, PublicCase, logged, training

PACKAGE = "training-doctor"
HOW = (
    f"`Doctor().log` of loss, rate and gradient norm at each of {STEPS_OF_A_LOG} steps; warnings and "
    "critical diagnoses count"
)
ASKS_PLACE = False
STATES = {
    "lr_too_high": ("schedule", "step", "finite"),
    "lr_too_low": ("schedule", "step", "learns"),
    "plateau": ("learns",),
    "early_plateau": ("learns",),
    "gradient_instability": ("step", "finite"),
    "mixed_precision_instability": ("precision",),
}


def states(check: str) -> tuple[str, ...]:
    """Return the causes that a detector states."""
    return STATES.get(check, ())


def findings(case: PublicCase) -> list[Finding]:
    """Return the diagnoses at any step."""
    from training_doctor import Doctor

    doctor, told = Doctor(), []
    for record in logged(training(case)):
        step = int(record.pop("step"))
        told += doctor.log(step, **record)
    counted = [each for each in told if each.severity.value in ("warning", "critical")]
    return [Finding(each.detector_name, "", f"{each.problem}. {each.explanation}"[:300]) for each in counted]
