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

Several trees of parameters are an ensemble: the next id's p is the mean of theirs. They may be of several
Configs, as long as they read and write the same ids.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from transformer_jax.attention import KeysValues
from transformer_jax.cache import Cache, extend
from transformer_jax.config import Config, Hyper, to_dict
from transformer_jax.decode import Given, Room, Rows, check_request, id_mask, laid_out, on_device, read
from transformer_jax.encoder_decoder import Transformer, init_transformer, logits_of
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
class Group:
    """Members of an ensemble that are of one Config and Hyper, and what they are given; config, room: static."""

    members: tuple[Transformer, ...]
    hyper: Hyper
    given: Given
    config: Config = struct.field(pytree_node=False)
    room: Room = struct.field(pytree_node=False)

    def stacked(self) -> tuple[Transformer, Any]:
        """The members' parameters in one tree, and the axis of each leaf that counts them."""
        # They stand after L, which the scan over layers takes first.
        axes = jax.tree_util.tree_map_with_path(
            lambda path, _: int(any(getattr(part, "name", "") == "layers" for part in path)), self.members[0]
        )
        return jax.tree.map(lambda axis, *leaves: jnp.stack(leaves, axis), axes, *self.members), axes


@struct.dataclass
class Asked:
    """What is asked for a batch, all of it traced.

    stops_V, banned_V: booleans. added, alpha: the penalty's numbers. enough: finished hypotheses that end a row.
    """

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

    caches: of each group of members, which are axis 1 of its keys and values; B W rows, before the last ids and
    in the order of the live ones of the step before, of which parents_BW were followed. finished_B: how many
    have finished; nan_B: rows that met NaN.
    """

    caches: tuple[Cache, ...]
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


def search(groups: tuple[Group, ...], asked: Asked, beam: int, n_best: int) -> tuple[Beams, jax.Array]:
    """`beam_search` for a batch that is padded already, and the rows that met NaN [B]: pure, for use inside jit."""
    runs = [_run(group) for group in groups]

    def more(state: State) -> jax.Array:
        return (state.step < asked.most) & ~jnp.all(state.done_B)

    def step(state: State) -> State:
        return _followed(asked, *_advanced(runs, state))

    state = _begun(runs, asked, max(group.room.new for group in groups), beam, n_best)
    state = jax.lax.while_loop(more, step, state)
    cut = _hypotheses(asked, state.ids_BWT, state.logp_BW, state.step)
    return _where(state.done_B, state.best, _merged(state.best, cut)), state.nan_B


class _Run(NamedTuple):
    """A group's programs. begin() -> its cache, for W = 1, and ln p [R, B, V]; advance(cache, rows, tokens) -> both."""

    begin: Callable[[], tuple[Cache, jax.Array]]
    advance: Callable[[Cache, jax.Array, jax.Array], tuple[Cache, jax.Array]]


def _run(group: Group) -> _Run:
    """The members, vmapped: each has keys and values of its own, and they share what stands where."""
    config, hyper, (stacked, axes) = group.config, group.hyper, group.stacked()

    def begin() -> tuple[Cache, jax.Array]:
        def one(params: Transformer) -> Any:
            cache, x_BD = read(params, config, hyper, group.given, group.room)
            return _log_p(params, config, hyper, x_BD), cache.held, replace(cache, held=None)

        logp_RBV, held, cache = jax.vmap(one, in_axes=(axes,), out_axes=(0, 1, None))(stacked)
        return replace(cache, held=held), logp_RBV

    def advance(cache: Cache, rows: jax.Array, tokens: jax.Array) -> tuple[Cache, jax.Array]:
        # All live ones of a row are as long: the rest of the cache is the same for each.
        held = replace(cache.held, own=jax.tree.map(lambda x: x[:, :, rows], cache.held.own))

        def one(params: Transformer, own: KeysValues, cross: KeysValues | None) -> Any:
            mine = replace(cache, held=replace(held, own=own, cross=cross))
            x_BTD, mine = extend(params, config, hyper, mine, tokens)
            return _log_p(params, config, hyper, x_BTD[:, 0]), mine.held.own, replace(mine, held=None)

        run = jax.vmap(one, in_axes=(axes, 1, 1), out_axes=(0, 1, None))
        logp_RBV, own, longer = run(stacked, held.own, held.cross)
        return replace(longer, held=replace(held, own=own)), logp_RBV

    return _Run(begin, advance)


def _begun(runs: Sequence[_Run], asked: Asked, new: int, W: int, n_best: int) -> State:
    """Read the source and the prompts, and follow them by the first ids; `new`: ids that there is room for."""
    begun = [run.begin() for run in runs]
    logp_BV = _mean([logp for _, logp in begun])
    B, V = logp_BV.shape

    def widened(cache: Cache) -> Cache:
        held = replace(cache.held, own=jax.tree.map(lambda x: jnp.repeat(x, W, axis=2), cache.held.own))
        places, lengths = (jnp.repeat(x, W, axis=0) for x in (cache.positions_BS, cache.lengths_B))
        return replace(cache, held=held, positions_BS=places, lengths_B=lengths)

    none = jnp.full((B, n_best), -jnp.inf)
    state = State(
        tuple(widened(cache) for cache, _ in begun),
        jnp.full((B, W, new), asked.pad_id),
        # There is one prompt to follow.
        jnp.broadcast_to(jnp.where(jnp.arange(W) == 0, 0.0, -jnp.inf), (B, W)),
        jnp.zeros((B, W), jnp.int32),
        Beams(jnp.full((B, n_best, new), asked.pad_id), jnp.zeros((B, n_best), jnp.int32), none, none),
        jnp.zeros(B, jnp.int32),
        jnp.zeros(B, bool),
        jnp.zeros(B, bool),
        jnp.zeros((), jnp.int32),
    )
    return _followed(asked, state, jnp.broadcast_to(logp_BV[:, None], (B, W, V)))


