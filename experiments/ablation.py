"""What does a setting do? Arms of any fields, on any task, with any number of seeds.

    python launch.py --experiment=ablation --sweep="norm=layernorm,rmsnorm"
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import ask, evaluating, grid, report, results, stats, terminal, train, trained
from experiments.flags import Settings
from experiments.grid import Arm
from experiments.sections import Section
from experiments.sweep import Outcome, Question
from experiments.translating import Translator
from experiments.workdir import read_json
from transformer_jax import sharding
from transformer_jax.cache import check_cacheable
from transformer_jax.config import Config, Hyper
from transformer_jax.data import make_task, resolve
from transformer_jax.data.metrics import METRICS
from transformer_jax.data.pairs_task import PAIR_TASKS
from transformer_jax.errors import ConfigError

FLAGS = tuple(flag for flag in ask.FLAGS if flag != "depth")
SEEDS = 6
RATES = (1 / 3, 1.0, 3.0)  # of the usual one
ALONE = "as set"  # the one arm of a run without --sweep
BASE = Config(
    num_heads=4, num_layers=2, d_model=64, seq_len=64, batch_size=8, steps=300, optimizer="adam", scan_unroll=0
)
HYPER = Hyper(learning_rate=4e-3)
MEANT_BY_IDS = ("tokenizer", "target_tokenizer", "bpe_size", "pairs", "text", "task")  # what ids stand for


@dataclasses.dataclass(frozen=True)
class Asked:
    """The question, and the pairs of arms that are compared: by loss only where that is of the same ids."""

    question: Question
    pairs: tuple[tuple[str, str], ...]


def asked(settings: Settings) -> Asked:
    """The arms: each combination of the values in --sweep. Raises ConfigError as the flags and fields do."""
    base = train.base_of(settings) if settings.overrides.get("task") in PAIR_TASKS else (BASE, HYPER)
    config, hyper = settings.configure(*base)
    extra = grid.parse_sweep(settings.sweep)
    rates = extra.pop("learning_rate", ())
    if rates and "learning_rate" in settings.overrides:
        raise ConfigError("--learning_rate and --sweep=learning_rate=… are both given: which one?")
    if "steps" in extra:
        raise ConfigError("--sweep=steps=…: arms of one sweep train alike; use --steps")
    if not rates:
        usual = hyper.learning_rate
        several = extra and "learning_rate" not in settings.overrides
        rates = [float(f"{usual * part:.3g}") for part in RATES] if several else [usual]
    arms = grid.with_shared_terms(grid.cross([Arm("", config, hyper)], extra))
    arms = tuple(dataclasses.replace(arm, name=arm.name.removeprefix(", ") or ALONE) for arm in arms)
    for arm in arms:
        if arm.config.task in PAIR_TASKS:
            check_cacheable(arm.config)  # it is to write
    pairs, notes = stats.first_pairs(against_first(arms, extra))
    if pairs and len(rates) == 1:
        notes = (*notes, f"all arms at one learning rate, {rates[0]:g}: what suits an arm's own is not asked")
    unlike = sorted(set(extra) & set(MEANT_BY_IDS))
    if unlike:
        notes = (*notes, f"losses are not compared: a token is not the same in arms of another {unlike[0]}")
    title = f"What does {' and '.join(extra)} do?" if extra else "One setting, seed by seed"
    question = Question(
        name="ablation",
        title=title,
        arms=arms,
        learning_rates=tuple(sorted(rates)),
        comparisons=() if unlike else pairs,
        notes=notes,
    )
    return Asked(question, pairs)


def against_first(arms: Sequence[Arm], extra: dict[str, tuple[Any, ...]]) -> list[tuple[str, str]]:
    """Of each swept field: each arm with another value than its first against the one that differs in it alone."""
    by_values = {values: arm.name for values, arm in zip(itertools.product(*extra.values()), arms, strict=True)}
    pairs = []
    for place, field in enumerate(extra):
        for values, name in by_values.items():
            first = (*values[:place], extra[field][0], *values[place + 1 :])
            if values != first:
                pairs.append((name, by_values[first]))
    return pairs


# --- what models of pairs write -------------------------------------------------------


def writes(question: Question) -> bool:
    """Whether all arms are models of pairs."""
    return all(arm.config.task in PAIR_TASKS for arm in question.arms)


def writer(arm: Arm) -> tuple[Translator, evaluating.Pairs]:
    """(how the models of an arm write, what they are asked). Raises DataError where a metric's package is missing."""
    config = resolve(arm.config)
    text = make_task(config).text
    assert text is not None
    translator = Translator((), config, arm.hyper, text.tokenizers)
    evaluating.metrics_of(translator)
    return translator, text.pairs["report"]


