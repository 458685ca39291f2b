"""Seeds for every purpose, derived where they are needed, so that no generator's state must be saved."""

from __future__ import annotations

import hashlib


def derive(seed: int, purpose: str, *counters: int) -> int:
    """Return a seed in [0, 2**63): the first 63 bits of BLAKE2b over the arguments.

    Different purposes or counters (step, micro-batch, epoch) give unrelated seeds; the same ones give the
    same seed on every machine and Python version.
    """
    key = "\x1f".join([purpose, str(int(seed)), *(str(int(counter)) for counter in counters)])
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") >> 1
