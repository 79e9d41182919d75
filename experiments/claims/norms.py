"""Chapter C: gradients in depth, residual connections, LayerNorm (S1 §4.3; S2 §7)."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims import norms_trained
from experiments.claims.norms_depth import (
    ADDED,
    DEEP,
    DIRECT,
    ONE_TOKEN,
    chain,
    every,
    expected_chain,
    foreseen,
    layer,
    of_chain,
    passes,
    rows,
    spreads,
    stacks,
    tanh_chain,
)
from experiments.claims.norms_rms import by_hand, normed, settings
from experiments.claims.norms_stream import chapter
from experiments.claims.record import Curves, Numbers, Verdict, Words, at_least, at_most, near, shown
from experiments.claims.scaling_variance import draws
from transformer_jax.ffn import ffn, init_ffn
from transformer_jax.layers import apply_stack, init_stack
from transformer_jax.norms import Norm, norm, rms

c08 = chapter.claim(
    "C08",
    "S1 §4.3, S2 §7",
    Verdict.CONDITIONAL,
    Words(
        "Without residual connections and norms, gradients grow or decay exponentially with the number of layers.",
        "若没有残差连接和归一化，梯度会随层数指数式地增大或衰减。",
    ),
    formula=r"\frac{\|\partial L / \partial x_0\|}{\|\partial L / \partial x_L\|} \approx "
    r"\left(\frac{g^2}{2}\right)^{L/2}, "
    r"\quad \mathrm{Var}(W_1) = \frac{g^2}{d}, \; \mathrm{Var}(W_2) = \frac{1}{d_{ff}}",
    finding=Words(
        "It depends on how the weights are drawn. A chain of ReLU nets multiplies the gradient by {g1:.2f} a layer if "
        "they have variance 1/fan-in, by {g2:.2f} with twice that in the first of each pair (He), by {g4:.2f} with "
        "four times; norms alone, without a residual connection, leave it {normed1:.2f} and {normed2:.2f} a layer "
        "whatever "
        "the variance. A residual connection alone makes it worse: {none:.2f} a layer, and the variance of what passes "
        "forwards grows {forward:.2f}-fold a layer, to {explodes:.0e} after 24; with norms, {pre:.3f}.",
        "取决于权重如何初始化：ReLU 网络串联时，权重方差取 1/fan-in 则每层乘以 {g1:.2f}，"
        "每对中第一个矩阵的方差加倍（He）则为 {g2:.2f}，取四倍则为 {g4:.2f}。"
        "只加归一化而无残差时，无论方差多大，每层都约为 {normed1:.2f}、{normed2:.2f}。"
        "单有残差连接反而更糟：每层 {none:.2f} 倍，前向的方差每层乘以 {forward:.2f}，24 层后达 {explodes:.0e}；"
        "再加归一化则为 {pre:.3f}。",
    ),
    uses=(ffn, init_ffn, apply_stack, init_stack),
)


@c08.quick
def by_initialisation() -> Numbers:
    for name, gain in (("g1", 1.0), ("g2", 2**0.5), ("g4", 2.0)):
        label = Words(
            f"factor a layer, first variance {gain**2:.0f}/fan-in", f"每层的倍数，首个矩阵方差 {gain**2:.0f}/fan-in"
        )
        yield foreseen(name, label, chain("relu", gain), gain * 0.5**0.5, of_chain())
    for name, gain in (("normed1", 1.0), ("normed2", 2.0)):
        # LayerNorm divides by what the net multiplies, and takes off 2 of D directions.
        label = Words(f"norms, no residual, variance {gain**2:.0f}/fan-in", f"只有归一化，方差 {gain**2:.0f}/fan-in")
        yield foreseen(name, label, chain("relu", gain, normed=True), (1 - 2 / ONE_TOKEN.D) ** 0.5, of_chain())
    squares = passes(ONE_TOKEN.replace(norm_placement="none"))[DEEP].squares[:, DEEP]
    label = Words("factor of the variance a layer, residual without norms", "有残差、无归一化时方差每层的倍数")
    yield foreseen("forward", label, squares ** (1 / DEEP), 3.0, spreads("none", DEEP).square / DEEP)
    yield shown("explodes", Words("that variance after 24 layers", "24 层后的方差"), np.mean(squares), "float32")
    for placement, want, text in (
        ("none", 3**0.5, Words("residual without norms", "有残差，无归一化")),
        ("pre", 1.0, Words("residual and norms", "残差加归一化")),
    ):
        gain = passes(ONE_TOKEN.replace(norm_placement=placement))[DEEP].gain
        label = Words(f"factor a layer, {text.en}", f"每层的倍数，{text.zh}")
        yield foreseen(placement, label, gain ** (1 / DEEP), want, spreads(placement, DEEP).gain / DEEP)


c09 = chapter.claim(
    "C09",
    "S2 §7, S2 §7.1",
    Verdict.OVERCLAIM,
    Words(
        "Thanks to the shortcuts of LayerNorm(x + Sublayer(x)), training stays stable in deep models.",
        "有了 LayerNorm(x + Sublayer(x)) 中的残差捷径，层数加深训练也能保持稳定。",
    ),
    formula=r"\mathrm{Output} = \mathrm{LayerNorm}(x + \mathrm{Sublayer}(x))",
    finding=Words(
        "Of this placement the last layers' gradients do not shrink with depth: from 12 to 24 layers they become "
        "{post:.2f} times smaller, with norms before the sub-layers {pre:.2f} times, as 1/√L. A rate that suits a "
        "shallow model is then too large for a deep one, which is the usual reason given for warm-up.",
        "采用这种位置时，最后几层的梯度不随深度变小：从 12 层到 24 层只缩小到 1/{post:.2f}；归一化在子层之前时则缩小到 "
        "1/{pre:.2f}，即按 1/√L。因此适合浅层模型的学习率对深层模型过大，这是通常给出的预热理由。",
    ),
    learned=Words(
        "Six layers, four rates: {stuck_post0:.0f} of {runs:.0f} runs learn no more than byte frequencies "
        "({diverged_post0:.0f} diverge), with 100 steps of warm-up {stuck_post100:.0f}, with norms before the "
        "sub-layers {stuck_pre0:.0f}. Warm-up changes the mean over the rates by {warmed_lower:+.2f} "
        "to {warmed_upper:+.2f} nats; at a rate of 0.0045 it is {at00045_post0:.2f}, {at00045_post100:.2f} and "
        "{at00045_pre0:.2f}, at the best {loss_post0:.3f}, {loss_post100:.3f} and {loss_pre0:.3f}. Depth and steps "
        "were set after a first look: at 12 layers no run with norms after the sums learnt more in 200 steps.",
        "6 层、4 种学习率：{runs:.0f} 次训练中有 {stuck_post0:.0f} 次所学不超过字节频率（{diverged_post0:.0f} 次发"
        "散），预热 100 步后为 {stuck_post100:.0f} 次，归一化在子层之前时为 {stuck_pre0:.0f} 次。预热使各学习率的平均"
        "损失改变 {warmed_lower:+.2f} 至 {warmed_upper:+.2f} nat；学习率 0.0045 时平均损失依次为 {at00045_post0:.2f}、"
        "{at00045_post100:.2f} 与 {at00045_pre0:.2f}，各取最佳学习率则为 {loss_post0:.3f}、{loss_post100:.3f} 与 "
        "{loss_pre0:.3f}。层数与步数是看过初步结果后定下的：12 层时，归一化在后的训练 200 步后无一学到更多。",
    ),
    uses=(apply_stack, init_stack, norm),
)


@c09.quick
def last_gradients() -> Numbers:
    lines = {}
    for placement, want, text in (
        ("post", 1.0, Words("norm after", "归一化在后")),
        ("pre", ((1 + ADDED * DEEP) / (1 + ADDED * 12)) ** 0.5, Words("norm before", "归一化在前")),
    ):
        found = passes(ONE_TOKEN.replace(norm_placement=placement))
        label = Words(f"last layer's ‖g‖, L = 12 over 24, {text.en}", f"末层 ‖g‖，L = 12 与 24 之比，{text.zh}")
        yield foreseen(
            placement,
            label,
            found[12].last / found[DEEP].last,
            want,
            math.hypot(*(spreads(placement, L).last for L in (12, DEEP))),
        )
        label = Words(
            f"‖g‖ of the first layer over the last, L = 24, {text.en}", f"首层与末层 ‖g‖ 之比，L = 24，{text.zh}"
        )
        yield shown(f"{placement}_ratio", label, np.mean(found[DEEP].first / found[DEEP].last), "float32")
        lines[placement] = (list(found), [float(np.mean(one.last)) for one in found.values()])
    caption = Words("Norm of the last layer's gradient by depth.", "末层梯度的范数随深度的变化。")
    yield Curves(caption, "L", "‖g‖", lines, log_x=True, log_y=True)


c09.full(norms_trained.stable_in_depth)


c10 = chapter.claim(
    "C10",
    "S1 §4.3, S2 §7.1",
    Verdict.CONDITIONAL,
    Words(
        "A residual connection gives gradients a direct way to the first layers.", "残差连接让梯度能沿捷径直达浅层。"
    ),
    formula=r"\frac{\partial L}{\partial x} = \frac{\partial L}{\partial y} (I + F'(x))",
    finding=Words(
        "With norms before the sub-layers, where the direct part is divided once, by the final norm: {pre4:.2f} of it "
        "is left after 4 layers, as 1/√(1 + 1.5 L). After each sum the norm's own Jacobian stands in the way, two a "
        "layer: {post4:.2f} is left, as 3^(−L/2).",
        "归一化在子层之前时成立：直通部分只被最后的归一化除一次，4 层后还剩 {pre4:.2f}，即 1/√(1 + 1.5 L)。"
        "放在相加之后，每层有两个归一化的雅可比矩阵挡在路上：4 层后只剩 {post4:.2f}，即 3^(−L/2)。",
    ),
    uses=(apply_stack, init_stack, norm),
)


@c10.quick
def direct_path() -> Numbers:
    x, g = rows()
    for placement, text in (("pre", Words("norm before", "归一化在前")), ("post", Words("norm after", "归一化在后"))):
        found = passes(ONE_TOKEN.replace(norm_placement=placement))
        for L in (4, 1, 2):
            want = (1 + ADDED * L) ** -0.5 if placement == "pre" else 3 ** (-L / 2)
            label = Words(f"direct part of dL/dx, {L} layers, {text.en}", f"dL/dx 的直通部分，{L} 层，{text.zh}")
            yield foreseen(f"{placement}{L}", label, found[L].direct, want, DIRECT / want)
    for placement in ("pre", "post"):
        gap = np.max(np.abs(through_nothing(placement, 3 * x, g) - expected_of_nothing(placement, 3 * x, g)))
        label = Words(
            f"max |Δ dL/dx| where F = 0, {placement}-norm",
            f"F = 0 时 dL/dx 的误差，归一化{'在前' if placement == 'pre' else '在后'}",
        )
        yield at_most(f"{placement}0", label, gap, 0.0 if placement == "pre" else 2e-6, "float32")


def through_nothing(placement: str, x: np.ndarray, g: np.ndarray) -> np.ndarray:
    """dL/dx of a layer whose sub-layers give 0, for dL/dy = g; no norm after the stack."""
    config = ONE_TOKEN.replace(norm_placement=placement)
    first = jax.tree.map(lambda leaf: leaf[:, 0], stacks(config).layers)
    silent = dataclasses.replace(
        first,
        attention=dataclasses.replace(first.attention, wo_NHD=0 * first.attention.wo_NHD),
        ffn=dataclasses.replace(first.ffn, w2_FD=0 * first.ffn.w2_FD),
    )
    return np.asarray(layer(config)(silent, every(x), every(g))[1][0])


def expected_of_nothing(placement: str, x: np.ndarray, g: np.ndarray) -> np.ndarray:
    """g itself with norms before; after, LayerNorm's Jacobian twice, in float64."""
    y, slope, passed = x.astype(np.float64), g.astype(np.float64), []
    for _ in range(2 if placement == "post" else 0):
        root = np.sqrt(y.var(axis=-1, keepdims=True) + ONE_TOKEN.norm_epsilon)
        y = (y - y.mean(axis=-1, keepdims=True)) / root
        passed.append((y, root))
    for y, root in reversed(passed):
        along = np.mean(slope * y, axis=-1, keepdims=True)
        slope = (slope - slope.mean(axis=-1, keepdims=True) - y * along) / root
    return slope


