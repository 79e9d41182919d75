"""Chapter D, its first part: minus infinity and its stand-ins (S0 and S3 §4.2, S1 §7.2, S2 §10)."""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims.masks_probes import (
    EPSILON,
    HALVES,
    LETTERS,
    H,
    T,
    drawn,
    filled,
    gap_weights,
    ids,
    logit_slopes,
    model_weights,
    moved_by_company,
    moved_by_the_last,
    reads,
    weights_under,
)
from experiments.claims.record import Chapter, Numbers, Verdict, Words, at_least, at_most, near, shown
from transformer_jax import masks
from transformer_jax.attention import attend
from transformer_jax.batch import Batch
from transformer_jax.config import NORMS, PLACEMENTS, POSITIONS, Config, Hyper
from transformer_jax.dependencies import Pattern, leaks, silent
from transformer_jax.encoder_decoder import hidden, logits_of
from transformer_jax.losses import cross_entropy
from transformer_jax.moe import moe
from transformer_jax.scores import Scoring, attention_scores, masked_softmax, weights_of

chapter = Chapter("D", Words("Masks and causality", "掩码与因果性"))

d01 = chapter.claim(
    "D01",
    "S0 §4.2, S3 §4.2, S3 §6",
    Verdict.TRUE,
    Words("As x falls without bound, the exponential of x goes to zero.", "x 趋于负无穷时，e 的 x 次方趋于零。"),
    formula=r"\lim_{x \to -\infty} e^x = 0",
    finding=Words(
        "Nothing in it is Gaussian, as S3 names it. On a computer the limit is reached: an exponential is exactly 0 "
        "from {float32:.2f} on in float32, {bfloat16:.2f} in bfloat16 and {float16:.2f} in float16.",
        "S3 称之为“高斯指数极限”，其实与高斯分布无关。计算机上这一极限真的会达到："
        "float32 从 {float32:.2f}、bfloat16 从 {bfloat16:.2f}、float16 从 {float16:.2f} 起，e 的 x 次方恰为 0。",
    ),
    uses=(masked_softmax,),
)


@d01.quick
def exponential_limit() -> Numbers:
    k = np.arange(301)
    off = np.abs(np.exp(-k * np.log(10)) * 10.0**k - 1)
    # x itself is rounded: 691 of it to 1e-13.
    label = Words("max |eˣ·10ᵏ − 1|, x = −k ln 10, k ≤ 300", "max |eˣ·10ᵏ − 1|，x = −k ln 10，k ≤ 300")
    yield at_most("limit", label, off.max(), 2e-13)
    # 0 below the least subnormal in any case, above 0 from the least normal number on.
    bounds = {"float32": (-104.0, -87.25), "bfloat16": (-104.0, -87.0), "float16": (-17.375, -9.6875)}
    for dtype, (zero, still) in bounds.items():
        # As the type has them: 0 in float32 may be a subnormal that the processor drops.
        gaps = np.unique(np.linspace(-110, -10, 20001).astype(jnp.dtype(dtype)).astype(np.float64))
        weights = gap_weights(np.array([zero, still, *gaps]), dtype)
        label = Words(f"weight at a gap of −{-zero:g}, {dtype}", f"差为 −{-zero:g} 时的权重（{dtype}）")
        yield near(f"{dtype}_zero", label, weights[0], 0.0, dtype=dtype)
        label = Words(f"weight · e^{-still:g}, gap −{-still:g}", f"差为 −{-still:g} 时权重 · e^{-still:g}")
        # Half a unit in the last place of the weight and of what it is divided by; float32's exponential has a few.
        yield near(f"{dtype}_some", label, weights[1] * np.exp(-still), 1.0, 4 * float(jnp.finfo(dtype).eps), dtype)
        last = gaps[weights[2:] == 0].max()
        yield shown(dtype, Words(f"0 from here on, {dtype}", f"从此起为 0（{dtype}）"), last, dtype)


