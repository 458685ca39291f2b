"""Oracles of the initialisation: the deviations of the matrices, and the placements' own parameters."""

from collections.abc import Callable

import numpy as np
from scipy.special import erf

ATTENTION_MATRICES = ("query", "key", "value", "output")
MATRICES = (*ATTENTION_MATRICES, "ffn_in", "ffn_gate", "ffn_out")
SCALED = ("value", "output", "ffn_in", "ffn_gate", "ffn_out")
FIXUP_WEIGHTS_IN_SERIES = 2

Branch = Callable[[np.ndarray, int], np.ndarray]


def sublayer_count(layers_encoder: int, layers_decoder: int) -> int:
    """Branches of the whole model: 2N + 3M with an encoder, else 2M."""
    if layers_encoder == 0:
        return 2 * layers_decoder
    return 2 * layers_encoder + 3 * layers_decoder


def deepnorm_gain(stack_name: str, N: int, M: int) -> float:
    """beta: encoder of a pair 0.87 (N^4 M)^(-1/16), its decoder (12M)^(-1/4); one stack (8L)^(-1/4).

    Wang et al. 2022, Figure 2 (arXiv 2203.00555).
    """
    if N == 0 or M == 0:
        return (8.0 * (N + M)) ** (-1 / 4)
    if stack_name == "encoder":
        return 0.87 * float(N**4 * M) ** (-1 / 16)
    return (12.0 * M) ** (-1 / 4)


def subln_gain(stack_name: str, N: int, M: int) -> float:
    """gamma: encoder of a pair sqrt(ln 3M ln 2N / 3), its decoder sqrt(ln 3M); one stack sqrt(ln 2L).

    Only in branches with an inner norm, which cross-attention does not have.

    Wang et al. 2022, Figure 2 (arXiv 2210.06423).
    """
    if N == 0 or M == 0:
        return np.sqrt(np.log(2 * (N + M)))
    if stack_name == "encoder":
        return np.sqrt(np.log(3 * M) * np.log(2 * N) / 3)
    return np.sqrt(np.log(3 * M))


def tfixup_gain(stack_name: str, N: int, M: int) -> float:
    """Encoder 0.67 N^(-1/4), decoder (9M)^(-1/4), alone or in a pair; query and key 1/sqrt 2.

    Huang et al. 2020 (ICML 2020), the last by its released code.
    """
    if stack_name == "encoder":
        return 0.67 * float(N) ** (-1 / 4)
    return (9.0 * M) ** (-1 / 4)


def fixup_gain(matrix: str, N: int, M: int) -> float:
    """K^(-1/(2m-2)) for all but the last weight of a branch, which is 0; m = 2 weights in series, K branches.

    Query and key sit inside the softmax and keep 1.

    Zhang et al. 2019, rules 1 and 2 (arXiv 1901.09321).
    """
    if matrix in ("output", "ffn_out"):
        return 0.0
    if matrix in ("query", "key"):
        return 1.0
    return float(sublayer_count(N, M)) ** (-1 / (2 * FIXUP_WEIGHTS_IN_SERIES - 2))


def b2t_code_gain(stack_name: str, N: int, M: int) -> float:
    """N^(-1/2) in the encoder, M^(-1/2) in the decoder: the released code of Takase et al. 2022."""
    return float({"encoder": N, "decoder": M}[stack_name]) ** (-1 / 2)


def admin_rescaled_gain(stack_name: str, matrix: str, N: int, M: int) -> float:
    """1 / omega of ``admin_data_free`` on the last matrix of a branch: Liu et al. 2020, Appendix C."""
    sublayers = {"encoder": 2 * N, "decoder": 3 * M if N else 2 * M}[stack_name]
    return 1 / admin_data_free(sublayers) if matrix in ("output", "ffn_out") else 1.0


def gain(method: str, stack_name: str, matrix: str, N: int, M: int, role: str = "") -> float:
    """The factor on the base scheme's standard deviation of one matrix; 1 where the method names none.

    N encoder and M decoder layers; one of them 0 is a single stack. The role is that of the sublayer.
    """
    if matrix not in MATRICES:
        raise ValueError(f"matrix {matrix!r} is not one of {MATRICES}")
    if method in ("fixup", "admin_rescaled"):
        return (
            fixup_gain(matrix, N, M) if method == "fixup" else admin_rescaled_gain(stack_name, matrix, N, M)
        )
    if method == "b2t_code":
        return b2t_code_gain(stack_name, N, M)
    if method == "tfixup" and matrix not in SCALED:
        return np.sqrt(1 / 2)
    if method == "subln" and role == "cross_attention":
        return 1.0
    rule = {"deepnorm": deepnorm_gain, "subln": subln_gain, "tfixup": tfixup_gain}.get(method)
    return 1.0 if rule is None or matrix not in SCALED else float(rule(stack_name, N, M))