def _advanced(runs: Sequence[_Run], state: State) -> tuple[State, jax.Array]:
    """The members read the last ids: the state with its caches in the order of the live ones, and ln p [B, W, V]."""
    B, W = state.logp_BW.shape
    rows = (jnp.arange(B)[:, None] * W + state.parents_BW).reshape(-1)
    tokens = jax.lax.dynamic_index_in_dim(state.ids_BWT, state.step - 1, axis=2).reshape(-1, 1)
    made = [run.advance(cache, rows, tokens) for run, cache in zip(runs, state.caches, strict=True)]
    state = replace(state, caches=tuple(cache for cache, _ in made))
    return state, _mean([logp for _, logp in made]).reshape(B, W, -1)


def _log_p(params: Transformer, config: Config, hyper: Hyper, x_BD: jax.Array) -> jax.Array:
    return jax.nn.log_softmax(logits_of(params, config, hyper, x_BD[:, None])[:, 0], axis=1)


def _mean(logps_RBV: Sequence[jax.Array]) -> jax.Array:
    """ln of the mean of all members' p. Never above 0, so that no sum of ln p grows."""
    logp_RBV = logps_RBV[0] if len(logps_RBV) == 1 else jnp.concatenate(logps_RBV)
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


_search = jax.jit(search, static_argnames=("beam", "n_best"))


# --- on the host ------------------------------------------------------------------


def beam_search(
    params: Transformer | Sequence[Transformer],
    config: Config | Sequence[Config],
    hyper: Hyper | Sequence[Hyper],
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

    params: one tree, or several for an ensemble; config, hyper: one for all of them, or one for each.
    beam: live hypotheses of a row, W. stop_ids: a text ends with the first of them, which is kept. penalty:
    None for none. banned_ids: never written, such as padding or rows of the vocabulary that no token has; the
    others' p are as they were. sources: an encoder-decoder's, one for each prompt (a prompt is then what the
    decoder begins with). enough: a row also ends when so many hypotheses have finished, whatever the
    others could still reach; 0: it does not.
    Raises ConfigError or DataError, one line, for what decode.generate refuses, numbers that are out of
    range, members that do not fit their Config or read other ids than the first, and, once it has
    searched, logits that are not finite.
    """
    members = (params,) if isinstance(params, Transformer) else tuple(params)
    configs = [config] * len(members) if isinstance(config, Config) else list(config)
    hypers = [hyper] * len(members) if isinstance(hyper, Hyper) else list(hyper)
    penalty = Penalty() if penalty is None else penalty
    check_beam(beam, n_best, penalty, enough)
    _check_members(members, configs, hypers)
    others = [*stop_ids, *banned_ids, pad_id]
    for one, numbers in zip(configs, hypers, strict=True):
        check_request(one, numbers, prompts, max_new_tokens, Sampler(), others, sources)
    V = configs[0].V
    asked = Asked(
        id_mask(stop_ids, V),
        id_mask(banned_ids, V),
        jnp.float32(PENALTIES[penalty.kind]),
        jnp.float32(penalty.alpha),
        jnp.int32(1 if beam == 1 else enough or NEVER),
        jnp.int32(max_new_tokens),
        jnp.int32(pad_id),
    )
    groups = tuple(
        Group(tuple(members[i] for i in alike), on_device(hypers[first]), given, configs[first], room)
        for first, alike in _grouped(configs, hypers).items()
        for given, room in [laid_out(configs[first], hypers[first], prompts, sources, max_new_tokens)]
    )
    # On a mesh another device may still be in a collective when the first one's numbers are there to be read.
    found, nan_B = jax.block_until_ready(_search(groups, asked, beam, n_best))
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


def _grouped(configs: Sequence[Config], hypers: Sequence[Hyper]) -> dict[int, list[int]]:
    """The first of those that are alike in Config and Hyper -> all of them."""
    groups: dict[int, list[int]] = {}
    for i, made in enumerate(zip(configs, hypers, strict=True)):
        first = next((j for j in groups if configs[j] == made[0] and to_dict(hypers[j]) == to_dict(made[1])), i)
        groups.setdefault(first, []).append(i)
    return groups


def _check_members(members: Sequence[Transformer], configs: Sequence[Config], hypers: Sequence[Hyper]) -> None:
    if not members:
        raise ConfigError("an ensemble of no models: at least 1")
    if not len(members) == len(configs) == len(hypers):
        raise ConfigError(f"an ensemble of {len(members)} models, {len(configs)} Configs and {len(hypers)} Hypers")

    def shapes(tree: Any) -> dict[str, tuple[int, ...]]:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {jax.tree_util.keystr(path, simple=True, separator="/"): x.shape for path, x in leaves}

    def ids(config: Config) -> dict[str, Any]:
        return {"architecture": config.architecture, "V": config.V, "source ids": config.source_vocab_size or config.V}

    for i, (params, config) in enumerate(zip(members, configs, strict=True)):
        wanted = shapes(jax.eval_shape(partial(init_transformer, config=config), jax.random.key(0)))
        found = shapes(params)
        odd = [name for name in {**wanted, **found} if wanted.get(name) != found.get(name)]
        if odd:
            raise ConfigError(
                f"model {i} of the ensemble does not fit its Config: {odd[0]} is {found.get(odd[0])}, "
                f"not {wanted.get(odd[0])}"
            )
        for name, value in ids(config).items():
            if value != ids(configs[0])[name]:
                raise ConfigError(
                    f"model {i} of the ensemble reads other ids: {name} is {value}, in model 0 {ids(configs[0])[name]}"
                )