d02 = chapter.claim(
    "D02",
    "S0 §4.2, S3 §4.2",
    Verdict.CONDITIONAL,
    Words(
        "Where minus infinity is filled in, the weight is exactly zero, whatever the denominator may be.",
        "填入负无穷的位置，不论分母是多少，权重必为 0。",
    ),
    formula=r"\max_j s_j > -\infty \; \Rightarrow \; \frac{e^{-\infty}}{\sum_j e^{s_j}} = 0",
    finding=Words(
        "Only if the row keeps a key. One that sees none divides 0 by 0: {nan_float32:.0f} of its {keys:.0f} weights "
        "are NaN, in float32 as in bfloat16 and float16. Booleans give such a row the output 0.",
        "前提是该行至少能看到一个键。一个也看不到时是 0/0：{keys:.0f} 个权重里有 {nan_float32:.0f} 个 NaN，"
        "float32、bfloat16、float16 皆然。用布尔掩码时，这样的行输出为 0。",
    ),
    uses=(attend, masks.causal, masks.padding),
)


@d02.quick
def whole_row_hidden() -> Numbers:
    q, k, v = drawn()
    causal = np.tri(T, dtype=bool)
    biases = np.stack([np.where(causal, 0, -np.inf), np.full((T, T), -np.inf)])
    by_type = {dtype: weights_under(q, k, v, biases, dtype) for dtype in ("float32", *HALVES)}
    weights = by_type["float32"][0]
    label = Words("largest future weight, −∞ filled in", "填入 −∞ 后未来位置的最大权重")
    yield near("future", label, weights[~causal].max(), 0.0, dtype="float32")
    sums = np.abs(weights.sum(axis=1) - 1).max()
    yield at_most("sums", Words("|sum of a row's weights − 1|", "|每行权重之和 − 1|"), sums, T * EPSILON, "float32")
    yield shown("keys", Words("keys of a row", "每行的键数"), T)
    for dtype, weights in by_type.items():
        lost = np.isnan(weights[1, 0]).sum()
        label = Words(f"NaN in a row without a key, {dtype}", f"无可见键的行中的 NaN（{dtype}）")
        yield near(f"nan_{dtype}", label, lost, T, dtype=dtype)
    boolean = jax.jit(lambda: attend(q, k, v, masks.causal() & masks.padding(jnp.zeros(1, jnp.int32))))()
    label = Words("max |output| of such rows, booleans", "布尔掩码下这类行的 max |输出|")
    yield near("boolean", label, np.abs(boolean).max(), 0.0, dtype="float32")


d03 = chapter.claim(
    "D03",
    "S3 §4.2",
    Verdict.OVERCLAIM,
    Words(
        "Minus infinity in the mask is an airtight mathematical guarantee that nothing of the future leaks.",
        "掩码中的负无穷在数学上滴水不漏，保证未来信息绝不泄露。",
    ),
    formula=r"\frac{\partial\, \mathrm{logits}_i}{\partial x_j} = 0 \quad (j > i)",
    finding=Words(
        "Of attention alone. The whole model leaks nothing either ({pairs:.0f} of {later:.0f} derivatives by later "
        "inputs are not 0, over {models:.0f} models, in which each causal mask meets each kind of position and each "
        "placement of norms), but no mask stops what goes around it. Where positions are normalised together before "
        "causal "
        "attention, changing the last token moves earlier outputs by {norm:.2g}. Targets that were not shifted cost "
        "{unshifted:.0f} nats of text where chance costs {chance:.2f}. Experts with a capacity move an earlier output "
        "by {experts:.2g} once later tokens come, although no derivative says so.",
        "只对注意力这一条路成立。整个模型也确实不泄露（{models:.0f} 个模型涵盖各种因果掩码、"
        "位置编码与归一化位置的两两组合，"
        "logits 对后续输入的 {later:.0f} 个导数里不为 0 的有 {pairs:.0f} 个），"
        "但绕过掩码的通路它管不着：因果注意力之前若把各位置放在一起归一化，改动最后一个词元，"
        "前面的输出就变动 {norm:.2g}；"
        "目标忘了移位，损失只有 {unshifted:.0f} nat，而瞎猜为 {chance:.2f}；"
        "有容量上限的专家层在后面添上词元时，前面的输出变动 {experts:.2g}，任何导数都看不出来。",
    ),
    uses=(hidden, logits_of, leaks, silent, attend, masks.causal, masks.window, masks.block_sparse, cross_entropy, moe),
)
# The masks of a decoder that are causal (`prefix` is not, and two are for ablations).
CAUSAL = ("causal", "window", "block_sparse")


