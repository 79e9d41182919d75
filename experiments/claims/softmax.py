"""Chapter F: softmax, temperature and decoding (S1 §3.1 and §3.3, S2 §4.4)."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import decoding, tempering
from experiments.claims import softmax_trained
from experiments.claims.record import Chapter, Curves, Numbers, Verdict, Words, at_least, at_most, near, shown
from transformer_jax.beam import beam_search
from transformer_jax.config import Config, Hyper
from transformer_jax.data.markov import entropy_rate, stationary, transition_table
from transformer_jax.encoder_decoder import init_transformer
from transformer_jax.exact import Outcomes, distribution, outcomes
from transformer_jax.losses import entropy
from transformer_jax.samplers import Sampler, adjusted, draw
from transformer_jax.scores import entmax15, masked_relu, masked_sigmoid, masked_softmax

chapter = Chapter("F", Words("Softmax, temperature and decoding", "Softmax、温度与解码"))

EPSILON = float(np.finfo(np.float32).eps)
ROUNDING = 16 * EPSILON


def softmax64(z: np.ndarray) -> np.ndarray:
    """Over the last axis, in float64."""
    powers = np.exp(z - z.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def weights(z: Any, dtype: str = "float32") -> np.ndarray:
    """The library's softmax of rows of scores [..., n] in a type, as float64."""
    scores = np.asarray(z, np.float32).astype(jnp.dtype(dtype))
    return np.asarray(jax.jit(lambda z: masked_softmax(z, None))(scores), np.float64)


def tempered(logits: np.ndarray, temperatures: np.ndarray) -> np.ndarray:
    """What the library draws from at each temperature: logits [V] -> p, float32 [R, V]."""
    R = len(temperatures)

    @jax.jit
    def run(logits: jax.Array, temperatures: jax.Array) -> jax.Array:
        rows = jnp.broadcast_to(logits, (R, len(logits)))
        return jax.nn.softmax(adjusted(rows, Sampler(temperature=temperatures).of_rows(R), jnp.zeros(rows.shape, bool)))

    return np.asarray(run(np.asarray(logits, np.float32), np.asarray(temperatures, np.float32)))


f01 = chapter.claim(
    "F01",
    "S0 §3.2, S1 §3.1, S2 §4.4",
    Verdict.TRUE,
    Words(
        "Softmax turns each row of scores into weights between 0 and 1 that sum to 1.",
        "softmax 把每一行得分变成介于 0 和 1 之间、总和为 1 的权重。",
    ),
    formula=r"\text{softmax}(z)_i = \frac{e^{z_i}}{\sum_j e^{z_j}}",
    uses=(masked_softmax,),
)


@f01.quick
def rows_sum_to_one() -> Numbers:
    z = np.random.default_rng(0).normal(size=(50, 64)).astype(np.float32)
    w = weights(z)
    yield at_most(
        "sum", Words("max |Σ − 1|, float32", "max |Σ − 1|（float32）"), np.abs(w.sum(axis=1) - 1).max(), 1e-6, "float32"
    )
    yield at_least("least", Words("least weight", "最小的权重"), w.min(), 1e-9, "float32")
    yield at_most("largest", Words("largest weight", "最大的权重"), w.max(), 1 - 1e-3, "float32")
    label = Words("max |Δweight| to the formula in float64", "与 float64 公式的 max |Δ权重|")
    yield at_most("formula", label, np.abs(w - softmax64(z.astype(np.float64))).max(), ROUNDING, "float32")
    # Each weight and the sum that it is divided by are rounded to 2⁻⁹ of themselves.
    off = np.abs(weights(z, "bfloat16").sum(axis=1) - 1).max()
    yield at_most("half", Words("max |Σ − 1|, bfloat16", "max |Σ − 1|（bfloat16）"), off, 2.0**-8, "bfloat16")


f02 = chapter.claim(
    "F02",
    "S1 §3.1",
    Verdict.TRUE,
    Words(
        "The exponential makes any real score positive, and one of 3 about 2.72 times as heavy as one of 2.",
        "指数把任何实数变为正数；得分 3 的权重约为得分 2 的 2.72 倍。",
    ),
    formula=r"e^3 / e^2 = e \approx 2.718",
    uses=(masked_softmax,),
)


