"""What a sweep runs: arms, learning rates and seeds, grouped by the program they share."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from transformer_jax.config import INTEGER_HYPER, Config, Hyper, check_value, with_terms
from transformer_jax.errors import ConfigError, unknown

CONFIG_FIELDS = {f.name: f for f in dataclasses.fields(Config)}
HYPER_FIELDS = {f.name: f for f in dataclasses.fields(Hyper)}
MAX_RUNS = 10_000


@dataclasses.dataclass(frozen=True)
class Arm:
    """One setting of the question. `hyper` holds plain numbers; its learning rate is swept."""

    name: str
    config: Config
    hyper: Hyper


@dataclasses.dataclass(frozen=True)
class Run:
    """One training: an arm at one learning rate with one seed."""

    arm: int
    learning_rate: float
    seed: int


@dataclasses.dataclass(frozen=True)
class Group:
    """Runs that share a Config, and so a compiled program."""

    config: Config
    runs: tuple[Run, ...]


def parse_value(name: str, text: str) -> Any:
    """The value of a Config or Hyper field from text. ConfigError for an unknown field or a bad value."""
    fields = CONFIG_FIELDS | HYPER_FIELDS
    if name not in fields:
        raise unknown("field", name, fields)
    field = fields[name]
    default = field.default
    try:
        if isinstance(default, bool):
            value = {"true": True, "false": False, "1": True, "0": False}[text.lower()]
        elif isinstance(default, int) or name in INTEGER_HYPER:
            value = int(text)
        elif isinstance(default, float):
            value = float(text)
        elif isinstance(default, tuple):
            value = tuple(part for part in text.split("+") if part)
        else:
            value = text
    except (ValueError, KeyError):
        raise ConfigError(f"{name}={text}: not a {type(default).__name__}") from None
    check_value("--sweep", field, value)
    return value


def parse_sweep(text: str) -> dict[str, tuple[Any, ...]]:
    """`"learning_rate=1e-3,3e-3;num_layers=2,4"` -> field -> values. An empty text gives {}."""
    out: dict[str, tuple[Any, ...]] = {}
    for part in filter(None, (p.strip() for p in text.split(";"))):
        name, equals, values = part.partition("=")
        name = name.strip()
        if not equals or not values.strip():
            raise ConfigError(f"--sweep={part!r}: write FIELD=VALUE,VALUE;FIELD=…")
        if name in out:
            raise ConfigError(f"--sweep names {name} twice")
        out[name] = tuple(parse_value(name, v.strip()) for v in values.split(","))
        if len(set(out[name])) < len(out[name]):
            raise ConfigError(f"--sweep={part!r} repeats a value")
    return out


def changed(config: Config, hyper: Hyper, values: Mapping[str, Any]) -> tuple[Config, Hyper]:
    """Config and Hyper with the fields of `values` set, each where it belongs."""
    for name in values:
        if name not in CONFIG_FIELDS | HYPER_FIELDS:
            raise unknown("field", name, CONFIG_FIELDS | HYPER_FIELDS)
    config = config.replace(**{k: v for k, v in values.items() if k in CONFIG_FIELDS})
    return config, dataclasses.replace(hyper, **{k: v for k, v in values.items() if k in HYPER_FIELDS})


def cross(arms: Sequence[Arm], extra: Mapping[str, Sequence[Any]]) -> tuple[Arm, ...]:
    """Each arm under each combination of the extra fields, named after both."""
    out = []
    for combination in itertools.product(*extra.values()):
        values = dict(zip(extra, combination, strict=True))
        label = "".join(f", {k}={v}" for k, v in values.items())
        for arm in arms:
            config, hyper = changed(arm.config, arm.hyper, values)
            out.append(Arm(arm.name + label, config, hyper))
    return tuple(out)


def with_shared_terms(arms: Sequence[Arm]) -> tuple[Arm, ...]:
    """The arms with every term that any of them uses in all their programs, so that they can share one."""
    hypers = [arm.hyper for arm in arms]
    return tuple(dataclasses.replace(arm, config=with_terms(arm.config, hypers)) for arm in arms)


def group_runs(arms: Sequence[Arm], learning_rates: Sequence[float], seeds: Sequence[int]) -> tuple[Group, ...]:
    """One group for each distinct Config, in order of appearance; runs by arm, rate, seed."""
    by_config: dict[Config, list[Run]] = {}
    for i, arm in enumerate(arms):
        runs = by_config.setdefault(arm.config, [])
        runs += [Run(i, rate, seed) for rate in learning_rates for seed in seeds]
    total = sum(len(runs) for runs in by_config.values())
    if total > MAX_RUNS:
        raise ConfigError(f"{total} runs: at most {MAX_RUNS}")
    return tuple(Group(config, tuple(runs)) for config, runs in by_config.items())


def hyper_of(arms: Sequence[Arm], run: Run) -> Hyper:
    """The numbers of a run: its arm's, at its learning rate."""
    return dataclasses.replace(arms[run.arm].hyper, learning_rate=run.learning_rate)
