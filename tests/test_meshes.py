"""Mesh files, the devices that they ask for, and whether a config's sizes divide over them."""

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import builders
import jax
import pytest

from switchjax import layout
from switchjax.axes import AXES
from switchjax.errors import UserError
from switchjax.layout import Layout
from switchjax.mesh import (
    Exchange,
    MeshShape,
    make_mesh,
    make_submesh,
    mesh_names,
    read_mesh,
    use_abstract_mesh,
)
from switchjax.moe.experts import Experts
from switchjax.state import init_state
from switchjax.step import train_step

FOLDER = Path(__file__).parent.parent / "meshes"


# Type-checking: no mesh below needs its devices.


@pytest.mark.parametrize("architecture", ["encoder_decoder", "decoder_only"])
@pytest.mark.parametrize("mesh_name", mesh_names())
def test_every_mesh_type_checks_the_whole_step(mesh_name, architecture):
    """Shapes and shardings of init and step, both losses' gradients and AdamW included."""
    model = replace(
        builders.MODEL,
        architecture=architecture,
        activation="geglu",
        num_experts=16,
        jitter=0.1,
        dropout=0.1,
    )
    config = builders.run_config(model, rows=128, accumulation=2)
    batch = builders.random_batch(model, rows=128)
    specs = Layout.of(read_mesh(mesh_name))
    with use_abstract_mesh(read_mesh(mesh_name)):
        mesh = jax.sharding.get_abstract_mesh()
        placed = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=jax.NamedSharding(mesh, specs.rows(x.ndim))
            ),
            batch,
        )
        state = jax.eval_shape(partial(init_state, config, specs))
        after, metrics = jax.eval_shape(partial(train_step, config, specs), state, placed)
    before, after = builders.named_leaves(state), builders.named_leaves(after)
    assert before.keys() == after.keys()
    for name, leaf in before.items():
        new = after[name]
        assert (new.shape, new.dtype) == (leaf.shape, leaf.dtype), name
        if leaf.ndim:
            assert new.sharding == leaf.sharding, name
    assert metrics.loss.shape == ()
    assert metrics.router.load_E.shape == (len(layers(architecture)), 16)


def layers(architecture: str) -> tuple[str, ...]:
    return ("encoder", "decoder") if architecture == "encoder_decoder" else ("decoder",)


def test_one_mesh_file_needs_512_devices():
    assert max(read_mesh(name).num_devices for name in mesh_names()) == 512


# Divisibility.

SHAPE_222 = builders.sizes(2, 2, 2)


def exchanging(expert: int, model: int, **exchange) -> MeshShape:
    return replace(builders.sizes(1, expert, model), exchange=Exchange(**exchange))


