"""absl flags made from the fields of Config and Hyper, and the few that steer a run.

Every field is a flag whose default is "not given": an experiment's own base decides then.
A misspelt flag, a value out of range, or a flag that the experiment does not use fails
with one line, before anything is written.
"""

import dataclasses
import difflib
import math
from collections.abc import Sequence
from typing import Any

from absl import flags

from experiments.grid import CONFIG_FIELDS, HYPER_FIELDS
from transformer_jax.config import INTEGER_HYPER, TERMS, Config, Hyper, check_value
from transformer_jax.errors import ConfigError, UserError
from transformer_jax.presets import NUMBERS, PRESETS, preset

LARGEST = 2**63 - 1  # that a seed may be, and more than any number of steps or rows
# name -> (kind, default, help, least value)
RUN_FLAGS: dict[str, tuple[str, Any, str, float]] = {
    "seeds": ("int", 0, "independent repetitions of every arm; 0: the experiment's own number", 0),
    "workdir": ("str", "", "folder for results and checkpoints; empty: runs/EXPERIMENT", 0),
    "minutes": ("float", 0.0, "time budget: stop cleanly, saved, when it is spent; 0: none", 0),
    "checkpoint_every": ("int", 0, "steps between checkpoints; 0: by time", 0),
    "eval_every": ("int", 0, "steps between evaluations; 0: a tenth of the run", 0),
    "seed": ("int", 0, "the run's seed", 0),
    "overwrite": ("bool", False, "move a workdir that holds another run aside and start anew", 0),
    "restore": ("str", "", "the workdir of the trained model to use", 0),
    "restore_step": (
        "str",
        "",
        "which checkpoint: a step, best or newest; empty: best of a model of pairs, else newest",
        0,
    ),
    "arm": ("str", "", "with --restore of a sweep: the arm whose seeds are used together; empty: its only one", 0),
    "parts": ("str", "", "with --restore: only these parameters, such as embedding,decoder/layers; empty: all", 0),
    "keep": ("int", 2, "newest checkpoints that stay", 1),
    "keep_every": ("int", 0, "checkpoints of each such step stay too; 0: none", 0),
    "keep_best": ("bool", False, "the checkpoint with the lowest selection loss stays too", 0),
    "patience": ("int", 0, "evaluations without a better one after which training ends; 0: none does", 0),
    "topology": ("str", "", "a TPU slice to compile for, such as v5e:4x4 or v5p:4x4x4", 0),
    "coordinator": ("str", "", "HOST:PORT of process 0, where several processes make one run", 0),
    "num_processes": ("int", 0, "how many processes make the run; with --coordinator", 0),
    "process_id": ("int", -1, "which of them this is, from 0; with --coordinator", -1),
    "plan": ("bool", False, "print arms, groups, parameters, estimated time and memory; run nothing", 0),
    "sweep": ("str", "", 'more arms, crossed: "learning_rate=1e-3,3e-3;num_layers=2,4"', 0),
    "preset": ("str", "", f"start from a named configuration: {', '.join(PRESETS)}", 0),
    "mesh": (
        "str",
        "",
        "devices by axis: any of data:2,fsdp:2,model:2,seq:2 for one model; sweep:2 for arms",
        0,
    ),
    "depth": ("choice", "quick", "how much of the question is run: quick or full", 0),
    "profile": ("bool", False, "write a trace of some steps to the workdir", 0),
    "prompt": ("str", "", "what the model is given: text, or ids as the task's samples show them", 0),
    "sample_temperature": ("float", 1.0, "temperature of what is drawn; 0: always the most probable", 0),
    "top_k": ("int", 0, "draw from the k most probable ids alone; 0: off", 0),
    "top_p": ("float", 1.0, "draw from the fewest ids whose probabilities sum to p; 1: off", 0),
    "min_p": ("float", 0.0, "draw from ids at least this times as probable as the first; 0: off", 0),
    "repetition_penalty": ("float", 1.0, "lowers ids that stand there already; 1: off", 0),
    "max_new_tokens": ("int", 0, "tokens to write at most; 0: what seq_len leaves", 0),
    "num_samples": ("int", 1, "texts to write, one after the other", 1),
    "stop": ("str", "", "writing ends before this text", 0),
    "beam": ("int", 1, "hypotheses that the search keeps; 1: greedy", 1),
    "n_best": ("int", 1, "outputs of each line, the best first; at most --beam", 1),
    "penalty": ("choice", "power", "what length does to the ranking: power or gnmt (see transformer_jax/beam.py)", 0),
    "length_penalty": ("float", 1.0, "strength of --penalty; 0: sums of log-probabilities as they are", -math.inf),
    "average": (
        "int",
        0,
        "use the mean of the parameters (not of their EMA) of so many newest checkpoints; 0: one checkpoint",
        0,
    ),
    "strict": ("bool", False, "a line that the model cannot read is an error, not a counted skip", 0),
    "only": ("str", "", "check these claims alone: ids or letters of chapters, such as B12,D07 or E; empty: all", 0),
    "show": ("str", "", "sources whose attention the report draws, parted by |; empty: some right and wrong ones", 0),
}
ALWAYS = ("experiment", "list", "debug", "help")
CHOICES = {"depth": ("quick", "full"), "penalty": ("power", "gnmt")}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What was asked for. overrides: the Config and Hyper fields given on the command line."""

    experiment: str
    overrides: dict[str, Any]
    given: frozenset[str]
    seeds: int = 0
    workdir: str = ""
    minutes: float = 0.0
    checkpoint_every: int = 0
    eval_every: int = 0
    seed: int = 0
    overwrite: bool = False
    restore: str = ""
    restore_step: str = ""
    arm: str = ""
    parts: str = ""
    keep: int = 2
    keep_every: int = 0
    keep_best: bool = False
    patience: int = 0
    topology: str = ""
    coordinator: str = ""
    num_processes: int = 0
    process_id: int = -1
    plan: bool = False
    sweep: str = ""
    preset: str = ""
    mesh: str = ""
    depth: str = "quick"
    profile: bool = False
    prompt: str = ""
    sample_temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int = 0
    num_samples: int = 1
    stop: str = ""
    beam: int = 1
    n_best: int = 1
    penalty: str = "power"
    length_penalty: float = 1.0
    average: int = 0
    strict: bool = False
    only: str = ""
    show: str = ""

    def values(self) -> dict[str, Any]:
        """Every flag but the experiment's, None for a field that was not given."""
        fields = {name: self.overrides.get(name) for name in (*CONFIG_FIELDS, *HYPER_FIELDS)}
        return {name: getattr(self, name) for name in RUN_FLAGS} | fields

    def configure(self, base: Config, hyper: Hyper | None = None) -> tuple[Config, Hyper]:
        """The base (or the preset, where one is given) with the command line's fields.

        Raises ConfigError for a field that the task does not read.
        """
        from experiments.grid import changed

        numbers = dataclasses.replace(hyper or Hyper(), **NUMBERS.get(self.preset, {}))
        config, numbers = changed(preset(self.preset) if self.preset else base, numbers, self.overrides)
        for name in filter(CONFIG_FIELDS.get, self.overrides):
            readers = CONFIG_FIELDS[name].metadata.get("tasks", (config.task,))
            if config.task not in readers:
                raise ConfigError(f"--{name} is read with --task={' or '.join(readers)}, not with {config.task}")
        return config, numbers


