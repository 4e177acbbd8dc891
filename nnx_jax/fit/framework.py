"""Framework: what the faces ask of the library a network is written in; here of Flax NNX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from nnx_jax.core.errors import ConfigError, ModelError, ResumePointError
from nnx_jax.engines.compile_cache import enable_compile_cache
from nnx_jax.engines.flax import FlaxEngine
from nnx_jax.engines.inference import Inference, weights_of
from nnx_jax.engines.nnx_forward import PureModule
from nnx_jax.engines.scoring import ModelScorer
from nnx_jax.engines.transforms import apply_transforms, frozen_by
from nnx_jax.fit.call import TrainCall
from nnx_jax.fit.group import open_world
from nnx_jax.fit.identity import describe_module
from nnx_jax.fit.job import Job, prepare
from nnx_jax.loop.hook_events import HookEvents
from nnx_jax.nets import build_net
from nnx_jax.nets.opened import ENGINES, is_built_in, open_arrays
from nnx_jax.objectives.losses import Loss, build_loss
from nnx_jax.params.model import NNModelParams
from nnx_jax.params.net import NNParams
from nnx_jax.params.run import RunSpec
from nnx_jax.runs.arrays import ArrayWriter
from nnx_jax.runs.commit import MakeWriter
from nnx_jax.runs.transforms import NNCheckpointTransform
from nnx_jax.spmd.world import World


class Framework:
    """Flax NNX; another library's is a subclass with every method of its own.

    Attributes:
        backend: `backend` of a configuration.
        kind: of network, for messages.
        make_writer: how the arrays of a run are stored.
        has_mesh: several processes are one mesh of devices.
        engine_class: what trains the network, a FlaxEngine, see `fit.job.prepare`.
    """

    backend: str = "flax"
    kind: str = "flax.nnx.Module"
    make_writer: MakeWriter = ArrayWriter
    has_mesh: bool = True
    engine_class: Any = FlaxEngine

    # -- the network -------------------------------------------------------------------------------------------

    def is_module(self, value: Any) -> bool:
        """Whether a value is a network of this library."""
        return isinstance(value, nnx.Module)

    def build(self, net: NNParams, seed: int, info: Mapping[str, Any]) -> Any:
        """Return a built-in network with fresh weights.

        Args:
            net: with every size filled in.
            info: what the data says of sizes.
        """
        return build_net(net, rngs=nnx.Rngs(seed), info=info)

    def describe(self, module: Any) -> str:
        """Name and digest of a network of the user's own."""
        return describe_module(module)

    def parameters(self, module: Any) -> Mapping[str, Any]:
        """Every parameter by name."""
        return PureModule(module).params

    def weights(self, module: Any) -> Mapping[str, np.ndarray]:
        """Every parameter and statistic by name, as numpy arrays."""
        return weights_of(module)

    def load(self, module: Any, arrays: Mapping[str, Any], net: NNParams | None, written_by: str, source: str) -> None:
        """Write the arrays of a generation, "params/..." and the like, into a network.

        Args:
            net: of a built-in network; None for one of the user's own.
            written_by: the engine that wrote them.
            source: where they are from, for messages.

        Raises:
            ResumePointError: (a ValueError) they are not those of this network, or another engine wrote those of a
                network of the user's own; the network is as it was.
        """
        arrays = self.own_arrays(arrays, net, written_by, source)
        pure, weights = PureModule(module), of_model(arrays)
        state = {name.removeprefix("model_state/"): arrays[name] for name in arrays if name.startswith("model_state/")}
        check_leaves(weights | state, pure.params | pure.model_state, source, type(module).__name__)
        pure.write(module, weights, state)

    def own_arrays(
        self, arrays: Mapping[str, Any], net: NNParams | None, written_by: str, source: str
    ) -> Mapping[str, Any]:
        """The weights of a generation under this library's names and in its layouts; see `load`."""
        if written_by == self.backend:
            return arrays
        known = self.check_opens(net, written_by, source)
        try:
            return open_arrays(arrays, known, written_by, self.backend)
        except ModelError as error:
            raise ResumePointError(f"{source} was written by the engine '{written_by}': {error}") from error

    def check_opens(self, net: NNParams | None, written_by: str, source: str) -> NNParams:
        """Return the network whose weights another engine wrote, where they can be opened here; see `load`."""
        if net is not None and written_by in ENGINES and is_built_in(net):
            return net
        raise ResumePointError(
            f"{source} was written by the engine '{written_by}'; this model's is '{self.backend}'. Only the layers of "
            "a built-in network are known in both; weights of your own are turned with nnx_jax.torch.convert"
        )

    def transform(self, module: Any, transforms: Sequence[NNCheckpointTransform]) -> Any:
        """Return the network after changes of its topology, see `register_transform`."""
        return apply_transforms(module, transforms)

    def frozen_by(self, module: Any, transforms: Sequence[NNCheckpointTransform]) -> tuple[str, ...]:
        """Names of the parameters that these changes leave out of training."""
        return frozen_by(module, transforms)

    # -- asking ------------------------------------------------------------------------------------------------

    def build_loss(self, loss: Any) -> Loss:
        """The loss that a configuration or a function describes."""
        return build_loss(loss)

    def inference(self, module: Any, precision: str) -> Any:
        """What computes a network's outputs: has `module` and `outputs(x, batch_size)`."""
        return Inference(module, precision)

    def scorer(self, module: Any, loss: Any, params: NNModelParams) -> Any:
        """What scores a network: has `module`, `params` and `score(feed)`."""
        return ModelScorer(module, loss, params)

    # -- training ----------------------------------------------------------------------------------------------

    def check(self, spec: RunSpec) -> None:
        """Check that a specification asks for this library.

        Raises:
            ConfigError: it names another one.
        """
        if spec.backend != self.backend:
            raise ConfigError(f"got '{spec.backend}'; this engine is '{self.backend}'", path="backend")

    def open_world(self, distributed: Any, what: str) -> World:
        """The processes that train together, see `fit.group.open_world`."""
        return open_world(distributed, what)

    def around(self) -> dict[str, Any]:
        """What has to be the same in every process of a group besides the run: version and devices."""
        return {"jax": jax.__version__, "devices of a process": jax.local_device_count()}

    def prepare(self, model: Any, spec: RunSpec, events: HookEvents | None, call: TrainCall, world: World) -> Job:
        """Check and build everything that needs no run directory, see `fit.job.prepare`."""
        self.check(spec)
        enable_compile_cache()
        return prepare(model, spec, events, call, world)


def check_leaves(stored: Mapping[str, Any], held: Mapping[str, Any], source: str, called: str) -> None:
    """Check that stored leaves are those of a network, in name and shape.

    Raises:
        ResumePointError: (a ValueError) naming the first leaf that differs, and both shapes.
    """
    for name in sorted({*held, *stored}):
        then, now = (str(list(np.shape(each[name]))) if name in each else "not there" for each in (stored, held))
        if then != now:
            told = f"{name} is {then} in the checkpoint, {now} in the network"
            raise ResumePointError(f"the weights of {source} do not fit {called}: {told}")


def of_model(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Every parameter among the arrays of a generation, trained or not, by its own name."""
    return {name.split("/", 1)[1]: array for name, array in arrays.items() if name.startswith(("params/", "frozen/"))}


FLAX = Framework()
