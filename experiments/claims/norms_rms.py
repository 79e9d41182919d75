"""Chapter C, its first part: RMSNorm, its scale invariance and the mean that it leaves (S0 and S3 §4.1, S3 §6)."""

import jax.numpy as jnp
import numpy as np

from experiments.claims import norms_trained
from experiments.claims.record import Chapter, Curves, Numbers, Verdict, Words, at_most, near, shown
from experiments.claims.scaling_variance import draws
from transformer_jax.config import Config
from transformer_jax.norms import Norm, init_norm, norm, rms

chapter = Chapter("C", Words("Normalisation and depth", "归一化与深度"))

D = 64


def settings(kind: str = "rmsnorm", epsilon: float = 1e-6, width: int = D) -> Config:
    """A norm of that kind and width."""
    return Config(norm=kind, norm_epsilon=epsilon, d_model=width, num_heads=1, positions="none")


def normed(x: np.ndarray, config: Config) -> np.ndarray:
    """The library's norm of rows [T, D] in x's type, as it starts: scale 1, bias 0."""
    return np.asarray(norm(init_norm(config), jnp.asarray(x)[None], config))[0]


def by_hand(
    x: np.ndarray, config: Config, scale: np.ndarray | float = 1.0, bias: np.ndarray | float = 0.0
) -> np.ndarray:
    """The norm of rows [T, D], one after the other, in float64: variances with 1/D, epsilon inside the root."""
    out = []
    for row in x.astype(np.float64):
        row = row - sum(row) / len(row) if config.norm == "layernorm" else row
        out.append(row / (sum(row * row) / len(row) + config.norm_epsilon) ** 0.5 * scale + bias)
    return np.array(out)


def amplitude(y: np.ndarray) -> float:
    """Root mean square of all entries."""
    return float(np.sqrt(np.mean(np.square(y.astype(np.float64)))))


def unit_rows(seed: int, count: int = 5) -> np.ndarray:
    """float32 rows [count, D] of root mean square 1."""
    x = draws(seed, count, D)
    return x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True))


c01 = chapter.claim(
    "C01",
    "S0 §4.1, S3 §6",
    Verdict.TRUE,
    Words(
        "RMSNorm divides a vector by the root of its mean square plus ε and multiplies by a learned scale.",
        "RMSNorm 把向量除以（均方加 ε）的平方根，再乘以可学习的缩放。",
    ),
    formula=r"\mathrm{RMSNorm}(x) = \frac{x}{\sqrt{\frac{1}{d} \sum_i x_i^2 + \epsilon}} \odot \gamma",
    uses=(norm, rms),
)


@c01.quick
def definition() -> Numbers:
    # Mean square 12.5; with ε = 0.25 the root is that of 12.75, and ε outside it would give 3.786 instead of 3.571.
    y = rms(jnp.array([1.0, 2.0, 3.0, 6.0]), jnp.array([1.0, 2.0, 1.0, 1.0]), 0.25)
    label = Words("second coordinate of (1, 2, 3, 6), γ = 2, ε = ¼", "(1, 2, 3, 6) 的第二分量，γ = 2，ε = ¼")
    yield near("hand", label, y[1], 4 / 12.75**0.5, 1e-6, "float32")
    config, x, scale = settings(epsilon=0.1), 2 * draws(1, 5, D) + 1, draws(2, D)
    y = norm(Norm(jnp.asarray(scale), None), jnp.asarray(x)[None], config)
    gap = np.max(np.abs(np.asarray(y)[0] - by_hand(x, config, scale)))
    yield at_most(
        "gap", Words("max |Δ| to float64 loops, ε = 0.1", "与 float64 逐行计算之差，ε = 0.1"), gap, 5e-6, "float32"
    )


c02 = chapter.claim(
    "C02",
    "S0 §4.1, S3 §4.1",
    Verdict.CONDITIONAL,
    Words(
        "RMS(100x) is 100 RMS(x), so that the factor cancels exactly: RMSNorm(100x) = RMSNorm(x).",
        "RMS(100x) = 100 RMS(x)，常数精确约去：RMSNorm(100x) = RMSNorm(x)。",
    ),
    formula=r"\mathrm{RMSNorm}(c x) = \frac{c}{\sqrt{c^2 + \epsilon / \mathrm{RMS}(x)^2}}"
    r"\, \frac{x}{\mathrm{RMS}(x)} \odot \gamma",
    finding=Words(
        "Exactly only for ε = 0, and for positive factors: −1 turns the sign. With ε = 10⁻⁶ a hundredfold unit input "
        "moves by {c100:.0e}, but at a thousandth of it the output has amplitude {a3:.3f}, at a ten-thousandth "
        "{a4:.4f}.",
        "仅当 ε = 0 且常数为正时精确：乘以 −1 会变号。取 ε = 10⁻⁶，单位输入放大百倍后输出只变 {c100:.0e}；"
        "但缩小到千分之一时输出幅度为 {a3:.3f}，万分之一时为 {a4:.4f}。",
    ),
    uses=(norm, rms),
)


