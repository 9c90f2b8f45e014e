"""What the backward pass keeps from the forward pass, and what it computes again.

`none` keeps all that is not made again at once from what is kept (norms, gates: `recomputed`).
`moe` keeps all but the hidden activations of experts. `dots` keeps, of each period, the results of
products with weights and what other devices sent. `full` keeps what each period receives.
Whatever is computed again, two things are not: who goes where, since a choice between two equal
experts might fall otherwise, and with `moe` and `dots` what tokens' exchanges brought. Weights that
are gathered for use (`zero` 3) are never kept, and gathered again. With
`offload = optimizer+activations` in the mesh file, what a period receives is kept on the host.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from switchjax.config import Remat

Tree = TypeVar("Tree")

ROUTING = "routing"
"""Choices of experts, places in queues, sums over all devices."""
ARRIVED = "arrived"
"""Tokens at their experts."""
PRODUCT = "product"
"""Of arrived tokens with weights."""
RETURNED = "returned"
"""Outputs of experts at their tokens."""
_RECEIVED = "received"  # by a period

HOST_MEMORY = "pinned_host"
"""The kind of memory of the host that devices copy from and to."""

_GATHER = "all_gather_reduced"  # of weights alone: see `zero.in_use`
# Nothing is computed here: copies of a gathered weight, and others that are as cheap to make again.
_COPIES = {
    "convert_element_type",
    "pvary",
    "reduced_vary_cast",
    "reduced_vary_cast_p",  # the same, on jax 0.10
    "reshape",
    "reshard",
    "transpose",
}


def named(name: str, tree: Tree) -> Tree:
    """The same, for policies to know."""
    return jax.tree.map(lambda x: checkpoint_name(x, name), tree)


def with_policy(
    body: Callable[..., Any],
    remat: Remat,
    *,
    gathers_weights: bool,
    is_looped: bool,
    offloads: bool = False,
) -> Callable[..., Any]:
    """A period that keeps what the policy says.

    Args:
        body: takes the tokens that the period receives first.
        offloads: keeps them in memory of the host; with `full` alone.
        is_looped: the body of a loop, of which XLA cannot join the two passes.
    """
    names = jax.checkpoint_policies.save_only_these_names
    if offloads:
        assert remat == "full", remat
        return jax.checkpoint(
            lambda x, *rest: body(named(_RECEIVED, x), *rest),
            policy=jax.checkpoint_policies.save_and_offload_only_these_names(
                names_which_can_be_saved=[ROUTING],
                names_which_can_be_offloaded=[_RECEIVED],
                offload_src="device",
                offload_dst=HOST_MEMORY,
            ),
            prevent_cse=not is_looped,
        )
    match remat:
        case "full":
            policy = names(ROUTING)
        case "dots":
            policy = jax.checkpoint_policies.save_from_both_policies(
                jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
                names(ROUTING, ARRIVED, PRODUCT, RETURNED),
            )
        case _:  # experts see to `moe` themselves
            if not gathers_weights:
                return body
            policy = _all_but_weights
    return jax.checkpoint(body, policy=policy, prevent_cse=not is_looped)


def _all_but_weights(primitive: Any, *_: Any, **params: Any) -> bool:
    if primitive.name == "custom_vjp_call":
        return not _gathers(params["call_jaxpr"].jaxpr)
    return primitive.name not in {_GATHER, *_COPIES}


def _gathers(jaxpr: Any) -> bool:
    """Whether weights are gathered at once, in a `shard_map` or in a branch; not further in."""
    inner = []
    for eqn in jaxpr.eqns:
        match eqn.primitive.name:
            case "shard_map":
                inner.append(eqn.params["jaxpr"])
            case "cond":
                inner += [branch.jaxpr for branch in eqn.params["branches"]]
    names = {eqn.primitive.name for part in (jaxpr, *inner) for eqn in part.eqns}
    return _GATHER in names


def recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, keeping nothing but its arguments.

    As `jax.checkpoint` without a policy; but a policy around that one would reach into it.
    """

    @jax.custom_vjp
    def call(*arguments: Any) -> Any:
        return function(*arguments)

    def backward(arguments: Any, gradient: Any) -> Any:
        # Or XLA finds the forward pass's results to be the same, and keeps them. One by one, since
        # what leaves a barrier together varies over the same mesh axes.
        arguments = jax.tree.map(lax.optimization_barrier, arguments)
        return jax.vjp(function, *arguments)[1](gradient)

    call.defvjp(lambda *arguments: (function(*arguments), arguments), backward)
    return call
