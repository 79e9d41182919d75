"""Chapter F's trainings: normalisers (F03; F04 at rates too high), logits (F05), text (F06) and answers (F07) at
temperatures."""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import stats, temperature, tempering
from experiments import trained as models_of
from experiments.claims.paired import LOWER, UPPER, apart, lower, lower_arm
from experiments.claims.record import Curves, Numbers, Words, at_least, at_most, shown
from experiments.claims.training import arms, compared, mean, trained
from experiments.grid import Arm, Run
from experiments.loop import device_hyper
from experiments.sweep import Question
from transformer_jax import keys
from transformer_jax.batch import Batch
from transformer_jax.config import Config, Hyper
from transformer_jax.data import make_task
from transformer_jax.data.markov import ORDER
from transformer_jax.encoder_decoder import Transformer, forward

SEEDS = 6
SEEDS_OF_SUMS = 16  # some have learnt to add by the last step, and some have not begun: six seeds tell nothing
RATES = (1e-3, 3e-3, 1e-2)

# --- F03 ----------------------------------------------------------------------------

KINDS = ("softmax", "relu", "sigmoid", "entmax15")
RECALLING = Config(
    task="induction", vocab_size=32, d_model=64, num_heads=2, num_layers=2, d_ff=128, seq_len=32, batch_size=8,
    steps=900, scan_unroll=0,
)  # fmt: skip
CHANCE = math.log(RECALLING.V - 3)  # three ids are no symbols
NORMALISERS = Question(
    name="claim_F03",
    title="How do the normalisers of attention compare?",
    arms=tuple(Arm(kind, RECALLING.replace(normaliser=kind), Hyper()) for kind in KINDS),
    learning_rates=(3.75e-4, 7.5e-4, 1.5e-3, 3e-3),
    comparisons=tuple((kind, "softmax") for kind in KINDS[1:]),
)
NAMES = {"softmax": "softmax", "relu": "线性（正分）", "sigmoid": "sigmoid", "entmax15": "1.5-entmax"}


def divided(model: models_of.Model) -> np.ndarray:
    """s_j / Σ s of a model's scores on a batch, [rows, T] with 0 at hidden keys; rows of one key are left out."""
    config, task = model.config, make_task(model.config)

    @jax.jit
    def of(params: Transformer, batch: Batch) -> tuple[jax.Array, jax.Array]:
        trace = forward(params, config, device_hyper(model.hyper), batch, trace=True)[1].decoder
        assert trace is not None
        visible = trace.allowed_BNTS & (trace.allowed_BNTS.sum(axis=-1, keepdims=True) > 1)
        return jnp.where(visible, trace.scores_BNTS, 0), visible

    scores, visible = (np.asarray(x) for x in of(model.params, task.eval_batch(task.data, "report", 0)))
    rows = scores.reshape(-1, scores.shape[-1])[visible.any(axis=-1).ravel()]
    with np.errstate(divide="ignore", invalid="ignore"):
        return rows / rows.sum(axis=-1, keepdims=True)


def undivided(folder: Path, rate: float) -> Numbers:
    """What plain division by the sum would do with the scores of the trained softmax models."""
    made = models_of.models(folder)
    rows = np.concatenate([divided(made[Run(0, rate, seed)]) for seed in range(SEEDS)])
    whole = np.isfinite(rows).all(axis=-1)
    label = Words("trained scores over their sum: rows with NaN or ∞", "训练后的得分除以总和：含 NaN 或 ∞ 的行")
    yield shown("plain_nan", label, 1 - whole.mean(), "float32")
    label = Words("the same: rows with a weight below 0", "同上：含负权重的行")
    yield at_least("plain_negative", label, (rows < 0).any(axis=-1).mean(), 0.5, "float32")
    label = Words("the same: largest |weight|", "同上：|权重| 的最大值")
    yield shown("plain_most", label, np.abs(rows[whole]).max(), "float32")


