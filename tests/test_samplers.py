"""Samplers: hand values, one documented order, and a second implementation in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.quick import jit
from transformer_jax.errors import ConfigError
from transformer_jax.exact import distribution
from transformer_jax.samplers import GREEDY, Sampler, adjusted, check_sampler, draw, log_probability

run = jit(adjusted)


def kept(logits: Any, **numbers: Any) -> list[int]:
    """Ids of the first row that may be drawn."""
    return np.flatnonzero(np.isfinite(of(logits, **numbers)[0])).tolist()


def of(logits: Any, seen: Any = None, **numbers: Any) -> np.ndarray:
    rows = jnp.atleast_2d(jnp.asarray(logits, jnp.float32))
    seen = jnp.zeros(rows.shape, bool) if seen is None else jnp.atleast_2d(jnp.asarray(seen))
    return np.asarray(run(rows, Sampler(**numbers).of_rows(len(rows)), seen))


def test_l1_temperature_zero_is_the_argmax_beside_rows_that_are_not() -> None:
    logits = np.random.default_rng(0).normal(size=(4, 7))
    for numbers in ({}, {"top_k": 3, "top_p": 0.9, "min_p": 0.1}):
        got = of(logits, temperature=jnp.asarray([0.0, 0.7, 0.0, 1e-6]), **numbers)
        assert not np.isnan(got).any()
        for row in (0, 2):
            assert np.flatnonzero(np.isfinite(got[row])).tolist() == [logits[row].argmax()]
        assert np.isfinite(got[1]).sum() > 1
        p = np.asarray(jax.nn.softmax(got[3]))
        assert p[logits[3].argmax()] == 1 and np.isfinite(p).all()
    for step in range(20):
        drawn = draw(jax.random.key(0), jnp.asarray(got), jnp.arange(4), jnp.int32(step))
        assert drawn[0] == logits[0].argmax() and drawn[3] == logits[3].argmax()
    assert kept([1.0, 5.0, 5.0], temperature=0.0) == [1]  # of equal ones the first


def test_l2_top_p_keeps_the_id_that_crosses_it() -> None:
    assert kept(np.log([0.5, 0.41, 0.09]), top_p=0.9) == [0, 1]
    assert kept(np.log([0.4, 0.3, 0.2, 0.1]), top_p=0.8) == [0, 1, 2]
    assert kept(np.log([0.4, 0.3, 0.2, 0.1]), top_p=1.0) == [0, 1, 2, 3]
    assert kept(np.log([0.4, 0.3, 0.2, 0.1]), top_p=1e-30) == [0]
    # Off means off: a sum in float32 reaches 1 long before the last of many unlikely ids.
    assert len(kept(np.r_[50.0, np.zeros(500)], top_p=1.0)) == 501


def test_l4_top_k_leaves_exactly_k_ties_or_not() -> None:
    logits = np.random.default_rng(1).normal(size=9)
    for k in (1, 2, 3, 8, 9):
        assert kept(logits, top_k=k) == sorted(np.argsort(-logits)[:k].tolist())
    assert kept([2.0, 3.0, 2.0, 2.0, 1.0], top_k=3) == [0, 1, 2]
    assert kept(np.zeros(5), top_k=2) == [0, 1]


def test_l5_top_k_at_its_bounds() -> None:
    logits = np.random.default_rng(2).normal(size=5)
    plain = of(logits)
    np.testing.assert_array_equal(of(logits, top_k=5), plain)
    np.testing.assert_array_equal(of(logits, top_k=0), plain)
    check_sampler(Sampler(top_k=5), 5)
    for k in (50, 6, -1):
        with pytest.raises(ConfigError, match=f"top_k={k} is out of range: .* vocabulary's 5"):
            check_sampler(Sampler(top_k=k), 5)


def test_l6_the_penalty_lowers_what_was_seen_whatever_its_sign() -> None:
    got = of([2.0, -2.0, 1.0], seen=[True, True, False], repetition_penalty=2.0)[0]
    np.testing.assert_allclose(got - got[0], [0.0, -5.0, 0.0])  # 1, -4 and 1
    plain = of([2.0, -2.0, 1.0])
    np.testing.assert_array_equal(of([2.0, -2.0, 1.0], seen=[True] * 3, repetition_penalty=1.0), plain)
    np.testing.assert_array_equal(of([2.0, -2.0, 1.0], seen=[False] * 3, repetition_penalty=9.0), plain)


def test_l7_temperature_comes_before_top_p() -> None:
    assert kept([3.0, 2.0, 1.0], temperature=0.5, top_p=0.8) == [0]
    assert kept([3.0, 2.0, 1.0], temperature=1.0, top_p=0.8) == [0, 1]


def test_the_penalty_comes_first_and_top_p_counts_what_top_k_left() -> None:
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    # Of the three 0.4 is 0.44 and 0.7 is 0.78: two reach 0.75. Of all four it takes three.
    assert kept(logits, top_k=3, top_p=0.75) == [0, 1]
    assert kept(logits, top_p=0.75) == [0, 1, 2]
    # Logits below 0: the penalty squares 0.4 to 0.16, and the first is then id 1.
    assert kept(logits, seen=[True, False, False, False], repetition_penalty=2.0, top_k=1) == [1]


def test_min_p_is_a_part_of_the_largest_probability() -> None:
    logits = np.log([0.5, 0.26, 0.24])
    assert kept(logits, min_p=0.5) == [0, 1] and kept(logits, min_p=0.4) == [0, 1, 2]
    assert kept(logits, min_p=1.0) == [0] and kept(logits, min_p=0.0) == [0, 1, 2]
    assert kept(logits, min_p=0.5, temperature=2.0) == [0, 1, 2]


def test_every_row_equals_the_second_implementation() -> None:
    """300 rows of random logits and numbers, equal logits among them, against lists in float64."""
    rng, B, V = np.random.default_rng(3), 300, 7
    logits = np.round(rng.normal(scale=2.0, size=(B, V)), 1).astype(np.float32)
    seen = rng.random((B, V)) < 0.3
    numbers = Sampler(
        temperature=np.where(rng.random(B) < 0.2, 0, rng.uniform(0.2, 2.0, B)),
        top_k=rng.integers(0, V + 1, B),
        top_p=np.where(rng.random(B) < 0.3, 1, rng.uniform(0.05, 1.0, B)),
        min_p=np.where(rng.random(B) < 0.3, 0, rng.uniform(0.0, 1.0, B)),
        repetition_penalty=rng.uniform(0.5, 2.0, B),
    )
    got = jax.nn.softmax(run(jnp.asarray(logits), numbers.of_rows(B), jnp.asarray(seen)))
    for b in range(B):
        plain = jax.tree.map(lambda x, b=b: np.asarray(x)[b].item(), numbers.of_rows(B))
        want = distribution(np.asarray(logits[b], np.float64), set(np.flatnonzero(seen[b]).tolist()), plain)
        np.testing.assert_allclose(got[b], want, atol=2e-6, err_msg=f"row {b}: {plain}")


def test_draws_belong_to_a_row_and_a_step() -> None:
    logits = jnp.zeros((6, 1000))
    key, rows = jax.random.key(4), jnp.arange(6)
    first = draw(key, logits, rows, jnp.int32(0))
    assert len(set(first.tolist())) > 1
    np.testing.assert_array_equal(
        draw(key, logits[:2], rows[jnp.asarray([4, 1])], jnp.int32(0)), first[jnp.asarray([4, 1])]
    )
    assert (draw(key, logits, rows, jnp.int32(1)) != first).sum() >= 5
    assert (draw(jax.random.key(5), logits, rows, jnp.int32(0)) != first).sum() >= 5


def test_log_probabilities() -> None:
    logits = jnp.log(jnp.asarray([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]]))
    np.testing.assert_allclose(log_probability(logits, jnp.asarray([1, 2])), np.log([0.25, 0.7]), rtol=1e-5)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"temperature": -1.0}, "temperature=-1 is out of range: at least 0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": np.array([0.0, -0.5])}, "temperature=-0.5"),
        ({"top_p": 0.0}, "top_p=0 is out of range: above 0, at most 1"),
        ({"top_p": 1.01}, "top_p=1.01"),
        ({"min_p": -0.1}, "min_p=-0.1 is out of range: from 0 to 1"),
        ({"min_p": 2.0}, "min_p=2"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0 is out of range: above 0"),
        ({"top_k": 1.5}, "top_k=1.5"),
    ],
)  # fmt: skip
def test_numbers_that_mean_nothing_are_refused(numbers: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_sampler(Sampler(**numbers), 5)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_the_defaults_change_nothing() -> None:
    check_sampler(Sampler(), 5)
    check_sampler(GREEDY, 5)
    logits = np.random.default_rng(6).normal(size=(3, 5))
    np.testing.assert_allclose(
        jax.nn.softmax(of(logits, seen=np.ones((3, 5), bool))), jax.nn.softmax(logits), atol=1e-6
    )
