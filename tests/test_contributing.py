"""CONTRIBUTING's examples, pasted into modules and run by the commands that stand below them."""

from __future__ import annotations

import json
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
        r"^```(?:python|toml)\n# (\w+\.(?:py|toml))\n(.*?)^```\n+```bash\n(.*?)^```",
        GUIDE,
        re.DOTALL | re.MULTILINE,
    )
}
"""Each file of the page, with the commands that stand below it."""
REGIME = """
question = "Which is better?"
findings = ["E1"]
seeds = [1, 2, 3]
[cells.pre]
recipe = "pre"
[cells."post+warmup"]
recipe = "post+warmup"
"""
"""What the paper's file reads besides: runs that its author has."""
SMALL = (
    "--steps 4 --validate-every-steps 2 --dim 16 --ffn-dim 32 --heads 2 --encoder-layers 1 "
    "--decoder-layers 1 --vocab-size 150 --max-tokens 512 --threads 1"
).split()
SHRUNK = {"train": SMALL}
"""Flags that make a command small."""


def test_every_example_is_run_and_every_proof_exists():
    assert len(EXAMPLES) == GUIDE.count("```python") + GUIDE.count("```toml")
    wanted = {"property", "source", "placement", "study", "finding", "chart", "task", "paper"}
    assert {f"my_{part}.py" for part in wanted} | {"doe2026.toml"} <= EXAMPLES.keys()
    proofs = re.findall(r"\| 1 \| `(tests/\S+\.py)` \|", GUIDE)
    assert len(proofs) == len(wanted)
    assert [path for path in proofs if not (HOME / path).exists()] == []


def write_runs(folder):
    """Write three runs of each of two recipes."""
    folder.mkdir(parents=True)
    (folder / "regime.toml").write_text(REGIME)
    rows = [
        {"cell": cell, "seed": seed, "run": f"{cell}{seed}", "outcome": "trained", "dev": [], "train": [],
         "test": {"bleu": level + seed, "nll": 3.0}}
        for cell, level in (("pre", 30.0), ("post+warmup", 20.0))
        for seed in (1, 2, 3)
    ]  # fmt: skip
    (folder / "runs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_as_it_is_pasted(name, tmp_path, monkeypatch):
    monkeypatch.delenv("NORMLAB_IMPORT", raising=False)
    code, commands = EXAMPLES[name]
    (tmp_path / name).write_text(code)
    write_runs(tmp_path / "runs" / "mine")
    for command in commands:
        program, *words = shlex.split(command)
        assert program == "normlab"
        done = normlab(*words, *SHRUNK.get(words[0], []), cwd=tmp_path)
        assert done.returncode == 0, (command, done.stderr)
