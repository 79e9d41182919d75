"""What training says of chapter B: language models of one head of 64 on text, as experiments.dk_scaling asks."""

from pathlib import Path
from typing import Any

from experiments.claims.paired import lower_arm
from experiments.claims.record import Curves, Numbers, Words, at_least, at_most, near, shown
from experiments.claims.training import arms, compared, mean, trained
from experiments.dk_scaling import BASE, EXPONENTS, RATES, SEEDS
from experiments.grid import Arm
from experiments.observe import attention_statistics
from experiments.observed import at_mark
from experiments.sweep import Question
from transformer_jax.config import Hyper

QUESTION = Question(
    name="claims_scaling",
    title="Does a model learn without the division by √d_k?",
    arms=tuple(Arm(name, BASE.replace(head_dim=64), Hyper(dk_exponent=x)) for name, x in EXPONENTS.items()),
    learning_rates=(RATES[0] / 3, *RATES),  # without the division the lowest of RATES is the best
    comparisons=(("on", "off"), ("on", "twice")),
    observe=attention_statistics,
)


def results(folder: Path, question: Question = QUESTION, seeds: int = SEEDS) -> dict[str, Any]:
    """results.json of the sweep, which claims B13 and B17 share: whichever comes first trains it."""
    names = {
        "on": Words("divided by √d_k", "除以 √d_k"),
        "off": Words("not divided", "不缩放"),
        "twice": Words("divided by d_k", "除以 d_k"),
    }
    return trained(question, seeds, folder.parent / question.name, names=names)[0]


def learns_unscaled(folder: Path) -> Numbers:
    """B13: worse than with the division, by an interval, and yet far from where it started."""
    found = results(folder)
    by_name, row = arms(found), compared(found, "on", "off")
    off = by_name["off"]
    low, high = row["ci95"]
    yield at_most(
        "high", Words("loss, divided less not: upper end", "缩放减不缩放的损失差：区间上端"), high, 0.0, "float32"
    )
    yield shown("low", Words("the same: lower end", "同上：区间下端"), low, "float32")
    yield at_most("p", Words("p, adjusted", "p 值（已校正）"), row["p_adjusted"], 0.05, "float32")
    label = Words("loss, divided by d_k less by √d_k", "损失差，除以 d_k 减除以 √d_k")
    yield from lower_arm("twice", label, found, "twice", "on")
    start = off["observed"]["selection_loss"][0]
    label = Words("loss without the division, over that before training", "不缩放时的损失与训练前之比")
    yield at_most("left", label, mean(off, "report_loss") / start, 0.5, "float32")
    label = Words("mean ‖dL/dq‖ before training, without over with", "训练前 ‖dL/dq‖ 均值之比：不缩放与缩放")
    yield at_least(
        "gradients", label, at_mark(off, "grad_q_mean") / at_mark(by_name["on"], "grad_q_mean"), 1.0, "float32"
    )
    for name, arm in by_name.items():
        text = {"on": Words("divided by √d_k", "除以 √d_k"), "off": Words("as they are", "不缩放")}
        kind = text.get(name, Words("divided by d_k", "除以 d_k"))
        yield shown(f"loss_{name}", Words(f"loss, {kind.en}", f"损失，{kind.zh}"), mean(arm, "report_loss"), "float32")
    marks = off["observed"]["marks"]
    lines = {name: (marks, arm["observed"]["selection_loss"]) for name, arm in by_name.items()}
    caption = Words("Loss over training, each at its own best rate.", "训练过程中的损失，各取自己的最佳学习率。")
    yield Curves(caption, "step", "nats", lines)


def variance_moves(folder: Path) -> Numbers:
    """B17: the variance of the divided scores, before the first step and after the last."""
    on = arms(results(folder))["on"]
    # The inputs are normalised, but not independent: text repeats tokens.
    yield near(
        "first", Words("Var, before training", "训练前的方差"), at_mark(on, "score_variance"), 1.0, 0.15, "float32"
    )
    last = at_mark(on, "score_variance", -1)
    yield at_least("last", Words("Var, after 300 steps", "300 步之后的方差"), last, 4.0, "float32")
    marks, values = on["observed"]["marks"], on["observed"]["score_variance"]
    lines = {f"{i + 1}": (marks, [row[i] for row in values]) for i in range(len(values[0]))}
    caption = Words("Variance of the divided scores over training, by layer.", "训练过程中缩放后得分的方差，按层。")
    yield Curves(caption, "step", "Var", lines, log_y=True)
