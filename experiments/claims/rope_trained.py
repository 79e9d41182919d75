"""The training of chapter A: does what is trained on rows of T read rows of 2T and 4T? (claim A11)"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from experiments import stats
from experiments.claims import training
from experiments.claims.paired import LOWER, UPPER, apart
from experiments.claims.record import Curves, Numbers, Words, at_least, at_most, near, shown
from experiments.grid import Arm, Run
from experiments.loop import device_hyper
from experiments.sweep import Question
from experiments.trained import Model, models
from transformer_jax.config import Config, Hyper
from transformer_jax.data import make_task
from transformer_jax.errors import ConfigError
from transformer_jax.train import evaluate

T, FACTORS, SEEDS = 32, (1, 2, 4), 6
KINDS = ("rope", "none", "alibi", "sinusoidal")
SCALINGS = ("linear", "ntk", "yarn")  # of the trained RoPE models, without further training
RATES = (7e-4, 2e-3, 6e-3, 1.8e-2)
TABLE = "learned"  # a table of as many rows as the longest row has: those past T are never trained
BASE = Config(d_model=64, num_heads=4, num_layers=2, seq_len=T, batch_size=8, steps=300, scan_unroll=0)
# Tokens of an evaluation batch, whatever its rows' length, and such batches of the report split (about half of it).
TOKENS, HELD_OUT = 4096, 4
# Of NLL(4T) / NLL(T), named before the run.
PAIRS = (("alibi", "rope"), ("none", "rope"), ("sinusoidal", "rope"), *((kind, "rope") for kind in SCALINGS))
NAMES = {
    "rope": Words("RoPE", "RoPE"),
    "none": Words("no positions", "不加位置编码"),
    TABLE: Words("learned table", "可学习的位置表"),
    "alibi": Words("ALiBi", "ALiBi"),
    "sinusoidal": Words("sinusoidal", "正余弦编码"),
    "linear": Words("RoPE scaled linearly", "RoPE 线性缩放"),
    "ntk": Words("RoPE scaled by NTK", "RoPE NTK 缩放"),
    "yarn": Words("RoPE scaled by YaRN", "RoPE YaRN 缩放"),
}


def question() -> Question:
    """Language models on real text that differ in their positions."""
    return Question(
        name="extrapolation",
        title="Who reads rows that are longer than those of training?",
        arms=tuple(Arm(kind, BASE.replace(positions=kind), Hyper()) for kind in KINDS),
        learning_rates=RATES,
        comparisons=(("rope", "none"), ("rope", "alibi"), ("rope", "sinusoidal")),
    )


def untrained_rows() -> Question:
    """The same with a learned table whose last rows training never meets."""
    config = BASE.replace(positions=TABLE, max_positions=FACTORS[-1] * T)
    return Question(
        name="untrained_rows",
        title="Does a learned table read past the rows that were trained?",
        arms=(Arm(TABLE, config, Hyper()),),
        learning_rates=RATES,
        comparisons=(),
    )


def losses(found: Sequence[Model], factor: int, scaling: str = "none") -> list[float]:
    """Nats per token of each model on the same tokens of the report split, in rows of factor · T."""
    length = factor * T
    config = found[0].config.replace(
        seq_len=length, batch_size=TOKENS // length, rope_scaling=scaling, rope_original_positions=T
    )
    hyper = device_hyper(dataclasses.replace(found[0].hyper, rope_factor=float(factor)))
    task = make_task(config)
    params = jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(leaf) for leaf in leaves]), *[m.params for m in found])

    @jax.jit
    def run(params, data):
        def of(one):
            return evaluate(config, one, hyper, lambda i: task.eval_batch(data, "report", i), HELD_OUT).loss

        return jax.lax.map(of, params)

    return np.asarray(run(params, task.data), np.float64).tolist()


def extrapolation(folder: Path) -> Numbers:
    """Train at T, measure at T, 2T and 4T; ratios by seed, with their intervals."""
    found, _ = training.trained(question(), SEEDS, folder, names=NAMES)
    trained, arms = models(folder), training.arms(found)
    nats: dict[str, dict[int, list[float]]] = {}
    for i, kind in enumerate(KINDS):
        mine = [trained[Run(i, arms[kind]["best_learning_rate"], seed)] for seed in range(SEEDS)]
        nats[kind] = {factor: losses(mine, factor) for factor in FACTORS}
        if kind == "rope":
            at_T = {1: nats[kind][1]}  # where nothing is stretched
            nats |= {s: at_T | {f: losses(mine, f, s) for f in FACTORS[1:]} for s in SCALINGS}
    arm = training.trained(untrained_rows(), SEEDS, folder / TABLE)[0]["arms"][0]
    trained = models(folder / TABLE)
    mine = [trained[Run(0, arm["best_learning_rate"], seed)] for seed in range(SEEDS)]
    nats[TABLE] = {factor: losses(mine, factor) for factor in FACTORS}
    yield from judged(nats)
    table = BASE.replace(positions="learned", max_positions=T)
    try:
        table.replace(seq_len=2 * T)
        refused = 0
    except ConfigError:
        refused = 1
    label = Words("a learned table of T rows refuses 2T", "T 行的可学习位置表拒绝 2T")
    yield near("refused", label, refused, 1, dtype="int64")


def number(value: float | None) -> float:
    """NaN, which holds nothing, where the statistics have no value."""
    return float("nan") if value is None else value


def judged(nats: dict[str, dict[int, list[float]]]) -> Numbers:
    """The numbers of A11 from each kind's losses by factor and seed."""
    ratios = {kind: {f: (np.array(by[f]) / np.array(by[1])).tolist() for f in FACTORS} for kind, by in nats.items()}
    last = FACTORS[-1]
    for kind, by in ratios.items():
        _, low, high = stats.mean_interval(by[last])
        label = Words(
            f"{NAMES[kind].en}, NLL(4T) / NLL(T), {LOWER.en}", f"{NAMES[kind].zh}，NLL(4T) / NLL(T)，{LOWER.zh}"
        )
        if kind in ("rope", TABLE):
            yield at_least(f"{kind}_low", label, number(low), 1.0, "float32")
        else:
            yield shown(f"{kind}_low", label, number(low), "float32")
        label = Words(
            f"{NAMES[kind].en}, NLL(4T) / NLL(T), {UPPER.en}", f"{NAMES[kind].zh}，NLL(4T) / NLL(T)，{UPPER.zh}"
        )
        yield shown(f"{kind}_high", label, number(high), "float32")
    rows = stats.compare({kind: by[last] for kind, by in ratios.items()}, PAIRS, "NLL(4T)/NLL(T)")
    alibi = rows[0]
    label = Words(f"ALiBi less RoPE, of that ratio, {UPPER.en}", f"同一比值，ALiBi 减 RoPE，{UPPER.zh}")
    yield at_most("alibi_less", label, alibi.ci95[1] if alibi.ci95 else number(None), 0.0, "float32")
    yield at_most("alibi_p", Words("its p, adjusted", "其校正后的 p"), number(alibi.p_adjusted), 0.05, "float32")
    for row in rows:
        label = Words(f"{NAMES[row.a].en} less RoPE, of that ratio", f"同一比值，{NAMES[row.a].zh}减 RoPE")
        yield from apart(f"{row.a}_less", label, row.to_dict())
    for kind, by in ratios.items():
        name = NAMES[kind]
        for factor in FACTORS[1:]:
            label = Words(f"{name.en}, NLL({factor}T) / NLL(T)", f"{name.zh}，NLL({factor}T) / NLL(T)")
            yield shown(f"{kind}{factor}", label, np.mean(by[factor]), "float32")
    for kind in (*KINDS, TABLE):
        label = Words(f"{NAMES[kind].en}, NLL(T)", f"{NAMES[kind].zh}，NLL(T)")
        yield shown(f"{kind}_loss", label, np.mean(nats[kind][1]), "float32")
    lines = {kind: ([T * f for f in FACTORS], [float(np.mean(by[f])) for f in FACTORS]) for kind, by in ratios.items()}
    caption = Words(f"NLL over that at T = {T}.", f"各长度的 NLL 与 T = {T} 时之比。")
    yield Curves(caption, "n", "NLL(n) / NLL(T)", lines, log_x=True)