@pytest.mark.parametrize(
    ("model", "shape", "rows", "accumulation", "numbers"),
    [
        # Case 14: E = 8 over 3, over 16, E = 4 over 8.
        (dict(), builders.sizes(1, 3, 1), 24, 1, ("expert = 3", "model.num_experts = 8")),
        (dict(), builders.sizes(1, 16, 1), 32, 1, ("expert = 16", "model.num_experts = 8")),
        (
            dict(num_experts=4),
            builders.sizes(1, 8, 1),
            8,
            1,
            ("expert = 8", "model.num_experts = 4"),
        ),
        (dict(num_heads=6), builders.sizes(1, 1, 4), 8, 1, ("model = 4", "model.num_heads = 6")),
        (dict(d_ff=18), builders.sizes(1, 1, 4), 8, 1, ("model = 4", "model.d_ff = 18")),
        (dict(vocab_size=30), builders.sizes(1, 1, 4), 8, 1, ("model = 4", "vocab_size = 30")),
        (dict(), SHAPE_222, 6, 1, ("data * expert = 4", "= 6")),
        (dict(), SHAPE_222, 8, 4, ("data * expert = 4", "data.batch_size 8", "accumulation 4")),
        # 8 rows on 4 devices: 2 rows of 16 and of 8 tokens each.
        (dict(group_size=5), SHAPE_222, 8, 1, ("group_size = 5", "micro-batch = 32")),
        (dict(group_size=32), SHAPE_222, 8, 1, ("group_size = 32", "micro-batch = 16")),
        (dict(group_size=16), SHAPE_222, 8, 2, ("group_size = 16", "micro-batch = 8")),
        # Folded experts are over both axes.
        (
            dict(),
            exchanging(2, 8, experts="folded"),
            16,
            1,
            ("expert * model = 16", "model.num_experts = 8"),
        ),
        (dict(num_heads=6), exchanging(1, 4, experts="folded"), 8, 1, ("model.num_heads = 6",)),
        # 8 rows on 2 devices: 4 groups of 16 and 4 of 8 tokens.
        (dict(), exchanging(2, 1, chunks=3), 8, 1, ("chunks = 3", "micro-batch = 4", "16 a group")),
        (dict(group_size=32), exchanging(2, 1, chunks=2), 8, 1, ("chunks = 2", "micro-batch = 1")),
        (
            dict(eval_capacity_factor=2.0),
            exchanging(2, 1, dispatcher="ragged"),
            8,
            1,
            ("ragged drops nothing", "eval_capacity_factor 2.0"),
        ),
        (
            dict(expert_capacity=4),
            exchanging(2, 1, dispatcher="ragged"),
            8,
            1,
            ("ragged drops nothing", "expert_capacity 4"),
        ),
    ],
)
def test_sizes_that_do_not_divide_are_refused(model, shape, rows, accumulation, numbers):
    """Case 14: one line, before anything is built, with both numbers in it."""
    with pytest.raises(UserError) as error:
        layout.check(
            replace(builders.MODEL, **model),
            shape,
            batch_size=rows,
            accumulation=accumulation,
            row_lengths=(16, 8),
        )
    for number in numbers:
        assert number in str(error.value)
    assert shape.name in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("model", "shape", "rows", "accumulation"),
    [
        (dict(), builders.sizes(1, 4, 1), 8, 1),  # case 14: E = 8 over 4
        (dict(), builders.sizes(4, 2, 1), 8, 1),  # case 14: four experts a device
        (dict(group_size=16), SHAPE_222, 8, 1),
        (dict(group_size=8), SHAPE_222, 8, 2),
        (dict(moe_every=0, num_experts=3, group_size=7), SHAPE_222, 8, 1),  # no experts to split
    ],
)
def test_sizes_that_divide_are_taken(model, shape, rows, accumulation):
    layout.check(
        replace(builders.MODEL, **model),
        shape,
        batch_size=rows,
        accumulation=accumulation,
        row_lengths=(16, 8),
    )


# Reading a mesh.


@pytest.mark.parametrize("mesh", ["data2_expert4", str(FOLDER / "data2_expert4.toml")])
def test_a_mesh_by_name_and_by_path(mesh):
    assert read_mesh(mesh) == MeshShape(name="data2_expert4", data=2, expert=4, model=1)


def test_a_mesh_by_its_sizes():
    assert read_mesh("data=2,expert=4").sizes == (2, 4, 1)
    assert read_mesh("model=2,data=4").sizes == (4, 1, 2)
    assert read_mesh("expert=8").sizes == (1, 8, 1)


def test_the_name_of_a_mesh_file_says_its_sizes():
    """Axes of size 1 are left out of the name; that experts are folded is part of it."""
    for name in mesh_names():
        shape = read_mesh(name)
        split = [f"{axis}{size}" for axis, size in zip(AXES, shape.sizes, strict=True) if size > 1]
        folded = ["folded"] * (shape.exchange.experts == "folded")
        assert name == "_".join([*(split or ["single"]), *folded])


def test_a_mesh_file_says_how_tokens_reach_experts(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'data = 2\nexpert = 4\nmodel = 1\nexperts = "folded"\n'
        'dispatcher = "ragged"\nwire = "float8"\nchunks = 2\nbuffer = 1.5\n'
    )
    exchange = Exchange(experts="folded", dispatcher="ragged", wire="float8", chunks=2, buffer=1.5)
    assert read_mesh(str(path)).exchange == exchange
    assert read_mesh("expert8").exchange == Exchange()


def test_keys_after_a_name_replace_those_of_its_file():
    shape = read_mesh("data2_model4_folded,dispatcher=local,model=2")
    assert shape.sizes == (2, 1, 2)
    assert shape.exchange == Exchange(experts="folded", dispatcher="local")
    assert shape.name == "data2_model4_folded,dispatcher=local,model=2"
    assert read_mesh("expert8", "ragged").exchange.dispatcher == "ragged"
    assert read_mesh("expert=8,buffer=2,dispatcher=ragged").exchange.buffer == 2


