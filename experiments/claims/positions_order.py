"""Chapter G, its first part: embeddings, order, the sinusoidal table (S1 §2.1 and §6, S2 §3)."""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims.drawn import U, batch_of, logits, model, normal
from experiments.claims.record import Chapter, Numbers, Verdict, Words, at_least, at_most, near
from transformer_jax.attention import attend
from transformer_jax.config import Config, Hyper
from transformer_jax.embedding import Embedding, embed, unembed
from transformer_jax.encoder_decoder import Transformer, forward
from transformer_jax.masks import causal
from transformer_jax.positions import sinusoidal

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
        "Attention is invariant under permutations: “I love eating apples” and “apples love eating me” have the same "
        "representation.",
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
        "Asked which of two symbols came first, without positions: a causal model is right in {first_causal:.1%}, a "
        "bidirectional one in {first_blind:.1%} ({first_runs:.0f} runs, none farther than {first_off:.1%} from one "
        "half); with positions the latter is right in {first_told:.1%}. On a chain in which the last two symbols, in "
        "their order, decide the next, the causal model reaches {causal_nats:.2f} nats (least possible: {floor:.2f}), "
        "the bidirectional one, which even sees the answer among its tokens, {bidirectional_nats:.2f}. The last symbol "
        "alone leaves {one:.2f}: the causal model has learnt a part of the order, not all of it.",
        "问两个符号哪个在前，不加位置编码：因果模型答对 {first_causal:.1%}，双向模型在各学习率共 {first_runs:.0f} 次训"
        "练中平均答对 {first_blind:.1%}（偏离一半不超过 {first_off:.1%}），加上位置编码则答对 {first_told:.1%}。在由前"
        "两个符号及其次序决定下一个符号的链上，因果模型达到 {causal_nats:.2f} nat（可能的最小值为 {floor:.2f}）；双向"
        "模型的输入里甚至包含答案，却只到 {bidirectional_nats:.2f}。仅凭最后一个符号则为 {one:.2f}：因果模型只学到部分"
        "次序信息。",
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
    from experiments.claims import positions_apart, positions_trained

    yield from positions_apart.which_came_first(folder / "first")
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