def normalisers(folder: Path) -> Numbers:
    """Each normaliser at its own best rate on a task that nothing but attention solves.

    Judged: linear, kept to positive scores, learns, and less well than softmax.
    """
    texts = {kind: Words(kind, zh) for kind, zh in NAMES.items()}
    found, _ = trained(NORMALISERS, SEEDS, folder, names=texts)
    by_name = arms(found)
    label = Words("loss, softmax less linear (positive scores)", "损失差，softmax 减线性（正分）")
    yield from lower_arm("linear", label, found, "softmax", "relu")
    for kind in KINDS:
        zh, ends = NAMES[kind], by_name[kind]["metrics"]["report_loss"]["ci95"]
        label = Words(f"{kind}, upper end of the 95% interval of the loss", f"{zh}：损失的 95% 区间上端")
        # All that is judged is that each learns; guessing among all symbols costs CHANCE.
        yield at_most(f"{kind}_works", label, float("nan") if ends is None else ends[1], CHANCE, "float32")
        label = Words(f"loss, {kind}, nats", f"损失（{zh}），nat")
        yield shown(kind, label, mean(by_name[kind], "report_loss"), "float32")
        lost = len(by_name[kind]["diverged"])
        yield shown(f"{kind}_lost", Words(f"runs that diverged, {kind}", f"发散的训练次数（{zh}）"), lost)
        if kind != "softmax":
            label = Words(f"loss, {kind} less softmax", f"损失差，{zh}减 softmax")
            yield from apart(f"{kind}_more", label, compared(found, kind, "softmax"))
    yield from undivided(folder, by_name["softmax"]["best_learning_rate"])


# --- F04 ----------------------------------------------------------------------------

HOT = Question(
    name="claim_F04",
    title="Is it the exponential that keeps training stable?",
    arms=tuple(Arm(kind, RECALLING.replace(normaliser=kind, steps=300), Hyper()) for kind in KINDS),
    learning_rates=(1e-2, 3e-2, 1e-1),
    comparisons=(),
)
WORSE = 0.1  # nats above guessing: more than a run that has learnt nothing is apart from it


def stability(folder: Path) -> Numbers:
    """Runs at rates that are too high: with which normalisers do they end worse than guessing?"""
    _, outcome = trained(HOT, SEEDS, folder, chooses=False)
    lost: dict[str, int] = {}
    for i, kind in enumerate(KINDS):
        ends = [run.final("report_loss") for rate in HOT.learning_rates for run in outcome.of(i, rate)]
        lost[kind] = sum(end is None or end > CHANCE + WORSE for end in ends)
        label = Words(f"{kind}: runs that end worse than guessing", f"{NAMES[kind]}：结果比乱猜还差的训练次数")
        yield shown(f"{kind}_lost", label, lost[kind])
        norms = [run.grad_norm[np.isfinite(run.grad_norm)] for run in outcome.of(i, HOT.learning_rates[0])]
        spikes = [np.max(norm) / np.median(norm) for norm in norms]
        label = Words(
            f"{kind}: largest gradient norm over the median, median of seeds at the lowest rate",
            f"{NAMES[kind]}：梯度范数的最大值与中位数之比（最低学习率，各种子的中位数）",
        )
        yield shown(f"{kind}_spike", label, np.median(spikes), "float32")
    yield shown("runs", Words("runs of each", "每种的训练次数"), SEEDS * len(HOT.learning_rates))
    label = Words(
        "runs lost by the steadiest of the others, less those of softmax", "其余中最稳者与 softmax 的失败次数之差"
    )
    yield at_most("others", label, min(lost[kind] for kind in KINDS[1:]) - lost["softmax"], 0)


# --- F05 and F06, of the same models --------------------------------------------------

WRITERS = Question(
    name="claim_writers",
    title="What do models write at each temperature?",
    arms=(Arm("writer", temperature.BASE.replace(steps=400), Hyper()),),
    learning_rates=(2e-3, 6e-3, 1.8e-2),
    comparisons=(),
)
OF_LOGITS = (0.25, 0.5, 1.0, 2.0, 4.0)
POSITIONS = 64  # rows of held-out text whose logits are taken


def writers(folder: Path) -> list[models_of.Model]:
    """The models that F05 and F06 share: whichever comes first trains them."""
    return trained_models(WRITERS, SEEDS, folder.parent / WRITERS.name)