@pytest.mark.parametrize("experts", ["separate", "folded"])
def test_where_the_layout_puts_the_experts(experts):
    layout = Layout.of(replace(SHAPE_222, exchange=Exchange(experts=experts)))
    config = replace(builders.MODEL, d_model=4, d_ff=6)
    with jax.set_mesh(make_mesh(SHAPE_222)):
        made = jax.jit(lambda: Experts(jax.random.key(0), config, layout))()
    shards = {name: x.addressable_shards[0].data.shape for name, x in
              (("in", made.w_in_EDF[...]), ("out", made.w_out_EFD[...]))}  # fmt: skip
    separate, folded = {"in": (4, 4, 3), "out": (4, 3, 4)}, {"in": (2, 4, 6), "out": (2, 6, 4)}
    assert shards == (separate if experts == "separate" else folded)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("no_such_mesh", ("no_such_mesh", "data2_expert2_model2")),
        ("data=0", ("data", "0")),
        ("data=-2", ("data", "-2")),
        ("data=two", ("data", "two")),
        ("data=2.5", ("data", "2.5")),
        ("data=2,experts=split", ("experts", "separate, folded", "'split'")),
        ("data=2,dispatcher=alltoall", ("dispatcher", "all_to_all", "'alltoall'")),
        ("data=2,wire=fp8", ("wire", "compute, bfloat16, float8", "'fp8'")),
        ("data=2,chunks=0", ("chunks", "positive integer", "0")),
        ("data=2,chunks=half", ("chunks", "positive integer", "'half'")),
        ("data=2,chunks=1.5", ("chunks", "1.5")),
        ("data=2,dispatcher=ragged,buffer=0", ("buffer", "positive", "0")),
        ("data=2,dispatcher=ragged,buffer=nan", ("buffer", "nan")),
        ("data=2,dispatcher=ragged,buffer=big", ("buffer", "'big'")),
        ("data=2,buffer=2", ("all_to_all", "buffer")),
        ("expert8,dispatcher=local", ("local", "expert = 1", "expert = 8")),
        ("data8,dispatcher=local,wire=float8", ("local", "float8")),
        ("expert8,expert=4,expert=2", ("twice",)),
        ("expert8,wyre=float8", ("unknown wyre", "wire")),
        ("data=", ("data", "''")),
        ("data=2,data=4", ("data=2,data=4", "twice")),
        ("data=2,pipeline=4", ("pipeline", "data, expert, model")),
        ("data=2,expert", ("data=2,expert",)),
        ("data=8,zero=4", ("zero", "0, 1, 2 or 3", "4")),
        ("data=8,zero=1.0", ("zero", "1.0")),
        ("data=8,reduce_dtype=half", ("reduce_dtype", "compute, float32", "'half'")),
        ("data=8,zero=3,hot_experts=-2", ("hot_experts", "positive integer", "-2")),
        ("data=8,zero=3,hot_experts=2.0", ("hot_experts", "2.0")),
        ("data=8,zero=2,hot_experts=4", ("hot_experts = 4", "zero = 3", "zero = 2")),
        ("", ("data2_expert2_model2",)),
        ("../meshes/single", ("../meshes/single",)),
        ("/no/such/file.toml", ("/no/such/file.toml", "No such file")),
        ("/", ("'/'",)),
    ],
)
def test_bad_mesh_text_is_refused(text, says):
    with pytest.raises(UserError) as error:
        read_mesh(text)
    for words in says:
        assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("data = 2\nexpert = 2\n", ("missing model",)),
        ("data = 2\nexpert = 2\nmodel = 1\npipeline = 3\n", ("unknown pipeline",)),
        ("data = 2\nexprt = 2\nmodel = 1\n", ("unknown exprt", "missing expert")),
        ("data = 2\nexpert = 2\nmodel = 0\n", ("model", "0")),
        ("data = 2\nexpert = -1\nmodel = 1\n", ("expert", "-1")),
        ("data = true\nexpert = 1\nmodel = 1\n", ("data", "True")),
        ('data = "2"\nexpert = 1\nmodel = 1\n', ("data", "'2'")),
        ("data = 2.0\nexpert = 1\nmodel = 1\n", ("data", "2.0")),
        ("data = \nexpert = 1\n", ("bad.toml",)),
        ("data = 2\nexpert = 1\nmodel = 1\nchunks = true\n", ("chunks", "True")),
        ("data = 2\nexpert = 1\nmodel = 1\nwire = 8\n", ("wire", "8")),
        ("data = 2\nexpert = 1\nmodel = 1\nexperts = [1]\n", ("experts", "[1]")),
        ('data = 2\nexpert = 1\nmodel = 1\ndispatcher = "ragged"\nbuffer = true\n', ("True",)),
        ("", ("missing data, expert, model",)),
        (b"\xff\xfe", ("bad.toml",)),
    ],
)
def test_a_bad_mesh_file_is_refused(tmp_path, content, says):
    path = tmp_path / "bad.toml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as error:
        read_mesh(str(path))
    for words in says:
        assert words in str(error.value)
    assert "\n" not in str(error.value)


