"""How hidden scores are hidden: the constants of the field, added to the scores, against booleans.

    scores + sum over masks of (0 where it allows, c where it hides)          added after the scale
    (q.k + that sum) / sqrt(d_k)                                              added before it

for c in -inf, -1e4, -1e9 and the least number of the score type. The library does neither: a
hidden score has weight 0 exactly, and a row that sees nothing is 0 with gradient 0. Each constant
is tried on small inputs made to be hard, and in a short training on rows padded on the left.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax import masks, relative
from transformer_jax.config import FLOATS, Config, Hyper
from transformer_jax.data import make_task
from transformer_jax.embedding import embed
from transformer_jax.encoder_decoder import init_transformer, logits_of
from transformer_jax.layers import apply_stack
from transformer_jax.losses import cross_entropy
from transformer_jax.numerics import product
from transformer_jax.optim import optimizer
from transformer_jax.scores import Scoring, attention_scores, score_factor, weights_of
from transformer_jax.train import batch_key

MINIMUM = "minimum"
CONSTANTS = ("-inf", "-1e4", "-1e9", MINIMUM)
BOOLEAN = "boolean"
PLACEMENTS = ("after", "before")  # the scale
B, T, N, H = 2, 8, 2, 4
ROUNDING = 1e-6
LOW = -2e4  # an allowed score, which a hidden one must stay below

# Name -> what it puts to the test.
CASES = {
    "causal": "each row sees a key",
    "causal + padding": "two masks added, each row sees a key",
    "no key": "one mask, rows that see nothing",
    "no key, twice": "two masks added, both hide all of a row",
    "low score": f"causal, the only allowed score of a row is −{-LOW:g}",
}


@dataclasses.dataclass(frozen=True)
class Found:
    """One constant on one case, against booleans in the same score type.

    max_abs_difference: of the outputs that are numbers. hidden_weight: the largest weight of a hidden key.
    infinite: scores that are -inf after the addition. nan_gradients: of d/dq, d/dk, d/dv, though no
    row that sees nothing counts in what is differentiated.
    """

    constant: str
    score_dtype: str
    placement: str
    case: str
    max_abs_difference: float
    hidden_weight: float
    infinite: int
    nan_outputs: int
    nan_gradients: int

    @property
    def words(self) -> str:
        """The finding in a cell of a table."""
        if self.nan_outputs or self.nan_gradients:
            return f"NaN: {self.nan_outputs} outputs, {self.nan_gradients} slopes"
        if self.hidden_weight > 0:
            return f"off by {self.max_abs_difference:.2g}, hidden weight {self.hidden_weight:.2g}"
        # Two programs add the same products in two orders.
        return "equal" if self.max_abs_difference < ROUNDING else f"off by {self.max_abs_difference:.1g}"


def value(constant: str, dtype: str) -> float:
    """The number that a constant is in a type, infinities included."""
    least = float(jnp.finfo(dtype).min)
    number = least if constant == MINIMUM else float(constant)
    return float(jnp.asarray(number if number >= least else -np.inf, dtype))


def case(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """q, k, v [B, T, N, H] and the masks [2, B, 1, T, T] that are added, True may attend."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, B, T, N, H))
    causal, all_keys = np.tri(T, dtype=bool), np.ones((T, T), bool)
    first, second = np.stack([causal] * B), np.stack([all_keys] * B)
    keys = np.arange(T)
    if name == "causal + padding":
        second[1] &= keys[None] < 3
    elif name == "no key":  # padding on the left: the first three rows see nothing
        first[1] &= keys[None] >= 3
    elif name == "no key, twice":
        first[1, 2] = second[1, 2] = False
    elif name == "low score":  # of key 0, which alone row 0 may see
        q[:], k[:] = -100.0 * np.eye(H)[0], 0.0
        k[:, 0, :, 0] = -LOW / 100.0 * np.sqrt(H)
    return q, k, v, np.stack([first, second])[:, :, None]


def hidden_sum(allowed: jax.Array, constant: jax.Array, dtype: str) -> jax.Array:
    """The constant for each mask [M, …] that hides, added up in the score type: [...]."""
    total = jnp.zeros(allowed.shape[1:], dtype)
    for mask in allowed:
        total = total + jnp.where(mask, 0.0, constant.astype(dtype))
    return total


