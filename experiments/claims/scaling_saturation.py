"""Chapter B, its second part: softmax where its scores are large (S0 and S3 §3.2; S1 §2.2; S2 §4.3)."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims import scaling_trained
from experiments.claims.record import Curves, Numbers, Verdict, Words, at_least, at_most, near, shown
from experiments.claims.scaling_integrals import of_top, tail
from experiments.claims.scaling_variance import WIDTHS, chapter, dots, draws, heads, sampled
from transformer_jax.attention import attend
from transformer_jax.config import Config, Hyper
from transformer_jax.layers import Layer, Stack, apply_stack, init_stack
from transformer_jax.masks import padding
from transformer_jax.scores import Scoring, attention_scores, masked_softmax, score_factor


def reference_weights(q: np.ndarray, k: np.ndarray, factor: float) -> np.ndarray:
    """softmax(q·k factor), [B, T, S] from [B, T, 1, d] and [B, S, 1, d], in NumPy's float64."""
    scores = np.einsum("bthd,bshd->bts", q.astype(np.float64), k.astype(np.float64)) * factor
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def entropies(p: np.ndarray) -> np.ndarray:
    """-Σ p ln p over the last axis, in nats."""
    p = np.asarray(p, np.float64)
    return -np.sum(p * np.log(np.where(p > 0, p, 1)), axis=-1)


b09 = chapter.claim(
    "B09",
    "S0 §3.2, S3 §3.2",
    Verdict.CONDITIONAL,
    Words(
        "Softmax of a vector with +20 and −15 gives the largest 99.9999% and all others nothing.",
        "向量含 +20 与 −15 时，softmax 让最大者独占 99.9999%，其余全部为零。",
    ),
    formula=r"\frac{e^{20}}{e^{20} + e^{-15}} \approx 1 - 6.3 \times 10^{-16}",
    finding=Words(
        "Of those two alone; a third score of 19 would take {third:.0%}. Among 64 scores of standard deviation 8 the "
        "largest weight is {top64:.2f} on average, and above 0.999999 in {tail64:.1%} of rows (among 1,024 in "
        "{tail1024:.2%}).",
        "仅对这两个数成立；再加一个 19，它就分走 {third:.0%}。64 个标准差为 8 的得分中，"
        "最大权重平均为 {top64:.2f}，超过 0.999999 的行只占 {tail64:.1%}（1024 个得分时为 {tail1024:.2%}）。",
    ),
    uses=(masked_softmax,),
)


