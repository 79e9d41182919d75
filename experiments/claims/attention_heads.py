"""Chapter H, its first part: queries, keys and values, one head and several (S1 §2, S2 §4-5)."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims.attention_loops import (
    ROUND,
    by_loop,
    drawn,
    gap,
    heads_by_loop,
    jit,
    normal,
    rounding,
)
from experiments.claims.record import Chapter, Numbers, Verdict, Words, at_most, near
from transformer_jax import masks
from transformer_jax.attention import attend, attention, init_attention, keys_values
from transformer_jax.config import Config, Hyper
from transformer_jax.numerics import product
from transformer_jax.scores import Scoring, attention_scores

chapter = Chapter("H", Words("Attention, heads and feed-forward nets", "注意力、多头与前馈网络"))

HYPER = Hyper()
BARE = Scoring(dk_exponent=0.0)  # q·k itself
F32 = "float32"
ALL = masks.full()


def one_head(*arrays: np.ndarray) -> tuple[jax.Array, ...]:
    """[T, H] -> [1, T, 1, H] each."""
    return tuple(jnp.asarray(x[None, :, None]) for x in arrays)


# --- queries, keys, values ---------------------------------------------------------

h01 = chapter.claim(
    "H01",
    "S1 §2.1",
    Verdict.TRUE,
    Words(
        "Ten words of width 512 times a 512 × 64 matrix give Q, and likewise K and V, of ten rows and 64 columns.",
        "10 个 512 维的词乘以 512 × 64 的矩阵得到 Q，K 与 V 亦然，各为 10 行 64 列。",
    ),
    formula=r"Q = X W_Q, \quad (10, 512)\,(512, 64) \to (10, 64)",
    uses=(init_attention, keys_values, product),
)


@h01.quick
def projections() -> Numbers:
    config = Config(d_model=512, num_heads=1, head_dim=64)
    weights, x = drawn(init_attention, config, 512**-0.5), normal(1, 10, 512)
    held = keys_values(weights, jnp.asarray(x[None]), config)
    made = (product("btd,dnh->btnh", jnp.asarray(x[None]), weights.wq_DNH), held.k_BSKH, held.v_BSKH)
    matrices = [np.asarray(w, np.float64)[:, 0] for w in (weights.wq_DNH, weights.wk_DKH, weights.wv_DKH)]
    right = sum(y.shape == (1, 10, 1, 64) for y in made)
    yield near("right", Words("of Q, K, V: ten rows of 64", "Q、K、V 中形状为 10 × 64 的个数"), right, 3, dtype=F32)
    worst = max(gap(y[0, :, 0], x @ w) for y, w in zip(made, matrices, strict=True))
    label = Words("max difference from the float64 product", "与 float64 乘积的最大差")
    yield at_most("gap", label, worst, max(rounding(x, w) for w in matrices), F32)


h02 = chapter.claim(
    "H02",
    "S1 §2.1",
    Verdict.IMPRECISE,
    Words(
        "Multiplying by W_Q combines rotations, scalings and stretches of a vector.",
        "乘以 W_Q 就是对向量做旋转、缩放与拉伸的组合。",
    ),
    formula=r"W_Q = U \Sigma V^\top, \quad \mathrm{rank}\, W_Q \le 64",
    finding=Words(
        "It also forgets: a head's 512 × 64 matrix has rank {rank:d}, and along {null:d} directions a change of "
        "the input changes no query. A random direction keeps {kept:.3f} of its squared length.",
        "它还会丢弃信息：一个头的 512 × 64 矩阵的秩为 {rank:d}，输入沿其余 {null:d} 个方向的改动不影响查询；"
        "随机方向的平方长度平均只保留 {kept:.3f}。",
    ),
    uses=(init_attention, product),
)


@h02.quick
def forgets() -> Numbers:
    config = Config(d_model=512, num_heads=8)
    w = jit(lambda key: init_attention(key, config).wq_DNH[:, :1])(jax.random.key(0))
    seen, rest = np.linalg.qr(np.asarray(w[:, 0], np.float64))  # [512, 64] times [64, 64]
    sizes = np.linalg.svd(rest, compute_uv=False)
    rank = int(np.sum(sizes > sizes[0] * 512 * np.finfo(np.float64).eps))
    yield near("rank", Words("rank of a head's W_Q", "一个头的 W_Q 的秩"), rank, 64)
    yield near("null", Words("input directions that it forgets", "被丢弃的输入方向数"), 512 - rank, 448)
    directions = np.random.default_rng(1).standard_normal((1000, 512))
    share = np.sum((directions @ seen) ** 2, axis=1) / np.sum(directions**2, axis=1)
    # The share is Beta(32, 224): mean 1/8, variance 32·224 / (256² 257).
    error = 5 * math.sqrt(32 * 224 / (256**2 * 257) / 1000)
    yield near("kept", Words("squared length kept, mean", "平方长度的平均保留比例"), share.mean(), 1 / 8, error)
    x, silent = normal(2, 10, 512), normal(3, 10, 512).astype(np.float64)
    silent = (silent - silent @ seen @ seen.T).astype(np.float32)
    here, there = (product("btd,dnh->btnh", jnp.asarray(y[None]), w) for y in (x, x + silent))
    bound = rounding(x, np.asarray(w)) + rounding(x + silent, np.asarray(w))
    label = Words("max |ΔQ| for a change as large as x along them", "沿这些方向作与 x 同大的改动时 max |ΔQ|")
    yield at_most("moved", label, gap(here, there), bound, F32)


h03 = chapter.claim(
    "H03",
    "S1 §2.2, S3 §6",
    Verdict.IMPRECISE,
    Words(
        "The dot product says how far two vectors agree in direction: larger for smaller angles, about 0 at a right "
        "angle, negative for obtuse ones.",
        "点积衡量两个向量方向的一致程度：夹角越小越大，直角附近为零，钝角为负。",
    ),
    formula=r"q \cdot k = |q|\,|k| \cos\theta",
    finding=Words(
        "The sign is right, the order need not be: a key ten times as long at 60° scores {far:.3g}, an aligned one "
        "{same:.3g}, and it takes {share:.2f} of the weight. Only where all have one length, as with QK norm, does the "
        "angle decide: {far_normed:.3f} against {same_normed:.3f}.",
        "符号没错，大小却未必：长十倍、夹角 60° 的键得分为 {far:.3g}，方向完全一致的键只有 {same:.3g}，"
        "前者占去 {share:.2f} 的权重。只有长度都相等（如 QK 归一化）时才由夹角决定："
        "{far_normed:.3f} 对 {same_normed:.3f}。",
    ),
    uses=(attention_scores, attend, attention),
)


@h03.quick
def angles() -> Numbers:
    # Name -> (angle in degrees, its cosine, length of the key); the query is (1, 0).
    keys = {"far": (60, 0.5, 10), "same": (0, 1.0, 1), "right": (90, 0.0, 1), "obtuse": (135, -math.sqrt(0.5), 1)}
    table = [[size * cosine, size * math.sqrt(1 - cosine**2)] for _, cosine, size in keys.values()]
    q, k = one_head(np.array([[1.0, 0.0]], np.float32), np.array(table, np.float32))
    # With the identity as projections and unit scales, the norm makes every query and key √2 long.
    config, eye = Config(d_model=2, num_heads=1, qk_norm=True, norm_epsilon=1e-12), jnp.eye(2)
    params = drawn(init_attention, config, 1.0).replace(
        wq_DNH=eye[:, None], wk_DKH=eye[:, None], q_scale_H=jnp.ones(2), k_scale_H=jnp.ones(2)
    )

    @jit
    def scores(q: jax.Array, k: jax.Array) -> tuple[jax.Array, ...]:
        _, trace = attention(params, q[:, :, 0], k[:, :, 0], ALL, config, HYPER, trace=True)
        assert trace is not None
        made = attention_scores(q, k, BARE), attend(q, k, k, weights=True)[1], trace.scores_BNTS
        return tuple(x[0, 0, 0] for x in made)

    plain, weights, normed = scores(q, k)
    for (name, (angle, cosine, size)), score in zip(keys.items(), plain, strict=True):
        label = Words(f"score at {angle}°, |k| = {size}", f"夹角 {angle}°、|k| = {size} 的得分")
        yield near(name, label, score, size * cosine, 4 * ROUND * size, F32)
    powers = [math.exp(row[0] / math.sqrt(2)) for row in table]
    label = Words("weight of the long key", "长键的注意力权重")
    yield near("share", label, weights[0], powers[0] / sum(powers), 20 * ROUND, F32)
    for (name, (angle, cosine, _)), score in zip(keys.items(), normed, strict=True):
        label = Words(f"with QK norm, {angle}°", f"QK 归一化后，{angle}°")
        yield near(f"{name}_normed", label, score, math.sqrt(2) * cosine, 10 * ROUND, F32)


h04 = chapter.claim(
    "H04",
    "S2 §4.1",
    Verdict.IMPRECISE,
    Words("Q, K and V are all N × d_k.", "Q、K、V 都是 N × d_k 的矩阵。"),
    formula=r"Q = X W^Q, \; K = X W^K, \; V = X W^V",
    finding=Words(
        "Only Q and K must share a width. V is N × d_v, and so is the output: {width:d} wide here with d_k = 4. That "
        "they are equal is custom, d_k = d_v = d/h: {per_head:d} for d = 512 and h = 8.",
        "只有 Q 与 K 必须同宽；V 是 N × d_v，输出也是：此例 d_k = 4，而输出宽 {width:d}。"
        "两者相等只是惯例，d_k = d_v = d/h：d = 512、h = 8 时为 {per_head:d}。",
    ),
    uses=(attend, init_attention),
)


@h04.quick
def widths() -> Numbers:
    q, k, v = normal(0, 5, 4), normal(1, 5, 4), normal(2, 5, 6)
    out = jit(attend)(*one_head(q, k, v))
    label = Words("width of the output, d_k = 4, d_v = 6", "输出宽度（d_k = 4、d_v = 6）")
    yield near("width", label, out.shape[-1], 6, dtype=F32)
    label = Words("max difference from a loop", "与循环计算的最大差")
    yield at_most("gap", label, gap(out[0, :, 0], by_loop(q, k, v)[0]), 40 * ROUND * np.max(np.abs(v)), F32)
    weights = drawn(init_attention, Config(d_model=512, num_heads=8), 1.0)
    yield near("per_head", Words("d_k, d = 512, h = 8", "d = 512、h = 8 时的 d_k"), weights.wq_DNH.shape[2], 64)
    yield near("values", Words("d_v of the same", "同例的 d_v"), weights.wv_DKH.shape[2], 64)


# --- one attention -----------------------------------------------------------------

h05 = chapter.claim(
    "H05",
    "S2 §4.2, S1 §8.1",
    Verdict.TRUE,
    Words(
        "The scores are N × N, one for each query and key, however wide the vectors are.",
        "得分矩阵是 N × N，每对查询与键一个数，与向量维度无关。",
    ),
    formula=r"S = Q K^\top \in \mathbb{R}^{N \times N}, \quad s_{ij} = q_i \cdot k_j",
    uses=(attention_scores,),
)


@h05.quick
def score_matrix() -> Numbers:
    q, k = normal(0, 10, 64), normal(1, 10, 64)
    scores = attention_scores(jnp.asarray(q[None, :, None]), jnp.asarray(k[None, :, None]), BARE)[0, 0]
    yield near("rows", Words("rows, N = 10, d_k = 64", "行数（N = 10、d_k = 64）"), scores.shape[0], 10, dtype=F32)
    yield near("columns", Words("columns", "列数"), scores.shape[1], 10, dtype=F32)
    want = np.array([[sum(float(a) * float(b) for a, b in zip(row, key, strict=True)) for key in k] for row in q])
    label = Words("max |s_ij − q_i·k_j|", "max |s_ij − q_i·k_j|")
    yield at_most("gap", label, gap(scores, want), rounding(q, k.T), F32)


h06 = chapter.claim(
    "H06",
    "S2 §4.4, S2 §4.5",
    Verdict.TRUE,
    Words(
        "Each row of weights is a probability distribution, and the output is the weighted mean of the values.",
        "权重矩阵的每一行是一个概率分布，输出是值向量的加权平均。",
    ),
    formula=r"a_{ij} \ge 0, \; \sum_j a_{ij} = 1, \quad \min_j v_{jc} \le (AV)_{ic} \le \max_j v_{jc}",
    uses=(attend, masks.causal),
)


@h06.quick
def distributions() -> Numbers:
    q, k, v = (3 * normal(seed, 2, 9, 4, 5) for seed in range(3))
    both = jit(lambda q, k, v: (attend(q, k, v, weights=True), attend(q, k, v, masks.causal())))
    (out, weights), causal = jax.tree.map(lambda x: np.asarray(x, np.float64), both(q, k, v))
    error, size = 20 * ROUND, float(np.max(np.abs(v)))  # nine powers and their sum; a mean of nine values
    off = np.max(np.abs(weights.sum(axis=-1) - 1))
    yield at_most("sum", Words("max |Σ_j a_ij − 1|", "max |Σ_j a_ij − 1|"), off, error, F32)
    scores = np.einsum("btnh,bsnh->bnts", *(x.astype(np.float64) for x in (q, k))) / math.sqrt(5)
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    least = np.min(powers / powers.sum(axis=-1, keepdims=True))
    # A score errs by five roundings of its size, a weight by as much of itself.
    slack = 10 * ROUND * float(np.max(np.abs(scores)))
    yield near(
        "least", Words("smallest weight over its formula", "最小权重与公式值之比"), weights.min() / least, 1, slack, F32
    )
    want = np.einsum("bnts,bsnh->btnh", weights, v)
    yield at_most("gap", Words("max |output − AV|", "max |输出 − AV|"), gap(out, want), error * size, F32)
    outside = np.maximum(v.min(axis=1, keepdims=True) - out, out - v.max(axis=1, keepdims=True)).max()
    label = Words("how far a coordinate leaves the values' range", "输出坐标超出值的范围多少")
    yield at_most("outside", label, outside, error * size, F32)
    label = Words("row 0 under the causal mask, against v_0", "因果掩码下第 0 行与 v_0 之差")
    yield at_most("first", label, gap(causal[:, 0], v[:, 0]), 0.0, F32)  # of one key the mean is its value


h07 = chapter.claim(
    "H07",
    "S0 §3, S1 §2.2, S2 §4.5, S3 §3",
    Verdict.TRUE,
    Words(
        "Attention is the softmax of the scaled scores times the values.",
        "注意力等于缩放后得分的 softmax 再乘以值矩阵。",
    ),
    formula=r"\mathrm{Attention}(Q, K, V) = \mathrm{softmax}\left(\frac{Q K^\top}{\sqrt{d_k}}\right) V",
    uses=(attend,),
)


@h07.quick
def formula() -> Numbers:
    q, k, v = (normal(seed, 2, 7, 3, 5) for seed in range(3))
    want = np.zeros(q.shape)
    for b, n in np.ndindex(2, 3):
        want[b, :, n] = by_loop(q[b, :, n], k[b, :, n], v[b, :, n])[0]

    @jit
    def made(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[Any, ...]:
        blocks = attend(q, k, v, implementation="blockwise", block=3)
        return attend(q, k, v), blocks, jax.nn.dot_product_attention(q, k, v)

    labels = {
        "dense": Words("max difference from a loop", "与循环计算的最大差"),
        "blockwise": Words("in blocks of 3 keys", "按 3 个键一块计算"),
        "jax": Words("jax.nn.dot_product_attention", "jax.nn.dot_product_attention"),
    }
    # A score of size 5 errs by five roundings of that, and a weight by as much relative to itself.
    for (name, label), out in zip(labels.items(), made(q, k, v), strict=True):
        yield at_most(name, label, gap(out, want), 40 * ROUND * np.max(np.abs(v)), F32)


# --- heads -------------------------------------------------------------------------

h08 = chapter.claim(
    "H08",
    "S2 §5",
    Verdict.TRUE,
    Words(
        "h heads with matrices of their own are computed side by side, joined to width h·d_v = d and multiplied by "
        "W^O; the output is as wide as the input.",
        "h 个头各用自己的矩阵并行计算，拼接成宽度 h·d_v = d，再乘以 W^O，输出与输入同宽。",
    ),
    formula=r"\mathrm{MultiHead}(X) = \mathrm{Concat}(\mathrm{head}_1, \ldots, \mathrm{head}_h)\, W^O",
    uses=(init_attention, attention),
)


@h08.quick
def multi_head() -> Numbers:
    config, x = Config(d_model=64, num_heads=8), normal(1, 6, 64)
    weights = drawn(init_attention, config, 1 / 8)
    out, trace = jit(lambda x: attention(weights, x, x, ALL, config, HYPER, trace=True))(x[None])
    label = Words("max difference from a head at a time", "与逐头计算的最大差")
    # Three products of 64 terms of size 1 stand one behind the other.
    yield at_most("gap", label, gap(out[0], heads_by_loop(weights, x)), 3 * 64 * ROUND, F32)
    assert trace is not None
    yield near("heads", Words("heads", "头数"), trace.weights_BNTS.shape[1], 8, dtype=F32)
    yield near("width", Words("width of the output, d = 64", "输出宽度（d = 64）"), out.shape[-1], 64, dtype=F32)
