"""Chapter G: what sines and cosines of positions give (S1 §6.2, S2 §3.2)."""

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims.drawn import U, batch_of, logits, model, normal
from experiments.claims.positions_order import PLAIN, chapter, error, exact, library, theta
from experiments.claims.record import Curves, Numbers, Verdict, Words, at_least, at_most, near
from transformer_jax.config import Hyper
from transformer_jax.embedding import Embedding, embed
from transformer_jax.encoder_decoder import encode, forward
from transformer_jax.positions import shift_matrix, sinusoidal
from transformer_jax.rope import rotation
from transformer_jax.scores import Scoring, attention_scores

g08 = chapter.claim(
    "G08",
    "S1 §6.2, S2 §3.2",
    Verdict.TRUE,
    Words(
        "The encoding of pos + k is a linear map of that of pos, the same for every pos.",
        "pos + k 的编码是 pos 的编码的线性变换，且该变换与 pos 无关。",
    ),
    formula=r"PE_{pos + k} = M_k\, PE_{pos}, \quad M_a M_b = M_{a + b}",
    uses=(shift_matrix, sinusoidal),
)


@g08.quick
def shifted() -> Numbers:
    D, k = 64, 50
    M, places = shift_matrix(k, D), np.arange(5000)
    gap = np.max(np.abs(exact(places + k, D) - exact(places, D) @ M.T))
    # An angle of 5,000 is known to half of 2^-40, on both sides.
    yield at_most("exact", Words("max |PE(pos + 50) − M PE(pos)|", "max |PE(pos + 50) − M PE(pos)|"), gap, 4 * 2.0**-40)
    table = library(np.arange(100 + k), D)
    gap = np.max(np.abs(table[k:] - table[:100] @ M.T))
    yield at_most("float32", Words("the library's table", "本库的表"), gap, 3 * error(100 + k), "float32")
    yield at_most(
        "orthogonal", Words("max |M Mᵀ − I|", "max |M Mᵀ − I|"), np.max(np.abs(M @ M.T - np.eye(D))), 4 * 2.0**-52
    )
    group = np.max(np.abs(shift_matrix(20, D) @ shift_matrix(30, D) - M))
    yield at_most("group", Words("max |M₂₀ M₃₀ − M₅₀|", "max |M₂₀ M₃₀ − M₅₀|"), group, 64 * 2.0**-52)


g09 = chapter.claim(
    "G09",
    "S1 §6.2",
    Verdict.OVERCLAIM,
    Words(
        "So the model can infer the encoding k places on without learning anything more.",
        "所以模型无须再学什么，就能由一个位置的编码得知 k 个位置之外的编码。",
    ),
    formula=r"M_k^\top A\, M_k = A, \quad A = W_Q W_K^\top",
    finding=Words(
        "The map exists; nothing in attention applies it. Scores p A p' depend on the offset alone only if A commutes "
        "with the shifts, {free:.0f} of {all:.0f} dimensions for d = 16. Random weights have {share:.1%} of their "
        "square norm there (1/d): the rest has to be learned.",
        "这个映射存在，但注意力中没有任何部分在使用它。只有当 A 与平移可交换时，得分 p A p' 才仅依赖相对距离："
        "d = 16 时这样的 A 在 {all:.0f} 维中只占 {free:.0f} 维。随机权重的平方范数只有 {share:.1%} 落在其中（1/d），"
        "其余要靠学习。",
    ),
    uses=(shift_matrix,),
)


@g09.quick
def commuting() -> Numbers:
    D, M = 16, shift_matrix(1, 16)
    fixed = np.kron(M.T, M.T) - np.eye(D * D)  # of A, row by row: its kernel is what commutes
    _, sizes, basis = np.linalg.svd(fixed)
    # The slowest two frequencies, 3e-4 and 1e-3, part the others by 6e-4; rounding does by 1e-14.
    free = int(np.sum(sizes < 1e-10))
    yield near("free", Words("dimensions of such A, d", "这样的 A 的维数，d"), free, D, 0)
    yield near("all", Words("of d²", "总维数 d²"), D * D, 256, 0)
    weights = np.random.default_rng(9).normal(size=(2, 400, D, D)) / math.sqrt(D)
    A = np.einsum("nij,nkj->nik", *weights).reshape(400, D * D)
    shares = np.sum((A @ basis[-free:].T) ** 2, axis=1) / np.sum(A**2, axis=1)
    # Of D of D² coordinates of a normal A the share has the variance 2D/D⁴; those of a product are nearly so.
    spread = 5 * math.sqrt(2 * D) / D**2 / math.sqrt(len(shares))
    yield near(
        "share", Words("random A: share of ‖A‖², 1/d", "随机 A：占 ‖A‖² 的比例，1/d"), np.mean(shares), 1 / D, spread
    )