def trained_models(question: Question, seeds: int, folder: Path) -> list[models_of.Model]:
    """The models of the only arm at its best rate, one a seed; those that diverged are left out."""
    texts = {"writer": Words("writer", "书写模型"), "sums": Words("sums", "加法模型")}
    arm = trained(question, seeds, folder, names=texts)[0]["arms"][0]
    every, losses = models_of.models(folder), arm["metrics"]["report_loss"]["per_seed"]
    return [every[Run(0, arm["best_learning_rate"], seed)] for seed, loss in enumerate(losses) if loss is not None]


def flattening(folder: Path) -> Numbers:
    """What temperatures do to the logits of trained models on held-out text."""
    rises, gaps, ends = [], [], []
    for model in writers(folder):
        logits = temperature.logits_of(model, temperature.held_out(model.config)[:POSITIONS, :-1])
        logits = logits.reshape(-1, logits.shape[-1])
        nats = [float(np.mean(tempering.entropy(tempering.log_probabilities(logits, T)))) for T in OF_LOGITS]
        rises.append(float(np.diff(nats).min()))
        gaps.append(tempering.entropy_slopes(logits, OF_LOGITS).largest_difference)
        ends.append((nats[0], nats[-1]))
    label = Words("least rise of H from one T to the next, any model", "任一模型中 H 随 T 的最小增量")
    yield at_least("trained_rising", label, min(rises), 1e-2)
    label = Words("trained models: dH/dT by formula, autodiff, differences", "训练后模型的 dH/dT：公式、自动微分与差分")
    yield at_most("trained_slope", label, max(gaps), 1e-8)
    for name, nats, T in zip(("cold", "hot"), zip(*ends, strict=True), (OF_LOGITS[0], OF_LOGITS[-1]), strict=True):
        label = Words(f"H at T = {T:g}, mean over models", f"T = {T:g} 时的 H，各模型平均")
        yield shown(f"trained_{name}", label, np.mean(nats))


def writing(folder: Path) -> Numbers:
    """Samples of models of a Markov chain at temperatures, held to the chain."""
    judged = []
    for seed, model in enumerate(writers(folder)):
        rows = temperature.held_out(model.config)
        samples = temperature.write(
            model, rows[: temperature.SAMPLES, :ORDER], keys.named(jax.random.key(seed), "samples")
        )
        judged.append(temperature.judge(model, samples))

    def of(T: float, metric: str) -> list[float | None]:
        at = temperature.OF_SAMPLES.index(T)
        return [rows[at][metric] for rows in judged]

    repeats, cost = "repetition_4", "generator_nats"
    label = Words("4-grams repeated, T = 1 − T = 0", "重复的 4-gram 比例，T = 1 − T = 0")
    yield from lower("mechanical", label, of(1.0, repeats), of(0.0, repeats))
    label = Words("nats under the chain, T = 0.5 − T = 1", "在链下的代价，T = 0.5 − T = 1")
    yield from lower("stable", label, of(0.5, cost), of(1.0, cost))
    label = Words("nats under the chain, T = 1 − T = 1.5", "在链下的代价，T = 1 − T = 1.5")
    yield from lower("loose", label, of(1.0, cost), of(1.5, cost))
    for T in temperature.OF_SAMPLES:
        name = f"{T:g}".replace(".", "")
        label = Words(f"4-grams repeated, T = {T:g}", f"T = {T:g} 时重复的 4-gram 比例")
        yield shown(f"repeat{name}", label, np.mean(np.array(of(T, repeats))), "float32")
        label = Words(f"nats a symbol under the chain, T = {T:g}", f"T = {T:g} 时每符号在链下的代价")
        yield shown(f"cost{name}", label, np.mean(np.array(of(T, cost))), "float32")


# --- F07 ----------------------------------------------------------------------------

OF_ANSWERS = (0.0, 0.1, 0.4, 0.8, 1.0, 1.2, 1.4, 1.6, 2.0)
SUMS = Question(
    name="claim_F07",
    title="How often is an answer right at each temperature?",
    arms=(
        Arm(
            "sums",
            Config(task="modular", vocab_size=27, d_model=32, num_heads=2, num_layers=2, seq_len=31, batch_size=8,
                   steps=600, scan_unroll=0),
            Hyper(),
        ),
    ),
    learning_rates=(*RATES, 3e-2),
    comparisons=(),
)  # fmt: skip


