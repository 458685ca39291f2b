"""The child process of ``encode``: parts of a text in, their ids out.

Each message is its length in 8 bytes and then its content: a tokenizer, and then parts as JSON come in; for
each side of a part its ids and its offsets go out. It ends with its standard input, and so with its parent,
and without a word at a part that it cannot encode: the parent does that part itself and sees the error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import IO

import numpy as np

from normlab.data.ragged import Ragged
from normlab.data.tokenizer import Tokenizer
from normlab.data.vocabulary import parse

_LENGTH_BYTES = 8


def send(stream: IO[bytes], *messages: bytes) -> None:
    """Raises OSError where nobody reads any more."""
    for message in messages:
        stream.write(len(message).to_bytes(_LENGTH_BYTES, "little"))
        stream.write(message)
    stream.flush()


def receive(stream: IO[bytes]) -> bytes:
    """The next message. Raises EOFError if the other side is gone, in the middle of one too."""
    size = int.from_bytes(_exactly(stream, _LENGTH_BYTES), "little")
    return _exactly(stream, size)


def _exactly(stream: IO[bytes], size: int) -> bytes:
    content = stream.read(size)
    if len(content) < size:
        raise EOFError(f"{len(content)} bytes of {size}")
    return content


def part_tokens(tokenizer: Tokenizer, part: Sequence[Sequence[str]], dtype: type[np.integer]) -> list[Ragged]:
    """The ids of the source's lines, and of the target's where there are any."""
    encoders = (tokenizer.encode, tokenizer.encode_target)
    return [Ragged.of(encode(lines), dtype) for encode, lines in zip(encoders, part, strict=False)]


def serve(requests: IO[bytes], replies: IO[bytes], dtype: type[np.integer]) -> None:
    """Until the requests end, which raises EOFError."""
    tokenizer = parse(receive(requests))
    while True:
        for side in part_tokens(tokenizer, json.loads(receive(requests)), dtype):
            send(replies, side.tokens.tobytes(), side.offsets.tobytes())


def main() -> None:
    """Serve standard input; the type of an id is the one argument."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no reply
    try:
        serve(sys.stdin.buffer, replies, np.dtype(sys.argv[1]).type)
    finally:
        os._exit(0)  # what is left of a reply that nobody reads is not flushed


if __name__ == "__main__":
    main()