def embedding_gain(method: str, N: int, M: int) -> float:
    """T-Fixup: (9N)^(-1/4) for both stacks' embeddings, in a single stack that stack's factor; else 1."""
    if method != "tfixup":
        return 1.0
    if N > 0 and M > 0:
        return (9.0 * N) ** (-1 / 4)
    return tfixup_gain("decoder" if M > 0 else "encoder", N, M)


def classifier_gain(method: str) -> float:
    """FixUp initialises the output layer with 0 (rule 1), if it is not tied to the embedding; 1 elsewhere."""
    return 0.0 if method == "fixup" else 1.0


def xavier_bound(n_out: int, n_in: int) -> float:
    """U(-b, b) with b = sqrt(6 / (n_in + n_out)). Glorot and Bengio 2010, equation 16."""
    return np.sqrt(6.0 / (n_in + n_out))


def cut_normal_std(cut: float) -> float:
    """Standard deviation of N(0, 1) cut at +-cut: sqrt(1 - 2 cut phi(cut) / (2 Phi(cut) - 1))."""
    density = np.exp(-cut * cut / 2) / np.sqrt(2 * np.pi)
    return np.sqrt(1 - 2 * cut * density / erf(cut / np.sqrt(2)))


def language_model_std(scheme: str, matrix: str, n_in: int, sublayers: int) -> float:
    """Deviations of the starts of language models; n_in the width that a matrix reads, d for the tables.

    GPT-2: 0.02, the last matrix of a branch / sqrt(sublayers), 2L in one stack. normal002: 0.02 everywhere.
    truncnormal: 0.02 cut at three deviations (OLMo 2). zerooutputs: 1/sqrt(n_in), last matrices 0. nanochat:
    1/sqrt(d), first feed-forward matrices 0.4/sqrt(d), last matrices 0, tokens 0.8, an output matrix 0.001;
    positions, which nanochat does not have, as tokens.
    """
    last = matrix in ("output", "ffn_out")
    if scheme == "gpt2start":
        return 0.02 / np.sqrt(sublayers) if last else 0.02
    if scheme == "normal002":
        return 0.02
    if scheme == "truncnormal":
        return 0.02 * cut_normal_std(3.0)
    if scheme == "nanochatstart" and matrix in ("embedding", "positions", "unembedding"):
        return 0.001 if matrix == "unembedding" else 0.8
    if last:
        return 0.0
    small = scheme == "nanochatstart" and matrix in ("ffn_in", "ffn_gate")
    return (0.4 if small else 1.0) / np.sqrt(n_in)


LANGUAGE_MODEL_STARTS = ("normal002", "gpt2start", "truncnormal", "zerooutputs", "ngptstart", "nanochatstart")
UNIFORM = ("xavier_uniform", "nanochatstart")


def scheme_std(scheme: str, matrix: str, n_out: int, n_in: int, sublayers: int = 1) -> float:
    """Xavier sqrt(2 / (n_in + n_out)); SmallInit sqrt(2 / (d + 4d)) for attention, else Xavier.

    d is the model's width: the input of query, key and value and the output of the output matrix. Xavier
    uniform has the standard deviation b / sqrt 3 of its bound b. LookLinear draws a half W of a mirrored
    feed-forward matrix with the fans of the full matrix, and everything else by Xavier. Uniform attention has
    W_Q = W_K = 0, and everything else by Xavier.

    Nguyen and Salazar 2019, Section 2.2 (arXiv 1910.05895); Balduzzi et al. 2017 (arXiv 1702.08591);
    Xiong et al. 2020, Section 3.3 (arXiv 2002.04745).
    """
    if scheme == "ngptstart":  # vectors of length 1: rows, and columns of the last matrices
        return 1 / np.sqrt(n_out if matrix in ("output", "ffn_out") else n_in)
    if scheme in LANGUAGE_MODEL_STARTS:
        return language_model_std(scheme, matrix, n_in, sublayers)
    if scheme == "xavier_uniform":
        return xavier_bound(n_out, n_in) / np.sqrt(3.0)
    if scheme == "smallinit" and matrix in ATTENTION_MATRICES:
        d = n_out if matrix == "output" else n_in
        return np.sqrt(2.0 / (d + 4 * d))
    if scheme == "uniformattention" and matrix in ("query", "key"):
        return 0.0
    if scheme in ("xavier", "smallinit", "looklinear", "uniformattention"):
        return np.sqrt(2.0 / (n_in + n_out))
    raise ValueError(
        f"scheme {scheme!r} is not one of xavier, xavier_uniform, smallinit, looklinear, uniformattention, "
        f"{', '.join(LANGUAGE_MODEL_STARTS)}"
    )


