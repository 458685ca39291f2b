"""The process that encodes: what it is told and what it answers, and that it leaves nothing behind."""

from __future__ import annotations

import io
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from normlab.data.encode_worker import part_tokens, receive, send, serve
from normlab.data.pieces import SentencePieces
from normlab.data.tokenizer import BytePairs
from normlab.data.words import Worded

TEXT = ["ab abab ba", "aa, bb é's"]
BYTE_PAIRS = BytePairs.train(TEXT, 20)
TOKENIZERS = {
    "bpe": BYTE_PAIRS,
    "unigram": SentencePieces.train(TEXT, 20),
    "words": Worded(BYTE_PAIRS, "moses", ("en", "fr")),
}
LINES = st.lists(st.text(max_size=12) | st.text("ab é',\n", max_size=12), max_size=5)


def answers(tokenizer, parts, dtype):
    """Of one that is told all of them."""
    requests, replies = io.BytesIO(), io.BytesIO()
    send(requests, tokenizer.to_json().encode(), *(json.dumps(part).encode() for part in parts))
    requests.seek(0)
    with pytest.raises(EOFError):
        serve(requests, replies, dtype)
    replies.seek(0)
    return replies


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_it_answers_what_the_tokenizer_says(name, dtype):
    @settings(max_examples=20, deadline=None)
    @given(st.lists(st.tuples(LINES) | st.tuples(LINES, LINES), min_size=1, max_size=3))
    def same(parts):
        replies = answers(TOKENIZERS[name], parts, dtype)
        for part in parts:
            for side in part_tokens(TOKENIZERS[name], part, dtype):
                assert receive(replies) == side.tokens.tobytes()
                assert receive(replies) == side.offsets.tobytes()
                assert (side.tokens.dtype, side.offsets.dtype) == (dtype, np.int64)
        assert not replies.read()

    same()


@given(st.lists(st.binary(max_size=300), max_size=4), st.data())
def test_a_message_comes_whole_or_not_at_all(messages, data):
    stream = io.BytesIO()
    send(stream, *messages)
    ends = list(itertools.accumulate(8 + len(message) for message in messages))
    stream.truncate(data.draw(st.integers(0, len(stream.getvalue()))))
    stream.seek(0)
    whole = sum(end <= len(stream.getvalue()) for end in ends)
    assert [receive(stream) for _ in range(whole)] == messages[:whole]
    with pytest.raises(EOFError):
        receive(stream)


def test_it_needs_no_torch():
    code = "import sys, normlab.data.encode_worker; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


SCRIPT = """
import signal
import sys
from pathlib import Path

import numpy as np

from normlab.data import encode
from normlab.data.tokenizer import BytePairs

signal.signal(signal.SIGINT, signal.default_int_handler)
with open("executed", "a") as file:
    file.write("once\\n")
encode.SECONDS_ALONE, encode.usable_cores = 0.0, lambda: 2
_Worker = encode._Worker


class Noted(_Worker):
    def __init__(self, *args):
        super().__init__(*args)
        with open("children", "a") as file:
            file.write(f"{self.process.pid}\\n")


encode._Worker = Noted
tokenizer = BytePairs.train(["ab abab ba"], 20)
parts = ((["ab ba"] * 100,) for _ in range(int(sys.argv[1])))
total = sum(len(sides[0]) for _, sides in encode.encoded(tokenizer, parts, np.uint16))
Path("total").write_text(str(total))
"""


def script(folder, parts):
    """A user's script, without a guard."""
    (folder / "script.py").write_text(SCRIPT)
    return subprocess.Popen(
        [sys.executable, "script.py", str(parts)], cwd=folder, stderr=subprocess.PIPE, text=True
    )


def alive(pid):
    """Whether a process is there and no zombie, which only waits for the system to be asked about it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_script_without_a_guard_is_executed_once(tmp_path):
    with script(tmp_path, 6) as process:
        assert process.communicate()[1] == ""
    assert process.returncode == 0
    assert (tmp_path / "total").read_text() == "600"
    assert (tmp_path / "executed").read_text() == "once\n"
    assert len((tmp_path / "children").read_text().split()) == 2


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_its_parent(tmp_path, how):
    with script(tmp_path, 10**9) as process:
        children, patience = tmp_path / "children", time.monotonic() + 30
        while not (children.exists() and children.read_text().count("\n") == 2):
            assert time.monotonic() < patience
            assert process.poll() is None
            time.sleep(0.01)
        pids = [int(line) for line in children.read_text().split()]
        os.kill(process.pid, how)
        said = process.communicate()[1]
    assert said.count("Traceback") == (1 if how == signal.SIGINT else 0), said
    while any(map(alive, pids)):
        assert time.monotonic() < patience
        time.sleep(0.01)
