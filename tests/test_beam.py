"""Beam search against every sequence there is, and the faults of other beam searches."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.quick import jit
from tests.test_decode import HYPER, SMALL, forward_of, parameters
from transformer_jax import beam as beam_module
from transformer_jax import decode
from transformer_jax.beam import Asked, Beams, Group, Penalty, beam_search, search
from transformer_jax.config import Config, Hyper
from transformer_jax.decode import Given, Prompts, Room
from transformer_jax.encoder_decoder import Transformer, init_transformer
from transformer_jax.errors import ConfigError, DataError
from transformer_jax.exact import outcomes
from transformer_jax.samplers import GREEDY

pytestmark = pytest.mark.usefixtures("quick_decoding")
V, NEW, STOP, PROMPT = 3, 4, 1, [0, 2]
TINY = Config(vocab_size=V, d_model=8, num_heads=2, num_layers=1, positions="alibi", seq_len=8, tie_embeddings=False)
PENALTIES = [Penalty(kind, alpha) for kind in ("gnmt", "power") for alpha in (-1.0, 0.0, 0.7, 1.0, 2.0)]
SEEDS = 6
ALL = 27  # as many beams as there are prefixes of 3 ids, so that nothing is ever cut
Scored = list[tuple[tuple[int, ...], float]]


@functools.cache
def model(seed: int) -> Transformer:
    """Sharper than at the start, so that what is best depends on the penalty."""
    return jax.tree.map(lambda x: 1.4 * x, init_transformer(jax.random.key(seed), TINY))


def penalised(logp: float, length: int, penalty: Penalty) -> float:
    return logp / (((5 + length) / 6) if penalty.kind == "gnmt" else length) ** penalty.alpha


def ranked(sequences: Any, logp: Any, penalty: Penalty) -> Scored:
    scored = [(ids, penalised(float(x), len(ids), penalty)) for ids, x in zip(sequences, logp, strict=True)]
    return sorted(scored, key=lambda one: -one[1])


def hypotheses(found: Beams, row: int = 0) -> Scored:
    ids, lengths, scores = (np.asarray(x)[row] for x in (found.ids_BWT, found.lengths_BW, found.scores_BW))
    return [(tuple(text[:n].tolist()), float(s)) for text, n, s in zip(ids, lengths, scores, strict=True) if n]


def same(got: Scored, want: Scored, atol: float = 1e-5) -> None:
    assert [ids for ids, _ in got] == [ids for ids, _ in want]
    np.testing.assert_allclose([s for _, s in got], [s for _, s in want], atol=atol)


def tiny(seeds: Sequence[int] = (0,), **options: Any) -> Beams:
    asked: dict[str, Any] = {"max_new_tokens": NEW, "stop_ids": (STOP,), "beam": ALL}
    return beam_search([model(seed) for seed in seeds], TINY, Hyper(), [PROMPT], **asked | options)


@functools.cache
def every(seed: int, stop_ids: tuple[int, ...] = (STOP,)) -> Any:
    return outcomes(model(seed), TINY, Hyper(), PROMPT, max_new_tokens=NEW, stop_ids=stop_ids)


# --- against every sequence ---------------------------------------------------------


@pytest.mark.parametrize("penalty", PENALTIES, ids=lambda p: f"{p.kind} {p.alpha:g}")
@pytest.mark.parametrize("seed", range(3))
def test_wide_enough_it_is_the_exhaustive_search(seed: int, penalty: Penalty) -> None:
    want = ranked(every(seed).sequences, np.log(every(seed).p), penalty)
    found = tiny([seed], penalty=penalty, n_best=5)
    same(hypotheses(found), want[:5])
    sums = np.asarray(found.logp_BW)[0]
    np.testing.assert_allclose(sums, [np.log(every(seed).probability(ids)) for ids, _ in want[:5]], atol=1e-5)


def test_the_penalties_change_what_is_best() -> None:
    """Else the test above would hold without them."""
    for seed in range(3):
        assert len({ranked(every(seed).sequences, np.log(every(seed).p), p)[0][0] for p in PENALTIES}) > 1


@pytest.mark.parametrize("stops", [(), (0, 1)])
def test_any_number_of_stop_ids(stops: tuple[int, ...]) -> None:
    want = ranked(every(0, stops).sequences, np.log(every(0, stops).p), Penalty("power", 1.0))
    same(hypotheses(tiny(stop_ids=stops, penalty=Penalty("power", 1.0), n_best=5)), want[:5])


def test_m10_l8_a_banned_id_is_never_written_and_changes_no_probability() -> None:
    """Padding, or a row of the output layer that no token has: here the most probable id."""
    worst = every(0).mode[0]
    stops = () if worst == STOP else (STOP,)
    left = [(ids, p) for ids, p in zip(every(0, stops).sequences, every(0, stops).p, strict=True) if worst not in ids]
    found = tiny(banned_ids=(worst,), stop_ids=stops, n_best=ALL, pad_id=worst)
    same(hypotheses(found), ranked([ids for ids, _ in left], np.log([p for _, p in left]), Penalty()))
    missing = np.asarray(found.lengths_BW)[0] == 0
    assert missing.sum() == ALL - len(left) > 0
    assert np.isneginf(np.asarray(found.scores_BW)[0, missing]).all()
    assert np.isneginf(np.asarray(found.logp_BW)[0, missing]).all()
    assert (np.asarray(found.ids_BWT)[0, missing] == worst).all()


# --- faults of others ---------------------------------------------------------------


@pytest.mark.parametrize("penalty", PENALTIES, ids=lambda p: f"{p.kind} {p.alpha:g}")
def test_m4_m5_asking_for_more_does_not_change_the_best(penalty: Penalty) -> None:
    for seed in range(3):
        best = ranked(every(seed).sequences, np.log(every(seed).p), penalty)[0]
        for n_best in (1, 5):
            same(hypotheses(tiny([seed], penalty=penalty, n_best=n_best))[:1], [best])


def test_m5_it_stops_as_soon_as_nothing_can_be_better_and_no_sooner() -> None:
    """The ids of live hypotheses when the loop ends, for all penalties in one program, against a bound by hand."""

    def step(params: Transformer, added: jax.Array, alpha: jax.Array) -> jax.Array:
        asked, given = _asked([STOP], NEW, TINY, added=added, alpha=alpha), _given([PROMPT])
        with pytest.MonkeyPatch.context() as patch:
            ends: list[jax.Array] = []
            real = beam_module._hypotheses
            patch.setattr(beam_module, "_hypotheses", lambda *a: (ends.append(a[3]), real(*a))[1])
            search((Group((params,), Hyper(), given, TINY, Room(8, 2, NEW, False)),), asked, ALL, 1)
        return ends[-1]

    added, alpha = zip(*((beam_module.PENALTIES[p.kind], p.alpha) for p in PENALTIES), strict=True)
    run = jit(jax.vmap(step, (None, 0, 0)))
    for seed in range(SEEDS):
        steps = run(model(seed), jnp.asarray(added), jnp.asarray(alpha))
        assert steps.tolist() == [_steps_by_hand(seed, p) for p in PENALTIES], seed


def test_m5_early_stopping_asks_for_less_work_where_it_can() -> None:
    """Else the test above would hold for a search that never stops, or always at once."""
    assert {_steps_by_hand(seed, p) for seed in range(SEEDS) for p in PENALTIES} > {2, 4}


def _given(prompts: Any) -> Given:
    return Given(jnp.asarray(prompts, jnp.int32), jnp.ones(np.shape(prompts), bool))


def _asked(stops: Any, most: int, config: Config, *, added: Any, alpha: Any, enough: int = 1 << 30) -> Asked:
    stops_V, none_V = jnp.asarray(np.isin(np.arange(config.V), stops)), jnp.zeros(config.V, bool)
    numbers = (jnp.asarray(added), jnp.asarray(alpha), jnp.int32(enough), jnp.int32(most), jnp.int32(0))
    return Asked(stops_V, none_V, *numbers)


def _steps_by_hand(seed: int, penalty: Penalty) -> int:
    found = dict(zip(every(seed).sequences, np.log(every(seed).p), strict=True))
    for t in range(1, NEW + 1):
        ended = [penalised(x, len(ids), penalty) for ids, x in found.items() if ids[-1] == STOP and len(ids) <= t]
        live = {}
        for ids, x in found.items():
            if len(ids) > t or (len(ids) == t and ids[-1] != STOP):
                live[ids[:t]] = np.logaddexp(live.get(ids[:t], -np.inf), x)
        reach = max(penalised(x, n, penalty) for x in live.values() for n in range(min(t + 1, NEW), NEW + 1))
        if max(ended) >= reach:
            return t
    return NEW


def test_enough_ends_a_row_with_the_finished_ones_so_far() -> None:
    """The best of the first three, one of the first step and two of the second: better ones are longer."""
    penalty, found = Penalty("power", 2.0), dict(zip(every(0).sequences, np.log(every(0).p), strict=True))
    ended = {ids: x for ids, x in found.items() if ids[-1] == STOP and len(ids) <= 2}
    assert len(ended) == 3
    early = hypotheses(tiny(penalty=penalty, enough=3))
    same(early, ranked(ended, ended.values(), penalty)[:1])
    assert hypotheses(tiny(penalty=penalty))[0][1] > early[0][1]


def test_m8_a_beam_of_one_ends_with_its_first_stop_id_whatever_the_penalty() -> None:
    """Where longer ones gain so much that a search that went on would have written more."""
    lengths = []
    for seed in range(SEEDS):
        options: dict[str, Any] = {"max_new_tokens": NEW, "stop_ids": (STOP,)}
        greedy = outcomes(model(seed), TINY, Hyper(), PROMPT, GREEDY, **options).mode
        [(ids, _)] = hypotheses(tiny([seed], beam=1, penalty=Penalty("power", 10.0)))
        assert ids == greedy
        lengths.append(len(ids))
    assert min(lengths) < NEW


def test_m8_near_candidates_of_a_long_text_are_told_apart() -> None:
    """1e-5 is less than a sum of -1000 can hold: id 2 is the more probable, and greedy decoding takes it."""
    asked, given = _asked([], 2, TINY, added=0.0, alpha=0.0), _given([PROMPT])

    def begun(p: Transformer) -> Any:
        group = Group((p,), Hyper(), given, TINY, Room(8, 2, NEW, False))
        return beam_module._begun([beam_module._run(group)], asked, NEW, 1, 1)

    state = jax.eval_shape(begun, model(0))
    state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state)
    state = state.replace(logp_BW=jnp.asarray([[-1000.0]]))
    next_state = jit(beam_module._followed)(asked, state, jnp.asarray([[[-5.0, -1.00001, -1.0]]]))
    assert int(next_state.ids_BWT[0, 0, 0]) == 2


RANDOM, WIDE = 200, 12
MANY = SMALL.replace(num_layers=1, positions="sinusoidal")


@pytest.fixture(scope="module")
def many() -> tuple[Beams, Any]:
    """200 random models in one program: a beam of 1, and greedy decoding."""
    params = jax.vmap(lambda k: init_transformer(k, MANY))(jax.random.split(jax.random.key(7), RANDOM))
    prompts, stops, room = [[3, 1], [4, 8]], [5, 6], Room(16, 2, WIDE, False)
    asked, given = _asked(stops, WIDE, MANY, added=0.0, alpha=1.0, enough=1), _given(prompts)
    greedy = Prompts(
        given,
        jax.random.key(0),
        jnp.arange(2),
        GREEDY.of_rows(2),
        asked.stops_V,
        asked.banned_V,
        jnp.int32(WIDE),
        jnp.int32(0),
    )

    @jit
    def both(params: Transformer) -> Any:
        params = jax.tree.map(lambda x: 2.0 * x, params)
        return jax.vmap(
            lambda p: (
                search((Group((p,), HYPER, given, MANY, room),), asked, 1, 1)[0],
                decode.write(p, MANY, HYPER, greedy, room),
            )
        )(params)

    return both(params)


def test_m8_a_beam_of_one_is_greedy_decoding(many: tuple[Beams, Any]) -> None:
    found, greedy = many
    np.testing.assert_array_equal(found.lengths_BW[:, :, 0], greedy.lengths_B)
    np.testing.assert_array_equal(found.ids_BWT[:, :, 0], greedy.ids_BT)
    np.testing.assert_allclose(found.logp_BW[:, :, 0], greedy.logp_BT.sum(-1), atol=1e-4)
    lengths = np.asarray(found.lengths_BW)
    assert (lengths < WIDE).sum() > 50 and (lengths == WIDE).sum() > 50


# --- rows, caches, rescoring --------------------------------------------------------

TEXT = SMALL.replace(positions="t5")
PAIR = SMALL.replace(
    num_layers=1, architecture="encoder_decoder", positions="t5", source_vocab_size=17, output_bias=True
)
OPTIONS: dict[str, Any] = {
    "beam": 4, "n_best": 4, "max_new_tokens": 9, "stop_ids": (2, 7), "penalty": Penalty("gnmt", 0.8), "pad_id": 3
}  # fmt: skip


def rows(count: int, longest: int, most: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, most, rng.integers(1, longest + 1)).tolist() for _ in range(count)]


@pytest.fixture(scope="module")
def thirty() -> tuple[list[list[int]], Beams]:
    prompts = rows(30, 20, 11, 0)
    assert max(map(len, prompts)) > 16  # another bucket than the short ones alone have
    return prompts, beam_search(parameters(TEXT), TEXT, HYPER, prompts, **OPTIONS)


def test_m1_m3_a_row_is_as_alone(thirty: tuple[list[list[int]], Beams]) -> None:
    prompts, found = thirty
    for b in [b for b in range(30) if len(prompts[b]) <= 16][::2]:
        alone = beam_search(parameters(TEXT), TEXT, HYPER, [prompts[b]], **OPTIONS)
        np.testing.assert_array_equal(found.ids_BWT[b], alone.ids_BWT[0])
        np.testing.assert_array_equal(found.lengths_BW[b], alone.lengths_BW[0])
        np.testing.assert_allclose(found.scores_BW[b], alone.scores_BW[0], atol=1e-5)


def test_m2_each_hypothesis_has_one_stop_id_at_its_end_and_pads_after_it(
    thirty: tuple[list[list[int]], Beams],
) -> None:
    _, found = thirty
    lengths = np.asarray(found.lengths_BW)
    assert lengths.min() >= 1 and len(set(lengths.ravel().tolist())) > 3
    for text, length in zip(np.asarray(found.ids_BWT).reshape(-1, 9), lengths.ravel(), strict=True):
        stops = np.flatnonzero(np.isin(text[:length], OPTIONS["stop_ids"]))
        assert stops.tolist() == [length - 1] or (length == 9 and not stops.size)
        assert (text[length:] == 3).all()
    assert len({tuple(text) for text in np.asarray(found.ids_BWT)[0].tolist()}) == 4


def check_scores(config: Config, prompt: list[int], found: Beams, row: int, **parts: Any) -> None:
    """A forward pass over the prompt and a hypothesis gives its sum, and its own length the score."""
    for w in range(4):
        length = int(found.lengths_BW[row, w])
        text = np.asarray(found.ids_BWT)[row, w]  # pads and all, for one shape: they do not reach what is before them
        logp = np.asarray(jax.nn.log_softmax(forward_of(config, jnp.asarray([[*prompt, *text]]), **parts)[0], axis=-1))
        want = sum(logp[len(prompt) - 1 + t, text[t]] for t in range(length))
        np.testing.assert_allclose(found.logp_BW[row, w], want, atol=1e-4)
        np.testing.assert_allclose(found.scores_BW[row, w], want / ((5 + length) / 6) ** 0.8, atol=1e-4)


def test_m6_m9_the_forward_pass_gives_each_hypothesis_its_score(thirty: tuple[list[list[int]], Beams]) -> None:
    prompts, found = thirty
    longest = int(np.argmax([len(prompt) for prompt in prompts]))
    for row in (0, longest):
        check_scores(TEXT, prompts[row], found, row)


def test_m9_translations_too_whatever_the_others_sources() -> None:
    sources, prompts = [*rows(4, 12, 17, 1), [16] * 20], [[1], [4], [1, 2], [9], [1]]
    found = beam_search(parameters(PAIR), PAIR, HYPER, prompts, sources=sources, **OPTIONS)
    alone = beam_search(parameters(PAIR), PAIR, HYPER, prompts[2:3], sources=sources[2:3], **OPTIONS)
    same(hypotheses(found, 2), hypotheses(alone))
    check_scores(PAIR, prompts[0], found, 0, source_BS=jnp.asarray(sources[:1]))


def test_keys_and_values_of_a_source_are_not_repeated_for_its_beams() -> None:
    sources = [[1, 2], [3]]
    given, room = decode.laid_out(PAIR, HYPER, [[1], [2]], sources, 4)
    asked = _asked([2], 4, PAIR, added=5.0, alpha=0.0)

    def begun(p: Transformer) -> Any:
        group = Group((p,), HYPER, given, PAIR, room)
        return beam_module._begun([beam_module._run(group)], asked, room.new, 4, 1).caches[0].held

    held = jax.eval_shape(begun, parameters(PAIR))
    assert held.cross.k_BSKH.shape[1:4] == (1, 2, 16) and held.own.k_BSKH.shape[1:3] == (1, 8)


def test_k1_a_program_for_a_bucket_and_any_penalty() -> None:
    before = beam_module._search._cache_size()
    for n, penalty in enumerate(PENALTIES):
        beam_search(
            model(0),
            TINY,
            Hyper(),
            [[1] * (n + 1)],
            beam=2,
            max_new_tokens=n + 1,
            stop_ids=[0, 1][: n % 3],
            penalty=penalty,
        )
    assert beam_module._search._cache_size() - before == 1


def test_a_window_forgets_in_a_ring() -> None:
    """12 ids through a ring, the same as through a cache that holds all."""
    config = SMALL.replace(mask="window")
    prompts, options = [[3, 1, 4, 1, 5], [9]], OPTIONS | {"max_new_tokens": 12}
    hyper = HYPER.replace(window=2)
    found = beam_search(parameters(config), config, hyper, prompts, **options)
    _, room = decode.laid_out(config, hyper, prompts, None, 12)
    assert room.ring
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(beam_module, "laid_out", lambda *a: (decode.laid_out(*a)[0], Room(32, 16, 16, False)))
        whole = beam_search(parameters(config), config, hyper, prompts, **options)
    for b in range(2):
        same(hypotheses(found, b), hypotheses(whole, b))


# --- refusals -----------------------------------------------------------------------

MISTAKES: dict[str, dict[str, Any]] = {
    "beam=0 is out of range: at least 1": {"beam": 0},
    "n_best=5 is out of range: from 1 to beam=4": {"n_best": 5, "beam": 4},
    "n_best=0 is out of range": {"n_best": 0},
    "unknown length penalty 'gnnt': did you mean gnmt?": {"penalty": Penalty("gnnt", 1.0)},
    "alpha=nan of the length penalty is out of range": {"penalty": Penalty("gnmt", float("nan"))},
    "alpha=-11 of the length penalty is out of range: from -10 to 10": {"penalty": Penalty("power", -11)},
    "max_new_tokens=0 is out of range": {"max_new_tokens": 0},
    "id 3 at 1 is outside the vocabulary of 3": {"banned_ids": (3,)},
    "has no sources": {"sources": [[1]]},
    "enough=2 is out of range: at least n_best=3, or 0": {"n_best": 3, "enough": 2},
    "an ensemble of no models": {"seeds": ()},
}


@pytest.mark.parametrize("message", MISTAKES)
def test_what_cannot_be_done_is_refused_in_one_line(message: str) -> None:
    with pytest.raises((ConfigError, DataError)) as error:
        tiny(**MISTAKES[message])
    assert message in str(error.value) and "\n" not in str(error.value)


def test_logits_that_are_not_finite_are_an_error() -> None:
    bad = jax.tree.map(lambda x: x * jnp.nan, model(0))
    with pytest.raises(ConfigError, match="not finite in row 0"):
        beam_search([model(0), bad], TINY, Hyper(), [PROMPT], beam=2, max_new_tokens=NEW)