@c02.quick
def factor_cancels() -> Numbers:
    x, config = unit_rows(3), settings()

    def exact(x: np.ndarray) -> np.ndarray:
        """With ε = 0, which no model may have."""
        return np.asarray(rms(jnp.asarray(x), jnp.ones(D), 0.0))

    for name, c in (("a3", 1e-3), ("a2", 1e-2), ("a4", 1e-4)):
        label = Words(f"amplitude of RMSNorm({c:g} x), ε = 1e−6", f"RMSNorm({c:g} x) 的幅度，ε = 1e−6")
        yield near(
            name, label, amplitude(normed(np.float32(c) * x, config)), (1 + 1e-6 / c**2) ** -0.5, 1e-6, "float32"
        )
    moved = np.max(np.abs(normed(100 * x, config) - normed(x, config)))
    label = Words("max |Δ| at c = 100, ε = 1e−6", "c = 100、ε = 1e−6 时的最大变动")
    # ε takes off 5e-7 of entries up to 4; the products 100 x are rounded.
    yield at_most("c100", label, moved, 4e-6, "float32")
    # c x is rounded, and the root, which is 1/c here: each by half a unit in the last place, of entries up to 4.
    gap = np.max(np.abs(exact(np.float32(1e-3) * x) - exact(x)))
    label = Words("max |Δ| at c = 0.001, ε = 0", "c = 0.001、ε = 0 时的最大变动")
    yield at_most("exact", label, gap, 8 * 2.0**-24 * np.max(np.abs(x)), "float32")
    gap = np.max(np.abs(exact(-x) + exact(x)))
    yield near(
        "sign", Words("max |RMSNorm(−x) + RMSNorm(x)|", "max |RMSNorm(−x) + RMSNorm(x)|"), gap, 0.0, 0.0, "float32"
    )
    factors = [10.0**k for k in range(-6, 3)]
    lines = {
        f"ε = {e:g}": (factors, [amplitude(normed(np.float32(c) * x, settings(epsilon=e))) for c in factors])
        for e in (1e-5, 1e-6, 1e-8)
    }
    caption = Words("Amplitude of RMSNorm(c x) for x of amplitude 1.", "x 幅度为 1 时 RMSNorm(c x) 的幅度。")
    yield Curves(caption, "c", "RMS", lines, log_x=True, log_y=True)


c03 = chapter.claim(
    "C03",
    "S0 §4.1, S3 §4.1",
    Verdict.OVERCLAIM,
    Words(
        "Whatever the input does, RMSNorm's output keeps a rock-solid amplitude.",
        "无论输入怎样变化，RMSNorm 输出的幅度始终稳固。",
    ),
    finding=Words(
        "Not for small inputs: at ε = 10⁻⁵ a thousandth gives amplitude {small:.3f}. Squares computed in float16 "
        "overflow at 300, and the output is {naive:.0f}; the library's, in float32, gives {half:.3f}, but overflows at "
        "10²⁰: {large:.0f}. And where one coordinate of 64 is 1000, the others together keep {rest:.4f}.",
        "输入很小时不然：ε = 10⁻⁵ 时千分之一的输入只得幅度 {small:.3f}。若以 float16 求平方，300 即溢出，"
        "输出为 {naive:.0f}；本库以 float32 求均方，得 {half:.3f}，但到 10²⁰ 也会溢出，输出 {large:.0f}。"
        "另外，64 个分量中若有一个为 1000，其余各分量的幅度只剩 {rest:.4f}。",
    ),
    uses=(norm, rms),
)