g10 = chapter.claim(
    "G10",
    "S2 §3.2",
    Verdict.IMPRECISE,
    Words(
        "By inner products, attention easily recognises how far apart two words are.",
        "凭内积，注意力不费力就能看出两个词隔了多远。",
    ),
    formula=r"PE_m \cdot PE_n = \sum_i \cos\big( (m - n)\, \theta_i \big)",
    finding=Words(
        "PE·PE is a function of the offset ({at0:.0f} at 0, {at50:.1f} at 50 for d = 512), but it falls only "
        "until offset {turns:.0f} and then rises, so that it does not order distances; and attention has W_Q and W_K "
        "in between: "
        "with random ones, the offset explains {r2:.0%} of the variance of position scores among 64 positions.",
        "PE·PE 确是相对距离的函数（d = 512 时，距离 0 处为 {at0:.0f}，50 处为 {at50:.1f}），但只下降到距离 "
        "{turns:.0f} 处，随后回升，因此不能给远近排序；而且注意力的内积中间隔着 W_Q 和 W_K：随机权重下，"
        "64 个位置之间的位置得分的"
        "方差只有 {r2:.0%} 由相对距离解释。",
    ),
    uses=(sinusoidal, attention_scores),
)


@g10.quick
def inner_products() -> Numbers:
    D, table = 512, library(np.arange(128), 512)
    predicted = np.array([np.sum(np.cos(k * theta(D))) for k in range(100)])
    bound = float(np.sum(4 * U * (4 + 4 * 128 * theta(D))))
    yield near(
        "at0", Words("PE·PE at offset 0, d/2", "距离 0 处的 PE·PE，d/2"), table[7] @ table[7], D / 2, bound, "float32"
    )
    yield near("at50", Words("at offset 50", "距离 50 处"), table[57] @ table[7], predicted[50], bound, "float32")
    gram = table @ table.T
    spread = max(np.ptp(np.diagonal(gram, k)) for k in range(100))
    yield at_most(
        "spread", Words("spread over positions at one offset", "同一距离在各位置上的极差"), spread, 2 * bound, "float32"
    )
    rises = [int(np.flatnonzero(np.diff(row) > 0)[0]) for row in (gram[0, :100], predicted)]
    yield near(
        "turns", Words("first offset after which it rises", "首次回升前的距离"), rises[0], rises[1], 0, "float32"
    )
    yield from explained()
    caption = Words("PE·PE by the offset, d = 512.", "PE·PE 随相对距离的变化，d = 512。")
    lines = {"PE·PE": (list(range(100)), gram[0, :100].tolist())}
    yield Curves(caption, "m − n", "PE·PE", lines)


def explained() -> Numbers:
    """How much of the scores' variance their offset explains, over 64 heads of random weights."""
    T, D, heads = 64, 64, 64
    table, weights = library(np.arange(T), D).astype(np.float32), normal(10, 2, D, heads, D) / np.float32(math.sqrt(D))
    q, k = (jnp.asarray(np.einsum("td,dnh->tnh", table, w))[None] for w in weights)
    scores = np.asarray(attention_scores(q, k, Scoring()), np.float64)[0]
    offset = np.arange(T)[:, None] - np.arange(T)[None]
    centred = scores - scores.mean(axis=(1, 2), keepdims=True)
    between = np.zeros(heads)
    for d in range(1 - T, T):
        group = centred[:, offset == d]
        between += group.shape[1] * group.mean(axis=1) ** 2
    total = np.sum(centred**2, axis=(1, 2))
    # For independent weights E s(m, n) s(m', n') is the product of the two PE·PE.
    gram = np.array([[np.sum(np.cos((m - n) * theta(D))) for n in range(T)] for m in range(T)])
    grand = gram.sum() ** 2 / T**2
    groups = sum(np.sum(gram[d:, d:] * gram[: T - d, : T - d]) / (T - d) * (2 if d else 1) for d in range(T))
    expected = (groups - grand) / (np.sum(np.diagonal(gram)) ** 2 - grand)
    ratio = between.sum() / total.sum()
    spread = 5 * float(np.std(between - ratio * total) / math.sqrt(heads) / total.mean())
    yield near("r2", Words("R² of the offset, random W", "相对距离的 R²，随机权重"), ratio, expected, spread, "float32")


