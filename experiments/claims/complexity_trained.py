"""The training of chapter I: a recurrent net against attention on recall, by the number of symbols (claim I08)."""

import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import stats
from experiments.claims.record import Curves, Numbers, Words, at_least, shown
from experiments.claims.training import best_rate, kept
from experiments.program import run_key
from transformer_jax import keys, sharding
from transformer_jax.batch import Batch
from transformer_jax.config import Config, Hyper, to_dict
from transformer_jax.data import Task, make_task
from transformer_jax.encoder_decoder import forward, init_transformer
from transformer_jax.losses import Sums, cross_entropy
from transformer_jax.optim import optimizer
from transformer_jax.train import batch_key

SYMBOLS, SEEDS = (6, 12, 24), 6
RATES = {"attention": (1e-3, 2.5e-3, 6e-3), "gru": (2.5e-3, 6e-3, 1.5e-2)}
LEARNT = 0.99  # of the answers right
STEPS, HELD_OUT = 1000, 8  # updates, and evaluation batches of each n and split
ARMS = ("attention", "gru")
# A block of n/2 to n of n symbols, again and again to the end of the row: what followed this symbol before?
BASE = Config(task="induction", seq_len=48, batch_size=8, d_model=64, num_heads=2, num_layers=2, d_ff=64, scan_unroll=0)


def config_of(n: int) -> Config:
    """Rows over the first n symbols; the model's own config is that of the largest n."""
    return BASE.replace(vocab_size=n + 3)


class Arm(NamedTuple):
    """A model as two functions: key -> parameters, and (parameters, batch) -> logits [B, T, V]."""

    init: Callable[[jax.Array], Any]
    logits: Callable[[Any, Batch], jax.Array]


def attention(config: Config) -> Arm:
    """The library's decoder."""
    return Arm(
        lambda key: init_transformer(key, config), lambda params, batch: forward(params, config, Hyper(), batch)[0]
    )


