"""Chapter C, its second part: norms before sub-layers and after them (S0 §4; S1 §4.3; S3 §6)."""

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims import norms_trained
from experiments.claims.norms_depth import (
    ADDED,
    DEEP,
    ONE_TOKEN,
    foreseen,
    passes,
    rows,
    spreads,
    stacks,
)
from experiments.claims.norms_rms import chapter, settings
from experiments.claims.record import Curves, Numbers, Verdict, Words, near
from experiments.claims.scaling_variance import draws
from transformer_jax import masks
from transformer_jax.config import Config, Hyper
from transformer_jax.ffn import FFN, ffn
from transformer_jax.layers import apply_stack, init_stack
from transformer_jax.norms import Norm, norm

c05 = chapter.claim(
    "C05",
    "S3 §6",
    Verdict.EMPIRICAL,
    Words(
        "RMSNorm before each sub-layer keeps gradients stable across 12 layers.",
        "在每个子层之前做 RMSNorm，能让梯度稳定地穿过 12 层。",
    ),
    formula=r"\frac{\|\partial L / \partial x_0\|}{\|\partial L / \partial y\|} \approx "
    r"\frac{\sqrt{1 + 1.5 L}}{\sqrt{1 + 1.5 L}} = 1",
    finding=Words(
        "At the start it does: through 12 layers a gradient keeps {pre:.2f} of its norm, without norms it grows "
        "{none:.0f}-fold. But norms after each sub-layer keep it as well ({post:.2f}): only training tells them apart.",
        "初始时确实如此：穿过 12 层后梯度范数为原来的 {pre:.2f} 倍，没有归一化则增大到 {none:.0f} 倍。"
        "但归一化放在子层之后同样能保持（{post:.2f}）；两者的差别要靠训练来看。",
    ),
    learned=Words(
        "After 200 steps 12 layers end at {loss_pre:.3f} nats with RMSNorm before the sub-layers, at {loss_post:.3f} "
        "after them ({post_lower:.2f} to {post_upper:.2f}), each at its best rate; byte frequencies alone give "
        "{bar:.3f}. Without norms they train at none of four rates from 1.7e-6 to 1.7e-3: {loss_none:.0f} nats at the "
        "best. The first layer's gradient is {ratio_pre_first:.2f} times the last's at the start and "
        "{ratio_pre_last:.2f} at the end with norms before, {ratio_post_first:.2f} and {ratio_post_last:.2f} with "
        "norms after; at the end they are apart by {faded_low:.1f} to {faded_high:.1f} in the logarithm (p "
        "{faded_p:.2g}).",
        "训练 200 步之后，12 层模型各取最佳学习率：RMSNorm 在子层之前得 {loss_pre:.3f} nat，在子层之后得 "
        "{loss_post:.3f}（差值 {post_lower:.2f} 至 {post_upper:.2f}）；只知字节频率也有 {bar:.3f}。没有归一化时，"
        "从 1.7e-6 到 1.7e-3 的四种学习率都训练不起来：最好也有 {loss_none:.0f} nat。首层与末层梯度之比：归一化在前时"
        "训练前为 {ratio_pre_first:.2f}、训练后为 {ratio_pre_last:.2f}，归一化在后时为 {ratio_post_first:.2f} 与 "
        "{ratio_post_last:.2f}；训练后两者的对数相差 {faded_low:.1f} 至 {faded_high:.1f}（p 值 {faded_p:.2g}）。",
    ),
    uses=(apply_stack, init_stack, norm),
)


@c05.quick
def across_twelve() -> Numbers:
    rms_normed = ONE_TOKEN.replace(norm="rmsnorm")
    for placement, config, want, text in (
        ("pre", rms_normed, 1.0, Words("RMSNorm before", "RMSNorm 在前")),
        ("post", rms_normed, 1.0, Words("RMSNorm after", "RMSNorm 在后")),
        ("none", ONE_TOKEN, 3.0**6, Words("no norms", "无归一化")),
    ):
        found = passes(config.replace(norm_placement=placement))[12]
        label = Words(f"‖dL/dx‖/‖dL/dy‖ of 12 layers, {text.en}", f"12 层的 ‖dL/dx‖/‖dL/dy‖，{text.zh}")
        yield foreseen(placement, label, found.gain, want, spreads(placement, 12).gain)


c05.full(norms_trained.before_or_after)


c06 = chapter.claim(
    "C06",
    "S0 §4",
    Verdict.GAP,
    Words("SiLU is smooth (the title says so, nothing follows).", "SiLU 是平滑的（仅见于标题，正文没有下文）。"),
    formula=r"\mathrm{SiLU}(x) = x\, \sigma(x),\quad \min = x_m + 1,\quad x_m = -1 - W(1/e)",
    finding=Words(
        "It is: its derivative is ½ on both sides of 0, where ReLU's jumps by {relu:.2f}. It is not monotone: its "
        "least value is {least:.5f}, at {where:.3f}.",
        "确实平滑：0 两侧的导数都是 ½，而 ReLU 的导数在此跳变 {relu:.2f}。它并不单调：最小值 {least:.5f}，"
        "位于 {where:.3f}。",
    ),
    uses=(ffn,),
)