c11 = chapter.claim(
    "C11",
    "S2 §7.2",
    Verdict.TRUE,
    Words(
        "LayerNorm takes mean and variance of a token's coordinates, with 1/d, and ε inside the root; then it scales "
        "and shifts.",
        "LayerNorm 对单个词元的各分量求均值与方差（除以 d），ε 在根号内，再做缩放与平移。",
    ),
    formula=r"\mathrm{LN}(x) = \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} \odot \gamma + \beta,\quad "
    r"\sigma^2 = \frac{1}{d} \sum_i (x_i - \mu)^2",
    finding=Words(
        "Not every implementation does: with the unbiased deviation and ε outside the root, results move by {d8:.3f} "
        "at d = 8 and by {d512:.4f} at 512.",
        "并非所有实现都如此：若用无偏标准差且把 ε 放在根号外，d = 8 时结果相差 {d8:.3f}，d = 512 时相差 {d512:.4f}。",
    ),
    uses=(norm,),
)


@c11.quick
def layer_norm() -> Numbers:
    # Mean 3, variance 14/4; with ε = ½ the root is 2. With 14/3 it would be 2.27, with ε outside 2.37.
    config = settings("layernorm", 0.5, 4)
    y = norm(
        Norm(jnp.array([1.0, 1.0, 1.0, 2.0]), jnp.array([0.0, 0.0, 0.0, 5.0])), jnp.array([[[1.0, 2, 3, 6]]]), config
    )
    for name, i, want in (("first", 0, -1.0), ("last", 3, 8.0)):
        label = Words(f"LN of (1, 2, 3, 6), coordinate {i + 1}, ε = ½", f"(1, 2, 3, 6) 的 LN 第 {i + 1} 分量，ε = ½")
        yield near(name, label, y[0, 0, i], want, 2e-6, "float32")
    for d, low, high in ((8, 0.05, 0.3), (512, 0.001, 0.01)):
        config, x = settings("layernorm", 1e-6, d), 2 * draws(d, 50, d) + 1
        y = normed(x, config)
        gap = np.max(np.abs(y - by_hand(x, config)))
        label = Words(f"max |Δ| to float64 loops, d = {d}", f"与 float64 逐行计算之差，d = {d}")
        yield at_most(f"loops{d}", label, gap, 5e-6, "float32")
        other = (x - x.mean(axis=-1, keepdims=True)) / (x.std(axis=-1, keepdims=True, ddof=1) + 1e-6)
        label = Words(f"max |Δ| to the other way, d = {d}", f"与另一种写法之差，d = {d}")
        # 1 − √(1 − 1/d) of the largest entry, which is between 1.5 and 5.
        yield at_least(f"d{d}", label, np.max(np.abs(y - other)), low, "float32")
        yield at_most(f"below{d}", label, np.max(np.abs(y - other)), high, "float32")