@d03.quick
def around_the_mask() -> Numbers:
    n, row = 5, ids(1, 5, V=3)
    batch, one = Batch(row, row, jnp.ones((1, n))), jnp.ones((1, 1), bool)
    # Keys that a query may see in one layer: all before it, the last two; blocks of two, the one before and the first.
    i, j = np.indices((n, n))
    sight = {
        "causal": j <= i,
        "window": (j <= i) & (j > i - 2),
        "block_sparse": (j <= i) & ((i // 2 - j // 2 < 2) | (j < 2)),
    }
    leaking = mute = asked = 0
    # Each pair of a mask, a kind of position and a placement: all triples would take three times as long.
    kinds = list(itertools.product(range(len(POSITIONS)), range(len(PLACEMENTS))))
    for p, q in kinds:
        mask, positions, placement = CAUSAL[(p + q) % 3], POSITIONS[p], PLACEMENTS[q]
        config = Config(
            vocab_size=3, d_model=4, num_heads=2, num_layers=2, d_ff=4, seq_len=n, max_positions=8, block_size=2,
            mask=mask, positions=positions, norm_placement=placement, norm=NORMS[p % 2],
        )  # fmt: skip
        slopes = Pattern(
            jnp.asarray(logit_slopes(model_weights(config), config, Hyper(window=2), batch))[None], None, one
        )
        twice = np.linalg.matrix_power(sight[mask].astype(int), 2) > 0
        leaking += leaks(slopes, Pattern(jnp.asarray(j <= i)[None], None, one)).count
        mute += silent(slopes, Pattern(jnp.asarray(twice)[None], None, one)).count
        asked += int(twice.sum())
    yield shown("models", Words("models", "模型数"), len(kinds), "int64")
    label = Words("derivatives ∂logits_i/∂x_j with j > i", "j > i 的导数 ∂logits_i/∂x_j 的个数")
    yield shown("later", label, len(kinds) * n * (n - 1) // 2, "int64")
    yield near("pairs", Words("… that are not 0", "其中不为 0 者"), leaking, 0, dtype="float32")
    label = Words(f"… = 0 where the mask allows one, of {asked}", f"掩码允许的 {asked} 个导数中为 0 者")
    yield near("silent", label, mute, 0, dtype="float32")
    alone, together = moved_by_the_last()
    label = Words("max |Δ earlier output|, each position normalised alone", "逐位置归一化时前面输出的 max |Δ|")
    yield near("alone", label, alone, 0.0, dtype="float32")
    label = Words("… positions normalised together", "跨位置归一化时前面输出的 max |Δ|")
    yield at_least("norm", label, together, 1e-2, "float32")
    unshifted, shifted = reads((0, masks.causal(), 0), (0, masks.causal(), 1))
    label = Words("nats, targets not shifted", "目标未移位时的 nat 数")
    yield at_most("unshifted", label, unshifted, 1e-6, "float32")
    yield at_least("shifted", Words("… shifted", "移位后的 nat 数"), shifted, math.log(LETTERS), "float32")
    yield shown("chance", Words("ln 8", "ln 8"), math.log(LETTERS))
    # 3 slots an expert in a row of 4 tokens, so that the fourth finds none; 5 in a row of 8.
    label = Words("max |Δ output of experts|, 4 later tokens", "添上 4 个后续词元时专家层输出的 max |Δ|")
    yield at_least("experts", label, moved_by_company((4, 8)), 1e-2, "float32")


d04 = chapter.claim(
    "D04",
    "S1 §7.2",
    Verdict.TRUE,
    Words(
        "Padding must be set to minus infinity and not to zero, because the exponential of zero is one.",
        "填充位置要设为负无穷而不是 0，因为 e 的 0 次方是 1。",
    ),
    formula=r"e^0 = 1, \quad e^{-\infty} = 0",
    uses=(attention_scores, weights_of, attend, masks.padding),
)


@d04.quick
def zero_is_no_mask() -> Numbers:
    q, k = np.ones((1, 1, 1, 1), np.float32), np.arange(3, dtype=np.float32)[None, :, None, None]  # scores 0, 1, 2

    @jax.jit
    def both(q: jax.Array, k: jax.Array) -> Any:
        scores = jnp.where(jnp.arange(3) < 2, attention_scores(q, k, Scoring()), 0.0)
        return weights_of(scores, None, Scoring()), attend(q, k, k, masks.padding(jnp.asarray([2])), weights=True)[1]

    filled, masked = (np.asarray(weights)[0, 0, 0] for weights in both(q, k))
    label = Words("weight of padding, its score set to 0", "得分置 0 时填充位置的权重")
    yield near("zero", label, filled[2], 1 / (2 + math.e), 4 * EPSILON, "float32")
    yield near("masked", Words("… masked", "用掩码时的权重"), masked[2], 0.0, dtype="float32")
    label = Words("weight of score 1 beside 0", "得分 1 与 0 并列时前者的权重")
    yield near("rest", label, masked[1], math.e / (1 + math.e), 4 * EPSILON, "float32")


d05 = chapter.claim(
    "D05",
    "S1 §7.2",
    Verdict.IMPRECISE,
    Words("Only minus infinity makes a weight vanish altogether.", "只有负无穷才能使权重完全归零。"),
    finding=Words(
        "Any score that lies 104 or more below the largest has the float32 weight 0, and 17.4 in float16; "
        "at 80 below it still has {some:.1e}.",
        "比最大得分低 104 以上，float32 的权重就恰为 0，float16 只需低 17.4；低 80 时则还有 {some:.1e}。",
    ),
    uses=(attend,),
)


@d05.quick
def finite_gaps() -> Numbers:
    q, k = jnp.zeros((1, 1, 1, H)), jnp.zeros((1, 2, 1, H))
    gaps = {"float32": (-104.0, -1e4, -1e9, -80.0), "float16": (-17.4,)}
    for dtype, values in gaps.items():
        weights = weights_under(q, k, k, [[[0.0, gap]] for gap in values], dtype)[:, 0, 1]
        for gap, weight in zip(values, weights, strict=True):
            label = Words(f"weight at −{-gap:g}, {dtype}", f"加 −{-gap:g} 时的权重（{dtype}）")
            some = math.exp(gap) if gap == -80 else 0.0
            # float32's exponential has an error of a few units in the last place.
            yield near("some" if some else f"f{-gap:g}", label, weight, some, 8 * EPSILON * some, dtype)


d06 = chapter.claim(
    "D06",
    "S2 §10",
    Verdict.IMPRECISE,
    Words(
        "Code masks by writing −10⁹ into the scores that must not be seen.",
        "代码把不该看见的得分写成 −10⁹ 来实现掩码。",
    ),
    formula=r"s_{ij} \leftarrow -10^9 \quad (M_{ij} = 0)",
    finding=Words(
        "Equal to minus infinity while a row sees a key. A row that sees none becomes uniform: {float32:.3f} for each "
        "of three keys in float32, {bfloat16:.3f} in bfloat16. In float16 −10⁹ is itself −∞, and gives "
        "{float16:.0f} NaN; the type's least number is uniform in all three.",
        "一行还能看到键时与负无穷等价。什么也看不到的行则变成均匀分布：三个键各 {float32:.3f}（float32）、"
        "{bfloat16:.3f}（bfloat16）。float16 中 −10⁹ 本身就是 −∞，得到 {float16:.0f} 个 NaN；"
        "换成该类型的最小数，三种类型都得均匀分布。",
    ),
    uses=(attention_scores, weights_of),
)


@d06.quick
def minus_a_billion() -> Numbers:
    for dtype in ("float32", *HALVES):
        causal, nothing = filled(dtype)
        label = Words(f"max |Δweight| to −∞, causal, {dtype}", f"因果掩码下与 −∞ 的 max |Δ权重|（{dtype}）")
        yield near(f"{dtype}_same", label, np.abs(causal[1] - causal[0]).max(), 0.0, dtype=dtype)
        rounding = float(jnp.finfo(dtype).eps)
        label = Words(
            f"max |weight − ⅓|, no key, least number, {dtype}", f"无键、填最小数时的 max |权重 − ⅓|（{dtype}）"
        )
        yield at_most(f"{dtype}_least", label, np.abs(nothing[2] - 1 / 3).max(), rounding, dtype)
        if dtype == "float16":
            label = Words("NaN, no key, −10⁹, float16", "无键、填 −10⁹ 时的 NaN（float16）")
            yield near(dtype, label, np.isnan(nothing[1, 0]).sum(), 3, dtype=dtype)
        else:
            label = Words(f"weight, no key, −10⁹, {dtype}", f"无键、填 −10⁹ 时的权重（{dtype}）")
            yield near(dtype, label, nothing[1].max(), 1 / 3, rounding, dtype)