def define(values: flags.FlagValues) -> None:
    """Define every flag on `values`."""
    for name, field in (CONFIG_FIELDS | HYPER_FIELDS).items():
        default, note = field.default, describe(field)
        if isinstance(default, bool):
            flags.DEFINE_bool(name, None, note, flag_values=values)
        elif isinstance(default, int) or name in INTEGER_HYPER:
            flags.DEFINE_integer(name, None, note, flag_values=values)
        elif isinstance(default, float):
            flags.DEFINE_float(name, None, note, flag_values=values)
        elif isinstance(default, tuple):
            flags.DEFINE_list(name, None, note, flag_values=values)
        else:
            flags.DEFINE_string(name, None, note, flag_values=values)
    for name, (kind, default, note, _) in RUN_FLAGS.items():
        makers = {"int": flags.DEFINE_integer, "float": flags.DEFINE_float, "bool": flags.DEFINE_bool}
        makers.get(kind, flags.DEFINE_string)(name, default, note, flag_values=values)
    flags.DEFINE_string("experiment", "", "which question to ask (see --list)", flag_values=values)
    flags.DEFINE_bool("list", False, "list the experiments", flag_values=values)
    flags.DEFINE_bool("debug", False, "show the traceback of an error", flag_values=values)
    flags.DEFINE_bool("help", False, "describe every flag", flag_values=values)


