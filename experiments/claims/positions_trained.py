"""The trainings of chapter G: order without positions (claim G04), and what sines and cosines teach (claim G16)."""

import math
from pathlib import Path

import numpy as np

from experiments.claims import training
from experiments.claims.paired import lower_arm
from experiments.claims.record import Numbers, Words, at_most, shown
from experiments.grid import Arm
from experiments.sweep import Question
from transformer_jax.config import Config, Hyper
from transformer_jax.data.markov import chain_of, mean_floor, stationary

SEEDS = 6
RATES = (4e-4, 1e-3, 2.5e-3, 6e-3, 1.5e-2)
# A chain of order 2: the next symbol depends on the last two, in their order.
CHAIN = Config(
    task="markov", vocab_size=8, d_model=64, num_heads=4, num_layers=2, seq_len=32, batch_size=16, steps=500,
    scan_unroll=0,
)  # fmt: skip
# What stood at n - 1 - i? Rows of 4 to 8 symbols, read both ways at once.
MIRROR = CHAIN.replace(task="reverse", vocab_size=32, architecture="encoder", seq_len=8, batch_size=64)


def order() -> Question:
    """Order without positions: a causal mask against none."""
    return Question(
        name="order",
        title="Does a model without positions know the order of its tokens?",
        arms=(
            Arm("causal", CHAIN.replace(positions="none"), Hyper()),
            Arm("bidirectional", CHAIN.replace(positions="none", mask="none"), Hyper()),
        ),
        learning_rates=RATES,
        comparisons=(("causal", "bidirectional"),),
    )


def places() -> Question:
    """Relative positions (the chain) and absolute ones (the mirror), by the kind of positions."""
    config = {"chain": CHAIN.replace(steps=300), "mirror": MIRROR.replace(steps=300)}
    names = ("chain sinusoidal", "chain rope", "mirror sinusoidal", "mirror none")
    return Question(
        name="places",
        title="Do sines and cosines teach absolute and relative positions?",
        arms=tuple(
            Arm(name, config[task].replace(positions=kind), Hyper()) for name in names for task, kind in [name.split()]
        ),
        learning_rates=RATES,
        comparisons=(names[:2], names[2:]),
    )


def of_one_symbol(table: np.ndarray) -> float:
    """Nats of the next symbol given the last one alone, in the long run."""
    joint = (stationary(table)[..., None] * table).sum(axis=0)
    return float(-np.sum(joint * np.log(joint / joint.sum(axis=1, keepdims=True))))


def without_positions(folder: Path) -> Numbers:
    """G04: causal below bidirectional, both without positions, though the latter sees the answer among its tokens."""
    names = {"causal": Words("causal", "因果"), "bidirectional": Words("bidirectional", "双向")}
    found, _ = training.trained(order(), SEEDS, folder, names=names)
    label = Words("loss without positions, causal − bidirectional", "不加位置编码的损失，因果 − 双向")
    yield from lower_arm("causal", label, found, "causal", "bidirectional")
    ends = training.arms(found)["causal"]["metrics"]["report_loss"]["ci95"] or (math.nan, math.nan)
    label = Words("causal: upper end of the 95% interval", "因果：95% 置信区间上端")
    # What no model can have that does not know the last symbol but one.
    yield at_most("ordered", label, ends[1], of_one_symbol(chain_of(order().arms[0].config)), "float32")
    arms = training.arms(found)
    for name, words in (
        ("causal", Words("causal, no positions", "因果，不加位置编码")),
        ("bidirectional", Words("bidirectional, no positions", "双向，不加位置编码")),
    ):
        label = Words(f"nats a symbol, {words.en}", f"每个符号的损失（nat），{words.zh}")
        yield shown(f"{name}_nats", label, training.mean(arms[name], "report_loss"), "float32")
    table = chain_of(CHAIN)
    yield shown("one", Words("entropy given one symbol", "已知一个符号时的熵"), of_one_symbol(table))
    yield shown("floor", Words("least possible loss", "可能的最小损失"), mean_floor(table, CHAIN.seq_len))


def sines(folder: Path) -> Numbers:
    """G16: the chain against its floor, the mirror against no positions; RoPE is shown beside."""
    names = {
        "chain sinusoidal": Words("chain, sinusoidal", "链，正余弦"),
        "chain rope": Words("chain, RoPE", "链，RoPE"),
        "mirror sinusoidal": Words("mirror, sinusoidal", "镜像，正余弦"),
        "mirror none": Words("mirror, no positions", "镜像，不加位置编码"),
    }
    found, _ = training.trained(places(), SEEDS, folder, names=names)
    arms, table = training.arms(found), chain_of(CHAIN)
    one, floor = of_one_symbol(table), mean_floor(table, CHAIN.seq_len)
    high = (arms["chain sinusoidal"]["metrics"]["report_loss"]["ci95"] or [math.nan] * 2)[1]
    label = Words(
        "chain: part of what the last symbol but one tells that is missed, upper end",
        "链：倒数第二个符号所含信息中未学到的比例，95% 区间上端",
    )
    yield at_most("missed", label, (high - floor) / (one - floor), 0.5, "float32")
    label = Words("mirror: loss, sinusoidal − no positions", "镜像：损失，正余弦 − 不加位置编码")
    yield from lower_arm("mirror", label, found, "mirror sinusoidal", "mirror none")
    kinds = {"sinusoidal": "正余弦", "rope": "RoPE", "none": "不加位置编码"}
    for name, arm in arms.items():
        task, kind = name.split()
        metric = "report_loss" if task == "chain" else "report_accuracy"
        label = {
            "chain": Words(f"chain, nats: {kind}", f"链，nat：{kinds[kind]}"),
            "mirror": Words(f"mirror, accuracy: {kind}", f"镜像，正确率：{kinds[kind]}"),
        }[task]
        yield shown(f"{task}_{kind}", label, training.mean(arm, metric), "float32")
    row = training.compared(found, "chain sinusoidal", "chain rope")
    p = math.nan if row["p_adjusted"] is None else row["p_adjusted"]
    yield shown("p_rope", Words("chain: p of sinusoidal − RoPE", "链：正余弦 − RoPE 的 p"), p, "float32")
    yield shown("floor", Words("chain, least possible loss", "链，可能的最小损失"), floor)
