"""The rates that a loop sets by hand, as in ``group["lr"] = rate_at(step)``, and what they lead to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.optim import Optimizer

from normlab.setups.recording import Recording


@dataclass(frozen=True)
class RatesByHand:
    """The rates of one optimizer's groups: in the first steps, and as the optimizer was made.

    A loop that warms up begins below its peak. That is taken to be the rate that the optimizer was made with,
    as torch's own schedules take it, if the loop begins below that; otherwise nothing says how far it goes.
    """

    seen: Sequence[Sequence[float]]
    """The rates of the groups in each step."""
    made_with: Sequence[float]

    @property
    def rise(self) -> bool:
        """Whether the loop warms up."""
        return max(self.seen[-1]) > max(self.seen[0])

    @property
    def have_a_known_peak(self) -> bool:
        """Whether something says how far the rates rise, if they do."""
        return not self.rise or max(self.made_with) > max(self.seen[-1])

    @property
    def peaks(self) -> list[float]:
        """The largest rate of each group, as far as it is known."""
        if self.rise and self.have_a_known_peak:
            return list(self.made_with)
        return [max(rates) for rates in zip(*self.seen, strict=True)]

    @property
    def fact(self) -> str:
        """What was seen, for a report."""
        largest = [f"{max(rates):.3g}" for rates in self.seen]
        fact = f"set by hand: {', '.join(largest)}"
        if not self.rise:
            return fact
        if not self.have_a_known_peak:
            return f"{fact}; {self.unknown}"
        return f"{fact}; {max(self.made_with):.3g}, which the optimizer was made with, counts as the peak"

    @property
    def unknown(self) -> str:
        """Why the peak is not known."""
        return (
            f"the loop raises the rate by hand, to {max(self.seen[-1]):.3g} in {len(self.seen)} steps, and "
            "nothing says how far; make the optimizer with the largest rate, as in AdamW(parameters, lr=3e-4)"
        )


def rates_by_hand(recording: Recording, optimizer: Optimizer) -> RatesByHand | None:
    """Return the rates that the loop itself has set in this optimizer's groups; None if it has set none."""
    seen = [e.rates for e in recording.events if e.kind == "step" and e.subject is optimizer and e.rates]
    made_with = recording.made_with.get(id(optimizer), ())
    same_groups = all(len(rates) == len(made_with) for rates in seen)
    if recording.schedulers or not seen or not made_with or not same_groups:
        return None
    if all(tuple(rates) == tuple(made_with) for rates in seen):
        return None
    return RatesByHand(seen, made_with)


def with_rates(optimizer: Optimizer, rates: Sequence[float]) -> Optimizer:
    """Return an optimizer of the same parameters and state whose groups have these rates."""
    if [group["lr"] for group in optimizer.param_groups] == list(rates):
        return optimizer
    other: Optimizer = object.__new__(type(optimizer))  # copy.copy would leave out what a subclass has added
    vars(other).update(vars(optimizer))
    groups = zip(optimizer.param_groups, rates, strict=True)
    other.param_groups = [{**group, "lr": rate} for group, rate in groups]
    return other
