"""The claims of chapter H that only training can tell: heads, feed-forward width, alignment (S2 §5, §6, §8.2)."""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments import trained as models
from experiments.claims.paired import apart, lower_arm
from experiments.claims.record import Numbers, Words, at_least, shown
from experiments.claims.training import arms, compared, mean, trained
from experiments.grid import Arm
from experiments.loop import device_hyper
from experiments.sweep import Question
from transformer_jax.batch import Batch
from transformer_jax.config import Config, Hyper
from transformer_jax.data import END, make_task
from transformer_jax.encoder_decoder import Transformer, forward

SEEDS = 6  # the sign-flip p of five is never below 0.0625
F32 = "float32"
RATES = (1.5e-3, 4.5e-3, 1.35e-2)
BASE = Config(d_model=64, num_heads=4, num_layers=2, seq_len=64, batch_size=8, steps=300, scan_unroll=0)


def losses(found: dict[str, Any], names: dict[str, Words]) -> Numbers:
    """Each arm's validation loss at its best rate. names: name of the number and the arm -> label."""
    for name, label in names.items():
        yield shown(name, label, mean(arms(found)[name], "report_loss"), F32)


# --- H09 -----------------------------------------------------------------------------

HEADS = (1, 2, 4, 8, 16)


def heads_question() -> Question:
    """1 to 16 heads on text, all with 4d² weights: H = d/h."""
    return Question(
        name="claim_heads",
        title="How many heads, at the same number of weights?",
        arms=tuple(Arm(f"h{h}", BASE.replace(num_heads=h), Hyper()) for h in HEADS),
        learning_rates=RATES,
        comparisons=(("h4", "h1"), ("h8", "h1"), ("h16", "h1")),
    )


def heads(folder: Path) -> Numbers:
    """H09: several heads against one."""
    found, _ = trained(heads_question(), SEEDS, folder)
    yield from lower_arm("four", Words("4 heads less 1, nats", "4 头减 1 头（nat）"), found, "h4", "h1")
    yield from apart("eight", Words("8 heads less 1, nats", "8 头减 1 头（nat）"), compared(found, "h8", "h1"))
    yield from apart("sixteen", Words("16 heads less 1, nats", "16 头减 1 头（nat）"), compared(found, "h16", "h1"))
    yield from losses(found, {f"h{h}": Words(f"loss, h = {h}", f"损失，h = {h}") for h in HEADS})


# --- H13 -----------------------------------------------------------------------------

# Name -> (inner width, layers). "deep" has as many weights as "wide": 4 (4 + 2) d² and 2 (4 + 8) d².
WIDTHS = {"none": (1, 2), "even": (64, 2), "wide": (256, 2), "deep": (64, 4)}


def width_question() -> Question:
    """Inner widths 1 (next to no net), d and 4d in two layers, and d in four."""
    shapes = WIDTHS.items()
    return Question(
        name="claim_ffn_width",
        title="What is the feed-forward net's expansion worth?",
        arms=tuple(Arm(name, BASE.replace(ffn="relu", d_ff=F, num_layers=L), Hyper()) for name, (F, L) in shapes),
        learning_rates=RATES,
        comparisons=(("wide", "none"), ("wide", "even"), ("wide", "deep")),
    )


def widths(folder: Path) -> Numbers:
    """H13: d_ff = 4d against d_ff = d, and against as many weights in more layers; a net of one unit is shown."""
    texts = {name: Words(f"d_ff = {F}, L = {L}", f"d_ff = {F}，L = {L}") for name, (F, L) in WIDTHS.items()}
    found, _ = trained(width_question(), SEEDS, folder, names=texts)
    label = Words("d_ff = 4d less d_ff = d, nats", "d_ff = 4d 减 d_ff = d（nat）")
    yield from lower_arm("expansion", label, found, "wide", "even")
    label = Words("d_ff = 4d less four layers of d_ff = d, nats", "d_ff = 4d 减四层 d_ff = d（nat）")
    yield from lower_arm("depth", label, found, "wide", "deep")
    label = Words("d_ff = 4d less d_ff = 1, nats", "d_ff = 4d 减 d_ff = 1（nat）")
    yield from apart("net", label, compared(found, "wide", "none"))
    names = {name: Words(f"loss, d_ff = {F}, L = {L}", f"损失，d_ff = {F}，L = {L}") for name, (F, L) in WIDTHS.items()}
    yield from losses(found, names)


