"""The dependency on the residual branch, and how far outputs move (Liu et al. 2020, Section 4).

The dependency of a residual branch is Var[f(x)] / Var[x + f(x)].
"""

from __future__ import annotations

from typing import Final

from normlab.papers import own_studies as studies
from normlab.papers.artefact import Artefact, Drawing
from normlab.papers.bases import CURVES
from normlab.papers.cells import printed
from normlab.papers.claim import RATIO, at_least, at_most, within
from normlab.papers.liu2020.bases import EN_DE
from normlab.papers.measures import ConstantRatio
from normlab.papers.scales import at_each

_ON_WMT: Final = {"text": "wmt14.en-de", "model": "base"}

_LINEAR: Final = "R² of a line at least 0.985, which rounds to the 0.99 that the paper reports for its fits"
_BETTER: Final = "the better law is the one of the smaller AIC"
_FASTER: Final = (
    (1.0, "larger", ""),
    (10.0, "larger by multiple magnitudes", "multiple magnitudes: at least 10 times"),
)

_NESTED: Final = {"first": 100, "batches": 4, "changes": 4}
"""Draws within models whose seeds begin at 100."""

FIG4: Final = Artefact(
    id="liu2020.fig4",
    paper="Liu et al. 2020, Figure 4 (arXiv 2004.08249)",
    shows="The change of the encoder's output |F(x, W) − F(x, W*)|² against the depth N, W* a random change "
    "of W or one step of Adam; Post, Pre and Admin.",
    published=printed("liu2020.fig4"),
    asserts="A line in N fits Post-LN better, one in log N Pre-LN, each as well as that; under updates "
    "Post-LN moves farther than Pre-LN, by multiple magnitudes; Admin grows as fast as Pre-LN.",
    discussion="The random change has to be small: the change of a normalised output cannot pass 2 an "
    "element. The encoder stands before a decoder of one layer; the matrices of its sublayers move, and the "
    "embeddings stay. Its first N layers are the encoder of N layers, so that one model gives a whole "
    "curve. R² and AIC are those of the curve averaged over seeds, with intervals by the jackknife over "
    "seeds. docs/amplification.md has the same for smaller encoders, each depth a model of its own, with "
    "embeddings that move.",
    study=studies.over_depth,
    settings={
        **_ON_WMT,
        "depths": (6, 9, 12, 15, 18),
        "deepest": 60,
        "tokens": 256,
        "lr": 1e-5,
        "nested": {"models": 24, "deepest": 3, **_NESTED},
    },
    claims=(
        *(
            at_least(
                0.985,
                f"R² of a line in {x}, {name}, random change",
                f"{placement}_random_{law}_r2",
                published="0.99",
                derived="0.985 rounds to the printed 0.99",
            )
            for placement, name, law, x in (
                ("post", "Post-LN", "linear", "N"),
                ("pre", "Pre-LN", "log", "log N"),
            )
        ),
        at_most(
            0.0,
            "by how much AIC prefers log N to N, Post-LN, random change",
            "post_random_log_over_linear_aic",
            published="linear in N",
            derived=_BETTER,
        ),
        at_least(
            0.0,
            "by how much AIC prefers log N to N, Pre-LN, random change",
            "pre_random_log_over_linear_aic",
            published="linear in log N",
            derived=_BETTER,
        ),
        *(
            at_least(
                bound,
                f"one Adam update: Post-LN's change over Pre-LN's, {layers} layers: {word}",
                f"post_over_pre_update{where}",
                published=word,
                convention=convention,
                derived="" if convention else "a ratio above 1",
            )
            for layers, where in ((18, ""), (60, "_deepest"))
            for bound, word, convention in _FASTER
        ),
        within(
            -0.25,
            0.25,
            "Admin's exponent less Pre-LN's, random change",
            "admin_minus_pre_exponent",
            published="roughly the same increase speed",
            convention="the same speed: exponents in N at most 0.25 apart",
        ),
    ),
    drawings=tuple(
        Drawing(
            kind,
            "layers",
            "change",
            f"Change of the encoder's output over depth, {title}",
            "layers",
            "mean square change",
            colour="placement",
            panel="encoder",
            log_x=True,
            log_y=True,
        )
        for kind, title in (("random", "a random change"), ("update", "one update of Adam"))
    ),
    version=3,
    date="2026-11-25",
    reason="The second version drew one batch and one random change for each of eight models, which made "
    "most of the spread. The claims are the same, of 24 other models, four batches and four changes in each. "
    "docs/pilots.md says how many models it takes, by seeds that do not count.",
)

