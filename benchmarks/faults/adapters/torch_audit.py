"""torch-audit: its rules over five steps of the case's own loop, by ``autopatch``."""

from __future__ import annotations

import torch
from training import Finding, PublicCase, training

PACKAGE = "torch-audit"
HOW = "`autopatch` with every rule, audited at each of five steps of the case's own loop; warnings count"
ASKS_PLACE = False
STEPS = 5
ADVICE = ("TA200", "TA201", "TA202", "TA203")
"""Rules on speed and hardware, which call no step wrong: they count neither for nor against the tool."""
STATES = {
    "TA100": ("finite",),
    "TA102": ("start", "finite"),
    "TA103": ("gradients", "reach"),
    "TA104": ("gradients", "frozen", "reach"),
    "TA105": ("gradients", "reach"),
    "TA302": ("inputs",),
    "TA305": ("inputs", "counted"),
    "TA401": ("groups", "update"),
    "TA402": ("groups",),
    "TA403": ("groups",),
    "TA405": ("start", "gradients"),
    "TA500": ("gradients", "reach"),
    "TA501": ("ties", "siblings"),
}


def states(check: str) -> tuple[str, ...]:
    """Return the causes that a rule states; a rule about groups counts for every fault of groups."""
    return STATES.get(check, ())


def findings(case: PublicCase) -> list[Finding]:
    """Return what the rules say of the case's loop, each finding once."""
    from torch_audit import autopatch
    from torch_audit.core import Severity

    steps = training(case)
    torch.manual_seed(0)
    auditor = autopatch(steps.model, optimizer=steps.optimizers[0], every_n_steps=1)
    for _ in range(STEPS):
        steps.step()
    result = auditor.finish(report=False)
    counted = [finding for finding in result.findings if finding.severity >= Severity.WARN]
    places = ((f, ".".join(filter(None, (f.module_path, f.entity)))) for f in counted)
    each = [Finding(finding.rule_id, place, finding.message[:300]) for finding, place in places]
    return list(dict.fromkeys(each))  # a rule speaks again at each step
