"""Markov chains: a language whose best possible loss is known to the last digit."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.batch import Batch
from transformer_jax.config import Config
from transformer_jax.data.tasks import Task, generated, need, next_token, symbol_names
from transformer_jax.errors import DataError
from transformer_jax.keys import named

MAX_STATES = 64  # an order-2 table has states³ entries: 1 MiB on the device at most
TABLE_SEED = 20170612
SHARPNESS = 3.0
UNIFORM_PART = 0.05
ORDER = 2  # of the chain that a Config names: order 1 needs no attention at all


def transition_table(states: int, order: int) -> np.ndarray:
    """p(next | the last `order` symbols): float64 [states] * (order + 1), the last axis sums to 1.

    Each row is 0.95 w_i / sum w + 0.05 / states with w = (-log u)**3, u uniform: a power of 1
    would be a flat Dirichlet, 3 makes some continuations likely, and the uniform part makes
    even small chains forget where they began. The seed is fixed: every run of a given
    size meets the same language.
    """
    # RandomState's stream is frozen by NumPy; that of default_rng may change between releases.
    uniform = np.random.RandomState(TABLE_SEED).random_sample((states,) * (order + 1))
    weights = (-np.log1p(-uniform)) ** SHARPNESS
    return (1 - UNIFORM_PART) * weights / weights.sum(axis=-1, keepdims=True) + UNIFORM_PART / states


def stationary(table: np.ndarray) -> np.ndarray:
    """Stationary distribution over contexts, float64 [states] * order, by power iteration.

    Every entry of the table is positive, so that it exists, is unique, and is reached.
    """
    contexts = table.shape[:-1]
    chance = np.full(contexts, 1.0 / np.prod(contexts))
    for _ in range(100_000):  # the largest chain needs a few dozen, the slowest (2 states) a few hundred
        after = (chance[..., None] * table).sum(axis=0)
        after /= after.sum()
        if np.abs(after - chance).max() < 1e-15:
            break
        chance = after
    return after


def chain_of(config: Config) -> np.ndarray:
    """The `transition_table` of the chain that a model of `config` (its vocabulary known) learns from."""
    return transition_table(min(config.V, MAX_STATES), ORDER)


def _entropy(chance: np.ndarray) -> float:
    return float(-(chance * np.log(chance)).sum())


def entropy_rate(table: np.ndarray) -> float:
    """Nats per symbol in the long run: sum over contexts of pi(c) H(p(. | c)) (Shannon 1948, §7)."""
    return float(-(stationary(table)[..., None] * table * np.log(table)).sum())


def mean_floor(table: np.ndarray, targets: int) -> float:
    """Least mean loss over the first `targets` predictions of a row that starts in the stationary state.

    Prediction j sees j symbols (1, 2, …). While j < order it knows only a part of its
    context and costs H(block of j+1) - H(block of j); after that it costs the entropy rate.
    """
    chance, order = stationary(table), table.ndim - 1
    blocks = [_entropy(chance.sum(axis=tuple(range(k, order)))) for k in range(1, order + 1)]
    early = [longer - shorter for shorter, longer in itertools.pairwise(blocks)][:targets]
    return (sum(early) + (targets - len(early)) * entropy_rate(table)) / targets


def _cumulative(chance: np.ndarray) -> jax.Array:
    """Upper borders of the intervals of [0, 1) that stand for each outcome, along the last axis."""
    upper = np.cumsum(chance, axis=-1)
    upper[..., -1] = 1.0  # above every uniform draw, so that no outcome is past the last
    return jnp.asarray(upper, jnp.float32)


def markov_task(config: Config, order: int = ORDER) -> Task:
    """A chain of order 1 or 2 over the first min(V, 64) ids; all targets count.

    data: {"start_C": float32, "next_CV": float32}, cumulative chances of the first context
    and of the next symbol, C = states**order. floor: `mean_floor`, exact for this seq_len.
    Raises DataError for vocab_size below 2, an architecture other than "decoder" (an
    encoder would see the next symbol), and an order other than 1 or 2.
    """
    if order not in (1, 2):
        raise DataError(f"a Markov chain of order {order}: choose 1 or 2")
    if config.architecture != "decoder":
        raise DataError(
            f"task markov is next-symbol prediction: it needs architecture=decoder, not {config.architecture}"
        )
    need(config, "vocab_size", 2)
    B, T, states = config.batch_size, config.seq_len, min(config.V, MAX_STATES)
    table = transition_table(states, order)
    contexts = states**order

    def draw(data: dict[str, jax.Array], key: jax.Array) -> Batch:
        start_B = jax.random.uniform(named(key, "start"), (B,))
        context_B = jnp.searchsorted(data["start_C"], start_B, side="right").astype(jnp.int32)
        first_OB = jnp.stack([context_B // states**k % states for k in reversed(range(order))])

        def step(context_B: jax.Array, uniform_B: jax.Array) -> tuple[jax.Array, jax.Array]:
            next_B = (data["next_CV"][context_B] <= uniform_B[:, None]).sum(axis=1, dtype=jnp.int32)
            return (context_B * states + next_B) % contexts, next_B

        uniform_TB = jax.random.uniform(named(key, "steps"), (max(0, T + 1 - order), B))
        _, rest_TB = jax.lax.scan(step, context_B, uniform_TB)
        row_BW = jnp.concatenate([first_OB, rest_TB])[: T + 1].T
        return next_token(row_BW, jnp.ones((B, T + 1), bool))

    data = {
        "start_C": _cumulative(stationary(table).reshape(-1)),
        "next_CV": _cumulative(table.reshape(contexts, states)),
    }
    return generated(config, mean_floor(table, T), draw, symbol_names(states), data)