@f02.quick
def exponential_ratio() -> Numbers:
    two, *_, three = weights([2.0, -1.0, 3.0])
    yield near(
        "ratio",
        Words("weight of 3 over weight of 2", "得分 3 与 2 的权重之比"),
        three / two,
        math.e,
        8 * EPSILON,
        "float32",
    )
    grid = np.linspace(-40, 40, 81)
    yield near(
        "positive",
        Words("weights ≤ 0, scores of ±40", "得分 ±40 之间 ≤ 0 的权重数"),
        (weights(grid) <= 0).sum(),
        0,
        dtype="float32",
    )
    apart = weights(grid)
    label = Words("max |ratio of neighbours 1 apart − e|", "max |相差 1 的相邻权重之比 − e|")
    # A score of 40 and its neighbour's exponent are each rounded.
    yield at_most("steps", label, np.abs(apart[1:] / apart[:-1] - math.e).max(), 16 * EPSILON, "float32")


f03 = chapter.claim(
    "F03",
    "S1 §3.1",
    Verdict.EMPIRICAL,
    Words(
        "Plain linear normalisation would also work, but tells small differences apart much less well.",
        "直接线性归一化也不是不行，但对细微差异的区分能力会弱很多。",
    ),
    formula=r"z_i / \sum_j z_j",
    finding=Words(
        "Scores of 3 and 2 weigh {linear:.2f} to 1 when divided by their sum, {softmax:.2f} to 1 by softmax; those of "
        "13 and 12 {linear_far:.2f} and {softmax_far:.2f}. With negative scores linear has no answer: 2 and −1 weigh 2 "
        "and −1, and 1 and −1 divide by 0. Kept to positive scores, a row of negatives weighs {none:.0f} in all.",
        "得分 3 与 2 除以总和，权重之比为 {linear:.2f}，softmax 为 {softmax:.2f}；"
        "得分 13 与 12 则为 {linear_far:.2f} 与 {softmax_far:.2f}。有负分时线性归一化无解："
        "2 与 −1 的权重为 2 与 −1，1 与 −1 则要除以 0；若只保留正分，全负的一行权重总和为 {none:.0f}。",
    ),
    learned=Words(
        "Trained to recall what followed a symbol, each at its best rate: {softmax:.2f} nats with softmax, {relu:.2f} "
        "with positive scores divided by their sum (p of the difference {relu_p:.2g}), {sigmoid:.2f} with sigmoids, "
        "{entmax15:.2f} with 1.5-entmax.",
        "训练模型回忆某符号之后出现过什么，各取最佳学习率：softmax {softmax:.2f} nat，"
        "正分除以总和 {relu:.2f}（差异的 p 值 {relu_p:.2g}），sigmoid {sigmoid:.2f}，1.5-entmax {entmax15:.2f}。",
    ),
    uses=(masked_softmax, masked_relu, masked_sigmoid, entmax15),
)


@f03.quick
def normalisers() -> Numbers:
    z = np.array([[2, 3], [12, 13], [-2, -1]], np.float32)

    @jax.jit
    def every(z: jax.Array) -> list[jax.Array]:
        return [masked_relu(z, None), masked_softmax(z, None), masked_sigmoid(z, None), entmax15(z)]

    relu, soft, sigmoid, entmax = (np.asarray(w, np.float64) for w in every(z))
    for name, en, zh, w, want in (
        ("linear", "3 against 2, linear", "线性：3 比 2", relu[0], 3 / 2),
        ("linear_far", "13 against 12, linear", "线性：13 比 12", relu[1], 13 / 12),
        ("softmax", "3 against 2, softmax", "softmax：3 比 2", soft[0], math.e),
        ("softmax_far", "13 against 12, softmax", "softmax：13 比 12", soft[1], math.e),
        # 1.5-entmax of scores d apart: √p = z/2 − τ, so that √p₁ − √p₂ = ½ and p₁ + p₂ = 1.
        (
            "entmax",
            "3 against 2, 1.5-entmax",
            "1.5-entmax：3 比 2",
            entmax[0],
            ((math.sqrt(7) + 1) / (math.sqrt(7) - 1)) ** 2,
        ),
        (
            "sigmoid",
            "3 against 2, sigmoid",
            "sigmoid：3 比 2",
            sigmoid[0],
            (1 + math.exp(-2) * 2) / (1 + math.exp(-3) * 2),
        ),
    ):
        yield near(name, Words(en, zh), w[1] / w[0], want, 4 * ROUNDING, "float32")
    yield near(
        "none",
        Words("sum of the weights of −1 and −2, linear", "−1 与 −2 的线性权重之和"),
        relu[2].sum(),
        0.0,
        dtype="float32",
    )
    yield near("negatives", Words("… softmax", "softmax 权重之和"), soft[2].sum(), 1.0, ROUNDING, "float32")


