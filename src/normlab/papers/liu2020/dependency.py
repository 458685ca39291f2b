"""The dependency on the residual branch, and how far outputs move (Liu et al. 2020, Section 4).

The dependency of a residual branch is Var[f(x)] / Var[x + f(x)].
"""

from __future__ import annotations

from typing import Final

from normlab.spec.artefact import Artefact, Drawing
from normlab.spec.claim import at_least, at_most, within

_ON_WMT: Final = {"text": "wmt14.en-de", "model": "base"}

FIG4: Final = Artefact(
    id="liu2020.fig4",
    paper="Liu et al. 2020, Figure 4 (arXiv 2004.08249)",
    shows="The output's change |F(x, W) − F(x, W*)|² against the depth N, W* a random change of W or one "
    "step of Adam; Post, Pre and Admin.",
    published={
        "post random": "linear in N",
        "pre random": "linear in log N",
        "R² random": 0.99,
        "R² update": 0.75,
        "post against pre, update": "above by several magnitudes",
        "admin": "near Pre",
    },
    asserts="A line in N fits Post-LN better, one in log N Pre-LN, each as well as that; under updates "
    "Post-LN moves far more than Pre-LN; Admin is near Pre-LN.",
    discussion="The random change has to be small: the change of a normalised output cannot pass 2 an "
    "element. Whole models of this size are measured here, where one update moves the embeddings, too; of "
    "encoders alone, over more depths and seeds, docs/amplification.md has Post-LN far above Pre-LN after a "
    "small update.",
    study="over_depth",
    settings={**_ON_WMT, "depths": (6, 9, 12, 15, 18), "tokens": 512, "lr": 1e-5, "seeds": 6},
    claims=(
        at_least(
            0.95, "R² of a line in N, Post-LN, random change", "post_random_linear_r2", published="0.99"
        ),
        at_least(0.95, "R² of a line in log N, Pre-LN, random change", "pre_random_log_r2", published="0.99"),
        at_most(
            0.0,
            "by how much AIC prefers log N to N, Post-LN",
            "post_random_log_over_linear_aic",
            published="N fits",
        ),
        at_least(
            0.0,
            "by how much AIC prefers log N to N, Pre-LN",
            "pre_random_log_over_linear_aic",
            published="log N fits",
        ),
        at_least(
            10.0,
            "one Adam update: Post-LN's change over Pre-LN's at the greatest depth",
            "post_over_pre_update",
            published="several magnitudes",
        ),
        within(
            -0.25,
            0.25,
            "Admin's exponent less Pre-LN's, random change",
            "admin_minus_pre_exponent",
            published="about the same speed",
        ),
    ),
    drawings=tuple(
        Drawing(
            kind,
            "layers",
            "change",
            f"Output change over depth, {title}",
            "layers of encoder and of decoder",
            "mean square change",
            colour="placement",
        )
        for kind, title in (("random", "a random change"), ("update", "one update of Adam"))
    ),
)

FIG7_8: Final = Artefact(
    id="liu2020.fig7_8",
    paper="Liu et al. 2020, Figures 7 and 8 (arXiv 2004.08249)",
    shows="The share β_ij of each branch in the output of each layer, at initialisation and after training: "
    "Post, Pre and Admin of 6 layers, and of 18.",
    published={
        "post": "relies on its own branch",
        "pre at initialisation": "evenly on all",
        "pre after training": "more on its own, less than Post",
        "admin at initialisation": "evenly on all",
        "admin after training": "more on its own",
        "Σ_j β_ij² at initialisation": 1.0,
    },
    asserts="At initialisation, in an encoder, Post-LN leans on its own branch, Pre-LN and Admin evenly on "
    "all, and the squares of a layer's shares add up to 1.",
    discussion="What becomes of the shares in training needs a training and is left open. With three seeds "
    "the sums of 18 layers were undecided, so that there are eight.",
    study="dependencies",
    settings={**_ON_WMT, "depths": (6, 18), "tokens": 1024, "followed": 32, "seeds": 8},
    claims=(
        at_least(
            2.0,
            "i β_ii² over the upper half, Post-LN, 6 layers",
            "post_6_own_times_i",
            published="relies on its own",
        ),
        at_least(4.0, "the same, 18 layers", "post_18_own_times_i", published="relies on its own"),
        *(
            at_most(
                1.5,
                f"the same, {name}, {layers} layers",
                f"{placement}_{layers}_own_times_i",
                published="1: evenly on all",
            )
            for placement, name in (("pre", "Pre-LN"), ("admin", "Admin"))
            for layers in (6, 18)
        ),
        *(
            within(
                0.95,
                1.05,
                f"Σ_j β_ij², {name}, {layers} layers",
                f"{placement}_{layers}_total",
                published="1",
            )
            for placement, name in (("post", "Post-LN"), ("pre", "Pre-LN"), ("admin", "Admin"))
            for layers in (6, 18)
        ),
    ),
    drawings=tuple(
        Drawing(
            f"shares_{layers}",
            "on",
            "of",
            f"β_ij² of an encoder of {layers} layers",
            "branch j (−1: the input)",
            "output i",
            panel="placement",
            kind="cells",
            shade="beta_sq",
        )
        for layers in (6, 18)
    ),
)

