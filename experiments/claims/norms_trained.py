"""What training says of chapter C: small language models on text, with other norms, placements and activations."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.claims.paired import lower_arm
from experiments.claims.record import Curves, Number, Numbers, Words, at_least, at_most, shown
from experiments.claims.training import arms, compared, mean, trained
from experiments.grid import Arm
from experiments.sweep import Outcome, Question
from transformer_jax.config import Config, Hyper
from transformer_jax.data import make_task, resolve

SEEDS = 6
RATES = (1.5e-3, 4.5e-3, 1.35e-2)
BASE = Config(d_model=64, num_heads=2, num_layers=2, d_ff=256, seq_len=64, batch_size=8, steps=300, scan_unroll=0)
# Deep models: narrower, on shorter rows, at rates that suit them, and compiled as a loop over layers.
DEEP_SEEDS = 6
DEEP_RATES = (1.7e-4, 5e-4, 1.5e-3, 4.5e-3, 1.35e-2)
DEEP = Config(d_model=64, num_heads=2, num_layers=12, d_ff=128, seq_len=32, batch_size=8, steps=200)
WARM = 50  # steps of warm-up
ARMS = {
    "pre": Words("norms before", "归一化在前"),
    "post": Words("norms after", "归一化在后"),
    "none": Words("no norms", "无归一化"),
}
NAMES = ARMS | {
    f"{kind}, warm-up {steps}": Words(
        f"{ARMS[kind].en}, warm-up {steps}", f"{ARMS[kind].zh}，{f'预热 {steps} 步' if steps else '无预热'}"
    )
    for kind in ("post", "pre")
    for steps in (0, WARM)
}
SAME = 0.1  # nats: a third of what the division by √d_k buys


def question(name: str, title: str, configs: dict[str, Config], pairs: Sequence[tuple[str, str]]) -> Question:
    """An arm for each config, at the rates of its depth."""
    made = tuple(Arm(arm, config, Hyper()) for arm, config in configs.items())
    rates = DEEP_RATES if made[0].config.L == DEEP.L else RATES
    return Question(f"claims_{name}", title, made, rates, tuple(pairs))


NORMS = question(
    "norms",
    "Is the mean in LayerNorm redundant?",
    {kind: BASE.replace(norm=kind) for kind in ("layernorm", "rmsnorm")},
    [("rmsnorm", "layernorm")],
)
PLACEMENTS = question(
    "placements",
    "Does RMSNorm before the sub-layers help 12 layers?",
    {kind: DEEP.replace(norm="rmsnorm", norm_placement=kind) for kind in ("pre", "post", "none")},
    [("pre", "post"), ("pre", "none")],
)
WARMUP = question(
    "warmup",
    "Is a deep model with norms after the sums stable, with and without warm-up?",
    {
        f"{kind}, warm-up {steps}": DEEP.replace(norm_placement=kind, warmup_steps=steps)
        for kind in ("post", "pre")
        for steps in (0, WARM)
    },
    [
        ("pre, warm-up 0", "post, warm-up 0"),
        (f"post, warm-up {WARM}", "post, warm-up 0"),
        (f"pre, warm-up {WARM}", f"post, warm-up {WARM}"),
    ],
)
ACTIVATIONS = question(
    "activations",
    "Does the activation matter?",
    {kind: BASE.replace(ffn=kind, match_ffn_parameters=True) for kind in ("relu", "gelu", "silu", "swiglu")},
    [(kind, "relu") for kind in ("gelu", "silu", "swiglu")],
)


def bounds(name: str, pair: Words, row: dict[str, Any]) -> tuple[float, float, list[Number]]:
    """The interval of a comparison (NaN where there is none), and its ends as numbers `name`_low and _high."""
    low, high = row["ci95"] or (np.nan, np.nan)
    ends = [("low", low, Words("lower end", "区间下端")), ("high", high, Words("upper end", "区间上端"))]
    numbers = [
        shown(f"{name}_{end}", Words(f"{pair.en}: {text.en}", f"{pair.zh}：{text.zh}"), value, "float32")
        for end, value, text in ends
    ]
    return low, high, numbers


def learning(found: dict[str, Any]) -> Curves:
    """The loss of each arm over training."""
    lines = {name: (arm["observed"]["marks"], arm["observed"]["selection_loss"]) for name, arm in arms(found).items()}
    caption = Words("Loss over training, each at its own best rate.", "训练过程中的损失，各取自己的最佳学习率。")
    return Curves(caption, "step", "nats", lines)


def losses(found: dict[str, Any]) -> list[Number]:
    """The loss of each arm at its best rate: loss_post0 and so on."""
    return [
        shown(
            f"loss_{name.replace(', warm-up ', '')}",
            Words(f"loss, {text.en}", f"损失，{text.zh}"),
            mean(arm, "report_loss"),
            "float32",
        )
        for name, arm in arms(found).items()
        for text in [NAMES.get(name, Words(name, name))]
    ]


def means_kept(folder: Path, asked: Question = NORMS, seeds: int = SEEDS) -> Numbers:
    """C04: RMSNorm against LayerNorm."""
    found, _ = trained(asked, seeds, folder)
    pair = Words("loss, RMSNorm less LayerNorm", "损失差，RMSNorm 减 LayerNorm")
    low, high, ends = bounds("gap", pair, compared(found, "rmsnorm", "layernorm"))
    label = Words(f"{pair.en}: larger end of |interval|", f"{pair.zh}：区间端点绝对值的较大者")
    yield at_most("gap", label, np.max(np.abs([low, high])), SAME, "float32")
    yield from [*ends, *losses(found), learning(found)]


def before_or_after(folder: Path, asked: Question = PLACEMENTS, seeds: int = DEEP_SEEDS) -> Numbers:
    """C05: RMSNorm before the sub-layers of 12 layers, after them, and none."""
    found, _ = trained(asked, seeds, folder, names=NAMES)
    for other, text in (("post", Words("after", "在后")), ("none", Words("none", "无"))):
        pair = Words(f"loss, norms before less {text.en}", f"损失差，归一化在前减{text.zh}")
        row = compared(found, "pre", other)
        if row["ci95"] is None:  # the other diverged in all seeds but one at most
            yield at_least(f"lost_{other}", pair, row["diverged_b"], seeds - 1, "float32")
            continue
        yield from lower_arm(other, pair, found, "pre", other)
        yield from bounds(other, pair, row)[2]
    yield from [*losses(found), learning(found)]


def unigram_entropy(config: Config) -> float:
    """Of the tokens to be predicted in 16 evaluation batches: what a model is worth that has learned frequencies."""
    config = resolve(config)
    task = make_task(config)
    ids = np.concatenate([np.ravel(task.eval_batch(task.data, "report", i).targets_BT) for i in range(16)])
    p = np.bincount(ids) / len(ids)
    return float(-np.sum(p[p > 0] * np.log(p[p > 0])))


def failed(outcome: Outcome, arm: int, bar: float) -> np.ndarray:
    """Share of an arm's seeds, at each rate, that end at or above `bar`, or not at a finite loss."""
    ends = [[run.final("report_loss") for run in outcome.of(arm, rate)] for rate in outcome.question.learning_rates]
    return np.array([np.mean([end is None or end >= bar for end in row]) for row in ends])


