"""Chapter G: embeddings and positions (S1 §2.1 and §6, S2 §3)."""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims.drawn import U, batch_of, logits, model, normal
from experiments.claims.record import Chapter, Curves, Numbers, Verdict, Words, at_least, at_most, near
from transformer_jax.attention import attend
from transformer_jax.config import Config, Hyper
from transformer_jax.embedding import Embedding, embed, unembed
from transformer_jax.encoder_decoder import Transformer, encode, forward
from transformer_jax.masks import causal
from transformer_jax.positions import shift_matrix, sinusoidal
from transformer_jax.rope import rotation
from transformer_jax.scores import Scoring, attention_scores

chapter = Chapter("G", Words("Embeddings and positions", "词嵌入与位置编码"))

PLAIN = Config(vocab_size=12, d_model=16, num_heads=2, num_layers=2, d_ff=32, positions="none", scale_embeddings=False)


def theta(D: int) -> np.ndarray:
    """10000^(-2i/D), one number at a time: float64 [D/2]."""
    return np.array([10_000.0 ** (-2 * i / D) for i in range(D // 2)])


def exact(places: np.ndarray, D: int) -> np.ndarray:
    """The sinusoidal table as the formula has it, float64 [T, D]."""
    table = np.zeros((len(places), D))
    for i, turn in enumerate(theta(D)):
        table[:, 2 * i], table[:, 2 * i + 1] = np.sin(places * turn), np.cos(places * turn)
    return table


def library(places: np.ndarray, D: int) -> np.ndarray:
    """The library's table, [T, D] in float64."""
    return np.asarray(sinusoidal(jnp.asarray(places)[None], D)[0], np.float64)


def error(last: int) -> float:
    """The most that float32 may change a sine at positions up to `last`: frequency, angle and sine are rounded."""
    return U * (4 + 4 * last)


g01 = chapter.claim(
    "G01",
    "S2 §3.1",
    Verdict.WRONG,
    Words(
        "A token's vector is W_E times its one-hot vector, for a W_E of V rows and d columns.",
        "词元的向量是 W_E 乘以它的 one-hot 向量，其中 W_E 为 V 行 d 列。",
    ),
    formula=r"x_i = W_E^\top\, \mathrm{onehot}(w_i), \quad W_E \in \mathbb{R}^{V \times d}",
    finding=Words(
        "A V × d matrix cannot multiply a vector of V (V ≠ d): it is the transpose that does, or the one-hot row from "
        "the left. That product is the row w of W_E to the last bit, so that no model multiplies: it looks up.",
        "V × d 的矩阵不能左乘 V 维向量（V ≠ d）：应当用转置，或把 one-hot 行向量写在左边。"
        "该乘积与 W_E 的第 w 行逐位相等，所以模型并不做乘法，而是查表。",
    ),
    uses=(embed,),
)


@g01.quick
def one_hot() -> Numbers:
    V, D, ids = 12, 16, np.array([[3, 0, 11, 7, 3]])
    table, hot = normal(1, V, D), np.eye(V, dtype=np.float32)[ids[0]]
    try:
        refused = 0 * len(table @ hot[0])
    except ValueError:
        refused = 1
    yield near(
        "refused", Words("W_E times a one-hot column: refused", "W_E 乘 one-hot 列向量：被拒绝"), refused, 1, 0, "int64"
    )
    found = embed(Embedding(jnp.asarray(table), None, None), jnp.asarray(ids), jnp.arange(5)[None], PLAIN)
    gap = np.max(np.abs(np.asarray(found[0]) - hot @ table))
    yield near(
        "gap", Words("looked up − one-hot row times W_E", "查表 − one-hot 行向量乘 W_E"), gap, 0.0, 0.0, "float32"
    )


g02 = chapter.claim(
    "G02",
    "S2 §3.1",
    Verdict.TRUE,
    Words("A text of N tokens becomes a matrix of N rows and d columns; d = 512 in the paper.",
          "长度为 N 的文本变成 N 行 d 列的矩阵；论文中 d = 512。"),
    formula=r"X \in \mathbb{R}^{N \times d}",
    finding=Words(
        "True, and not all of it: the paper also multiplies the rows by √d, here {factor:.3f}, and uses the same table "
        "for the logits.",
        "正确，但不完整：论文还把各行乘以 √d（此处为 {factor:.3f}），并用同一张表计算 logits。",
    ),
    uses=(embed, unembed),
)  # fmt: skip


@g02.quick
def matrix() -> Numbers:
    V, D, N = 20, 512, 10
    config = PLAIN.replace(vocab_size=V, d_model=D)
    params = Embedding(jnp.asarray(normal(2, V, D) / np.float32(math.sqrt(D))), None, None)
    ids, places = jnp.arange(N)[None] + 4, jnp.arange(N)[None]
    x = embed(params, ids, places, config)
    yield near("rows", Words("rows", "行数"), x[0].shape[0], N, 0.0, "int64")
    yield near("columns", Words("columns", "列数"), x[0].shape[1], 512, 0.0, "int64")
    scaled = embed(params, ids, places, config.replace(scale_embeddings=True))
    yield near(
        "factor", Words("factor √d", "系数 √d"), jnp.mean(scaled / x), math.sqrt(D), 4 * U * math.sqrt(D), "float32"
    )
    made = np.asarray(unembed(params, scaled, config, Hyper()), np.float64)[0]
    table, rows = np.asarray(params.embed_VD, np.float64), np.asarray(scaled, np.float64)[0]
    gap, bound = np.max(np.abs(made - rows @ table.T)), D * U * np.max(np.abs(rows) @ np.abs(table).T)
    yield at_most("tied", Words("tied logits − X W_Eᵀ", "共享权重的 logits − X W_Eᵀ"), gap, bound, "float32")


g03 = chapter.claim(
    "G03",
    "S1 §6.1",
    Verdict.WRONG,
    Words(
        "Attention is invariant under permutations: with its words reversed, a sentence has the same representation.",
        "注意力对排列不变：“我爱吃苹果”与“苹果爱吃我”得到的表示完全相同。",
    ),
    formula=r"f(Px) = P f(x) \ne f(x)",
    finding=Words(
        "It is equivariant: each word keeps its own vector, and the vectors change places with the words "
        "({equivariant:.0e}). The representation, a matrix, differs by up to {moved:.2f}; only what forgets the rows, "
        "such as their mean, is invariant ({pooled:.0e}).",
        "是等变而非不变：每个词仍得到自己的向量，向量随词一起换位（{equivariant:.0e}）。作为矩阵的表示最多相差 "
        "{moved:.2f}；只有忘掉行序的量（例如各行的平均）才不变（{pooled:.0e}）。",
    ),
    uses=(attend,),
)


@g03.quick
def permuted() -> Numbers:
    x, weights = normal(3, 4, 16), normal(4, 3, 16, 16) / 4
    order = np.array([3, 1, 2, 0])  # 我 爱 吃 苹果 -> 苹果 爱 吃 我

    def f(x: np.ndarray) -> np.ndarray:
        q, k, v = (jnp.asarray(x @ w)[None, :, None] for w in weights)
        return np.asarray(attend(q, k, v), np.float64)[0, :, 0]

    # Four weights of a sum, and products of 16 terms, in another order.
    here, there = f(x), f(x[order])
    label = Words("max |f(Px) − P f(x)|", "max |f(Px) − P f(x)|")
    yield at_most("equivariant", label, np.max(np.abs(there - here[order])), 64 * U, "float32")
    yield at_least(
        "moved", Words("max |f(Px) − f(x)|", "max |f(Px) − f(x)|"), np.max(np.abs(there - here)), 0.1, "float32"
    )
    pooled = np.max(np.abs(there.mean(axis=0) - here.mean(axis=0)))
    yield at_most("pooled", Words("the same of the rows' mean", "各行平均之差"), pooled, 64 * U, "float32")


g04 = chapter.claim(
    "G04",
    "S1 §6.1, S2 §3.2",
    Verdict.WRONG,
    Words(
        "Positions must be injected explicitly, as attention by itself knows no order.",
        "注意力本身不认顺序，所以必须显式注入位置信息。",
    ),
    finding=Words(
        "Not in a causal decoder: its mask is order enough. Without positions, |f(Px) − P f(x)| is {causal:.2f}, and "
        "two layers tell the last token in what order the others came ({two:.2f}); one layer gives it their set alone "
        "({one:.0e}).",
        "因果解码器并不需要：因果掩码本身就带来顺序。不加位置编码时 |f(Px) − P f(x)| 为 {causal:.2f}；两层就能让最后"
        "一个词元知道前面词元的次序（{two:.2f}），只有一层时它只知道有哪些词元（{one:.0e}）。",
    ),
    learned=Words(
        "Trained on a chain in which the last two symbols, in their order, decide the next, and both without "
        "positions, the causal model reaches {causal_nats:.2f} nats (least possible: {floor:.2f}); the bidirectional "
        "one, which even sees the answer among its tokens, {bidirectional_nats:.2f}. The last symbol alone leaves "
        "{one:.2f}.",
        "在由前两个符号及其次序决定下一个符号的链上训练，二者都不加位置编码：因果模型达到 {causal_nats:.2f} nat"
        "（可能的最小值为 {floor:.2f}）；双向模型的输入里甚至包含答案，却只到 {bidirectional_nats:.2f}。"
        "仅凭最后一个符号则为 {one:.2f}。",
    ),
    uses=(forward, causal),
)


@g04.quick
def order_without_positions() -> Numbers:
    order = np.array([2, 0, 4, 1, 3, 5])  # the last token stays where it is
    batch, params = batch_of(np.stack([np.arange(3, 9), np.arange(3, 9)[order]])), model(PLAIN, 4)
    two = logits(params, PLAIN, batch)
    one = logits(first_layer_only(params), PLAIN, batch)
    gap = np.max(np.abs(two[1] - two[0][order]))
    yield at_least(
        "causal", Words("max |f(Px) − P f(x)|, two layers", "max |f(Px) − P f(x)|，两层"), gap, 0.1, "float32"
    )
    label = Words("last token, others permuted, two layers", "打乱其余词元，最后一个词元的变化，两层")
    yield at_least("two", label, np.max(np.abs(two[1, -1] - two[0, -1])), 0.01, "float32")
    label = Words("the same, one layer", "同上，一层")
    yield at_most("one", label, np.max(np.abs(one[1, -1] - one[0, -1])), 400 * U, "float32")


@g04.full
def trained_without_positions(folder: Path) -> Numbers:
    from experiments.claims import positions_trained

    yield from positions_trained.without_positions(folder)


def first_layer_only(params: Transformer) -> Transformer:
    """The same with what the second layer adds to the residual stream set to 0."""
    outputs = ("wo_NHD", "w2_FD", "b2_D")

    def cut(path: Any, leaf: jax.Array) -> jax.Array:
        return leaf.at[1].set(0) if str(path[-1]).strip(".") in outputs else leaf

    return jax.tree_util.tree_map_with_path(cut, params)


g05 = chapter.claim(
    "G05",
    "S1 §6.2, S2 §3.2",
    Verdict.TRUE,
    Words(
        "Position pos has sines in its even coordinates and cosines in its odd ones, at the angles pos / 10000^{2i/d}.",
        "位置 pos 的偶数维是正弦、奇数维是余弦，角度为 pos / 10000^{2i/d}。",
    ),
    formula=r"PE_{pos, 2i} = \sin \frac{pos}{10000^{2i/d}}, \quad PE_{pos, 2i+1} = \cos \frac{pos}{10000^{2i/d}}",
    uses=(sinusoidal,),
)


@g05.quick
def sinusoid() -> Numbers:
    D, gap = 16, 0.0
    table = library(np.arange(100), D)
    for pos in range(100):
        for i in range(D // 2):
            angle = pos / 10_000 ** (2 * i / D)
            gap = max(gap, abs(table[pos, 2 * i] - math.sin(angle)), abs(table[pos, 2 * i + 1] - math.cos(angle)))
    yield at_most("gap", Words("max error, 100 positions", "100 个位置上的最大误差"), gap, error(99), "float32")


g06 = chapter.claim(
    "G06",
    "S2 §3.2",
    Verdict.IMPRECISE,
    Words("i is the dimension of the vector that the formula fills.", "公式中的 i 指向量的第 i 个维度。"),
    finding=Words(
        "i numbers pairs, dimensions 2i and 2i + 1, which turn together on a circle: of the {adjacent:.0f} pairs of "
        "neighbouring columns of a table of 16, {circles:.0f} do.",
        "i 是“对”的编号，对应第 2i 和 2i + 1 两维，二者一起在圆上转动：16 列的表中有 {adjacent:.0f} 对相邻的列，"
        "其中 {circles:.0f} 对如此。",
    ),
    uses=(sinusoidal,),
)


@g06.quick
def pairs() -> Numbers:
    squares = library(np.arange(100) * 661, 16) ** 2
    off = np.max(np.abs(squares[:, :-1] + squares[:, 1:] - 1), axis=0)
    yield near(
        "circles", Words("neighbours with PE² + PE² = 1", "平方和为 1 的相邻列"), np.sum(off < 8 * U), 8, 0, "float32"
    )
    yield near("adjacent", Words("neighbours", "相邻列的对数"), len(off), 15, 0, "int64")
    yield at_most(
        "even", Words("largest deviation, (2i, 2i + 1)", "(2i, 2i + 1) 的最大偏差"), max(off[::2]), 8 * U, "float32"
    )
    yield at_least(
        "odd", Words("least, (2i + 1, 2i + 2)", "(2i + 1, 2i + 2) 的最小偏差"), min(off[1::2]), 0.1, "float32"
    )


g07 = chapter.claim(
    "G07",
    "S1 §6.2",
    Verdict.WRONG,
    Words("Each position is a coordinate of 2i dimensions.", "位置编码把每个位置表示为 2i 维空间里的一点。"),
    finding=Words(
        "Of d dimensions, for every i: i is an index that runs to d/2 − 1. A table of d = 8 has {columns:.0f} columns "
        "and rank {rank:.0f}.",
        "是 d 维的，与 i 无关：i 只是从 0 到 d/2 − 1 的下标。d = 8 的表有 {columns:.0f} 列，秩为 {rank:.0f}。",
    ),
    uses=(sinusoidal,),
)


@g07.quick
def dimensions() -> Numbers:
    table = library(np.arange(64) * 61, 8)
    yield near("columns", Words("columns, d = 8", "列数，d = 8"), table.shape[1], 8, 0, "int64")
    # Rounding is far below a singular value of a tenth of the largest.
    sizes = np.linalg.svd(table, compute_uv=False)
    yield near("rank", Words("rank", "秩"), np.sum(sizes > 0.1 * sizes[0]), 8, 0, "float32")


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
    yield at_most("float32", Words("the library's table", "程序的表"), gap, 3 * error(100 + k), "float32")
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
    spread = 5 * float(np.std(shares)) / math.sqrt(len(shares))
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
        "PE·PE is a function of the offset ({at0:.0f} at 0, {at50:.1f} at 50 for d = 512), but it falls only to "
        "{turns:.0f} and then rises, so that it does not order distances; and attention has W_Q and W_K in between: "
        "with random ones, the offset explains {r2:.0%} of the variance of position scores among 64 positions.",
        "PE·PE 确是相对距离的函数（d = 512 时，距离 0 处为 {at0:.0f}，50 处为 {at50:.1f}），但只下降到 {turns:.0f} "
        "为止，随后回升，因此不能给远近排序；而且注意力的内积中间隔着 W_Q 和 W_K：随机权重下，64 个位置之间的位置得分的"
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
        "the first 65,536 all differ, by {least:.2f} at least for d = 64. Were positions cast to bfloat16 first, "
        "{coarse:.0f} different ones would be left: the library's RoPE refuses such positions.",
        "只在精确运算中成立。float32 下位置 16777217 与 16777216 的向量相同（距离 {alias:.0f}）；前 65536 个位置各不"
        "相同，d = 64 时最小距离为 {least:.2f}。若先把位置转成 bfloat16，就只剩 {coarse:.0f} 个不同的位置："
        "程序的 RoPE 拒绝这样的位置。",
    ),
    uses=(sinusoidal, rotation),
)


@g12.quick
def uniqueness() -> Numbers:
    n = 65_536
    rows = np.asarray(sinusoidal(jnp.arange(n)[None], 8)[0])
    distinct = len(np.unique(rows.view(np.dtype((np.void, rows.itemsize * 8)))))
    yield near("distinct", Words("different vectors of 65,536", "65536 个位置中不同的向量"), distinct, n, 0, "float32")
    far = np.arange(1, n)
    apart = np.sqrt(sum(2 - 2 * np.cos(far * turn) for turn in theta(64)))
    pair = library(np.array([0, 1]), 64)
    label = Words("least distance of two positions, d = 64", "两个位置的最小距离，d = 64")
    yield near("least", label, np.linalg.norm(pair[1] - pair[0]), apart.min(), 16 * U, "float32")
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
    table = library(np.arange(40, dtype=np.float32) / 2, D)
    gap = np.max(np.abs(table[1::2] - table[0::2] @ half.T))
    yield at_most(
        "half", Words("max |PE(pos + ½) − M½ PE(pos)|", "max |PE(pos + ½) − M½ PE(pos)|"), gap, 3 * error(20), "float32"
    )


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
)


@g16.full
def sines_and_cosines(folder: Path) -> Numbers:
    from experiments.claims import positions_trained

    yield from positions_trained.sines(folder)
