"""What a branch may look at beside the stream."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Context:
    """Padding, memory and caches of one forward pass.

    ``padding_mask`` and ``memory_mask`` are True where there is a token, `[B, T]` and `[B, S]`; None means
    everywhere.
    """

    padding_mask: Tensor | None = None
    memory: Tensor | None = None
    """The encoder's output, `[B, S, D]`."""
    memory_mask: Tensor | None = None
    cache: Cache | None = None

    @property
    def position(self) -> int | None:
        """The one position of a step of a search; None stands for 0 to T - 1."""
        return None if self.cache is None else self.cache.length - 1


class Cache:
    """Keys and values of an incremental decoding of B sentences with K beams, by attention module.

    The K beams of a sentence are K queries `[B, K, D]` at one position. Their keys stay where they were
    written; ``slots`` `[B, K, t]` says in which of the K places each beam's ancestor stood at each position,
    so that reordering beams reorders this table and never the cache. The memory's keys are shared by the
    beams.
    """

    def __init__(self, sentences: int, beams: int, max_len: int, device: torch.device) -> None:
        self.beams, self.max_len, self.length = beams, max_len, 0
        self.slots = torch.zeros(sentences, beams, max_len, dtype=torch.long, device=device)
        self._places = torch.arange(beams, device=device)
        self._own: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        self._memory: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        self._mask: Tensor | None = None

    def begin_position(self) -> None:
        """Every beam writes its key of the coming position into its own place."""
        self.slots[:, :, self.length] = self._places
        self.length += 1
        seen = self.slots[:, :, : self.length, None] == self._places
        self._mask = seen.flatten(2)[:, None]

    @property
    def mask(self) -> Tensor:
        """`[B, 1, K, t·K]`: True where a beam may look."""
        if self._mask is None:
            raise RuntimeError("begin_position comes before the first step")
        return self._mask

    def extend(self, module: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append `[B, H, K, D/H]` and return everything so far, `[B, H, t·K, D/H]`."""
        if module not in self._own:
            b, h, k, width = key.shape
            room = (b, h, self.max_len * k, width)
            self._own[module] = (key.new_empty(room), value.new_empty(room))
        keys, values = self._own[module]
        end = self.length * self.beams
        keys[:, :, end - self.beams : end] = key
        values[:, :, end - self.beams : end] = value
        return keys[:, :, :end], values[:, :, :end]

    def memory_of(self, module: nn.Module) -> tuple[Tensor, Tensor] | None:
        """Keys and values of the memory, `[B, H, S, D/H]`, if ``keep_memory`` stored them."""
        return self._memory.get(module)

    def keep_memory(self, module: nn.Module, key: Tensor, value: Tensor) -> None:
        # Read at every step, and products of strided matrices copy them first.
        self._memory[module] = (key.contiguous(), value.contiguous())

    def reorder(self, parents: Tensor) -> None:
        """Beam k goes on from beam ``parents[:, k]``, `[B, K]`."""
        self.slots = self.slots.gather(1, parents[:, :, None].expand_as(self.slots))

    def keep(self, rows: Tensor) -> None:
        """Go on with these sentences only (`[B']` indices)."""
        self.slots = self.slots[rows]
        self._own = {m: (k[rows], v[rows]) for m, (k, v) in self._own.items()}
        self._memory = {m: (k[rows], v[rows]) for m, (k, v) in self._memory.items()}
