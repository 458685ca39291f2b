"""Whatever bytes, JSON or name comes: something that works, or one sentence."""

from __future__ import annotations

import gzip
import json
import lzma
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from normlab.base.io import from_json, to_json
from normlab.lab.config import Config, OptimConfig, numbers
from normlab.lab.data.text import read_lines, require_parallel
from normlab.lab.recipes.grammar import describe, parts, resolve
from normlab.lab.runs.folder import read_config

FEW = settings(max_examples=60, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
BASE = Config(optim=OptimConfig(warmup_steps=4, decay_step=8))
ENDINGS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}
LINES = st.lists(st.sampled_from(["a", "zwölf", "", " ", "\ufeff", "\u2028", "\r", "\0"])).map("\n".join)
BYTES = st.one_of(st.binary(max_size=200), LINES.map(str.encode), LINES.map(lambda t: t.encode("utf-16")))


def one_sentence(error: Exception, *about: str) -> None:
    """Assert that a person can read it: some words on one line, which name what they are about."""
    said = str(error)
    assert any(name in said for name in about)
    assert len(said.split()) >= 4
    assert "\n" not in said
    assert said.encode()


def written(folder: Path, name: str, content: bytes, ending: str, *, packed: bool) -> Path:
    path = folder / f"{name}{ending}"
    path.write_bytes(ENDINGS[ending](content) if packed else content)
    return path


@FEW
@given(BYTES, st.sampled_from(sorted(ENDINGS)), st.booleans())
def test_any_bytes_are_lines_or_a_sentence_with_the_file(tmp_path, content, ending, packed):
    path = written(tmp_path, "text", content, ending, packed=packed)
    try:
        lines = read_lines(path)
    except (ValueError, OSError) as error:
        one_sentence(error, str(path))
        return
    assert not any("\n" in line for line in lines)
    if packed or not ending:
        text = content.decode().removeprefix("\ufeff")
        whole = text if text.endswith("\n") or not text else f"{text}\n"
        assert lines == [line.rstrip("\r") for line in whole.split("\n")[:-1]]


@FEW
@given(BYTES, BYTES)
@example(b"a\n", b"b")
def test_any_two_files_are_pairs_or_a_sentence(tmp_path, source, target):
    paths = [written(tmp_path, name, c, "", packed=True) for name, c in (("s", source), ("t", target))]
    try:
        sides = [read_lines(path) for path in paths]
        require_parallel((str(paths[0]), str(paths[1])), (len(sides[0]), len(sides[1])))
    except (ValueError, OSError) as error:
        one_sentence(error, *map(str, paths))
    else:
        assert len(sides[0]) == len(sides[1]) > 0


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, 1, -1, 10**30, 10**400]),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["nan", "inf", "\ud800", "pre", "bf16"]),
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)
PLAIN = json.loads(to_json(Config()))


@st.composite
def configurations(draw: st.DrawFn) -> Any:
    """A good configuration of which some values, sections or keys are something else."""
    content = json.loads(json.dumps(PLAIN))
    for _ in range(draw(st.integers(1, 3))):
        section = draw(st.sampled_from(["", "model", "data", "optim", "train", "decode", "seeds", "machine"]))
        place = content[section] if section else content
        if isinstance(place, dict):
            place[draw(st.sampled_from(sorted(place)) | st.text(max_size=6))] = draw(JSON)
    return content


def equal(a: Any, b: Any) -> bool:
    """As JSON, where nan is nan."""
    return to_json(a) == to_json(b)


@pytest.mark.slow
@FEW
@given(st.one_of(configurations(), JSON).map(json.dumps) | st.text(max_size=40))
@example('{"optim": {"lr": 1' + "0" * 400 + "}}")
@example('{"seeds": {"init": 1' + "0" * 5000 + "}}")
@example("[" * 100_000)
@example('{"a": 1, "a": 2}')
def test_any_json_is_a_configuration_or_a_sentence(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("utf-8", errors="surrogatepass"))
    try:
        config = read_config(path)
    except ValueError as error:
        one_sentence(error, str(path))
        return
    assert equal(from_json(Config, to_json(config)), config)
    assert all(math.isfinite(x) for x in (config.optim.lr, config.model.dropout, *config.optim.betas))
    assert isinstance(numbers(config), dict)


GLUE = ["enc:", "/dec:", "enc:pre/dec:post", "", " ", "\0", "ß"]
WORDS = st.sampled_from([*(part.name for part in parts()), *GLUE])
RECIPES = st.one_of(
    st.text(max_size=30), st.lists(WORDS, max_size=5).map("+".join), st.lists(WORDS, max_size=4).map("".join)
)


@FEW
@given(RECIPES)
@example("pre+rope")
@example("enc:pre/dec:")
@example("+")
@example("pre\nwarmup")
@example("\ud800")
def test_any_string_is_a_recipe_or_a_sentence(name):
    try:
        config = resolve(name, BASE)
    except ValueError as error:
        one_sentence(error, f"recipe {name!r}", f"recipe {name.strip()!r}", f"got {name!r}")
        return
    assert config.recipe == name.strip()
    assert resolve(config.recipe, config) == config
    assert describe(config)