def describe(field: dataclasses.Field) -> str:
    """A field's help, range and default in one line."""
    meta = field.metadata
    if "choices" in meta:
        limits = " | ".join(meta["choices"])
    elif "parts" in meta:
        limits = "of " + ", ".join(meta["parts"])
    else:
        words = {"low": "from {:g}", "above": "above {:g}", "high": "to {:g}", "below": "below {:g}"}
        limits = " ".join(word.format(meta[name]) for name, word in words.items() if name in meta)
    shown = ",".join(field.default) if isinstance(field.default, tuple) else field.default
    return f"{meta['help']} [{limits + '; ' if limits else ''}default {shown if shown != '' else 'empty'}]"


def parse(argv: Sequence[str], uses: dict[str, Sequence[str]]) -> tuple[Settings, dict[str, bool]]:
    """Settings from a command line (argv[0] is the program), and the ALWAYS switches.

    uses: experiment -> the run flags it takes. Raises UserError, one line, for anything
    misspelt, out of range, left over, or without effect in the chosen experiment.
    """
    values = flags.FlagValues()
    define(values)
    try:
        left = values(list(argv))[1:]
    except flags.UnrecognizedFlagError as error:
        raise _unrecognised(error.flagname, values) from None
    except flags.Error as error:
        raise UserError(" ".join(str(error).split())) from None
    switches = {name: bool(values[name].value) for name in ("list", "debug", "help")}
    if left:
        raise UserError(f"{left[0]!r} is not a flag: write --name=value")
    given = frozenset(name for name in values if values[name].present)
    settings: dict[str, Any] = {}
    for name, (kind, _, _, least) in RUN_FLAGS.items():
        value: Any = values[name].value
        if kind in ("int", "float") and not (value >= least or least == -math.inf):  # nan is none of these
            raise UserError(f"--{name}={value} is out of range: at least {least:g}")
        if kind == "int" and value > LARGEST:
            raise UserError(f"--{name}={value} is out of range: at most {LARGEST}")
        settings[name] = value
    for name, choices in CHOICES.items():
        if settings[name] not in choices:
            raise UserError(f"--{name}={settings[name]}: choose from {', '.join(choices)}")
    if settings["preset"]:
        preset(settings["preset"])
    overrides = {}
    for name, field in (CONFIG_FIELDS | HYPER_FIELDS).items():
        value = values[name].value
        if name in given and value is not None:
            value = tuple(sorted(value, key=list(TERMS).index)) if _known_terms(name, value) else value
            check_value("the flag", field, value)
            overrides[name] = value
    experiment = str(values["experiment"].value or "")
    if experiment and experiment not in uses:
        from transformer_jax.errors import unknown

        raise unknown("experiment", experiment, uses)
    if experiment:
        idle = sorted((given & set(RUN_FLAGS)) - set(uses[experiment]))
        if idle:
            raise ConfigError(f"--{idle[0]} has no effect in --experiment={experiment}: leave it out")
    return Settings(experiment, overrides, given, **settings), switches


def _known_terms(name: str, value: Any) -> bool:
    return name == "terms" and all(part in TERMS for part in value)


def _unrecognised(name: str, values: flags.FlagValues) -> UserError:
    near = difflib.get_close_matches(name, list(values), n=2, cutoff=0.6)
    hint = f"did you mean {' or '.join('--' + n for n in near)}?" if near else "see --help"
    return UserError(f"unknown flag --{name}: {hint}")