g11 = chapter.claim(
    "G11",
    "S1 §6.2",
    Verdict.TRUE,
    Words("The higher the dimension, the longer its period.", "维度越高，周期越长。"),
    formula=r"\lambda_i = 2\pi \cdot 10000^{2i/d}",
    uses=(sinusoidal,),
)


@g11.quick
def periods() -> Numbers:
    table = library(np.array([1]), 512)[0]
    lengths = 2 * np.pi / np.arctan2(table[0::2], table[1::2])
    last = 2 * np.pi * 10_000 ** (510 / 512)
    ratio = 10_000 ** (2 / 512)
    label = Words("λ of a pair over the one before: farthest from 10000^{2/d}", "相邻周期之比：离 10000^{2/d} 最远者")
    steps = lengths[1:] / lengths[:-1]
    worst = steps[np.argmax(np.abs(steps - ratio))]
    yield near("step", label, worst, ratio, 16 * U * ratio, "float32")
    yield near(
        "first", Words("first period, 2π", "第一个周期，2π"), lengths[0], 2 * np.pi, 8 * U * 2 * np.pi, "float32"
    )
    yield near(
        "last", Words("last period, d = 512", "最后一个周期，d = 512"), lengths[-1], last, 8 * U * last, "float32"
    )


g12 = chapter.claim(
    "G12",
    "S2 §3.2",
    Verdict.CONDITIONAL,
    Words("However long the text, each position has a vector of its own.", "文章再长，各个位置的向量也互不相同。"),
    finding=Words(
        "In exact arithmetic. In float32 position 16,777,217 has the vector of 16,777,216 (distance {alias:.0f}); "
        "the first 65,536 all differ, by {least:.2f} at least for d = 64, and rounded to bfloat16 {rounded:,.0f} still "
        "do. Were positions cast to bfloat16 first, {coarse:,.0f} different ones would be left: the library's RoPE "
        "refuses such positions.",
        "只在精确运算中成立。float32 下位置 16777217 与 16777216 的向量相同（距离 {alias:.0f}）；前 65536 个位置各不"
        "相同，d = 64 时最小距离为 {least:.2f}，把向量舍入为 bfloat16 后仍有 {rounded:.0f} 个互不相同。"
        "若先把位置转成 bfloat16，就只剩 {coarse:.0f} 个不同的位置："
        "本库的 RoPE 拒绝这样的位置。",
    ),
    uses=(sinusoidal, rotation),
)


def distinct(rows: jax.Array) -> int:
    """How many rows differ, bit by bit."""
    held = np.ascontiguousarray(rows)
    return len(np.unique(held.view(np.dtype((np.void, held.itemsize * held.shape[1])))))


