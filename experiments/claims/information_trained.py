"""Chapter E's training: small students of one teacher, by three divergences (E15).

The teacher is a Markov chain of order 2, whose probabilities are known; a student has too few numbers for all of
them, so that what it gives up tells the divergences apart. Students of all directions share seeds: initial weights
and batches are the same.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import stats
from experiments.claims.paired import apart, lower
from experiments.claims.record import Numbers, Words, shown
from experiments.claims.training import best_rate, kept
from experiments.program import run_key
from transformer_jax.batch import Batch
from transformer_jax.config import Config, Hyper, to_dict
from transformer_jax.data import make_task
from transformer_jax.data.markov import ORDER, chain_of
from transformer_jax.encoder_decoder import Transformer, forward, init_transformer
from transformer_jax.losses import DISTILLATIONS, distillation, entropy, kl_divergence
from transformer_jax.optim import optimizer
from transformer_jax.train import batch_key

SEEDS = 10
RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
STUDENT = Config(
    task="markov",
    vocab_size=12,
    d_model=8,
    num_heads=1,
    num_layers=1,
    d_ff=16,
    seq_len=32,
    batch_size=8,
    steps=1500,
    scan_unroll=0,
)
Scores = dict[str, dict[str, list[list[float]]]]  # direction -> split_metric -> [rates][seeds]


def against(config: Config, table: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """(the teacher's logits [B, T, V], 1 where its context is whole): the token itself and the one before it."""
    before = jnp.roll(batch.tokens_BT, 1, axis=1)
    known = jnp.broadcast_to(jnp.arange(config.seq_len) >= ORDER - 1, batch.tokens_BT.shape)
    return jnp.log(table)[before, batch.tokens_BT], known.astype(jnp.float32)


def students(config: Config, direction: str, seeds: int) -> dict[str, jax.Array]:
    """Train every one of RATES with every seed: split_metric -> [rates, seeds], a mean over the split's predictions."""
    task, table = make_task(config), jnp.asarray(chain_of(config), jnp.float32)

    def one(rate: jax.Array, key: jax.Array) -> dict[str, jax.Array]:
        hyper = Hyper(learning_rate=rate)
        rule: Any = optimizer(config, hyper)
        start = init_transformer(key, config)

        def loss(params: Transformer, batch: Batch) -> jax.Array:
            teacher, known = against(config, table, batch)
            total, count = distillation(forward(params, config, hyper, batch)[0], teacher, known, direction=direction)
            return total / count

        def step(carry: Any, i: jax.Array) -> tuple[Any, None]:
            params, state = carry
            slopes = jax.grad(loss)(params, task.train_batch(task.data, batch_key(key, i)))
            updates, state = rule.update(slopes, state, params)
            return (jax.tree.map(jnp.add, params, updates), state), None

        (params, _), _ = jax.lax.scan(step, (start, rule.init(start)), jnp.arange(config.steps))

        def judged(split: str) -> dict[str, jax.Array]:
            def of(index: jax.Array) -> dict[str, jax.Array]:
                batch = task.eval_batch(task.data, split, index)
                teacher, known = against(config, table, batch)
                student = forward(params, config, hyper, batch)[0]
                sums = {
                    "forward": kl_divergence(teacher, student, known)[0],
                    "reverse": kl_divergence(student, teacher, known)[0],
                    "entropy": jnp.sum(entropy(student) * known),
                }
                return {f"{split}_{name}": x / jnp.sum(known) for name, x in sums.items()}

            every = jax.lax.map(of, jnp.arange(task.eval_batches[split]))
            return {name: jnp.mean(x) for name, x in every.items()}

        return judged("selection") | judged("report")

    keys = jnp.stack([run_key(seed) for seed in range(seeds)])
    return jax.jit(lambda rates: jax.lax.map(lambda rate: jax.lax.map(lambda key: one(rate, key), keys), rates))(
        jnp.asarray(RATES)
    )


def asked(config: Config, seeds: int, folder: Path) -> Scores:
    """All directions; one that `folder` holds already is read."""
    of = {"config": to_dict(config), "seeds": seeds, "rates": list(RATES)}

    def scores(direction: str) -> dict[str, Any]:
        return {"scores": {name: np.asarray(x).tolist() for name, x in students(config, direction, seeds).items()}}

    return {
        direction: kept(folder / f"{direction}.json", of, functools.partial(scores, direction))["scores"]
        for direction in DISTILLATIONS
    }


def judged_by(by: str, metric: str) -> Words:
    """What a caveat says of students taught in a direction and judged by the other or the same."""
    zh = {"forward": "正向 KL", "reverse": "反向 KL", "jensen_shannon": "JS 散度"}
    return Words(f"{by} → {metric}", f"按{zh[by]}训练，以{zh[metric]}衡量")


def chosen(by: str, scores: Mapping[str, list[list[float]]], metric: str) -> list[float]:
    """A metric of the report split by seed, at the rate that is best for it on the selection split."""
    best = best_rate(judged_by(by, metric), dict(zip(RATES, scores[f"selection_{metric}"], strict=True)))
    return scores[f"report_{metric}"][RATES.index(best)]


def narrow(by: str, scores: Mapping[str, list[list[float]]], metric: str) -> list[float]:
    """The students' entropy by seed, at the rate that is best for `metric`."""
    best = best_rate(judged_by(by, metric), dict(zip(RATES, scores[f"selection_{metric}"], strict=True)))
    return scores["report_entropy"][RATES.index(best)]


def directions(folder: Path, config: Config = STUDENT, seeds: int = SEEDS) -> Numbers:
    """The forward direction is the better one by its own measure, and the reverse gives the narrower student.

    Narrower with each at the rate that is best for its own loss. By KL(student‖teacher) the two do not differ, nor in
    entropy where KL(teacher‖student) chooses the rate of both: these are shown, not judged.
    """
    scores = asked(config, seeds, folder)
    gap = {(by, metric): chosen(by, scores[by], metric) for by in DISTILLATIONS for metric in ("forward", "reverse")}
    label = Words("KL(teacher‖student), trained by it − by the reverse", "KL(教师‖学生)：按它训练 − 按反向训练")
    yield from lower("covers", label, gap["forward", "forward"], gap["reverse", "forward"])
    wide = narrow("forward", scores["forward"], "forward")
    label = Words("the student's entropy, trained by the reverse − by forward", "学生的熵：按反向训练 − 按正向训练")
    yield from lower("seeks", label, narrow("reverse", scores["reverse"], "reverse"), wide)
    label = Words("the same, rates best for KL(teacher‖student)", "同上，按 KL(教师‖学生) 选学习率")
    early = {"reverse": narrow("reverse", scores["reverse"], "forward"), "forward": wide}
    yield from apart("early", label, stats.compare(early, [("reverse", "forward")], "entropy")[0].to_dict())
    label = Words("KL(student‖teacher), trained by it − by forward", "KL(学生‖教师)：按它训练 − 按正向训练")
    yield shown("reverse_mean", label, np.mean(np.subtract(gap["reverse", "reverse"], gap["forward", "reverse"])))
    for by, zh in zip(DISTILLATIONS, ("正向", "反向", "JS"), strict=True):
        name = by.split("_")[0]
        label = Words(f"KL(teacher‖student), trained by {by.replace('_', '–')}", f"按{zh}训练后的 KL(教师‖学生)")
        yield shown(f"{name}_gap", label, np.mean(gap[by, "forward"]), "float32")
        label = Words(f"the student's entropy, trained by {by.replace('_', '–')}", f"按{zh}训练后学生的熵")
        own = "reverse" if by == "reverse" else "forward"  # of Jensen and Shannon's own loss no rate is known
        yield shown(f"{name}_entropy", label, np.mean(narrow(by, scores[by], own)), "float32")
