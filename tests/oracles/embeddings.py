"""Oracles of the embeddings: slow and obvious forms written from the published equations."""

import numpy as np


def plain_embed(ids: np.ndarray, E: np.ndarray) -> np.ndarray:
    """sqrt(d) E[id]. Vaswani et al. 2017, Section 3.4 (arXiv 1706.03762)."""
    return np.stack([np.sqrt(E.shape[1]) * E[i] for i in ids])


def soft_capped(z: np.ndarray, c: float) -> np.ndarray:
    """c tanh(z / c). Gemma Team 2024 (arXiv 2408.00118)."""
    return c * np.tanh(z / c)


def plain_logits(x: np.ndarray, E: np.ndarray) -> np.ndarray:
    """x E^T, the output layer tied to the embedding."""
    return x @ E.T


def unit_words(E: np.ndarray) -> np.ndarray:
    """w / ||w|| of every word w."""
    return np.stack([w / np.sqrt((w * w).sum()) for w in E])


def fixnorm_embed(ids: np.ndarray, E: np.ndarray) -> np.ndarray:
    """sqrt(d) w / ||w||. Nguyen and Salazar 2019, Section 2.3 (arXiv 1910.05895)."""
    return plain_embed(ids, unit_words(E))


def fixnorm_logits(x: np.ndarray, E: np.ndarray) -> np.ndarray:
    """x . w / ||w||, which is g cos(x, w) after a final ScaleNorm of gain g."""
    return plain_logits(x, unit_words(E))


def sinusoids(T: int, D: int) -> np.ndarray:
    """sin(t / 10000^(2i/D)) at channel 2i and cos of the same at 2i + 1, t from 0; [T, D].

    Vaswani et al. 2017, Section 3.5 (arXiv 1706.03762).
    """
    table = np.zeros((T, D))
    for t in range(T):
        for channel in range(D):
            angle = t / 10000.0 ** (2 * (channel // 2) / D)
            table[t, channel] = np.cos(angle) if channel % 2 else np.sin(angle)
    return table


def learned_positions(T: int, P: np.ndarray) -> np.ndarray:
    """The first T rows of the table P of learned positions; [T, D]."""
    if P.shape[0] < T:
        raise ValueError(f"{T} positions asked of a table of {P.shape[0]}: give a table of at least {T} rows")
    return np.stack([P[t] for t in range(T)])


def embed_with_positions(tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """tokens + positions, both [T, D]."""
    return tokens + positions