f03.full(softmax_trained.normalisers)


f04 = chapter.claim(
    "F04",
    "S1 §3.1",
    Verdict.IMPRECISE,
    Words(
        "The exponential makes attention winner-take-all without going to the extreme, the key to stable training.",
        "指数让注意力“赢家通吃”但又不完全极端，这个平衡点正是训练稳定的关键。",
    ),
    formula=r"p_{max} = \frac{e^g}{e^g + n - 1}",
    finding=Words(
        "How much the winner takes depends on the number of keys. With a lead of 5 over all others it has {n10:.3f} "
        "among 10 keys, {n100:.3f} among 100, {n1000:.3f} among 1,000 and {n10000:.3f} among 10,000; by 1.5-entmax "
        "{sparse:.0f} among any. A lead must grow as ln n to keep its share. Of stability see F03.",
        "赢家能拿多少，取决于键的个数。领先其余 5 分时，10 个键中它得 {n10:.3f}，100 个得 {n100:.3f}，"
        "1000 个得 {n1000:.3f}，一万个只得 {n10000:.3f}；1.5-entmax 则始终给它 {sparse:.0f}。"
        "要保住份额，领先必须随 ln n 增长。稳定性见 F03。",
    ),
    uses=(masked_softmax, entmax15),
)


@f04.quick
def dispersion() -> Numbers:
    sizes = (10, 100, 1000, 10_000)
    z = np.full((len(sizes), sizes[-1]), -np.inf, np.float32)
    for row, n in zip(z, sizes, strict=True):
        row[:n] = 0
        row[0] = 5

    @jax.jit
    def winners(z: jax.Array) -> list[jax.Array]:
        led = jnp.log(jnp.sum(z > -jnp.inf, axis=1, keepdims=True) / 10.0)  # what a lead must gain from 10 keys on
        grown = z + led * (jnp.arange(z.shape[1]) == 0)
        return [masked_softmax(x, None)[:, 0] for x in (z, grown)] + [entmax15(z)[:, 0]]

    soft, grown, sparse = (np.asarray(w) for w in winners(z))
    exact = [math.exp(5) / (math.exp(5) + n - 1) for n in sizes]
    for n, w, want in zip(sizes, soft, exact, strict=True):
        # Sums of 10⁴ terms, in any order.
        yield near(
            f"n{n}", Words(f"weight of the winner of {n:,}", f"{n:,} 个键中赢家的权重"), w, want, 1e-4 * want, "float32"
        )
    yield near(
        "sparse", Words("… least by 1.5-entmax", "1.5-entmax 下的最小值"), sparse.min(), 1.0, ROUNDING, "float32"
    )
    # (n − 1) / n is all that is left of n.
    apart = np.abs(grown - [1 / (1 + (1 - 1 / n) * 10 * math.exp(-5)) for n in sizes]).max()
    label = Words("… with a lead of 5 + ln(n/10), max |Δ|", "领先 5 + ln(n/10) 时的 max |Δ|")
    yield at_most("grown", label, apart, 1e-4, "float32")
    yield Curves(
        Words("Weight of the first of n keys, 5 above all others.", "n 个键中领先 5 分者的权重。"),
        "n",
        "p",
        {"softmax": (sizes, soft.tolist()), "1.5-entmax": (sizes, sparse.tolist())},
        log_x=True,
    )


f05 = chapter.claim(
    "F05",
    "S1 §3.3",
    Verdict.TRUE,
    Words(
        "Dividing scores by a temperature below 1 sharpens the distribution, above 1 it flattens it.",
        "得分除以温度：T 小于 1 时分布更尖锐，大于 1 时更平滑。",
    ),
    formula=r"p_i = \frac{e^{z_i / T}}{\sum_j e^{z_j / T}}, \quad \frac{dH}{dT} = \frac{\text{Var}_p(z)}{T^3} \ge 0",
    uses=(adjusted, Sampler, entropy),
)


