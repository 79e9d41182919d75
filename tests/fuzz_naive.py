"""Attention as the textbook has it, over all pairs: for numpy in float64, and for jax.numpy in the place of attend.

Masks and biases are made anew from their numbers. Nothing here calls the library's, but for the
bits of dropout, which are its own choice.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax import keys, masks, relative


def naive(
    xp: Any,
    q: Any,
    k: Any,
    v: Any,
    allowed: Any,
    scoring: Any,
    bias: Any = None,
    drop: Any = None,
    phi: bool = False,
) -> Any:
    """[B, T, N, H] over all pairs, xp numpy or jax.numpy; phi: linear attention's weights instead of scores."""
    H, group = q.shape[-1], q.shape[2] // k.shape[2]
    k, v = xp.repeat(k, group, axis=2), xp.repeat(v, group, axis=2)
    q = q * (float(H) ** -scoring.dk_exponent / scoring.temperature)
    sink = 0.0
    if phi:
        q, k = (xp.where(x > 0, x + 1, xp.exp(xp.minimum(x, 0))) for x in (q, k))
        w = xp.where(allowed, xp.einsum("btnh,bsnh->bnts", q, k), 0)
    else:
        s = xp.einsum("btnh,bsnh->bnts", q, k)
        if scoring.softcap is not None:
            cap = xp.where(scoring.softcap > 0, scoring.softcap, 1)
            s = xp.where(scoring.softcap > 0, cap * xp.tanh(s / cap), s)
        s = s if bias is None else s + bias
        if scoring.normaliser == "softmax":
            top = xp.max(xp.where(allowed, s, -1e30), axis=-1, keepdims=True)
            top = xp.where(top > -1e29, top, 0)
            top = top if xp is np else jax.lax.stop_gradient(top)
            w = xp.where(allowed, xp.exp(xp.where(allowed, s - top, 0)), 0)
            sink = 0.0 if scoring.sink_N is None else xp.exp(scoring.sink_N[None, :, None, None] - top)
        elif scoring.normaliser == "sigmoid":
            n = xp.maximum(xp.sum(allowed, axis=-1, keepdims=True), 1)
            w, sink = xp.where(allowed, (1 + xp.tanh((s - xp.log(n)) / 2)) / 2, 0), None
        elif scoring.normaliser == "relu":
            w = xp.where(allowed & (s > 0), s, 0)
        else:
            w, sink = _entmax(xp, s / 2, allowed), None
    if sink is not None:
        total = xp.sum(w, axis=-1, keepdims=True) + sink
        w = w / xp.where(total > 0, total, 1)
    return xp.einsum("bnts,bsnh->btnh", w if drop is None else drop(w), v)


def _entmax(xp: Any, z: Any, allowed: Any) -> Any:
    """(z - tau)^2 above tau. A key is in where its own and all larger ones leave tau below it: no sorting."""
    larger = allowed[..., None, :] & (z[..., None, :] >= z[..., :, None])
    above = xp.where(larger, z[..., None, :] - z[..., :, None], 0)
    inside = allowed & (xp.sum(above**2, axis=-1) < 1)  # tau = z_j would give those above too little
    n = xp.maximum(xp.sum(inside, axis=-1, keepdims=True), 1)
    mean = xp.sum(xp.where(inside, z, 0), axis=-1, keepdims=True) / n
    spread = xp.sum(xp.where(inside, z - mean, 0) ** 2, axis=-1, keepdims=True)
    left = (1 - spread) / n
    tau = mean - xp.sqrt(xp.where(left > 0, left, 1))
    return xp.where(inside, z - tau, 0) ** 2


