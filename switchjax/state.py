"""All that a step changes, how it starts, and where each part of it lives."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import NamedSharding

from switchjax import offload, optim, zero
from switchjax.config import ModelConfig, RunConfig
from switchjax.layout import Layout
from switchjax.mesh import MeshShape, use_abstract_mesh
from switchjax.model import SwitchTransformer, switch_layer_names
from switchjax.saved_steps import named_leaves
from switchjax.scaling import LossScale, first_scale


class TrainState(NamedTuple):
    """What a step hands to the next one; all of it is in a checkpoint."""

    step: Array  # finished steps, each with a batch of its own
    model: SwitchTransformer
    opt_state: optax.OptState
    router_bias_XE: Array | None  # on the choice of experts, float32; None without a bias rate
    # Choices of each expert in all steps, the later ones counting more, float32; None without any.
    load_XE: Array | None = None
    loss_scale: LossScale | None = None  # None where the loss is not scaled

    @property
    def updates(self) -> Array:
        """Finished steps that were not skipped: those that the learning rate goes by."""
        return self.step if self.loss_scale is None else self.step - self.loss_scale.skipped


def keys(config: RunConfig) -> tuple[Array, Array]:
    """The run's key for parameters and its key for noise."""
    init_key, noise_key = jax.random.split(jax.random.key(config.seed))
    return init_key, noise_key


def init_state(config: RunConfig, layout: Layout) -> TrainState:
    """The state before the first step, on the mesh in use; bitwise the same on any mesh."""
    model = SwitchTransformer(keys(config)[0], config.model, layout)
    return first_state(config, layout, model)


def first_state(config: RunConfig, layout: Layout, model: SwitchTransformer) -> TrainState:
    """The state before the first step of a run that starts from this model."""
    opt_state = optim.init(config.optim, zero.split(model, layout))
    if layout.storage.offload != "none":
        opt_state = offload.to_host(opt_state)
    bias_XE, load_XE = init_router_bias(config), init_load(config.model)
    loss_scale = first_scale(config.optim)
    return TrainState(jnp.int32(0), model, opt_state, bias_XE, load_XE, loss_scale)


def init_router_bias(config: RunConfig) -> Array | None:
    """No preference [Switch layers, experts]; None where nothing would ever move it."""
    num_layers = len(switch_layer_names(config.model))
    if not config.optim.bias_rate or not num_layers:
        return None
    return jnp.zeros((num_layers, config.model.num_experts), jnp.float32)


def init_load(config: ModelConfig) -> Array | None:
    """No choices yet [Switch layers, experts]."""
    num_layers = len(switch_layer_names(config))
    return jnp.zeros((num_layers, config.num_experts), jnp.float32) if num_layers else None


def abstract_state(config: RunConfig, layout: Layout) -> TrainState:
    """Shapes, dtypes and shardings, which say whose memory, of the state; on the mesh in use."""
    mesh = jax.sharding.get_mesh()

    def on_mesh(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = x.sharding.spec if x.sharding is not None else layout.whole
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    state = jax.tree.map(on_mesh, jax.eval_shape(lambda: init_state(config, layout)))
    if layout.storage.offload != "none":
        state = state._replace(opt_state=offload.promised(state.opt_state))
    return state


def model_shapes(config: ModelConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Of a model's arrays, by the names that they are stored under; on no device."""
    with use_abstract_mesh(MeshShape(name="single", data=1, expert=1, model=1)):
        model = jax.eval_shape(lambda: SwitchTransformer(jax.random.key(0), config, Layout()))
    leaves = named_leaves(model).items()
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in leaves}


def count_parameters(model: SwitchTransformer) -> int:
    """Parameters of a model or of its shapes."""
    return sum(x.size for x in jax.tree.leaves(model))
