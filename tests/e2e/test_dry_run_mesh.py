"""A dry run on a mesh: what lies where, what devices exchange, what is too large; also for devices not there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_jax.spmd import report
from nnx_jax.spmd.mesh import make_sharding
from tests.e2e.command import Here, environment, write_case

SPLIT = ["--set", "mesh={data: 2, fsdp: 2}", "--set", "model.net={kind: feed_forward, hidden_dims: [8]}"]


@pytest.fixture
def here(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Here:
    return Here(write_case(tmp_path), capsys, monkeypatch)


def test_the_table_of_a_mesh(here: Here) -> None:
    """By hand: 4 x 8 and 8 x 3 weights over two devices, a bias of 3 on each; state, exchanges and peak; no run."""
    done = here("--dry-run", "--json", *SPLIT)
    assert done.code == 0, done.err
    found = done.result["mesh"]
    assert (found["axes"], found["devices"]) == ({"data": 2, "fsdp": 2}, 4)
    table = {row["path"]: (row["shape"], row["spec"], row["bytes_per_device"]) for row in found["parameters"]}
    assert table == {
        "layers.0.kernel": ([4, 8], "[null, fsdp]", 64),
        "head.kernel": ([8, 3], "[fsdp, null]", 48),
        "layers.0.bias": ([8], "[fsdp]", 16),
        "head.bias": ([3], "whole", 12),
    }
    assert found["state_bytes"]["params"] == 64 + 48 + 16 + 12
    assert found["state_bytes"]["opt_state"] >= 2 * found["state_bytes"]["params"]
    assert found["peak_bytes"] >= sum(found["state_bytes"].values())
    assert found["collectives"]["all-gather"]["bytes"] >= 4 * (32 + 24 + 8)
    assert found["collectives"]["all-reduce"]["count"] >= 1
    assert found["warnings"] == []
    assert not (here.folder / "runs").exists()


def test_the_table_for_a_person(here: Here) -> None:
    done = here("--dry-run", *SPLIT)
    lines = [" ".join(line.split()) for line in done.out.splitlines()]
    assert "mesh {data: 2, fsdp: 2}: 4 devices" in lines
    assert "layers.0.kernel [4, 8] [null, fsdp] 64 B" in lines
    assert any(line.startswith("peak memory of each device: ") for line in lines)
    assert any(line.startswith("all-gather ") for line in lines)


MEASURED = """
import resource, sys
from nnx_jax.train import main
code = main(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, file=sys.stderr)
sys.exit(code)
"""


def test_a_mesh_and_a_model_that_are_not_there(tmp_path: Path) -> None:
    """In a process of its own, 64 devices and a matrix of 1 GiB, which is never made: nor written, nor trained."""
    folder = write_case(tmp_path)
    command = [sys.executable, "-c", MEASURED, "--config", "cfg.yaml", "--dry-run", "--devices", "64", "--json"]
    given = ["--set", "mesh={data: -1, tensor: 2}", "--set", "data.batch_size=32"]
    given += ["--set", "model.net={kind: feed_forward, hidden_dims: [16384, 16384]}"]
    done = subprocess.run(
        [*command, *given], cwd=folder, env=environment(), capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])["mesh"]
    assert (found["axes"], found["devices"]) == ({"data": 32, "tensor": 2}, 64)
    assert {row["path"]: row["spec"] for row in found["parameters"]} == {
        "layers.0.kernel": "[null, tensor]", "layers.0.bias": "[tensor]", "layers.1.kernel": "[tensor, null]",
        "layers.1.bias": "whole", "head.kernel": "whole", "head.bias": "whole",
    }  # fmt: skip
    assert found["state_bytes"]["params"] > 2**29
    assert found["warnings"] == []
    assert int(done.stderr.splitlines()[-1]) < 1.4 * 2**30
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--dry-run", "--devices", "4"], "needs a mesh; add --set mesh={data: -1}"),
        (["--devices", "4"], "add --dry-run"),
        (["--dry-run", "--devices", "0", *SPLIT], "from 1 to 4096"),
        (["--dry-run", "--devices", "64", *SPLIT], "JAX has started with 4 in this process"),
        (["--dry-run", "--set", "mesh={tensor: 4}", *SPLIT[2:3], "model.net.hidden_dims=[6]"], "6 = 4 x 1 + 2"),
    ],
)
def test_what_is_refused(here: Here, options: list[str], told: str) -> None:
    """Code 2, before anything is compiled."""
    done = here(*options)
    assert done.code == 2
    assert told in done.err


# The text of compiled programs ----------------------------------------------------------------------------------------

TEXT = """\
HloModule jit_f, entry_computation_layout={(f32[4]{0})->f32[16]{0}}

