"""The tokens of a text that is larger than memory, one part after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from normlab.data.ragged import Ragged
from normlab.data.tokenizer import Tokenizer

Part = tuple[list[str], ...]
"""Lines of the source, and of the target where there is one."""


def encoded(
    tokenizer: Tokenizer, parts: Iterable[Part], dtype: type[np.integer]
) -> Iterator[tuple[Part, list[Ragged]]]:
    """Yield each part with the tokens of its source and target lines."""
    encoders = tokenizer.encode, tokenizer.encode_target
    for part in parts:
        yield part, [Ragged.of(encode(lines), dtype) for encode, lines in zip(encoders, part, strict=False)]
