"""The KV cache: keys and values of the tokens so far, so that a new token costs one token's work.

    cache = init_cache(config, rows=2, slots=64)
    x_BTD, cache = extend(params, config, hyper, cache, tokens_BT, real_BT)     # a prompt, or a piece of it
    x_B1D, cache = extend(params, config, hyper, cache, token_B1)               # one token more

However a text is cut into pieces, the outputs are those of `encoder_decoder.hidden` on the whole.

Each row counts its own real tokens: a token's position is the number of real ones before it, and
its slot is its position (in a ring: modulo the slots). Padding, on either side or in the middle,
is written nowhere, so that a row knows nothing of its neighbours' lengths. Slots carry their
positions, and one that holds nothing stands after all positions, where every mask hides it.

A mixture of experts drops no token here, whatever `expert_capacity` says: what a row of one token
would have dropped has no meaning. The outputs equal those of expert_capacity=0.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from transformer_jax import masks
from transformer_jax.attention import KeysValues, keys_values
from transformer_jax.config import Config, Hyper
from transformer_jax.embedding import embed
from transformer_jax.encoder_decoder import Transformer, encode
from transformer_jax.errors import ConfigError
from transformer_jax.layers import Held, apply_stack
from transformer_jax.masks import Mask, known
from transformer_jax.numerics import at_precision

EMPTY = 1 << 30  # the position of a slot that holds nothing
UNFIT_MASKS = ("none", "inverted")  # they show later positions


@struct.dataclass
class Cache:
    """Keys and values [L, B, S, K, H] in the compute type, and what the S slots of each row hold.

    positions_BS: int32, the position of the token in a slot, EMPTY where there is none.
    lengths_B: int32, real tokens so far; the first min(length, S) slots are filled.
    memory_mask: where the encoder's output is real. piece: of a ring, the most tokens that may
    come at once; 0: no ring.
    """

    held: Held
    positions_BS: jax.Array
    lengths_B: jax.Array
    memory_mask: Mask | None = None
    piece: int = struct.field(pytree_node=False, default=0)


# --- what can be cached -----------------------------------------------------------


def check_cacheable(config: Config) -> None:
    """Raise ConfigError, with the reason, where keys and values of earlier tokens are not what is needed."""
    if config.architecture == "encoder":
        raise ConfigError("architecture=encoder has no decoder to write text with")
    if config.mask in UNFIT_MASKS:
        raise ConfigError(
            f"mask={config.mask} lets a position see later ones: each new token would change all that is cached"
        )
    if config.attention_implementation == "linear":
        raise ConfigError("attention_implementation=linear reads sums over the past, not its keys and values: no cache")


def most_positions(config: Config) -> int | None:
    """The most positions that a row can have; None: any number."""
    if config.positions == "learned":
        return config.P
    return config.rope_original_positions if config.rope_scaling == "dynamic" else None


def check_positions(config: Config, positions: int, what: str) -> None:
    """Raise ConfigError, naming both numbers, where `positions` of `what` are past the most there can be.

    Dynamic scaling turns all keys by angles that depend on the length once that is past the original
    context; keys of the second layer on were made from what the shorter length gave. A forward pass
    over the whole would make all of them anew.
    """
    most = most_positions(config)
    if most is None or positions <= most:
        return
    if config.positions == "learned":
        raise ConfigError(f"{what}: {positions} positions are past the position table (max_positions={most})")
    raise ConfigError(
        f"{what}: {positions} positions are past rope_original_positions={most}, "
        "from where on rope_scaling=dynamic changes the cached keys with every token"
    )


def init_cache(config: Config, rows: int, slots: int, *, piece: int = 0) -> Cache:
    """An empty cache of `slots` tokens a row.

    piece: above 0 for a ring, which a window mask may have: window + piece - 1 slots hold all that
    a piece of so many tokens can see, whatever the length. Raises ConfigError for a model that
    cannot be cached, a ring without a window, and more slots than there are positions.
    """
    check_cacheable(config)
    if piece and config.mask != "window":
        raise ConfigError(f"a ring of {slots} slots with mask={config.mask}: only a window forgets")
    if slots < 1:
        raise ConfigError(f"a cache of {slots} slots: at least 1")
    if not piece:
        check_positions(config, slots, f"a cache of {slots} slots")
    empty = jnp.zeros((config.L, rows, slots, config.K, config.H), config.compute_dtype)
    return Cache(
        Held(KeysValues(empty, empty)),
        positions_BS=jnp.full((rows, slots), EMPTY, jnp.int32),
        lengths_B=jnp.zeros(rows, jnp.int32),
        piece=piece,
    )


def ring_slots(window: Any, piece: int) -> int:
    """Slots of a ring for pieces of so many tokens under a window."""
    return int(window) + piece - 1


# --- filling it -------------------------------------------------------------------


def _serving(config: Config, T: int) -> Config:
    """The same function, computed as a few queries against many keys want it.

    scan_unroll 1: the update of an unrolled cache copies all of it (D256 L4 S1024, batch 8, two
    cores: 26 ms a token against 15).
    """
    blocks = config.attention_implementation == "blockwise" and T > 1
    return config.replace(
        attention_implementation="blockwise" if blocks else "dense", expert_capacity=0.0, scan_unroll=1, remat=False
    )


@at_precision
def read_source(
    params: Transformer,
    config: Config,
    hyper: Hyper,
    cache: Cache,
    source_BS: jax.Array,
    source_lengths_B: jax.Array | None = None,
) -> Cache:
    """The cache of an encoder-decoder with each layer's keys and values of the encoder's output."""
    config = config.replace(expert_capacity=0.0)
    memory_BSD, _ = encode(params, config, hyper, source_BS, lengths_B=source_lengths_B)
    assert params.decoder is not None
    crosses = params.decoder.layers.cross
    _, cross = jax.lax.scan(lambda _, layer: (None, keys_values(layer, memory_BSD, config)), None, crosses)
    return replace(cache, held=replace(cache.held, cross=cross), memory_mask=masks.cross(source_lengths_B))


@at_precision
def extend(
    params: Transformer,
    config: Config,
    hyper: Hyper,
    cache: Cache,
    tokens_BT: jax.Array,
    real_BT: jax.Array | None = None,
) -> tuple[jax.Array, Cache]:
    """The decoder on T more tokens a row: its output after the final norm [B, T, D], and the cache with them.

    real_BT: booleans, False for padding, whose outputs mean nothing (None: all are real). A prefix
    mask needs its prefix within the first piece. Raises ConfigError for tokens that the cache cannot
    hold, and in a ring for positions past the model's, where their number is known; where it is traced,
    none is overwritten, what has no room is dropped, and the row's outputs are NaN from then on.
    """
    B, T = tokens_BT.shape
    S = cache.positions_BS.shape[1]
    most = most_positions(config) if cache.piece else S  # slots are never more than positions, except in a ring
    check_cacheable(config)
    if config.architecture == "encoder_decoder" and cache.held.cross is None:
        raise ConfigError("architecture=encoder_decoder needs a cache that has read a source: read_source")
    _check_room(config, cache, np.ones((B, T), bool) if real_BT is None else real_BT)
    if real_BT is None:
        real_BT = jnp.ones((B, T), bool)
    positions_BT = jnp.where(real_BT, cache.lengths_B[:, None] + jnp.cumsum(real_BT, axis=1) - 1, 0)
    fits_BT = real_BT if cache.piece else real_BT & (positions_BT < S)
    slots_BT = jnp.where(fits_BT, positions_BT % S, S)
    rows = jnp.arange(B)[:, None]
    positions_BS = cache.positions_BS.at[rows, slots_BT].set(positions_BT, mode="drop")
    assert params.decoder is not None
    x_BTD, traces = apply_stack(
        params.decoder,
        embed(params.embedding, jnp.where(real_BT, tokens_BT, 0), positions_BT, config),
        _serving(config, T),
        hyper,
        mask=masks.from_config(config, hyper).at(positions_BT, positions_BS),
        positions_BT=positions_BT,
        memory_mask=cache.memory_mask,
        held=cache.held,
        slots_BT=slots_BT,
        real_BT=real_BT,
    )
    lengths_B = cache.lengths_B + jnp.sum(real_BT, axis=1, dtype=jnp.int32)
    if most is not None:
        x_BTD = jnp.where((lengths_B > most)[:, None, None], jnp.nan, x_BTD)
    assert traces.added is not None
    own = cache.held.own.written(traces.added, slots_BT)
    held = replace(cache.held, own=own)
    return x_BTD, replace(cache, held=held, positions_BS=positions_BS, lengths_B=lengths_B)


def _check_room(config: Config, cache: Cache, real_BT: jax.Array | np.ndarray) -> None:
    (B, T), S = real_BT.shape, cache.positions_BS.shape[1]
    if B != cache.lengths_B.shape[0]:
        raise ConfigError(f"tokens of {B} rows for a cache of {cache.lengths_B.shape[0]}")
    real, lengths = known(real_BT), known(cache.lengths_B)
    ends = None if real is None else int(np.max(real.sum(axis=1) + (0 if lengths is None else lengths), initial=0))
    if cache.piece:
        # Padding takes no slot, so that a traced piece is held to its width.
        most = T if real is None else int(real.sum(axis=1).max(initial=0))
        if most > cache.piece:
            raise ConfigError(f"{most} tokens at once for a ring that was made for pieces of {cache.piece}")
        if ends is not None:
            check_positions(config, ends, f"a ring of {S} slots")
    elif ends is not None and ends > S:
        raise ConfigError(f"{ends} tokens for a cache of {S} slots")


def last_real(x_BTD: jax.Array, real_BT: jax.Array) -> jax.Array:
    """Each row's x at its last real token, [B, D]; at the last token where none is real."""
    T = real_BT.shape[1]
    last_B = T - 1 - jnp.argmax(real_BT[:, ::-1], axis=1)
    return jnp.take_along_axis(x_BTD, last_B[:, None, None], axis=1)[:, 0]
