"""Every way to pickle or to unpickle raises, for tests of what works without."""

from __future__ import annotations

import pickle  # noqa: TID251  what is forbidden here
import sys
from collections.abc import Callable
from typing import Any, NoReturn

NAMES = ("load", "loads", "dump", "dumps", "Pickler", "Unpickler", "_load", "_loads", "_dump", "_dumps", "_Pickler",
         "_Unpickler")  # fmt: skip
TORCH = ("save", "load")
COLLECTIVES = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "send_object_list",
               "recv_object_list")  # fmt: skip


class PickledError(BaseException):
    """Something was pickled, or unpickled; no `except Exception` hides it."""


def forbid(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Replace the functions of pickle, of torch where it is loaded, and of whatever imported them by name.

    Args:
        put: sets an attribute; `MonkeyPatch.setattr` puts everything back after the test.
    """
    real = {id(getattr(pickle, name)): name for name in NAMES}
    for module in list(sys.modules.values()):
        for name, value in list(vars(module).items()) if module is not None else ():
            if id(value) in real and not getattr(module, "__name__", "").startswith("tests."):
                put(module, name, _raising(f"pickle.{real[id(value)]}"))
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return
    for owner, names in ((torch, TORCH), (torch.serialization, TORCH), (torch.distributed, COLLECTIVES)):
        for name in names:
            put(owner, name, _raising(f"{owner.__name__}.{name}"))


def _raising(what: str) -> Any:
    def called(*_: Any, **__: Any) -> NoReturn:
        raise PickledError(f"{what} was called")

    if what.endswith("ickler"):  # a module that is imported later may still make a class of its own from it
        return type(what.rpartition(".")[2], (), {"__init__": called})
    return called
