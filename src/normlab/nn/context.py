"""The inputs of a branch besides the stream: masks, memory and caches."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Context:
    """Masks, memory and cache of one forward pass.

    ``padding_mask`` `[B, T]` and ``memory_mask`` `[B, S]` are True where there is a token; None means all.
    """

    padding_mask: Tensor | None = None
    memory: Tensor | None = None
    """The encoder's output, `[B, S, D]`."""
    memory_mask: Tensor | None = None
    cache: Cache | None = None
    document_mask: Tensor | None = None
    """`[B, 1, T, T]`: True where causal attention without a cache may look; None: at its own position and all
    before it.
    """
    first_values: list[Tensor] = field(default_factory=list, compare=False, repr=False)
    """The values of the stack's first self-attention, if later ones read them."""

    @property
    def decode_index(self) -> int | None:
        """The position that a decoding step adds; None for positions 0 to T - 1, as in a prompt."""
        return None if self.cache is None or self.cache.in_prompt else self.cache.length - 1


class Cache:
    """Keys and values for incremental decoding of B sentences with K beams, by attention module.

    The K beams of a sentence are K queries `[B, K, D]` at one position. Their keys stay in the slot where
    they were written: ``slots`` `[B, K, t]` holds the slot of each beam's ancestor at each position, so
    reordering beams changes this table and never the cache. All beams share the keys of the memory.
    """

    def __init__(self, sentences: int, beams: int, max_len: int, device: torch.device) -> None:
        self.beams, self.max_len, self.length = beams, max_len, 0
        self.in_prompt = False
        """Whether all positions so far are computed at once, each from the ones before it."""
        self.slots = torch.zeros(sentences, beams, max_len, dtype=torch.long, device=device)
        self._own_slots = torch.arange(beams, device=device)
        self._own: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        self.memory: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        """Keys and values of the memory by attention module, `[B, H, S, D/H]` each."""
        self._mask: Tensor | None = None

    def begin_prompt(self, length: int) -> None:
        """Begin a prompt of ``length`` positions; the cache must be empty and have one beam."""
        self.in_prompt, self.length = True, length

    def begin_step(self) -> None:
        """Begin the next position, where every beam writes its key into its own slot."""
        self.in_prompt = False
        self.slots[:, :, self.length] = self._own_slots
        self.length += 1
        if self.beams > 1:
            seen = self.slots[:, :, : self.length, None] == self._own_slots
            self._mask = seen.flatten(2)[:, None]

    @property
    def mask(self) -> Tensor | None:
        """`[B, 1, K, t·K]`: True where a beam may attend; None for one beam, which attends everywhere."""
        if not self.length:
            raise RuntimeError("call begin_step before the first step")
        return self._mask

    def latest(self, positions: int) -> Tensor:
        """Return `[t·K]`, True for the slots of the latest positions."""
        return torch.arange(self.length * self.beams, device=self.slots.device) >= (
            (self.length - positions) * self.beams
        )

    def extend(self, module: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values `[B, H, K, D/H]`, or a prompt's `[B, H, t, D/H]`; return all so far,
        `[B, H, t·K, D/H]`.
        """
        if module not in self._own:
            b, h, _, width = key.shape
            room = (b, h, self.max_len * self.beams, width)
            self._own[module] = (key.new_empty(room), value.new_empty(room))
        keys, values = self._own[module]
        end = self.length * self.beams
        keys[:, :, end - key.shape[2] : end] = key
        values[:, :, end - key.shape[2] : end] = value
        return keys[:, :, :end], values[:, :, :end]

    def reorder(self, parents: Tensor) -> None:
        """Continue beam k from beam ``parents[:, k]``, `[B, K]`."""
        self.slots = self.slots.gather(1, parents[:, :, None].expand_as(self.slots))

    def keep(self, rows: Tensor) -> None:
        """Continue only with these sentences (`[B']` indices)."""
        self.slots = self.slots[rows]
        self._own = {m: (k[rows], v[rows]) for m, (k, v) in self._own.items()}
        self.memory = {m: (k[rows], v[rows]) for m, (k, v) in self.memory.items()}
