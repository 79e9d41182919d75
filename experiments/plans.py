"""How a task is learned: on pairs, with batches from the host and a judge that reads what the model writes."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from experiments.evaluating import judge, metrics_of
from experiments.feeds import Feed, FromHost
from experiments.flags import Settings
from experiments.loop import Judge
from experiments.translating import Translator
from transformer_jax import sharding
from transformer_jax.config import Config, Hyper
from transformer_jax.data import Task, metrics
from transformer_jax.data.batches import PairBatches
from transformer_jax.data.pairs_task import PAIR_TASKS
from transformer_jax.train import TrainState

T = TypeVar("T")
JUDGED = 1000  # pairs that are written at an evaluation
Score = Callable[[Any], dict[str, float | None]]


def score_of(config: Config, hyper: Hyper, task: Task, split: str, most: int | None = None) -> Score:
    """parameters -> all metrics of the run, of greedy outputs for at most `most` pairs of a split."""
    assert task.text is not None
    pairs = task.text.pairs[split]
    return judge(Translator((), config, hyper, task.text.tokenizers), spread(pairs, most or len(pairs)))


def spread(pairs: Sequence[T], most: int) -> list[T]:
    """At most so many of the pairs, at even distances: the first ones of a sorted file are not like the rest."""
    places = np.linspace(0, len(pairs) - 1, min(most, len(pairs))).round().astype(int)
    return [pairs[i] for i in places]


def _judge_of(config: Config, hyper: Hyper, task: Task, patience: int) -> tuple[Judge, list[str]]:
    """Judges by the first of the run's metrics, on JUDGED dev pairs at most; and a line that says so.

    Raises ConfigError for an unknown one, DataError where a package is missing that one needs.
    """
    assert task.text is not None
    name = metrics_of(Translator((), config, hyper, task.text.tokenizers))[0]
    count = len(task.text.pairs["selection"])
    metric = name if metrics.METRICS[name].lower else f"-{name}"
    note = f"judged by {metrics.METRICS[name].label} on {min(count, JUDGED):,} of {count:,} dev pairs"
    return Judge(metric, score_of(config, hyper, task, "selection", JUDGED), patience), [note]


def _feed_of(
    config: Config, task: Task, seed: int, mesh: sharding.Mesh | None
) -> tuple[Callable[..., Feed], list[str]]:
    """The run's batches, of which each process reads the rows that its devices hold; and lines that describe them."""
    assert task.text is not None
    index, count = (0, 1) if mesh is None else sharding.row_share(mesh, config.batch_size)
    batches = PairBatches(config, task.text.rows["train"], seed, index, count)
    iterator = batches.iterator()

    def made(numbers: Hyper, cursor: Any, places: TrainState | None) -> Feed:
        return FromHost(config, numbers, iterator, cursor, places, mesh, count)

    return made, batches.notes()


def measured_alone(task: Task) -> Task:
    """The task without its training pairs on the device: the host has them."""
    return dataclasses.replace(task, data={split: part for split, part in task.data.items() if split != "train"})


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a task is learned: who judges, what the report adds to the loss, where batches come from, what is said."""

    judge: Judge
    scores: Score = lambda params: {}
    feed_of: Callable[..., Feed] | None = None
    keeps_best: bool = False
    notes: tuple[str, ...] = ()


def plan_of(config: Config, hyper: Hyper, task: Task, settings: Settings, mesh: sharding.Mesh | None) -> Plan:
    """The plan of a task. Raises DataError for packages that are missing."""
    if config.task not in PAIR_TASKS:
        return Plan(Judge(patience=settings.patience), keeps_best=settings.keep_best or settings.patience > 0)
    judge, said = _judge_of(config, hyper, task, settings.patience)
    feed_of, notes = _feed_of(config, task, settings.seed, mesh)
    scores = score_of(config, hyper, task, "report")
    return Plan(judge, scores, feed_of, True, (*notes, *said))
