"""Trained models of pairs as flags name them, with their tokenizers: of `train`, or the seeds of an arm of a sweep."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from experiments import restoring, trained
from experiments.flags import Settings
from experiments.translating import ROWS, Translator
from experiments.workdir import TOKENIZERS, WorkdirError, differences
from transformer_jax.beam import Penalty, check_beam
from transformer_jax.config import Config, Hyper, to_dict
from transformer_jax.data import Tokenizers
from transformer_jax.data.pairs_task import PAIR_TASKS
from transformer_jax.errors import CheckpointError, ConfigError

FLAGS = ("restore", "restore_step", "arm", "average", "beam", "n_best", "penalty", "length_penalty", "strict")
DATA = ("pairs", "dev", "test", "batch_size")  # fields of Config that are not the model's, and may differ
# How a model was trained, which what it computes does not depend on.
LEARNING = frozenset({
    *DATA, "task", "text", "tokenizer", "target_tokenizer", "metrics", "bpe_size", "length_buckets", "packing",
    "optimizer", "schedule", "steps", "warmup_steps", "decay_steps", "accumulation", "loss_chunks", "remat",
    "scan_unroll", "learning_rate", "dropout_rate", "attention_dropout_rate", "activation_dropout_rate",
    "label_smoothing", "z_loss", "load_balance", "router_z_loss", "clip_norm", "ema_decay", "weight_decay", "b1", "b2",
    "adam_epsilon", "momentum",
})  # fmt: skip
# Of these, what is still asked of a trained model: what it is given, and how it is judged and computed.
ASKED = frozenset({*DATA, "task", "text", "metrics", "loss_chunks", "remat", "scan_unroll"})
COMPUTED = ("attention_softcap", "final_softcap")  # the terms that evaluation has too


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A translator, what its models are called, and lines that say what was read.

    folder: the first workdir; saved: the first model's settings as it was trained. translator: with what the flags
    change.
    """

    translator: Translator
    names: list[str]
    steps: list[int]
    notes: list[str]
    folder: str
    saved: tuple[Config, Hyper]


@dataclasses.dataclass(frozen=True)
class _Member:
    """A model and what it was trained with; notes: lines on how it was read."""

    name: str
    config: Config
    hyper: Hyper
    params: Any
    step: int
    notes: list[str]


Fits = Callable[[str, tuple[Config, Hyper], Tokenizers], None]


def _changes(settings: Settings) -> dict[str, Any]:
    """The fields of the model that the flags change."""
    return {name: value for name, value in settings.overrides.items() if name not in DATA}


def restores(restore: str) -> list[str]:
    """The workdirs that --restore names; a comma in the name of one that is there parts nothing."""
    return [restore] if "," not in restore or Path(restore).is_dir() else [part.strip() for part in restore.split(",")]


def load(settings: Settings) -> Loaded:
    """What the flags FLAGS ask for.

    Raises ConfigError for a model that was not trained on pairs, and for models that cannot write together;
    CheckpointError for a checkpoint of other tokenizers; else as restoring.restore_weights and trained.arm_named.
    """
    if idle := sorted((LEARNING - ASKED) & settings.overrides.keys()):
        raise ConfigError(f"--{idle[0]} has no effect on a trained model: leave it out")
    penalty = Penalty(settings.penalty, settings.length_penalty)
    check_beam(settings.beam, settings.n_best, penalty)
    folders, members = restores(settings.restore), list[_Member]()
    changes = _changes(settings)
    if settings.arm and not any(map(trained.is_sweep, folders)):
        raise ConfigError(f"--arm={settings.arm}: --restore={settings.restore} names no sweep")
    read: list[tuple[Config, Hyper, Tokenizers]] = []

    def fits(name: str, trained_as: tuple[Config, Hyper], tokenizers: Tokenizers) -> None:
        """Whether a model can write with those before it: asked before its parameters are read."""
        config, hyper = restoring.changed(*trained_as, changes)
        if settings.beam > config.V:
            raise ConfigError(f"--beam={settings.beam} is wider than the vocabulary of {config.V}")
        read.append((config, hyper, tokenizers))
        _check_alike(folders[0], name, read[0], read[-1])

    for folder in folders:
        if (task := restoring.saved_task(folder)) not in PAIR_TASKS:
            raise ConfigError(f"--restore={folder} was trained on task {task}: one of {', '.join(PAIR_TASKS)}")
        members += (_of_sweep if trained.is_sweep(folder) else _of_train)(folder, settings, fits)
    # Those that compute the same function of their parameters are searched with together, whatever they learnt by.
    alike = [next(one for one in read if _computed(*one[:2]) == _computed(*other[:2])) for other in read]
    others = tuple((config, hyper) for config, hyper, _ in alike[1:])
    rows = settings.overrides.get("batch_size", ROWS)
    models = tuple(member.params for member in members)
    made = Translator(models, *read[0], settings.beam, settings.n_best, penalty, rows, others)
    names, steps = [member.name for member in members], [member.step for member in members]
    notes = [note for member in members for note in member.notes]
    return Loaded(made, names, steps, notes, folders[0], (members[0].config, members[0].hyper))


def _of_train(folder: str, settings: Settings, fits: Fits) -> list[_Member]:
    from experiments import loop

    config, hyper = restoring.saved_configuration(folder)
    tokenizers = restoring.saved_tokenizers(folder)
    if tokenizers is None:
        raise WorkdirError(f"--restore={folder}: no {TOKENIZERS} there")
    fits(folder, (config, hyper), tokenizers)
    like = loop.abstract_state(*restoring.changed(config, hyper, _changes(settings)))
    restored = restoring.restore_weights(Path(folder) / "checkpoints", like, settings.restore_step, settings.average)
    made_with = restored.meta.get("tokenizers", tokenizers.sha256)
    if made_with != tokenizers.sha256:
        raise CheckpointError(
            f"step {restored.step} in {folder} was trained with other tokenizers than its {TOKENIZERS}: "
            f"SHA-256 {made_with[:12]}… and {tokenizers.sha256[:12]}…"
        )
    notes = [*restored.notes, f"{folder}, step {restored.step}"]
    return [_Member(folder, config, hyper, restored.state, restored.step, notes)]


def _of_sweep(folder: str, settings: Settings, fits: Fits) -> list[_Member]:
    """The models of an arm at its best rate, one a seed; those that diverged are left out, and named in the notes."""
    if settings.restore_step or settings.average:
        given = "restore_step" if settings.restore_step else "average"
        raise ConfigError(f"--{given}: --restore={folder} is a sweep, which keeps the models of its last step alone")
    arm = trained.arm_named(folder, settings.arm)
    tokenizers = trained.tokenizers_of(folder, arm)
    if not arm.sound:
        raise ConfigError(f"--restore={folder}: {arm.name} diverged with every seed")
    lost = [f"{folder}, {arm.name}, seed {seed}: diverged, left out" for seed in sorted(arm.diverged)]
    members = []
    for seed, model in arm.sound.items():
        name = f"{folder}, {arm.name}, seed {seed}"
        fits(name, (model.config, model.hyper), tokenizers)
        notes = [*lost, f"{name}, step {model.step}"]
        members.append(_Member(name, model.config, model.hyper, model.params, model.step, notes))
        lost = []
    return members


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