def embedding_std(kind: str, d: int) -> float:
    """Plain N(0, 1/d); FixNorm U(-0.01, 0.01), whose standard deviation is 0.01 / sqrt 3.

    Nguyen and Salazar 2019, Section 3.2 (arXiv 1910.05895).
    """
    return {"plain": 1.0 / np.sqrt(d), "fixnorm": 0.01 / np.sqrt(3.0)}[kind]


def looklinear_is_mirrored(W_in: np.ndarray, W_out: np.ndarray) -> bool:
    """W_in = [W; -W] and W_out = [V, -V], exactly: then W_out relu(W_in x) = V W x."""
    half = W_in.shape[0] // 2
    if W_in.shape[0] != 2 * half or W_out.shape[1] != 2 * half:
        return False
    return np.array_equal(W_in[:half], -W_in[half:]) and np.array_equal(W_out[:, :half], -W_out[:, half:])


def pooled_variance(sentences: list[np.ndarray]) -> float:
    """Population variance over all elements of all sentences together."""
    elements = np.concatenate([np.asarray(sentence).ravel() for sentence in sentences])
    return float(((elements - elements.mean()) ** 2).mean())


def admin_paper(x0_list: list[np.ndarray], f_outputs: list[list[np.ndarray]]) -> np.ndarray:
    """omega_i^2 = Var[x_0] + sum_{j < i} Var[f_j], with every f_j profiled at omega = 1.

    x0_list: the sentences' embeddings; f_outputs[j]: the outputs of branch j for the sentences. Returns [S].

    Liu et al. 2020, Section 4.3 (arXiv 2004.08249).
    """
    omegas = []
    total = pooled_variance(x0_list)
    for outputs in f_outputs:
        omegas.append(np.sqrt(total))
        total += pooled_variance(outputs)
    return np.array(omegas)


def admin_code(
    sentences: list[np.ndarray], branches: list[Branch], norms: list[Callable[[np.ndarray], np.ndarray]]
) -> np.ndarray:
    """omega_1 = 1, omega_{i+1}^2 = Var[omega_i x_{i-1}] + Var[f_i], x_i = LN_i(omega_i x_{i-1} + f_i).

    One pass in forward order that uses each omega as soon as it is set. branches[i](x, n) is branch i on the
    stream x of sentence number n (which lets cross-attention find its memory); norms[i](x) is its LN. Returns
    [S].
    """
    streams = list(sentences)
    omega = 1.0
    omegas = []
    for branch, norm in zip(branches, norms, strict=True):
        omegas.append(omega)
        outputs = [branch(x, n) for n, x in enumerate(streams)]
        following = np.sqrt(pooled_variance([omega * x for x in streams]) + pooled_variance(outputs))
        streams = [norm(omega * x + y) for x, y in zip(streams, outputs, strict=True)]
        omega = following
    return np.array(omegas)


def admin_data_free(S: int) -> float:
    """omega = sqrt((S + 1) / ln(S + 1) - 1), the same for all S sublayers of a stream."""
    return np.sqrt((S + 1) / np.log(S + 1) - 1)


def layerscale_start(layers: int) -> float:
    """lam = 0.1 up to 18 layers, 1e-5 up to 24, 1e-6 beyond.

    Touvron et al. 2021 (arXiv 2103.17239).
    """
    if layers <= 18:
        return 0.1
    return 1e-5 if layers <= 24 else 1e-6


def parameter_start(name: str, layers: int = 1, sublayers: int = 1, layer: int = 0, width: int = 64) -> float:
    """omega (data-free, of the stream's sublayers), alpha 0, s 1, a 0, lam by the stack's depth in layers.

    nanochat's r falls from 1.15 to 1.05 over the layers, its mu from 0.2 to 0.05.
    """
    share = layer / (layers - 1) if layers > 1 else 0.0
    initial = {
        "omega": admin_data_free(sublayers),
        "alpha": 0.0,
        "s": 1.0,
        "a": 0.0,
        "lam": layerscale_start(layers),
        "alpha_n": width**-0.5,
        "r": 1.15 - 0.10 * share,
        "mu": 0.20 - 0.15 * share,
    }
    return float(initial[name])


def qk_gain_start(length: float) -> float:
    """g = log2(n^2 - n), n the 97.5th percentile of the training lengths.

    Henry et al. 2020 (arXiv 2010.04245).
    """
    return np.log2(length * length - length)