@g12.quick
def uniqueness() -> Numbers:
    n = 65_536
    yield near("distinct", Words("different vectors of 65,536, d = 8", "65536 个位置中不同的向量，d = 8"),
               distinct(sinusoidal(jnp.arange(n)[None], 8)[0]), n, 0, "float32")  # fmt: skip
    table = sinusoidal(jnp.arange(n)[None], 64)[0]
    label = Words("the same, rounded to bfloat16, d = 64", "同上，舍入为 bfloat16，d = 64")
    yield near("rounded", label, distinct(table.astype(jnp.bfloat16)), n, 0, "bfloat16")
    far = np.arange(1, n)
    apart = np.sqrt(sum(2 - 2 * np.cos(far * turn) for turn in theta(64)))
    found = np.linalg.norm(np.asarray(table[1:], np.float64) - np.asarray(table[0], np.float64), axis=1)
    label = Words("least distance of two positions, d = 64", "两个位置的最小距离，d = 64")
    yield near("least", label, found.min(), apart.min(), 16 * U, "float32")
    label = Words("the offset at which it is", "取到最小距离的相对位置")
    yield near("nearest", label, far[found.argmin()], float(far[apart.argmin()]), 0, "float32")
    alias = library(np.array([2**24, 2**24 + 1], np.int32), 64)
    yield near(
        "alias",
        Words("distance of 2²⁴ + 1 from 2²⁴", "2²⁴ + 1 与 2²⁴ 的距离"),
        np.max(np.abs(alias[1] - alias[0])),
        0,
        0,
        "float32",
    )
    coarse = jnp.arange(n).astype(jnp.bfloat16)
    # 0 to 256, then 128 in each of the octaves up to 2^16.
    label = Words("different positions in bfloat16", "bfloat16 中不同的位置")
    yield near("coarse", label, len(np.unique(np.asarray(coarse, np.float32))), 257 + 8 * 128, 0, "bfloat16")
    try:
        rotation(coarse[None, :4], 8, 10_000.0)
        refused = 0
    except TypeError:
        refused = 1
    yield near(
        "refused", Words("bfloat16 positions: refused by RoPE", "bfloat16 位置：被 RoPE 拒绝"), refused, 1, 0, "int64"
    )


g13 = chapter.claim(
    "G13",
    "S2 §3.2",
    Verdict.TRUE,
    Words("The model's input is the sum of embedding and position.", "模型的输入是词嵌入与位置编码之和。"),
    formula=r"X_{\mathrm{input}} = X + PE",
    finding=Words(
        "True; the sizes decide what is heard. Rows drawn N(0, 1/d) and not multiplied by √d drown: positions make "
        "{drowned:.0%} of the square of a random score between inputs (d = 64), against {heard:.0%} with the factor.",
        "正确；但二者的大小决定了谁能被听见。若各行按 N(0, 1/d) 抽取而不乘 √d，词就会被淹没："
        "在输入之间的随机得分的平方中，位置占 {drowned:.0%}（d = 64），乘上 √d 后占 {heard:.0%}。",
    ),
    uses=(embed, sinusoidal),
)


@g13.quick
def added() -> Numbers:
    V, D, T = 256, 64, 64
    config = PLAIN.replace(vocab_size=V, d_model=D)
    params = Embedding(jnp.asarray(normal(13, V, D) / np.float32(math.sqrt(D))), None, None)
    ids, places = jnp.arange(V).reshape(4, T), jnp.arange(T)[None]
    for name, scaled, size in (("heard", True, 1.0), ("drowned", False, 1 / D)):
        word = embed(params, ids, places, config.replace(scale_embeddings=scaled))
        both = embed(params, ids, places, config.replace(scale_embeddings=scaled, positions="sinusoidal"))
        words, where = (np.asarray(x, np.float64) for x in (word, both - word))
        if scaled:
            gap = np.max(np.abs(where - exact(np.arange(T), D)))
            # The sum of up to 5 is rounded, and so is the difference.
            yield at_most(
                "sum", Words("max |input − X − PE|", "max |输入 − X − PE|"), gap, error(T) + 16 * U, "float32"
            )
        power = [np.mean(np.sum(x**2, axis=-1)) for x in (words, where)]
        expected = (D / 2 / (D / 2 + size * D)) ** 2
        # Relative errors of the mean square of V D normal numbers, and of a share's square.
        tolerance = 5 * math.sqrt(2 / (V * D)) * 2 * (1 - math.sqrt(expected)) * expected
        label = Words(f"share of positions, embeddings of size {size:.2g}", f"位置所占比例，词嵌入方差 {size:.2g}")
        yield near(name, label, (power[1] / sum(power)) ** 2, expected, tolerance, "float32")


g14 = chapter.claim(
    "G14",
    "S2 §3.2",
    Verdict.CONDITIONAL,
    Words(
        "As all words are processed at once, their order is lost: “dog bites man” is “man bites dog”.",
        "所有单词并行处理，语序信息因此丢失：“狗咬人”与“人咬狗”无法区分。",
    ),
    finding=Words(
        "True of a bidirectional encoder: each word has the same vector in both sentences ({encoder:.0e}). A causal "
        "decoder processes all words at once as well, and tells them apart without positions (by {decoder:.2f}): it is "
        "not parallelism that loses order.",
        "对双向编码器成立：每个词在两句中的向量相同（{encoder:.0e}）。因果解码器同样并行处理所有单词，"
        "不加位置编码却能区分两句（相差 {decoder:.2f}）：丢失语序的原因不在并行。",
    ),
    uses=(encode, forward),
)


