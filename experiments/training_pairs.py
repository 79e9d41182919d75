"""What training on pairs adds to `train`: a base, batches from the host, a judge that reads what the model writes."""

import dataclasses
from collections.abc import Callable
from typing import Any

from experiments import processes
from experiments.evaluating import judge
from experiments.feeds import Feed, FromHost
from experiments.loop import Judge
from experiments.translating import Translator
from transformer_jax import sharding
from transformer_jax.config import Config, Hyper
from transformer_jax.data import Task, metrics
from transformer_jax.data.batches import PairBatches
from transformer_jax.train import TrainState

# A small corpus's model: what held on the development parts of several (see BUILD_NOTES.md).
BASE = Config(
    architecture="encoder_decoder",
    d_model=128,
    num_layers=3,
    num_heads=4,
    ffn="relu",
    positions="rope",
    batch_size=64,
    steps=10_000,
    optimizer="adam",
    schedule="inverse_sqrt",
    warmup_steps=1000,
    scan_unroll=0,
)
HYPER = Hyper(learning_rate=1e-3, dropout_rate=0.3, label_smoothing=0.1, b2=0.98, clip_norm=1.0, ema_decay=0.999)
JUDGED = 1000  # pairs that are written at an evaluation


Score = Callable[[Any], dict[str, float | None]]


def score_of(config: Config, hyper: Hyper, task: Task, split: str, most: int | None = None) -> Score:
    """parameters -> all metrics that suit the target side, of greedy outputs for the first `most` pairs of a split."""
    assert task.text is not None
    return judge(Translator((), config, hyper, task.text.tokenizers), task.text.pairs[split][:most])


def judge_of(config: Config, hyper: Hyper, task: Task, patience: int) -> Judge:
    """Judges by the first metric that suits the target side, on the first JUDGED dev pairs."""
    assert task.text is not None
    name = metrics.for_target(task.text.tokenizers.target.kind)[0]
    metric = name if metrics.METRICS[name].lower else f"-{name}"
    return Judge(metric, score_of(config, hyper, task, "selection", JUDGED), patience)


def feed_of(config: Config, task: Task, seed: int, mesh: sharding.Mesh | None) -> tuple[Callable[..., Feed], list[str]]:
    """The run's batches, each process its own rows of them; and lines that describe them."""
    assert task.text is not None
    batches = PairBatches(config, task.text.rows["train"], seed, processes.index(), processes.count())

    def made(numbers: Hyper, cursor: Any, places: TrainState | None) -> Feed:
        return FromHost(config, numbers, batches.iterator(), cursor, places, mesh)

    return made, batches.notes()


def on_device(task: Task) -> Task:
    """The task without its training pairs on the device: the host has them."""
    return dataclasses.replace(task, data={split: part for split, part in task.data.items() if split != "train"})