# --- H15 -----------------------------------------------------------------------------

TASKS = ("copy", "reverse")
TASK_NAMES = {"copy": Words("copying", "复制"), "reverse": Words("reversing", "反转")}
RIGHT = 0.99  # part of the tokens that a run must write right to be one that can
BATCHES = 8  # of 16 rows


def alignment_question() -> Question:
    """An encoder and a decoder of one layer, on copying and on reversing."""
    config = Config(
        architecture="encoder_decoder", d_model=32, num_heads=1, num_layers=1, seq_len=12, batch_size=16, vocab_size=16
    ).replace(positions="sinusoidal", steps=1500, schedule="cosine", scan_unroll=0)
    return Question(
        name="claim_alignment",
        title="Does cross-attention look where the next token stands?",
        arms=tuple(Arm(task, config.replace(task=task), Hyper()) for task in TASKS),
        learning_rates=(3e-3, 6e-3, 1.2e-2, 2.4e-2),
        comparisons=(),
    )


def aligned(model: models.Model, split: str) -> np.ndarray:
    """Per layer and head, [L, N]: how often the largest weight stands on the token that is to be written.

    END, which the source does not have, is left out.
    """
    config, task = model.config, make_task(model.config)
    hyper = device_hyper(model.hyper)

    @jax.jit
    def weights_of(params: Transformer, batch: Batch) -> jax.Array:
        trace = forward(params, config, hyper, batch, trace=True)[1].cross
        assert trace is not None
        return trace.weights_BNTS

    hits, asked = np.zeros((config.L, config.N)), 0
    for index in range(BATCHES):
        batch = task.eval_batch(task.data, split, index)
        place_BT, lengths = np.arange(batch.tokens_BT.shape[1])[None], np.asarray(batch.source_lengths_B)[:, None]
        place_BT = place_BT + 0 * lengths if config.task == "copy" else lengths - 1 - place_BT
        counted = (np.asarray(batch.weights_BT) > 0) & (np.asarray(batch.targets_BT) != END)
        best_LBNT = np.asarray(weights_of(model.params, batch)).argmax(axis=-1)
        hits += np.sum((best_LBNT == place_BT[None, :, None]) & counted[None, :, None], axis=(1, 3))
        asked += int(counted.sum())
    return hits / asked


def best_head(model: models.Model) -> float:
    """The accuracy, on the split of the report, of the head that is best on the other split."""
    return float(aligned(model, "report").flat[int(np.argmax(aligned(model, "selection")))])


def alignment(folder: Path) -> Numbers:
    """H15: the best head of each trained model: over seeds at the best rate, and the least of all that can do it.

    The last is shown, not judged: at high rates single runs write every token right and align little.
    """
    found, outcome = trained(alignment_question(), SEEDS, folder, names=TASK_NAMES)
    made = models.models(folder)
    yield shown("right", Words("tokens right of a run that can", "“学会”的最低正确率"), RIGHT)
    for i, task in enumerate(TASKS):
        rate = arms(found)[task]["best_learning_rate"]
        hits = {run: best_head(model) for run, model in made.items() if run.arm == i}
        best = [hit for run, hit in hits.items() if run.learning_rate == rate]
        label = Words(
            f"{task}: aligned tokens, best head, median of {SEEDS} seeds",
            f"{TASK_NAMES[task].zh}：最佳头的对齐率（{SEEDS} 个种子的中位数）",
        )
        yield at_least(task, label, np.median(best), 0.95, F32)
        # Alignment error rate 1 − 2|A∩S|/(|A| + |S|) (Och & Ney 2003): A and S have a link for every token written.
        label = Words(f"{task}: alignment error rate, median", f"{task}：对齐错误率（中位数）")
        yield shown(f"{task}_aer", label, 1 - np.median(best), F32)
        ends = {run: outcome.of(i, run.learning_rate)[run.seed].final("report_accuracy") for run in hits}
        able = [hit for run, hit in hits.items() if (ends[run] or 0.0) >= RIGHT]
        label = Words(
            f"{task}: aligned tokens, least of the runs that can", f"{TASK_NAMES[task].zh}：对齐率，学会的运行中最低"
        )
        yield shown(f"{task}_least", label, min(able, default=float("nan")), F32)
        label = Words(f"{task}: accuracy of the next token", f"{TASK_NAMES[task].zh}：下一词元的正确率")
        yield shown(f"{task}_accuracy", label, mean(arms(found)[task], "report_accuracy"), F32)