def allowed_by(xp: Any, mask: masks.Mask, T: int, S: int) -> Any:
    """[B or 1, 1, T, S] from the mask's numbers alone."""
    i, j = _places(xp, mask, T, S)
    made = xp.ones((1, 1, T, S), bool) & (i == i) & (j == j)
    for part in mask.parts:
        if isinstance(part, masks.Causal):
            rule = i >= j
        elif isinstance(part, masks.Inverted):
            rule = i <= j
        elif isinstance(part, masks.Window):
            rule = (i - j < part.width) & (j - i < part.width)
        elif isinstance(part, masks.PrefixLM):
            rule = (i >= j) | (j <= xp.asarray(part.length).reshape(-1, 1, 1, 1) - 1)
        elif isinstance(part, masks.Padding):
            rule = xp.arange(S)[None, None, None] < xp.asarray(part.lengths_B)[:, None, None, None]
        elif isinstance(part, masks.Segments):
            rule = (xp.asarray(part.q_ids_BT)[:, :, None] == xp.asarray(part.k_ids_BS)[:, None, :])[:, None]
        elif isinstance(part, masks.Dense):
            rule = xp.asarray(part.allowed)
        else:
            near = i // part.size - j // part.size
            rule = (near == 0) | (near == 1) | ((j >= 0) & (j < part.size))
        made = made & rule
    return made


def bias_by(xp: Any, bias: relative.Bias | None, N: int, T: int, S: int) -> Any:
    """[B or 1, N, T, S] from the bias's own numbers alone, None for none."""
    if bias is None:
        return None
    places = _places(xp, bias, T, S)
    return sum(_bias_of(xp, part, places, N) for part in bias.parts)


def _bias_of(xp: Any, part: Any, places: tuple[Any, Any], N: int) -> Any:
    i, j = places
    if isinstance(part, relative.DenseBias):
        return xp.asarray(part.values)
    if isinstance(part, relative.ALiBi):
        P = 2 ** int(math.log2(N))
        slopes = [2 ** (-8 * (n + 1) / P) for n in range(P)] + [2 ** (-4 * (2 * n + 1) / P) for n in range(N - P)]
        return -xp.abs(i - j) * xp.asarray(slopes)[None, :, None, None]
    table = xp.asarray(part.table_CN)
    n = len(table) // 2 if part.bidirectional else len(table)
    exact = n // 2

    def bucket(r: int) -> int:
        wide = exact + int((n - exact) * math.log(max(r, 1) / exact) / math.log(part.distance / exact) + 1e-9)
        return r if r < exact else min(n - 1, wide)

    of = xp.asarray([bucket(r) for r in range(16)])
    back, ahead = of[xp.maximum(i - j, 0)], of[xp.maximum(j - i, 0)]
    which = xp.where(j > i, n + ahead if part.bidirectional else 0, back)[:, 0]
    return xp.moveaxis(table[which], -1, 1)


def _places(xp: Any, of: Any, T: int, S: int) -> tuple[Any, Any]:
    q, k = of.q_positions_BT, of.k_positions_BS
    q, k = xp.arange(T)[None] if q is None else xp.asarray(q), xp.arange(S)[None] if k is None else xp.asarray(k)
    return q[:, None, :, None], k[:, None, None, :]


def naive_attend(
    q: Any, k: Any, v: Any, mask: Any, *, scoring: Any, implementation: str, bias: Any = None,
    dropout_rate: Any = None, key: Any = None, **_: Any,
) -> jax.Array:  # fmt: skip
    """In the place of `attend`; dropout by the rule that bits belong to a (row, head, query, key)."""
    (B, T, N, _), S, kept = q.shape, k.shape[1], q.dtype

    def drop(w: jax.Array) -> jax.Array:
        line = jnp.arange(B * N * T, dtype=jnp.uint32).reshape(B, N, T, 1)
        return keys.dropout_at(
            w, dropout_rate, key, "attention", line, jnp.arange(S, dtype=jnp.uint32)[None, None, None]
        )

    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    allowed, added = allowed_by(jnp, mask, T, S), bias_by(jnp, bias, N, T, S)
    dropped = None if dropout_rate is None or key is None else drop
    return naive(jnp, q, k, v, allowed, scoring, added, dropped, implementation == "linear").astype(kept)
