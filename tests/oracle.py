"""The Switch layer as a float64 loop over tokens, with gradients written out by hand.

It shares no code and no algorithm with the package: a queue is a counter that a loop raises, an
expert is called for one token at a time, and no index is ever computed. Slow, and meant to be
read. `tests/moe/test_oracle.py` checks its gradients by finite differences.
"""

import itertools
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
    shared: bool  # gates are shares of the chosen probabilities; else those themselves
    margin: float  # how far it is from other choices


def switch(
    x: np.ndarray,
    real: np.ndarray,
    weights: Weights,
    *,
    group_size: int,
    capacity: int,
    top_k: int,
    cotangents: Cotangents,
    bias: np.ndarray | None = None,
    second: np.ndarray | None = None,
) -> Result:
    """The layer without jitter and dropout, forward and backward.

    Args:
        bias: [E], added to probabilities for the choice alone.
        second: [B, L], numbers in [0, 1): a second choice is sent where they are below twice its
            gate.
    """
    num_experts = weights.router.shape[1]
    tokens = _tokens(x, real, weights)
    for token in tokens.values():
        _ask(token, top_k, np.zeros(num_experts) if bias is None else bias)
    load, dropped = [0] * num_experts, 0
    for start in range(0, real.size, group_size):
        queue = [0] * num_experts
        for choice in range(top_k):
            for number in range(start, start + group_size):
                if number not in tokens:
                    continue
                token = tokens[number]
                if choice == 1 and second is not None:
                    above = 2 * token.gates[1] - float(second.reshape(-1)[number])
                    token.margin = min(token.margin, abs(above))
                    if above <= 0:
                        token.kept.append(False)
                        continue
                expert = token.experts[choice]
                token.kept.append(queue[expert] < capacity)
                dropped += queue[expert] >= capacity
                queue[expert] += 1
                load[expert] += 1
    return _layer(x, tokens, load, dropped, weights, cotangents)


def expert_choice(
    x: np.ndarray,
    real: np.ndarray,
    weights: Weights,
    *,
    group_size: int,
    capacity: int,
    cotangents: Cotangents,
) -> Result:
    """The same layer where each expert takes its likeliest tokens of every group."""
    num_experts = weights.router.shape[1]
    tokens = _tokens(x, real, weights)
    load = [0] * num_experts
    for start in range(0, real.size, group_size):
        group = [tokens[n] for n in range(start, start + group_size) if n in tokens]
        for expert in range(num_experts):
            ranked = sorted(group, key=lambda t: (-t.probs[expert], t.number))
            for token in ranked[:capacity]:
                token.experts.append(expert)
                token.gates.append(token.probs[expert])
                token.kept.append(True)
                load[expert] += 1
            if len(ranked) > capacity:
                last, next_one = ranked[capacity - 1], ranked[capacity]
                gap = last.probs[expert] - next_one.probs[expert]
                last.margin = min(last.margin, gap)
    dropped = sum(not token.experts for token in tokens.values())
    return _layer(x, tokens, load, dropped, weights, cotangents)


def _tokens(x: np.ndarray, real: np.ndarray, weights: Weights) -> dict[int, Token]:
    """The real tokens by their numbers, without experts yet."""
    xs, router = x.reshape(-1, x.shape[-1]).astype(np.float64), weights.router.astype(np.float64)
    tokens = {}
    for number in range(len(xs)):
        if real.reshape(-1)[number]:
            logits = xs[number] @ router
            lse = math.log(sum(math.exp(logit - logits.max()) for logit in logits)) + logits.max()
            probs = np.array([math.exp(logit - lse) for logit in logits])
            tokens[number] = Token(number, xs[number], probs, lse, [], [], [], False, math.inf)
    return tokens


def _layer(
    x: np.ndarray,
    tokens: dict[int, Token],
    load: list[int],
    dropped: int,
    weights: Weights,
    cotangents: Cotangents,
) -> Result:
    """What the layer returns once every token has its experts, and all gradients."""
    num_experts = weights.router.shape[1]
    dys = cotangents.y.reshape(-1, x.shape[-1])
    weights = Weights(
        *(
            None if w is None else w.astype(np.float64)
            for w in (weights.router, weights.w_in, weights.w_gate, weights.w_out)
        )
    )
    count = max(len(tokens), 1)
    share = [n / max(sum(load), 1) for n in load]
    mean_prob = [sum(t.probs[e] for t in tokens.values()) / count for e in range(num_experts)]
    aux = num_experts * sum(f * p for f, p in zip(share, mean_prob, strict=True))
    z = sum(t.lse**2 for t in tokens.values()) / count

    y, dx = np.zeros(dys.shape), np.zeros(dys.shape)
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
        dropped=dropped,
        margin=min((t.margin for t in tokens.values()), default=math.inf),
        objective=float(
            (y * dys).sum() + cotangents.aux_coefficient * aux + cotangents.z_coefficient * z
        ),
        dx=dx.reshape(x.shape),
        dweights=grads,
    )


def _ask(token: Token, top_k: int, bias: np.ndarray) -> None:
    """Gives a token its experts, best first; of equals the lower number."""
    biased, probs = token.probs + bias, token.probs
    ranked = sorted(range(len(probs)), key=lambda e: (-biased[e], e))
    token.experts, token.shared = ranked[:top_k], top_k > 1
    total = sum(probs[e] for e in token.experts) if token.shared else 1.0
    token.gates = [probs[e] / total for e in token.experts]
    # Below float32's errors, no test can be exact.
    gaps = [biased[one] - biased[next_one] for one, next_one in itertools.pairwise(ranked)]
    token.margin = min(gaps[:top_k], default=math.inf)


def _gate_backward(token: Token, dgates: list[float], dprobs: np.ndarray) -> None:
    """Adds the gates' part to the gradient of the probabilities."""
    if not token.shared:
        for expert, dgate in zip(token.experts, dgates, strict=True):
            dprobs[expert] += dgate
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
