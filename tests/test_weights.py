"""Weights by name, in parts: from a run's checkpoint or a directory of files, on any mesh."""

import json
import os
from dataclasses import replace

import jax
import numpy as np
import pytest
from builders import DEEP, MODEL, layout, mesh, run_config, start
from safetensors.numpy import load_file

from switchjax.checkpoint import Checkpoints
from switchjax.config import write_config
from switchjax.errors import UserError
from switchjax.saved_steps import checkpoint_directory, named_leaves
from switchjax.state import abstract_state
from switchjax.weights import ROUTER_BIAS, load_model, open_weights, write_weights

CONFIG = replace(run_config(DEEP, optimizer="sgd", bias_rate=0.5), mesh="data2_expert2_model2")
NAME = "encoder.periods.blocks.1.switch.experts.w_in_EDF"


@pytest.fixture(scope="module")
def arrays():
    with jax.set_mesh(mesh("single")):
        model = start(CONFIG, layout("single")).model
    return {name: np.asarray(x) for name, x in named_leaves(model).items()}


def write(directory, arrays):
    def rows(name):
        yield from arrays[name]

    write_weights(directory, CONFIG, {n: as_shape(a) for n, a in arrays.items()}, rows)


def as_shape(array):
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


@pytest.fixture(scope="module")
def directory(tmp_path_factory, arrays):
    out = tmp_path_factory.mktemp("weights") / "converted"
    write(out, arrays)
    return out


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose second step was saved on eight devices."""
    out = tmp_path_factory.mktemp("run")
    write_config(CONFIG, out)
    checkpoints = Checkpoints(checkpoint_directory(out), keep=2, on_commit=lambda step: None)
    with jax.set_mesh(mesh(CONFIG.mesh)):
        state = start(CONFIG, layout(CONFIG.mesh))
        for step in (1, 2):
            scaled = state._replace(model=jax.tree.map(lambda x, s=step: x * s, state.model))
            checkpoints.save(step, scaled, data_state={}, config=CONFIG, eval_loss=None)
    checkpoints.close()
    return out


@pytest.fixture(params=["run", "directory"])
def source(request):
    return request.getfixturevalue(request.param)


def test_names_and_shapes_are_those_of_the_model(source, arrays):
    weights = open_weights(source)
    assert weights.shapes == {name: as_shape(array) for name, array in arrays.items()}
    assert weights.config.model == CONFIG.model


def test_parts_of_an_array(source, arrays):
    weights, scale = open_weights(source), 2 if (source / "checkpoints").exists() else 1
    for index in ((), (1,), (0, slice(2, 5)), (slice(0, 1), 3, slice(4, 8))):
        part = weights.read(NAME, index)
        np.testing.assert_array_equal(part, scale * arrays[NAME][index])


@pytest.mark.parametrize(
    "name", ["single", "expert8", "data4_model2,zero=3", "data2_model4_folded"]
)
def test_a_model_on_any_mesh(source, arrays, name):  # case 6
    weights, scale = open_weights(source), 2 if (source / "checkpoints").exists() else 1
    with jax.set_mesh(mesh(name)):
        target = abstract_state(CONFIG, layout(name)).model
        model = load_model(weights, target)
    for path, leaf in named_leaves(model).items():
        np.testing.assert_array_equal(leaf, scale * arrays[path], err_msg=path)
        assert leaf.sharding == named_leaves(target)[path].sharding, path


def test_a_run_has_steps_and_a_bias(run, arrays):  # case 63
    first = open_weights(run, 1)
    np.testing.assert_array_equal(first.read(NAME), arrays[NAME])
    assert open_weights(run).source.startswith("step 2 in ")
    np.testing.assert_array_equal(first.read(ROUTER_BIAS), np.zeros((4, 8), np.float32))
    with pytest.raises(UserError, match="step 7: there is no such checkpoint"):
        open_weights(run, 7)


def test_weights_of_another_model(directory):
    weights = open_weights(directory)
    with jax.set_mesh(mesh("single")):
        other = replace(MODEL, num_layers=4, num_experts=4, architecture="decoder_only")
        target = abstract_state(run_config(other), layout("single")).model
        with pytest.raises(UserError) as raised:
            load_model(weights, target)
    message = str(raised.value)
    assert message.startswith(f"the weights of {directory} do not fit: ")
    assert "extra decoder.periods.blocks.0.cross_attention.w_k_DHK, " in message
    assert "router_DE is float32[2,16,8], not float32[2,16,4]" in message


def test_files_are_safetensors(directory, arrays):
    for path in (directory / "weights").iterdir():
        ((name, array),) = load_file(path).items()
        np.testing.assert_array_equal(array, arrays[name])
    assert len(list((directory / "weights").iterdir())) == len(arrays)


def test_the_tokenizer_moves_with_the_weights(tmp_path, arrays):
    (tmp_path / "spiece.model").write_text("pieces")
    tokenizer = str(tmp_path / "spiece.model")
    config = replace(CONFIG, data=replace(CONFIG.data, tokenizer=tokenizer))
    shapes = {n: as_shape(a) for n, a in arrays.items()}
    write_weights(tmp_path / "out", config, shapes, lambda n: iter(arrays[n]))
    (tmp_path / "spiece.model").unlink()
    moved = tmp_path / "moved"
    (tmp_path / "out").rename(moved)
    assert open_weights(moved).config.data.tokenizer == str(moved / "spiece.model")


def test_an_interrupted_write_leaves_nothing(tmp_path, arrays):
    def breaks(name):
        yield arrays[name][:1]
        raise UserError("a file ends early")

    shapes = {n: as_shape(a) for n, a in arrays.items()}
    with pytest.raises(UserError, match="a file ends early"):
        write_weights(tmp_path / "out", CONFIG, shapes, breaks)
    assert not list(tmp_path.iterdir())


def test_nothing_is_written_over(directory, tmp_path, arrays):
    with pytest.raises(UserError, match="holds a run or weights already"):
        write(directory, arrays)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="exists and is no empty directory"):
        write(tmp_path, arrays)
    empty = tmp_path / "empty"
    empty.mkdir()
    write(empty, arrays)
    assert open_weights(empty).shapes


def test_damage_is_named(tmp_path, arrays):
    out = tmp_path / "out"
    write(out, arrays)
    path = out / "weights" / f"{NAME}.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"file weights/{NAME}.safetensors is damaged"):
        open_weights(out)
    os.truncate(path, 100)
    with pytest.raises(UserError, match="is damaged"):
        open_weights(out)
    path.unlink()
    with pytest.raises(UserError, match="is missing"):
        open_weights(out)


def test_no_weights(tmp_path):
    with pytest.raises(UserError, match="holds no run"):
        open_weights(tmp_path)
    write_config(CONFIG, tmp_path)
    with pytest.raises(UserError, match="holds neither checkpoints nor weights"):
        open_weights(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError, match="holds no complete checkpoint"):
        open_weights(tmp_path)


def test_weights_have_no_steps(directory):
    with pytest.raises(UserError, match="holds weights without steps: leave out step 3"):
        open_weights(directory, 3)
    assert json.loads((directory / "manifest.json").read_text())["files"]
