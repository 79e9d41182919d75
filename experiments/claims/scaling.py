"""Chapter B: the division of scores by √d_k (S0 and S3 §3.3; S1 §2.2; S2 §4.3-4.4)."""

import math

import jax.numpy as jnp
import numpy as np

from experiments.claims import scaling_trained
from experiments.claims.record import Curves, Numbers, Verdict, Words, at_least, at_most, near
from experiments.claims.scaling_integrals import mean_entropy, of_top
from experiments.claims.scaling_saturation import back, entropies, reference_weights
from experiments.claims.scaling_variance import (
    WIDTHS,
    chapter,
    dots,
    draws,
    heads,
    inside,
    of_variance,
    projected_scores,
    projections,
    sampled,
)
from transformer_jax.attention import attend, attention, init_attention
from transformer_jax.encoder_decoder import count_parameters
from transformer_jax.norms import norm
from transformer_jax.presets import preset
from transformer_jax.scores import Scoring, attention_scores, score_factor

b16 = chapter.claim(
    "B16",
    "S0 §3.3, S3 §3.3",
    Verdict.TRUE,
    Words(
        "A factor c multiplies the variance by c², so that scores over √d_k have variance and standard deviation 1 and "
        "mostly lie in ±3.",
        "乘以常数 c 则方差乘以 c²，因此除以 √d_k 后得分的方差与标准差都是 1，大多落在 ±3 之内。",
    ),
    formula=r"\mathrm{Var}\left(\frac{S}{\sqrt{d_k}}\right) = \frac{1}{d_k} \cdot d_k = 1",
    finding=Words(
        "At the start, under the conditions of B04; see B17 for later.",
        "仅在初始时、满足 B04 的条件下成立；之后见 B17。",
    ),
    uses=(attention_scores, score_factor),
)


@b16.quick
def scaled() -> Numbers:
    for d in (64, 16, 256, 512):
        s = dots(*heads(d), exponent=0.5)
        label = Words(f"Var(S/√d_k), d_k = {d}", f"Var(S/√d_k)，d_k = {d}")
        yield sampled(f"v{d}", label, np.mean(s**2, axis=1), 1.0, of_variance(d))
        if d == 64:
            share = np.mean(np.abs(s) <= 3, axis=1)
            yield sampled("in3", Words("share within ±3", "落在 ±3 内的比例"), share, *inside(64, 24))
    yield near("factor", Words("the factor at d_k = 64", "d_k = 64 时的因子"), score_factor(64, 0.5, 1.0), 1 / 8, 0.0,
               "float32")  # fmt: skip


b17 = chapter.claim(
    "B17",
    "S2 §4.3, S0 §3.3",
    Verdict.WRONG,
    Words(
        "The division keeps the variance of the scores at 1, always and exactly.",
        "缩放使得分的方差始终精确地保持在 1。",
    ),
    finding=Words(
        "It does so only for unit coordinates. A norm whose learned scale is 2 gives a variance of {gain:.1f}, and "
        "nothing holds the weights where they started.",
        "只对单位方差的分量成立。归一化的可学习缩放取 2 时方差就是 {gain:.1f}，而训练并不会把权重留在初始值。",
    ),
    learned=Words(
        "In a model trained on text it goes from {first:.2f} to {last:.1f} in 300 steps.",
        "在文本上训练的模型中，300 步内它从 {first:.2f} 变为 {last:.1f}。",
    ),
    uses=(norm, init_attention, attention),
)


@b17.quick
def with_a_learned_scale() -> Numbers:
    # Relative to the same draws at scale 1, so that only rounding is left.
    drawn = projections("own")
    ratio = np.mean(projected_scores(drawn, gain=2.0) ** 2) / np.mean(projected_scores(drawn) ** 2)
    label = Words("Var with γ = 2 over Var with γ = 1", "γ = 2 与 γ = 1 的方差之比")
    yield near("gain", label, ratio, 16.0, 1e-4, "float32")


b17.full(scaling_trained.variance_moves)


b18 = chapter.claim(
    "B18",
    "S0 §3.3",
    Verdict.IMPRECISE,
    Words("Once scaled, the softmax is very smooth and even.", "缩放之后 softmax 极其平滑均匀。"),
    finding=Words(
        "Among 64 keys the largest weight is {top:.3f} on average, {times:.1f} times the even share, and the entropy "
        "{entropy:.3f} of ln 64 = 4.159 nats.",
        "64 个键中最大权重平均为 {top:.3f}，是均分的 {times:.1f} 倍；熵为 {entropy:.3f}，而 ln 64 = 4.159 nat。",
    ),
    uses=(attend,),
)


