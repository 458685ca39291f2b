"""The derivative of a scalar function of one real variable at 0."""

from collections.abc import Callable

import numpy as np

Scalar = Callable[[complex], complex]


def derivative(f: Scalar, step: float = 1e-20) -> float:
    """Im f(i h) / h, the complex step.

    Nothing is subtracted, so the truncation error is of order h^2 and the result is right to rounding: expect
    a relative error of 1e-13 or better through a whole stack. f must be analytic and must not drop the
    imaginary part (no abs, no cast to float, no np.var); every function beside this one keeps it. ReLU and
    the clamps switch on the real part.

    Squire and Trapp 1998.
    """
    value = np.asarray(f(complex(0.0, step)))
    if not np.iscomplexobj(value):
        raise TypeError("f gave a real value: it drops the imaginary part; use central_difference(f)")
    return float(value.imag) / step


def central_difference(f: Callable[[float], float], step: float = 1e-4) -> float:
    """Richardson's extrapolation of D(h) = (f(h) - f(-h)) / 2h over h, h/2, h/4, h/8: error of order h^8.

    For functions that take real arrays only. Expect a relative error near 1e-11 through a whole stack, 1e-8
    where the function is steep; with a kink (ReLU, a clamp) within h of 0 the result means nothing.
    """
    row = [(f(h) - f(-h)) / (2 * h) for h in (step, step / 2, step / 4, step / 8)]
    power = 4.0
    while len(row) > 1:
        row = [(power * row[i + 1] - row[i]) / (power - 1) for i in range(len(row) - 1)]
        power *= 4.0
    return float(row[0])
