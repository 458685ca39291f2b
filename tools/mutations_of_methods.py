"""Errors that public implementations of the methods have made."""

from __future__ import annotations

from typing import Final

from mutation import Mutation

METHODS: Final = (
    Mutation(
        "gamma left out",
        "nn/norm.py",
        {"F.layer_norm(x, self.weight.shape, self.weight,": "F.layer_norm(x, self.weight.shape, None,"},
    ),
    Mutation(
        "g relative to sqrt(d)",
        "nn/norm.py",
        {
            "nn.Parameter(torch.full((1,), dim**0.5))": "nn.Parameter(torch.ones(1))",
            "return scaled_to(x, self.g)\n\n    @torch": (
                "return scaled_to(x, self.g * x.shape[-1] ** 0.5)\n\n    @torch"
            ),
        },
    ),
    Mutation(
        "DeepNorm's alpha on the branch",
        "nn/placement/scaled.py",
        {"self.norm(self.alpha * stream + y)": "self.norm(stream + self.alpha * y)"},
    ),
    Mutation("DeepNorm's beta inverted", "nn/placement/scaled.py", {"(12 * m) ** -0.25": "(12 * m) ** 0.25"}),
    Mutation(
        "1.15 where DeepNorm has 0.87",
        "nn/placement/scaled.py",
        {"0.87 * (n**4 * m) ** (-1 / 16)\n": "1.15 * (n**4 * m) ** (-1 / 16)\n"},
    ),
    Mutation(
        "no final norm",
        "nn/placement/base.py",
        {"return site.final_norm() if cls.final_norm else nn.Identity()": "return nn.Identity()"},
    ),
    Mutation(
        "omega_1 = 0",
        "nn/placement/scaled.py",
        {
            "def first(stream: Tensor) -> Tensor:\n        return stream\n": (
                "def first(stream: Tensor) -> Tensor:\n        return 0 * stream\n"
            )
        },
    ),
    Mutation(
        "padding in Admin's profile",
        "nn/init/profile.py",
        {"            x = x[context.padding_mask]\n": "            pass\n"},
    ),
    Mutation("a window one wider", "nn/sublayer.py", {".triu(1 - window)": ".triu(-window)"}),
    Mutation("gates without a sigmoid", "nn/sublayer.py", {"torch.sigmoid(gate)": "gate"}),
    Mutation("values of the layer before", "nn/sublayer.py", {"if self.first:": "if True:"}),
    Mutation(
        "norm before the rotation",
        "nn/query_key.py",
        {"after_rotation: ClassVar[bool] = False": "after_rotation: ClassVar[bool] = True"},
    ),
    Mutation("a cap without its scale", "nn/embedding.py", {"self.cap * torch.tanh(": "torch.tanh("}),
    Mutation("gain w in place of 1 + w", "nn/norm.py", {"x, 1 + self.offset,": "x, self.offset,"}),
    Mutation("outputs by the layers", "nn/init/scheme.py", {"site.sublayers**-0.5": "site.layers**-0.5"}),
    Mutation(
        "x0 before every sublayer",
        "nn/placement/streamed.py",
        {"self.begins_layer = site.index % len(site.roles) == 0": "self.begins_layer = True"},
    ),
    Mutation("a signed alpha", "nn/placement/streamed.py", {"self.factor).abs()": "self.factor)"}),
    Mutation(
        "ProRes by the sublayer",
        "nn/placement/streamed.py",
        {"_steps * (site.layer + 1)": "_steps * (site.index + 1)"},
    ),
    Mutation("a gradient through GPAS", "nn/placement/streamed.py", {"x.detach()": "x"}),
    Mutation("causal mask off by one", "nn/kernels/ops.py", {".tril()": ".tril(1)"}),
    Mutation(
        "residual added after the norm",
        "nn/placement/normed.py",
        {"return self.norm(x + y), d + y": "return self.norm(x) + y, d + y"},
    ),
    Mutation(
        "FixNorm at the input alone",
        "nn/embedding.py",
        {"return linear(x, self.vectors())": "return linear(x, self.weight)"},
    ),
    Mutation(
        "ReZero's alpha for each sublayer",
        "nn/placement/scaled.py",
        {
            'return site.shared.setdefault("rezero.alpha", nn.Parameter(torch.zeros(1)))': (
                "return nn.Parameter(torch.zeros(1))"
            )
        },
    ),
    Mutation(
        "LayerNorm Scaling by sublayer instead of layer",
        "nn/placement/normed.py",
        {"(site.layer + 1) ** -0.5": "(site.index + 1) ** -0.5"},
    ),
    Mutation(
        "QK-norm's g on top of 1/sqrt(w)",
        "nn/query_key.py",
        {"scale: ClassVar[float | None] = 1.0\n\n": "scale: ClassVar[float | None] = None\n\n"},
    ),
    Mutation(
        "an inner norm in cross-attention",
        "nn/options.py",
        {'return role != "cross_attention"': "return True"},
    ),
    Mutation(
        "T-Fixup's embeddings by the decoder's depth",
        "nn/placement/scaled.py",
        {"(9 * site.encoder_layers) ** -0.25": "(9 * site.decoder_layers) ** -0.25"},
    ),
    Mutation(
        "SmallInit with 4d",
        "nn/init/scheme.py",
        {"(2 / (5 * weight.shape[1]))": "(2 / (4 * weight.shape[1]))"},
    ),
    Mutation(
        "Muon on packed matrices as one",
        "optim/optimizer.py",
        {
            "parameter.split(rows[parameter])": "[parameter]",
            "grad.split(rows[parameter])": "[grad]",
            "momentum.split(rows[parameter])": "[momentum]",
        },
    ),
    Mutation(
        "rates of the muP table inverted",
        "nn/parametrisation.py",
        {'{"hidden": Exponents(width=-1)}\n    head': '{"hidden": Exponents(width=1)}\n    head'},
        own=("tests/optim/test_parametrisation.py",),
    ),
    Mutation(
        "CompleteP without its decay",
        "nn/parametrisation.py",
        {'"hidden": Exponents(width=1)}': '"hidden": ONE}'},
        own=("tests/optim/test_parametrisation.py",),
    ),
    Mutation(
        "branches not divided by depth",
        "nn/parametrisation.py",
        {"branch: ClassVar[Exponents] = Exponents(depth=-1)": "branch: ClassVar[Exponents] = ONE"},
        own=("tests/optim/test_parametrisation.py",),
    ),
    Mutation(
        "a gain taken for a matrix's kin",
        "nn/roles.py",
        {'"hidden" if p.dim() > 1 else "scalar"': '"hidden"'},
    ),
    Mutation(
        "1 - u where WSD has 1 - sqrt(u)",
        "optim/schedule.py",
        {"_decayed(step, state) ** 0.5": "_decayed(step, state)"},
    ),
    Mutation(
        "a search one position late",
        "nn/context.py",
        {"else self.cache.length - 1": "else self.cache.length"},
    ),
    Mutation("relu in place of its square", "nn/options.py", {"relu(x).square()": "relu(x)"}),
    Mutation(
        "unit weights along the wrong axis",
        "nn/model.py",
        {"unit_(weight, along_stream(name))": "unit_(weight, 1 - along_stream(name))"},
    ),
    Mutation(
        "a table's rate ten times as high", "optim/roles.py", {'adamw", 0.008 / 0.02': 'adamw", 0.08 / 0.02'}
    ),
    Mutation(
        "z-loss without the square",
        "lab/tasks/task.py",
        {"logsumexp(wide, -1).square()": "logsumexp(wide, -1).abs()"},
        own=("tests/lab/tasks/test_loss.py",),
    ),
    Mutation(
        "positions that go on in the next document",
        "nn/model.py",
        {"positions = together[:, 0].tril().sum(-1) - 1": "positions = (documents >= 0).cumsum(-1) - 1"},
    ),
    Mutation(
        "a byte too many in each token",
        "lab/data/tokenizer.py",
        {"[len(piece) for piece": "[len(piece) + 1 for piece"},
        own=("tests/lab/data/test_verbatim.py",),
    ),
    Mutation(
        "an export whose rotations stay interleaved",
        "lab/training/families.py",
        {"(1, 2).flatten(0, 2)": "(1, 2).transpose(1, 2).flatten(0, 2)"},
        own=("tests/lab/training/test_export.py",),
    ),
)
