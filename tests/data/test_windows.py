"""Windows over arrays: what they hold, and that none of them crosses from one split into another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnx_jax.core.errors import DataError
from nnx_jax.data import Feed, TrainingDataset, WindowDataset

SERIES = np.arange(100.0)[:, None] * np.array([1.0, -1.0])


def windows(**fields: Any) -> WindowDataset:
    return WindowDataset(**({"data": SERIES, "input_steps": 3} | fields))


def steps(data: WindowDataset) -> set[int]:
    """Every step that a window of this split holds."""
    found = data.take(np.arange(len(data)))
    return {int(step) for name in ("x", "y") for step in found[name][..., 0].reshape(-1)}


def test_what_a_window_holds() -> None:
    data = windows(target_steps=2, lead=4)
    assert data.reach == 8
    x, y = data[5]
    np.testing.assert_array_equal(x, SERIES[5:8])
    np.testing.assert_array_equal(y, SERIES[12:14])
    assert data.columns["x"].shape == (3, 2)
    assert data.info == {"input_shape": (3, 2), "input_dim": 6, "target_shape": (2, 2), "output_dim": 4}
    other = windows(target=np.arange(100), stride=7)
    assert [int(y[0]) for _, y in other] == [3, 10, 17, 24, 31, 38, 45, 52, 59, 66, 73]
    assert len(next(Feed(data, batch_size=4).batches())["x"]) == 4


def test_origins_and_sizes_by_hand() -> None:
    """100 steps, windows of 4: 97 origins, of which 77, 10 and 10; the last 3 of the first two parts are the guard."""
    parts = [windows(split=split) for split in ("train", "val", "test")]
    assert [(len(part), int(part.origins[0]), int(part.origins[-1])) for part in parts] == [
        (74, 0, 73),
        (7, 77, 83),
        (10, 87, 96),
    ]


@pytest.mark.parametrize("length", [4, 5, 9, 10, 23, 40, 100])
@pytest.mark.parametrize("stride", [1, 2, 5])
@pytest.mark.parametrize("lead", [0, 3])
@pytest.mark.parametrize("guard", [None, 8, 60])
def test_no_window_crosses_into_another_split(length: int, stride: int, lead: int, guard: int | None) -> None:
    """The splits share no step, and the guard keeps them apart; none of them is ever a crash (pipekit:B27)."""
    parts = [
        windows(data=SERIES[:length], stride=stride, lead=lead, target_steps=2, split_guard=guard, split=split)
        for split in ("train", "val", "test")
    ]
    held = [steps(part) for part in parts]
    for earlier, later in ((0, 1), (0, 2), (1, 2)):
        assert not held[earlier] & held[later]
        if len(parts[earlier]) and len(parts[later]):
            apart = parts[later].origins[0] - parts[earlier].origins[-1]
            assert apart > (parts[0].reach if guard is None else guard)
    assert all(max(found, default=0) < length for found in held)
    kept = sum(map(len, parts))
    everything = len(range(0, length - parts[0].reach, stride))
    assert kept <= everything
    assert not len(parts[2]) or parts[2].origins[-1] == (everything - 1) * stride


def test_a_guard_wider_than_the_split() -> None:
    """No rows, and still a dataset (pipekit:B27)."""
    val = windows(split="val", split_guard=30)
    assert len(val) == 0
    assert list(val) == []
    assert val.take(np.arange(0))["x"].shape == (0, 3, 2)
    assert val.info["input_shape"] == (3, 2)
    with pytest.raises(DataError, match=r"WindowDataset is empty \(0 rows\)"):
        Feed(val, batch_size=2)
    assert len(windows(data=SERIES[:2])) == 0
    with pytest.raises(ValueError, match="2 steps are fewer than a window reaches, 3, so windows would cross"):
        windows(split_guard=2)


class OnDisk:
    """An array that only gives slices of steps, as zarr does."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.shape, self.dtype = array, array.shape, array.dtype
        self.longest = 0

    def __getitem__(self, place: slice) -> np.ndarray:
        assert isinstance(place, slice)
        self.longest = max(self.longest, place.stop - place.start)
        return self.array[place]


def test_arrays_that_stay_where_they_are(tmp_path: Path) -> None:
    np.save(tmp_path / "series.npy", SERIES)
    disk = OnDisk(SERIES)
    lazy, mapped, plain = windows(data=disk), windows(data=str(tmp_path / "series.npy")), windows()
    for data in (lazy, mapped):
        for name, column in plain.take(np.array([4, 70, 4])).items():
            np.testing.assert_array_equal(data.take(np.array([4, 70, 4]))[name], column)
        assert data.take(np.arange(0))["y"].shape == (0, 1, 2)
    assert disk.longest == 3  # a window's steps, and no more
    assert len({data.content_hash() for data in (lazy, mapped, plain)}) == 1  # the rows are the same
    back: Any = TrainingDataset.from_yaml(mapped.to_yaml())
    assert back == mapped
    assert isinstance(back._arrays()[0], np.memmap)
    with pytest.raises(ValueError, match="ndarray was given in Python and is not stored"):
        TrainingDataset.from_state(plain.state())


def test_identity() -> None:
    base = windows()
    changed = SERIES.copy()
    changed[50, 0] += 1
    others = [
        windows(data=changed), windows(target=changed), windows(input_steps=4), windows(target_steps=2),
        windows(lead=1), windows(stride=2), windows(split="val"), windows(split_guard=9), windows(data_id="series"),
        base.widened(),
    ]  # fmt: skip
    assert len({data.content_hash() for data in (base, *others)}) == 11
    assert base == windows()
    assert base.with_split("val").content_hash() == windows(split="val").content_hash()
    assert windows(data_id="series", data=changed).content_hash() == windows(data_id="series").content_hash()


def test_a_later_change_in_place_cannot_make_the_hash_lie() -> None:
    mine = SERIES.copy()
    data = windows(data=mine)
    mine[:] = 0
    np.testing.assert_array_equal(data[5][0], SERIES[5:8])


def test_what_is_refused(tmp_path: Path) -> None:
    for given in ([1, 2, 3], 5, np.float32(3)):
        with pytest.raises(TypeError, match=r"expected an array \[T, ...\] or the path of an .npy"):
            windows(data=given)
    with pytest.raises(DataError, match="data has 100 steps, target has 99"):
        len(windows(target=np.zeros(99)))
    with pytest.raises(DataError, match="cannot be mapped|not an .npy"):
        len(windows(data=str(tmp_path / "missing.npy")))
    (tmp_path / "text.npy").write_text("no")
    with pytest.raises(DataError, match="not an .npy of numbers"):
        len(windows(data=str(tmp_path / "text.npy")))
    np.save(tmp_path / "one.npy", np.float32(1))
    with pytest.raises(DataError, match=r"holds no array"):
        len(windows(data=str(tmp_path / "one.npy")))