@f05.quick
def temperature() -> Numbers:
    z = np.random.default_rng(0).normal(size=12) * 2
    T = np.array([0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 1e4])
    p = tempered(z, T)
    label = Words("max |Δp| to softmax(z/T) in float64", "与 float64 的 softmax(z/T) 的 max |Δp|")
    want = softmax64(z.astype(np.float32).astype(np.float64) / T[1:, None])
    # z/T is as large as 40, and rounded.
    yield at_most("formula", label, np.abs(p[1:] - want).max(), 40 * EPSILON, "float32")
    H = np.asarray(jax.jit(lambda p: entropy(jnp.log(p)))(p[1:]), np.float64)
    yield at_least(
        "rising",
        Words("least rise of H from one T to the next", "H 随 T 的最小增量"),
        np.diff(H).min(),
        1e-2,
        "float32",
    )
    yield near(
        "zero", Words("p of the largest at T = 0", "T = 0 时最大者的 p"), p[0, np.argmax(z)], 1.0, dtype="float32"
    )
    # H is ln n − Var(z)/2T² to second order.
    yield near("hot", Words("H at T = 10⁴", "T = 10⁴ 时的 H"), H[-1], math.log(12), ROUNDING, "float32")
    slopes = tempering.entropy_slopes(z[None], T[1:-1])
    variance = [float(q @ z**2 - (q @ z) ** 2) for q in softmax64(z / T[1:-1, None])]
    apart = np.abs(slopes.autodiff - variance / T[1:-1] ** 3).max()
    label = Words("max |dH/dT − Var(z)/T³|", "max |dH/dT − Var(z)/T³|")
    yield at_most("slope", label, apart, 1e-10)
    yield shown("steepest", Words("largest dH/dT", "最大的 dH/dT"), slopes.formula.max())


f06 = chapter.claim(
    "F06",
    "S1 §3.3",
    Verdict.EMPIRICAL,
    Words(
        "Below temperature 1 output is more stable; taking the argmax each time makes it very mechanical.",
        "温度低于 1 时输出更稳定；每次都取 argmax 则非常机械，总走同一套路。",
    ),
    finding=Words(
        "A Markov chain, written at temperatures: at 0 it runs in circles of {cycle:.0f} symbols. At 0.5, 1 and 2 a "
        "symbol costs {cost05:.3f}, {cost1:.3f} and {cost2:.3f} nats under the chain itself; the entropy of what is "
        "written is {rate05:.3f}, {rate1:.3f} and {rate2:.3f}: below 1 it is likelier than real text, and poorer.",
        "让一条马尔可夫链按不同温度书写：温度 0 时，它以 {cycle:.0f} 个符号为一圈循环。温度 0.5、1、2 时，"
        "每个符号在该链下的代价为 {cost05:.3f}、{cost1:.3f}、{cost2:.3f} nat，所写文本的熵率为 "
        "{rate05:.3f}、{rate1:.3f}、{rate2:.3f}：低于 1 时文本比真实文本更可能，也更贫乏。",
    ),
    learned=Words(
        "Trained models at T = 0 repeat {repeat0:.0%} of their 4-grams, at 0.5 {repeat05:.0%}, at 1 {repeat1:.0%}; a "
        "symbol costs {cost0:.2f}, {cost05:.2f} and {cost1:.2f} nats under the true chain, at 1.5 {cost15:.2f}.",
        "训练好的模型在 T = 0 时重复 {repeat0:.0%} 的 4-gram，0.5 时 {repeat05:.0%}，1 时 {repeat1:.0%}；"
        "在真实链下每个符号的代价为 {cost0:.2f}、{cost05:.2f}、{cost1:.2f} nat，温度 1.5 时为 {cost15:.2f}。",
    ),
    uses=(transition_table, distribution, stationary, entropy_rate),
)


