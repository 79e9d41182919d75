"""Text from a model: `generate` writes a batch in one program, `stream` yields it as it comes.

    made = generate(params, config, hyper, [[5, 9], [7]], jax.random.key(0), max_new_tokens=20, stop_ids=(2,))
    for ids_B in stream(params, config, hyper, [[5, 9], [7]], jax.random.key(0), max_new_tokens=20): ...

Both give the same ids. A row's ids follow from its prompt, the key, its row id and its sampler:
neither the other rows nor any padding reach them. Programs are compiled for buckets (powers of
two) of prompt, source and new tokens, not for their lengths; the numbers of the sampler, the stop ids
and the number of new tokens are traced.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from transformer_jax.cache import (
    Cache,
    check_cacheable,
    check_positions,
    extend,
    init_cache,
    last_real,
    most_positions,
    read_source,
    ring_slots,
)
from transformer_jax.config import Config, Hyper
from transformer_jax.data import check_ids
from transformer_jax.encoder_decoder import Transformer, logits_of
from transformer_jax.errors import ConfigError, NotFiniteError
from transformer_jax.samplers import Sampler, adjusted, check_sampler, draw, log_probability

LEAST_BUCKET = 16
Rows = Sequence[Sequence[int] | np.ndarray]


@struct.dataclass
class Given:
    """What a batch begins with: tokens_BT with real_BT False on padding, on either side; the sources."""

    tokens_BT: jax.Array
    real_BT: jax.Array
    source_BS: jax.Array | None = None
    source_lengths_B: jax.Array | None = None


@struct.dataclass
class Prompts:
    """What is asked for a batch, all of it traced.

    sampler: numbers [B]. rows_B: the row ids that draws depend on. stops_V, banned_V: booleans, ids that end a
    row and that are never drawn. most: new tokens at most. pad_id: what a finished row gives.
    """

    given: Given
    key: jax.Array
    rows_B: jax.Array
    sampler: Sampler
    stops_V: jax.Array
    banned_V: jax.Array
    most: jax.Array
    pad_id: jax.Array


class Room(NamedTuple):
    """Static sizes: slots of the cache, tokens of a piece of the prompt, new tokens; whether the slots are a ring."""

    slots: int
    piece: int
    new: int
    ring: bool


@struct.dataclass
class State:
    """Between two steps. ids_B were drawn in step `step` and are not in the cache yet; done_B: rows that have ended.

    logp_B, sampler_logp_B: ln p of ids_B under the model and under the sampler; 0 for padding.
    """

    cache: Cache
    ids_B: jax.Array
    logp_B: jax.Array
    sampler_logp_B: jax.Array
    lengths_B: jax.Array
    seen_BV: jax.Array
    done_B: jax.Array
    step: jax.Array


@struct.dataclass
class Generated:
    """ids_BT [B, max_new_tokens], the pad id after a row's end; lengths_B: new ids, a stop id included.

    logp_BT, sampler_logp_BT: ln p of each id under the model (its logits as they are) and under
    the sampler; 0 after a row's end.
    """

    ids_BT: jax.Array
    lengths_B: jax.Array
    logp_BT: jax.Array
    sampler_logp_BT: jax.Array


# --- on the device ----------------------------------------------------------------


def read(params: Transformer, config: Config, hyper: Hyper, given: Given, room: Room) -> tuple[Cache, jax.Array]:
    """A cache that has the source and the prompts, and the decoder's output at each prompt's last token [B, D]."""
    (B, T), piece = given.tokens_BT.shape, room.piece
    cache = init_cache(config, B, room.slots, piece=piece if room.ring else 0)
    if given.source_BS is not None:
        cache = read_source(params, config, hyper, cache, given.source_BS, given.source_lengths_B)

    def one(carry: tuple[Cache, jax.Array], xs: tuple[jax.Array, jax.Array]) -> tuple[tuple[Cache, jax.Array], None]:
        cache, last_BD = carry
        tokens, real = xs
        x_BTD, cache = extend(params, config, hyper, cache, tokens, real)
        return (cache, jnp.where(jnp.any(real, axis=1)[:, None], last_real(x_BTD, real), last_BD)), None

    pieces = jax.tree.map(lambda x: x.reshape(B, T // piece, piece).swapaxes(0, 1), (given.tokens_BT, given.real_BT))
    read_all, _ = jax.lax.scan(one, (cache, jnp.zeros((B, config.D), config.compute_dtype)), pieces)
    return read_all


def begin(params: Transformer, config: Config, hyper: Hyper, prompts: Prompts, room: Room) -> State:
    """Read the source and the prompts, and draw the first ids."""
    given = prompts.given
    cache, last_BD = read(params, config, hyper, given, room)
    B = given.tokens_BT.shape[0]
    ids = jnp.where(given.real_BT, given.tokens_BT, config.V)
    seen_BV = jnp.zeros((B, config.V), bool).at[jnp.arange(B)[:, None], ids].set(True, mode="drop")
    zero_B = jnp.zeros(B, jnp.int32)
    state = State(cache, zero_B, zero_B, zero_B, zero_B, seen_BV, jnp.zeros(B, bool), jnp.zeros((), jnp.int32))
    return _drawn(params, config, hyper, prompts, state, last_BD)


def advance(params: Transformer, config: Config, hyper: Hyper, prompts: Prompts, state: State) -> State:
    """Read the ids that were drawn last, and draw the next ones; rows that have ended do neither."""
    x_BTD, cache = extend(params, config, hyper, state.cache, state.ids_B[:, None], ~state.done_B[:, None])
    state = replace(state, cache=cache, step=state.step + 1)
    return _drawn(params, config, hyper, prompts, state, x_BTD[:, 0])


def _drawn(params: Transformer, config: Config, hyper: Hyper, prompts: Prompts, state: State, x_BD: jax.Array) -> State:
    logits_BV = logits_of(params, config, hyper, x_BD[:, None])[:, 0]
    allowed_BV = jnp.where(prompts.banned_V[None], -jnp.inf, logits_BV)
    drawn_from = adjusted(allowed_BV, prompts.sampler, state.seen_BV)
    ids_B = draw(prompts.key, drawn_from, prompts.rows_B, state.step)
    live_B = ~state.done_B
    rows = jnp.arange(ids_B.shape[0])
    return replace(
        state,
        ids_B=jnp.where(live_B, ids_B, prompts.pad_id),
        logp_B=jnp.where(live_B, log_probability(logits_BV, ids_B), 0.0),
        sampler_logp_B=jnp.where(live_B, log_probability(drawn_from, ids_B), 0.0),
        lengths_B=state.lengths_B + live_B,
        seen_BV=state.seen_BV.at[rows, jnp.where(live_B, ids_B, config.V)].set(True, mode="drop"),
        done_B=state.done_B | prompts.stops_V[ids_B],
    )


def write(params: Transformer, config: Config, hyper: Hyper, prompts: Prompts, room: Room) -> Generated:
    """`generate` for a batch that is padded already: pure, for use inside jit. Ends when all rows have."""
    B = prompts.given.tokens_BT.shape[0]
    ids_BT = jnp.full((B, room.new), prompts.pad_id, jnp.int32)
    zeros_BT = jnp.zeros((B, room.new))

    def note(made: Generated, state: State) -> Generated:
        return Generated(
            made.ids_BT.at[:, state.step].set(state.ids_B),
            state.lengths_B,
            made.logp_BT.at[:, state.step].set(state.logp_B),
            made.sampler_logp_BT.at[:, state.step].set(state.sampler_logp_B),
        )

    def more(carry: tuple[State, Generated]) -> jax.Array:
        state, _ = carry
        return (state.step + 1 < prompts.most) & ~jnp.all(state.done_B)

    def step(carry: tuple[State, Generated]) -> tuple[State, Generated]:
        state = advance(params, config, hyper, prompts, carry[0])
        return state, note(carry[1], state)

    state = begin(params, config, hyper, prompts, room)
    first = note(Generated(ids_BT, state.lengths_B, zeros_BT, zeros_BT), state)
    return jax.lax.while_loop(more, step, (state, first))[1]


_write = jax.jit(write, static_argnames=("config", "room"))
_begin = jax.jit(begin, static_argnames=("config", "room"))
_advance = jax.jit(advance, static_argnames="config", donate_argnames="state")


# --- on the host ------------------------------------------------------------------


def bucket(length: int, most: int | None = None) -> int:
    """The least power of two that holds `length`, from 16 on, but no more than `most`."""
    size = max(LEAST_BUCKET, 1 << (length - 1).bit_length())
    return size if most is None else min(size, most)


def padded(rows: Rows, width: int, side: str = "right") -> tuple[np.ndarray, np.ndarray]:
    """Rows of ids with zeros on one side: int32 [B, width], and booleans that are False there."""
    tokens, real = np.zeros((len(rows), width), np.int32), np.zeros((len(rows), width), bool)
    for i, row in enumerate(rows):
        place = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
        tokens[i, place], real[i, place] = row, True
    return tokens, real


def generate(
    params: Transformer,
    config: Config,
    hyper: Hyper,
    prompts: Rows,
    key: jax.Array,
    *,
    max_new_tokens: int,
    sampler: Sampler | None = None,
    stop_ids: Sequence[int] = (),
    pad_id: int = 0,
    sources: Rows | None = None,
    row_ids: Sequence[int] | None = None,
    piece: int = 0,
    banned_ids: Sequence[int] = (),
) -> Generated:
    """Write up to max_new_tokens ids after each prompt, a row of ids of any length from 1 on.

    sampler: None draws from the model. stop_ids: a row ends with the first of them, which is kept.
    sources: an encoder-decoder's, one for each prompt (a prompt is then what the decoder begins with).
    row_ids: what draws depend on beside the key, 0, 1, 2, … where None. piece: tokens of the prompts
    that are read at once, 0 for all; it bounds memory, and changes nothing else. banned_ids: never drawn, such
    as rows of the vocabulary that no token has.
    Raises ConfigError or DataError, one line, for a model that cannot be cached (cache.check_cacheable),
    more positions than it has, ids outside the vocabulary, numbers that are out of range, and, once
    it has written, logits that are not finite.
    """
    asked, room = _request(
        config, hyper, prompts, key, max_new_tokens=max_new_tokens, sampler=sampler, stop_ids=stop_ids, pad_id=pad_id,
        sources=sources, row_ids=row_ids, piece=piece, banned_ids=banned_ids,
    )  # fmt: skip
    made = _write(params, config, on_device(hyper), asked, room)
    _check_finite(made.logp_BT)
    return jax.tree.map(lambda x: x[:, :max_new_tokens] if x.ndim == 2 else x, made)


def stream(
    params: Transformer, config: Config, hyper: Hyper, prompts: Rows, key: jax.Array, **options: Any
) -> Iterator[np.ndarray]:
    """The columns of `generate`'s ids_BT, int32 [B] each, as they come; ends when all rows have.

    options: as `generate` takes them; checked at the call, before the first column is asked for. Raises
    ConfigError in the place of a column that was drawn from logits that are not finite.
    """
    return _columns(params, config, on_device(hyper), *_request(config, hyper, prompts, key, **options))


def _columns(params: Transformer, config: Config, hyper: Hyper, asked: Prompts, room: Room) -> Iterator[np.ndarray]:
    state = _begin(params, config, hyper, asked, room)
    _check_finite(state.logp_B[:, None])
    yield np.asarray(state.ids_B)
    for step in range(1, int(asked.most)):
        if np.all(state.done_B):
            return
        state = _advance(params, config, hyper, asked, state)
        _check_finite(state.logp_B[:, None], step)
        yield np.asarray(state.ids_B)


def _check_finite(logp_BT: jax.Array, step: int = 0) -> None:
    """Raise ConfigError for the first NaN; `step` is the first column's. Every id drawn from NaN would be 0."""
    found = np.argwhere(np.isnan(np.asarray(logp_BT)).T)
    if len(found):
        at, row = found[0]
        raise NotFiniteError(
            f"the model's logits are not finite at new token {step + at} of row {row}: nothing to draw"
        )


