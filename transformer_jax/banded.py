"""Sliding-window attention that costs T times the window, forward and backward.

Queries are cut into blocks; each block meets only the keys that the band can reach, as dense
attention of a small size. A group of blocks is done at a time, and again in the backward pass,
so that the weights of all never stand in memory together.

The neighbours' keys are laid beside each other by shifting whole blocks, not by slicing inside a
loop: the transpose of a slice writes a whole array of zeros for every block, and the backward
pass would be quadratic again.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.typing import ArrayLike

from transformer_jax.blockwise import Dropout
from transformer_jax.dense import dense_block
from transformer_jax.errors import ConfigError
from transformer_jax.masks import Causal, Mask, Window, known
from transformer_jax.relative import Bias
from transformer_jax.scores import Scoring

QUERIES = 512  # at most, in a group of blocks


def known_width(mask: Mask) -> int:
    """The narrowest of a mask's windows whose width is a number already; 0 where there is none."""
    widths = [known(part.width) for part in mask.parts if isinstance(part, Window)]
    return min((int(width) for width in widths if width is not None), default=0)


def width_of(mask: Mask, band: int, T: int) -> int:
    """Static number of keys that a query reaches on one side, its own included.

    band: asked for, 0 if not. Raises ConfigError without a window, for a traced window without
    a band, and for a band that is too narrow for the window or beyond T.
    """
    if not any(isinstance(part, Window) for part in mask.parts):
        raise ConfigError("banded attention needs a window mask: masks.window(width), or another implementation")
    needed = known_width(mask)
    width = band or needed
    if not width:
        raise ConfigError("banded attention of a traced window needs `band`, the widest that it may become")
    if width < needed:
        raise ConfigError(f"band={band} is narrower than the window of {needed}")
    if width > T:
        raise ConfigError(f"a window of {width} in a row of {T}: dense attention does the same for less")
    return width


def grouping(T: int, size: int) -> tuple[int, int]:
    """Blocks of `size` queries for T of them, a multiple of the blocks in a group; and the blocks in a group."""
    blocks = math.ceil(T / size)
    groups = math.ceil(blocks / max(1, QUERIES // size))
    group = math.ceil(blocks / groups)
    return groups * group, group


def banded(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    mask: Mask,
    scoring: Scoring,
    *,
    bias: Bias | None = None,
    dropout: Dropout | None = None,
    block: int = 0,
    band: int = 0,
) -> jax.Array:
    """[B, T, N, H], equal to dense attention under a mask that has a window; O(T (band + block)) time and memory.

    block: queries taken together; 0: half the band, from 16 to 512. A traced window wider than
    the band gives NaN: wrong weights are never silent.
    """
    T = q_BTNH.shape[1]
    mask.check(T, T)
    width = width_of(mask, band, T)
    size = min(block or max(16, min(512, math.ceil(width / 2))), T)
    reach = math.ceil((width - 1) / size)  # blocks of keys before the query's own
    after = 0 if any(isinstance(part, Causal) for part in mask.parts) else reach
    blocks, group = grouping(T, size)

    def around(x: jax.Array) -> jax.Array:
        """[B, T, …] -> [groups, B, (reach + group + after) size, …], zeros outside the row: what a group sees."""
        padding = [(0, 0)] * x.ndim
        padding[1] = (reach * size, blocks * size - T + math.ceil((reach + after) / group) * group * size)
        x = jnp.pad(x, padding)
        slab, step = (reach + group + after) * size, group * size
        pieces = []
        for start in range(0, slab, step):
            piece = x[:, start : start + blocks * size]
            piece = rearrange(piece, "b (groups t) ... -> groups b t ...", t=step)
            pieces.append(piece[:, :, : slab - start])
        return jnp.concatenate(pieces, axis=2)

    def neighbours(x: jax.Array) -> jax.Array:
        """[B, (reach + group + after) size, …] of a group -> [group, B, (reach + 1 + after) size, …]."""
        shifted = [x[:, i * size : (i + group) * size] for i in range(reach + 1 + after)]
        return rearrange(shifted, "shift b (g t) ... -> g b (shift t) ...", t=size)

    def queries(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, 0), (0, blocks * size - T), (0, 0), (0, 0)])
        return rearrange(x, "b (groups g t) ... -> groups g b t ...", t=size, g=group)

    q_slots = jnp.arange(blocks * size).reshape(-1, group, size)
    k_slots = q_slots[:, :, :1] + jnp.arange(-reach * size, (1 + after) * size)[None, None]

    def one(q: jax.Array, k: jax.Array, v: jax.Array, q_slots: jax.Array, k_slots: jax.Array) -> jax.Array:
        """A block of queries against the keys around it."""
        # Queries that fill up the last block see nothing, as in blockwise attention.
        inside = ((k_slots >= 0) & (k_slots < T))[None, :] & (q_slots < T)[:, None]
        k_slots = jnp.clip(k_slots, 0, T - 1)
        allowed = mask.block(q_slots, k_slots) & inside[None, None]
        at = None if bias is None else bias.block(q_slots, k_slots)
        drop = None if dropout is None else partial(dropout, q_slots_T=q_slots, k_slots_S=k_slots, T=T)
        return dense_block(q, k, v, allowed, scoring, bias=at, drop=drop, hides_keys=mask.hides(T, T))[0]

    @jax.checkpoint
    def some(xs: tuple[jax.Array, ...]) -> jax.Array:
        # Tied to the queries, as in blockwise attention: else a scan over layers would keep all masks.
        q, k, v, *slots = jax.lax.optimization_barrier(xs)
        return jax.vmap(one)(q, neighbours(k), neighbours(v), *slots)

    out = jax.lax.map(some, (queries(q_BTNH), around(k_BTKH), around(v_BTKH), q_slots, k_slots))
    out = rearrange(out, "groups g b t n h -> b (groups g t) n h")[:, :T]
    return _loud(out, mask, width)


def _loud(out: jax.Array, mask: Mask, width: int) -> jax.Array:
    """NaN where a traced window is wider than the band that was computed."""
    traced: list[ArrayLike] = [p.width for p in mask.parts if isinstance(p, Window) and known(p.width) is None]
    if not traced or len(traced) < sum(isinstance(p, Window) for p in mask.parts):
        return out
    narrowest = jnp.min(jnp.stack([jnp.asarray(w) for w in traced]))
    return jnp.where(narrowest <= width, out, jnp.nan)
