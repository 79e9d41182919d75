"""Order that nothing but order tells: which of two symbols came first? (the second training of claim G04)

A row is a permutation of all symbols, and then a question. Every row has the same tokens: a model that is blind to
their order answers every row alike, right in half of them and at ln 2 nats at best. The answer is no token of the row.
"""

import functools
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import stats
from experiments.claims.paired import LOWER
from experiments.claims.record import Numbers, Words, at_least, at_most, shown
from experiments.claims.training import best_rate, kept
from experiments.program import run_key
from transformer_jax import keys, sharding
from transformer_jax.batch import Batch
from transformer_jax.config import Config, Hyper, to_dict
from transformer_jax.data.tasks import EVALUATION_SEED
from transformer_jax.encoder_decoder import Transformer, forward, init_transformer
from transformer_jax.losses import Sums, cross_entropy
from transformer_jax.optim import optimizer
from transformer_jax.train import batch_key

SYMBOLS, SEEDS = 8, 6
RATES = (3e-3, 1e-2, 3e-2)
STEPS, HELD_OUT = 300, 32  # updates, and evaluation batches of each split
# Ids: the symbols, then the question; the answers "no" and "yes" are ids 0 and 1.
BASE = Config(
    vocab_size=SYMBOLS + 1, seq_len=SYMBOLS + 1, batch_size=32, d_model=32, num_heads=2, num_layers=2, d_ff=64
)
ARMS = {
    "causal": BASE.replace(positions="none"),
    "bidirectional": BASE.replace(positions="none", mask="none"),
    "told": BASE.replace(positions="sinusoidal", mask="none"),
}
NAMES = {  # of those that can know
    "causal": Words("causal, no positions", "因果，不加位置编码"),
    "told": Words("bidirectional, sinusoidal positions", "双向，正余弦编码"),
}


def rows(key: jax.Array) -> Batch:
    """B rows of all symbols in a random order and the question: did symbol 0 come before symbol 1?"""
    B, T = BASE.batch_size, BASE.seq_len
    order_BS = jnp.argsort(jax.random.uniform(key, (B, SYMBOLS)), axis=1).astype(jnp.int32)
    tokens_BT = jnp.concatenate([order_BS, jnp.full((B, 1), SYMBOLS, jnp.int32)], axis=1)
    place = [jnp.argmax(order_BS == symbol, axis=1) for symbol in (0, 1)]
    answer_B = (place[0] < place[1]).astype(jnp.int32)
    asked_T = (jnp.arange(T) == T - 1)[None]
    return Batch(tokens_BT, answer_B[:, None] * asked_T, jnp.broadcast_to(asked_T, (B, T)).astype(jnp.float32))


def held_out_key(split: str, i: jax.Array) -> jax.Array:
    """The key of the i-th evaluation batch of a split; training draws from others."""
    return jax.random.fold_in(keys.named(jax.random.key(EVALUATION_SEED), split), i)


def fit(config: Config, rate: jax.Array, key: jax.Array) -> dict[str, jax.Array]:
    """Train; the loss on one split, loss and accuracy on the other. Arms that share a key share their batches."""
    hyper = Hyper(learning_rate=rate)
    rule: Any = optimizer(config, hyper)

    def sums(params: Transformer, batch: Batch) -> Sums:
        return cross_entropy(forward(params, config, hyper, batch)[0], batch.targets_BT, batch.weights_BT)

    def step(state: tuple[Any, Any], i: jax.Array) -> tuple[tuple[Any, Any], None]:
        params, moments = state
        slopes = jax.grad(lambda p: sums(p, rows(batch_key(key, i))).loss)(params)
        updates, moments = rule.update(slopes, moments, params)
        return (jax.tree.map(jnp.add, params, updates), moments), None

    def held_out(params: Transformer, split: str) -> Sums:
        def one(total: Sums, i: jax.Array) -> tuple[Sums, None]:
            return total + sums(params, rows(held_out_key(split, i))), None

        return jax.lax.scan(one, Sums.zero(), jnp.arange(HELD_OUT))[0]

    start = init_transformer(keys.named(key, "init"), config)
    (params, _), _ = jax.lax.scan(step, (start, rule.init(start)), jnp.arange(STEPS))
    report = held_out(params, "report")
    return {"selection": held_out(params, "selection").loss, "loss": report.loss, "accuracy": report.accuracy}


