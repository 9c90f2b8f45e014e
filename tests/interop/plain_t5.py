"""T5 and Switch Transformers as plain float64 numpy over tensors with Hugging Face's names.

Shares no code with the package. `test_huggingface.py` holds it to another implementation's numbers.
"""

import math

import numpy as np


def logits(tensors, config, source, source_mask, target, *, capacity=None):
    """Logits [B, L, V].

    Args:
        tensors: by name.
        config: of Hugging Face.
        source: ids of the encoder [B, S]; `source_mask` is 1 where they are real.
        target: ids that the decoder reads [B, L], all of them real.
        capacity: tokens that an expert takes of a row, padding included; None = all.
    """
    run = _Run(tensors, config, capacity)
    shared = run.weight("shared")
    length, sources = target.shape[1], source.shape[1]
    real = np.broadcast_to(source_mask[:, None, :] > 0, (len(source), sources, sources))
    encoded = run.stack("encoder", shared[source], real)
    past = np.tril(np.ones((length, length), bool))[None].repeat(len(target), axis=0)
    across = np.broadcast_to(source_mask[:, None, :] > 0, (len(source), length, sources))
    decoded = run.stack("decoder", shared[target], past, encoded, across)
    if config.get("tie_word_embeddings", True):
        return decoded @ shared.T / math.sqrt(config["d_model"])
    return decoded @ run.weight("lm_head").T


class _Run:
    def __init__(self, tensors, config, capacity):
        self.tensors, self.config, self.capacity = tensors, config, capacity

    def weight(self, name):
        return np.asarray(self.tensors[f"{name}.weight"], np.float64)

    def stack(self, stack, x, visible, context=None, context_visible=None):
        self.bias = self.relative_bias(stack, x.shape[1])
        for i in range(self.config["num_layers"]):
            block = f"{stack}.block.{i}.layer"
            x = x + self.attention(f"{block}.0", "SelfAttention", x, None, visible, self.bias)
            if context is not None:
                name = f"{block}.1"
                x = x + self.attention(name, "EncDecAttention", x, context, context_visible, 0)
            x = x + self.feed_forward(f"{block}.{1 if context is None else 2}", x)
        return self.norm(f"{stack}.final_layer_norm", x)

    def norm(self, name, x):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * self.weight(name)

    def attention(self, layer, kind, x, context, visible, bias):
        x = self.norm(f"{layer}.layer_norm", x)
        context = x if context is None else context
        heads = self.config["num_heads"]

        def project(name, values):
            values = values @ self.weight(f"{layer}.{kind}.{name}").T
            return values.reshape(*values.shape[:2], heads, -1).swapaxes(1, 2)

        scores = project("q", x) @ project("k", context).swapaxes(-1, -2) + bias
        scores = np.where(visible[:, None], scores, -1e30)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = (weights @ project("v", context)).swapaxes(1, 2)
        return mixed.reshape(*x.shape[:2], -1) @ self.weight(f"{layer}.{kind}.o").T

    def feed_forward(self, layer, x):
        x = self.norm(f"{layer}.layer_norm", x)
        if f"{layer}.mlp.router.classifier.weight" in self.tensors:
            return np.stack([self.switch(f"{layer}.mlp", row) for row in x])
        dense = "mlp" if self.config["model_type"] == "switch_transformers" else "DenseReluDense"
        return self.mlp(f"{layer}.{dense}", x)

    def mlp(self, name, x):
        if f"{name}.wi.weight" in self.tensors:
            hidden = np.maximum(x @ self.weight(f"{name}.wi").T, 0)
        else:
            gate = x @ self.weight(f"{name}.wi_0").T
            cubic = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
            hidden = 0.5 * gate * (1 + np.tanh(cubic)) * (x @ self.weight(f"{name}.wi_1").T)
        return hidden @ self.weight(f"{name}.wo").T

    def switch(self, name, row):
        scores = row @ self.weight(f"{name}.router.classifier").T
        odds = np.exp(scores - scores.max(-1, keepdims=True))
        gates = odds / odds.sum(-1, keepdims=True)
        taken, out = {}, np.zeros_like(row)
        for token, gate in enumerate(gates):
            expert = int(gate.argmax())
            taken[expert] = taken.get(expert, 0) + 1
            if self.capacity is None or taken[expert] <= self.capacity:
                output = self.mlp(f"{name}.experts.expert_{expert}", row[token])
                out[token] = gate[expert] * output
        return out

    def relative_bias(self, stack, length):
        table = self.weight(f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias")
        bucket = [[_bucket(k - q, stack) for k in range(length)] for q in range(length)]
        return table[np.array(bucket)].transpose(2, 0, 1)[None]


def _bucket(offset, stack):
    start, buckets = 0, 32
    if stack == "encoder":
        buckets = 16
        start = 16 if offset > 0 else 0
        offset = -abs(offset)
    distance, exact = max(-offset, 0), buckets // 2
    if distance < exact:
        return start + distance
    share = np.log(np.float32(distance) / np.float32(exact)) / np.float32(math.log(128 / exact))
    return start + min(exact + int(share * np.float32(buckets - exact)), buckets - 1)
