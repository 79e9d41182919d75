"""Beam search: the most probable texts after each prompt, from one model or from several.

    found = beam_search(params, config, hyper, [[5, 9], [7]], beam=4, n_best=2, max_new_tokens=20, stop_ids=(2,))
    found.ids_BWT[0, 0, : found.lengths_BW[0, 0]]     # the best after [5, 9]; its score: found.scores_BW[0, 0]

The score of a hypothesis is the sum of ln p of its ids, divided by

    gnmt    ((5 + length) / 6) ** alpha     Wu et al. 2016 §7
    power   length ** alpha

where length counts the ids written, a stop id included, and never the prompt. alpha 0 leaves the sum
as it is, above 0 longer ones gain, below 0 shorter ones.

In each step every live hypothesis of a row is followed by every id, and the candidates are ranked by
their sums. The first W that go on are the next live ones. Those among the first W of all that end with a
stop id are finished: they are kept apart, in order of score, and take no live one's place. What is still
live at max_new_tokens is cut there, and ranks by its score as what is finished does.

A row ends when nothing live can still have a higher score than its n-th best finished one. A sum
never grows and the penalty is monotone in the length, so that a live one of t ids and sum s can reach
s / max(penalty(t + 1), penalty(max_new_tokens)), whatever alpha's sign. So n_best does not
change which hypothesis is the best. Other programs end a row sooner, with its W-th finished hypothesis,
and may miss better ones: `enough` does as they do. With one beam a row always ends with its first
stop id: this is greedy decoding, whatever the penalty.

Several trees of parameters of one Config are an ensemble: the next id's p is the mean of theirs.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from transformer_jax.attention import KeysValues
from transformer_jax.cache import Cache, extend
from transformer_jax.config import Config, Hyper
from transformer_jax.decode import Given, Room, Rows, check_request, id_mask, laid_out, on_device, read
from transformer_jax.encoder_decoder import Transformer, logits_of
from transformer_jax.errors import ConfigError, NotFiniteError, unknown
from transformer_jax.samplers import Sampler

PENALTIES = {"gnmt": 5.0, "power": 0.0}  # what is added to the length
NEVER = 1 << 30  # more hypotheses than can finish
MOST_ALPHA = 10.0  # a length of 1024 to the power of it is still a float32


@struct.dataclass
class Penalty:
    """What a sum of ln p is divided by: kind "gnmt" or "power", and its exponent, of any sign; 0: by 1."""

    kind: str = struct.field(pytree_node=False, default="gnmt")
    alpha: Any = 0.0


@struct.dataclass
class Beams:
    """The n_best hypotheses of each row, best first: ids_BWT [B, n_best, max_new_tokens], the pad id after the end.

    lengths_BW: ids of each, a stop id included. scores_BW: with the penalty; logp_BW: the plain sums of ln p.
    Where a row has fewer hypotheses, the last ones have length 0 and a score of -inf.
    """

    ids_BWT: jax.Array
    lengths_BW: jax.Array
    scores_BW: jax.Array
    logp_BW: jax.Array


@struct.dataclass
class Asked:
    """What is asked for a batch, all of it traced.

    stops_V, banned_V: booleans. added, alpha: the penalty's numbers. enough: finished hypotheses that end a row.
    """

    given: Given
    stops_V: jax.Array
    banned_V: jax.Array
    added: jax.Array
    alpha: jax.Array
    enough: jax.Array
    most: jax.Array
    pad_id: jax.Array


@struct.dataclass
class State:
    """After `step` ids: W live hypotheses a row, dead ones with a sum of -inf, and the best finished ones.

    cache: of the members, which are axis 1 of its keys and values; B W rows, before the last ids and in the
    order of the live ones of the step before, of which parents_BW were followed. finished_B: how many have
    finished; nan_B: rows that met NaN.
    """

    cache: Cache
    ids_BWT: jax.Array
    logp_BW: jax.Array
    parents_BW: jax.Array
    best: Beams
    finished_B: jax.Array
    done_B: jax.Array
    nan_B: jax.Array
    step: jax.Array


# --- on the device ----------------------------------------------------------------


def divisor(lengths: jax.Array, added: jax.Array, alpha: jax.Array) -> jax.Array:
    """((added + length) / (added + 1)) ** alpha, float32: both kinds of penalty are this."""
    return ((added + lengths.astype(jnp.float32)) / (added + 1.0)) ** alpha


def search(
    members: tuple[Transformer, ...], config: Config, hyper: Hyper, asked: Asked, room: Room, beam: int, n_best: int
) -> tuple[Beams, jax.Array]:
    """`beam_search` for a batch that is padded already, and the rows that met NaN [B]: pure, for use inside jit."""
    # Members stand after L, which the scan over layers takes first.
    axes = jax.tree_util.tree_map_with_path(
        lambda path, _: int(any(getattr(part, "name", "") == "layers" for part in path)), members[0]
    )
    stacked = jax.tree.map(lambda axis, *leaves: jnp.stack(leaves, axis), axes, *members)

    def more(state: State) -> jax.Array:
        return (state.step < asked.most) & ~jnp.all(state.done_B)

    def step(state: State) -> State:
        return _followed(asked, *_advanced(stacked, axes, config, hyper, state))

    state = _begun(stacked, axes, config, hyper, asked, room, beam, n_best)
    state = jax.lax.while_loop(more, step, state)
    cut = _hypotheses(asked, state.ids_BWT, state.logp_BW, state.step)
    return _where(state.done_B, state.best, _merged(state.best, cut)), state.nan_B


def _begun(
    stacked: Transformer, axes: Any, config: Config, hyper: Hyper, asked: Asked, room: Room, W: int, n_best: int
) -> State:
    """Read the source and the prompts, and follow them by the first ids."""

    def one(params: Transformer) -> Any:
        cache, x_BD = read(params, config, hyper, asked.given, room)
        return _log_p(params, config, hyper, x_BD), cache.held, replace(cache, held=None)

    logp_RBV, held, cache = jax.vmap(one, in_axes=(axes,), out_axes=(0, 1, None))(stacked)
    B = logp_RBV.shape[1]
    held = replace(held, own=jax.tree.map(lambda x: jnp.repeat(x, W, axis=2), held.own))
    cache = replace(
        cache,
        held=held,
        positions_BS=jnp.repeat(cache.positions_BS, W, axis=0),
        lengths_B=jnp.repeat(cache.lengths_B, W, axis=0),
    )
    none = jnp.full((B, n_best), -jnp.inf)
    state = State(
        cache,
        jnp.full((B, W, room.new), asked.pad_id),
        # There is one prompt to follow.
        jnp.broadcast_to(jnp.where(jnp.arange(W) == 0, 0.0, -jnp.inf), (B, W)),
        jnp.zeros((B, W), jnp.int32),
        Beams(jnp.full((B, n_best, room.new), asked.pad_id), jnp.zeros((B, n_best), jnp.int32), none, none),
        jnp.zeros(B, jnp.int32),
        jnp.zeros(B, bool),
        jnp.zeros(B, bool),
        jnp.zeros((), jnp.int32),
    )
    return _followed(asked, state, jnp.broadcast_to(_mean(logp_RBV)[:, None], (B, W, config.V)))


def _advanced(stacked: Transformer, axes: Any, config: Config, hyper: Hyper, state: State) -> tuple[State, jax.Array]:
    """The members read the last ids: the state with its cache in the order of the live ones, and ln p [B, W, V]."""
    B, W = state.logp_BW.shape
    rows = (jnp.arange(B)[:, None] * W + state.parents_BW).reshape(-1)
    held = state.cache.held
    # All live ones of a row are as long: the rest of the cache is the same for each.
    held = replace(held, own=jax.tree.map(lambda x: x[:, :, rows], held.own))
    tokens = jax.lax.dynamic_index_in_dim(state.ids_BWT, state.step - 1, axis=2).reshape(-1, 1)

    def one(params: Transformer, own: KeysValues, cross: KeysValues | None) -> Any:
        cache = replace(state.cache, held=replace(held, own=own, cross=cross))
        x_BTD, cache = extend(params, config, hyper, cache, tokens)
        return _log_p(params, config, hyper, x_BTD[:, 0]), cache.held.own, replace(cache, held=None)

    run = jax.vmap(one, in_axes=(axes, 1, 1), out_axes=(0, 1, None))
    logp_RBV, own, cache = run(stacked, held.own, held.cross)
    state = replace(state, cache=replace(cache, held=replace(held, own=own)))
    return state, _mean(logp_RBV).reshape(B, W, -1)


def _log_p(params: Transformer, config: Config, hyper: Hyper, x_BD: jax.Array) -> jax.Array:
    return jax.nn.log_softmax(logits_of(params, config, hyper, x_BD[:, None])[:, 0], axis=1)


def _mean(logp_RBV: jax.Array) -> jax.Array:
    """ln of the mean of the members' p. Never above 0, so that no sum of ln p grows."""
    R = logp_RBV.shape[0]
    return logp_RBV[0] if R == 1 else jnp.minimum(jax.nn.logsumexp(logp_RBV, axis=0) - jnp.log(R), 0.0)


