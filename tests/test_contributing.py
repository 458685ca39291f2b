"""CONTRIBUTING's examples, pasted into modules and run by the commands that stand below them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from cli.typed import normlab

HOME = Path(__file__).parents[1]
GUIDE = (HOME / "CONTRIBUTING.md").read_text(encoding="utf-8")
EXAMPLES = {
    name: (code, commands.splitlines())
    for name, code, commands in re.findall(
        r"^```python\n# (\w+)\.py\n(.*?)^```\n+```bash\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE
    )
}
SMALL = (
    "--steps 4 --validate-every-steps 2 --dim 16 --ffn-dim 32 --heads 2 --encoder-layers 1 "
    "--decoder-layers 1 --vocab-size 150 --max-tokens 512 --threads 1"
).split()
SHRUNK = {"train": SMALL}
"""Flags that make a command small."""


def test_every_example_is_run_and_every_proof_exists():
    assert len(EXAMPLES) == GUIDE.count("```python")
    assert {"my_placement", "two_streams", "my_paper"} <= EXAMPLES.keys()
    proofs = re.findall(r"\| 1 \| `(tests/\S+\.py)` \|", GUIDE)
    assert len(proofs) == 4
    assert [path for path in proofs if not (HOME / path).exists()] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_as_it_is_pasted(name, tmp_path, monkeypatch):
    monkeypatch.delenv("NORMLAB_IMPORT", raising=False)
    code, commands = EXAMPLES[name]
    (tmp_path / f"{name}.py").write_text(code)
    for command in commands:
        program, *words = shlex.split(command)
        assert program == "normlab"
        done = normlab(*words, *SHRUNK.get(words[0], []), cwd=tmp_path)
        assert done.returncode == 0, (command, done.stderr)
