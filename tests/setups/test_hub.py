"""Models by name: what the local cache of the Hub knows, and what is said of a name that it does not know."""

import json
import socket
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import errors

from normlab.errors import UserError
from normlab.setups.hub import folder_of
from normlab.setups.huggingface import setup_from_configuration
from normlab.testing import setup_from_source

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 61,
}
NAME, COMMIT = "acme/tiny-llama", "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of the Hub, laid out as the Hub's client does, with the configuration of one model."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    model = tmp_path / "models--acme--tiny-llama"
    snapshot, refs = model / "snapshots" / COMMIT, model / "refs"
    for folder in (snapshot, refs):
        folder.mkdir(parents=True)
    (refs / "main").write_text(COMMIT)
    (snapshot / "config.json").write_text(json.dumps(TINY))
    return tmp_path


@pytest.fixture
def no_network(monkeypatch):
    """Every name of a host is unknown."""

    def unknown(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)


@pytest.mark.usefixtures("no_network")
def test_a_name_that_the_cache_knows_needs_no_network(cache):
    assert json.loads((folder_of(NAME) / "config.json").read_text()) == TINY
    named = setup_from_configuration(NAME, seed=1)
    assert named.facts["configuration"] == NAME
    assert named.setup.model.config.hidden_size == 16
    with setup_from_source(f"hf:{NAME}") as setup:
        assert type(setup.model).__name__ == "LlamaForCausalLM"
    assert not list(cache.rglob("*.safetensors"))


def test_a_folder_comes_before_a_name(tmp_path, monkeypatch):
    (tmp_path / NAME).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert folder_of(NAME).resolve() == tmp_path / NAME


def answer(error):
    """The error that the Hub's client makes of an answer."""
    return error("the Hub's own words", response=SimpleNamespace(headers={}, request=None))


REASONS = {
    "gated": (answer(errors.GatedRepoError), "is gated: accept its conditions"),
    "unknown": (answer(errors.RepositoryNotFoundError), "has no model acme/x that you may read"),
    "empty": (answer(errors.RemoteEntryNotFoundError), "has no config.json on the Hub"),
    "offline": (errors.OfflineModeIsEnabled("offline"), "connect to the network, or name a folder"),
    "broken": (answer(errors.HfHubHTTPError), r"cannot be asked \(HfHubHTTPError"),
}


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("reason", REASONS)
def test_one_sentence_says_why_there_is_no_configuration(reason, monkeypatch):
    error, words = REASONS[reason]

    def ask(*_, **__):
        raise error

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", ask)
    with pytest.raises(UserError, match=words) as raised:
        folder_of("acme/x")
    assert "acme/x" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert folder_of(NAME).name == COMMIT, "the cache knows it, whatever the network says"


@pytest.mark.usefixtures("cache", "no_network")
def test_without_a_network_an_unknown_name_is_refused():
    with pytest.raises(UserError, match="network"):
        folder_of("acme/unknown")


def test_what_can_be_no_name_is_a_folder_that_is_missing():
    with pytest.raises(UserError, match=r"configs/my/llama; .*hf:"):
        folder_of("configs/my/llama")


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_code_of_the_hub_is_refused(tmp_path, key):
    for value in ("acme/kernels", {"text_config": "acme/kernels"}):
        (tmp_path / "config.json").write_text(json.dumps({**TINY, key: value}))
        with pytest.raises(UserError, match=f"acme/kernels .{key}.*--trust-remote-code"):
            setup_from_configuration(tmp_path, seed=1)