def stable_in_depth(folder: Path, asked: Question = WARMUP, seeds: int = DEEP_SEEDS) -> Numbers:
    """C09: norms after the sums against before them, with and without warm-up."""
    found, outcome = trained(asked, seeds, folder, names=NAMES)
    bar = unigram_entropy(asked.arms[0].config)
    shares = [failed(outcome, i, bar) for i in range(len(asked.arms))]
    pair = Words("loss without warm-up, norms before less after", "无预热时的损失差，归一化在前减在后")
    yield from lower_arm("cold", pair, found, "pre, warm-up 0", "post, warm-up 0")
    yield from bounds("cold", pair, compared(found, "pre, warm-up 0", "post, warm-up 0"))[2]
    label = Words("failed runs without warm-up, norms after less before", "无预热时失败比例之差，归一化在后减在前")
    names = [arm.name for arm in asked.arms]
    cold = {kind: shares[names.index(f"{kind}, warm-up 0")] for kind in ("post", "pre")}
    yield shown("failing", label, np.mean(cold["post"]) - np.mean(cold["pre"]), "float32")
    pair = Words("loss, norms after: warm-up less none", "归一化在后的损失差：有预热减无预热")
    yield from bounds("warmed", pair, compared(found, f"post, warm-up {WARM}", "post, warm-up 0"))[2]
    for name, share in zip(names, shares, strict=True):
        kind, steps = name.split(", warm-up ")
        label = Words(f"failed runs, {NAMES[name].en}", f"失败的比例，{NAMES[name].zh}")
        yield shown(f"failed_{kind}{steps}", label, np.mean(share), "float32")
    yield shown("bar", Words("entropy of byte frequencies", "字节频率的熵"), bar, "float64")
    yield from losses(found)
    lines = {name: (asked.learning_rates, list(share)) for name, share in zip(names, shares, strict=True)}
    caption = Words("Runs that learn no more than byte frequencies.", "所学不超过字节频率的训练所占比例。")
    yield Curves(caption, "η", "share", lines, log_x=True)


def activations(folder: Path, asked: Question = ACTIVATIONS, seeds: int = SEEDS) -> Numbers:
    """C13: ReLU against other activations, with the same number of parameters."""
    found, _ = trained(asked, seeds, folder)
    for kind in ("gelu", "silu", "swiglu"):
        pair = Words(f"loss, {kind} less relu", f"损失差，{kind} 减 relu")
        low, high, ends = bounds(kind, pair, compared(found, kind, "relu"))
        label = Words(f"{pair.en}: larger end of |interval|", f"{pair.zh}：区间端点绝对值的较大者")
        yield at_most(kind, label, np.max(np.abs([low, high])), SAME, "float32")
        yield from ends
    yield from [*losses(found), learning(found)]