def weights(q: np.ndarray, k: np.ndarray, exponent: float = 0.5, temperature: float = 1.0) -> np.ndarray:
    """The library's attention weights [B, T, S], float32."""
    scoring = Scoring(dk_exponent=exponent, temperature=temperature)
    _, p = attend(jnp.asarray(q), jnp.asarray(k), jnp.asarray(k), scoring=scoring, weights=True)
    return np.asarray(p)[:, 0]


@b18.quick
def evenness() -> Numbers:
    rows, n = 2000, 64  # each query has keys of its own, so that rows are independent
    p = weights(draws(18, rows, 1, 1, 64), draws(19, rows, n, 1, 64))[:, 0]
    top, entropy = p.max(axis=-1), entropies(p)
    # Of one query the scores have the variance |q|²/64, not 1: that moves the entropy by 0.001, the top by 0.0001.
    # An entropy is the mean of (2 − s) exp(s − ½) − 1 over its keys to first order, of variance e − 1.
    spread = math.sqrt((math.e - 1) / n)
    yield sampled("entropy", Words("entropy, nats", "熵（nat）"), entropy, mean_entropy(n, 1.0), spread)
    yield at_most("below", Words("entropy, against ln 64 − 0.4", "熵，不超过 ln 64 − 0.4"), np.mean(entropy),
                  math.log(64) - 0.4, "float32")  # fmt: skip
    yield sampled("top", Words("mean of the largest weight", "最大权重的均值"), top, *of_top(n, 1.0))
    yield at_least("times", Words("the same, in even shares", "相当于均分的倍数"), 64 * np.mean(top), 5.0, "float32")


b19 = chapter.claim(
    "B19",
    "S1 §2.2",
    Verdict.TRUE,
    Words(
        "The division standardises the scores, so that the softmax's input does not run away with the dimension.",
        "除以 √d_k 相当于标准化，使 softmax 的输入不随维度增大而失控。",
    ),
    finding=Words(
        "At the start: over d_k = 16 … 512 the entropy of 64 weights moves by {scaled:.3f} nats; unscaled, by "
        "{unscaled:.1f}.",
        "在初始时成立：d_k 从 16 到 512，64 个权重的熵只变动 {scaled:.3f} nat；不缩放则变动 {unscaled:.1f}。",
    ),
    uses=(attend,),
)


@b19.quick
def by_dimension() -> Numbers:
    lines = {}
    for name, exponent, label in (
        ("scaled", 0.5, Words("entropy: spread over d_k, scaled", "熵随 d_k 的变动：缩放")),
        ("unscaled", 0.0, Words("entropy: spread over d_k, unscaled", "熵随 d_k 的变动：不缩放")),
    ):
        means = [float(np.mean(entropies(weights(*heads(d), exponent)))) for d in WIDTHS]
        lines["1/√d_k" if exponent else "1"] = (list(WIDTHS), means)
        spread = max(means) - min(means)
        # Scaled, a row's variance |q|²/d_k is even less settled at 16: that moves the mean by 0.007. Unscaled, a
        # spread of ln σ by ln 5.7 takes off nats.
        yield (at_most(name, label, spread, 0.02, "float32") if exponent else
               at_least(name, label, spread, 1.0, "float32"))  # fmt: skip
    caption = Words("Entropy of the weights over 64 keys.", "64 个键上权重的熵。")
    yield Curves(caption, "d_k", "H / nat", lines, log_x=True)


b20 = chapter.claim(
    "B20",
    "cross (S0 §3.3, S1 §3.3, S2 §4.3)",
    Verdict.TRUE,
    Words(
        "Dividing scores by √d_k is softmax at temperature √d_k: unscaled attention is scaled attention at temperature "
        "1/√d_k.",
        "除以 √d_k 就是温度为 √d_k 的 softmax：不缩放的注意力即温度为 1/√d_k 的缩放注意力。",
    ),
    formula=r"\mathrm{softmax}(s) = \mathrm{softmax}\left(\frac{s / \sqrt{d_k}}{1 / \sqrt{d_k}}\right)",
    uses=(attend, score_factor),
)


@b20.quick
def as_a_temperature() -> Numbers:
    q, k = heads(64)
    off, warm = weights(q, k, 0.0), weights(q, k, 0.5, 1 / 8)
    yield near("same", Words("max |Δ weight|, d_k = 64", "权重之差的最大值，d_k = 64"), np.max(np.abs(off - warm)), 0.0,
               dtype="float32")  # fmt: skip
    label = Words("max |weight − its formula at temperature √d_k|", "max |权重 − 温度 √d_k 时的公式值|")
    gap = np.max(np.abs(weights(q, k) - reference_weights(q, k, 1 / 8)))
    yield at_most("formula", label, gap, 1e-6, "float32")
    factor = score_factor(48, 0.5, 1 / math.sqrt(48))
    label = Words("the factor at d_k = 48, not a power of 4", "d_k = 48（非 4 的幂）时的因子")
    yield near("factor", label, factor, 1.0, 2.0**-22, "float32")