def by_addition(
    q: jax.Array, k: jax.Array, v: jax.Array, allowed: jax.Array, constant: jax.Array, dtype: str, before: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(out, weights, scores) of attention whose hidden scores have the constant added, before the scale or after it."""
    scoring = Scoring(score_dtype=dtype, dk_exponent=jnp.where(before, 0.0, 0.5))
    scores = attention_scores(q, k, scoring) + hidden_sum(allowed, constant, dtype)
    scores = scores * jnp.where(before, score_factor(q.shape[-1], 0.5, 1.0), 1.0).astype(dtype)
    weights = weights_of(scores, None, scoring)
    return product("bnts,bsnh->btnh", weights.astype(v.dtype), v), weights, scores


def by_boolean(q: jax.Array, k: jax.Array, v: jax.Array, allowed: jax.Array, dtype: str) -> jax.Array:
    """The library's own output."""
    scoring = Scoring(score_dtype=dtype)
    weights = weights_of(attention_scores(q, k, scoring), jnp.all(allowed, axis=0), scoring)
    return product("bnts,bsnh->btnh", weights.astype(v.dtype), v)


def try_out() -> list[Found]:
    """Every constant in every score type, placement and case."""
    inputs = [jnp.asarray(np.stack(parts)) for parts in zip(*(case(name) for name in CASES), strict=True)]
    q, k, v = (x.astype(jnp.float32) for x in inputs[:3])
    found = []
    for dtype in FLOATS:
        constants = jnp.asarray([value(name, dtype) for name in CONSTANTS], jnp.float32)
        numbers = _all_cases(q, k, v, inputs[3], constants, jnp.asarray([False, True]), dtype)
        for at in np.ndindex(len(PLACEMENTS), len(CASES), len(CONSTANTS)):
            row = {key: x[at].item() for key, x in numbers.items()}
            found.append(Found(CONSTANTS[at[2]], dtype, PLACEMENTS[at[0]], list(CASES)[at[1]], **row))
    return found


@functools.partial(jax.jit, static_argnums=6)
def _all_cases(
    q: jax.Array, k: jax.Array, v: jax.Array, allowed: jax.Array, constants: jax.Array, before: jax.Array, dtype: str
) -> dict[str, jax.Array]:
    """The numbers of Found, [placements, cases, constants] each."""

    def one(
        q: jax.Array, k: jax.Array, v: jax.Array, allowed: jax.Array, constant: jax.Array, before: jax.Array
    ) -> dict[str, jax.Array]:
        visible = jnp.all(allowed, axis=0)
        sees = jnp.any(visible, axis=-1)[:, 0, :, None, None]

        def counted(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
            made = by_addition(q, k, v, allowed, constant, dtype, before)
            return jnp.sum(jnp.where(sees, jnp.sin(made[0]), 0.0)), made

        slopes, (out, weights, scores) = jax.grad(counted, argnums=(0, 1, 2), has_aux=True)(q, k, v)
        gap = jnp.abs(out - by_boolean(q, k, v, allowed, dtype))
        leaked = jnp.where(visible | jnp.isnan(weights), 0.0, weights)
        return {
            "max_abs_difference": jnp.max(jnp.where(jnp.isnan(gap), 0.0, gap)),
            "hidden_weight": jnp.max(leaked).astype(jnp.float32),
            "infinite": jnp.sum(jnp.isneginf(scores)),
            "nan_outputs": jnp.sum(jnp.isnan(out)),
            "nan_gradients": jnp.sum(jnp.isnan(jnp.stack(slopes))),
        }

    over_constants = jax.vmap(one, in_axes=(None, None, None, None, 0, None))
    over_cases = jax.vmap(over_constants, in_axes=(0, 0, 0, 0, None, None))
    return jax.vmap(over_cases, in_axes=(None, None, None, None, None, 0))(q, k, v, allowed, constants, before)


# --- a short training --------------------------------------------------------------


def train(config: Config, hyper: Hyper, steps: int) -> list[dict[str, Any]]:
    """A model trained with each constant in each score type: rows with `loss` (last tenth) and `nan_step`.

    A quarter of the rows' positions, on average, is padding on the left: its own queries see nothing,
    nobody sees it, and no loss is counted there. The masks, causal and padding, are added.
    """
    rows = []
    for dtype in FLOATS:
        losses = np.asarray(_train(config.replace(mask="none", score_dtype=dtype), hyper, CONSTANTS, steps))
        for name, loss in zip((BOOLEAN, *CONSTANTS), losses, strict=True):
            bad = np.flatnonzero(~np.isfinite(loss))
            last = float(np.mean(loss[-max(1, steps // 10) :]))
            finite = {"loss": None, "nan_step": int(bad[0])} if len(bad) else {"loss": last, "nan_step": None}
            rows.append({"constant": name, "score_dtype": dtype, **finite})
    return rows


def _train(config: Config, hyper: Hyper, constants: Sequence[str], steps: int) -> jax.Array:
    """Losses [1 + constants, steps], booleans first; one program."""
    task, rule = make_task(config), optimizer(config, hyper)
    B, T = config.batch_size, config.seq_len
    pads_B = jnp.arange(B) * (T // 2) // max(1, B - 1)
    real_BS = jnp.arange(T)[None] >= pads_B[:, None]
    causal = jnp.broadcast_to(jnp.tri(T, dtype=bool)[None, None], (B, 1, T, T))
    planes = jnp.stack([causal, jnp.broadcast_to(real_BS[:, None, None], (B, 1, T, T))])
    allowed, places = jnp.all(planes, axis=0), jnp.arange(T)[None]

    def run(constant: jax.Array, boolean: jax.Array, data: Any) -> jax.Array:
        mask = masks.dense(allowed | ~boolean)
        bias = relative.dense(jnp.where(boolean, 0.0, hidden_sum(planes, constant, config.score_dtype)))

        def objective(params: Any, key: jax.Array) -> jax.Array:
            batch = task.train_batch(data, key)
            x = embed(params.embedding, jnp.where(real_BS, batch.tokens_BT, 0), places, config)
            x, _ = apply_stack(params.decoder, x, config, hyper, mask=mask, positions_BT=places, bias=bias)
            weights_BT = jnp.where(real_BS, batch.weights_BT, 0.0)
            return cross_entropy(logits_of(params, config, hyper, x), batch.targets_BT, weights_BT).loss

        def step(carry: tuple[Any, Any], i: jax.Array) -> tuple[tuple[Any, Any], jax.Array]:
            params, state = carry
            loss, slopes = jax.value_and_grad(objective)(params, batch_key(jax.random.key(0), i))
            updates, state = rule.update(slopes, state, params)
            return (jax.tree.map(jnp.add, params, updates), state), loss

        start: Any = init_transformer(jax.random.key(0), config)
        return jax.lax.scan(step, (start, rule.init(start)), jnp.arange(steps))[1]

    numbers = [0.0, *(value(name, config.score_dtype) for name in constants)]
    flags = [True] + [False] * len(constants)
    every = jax.jit(lambda c, boolean, data: jax.lax.map(lambda x: run(x[0], x[1], data), (c, boolean)))
    return every(jnp.asarray(numbers), jnp.asarray(flags), task.data)