@f06.quick
def written_by_the_chain() -> Numbers:
    n, table = 8, transition_table(8, 2)
    logits = np.log(table)

    def at(T: float) -> np.ndarray:
        rows = [distribution(z, frozenset(), Sampler(temperature=T)) for z in logits.reshape(-1, n)]
        return np.array(rows).reshape(n, n, n)

    cost, rate = {}, {}
    for T in (0.5, 1.0, 2.0):
        p = at(T)
        by_hand = table ** (1 / T) / (table ** (1 / T)).sum(axis=-1, keepdims=True)
        label = Words(f"max |Δp| by hand, T = {T:g}", f"T = {T:g} 时与手算的 max |Δp|")
        yield at_most(f"p{T:g}", label, np.abs(p - by_hand).max(), 1e-14)
        cost[T], rate[T] = -(stationary(p)[..., None] * p * logits).sum(), entropy_rate(p)
        name = f"{T:g}".replace(".", "")
        label = Words(f"nats a symbol under the chain, T = {T:g}", f"T = {T:g} 时每符号在链下的代价（nat）")
        yield shown(f"cost{name}", label, cost[T])
        label = Words(f"entropy of what is written, T = {T:g}", f"T = {T:g} 时所写文本的熵率")
        yield shown(f"rate{name}", label, rate[T])
    yield near("own", Words("cost − entropy at T = 1", "T = 1 时代价 − 熵率"), cost[1.0] - rate[1.0], 0.0, 1e-12)
    for name, en, zh, x in (("likelier", "cost", "代价", cost), ("poorer", "entropy", "熵率", rate)):
        label = Words(f"{en} at 1 − {en} at 0.5", f"温度 1 与 0.5 的{zh}之差")
        yield at_least(name, label, x[1.0] - x[0.5], 0.05)
    context, seen, greedy = (0, 1), {}, at(0.0)
    while context not in seen:
        seen[context] = len(seen)
        context = (context[1], int(np.argmax(greedy[context])))
    yield shown("cycle", Words("symbols of the circle at T = 0", "T = 0 时循环的长度"), len(seen) - seen[context])


f06.full(softmax_trained.writing)


f07 = chapter.claim(
    "F07",
    "S1 §3.3",
    Verdict.EMPIRICAL,
    Words(
        "Use a temperature of 0.7 to 0.9 for general text and 0.1 for code and mathematics; above 1.2 it hallucinates.",
        "通用文本用温度 0.7 到 0.9，代码和数学用 0.1，1.2 以上容易产生幻觉。",
    ),
    finding=Words(
        "It depends on the model. The most probable of a question's answers is drawn less often as T rises: one of "
        "{sure:.2f} at T = 1 with {low:.3f} at 0.1, {middle:.3f} at 0.8 and {high:.3f} at 1.2. If the second is the "
        "right one, warmth helps: {wrong_low:.3f} at 0.1, {wrong_high:.3f} at 1.2. No threshold stands at 1.2.",
        "这要看模型。一道题最可能的答案，T 越高越少被抽到：T = 1 时为 {sure:.2f} 的答案，在 0.1、0.8、1.2 时为 "
        "{low:.3f}、{middle:.3f}、{high:.3f}。若正确的是居次的那个，升温反而有益：0.1 时 {wrong_low:.3f}，"
        "1.2 时 {wrong_high:.3f}。1.2 处并没有什么门槛。",
    ),
    learned=Words(
        "A trained model's answers to sums are right to {right0:.1%} at T = 0, {right01:.1%} at 0.1, {right08:.1%} at "
        "0.8, {right12:.1%} at 1.2 and {right2:.1%} at 2; its calibration error at these is {ece0:.3f}, {ece01:.3f}, "
        "{ece08:.3f}, {ece12:.3f} and {ece2:.3f}.",
        "训练好的模型做加法题，T = 0、0.1、0.8、1.2、2 时答对率为 {right0:.1%}、{right01:.1%}、{right08:.1%}、"
        "{right12:.1%}、{right2:.1%}，校准误差为 {ece0:.3f}、{ece01:.3f}、{ece08:.3f}、{ece12:.3f}、{ece2:.3f}。",
    ),
    uses=(adjusted, Sampler),
)


@f07.quick
def one_right_answer() -> Numbers:
    p = np.array([0.6, 0.25, 0.1, 0.05])
    T = np.array([0.0, 0.1, 0.5, 0.8, 1.0, 1.2, 2.0, 5.0])
    found = tempered(np.log(p), T).astype(np.float64)
    at = {f"{t:g}": row for t, row in zip(T, found, strict=True)}
    # Powers of p, normalised: by hand.
    powers = {t: p ** (1 / float(t)) / (p ** (1 / float(t))).sum() for t in ("0.1", "0.8", "1.2")}
    yield shown("sure", Words("p of the right answer at T = 1", "T = 1 时正确答案的 p"), at["1"][0], "float32")
    for name, t in (("low", "0.1"), ("middle", "0.8"), ("high", "1.2")):
        label = Words(f"right at T = {t}, the most probable", f"T = {t}、正确者最可能时的答对率")
        yield near(name, label, at[t][0], powers[t][0], 10 * ROUNDING, "float32")
    for name, t in (("wrong_low", "0.1"), ("wrong_high", "1.2")):
        label = Words(f"right at T = {t}, the second", f"T = {t}、正确者居次时的答对率")
        yield near(name, label, at[t][1], powers[t][1], 10 * ROUNDING, "float32")
    yield near("zero", Words("right at T = 0", "T = 0 时的答对率"), at["0"][0], 1.0, dtype="float32")
    label = Words("rises of the first's chance with T", "最可能者的概率随 T 上升的次数")
    yield near("falls", label, (np.diff(found[:, 0]) >= 0).sum(), 0, dtype="float32")
    yield Curves(
        Words("Chance of each of four answers.", "四个答案各自的概率。"),
        "T",
        "p",
        {f"p = {x:g}": (T.tolist(), found[:, i].tolist()) for i, x in enumerate(p)},
    )


