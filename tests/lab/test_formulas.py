"""Formulas of docstrings as a terminal shows them."""

from __future__ import annotations

from cases import each
from normlab.lab.formulas import readable

SHOWN = {
    r"Post-LN: :math:`x \leftarrow \mathrm{LN}(x + f(x))`": "Post-LN: x ← LN(x + f(x))",
    r":math:`\sqrt{\mathrm{mean}(x^2) + \epsilon}`": "√(mean(x²) + ϵ)",
    r":math:`g \, x / \|x\|_2`, shape `[1]`": "g x / ‖x‖₂, shape [1]",
    r":math:`2/(n_{in} + n_{out})`, :math:`\max(1, k)`": "2/(n_in + n_out), max(1, k)",
    r":math:`\alpha = 0.81 (N^4 M)^{1/16}`, :math:`K^{-1/(2m-2)}`": "α = 0.81 (N⁴ M)^(1/16), K^(-1/(2m-2))",
    r":math:`\omega_{i+1}^2 + x_{i-1}^{10}`": "ω_(i+1)² + x_(i-1)¹⁰",
    r":math:`\sum_{1 \le j < i} \mathrm{Var}[f_j]`": "∑_(1 ≤ j < i) Var[f_j]",
    r":math:`\frac{1}{2}\left(1 + \cos \pi\frac{n - k}{N - k}\right)`": "1/2 (1 + cos π(n - k)/(N - k))",
    r":math:`\frac{\lambda}{\sqrt{d}} \min(n^{-1/2}, n\,k^{-3/2})`": "λ/(√d) min(n^(-1/2), n k^(-3/2))",
    r":math:`\hat m / (\sqrt{\hat v} + \epsilon_n)`": "m\u0302 / (√v\u0302 + ϵ_n)",
    r":math:`\sqrt{\ln 3M \cdot \ln 2N / 3}`": "√(ln 3M · ln 2N / 3)",
    r":math:`\lfloor L/4 \rfloor`, :math:`\Phi(x)`, :math:`\log_2 n`": "⌊L/4⌋, Φ(x), log₂ n",
    r":math:`\rho_\infty \times Q K^\top \in U`": "ρ_∞ × Q K^⊤ ∈ U",
    r":math:`a \odot \tanh b`, ``optim.lr`` and x_y \n as it is": r"a ⊙ tanh b, optim.lr and x_y \n as it is",
    r":math:`\Delta x \pm \partial y/\partial x`": "Δ x ± ∂ y/∂ x",
    r":math:`\|x - \bar x\|^2`, :math:`p(y \mid x)`": "‖x - x\u0304‖², p(y | x)",
    "a paragraph\nof two lines": "a paragraph of two lines",
    r":math:`x^`": "x^",
}


@each(("tex", "shown"), SHOWN.items(), ids=list(SHOWN.values()))
def test_equations_are_readable_in_a_terminal(tex, shown):
    assert readable(tex) == shown
