"""ShardingSpec and the mesh of a configuration: what is made of it, and what is refused before anything is compiled."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from nnx_jax.core.errors import ConfigError
from nnx_jax.engines.placement import SplitRows
from nnx_jax.spmd.mesh import ShardingSpec, make_sharding


def test_devices_are_taken_from_the_first_on() -> None:
    found = make_sharding({"data": 2})
    assert found is not None
    assert list(found.mesh.devices.flat) == jax.devices()[:2]
    assert found.parts == 2


def test_minus_one_is_every_device() -> None:
    found = make_sharding({"data": -1})
    assert found is not None
    assert found.parts == len(jax.devices()) == 4
    assert make_sharding({"data": -1}, jax.devices()[:1]) is None


@pytest.mark.parametrize("sizes", [{}, {"data": 1}, {"model": 1}, {"data": 1, "model": 1}])
def test_one_device_is_no_mesh(sizes: dict[str, int]) -> None:
    assert make_sharding(sizes) is None


def test_equal_specs_are_one_key() -> None:
    specs = {make_sharding({"data": 2}), make_sharding({"data": 2, "model": 1})}
    assert len(specs) == 1


def test_rows_are_filled_up_to_equal_parts() -> None:
    found = make_sharding({"data": 4})
    assert found is not None
    assert [found.padded(rows) for rows in (1, 4, 6, 8)] == [4, 4, 8, 8]


def test_what_lies_where() -> None:
    """A window's sums of each device are told by their name; everything else of a state is whole everywhere."""
    found = make_sharding({"data": 4})
    assert isinstance(found, ShardingSpec)
    assert found.rows.spec == PartitionSpec("data")
    assert found.stacked.spec == PartitionSpec(None, "data")
    paths = ("params/w", "accum/window/grads/0/w", "counters")
    places = found.leaves(paths, [(4,), (4, 4), ()], ("accum/window/grads/",))
    assert [place.is_fully_replicated for place in places] == [True, False, True]


def test_more_devices_than_there_are() -> None:
    """The message counts them, and says how a CPU gets more."""
    with pytest.raises(
        ConfigError, match=r"got \{data: 8\}, but there are 4 devices \(cpu\); .*JAX_NUM_CPU_DEVICES=8"
    ) as e:
        make_sharding({"data": 8})
    assert e.value.path == "mesh"
    with pytest.raises(ConfigError, match=r"there is 1 device \(cpu\); leave mesh out, or set JAX_NUM_CPU_DEVICES=2"):
        make_sharding({"data": 2}, jax.devices()[:1])


def test_another_axis_is_refused() -> None:
    """An axis that would be ignored."""
    with pytest.raises(ConfigError, match=r"got \{data: 2, model: 2\}; nothing is split over 'model'"):
        make_sharding({"data": 2, "model": 2})


# Several axes ---------------------------------------------------------------------------------------------------------


def test_rows_are_split_over_data_and_fsdp_together() -> None:
    """The axes stand in one order however they are written: rows first, `tensor` last, own ones between."""
    found = make_sharding({"tensor": 1, "fsdp": 2, "data": 2})
    assert found is not None
    assert found.mesh.axis_names == ("data", "fsdp")
    assert found.rows.spec == PartitionSpec(("data", "fsdp"))
    assert found.parts == 4
    found = make_sharding({"tensor": 2, "own": 2}, rules={"w": ["own"]})
    assert found is not None
    assert found.mesh.axis_names == ("own", "tensor")
    assert (found.rows.spec, found.parts, found.padded(3)) == (PartitionSpec(), 1, 3)


