"""One update of a window by several processes, under torch's DistributedDataParallel.

Each process differentiates its own numerators. The wrapper averages gradients in the backward pass of a window's last
microbatch and nowhere else; the denominators are added up once, at the window's end; and gradient sum / W is the
average * processes / W, which is one process's update on the union of the batches. Of a small network on a CPU, the
gradients are added up at the window's end too, in one exchange with the denominators, and without gloo where the
processes share a machine: it is the exchanges that take the time there, not their bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from inspect import signature
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from nnx_jax.core.errors import ResumePointError
from nnx_jax.spmd.world import World
from nnx_jax.torch import foreach
from nnx_jax.torch.allowed import DDP, batch_norms
from nnx_jax.torch.arrays import host
from nnx_jax.torch.module import Net, weight_arrays
from nnx_jax.torch.neighbours import Neighbours, connect
from nnx_jax.torch.sync_norm import SyncNorms

FEW_NUMBERS = 2**16
"""Gradients of up to so many numbers go along with what the microbatches measured: an exchange costs more than its
bytes. Larger ones are exchanged by the wrapper while the backward pass still runs."""
STREAMS = "rng/"
"""Prefix of the arrays that are random streams, of which every process has its own."""
SUMS = "window/grads/"
"""Prefix of the arrays that are gradient sums of an open window."""
_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in signature(DistributedDataParallel).parameters
)
"""What the wrapper of this torch calls copying buffers before every forward pass."""
Key = tuple[tuple[str, float, bool], ...]


class _Nothing(torch.autograd.Function):
    """A scalar 0 of any tensors, with zeros for a gradient, whatever is in them."""

    @staticmethod
    def forward(ctx: Any, *values: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*values)
        return values[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return tuple(torch.zeros_like(value) for value in ctx.saved_tensors)


def nothing_of(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """For each value a scalar 0 whose derivatives are all 0, whatever it is made of."""
    return [_Nothing.apply(value) for value in values]  # type: ignore[misc]


class _Forward(torch.nn.Module):
    """What the wrapper wraps: the network, or a pass without any row that takes part in the exchange.

    Args:
        call: its forward pass, the module itself or what torch compiled of it.
    """

    def __init__(self, module: torch.nn.Module, call: Any) -> None:
        super().__init__()
        self.module, self.called = module, (call,)  # in a tuple, since parts of a module are listed by their names

    def forward(self, *args: Any, without_rows: bool = False, **more: Any) -> Any:
        if without_rows:
            return _Nothing.apply(*(value for value in self.module.parameters() if value.requires_grad))
        return self.called[0](*args, **more)


@dataclass(frozen=True)
class _Packed:
    """What goes along in one exchange: gradient sums, and a place for what each process measured, [ranks, n, sums]."""

    whole: torch.Tensor
    grads: list[torch.Tensor]
    places: torch.Tensor

    @classmethod
    def of(cls, grads: Sequence[torch.Tensor], ranks: int, rows: torch.Tensor) -> _Packed:
        """Room for gradients like these and rows like these, in one float64 vector."""
        sizes = [*(grad.numel() for grad in grads), ranks * rows.numel()]
        whole = rows.new_zeros(sum(sizes))
        *parts, places = whole.split(sizes)
        shaped = [part.view(grad.shape) for part, grad in zip(parts, grads, strict=True)]
        return cls(whole, shaped, places.view(ranks, *rows.shape))


class Exchange:
    """How the processes of a group make one update of a window; a `window.Sync`.

    Args:
        world: the processes.
        given: the settings; `find_unused_parameters` for a network of which a microbatch may use a part.

    Attributes:
        joins: layers wait for every process, so one without a row passes through them too.
    """

    def __init__(self, world: World, given: DDP) -> None:
        self.world, self.given = world, given
        self.size = world.size
        self._net: Net | None = None
        self._wrapper: DistributedDataParallel | None = None
        self._called = self._at_once = False
        self._norms: SyncNorms | None = None
        self._packed: _Packed | None = None
        self._neighbours: Neighbours | None = None

    @property
    def joins(self) -> bool:
        return self._norms is not None

    def wrap(self, net: Net, *, averages: bool) -> None:
        """Wrap the network for one fit; the wrapper is nobody's attribute but this one's.

        Every process calls this at the same time, and all have the weights of rank 0 then.

        Args:
            averages: gradients are in the parameters' own `.grad`, so that the wrapper can average them there; else
                `gradients` adds them up.
        """
        self._net, self._wrapper, self._packed, self._neighbours = net, None, None, None
        trained = sum(value.numel() for value in net.params.values())
        self._at_once = averages and net.device.type == "cpu" and trained <= FEW_NUMBERS
        if self._at_once and self.size > 1:
            self._neighbours = connect(self.world)
        norms = list(batch_norms(net.module).values())
        self._norms = SyncNorms(norms, self.size) if norms else None
        if not averages or not self._wraps(net.device):
            for value in weight_arrays(net.module).values():
                dist.broadcast(value.detach(), 0)
            return
        index = [net.device.index] if net.device.type == "cuda" else None
        given: dict[str, Any] = {_BUFFERS: False}  # equal on all: what would make them differ is refused
        with net.mode(train=True):  # what is frozen has no gradient to exchange
            self._wrapper = DistributedDataParallel(
                _Forward(net.module, net.call),
                device_ids=index,
                find_unused_parameters=self.given.find_unused_parameters,
                **given,
            )

    def _wraps(self, device: torch.device) -> bool:
        """Whether torch's wrapper goes together with the batch norms.

        With unused parameters every process exchanges in an order of its own, while the norms wait for all of them; and
        on a CPU the wrapper refuses torch's SyncBatchNorm, whose arithmetic is not its own here.
        """
        if self._norms is None:
            return True
        own = any(isinstance(part, torch.nn.SyncBatchNorm) for part in self._norms.parts)
        return not self.given.find_unused_parameters and (device.type == "cuda" or not own)

    @contextmanager
    def lent(self, *, rows: bool = True) -> Iterator[None]:
        """While it is open, batch norms are those of all processes; see `SyncNorms.lent`."""
        with nullcontext() if self._norms is None else self._norms.lent(counts=rows):
            yield

    @contextmanager
    def backward(self, *, last: bool, rows: bool = True) -> Iterator[None]:
        """Around a microbatch's forward and backward pass: gradients are averaged if it ends the window.

        A process whose last microbatch has no row makes an empty pass, since the others wait for it.
        """
        with self.lent(rows=rows), self._averaging(last):
            yield

    @contextmanager
    def _averaging(self, last: bool) -> Iterator[None]:
        net, wrapper = self._net, self._wrapper
        assert net is not None
        if wrapper is None or self._at_once:
            yield
            return
        self._called, before = False, net.call
        net.call = self._call
        try:
            with nullcontext() if last else wrapper.no_sync():
                yield
                if last and not self._called:
                    wrapper(without_rows=True).backward()
        finally:
            net.call = before

    def _call(self, *args: Any, **more: Any) -> Any:
        assert self._wrapper is not None
        self._called = True
        return self._wrapper(*args, **more)

    def total(self, rows: torch.Tensor, grads: list[torch.Tensor] | None = None) -> torch.Tensor:
        """What the microbatches of all processes measured, [n, sums] float64: added up in the order of the ranks."""
        mine = rows.to(torch.float64).contiguous()
        if grads is not None and self._at_once:
            return self._total_with(mine, grads)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(found, mine)
        return sum(found[1:], start=found[0])

    def _total_with(self, mine: torch.Tensor, grads: list[torch.Tensor]) -> torch.Tensor:
        """`total` in one exchange with the gradient sums, which are added in float64 and rounded once.

        Every process has places of its own for its rows, where the others add 0.
        """
        if self._packed is None or self._packed.places[0].shape != mine.shape:
            self._packed = _Packed.of(grads, self.size, mine)
        packed = self._packed
        foreach.copy_(packed.grads, grads)
        packed.places.zero_()
        packed.places[self.world.rank] = mine
        if self._neighbours is None:
            dist.all_reduce(packed.whole)
        else:
            self._neighbours.add_up(packed.whole)
        return sum(packed.places[1:], start=packed.places[0].clone())

    def gradients(self, grads: list[torch.Tensor], *, reduced: bool) -> list[torch.Tensor]:
        """The gradient sums of all processes.

        Args:
            reduced: they are averages of the wrapper already, or went along with `total`.
        """
        if reduced and self._at_once:
            assert self._packed is not None
            foreach.copy_(grads, self._packed.grads)
            return grads
        if reduced and self._wrapper is not None:
            foreach.mul_(grads, float(self.size))
            return grads
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat)
        parts = flat.split([grad.numel() for grad in grads])
        return [part.view_as(grad) for part, grad in zip(parts, grads, strict=True)]

    # -- what a generation holds -------------------------------------------------------------------------------

    def stored(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """What a generation holds of all processes: of an open window the sums of all, and the streams of each.

        Every process calls this at the same time; a stream of rank r is `rng/<r>/<name>`.
        """
        streams = {name: value for name, value in arrays.items() if name.startswith(STREAMS)}
        found = {name: value for name, value in arrays.items() if name not in streams}
        if int(arrays["counters/micro"]):
            for name in [name for name in found if name.startswith(SUMS)]:
                summed = self._placed(found[name])
                dist.all_reduce(summed)
                found[name] = host(summed)
        packed = np.frombuffer(b"".join(value.tobytes() for value in streams.values()), np.uint8)
        mine = self._placed(packed)
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(everyone, mine)
        for rank, given in enumerate(everyone):
            left = host(given).tobytes()
            for name, like in streams.items():
                value = np.frombuffer(left[: like.nbytes], like.dtype).reshape(like.shape)
                found[f"{STREAMS}{rank}/{name.removeprefix(STREAMS)}"], left = value, left[like.nbytes :]
        return found

    def restored(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """What this process goes on from: its own streams, and the sums of an open window on rank 0 alone.

        Raises:
            ResumePointError: there are no streams of this process.
        """
        mine, rank = f"{STREAMS}{self.world.rank}/", self.world.rank
        if not any(name.startswith(mine) for name in arrays):
            raise ResumePointError(f"the checkpoint has no random streams of rank {rank}")
        found = {name: value for name, value in arrays.items() if not name.startswith(STREAMS)}
        found |= {f"{STREAMS}{n.removeprefix(mine)}": value for n, value in arrays.items() if n.startswith(mine)}
        if rank:
            found |= {name: np.zeros_like(value) for name, value in found.items() if name.startswith(SUMS)}
        return found

    def _placed(self, array: np.ndarray) -> torch.Tensor:
        assert self._net is not None
        return torch.from_numpy(np.array(array)).to(self._net.device)


def added(world: World, sums: np.ndarray, rows: int, key: Key) -> tuple[np.ndarray, int, Key]:
    """What all processes measured of their shards: one gather of what each added up, in the order of the ranks.

    Args:
        sums: float64 [n]; empty where this process had no row.
        rows: how many this process had.
        key: (name, weight, additive) of every loss term; empty where this process had no row.
    """
    mine = {"sums": [value.hex() for value in sums.tolist()], "rows": rows, "key": [list(term) for term in key]}
    found = [each for each in world.gather("scores of the shards", mine) if each["rows"]]
    if not found:
        return sums, 0, key
    total = sum(np.array([float.fromhex(value) for value in each["sums"]]) for each in found)
    terms = tuple((name, float(weight), additive) for name, weight, additive in found[0]["key"])
    return np.asarray(total), sum(each["rows"] for each in found), terms
