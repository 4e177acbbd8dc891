"""TensorBoard's event files, written without TensorFlow: framed records of a few protocol buffer fields."""

from __future__ import annotations

import os
import re
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from nnx_jax.core import fsio

_POLYNOMIAL = 0x82F63B78  # CRC-32C (Castagnoli), bits reversed
_VERSION = b"brain.Event:2"
_DOUBLE, _VARINT, _BYTES, _FLOAT = 1, 0, 2, 5
_EVENT = {"wall_time": 1, "step": 2, "file_version": 3, "summary": 5, "session_log": 7}
_START = 1


class EventFile:
    """One file of scalars; what is added is on the disk after `flush`.

    Args:
        directory: made if it is not there.
        start: first step of this session: whatever an earlier file holds from there on is left out by TensorBoard.
    """

    _made = 0

    def __init__(self, directory: Path, start: int) -> None:
        EventFile._made += 1
        host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())
        name = f"events.out.tfevents.{int(time.time()):010d}.{host}.{os.getpid()}.{EventFile._made}"
        self.path = fsio.make_dir(directory) / name
        self._buffer = bytearray(_record(_event(0, _field("file_version", _BYTES, _VERSION))))
        session = _plain_field(1, _VARINT, _varint(_START))
        self._buffer += _record(_event(start, _field("session_log", _BYTES, session)))

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add scalars by tag, all at one step."""
        summary = b"".join(_plain_field(1, _BYTES, _scalar(tag, value)) for tag, value in scalars.items())
        self._buffer += _record(_event(step, _field("summary", _BYTES, summary)))

    def flush(self) -> None:
        """Append what was added to the file."""
        if self._buffer:
            data, self._buffer = bytes(self._buffer), bytearray()
            fsio.append_bytes(self.path, data)


def crc32c(data: bytes) -> int:
    """Return the CRC-32C of some bytes."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _entry(byte: int) -> int:
    for _ in range(8):
        byte = (byte >> 1) ^ (_POLYNOMIAL if byte & 1 else 0)
    return byte


_TABLE = tuple(_entry(byte) for byte in range(256))


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _masked(length) + data + _masked(data)


def _event(step: int, what: bytes) -> bytes:
    stamp = _field("wall_time", _DOUBLE, struct.pack("<d", time.time()))
    return stamp + (_field("step", _VARINT, _varint(step)) if step else b"") + what


def _scalar(tag: str, value: float) -> bytes:
    with np.errstate(over="ignore"):  # a number too large for float32 is infinite there
        number = np.asarray(value, "<f4").tobytes()
    return _plain_field(1, _BYTES, tag.encode()) + _plain_field(2, _FLOAT, number)


def _field(name: str, wire: int, payload: bytes) -> bytes:
    return _plain_field(_EVENT[name], wire, payload)


def _plain_field(number: int, wire: int, payload: bytes) -> bytes:
    length = _varint(len(payload)) if wire == _BYTES else b""
    return _varint(number << 3 | wire) + length + payload


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)
