"""Without flatbuffers none of these tests is collected: what does not need the extra runs without it."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("flatbuffers") else ["*"]
