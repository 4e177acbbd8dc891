"""What three real processes do to show the laws of World; `test_world.py` reads what each of them saw."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from nnx_jax.core.errors import DistributedFailure, HaltedElsewhere
from nnx_jax.spmd.processes import joined
from nnx_jax.spmd.world import Channel, World

if os.environ.get("TESTS_FRAMEWORK") == "torch":
    from nnx_jax.torch.distributed import current_world, tell_failure
else:
    from nnx_jax.distributed import current_world, tell_failure

SIZE = 3
SHORT = 2.0
"""Timeout of the scene in which somebody does not come."""
ROUNDS = 20
VALUES = [{"text": 'ä \n"', "float": 0.1, "small": 1e-300, "list": [None, True, []]}, 2**53 + 1, "ß" * 5000]


def outcome(work: Callable[[], Any]) -> dict[str, Any]:
    """What a call returned or raised, and how long it took."""
    begun = time.monotonic()
    try:
        found: dict[str, Any] = {"value": work()}
    except DistributedFailure as failure:
        found = {"failed": [failure.rank, failure.stage, failure.kind, failure.message]}
    except BaseException as error:
        found = {"raised": f"{type(error).__name__}: {error}"}
    return found | {"seconds": time.monotonic() - begun}


def _channel(world: World) -> Channel:
    """The group's store, with a short timeout."""
    if (found := joined(SHORT)) is not None:
        return found
    from nnx_jax.torch.channel import StoreChannel

    assert isinstance(world._channel, StoreChannel)
    return StoreChannel(world._channel._store, world.rank, world.size, SHORT)


def raising(error: BaseException | None, value: Any = None) -> Callable[[], Any]:
    """Work that raises, or returns a value."""

    def work() -> Any:
        if error is not None:
            raise error
        return value

    return work


def scenes() -> dict[str, Any]:
    """All of them; each begins together, in a conversation of its own or where the one before left it."""
    world = current_world()
    seen: dict[str, Any] = {"place": [world.rank, world.size, world.alone, world.writes, world.timeout_seconds]}
    seen |= _agreements(world)
    seen |= _values(world)
    seen |= _failures_elsewhere()
    seen |= _threads(world)
    seen |= _missing(world)
    seen["kept"] = _kept(world)
    return seen


def _agreements(world: World) -> dict[str, Any]:
    mine = world.rank
    errors = {1: ValueError("mine"), 2: KeyError("too")}
    return {
        "fine": outcome(lambda: world.agree("fine", raising(None, mine * 10))),
        "one fails": outcome(lambda: world.agree("one fails", raising(errors[1] if mine == 1 else None))),
        "two fail": outcome(lambda: world.agree("two fail", raising(errors.get(mine)))),
        "interrupt": outcome(
            lambda: world.agree("interrupt", raising(KeyboardInterrupt("stop") if mine == 2 else None))
        ),
        "halted": outcome(
            lambda: world.agree("halted", raising(OSError("disk") if mine == 0 else HaltedElsewhere("no rows")))
        ),
        "odd text": outcome(lambda: world.agree("odd", raising(OSError("caf\udce9" * 9000) if mine == 1 else None))),
        "no JSON": outcome(lambda: world.gather("no JSON", float("inf") if mine == 1 else 0.0)),
        "another place": outcome(lambda: world.agree("epoch 2" if mine == 2 else "epoch 1", raising(None))),
        "after all that": outcome(lambda: world.agree("after", raising(None, "together"))),
        "telling": outcome(lambda: world.agree_telling("telling", raising(None, mine), lambda: -mine)),
        "not to be told": outcome(lambda: world.gather("values", raising if mine == 1 else mine)),
        "not finite": outcome(lambda: [str(value) for value in world.gather("values", float("nan") if mine else 1.5)]),
        "long error": outcome(lambda: world.agree("long", raising(ValueError("x" * 10**6) if mine == 1 else None))),
        "telling fails": outcome(
            lambda: world.agree_telling("telling", raising(None), raising(ValueError("tell") if mine == 1 else None))
        ),
    }


def _values(world: World) -> dict[str, Any]:
    mine, ran = world.rank, []
    writing = current_world(writer_rank=1)

    def write() -> str:
        ran.append(mine)
        return "written"

    seen = {
        "gathered": outcome(lambda: world.gather("values", VALUES[mine])),
        "any": outcome(lambda: world.any("any", mine == 2)),
        "none": outcome(lambda: world.any("none", False)),
        "on writer": outcome(lambda: writing.on_writer("write", write)),
        "writer fails": outcome(lambda: writing.on_writer("write", raising(OSError("full")))),
        "bad rank": outcome(lambda: World(_channel(world), writer_rank=SIZE)),
    }
    board = world.board("notes")
    board.put(f"from/{mine}", str(mine))
    seen["board"] = outcome(lambda: [board.get(f"from/{rank}", 5.0) for rank in range(SIZE)])
    seen["empty board"] = outcome(lambda: board.get("nothing", 0.1))
    return seen | {"ran": ran}


def _failures_elsewhere() -> dict[str, Any]:
    """Rank 0 tells of an error while the others wait for it, a while after they began to."""
    world = current_world()

    def wait_or_tell() -> Any:
        if world.rank:
            return world.agree("a long wait", raising(None))
        time.sleep(0.5)
        tell_failure("reading rows", ValueError("row 7"))
        return "told"

    seen = {"told": outcome(wait_or_tell)}
    with contextlib.suppress(Exception):
        world.fail("not mine", DistributedFailure(0, "x", "Y", "z"))  # it is told by whom it happened to
    fresh = current_world()  # knows nothing of it
    seen["after it was told"] = outcome(lambda: fresh.agree("fresh", raising(None, "fine")))
    seen["told again"] = outcome(lambda: fresh.failure())
    return seen


def _threads(world: World) -> dict[str, Any]:
    """Two threads and the main one agree at once, each at its own pace; a wait holds up nobody."""
    found: dict[str, list[Any]] = {"a": [], "b": []}

    def talk(name: str, pause: float) -> None:
        conversation = world.sub(name)
        for number in range(ROUNDS):
            time.sleep(pause)
            found[name].append(conversation.gather(f"{name} {number}", [name, number, world.rank]))

    pauses = {"a": 0.002 * world.rank, "b": 0.002 * (2 - world.rank)}
    threads = [threading.Thread(target=talk, args=each) for each in pauses.items()]
    for thread in threads:
        thread.start()
    main = [world.gather(f"main {number}", number) for number in range(ROUNDS)]
    for thread in threads:
        thread.join(60)
    counted, waiting = 0, threading.Thread(target=lambda: world.board("silence").get("nothing", 0.5))
    waiting.start()
    while waiting.is_alive():
        counted += 1
        time.sleep(0.001)
    return {"threads": found, "main": main, "counted": counted}


def _missing(world: World) -> dict[str, Any]:
    """Rank 2 comes to nothing of a conversation with a short timeout."""
    short = World(_channel(world), name="short")
    seen = {"late": outcome(lambda: short.gather("meeting", 1))} if world.rank < 2 else {}
    world.gather("on with it", None)
    return seen


def _kept(world: World) -> int:
    """How many keys there are of a conversation that has had many turns."""
    world.gather("all are here", None)
    return len(_channel(world).find("nnx_jax/run1/"))
