"""The paper's models: sizes, dense twins, and the meshes that they fit."""

from dataclasses import replace
from functools import cache

import jax
import pytest

from switchjax.config import RunConfig
from switchjax.errors import UserError
from switchjax.layout import Layout
from switchjax.mesh import mesh_names, read_mesh, use_abstract_mesh
from switchjax.presets import PRESETS
from switchjax.setup import check_sizes
from switchjax.state import count_parameters, init_state


@cache
def num_parameters(preset: str) -> int:
    """From shapes alone: no array is made."""
    with use_abstract_mesh(read_mesh("single")):
        run = replace(PRESETS[preset], optim=replace(PRESETS[preset].optim, optimizer="sgd"))
        return count_parameters(jax.eval_shape(lambda: init_state(run, Layout()).model))


@pytest.mark.parametrize(
    ("preset", "billions"),
    [
        ("switch-large", 26),
        ("switch-xxl", 395),
        ("switch-c", 1571),
        ("t5-base", 0.22),  # T5, arXiv:1910.10683, section 3.1.1
    ],
)
def test_parameter_counts_of_the_papers(preset, billions):
    """Switch Transformer, table 9, and T5, within 5 %."""
    assert num_parameters(preset) == pytest.approx(billions * 1e9, rel=0.05)


def test_switch_base_has_seven_billion_with_the_last_digit_cut():
    """presets.py says why the table's 7 B stand for 7.4 B."""
    assert num_parameters("switch-base") // 10**9 == 7
    assert num_parameters("switch-base") == pytest.approx(7.4e9, rel=0.01)


def test_parameters_of_a_released_model_by_hand():
    """switch-base-8: 24 attentions and 12 more to the encoder, 12 dense layers, 12 of experts."""
    D, F, V, E, heads = 768, 3072, 32128, 8, 12
    attention, ff = 4 * D * D, 2 * D * F
    norms = (12 * 2 + 1) + (12 * 3 + 1)
    expected = (
        V * D
        + 36 * attention
        + 12 * ff
        + 12 * (E * ff + D * E)
        + norms * D
        + 2 * 32 * heads  # buckets of relative positions
    )
    assert num_parameters("switch-base-8") == expected


@pytest.mark.parametrize("preset", [name for name in PRESETS if name.startswith("switch-base-")])
def test_released_models_differ_only_in_their_experts(preset):
    num_experts = int(preset.rsplit("-", 1)[1])
    model = PRESETS[preset].model
    assert model == replace(PRESETS["switch-base-8"].model, num_experts=num_experts)
    one_expert = 12 * (2 * 768 * 3072 + 768)
    assert (
        num_parameters(preset) - num_parameters("switch-base-8") == (num_experts - 8) * one_expert
    )


@pytest.mark.parametrize(
    ("sparse", "dense"),
    [
        ("tiny", "tiny-dense"),
        ("switch-base-8", "t5-base"),
        ("switch-base-256", "t5-base"),
        ("switch-base", "t5-base-geglu"),
    ],
)
def test_dense_twins_do_the_same_work_a_token(sparse, dense):
    """One expert is as large as the feed-forward layer that it stands for."""
    model = PRESETS[sparse].model
    twin = replace(model, moe_every=0, num_experts=PRESETS[dense].model.num_experts)
    assert twin == PRESETS[dense].model
    assert model.top_k == 1
    assert PRESETS[sparse].data == PRESETS[dense].data
    assert PRESETS[sparse].optim == PRESETS[dense].optim


@pytest.mark.parametrize("preset", [name for name in PRESETS if not name.startswith("tiny")])
def test_recipe_of_the_paper(preset):
    """DESIGN, section 5."""
    run = PRESETS[preset]
    assert run.optim.balance_coefficient == 1e-2 and run.optim.z_coefficient == 1e-3
    assert run.model.capacity_factor == 1.25 and run.model.jitter == 1e-2
    assert run.model.init_scale == 0.1 and run.model.dropout == 0.1
    assert run.optim.optimizer == "adafactor" and run.optim.warmup_steps == 10_000
    assert run.data.sequence_length == 512 and run.model.vocab_size == 32128


def fits(run: RunConfig, mesh_name: str) -> bool:
    try:
        check_sizes(run, read_mesh(mesh_name))
    except UserError:
        return False
    return True


# 8 does not divide the 12 heads of the base models; 64 devices of tokens do not divide the 32 rows
# of tiny's batch.
_TWELVE_HEADS = {"model8", "data4_expert16_model8"}
DO_NOT_FIT = {
    **{name: {"data4_expert16_model8"} for name in ("tiny", "tiny-dense")},
    **{name: _TWELVE_HEADS for name, run in PRESETS.items() if run.model.num_heads == 12},
}


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_fit_the_meshes(preset):
    refused = {name for name in mesh_names() if not fits(PRESETS[preset], name)}
    assert refused == DO_NOT_FIT.get(preset, set())
