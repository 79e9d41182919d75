"""Chapter A: rotary positions, what they keep and what does not follow (S0 and S3, §2.4)."""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims.drawn import U, batch_of, logits, model, normal
from experiments.claims.record import Curves, Numbers, Verdict, Words, at_least, at_most, near
from experiments.claims.rope_complex import (
    BASE,
    RAW,
    THETA,
    H,
    as_numbers,
    at,
    chapter,
    queries_and_keys,
    rounding,
    scores,
)
from transformer_jax import masks
from transformer_jax.attention import attend
from transformer_jax.config import Config
from transformer_jax.encoder_decoder import forward
from transformer_jax.positions import learned
from transformer_jax.rope import Rotation, from_config, half_from_interleaved, rotate, rotation
from transformer_jax.rope_scaling import frequencies
from transformer_jax.scores import attention_scores

a09 = chapter.claim(
    "A09",
    "S0 §2.4, S3 §2.4",
    Verdict.TRUE,
    Words(
        "The score of rotated query and key depends on their positions through m − n alone: −3 for 2 and 5, and for "
        "102 and 105.",
        "旋转后查询与键的得分只通过 m − n 依赖位置：位置 2 与 5、102 与 105 的差都是 −3。",
    ),
    formula=r"\langle R_m q, R_n k \rangle = \mathrm{Re}\left( q k^* e^{i(m - n)\theta} \right)",
    uses=(rotation, rotate, attention_scores),
)


@a09.quick
def relative() -> Numbers:
    q, k = queries_and_keys()
    z, w = as_numbers(q), as_numbers(k)
    exact = np.real(z * w.conj() * np.exp(-3j * THETA)).sum(axis=1)
    turned = [(z * np.exp(1j * m * THETA), w * np.exp(1j * (m + 3) * THETA)) for m in (2, 102)]
    apart = [np.real(a * b.conj()).sum(axis=1) for a, b in turned]
    label = Words("max difference of the two scores", "两处得分的最大差")
    yield at_most("exact", label, np.max(np.abs(apart[0] - apart[1])), 1e-12, "complex128")
    for m in (2, 102):
        label = Words(f"the library's scores at {m}, {m + 3}, error", f"本库在位置 {m}, {m + 3} 处得分的误差")
        gap = np.max(np.abs(scores(q, k, m, m + 3) - exact))
        yield at_most(f"at{m}", label, gap, rounding(q, k, m, m + 3), "float32")
    label = Words("max |score(2, 5) − score(5, 2)|: the sign counts", "max |得分(2, 5) − 得分(5, 2)|：符号有影响")
    yield at_least("sign", label, np.max(np.abs(scores(q, k, 2, 5) - scores(q, k, 5, 2))), 1.0, "float32")


a10 = chapter.claim(
    "A10",
    "S0 §2.4, S3 §2.4",
    Verdict.IMPRECISE,
    Words(
        "Shifting both tokens by 100 positions leaves the score exactly as it was.",
        "两个词元同时右移 100 个位置，注意力得分完全不变。",
    ),
    formula=r"\langle R_{m+100}\, q, R_{n+100}\, k \rangle = \langle R_m q, R_n k \rangle",
    finding=Words(
        "Exact in real numbers only. Of 64 raw scores q·k, d = 64, {changed:.0f} change in float32 at a shift of "
        "100, "
        "by up to {f100:.1e}, and by {f1000000:.3f} at a million, because the angle mθ is rounded before its cosine is "
        "taken. Queries and keys in bfloat16 cost {half:.2f} at any shift. Angles in bfloat16 lose the position: "
        "{bf16:.2f} at a shift of 100, {bf16_1000:.1f} at 1,000; {alias:.0f} is the first that bfloat16 takes for "
        "another.",
        "只在实数运算中精确。64 个未缩放的得分 q·k（d = 64）中，float32 下位移 100 时有 {changed:.0f} 个改变，最多 "
        "{f100:.1e}，位移一百万时达 {f1000000:.3f}，因为取余弦之前角度 mθ 已被舍入。查询与键若用 bfloat16，"
        "任何位移下的误差都约为 {half:.2f}。角度若用 bfloat16，位置信息就丢失了：位移 100 时变动 {bf16:.2f}，"
        "1000 时变动 {bf16_1000:.1f}；{alias:.0f} 是 bfloat16 与别的位置混同的第一个位置。",
    ),
    uses=(rotation, rotate, attention_scores),
)


SHIFTS = (100, 1000, 10_000, 100_000, 1_000_000)