%add.1 (x: f32[], y: f32[]) -> f32[] {
  ROOT %s = f32[] add(%x, %y)
}

%body.1 (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %g = bf16[8,4]{1,0} all-gather(%a), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}
  %r = (f32[], f32[6]{0}) all-reduce(%b, %c), replica_groups={{0,1},{2,3}}, to_apply=%add.1
}

%condition.1 (p: (s32[], f32[8,4])) -> pred[] {
  ROOT %c = pred[] compare(%i, %n), direction=LT
}

%few (p: f32[4]) -> f32[4] {
  ROOT %p1 = f32[4]{0} collective-permute(%p), source_target_pairs={{0,1},{1,0}}
}

%many (p: f32[4]) -> f32[4] {
  ROOT %p2 = f32[4]{0} reduce-scatter(%p), replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, dimensions={0}
}

ENTRY %main.1 (p: f32[4]) -> f32[16] {
  %w = (s32[], f32[8,4]) while(%t), condition=%condition.1, body=%body.1, backend_config={"known_trip_count":{"n":"5"}}
  %v = (s32[], f32[8,4]) while(%t), condition=%condition.1, body=%body.1
  %k = f32[4]{0} conditional(%i, %p, %p), branch_computations={%few, %many}
  %h = (f32[4]{0}, f32[16]{0}) all-gather-start(%p), replica_groups={{0,1,2,3}}, dimensions={0}
  ROOT %d = f32[16]{0} all-gather-done(%h)
}
"""


def test_what_a_program_exchanges() -> None:
    """By hand: a loop of five rounds and one of unknown length, the larger branch, a gather that is started early.

    Of a ring of n each device sends (n - 1) / n of a gathered result, twice that of a sum, n - 1 parts of a scattered.
    """
    found = report.exchanges(TEXT)
    gathered, summed, scattered = found["all-gather"], found["all-reduce"], found["reduce-scatter"]
    assert (gathered.count, gathered.bytes, gathered.moved) == (6 + 1, 6 * 64 + 64, 6 * 48 + 48)
    assert (summed.count, summed.bytes, summed.moved) == (6, 6 * 28, 6 * 28)
    assert (scattered.count, scattered.bytes, scattered.moved) == (1, 16, 3 * 16)
    assert "collective-permute" not in found


def test_exchanges_of_a_program_of_jax() -> None:
    """A sum over four devices in a loop of three rounds, as XLA writes it today."""
    spec = make_sharding({"data": 4})
    assert spec is not None

    def rounds(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 3, lambda _, y: y + jax.lax.with_sharding_constraint(y.sum(0), spec.whole), x)

    x = jax.ShapeDtypeStruct((8, 16), np.float32, sharding=spec.rows)
    text = jax.jit(rounds, out_shardings=spec.rows).lower(x).compile().as_text()
    assert text is not None
    found = report.exchanges(text)
    assert (found["all-reduce"].count, found["all-reduce"].bytes) == (3, 3 * 64)
    assert found["all-reduce"].moved == 3 * 96


def test_large_arrays_that_are_whole() -> None:
    """From 64 MiB on, the largest first, five of them; one that is split is not told of."""
    spec = make_sharding({"fsdp": 4})
    assert spec is not None

    def leaf(shape: tuple[int, ...], *axes: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(spec.mesh, P(*axes)))

    most = report.LARGE_BYTES // 4
    small, large, cut = leaf((most - 1,)), leaf((most,)), leaf((4 * most,), "fsdp")
    assert report.whole_warnings({"a": small, "cut": cut}) == []
    (line,) = report.whole_warnings({"a": small, "params/w": large})
    assert line.startswith(f"params/w [{most}] is whole on every device, 64.0 MiB on each; split it by an axis fsdp")
    lines = report.whole_warnings({f"w{number}": leaf((most + number,)) for number in range(7)})
    assert [line.partition(" ")[0] for line in lines] == ["w6", "w5", "w4", "w3", "w2", "2"]
