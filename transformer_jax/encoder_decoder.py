"""Encoder, decoder, and both: the same layers, stacked and scanned.

A layer is self-attention, in a decoder that has a source also cross-attention, and a
feed-forward net, each with a residual connection and norms placed as the config says:

    pre       x + f(norm(x))              and one norm after the stack
    post      norm(x + f(x))              (Vaswani et al. 2017, article S2 §7)
    sandwich  x + norm(f(norm(x)))        and one norm after the stack
    none      x + f(x)

Masks and rotary angles are made once, outside the layer loop. The mathematics knows no
mesh: `constrain(x, letters)` is called at the borders of the layers, and does nothing
unless the caller brings one.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from transformer_jax import keys, masks, rope
from transformer_jax.attention import Attention, Probe, Trace, attention, init_attention
from transformer_jax.batch import Batch
from transformer_jax.config import Config, Hyper
from transformer_jax.embedding import Embedding, embed, init_embedding, unembed
from transformer_jax.errors import ConfigError
from transformer_jax.ffn import FFN, ffn, init_ffn
from transformer_jax.masks import Mask
from transformer_jax.norms import Norm, init_norm, norm

Constrain = Callable[[jax.Array, str], jax.Array]


@struct.dataclass
class Sublayer:
    """A norm before (or after, for "post") and, for "sandwich", one more after."""

    norm: Norm | None
    post_norm: Norm | None


@struct.dataclass
class Layer:
    """One layer; `cross` and its norms only in a decoder with a source."""

    attention: Attention
    attention_norms: Sublayer
    cross: Attention | None
    cross_norms: Sublayer | None
    ffn: FFN
    ffn_norms: Sublayer


@struct.dataclass
class Stack:
    """Layers with a leading axis L, and the norm after them (pre and sandwich)."""

    layers: Layer
    final_norm: Norm | None


@struct.dataclass
class Transformer:
    """All parameters. encoder or decoder is None where the architecture lacks it."""

    embedding: Embedding
    encoder: Stack | None
    decoder: Stack | None


@struct.dataclass
class Traces:
    """What the attentions did, each field with a leading axis L; None where there is no such attention."""

    encoder: Trace | None = None
    decoder: Trace | None = None
    cross: Trace | None = None


# --- parameters ------------------------------------------------------------------


def init_transformer(key: jax.Array, config: Config) -> Transformer:
    """Fresh float32 parameters. Layers draw from keys of their own: a deeper stack shares its first ones."""
    encoder = decoder = None
    if config.architecture != "decoder":
        encoder = _init_stack(keys.named(key, "encoder"), config, config.encoder_layers, cross=False)
    if config.architecture != "encoder":
        decoder = _init_stack(
            keys.named(key, "decoder"), config, config.L, cross=config.architecture == "encoder_decoder"
        )
    return Transformer(init_embedding(keys.named(key, "embedding"), config), encoder, decoder)


def _init_stack(key: jax.Array, config: Config, layers: int, cross: bool) -> Stack:
    layer_keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(layers))
    stacked = jax.vmap(lambda k: _init_layer(k, config, cross))(layer_keys)
    return Stack(stacked, init_norm(config) if config.norm_placement in ("pre", "sandwich") else None)


def _init_layer(key: jax.Array, config: Config, cross: bool) -> Layer:
    placement = config.norm_placement

    def norms() -> Sublayer:
        return Sublayer(
            init_norm(config) if placement != "none" else None,
            init_norm(config) if placement == "sandwich" else None,
        )

    return Layer(
        attention=init_attention(keys.named(key, "attention"), config),
        attention_norms=norms(),
        cross=init_attention(keys.named(key, "cross"), config) if cross else None,
        cross_norms=norms() if cross else None,
        ffn=init_ffn(keys.named(key, "ffn"), config),
        ffn_norms=norms(),
    )


def count_parameters(config: Config) -> int:
    """Scalars in the parameters, from their shapes alone: nothing is allocated."""
    shapes = jax.eval_shape(lambda k: init_transformer(k, config), jax.random.key(0))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


# --- the forward pass ------------------------------------------------------------


def _residual(
    x: jax.Array,
    f: Callable[[jax.Array], jax.Array],
    norms: Sublayer,
    config: Config,
    hyper: Hyper,
    key: jax.Array | None,
) -> jax.Array:
    """One sub-layer with its residual connection, norms and dropout, in the placement of the config."""
    placement = config.norm_placement
    before = norms.norm if placement in ("pre", "sandwich") else None
    y = f(x if before is None else norm(before, x, config))
    if norms.post_norm is not None:
        y = norm(norms.post_norm, y, config)
    if config.has("dropout"):
        y = keys.dropout(y, hyper.dropout_rate, key, "residual")
    x = x + y
    if placement == "post" and norms.norm is not None:
        x = norm(norms.norm, x, config)
    return x


def _apply_layer(
    layer: Layer,
    x: jax.Array,
    config: Config,
    hyper: Hyper,
    *,
    mask: Mask,
    turn: rope.Rotation | None,
    memory: jax.Array | None,
    memory_mask: Mask | None,
    key: jax.Array | None,
    probe: Probe | None,
    trace: bool,
) -> tuple[jax.Array, tuple[Trace | None, Trace | None]]:
    """[B, T, D] -> [B, T, D], with the traces of self- and cross-attention."""

    def part(name: str) -> jax.Array | None:
        return None if key is None else keys.named(key, name)

    traces: dict[str, Trace | None] = {"self": None, "cross": None}

    def self_attention(y: jax.Array) -> jax.Array:
        out, traces["self"] = attention(
            layer.attention, y, y, mask, config, hyper, turn=turn, key=part("attention"), probe=probe, trace=trace
        )
        return out

    def cross_attention(y: jax.Array) -> jax.Array:
        assert layer.cross is not None and memory is not None and memory_mask is not None
        out, traces["cross"] = attention(
            layer.cross, y, memory, memory_mask, config, hyper, key=part("cross"), trace=trace
        )
        return out

    with jax.named_scope("self_attention"):
        x = _residual(x, self_attention, layer.attention_norms, config, hyper, part("attention"))
    if layer.cross is not None and layer.cross_norms is not None:
        with jax.named_scope("cross_attention"):
            x = _residual(x, cross_attention, layer.cross_norms, config, hyper, part("cross"))
    with jax.named_scope("ffn"):
        x = _residual(
            x, lambda y: ffn(layer.ffn, y, config, hyper, part("ffn")), layer.ffn_norms, config, hyper, part("ffn")
        )
    return x, (traces["self"], traces["cross"])


def apply_stack(
    stack: Stack,
    x_BTD: jax.Array,
    config: Config,
    hyper: Hyper,
    *,
    mask: Mask,
    positions_BT: jax.Array,
    memory: jax.Array | None = None,
    memory_mask: Mask | None = None,
    key: jax.Array | None = None,
    probe: Probe | None = None,
    trace: bool = False,
    constrain: Constrain = lambda x, letters: x,
) -> tuple[jax.Array, tuple[Trace | None, Trace | None]]:
    """Run the layers: [B, T, D] -> [B, T, D], traces with a leading L.

    memory [B, S, D], memory_mask: the encoder's output, for cross-attention.
    probe: zeros with a leading L (see attention.Probe). key: for dropout, folded by layer.
    """
    turn = rope.rotation(positions_BT, config.rotated, hyper.rope_base) if config.positions == "rope" else None
    L = jax.tree.leaves(stack.layers)[0].shape[0]

    def body(x: jax.Array, xs: tuple[Layer, Probe | None, jax.Array]) -> tuple[jax.Array, tuple]:
        layer, layer_probe, i = xs
        layer_key = None if key is None else jax.random.fold_in(key, i)
        x, traces = _apply_layer(
            layer,
            x,
            config,
            hyper,
            mask=mask,
            turn=turn,
            memory=memory,
            memory_mask=memory_mask,
            key=layer_key,
            probe=layer_probe,
            trace=trace,
        )
        return constrain(x, "BTD"), traces

    if config.remat:
        body = jax.checkpoint(body, prevent_cse=False)
    x, traces = jax.lax.scan(body, x_BTD, (stack.layers, probe, jnp.arange(L)), unroll=config.scan_unroll or L)
    return (x if stack.final_norm is None else norm(stack.final_norm, x, config)), traces


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


def _positions(given: jax.Array | None, tokens: jax.Array) -> jax.Array:
    return jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] if given is None else given


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
    trace: bool = False,
    constrain: Constrain = lambda x, letters: x,
) -> tuple[jax.Array, Trace | None]:
    """Bidirectional encoder: ids [B, S] -> [B, S, D]; padding and other segments are hidden."""
    x = _embed(params, config, hyper, tokens_BS, positions_BS, key, constrain)
    assert params.encoder is not None
    x, traces = apply_stack(
        params.encoder,
        x,
        config,
        hyper,
        mask=_row_mask(positions_BS, segments_BS, lengths_B),
        positions_BT=_positions(positions_BS, tokens_BS),
        key=key,
        trace=trace,
        constrain=constrain,
    )
    return x, traces[0]


def _embed(
    params: Transformer,
    config: Config,
    hyper: Hyper,
    tokens: jax.Array,
    positions: jax.Array | None,
    key: jax.Array | None,
    constrain: Constrain,
) -> jax.Array:
    with jax.named_scope("embedding"):
        x = embed(params.embedding, tokens, _positions(positions, tokens), config)
        if config.has("dropout"):
            x = keys.dropout(x, hyper.dropout_rate, key, "embedding")
        return constrain(x, "BTD")


def forward(
    params: Transformer,
    config: Config,
    hyper: Hyper,
    batch: Batch,
    key: jax.Array | None = None,
    *,
    probe: Probe | None = None,
    trace: bool = False,
    constrain: Constrain = lambda x, letters: x,
) -> tuple[jax.Array, Traces]:
    """Logits [B, T, V] in float32 for every architecture, and what the attentions did.

    key None: no dropout (evaluation). probe: added in the decoder's (an encoder-only
    model's encoder's) self-attention. trace: keep weights and scores, O(L N T S) memory.
    Raises ConfigError where the batch lacks the architecture's inputs.
    """

    def part(name: str) -> jax.Array | None:
        return None if key is None else keys.named(key, name)

    memory = memory_trace = memory_mask = None
    if config.architecture == "encoder_decoder":
        if batch.source_BS is None:
            raise ConfigError("architecture=encoder_decoder needs a batch with source_BS")
        memory, memory_trace = encode(
            params,
            config,
            hyper,
            batch.source_BS,
            lengths_B=batch.source_lengths_B,
            positions_BS=batch.source_positions_BS,
            segments_BS=batch.source_segments_BS,
            key=part("encoder"),
            trace=trace,
            constrain=constrain,
        )
        memory_mask = masks.cross(batch.source_lengths_B)
        if batch.source_segments_BS is not None and batch.segments_BT is not None:
            memory_mask = memory_mask & masks.segments(batch.segments_BT, batch.source_segments_BS)
    if config.architecture == "encoder":
        stack, mask = params.encoder, _row_mask(batch.positions_BT, batch.segments_BT, batch.lengths_B)
    else:
        stack, mask = params.decoder, decoder_mask(config, hyper, batch)
    x = _embed(params, config, hyper, batch.tokens_BT, batch.positions_BT, part("decoder"), constrain)
    assert stack is not None
    x, (self_trace, cross_trace) = apply_stack(
        stack,
        x,
        config,
        hyper,
        mask=mask,
        positions_BT=_positions(batch.positions_BT, batch.tokens_BT),
        memory=memory,
        memory_mask=memory_mask,
        key=part("decoder"),
        probe=probe,
        trace=trace,
        constrain=constrain,
    )
    with jax.named_scope("unembed"):
        logits = constrain(unembed(params.embedding, x), "BTV")
    if config.architecture == "encoder":
        return logits, Traces(encoder=self_trace)
    return logits, Traces(encoder=memory_trace, decoder=self_trace, cross=cross_trace)


def init_probe(config: Config, batch: Batch) -> Probe:
    """Zeros [L, B, T, heads, H] for the self-attention that `forward` probes."""
    B, T = batch.tokens_BT.shape
    L = config.encoder_layers if config.architecture == "encoder" else config.L
    q, kv = (L, B, T, config.N, config.H), (L, B, T, config.K, config.H)
    return Probe(jnp.zeros(q), jnp.zeros(kv), jnp.zeros(kv))