f07.full(softmax_trained.answering)


f08 = chapter.claim(
    "F08",
    "S1 §3.3",
    Verdict.GAP,
    Words(
        "To choose a word there is the argmax, or a draw at some temperature.",
        "选词的办法只有 argmax，或按某个温度随机采样。",
    ),
    finding=Words(
        "The library also cuts off the tail, by number (top-k), by mass (top-p) and by ratio to the first (min-p), in "
        "this order after the temperature, punishes what was written, and searches with beams. Draws fit the "
        "distributions written out by hand (least p of {tests:.0f} χ² tests {worst:.2f}). A wide beam finds the most "
        "probable of all texts, p = {best:.3f}; step by step the argmax finds one of {greedy:.3f}.",
        "本库还能截去尾部：按个数（top-k）、按概率质量（top-p）、按与首位之比（min-p），依此顺序在温度之后进行；"
        "还可惩罚已写过的词元，并有集束搜索。采样结果与手算分布相符"
        "（{tests:.0f} 次 χ² 检验中最小的 p 为 {worst:.2f}）。"
        "足够宽的集束能找到全部文本中概率最高者，p = {best:.3f}；逐步取 argmax 只得到 {greedy:.3f}。",
    ),
    uses=(adjusted, draw, outcomes, beam_search),
)


SEEN = (0, 1)
# By the sampler's names. Of T = 2, k = 3, p = 0.7 two ids are left, and three with p before k.
SETTINGS: dict[str, dict[str, float]] = {
    "T = 0.5": {"temperature": 0.5},
    "k = 3": {"top_k": 3},
    "p = 0.7": {"top_p": 0.7},
    "min-p = 0.3": {"min_p": 0.3},
    "penalty 1.5": {"repetition_penalty": 1.5},
    "T = 2, k = 3, p = 0.7": {"temperature": 2.0, "top_k": 3, "top_p": 0.7},
    "T = 1.5, k = 6, p = 0.9, min-p = 0.4": {"temperature": 1.5, "top_k": 6, "top_p": 0.9, "min_p": 0.4},
}


def truncated(z: np.ndarray, of: Sampler) -> np.ndarray:
    """What a sampler of plain numbers draws from over distinct logits [V], by its description, in float64."""
    z = z.copy()
    for i in SEEN:
        z[i] = z[i] / of.repetition_penalty if z[i] > 0 else z[i] * of.repetition_penalty
    p = softmax64(z / of.temperature)
    kept = np.argsort(-p)[: of.top_k or len(p)]
    share = p[kept] / p[kept].sum()
    inside = [i for n, i in enumerate(kept) if share[:n].sum() < of.top_p and p[i] >= of.min_p * p[kept[0]]]
    return np.where(np.isin(np.arange(len(p)), inside), p, 0) / p[inside].sum()