# Devices. What JAX has already done counts here, so most run in a process of their own.


def test_a_mesh_takes_all_devices_or_says_so():
    mesh = make_mesh(builders.sizes(2, 2, 2))
    assert mesh.axis_names == ("data", "expert", "model") and mesh.devices.shape == (2, 2, 2)
    with pytest.raises(UserError, match="needs 4 devices .* sees 8 .* JAX_NUM_CPU_DEVICES=4"):
        make_mesh(builders.sizes(2, 2, 1))


def test_devices_of_the_last_axis_are_neighbours():
    ids = [[[d.id for d in row] for row in plane] for plane in make_mesh(SHAPE_222).devices]
    assert ids == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_a_submesh_leaves_devices_idle():
    assert make_submesh(builders.sizes(1, 2, 1)).devices.size == 2


def run(code: str, **environment: str) -> subprocess.CompletedProcess:
    clean = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=clean | {"JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        text=True,
        cwd=FOLDER.parent,
        timeout=120,
    )


SIMULATE = """
import jax, os
from switchjax.errors import UserError
from switchjax.mesh import make_mesh, read_mesh, simulate_devices
{before}
shape = read_mesh("data2_expert2_model2")
try:
    simulate_devices({count}, shape)
    make_mesh(shape)
    print(len(jax.devices()), os.environ.get("XLA_FLAGS"))
except UserError as error:
    print("refused:", error)
"""


def simulate(count: int | None = None, *, before: str = "", **environment: str) -> str:
    done = run(SIMULATE.format(count=count, before=before), **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_as_many_devices_as_the_mesh_needs():
    assert simulate() == "8 None"


def test_other_xla_flags_stay():
    """Case 25."""
    flags = "--xla_cpu_enable_fast_math=false"
    assert simulate(8, XLA_FLAGS=flags) == f"8 {flags}"


def test_the_same_count_in_xla_flags_is_fine():
    flags = "--xla_force_host_platform_device_count=8 --xla_cpu_enable_fast_math=false"
    assert simulate(XLA_FLAGS=flags) == f"8 {flags}"


def test_another_count_in_xla_flags_is_a_conflict():
    """Case 25: the user is told what to remove."""
    said = simulate(XLA_FLAGS="--xla_force_host_platform_device_count=4")
    assert said.startswith("refused: XLA_FLAGS asks for 4 CPU devices and this run needs 8")
    assert "remove --xla_force_host_platform_device_count" in said


def test_too_late_says_what_to_do():
    """Case 25: JAX has started with one device."""
    said = simulate(before="jax.devices()")
    assert said.startswith("refused: JAX has already started with 1 devices, too late for 8")
    assert "JAX_NUM_CPU_DEVICES=8" in said


def test_started_with_the_right_count_is_not_too_late():
    before = "jax.config.update('jax_num_cpu_devices', 8); jax.devices()"
    assert simulate(before=before) == "8 None"


def test_the_count_in_the_environment_counts():
    assert simulate(JAX_NUM_CPU_DEVICES="8") == "8 None"
    said = simulate(JAX_NUM_CPU_DEVICES="4")
    assert said.startswith("refused:") and "needs 8 devices" in said and "sees 4" in said


def test_a_count_unlike_the_mesh_is_refused():
    """Case 14: data * expert * model must be the devices."""
    said = simulate(4)
    assert said.startswith("refused: mesh data2_expert2_model2 needs 8 devices")
    assert "--devices is 4" in said