@a10.quick
def shifts() -> Numbers:
    q, k = queries_and_keys()
    here = scores(q, k, 2, 5)
    moved = {shift: np.abs(scores(q, k, 2 + shift, 5 + shift) - here) for shift in SHIFTS}
    for shift, gaps in moved.items():
        label = Words(f"max |Δscore| at a shift of {shift:,}", f"位移 {shift:,} 时的 max |Δ得分|")
        bound = rounding(q, k, 2, 5) + rounding(q, k, 2 + shift, 5 + shift)
        yield at_most(f"f{shift}", label, np.max(gaps), bound, "float32")
    label = Words("scores of 64 that change at 100", "位移 100 时改变的得分数（共 64 个）")
    yield at_least("changed", label, np.sum(moved[100] > 0), 32, "float32")

    def coarse(m: int) -> Rotation:
        angles = (jnp.bfloat16(m) * frequencies(H, BASE).astype(jnp.bfloat16)).astype(jnp.float32)[None, None]
        return Rotation(jnp.cos(angles), jnp.sin(angles))

    half_q, half_k = q.astype(jnp.bfloat16), k.astype(jnp.bfloat16)
    base = scores(half_q, half_k, 2, 5)
    apart = {shift: np.max(np.abs(scores(half_q, half_k, 2 + shift, 5 + shift) - base)) for shift in SHIFTS}
    # Both sides are rounded to 2⁻⁹ of themselves after the turn, at both places.
    sizes = np.abs(as_numbers(half_q)) * np.abs(as_numbers(half_k))
    bound = (
        float(np.max(np.sum(sizes, axis=1))) * 4 * 2.0**-9 + rounding(q, k, 2, 5) + rounding(q, k, 2 + 10**6, 5 + 10**6)
    )
    label = Words("largest of the same, q and k in bfloat16", "同上的最大值，q 与 k 用 bfloat16")
    yield at_most("half", label, max(apart.values()), bound, "bfloat16")
    label = Words("the same, largest over least of the shifts", "同上，各位移中最大与最小之比")
    yield at_most("flat", label, max(apart.values()) / min(apart.values()), 2.0, "bfloat16")
    turned = {
        m: attention_scores(rotate(q, coarse(m), "half"), rotate(k, coarse(m + 3), "half"), RAW) for m in (2, 102, 1002)
    }
    label = Words("with angles in bfloat16, at 100", "角度用 bfloat16，位移 100")
    yield at_least("bf16", label, jnp.max(jnp.abs(turned[2] - turned[102])), 1000 * np.max(moved[100]), "bfloat16")
    # An angle of 1,000 is off by up to 2, and positions of this size by up to 2: more than a unit of the score.
    label = Words("the same, at 1,000", "同上，位移 1000")
    yield at_least("bf16_1000", label, jnp.max(jnp.abs(turned[2] - turned[1002])), 1.0, "bfloat16")
    places = np.arange(1024)
    label = Words("first position that is another's in bfloat16, 2⁸ + 1", "bfloat16 下首个与别的位置混同的位置，2⁸ + 1")
    wrong = np.asarray(jnp.asarray(places).astype(jnp.bfloat16), np.float64) != places
    yield near("alias", label, np.argmax(wrong), 2**8 + 1, 0, "bfloat16")
    caption = Words("How far a shift moves the score, float32.", "位移使得分变动多少（float32）。")
    lines = {"max |Δscore|": (list(moved), [float(np.max(gaps)) for gaps in moved.values()])}
    yield Curves(caption, "shift", "max |Δscore|", lines, log_x=True, log_y=True)