def answers(model: models_of.Model) -> tuple[np.ndarray, np.ndarray]:
    """(chance of the right answer, calibration error) at each temperature, over the reported split: [temperatures].

    Drawing one token is right with the probability of the right one: no draw is needed.
    """
    task = make_task(model.config)
    batches = jax.jit(jax.vmap(lambda i: task.eval_batch(task.data, "report", i)))(
        np.arange(task.eval_batches["report"])
    )
    T = model.config.seq_len
    tokens, targets, weights = (
        np.asarray(x).reshape(-1, T) for x in (batches.tokens_BT, batches.targets_BT, batches.weights_BT)
    )
    logits, asked = temperature.logits_of(model, tokens)[weights > 0], targets[weights > 0]
    rows = [tempering.log_probabilities(logits, t) for t in OF_ANSWERS]
    right = [np.exp(logp[np.arange(len(asked)), asked]).mean() for logp in rows]
    return np.array(right), np.array([tempering.reliability(logp, asked).error for logp in rows])


def answering(folder: Path) -> Numbers:
    """Sums modulo a prime: one answer is right, and its chance at each temperature is known without drawing."""
    found = [answers(model) for model in trained_models(SUMS, SEEDS_OF_SUMS, folder)]
    right, error = (np.array(x) for x in zip(*found, strict=True))  # [seeds, temperatures]
    at = {T: i for i, T in enumerate(OF_ANSWERS)}

    def of(values: np.ndarray, T: float) -> list[Any]:
        return values[:, at[T]].tolist()

    label = Words("right, T = 0.8 − T = 0.1", "答对率，T = 0.8 − T = 0.1")
    yield from lower("general", label, of(right, 0.8), of(right, 0.1))
    label = Words("right, T = 1.2 − T = 0.8", "答对率，T = 1.2 − T = 0.8")
    yield from lower("hot", label, of(right, 1.2), of(right, 0.8))
    # A threshold at 1.2 would at least double what a step of 0.2 costs.
    before, after = (right[:, at[T]] - right[:, at[T] + 1] for T in (1.0, 1.2))
    label = Words(
        "right answers lost, T = 1.2 to 1.4, less twice those of 1 to 1.2",
        "答对率的下降，T 从 1.2 到 1.4，减从 1 到 1.2 的两倍",
    )
    yield from lower("threshold", label, after.tolist(), (2 * before).tolist())
    label = Words("right answers lost, T = 1.2 to 1.4 less 1 to 1.2", "答对率的下降，T 从 1.2 到 1.4 减从 1 到 1.2")
    row = stats.compare({"after": after.tolist(), "before": before.tolist()}, [("after", "before")], "right")[0]
    yield from apart("steeper", label, row.to_dict())
    bands = [stats.mean_interval(right[:, i].tolist()) for i in range(len(OF_ANSWERS))]
    ends = np.array([[np.nan if end is None else end for end in band[1:]] for band in bands])
    for T, (low, high) in zip(OF_ANSWERS, ends, strict=True):
        name = f"{T:g}".replace(".", "")
        label = Words(f"right, T = {T:g}", f"T = {T:g} 时的答对率")
        yield shown(f"right{name}", label, right[:, at[T]].mean(), "float32")
        yield shown(f"right{name}_low", Words(f"{label.en}, {LOWER.en}", f"{label.zh}，{LOWER.zh}"), low, "float32")
        yield shown(f"right{name}_high", Words(f"{label.en}, {UPPER.en}", f"{label.zh}，{UPPER.zh}"), high, "float32")
        label = Words(f"calibration error, T = {T:g}", f"T = {T:g} 时的校准误差")
        yield shown(f"ece{name}", label, error[:, at[T]].mean(), "float32")
    curves = {"right": right.mean(axis=0), "95%": ends[:, 0], "95% ": ends[:, 1], "ECE": error.mean(axis=0)}
    lines = {name: (OF_ANSWERS, curve.tolist()) for name, curve in curves.items()}
    caption = Words(
        "Answers that are right, with their interval, and the calibration error.", "答对率及其区间，与校准误差。"
    )
    yield Curves(caption, "T", "part", lines)