FIG7_8: Final = Artefact(
    id="liu2020.fig7_8",
    paper="Liu et al. 2020, Figures 7 and 8 (arXiv 2004.08249)",
    shows="The share β_ij of each branch in the output of each layer, at initialisation and after training: "
    "Post, Pre and Admin of 6 layers, and of 18.",
    published=printed("liu2020.fig7_8"),
    asserts="At initialisation, in an encoder, Post-LN leans on its own branch, Pre-LN and Admin evenly on "
    "all, and the squares of a layer's shares add up to 1.",
    discussion="What becomes of the shares in training needs a training and is left open. With three seeds "
    "the sums of 18 layers were undecided, so that there are eight.",
    study=studies.dependencies,
    settings={**_ON_WMT, "depths": (6, 18), "tokens": 1024, "followed": 32, "seeds": 8},
    claims=(
        at_least(
            2.0,
            "i β_ii² over the upper half, Post-LN, 6 layers",
            "post_6_own_times_i",
            published="relies on its own",
            convention="relies on its own: twice an even share, or more",
        ),
        at_least(
            4.0,
            "the same, 18 layers",
            "post_18_own_times_i",
            published="relies on its own",
            convention="relies on its own: four times an even share at this depth, or more",
        ),
        *(
            at_most(
                1.5,
                f"the same, {name}, {layers} layers",
                f"{placement}_{layers}_own_times_i",
                published="1: evenly on all",
                convention="evenly: at most half more than an even share",
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
                convention="1: within 5%",
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
    published=printed("liu2020.theorem2"),
    asserts="1/β_ii² is linear in i in a Pre-LN and flat in a Post-LN. One C for each placement, fitted at "
    "the shallow half of the depths, predicts how far the output moves at the deep half.",
    discussion="β_ii² = 1/i needs branches of the same variance and no input; with an input it is 1/(i + "
    "c), and 1/β_ii² is a line of slope 1 all the same. Self-attention and feed-forwards differ in "
    "variance, so that each role has a line of its own, where the theorem's condition can hold; the slope "
    "is that through all sublayers, which is 1 if the variances are the same. Orders in N follow from the "
    "shares and the sum. Depths are prefixes of one encoder of 18 layers. Sections 3.1 and 5.2 of the paper "
    "exchange the numbers of its theorems.",
    study=studies.prefixes,
    settings={
        **_ON_WMT,
        "layers": 18,
        "tokens": 512,
        "followed": 32,
        "models": {"post": 80, "pre": 24, "admin": 24},
        "nested": _NESTED,
    },
    claims=(
        *(
            at_least(
                0.985,
                f"R² of a line in i through 1/β_ii² of the {name}, Pre-LN",
                f"pre_inverse_{role}_r2",
                published="1/i",
                convention=f"linear: {_LINEAR}",
            )
            for role, name in (("self_attention", "self-attention"), ("ffn", "feed-forwards"))
        ),
        within(
            0.8,
            1.25,
            "slope of 1/β_ii² in i through all sublayers, Pre-LN",
            "pre_inverse_slope",
            published="1/i",
            convention="a slope of 1: within 25%",
        ),
        within(
            0.5,
            2.0,
            "1/β_ii² of the last layer over that of the first, Post-LN",
            "post_inverse_last_over_first",
            published="constant",
            convention="flat: the last layer has between half and twice what the first has",
        ),
        *(
            claim
            for placement, name in (("post", "Post-LN"), ("pre", "Pre-LN"))
            for claim in (
                within(
                    0.8,
                    1.25,
                    f"C Σ β_ii² over the measured change, deep half of the depths, {name}",
                    f"{placement}_predicted_over_measured",
                    published="C Σ β_ii²",
                    convention="predicts: within 25%",
                ),
                at_least(
                    0.985,
                    f"R² of C Σ β_ii² over all depths, {name}",
                    f"{placement}_r2_of_sum",
                    published="C Σ β_ii²",
                    convention=f"predicts: {_LINEAR}",
                ),
            )
        ),
    ),
    drawings=(
        Drawing(
            "changes",
            "depth",
            "change",
            "Output change of a prefix of N sublayers, and C Σ β_ii² (dashed)",
            "sublayers N",
            "mean square change",
            colour="placement",
            theory="predicted",
        ),
        Drawing(
            "changes",
            "depth",
            "inverse",
            "1/β_ii² of every sublayer",
            "sublayer i",
            "1/β_ii²",
            colour="role",
            panel="placement",
        ),
    ),
    version=3,
    date="2026-11-25",
    reason="The second version drew one batch and one random change for each of 16 models, which made "
    "most of the spread. The claims are the same, of other models, four batches and four changes in each. "
    "docs/pilots.md says how many models it takes, by seeds that do not count.",
)

_TRAINED: Final = {"Post": "post", "Pre": "pre", "Admin": "admin"}

CONSTANT_C: Final = Artefact(
    id="liu2020.constantC",
    paper="Liu et al. 2020, Section 5.2 (arXiv 2004.08249)",
    shows="The constant of Theorem 2 through training.",
    published=printed("liu2020.constantC"),
    asserts="C falls as training goes on: why warm-up helps SGD, too.",
    discussion="C is fitted to the output changes of the encoder's prefixes, whose weights are changed by 1% "
    "of each matrix's root mean square, at initialisation and at the best weights on dev.",
    study=studies.trainings,
    settings={"measures": {name.lower(): ConstantRatio(name) for name in _TRAINED}},
    trainings=at_each(lambda s: {name: s.recipe(placement) for name, placement in _TRAINED.items()}, EN_DE),
    claims=tuple(
        at_most(
            1.0,
            f"C at the end of the training over C at initialisation, {name}",
            name.lower(),
            published="falls",
            derived=RATIO,
        )
        for name in _TRAINED
    ),
    drawings=CURVES,
)

PROFILING: Final = Artefact(
    id="liu2020.profiling",
    paper="Liu et al. 2020, Section 4.3 (arXiv 2004.08249)",
    shows="Admin's ω from the forward pass of a single batch.",
    published=printed("liu2020.profiling"),
    asserts="One batch suffices: ω differs less between batches than between seeds of the weights, and an "
    "Admin profiled on one batch moves its output as far as one profiled on 32.",
    discussion="Batches are of sentences drawn whatever their length, 512 positions each; a batch as "
    "large as the paper allows would differ less. Of the encoder, before a decoder of one layer. Taken to "
    "the letter, ω_i² as the sum of the variances of the branches before makes ω_1 zero and erases the "
    "embedding; the variance of the input has to be in the sum.",
    study=studies.profiles,
    settings={**_ON_WMT, "layers": 18, "tokens": 512, "batches": 32, "seeds": 8},
    claims=(
        at_most(
            1.0,
            "deviation of ln ω over batches, over that over seeds of the weights",
            "batches_over_seeds",
            published="one batch suffices",
            derived="as much as another draw of the weights would change",
        ),
        within(
            -0.5,
            0.5,
            "ln of the output's change, profiled on 1 batch less on 32, in deviations over seeds",
            "change_in_deviations",
            published="one batch suffices",
            convention="the same: within half of the deviation over seeds of the weights",
        ),
    ),
    drawings=(
        Drawing(
            "omegas",
            "sublayer",
            "omega",
            "ω of every sublayer of the encoder; the band is over batches",
            "sublayer",
            "ω",
            colour="seed",
        ),
        Drawing(
            "changes",
            "seed",
            "change",
            "How far a random change of the weights moves the output",
            "seed of the weights",
            "mean square change",
            colour="profiled_on",
        ),
    ),
    version=2,
    date="2026-11-22",
    reason="The first version allowed 2% on the largest of 90 spreads, a number that the paper does not "
    "have, and compared batches of sentences of one length, which differ more than random ones.",
)
