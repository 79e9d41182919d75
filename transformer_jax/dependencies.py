"""What an output depends on: as the masks say, and as the derivatives say.

A layer lets position i see itself, by the residual connection, and what its mask M allows.
Booleans multiply as "by way of": with R = I or M, L layers of self-attention reach R^L. In an
encoder-decoder the memory has reached E = (I or M_source)^(L_encoder) of the source, and each
decoder layer looks at it through the cross mask X after its self-attention:

    target   R^L
    source   R^(L-1) X E            the first layer's X E, carried on by L - 1 self-attentions

Norms, feed-forward nets, biases and projections act on each position by itself: neither their
kind nor their place matters. Position biases are no function of the tokens.

Experts with a capacity are the exception that derivatives do not see. Which expert a token is
sent to, and whether it finds a slot, are steps: another token may push it out, and no derivative
says so. The pattern here is that of the derivatives, attention alone.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.batch import Batch
from transformer_jax.config import Config, Hyper
from transformer_jax.encoder_decoder import Nudge, Transformer, cross_mask, decoder_mask, hidden
from transformer_jax.errors import ConfigError


class Pattern(NamedTuple):
    """Outputs against inputs: booleans (may depend), or the largest absolute derivatives, float32.

    target_BTT: output i on the embedding of target position j of the same row. source_BTS: on that of
    source position j, None without a source. rows_BB: the outputs of a row on the embeddings of another.
    """

    target_BTT: jax.Array
    source_BTS: jax.Array | None
    rows_BB: jax.Array


class Found(NamedTuple):
    """The largest of some derivatives (0 where there are none), and where they stand.

    where: the indices into each part of a Pattern, [n, 3] for target and source, [n, 2] for rows.
    """

    largest: float
    where: dict[str, np.ndarray]

    @property
    def count(self) -> int:
        return sum(len(places) for places in self.where.values())


# --- what the masks say ------------------------------------------------------------


def _through(a: jax.Array, b: jax.Array) -> jax.Array:
    """Boolean product over the last two axes: i sees k if it sees some j by a, and that sees k by b."""
    # Sums of zeros and ones: exact in float32 for any length that fits in memory.
    return jnp.matmul(a.astype(jnp.float32), b.astype(jnp.float32)) > 0


def reach(allowed_BNTS: jax.Array, layers: int) -> jax.Array:
    """(I or M)^layers, [B or 1, T, T]: what output i of a stack of residual self-attentions can depend on.

    allowed_BNTS: the mask M of each layer, booleans [B or 1, N or 1, T, T]; any head's sight counts.
    A row that may attend to nothing still depends on itself. Raises ConfigError for another
    shape, for numbers, and for a negative number of layers.
    """
    shape = allowed_BNTS.shape
    if len(shape) != 4 or shape[2] != shape[3] or allowed_BNTS.dtype != bool:
        raise ConfigError(f"a self-attention mask of {allowed_BNTS.dtype} {shape}: give booleans [B, N, T, T]")
    if layers < 0:
        raise ConfigError(f"layers={layers}: at least 0")
    itself = jnp.eye(shape[2], dtype=bool)[None]
    step = jnp.any(allowed_BNTS, axis=1) | itself
    seen = jnp.broadcast_to(itself, step.shape)
    for _ in range(layers):
        seen = _through(step, seen)
    return seen


def reach_source(allowed_BNTS: jax.Array, cross_BNTS: jax.Array, encoded_BSS: jax.Array, layers: int) -> jax.Array:
    """R^(layers - 1) X E, [B, T, S]: what output i of a decoder can depend on in the source.

    allowed_BNTS [B or 1, N or 1, T, T]: the decoder's self-attention mask. cross_BNTS [B or 1, N or 1, T, S]:
    its cross mask. encoded_BSS [B or 1, S, S]: what the memory has reached of the source.
    Raises ConfigError as `reach` does.
    """
    looks = _through(jnp.any(cross_BNTS, axis=1), encoded_BSS)
    return _through(reach(allowed_BNTS, layers - 1), looks)


def predicted(config: Config, hyper: Hyper, batch: Batch) -> Pattern:
    """What the masks let each output of `encoder_decoder.hidden` depend on, in booleans.

    Exact for softmax and sigmoid, which give every allowed key a weight, and for linear attention; with
    relu and entmax15 it is the most that there can be. Raises ConfigError where the batch lacks the
    architecture's inputs.
    """
    B, T = batch.tokens_BT.shape
    layers = config.encoder_layers if config.architecture == "encoder" else config.L
    # An encoder sees both ways: its mask is the decoder's without a kind.
    both_ways = config.replace(mask="none", attention_implementation="dense")
    own = both_ways if config.architecture == "encoder" else config
    allowed = decoder_mask(own, hyper, batch).dense(T, T)
    target = jnp.broadcast_to(reach(allowed, layers), (B, T, T))
    rows = jnp.eye(B, dtype=bool)
    if config.architecture != "encoder_decoder":
        return Pattern(target, None, rows)

    if batch.source_BS is None:
        raise ConfigError("architecture=encoder_decoder needs a batch with source_BS")
    S = batch.source_BS.shape[1]
    source = Batch(
        batch.source_BS,
        batch.source_BS,
        jnp.ones((B, S)),
        lengths_B=batch.source_lengths_B,
        positions_BT=batch.source_positions_BS,
        segments_BT=batch.source_segments_BS,
    )
    look = cross_mask(batch)
    encoded = reach(decoder_mask(both_ways, hyper, source).dense(S, S), config.encoder_layers)
    across = reach_source(allowed, look.dense(T, S), encoded, layers)
    return Pattern(target, jnp.broadcast_to(across, (B, T, S)), rows)


# --- what the derivatives say ------------------------------------------------------


def measured(params: Transformer, config: Config, hyper: Hyper, batch: Batch, key: jax.Array | None = None) -> Pattern:
    """max |d hidden_i / d embedding_j| over features of both, by reverse mode: float32.

    Embeddings are what enters the first layer, positions included. B T D backward passes, D of them
    at a time: for small models; jit it with config static. key: for dropout, None for none.
    A NaN anywhere among the derivatives of a pair is that pair's value.
    """
    (B, T), D = batch.tokens_BT.shape, config.D
    S = None if batch.source_BS is None or config.architecture != "encoder_decoder" else batch.source_BS.shape[1]
    zeros = Nudge(jnp.zeros((B, T, D)), None if S is None else jnp.zeros((B, S, D)))

    def outputs(nudge: Nudge) -> jax.Array:
        return hidden(params, config, hyper, batch, key, nudge=nudge)[0].astype(jnp.float32)

    _, pull = jax.vjp(outputs, zeros)

    def of_position(place: jax.Array) -> Nudge:
        """The derivatives of one output position by every position of every row, [B, T] and [B, S]."""

        def of_feature(feature: jax.Array) -> Nudge:
            return pull(jnp.zeros((B * T, D)).at[place, feature].set(1.0).reshape(B, T, D))[0]

        return jax.tree.map(lambda d: jnp.max(jnp.abs(d), axis=(0, -1)), jax.vmap(of_feature)(jnp.arange(D)))

    slopes = jax.lax.map(of_position, jnp.arange(B * T))
    target = slopes.x_BTD.reshape(B, T, B, T)
    source = None if S is None else slopes.source_BSD.reshape(B, T, B, S)
    across = jnp.max(target, axis=(1, 3))
    if source is not None:
        across = jnp.maximum(across, jnp.max(source, axis=(1, 3)))
    same = jnp.arange(B)
    return Pattern(target[same, :, same], None if source is None else source[same, :, same], across)


# --- one against the other ---------------------------------------------------------


def _where(measured: Pattern, predicted: Pattern, which: str) -> Found:
    slopes, places = [], {}
    for name, value, may in zip(("target", "source", "rows"), measured, predicted, strict=True):
        shapes = [None if part is None else part.shape for part in (value, may)]
        if shapes[0] != shapes[1]:
            raise ConfigError(f"patterns of two models: {name} is {shapes[0]} measured, {shapes[1]} predicted")
        if value is None or may is None:
            continue
        value, may = np.asarray(value), np.asarray(may)
        # NaN is no zero: a leak, and never silent.
        here = ~may & (value != 0) if which == "leaks" else may & (value == 0)
        places[name] = np.argwhere(here)
        slopes.append(value[here])
    every = np.concatenate(slopes)
    return Found(float(np.max(every)) if every.size else 0.0, places)


def leaks(measured: Pattern, predicted: Pattern) -> Found:
    """Derivatives that are not exactly 0 (or NaN) where none was predicted; `largest` 0.0 and `count` 0 are the proof.

    Raises ConfigError for patterns of different shapes.
    """
    return _where(measured, predicted, "leaks")


def silent(measured: Pattern, predicted: Pattern) -> Found:
    """Where a dependence was predicted and the derivative is exactly 0: a mask too narrow, dead units, underflow.

    Raises ConfigError for patterns of different shapes.
    """
    return _where(measured, predicted, "silent")
