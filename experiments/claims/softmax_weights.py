"""Chapter F, its first part: softmax and other ways to weights (S1 §3.1, S2 §4.4)."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims import softmax_trained
from experiments.claims.information_probes import EPSILON, ROUNDING, softmax64
from experiments.claims.record import Chapter, Curves, Numbers, Verdict, Words, at_most, near
from transformer_jax.samplers import Sampler, adjusted
from transformer_jax.scores import entmax15, masked_relu, masked_sigmoid, masked_softmax

chapter = Chapter("F", Words("Softmax, temperature and decoding", "Softmax、温度与解码"))


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
    label = Words("weights that are not between 0 and 1", "不在 0 与 1 之间的权重数")
    yield near("outside", label, np.sum((w <= 0) | (w >= 1)), 0, dtype="float32")
    label = Words(
        "largest weight of a row over its least, against e^{max − min}", "行内最大与最小权重之比，与 e^{max − min} 相比"
    )
    ratio = w.max(axis=1) / w.min(axis=1) / np.exp(np.ptp(z.astype(np.float64), axis=1))
    yield near("ratio", label, ratio[np.argmax(np.abs(ratio - 1))], 1.0, ROUNDING, "float32")
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
        "with positive scores divided by their sum ({relu_more_low:+.2f} to {relu_more_high:+.2f}, p {relu_more_p:.2g})"
        ", {sigmoid:.2f} with sigmoids ({sigmoid_more_low:+.2f} to {sigmoid_more_high:+.2f}), {entmax15:.2f} with "
        "1.5-entmax ({entmax15_more_low:+.2f} to {entmax15_more_high:+.2f}). So linear works, and less well; of "
        "sigmoids these seeds do not tell. Divided by their sum as they are, the trained scores would give "
        "{plain_negative:.0%} of the rows negative weights, one of size {plain_most:,.0f}, and {plain_nan:.2%} NaN.",
        "训练模型回忆某符号之后出现过什么，各取最佳学习率：softmax {softmax:.2f} nat，正分除以总和 {relu:.2f}"
        "（{relu_more_low:+.2f} 至 {relu_more_high:+.2f}，p 值 {relu_more_p:.2g}），sigmoid {sigmoid:.2f}"
        "（{sigmoid_more_low:+.2f} 至 {sigmoid_more_high:+.2f}），1.5-entmax {entmax15:.2f}"
        "（{entmax15_more_low:+.2f} 至 {entmax15_more_high:+.2f}）。可见线性能用，但较差；sigmoid 则这些种子无法判定。"
        "若把训练后的得分原样除以总和，{plain_negative:.0%} 的行会出现负权重，最大的达 {plain_most:,.0f}，"
        "出现 NaN 的行占 {plain_nan:.2%}。",
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
        "{sparse:.0f} among any. A lead must grow as ln n to keep its share.",
        "赢家能拿多少，取决于键的个数。领先其余 5 分时，10 个键中它得 {n10:.3f}，100 个得 {n100:.3f}，"
        "1000 个得 {n1000:.3f}，一万个只得 {n10000:.3f}；1.5-entmax 则始终给它 {sparse:.0f}。"
        "要保住份额，领先必须随 ln n 增长。",
    ),
    learned=Words(
        "Is it what keeps training stable? Of {runs:.0f} runs each, at rates too high, {softmax_lost:.0f} end worse "
        "than guessing with softmax, {relu_lost:.0f} with positive scores divided by their sum, {sigmoid_lost:.0f} "
        "with sigmoids, {entmax15_lost:.0f} with 1.5-entmax.",
        "它是训练稳定的关键吗？在过高的学习率下各训练 {runs:.0f} 次，结果比乱猜还差的次数：softmax {softmax_lost:.0f}，"
        "正分除以总和 {relu_lost:.0f}，sigmoid {sigmoid_lost:.0f}，1.5-entmax {entmax15_lost:.0f}。",
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
        grown = z + led * (jnp.arange(z.shape[1]) == 0)[None]
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


f04.full(softmax_trained.stability)