c12 = chapter.claim(
    "C12",
    "S2 §7.2",
    Verdict.TRUE,
    Words(
        "Normalising each token by itself, unlike over a batch, does not depend on the batch's size or its lengths.",
        "逐词元归一化与按批次归一化不同，不依赖批次大小，也不依赖其中序列的长度。",
    ),
    finding=Words(
        "A token's output is the same in a batch of 1 and of 64, to {layernorm:.0e}. Statistics over a batch move it "
        "by {batch:.2f}.",
        "同一词元在批次为 1 与 64 时输出相同（差 {layernorm:.0e}）；若按批次统计，则变动 {batch:.2f}。",
    ),
    uses=(norm,),
)


@c12.quick
def alone_or_in_a_batch() -> Numbers:
    params = Norm(jnp.asarray(draws(8, 64)), jnp.asarray(draws(9, 64)))
    x = draws(7, 64, 10, 64) * np.arange(1, 65, dtype=np.float32)[:, None, None]
    for kind in ("layernorm", "rmsnorm"):
        config = settings(kind)
        of = params if kind == "layernorm" else Norm(params.scale_D, None)
        many = np.asarray(norm(of, jnp.asarray(x), config))
        label = Words(f"max |Δ|, batch of 1 or 64, {kind}", f"批次 1 与 64 之差的最大值，{kind}")
        # Entries are below 8: two of their last places.
        gap = np.max(np.abs(many[:1] - norm(of, jnp.asarray(x[:1]), config)))
        yield at_most(kind, label, gap, 2.0**-20, "float32")
        gap = np.max(np.abs(many[:, :3] - norm(of, jnp.asarray(x[:, :3]), config)))
        label = Words(f"max |Δ|, rows of 3 or 10 tokens, {kind}", f"长 3 与长 10 之差的最大值，{kind}")
        yield at_most(f"length_{kind}", label, gap, 2.0**-20, "float32")

    def over_batch(x: np.ndarray) -> np.ndarray:
        return (x - x.mean(axis=(0, 1))) / np.sqrt(x.var(axis=(0, 1)) + 1e-6)

    gap = np.max(np.abs(over_batch(x[:2])[:1] - over_batch(x)[:1]))
    yield at_least(
        "batch", Words("max |Δ|, batch statistics of 2 or 64", "批次统计：2 与 64 之差"), gap, 0.1, "float32"
    )


