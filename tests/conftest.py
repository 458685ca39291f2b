"""One core a test process: workers then do not fight for cores, and timings mean something."""

import gc
import os
import signal
import socket

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

import pytest
from hypothesis import settings

settings.register_profile("untimed", deadline=None)  # a busy machine is no fault of the code
settings.load_profile("untimed")

# a shell that starts the tests in its background has told them to ignore these, and a run heeds that
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_finish():
    """Let nothing scan what is there before the first test: torch, the libraries and the tests themselves.

    Instruments collect garbage, and look through all objects that are alive for a script's models. Beside two
    million others that takes longer than most of what is tested.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def no_power_fails():
    """Nothing waits for the disk; a test of what is synced puts its own function there."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A data configuration of small files."""
    from lab.training.tiny import write_text

    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture
def loopback(monkeypatch):
    """Processes that talk to one another on this machine alone; skipped at once where they cannot."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=1).close()
    except OSError as error:
        pytest.skip(f"needs the loopback device ({error}); type: ip link set lo up")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture
def one_rank():
    """A process group of which this process is the only rank."""
    from torch import distributed

    from one_rank import BACKEND

    distributed.init_process_group(BACKEND, store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()
