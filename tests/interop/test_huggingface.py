"""Hugging Face directories in and out: every tensor in its place, or a line that says why not."""

import json
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path

import builders
import hugging_face
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hugging_face import VARIANTS, arrays, give, loaded, random_weights, rewrite, take_over
from safetensors.numpy import load_file

from switchjax.checkpoint import Checkpoints
from switchjax.config import ModelConfig, RunConfig, write_config
from switchjax.data.tokenizer import train_tokenizer
from switchjax.errors import UserError
from switchjax.interop.huggingface import tensors_of
from switchjax.interop.their_config import model_of, theirs_of
from switchjax.presets import PRESETS
from switchjax.saved_steps import checkpoint_directory
from switchjax.state import TrainState, model_shapes
from switchjax.weights import ROUTER_BIAS, open_weights, write_weights

THEIRS = Path(__file__).parent.parent / "data" / "hf_golden"
SWITCH = VARIANTS["Switch"]
EXPERT = "decoder.block.1.layer.2.mlp.experts.expert_{}.wi.weight"


@pytest.fixture(scope="module")
def switch(tmp_path_factory):
    """A small Switch Transformer of twelve experts, as a Hugging Face directory."""
    folder = tmp_path_factory.mktemp("switch")
    random_weights(SWITCH, folder / "ours")
    give(folder / "ours", folder / "theirs")
    return folder / "theirs"


# What converts.


@pytest.mark.parametrize("variant", VARIANTS)
def test_there_and_back_bit_for_bit(tmp_path, variant):
    """Case 48: one file or several, scanned or unrolled, with 12 experts in numeric order."""
    model = replace(VARIANTS[variant], scan=variant != "Switch")
    random_weights(model, tmp_path / "ours")
    give(tmp_path / "ours", tmp_path / "whole")
    give(tmp_path / "ours", tmp_path / "sharded", shard_bytes=4000)
    before = arrays(tmp_path / "ours")
    for form in ("whole", "sharded"):
        take_over(tmp_path / form, tmp_path / f"from {form}")
        after = arrays(tmp_path / f"from {form}")
        assert after.keys() == before.keys()
        for name, array in before.items():
            np.testing.assert_array_equal(after[name], array, name, strict=True)
        config = open_weights(tmp_path / f"from {form}").config
        experts = model.num_experts if model.moe_every else ModelConfig().num_experts
        assert replace(config.model, scan=model.scan, dropout=0.0) == replace(
            model, num_experts=experts
        )


def test_other_implementations_tensors_come_back(tmp_path):
    """Names, shapes, values, and with the switch on every number of the config too."""
    take_over(THEIRS, tmp_path / "ours", hf_semantics=True)
    give(tmp_path / "ours", tmp_path / "theirs")
    before, after = (load_file(d / "model.safetensors") for d in (THEIRS, tmp_path / "theirs"))
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        np.testing.assert_array_equal(after[name], tensor, name, strict=True)
    files = (directory / "config.json" for directory in (THEIRS, tmp_path / "theirs"))
    before, after = (json.loads(file.read_text()) for file in files)
    differ = {name for name, value in after.items() if before.get(name) != value}
    assert differ == {"architectures", "is_gated_act", "torch_dtype"}


def test_experts_are_in_numeric_order(tmp_path):
    """Case 48: expert 10 after expert 9, not after expert 1; case 6: and each has its own."""
    shapes = model_shapes(SWITCH)

    def pieces(name):
        shape = shapes[name].shape
        numbers = np.arange(12.0).reshape(1, 12, 1, 1) if ".experts." in name else 0.5
        yield np.broadcast_to(numbers, shape).astype(np.float32)

    write_weights(tmp_path / "ours", RunConfig(model=SWITCH, mesh="single"), shapes, pieces)
    give(tmp_path / "ours", tmp_path / "theirs")
    tensors = load_file(tmp_path / "theirs" / "model.safetensors")
    for expert in range(12):
        assert (tensors[EXPERT.format(expert)] == expert).all()
    take_over(tmp_path / "theirs", tmp_path / "again")
    name = "decoder.periods.blocks.1.switch.experts.w_in_EDF"
    stacked = open_weights(tmp_path / "again").read(name)
    assert (stacked == np.arange(12).reshape(1, 12, 1, 1)).all()


