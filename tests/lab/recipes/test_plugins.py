"""Modules of other people: imported, or refused with the reason, and handed on to worker processes."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest

from normlab.lab.recipes import plugins
from normlab.lab.recipes.plugins import ENVIRONMENT, code_digest, load_plugins
from normlab.nn import PreNorm


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty current directory; what is imported from it is forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path


def test_a_module_of_the_current_directory_is_imported_and_handed_on(here, monkeypatch):
    (here / "plugin_a.py").write_text("value = 1")
    (here / "plugin_b.py").write_text("value = 2")
    monkeypatch.setenv(ENVIRONMENT, "plugin_b")
    load_plugins("plugin_a")
    assert (sys.modules["plugin_a"].value, sys.modules["plugin_b"].value) == (1, 2)
    assert plugins.os.environ[ENVIRONMENT] == "plugin_b,plugin_a"
    load_plugins()
    assert plugins.os.environ[ENVIRONMENT] == "plugin_b,plugin_a"


def test_nothing_to_import_changes_nothing(here):
    before = list(sys.path)
    load_plugins()
    assert sys.path == before
    assert ENVIRONMENT not in plugins.os.environ


@pytest.mark.parametrize(
    ("content", "name", "sentence"),
    [
        (
            None,
            "plugin_c",
            r"^cannot import 'plugin_c' \(--import\): No module named 'plugin_c'; modules are looked for",
        ),
        (
            None,
            "pack.plugin",
            r"No module named 'pack'; modules are looked for in .* and among the installed packages$",
        ),
        (None, "./own/plugin_c.py", r"; give a module instead of a file: --import own\.plugin_c$"),
        ("import missing_d", "plugin_c", r"\(--import\): No module named 'missing_d'$"),
        ("1 / 0", "plugin_c", r"\(--import\): ZeroDivisionError: division by zero$"),
        (
            "from normlab.nn import PreNorm\nclass Mine(PreNorm, name='post'): pass",
            "plugin_c",
            r"\(--import\): the placement name 'post' is taken by PostNorm; give yours",
        ),
    ],
)
def test_what_cannot_be_imported_is_a_sentence(here, content, name, sentence):
    if content:
        (here / "plugin_c.py").write_text(content)
    with pytest.raises(ValueError, match=sentence):
        load_plugins(name)
    assert ENVIRONMENT not in plugins.os.environ


def test_the_variable_is_named_where_it_asked(here, monkeypatch):
    monkeypatch.setenv(ENVIRONMENT, "plugin_c")
    with pytest.raises(ValueError, match=r"'plugin_c' .*\$NORMLAB_IMPORT"):
        load_plugins()


def test_installed_packages_are_found_by_their_entry_point(here, monkeypatch):
    (here / "plugin_e.py").write_text("value = 3")
    monkeypatch.syspath_prepend(here)
    found = [EntryPoint("mine", "plugin_e", plugins.GROUP)]
    monkeypatch.setattr(plugins, "entry_points", lambda group: found if group == plugins.GROUP else [])
    load_plugins()
    assert sys.modules["plugin_e"].value == 3
    assert ENVIRONMENT not in plugins.os.environ
    found[0] = EntryPoint("mine", "missing_f", plugins.GROUP)
    with pytest.raises(ValueError, match=r"'mine' .*'normlab\.plugins'.*missing_f"):
        load_plugins()


def test_code_of_ones_own_has_a_digest_and_ours_has_none(here, monkeypatch):
    file = here / "mine.py"
    file.write_text("a")
    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(__file__=str(file)))
    own = SimpleNamespace(__module__="mine")
    assert code_digest([PreNorm, load_plugins]) == ""
    first = code_digest([PreNorm, own])
    assert first == code_digest([own, own])
    file.write_text("b")
    assert code_digest([own]) not in ("", first)
    assert code_digest([SimpleNamespace(__module__="typed_at_a_prompt")]) != ""
