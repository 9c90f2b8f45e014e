"""A dense model becomes a sparse one whose first outputs the formula tells."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from builders import DEEP, layout, mesh, random_batch, run_config, start

from switchjax.errors import UserError
from switchjax.interop.options import UpcycleConfig
from switchjax.interop.upcycle import upcycle
from switchjax.model import SwitchTransformer
from switchjax.nn.mlp import Mlp
from switchjax.saved_steps import named_leaves
from switchjax.state import abstract_state, model_shapes
from switchjax.weights import load_model, open_weights, write_weights

DENSE = replace(DEEP, moe_every=0)


def write_dense(directory, model):
    with jax.set_mesh(mesh("single")):
        leaves = named_leaves(start(run_config(model), layout("single")).model)
    arrays = {name: np.asarray(leaf) for name, leaf in leaves.items()}
    write_weights(directory, run_config(model), model_shapes(model), lambda n: iter([arrays[n]]))
    return directory


@pytest.fixture(scope="module", params=["relu", "geglu", "decoder_only"])
def dense(request, tmp_path_factory):
    model = DENSE
    if request.param == "geglu":
        model = replace(model, activation="geglu")
    if request.param == "decoder_only":
        model = replace(model, architecture="decoder_only")
    return write_dense(tmp_path_factory.mktemp("dense") / request.param, model)


def load(path, name="single", **changes) -> SwitchTransformer:
    """On the mesh in use."""
    weights = open_weights(path)
    config = run_config(replace(weights.config.model, **changes))
    return load_model(weights, abstract_state(config, layout(name)).model)


def logits(path, name="single", **changes):
    batch = random_batch(open_weights(path).config.model)
    with jax.set_mesh(mesh(name)):
        model = load(path, name, **changes)
        program = jax.jit(lambda model, batch: model(batch, None)[0])
        return np.asarray(program(model, layout(name).place(batch))), batch


def test_layers_are_copied(dense, tmp_path):  # case 65
    upcycle(UpcycleConfig(dense=str(dense), out=str(tmp_path / "sparse"), num_experts=4))
    before, after = open_weights(dense), open_weights(tmp_path / "sparse")
    every = 2
    routers = []
    for name in after.shapes:
        stack, _, in_period = name.partition(".periods.blocks.")
        if not in_period:
            np.testing.assert_array_equal(after.read(name), before.read(name))
            continue
        block, _, leaf = in_period.partition(".")
        of_sparse = after.read(name)
        if leaf.endswith("router_DE"):
            routers += [*of_sparse]
            continue
        of_experts = leaf.startswith("switch.experts.")
        if of_experts:
            letters = leaf.removeprefix("switch.experts.").replace("_EDF", "_DF")
            leaf = "mlp." + letters.replace("_EFD", "_FD")
        of_dense = before.read(f"{stack}.periods.blocks.0.{leaf}")[int(block) :: every]
        if of_experts:
            of_dense = np.repeat(of_dense[:, None], 4, axis=1)
        np.testing.assert_array_equal(of_sparse, of_dense, err_msg=name)
    std = np.sqrt(DENSE.init_scale / DENSE.d_model)
    assert np.std(routers) == pytest.approx(std, rel=0.15)
    assert len({router.tobytes() for router in routers}) == len(routers)


def test_with_two_choices_it_is_the_dense_model(dense, tmp_path):  # case 65
    """Gates of several choices add up to 1, and evaluation drops nothing."""
    upcycle(UpcycleConfig(dense=str(dense), out=str(tmp_path / "sparse"), num_experts=4))
    expected, batch = logits(dense)
    for name, k in (("single", 2), ("data2_expert2_model2", 3)):
        found, _ = logits(tmp_path / "sparse", name, top_k=k)
        real = batch.segment_BL > 0
        np.testing.assert_allclose(found[real], expected[real], rtol=1e-5, atol=1e-6)


def test_one_choice_is_scaled_by_its_gate(dense, tmp_path):  # case 65
    scale, E = 3.0, 4
    out = str(tmp_path / "sparse")
    upcycle(UpcycleConfig(dense=str(dense), out=out, num_experts=E, output_scale=scale))
    with jax.set_mesh(mesh("single")):
        spec = layout("single").tokens_bld
        x_BLD = jax.random.normal(jax.random.key(1), (2, 6, DENSE.d_model), out_sharding=spec)
        real_BL = x_BLD[..., 0] == x_BLD[..., 0]
        sparse, plain = load(out), load(dense)
        first = jax.tree.map(lambda w: w[0], sparse.decoder.periods.blocks[1].switch)
        y_BLD, _ = first(x_BLD, real_BL, None)
        mlp: Mlp = jax.tree.map(lambda w: w[1], plain.decoder.periods.blocks[0].mlp)
        dense_BLD = mlp(x_BLD, None)
        probs_BLE = jax.nn.softmax(x_BLD @ first.router_DE[...], axis=-1)
    expected = scale * probs_BLE.max(axis=-1, keepdims=True) * dense_BLD
    np.testing.assert_allclose(y_BLD, expected, rtol=1e-5, atol=1e-6)
    assert np.abs(probs_BLE - 1 / E).max() < 0.2  # no expert is much preferred


def test_noise_sets_experts_apart(dense, tmp_path):
    for name, seed in (("one", 0), ("again", 0), ("other", 1)):
        out = str(tmp_path / name)
        upcycle(UpcycleConfig(dense=str(dense), out=out, num_experts=4, noise=0.1, seed=seed))
    opened = {name: open_weights(tmp_path / name) for name in ("one", "again", "other")}
    for leaf in ("w_in_EDF", "w_out_EFD"):
        arrays = {n: w.read(f"decoder.periods.blocks.1.switch.experts.{leaf}") for n, w in
                  opened.items()}  # fmt: skip
        np.testing.assert_array_equal(arrays["one"], arrays["again"])
        assert not np.array_equal(arrays["one"], arrays["other"])
        of_dense = "mlp." + leaf.replace("_EDF", "_DF").replace("_EFD", "_FD")
        weight = open_weights(dense).read(f"decoder.periods.blocks.0.{of_dense}")[1::2]
        added = arrays["one"] - weight[:, None]
        assert added.std() == pytest.approx(0.1 * weight.std(), rel=0.1)
        assert len({expert.tobytes() for layer in added for expert in layer}) == 8


def test_narrow_experts_and_a_wide_router(tmp_path):
    dense = write_dense(tmp_path / "dense", replace(DENSE, param_dtype="bfloat16"))
    for name, noise in (("copies", 0.0), ("noisy", 0.1)):
        out = str(tmp_path / name)
        upcycle(UpcycleConfig(dense=str(dense), out=out, num_experts=4, noise=noise))
    block, leaf = "decoder.periods.blocks.1.switch", "experts.w_in_EDF"
    copies, noisy = (open_weights(tmp_path / name) for name in ("copies", "noisy"))
    assert copies.shapes[f"{block}.router_DE"].dtype == np.float32
    of_dense = open_weights(dense).read("decoder.periods.blocks.0.mlp.w_in_DF")[1::2, None]
    expected = np.broadcast_to(of_dense, copies.shapes[f"{block}.{leaf}"].shape)
    np.testing.assert_array_equal(copies.read(f"{block}.{leaf}"), expected, strict=True)
    added = noisy.read(f"{block}.{leaf}").astype(np.float32) - expected.astype(np.float32)
    assert added.std() == pytest.approx(0.1 * of_dense.astype(np.float32).std(), rel=0.1)


def test_mistakes(tmp_path):
    dense = write_dense(tmp_path / "dense", DENSE)
    out = str(tmp_path / "out")
    with pytest.raises(UserError, match="num_layers 4 must be a multiple of model.moe_every 3"):
        upcycle(UpcycleConfig(dense=str(dense), out=out, moe_every=3))
    upcycle(UpcycleConfig(dense=str(dense), out=out))
    with pytest.raises(UserError, match="out holds a run or weights already"):
        upcycle(UpcycleConfig(dense=str(dense), out=out))
    with pytest.raises(UserError, match=r"out has experts already \(model.moe_every 2\)"):
        upcycle(UpcycleConfig(dense=out, out=str(tmp_path / "twice")))
    with pytest.raises(UserError, match="holds no run"):
        upcycle(UpcycleConfig(dense=str(tmp_path), out=str(tmp_path / "none")))
    with pytest.raises(UserError, match="upcycle.noise must be 0 or more, got -1"):
        UpcycleConfig(dense="a", out="b", noise=-1)
    assert not (tmp_path / "twice").exists() and not (tmp_path / "none").exists()