def test_files_of_several_shards(tmp_path, switch):
    """None larger than asked (but for a tensor that is), all tensors once, named as they are."""
    random_weights(SWITCH, tmp_path / "ours")
    give(tmp_path / "ours", tmp_path / "theirs", shard_bytes=4000)
    files = sorted(path.name for path in (tmp_path / "theirs").glob("*.safetensors"))
    count = len(files)
    assert count > 3 and files[0] == f"model-00001-of-{count:05}.safetensors"
    index = json.loads((tmp_path / "theirs" / "model.safetensors.index.json").read_text())
    whole, found = load_file(switch / "model.safetensors"), {}
    for file in files:
        tensors = load_file(tmp_path / "theirs" / file)
        assert sum(t.nbytes for t in tensors.values()) <= 4000 or len(tensors) == 1
        assert {index["weight_map"][name] for name in tensors} == {file}
        found |= tensors
    assert found.keys() == whole.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in whole.values())
    for name, tensor in whole.items():
        np.testing.assert_array_equal(found[name], tensor)


def test_a_run_gives_the_step_that_is_asked_for(tmp_path):
    """From checkpoints as training saves them."""
    random_weights(SWITCH, tmp_path / "ours")
    run, config = tmp_path / "run", RunConfig(model=SWITCH, mesh="single")
    run.mkdir()
    write_config(config, run)
    with jax.set_mesh(builders.mesh("single")):
        model = loaded(tmp_path / "ours")
        checkpoints = Checkpoints(checkpoint_directory(run), keep=2, on_commit=lambda step: None)
        for step in (1, 2):
            scaled = jax.tree.map(lambda x, step=step: x * step, model)
            state = TrainState(jnp.int32(step), scaled, (), None)
            checkpoints.save(step, state, data_state={}, config=config, eval_loss=None)
        checkpoints.close()
    table = arrays(tmp_path / "ours")["embedding.embed_VD"]
    for options, scale in (({}, 2), ({"step": 1}, 1)):
        said = give(run, tmp_path / f"theirs {scale}", **options)
        assert f"parameters of step {scale} in " in said[-1]
        tensors = load_file(tmp_path / f"theirs {scale}" / "model.safetensors")
        np.testing.assert_array_equal(tensors["shared.weight"], scale * table)
    with pytest.raises(UserError, match="step 3: there is no such checkpoint"):
        give(run, tmp_path / "no", step=3)


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16], ids=["float16", "bfloat16"])
def test_narrow_tensors_become_float32(tmp_path, switch, dtype):
    narrow = {n: t.astype(dtype) for n, t in load_file(switch / "model.safetensors").items()}
    rewrite(switch, tmp_path / "theirs", tensors=narrow)
    said = take_over(tmp_path / "theirs", tmp_path / "ours")
    assert said[0] == f"tensors in {np.dtype(dtype).name} become float32"
    array = open_weights(tmp_path / "ours").read("embedding.embed_VD")
    expected = narrow["shared.weight"].astype(np.float32)
    np.testing.assert_array_equal(array, expected, strict=True)


def test_bfloat16_on_request(tmp_path):
    random_weights(SWITCH, tmp_path / "ours")
    give(tmp_path / "ours", tmp_path / "theirs", dtype="bfloat16")
    tensors = load_file(tmp_path / "theirs" / "model.safetensors")
    assert {t.dtype for t in tensors.values()} == {np.dtype(jnp.bfloat16)}
    table = arrays(tmp_path / "ours")["embedding.embed_VD"]
    np.testing.assert_array_equal(tensors["shared.weight"], table.astype(jnp.bfloat16))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_narrow_parameters_lose_nothing(tmp_path, dtype):
    """A model in bfloat16 is written in float32 unless asked for otherwise; neither rounds it."""
    random_weights(replace(SWITCH, param_dtype="bfloat16"), tmp_path / "ours")
    give(tmp_path / "ours", tmp_path / "theirs", dtype=dtype)
    tensors = load_file(tmp_path / "theirs" / "model.safetensors")
    table = arrays(tmp_path / "ours")["embedding.embed_VD"]
    expected = table.astype(tensors["shared.weight"].dtype)
    np.testing.assert_array_equal(tensors["shared.weight"], expected)
    assert (table.dtype, expected.dtype.name) == (jnp.bfloat16, dtype)