@g14.quick
def dog_bites_man() -> Numbers:
    dog, bites, man = 3, 4, 5
    batch, gaps = batch_of([[dog, bites, man], [man, bites, dog]]), {}
    for kind in ("encoder", "decoder"):
        config = PLAIN.replace(architecture=kind, num_layers=1)
        params = model(config, 14)
        if kind == "encoder":
            run = jax.jit(lambda params, tokens, c=config: encode(params, c, Hyper(), tokens)[0])
            made = np.asarray(run(params, batch.tokens_BT), np.float64)
        else:
            made = logits(params, config, batch)
        gaps[kind] = np.max(np.abs(made[1] - made[0][::-1]))
    label = Words("encoder: a word's vector in either sentence", "编码器：同一个词在两句中的向量之差")
    yield at_most("encoder", label, gaps["encoder"], 400 * U, "float32")
    label = Words("decoder: the same of its logits", "解码器：logits 之差")
    yield at_least("decoder", label, gaps["decoder"], 0.1, "float32")


g15 = chapter.claim(
    "G15",
    "S1 §1.1, S1 §6.2",
    Verdict.IMPRECISE,
    Words("Position encodings and their identities are combinatorics.", "位置编码及其恒等式属于组合数学。"),
    finding=Words(
        "They are trigonometry: the shift is a rotation that exists for every real offset, half a position too "
        "({half:.0e}), and nothing is counted. Combinatorial are the permutations of G03 and the pairs of I02.",
        "它们属于三角学：平移是旋转，对任何实数距离都成立，半个位置也行（{half:.0e}），其中没有任何计数。"
        "属于组合数学的是 G03 的排列和 I02 的配对数。",
    ),
    uses=(shift_matrix, sinusoidal),
)


@g15.quick
def half_a_position() -> Numbers:
    D = 16
    half = np.zeros((D, D))
    for i, turn in enumerate(theta(D)):
        c, s = math.cos(turn / 2), math.sin(turn / 2)
        half[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = [[c, s], [-s, c]]
    twice = np.max(np.abs(half @ half - shift_matrix(1, D)))
    yield at_most("twice", Words("max |M½ M½ − M₁|", "max |M½ M½ − M₁|"), twice, 4 * 2.0**-52)
    # The library's positions are integers: half a step beyond its table is the formula.
    table, places = library(np.arange(20), D), np.arange(20)
    gap = np.max(np.abs(exact(places + 0.5, D) - table @ half.T))
    text = "max |PE(pos + ½) − M½ PE(pos)|"
    yield at_most("half", Words(text, text), gap, 3 * error(20), "float32")


g16 = chapter.claim(
    "G16",
    "S2 §3.2",
    Verdict.EMPIRICAL,
    Words(
        "With sines and cosines a model learns absolute and relative positions easily.",
        "有了正弦和余弦，绝对位置与相对位置对模型来说都不难学。",
    ),
    finding=Words(
        "After 300 steps on a chain of order 2, which takes relative positions, the loss is {chain_sinusoidal:.3f} "
        "nats, with RoPE {chain_rope:.3f} (least possible: {floor:.3f}). Reversing rows of 4 to 8 symbols, which takes "
        "absolute ones, is {mirror_sinusoidal:.0%} right, without positions {mirror_none:.0%}.",
        "在需要相对位置的二阶链上训练 300 步后，损失为 {chain_sinusoidal:.3f} nat，RoPE 为 {chain_rope:.3f}"
        "（可能的最小值为 {floor:.3f}）。把 4 到 8 个符号的行反转需要绝对位置，正确率为 {mirror_sinusoidal:.0%}，"
        "不加位置编码为 {mirror_none:.0%}。",
    ),
    uses=(embed, sinusoidal, rotation),
)


@g16.full
def sines_and_cosines(folder: Path) -> Numbers:
    from experiments.claims import positions_trained

    yield from positions_trained.sines(folder)