c13 = chapter.claim(
    "C13",
    "S1 §4.3",
    Verdict.EMPIRICAL,
    Words(
        "Gradients used to vanish because of tanh; the Transformer avoids it with ReLU, LayerNorm and residual "
        "connections.",
        "tanh 时代梯度消失是常事；Transformer 靠 ReLU、LayerNorm 与残差连接来避免。",
    ),
    formula=r"\chi = E[f'(\sqrt{q} z)^2],\quad q \leftarrow E[f(\sqrt{q} z)^2]",
    finding=Words(
        "ReLU alone does not do it. Through 24 plain nets with weights of variance 1/fan-in, a gradient keeps "
        "{tanh:.2f} of its norm a layer with tanh, {relu:.2f} with ReLU, {gelu:.2f} with GELU and {silu:.2f} with SiLU "
        "(with He's twice that variance, ReLU keeps 1: C08). With residuals and norms ReLU keeps {with_norms:.3f}.",
        "单靠 ReLU 不够。权重方差为 1/fan-in 的 24 个普通网络串联时，梯度每层保留：tanh {tanh:.2f}、"
        "ReLU {relu:.2f}、GELU {gelu:.2f}、SiLU {silu:.2f}"
        "（按 He 初始化把方差加倍，ReLU 约为 1，见 C08）。有了残差与归一化，ReLU 每层保留 "
        "{with_norms:.3f}。",
    ),
    learned=Words(
        "With them the choice matters little: {loss_relu:.3f} nats with ReLU, {loss_gelu:.3f} with GELU, "
        "{loss_silu:.3f} with SiLU and {loss_swiglu:.3f} with SwiGLU, at equal parameters.",
        "有了它们，选哪种激活函数差别不大：参数量相同时，ReLU {loss_relu:.3f} nat，GELU {loss_gelu:.3f}，"
        "SiLU {loss_silu:.3f}，SwiGLU {loss_swiglu:.3f}。",
    ),
    uses=(ffn, init_ffn, apply_stack, init_stack),
)