b21 = chapter.claim(
    "B21",
    "S2 §4.3, S2 §4.4",
    Verdict.IMPRECISE,
    Words(
        "The scores are scaled by √d_k, and the softmax that follows divides s_ij by √d_k.",
        "得分先除以 √d_k，随后的 softmax 公式又把 s_ij 除以 √d_k。",
    ),
    formula=r"a_{ij} = \frac{\exp(s_{ij} / \sqrt{d_k})}{\sum_m \exp(s_{im} / \sqrt{d_k})}",
    finding=Words(
        "Right if s is the plain product; read in order, it divides by d_k. Then 64 keys get nearly even weights "
        "(entropy {entropy:.3f} of 4.159 nats), and the query's gradient is {smaller:.1f} times smaller.",
        "若 s 指未缩放的点积，公式无误；若顺着读下来，则总共除以 d_k：64 个键的权重几乎均等"
        "（熵 {entropy:.3f}，上限 4.159 nat），查询的梯度缩小到 1/{smaller:.1f}。",
    ),
    uses=(score_factor, attend),
)


@b21.quick
def twice() -> Numbers:
    yield near("factor", Words("factor of scaling twice, d_k = 64", "缩放两次的因子，d_k = 64"),
               score_factor(64, 1.0, 1.0), 1 / 64, 0.0, "float32")  # fmt: skip
    q, k = heads(64)
    p = weights(q, k, 1.0)
    gap = np.max(np.abs(p - reference_weights(q, k, 1 / 64)))
    yield at_most("formula", Words("max |weight − its formula|", "max |权重 − 公式值|"), gap, 1e-7, "float32")
    # ln n − σ²/2 for scores of variance σ² = 1/64.
    label = Words("entropy of the weights", "权重的熵")
    yield near("entropy", label, np.mean(entropies(p)), math.log(64) - 1 / 128, 1e-3, "float32")
    (q, g), (k, v) = draws(64, 2, 400, 1, 1, 64), draws(65, 2, 400, 64, 1, 64)
    slope = back()
    once, again = (np.mean(np.linalg.norm(slope(q, k, v, g, jnp.float32(f))[0], axis=-1)) for f in (0.5, 1.0))
    label = Words("‖dL/dq‖ scaled once over twice, 64 keys", "‖dL/dq‖ 缩放一次与两次之比，64 个键")
    # 8 from the factor alone; the derivative of softmax is at its smallest for even weights of many keys.
    yield at_least("smaller", label, once / again, 8.0, "float32")


b22 = chapter.claim(
    "B22",
    "S0 §3.2, S3 §6",
    Verdict.CONDITIONAL,
    Words(
        "Mini-LLaMA-0.04B has heads of 64 and 12 layers; its name says 40 million parameters.",
        "Mini-LLaMA-0.04B 的头维度为 64，共 12 层；名称表示 4000 万参数。",
    ),
    formula=r"V D + L (4 D^2 + 3 D F + 2 D) + D",
    finding=Words(
        "The other sizes are not given. With a width of 512, SwiGLU of 1408 and 6,400 tied embeddings there are "
        "{count:,.0f} parameters; with 32,000 of them, {large:,.0f}.",
        "其余尺寸文中未给。取宽度 512、SwiGLU 1408、6400 个共享词向量时为 {count:万} 万；"
        "词表改为 32000 则为 {large:万} 万。",
    ),
    uses=(preset, count_parameters),
)


@b22.quick
def parameters() -> Numbers:
    config = preset("mini_llama_40m")
    count, (V, D, L, F) = count_parameters(config), (6400, 512, 12, 1408)
    yield near("count", Words("parameters", "参数量"), count, V * D + L * (4 * D * D + 3 * D * F + 2 * D) + D,
               dtype="int64")  # fmt: skip
    yield near("million", Words("in millions", "以百万计"), count / 1e6, 40.0, 4.0, "int64")
    yield near("head", Words("d_k", "d_k"), config.H, 64, dtype="int64")
    yield near("layers", Words("layers", "层数"), config.L, 12, dtype="int64")
    large, V = count_parameters(config.replace(vocab_size=32_000)), 32_000
    label = Words("parameters with 32,000 embeddings", "词表 32000 时的参数量")
    yield near("large", label, large, V * D + L * (4 * D * D + 3 * D * F + 2 * D) + D, dtype="int64")
