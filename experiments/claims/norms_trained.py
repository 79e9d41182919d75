"""What training says of chapter C: small language models on text, with other norms, placements and activations."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments import stats
from experiments.claims.paired import apart, lower, lower_arm, per_seed
from experiments.claims.record import Curves, Number, Numbers, Words, at_least, at_most, shown
from experiments.claims.training import arms, compared, mean, trained
from experiments.grid import Arm, Run
from experiments.loop import device_hyper
from experiments.program import run_key
from experiments.results import number
from experiments.sweep import Outcome, Question
from experiments.trained import models
from transformer_jax.config import Config, Hyper
from transformer_jax.data import make_task, resolve
from transformer_jax.encoder_decoder import Transformer
from transformer_jax.train import gradients, init_state

SEEDS = 6
RATES = (1.5e-3, 4.5e-3, 1.35e-2)
BASE = Config(d_model=64, num_heads=2, num_layers=2, d_ff=256, seq_len=64, batch_size=8, steps=300, scan_unroll=0)
# Deep models: narrower, on shorter rows, at rates that suit them, and compiled as a loop over layers.
DEEP_SEEDS = 6
DEEP_RATES = (1.7e-4, 5e-4, 1.5e-3, 4.5e-3, 1.35e-2)
DEEP = Config(d_model=64, num_heads=2, num_layers=12, d_ff=128, seq_len=32, batch_size=8, steps=200)
# Without norms the stream's variance grows 3^12-fold, and with it the logits: rates by decades, and lower ones.
BARE_RATES = (1.7e-6, 1.7e-5, 1.7e-4, 1.7e-3)
# Norms after the sums learn text in 400 steps at 6 layers (at 12 they do not, whatever the warm-up).
HALF = DEEP.replace(num_layers=6, steps=400)
HALF_RATES = (5e-4, 1.5e-3, 4.5e-3, 1.35e-2)
WARM = 100  # steps of warm-up
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


def question(
    name: str,
    title: str,
    configs: dict[str, Config],
    pairs: Sequence[tuple[str, str]],
    rates: tuple[float, ...] = RATES,
) -> Question:
    """An arm for each config."""
    made = tuple(Arm(arm, config, Hyper()) for arm, config in configs.items())
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
    {kind: DEEP.replace(norm="rmsnorm", norm_placement=kind) for kind in ("pre", "post")},
    [("pre", "post")],
    DEEP_RATES,
)
BARE = question(
    "bare",
    "Do 12 layers learn without norms?",
    {"none": DEEP.replace(norm="rmsnorm", norm_placement="none")},
    [],
    BARE_RATES,
)
WARMUP = question(
    "warmup",
    "Is a model with norms after the sums stable, with and without warm-up?",
    {
        f"{kind}, warm-up {steps}": HALF.replace(norm_placement=kind, warmup_steps=steps)
        for kind, steps in (("post", 0), ("post", WARM), ("pre", 0))
    },
    [("pre, warm-up 0", "post, warm-up 0"), (f"post, warm-up {WARM}", "post, warm-up 0")],
    HALF_RATES,
)
ACTIVATIONS = question(
    "activations",
    "Does the activation matter?",
    {kind: BASE.replace(ffn=kind, match_ffn_parameters=True) for kind in ("relu", "gelu", "silu", "swiglu")},
    [(kind, "relu") for kind in ("gelu", "silu", "swiglu")],
)


def learning(found: dict[str, Any]) -> Curves:
    """The loss of each arm over training."""
    lines = {name: (arm["observed"]["marks"], arm["observed"]["selection_loss"]) for name, arm in arms(found).items()}
    caption = Words("Loss over training, each at its own best rate.", "训练过程中的损失，各取自己的最佳学习率。")
    return Curves(caption, "step", "nats", lines)


def alike(name: str, pair: Words, row: Mapping[str, Any]) -> Numbers:
    """Both ends of a comparison's interval are within SAME of 0."""
    label = Words(f"{pair.en}: larger end of |interval|", f"{pair.zh}：区间端点绝对值的较大者")
    yield at_most(name, label, np.max(np.abs(row["ci95"] or np.nan)), SAME, "float32")
    yield from apart(name, pair, row)


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
    yield from alike("gap", pair, compared(found, "rmsnorm", "layernorm"))
    yield from [*losses(found), learning(found)]


