"""Encoder, decoder, and both: embeddings, stacks of the same layers, logits.

The mathematics knows no mesh: `constrain(x, letters)` is called at the borders of the layers,
and does nothing unless the caller brings one.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import struct

from transformer_jax import keys, masks
from transformer_jax.attention import Probe, Trace
from transformer_jax.batch import Batch
from transformer_jax.config import Config, Hyper
from transformer_jax.embedding import Embedding, embed, init_embedding, of_source, unembed
from transformer_jax.errors import ConfigError
from transformer_jax.layers import UNCONSTRAINED, Constrain, LayerTrace, Stack, apply_stack, init_stack
from transformer_jax.masks import Mask
from transformer_jax.moe import MoELosses
from transformer_jax.numerics import at_precision


@struct.dataclass
class Transformer:
    """All parameters. encoder or decoder is None where the architecture lacks it."""

    embedding: Embedding
    encoder: Stack | None
    decoder: Stack | None


@struct.dataclass
class Nudge:
    """Zeros added to the embedded tokens: gradients with respect to them are those of the embeddings."""

    x_BTD: jax.Array
    source_BSD: jax.Array | None = None


@struct.dataclass
class Traces:
    """What the attentions did, each with a leading axis L; None where there is no such attention, or no trace.

    experts: the routers' losses, summed over tokens and averaged over the layers of a stack.
    """

    encoder: Trace | None = None
    decoder: Trace | None = None
    cross: Trace | None = None
    experts: MoELosses | None = None


# --- parameters ------------------------------------------------------------------


def init_transformer(key: jax.Array, config: Config) -> Transformer:
    """Fresh float32 parameters. Layers draw from keys of their own: a deeper stack shares its first ones."""
    encoder = decoder = None
    if config.architecture != "decoder":
        encoder = init_stack(keys.named(key, "encoder"), config, config.encoder_layers, cross=False)
    if config.architecture != "encoder":
        decoder = init_stack(
            keys.named(key, "decoder"), config, config.L, cross=config.architecture == "encoder_decoder"
        )
    return Transformer(init_embedding(keys.named(key, "embedding"), config), encoder, decoder)


def count_parameters(config: Config) -> int:
    """Scalars in the parameters, from their shapes alone: nothing is allocated."""
    shapes = jax.eval_shape(lambda k: init_transformer(k, config), jax.random.key(0))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def _row_mask(positions: jax.Array | None, segments: jax.Array | None, lengths: jax.Array | None) -> Mask:
    """What any self-attention over these rows must hide: other segments and padding."""
    mask = masks.full().at(positions, positions)
    if segments is not None:
        mask = mask & masks.segments(segments)
    return mask if lengths is None else mask & masks.padding(lengths)


def decoder_mask(config: Config, hyper: Hyper, batch: Batch) -> Mask:
    """config.mask, within segments and without padding."""
    rows = _row_mask(batch.positions_BT, batch.segments_BT, batch.lengths_B)
    return masks.from_config(config, hyper) & rows


def cross_mask(batch: Batch) -> Mask:
    """What the decoder may see of the source: real tokens, within segments; without source_segments_BS all documents
    of a row are of one source.

    Raises ConfigError where only the source has segments: a target of one document would see all of them.
    """
    look, own, source = masks.cross(batch.source_lengths_B), batch.segments_BT, batch.source_segments_BS
    if own is not None and source is not None:
        return look & masks.segments(own, source)
    if source is not None:
        raise ConfigError("a batch with source_segments_BS and no segments_BT: which segment is the target's?")
    return look


def _positions(given: jax.Array | None, tokens: jax.Array) -> jax.Array:
    return jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] if given is None else given


@at_precision
def encode(
    params: Transformer,
    config: Config,
    hyper: Hyper,
    tokens_BS: jax.Array,
    *,
    lengths_B: jax.Array | None = None,
    positions_BS: jax.Array | None = None,
    segments_BS: jax.Array | None = None,
    key: jax.Array | None = None,
    nudge_BSD: jax.Array | None = None,
    trace: bool = False,
    constrain: Constrain = UNCONSTRAINED,
) -> tuple[jax.Array, LayerTrace]:
    """Bidirectional encoder: ids [B, S] -> [B, S, D]; padding and other segments are hidden."""
    x = _embed(of_source(params.embedding), config, hyper, tokens_BS, positions_BS, key, nudge_BSD, constrain)
    assert params.encoder is not None
    return apply_stack(
        params.encoder,
        x,
        config,
        hyper,
        mask=_row_mask(positions_BS, segments_BS, lengths_B),
        positions_BT=_positions(positions_BS, tokens_BS),
        lengths_B=lengths_B,
        key=key,
        trace=trace,
        constrain=constrain,
    )


def _embed(
    params: Embedding,
    config: Config,
    hyper: Hyper,
    tokens: jax.Array,
    positions: jax.Array | None,
    key: jax.Array | None,
    nudge: jax.Array | None,
    constrain: Constrain,
) -> jax.Array:
    with jax.named_scope("embedding"):
        tokens = constrain(tokens, "BT")
        # D whole: looked up in columns, the rows would have to be cut anew by B.
        table = dataclasses.replace(params, embed_VD=constrain(params.embed_VD, "VD"))
        x = embed(table, tokens, _positions(positions, tokens), config)
        x = x if nudge is None else x + nudge.astype(x.dtype)
        if config.has("dropout"):
            x = keys.dropout(x, hyper.dropout_rate, key, "embedding")
        return constrain(x, "BTD")


@at_precision
def hidden(
    params: Transformer,
    config: Config,
    hyper: Hyper,
    batch: Batch,
    key: jax.Array | None = None,
    *,
    probe: Probe | None = None,
    nudge: Nudge | None = None,
    trace: bool = False,
    constrain: Constrain = UNCONSTRAINED,
) -> tuple[jax.Array, Traces]:
    """The last layer's output [B, T, D], after the final norm, and what happened on the way.

    key None: no dropout (evaluation). probe: added in the decoder's (an encoder-only
    model's encoder's) self-attention. nudge: added to the embedded tokens. trace: keep weights
    and scores, O(L N T S) memory, which only dense attention has.
    Raises ConfigError where the batch lacks the architecture's inputs or its source alone is packed, and for packed
    rows with experts' slots.
    """

    def part(name: str) -> jax.Array | None:
        return None if key is None else keys.named(key, name)

    packed = batch.segments_BT is not None or batch.source_segments_BS is not None
    if packed and config.E and config.expert_capacity:
        raise ConfigError(
            f"segments with expert_capacity={config.expert_capacity:g}: documents of a row would take each other's "
            "slots; expert_capacity=0 drops none"
        )
    memory = source = memory_mask = None
    if config.architecture == "encoder_decoder":
        if batch.source_BS is None:
            raise ConfigError("architecture=encoder_decoder needs a batch with source_BS")
        memory_mask = cross_mask(batch)
        memory, source = encode(
            params,
            config,
            hyper,
            batch.source_BS,
            lengths_B=batch.source_lengths_B,
            positions_BS=batch.source_positions_BS,
            segments_BS=batch.source_segments_BS,
            key=part("encoder"),
            nudge_BSD=None if nudge is None else nudge.source_BSD,
            trace=trace,
            constrain=constrain,
        )
    if config.architecture == "encoder":
        stack, mask = params.encoder, _row_mask(batch.positions_BT, batch.segments_BT, batch.lengths_B)
    else:
        stack, mask = params.decoder, decoder_mask(config, hyper, batch)
    added = None if nudge is None else nudge.x_BTD
    x = _embed(params.embedding, config, hyper, batch.tokens_BT, batch.positions_BT, part("decoder"), added, constrain)
    assert stack is not None
    x, seen = apply_stack(
        stack,
        x,
        config,
        hyper,
        mask=mask,
        positions_BT=_positions(batch.positions_BT, batch.tokens_BT),
        memory=memory,
        memory_mask=memory_mask,
        lengths_B=batch.lengths_B,
        key=part("decoder"),
        probe=probe,
        trace=trace,
        constrain=constrain,
    )
    stacks = [stack.experts for stack in (source, seen) if stack is not None and stack.experts is not None]
    means = [jax.tree.map(lambda x: jnp.mean(x, axis=0), losses) for losses in stacks]
    experts = functools.reduce(MoELosses.__add__, means) if means else None
    if config.architecture == "encoder":
        return x, Traces(encoder=seen.attention, experts=experts)
    return x, Traces(None if source is None else source.attention, seen.attention, seen.cross, experts)


@at_precision
def logits_of(params: Transformer, config: Config, hyper: Hyper, x_BTD: jax.Array) -> jax.Array:
    """Logits [B, T, V] in float32 from `hidden`'s output."""
    with jax.named_scope("unembed"):
        return unembed(params.embedding, x_BTD, config, hyper)


def forward(
    params: Transformer,
    config: Config,
    hyper: Hyper,
    batch: Batch,
    key: jax.Array | None = None,
    *,
    probe: Probe | None = None,
    nudge: Nudge | None = None,
    trace: bool = False,
    constrain: Constrain = UNCONSTRAINED,
) -> tuple[jax.Array, Traces]:
    """Logits [B, T, V] in float32 for every architecture, and what happened on the way (see `hidden`)."""
    with constrain.scope():
        x, seen = hidden(params, config, hyper, batch, key, probe=probe, nudge=nudge, trace=trace, constrain=constrain)
        return constrain(logits_of(params, config, hyper, x), "BTV"), seen


def init_probe(config: Config, batch: Batch) -> Probe:
    """Zeros [L, B, T, heads, H] for the self-attention that `forward` probes."""
    B, T = batch.tokens_BT.shape
    L = config.encoder_layers if config.architecture == "encoder" else config.L
    q, kv = (L, B, T, config.N, config.H), (L, B, T, config.K, config.H)
    return Probe(jnp.zeros(q), jnp.zeros(kv), jnp.zeros(kv))
