"""GPAS scales the stream forwards and leaves its gradient alone."""

import torch

from contracts.variants import build, uniform


def test_the_scale_of_the_stream_is_not_in_its_gradient():
    place = build(uniform("gpas")).encoder.sublayers[0].place
    with torch.no_grad():
        place.a.fill_(1.0)
    stream, branch = (torch.ones(2, 3, 16, requires_grad=True) for _ in range(2))
    written = place.write(stream, branch)
    written.sum().backward()
    assert (written < 2).all()
    assert torch.equal(stream.grad, torch.ones(2, 3, 16))
    assert torch.equal(branch.grad, torch.ones(2, 3, 16))