THEOREM2: Final = Artefact(
    id="liu2020.theorem2",
    paper="Liu et al. 2020, Theorem 2 (arXiv 2004.08249)",
    shows="That the output's change is C·Σ_i β_ii².",
    published={
        "β_ii² pre": "1/i",
        "β_ii² post": "constant in i",
        "change pre": "O(log N)",
        "change post": "O(N)",
    },
    asserts="The exponents fitted to the shares and to the change, in an encoder and its prefixes, are "
    "those.",
    discussion="Sections 3.1 and 5.2 of the paper exchange the numbers of its theorems.",
    study="prefixes",
    settings={**_ON_WMT, "layers": 18, "tokens": 512, "followed": 32, "seeds": 8},
    claims=(
        within(0.8, 1.2, "exponent of the change in N, Post-LN", "post_exponent", published="1"),
        at_most(
            0.0, "by how much AIC prefers log N to N, Post-LN", "post_log_over_linear_aic", published="O(N)"
        ),
        at_least(
            0.0, "by how much AIC prefers log N to N, Pre-LN", "pre_log_over_linear_aic", published="O(log N)"
        ),
        within(-0.2, 0.2, "exponent of β_ii² in i, Post-LN", "post_own_exponent", published="0"),
        within(-1.2, -0.8, "exponent of β_ii² in i, Pre-LN", "pre_own_exponent", published="−1"),
        at_least(0.9, "R² of the change as C Σ β_ii², Post-LN", "post_r2_of_sum"),
        at_least(0.9, "R² of the change as C Σ β_ii², Pre-LN", "pre_r2_of_sum"),
    ),
    drawings=(
        Drawing(
            "changes",
            "depth",
            "change",
            "Output change of a prefix of N sublayers",
            "sublayers N",
            "mean square change",
            colour="placement",
            log_x=True,
            log_y=True,
        ),
        Drawing(
            "changes",
            "sum_own",
            "change",
            "The same against the theorem's sum",
            "Σ β_ii²",
            "mean square change",
            colour="placement",
        ),
    ),
)

CONSTANT_C: Final = Artefact(
    id="liu2020.constantC",
    paper="Liu et al. 2020, Section 5.2 (arXiv 2004.08249)",
    shows="The constant of Theorem 2 through training.",
    published={"C, about": "|δ|·|∇G|", "through training": "falls"},
    asserts="C falls as training goes on: why warm-up helps SGD, too.",
)

PROFILING: Final = Artefact(
    id="liu2020.profiling",
    paper="Liu et al. 2020, Section 4.3 (arXiv 2004.08249)",
    shows="Admin's ω from the forward pass of a single batch.",
    published={"tokens of the batch, at most": 8192, "batches": 1},
    asserts="One batch suffices: ω hardly differs between batches and sizes of them.",
    discussion="Taken to the letter, ω_i² as the sum of the variances of the branches before makes ω_1 zero "
    "and erases the embedding; the variance of the input has to be in the sum.",
    study="profiles",
    settings={**_ON_WMT, "layers": 18, "tokens": (512, 2048, 8192), "batches": 3, "seed": 1},
    claims=(
        at_most(
            0.02,
            "deviation of ω over batches of 8,192 positions, the largest over its mean",
            "spread_over_batches",
            published="one batch suffices",
        ),
        at_most(
            0.05,
            "ω from batches of 512 to 8,192 positions: the largest over the least, less 1",
            "spread_over_sizes",
            published="one batch suffices",
        ),
    ),
    drawings=(
        Drawing(
            "omegas",
            "sublayer",
            "omega",
            "ω of every sublayer, encoder first",
            "sublayer",
            "ω",
            colour="tokens",
        ),
    ),
)
