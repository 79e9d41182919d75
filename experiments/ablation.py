"""What does a setting do? Arms of any fields, on any task, with any number of seeds.

    python launch.py --experiment=ablation --sweep="norm=layernorm,rmsnorm;ffn=relu,swiglu" --match_ffn_parameters
    python launch.py --experiment=ablation --task=pairs --pairs=train.tsv --dev=dev.tsv --sweep="dropout_rate=0.3,0.1"
    python launch.py --experiment=ablation --task=pairs --pairs=train.tsv --dev=dev.tsv --seeds=5 --workdir=runs/five
    python launch.py --experiment=evaluate --restore=runs/five --test=test.tsv --beam=5

An arm has one value of each field of --sweep; the rest is as flags say, beside a small model, or on pairs beside what
`train` starts from. The first value of a field is what its others are compared with, the other fields alike. Where
arms are compared, each is trained at a third of the usual learning rate, at it and at three times it, unless
--learning_rate or --sweep="learning_rate=…" says otherwise; without --sweep there is one arm, of so many seeds.

On pairs, the models at their best rates write the reported split (greedily), are judged by what they wrote, seed by
seed, and once more as an ensemble of an arm's seeds; `evaluate` and `translate` take such an ensemble by
--restore=WORKDIR --arm=NAME. Unlike `train`, a sweep draws its pairs with replacement, in one shape, and
keeps the models of the last step.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments import ask, grid, stats, train, written
from experiments.flags import Settings
from experiments.grid import CONFIG_FIELDS, Arm
from experiments.sections import Section
from experiments.sweep import Outcome, Question
from experiments.workdir import read_json
from transformer_jax import sharding
from transformer_jax.cache import check_cacheable
from transformer_jax.config import Config, Hyper
from transformer_jax.data import Task, make_task, resolve
from transformer_jax.data.pairs_task import PAIR_TASKS
from transformer_jax.encoder_decoder import count_parameters
from transformer_jax.errors import ConfigError

FLAGS = (*(flag for flag in ask.FLAGS if flag != "depth"), "strict")
SEEDS = 6
RATES = (1 / 3, 1.0, 3.0)  # of the usual one
ALONE, ONE = "as set", "One setting, seed by seed"  # the one arm of a run without --sweep, and what it asks
BASE = Config(
    num_heads=4, num_layers=2, d_model=64, seq_len=64, batch_size=8, steps=300, optimizer="adam", scan_unroll=0
)
HYPER = Hyper(learning_rate=4e-3)
# What no sweep of one question can hold, and where to go with it.
NOT_SWEPT = {
    "steps": "arms of one sweep train alike; use --steps",
    "task": "arms of one sweep are of one task; use --task",
    "metrics": "the same models would be trained again; use --metrics",
}
HONEST = ("causal", "window", "block_sparse")  # masks under which no position reads what it is to say


@dataclasses.dataclass(frozen=True)
class Asked:
    """The question with its arms resolved, the task of each, and the pairs of arms whose writing is compared.

    tasks: one an arm; arms that differ in the model alone share it.
    """

    question: Question
    tasks: tuple[Task, ...]
    pairs: tuple[tuple[str, str], ...]


def question(settings: Settings) -> Question:
    """The arms: each combination of the values in --sweep. Reads no data. Raises ConfigError as flags and fields do."""
    begun = "" if settings.overwrite else settings.workdir or "runs/ablation"
    base = train.base_of(settings, begun) if settings.overrides.get("task") in PAIR_TASKS else (BASE, HYPER)
    config, hyper = settings.configure(*base)
    extra = grid.parse_sweep(settings.sweep)
    for name in extra:
        readers = CONFIG_FIELDS[name].metadata.get("tasks", ()) if name in CONFIG_FIELDS else ()
        if name in settings.overrides:
            raise ConfigError(f"--{name} and --sweep={name}=… are both given: which one?")
        if name in NOT_SWEPT:
            raise ConfigError(f"--sweep={name}=…: {NOT_SWEPT[name]}")
        if readers and config.task not in readers:
            raise ConfigError(f"--sweep={name}=… is read with --task={' or '.join(readers)}, not with {config.task}")
    rates = extra.pop("learning_rate", ())
    if not rates:
        usual = hyper.learning_rate
        several = extra and "learning_rate" not in settings.overrides
        rates = [float(f"{usual * part:.3g}") for part in RATES] if several else [usual]
    arms = grid.with_shared_terms(grid.cross([Arm("", config, hyper)], extra))
    arms = tuple(dataclasses.replace(arm, name=arm.name.removeprefix(", ") or ALONE) for arm in arms)
    for arm in arms:
        if arm.config.architecture != "encoder" and arm.config.mask not in HONEST:
            raise ConfigError(
                f"mask={arm.config.mask}: a position would read what it is to say, and no loss would mean anything: "
                "--experiment=masking asks about masks honestly"
            )
        if arm.config.task in PAIR_TASKS:
            check_cacheable(arm.config)  # it is to write
    pairs, notes = stats.first_pairs(against_first(arms, extra))
    if pairs and len(rates) == 1:
        notes = (*notes, f"all arms at one learning rate, {rates[0]:g}: what suits an arm's own is not asked")
    return Question(
        name="ablation",
        title=f"What {'do' if len(extra) > 1 else 'does'} {' and '.join(extra)} do?" if extra else ONE,
        arms=arms,
        learning_rates=tuple(sorted(rates)),
        comparisons=pairs,
        notes=notes,
    )


def against_first(arms: Sequence[Arm], extra: dict[str, tuple[Any, ...]]) -> list[tuple[str, str]]:
    """Of each swept field: each arm with another value than its first against the one that differs in it alone.

    First those whose other fields have their first values, so that every field has its turn.
    """
    by_values = {values: arm.name for values, arm in zip(itertools.product(*extra.values()), arms, strict=True)}
    pairs = []
    for place, field in enumerate(extra):
        for values, name in by_values.items():
            first = (*values[:place], extra[field][0], *values[place + 1 :])
            if values != first:
                others = sum(value != extra[other][0] for value, other in zip(first, extra, strict=True))
                pairs.append((others, name, by_values[first]))
    return [(name, against) for _, name, against in sorted(pairs, key=lambda pair: pair[0])]


def settled(of: Question, strict: bool = False) -> Asked:
    """Read the data; keep the comparisons that are of the same tokens, and of the same sources for what is written.

    The question's notes say what was left out. Raises DataError as the tasks do, and where a metric's package is
    missing.
    """
    arms = tuple(dataclasses.replace(arm, config=resolve(arm.config, strict)) for arm in of.arms)
    made = {config: make_task(config, strict=strict) for config in dict.fromkeys(arm.config for arm in arms)}
    tasks = tuple(made[arm.config] for arm in arms)
    notes = list(of.notes)
    if writes(of):
        for arm, task in zip(arms, tasks, strict=True):
            written.writer(arm, task)
        notes += dict.fromkeys(note for task in tasks if task.text is not None for note in task.text.notes)
        if len(of.learning_rates) > 1 and any(_chosen_on_the_report(task) for task in tasks):
            notes.append("no --test: learning rates are chosen on the pairs that are reported on")
    by_name = {arm.name: (arm.config, task) for arm, task in zip(arms, tasks, strict=True)}
    kept = {}
    for what, alike in (("losses", _tokens), ("what is written", _items)):
        kept[what] = tuple((a, b) for a, b in of.comparisons if alike(*by_name[a]) == alike(*by_name[b]))
        lost = [f"{a} against {b}" for a, b in of.comparisons if (a, b) not in kept[what]]
        if lost and (what == "losses" or writes(of)):
            notes.append(f"{what} not compared, as they are of other tokens or data: {'; '.join(lost)}")
    sizes = {config: count_parameters(config) for config in made}
    of_arm = {arm.name: sizes[arm.config] for arm in arms}
    unlike = [f"{a} {of_arm[a]:,}, {b} {of_arm[b]:,}" for a, b in of.comparisons if not _alike(of_arm[a], of_arm[b])]
    if unlike:
        notes.append(f"compared at other numbers of parameters: {'; '.join(unlike)}")
    question = dataclasses.replace(of, arms=arms, comparisons=kept["losses"], notes=tuple(notes))
    return Asked(question, tasks, kept["what is written"] if writes(of) else ())


def writes(of: Question) -> bool:
    """Whether the arms are models of pairs."""
    return of.arms[0].config.task in PAIR_TASKS


def _chosen_on_the_report(task: Task) -> bool:
    return task.text is not None and task.text.pairs["selection"] is task.text.pairs["report"]


def _items(config: Config, task: Task) -> Any:
    """What a model of pairs is to write, and its references: equal where error rates are of one question."""
    return None if task.text is None else task.text.pairs.get("report")


def _alike(a: int, b: int) -> bool:
    """Whether two models are of about one size: within 2%."""
    return abs(a - b) <= 0.02 * max(a, b)


def _tokens(config: Config, task: Task) -> Any:
    """What a loss is a mean over: equal where two losses are of one question."""
    if config.task in PAIR_TASKS:
        assert task.text is not None
        return task.text.pairs["report"], task.text.tokenizers.target, len(task.text.rows["report"])
    if config.task == "text":  # the same tokens in rows of any length; a packed document's first is never asked for
        return task.sha256, config.V, config.packing
    return task.sha256, config.V, config.seq_len, config.architecture, config.batch_size


def run(settings: Settings) -> int:
    """Train, compare, judge what was written, report; exit code 0, or that of the signal that stopped it."""
    sharding.use_cpu_cores()  # before a task touches a device
    of = settled(question(settings), settings.strict)

    def afterwards(outcome: Outcome, found: dict[str, Any], folder: Path) -> dict[str, Any]:
        if not writes(of.question):
            return {}
        return {"written": written.judge(of.question.arms, of.tasks, of.pairs, found, folder)}

    def sections(outcome: Outcome, found: dict[str, Any]) -> list[Section]:
        return written.sections(found["written"]) if "written" in found else []

    code = ask.run(settings, of.question, SEEDS, sections, afterwards)
    found = None if settings.plan else read_json(Path(settings.workdir or f"runs/{of.question.name}") / "results.json")
    asked = {"seeds": settings.seeds or SEEDS, "steps": of.question.arms[0].config.steps}
    # A run that was stopped leaves the answer to an earlier question where it was.
    if not code and found and "written" in found and asked.items() <= found.items():
        written.show(found["written"])
    return code