def test_one_tensor_at_a_time(tmp_path):
    """Neither way holds more than a few tensors; `experiments/bench/convert.py` measures a large
    model in a process of its own."""
    model = replace(SWITCH, d_model=256, d_ff=512, num_layers=4)
    random_weights(model, tmp_path / "ours")
    shapes = model_shapes(model)
    experts = shapes["encoder.periods.blocks.1.switch.experts.w_in_EDF"]
    checksums = 2**23  # two blocks of a file
    bound = checksums + experts.size * 4 // 2
    assert bound < sum(leaf.size for leaf in shapes.values()) * 4 / 3
    for convert, source, out in ((give, "ours", "theirs"), (take_over, "theirs", "again")):
        tracemalloc.start()
        try:
            convert(tmp_path / source, tmp_path / out)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < bound, peak


def test_tied_copies_and_what_nobody_uses(tmp_path, switch):
    table = load_file(switch / "model.safetensors")["shared.weight"]
    unused = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    names = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
    copies = {name: table.copy() for name in names}
    more = copies | {unused: np.zeros((32, 2), np.float32)}
    rewrite(switch, tmp_path / "theirs", tensors=more)
    said = take_over(tmp_path / "theirs", tmp_path / "ours")
    assert said[0] == f"left out, since no version of transformers uses it: {unused}"
    copies["lm_head.weight"][23, 5] += 1
    rewrite(switch, tmp_path / "other", tensors=copies)
    with pytest.raises(UserError, match="lm_head.weight differs from shared.weight"):
        take_over(tmp_path / "other", tmp_path / "no")


def test_output_that_is_not_scaled_in_new_files(tmp_path):
    """New versions tie T5 1.1 in name, and keep in another field that its output is not scaled."""
    random_weights(VARIANTS["T5 1.1"], tmp_path / "ours")
    give(tmp_path / "ours", tmp_path / "theirs")
    fields = dict(tie_word_embeddings=True, scale_decoder_outputs=False)
    rewrite(tmp_path / "theirs", tmp_path / "new", **fields)
    take_over(tmp_path / "new", tmp_path / "again")
    assert not open_weights(tmp_path / "again").config.model.tied_embeddings


def test_the_tokenizer_goes_along(tmp_path, switch):
    theirs = rewrite(switch, tmp_path / "theirs")
    assert "need a --data.tokenizer" in take_over(theirs, tmp_path / "without")[-2]
    text = ["the cat sat on the mat and the dog sat on the log"] * 50
    train_tokenizer(text, 273, theirs / "spiece.model")
    take_over(theirs, tmp_path / "ours")
    moved = (tmp_path / "ours").rename(tmp_path / "moved")
    tokenizer = Path(open_weights(moved).config.data.tokenizer)
    assert tokenizer.parent == moved and tokenizer.is_file()
    give(moved, tmp_path / "back")
    copied = (tmp_path / "back" / "spiece.model").read_bytes()
    assert copied == (theirs / "spiece.model").read_bytes()


@pytest.mark.parametrize("name", [name for name in PRESETS if not name.startswith("tiny")])
def test_the_papers_models_have_a_place_for_every_tensor(name):
    """From shapes alone: every parameter of every preset, once; and their config means the same."""
    config = PRESETS[name]
    theirs = theirs_of(config, pad_id=0, eos_id=1, dtype="float32")
    model = model_of(theirs["model_type"], theirs, hf_semantics=False)
    same = ("activation", "tied_embeddings", "moe_every", "d_model", "d_ff", "num_heads", "d_kv")
    assert all(getattr(model, field) == getattr(config.model, field) for field in same)
    shapes, names, size = model_shapes(model), set(), 0
    for ours, leaf in shapes.items():
        for tensor in tensors_of(ours, leaf.shape, model, theirs["model_type"]):
            assert tensor.name not in names
            names.add(tensor.name)
            size += int(np.prod(tensor.shape))
    assert size == sum(leaf.size for leaf in shapes.values())


# What does not.

