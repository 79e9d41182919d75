"""The honest loss: what a decoder is worth when nothing after its own position exists.

A loss under teacher forcing shows a position everything that its mask allows. Where the mask
allows what comes later, that holds the answer, and a low loss says nothing about generation. Here
each position is asked alone, on the row cut off after it: it sees what a decoder has while it writes.
"""

import dataclasses

import jax
import jax.numpy as jnp

from transformer_jax.batch import Batch
from transformer_jax.config import Config, Hyper
from transformer_jax.data.tasks import Index
from transformer_jax.encoder_decoder import Transformer
from transformer_jax.losses import Sums
from transformer_jax.train import token_sums

STRIDE = 32  # a position costs the forward pass of a whole row: one in so many is asked


def asked(B: int, T: int, index: Index, stride: int = STRIDE) -> jax.Array:
    """[B, Q] every stride-th position of each row; another first one in each row and each batch.

    A place may be T or more: it is no position, and does not count.
    """
    stride = min(stride, T)
    first_B = (jnp.arange(B) + index) % stride
    return first_B[:, None] + stride * jnp.arange(-(-T // stride))[None, :]


def prefixes(batch: Batch, places_BQ: jax.Array) -> Batch:
    """Q copies of each row, [B Q, T]: copy q ends after position places_BQ[b, q], and only that one counts.

    What stands after it is padding, which no position may attend to, of token 0. A batch for
    architecture=decoder; a place of T or more counts nothing.
    """
    (B, T), Q = batch.tokens_BT.shape, places_BQ.shape[1]
    place = places_BQ.reshape(-1)
    rows = jax.tree.map(lambda x: jnp.repeat(x, Q, axis=0) if x.shape[0] == B else x, batch)
    lengths = jnp.minimum(place + 1, T if rows.lengths_B is None else rows.lengths_B).astype(jnp.int32)
    slots = jnp.arange(T)[None]
    return dataclasses.replace(
        rows,
        tokens_BT=jnp.where(slots <= place[:, None], rows.tokens_BT, 0),
        weights_BT=jnp.where(slots == place[:, None], rows.weights_BT, 0.0),
        lengths_B=lengths,
    )


def honest(config: Config, params: Transformer, hyper: Hyper, batch: Batch, index: Index, stride: int = STRIDE) -> Sums:
    """Sums over the asked positions, each on its own prefix."""
    B, T = batch.tokens_BT.shape
    return token_sums(params, config, hyper, prefixes(batch, asked(B, T, index, stride)))


def seen(config: Config, params: Transformer, hyper: Hyper, batch: Batch, index: Index, stride: int = STRIDE) -> Sums:
    """Sums over the same positions under teacher forcing: all of the row that the mask allows."""
    B, T = batch.tokens_BT.shape
    here_BT = jnp.any(asked(B, T, index, stride)[:, :, None] == jnp.arange(T)[None, None], axis=1)
    return token_sums(
        params, config, hyper, dataclasses.replace(batch, weights_BT=jnp.where(here_BT, batch.weights_BT, 0.0))
    )
