"""What does each mask let a model learn, and which ones cheat?

    python launch.py --experiment=masking --workdir=runs/masking
    python launch.py --experiment=masking --depth=full --workdir=runs/masking_full

Small decoders of two layers on real text, one for each mask: causal, none, inverted (the formula
as one article prints it), a prefix of 16, block-sparse (causal, as the library has it), causal
windows of 4, 16 and 64; each at three learning rates, each with the same seeds. Text, because it
rewards every distance; a made task rewards one. The primary loss is the honest one (honest.py):
each position is asked on the row cut off after it. Rates are chosen by it, too: a mask that cheats
is judged at the rate at which it generalises best. Beside it stand the loss that the mask shows
under teacher forcing, the derivatives of outputs by later inputs, and the constants by which
others hide scores (mask_constants.py).

Expected, with six seeds: without a mask and with the inverted one the loss under the mask is 0.05
and 0.04 nats, the honest one 4.04 and 3.35 (causal: 1.779 both ways); all 2,016 pairs of an output
and a later input leak. The more they learn to cheat, the less they are worth, so that their best
rate is the least tried. The prefix looks ahead in 120 pairs, shows 1.46, and is worth 2.00. Causal
masks have a gap of 0 and no leak. A window of 4 ends 0.045 below causal: 300 steps are too few to use
more than the nearest bytes. A window of 64, the whole row, is causal to the last bit.

Of the constants, -inf gives NaN in a row that sees nothing, and in training from the first update on;
so does -1e9 in float16 scores; the minimum where two masks hide the same row. The finite ones give
such a row the mean of all values, or in float32, with -1e4, what it would attend to unmasked. An
allowed score of -20000 loses to -1e4. Any other row that sees a key is the same with all of them.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import ask, grid, mask_constants, report, results, stats, trained
from experiments.flags import Settings
from experiments.grid import Arm, Run
from experiments.honest import honest, seen
from experiments.sections import Section
from experiments.sweep import Outcome, Question
from transformer_jax.config import Config, Hyper
from transformer_jax.data import make_task
from transformer_jax.dependencies import Pattern, leaks, measured
from transformer_jax.errors import ConfigError

FLAGS = ask.FLAGS
SEEDS = 6
KINDS = ("causal", "none", "inverted", "prefix", "block_sparse", "window")
WINDOWS = (4, 16, 64)
RATES = (3e-3, 1e-2, 3e-2)
BASE = Config(
    d_model=32,
    num_heads=2,
    num_layers=2,
    seq_len=64,
    batch_size=8,
    steps=300,
    scan_unroll=0,
)
FULL = BASE.replace(d_model=64, num_heads=4, seq_len=128, steps=1500)
NUMBERS = Hyper(prefix=16)
SWEPT = ("mask", "window", "learning_rate")
TRIAL = {"num_layers": 1, "seq_len": 32, "batch_size": 4}  # of the constants; also as wide as the arms at most
TRIAL_STEPS = 60
PICTURES = "leaks.npz"
CONSTANTS = {"-inf": "−∞", "-1e4": "−10⁴", "-1e9": "−10⁹"}  # as the report writes them


def question(settings: Settings) -> Question:
    """The arms: one for each mask, windows one for each width, crossed with --sweep; `--depth=full` is larger."""
    config, hyper = settings.configure(FULL if settings.depth == "full" else BASE, NUMBERS)
    for name in SWEPT:
        if name in settings.overrides:
            raise ConfigError(f"--{name} is what this experiment sweeps: use --sweep={name}=… for other values")
    if config.architecture != "decoder":
        raise ConfigError(f"architecture={config.architecture}: a mask of the decoder is asked about")
    extra = grid.parse_sweep(settings.sweep)
    kinds = extra.pop("mask", KINDS)
    # A window of the whole row is the causal mask, and shows what of a difference is the program's.
    windows = extra.pop("window", [width for width in WINDOWS if width <= config.seq_len])
    prefixes = extra.pop("prefix", [hyper.prefix])
    rates = extra.pop("learning_rate", RATES)
    hyper = dataclasses.replace(hyper, window=min(hyper.window, config.seq_len))
    arms = []
    for kind in kinds:
        of = config.replace(mask=kind)
        if kind == "window":
            arms += [Arm(f"window {width}", of, dataclasses.replace(hyper, window=width)) for width in windows]
        elif kind == "prefix":
            arms += [Arm(f"prefix {seen}", of, dataclasses.replace(hyper, prefix=seen)) for seen in prefixes]
        else:
            arms.append(Arm("no mask" if kind == "none" else kind.replace("_", "-"), of, hyper))
    arms = grid.with_shared_terms(grid.cross(arms, extra))
    pairs, notes = stats.first_pairs(_pairs(arms))
    return Question(
        name="masking",
        title="What does each mask let a model learn, and which ones cheat?",
        arms=arms,
        learning_rates=tuple(sorted(rates)),
        comparisons=pairs,
        losses={"honest": honest, "seen": seen},
        primary="report_honest_loss",
        selection="selection_honest_loss",
        notes=notes,
    )


def _pairs(arms: Sequence[Arm]) -> list[tuple[str, str]]:
    """Every arm against the causal one of the same settings; windows that hold the whole row left out."""
    names = [arm.name for arm in arms]
    pairs = []
    for arm in arms:
        kind, comma, rest = arm.name.partition(", ")
        whole_row = arm.config.mask == "window" and arm.hyper.window >= arm.config.seq_len
        if kind != "causal" and not whole_row and (against := f"causal{comma}{rest}") in names:
            pairs.append((arm.name, against))
    return pairs


# --- after the training -------------------------------------------------------------


def afterwards(outcome: Outcome, found: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Gaps, leaks of each arm's first model, and the constants; the derivatives [T, T] go to a file of their own."""
    models = trained.models(folder)
    derivatives, rows = {}, []
    for i, arm in enumerate(found["arms"]):
        slopes, row = leak(models[Run(i, arm["best_learning_rate"], 0)])
        derivatives[arm["name"]] = slopes
        rows.append({"name": arm["name"], **row})
    np.savez_compressed(folder / PICTURES, **derivatives)
    config, hyper = outcome.question.arms[0].config, outcome.question.arms[0].hyper
    small = config.replace(**{name: min(size, getattr(config, name)) for name, size in TRIAL.items()})
    middle = sorted(outcome.question.learning_rates)[len(outcome.question.learning_rates) // 2]
    steps = min(TRIAL_STEPS, config.steps)
    return {
        "gaps": [gap(arm) for arm in found["arms"]],
        "leaks": rows,
        "constants": [dataclasses.asdict(row) for row in mask_constants.try_out()],
        "constants_in_training": {
            "steps": steps,
            "rows": mask_constants.train(small, dataclasses.replace(hyper, learning_rate=middle), steps),
        },
    }


def gap(arm: dict[str, Any]) -> dict[str, Any]:
    """Honest loss less the loss under the mask, on the same positions, seed by seed."""
    pair = [arm["metrics"][f"report_{name}_loss"]["per_seed"] for name in ("honest", "seen")]
    each = [None if None in (a, b) else a - b for a, b in zip(*pair, strict=True)]
    return {"name": arm["name"], **results.summarise(each)}


# One program for each Config: windows share theirs.
_measured = jax.jit(measured, static_argnums=1)


def leak(model: trained.Model) -> tuple[np.ndarray, dict[str, Any]]:
    """max |d h_i / d x_j| of one row of text, [T, T], and what of it lies above the diagonal.

    h: the last layer's output after its norm, of which the logits are a linear map; x: the embeddings.
    largest: the largest at j > i; pairs: how many of them are not 0, of all.
    """
    from experiments.loop import device_hyper

    config = model.config.replace(batch_size=1)
    task = make_task(config)
    batch = task.eval_batch(task.data, "report", 0)
    pattern = _measured(model.params, config, device_hyper(model.hyper), batch)
    T = config.seq_len
    found = leaks(pattern, Pattern(jnp.tri(T, dtype=bool)[None], None, jnp.ones((1, 1), bool)))
    row = {"largest": results.number(found.largest), "pairs": found.count, "of": T * (T - 1) // 2}
    return np.asarray(pattern.target_BTT[0]), row


# --- the report ---------------------------------------------------------------------


def sections(outcome: Outcome, found: dict[str, Any]) -> list[Section]:
    """The report's own parts: who cheats, what depends on what, and the constants."""
    return [_cheats(found), _dots(found), _heat(found), *_constants(found["constants"]), _training(found)]


def _shown(metric: dict[str, Any], digits: int = 3) -> str:
    return "diverged" if metric["mean"] is None else f"{metric['mean']:.{digits}f}"


def _cheats(found: dict[str, Any]) -> Section:
    rows = []
    for arm, gap, leak in zip(found["arms"], found["gaps"], found["leaks"], strict=True):
        losses = [arm["metrics"][name] for name in ("train_loss", "report_seen_loss", "report_honest_loss")]
        apart = "diverged" if gap["mean"] is None else report.fixed(gap["mean"], 3 if abs(gap["mean"]) > 5e-4 else 6)
        largest = "NaN" if leak["largest"] is None else f"{leak['largest']:.2g}"
        rows.append([arm["name"], *map(_shown, losses), apart, largest, f"{leak['pairs']:,} of {leak['of']:,}"])
    return Section(
        "Who cheats",
        "Nats per token, means over seeds, each arm at its best rate. Under the mask: teacher forcing, all of the row "
        "that the mask allows. Honest: the same positions, each on the row cut off after it. Their gap is what a mask "
        "gains by looking ahead. Leak: the largest derivative of an output by a later input, on one "
        "row of text in the model of seed 0, and at how many pairs it is not 0.",
        ("arm", "training", "under the mask", "honest", "gap", "leak", "pairs that leak"),
        rows,
    )


def _dots(found: dict[str, Any]) -> Section:
    arms = found["arms"]

    def draw(path: Path) -> None:
        from experiments.plots_masking import two_dots

        names = [arm["name"] for arm in arms]
        pair = [[arm["metrics"][f"report_{loss}_loss"] for arm in arms] for loss in ("seen", "honest")]
        two_dots(path, names, *pair, labels=("under the mask", "honest"), x_label="validation loss, nats per token")

    return Section("The loss that a mask shows, and the honest one", figure=("honest.png", draw))


def _heat(found: dict[str, Any]) -> Section:
    def draw(path: Path) -> None:
        from experiments.plots_masking import heat_maps

        with np.load(path.parent / PICTURES) as held:
            heat_maps(path, {arm["name"]: held[arm["name"]] for arm in found["arms"]})

    return Section(
        "What an output depends on",
        "The largest derivative of output i by the embedding of position j, seed 0, on one row of text. White is "
        "exactly 0. Red lies above the diagonal: the future.",
        figure=("leaks.png", draw),
    )


def _constants(found: Sequence[dict[str, Any]]) -> list[Section]:
    tried = [mask_constants.Found(**row) for row in found]
    cells = {(row.constant, row.score_dtype, row.case, row.placement): row.words for row in tried}
    kinds = sorted({(row.constant, row.score_dtype): None for row in tried}, key=_order)

    def table(placement: str) -> list[list[str]]:
        return [
            [CONSTANTS.get(constant, constant), dtype]
            + [cells[constant, dtype, case, placement] for case in mask_constants.CASES]
            for constant, dtype in kinds
        ]

    after, before = table("after"), table("before")
    other = [row for row, usual in zip(before, after, strict=True) if row != usual]
    header = ("added", "scores", *mask_constants.CASES)
    cases = "; ".join(f"{name}: {what}" for name, what in mask_constants.CASES.items())
    return [
        Section(
            "Constants that hide scores",
            "What the field adds to hidden scores, against booleans in the same type, on two rows of eight positions. "
            "Equal: to rounding, with no weight on a hidden key. Off by: largest difference of an output. "
            f"NaN: how many of 128 outputs and 384 derivatives by q, k, v. {cases}.",
            header,
            after,
        ),
        Section(
            "The same, added before the scale",
            "The constant is then divided by √d_k, too. Only where that changes something."
            if other
            else "The constant is then divided by √d_k, too: nothing changes.",
            header if other else (),
            other,
        ),
    ]


def _order(kind: tuple[str, str]) -> int:
    """Rows stand by constant; the types of each as they were tried."""
    return mask_constants.CONSTANTS.index(kind[0])


def _training(found: dict[str, Any]) -> Section:
    trial = found["constants_in_training"]
    at = {(row["constant"], row["score_dtype"]): row for row in trial["rows"]}
    dtypes = list(dict.fromkeys(row["score_dtype"] for row in trial["rows"]))

    def cell(row: dict[str, Any]) -> str:
        return f"NaN from step {row['nan_step']}" if row["loss"] is None else f"{row['loss']:.4f}"

    names = dict.fromkeys(name for name, _ in at)
    rows = [[CONSTANTS.get(name, name), *(cell(at[name, dtype]) for dtype in dtypes)] for name in names]
    return Section(
        "Constants in training",
        f"One layer trained for {trial['steps']} steps on rows padded on the left, causal and padding masks added "
        "after the scale: training loss over the last tenth, by the type of the scores. No loss is counted at padding.",
        ("hidden by", *dtypes),
        rows,
    )


def run(settings: Settings) -> int:
    """Train, compare, look, report; exit code 0, or that of the signal that stopped it."""
    return ask.run(settings, question(settings), SEEDS, sections, afterwards)