CONFIGS = {
    "no model_type": (dict(model_type=...), "model_type is None; what converts is t5 and switch"),
    "another model": (dict(model_type="mixtral"), "model_type is 'mixtral'; what converts is t5"),
    "activation": (dict(dense_act_fn="silu"), "activation is 'silu'; here there are relu and"),
    "exact gelu": (
        dict(is_gated_act=True, dense_act_fn="gelu"),
        "activation is 'gated-gelu'; here there are relu and gated-gelu_new",
    ),
    "gated": (dict(is_gated_act=True), "activation is 'gated-relu'; here there are relu and"),
    "epsilon": (dict(layer_norm_epsilon=1e-5), "layer_norm_epsilon is 1e-05, .* always 1e-06"),
    "buckets": (dict(relative_attention_num_buckets=16), "num_buckets is 16, .* always 32"),
    "distance": (dict(relative_attention_max_distance=64), "max_distance is 64, .* always 128"),
    "bias": (dict(router_bias=True), "router_bias is True, and here it is always False"),
    "router": (dict(router_dtype="bfloat16"), "router_dtype is 'bfloat16', .* 'float32'"),
    "encoder alone": (dict(is_encoder_decoder=False), "is_encoder_decoder is False, .* True"),
    "decoder": (dict(num_decoder_layers=3), "num_layers is 2 and num_decoder_layers 3; here"),
    "no size": (dict(d_model=...), "must have a whole number d_model, got None"),
    "size": (dict(d_ff="20"), "must have a whole number d_ff, got '20'"),
    "size 0": (dict(d_kv=0), "model.d_kv must be positive, got 0"),
    "dropout": (dict(dropout_rate="a"), "must have a number dropout_rate, got 'a'"),
    "steps": (
        dict(num_layers=6, num_decoder_layers=6, num_sparse_encoder_layers=2),
        "num_sparse_encoder_layers 2 and num_sparse_decoder_layers 1 of 6 .* 6 or 3 of each",
    ),
    "every third": (
        dict(num_layers=6, num_decoder_layers=6)
        | dict(num_sparse_encoder_layers=2, num_sparse_decoder_layers=2),
        "num_sparse_encoder_layers 2 .* of 6 layers; here all layers or every second one",
    ),
    "dense end": (dict(num_layers=3, num_decoder_layers=3), "1 of 3 layers; .* 3 or 1.5 of each"),
    "none sparse": (dict(num_sparse_encoder_layers=0), "num_sparse_encoder_layers 0 and"),
    "start": (dict(decoder_start_token_id=5), "decoder_start_token_id is 5 and pad_token_id 0"),
}


@pytest.mark.parametrize(("change", "answer"), CONFIGS.values(), ids=CONFIGS)
def test_a_model_that_there_is_not_here(tmp_path, switch, change, answer):
    rewrite(switch, tmp_path / "theirs", **change)
    refuses(answer, tmp_path, tmp_path / "theirs")


def refuses(answer, folder, directory):
    """Gives the one line; nothing is left."""
    before = sorted(folder.rglob("*"))
    with pytest.raises(UserError, match=answer) as raised:
        take_over(directory, folder / "out")
    assert "\n" not in str(raised.value)
    assert sorted(folder.rglob("*")) == before
    return str(raised.value)


def test_tensors_missing_extra_and_misshaped_are_listed(tmp_path, switch):
    """S14, case 48: all of them by name, before anything is written."""
    tensors = {
        EXPERT.format(10): ...,
        "decoder.final_layer_norm.weight": ...,
        "encoder.block.7.layer.0.layer_norm.weight": np.ones(12, np.float32),
        "encoder.block.0.layer.1.mlp.wi.weight": np.ones((12, 20), np.float32),
        "encoder.final_layer_norm.weight": np.ones(12, np.int64),
    }
    rewrite(switch, tmp_path / "theirs", tensors=tensors)
    answer = refuses("the tensors are not", tmp_path, tmp_path / "theirs")
    assert answer.startswith(
        "the tensors are not those of config.json: missing decoder.final_layer_norm.weight, "
        f"{EXPERT.format(10)}; extra encoder.block.7.layer.0.layer_norm.weight; "
    )
    for other in (
        "encoder.final_layer_norm.weight is I64[12], not float32[12]",
        "encoder.block.0.layer.1.mlp.wi.weight is float32[12,20], not float32[20,12]",
    ):
        assert other in answer


