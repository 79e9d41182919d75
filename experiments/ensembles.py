"""Trained models of pairs as flags name them: one workdir or several, with their tokenizers."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments import restoring
from experiments.flags import Settings
from experiments.translating import ROWS, Translator
from experiments.workdir import TOKENIZERS, WorkdirError, differences
from transformer_jax.beam import Penalty, check_beam
from transformer_jax.config import Config, Hyper, to_dict
from transformer_jax.data import Tokenizers
from transformer_jax.data.pairs_task import PAIR_TASKS
from transformer_jax.errors import CheckpointError, ConfigError

FLAGS = ("restore", "restore_step", "average", "beam", "n_best", "penalty", "length_penalty", "strict")
DATA = ("pairs", "dev", "test", "batch_size")  # fields of Config that are not the model's, and may differ
# How a model was trained, which what it computes does not depend on.
LEARNING = frozenset({
    *DATA, "task", "text", "tokenizer", "target_tokenizer", "metrics", "bpe_size", "length_buckets", "packing",
    "optimizer", "schedule", "steps", "warmup_steps", "decay_steps", "accumulation", "loss_chunks", "remat",
    "scan_unroll", "learning_rate", "dropout_rate", "attention_dropout_rate", "activation_dropout_rate",
    "label_smoothing", "z_loss", "load_balance", "router_z_loss", "clip_norm", "ema_decay", "weight_decay", "b1", "b2",
    "adam_epsilon", "momentum",
})  # fmt: skip
COMPUTED = ("attention_softcap", "final_softcap")  # the terms that evaluation has too


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A translator, the first model's settings with what the flags change, and lines that say what was read."""

    translator: Translator
    names: list[str]
    steps: list[int]
    notes: list[str]


def restores(restore: str) -> list[str]:
    """The workdirs that --restore names; a comma in the name of one that is there parts nothing."""
    return [restore] if "," not in restore or Path(restore).is_dir() else [part.strip() for part in restore.split(",")]


def load(settings: Settings) -> Loaded:
    """What the flags FLAGS ask for.

    Raises ConfigError for a model that was not trained on pairs, and for models that cannot write together;
    CheckpointError for a checkpoint of other tokenizers; else as restoring.restore_weights.
    """
    from experiments import loop

    penalty = Penalty(settings.penalty, settings.length_penalty)
    check_beam(settings.beam, settings.n_best, penalty)
    changes = {name: value for name, value in settings.overrides.items() if name not in DATA}
    names, models, steps, notes = restores(settings.restore), [], [], []
    read: list[tuple[Config, Hyper, Tokenizers]] = []
    for name in names:
        trained, trained_hyper = restoring.saved_configuration(name)
        if trained.task not in PAIR_TASKS:
            raise ConfigError(f"--restore={name} was trained on task {trained.task}: one of {', '.join(PAIR_TASKS)}")
        config, hyper = restoring.changed(trained, trained_hyper, changes)
        tokenizers = restoring.saved_tokenizers(name)
        if tokenizers is None:
            raise WorkdirError(f"--restore={name}: no {TOKENIZERS} there")
        if settings.beam > config.V:
            raise ConfigError(f"--beam={settings.beam} is wider than the vocabulary of {config.V}")
        read.append((config, hyper, tokenizers))
        _check_alike(names[0], name, read[0], read[-1])
        restored = restoring.restore_weights(
            Path(name) / "checkpoints", loop.abstract_state(config, hyper), settings.restore_step, settings.average
        )
        made_with = restored.meta.get("tokenizers", tokenizers.sha256)
        if made_with != tokenizers.sha256:
            raise CheckpointError(
                f"step {restored.step} in {name} was trained with other tokenizers than its {TOKENIZERS}: "
                f"SHA-256 {made_with[:12]}… and {tokenizers.sha256[:12]}…"
            )
        notes += [*restored.notes, f"{name}, step {restored.step}"]
        models.append(restored.state)
        steps.append(restored.step)
    # Those that compute the same function of their parameters are searched with together, whatever they learnt by.
    alike = [next(one for one in read if _computed(*one[:2]) == _computed(*other[:2])) for other in read]
    others = tuple((config, hyper) for config, hyper, _ in alike[1:])
    rows = settings.overrides.get("batch_size", ROWS)
    made = Translator(tuple(models), *read[0], settings.beam, settings.n_best, penalty, rows, others)
    return Loaded(made, names, steps, notes)


def _check_alike(
    name: str, other: str, first: tuple[Config, Hyper, Tokenizers], second: tuple[Config, Hyper, Tokenizers]
) -> None:
    """Raise ConfigError, naming the differences, unless both models read and write the same ids in the same order."""
    lines = differences({"architecture": first[0].architecture}, {"architecture": second[0].architecture})
    sides = [side for side in ("source", "target") if getattr(first[2], side) != getattr(second[2], side)]
    lines += [f"the {side} tokenizers differ" for side in sides]
    if lines:
        raise ConfigError(f"--restore: {name} and {other} cannot write together: {'; '.join(lines[:4])}")


def _computed(config: Config, hyper: Hyper) -> Mapping[str, Any]:
    fields = {name: value for name, value in {**to_dict(config), **to_dict(hyper)}.items() if name not in LEARNING}
    return fields | {"terms": [term for term in config.terms if term in COMPUTED]}