def judged(
    question: Question, pairs: Sequence[tuple[str, str]], found: Mapping[str, Any], folder: Path
) -> dict[str, Any]:
    """The part `written` of results.json: each arm's metrics by seed and of its seeds as an ensemble; and what differs.

    The metric to choose by is compared, arm against arm, in one family: the pairs that were named before the run.
    """
    rows = []
    for arm, of in zip(question.arms, trained.arms(folder, found), strict=True):
        translator, asked_for = writer(arm)
        score = evaluating.judge(translator, asked_for)
        by_seed = [score(of.sound[seed].params) if seed in of.sound else None for seed in range(len(of.models))]
        together = score(*(model.params for model in of.sound.values())) if len(of.sound) > 1 else {}
        metrics = {
            name: results.summarise([None if one is None else one[name] for one in by_seed])
            | {"ensemble": together.get(name)}
            for name in evaluating.metrics_of(translator)
        }
        rows.append({"name": arm.name, "items": len(asked_for), "metrics": metrics})
    shared = [name for name in rows[0]["metrics"] if all(name in row["metrics"] for row in rows)]
    compared = []
    if pairs and shared:
        values = {row["name"]: row["metrics"][shared[0]]["per_seed"] for row in rows}
        compared = [row.to_dict() for row in stats.compare(values, pairs, shared[0])]
    return {"arms": rows, "metrics": shared, "comparisons": compared}


def table(found: dict[str, Any]) -> tuple[tuple[str, ...], list[list[str]]]:
    """(header, rows) of what was written: mean and half its 95% interval of each metric, and the ensemble's first."""
    names = found["metrics"]
    rows = []
    for arm in found["arms"]:
        cells = []
        for name in names:
            of = arm["metrics"][name]
            half = report.half_width(of["ci95"])
            cells.append(report.fixed(of["mean"], 2) + ("" if half is None else f" ± {report.fixed(half, 2)}"))
        rows.append([arm["name"], *cells, *(report.fixed(arm["metrics"][name]["ensemble"], 2) for name in names[:1])])
    labels = [METRICS[name].label for name in names]
    return ("arm", *labels, *(f"{label}, ensemble" for label in labels[:1])), rows


def compared(found: dict[str, Any]) -> tuple[tuple[str, ...], list[list[str]]]:
    """(header, rows) of the comparisons of the first metric."""
    rows = [
        [
            f"{row['a']} − {row['b']}",
            report.fixed(row["difference"], 2, sign=True),
            report.interval(row["ci95"], 2, sign=True),
            report.probability(row["p_adjusted"]),
            row["verdict"],
        ]
        for row in found["comparisons"]
    ]
    return ("comparison", "difference", "95% interval", "adjusted p", "verdict"), rows


def sections(outcome: Outcome, found: dict[str, Any]) -> list[Section]:
    """What the models wrote, where they write."""
    if "written" not in found:
        return []
    written = found["written"]
    items = written["arms"][0]["items"]
    text = (
        f"Each model at its arm's best rate wrote {report.plural(items, 'source')} of the reported split, greedily. "
        "Mean over seeds with half its 95% interval; the ensemble is of all seeds of an arm, the next id's probability "
        "the mean of theirs."
    )
    parts = [Section("What they write", text, *table(written))]
    if written["comparisons"]:
        label = METRICS[written["metrics"][0]].label
        parts.append(Section(f"What they write, compared: {label}", "Paired by seed.", *compared(written)))
    return parts


def run(settings: Settings) -> int:
    """Train, compare, judge what was written, report; exit code 0, or that of the signal that stopped it."""
    sharding.use_cpu_cores()  # before a task touches a device
    of = asked(settings)
    for arm in of.question.arms if writes(of.question) else ():
        writer(arm)  # what it lacks is said now, not after hours

    def afterwards(outcome: Outcome, found: dict[str, Any], folder: Path) -> dict[str, Any]:
        return {"written": judged(outcome.question, of.pairs, found, folder)} if writes(outcome.question) else {}

    code = ask.run(settings, of.question, SEEDS, sections, afterwards)
    found = None if settings.plan else read_json(Path(settings.workdir or f"runs/{of.question.name}") / "results.json")
    if not code and found and "written" in found:
        print()
        console = terminal.console_of(None)
        terminal.table(console, *table(found["written"]))
        if found["written"]["comparisons"]:
            terminal.table(console, *compared(found["written"]))
    return code
