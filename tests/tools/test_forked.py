"""What a forked process has of its parent's."""

from __future__ import annotations

import json
import os
import sys

import pytest

import forked


def test_the_path_of_a_fresh_python_has_nothing_of_this_ones(monkeypatch):
    monkeypatch.syspath_prepend("/left/behind")
    path = forked._fresh_path("/asked/for")
    assert path[0] == "/asked/for"
    assert "/left/behind" not in path
    assert any(folder.endswith("site-packages") for folder in path)


def _write_path():
    sys.stdout.write(json.dumps(sys.path))


@pytest.mark.slow
def test_a_forked_process_imports_from_where_a_fresh_one_would(tmp_path, monkeypatch):
    files = [tmp_path / name for name in ("in", "out", "err")]
    for file in files:
        file.touch()
    monkeypatch.syspath_prepend("/left/behind")
    env = {**os.environ, "PYTHONPATH": "/asked/for"}
    assert forked.exit_code(_write_path, cwd=tmp_path, env=env, files=files) == 0, files[2].read_text()
    assert json.loads(files[1].read_text()) == forked._fresh_path("/asked/for")