def on_device(hyper: Hyper) -> Hyper:
    """Its numbers as device scalars, so that values are not compiled in."""
    return jax.tree.map(
        lambda x: jnp.asarray(x, jnp.int32 if jnp.issubdtype(jnp.result_type(x), jnp.integer) else jnp.float32), hyper
    )


def _request(
    config: Config,
    hyper: Hyper,
    prompts: Rows,
    key: jax.Array,
    *,
    max_new_tokens: int,
    sampler: Sampler | None = None,
    stop_ids: Sequence[int] = (),
    pad_id: int = 0,
    sources: Rows | None = None,
    row_ids: Sequence[int] | None = None,
    piece: int = 0,
    banned_ids: Sequence[int] = (),
) -> tuple[Prompts, Room]:
    """The traced and the static part of what is asked, checked and padded to buckets."""
    sampler, B = sampler or Sampler(), len(prompts)
    check_request(config, hyper, prompts, max_new_tokens, sampler, [*stop_ids, *banned_ids, pad_id], sources, piece)
    if row_ids is not None and len(row_ids) != B:
        raise ConfigError(f"{len(row_ids)} row_ids for {B} prompts")
    given, room = laid_out(config, hyper, prompts, sources, max_new_tokens, piece)
    asked = Prompts(
        given,
        key,
        jnp.asarray(np.arange(B) if row_ids is None else row_ids, jnp.int32),
        sampler.of_rows(B),
        id_mask(stop_ids, config.V),
        id_mask(banned_ids, config.V),
        jnp.int32(max_new_tokens),
        jnp.int32(pad_id),
    )
    return asked, room