@c03.quick
def always_steady() -> Numbers:
    x, config = unit_rows(4), settings(epsilon=1e-5)
    label = Words("amplitude at 0.001 x, ε = 1e−5", "0.001 x 的输出幅度，ε = 1e−5")
    yield near("small", label, amplitude(normed(np.float32(1e-3) * x, config)), 11**-0.5, 1e-6, "float32")
    big = np.float16(300) * np.sign(x).astype(np.float16)
    label = Words("amplitude at ±300, float16 input", "±300 的输出幅度，float16 输入")
    yield near("half", label, amplitude(normed(big, config)), 1.0, 1e-3, "float16")
    with np.errstate(over="ignore"):
        naive = big / np.sqrt(np.mean(np.square(big), axis=-1, keepdims=True) + np.float16(1e-5))
    yield near("naive", Words("with squares in float16", "平方也用 float16 时"), amplitude(naive), 0.0, 0.0, "float16")
    large = amplitude(normed(np.float32(1e20) * x, config))
    yield near("large", Words("amplitude at 10²⁰ x, float32", "10²⁰ x 的输出幅度，float32"), large, 0.0, 0.0, "float32")
    spiked = x.copy()
    spiked[:, 0] = 1000
    label = Words("amplitude of 63 coordinates beside one of 1000", "一个分量为 1000 时其余 63 个的幅度")
    want = amplitude(spiked[:, 1:]) / np.sqrt((1000**2 + 63 * amplitude(spiked[:, 1:]) ** 2) / 64)
    yield near("rest", label, amplitude(normed(spiked, config)[:, 1:]), float(want), 1e-6, "float32")
    spiked[0, 0] = np.inf
    broken = np.mean(np.isnan(normed(spiked, config)[0, :1]))
    yield near("nan", Words("an infinite coordinate becomes NaN", "无穷大的分量变为 NaN"), broken, 1.0, 0.0, "float32")


c04 = chapter.claim(
    "C04",
    "S3 §6",
    Verdict.CONDITIONAL,
    Words("RMSNorm discards the mean, whose computation is redundant.", "RMSNorm 省去了多余的均值计算。"),
    formula=r"\mathrm{LayerNorm}(x) = \mathrm{RMSNorm}(x - \bar{x})",
    finding=Words(
        "Where the mean is about 0. RMSNorm of x less its mean is LayerNorm (difference {same:.0e}), but x + 3 moves "
        "LayerNorm by {ln:.0e} and RMSNorm by {rms:.2f}, most of whose output is then the mean: {mean:.3f}.",
        "前提是均值约为 0。x 减去均值后的 RMSNorm 就是 LayerNorm（差 {same:.0e}）；但输入改为 x + 3 时 LayerNorm 只变 "
        "{ln:.0e}，RMSNorm 却变 {rms:.2f}，输出大半成了均值：{mean:.3f}。",
    ),
    learned=Words(
        "In training little is lost: {loss_rmsnorm:.3f} nats with RMSNorm and {loss_layernorm:.3f} with LayerNorm "
        "(difference {gap_low:.3f} to {gap_high:.3f}).",
        "训练中损失不大：RMSNorm 为 {loss_rmsnorm:.3f} nat，LayerNorm 为 {loss_layernorm:.3f}"
        "（差值 {gap_low:.3f} 至 {gap_high:.3f}）。",
    ),
    uses=(norm, rms),
)


@c04.quick
def without_the_mean() -> Numbers:
    x, plain, centred = draws(5, 200, D), settings(), settings("layernorm")
    less = x - x.mean(axis=-1, keepdims=True)
    gap = np.max(np.abs(normed(less, plain) - normed(x, centred)))
    text = "max |RMSNorm(x − x̄) − LayerNorm(x)|"
    yield at_most("same", Words(text, text), gap, 2e-6, "float32")
    shifted = x + np.float32(3)
    gap = np.max(np.abs(normed(shifted, centred) - normed(x, centred)))
    # x + 3 is rounded to 2⁻²², of entries up to 4 after the norm.
    yield at_most("ln", Words("max |Δ LayerNorm| at x + 3", "x + 3 时 LayerNorm 的最大变动"), gap, 4e-6, "float32")
    y = normed(shifted, plain)
    gap = np.max(np.abs(y - normed(x, plain)))
    want = np.max(np.abs(by_hand(shifted, plain) - by_hand(x, plain)))
    yield near(
        "rms", Words("max |Δ RMSNorm| at x + 3", "x + 3 时 RMSNorm 的最大变动"), gap, float(want), 5e-6, "float32"
    )
    # 3/√(9 + 1), up to terms of 1/D.
    yield near("mean", Words("mean of RMSNorm(x + 3)", "RMSNorm(x + 3) 的均值"), np.mean(y), 0.9**0.5, 1 / D, "float32")
    yield shown("before", Words("mean of RMSNorm(x)", "RMSNorm(x) 的均值"), np.mean(normed(x, plain)), "float32")


c04.full(norms_trained.means_kept)
