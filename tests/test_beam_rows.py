"""Beam search against one that has no cache, and a row against itself among others: ids and scores, every beam."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.quick import jit
from tests.test_beam import PAIR as BIASED
from tests.test_beam import Scored, hypotheses, model, same
from tests.test_decode import HYPER, parameters
from transformer_jax.batch import Batch
from transformer_jax.beam import Penalty, beam_search
from transformer_jax.config import Config, Hyper
from transformer_jax.encoder_decoder import Transformer, forward

pytestmark = pytest.mark.usefixtures("quick_decoding")
PAIR = BIASED.replace(output_bias=False)  # a bias's favourite would be written again and again
MOST, W = 9, 4
STOPS, BANNED, START = (2, 10), (0, 1), 1
POWER = Penalty("power", 1.0)


def sources(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 17, rng.integers(1, longest + 1)).tolist() for _ in range(count)]


@functools.partial(jit, static_argnums=0)
def _forward(config: Config, params: Transformer, batch: Batch) -> jax.Array:
    return jax.nn.log_softmax(forward(params, config, HYPER, batch)[0].astype(jnp.float32), axis=-1)


def naive(source: list[int], beam: int) -> Scored:
    """The hypotheses of one source by the rules of beam.py's docstring: each step reads the whole texts again."""
    live: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    ended: Scored = []
    for t in range(MOST):
        tokens = np.zeros((beam, MOST), np.int32)  # one shape: what comes after a text does not reach it
        tokens[:, 0] = START
        for w, (ids, _) in enumerate(live):
            tokens[w, 1 : 1 + t] = ids
        read = jnp.asarray([source] * beam)
        batch = Batch(jnp.asarray(tokens), jnp.asarray(tokens), jnp.ones((beam, MOST)), source_BS=read)
        logp_WV = np.asarray(_forward(PAIR, parameters(PAIR), batch))[:, t]
        follow = [
            ((*ids, v), total + float(logp_WV[w, v]))
            for w, (ids, total) in enumerate(live)
            for v in range(PAIR.V)
            if v not in BANNED
        ]
        follow.sort(key=lambda one: -one[1])
        ended += [(ids, total / len(ids)) for ids, total in follow[:beam] if ids[-1] in STOPS]
        live = [one for one in follow if one[0][-1] not in STOPS][:beam]
        ended.sort(key=lambda one: -one[1])
        # A sum never grows, so that the longest text divides it best. With one beam the first stop id ends it.
        if len(ended) >= beam and (beam == 1 or ended[beam - 1][1] >= live[0][1] / MOST):
            return ended[:beam]
    return sorted([*ended, *((ids, total / MOST) for ids, total in live)], key=lambda one: -one[1])[:beam]


def found(config: Config, given: list[list[int]], beam: int) -> Any:
    return beam_search(
        parameters(config), config, HYPER, [[START]] * len(given), sources=given, beam=beam, n_best=beam,
        max_new_tokens=MOST, stop_ids=STOPS, banned_ids=BANNED, penalty=POWER,
    )  # fmt: skip


@pytest.mark.parametrize("beam", [1, W])
def test_m9_with_a_cache_it_is_the_search_without_one(beam: int) -> None:
    given = sources(12, 16)
    made = found(PAIR, given, beam)
    lengths = set()
    for row, source in enumerate(given):
        want = naive(source, beam)
        same(hypotheses(made, row), want)
        lengths |= {len(ids) for ids, _ in want}
    assert len(lengths) > 3, "texts of one length show little"


def alike(one: Any, row: int, other: Any, place: int, atol: float = 1e-5) -> None:
    np.testing.assert_array_equal(one.ids_BWT[row], other.ids_BWT[place])
    np.testing.assert_array_equal(one.lengths_BW[row], other.lengths_BW[place])
    np.testing.assert_allclose(one.scores_BW[row], other.scores_BW[place], rtol=0, atol=atol)
    np.testing.assert_allclose(one.logp_BW[row], other.logp_BW[place], rtol=0, atol=MOST * atol)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("beam", [1, W])
def test_m3_a_row_is_the_same_among_any_others(beam: int, dtype: str) -> None:
    """64 rows, one program: other sources beside it, at another place, or itself."""
    config, given = PAIR.replace(compute_dtype=dtype), sources(64, 16)
    whole = found(config, given, beam)
    backwards = found(config, given[::-1], beam)
    for row in range(64):
        alike(whole, row, backwards, 63 - row)
    for row in (0, 17, 40):
        alike(whole, row, found(config, [given[row]] * 64, beam), 5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("beam", [1, W])
def test_m3_a_row_is_the_same_alone_and_in_a_wider_bucket(beam: int, dtype: str) -> None:
    config, given = PAIR.replace(compute_dtype=dtype), sources(8, 16)
    whole, wider = found(config, given, beam), found(config, [*given[:7], [3] * 20], beam)
    for row in range(7):
        alike(whole, row, wider, row)
        alike(whole, row, found(config, [given[row]], beam), 0)


def test_m6_equal_probabilities_tie_whatever_the_length_and_the_prompt() -> None:
    """A model of zeros gives every id 1/V: with the mean of ln p, no length and no prompt is preferred."""
    zeros = jax.tree.map(jnp.zeros_like, model(0))
    config = Config(vocab_size=3, d_model=8, num_heads=2, num_layers=1, positions="alibi", seq_len=8)
    config = config.replace(tie_embeddings=False)
    prompts = [[0], [0, 2, 2], [2] * 7]
    made = beam_search(
        zeros, config, Hyper(), prompts, beam=8, n_best=8, max_new_tokens=5, stop_ids=(1,), penalty=POWER
    )
    lengths = np.asarray(made.lengths_BW)
    assert len(set(lengths.ravel().tolist())) > 2
    np.testing.assert_allclose(made.scores_BW, -np.log(3.0), rtol=0, atol=1e-6)
    np.testing.assert_allclose(made.logp_BW, -np.log(3.0) * lengths, rtol=0, atol=1e-5)