a11 = chapter.claim(
    "A11",
    "S0 §2.4, S3 §2.4, S3 §6",
    Verdict.WRONG,
    Words(
        "Invariance under shifts is the rigorous proof that RoPE extrapolates to longer texts than it was trained on.",
        "平移不变性严格证明了 RoPE 能外推到比训练时更长的文本。",
    ),
    finding=Words(
        "It does not follow. Two attentions that both depend on offsets alone (all of the past, and its nearest 16) "
        "are equal to the last bit on rows of 16, and differ by up to {apart:.2f} on rows of 64: invariance says "
        "nothing about offsets that training never showed, and {unseen:.0%} of the pairs of a row of 4T have one.",
        "推不出来。两种注意力都只依赖相对距离（一种看全部过去，一种只看最近 16 个）：在长度 16 的行上逐位相等，"
        "在长度 64 的行上最多相差 {apart:.2f}。不变性对训练中从未出现的距离毫无约束，而长度 4T 的行中有 {unseen:.0%} "
        "的词元对属于这种距离。",
    ),
    learned=Words(
        "Trained on rows of 32, RoPE has {rope4:.2f} times its loss on rows of 128 ({rope_low:.2f} to "
        "{rope_high:.2f}), sinusoidal positions {sinusoidal4:.2f} times ({sinusoidal_low:.2f} to "
        "{sinusoidal_high:.2f}), none {none4:.2f} ({none_low:.2f} to {none_high:.2f}), ALiBi {alibi4:.3f} "
        "({alibi_low:.3f} to {alibi_high:.3f}); RoPE stretched afterwards {linear4:.2f} (linear), {ntk4:.2f} (NTK), "
        "{yarn4:.2f} (YaRN). A learned table with rows that training never met has {learned4:.2f} times its loss "
        "({learned_low:.2f} to {learned_high:.2f}); one that ends where training did refuses longer rows.",
        "在长度 32 的行上训练后，RoPE 在长度 128 的行上的损失是原来的 {rope4:.2f} 倍（{rope_low:.2f} 至 "
        "{rope_high:.2f}），正余弦编码 {sinusoidal4:.2f} 倍（{sinusoidal_low:.2f} 至 {sinusoidal_high:.2f}），"
        "不加位置编码 {none4:.2f} 倍（{none_low:.2f} 至 {none_high:.2f}），ALiBi {alibi4:.3f} 倍（{alibi_low:.3f} 至 "
        "{alibi_high:.3f}）；事后缩放的 RoPE 为 {linear4:.2f}（线性）、{ntk4:.2f}（NTK）、{yarn4:.2f}（YaRN）倍。"
        "可学习的位置表若含训练中从未用到的行，损失为原来的 {learned4:.2f} 倍（{learned_low:.2f} 至 "
        "{learned_high:.2f}）；若只到训练长度，则拒绝更长的行。",
    ),
    uses=(attend, masks.causal, masks.window, rotation, rotate),
)


@a11.full
def trained(folder: Path) -> Numbers:
    from experiments.claims import rope_trained

    yield from rope_trained.extrapolation(folder)


@a11.quick
def invariant_both() -> Numbers:
    T, n, width = 16, 64, 16
    kinds = (masks.causal(), masks.window(T))

    @jax.jit
    def outputs(q: jax.Array, k: jax.Array, v: jax.Array, shift: int) -> list[Any]:
        places = jnp.arange(n, dtype=jnp.int32)[None] + shift
        turn = rotation(places, width, BASE)
        q, k = rotate(q, turn, "half"), rotate(k, turn, "half")
        return [attend(q, k, v, mask.at(places, places)) for mask in kinds]

    qkv = normal(11, 3, 1, n, 1, width)
    (every, nearest), shifted = (np.asarray(outputs(*qkv, shift), np.float64)[:, 0, :, 0] for shift in (0, 100))
    moved = np.max(np.abs(shifted - [every, nearest]))
    # Angles up to 164 are off by 4 U of themselves; a score moves by that times |q||k| / √16, less than 16.
    label = Words("both, at a shift of 100: max change", "两者平移 100 的最大变化")
    yield at_most("moved", label, moved, 4 * 164 * U * 16, "float32")
    gap = np.max(np.abs(every - nearest), axis=1)
    yield near(
        "short", Words("max difference, rows of T = 16", "长度 T = 16 时的最大差"), max(gap[:T]), 0, 0, "float32"
    )
    yield at_least("apart", Words("max difference, rows of 4T", "长度 4T 时的最大差"), max(gap), 0.1, "float32")
    unseen = 1 - masks.window(T).pairs(n, n) / masks.causal().pairs(n, n)
    expected = (n - T) * (n - T + 1) / (n * (n + 1))
    yield near(
        "unseen", Words("pairs of unseen offset, 4T", "4T 中距离未见过的词元对"), unseen, expected, 1e-12, "int64"
    )


a12 = chapter.claim(
    "A12",
    "S0 §2.4, S3 §2.4",
    Verdict.GAP,
    Words(
        "The derivation is of two coordinates and one θ; heads of 64 are not described.",
        "推导只针对二维向量和单个 θ，没有说明 64 维的头如何处理。",
    ),
    formula=r"\theta_i = b^{-2i/d}, \quad i = 0, \dots, d/2 - 1",
    finding=Words(
        "A head of d turns d/2 pairs, each by its own θ, and which coordinates make a pair has to be said: the two "
        "conventions in use are equal up to one permutation (difference {permuted:.0e}); mixed, they change scores by "
        "up to "
        "{mixed:.1f}.",
        "d 维的头旋转 d/2 对坐标，每对各有自己的 θ，而且必须说明哪两个坐标成一对：通行的两种约定只差一个固定的置换"
        "（误差 {permuted:.0e}），混用则会使得分改变多达 {mixed:.1f}。",
    ),
    uses=(frequencies, rotation, rotate, half_from_interleaved),
)


