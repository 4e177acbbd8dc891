"""Devices that this machine does not have: compiling for a mesh needs their number, not the devices."""

from __future__ import annotations

import os
import sys

from nnx_jax.core.errors import ConfigError

MOST = 4096


def pretend_devices(count: int, *, path: str = "--devices") -> None:
    """Let this process have `count` devices, made of its CPU; comes before anything starts JAX.

    Raises:
        ConfigError: JAX has started with other ones, or the number is none.
    """
    if not 1 <= count <= MOST:
        raise ConfigError(f"got {count}; write a number of devices from 1 to {MOST}", path=path)
    if "jax" not in sys.modules:  # it reads the environment when it is imported
        os.environ.update(JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES=str(count))
    import jax

    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        pass  # it has started: with as many, or not
    if (found := jax.device_count()) != count:
        raise ConfigError(f"got {count}, but JAX has started with {found} in this process; ask in a new one", path=path)
