"""Attention, heads and nets in float64 loops that share nothing with the library: what chapter H is held to."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.config import Config

ROUND = 2.0**-24  # the largest relative error of rounding to float32

# For programs that run once: what XLA would make faster costs more than it saves.
_OPTIONS: dict[str, Any] = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):  # later versions have no such choice
    _OPTIONS["xla_cpu_use_fusion_emitters"] = False
jit = functools.partial(jax.jit, compiler_options=_OPTIONS)


def normal(seed: int, *shape: int) -> np.ndarray:
    """float32 draws of N(0, 1)."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def gap(a: Any, b: Any) -> float:
    """max |a − b| of two arrays of one shape, in float64."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if a.shape != b.shape:
        raise ValueError(f"shapes {a.shape} and {b.shape}")
    return float(np.max(np.abs(a - b)))


def rounding(x: np.ndarray, w: np.ndarray) -> float:
    """What float32 can err in x [T, D] w [D, …] at most: D roundings of sums of |x||w|."""
    return ROUND * x.shape[-1] * float(np.max(np.abs(x) @ np.abs(w.reshape(x.shape[-1], -1))))


def by_loop(q: np.ndarray, k: np.ndarray, v: np.ndarray, exponent: float = 0.5) -> tuple[np.ndarray, np.ndarray]:
    """One head: q [T, H], k [S, H], v [S, W] -> (out [T, W], weights [T, S]), a query and a key at a time."""
    weights, out = np.zeros((len(q), len(k))), np.zeros((len(q), v.shape[1]))
    for i in range(len(q)):
        scores = [sum(float(a) * float(b) for a, b in zip(q[i], key, strict=True)) for key in k]
        powers = [math.exp(score / q.shape[1] ** exponent) for score in scores]
        for j, power in enumerate(powers):
            weights[i, j] = power / sum(powers)
            out[i] += weights[i, j] * v[j]
    return out, weights


def heads_by_loop(weights: Any, x: np.ndarray) -> np.ndarray:
    """Multi-head self-attention of x [T, D], a head at a time, joined side by side, times W^O: [T, D]."""
    wq, wk, wv, wo = (
        np.asarray(w, np.float64) for w in (weights.wq_DNH, weights.wk_DKH, weights.wv_DKH, weights.wo_NHD)
    )
    heads = [by_loop(x @ wq[:, n], x @ wk[:, n], x @ wv[:, n])[0] for n in range(wq.shape[1])]
    return np.concatenate(heads, axis=1) @ wo.reshape(-1, wo.shape[2])


def net_by_numpy(kind: str, net: Any, x: np.ndarray) -> np.ndarray:
    """A feed-forward net of x [T, D]: relu, gelu (exact, by math.erf) or swiglu."""
    w1, b1, w2, b2 = (np.asarray(part, np.float64) for part in (net.w1_DF, net.b1_F, net.w2_FD, net.b2_D))
    hidden = x @ w1 + b1
    if kind == "relu":
        hidden = np.maximum(0.0, hidden)
    elif kind == "gelu":
        hidden = hidden * np.vectorize(lambda y: 0.5 * (1 + math.erf(y / math.sqrt(2))))(hidden)
    else:
        gate = x @ np.asarray(net.wg_DF, np.float64) + np.asarray(net.bg_F)
        hidden = gate / (1 + np.exp(-gate)) * hidden
    return hidden @ w2 + b2


def drawn(init: Callable[..., Any], config: Config, scale: float, seed: int = 0) -> Any:
    """Parameters as `init(key, config)` shapes them, all of them N(0, scale²): no bias is 0 and no scale 1."""
    rng = np.random.default_rng(seed)
    made = jax.eval_shape(lambda key: init(key, config), jax.random.key(0))
    return jax.tree.map(lambda leaf: jnp.asarray(scale * rng.standard_normal(leaf.shape), jnp.float32), made)


def count(init: Callable[..., Any], config: Config) -> int:
    """Numbers in the parameters that `init(key, config)` makes."""
    return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(lambda key: init(key, config), jax.random.key(0))))


def layer_norm(norm: Any, x: np.ndarray) -> np.ndarray:
    """Of each row of x [T, D], ε = 10⁻⁵ inside the root."""
    centred = x - x.mean(axis=1, keepdims=True)
    spread = np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-5)
    return centred / spread * np.asarray(norm.scale_D, np.float64) + np.asarray(norm.bias_D, np.float64)