def id_mask(ids: Sequence[int], V: int) -> jax.Array:
    """Booleans [V], True for these ids: one program for any number of them."""
    return jnp.asarray(np.isin(np.arange(V), ids))


def laid_out(
    config: Config, hyper: Hyper, prompts: Rows, sources: Rows | None, max_new_tokens: int, piece: int = 0
) -> tuple[Given, Room]:
    """Prompts and sources padded to their buckets, and the sizes that go with them; `check_request` comes first."""
    most = most_positions(config)
    width = bucket(max(map(len, prompts)), most)
    piece = min(piece, width) or width
    tokens_BT, real_BT = padded(prompts, -(-width // piece) * piece)
    new = bucket(max_new_tokens, most)
    slots = width + new if most is None else min(width + new, most)
    ring = config.mask == "window" and ring_slots(hyper.window, piece) < slots
    room = Room(ring_slots(hyper.window, piece) if ring else slots, piece, new, ring)
    source_BS = source_lengths_B = None
    if sources is not None:
        source_BS, source_lengths_B = _padded_sources(config, sources)
    return Given(jnp.asarray(tokens_BT), jnp.asarray(real_BT), source_BS, source_lengths_B), room


def check_request(
    config: Config,
    hyper: Hyper,
    prompts: Rows,
    max_new_tokens: int,
    sampler: Sampler,
    other_ids: Sequence[int] = (),
    sources: Rows | None = None,
    piece: int = 0,
) -> None:
    """Raise ConfigError or DataError, one line, for what `generate` refuses. other_ids: of stops and padding."""
    check_cacheable(config)
    check_sampler(sampler, config.V)
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens={max_new_tokens} is out of range: at least 1")
    if piece < 0:
        raise ConfigError(f"piece={piece} is out of range: at least 0")
    if (config.architecture == "encoder_decoder") != (sources is not None):
        raise ConfigError(f"architecture={config.architecture} {'needs' if sources is None else 'has no'} sources")
    _check_rows("prompt", prompts, config.V)
    check_ids(other_ids, config.V)
    lengths = [len(prompt) for prompt in prompts]
    longest = max(lengths)
    check_positions(config, longest + max_new_tokens, f"a prompt of {longest} and max_new_tokens={max_new_tokens}")
    if config.mask == "prefix" and (first := min(piece or longest, *lengths)) < hyper.prefix:
        raise ConfigError(
            f"prefix={hyper.prefix} with {first} prompt tokens in the first piece: all of a prefix is read at once"
        )
    if sources is None:
        return
    _check_rows("source", sources, config.source_vocab_size or config.V)
    if len(sources) != len(prompts):
        raise ConfigError(f"{len(sources)} sources for {len(prompts)} prompts")
    longest = max(map(len, sources))
    if config.positions == "learned" and longest > config.P:
        raise ConfigError(f"a source of {longest} is past the position table (max_positions={config.P})")


def _check_rows(kind: str, rows: Rows, V: int) -> None:
    if len(rows) == 0:
        raise ConfigError(f"no {kind}s")
    for i, row in enumerate(rows):
        if len(row) == 0:
            raise ConfigError(f"{kind} {i} is empty: at least one id")
        check_ids(np.asarray(row), V)


def _padded_sources(config: Config, sources: Rows) -> tuple[jax.Array, jax.Array]:
    most = config.P if config.positions == "learned" else None
    tokens_BS, _ = padded(sources, bucket(max(map(len, sources)), most))
    return jnp.asarray(tokens_BS), jnp.asarray([len(source) for source in sources], jnp.int32)