def first_over_last(config: Config, params: Transformer, hyper: Hyper) -> float:
    """‖g‖ of the first layer's parameters over the last layer's, on a batch of the report split."""
    task = make_task(config)
    grads, _ = jax.jit(gradients, static_argnums=1)(params, config, hyper, task.eval_batch(task.data, "report", 0))
    squares = [np.square(leaf).reshape(config.L, -1).sum(axis=1) for leaf in jax.tree.leaves(grads.decoder.layers)]
    sizes = np.sqrt(np.sum(squares, axis=0, dtype=np.float64))
    return float(sizes[0] / sizes[-1])


def before_or_after(
    folder: Path, asked: Question = PLACEMENTS, bare: Question = BARE, seeds: int = DEEP_SEEDS
) -> Numbers:
    """C05: RMSNorm before the sub-layers of 12 layers, after them, and none."""
    found, _ = trained(asked, seeds, folder, names=NAMES)
    without = trained(bare, seeds, folder / "bare", names=NAMES)[0]
    by_name = arms(found) | arms(without)
    yield from lower_arm(
        "post", Words("loss, norms before less after", "损失差，归一化在前减在后"), found, "pre", "post"
    )
    ends = [per_seed(by_name[name], "report_loss") for name in ("pre", "none")]
    yield from lower("none", Words("loss, norms before less none", "损失差，归一化在前减无"), *ends)
    bar = unigram_entropy(DEEP)
    yield shown("bar", Words("entropy of byte frequencies", "字节频率的熵"), bar)
    ends = by_name["none"]["metrics"]["report_loss"]["ci95"] or (np.inf, np.inf)  # no two seeds left: it trains nowhere
    label = Words("loss without norms, lower end of the 95% interval", "无归一化时的损失，95% 置信区间下端")
    yield at_least("bare_low", label, ends[0], bar, "float32")
    made, logs = models(folder), {}
    for i, (kind, zh) in enumerate({"pre": "归一化在前", "post": "归一化在后"}.items()):
        best = [made[Run(i, by_name[kind]["best_learning_rate"], seed)] for seed in range(seeds)]
        starts = [init_state(one.config, Hyper(), run_key(seed)).weights for seed, one in enumerate(best)]
        weights = {"first": starts, "last": [one.params for one in best]}
        for name, step in (("first", Words("at the start", "训练前")), ("last", Words("at the end", "训练后"))):
            ratios = [
                first_over_last(one.config, params, device_hyper(one.hyper))
                for one, params in zip(best, weights[name], strict=True)
            ]
            logs[kind, name] = np.log(ratios).tolist()
            label = Words(
                f"‖g‖ of the first layer over the last, {kind}, {step.en}", f"首层与末层 ‖g‖ 之比，{zh}，{step.zh}"
            )
            yield shown(f"ratio_{kind}_{name}", label, np.exp(np.mean(logs[kind, name])), "float32")
    label = Words("ln of that ratio at the end, norms after less before", "训练后该比值的对数，归一化在后减在前")
    ends = {kind: logs[kind, "last"] for kind in ("post", "pre")}
    yield from apart("faded", label, stats.compare(ends, [("post", "pre")], "ln ratio")[0].to_dict())
    yield from [*losses(found), *losses(without), learning(found)]


def unigram_entropy(config: Config) -> float:
    """Of the tokens to be predicted in 16 evaluation batches: what a model is worth that has learned frequencies."""
    config = resolve(config)
    task = make_task(config)
    ids = np.concatenate([np.ravel(task.eval_batch(task.data, "report", i).targets_BT) for i in range(16)])
    p = np.bincount(ids) / len(ids)
    return float(-np.sum(p[p > 0] * np.log(p[p > 0])))