@f08.quick
def samplers() -> Numbers:
    z, N, R = np.array([1.3, -0.2, 0.9, 2.0, 0.1, -1.1, 0.5, 1.7]), 4000, len(SETTINGS)
    each = [Sampler(**setting) for setting in SETTINGS.values()]
    rows = Sampler(**{name: np.array([getattr(of, name) for of in each]) for name in dataclasses.asdict(each[0])})
    seen = np.tile(np.isin(np.arange(len(z)), SEEN), (R, 1))

    @jax.jit
    def run(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        left = adjusted(jnp.broadcast_to(logits, (R, len(z))), rows.of_rows(R), jnp.asarray(seen))
        many = jnp.repeat(left, N, axis=0)
        return jax.nn.softmax(left), draw(jax.random.key(0), many, jnp.arange(R * N), jnp.int32(0))

    p, ids = run(z.astype(np.float32))
    drawn, chances = np.reshape(ids, (R, N)), []
    for i, (name, of) in enumerate(zip(SETTINGS, each, strict=True)):
        want = truncated(z, of)
        label = Words(f"max |Δp| by hand, {name}", f"与手算的 max |Δp|，{name}")
        yield at_most(f"p{i}", label, np.abs(np.asarray(p[i]) - want).max(), ROUNDING, "float32")
        inside = np.flatnonzero(want)
        counts = {(int(x),): int((drawn[i] == x).sum()) for x in np.unique(drawn[i])}
        chances.append(decoding.misfit(counts, Outcomes(tuple((int(x),) for x in inside), want[inside])))
    yield shown("tests", Words("settings", "设置数"), R)
    label = Words("least p of the χ² tests of 4000 draws", "4000 次采样的 χ² 检验中最小的 p")
    yield at_least("worst", label, min(chances), 1e-3 / R, "float32")

    config = Config(vocab_size=3, d_model=4, num_heads=1, num_layers=1, d_ff=4, positions="none")
    shapes = jax.eval_shape(lambda key: init_transformer(key, config), jax.random.key(0))
    rng = np.random.default_rng(36)
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 1, leaf.shape), jnp.float32), shapes)
    every = outcomes(params, config, Hyper(), [0], max_new_tokens=3)
    greedy = outcomes(params, config, Hyper(), [0], Sampler(temperature=0.0), max_new_tokens=3).mode
    # 9 beams hold all beginnings of two ids.
    found = beam_search(params, config, Hyper(), [[0]], max_new_tokens=3, beam=9)
    label = Words("p of the beam's text − the largest p", "集束所得文本的 p − 最大的 p")
    yield near("beam", label, every.probability(np.asarray(found.ids_BWT)[0, 0].tolist()) - every.p[0], 0.0)
    apart = float(found.scores_BW[0, 0]) - math.log(every.p[0])
    yield near("score", Words("its score − ln p", "其得分 − ln p"), apart, 0.0, 4 * ROUNDING, "float32")
    yield shown("best", Words("largest p of a text", "文本概率的最大值"), every.p[0])
    yield at_most("greedy", Words("p of the greedy text", "贪心文本的 p"), every.probability(greedy), every.p[0] - 0.01)


f09 = chapter.claim(
    "F09",
    "S1 §3.1",
    Verdict.TRUE,
    Words(
        "Softmax does not change when a constant is added to every score (which none of the articles states).",
        "所有得分加上同一常数，softmax 不变（各篇均未提及）。",
    ),
    formula=r"\text{softmax}(z + c) = \text{softmax}(z)",
    finding=Words(
        "So the largest may be taken off first, without which e¹⁰²⁴ would overflow. Bit by bit the same where z + c is "
        "exact; where it is rounded, the weights move with it: by {rounded:.1g} at c = 1000.",
        "因此可以先减去最大值，否则 e¹⁰²⁴ 会溢出。z + c 无舍入时结果逐位相同；"
        "有舍入时权重随之变动：c = 1000 时为 {rounded:.1g}。",
    ),
    uses=(masked_softmax,),
)


@f09.quick
def shift_invariance() -> Numbers:
    rng = np.random.default_rng(0)
    exact = rng.integers(-256, 256, 32) / 64  # with 1024 they still fit into 24 bits
    w = weights([exact, exact + 1024, exact - 1024])
    label = Words("max |Δweight|, ±1024 added, z + c exact", "加 ±1024（z + c 无舍入）时的 max |Δ权重|")
    yield near("exact", label, np.abs(w - w[0]).max(), 0.0, dtype="float32")
    yield at_most(
        "formula", Words("… to float64", "与 float64 的差"), np.abs(w - softmax64(exact)).max(), ROUNDING, "float32"
    )
    z = rng.normal(size=32)
    moved = np.abs(np.diff(weights([z, z + 1000]), axis=0)).max()
    # z + 1000 is rounded to 2⁻¹⁵: 3·10⁻⁵ of a weight, up or down, and as much of their sum.
    yield at_most("rounded", Words("max |Δweight|, 1000 added", "加 1000 时的 max |Δ权重|"), moved, 2.0**-14, "float32")