def activation(kind: str, x: jax.Array) -> jax.Array:
    """The library's feed-forward net of width 1 with weights 1: the activation alone, of numbers [T]."""
    one = jnp.ones((1, 1))
    config = Config(d_model=1, num_heads=1, d_ff=1, ffn=kind, ffn_bias=False, positions="none")
    return ffn(FFN(one, one, None, None, None, None), x[None, :, None], config, Hyper())[0, :, 0]


@c06.quick
def smooth() -> Numbers:
    x = np.linspace(-3, 3, 60_001, dtype=np.float32)
    y = np.asarray(activation("silu", jnp.asarray(x)))
    yield near("least", Words("least value", "最小值"), y.min(), -0.2784645428, 1e-7, "float32")
    # The bottom is flat: float32 tells values apart from 5e-4 on.
    yield near("where", Words("where", "所在位置"), x[y.argmin()], -1.2784645428, 2e-3, "float32")
    near_zero = jnp.array([-1e-3, 1e-3])
    for kind, jump in (("silu", 1e-3), ("relu", 1.0)):
        left, right = jax.grad(lambda x, kind=kind: jnp.sum(activation(kind, x)))(near_zero)
        label = Words(f"{kind}'(0.001) − {kind}'(−0.001)", f"{kind}'(0.001) − {kind}'(−0.001)")
        yield near(kind, label, right - left, jump, 1e-6, "float32")
        if kind == "silu":  # x/2 and an even function: the mean of both sides is the slope at 0
            label = Words("silu'(0), their mean", "silu'(0)，即两者均值")
            yield near("slope", label, (left + right) / 2, 0.5, 1e-6, "float32")


c07 = chapter.claim(
    "C07",
    "S1 §4.3",
    Verdict.IMPRECISE,
    Words(
        "Every layer has a residual connection and LayerNorm, which pulls activations back to mean 0 and variance 1.",
        "每一层都有残差连接和 LayerNorm，后者把激活值拉回均值 0、方差 1。",
    ),
    formula=r"\mathrm{Var}(x_L) = 1 + 1.5 L,\quad \mathrm{Var}(\mathrm{LN}(x + F(x))) = 1",
    finding=Words(
        "Before γ and β, and up to ε: with γ = 2 and β = 1 they have mean {mean:.2f} and variance {var:.2f}. With the "
        "norm before the sub-layers the stream itself is not normalised: its variance grows by 1.5 a layer, to "
        "{pre24:.1f} after 24; after them, it stays {post24:.2f}.",
        "这是乘 γ、加 β 之前的情形，且有 ε 之差：γ = 2、β = 1 时均值为 {mean:.2f}，方差为 {var:.2f}。"
        "归一化在子层之前时，残差流本身并未归一化：方差每层增加 1.5，24 层后为 {pre24:.1f}；"
        "放在子层之后则保持 {post24:.2f}。",
    ),
    uses=(norm, apply_stack, init_stack),
)


@c07.quick
def pulled_back() -> Numbers:
    config, x = settings("layernorm"), 3 * draws(1, 1, 50, 64) + 5
    y = np.asarray(norm(Norm(jnp.full(64, 2.0), jnp.ones(64)), jnp.asarray(x), config), np.float64)
    yield near("mean", Words("mean with β = 1", "β = 1 时的均值"), y.mean(), 1.0, 1e-6, "float32")
    yield near("var", Words("variance with γ = 2", "γ = 2 时的方差"), y.var(axis=-1).mean(), 4.0, 1e-5, "float32")
    depths, lines = (2, 6, 12, DEEP), {}
    for placement, text in (("pre", Words("norm before", "归一化在前")), ("post", Words("norm after", "归一化在后"))):
        squares = passes(ONE_TOKEN.replace(norm_placement=placement))[DEEP].squares
        lines[placement] = (list(range(DEEP + 1)), list(squares.mean(axis=0)))
        for L in depths:
            label = Words(f"mean square after {L} layers, {text.en}", f"{L} 层后的均方，{text.zh}")
            want, spread = (1 + ADDED * L, spreads("pre", L).square) if placement == "pre" else (1.0, 0.0)
            yield foreseen(f"{placement}{L}", label, squares[:, L], want, spread)
    stack = jax.tree.map(lambda leaf: leaf[0], stacks(ONE_TOKEN))
    x, places = jnp.asarray(rows()[0]), jnp.zeros((1, 1), jnp.int32)
    y, _ = apply_stack(stack, x, ONE_TOKEN, Hyper(), mask=masks.causal(), positions_BT=places)
    label = Words("mean square after the final norm", "最后的归一化之后的均方")
    yield near("final", label, np.mean(np.square(y)), 1.0, 1e-3, "float32")
    caption = Words("Mean square of the residual stream.", "残差流的均方。")
    yield Curves(caption, "L", "E[x²]", lines, log_y=True)
