"""Dense attention of a block of queries over a block of keys: the definition that the others are held to."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from einops import rearrange

from transformer_jax.numerics import product
from transformer_jax.scores import Scoring, attention_scores, weights_of


def dense_block(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    allowed: jax.Array | None,
    scoring: Scoring,
    *,
    bias: jax.Array | None = None,
    drop: Callable[[jax.Array], jax.Array] | None = None,
    hides_keys: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """([B, T, N, H], weights [B, N, T, S] before dropout).

    allowed: booleans [B or 1, N or 1, T, S], None for all. drop: dropout of the weights.
    hides_keys: a key that no query may see is set to 0 with its value, so that NaN in padding
    stays there.
    """
    if allowed is not None and hides_keys:
        # Per batch row: a key is kept if any head's query may see it.
        seen = jnp.any(allowed, axis=(1, 2))[:, :, None, None]
        k_BSKH, v_BSKH = jnp.where(seen, k_BSKH, 0), jnp.where(seen, v_BSKH, 0)
    weights_BNTS = weights_of(attention_scores(q_BTNH, k_BSKH, scoring, bias), allowed, scoring)
    used = weights_BNTS if drop is None else drop(weights_BNTS)
    used = rearrange(used.astype(v_BSKH.dtype), "b (k g) t s -> b k g t s", k=k_BSKH.shape[2])
    out = product("bkgts,bskh->btkgh", used, v_BSKH)
    return rearrange(out, "b t k g h -> b t (k g) h"), weights_BNTS
