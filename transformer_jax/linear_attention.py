"""Linear attention: another function than softmax attention, in time and memory linear in T.

    out_i = phi(q_i) . sum_j phi(k_j) v_j / phi(q_i) . sum_j phi(k_j),   phi(x) = elu(x) + 1

Katharopoulos et al. 2020. It approximates nothing: the weights are phi(q).phi(k) over their
sum. Queries are multiplied by H**(-dk_exponent) / temperature before phi, so that both
numbers act here too; the paper's function is dk_exponent 0, temperature 1.
"""

import jax
import jax.numpy as jnp
from einops import rearrange

from transformer_jax.errors import ConfigError
from transformer_jax.masks import Causal, Mask
from transformer_jax.scores import Scoring, check_heads, score_factor

CHUNK = 64


def features(x: jax.Array) -> jax.Array:
    """elu(x) + 1, above 0, float32."""
    x = x.astype(jnp.float32)
    # Not elu + 1, which rounds exp(x) to the last place of 1: at -16 nothing would be left of it.
    return jnp.where(x > 0, x + 1, jnp.exp(jnp.where(x > 0, 0, x)))


def linear_attention(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask: Mask, scoring: Scoring, *, block: int = 0
) -> jax.Array:
    """[B, T, N, H]; causal (a scan over chunks of `block` positions, 0: 64) or over all keys.

    Keys that padding hides count for nothing; a row that sees no key is 0. Raises ConfigError for
    heads that do not fit, and for unequal lengths where it is causal.
    """
    check_heads(q_BTNH, k_BSKH)
    T, (S, K, H) = q_BTNH.shape[1], k_BSKH.shape[1:]
    mask.check(T, S)
    causal = any(isinstance(part, Causal) for part in mask.parts)
    if causal and T != S:
        raise ConfigError(f"causal linear attention of {T} queries over {S} keys: the lengths must be equal")
    rest = Mask(tuple(part for part in mask.parts if not isinstance(part, Causal)))
    shown = rest.block(jnp.zeros(1, jnp.int32), jnp.arange(S))[:, 0, 0, :, None, None]  # [B or 1, S, 1, 1]
    factor = score_factor(H, scoring.dk_exponent, scoring.temperature)
    q = features(rearrange(q_BTNH, "b t (k g) h -> b t k g h", k=K).astype(jnp.float32) * factor)
    k = jnp.where(shown, features(jnp.where(shown, k_BSKH, 0)), 0)
    v = jnp.where(shown, v_BSKH, 0).astype(jnp.float32)
    # A column of ones beside the values carries the sum of weights through the same products.
    v = jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1)
    if causal:
        sums = _causal(q, k, v, block or CHUNK)
    else:
        sums = jnp.einsum("btkgh,bkhw->btkgw", q, jnp.einsum("bskh,bskw->bkhw", k, v))
    out, total = sums[..., :-1], sums[..., -1:]
    out = out / jnp.where(total > 0, total, 1)
    return rearrange(out, "b t k g h -> b t (k g) h").astype(q_BTNH.dtype)


def _causal(q: jax.Array, k: jax.Array, v: jax.Array, size: int) -> jax.Array:
    """sum_{j <= i} (q_i.k_j) v_j, [B, T, K, G, W]: inside a chunk by products, before it by the carried sum."""
    T = q.shape[1]
    size = min(size, T)

    def chunks(x: jax.Array) -> jax.Array:
        padding = [(0, 0)] * x.ndim
        padding[1] = (0, -T % size)
        return rearrange(jnp.pad(x, padding), "b (chunks t) ... -> chunks b t ...", t=size)

    earlier = jnp.tril(jnp.ones((size, size), jnp.float32))[None, None, None]

    def step(carried: jax.Array, xs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v = xs
        inside = jnp.einsum("btkgh,bskh->bkgts", q, k) * earlier
        out = jnp.einsum("bkgts,bskw->btkgw", inside, v) + jnp.einsum("btkgh,bkhw->btkgw", q, carried)
        return carried + jnp.einsum("bskh,bskw->bkhw", k, v), out

    first = jnp.zeros((k.shape[0], *k.shape[2:], v.shape[-1]), jnp.float32)
    _, out = jax.lax.scan(jax.checkpoint(step), first, (chunks(q), chunks(k), chunks(v)))
    return rearrange(out, "chunks b t ... -> b (chunks t) ...")[:, :T]
