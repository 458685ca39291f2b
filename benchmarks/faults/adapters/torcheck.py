"""torcheck: parameters that must change or stay, NaN and infinity, while the case's own loop runs."""

from __future__ import annotations

from fnmatch import fnmatchcase

from training import Finding, PublicCase, training

PACKAGE = "torcheck"
HOW = "checks of change, NaN and infinity on every parameter, over three steps of the case's own loop"
ASKS_PLACE = False
STEPS = 3
STATES = {
    "should change": ("gradients", "update", "optimizer_coverage", "frozen", "schedule"),
    "should not change": ("frozen", "groups"),
    "NaN": ("finite",),
    "inf": ("finite",),
    "not in an optimizer": ("optimizer_coverage",),
}


def states(check: str) -> tuple[str, ...]:
    """Return the causes that a kind of message states."""
    return STATES.get(check, ())


def kind_of(line: str) -> str:
    """Return which kind of message a line is."""
    return next((kind for kind in STATES if kind in line), "other")


def findings(case: PublicCase) -> list[Finding]:
    """Return what is said of each parameter, whether it ought to change or not."""
    from torcheck.registry import Registry

    steps, registry = training(case), Registry()
    frozen = steps.arguments.get("declare", {}).get("frozen", ())
    for optimizer in steps.optimizers:
        registry.register(optimizer)
    told = []
    for name, parameter in steps.model.named_parameters():
        still = any(fnmatchcase(name, glob) for glob in frozen)
        if parameter in registry.tensor_to_optimizer:
            changing = parameter.requires_grad and not still
            registry.add_tensor(parameter, name, changing=changing, check_nan=True, check_inf=True)
        elif parameter.requires_grad and not still:
            told.append(Finding("not in an optimizer", name, "The tensor doesn't belong to any optimizer."))
    for _ in range(STEPS):
        try:
            steps.step()
        except RuntimeError as failed:
            lines = [line for line in str(failed).splitlines() if kind_of(line) != "other"]
            if not lines:
                raise
            told += [Finding(kind_of(line), line.split()[0], line[:300]) for line in lines]
    return list(dict.fromkeys(told))
