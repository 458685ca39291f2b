"""What is said while a script takes long to come to its first step."""

from __future__ import annotations

import threading
import time

from normlab.cli.waiting import says_where


def test_a_long_wait_says_where_in_the_users_code_the_script_is():
    said: list[str] = []
    with says_where("train.py", after_s=0.02, write=said.append):
        while not said:
            time.sleep(0.001)
    assert said[0].startswith("train.py is still running after ")
    assert "at test_waiting.py:" in said[0]
    assert "in test_a_long_wait_says_where_in_the_users_code_the_script_is()" in said[0]


def test_a_short_wait_says_nothing_and_leaves_no_thread():
    said: list[str] = []
    before = threading.active_count()
    with says_where("train.py", after_s=30.0, write=said.append):
        pass
    assert (said, threading.active_count()) == ([], before)
