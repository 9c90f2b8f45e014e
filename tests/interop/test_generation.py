"""Generation with a cache, against that of transformers, with its rules kept."""

from pathlib import Path

import builders
import hugging_face
import jax
import jax.numpy as jnp
import numpy as np
from hugging_face import loaded

from switchjax.batch import Prompts
from switchjax.decode import start
from switchjax.layout import Layout
from switchjax.sampling import Vocabulary

THEIRS = Path(__file__).parent.parent / "data" / "hf_golden"
INPUTS = np.load(THEIRS / "golden.npz")
GOLDEN = np.load(THEIRS / "generation.npz")
PAD, EOS = 0, 1


def cached_logits(model, prompts, tokens_BM):
    """Before each token of a continuation [B, M, V]."""
    vocabulary = Vocabulary(size=97, pad_id=PAD, eos_id=EOS)
    logits_BV, cache, read = start(model, None, prompts, tokens_BM.shape[1], vocabulary)
    logits = [logits_BV]
    for place in range(tokens_BM.shape[1] - 1):
        token_B1 = tokens_BM[:, place : place + 1]
        logits_BV, cache = read(token_B1, jnp.ones_like(token_B1), cache)
        logits.append(logits_BV)
    return jnp.stack(logits, axis=1)


def test_cached_decoding_is_that_of_transformers(tmp_path):  # cases 48 and 67
    """Their encoder drops tokens; their cached decoder reads one token at a time and cannot."""
    hugging_face.take_over(THEIRS, tmp_path / "exact", hf_semantics=True)
    source, mask = (INPUTS[name].astype(np.int32) for name in ("input_ids", "attention_mask"))
    said = GOLDEN["sequences"]
    start_B1 = np.full((len(source), 1), PAD, np.int32)
    prompts = Prompts(np.arange(2, dtype=np.int32), start_B1, np.ones_like(start_B1), source, mask)
    with jax.set_mesh(builders.mesh("single")):
        placed, model = Layout().place(prompts), loaded(tmp_path / "exact")
        tokens_BM = jax.device_put(said[:, 1:], placed.tokens_BL.sharding)
        found_BMV = np.asarray(jax.jit(cached_logits)(model, placed, tokens_BM))
    assert (found_BMV[..., PAD] == -np.inf).all()
    # Logits up to 6, of many sums in another order.
    theirs_BMV = GOLDEN["logits"]
    np.testing.assert_allclose(found_BMV[..., 1:], theirs_BMV[..., 1:], rtol=0, atol=1e-4)
    likeliest_BM = np.delete(found_BMV, EOS, axis=-1).argmax(axis=-1) + 1  # none ended there
    np.testing.assert_array_equal(likeliest_BM, said[:, 1:])
