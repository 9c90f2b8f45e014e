"""Initial weights: the same bits on every mesh, of the promised distribution, and all different."""

import math
from dataclasses import replace
from functools import cache
from statistics import NormalDist

import jax
import numpy as np
import pytest
from small_meshes import LAYOUT, NAMES, use

from switchjax.config import ModelConfig
from switchjax.model import SwitchTransformer
from switchjax.moe.layer import SwitchLayer
from switchjax.nn.init import weight

DECODER = ModelConfig(
    architecture="decoder_only",
    vocab_size=24,
    d_model=16,
    d_ff=24,
    num_heads=8,
    d_kv=4,
    num_layers=4,
    activation="geglu",
    moe_every=1,
    num_experts=8,
)
BOTH = replace(DECODER, architecture="encoder_decoder", activation="relu", moe_every=2)


def parameters(config):
    """Of a whole model on the mesh in use, by name."""
    model = jax.jit(lambda: SwitchTransformer(jax.random.key(3), config, LAYOUT))()
    leaves = jax.tree_util.tree_flatten_with_path(jax.device_get(model))[0]
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


@cache
def reference(config):
    with use("single"):
        return parameters(config)


@pytest.mark.mesh
@pytest.mark.parametrize(
    "mesh, config",
    [(name, DECODER) for name in NAMES if name != "single"] + [("data2_expert2_model2", BOTH)],
)
def test_every_mesh_starts_with_the_same_bits(mesh, config):  # case 30
    with use(mesh):
        found = parameters(config)
    expected = reference(config)
    assert found.keys() == expected.keys()
    for name, array in found.items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


@pytest.mark.parametrize("mesh", ["single", "data2_expert2_model2"])
def test_narrow_weights_are_the_wide_ones_rounded(mesh):
    """But for the router, norms and relative positions, which stay wide."""
    with use(mesh):
        found = parameters(replace(BOTH, param_dtype="bfloat16"))
    expected = reference(BOTH)
    wide = {name for name, array in found.items() if array.dtype == np.float32}
    kinds = ("router_DE", "norm_D", "relative_UH")
    assert wide == {name for name in found if any(kind in name for kind in kinds)} < found.keys()
    for name, array in found.items():
        rounded = expected[name].astype(array.dtype)
        np.testing.assert_array_equal(array, rounded, err_msg=name, strict=True)


@pytest.mark.parametrize("config", [DECODER, BOTH])
def test_no_two_weights_are_alike(config):
    """Neither two experts nor two layers nor two matrices of a layer."""  # case 30
    starts = []
    for name, array in reference(config).items():
        if "norm" in name:
            assert (array == 1).all()
        else:
            num_stacked = ("periods" in name) + ("experts" in name)
            starts += array.reshape(math.prod(array.shape[:num_stacked]), -1)[:, :128].tolist()
    assert len(starts) > 30
    correlation = np.corrcoef(starts)  # of chance alone, 1 / sqrt(128) is a deviation
    assert np.abs(correlation - np.eye(len(starts))).max() < 6 / math.sqrt(128)


@pytest.mark.parametrize("num_experts", [2, 64])
def test_deviation_does_not_depend_on_the_number_of_experts(num_experts):  # case 30
    config = replace(DECODER, d_model=64, d_ff=128, num_experts=num_experts)
    with use("single"):
        layer = jax.jit(lambda: SwitchLayer(jax.random.key(0), config, LAYOUT))()
    for param, fan_in in (
        (layer.experts.w_in_EDF, 64),
        (layer.experts.w_gate_EDF, 64),
        (layer.experts.w_out_EFD, 128),
        (layer.router_DE, 64),
    ):
        std = np.asarray(param).std()
        sampling_error = 4 / math.sqrt(2 * param.size)
        np.testing.assert_allclose(std, math.sqrt(0.1 / fan_in), rtol=sampling_error)


def test_values_are_a_truncated_normal():
    """Cut at two deviations of the normal that was cut, and scaled up to the variance asked for."""
    with use("single"):
        values = np.asarray(
            weight(jax.random.key(1), (512, 1024), variance=0.04, held=LAYOUT.router_de)
        ).ravel()
    assert values.dtype == np.float32
    sigma = 0.2 / 0.87962566  # of the normal before the cut
    assert np.abs(values).max() <= 2 * sigma * (1 + 1e-6)
    assert np.abs(values).max() > 1.99 * sigma
    assert abs(values.mean()) < 4 * 0.2 / math.sqrt(values.size)
    np.testing.assert_allclose(values.std(), 0.2, rtol=0.004)
    # The distribution function at every tenth: Kolmogorov's distance at 1e-6 significance.
    normal = NormalDist(0, sigma)
    low, high = normal.cdf(-2 * sigma), normal.cdf(2 * sigma)
    points = np.linspace(-1.9, 1.9, 39) * sigma
    expected = [(normal.cdf(point) - low) / (high - low) for point in points]
    found = np.searchsorted(np.sort(values), points) / values.size
    assert np.abs(found - expected).max() < 2.7 / math.sqrt(values.size)
