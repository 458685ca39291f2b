"""The property of norms: modules that are norms by what they do, and the one before the head."""

from __future__ import annotations

from torch import Tensor

from normlab.checks.property import Answers, Untestable, fail, note, property_of
from normlab.checks.step import Step
from normlab.checks.structure import streams_in
from normlab.trace.exact import from_library
from normlab.trace.facts.norming import gains, responses
from normlab.trace.facts.stacks import Scaled, grown, scaled_streams


@property_of("structure", explains=["siblings", "start", "initial_loss", "overfit"], passes=4)
def norms(step: Step) -> Answers:
    """A norm gives each token's features one size, whatever their scale; and one stands before the head.

    A module whose own parameters are vectors and whose output at one feature depends on the others is a norm:
    its output must not change with the scale of its input, nor with other tokens. The entries of a gain have
    one sign. Where blocks add to a stream that they norm themselves, the logits must not grow with it.
    """
    tried = responses(step.exact)
    for one in tried:
        if one.grows and one.mixes and one.has_vector:
            say = f"its output changes by {one.grows:.1g} of its size when its input is ten times as large"
            yield fail(one.module, say, "divide by the root mean square, or the deviation, of the features")
            return
        if one.leaks and not one.grows:
            say = "what it makes of a token depends on others"
            yield fail(one.module, say, "take its statistics over features")
            return
    normed = [one for one in tried if one.mixes and not one.grows]
    known = gains(step.plain, normed)
    if len(known) > 1 and all(map(_scatters, known.values())):
        first, gain = next(iter(known.items()))
        say = f"its gains scatter around zero ({float(gain.mean()):.2g} ± {float(gain.std()):.2g})"
        more = f"{say}, as in {len(known) - 1} other norms"
        yield fail(first, more, "read a gain that is kept as an offset as 1 + w, or draw it as ones")
        return
    scaled: Scaled | None = step.kept.get("scaled streams")
    if scaled is not None:
        yield from _before_the_head(step, scaled)
    elif not normed:
        raise Untestable("no module is a norm, and no stack adds to a stream")


def _scatters(gain: Tensor) -> bool:
    """Whether the signs of a gain are those of a fair coin, by three deviations; or it is zero."""
    count = gain.numel()
    return abs(int((gain < 0).sum()) - count / 2) <= 1.5 * count**0.5 or not bool(gain.any())


def _before_the_head(step: Step, scaled: Scaled) -> Answers:
    last = next((path for path, _ in reversed(step.facts.order) if path in scaled.factors), None)
    if last is None or scaled.factors[last] != 1.0 or not grown(*map(step.logits, scaled.runs)):
        return
    own = step.fresh.exact(step.plain)
    if own is not None:
        meant = grown(*map(step.logits, scaled_streams(own, streams_in(step)).runs))
    else:
        meant = from_library(step.model.get_submodule(last)) and not from_library(step.model)
    say = "the logits grow in proportion to the last block's stream: no norm stands between"
    yield note(last, say) if meant else fail(last, say, "norm the stream before the head")
