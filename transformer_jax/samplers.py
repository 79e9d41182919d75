"""From logits to the next id. What is done, in this order:

    1. repetition penalty   logits of ids that were seen: positive ones divided by it, negative multiplied
                            (Keskar et al. 2019); 1: off
    2. temperature          logits / temperature; 0: the most probable id, always
    3. top_k                the k most probable ids; 0: off
    4. top_p                of these, renormalised, the fewest whose probabilities sum to p: the one that
                            crosses p is kept (Holtzman et al. 2020); 1: off
    5. min_p                of these, the ones at least min_p times as probable as the first; 0: off

and a draw from what is left. Steps 3 to 5 each keep the first so many of one order: by logit, and
of equal logits the lower id first. Exactly k ids are left by top_k, ties or not.

Seen are the prompt's ids (of an encoder-decoder: the decoder's prompt, not the source) and
the ids written so far. Padding is never seen.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from transformer_jax import keys
from transformer_jax.errors import ConfigError


@struct.dataclass
class Sampler:
    """Numbers of the steps, each for all rows or an array [B]; they may be traced. The default draws from the model."""

    temperature: Any = 1.0
    top_k: Any = 0
    top_p: Any = 1.0
    min_p: Any = 0.0
    repetition_penalty: Any = 1.0

    def of_rows(self, B: int) -> "Sampler":
        """Every number as an array [B]: top_k int32, the others float32."""

        def rows(name: str) -> jax.Array:
            value = jnp.asarray(getattr(self, name), jnp.int32 if name == "top_k" else jnp.float32)
            return jnp.broadcast_to(value, (B,))

        return Sampler(**{field.name: rows(field.name) for field in dataclasses.fields(self)})


GREEDY = Sampler(temperature=0.0)


def check_sampler(sampler: Sampler, V: int) -> None:
    """Raise ConfigError, naming the value, for a number that means nothing over a vocabulary of V. On the host."""
    limits = {
        "temperature": (lambda x: (x >= 0) & np.isfinite(x), "at least 0"),
        "top_k": (lambda x: (x >= 0) & (x <= V) & (x == np.floor(x)), f"a whole number from 0 to the vocabulary's {V}"),
        "top_p": (lambda x: (x > 0) & (x <= 1), "above 0, at most 1"),
        "min_p": (lambda x: (x >= 0) & (x <= 1), "from 0 to 1"),
        "repetition_penalty": (lambda x: (x > 0) & np.isfinite(x), "above 0"),
    }
    for name, (fits, wanted) in limits.items():
        values = np.atleast_1d(np.asarray(getattr(sampler, name)))
        bad = values[~fits(values)]
        if bad.size:
            raise ConfigError(f"{name}={bad[0]:g} is out of range: {wanted}")


def adjusted(logits_BV: jax.Array, sampler: Sampler, seen_BV: jax.Array) -> jax.Array:
    """Logits of the distribution that is drawn from, float32 [B, V]: -inf for ids that are out.

    sampler: as `of_rows` gives it. seen_BV: booleans, what the repetition penalty is for. The
    logits are finite at any temperature: the largest is subtracted first.
    """
    V = logits_BV.shape[1]
    of_row = jax.tree.map(lambda x: x[:, None], sampler)
    penalty = of_row.repetition_penalty
    punished = jnp.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
    logits = jnp.where(seen_BV, punished, logits_BV)
    greedy = of_row.temperature <= 0
    z = logits - jnp.max(logits, axis=1, keepdims=True)
    # A tiny temperature takes what is not the largest to -inf, and the largest to 0.
    z = z / jnp.where(greedy, 1.0, of_row.temperature)

    order = jnp.argsort(-z, axis=1, stable=True)
    ordered = jnp.take_along_axis(z, order, axis=1)
    place = jnp.arange(V)[None]
    kept = jnp.where(greedy, 1, jnp.where(of_row.top_k > 0, of_row.top_k, V))
    p = jax.nn.softmax(jnp.where(place < kept, ordered, -jnp.inf), axis=1)
    before = jnp.cumsum(p, axis=1) - p  # what the ids of higher places sum to
    inside = (before < of_row.top_p) | (of_row.top_p >= 1)
    # A difference of logits is the logarithm of a ratio of probabilities, however they are normalised.
    inside = inside & (ordered >= ordered[:, :1] + jnp.log(of_row.min_p))
    # The first is always in: a top_p that float32 rounds to 0 must not leave nothing.
    kept = jnp.maximum(jnp.minimum(kept, jnp.sum(inside, axis=1, keepdims=True)), 1)

    last = jnp.take_along_axis(order, kept - 1, axis=1)
    least = jnp.take_along_axis(ordered, kept - 1, axis=1)
    return jnp.where((z > least) | ((z == least) & (place <= last)), z, -jnp.inf)


def draw(key: jax.Array, logits_BV: jax.Array, rows_B: jax.Array, step: jax.Array) -> jax.Array:
    """An id a row, int32 [B], by logits that may be -inf. A row's draw follows from (key, its number, step) alone."""

    def one(row: jax.Array, logits_V: jax.Array) -> jax.Array:
        own = jax.random.fold_in(jax.random.fold_in(keys.named(key, "sample"), row), step)
        return jax.random.categorical(own, logits_V)

    return jax.vmap(one)(rows_B, logits_BV).astype(jnp.int32)


def log_probability(logits_BV: jax.Array, ids_B: jax.Array) -> jax.Array:
    """ln p of each row's id, float32 [B]."""
    return jnp.take_along_axis(jax.nn.log_softmax(logits_BV, axis=1), ids_B[:, None], axis=1)[:, 0]