@a12.quick
def pairs() -> Numbers:
    found = np.asarray(frequencies(H, BASE), np.float64)
    label = Words("max relative error of θ_i", "θ_i 的最大相对误差")
    yield at_most("theta", label, np.max(np.abs(found / THETA - 1)), 4 * U, "float32")
    q, k = queries_and_keys()
    m, z = 7, np.asarray(q, np.float64).reshape(64, H)
    by_hand = {"half": np.zeros((64, H)), "interleaved": np.zeros((64, H))}
    for i, theta in enumerate(THETA):
        c, s = math.cos(m * theta), math.sin(m * theta)
        for layout, (a, b) in {"half": (i, i + H // 2), "interleaved": (2 * i, 2 * i + 1)}.items():
            by_hand[layout][:, a] = z[:, a] * c - z[:, b] * s
            by_hand[layout][:, b] = z[:, a] * s + z[:, b] * c
    turn = rotation(at(m), H, BASE)
    turned = {layout: np.asarray(rotate(q, turn, layout)).reshape(64, H) for layout in by_hand}
    worst = max(np.max(np.abs(turned[layout] - by_hand[layout])) for layout in by_hand)
    # 4 U of the rotation and 4 m U of the angle, of pairs not longer than the longest.
    bound = (4 + 4 * m) * U * np.max(np.abs(as_numbers(q))) * math.sqrt(2)
    yield at_most("by_hand", Words("both layouts against loops", "两种排列与循环计算的差"), worst, bound, "float32")
    order = np.asarray(half_from_interleaved(H))
    permuted = np.asarray(rotate(q[..., order], turn, "half")).reshape(64, H)
    gap = np.max(np.abs(permuted - turned["interleaved"][:, order]))
    yield at_most(
        "permuted", Words("half, permuted, against interleaved", "置换后的对半排列与交错排列"), gap, bound, "float32"
    )
    mixed = scores(q, k, 7, 3, ("half", "interleaved")) - scores(q, k, 7, 3)
    yield at_least(
        "mixed", Words("scores with layouts mixed", "混用两种排列时的得分变化"), np.abs(mixed).max(), 1, "float32"
    )


a13 = chapter.claim(
    "A13",
    "S0 §2.4, S3 §2.4",
    Verdict.IMPRECISE,
    Words(
        "As the scores stay as they are, the model is invariant when a whole sentence moves to the right.",
        "得分不变，所以句子整体右移时，模型具有平移不变性。",
    ),
    finding=Words(
        "What is invariant is q·k. Logits of a RoPE model stay (within {hidden:.0e}) when a sentence moves right "
        "behind tokens that are masked, but change by {visible:.2f} when those can be seen, as a causal mask lets "
        "them be: the set of keys decides. With learned positions they change by {learned:.2f} even when masked.",
        "不变的是 q·k。句子右移、前面的词元被掩码挡住时，RoPE 模型的 logits 不变（{hidden:.0e}）；若前面的词元可见"
        "（因果掩码正是如此），则改变 {visible:.2f}：起决定作用的是可见的键的集合。用可学习的位置编码时，"
        "即使挡住也会改变 {learned:.2f}。",
    ),
    uses=(forward, from_config, learned),
)


@a13.quick
def whole_model() -> Numbers:
    n, before = 8, 5
    text, rest = np.arange(3, 3 + n), np.zeros(before, int)
    tokens = np.stack([np.r_[text, rest], np.r_[rest, text], np.r_[rest, text]])
    segments = np.ones((3, n + before), int)
    segments[1, :before] = 0
    batch, gaps = batch_of(tokens, segments_BT=segments), {}
    for kind in ("rope", "learned"):
        config = Config(vocab_size=12, d_model=16, num_heads=2, num_layers=1, d_ff=32, positions=kind)
        made = logits(model(config, 13), config, batch)
        gaps[kind] = [np.max(np.abs(made[row, before:] - made[0, :n])) for row in (1, 2)]
    # Logits of size 1 after a dozen float32 operations on sums of up to 32 terms.
    label = Words("RoPE, shifted behind masked tokens", "RoPE，前面的词元被挡住")
    yield at_most("hidden", label, gaps["rope"][0], 400 * U, "float32")
    label = Words("RoPE, shifted behind visible tokens", "RoPE，前面的词元可见")
    yield at_least("visible", label, gaps["rope"][1], 0.1, "float32")
    label = Words("learned positions, masked tokens", "可学习位置，前面的词元被挡住")
    yield at_least("learned", label, gaps["learned"][0], 0.1, "float32")


a14 = chapter.claim(
    "A14",
    "S0 §2",
    Verdict.UNVERIFIABLE,
    Words("RoPE needs nothing but high-school complex numbers.", "RoPE 只需要高中水平的复数知识。"),
    finding=Words("A statement about readers: no code can check it.", "这是关于读者的说法，代码无法检验。"),
)