def gru(config: Config) -> Arm:
    """A gated recurrent unit (Cho et al. 2014) of width 2 D, about as many numbers as the decoder has.

    z, r = σ(W x + U h), c = tanh(W x + U (r h)), h' = z h + (1 - z) c.
    """
    D, V, width = config.D, config.V, 2 * config.D

    def init(key: jax.Array) -> dict[str, jax.Array]:
        sizes = {"embed": (V, D), "w": (D, 3 * width), "u": (width, 2 * width), "c": (width, width), "out": (width, V)}
        drawn = {name: keys.normal(key, name, size, size[0] ** -0.5) for name, size in sizes.items()}
        return drawn | {"embed": drawn["embed"] * math.sqrt(V), "b": jnp.zeros(3 * width)}

    def logits(params: dict[str, jax.Array], batch: Batch) -> jax.Array:
        x = params["embed"][batch.tokens_BT]
        x = x @ params["w"] + params["b"][None, None]

        def step(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            z, r = jnp.split(jax.nn.sigmoid(x[:, : 2 * width] + h @ params["u"]), 2, axis=-1)
            h = z * h + (1 - z) * jnp.tanh(x[:, 2 * width :] + (r * h) @ params["c"])
            return h, h

        _, states = jax.lax.scan(step, jnp.zeros((x.shape[0], width)), jnp.swapaxes(x, 0, 1))
        return jnp.swapaxes(states, 0, 1) @ params["out"]

    return Arm(init, logits)


def fit(arm: Arm, steps: int, rate: jax.Array, key: jax.Array) -> dict[str, jax.Array]:
    """Train with Adam on rows of every n at once; the loss on one split, the accuracy [n] on the other.

    Arms that share a key share their batches.
    """
    rule: Any = optimizer(Config(), Hyper(learning_rate=rate))
    tasks = [make_task(config_of(n)) for n in SYMBOLS]

    def sums(params: Any, batch: Batch) -> Sums:
        return cross_entropy(arm.logits(params, batch), batch.targets_BT, batch.weights_BT)

    def step(state: tuple[Any, Any], i: jax.Array) -> tuple[tuple[Any, Any], None]:
        params, moments = state
        parts = [task.train_batch(task.data, batch_key(key, i)) for task in tasks]
        batch = jax.tree.map(lambda *rows: jnp.concatenate(rows), *parts)
        updates, moments = rule.update(jax.grad(lambda p: sums(p, batch).loss)(params), moments)
        return (jax.tree.map(jnp.add, params, updates), moments), None

    def held_out(params: Any, task: Task, split: str) -> Sums:
        def one(total: Sums, i: jax.Array) -> tuple[Sums, None]:
            return total + sums(params, task.eval_batch(task.data, split, i)), None

        return jax.lax.scan(one, Sums.zero(), jnp.arange(HELD_OUT))[0]

    params = arm.init(keys.named(key, "init"))
    (params, _), _ = jax.lax.scan(step, (params, rule.init(params)), jnp.arange(steps))
    chosen = [held_out(params, task, "selection").loss for task in tasks]
    reported = [held_out(params, task, "report").accuracy for task in tasks]
    return {"loss": jnp.mean(jnp.stack(chosen)), "accuracy": jnp.stack(reported)}


def runs(name: str, seeds: int = SEEDS, steps: int = STEPS) -> dict[str, Any]:
    """An arm at every rate, from every seed: "loss" of the selection split [rates, seeds], "accuracy" of the report
    [rates, seeds, symbols]."""
    arm = {"attention": attention, "gru": gru}[name](config_of(SYMBOLS[-1]))
    mesh = sharding.runs_mesh()
    settings = [(rate, seed) for rate in RATES[name] for seed in range(seeds)]
    filled = settings + [settings[-1]] * (-len(settings) % mesh.size)  # copies fill the devices
    rates = jnp.asarray([rate for rate, _ in filled], jnp.float32)
    all_keys = jnp.stack([run_key(seed) for _, seed in filled])
    one = sharding.over_runs(functools.partial(fit, arm, steps), mesh, shared=0, donate=False)
    found = one(*sharding.place_runs((rates, all_keys), mesh))
    shape = (len(RATES[name]), seeds)
    loss = np.asarray(found["loss"], np.float64)[: len(settings)].reshape(shape)
    accuracy = np.asarray(found["accuracy"], np.float64)[: len(settings)].reshape(*shape, len(SYMBOLS))
    return {"loss": loss.tolist(), "accuracy": accuracy.tolist()}


def chosen(name: str, found: Mapping[str, Any]) -> list[list[float]]:
    """Accuracy of an arm by n and seed, at its own best rate: chosen on one split, reported on the other."""
    names = {"attention": Words("attention", "注意力"), "gru": Words("GRU", "GRU")}
    best = best_rate(names[name], dict(zip(RATES[name], found["loss"], strict=True)))
    return np.asarray(found["accuracy"])[RATES[name].index(best)].T.tolist()


def judged(found: dict[tuple[str, int], list[float]]) -> Numbers:
    """The numbers of I08 from accuracies by arm, n and seed."""
    least, most = SYMBOLS[0], SYMBOLS[-1]
    ends = {key: stats.mean_interval(values) for key, values in found.items()}

    def end(name: str, n: int, side: int) -> float:
        value = ends[name, n][side]
        return math.nan if value is None else value

    # Shown: of six seeds one attention arm has not learnt so many symbols at all, and no p is small.
    apart = stats.mean_interval([a - b for a, b in zip(found["gru", most], found["attention", most], strict=True)])
    ends_of = {
        "sooner": Words("mean", "均值"),
        "sooner_low": Words("lower end", "区间下端"),
        "sooner_high": Words("upper end", "区间上端"),
    }
    for (name, text), x in zip(ends_of.items(), apart, strict=True):
        label = Words(
            f"accuracy at n = {most}, GRU − attention: {text.en}", f"n = {most} 的正确率，GRU − 注意力：{text.zh}"
        )
        yield shown(name, label, math.nan if x is None else x, "float32")
    lost = [a - b for a, b in zip(found["gru", least], found["gru", most], strict=True)]
    low = stats.mean_interval(lost)[1]
    label = Words(
        f"GRU, accuracy lost from n = {least} to {most}: lower end", f"GRU 从 n = {least} 到 {most} 损失的正确率：下端"
    )
    # More than guessing among the symbols would lose.
    yield at_least("lost", label, math.nan if low is None else low, 1 / least - 1 / most, "float32")
    label = Words(f"GRU, n = {least}: lower end", f"GRU，n = {least}：下端")
    yield at_least("gru_low", label, end("gru", least, 1), 0.9, "float32")
    label = Words(f"attention, n = {most}: median of the seeds", f"注意力，n = {most}：各种子的中位数")
    yield at_least("kept", label, np.median(found["attention", most]), LEARNT, "float32")
    for name, words in (("attention", Words("attention", "注意力")), ("gru", Words("GRU", "GRU"))):
        for n in SYMBOLS:
            label = Words(f"{words.en}, n = {n}", f"{words.zh}，n = {n}")
            yield shown(f"{name}{n}", label, np.median(found[name, n]), "float32")
            yield shown(f"{name}{n}_mean", Words(f"{label.en}, mean", f"{label.zh}，均值"), end(name, n, 0), "float32")
            text = Words(f"{label.en}: seeds above {LEARNT:.0%}", f"{label.zh}：超过 {LEARNT:.0%} 的种子数")
            yield shown(f"{name}{n}_learnt", text, sum(x >= LEARNT for x in found[name, n]))
    yield shown("seeds", Words("seeds", "种子数"), len(found["gru", most]))
    lines = {name: (list(SYMBOLS), [end(name, n, 0) for n in SYMBOLS]) for name in ARMS}
    caption = Words("Accuracy of recall among n symbols.", "在 n 个符号中回忆的正确率。")
    yield Curves(caption, "n", "accuracy", lines)


def recall(folder: Path) -> Numbers:
    """Accuracy against n for both arms; what is done is kept in the folder."""
    found: dict[tuple[str, int], list[float]] = {}
    for name in ARMS:
        settings = {
            "steps": STEPS,
            "seeds": SEEDS,
            "symbols": list(SYMBOLS),
            "held_out": HELD_OUT,
            "rates": list(RATES[name]),
            "keeps": ["loss", "accuracy"],
            "config": to_dict(config_of(SYMBOLS[-1])),
        }
        made = kept(folder / f"{name}.json", settings, functools.partial(runs, name))
        found |= {(name, n): of for n, of in zip(SYMBOLS, chosen(name, made), strict=True)}
    yield from judged(found)
