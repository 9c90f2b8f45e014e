"""The feed-forward over rows sorted by expert equals a loop over experts, at any sizes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax import P
from small_meshes import GRADIENTS, VALUES, put, use

from switchjax.axes import EXPERT, MODEL, TOKENS
from switchjax.moe import grouped
from switchjax.moe.grouped import block_rows, grouped_ffn, padded_rows, run_starts

# One shape for most tests, since each is compiled once: sizes are data. Room for one expert with
# pieces of all kinds, and for rows between the runs.
E, D, F, BLOCK, MOST = 4, 64, 96, 8, 240
# Programs as a user's: the quick ones of `conftest` round a little more in sums this long.
AS_USERS = (
    {"xla_backend_optimization_level": 3, "xla_cpu_use_fusion_emitters": True}
    if jax.__version_info__ < (0, 11)
    else {}
)
SIZES = [[17, 0, 5, 15], [0, 0, MOST, 0], [0, 0, 0, 0], [8, 16, 24, 48], [1, 1, 1, 97]]


def loop_over_experts(x_ND, sizes_e, w_in, w_gate, w_out, keep_Nf, block):
    """Every expert on every row, of which only its own are kept. Gradients are JAX's own."""
    starts_e, row_N = run_starts(sizes_e, block), jnp.arange(len(x_ND))
    y_ND = jnp.zeros_like(x_ND)
    for expert, start in enumerate(starts_e):
        hidden = x_ND @ w_in[expert]
        if w_gate is None:
            hidden = jax.nn.relu(hidden)
        else:
            hidden *= jax.nn.gelu(x_ND @ w_gate[expert])
        if keep_Nf is not None:
            hidden *= keep_Nf
        mine_N = (row_N >= start) & (row_N < start + sizes_e[expert])
        y_ND += jnp.where(mine_N[:, None], hidden @ w_out[expert], 0)
    return y_ND


@partial(jax.custom_vjp, nondiff_argnums=(6,))
def ragged_ffn(x_ND, sizes_e, w_in, w_gate, w_out, keep_Nf, block):
    """The way of the other platforms, on this one."""
    return ragged_ffn_forward(x_ND, sizes_e, w_in, w_gate, w_out, keep_Nf, block)[0]


def ragged_ffn_forward(x_ND, sizes_e, w_in, w_gate, w_out, keep_Nf, block):
    operands = (x_ND, sizes_e, grouped.Weights(w_in, w_gate, w_out), keep_Nf)
    y_ND, saved = grouped.ragged_forward(block, *operands)
    return y_ND, (*operands, saved)


def ragged_ffn_backward(block, residuals, dy_ND):
    dx_ND, dweights = grouped.ragged_backward(block, *residuals, dy_ND)
    return dx_ND, None, *dweights, None


ragged_ffn.defvjp(ragged_ffn_forward, ragged_ffn_backward)


@partial(jax.jit, static_argnames=("ffn", "block"), compiler_options=AS_USERS)
def run(ffn, x_ND, sizes_e, w_in, w_gate, w_out, keep_Nf, dy_ND, block=BLOCK):
    """Outputs, and gradients of x and the weights."""
    y_ND, vjp = jax.vjp(
        lambda x, *w: ffn(x, sizes_e, *w, keep_Nf, block), x_ND, w_in, w_gate, w_out
    )
    return y_ND, vjp(dy_ND)


def case(sizes, num_rows, block=BLOCK, *, gated, dropout=False, width=D, hidden=F):
    """Arguments of `run`; the incoming gradient is not zero outside the runs."""
    rng, num_experts = np.random.default_rng(0), len(sizes)
    sizes_e = np.array(sizes, np.int32)
    real_N1 = in_runs(sizes_e, num_rows, block)[:, None]
    x_ND = np.where(real_N1, rng.standard_normal((num_rows, width)), 0)
    shapes = [(num_experts, width, hidden)] * 2 + [(num_experts, hidden, width)]
    w_in, w_gate, w_out = (rng.standard_normal(s) / np.sqrt(s[1]) for s in shapes)
    keep_Nf = (rng.random((num_rows, hidden)) > 0.4) / 0.6 if dropout else None
    dy_ND = rng.standard_normal((num_rows, width)) / np.sqrt(num_rows)
    arrays = (x_ND, w_in, w_gate if gated else None, w_out, keep_Nf, dy_ND)
    x_ND, *weights, keep_Nf, dy_ND = jax.tree.map(np.float32, arrays)
    return x_ND, sizes_e, *weights, keep_Nf, dy_ND


def in_runs(sizes_e, num_rows, block):
    real_N = np.zeros(num_rows, bool)
    for start, size in zip(run_starts(sizes_e, block), sizes_e, strict=True):
        real_N[start : start + size] = True
    return real_N