@c13.quick
def activations() -> Numbers:
    for kind in ("relu", "gelu", "silu", "tanh"):
        label = Words(f"factor a layer without residual and norm, {kind}", f"无残差与归一化时每层的倍数，{kind}")
        yield foreseen(kind, label, tanh_chain() if kind == "tanh" else chain(kind), expected_chain(kind), of_chain())
    gain = passes(ONE_TOKEN)[DEEP].gain ** (1 / DEEP)
    label = Words("with residual and norms before, relu", "有残差、归一化在前，relu")
    yield foreseen("with_norms", label, gain, 1.0, spreads("pre", DEEP).gain / DEEP)


c13.full(norms_trained.activations)


c14 = chapter.claim(
    "C14",
    "derived (S0 §4.1, S3 §4.1)",
    Verdict.TRUE,
    Words(
        "As RMSNorm ignores the length of x, its Jacobian maps x to 0, and at cx it is 1/c of that at x.",
        "RMSNorm 与 x 的长度无关，因此其雅可比矩阵把 x 映为 0，且在 cx 处是 x 处的 1/c。",
    ),
    formula=r"J x = 0,\quad J(c x) = \frac{1}{c} J(x),\quad J = \frac{\mathrm{diag}(\gamma)}{r}"
    r"\left(I - \frac{x x^\top}{d\, r^2}\right)",
    finding=Words(
        "For ε = 0. From the left x gives 0 only where γ is constant: with a random γ, ‖xᵀJ‖ is {left:.2f}.",
        "须 ε = 0。从左边乘时，只有 γ 为常数才有 xᵀJ = 0：γ 随机时 ‖xᵀJ‖ 为 {left:.2f}。",
    ),
    uses=(rms,),
)


