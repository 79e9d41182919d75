"""Chapter B, its first part: variance, and what the scores' is (S0 and S3 §3.1-3.2; S1 §2.2; S2 §4.3)."""

import dataclasses
import functools
import math
from decimal import Decimal

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims.record import Chapter, Number, Numbers, Verdict, Words, at_most, near, shown
from transformer_jax.attention import Attention, attention, init_attention
from transformer_jax.config import Config, Hyper
from transformer_jax.masks import full
from transformer_jax.norms import init_norm, norm
from transformer_jax.scores import Scoring, attention_scores

chapter = Chapter("B", Words("Variance, scaling and saturation", "方差、缩放与饱和"))

WIDTHS = (16, 64, 256, 512)
WIDE = Config(d_model=512, num_heads=8, norm="rmsnorm", positions="none")  # heads of 64


def draws(seed: int, *shape: int) -> np.ndarray:
    """float32 N(0, 1) of `shape`."""
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@functools.cache
def heads(d: int) -> tuple[np.ndarray, np.ndarray]:
    """Queries and keys of unit normal coordinates, [4096/d, 64, 1, d] each."""
    q, k = draws(d, 2, 4096 // d, 64, 1, d)
    return q, k


def dots(q: np.ndarray, k: np.ndarray, exponent: float = 0.0) -> np.ndarray:
    """The library's scores of every query with every key of its batch, [B, T S] in float64; exponent 0: q·k itself."""
    scores = attention_scores(jnp.asarray(q), jnp.asarray(k), Scoring(dk_exponent=exponent))
    return np.asarray(scores, np.float64).reshape(len(q), -1)


def sampled(name: str, label: Words, values: np.ndarray, predicted: float, spread: float) -> Number:
    """The mean of independent values [B], within five standard errors of what is predicted.

    spread: the standard deviation of one value, by theory: a measured one would forgive what makes it larger.
    """
    return near(name, label, np.mean(values), predicted, 5 * spread / math.sqrt(len(values)), "float32")


def of_pairs(given_one: float, whole: float, n: int = 64) -> float:
    """The standard deviation of the mean of f(q_i·k_j) over n queries and n keys (Hoeffding 1948).

    given_one: the variance of E[f | q], which is that of E[f | k]. whole: that of f.
    """
    return math.sqrt(2 * given_one / n + (whole - 2 * given_one) / n**2)


def of_variance(d: int) -> float:
    """of_pairs for f = (q·k)²/d: E[f | q] = |q|²/d, and E f² = 3 (1 + 2/d)."""
    return of_pairs(2 / d, 2 + 6 / d)


def inside(d: int, limit: float) -> tuple[float, float]:
    """(P(|q·k| ≤ limit), of_pairs for it): given q, the score is N(0, |q|²), and |q|² is chi-squared."""
    x, step = np.linspace(1e-6, d + 30 * math.sqrt(2 * d), 20_000, retstep=True)
    density = np.exp((d / 2 - 1) * np.log(x) - x / 2 - (d / 2) * math.log(2) - math.lgamma(d / 2)) * step
    within = np.array([math.erf(limit / math.sqrt(2 * one)) for one in x])
    chance = float(np.sum(density * within))
    return chance, of_pairs(float(np.sum(density * (within - chance) ** 2)), chance * (1 - chance))


b01 = chapter.claim(
    "B01",
    "S0 §3.1",
    Verdict.TRUE,
    Words(
        "The variance is the mean square less the squared mean; its root is the standard deviation.",
        "方差等于平方的均值减去均值的平方；开方即得标准差。",
    ),
    formula=r"\mathrm{Var}(X) = E[X^2] - (E[X])^2",
    finding=Words(
        "In float32 the formula is a poor way to compute it: at a mean of 4096 it gives {one_pass:.3g} for {var:.4f}, "
        "which is why the library averages squared deviations.",
        "但在 float32 中不宜照此计算：均值为 4096 时它给出 {one_pass:.3g}，而实际为 {var:.4f}；"
        "因此本库改为对离差的平方求平均。",
    ),
    uses=(norm,),
)


@b01.quick
def variance() -> Numbers:
    die = np.arange(1.0, 7.0)
    label = Words("a die: E[X²] − (E X)²", "一枚骰子：E[X²] − (E X)²")
    yield near("die", label, np.mean(die**2) - np.mean(die) ** 2, 35 / 12, 1e-12)
    x = draws(1, 1, 8, 256) + np.float32(4096)
    exact = x.astype(np.float64)
    gap = np.mean(exact**2, -1) - np.mean(exact, -1) ** 2 - np.mean((exact - exact.mean(-1, keepdims=True)) ** 2, -1)
    # E[X²] is 2²⁴: its last place is 2⁻²⁸ in float64.
    label = Words("max |E[X²] − (E X)² − E[(X − E X)²]| at a mean of 4096", "均值 4096 时两种定义之差的最大值")
    yield at_most("gap", label, np.max(np.abs(gap)), 2.0**-28 * 8)
    config = Config(d_model=256, norm="layernorm")
    want = (exact - exact.mean(-1, keepdims=True)) / np.sqrt(exact.var(-1, keepdims=True) + config.norm_epsilon)
    error = np.max(np.abs(np.asarray(norm(init_norm(config), jnp.asarray(x), config)) - want))
    # The mean is right to a few of its last places, 2⁻¹¹ each.
    yield at_most("layernorm", Words("error of LayerNorm there", "此时 LayerNorm 的误差"), error, 2.0**-8, "float32")
    one_pass = np.mean(np.square(x[0, 0])) - np.square(np.mean(x[0, 0]))
    yield shown("one_pass", Words("E[X²] − (E X)² in float32", "float32 下的 E[X²] − (E X)²"), one_pass, "float32")
    yield shown("var", Words("in float64", "float64 下"), exact[0, 0].var())


b02 = chapter.claim(
    "B02",
    "S0 §3.1, S3 §3.1",
    Verdict.TRUE,
    Words(
        "Of two independent variables with mean zero, the variance of the product is the product of the variances.",
        "两个均值为零的独立变量，乘积的方差等于方差的乘积。",
    ),
    formula=r"\mathrm{Var}(XY) = \mathrm{Var}(X)\, \mathrm{Var}(Y)",
    finding=Words(
        "The zero means are needed: with means of 1 the scores of 64 coordinates have variance {shifted:.0f}; theory "
        "has {triple:.0f}, three times 64, as Var(XY) also has the terms μ²Var.",
        "零均值不可少：均值为 1 时，64 维点积的方差为 {shifted:.0f}；理论值为 {triple:.0f}，即 64 的三倍，"
        "因为 Var(XY) 还含有 μ²Var 各项。",
    ),
    uses=(attention_scores,),
)


@b02.quick
def product() -> Numbers:
    x, y = np.array([-2.0, -1.0, 3.0]), np.array([-1.0, 0.0, 1.0])  # all nine pairs: independent, means 0
    label = Words("Var(XY) of nine equally likely pairs", "九个等可能数对的 Var(XY)")
    yield near("product", label, np.var(np.outer(x, y)), float(np.var(x) * np.var(y)), 1e-12)
    q, k = heads(64)
    label = Words("Var(q·k) with means of 1, d_k = 64", "均值为 1 时的 Var(q·k)，d_k = 64")
    each = np.mean(np.square(dots(q + 1, k + 1) - 64), axis=1)
    # Of y = q·k − d with means of 1: Var E[y² | q] = 2d² + 10d, E y⁴ = 57d + 27d (d − 1).
    d = 64
    spread = of_pairs(2 * d**2 + 10 * d, 57 * d + 27 * d * (d - 1) - (3 * d) ** 2)
    yield sampled("shifted", label, each, 3 * d, spread)
    yield shown("triple", Words("3 d_k", "3 d_k"), 3 * d)


b03 = chapter.claim(
    "B03",
    "S0 §3.1, S3 §3.1, S3 §6",
    Verdict.TRUE,
    Words(
        "Of two independent variables with mean zero, the variance of the sum is the sum of the variances.",
        "两个均值为零的独立变量，和的方差等于方差之和。",
    ),
    formula=r"\mathrm{Var}(X + Y) = \mathrm{Var}(X) + \mathrm{Var}(Y)",
    finding=Words(
        "It holds for any means, and for dependent variables that are uncorrelated ({uncorrelated:.3g} for Y = X²); a "
        "correlation of ½ makes it {correlated:.2g} times as large.",
        "其实均值任意皆可，也不必独立，不相关即可（取 Y = X² 时比值仍为 {uncorrelated:.3g}）；"
        "相关系数为 ½ 时则是 {correlated:.2g} 倍。",
    ),
)


def of_sum(x: np.ndarray, y: np.ndarray, p: np.ndarray) -> float:
    """Var(X + Y) / (Var X + Var Y) of outcomes with probabilities p."""

    def var(z: np.ndarray) -> float:
        return float(p @ (z - p @ z) ** 2)

    return var(x + y) / (var(x) + var(y))


@b03.quick
def total() -> Numbers:
    x, y = np.array([1.0, 1.0, -1.0, -1.0]), np.array([1.0, -1.0, 1.0, -1.0])
    even, tied = np.full(4, 0.25), np.array([0.375, 0.125, 0.125, 0.375])
    yield near("independent", Words("ratio, independent", "比值：独立"), of_sum(x, y, even), 1.0, 1e-12)
    label = Words("ratio, independent with means 3 and −5", "比值：独立，均值为 3 与 −5")
    yield near("means", label, of_sum(x + 3, y - 5, even), 1.0, 1e-12)
    yield near("correlated", Words("ratio, correlation ½", "比值：相关系数 ½"), of_sum(x, y, tied), 1.5, 1e-12)
    x = np.array([-1.0, 0.0, 1.0])
    label = Words("ratio, Y = X²: dependent, uncorrelated", "比值：Y = X²，相依而不相关")
    yield near("uncorrelated", label, of_sum(x, x**2, np.full(3, 1 / 3)), 1.0, 1e-12)


b04 = chapter.claim(
    "B04",
    "S0 §3.2, S3 §3.2, S1 §2.2, S2 §4.3",
    Verdict.CONDITIONAL,
    Words(
        "If the coordinates of queries and keys have mean 0 and variance 1, their dot product has mean 0 and variance "
        "d_k: with 64 coordinates a standard deviation of 8.",
        "若查询与键的各分量均值为 0、方差为 1，则点积均值为 0、方差为 d_k：64 维时标准差为 8。",
    ),
    formula=r"\mathrm{Var}(q \cdot k) = \sum_{i=1}^{d_k} \mathrm{Var}(q_i k_i) = d_k",
    finding=Words(
        "If the coordinates are also independent: Var(q·k)/d_k is {v64:.3f} at 64. With 64 copies of one coordinate it "
        "is {copies:.1f}, as the variance is then d_k².",
        "还须各分量相互独立：d_k = 64 时 Var(q·k)/d_k 为 {v64:.3f}；若 64 个分量都是同一个数，"
        "方差为 d_k²，该比值达 {copies:.1f}。",
    ),
    uses=(attention_scores,),
)


@b04.quick
def of_dots() -> Numbers:
    for d in (64, 16, 256, 512):
        s = dots(*heads(d))
        label = Words(f"Var(q·k)/d_k, d_k = {d}", f"Var(q·k)/d_k，d_k = {d}")
        yield sampled(f"v{d}", label, np.mean(s**2, axis=1) / d, 1.0, of_variance(d))
        label = Words(f"mean of q·k over √d_k, d_k = {d}", f"q·k 的均值除以 √d_k，d_k = {d}")
        yield sampled(f"m{d}", label, np.mean(s, axis=1) / math.sqrt(d), 0.0, of_pairs(0.0, 1.0))
    q, k = (np.repeat(x[..., :1], 64, axis=-1) for x in heads(16))
    label = Words("the same for 64 equal coordinates", "64 个分量全相等时的同一比值")
    # 64 u²w² of normal u and w: of 64 each, the means of u² and w² have the variance 2/64.
    spread = 64 * math.sqrt((1 + 2 / 64) ** 2 - 1)
    yield sampled("copies", label, np.mean(dots(q, k) ** 2, axis=1) / 64, 64.0, spread)


b05 = chapter.claim(
    "B05",
    "S1 §2.2",
    Verdict.IMPRECISE,
    Words(
        "Coordinates of mean 0 and variance 1 are enough for a dot product of variance d_k.",
        "只要各分量均值为 0、方差为 1，点积的方差就是 d_k。",
    ),
    finding=Words(
        "Query and key must be independent, too. With q = k of 64 coordinates the mean is {mean:.1f} and the variance "
        "{var:.1f}, not 64 but about 2 d_k = {twice:.0f}.",
        "查询与键之间也须独立：取 q = k、64 维，均值为 {mean:.1f}，方差为 {var:.1f}，不是 64，"
        "而是约 2 d_k = {twice:.0f}。",
    ),
    uses=(attention_scores,),
)


@b05.quick
def with_itself() -> Numbers:
    q = draws(5, 64, 256, 1, 64)
    s = np.stack([dots(one[:, None], one[:, None])[:, 0] for one in q])  # [64, 256]
    d, n = 64, s.shape[1]
    # |q|² has the variance 2d and the excess kurtosis 12/d.
    spread = 2 * d * math.sqrt(2 / (n - 1) + 12 / d / n)
    yield sampled("var", Words("Var(q·q), d_k = 64", "Var(q·q)，d_k = 64"), np.var(s, axis=1, ddof=1), 2 * d, spread)
    yield sampled("mean", Words("mean of q·q", "q·q 的均值"), np.mean(s, axis=1), d, math.sqrt(2 * d / n))
    yield shown("twice", Words("2 d_k", "2 d_k"), 2 * d)


b06 = chapter.claim(
    "B06",
    "S0 §3.2, S3 §3.2",
    Verdict.WRONG,
    Words(
        "As the inputs are normalised, the coordinates of every query and key are independent, with mean 0 and "
        "variance 1.",
        "由于输入已归一化，每个查询与键的分量都是相互独立、均值为 0、方差为 1 的变量。",
    ),
    finding=Words(
        "What is normalised is x; q = x W_q is as large as W_q makes it. The scaled scores have variance {own:.3f} "
        "with weights of variance 1/D, {uniform:.3f} with those of uniform(±1/√D), {small:.4f} with N(0, 0.02²) at "
        "D = 512. Coordinates of q and k of one token share x: their squared correlation is {shared:.5f} on average, "
        "where that of independent ones would be {alone:.5f} over as many tokens. Nor does RMSNorm centre: of x + 1 it "
        "leaves a mean of {centre:.3f}.",
        "归一化的是 x，而 q = x W_q 的大小由 W_q 决定：权重方差为 1/D 时缩放后得分的方差为 {own:.3f}，"
        "取均匀分布 (±1/√D) 时为 {uniform:.3f}，D = 512 时取 N(0, 0.02²) 则为 {small:.4f}。"
        "同一词元的 q 与 k 的分量来自同一个 x：相关系数的平方平均为 {shared:.5f}，而在同样多的词元上，"
        "独立的分量只会有 {alone:.5f}。"
        "RMSNorm 也不去均值：输入 x + 1 后均值仍有 {centre:.3f}。",
    ),
    uses=(norm, init_attention, attention),
)


TOKENS = 128


@functools.cache
def projections(kind: str) -> Attention:
    """W_q and W_k as the library draws them ("own"), or drawn for themselves: uniform(±1/√D), N(0, 0.02²)."""
    weights, rng = init_attention(jax.random.key(6), WIDE), np.random.default_rng(60)
    if kind == "own":
        return weights
    ways = {"uniform": lambda size: rng.uniform(-1, 1, size) / math.sqrt(WIDE.D),
            "small": lambda size: rng.normal(0, 0.02, size)}  # fmt: skip
    q, k = (jnp.asarray(ways[kind](leaf.shape), jnp.float32) for leaf in (weights.wq_DNH, weights.wk_DKH))
    return dataclasses.replace(weights, wq_DNH=q, wk_DKH=k)


def projected_scores(weights: Attention, gain: float = 1.0) -> np.ndarray:
    """Scaled scores [N, T T] of RMS-normed inputs; gain: the norm's learned scale."""
    unit = init_norm(WIDE)
    scaled = dataclasses.replace(unit, scale_D=gain * unit.scale_D)
    x = norm(scaled, jnp.asarray(draws(6, 1, TOKENS, WIDE.D)), WIDE)
    _, trace = attention(weights, x, x, full(), WIDE, Hyper(), trace=True)
    assert trace is not None
    return np.asarray(trace.scores_BNTS[0], np.float64).reshape(WIDE.N, -1)


@b06.quick
def from_inputs() -> Numbers:
    D, N, H = WIDE.D, WIDE.N, WIDE.H
    # Relative, squared: of the weights, through |w_i|² of both; of the tokens, whose squared scores follow
    # |xᵀ W_q W_kᵀ|²: its eigenvalues have a mean square of 1 + 2H/D = 5/4.
    error = 5 * math.sqrt(4 / (D * H * N) + 2 * 2 * 1.25 / (H * TOKENS * N))
    cases = (
        ("uniform", 1 / 9, Words("Var, weights uniform(±1/√D)", "权重取均匀分布 (±1/√D) 时的方差")),
        ("own", 1.0, Words("Var, weights N(0, 1/D)", "权重取 N(0, 1/D) 时的方差")),
        ("small", (0.02**2 * D) ** 2, Words("Var, weights N(0, 0.02²)", "权重取 N(0, 0.02²) 时的方差")),
    )
    for name, want, label in cases:
        yield near(name, label, np.mean(projected_scores(projections(name)) ** 2), want, error * want, "float32")
    tokens, weights = 4096, projections("own")
    x = np.asarray(norm(init_norm(WIDE), jnp.asarray(draws(8, 1, tokens, D)), WIDE))[0]
    q, k = (x @ np.asarray(w).reshape(D, -1) for w in (weights.wq_DNH, weights.wk_DKH))
    squares = np.corrcoef(q, k, rowvar=False)[: N * H, N * H :] ** 2
    # That of w_i and w'_j is 1/D on average, that of a sample without any 1/n; 512² of them, hardly dependent.
    want = 1 / D + (1 + 1 / D) / tokens
    label = Words("mean squared correlation of q_i and k_j of a token", "同一词元的 q_i 与 k_j 的相关系数平方的均值")
    yield near(
        "shared", label, np.mean(squares), want, 5 * math.sqrt(2) / (N * H) * want + 4 / tokens * want, "float32"
    )
    label = Words("the same, each k of another token", "同上，k 取自另一词元")
    squares = np.corrcoef(q, np.roll(k, 1, axis=0), rowvar=False)[: N * H, N * H :] ** 2
    yield near(
        "alone", label, np.mean(squares), 1 / tokens, 5 * math.sqrt(2) / (N * H) / tokens + 4 / tokens**2, "float32"
    )
    y = np.asarray(norm(init_norm(WIDE), jnp.asarray(draws(7, 1, 200, D) + 1), WIDE), np.float64)
    label = Words("mean of RMSNorm(x + 1)", "RMSNorm(x + 1) 的均值")
    # 1/√2 up to terms of 1/D, which are below the sampling error; m/r with Var m = 1/D, and r² of the same numbers.
    yield sampled("centre", label, np.mean(y[0], axis=1), 2**-0.5, math.sqrt(3 / 16 / D))


b07 = chapter.claim(
    "B07",
    "S0 §3.2",
    Verdict.IMPRECISE,
    Words(
        "With a standard deviation of 8 the scores often swing between −24 and 24.",
        "标准差为 8 时，得分经常在 −24 到 24 之间大幅波动。",
    ),
    formula=r"P(|S| \le 3\sigma) \approx 0.997",
    finding=Words(
        "That is where nearly all of them lie: {in24:.4f} are within ±24, but {in8:.2f} within ±8. The tails are "
        "slightly heavier than a Gaussian's: the excess kurtosis is 6/d_k = {kurtosis:.3f} in theory, {excess:.3f} "
        "here.",
        "这只是几乎全部得分所在的范围：±24 之内占 {in24:.4f}，而 ±8 之内已占 {in8:.2f}。"
        "尾部略重于正态分布：超额峰度理论值为 6/d_k = {kurtosis:.3f}，此处测得 {excess:.3f}。",
    ),
    uses=(attention_scores,),
)


@b07.quick
def swings() -> Numbers:
    s = np.abs(dots(*heads(64)))
    for limit in (24, 8):
        share = np.mean(s <= limit, axis=1)
        yield sampled(f"in{limit}", Words(f"P(|S| ≤ {limit})", f"P(|S| ≤ {limit})"), share, *inside(64, limit))
    fourth, second = np.mean(s**4, axis=1), np.mean(s**2, axis=1)
    label = Words("excess kurtosis", "超额峰度")
    # By batch, about E S² = 64: the fourth moment is 3 d (d + 2).
    d = 64
    values = (fourth - 6 * d * (second - d)) / d**2 - 3
    # z = S/√d is N(0, r) given q, r = |q|²/d: E[z⁴ − 6z² | q] = 3 (r − 1)² − 3, whose variance is 9 (8/d² + 48/d³).
    r2, r3, r4 = (math.prod(1 + 2 * i / d for i in range(1, n)) for n in (2, 3, 4))
    whole = 105 * r4 - 180 * r3 + 108 * r2 - (3 * r2 - 6) ** 2
    yield sampled("excess", label, values, 6 / d, of_pairs(9 * (8 / d**2 + 48 / d**3), whole))
    yield shown("kurtosis", Words("6/d_k", "6/d_k"), 6 / d)


b08 = chapter.claim(
    "B08",
    "S0 §3.2, S3 §3.2",
    Verdict.TRUE,
    Words("e^20 is about 485,165,195 and e^−15 about 0.0000003.", "e^20 约为 485,165,195，e^−15 约为 0.0000003。"),
    formula=r"e^{20} \approx 4.85 \times 10^8,\quad e^{-15} \approx 3 \times 10^{-7}",
)


@b08.quick
def exponentials() -> Numbers:
    yield near("large", Words("e²⁰", "e²⁰"), Decimal(20).exp(), 485_165_195, 0.5, "decimal")
    yield near("small", Words("e⁻¹⁵", "e⁻¹⁵"), Decimal(-15).exp(), 3e-7, 5e-8, "decimal")
    yield near("float64", Words("e²⁰ in float64 over that", "float64 的 e²⁰ 与之比"),
               math.exp(20) / float(Decimal(20).exp()), 1.0, 2.0**-52)  # fmt: skip
