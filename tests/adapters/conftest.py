"""Trainings that another library's loop runs; without the library its tests are not collected."""

from __future__ import annotations

import os
from importlib.util import find_spec

os.environ.setdefault("KERAS_BACKEND", "jax")
collect_ignore = []
if not (find_spec("lightning") and find_spec("torch")):
    collect_ignore.append("test_lightning.py")
if not find_spec("keras"):
    collect_ignore.append("test_keras.py")