@c14.quick
def jacobian() -> Numbers:
    d = 16
    x, scale = draws(10, d), draws(11, d)
    slopes = jax.jit(jax.jacrev(lambda x, scale: rms(x, scale, 0.0)))
    J = np.asarray(slopes(x, scale), np.float64)
    wide, r2 = x.astype(np.float64), np.mean(np.square(x.astype(np.float64)))
    want = np.diag(scale) @ (np.eye(d) - np.outer(wide, wide) / (d * r2)) / math.sqrt(r2)
    yield at_most(
        "formula", Words("max |J − its formula|", "max |J − 公式|"), np.max(np.abs(J - want)), 1e-6, "float32"
    )
    yield at_most("right", Words("max |J x|", "max |J x|"), np.max(np.abs(J @ wide)), 2e-6, "float32")
    # 3 is no power of 2, so that 3x, its root and its products are rounded: two dozen roundings of entries below 1.
    gap = np.max(np.abs(3 * np.asarray(slopes(3 * x, scale), np.float64) - J))
    yield at_most(
        "scaled",
        Words("max |3 J(3x) − J(x)|", "max |3 J(3x) − J(x)|"),
        gap,
        24 * 2.0**-24 * np.max(np.abs(J)),
        "float32",
    )
    even = np.asarray(slopes(x, np.ones(d, np.float32)), np.float64)
    yield at_most(
        "even", Words("max |xᵀ J| with γ = 1", "γ = 1 时的 max |xᵀ J|"), np.max(np.abs(wide @ even)), 2e-6, "float32"
    )
    yield at_least(
        "left", Words("‖xᵀ J‖ with a random γ", "γ 随机时的 ‖xᵀ J‖"), np.linalg.norm(wide @ J), 0.1, "float32"
    )