def runs(name: str) -> dict[str, Any]:
    """An arm at every rate, from every seed: each number of `fit` [rates, seeds]."""
    mesh = sharding.runs_mesh()
    settings = [(rate, seed) for rate in RATES for seed in range(SEEDS)]
    filled = settings + [settings[-1]] * (-len(settings) % mesh.size)  # copies fill the devices
    rates = jnp.asarray([rate for rate, _ in filled], jnp.float32)
    all_keys = jnp.stack([run_key(seed) for _, seed in filled])
    one = sharding.over_runs(functools.partial(fit, ARMS[name]), mesh, shared=0, donate=False)
    found = one(*sharding.place_runs((rates, all_keys), mesh))
    shape = (len(RATES), SEEDS)
    return {name: np.asarray(x, np.float64)[: len(settings)].reshape(shape).tolist() for name, x in found.items()}


def chance() -> float:
    """The part of the report's questions whose answer is yes."""
    every = jax.jit(jax.vmap(lambda i: rows(held_out_key("report", i)).targets_BT[:, -1]))(jnp.arange(HELD_OUT))
    return float(np.mean(every))


def which_came_first(folder: Path) -> Numbers:
    """Causal knows and bidirectional, with positions, knows; without them it guesses, at every rate and seed."""
    found = {}
    for name, config in ARMS.items():
        settings = {"steps": STEPS, "seeds": SEEDS, "held_out": HELD_OUT, "rates": list(RATES)}
        settings["config"] = to_dict(config)
        found[name] = kept(folder / f"{name}.json", settings, functools.partial(runs, name))
    for name in ("causal", "told"):
        best = best_rate(NAMES[name].en, dict(zip(RATES, found[name]["selection"], strict=True)))
        mean, low, _ = stats.mean_interval(found[name]["accuracy"][RATES.index(best)])
        label = Words(f"which came first: right, {NAMES[name].en}", f"先后判断的正确率，{NAMES[name].zh}")
        yield shown(f"first_{name}", label, math.nan if mean is None else mean, "float32")
        label = Words(f"{label.en}, {LOWER.en}", f"{label.zh}，{LOWER.zh}")
        yield at_least(f"first_{name}_low", label, math.nan if low is None else low, 0.9, "float32")
    blind, yes = found["bidirectional"], chance()
    label = Words(
        "bidirectional, no positions: |right − ½|, most of all runs", "双向，不加位置编码：|正确率 − ½|，最大者"
    )
    off = np.max(np.abs(np.asarray(blind["accuracy"]) - 0.5))
    # A coin's share of heads is off by less than four standard errors.
    yield at_most("first_off", label, off, 4 * 0.5 / math.sqrt(HELD_OUT * BASE.batch_size), "float32")
    label = Words("the same: least loss of all runs, nats", "同上：所有训练中的最小损失（nat）")
    # One answer to all questions costs no less than the entropy of the answers.
    least = -yes * math.log(yes) - (1 - yes) * math.log(1 - yes)
    yield at_least("first_nats", label, np.min(np.asarray(blind["loss"])), least - 2.0**-22, "float32")
    label = Words("bidirectional, no positions: right, mean of all runs", "双向，不加位置编码：正确率，所有训练的均值")
    yield shown("first_blind", label, np.mean(np.asarray(blind["accuracy"])), "float32")
    yield shown("first_runs", Words("runs of it", "其训练次数"), np.size(blind["accuracy"]))
