"""The best output of a beam search, as the tests want it."""

from normlab.nn.decode import Bounds, search


def beam_search(model, source, *, beams=5, length_penalty=1.0, max_len_ratio=1.5, allowed=None):
    """Return the best output of each source row, as ids; empty if the search found none."""
    bounds = Bounds(max_len_ratio, allowed=allowed)
    outputs = search(model, source, bounds, beams=beams, length_penalty=length_penalty)
    return [hypotheses[0].ids if hypotheses else [] for hypotheses in outputs]
