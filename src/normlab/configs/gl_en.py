"""TED talks, Galician to English: the smallest pair of Nguyen and Salazar 2019 (arXiv 1910.05895)."""

from __future__ import annotations

from dataclasses import replace

from normlab.spec.config import Config


def gl_en() -> Config:
    """The last row of Table 3 as published: 4+4 layers of width 512, 8000 warm-up steps, dropout 0.4."""
    from normlab.papers.nguyen2019.bases import GL_EN

    return GL_EN


def gl_en_small() -> Config:
    """Fifteen minutes per run on one core: 4+4 layers of width 256, small batches, dropout 0.1."""
    from normlab.papers.nguyen2019.bases import GL_EN_SMALL

    optim = replace(GL_EN_SMALL.optim, lr=1e-3)
    return replace(GL_EN_SMALL, optim=optim, train=replace(GL_EN_SMALL.train, precision="auto"))
