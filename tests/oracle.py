"""The Switch layer as a float64 loop over tokens, with gradients written out by hand.

It shares no code and no algorithm with the package: a queue is a counter that a loop raises, an
expert is called for one token at a time, and no index is ever computed. Slow, and meant to be
read. `tests/moe/test_oracle.py` checks its gradients by finite differences.
"""

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Weights:
    """Of the layer, or the gradients of them."""

    router: np.ndarray  # [D, E]
    w_in: np.ndarray  # [E, D, F]
    w_gate: np.ndarray | None  # [E, D, F], geglu; None is relu
    w_out: np.ndarray  # [E, F, D]


@dataclass(frozen=True)
class Cotangents:
    """The objective is Σ y·dy + aux_coefficient · aux + z_coefficient · z."""

    y: np.ndarray
    aux_coefficient: float
    z_coefficient: float


@dataclass(frozen=True)
class Result:
    """What the layer returns, and the gradients of the objective."""

    y: np.ndarray  # [B, L, D]
    aux: float
    z: float
    load: list[int]  # choices of each expert before drops
    dropped: int
    margin: float  # smallest gap between a probability that was chosen and the next one
    objective: float
    dx: np.ndarray
    dweights: Weights


@dataclass
class Token:
    """A real token on its way through the layer."""

    number: int
    x: np.ndarray
    probs: np.ndarray
    lse: float
    experts: list[int]
    gates: list[float]
    kept: list[bool]


def switch(
    x: np.ndarray,
    real: np.ndarray,
    weights: Weights,
    *,
    group_size: int,
    capacity: int,
    top_k: int,
    cotangents: Cotangents,
) -> Result:
    """The layer without jitter and dropout, forward and backward."""
    num_experts = weights.router.shape[1]
    xs = x.reshape(-1, x.shape[-1]).astype(np.float64)
    dys = cotangents.y.reshape(xs.shape)
    weights = Weights(
        *(
            None if w is None else w.astype(np.float64)
            for w in (weights.router, weights.w_in, weights.w_gate, weights.w_out)
        )
    )
    tokens = {
        number: _ask(number, xs[number], weights.router, top_k)
        for number in range(len(xs))
        if real.reshape(-1)[number]
    }
    load = [0] * num_experts
    for start in range(0, len(xs), group_size):
        queue = [0] * num_experts
        for choice in range(top_k):
            for number in range(start, start + group_size):
                if number in tokens:
                    expert = tokens[number].experts[choice]
                    tokens[number].kept.append(queue[expert] < capacity)
                    queue[expert] += 1
                    load[expert] += 1

    count = max(len(tokens), 1)
    share = [n / max(sum(load), 1) for n in load]
    mean_prob = [sum(t.probs[e] for t in tokens.values()) / count for e in range(num_experts)]
    aux = num_experts * sum(f * p for f, p in zip(share, mean_prob, strict=True))
    z = sum(t.lse**2 for t in tokens.values()) / count

    y, dx = np.zeros_like(xs), np.zeros_like(xs)
    grads = Weights(
        np.zeros_like(weights.router),
        np.zeros_like(weights.w_in),
        None if weights.w_gate is None else np.zeros_like(weights.w_gate),
        np.zeros_like(weights.w_out),
    )
    for token in tokens.values():
        dy = dys[token.number]
        dgates = []
        for expert, gate, kept in zip(token.experts, token.gates, token.kept, strict=True):
            if not kept:
                dgates.append(0.0)
                continue
            out, dx_expert = _expert(token.x, expert, weights, gate * dy, grads)
            y[token.number] += gate * out
            dx[token.number] += dx_expert
            dgates.append(float(out @ dy))
        dprobs = np.array([cotangents.aux_coefficient * num_experts * f / count for f in share])
        _gate_backward(token, dgates, dprobs)
        dlogits = token.probs * (dprobs - token.probs @ dprobs)
        dlogits += cotangents.z_coefficient * 2 * token.lse * token.probs / count
        grads.router[...] += np.outer(token.x, dlogits)
        dx[token.number] += weights.router @ dlogits

    return Result(
        y=y.reshape(x.shape),
        aux=aux,
        z=z,
        load=load,
        dropped=sum(not kept for t in tokens.values() for kept in t.kept),
        margin=min((_margin(t) for t in tokens.values()), default=math.inf),
        objective=float(
            (y * dys).sum() + cotangents.aux_coefficient * aux + cotangents.z_coefficient * z
        ),
        dx=dx.reshape(x.shape),
        dweights=grads,
    )


def _ask(number: int, x: np.ndarray, router: np.ndarray, top_k: int) -> Token:
    """A token with its experts, best first; of equals the lower number."""
    logits = x @ router
    lse = math.log(sum(math.exp(logit - logits.max()) for logit in logits)) + logits.max()
    probs = np.array([math.exp(logit - lse) for logit in logits])
    experts = sorted(range(len(probs)), key=lambda e: (-probs[e], e))[:top_k]
    total = sum(probs[e] for e in experts) if top_k > 1 else 1.0
    return Token(number, x, probs, lse, experts, [probs[e] / total for e in experts], [])


def _margin(token: Token) -> float:
    """How far the token is from other choices: below float32's errors, no test can be exact."""
    descending = sorted(token.probs, reverse=True)
    gaps = [descending[i] - descending[i + 1] for i in range(len(descending) - 1)]
    return min(gaps[: len(token.experts)], default=math.inf)


def _gate_backward(token: Token, dgates: list[float], dprobs: np.ndarray) -> None:
    """Adds the gates' part to the gradient of the probabilities."""
    if len(token.experts) == 1:
        dprobs[token.experts[0]] += dgates[0]
        return
    total = sum(token.probs[e] for e in token.experts)
    shared = sum(d * token.probs[e] for e, d in zip(token.experts, dgates, strict=True)) / total**2
    for expert, dgate in zip(token.experts, dgates, strict=True):
        dprobs[expert] += dgate / total - shared


def _expert(
    x: np.ndarray, expert: int, weights: Weights, dout: np.ndarray, grads: Weights
) -> tuple[np.ndarray, np.ndarray]:
    """One expert's output for one token and the gradient of x; adds the weights' gradients."""
    w_in, w_out = weights.w_in[expert], weights.w_out[expert]
    pre = x @ w_in
    if weights.w_gate is None:
        hidden = np.where(pre > 0, pre, 0)
        dpre = np.where(pre > 0, w_out @ dout, 0)
        dx = w_in @ dpre
    else:
        w_gate = weights.w_gate[expert]
        gate = x @ w_gate
        value, slope = _gelu(gate)
        hidden = pre * value
        dhidden = w_out @ dout
        dpre, dgate = dhidden * value, dhidden * pre * slope
        grads.w_gate[expert] += np.outer(x, dgate)
        dx = w_in @ dpre + w_gate @ dgate
    grads.w_in[expert] += np.outer(x, dpre)
    grads.w_out[expert] += np.outer(hidden, dout)
    return hidden @ w_out, dx


def _gelu(a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """GELU in its tanh form, and its derivative."""
    scale = math.sqrt(2 / math.pi)
    tanh = np.tanh(scale * (a + 0.044715 * a**3))
    slope = 0.5 * (1 + tanh) + 0.5 * a * (1 - tanh**2) * scale * (1 + 3 * 0.044715 * a**2)
    return 0.5 * a * (1 + tanh), slope
