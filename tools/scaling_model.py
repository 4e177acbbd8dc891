"""The cost model of tools/scaling.py: seconds of an update from what its compiled program computes and exchanges."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

PARTS = (
    "call", "device", "flop", "byte", "device exchange", "device byte sent", "process exchange", "process byte sent"
)  # fmt: skip
"""What the seconds of an update are counted by: by call; of all devices of the machine; of all exchanges."""


@dataclass(frozen=True)
class Program:
    """One compiled update.

    Attributes:
        devices: that it runs on, of which `processes` processes have equally many.
        flops, memory: floating point operations, and bytes read and written, of each device (`cost_analysis`).
        exchanges: by kind of collective: count, bytes of the results on one device, bytes that one device sends.
    """

    devices: int
    processes: int
    flops: float
    memory: float
    exchanges: Mapping[str, Mapping[str, int]]

    @property
    def count(self) -> int:
        """Collectives of one update."""
        return sum(each["count"] for each in self.exchanges.values())

    @property
    def bytes(self) -> int:
        """Of their results on one device."""
        return sum(each["bytes"] for each in self.exchanges.values())

    @property
    def moved(self) -> int:
        """Bytes that one device sends."""
        return sum(each["moved"] for each in self.exchanges.values())

    def parts(self) -> np.ndarray:
        """How often each of PARTS is needed, when all devices share one machine: float64 [8]."""
        n, others = self.devices, (self.devices - 1) * self.count
        found = [1.0, n, n * self.flops, n * self.memory, 0.0, 0.0, 0.0, 0.0]
        at = 4 if self.processes == 1 else 6
        found[at], found[at + 1] = float(others), float(n * self.moved)
        return np.array(found)


def fit(programs: Sequence[Program], seconds: Sequence[float]) -> np.ndarray:
    """Seconds of each of PARTS, none below 0, with the least squared relative error: float64 [8]."""
    rows = np.array([program.parts() for program in programs]) / np.asarray(seconds)[:, None]
    scale = np.abs(rows).max(axis=0)
    used = [part for part in range(len(PARTS)) if scale[part] > 0]
    best, found = math.inf, np.zeros(len(PARTS))
    for size in range(1, len(used) + 1):
        for chosen in itertools.combinations(used, size):
            columns = rows[:, chosen] / scale[list(chosen)]
            values = np.linalg.lstsq(columns, np.ones(len(rows)), rcond=None)[0]
            error = float(np.sum((columns @ values - 1) ** 2))
            if np.all(values >= 0) and error < best - 1e-12:
                best, found = error, np.zeros(len(PARTS))
                found[list(chosen)] = values / scale[list(chosen)]
    return found


def predict(program: Program, costs: np.ndarray) -> float:
    """Seconds of an update on the machine that `costs` was fitted on."""
    return float(program.parts() @ costs)


@dataclass(frozen=True)
class Hardware:
    """One device of a cluster and its links.

    Attributes:
        flops: floating point operations a second; memory: bytes a second from and to its own memory.
        bandwidth: bytes a second that it sends to the others.
        latency: seconds of the smallest exchange between two.
    """

    flops: float
    memory: float
    bandwidth: float
    latency: float

    def update(self, program: Program) -> dict[str, float]:
        """Seconds of an update: computing, exchanging, and between which bounds both together lie.

        Computing is bound by operations or by memory. An exchange of n devices takes about log2 n latencies beside its
        bytes. The bounds: all of the shorter one is hidden behind the longer one, or nothing.
        """
        compute = max(program.flops / self.flops, program.memory / self.memory)
        steps = math.ceil(math.log2(program.devices)) if program.devices > 1 else 0
        exchange = program.count * steps * self.latency + program.moved / self.bandwidth
        return {
            "compute": compute,
            "exchange": exchange,
            "least": max(compute, exchange),
            "most": compute + exchange,
        }


def told(costs: np.ndarray) -> dict[str, Any]:
    """The fitted numbers as a person knows them; None for what no measured point needed."""
    rate = lambda value: None if value == 0 else float(1 / value)  # noqa: E731
    return {
        "call_seconds": float(costs[0]),
        "device_seconds": float(costs[1]),
        "flops_per_second": rate(costs[2]),
        "memory_bytes_per_second": rate(costs[3]),
        "device_exchange_seconds": float(costs[4]),
        "device_bytes_per_second": rate(costs[5]),
        "process_exchange_seconds": float(costs[6]),
        "process_bytes_per_second": rate(costs[7]),
    }