def _followed(asked: Asked, state: State, logp_BWV: jax.Array) -> State:
    """Every live hypothesis followed by every id: the next live ones, and the best finished ones."""
    B, W, V = logp_BWV.shape
    live_BW = state.logp_BW > -jnp.inf
    nan_B = jnp.any(jnp.isnan(logp_BWV) & live_BW[..., None], axis=(1, 2))
    logp_BWV = jnp.where(live_BW[..., None] & ~asked.banned_V[None, None], logp_BWV, -jnp.inf)
    # Ranked by what is above the best live one: added to a long text's sum, near candidates would round to ties.
    most_B = jnp.max(state.logp_BW, axis=1)
    above_BW = state.logp_BW - jnp.where(most_B > -jnp.inf, most_B, 0.0)[:, None]
    ranked_BWV = above_BW[..., None] + logp_BWV

    def first(ranked_BWV: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Of the first W: whom they follow, with which id, the ids so far, the sum."""
        ranked, places = jax.lax.top_k(ranked_BWV.reshape(B, W * V), W)
        parents, ids = places // V, places % V
        sums = jnp.take_along_axis((state.logp_BW[..., None] + logp_BWV).reshape(B, W * V), places, axis=1)
        texts = jnp.take_along_axis(state.ids_BWT, parents[..., None], axis=1).at[:, :, state.step].set(ids)
        return parents, ids, texts, jnp.where(ranked > -jnp.inf, sums, -jnp.inf)

    parents_BW, _, ids_BWT, logp_BW = first(jnp.where(asked.stops_V[None, None], -jnp.inf, ranked_BWV))
    _, last_BW, ended_BWT, sums_BW = first(ranked_BWV)
    sums_BW = jnp.where(asked.stops_V[last_BW], sums_BW, -jnp.inf)
    t = state.step + 1
    best = _merged(state.best, _hypotheses(asked, ended_BWT, sums_BW, t))
    best = _where(state.done_B, state.best, best)
    longest = jnp.maximum(*(divisor(n, asked.added, asked.alpha) for n in (jnp.minimum(t + 1, asked.most), asked.most)))
    ended_B = best.scores_BW[:, -1] >= jnp.max(logp_BW, axis=1) / longest
    finished_B = state.finished_B + jnp.sum(sums_BW > -jnp.inf, axis=1)
    return replace(
        state,
        ids_BWT=ids_BWT,
        logp_BW=logp_BW,
        parents_BW=parents_BW,
        best=best,
        finished_B=finished_B,
        done_B=state.done_B | ended_B | (finished_B >= asked.enough) | nan_B,
        nan_B=state.nan_B | (nan_B & ~state.done_B),
        step=t,
    )


def _hypotheses(asked: Asked, ids_BWT: jax.Array, logp_BW: jax.Array, length: jax.Array) -> Beams:
    lengths_BW = jnp.broadcast_to(length, logp_BW.shape)
    return Beams(ids_BWT, lengths_BW, logp_BW / divisor(length, asked.added, asked.alpha), logp_BW)


def _merged(best: Beams, more: Beams) -> Beams:
    """The best of both, as many as `best` has; of equal ones, such as none at all, those that `best` has."""
    both = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), best, more)
    _, order = jax.lax.top_k(both.scores_BW, best.scores_BW.shape[1])
    return jax.tree.map(lambda x: jnp.take_along_axis(x, order.reshape(*order.shape, *[1] * (x.ndim - 2)), 1), both)


def _where(rows_B: jax.Array, a: Beams, b: Beams) -> Beams:
    return jax.tree.map(lambda x, y: jnp.where(rows_B.reshape(-1, *[1] * (x.ndim - 1)), x, y), a, b)


_search = jax.jit(search, static_argnames=("config", "room", "beam", "n_best"))


# --- on the host ------------------------------------------------------------------


def beam_search(
    params: Transformer | Sequence[Transformer],
    config: Config,
    hyper: Hyper,
    prompts: Rows,
    *,
    max_new_tokens: int,
    beam: int = 4,
    n_best: int = 1,
    stop_ids: Sequence[int] = (),
    penalty: Penalty | None = None,
    banned_ids: Sequence[int] = (),
    pad_id: int = 0,
    sources: Rows | None = None,
    enough: int = 0,
) -> Beams:
    """The n_best texts of up to max_new_tokens ids after each prompt, a row of ids of any length from 1 on.

    params: one tree, or several for an ensemble. beam: live hypotheses of a row, W. stop_ids: a text ends
    with the first of them, which is kept. penalty: None for none. banned_ids: never written, such as padding
    or rows of the vocabulary that no token has; the others' p are as they were. sources: an
    encoder-decoder's, one for each prompt (a prompt is then what the decoder begins with). enough: a row also
    ends when so many hypotheses have finished, whatever the others could still reach; 0: it does not.
    Raises ConfigError or DataError, one line, for what decode.generate refuses, numbers that are out of
    range, trees that differ in a shape, and, once it has searched, logits that are not finite.
    """
    members = (params,) if isinstance(params, Transformer) else tuple(params)
    penalty = Penalty() if penalty is None else penalty
    check_beam(beam, n_best, penalty, enough)
    check_request(config, hyper, prompts, max_new_tokens, Sampler(), [*stop_ids, *banned_ids, pad_id], sources)
    _check_members(members)
    given, room = laid_out(config, hyper, prompts, sources, max_new_tokens)
    asked = Asked(
        given,
        id_mask(stop_ids, config.V),
        id_mask(banned_ids, config.V),
        jnp.float32(PENALTIES[penalty.kind]),
        jnp.float32(penalty.alpha),
        jnp.int32(1 if beam == 1 else enough or NEVER),
        jnp.int32(max_new_tokens),
        jnp.int32(pad_id),
    )
    found, nan_B = _search(members, config, on_device(hyper), asked, room, beam, n_best)
    if np.any(nan_B):
        raise NotFiniteError(f"the model's logits are not finite in row {int(np.argmax(nan_B))}: nothing to rank")
    return replace(found, ids_BWT=found.ids_BWT[:, :, :max_new_tokens])


def check_beam(beam: int, n_best: int, penalty: Penalty, enough: int = 0) -> None:
    """Raise ConfigError, naming the values, for a width, a number of results or a penalty that cannot be."""
    if enough and enough < n_best:
        raise ConfigError(f"enough={enough} is out of range: at least n_best={n_best}, or 0")
    if beam < 1:
        raise ConfigError(f"beam={beam} is out of range: at least 1")
    if not 1 <= n_best <= beam:
        raise ConfigError(f"n_best={n_best} is out of range: from 1 to beam={beam}")
    if penalty.kind not in PENALTIES:
        raise unknown("length penalty", str(penalty.kind), PENALTIES)
    if not abs(penalty.alpha) <= MOST_ALPHA:
        raise ConfigError(f"alpha={penalty.alpha:g} of the length penalty is out of range: from -10 to 10")


def _check_members(members: tuple[Transformer, ...]) -> None:
    if not members:
        raise ConfigError("an ensemble of no models: at least 1")
    shapes = [
        {jax.tree_util.keystr(path, simple=True, separator="/"): x.shape for path, x in leaves}
        for leaves in map(jax.tree_util.tree_leaves_with_path, members)
    ]
    for i, others in enumerate(shapes):
        odd = [name for name in {**shapes[0], **others} if shapes[0].get(name) != others.get(name)]
        if odd:
            raise ConfigError(
                f"model {i} of the ensemble is of another shape: {odd[0]} is {others.get(odd[0])}, "
                f"in model 0 {shapes[0].get(odd[0])}"
            )