def test_the_rest_of_the_devices() -> None:
    found = make_sharding({"data": -1, "tensor": 2})
    assert found is not None
    assert found.geometry() == {"axes": {"data": 2, "tensor": 2}}
    assert make_sharding({"fsdp": -1, "data": 4}) == make_sharding({"data": 4})
    with pytest.raises(ConfigError, match=r"4 devices do not split .* \(4 = 3 x 1 \+ 1\), so data cannot be -1"):
        make_sharding({"data": -1, "tensor": 3})
    with pytest.raises(ConfigError, match="only one axis can be -1"):
        make_sharding({"data": -1, "fsdp": -1})
    with pytest.raises(ConfigError, match=r"got \{data: -1, tensor: 8\}, but there are 4 devices"):
        make_sharding({"data": -1, "tensor": 8})


@pytest.mark.parametrize(
    ("sizes", "same"),
    [({"fsdp": 4}, False), ({"tensor": 2}, False), ({"data": 2}, True), ({"data": 2, "fsdp": 2}, False)],
)
def test_a_model_that_every_device_holds(sizes: dict[str, int], same: bool) -> None:
    """What may keep a window's sums on each device; a rule of the user's ends it."""
    found = make_sharding(sizes)
    assert found is not None
    assert found.replicates is same
    ruled = make_sharding({"data": 2}, rules={"w": ["data"]})
    assert ruled is not None
    assert not ruled.replicates


# Several processes ----------------------------------------------------------------------------------------------------


class Device:
    """As much of a device as choosing needs."""

    platform = "cpu"

    def __init__(self, id: int, process_index: int) -> None:
        self.id, self.process_index = id, process_index

    def __repr__(self) -> str:
        return f"{self.process_index}.{self.id}"


def chosen(sizes: dict[str, int], *, processes: int = 2, each: int = 4) -> list[str]:
    """The devices of a mesh, of processes whose devices come in turn."""
    devices = [Device(number, rank) for number in range(each) for rank in range(processes)]
    found = make_sharding(sizes, devices)
    assert found is not None
    return [repr(device) for device in found.mesh.devices.flat]


def test_each_processs_devices_follow_each_other() -> None:
    """So that a process's rows follow each other; a mesh of fewer devices takes as many of every process."""
    everyone = ["0.0", "0.1", "0.2", "0.3", "1.0", "1.1", "1.2", "1.3"]
    assert chosen({"data": -1}) == chosen({"data": 4, "tensor": 2}) == chosen({"fsdp": 8}) == everyone
    assert chosen({"data": 4}) == ["0.0", "0.1", "1.0", "1.1"]
    assert chosen({"data": 2}) == ["0.0", "1.0"]


@pytest.mark.parametrize("sizes", [{"data": 1}, {"data": 3}, {"fsdp": 1, "tensor": 1}])
def test_a_mesh_that_leaves_a_process_out(sizes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"in 2 processes of 4, 4 devices; .* a multiple of 2, or -1 for all"):
        chosen(sizes)


def test_more_devices_than_a_group_has() -> None:
    """Each process makes its own devices of its CPU, so the number to set is that of one process, not of all."""
    there = r"there are 2 devices \(cpu\), in 2 processes; write sizes whose product is 2 or less, and a multiple of 2"
    more = r"set JAX_NUM_CPU_DEVICES=3 in the environment of every process, which is --devices-per-process 3"
    with pytest.raises(ConfigError, match=rf"got \{{data: 6\}}, but {there}, or -1 for the rest, or {more}"):
        chosen({"data": 6}, each=1)
    with pytest.raises(ConfigError, match=there) as caught:
        chosen({"data": 3}, each=1)
    assert "JAX_NUM_CPU_DEVICES" not in str(caught.value)


def test_rows_of_a_batch() -> None:
    """pipekit:J3: a batch of 8 on two devices, four rows on each."""
    sharding = make_sharding({"data": 2})
    assert sharding is not None
    batch = SplitRows(sharding).batch({"x": np.zeros((8, 1), np.float32), "mask": np.ones(8, np.float32)})
    assert batch["x"].sharding == sharding.rows
    assert batch["x"].shape == (8, 1)
    assert [shard.data.shape for shard in batch["x"].addressable_shards] == [(4, 1), (4, 1)]