@b09.quick
def one_takes_all() -> Numbers:
    p = np.asarray(masked_softmax(jnp.array([20.0, -15.0]), None), np.float64)
    yield near("other", Words("weight of −15", "−15 的权重"), p[1], math.exp(-35), 1e-6 * math.exp(-35), "float32")
    yield near("first", Words("weight of +20", "+20 的权重"), p[0], 1.0, 0.0, "float32")
    p = masked_softmax(jnp.array([20.0, -15.0, 19.0]), None)
    yield near("third", Words("weight of a third, 19", "第三个得分 19 的权重"), p[2], 1 / (1 + math.e), 1e-6, "float32")
    run = jax.jit(weighed)
    for n, rows in ((10, 8192), (64, 32_768), (256, 24 * 2048), (1024, 48 * 2048)):
        tops, rests = (np.concatenate(of) for of in zip(*(run(8 * draws(n + i, 2048, n)) for i in range(rows // 2048)),
                                                        strict=True))  # fmt: skip
        label = Words(f"mean of the largest weight, {n} keys, σ = 8", f"最大权重的均值，{n} 个键，σ = 8")
        yield sampled(f"top{n}", label, tops, *of_top(n, 8.0))
        least, most = tail(n, 8.0, 1e-6)
        label = Words(f"rows with a weight above 0.999999, {n} keys", f"最大权重超过 0.999999 的行，{n} 个键")
        yield at_most(f"tail{n}", label, np.mean(rests < 1e-6), most + 5 * math.sqrt(most / rows), "float32")
        label = Words(f"the same, {n} keys", f"同上，{n} 个键")
        yield at_least(f"tail{n}_least", label, np.mean(rests < 1e-6), least - 5 * math.sqrt(least / rows), "float32")


def weighed(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of each row, the largest weight and the sum of the others: in float32 the former may be 1."""
    p = masked_softmax(scores, None)
    first = jnp.arange(p.shape[1])[None] == jnp.argmax(p, axis=1)[:, None]
    return jnp.max(p, axis=1), jnp.sum(jnp.where(first, 0, p), axis=1)


b10 = chapter.claim(
    "B10",
    "S0 §3.2, S3 §3.2",
    Verdict.IMPRECISE,
    Words("The derivative of softmax is p_i (1 − p_i).", "softmax 的导数是 p_i (1 − p_i)。"),
    formula=r"\frac{\partial p_i}{\partial s_j} = p_i (\delta_{ij} - p_j)",
    finding=Words(
        "That is the diagonal only. Of two weights the other entries are as large ({two:.3f} of it), of ten normal "
        "scores {ten:.0%} in Frobenius norm. Rows of the Jacobian sum to 0, and its rank is n − 1.",
        "那只是对角线。只有两个权重时，非对角元与之同大，比值 {two:.3f}；十个标准正态得分时，"
        "其 Frobenius 范数为对角线的 {ten:.0%}。雅可比矩阵每行之和为 0，秩为 n − 1。",
    ),
    uses=(masked_softmax,),
)


def slopes(scores: np.ndarray) -> np.ndarray:
    """The library's Jacobian ∂p_i/∂s_j of softmax at one row [n]: [n, n] in float64."""
    return np.asarray(jax.jit(jax.jacrev(lambda s: masked_softmax(s, None)))(jnp.asarray(scores)), np.float64)


def beside(J: np.ndarray) -> float:
    """Frobenius norm of what is off the diagonal over that of the diagonal."""
    diagonal = np.diag(np.diag(J))
    return float(np.linalg.norm(J - diagonal) / np.linalg.norm(diagonal))


@b10.quick
def jacobian() -> Numbers:
    s = draws(10, 10)
    J, p = slopes(s), np.exp(s.astype(np.float64)) / np.sum(np.exp(s.astype(np.float64)))
    label = Words("max |J − (diag p − p pᵀ)|, n = 10", "max |J − (diag p − p pᵀ)|，n = 10")
    yield at_most("formula", label, np.max(np.abs(J - (np.diag(p) - np.outer(p, p)))), 1e-7, "float32")
    yield near(
        "two", Words("off the diagonal, n = 2", "非对角元之比，n = 2"), beside(slopes(s[:2])), 1, 1e-6, "float32"
    )
    yield at_most("rows", Words("largest row sum", "行和的最大值"), np.max(np.abs(J.sum(axis=1))), 1e-7, "float32")
    values = np.linalg.eigvalsh((J + J.T) / 2)
    # n − 1 eigenvalues are at least min p² apart from 0; the last is rounding.
    yield near("rank", Words("rank", "秩"), np.sum(values > 1e-6), 9, dtype="float32")
    yield at_least("least", Words("least eigenvalue", "最小特征值"), values[0], -1e-7, "float32")
    yield shown("ten", Words("off the diagonal, n = 10", "非对角元之比，n = 10"), beside(J), "float32")


b11 = chapter.claim(
    "B11",
    "S0 §3.2, S3 §3.2",
    Verdict.TRUE,
    Words(
        "Where a weight nears 1 or 0, its derivative by its own score nears 0.",
        "权重趋于 1 或 0 时，它对自身得分的导数趋于 0。",
    ),
    formula=r"\lim_{p \to 1} p (1 - p) = \lim_{p \to 0} p (1 - p) = 0",
    uses=(masked_softmax,),
)


@b11.quick
def at_the_ends() -> Numbers:
    for k in (2, 4, 6):
        other = 10.0**-k
        J = slopes(np.array([math.log((1 - other) / other), 0.0], np.float32))
        for name, i, end in ((f"one{k}", 0, f"1 − 10^−{k}"), (f"zero{k}", 1, f"10^−{k}")):
            label = Words(f"∂p/∂s at p = {end}", f"p = {end} 处的 ∂p/∂s")
            # 1 − p of a float32 p near 1 is right to 2⁻²⁴; the score's own rounding adds 1e-6 of the value.
            yield near(name, label, J[i, i], other * (1 - other), 2.0**-23 + 1e-6 * other, "float32")


b12 = chapter.claim(
    "B12",
    "S0 §3.2, S3 §3.2, S1 §2.2, S2 §4.3",
    Verdict.WRONG,
    Words(
        "Without the division all gradients of backpropagation vanish, and the network stops learning.",
        "若不除以 √d_k，反向传播的所有梯度都会消失，网络无法学习。",
    ),
    formula=r"\frac{\partial L}{\partial q} = c\, K^\top (\mathrm{diag}(p) - p p^\top)\, V g,\quad "
    r"\frac{\partial L}{\partial v_j} = p_j\, g",
    finding=Words(
        "The gradients of the values cannot all vanish: they are p_j g, and sum to the output's g (to {values:.0e}); "
        "and the residual connection passes on g itself, {residual:.2f} of it through a layer whose weights are all 0 "
        "or 1. "
        "That of the query is larger without the division, as the factor 1/√d_k multiplies it, too: {off64:.1f} "
        "against {on64:.2f} with 64 keys, {off1024:.1f} against {on1024:.2f} with 1,024. Softmax's own Jacobian "
        "shrinks "
        "with 10 keys (mean norm {jacobian10_off:.3f} against {jacobian10_on:.3f}) and grows with 1,024 "
        "({jacobian1024_off:.3f} against {jacobian1024_on:.3f}). What shrinks is the lower tail: the query's tenth "
        "percentile with 10 keys is {low_off:.4f} against {low_on:.2f}.",
        "值向量的梯度不可能全部消失：它们是 p_j g，总和恒等于输出的梯度 g（误差 {values:.0e}）；"
        "残差连接则原样传回 g：权重只有 0 和 1 的一层仍传回其 {residual:.2f}。不做缩放时查询的梯度平均反而更大，"
        "因为因子 1/√d_k 也乘在梯度上：64 个键时为 {off64:.1f} 对 {on64:.2f}，1024 个键时为 {off1024:.1f} 对 "
        "{on1024:.2f}。softmax 自身的雅可比矩阵，10 个键时变小（平均范数 {jacobian10_off:.3f} 对 "
        "{jacobian10_on:.3f}），1024 个键时反而变大（{jacobian1024_off:.3f} 对 {jacobian1024_on:.3f}）。"
        "真正变小的是下尾：10 个键时查询梯度的第 10 百分位为 {low_off:.4f} 对 {low_on:.2f}。",
    ),
    uses=(attend, masked_softmax, apply_stack),
)
# The means of ‖J‖_F by the number of keys, for scores of σ = 1 and 8, of an independent measurement.
JACOBIANS = {10: (0.348, 0.162), 64: (0.184, 0.210), 1024: (0.051, 0.251)}
# Tenth percentiles of ‖dL/dq‖ with 10 keys: of 400,000 rows by query_gradient, below.
TENTHS = {"on": 1.320, "off": 0.00595}
ARMS = (("on", 0.5, Words("scaled", "缩放")), ("off", 0.0, Words("unscaled", "不缩放")))


def back() -> Callable[..., tuple[jax.Array, jax.Array]]:
    """A function (q, k, v, g, exponent) -> (dL/dq, dL/dv) of L = g·attend(q, k, v), by the library."""

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, exponent: jax.Array) -> jax.Array:
        out = attend(q, k, v, scoring=Scoring(dk_exponent=exponent))
        assert isinstance(out, jax.Array)
        return jnp.sum(out * g)

    return jax.jit(jax.grad(loss, argnums=(0, 2)))


def query_gradient(q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, factor: float) -> np.ndarray:
    """dL/dq [B, d] of L = g·softmax(q·k factor) v, by its formula in float64."""
    p = reference_weights(q, k, factor)[:, 0]
    into = np.einsum("bshd,bthd->bs", v.astype(np.float64), g.astype(np.float64))
    moved = p * (into - np.sum(p * into, axis=1, keepdims=True))
    return factor * np.einsum("bs,bshd->bd", moved, k.astype(np.float64))


@b12.quick
def gradients() -> Numbers:
    slope = back()
    lines: dict[str, list[float]] = {"on": [], "off": []}
    worst = wrong = 0.0
    counts = {10: (40, 1000), 64: (1, 400), 256: (1, 100), 1024: (4, 50)}  # keys -> batches of rows
    for n, (batches, rows) in counts.items():
        every: dict[str, list[np.ndarray]] = {"on": [], "off": []}
        for batch in range(batches):
            (q, g), (k, v) = (draws(n + i + 2 * batch, 2, rows, m, 1, 64) for i, m in enumerate((1, n)))
            for name, exponent, _ in ARMS:
                dq, dv = slope(q, k, v, g, jnp.float32(exponent))
                every[name].append(np.linalg.norm(np.asarray(dq[:, 0, 0], np.float64), axis=1))
                if batch:
                    continue
                wrong = max(wrong, float(np.max(np.abs(dq[:, 0, 0] - query_gradient(q, k, v, g, 64**-exponent)))))
                worst = max(worst, float(np.max(np.abs(np.sum(np.asarray(dv, np.float64), axis=1) - g[:, 0]))))
        sizes = {name: np.concatenate(parts) for name, parts in every.items()}
        for name, _, kind in ARMS:
            lines[name].append(float(np.mean(sizes[name])))
            label = Words(f"mean ‖dL/dq‖, {kind.en}, {n} keys", f"‖dL/dq‖ 均值，{kind.zh}，{n} 个键")
            yield shown(f"{name}{n}", label, lines[name][-1], "float32")
            if n == 10:
                label = Words(f"tenth percentile, {kind.en}, 10 keys", f"第 10 百分位，{kind.zh}，10 个键")
                yield shown(f"low_{name}", label, np.percentile(sizes[name], 10), "float32")
                label = Words(f"rows below {TENTHS[name]}, {kind.en}", f"低于 {TENTHS[name]} 的行，{kind.zh}")
                # A binomial share, of rows here and of ten times as many there.
                error = 5 * math.sqrt(1.1 * 0.1 * 0.9 / len(sizes[name]))
                yield near(f"tenth_{name}", label, np.mean(sizes[name] <= TENTHS[name]), 0.1, error, "float32")
        ratio = np.mean(sizes["off"]) / np.mean(sizes["on"])
        label = Words(f"unscaled over scaled mean ‖dL/dq‖, {n} keys", f"不缩放与缩放的 ‖dL/dq‖ 均值之比，{n} 个键")
        # The weights' derivative shrinks to no less than 0.46 of it, the factor grows by 8.
        yield at_least(f"ratio{n}", label, ratio, 2.0, "float32")
        if n == 10:
            label = Words("unscaled over scaled tenth percentile, 10 keys", "不缩放与缩放的第 10 百分位之比，10 个键")
            low = {name: np.percentile(size, 10) for name, size in sizes.items()}
            yield at_most("tail", label, low["off"] / low["on"], 0.1, "float32")
    label = Words("max |Σ_j dL/dv_j − g|", "max |Σ_j dL/dv_j − g|")
    yield at_most("values", label, worst, 1e-5, "float32")
    # Entries up to 100, sums of 64 to 256 terms.
    yield at_most("formula", Words("max |dL/dq − its formula|", "max |dL/dq − 公式|"), wrong, 2e-3, "float32")
    yield from jacobians()
    # The residual connection's part is 1; what the values and the feed-forward net add has no direction: less than
    # √1.5 of g, in 16 rows of 64.
    query, direct = past_saturation()
    label = Words("max |dL/dW_q| of a layer whose weights are 0 and 1", "权重只有 0 和 1 的一层的 max |dL/dW_q|")
    yield near("none", label, query, 0.0, dtype="float32")
    label = Words("its dL/dx·g/‖g‖²", "该层的 dL/dx·g/‖g‖²")
    yield near("residual", label, direct, 1.0, 5 * math.sqrt(1.5 * (1 / 16 + 1 / 64) / 64), "float32")
    caption = Words("Mean ‖dL/dq‖ by the number of keys, d_k = 64.", "‖dL/dq‖ 均值随键数的变化，d_k = 64。")
    named = {"1/√d_k": (list(counts), lines["on"]), "1": (list(counts), lines["off"])}
    yield Curves(caption, "n", "‖dL/dq‖", named, log_x=True, log_y=True)


def jacobians() -> Numbers:
    """The mean Frobenius norm of softmax's Jacobian: Σp² − 2Σp³ + (Σp²)² under the root."""
    size = jax.jit(lambda s: jacobian_size(masked_softmax(s, None)))
    for n, wanted in JACOBIANS.items():
        rows = 20_000 if n == 10 else 5000
        s = draws(100 + n, rows, n)
        for (name, _, kind), sigma, want in zip(ARMS, (1, 8), wanted, strict=True):
            found = np.asarray(size(np.float32(sigma) * s), np.float64)
            # It lies between 0 and ½, so that its variance is m (½ − m) at most; both means are samples.
            error = 5 * math.sqrt(2 * want * (0.5 - want) / rows)
            label = Words(f"mean ‖J‖_F, {kind.en}, {n} keys", f"‖J‖_F 均值，{kind.zh}，{n} 个键")
            yield near(f"jacobian{n}_{name}", label, np.mean(found), want, error, "float32")
            if n == 10:
                label = Words(f"‖J‖² by formula less by derivatives, {kind.en}", f"‖J‖²：公式与导数之差，{kind.zh}")
                off = abs(np.linalg.norm(slopes(np.float32(sigma) * s[0])) ** 2 - found[0] ** 2)
                yield at_most(f"jacobian_{name}", label, off, 16 * 2.0**-24, "float32")


def jacobian_size(p: jax.Array) -> jax.Array:
    """‖diag p − p pᵀ‖_F of rows [R, n]."""
    squares = jnp.sum(p**2, axis=-1)
    return jnp.sqrt(jnp.maximum(squares - 2 * jnp.sum(p**3, axis=-1) + squares**2, 0))


def past_saturation() -> tuple[float, float]:
    """max |dL/dW_q|, and the part of the output's gradient g left along g at the input, of a layer of 16 tokens.

    All attend to the first alone, the end of all saturation.
    """
    config = Config(d_model=64, num_heads=1, d_ff=128, positions="none")
    layers = init_stack(jax.random.key(0), config, 1, cross=False).layers
    x, g = draws(120, 2, 1, 16, 64)

    def loss(layers: Layer, x: jax.Array) -> jax.Array:
        places, mask = jnp.arange(16, dtype=jnp.int32)[None], padding(jnp.ones(1, jnp.int32))
        y, _ = apply_stack(Stack(layers, None), x, config, Hyper(dk_exponent=0.0), mask=mask, positions_BT=places)
        return jnp.sum(y * g)

    of_layers, of_x = jax.jit(jax.grad(loss, argnums=(0, 1)))(layers, x)
    return np.max(np.abs(of_layers.attention.wq_DNH)), np.sum(of_x * g) / np.sum(g * g)


b13 = chapter.claim(
    "B13",
    "S0 §3.2, S3 §3.2, S2 §4.3",
    Verdict.EMPIRICAL,
    Words("A model trained without the division cannot learn.", "不做缩放的模型无法训练。"),
    finding=Words(
        "It learns, less well. A model with one head of 64, each arm at the best of the rates tried, ends at "
        "{loss_off:.3f} nats a byte without the division and at {loss_on:.3f} with it (difference {low:.3f} to "
        "{high:.3f}); before the first "
        "step the query's mean gradient is {gradients:.1f} times as large without. Dividing by d_k gives "
        "{loss_twice:.3f} (by {twice_lower:.3f} to {twice_upper:.3f}): √d_k is not the best here.",
        "能学，只是较差。单头、头维度 64 的模型各取所试学习率中最好的：不缩放时损失为每字节 {loss_off:.3f} nat，"
        "缩放时为 {loss_on:.3f}（差值 {low:.3f} 至 {high:.3f}）；训练之前，不缩放时查询梯度的均值是缩放时的 "
        "{gradients:.1f} 倍。除以 d_k 则得 {loss_twice:.3f}（差值 {twice_lower:.3f} 至 {twice_upper:.3f}）："
        "√d_k 在此并非最优。",
    ),
    uses=(attend, score_factor),
)
b13.full(scaling_trained.learns_unscaled)


b14 = chapter.claim(
    "B14",
    "S2 §4.3",
    Verdict.IMPRECISE,
    Words(
        "As the variance grows, the gradients of all but the largest score become tiny.",
        "方差变大时，除最大得分之外，其余得分的梯度都变得极小。",
    ),
    finding=Words(
        "The largest score's own derivative is as small: with a lead of 8 both are {top:.2e}. It cannot be otherwise, "
        "as each row of the Jacobian sums to 0.",
        "最大得分自身的导数同样小：领先 8 时两者都是 {top:.2e}。雅可比矩阵每行之和为 0，只能如此。",
    ),
    formula=r"\frac{\partial p_m}{\partial s_m} = -\sum_{j \ne m} \frac{\partial p_m}{\partial s_j}",
    uses=(masked_softmax,),
)


@b14.quick
def of_the_largest() -> Numbers:
    J, want = slopes(np.array([8.0, 0.0], np.float32)), 1 / (2 + 2 * math.cosh(8))
    yield near("top", Words("∂p/∂s of the largest, lead 8", "最大者的 ∂p/∂s，领先 8"), J[0, 0], want, 2e-7, "float32")
    yield near("other", Words("of the other", "另一个的 ∂p/∂s"), J[1, 1], want, 2e-7, "float32")
    s = 8 * draws(14, 64)
    J, m = slopes(s), int(np.argmax(s))
    label = Words("|Σ_j ∂p_m/∂s_j|, 64 scores of σ = 8", "|Σ_j ∂p_m/∂s_j|，64 个 σ = 8 的得分")
    yield at_most("sum", label, abs(np.sum(J[m])), 1e-6, "float32")


b15 = chapter.claim(
    "B15",
    "S1 §2.2, S2 §4.3",
    Verdict.IMPRECISE,
    Words("With a larger d_k the dot products become very large, or very small.", "d_k 越大，点积就变得极大，或极小。"),
    formula=r"\sigma(q \cdot k) = \sqrt{d_k}",
    finding=Words(
        "They spread: the mean stays 0, and the standard deviation grows as d_k to the power {slope:.3f}.",
        "变的是离散程度：均值保持为 0，标准差按 d_k 的 {slope:.3f} 次幂增长。",
    ),
    uses=(attention_scores,),
)


@b15.quick
def spread() -> Numbers:
    lines = {}
    for name, exponent in (("q·k", 0.0), ("q·k/√d_k", 0.5), ("q·k/d_k", 1.0)):
        deviations = [float(np.sqrt(np.mean(dots(*heads(d), exponent) ** 2))) for d in WIDTHS]
        lines[name] = (list(WIDTHS), deviations)
        slope = np.polyfit(np.log(WIDTHS), np.log(deviations), 1)[0]
        label = Words(f"slope of ln σ by ln d_k, {name}", f"ln σ 对 ln d_k 的斜率，{name}")
        # Each σ is right to 0.4 %, over a range of ln 32: five standard errors are 0.0075.
        yield near("slope" if exponent == 0 else f"slope{exponent:g}", label, slope, 0.5 - exponent, 0.0075, "float32")
    caption = Words("Standard deviation of the scores.", "得分的标准差。")
    yield Curves(caption, "d_k", "σ", lines, log_x=True, log_y=True)
