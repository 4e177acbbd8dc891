"""One JAX for every test: CPU, four virtual devices, nothing shared with the user's caches or the network."""

from __future__ import annotations

import ipaddress
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Set before anything imports jax; child processes of the tests inherit it.
os.environ["JAX_PLATFORMS"] = "cpu"
# Four devices on every machine, so that code for several devices is exercised (and code for one is seen to use one)
# without an accelerator. The number is fixed: XLA partitions differently for other counts, and tests compare bits.
os.environ["JAX_NUM_CPU_DEVICES"] = "4"
# The compile cache of a user must neither speed a test up nor be filled by one. One folder a worker: two processes
# that write the same entry at once are not a case these tests are about.
CACHE = Path(tempfile.mkdtemp(prefix="nnx-jax-tests-"))
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(CACHE)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"  # small programs too: many tests compile the same one
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
os.environ.pop("NNX_JAX_RUNS_DIR", None)

settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_unconfigure() -> None:
    """Remove this worker's compile cache."""
    shutil.rmtree(CACHE, ignore_errors=True)


def _is_local(address: Any) -> bool:
    """True for Unix sockets and loopback addresses."""
    if not isinstance(address, tuple):
        return True
    host = str(address[0])
    if host in ("localhost", ""):
        return True
    try:
        return ipaddress.ip_address(host.split("%")[0]).is_loopback
    except ValueError:
        return False


@pytest.fixture(scope="session", autouse=True)
def _no_network() -> Iterator[None]:
    """Refuse every connection that leaves the machine: no test may fetch anything at run time."""
    real = socket.socket.connect

    def connect(self: socket.socket, address: Any) -> None:
        if not _is_local(address):
            raise OSError(f"tests open no network connection, but one to {address!r} was asked for")
        real(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", connect)
        yield
