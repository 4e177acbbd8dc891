"""Torch computes with one thread in tests, so that they do not wait for each other.

Without torch none of these tests is collected: what does not need the extra runs without it.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torch") else ["*"]
os.environ["OMP_NUM_THREADS"] = "1"  # of processes that tests start

if find_spec("torch"):
    import torch

    torch.set_num_threads(1)