def ends_of(outcome: Outcome, arm: int) -> np.ndarray:
    """An arm's losses at the end, [seeds, rates]; infinite where a run diverged."""
    runs = [outcome.of(arm, rate) for rate in outcome.question.learning_rates]
    ends = [[run.final("report_loss") for run in of] for of in runs]
    return np.array([[np.inf if end is None else end for end in row] for row in ends]).T


def stable_in_depth(folder: Path, asked: Question = WARMUP, seeds: int = DEEP_SEEDS) -> Numbers:
    """C09: norms after the sums against before them, and with a warm-up.

    Judged is the loss averaged over all rates, by seed: stable is what does not hang on the rate. Runs that learn no
    more than byte frequencies are counted, and those that diverge.
    """
    found, outcome = trained(asked, seeds, folder, names=NAMES)
    bar = unigram_entropy(asked.arms[0].config)
    names = [arm.name for arm in asked.arms]
    ends = {name: ends_of(outcome, i) for i, name in enumerate(names)}
    over_rates = {name: [number(x) for x in values.mean(axis=1)] for name, values in ends.items()}
    cold, warm, before = names
    label = Words("loss, mean of all rates, norms after: warm-up less none",
                  "各学习率平均损失，归一化在后：有预热减无预热")  # fmt: skip
    yield from lower("warmed", label, over_rates[warm], over_rates[cold])
    label = Words("loss, mean of all rates, no warm-up: norms before less after",
                  "各学习率平均损失，无预热：归一化在前减在后")  # fmt: skip
    yield from lower("before", label, over_rates[before], over_rates[cold])
    pair = Words("loss without warm-up, each at its best rate, norms before less after",
                 "无预热、各取最佳学习率的损失差，归一化在前减在后")  # fmt: skip
    yield from apart("cold", pair, compared(found, before, cold))
    pair = Words("loss, norms after, each at its best rate: warm-up less none",
                 "归一化在后、各取最佳学习率的损失差：有预热减无预热")  # fmt: skip
    yield from apart("best", pair, compared(found, warm, cold))
    for name in names:
        kind, steps = name.split(", warm-up ")
        label = Words(
            f"runs that learn no more than frequencies, {NAMES[name].en}",
            f"所学不超过字节频率的训练次数，{NAMES[name].zh}",
        )
        yield shown(f"stuck_{kind}{steps}", label, (ends[name] >= bar).sum())
        label = Words(f"runs that diverged, {NAMES[name].en}", f"发散的训练次数，{NAMES[name].zh}")
        yield shown(f"diverged_{kind}{steps}", label, np.isinf(ends[name]).sum())
        for rate, values in zip(asked.learning_rates, ends[name].T, strict=True):
            label = Words(f"loss at {rate:g}, {NAMES[name].en}", f"学习率 {rate:g} 时的损失，{NAMES[name].zh}")
            yield shown(f"at{rate:g}_{kind}{steps}".replace(".", ""), label, np.mean(values), "float32")
    yield shown("runs", Words("runs of each", "每种的训练次数"), seeds * len(asked.learning_rates))
    yield shown("bar", Words("entropy of byte frequencies", "字节频率的熵"), bar, "float64")
    yield from losses(found)
    lines = {name: (asked.learning_rates, values.mean(axis=0).tolist()) for name, values in ends.items()}
    yield Curves(Words("Loss at the end by learning rate.", "各学习率下的最终损失。"), "η", "nats", lines, log_x=True)


def activations(folder: Path, asked: Question = ACTIVATIONS, seeds: int = SEEDS) -> Numbers:
    """C13: ReLU against other activations, with the same number of parameters."""
    found, _ = trained(asked, seeds, folder)
    for kind in ("gelu", "silu", "swiglu"):
        pair = Words(f"loss, {kind} less relu", f"损失差，{kind} 减 relu")
        yield from alike(kind, pair, compared(found, kind, "relu"))
    yield from [*losses(found), learning(found)]
