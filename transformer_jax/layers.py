"""Layers and stacks: the same for encoder and decoder, scanned.

A layer is self-attention, in a decoder that has a source also cross-attention, and a
feed-forward net or a mixture of them, each with a residual connection and norms placed as
the config says:

    pre       x + f(norm(x))              and one norm after the stack
    post      norm(x + f(x))              (Vaswani et al. 2017, article S2 §7)
    sandwich  x + norm(f(norm(x)))        and one norm after the stack
    none      x + f(x)

Masks, rotary angles and position biases are made once, outside the layer loop.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from transformer_jax import keys, masks, relative, rope
from transformer_jax.attention import (
    Attention,
    KeysValues,
    Probe,
    Trace,
    attend,
    attention,
    init_attention,
    keys_values,
)
from transformer_jax.banded import known_width
from transformer_jax.config import Config, Hyper
from transformer_jax.ffn import FFN, ffn, init_ffn
from transformer_jax.masks import Mask
from transformer_jax.moe import MoE, MoELosses, init_moe, moe
from transformer_jax.norms import Norm, init_norm, norm


@dataclasses.dataclass(frozen=True)
class Constrain:
    """What a mesh changes in the model, which knows none; by itself it changes nothing.

    lay(x, letters): x as it is to be laid over devices, called at the borders of the layers.
    attend: how self-attention is computed, with the arguments of attention.attend.
    scope: a context for tracing the model in.
    """

    lay: Callable[[jax.Array, str], jax.Array] = lambda x, letters: x
    attend: Callable[..., Any] = attend
    scope: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    def __call__(self, x: jax.Array, letters: str) -> jax.Array:
        return self.lay(x, letters)


UNCONSTRAINED = Constrain()


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
    ffn: FFN | MoE
    ffn_norms: Sublayer


@struct.dataclass
class Stack:
    """Layers with a leading axis L; the norm after them (pre and sandwich); the table of t5 positions."""

    layers: Layer
    final_norm: Norm | None
    relative_CN: jax.Array | None = None


@struct.dataclass
class LayerTrace:
    """What a layer did (or, with a leading axis L, all of them): attentions if traced, experts if it has them.

    added: the keys and values of x that a cache is to keep, where there is one.
    """

    attention: Trace | None
    cross: Trace | None
    experts: MoELosses | None
    added: KeysValues | None = None


@struct.dataclass
class Held:
    """Keys and values of earlier calls (or, with a leading axis L, those of all layers).

    own: of the tokens so far, a slot each; cross: of the encoder's output, all of it, its rows as many as
    those of own, or one for several of them in turn (beams).
    """

    own: KeysValues
    cross: KeysValues | None = None


def init_stack(key: jax.Array, config: Config, layers: int, cross: bool) -> Stack:
    """Fresh parameters. Layers draw from keys of their own: a deeper stack shares its first ones."""
    layer_keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(layers))
    stacked = jax.vmap(lambda k: _init_layer(k, config, cross))(layer_keys)
    return Stack(
        stacked,
        init_norm(config) if config.norm_placement in ("pre", "sandwich") else None,
        relative.init_t5(key, config.C, config.N, config.D) if config.positions == "t5" else None,
    )


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
        ffn=init_moe(keys.named(key, "ffn"), config) if config.E else init_ffn(keys.named(key, "ffn"), config),
        ffn_norms=norms(),
    )


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
    bias: relative.Bias | None,
    memory: jax.Array | None,
    memory_mask: Mask | None,
    real_BT: jax.Array | None,
    held: Held | None,
    slots_BT: jax.Array | None,
    key: jax.Array | None,
    probe: Probe | None,
    trace: bool,
    constrain: Constrain,
) -> tuple[jax.Array, LayerTrace]:
    """[B, T, D] -> [B, T, D], and what happened on the way."""

    def part(name: str) -> jax.Array | None:
        return None if key is None else keys.named(key, name)

    traces = {}

    def self_attention(y: jax.Array) -> jax.Array:
        source = y
        if held is not None and slots_BT is not None:
            traces["added"] = keys_values(layer.attention, y, config, turn=turn)
            source = held.own.written(traces["added"], slots_BT)
        out, traces["self"] = attention(
            layer.attention,
            y,
            source,
            mask,
            config,
            hyper,
            turn=turn,
            bias=bias,
            implementation=implementation_for(config, mask, y.shape[1]),
            key=part("attention"),
            probe=probe,
            trace=trace,
            attend=constrain.attend,
        )
        return out

    def cross_attention(y: jax.Array) -> jax.Array:
        source = memory if held is None else held.cross
        assert layer.cross is not None and source is not None and memory_mask is not None
        queries = y
        if isinstance(source, KeysValues):
            # Rows that share a source stand in one row, as more queries: its keys and values are not repeated.
            queries = y.reshape(source.k_BSKH.shape[0], -1, y.shape[-1])
        out, traces["cross"] = attention(
            layer.cross,
            queries,
            source,
            memory_mask,
            config,
            hyper,
            implementation=implementation_for(config, memory_mask, queries.shape[1]),
            key=part("cross"),
            trace=trace,
        )
        return out.reshape(y.shape)

    def feed_forward(y: jax.Array) -> jax.Array:
        if isinstance(layer.ffn, FFN):
            return ffn(layer.ffn, y, config, hyper, part("ffn"))
        out, traces["experts"] = moe(layer.ffn, y, config, hyper, part("ffn"), real_BT)
        return out

    with jax.named_scope("self_attention"):
        x = _residual(x, self_attention, layer.attention_norms, config, hyper, part("attention"))
    if layer.cross is not None and layer.cross_norms is not None:
        with jax.named_scope("cross_attention"):
            x = _residual(x, cross_attention, layer.cross_norms, config, hyper, part("cross"))
    with jax.named_scope("ffn"):
        x = _residual(x, feed_forward, layer.ffn_norms, config, hyper, part("ffn"))
    return x, LayerTrace(traces.get("self"), traces.get("cross"), traces.get("experts"), traces.get("added"))


def implementation_for(config: Config, mask: Mask, T: int) -> str:
    """The config's implementation; where banded attention meets a mask without a window, or rows of T that are
    shorter than it, as batches of short texts are, dense."""
    windowed = any(isinstance(part, masks.Window) for part in mask.parts)
    fits = windowed and (config.band or known_width(mask)) <= T
    return "dense" if config.attention_implementation == "banded" and not fits else config.attention_implementation


def position_bias(stack: Stack, config: Config, mask: Mask) -> relative.Bias | None:
    """ALiBi's or T5's bias at the mask's positions; T5's buckets look one way where the mask is causal."""
    if config.positions == "alibi":
        bias = relative.alibi(config.N)
    elif config.positions == "t5":
        assert stack.relative_CN is not None
        both = not masks.looks_back(mask)
        bias = relative.t5(stack.relative_CN, distance=config.relative_distance, bidirectional=both)
    else:
        return None
    return bias.at(mask.q_positions_BT, mask.k_positions_BS)


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
    lengths_B: jax.Array | None = None,
    held: Held | None = None,
    slots_BT: jax.Array | None = None,
    real_BT: jax.Array | None = None,
    bias: relative.Bias | None = None,
    key: jax.Array | None = None,
    probe: Probe | None = None,
    trace: bool = False,
    constrain: Constrain = UNCONSTRAINED,
) -> tuple[jax.Array, LayerTrace]:
    """Run the layers: [B, T, D] -> [B, T, D], traces with a leading L.

    memory [B, S, D], memory_mask: the encoder's output, for cross-attention.
    lengths_B: real tokens of a row, which alone are sent to experts and have a length for dynamic RoPE (None:
    all); real_BT: which, instead.
    held: earlier keys and values, with a leading L; x's own are written to slots_BT, and the mask is
    of all S slots. The traces have what was added; `held` is as it was.
    bias: added to the scores of every self-attention, beside that of the positions.
    probe: zeros with a leading L (see attention.Probe). key: for dropout, folded by layer.
    """
    if lengths_B is not None:
        real_BT = jnp.arange(x_BTD.shape[1])[None] < lengths_B[:, None]
    turn = None
    if config.positions == "rope":
        turn = rope.from_config(positions_BT, config, hyper, real_BT, masks.segment_ids(mask))
    of_positions = position_bias(stack, config, mask)
    bias = of_positions if bias is None else bias if of_positions is None else bias + of_positions
    L = jax.tree.leaves(stack.layers)[0].shape[0]

    def body(x: jax.Array, xs: tuple[Layer, Probe | None, Held | None, jax.Array]) -> tuple[jax.Array, LayerTrace]:
        layer, layer_probe, layer_held, i = xs
        layer_key = None if key is None else jax.random.fold_in(key, i)
        x, traces = _apply_layer(
            layer,
            x,
            config,
            hyper,
            mask=mask,
            turn=turn,
            bias=bias,
            memory=memory,
            memory_mask=memory_mask,
            real_BT=real_BT,
            held=layer_held,
            slots_BT=slots_BT,
            key=layer_key,
            probe=layer_probe,
            trace=trace,
            constrain=constrain,
        )
        return constrain(x, "BTD"), traces

    if config.remat:
        body = jax.checkpoint(body, prevent_cse=False)
    x, traces = jax.lax.scan(body, x_BTD, (stack.layers, probe, held, jnp.arange(L)), unroll=config.scan_unroll or L)
    return (x if stack.final_norm is None else norm(stack.final_norm, x, config)), traces