def check(ffn, arguments, block=BLOCK):
    found, plain = (run(f, *arguments, block=block) for f in (ffn, loop_over_experts))
    np.testing.assert_allclose(found[0], plain[0], **VALUES)
    jax.tree.map(partial(np.testing.assert_allclose, **GRADIENTS), found[1], plain[1])
    between_N = ~in_runs(arguments[1], len(arguments[0]), block)
    assert not np.asarray(found[0])[between_N].any()
    assert not np.asarray(found[1][0])[between_N].any()


@pytest.mark.parametrize("ffn", [grouped_ffn, ragged_ffn])
@pytest.mark.parametrize("gated, dropout", [(False, False), (False, True), (True, True)])
def test_equals_a_loop_over_experts(ffn, gated, dropout):
    room = padded_rows(MOST, E, BLOCK)
    for sizes in SIZES:
        check(ffn, case(sizes, room, gated=gated, dropout=dropout))


@given(st.lists(st.integers(0, MOST // E), min_size=E, max_size=E))
@example([MOST // E] * E)
@settings(deadline=None, derandomize=True, database=None, max_examples=40)
def test_any_sizes(sizes):
    check(grouped_ffn, case(sizes, padded_rows(MOST, E, BLOCK), gated=False))


@pytest.mark.parametrize("sizes, block", [([3, 0, 2], 1), ([1, 1], 16), ([0], 8)])
def test_few_rows(sizes, block):
    """Fewer than in the largest piece, and none at all."""
    room = padded_rows(sum(sizes), len(sizes), block)
    check(grouped_ffn, case(sizes, room, block, gated=True), block)


def test_a_larger_case():  # case 73
    sizes = np.random.default_rng(1).multinomial(4096, np.full(8, 1 / 8))
    block = block_rows(4096, 8)
    arguments = case(sizes, padded_rows(4096, 8, block), block, gated=False, width=512, hidden=256)
    check(grouped_ffn, arguments, block)


def test_bfloat16_sums_in_float32():
    """As close to float32, of the same inputs, as rounding each stored array allows."""
    sizes = SIZES[-1]
    arguments = case(sizes, padded_rows(MOST, E, BLOCK), gated=False)
    low = jax.tree.map(lambda a: a if a.dtype == np.int32 else a.astype(jnp.bfloat16), arguments)
    high = jax.tree.map(lambda a: a if a.dtype == np.int32 else a.astype(np.float32), low)
    found, exact = run(grouped_ffn, *low), run(loop_over_experts, *high)
    for ours, expected in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        assert ours.dtype == jnp.bfloat16
        ours, expected = np.asarray(ours, np.float32), np.asarray(expected)
        assert np.abs(ours - expected).max() < 0.01 * np.abs(expected).max()


def test_what_is_not_finite_stays_in_its_run():
    sizes = [5, 6, 0, 0]
    x_ND, sizes_e, w_in, _, w_out, _, dy_ND = case(sizes, padded_rows(MOST, E, BLOCK), gated=False)
    dy_ND[5:8] = np.nan  # between the runs
    w_out[1] = np.inf
    y_ND, (dx_ND, *_) = run(grouped_ffn, x_ND, sizes_e, w_in, None, w_out, None, dy_ND)
    assert np.isfinite(y_ND[:8]).all() and np.isfinite(dx_ND[:8]).all()
    assert not np.isfinite(y_ND[8:14]).any()
    assert not np.asarray(y_ND)[[5, 6, 7, 14, 15]].any()


@pytest.mark.parametrize("num_rows", [0, 1, 37, 4096])
@pytest.mark.parametrize("num_experts", [1, 8, 128, 2048])
def test_there_is_room_for_the_worst_spread(num_rows, num_experts):
    block = block_rows(num_rows, num_experts)
    assert block % 8 == 0 and (8 * block >= num_rows / num_experts or block == 128)
    room = padded_rows(num_rows, num_experts, block)
    assert room <= num_rows + num_experts * block
    # Most room is needed when as many experts as possible have one row beyond whole blocks.
    whole, beyond = divmod(num_rows - min(num_rows, num_experts), block)
    needed = (whole + min(num_rows, num_experts)) * block
    assert needed <= room and room - needed < block + beyond


@pytest.mark.parametrize(
    "platform, loops, ragged", [("cpu", True, False), ("cuda", False, True), ("tpu", False, True)]
)
def test_each_platform_compiles_its_own_way_alone(platform, loops, ragged):
    arguments = case([3, 0, 2], padded_rows(5, 3, BLOCK), gated=False)
    text = run.trace(grouped_ffn, *arguments).lower(lowering_platforms=(platform,)).as_text()
    assert ("stablehlo.while" in text) == loops
    assert ("ragged_dot" in text) == ragged


# --- Inside other transformations ---------------------------------------------------------------


def test_inside_scan_checkpoint_and_cond():
    sizes, num_layers = [9, 0, 4], 3
    x_ND, sizes_e, *weights, _, dy_ND = case(sizes, padded_rows(13, 3, BLOCK), gated=True)
    stacked = jax.tree.map(lambda w: np.stack([w, 0.9 * w, 0.8 * w]), weights)

    def layer(ffn, x_ND, weights):
        def add_ffn(x_ND):
            return x_ND + ffn(x_ND, sizes_e, *weights, None, BLOCK)

        return jax.lax.cond(x_ND[0, 0] > -1e9, add_ffn, jnp.zeros_like, x_ND), None

    def scanned(x_ND, stacked):
        return jax.lax.scan(jax.checkpoint(partial(layer, grouped_ffn)), x_ND, stacked)[0]

    def unrolled(x_ND, stacked):
        for number in range(num_layers):
            of_layer = jax.tree.map(lambda w, number=number: w[number], stacked)
            x_ND, _ = layer(loop_over_experts, x_ND, of_layer)
        return x_ND

    def both_ways(f):
        program = jax.jit(
            lambda dy, *args: (f(*args), jax.vjp(f, *args)[1](dy)), compiler_options=AS_USERS
        )
        return program(dy_ND, x_ND, stacked)

    found, plain = map(both_ways, (scanned, unrolled))
    np.testing.assert_allclose(found[0], plain[0], **VALUES)
    jax.tree.map(partial(np.testing.assert_allclose, **GRADIENTS), found[1], plain[1])


@pytest.mark.mesh
@pytest.mark.parametrize(
    "mesh, dropout",
    [("data=2,expert=2,model=2", True), ("expert=8", False), ("data=4,model=2", False)],
)
def test_inside_shard_map(mesh, dropout):
    """Each device has rows of its own for its experts, and a slice of their hidden dim."""
    experts, most = 8, 8
    rng = np.random.default_rng(0)
    with use(mesh):
        axes = jax.sharding.get_mesh().shape
        devices, here = axes["data"] * axes["expert"], experts // axes["expert"]
        sizes_Xe = rng.integers(0, most + 1, (devices, here)).astype(np.int32)
        room = padded_rows(most * here, here, BLOCK)
        x_XND, dy_XND, keep_XNF = (
            np.zeros((devices, room, width), np.float32) for width in (D, D, F)
        )
        w_in, w_gate, w_out = case(sizes_Xe[0].repeat(experts // here), 1, 8, gated=True)[2:5]
        expected = np.zeros_like(x_XND), tuple(map(np.zeros_like, (x_XND, w_in, w_gate, w_out)))
        for device, sizes_e in enumerate(sizes_Xe):
            first = device % axes["expert"] * here
            mine = slice(first, first + here)
            x_ND, _, _, _, _, keep_NF, dy_ND = case(sizes_e, room, gated=True, dropout=True)
            x_XND[device], dy_XND[device], keep_XNF[device] = x_ND / (4 + device), dy_ND, keep_NF
            y_ND, (dx_ND, *dweights) = run(
                loop_over_experts, x_XND[device], sizes_e, w_in[mine], w_gate[mine], w_out[mine],
                keep_NF if dropout else None, dy_ND,
            )  # fmt: skip
            expected[0][device], expected[1][0][device] = y_ND, dx_ND
            for total, part in zip(expected[1][1:], dweights, strict=True):
                total[mine] += part

        rows, in_spec, out_spec = P(TOKENS, None, None), P(EXPERT, None, MODEL), P(EXPERT, MODEL)
        keep_spec = P(TOKENS, None, MODEL) if dropout else None

        @partial(
            jax.shard_map,
            in_specs=(rows, P(TOKENS, None), in_spec, in_spec, out_spec, keep_spec),
            out_specs=rows,
        )
        def mapped(x_xND, sizes_xe, w_in, w_gate, w_out, keep_xNf):
            x_ND = jax.lax.pcast(x_xND[0], MODEL, to="varying")
            keep_Nf = None if keep_xNf is None else keep_xNf[0]
            y_ND = grouped_ffn(x_ND, sizes_xe[0], w_in, w_gate, w_out, keep_Nf, BLOCK)
            return jax.lax.psum(y_ND, MODEL)[None]

        found = jax.device_get(
            run(
                lambda *arguments: mapped(*arguments[:-1]),
                put(x_XND, rows),
                put(sizes_Xe, P(TOKENS, None)),
                put(w_in, in_spec),
                put(w_gate, in_spec),
                put(w_out, out_spec),
                put(keep_XNF, keep_spec) if dropout else None,
                put(dy_XND, rows),
            )
        )
    np.testing.assert_allclose(found[0], expected[0], **VALUES)
    jax.tree.map(partial(np.testing.assert_allclose, **GRADIENTS), found[1], expected[1])