def test_directories_that_are_none(tmp_path, switch):
    refuses("theirs holds no Hugging Face model", tmp_path, tmp_path / "theirs")
    theirs = rewrite(switch, tmp_path / "theirs")
    (theirs / "config.json").write_text("{")
    refuses("cannot read .*theirs/config.json: ", tmp_path, theirs)
    (theirs / "config.json").write_text("[]")
    refuses("theirs/config.json: model_type is None", tmp_path, theirs)
    shutil.copy(switch / "config.json", theirs)
    (theirs / "model.safetensors").unlink()
    refuses("holds neither model.safetensors nor model.safetensors.index.json", tmp_path, theirs)
    (theirs / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch executed'\ntR.")
    refuses(r"holds a pickle \(pytorch_model.bin\), .*only safetensors are read", tmp_path, theirs)
    (theirs / "model.safetensors.index.json").write_text("{}")
    refuses("cannot read .*index.json: KeyError", tmp_path, theirs)


@pytest.mark.parametrize("kept", [4, 100, -1])
def test_a_truncated_file(tmp_path, switch, kept):
    theirs = rewrite(switch, tmp_path / "theirs")
    file = theirs / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    refuses("cannot read .*theirs/model.safetensors: ", tmp_path, theirs)


def test_an_index_that_is_wrong(tmp_path):
    random_weights(SWITCH, tmp_path / "ours")
    give(tmp_path / "ours", tmp_path / "theirs", shard_bytes=20000)
    path = tmp_path / "theirs" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first, *_, last = sorted(set(index["weight_map"].values()))
    name = next(name for name, file in index["weight_map"].items() if file == first)
    index["weight_map"][name] = last
    path.write_text(json.dumps(index))
    refuses(f"index.json promises what is not there: {name}$", tmp_path, tmp_path / "theirs")
    (tmp_path / "theirs" / last).unlink()
    refuses(f"cannot read .*{last}: ", tmp_path, tmp_path / "theirs")


def test_what_stops_half_way_leaves_nothing(tmp_path):
    """A shard that goes away once conversion has begun, both ways."""
    random_weights(SWITCH, tmp_path / "ours")
    give(tmp_path / "ours", tmp_path / "theirs", shard_bytes=20000)
    lost = sorted((tmp_path / "theirs").glob("*.safetensors"))[1]
    options = hugging_face.FromHuggingFace(
        directory=str(tmp_path / "theirs"), out=str(tmp_path / "new" / "out")
    )
    with pytest.raises(UserError, match=f"cannot read .*{lost.name}"):
        hugging_face.from_hugging_face(options, lambda line: lost.unlink(missing_ok=True))
    lost = tmp_path / "ours" / "weights" / "embedding.embed_VD.safetensors"
    options = hugging_face.ToHuggingFace(
        directory=str(tmp_path / "ours"), out=str(tmp_path / "new" / "out")
    )
    with pytest.raises(UserError, match="cannot read .*embed_VD"):
        hugging_face.to_hugging_face(options, lambda line: lost.unlink(missing_ok=True))
    assert not list((tmp_path / "new").iterdir())


def test_a_directory_that_is_taken(tmp_path, switch):
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "notes").write_text("mine")
    with pytest.raises(UserError, match="taken exists and is no empty directory"):
        take_over(switch, taken)
    random_weights(SWITCH, tmp_path / "ours")
    with pytest.raises(UserError, match="taken exists and is no empty directory"):
        give(tmp_path / "ours", taken)
    assert [path.name for path in taken.iterdir()] == ["notes"]


UNKNOWN_THERE = {
    "decoder": (dict(architecture="decoder_only"), {}, "architecture decoder_only: theirs are enc"),
    "top 2": (dict(top_k=2), {}, "model.top_k 2: their tokens go to one expert"),
    "choice": (dict(encoder_router="expert_choice"), {}, "expert_choice: their tokens choose"),
    "every third": (dict(num_layers=3, moe_every=3), {}, "model.moe_every 3: theirs is 1 or 2"),
    "groups": (dict(group_size=64), {}, "model.group_size 64: their slots are those of one row"),
    "bias": ({}, {ROUTER_BIAS: (2, 12)}, "their routers have no bias on the choice"),
}


@pytest.mark.parametrize(("model", "more", "answer"), UNKNOWN_THERE.values(), ids=UNKNOWN_THERE)
def test_a_model_that_there_is_not_there(tmp_path, model, more, answer):
    config = RunConfig(model=replace(SWITCH, **model), mesh="single")
    shapes = {
        name: jax.ShapeDtypeStruct(shape, np.float32)
        for name, shape in ({"embedding.embed_VD": (24, 12)} | more).items()
    }
    write_weights(
        tmp_path / "ours", config, shapes, lambda name: iter(np.zeros(shapes[name].shape, "f"))
    )
    with pytest.raises(UserError, match=f"Hugging Face has no such model: .*{answer}"):
        give(tmp_path / "ours", tmp_path / "theirs")
    assert not (tmp_path / "theirs").exists()
