"""Chapter H: queries, keys and values, heads, cross-attention, feed-forward nets, shapes (S1 §2, §7; S2 §4–8)."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims import attention_models, attention_trained
from experiments.claims.attention_loops import (
    ROUND,
    by_loop,
    count,
    drawn,
    gap,
    heads_by_loop,
    jit,
    net_by_numpy,
    normal,
    rounding,
)
from experiments.claims.record import Chapter, Numbers, Verdict, Words, at_least, at_most, near
from transformer_jax import masks
from transformer_jax.attention import attend, attention, init_attention, keys_values
from transformer_jax.config import Config, Hyper
from transformer_jax.embedding import embed, unembed
from transformer_jax.encoder_decoder import encode, forward, init_transformer
from transformer_jax.ffn import ffn, init_ffn
from transformer_jax.numerics import product
from transformer_jax.scores import Scoring, attention_scores, masked_softmax

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
    config, eye = Config(d_model=2, num_heads=1, qk_norm=True, norm_epsilon=0.0), jnp.eye(2)
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
    yield at_least("least", Words("smallest weight", "最小权重"), weights.min(), 0.0, F32)
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


h09 = chapter.claim(
    "H09",
    "S2 §5",
    Verdict.EMPIRICAL,
    Words(
        "One head catches one view of the context only; several catch several relations at once.",
        "单头只能捕捉一个视角，多头能同时捕捉多种关系。",
    ),
    formula=r"4 d^2 \;\; (h = 1, 2, 4, \ldots)",
    finding=Words(
        "They can be compared at equal size: 1 to 16 heads all have 4d² = {weights:,.0f} weights at d = 64.",
        "可以在同等规模下比较：d = 64 时，1 到 16 个头的参数都是 4d² = {weights:,.0f} 个。",
    ),
    learned=Words(
        "On text, each at its best rate, the validation loss of 4 heads differs from that of one by {four_mean:+.3f} "
        "nats, that of 8 by {eight_mean:+.3f}, that of 16, which are 4 wide, by {sixteen_mean:+.3f}.",
        "在文本上、各取最佳学习率时，4 头的验证损失与单头相差 {four_mean:+.3f} nat，8 头相差 {eight_mean:+.3f}，"
        "每头仅 4 维的 16 头相差 {sixteen_mean:+.3f}。",
    ),
    uses=(init_attention,),
)


@h09.quick
def same_size() -> Numbers:
    sizes = [count(init_attention, Config(d_model=64, num_heads=h)) for h in (1, 2, 4, 8, 16)]
    yield near("weights", Words("weights of one head", "单头的参数个数"), sizes[0], 4 * 64**2)
    label = Words("most less fewest, 1 to 16 heads", "1 到 16 头的最大差")
    yield near("spread", label, max(sizes) - min(sizes), 0)


h09.full(attention_trained.heads)


h10 = chapter.claim(
    "H10",
    "S1 §7.1",
    Verdict.IMPRECISE,
    Words(
        "The D dimensions are cut into H parts, D = H × D_head, and each head works in a subspace of its own.",
        "D 维空间被切成 H 份，D = H × D_head，每个头在各自的子空间里做注意力。",
    ),
    formula=r"D = H \times D_{head}, \quad \frac{\partial\, \mathrm{head}_h}{\partial x_d} \ne 0",
    finding=Words(
        "What is cut is the projection, not the input: {pairs:d} of the 16 derivatives of 2 heads by 8 inputs are not "
        "0. Nor need H × D_head be D: two heads of 6 on D = 8 give {width:d} outputs.",
        "被切分的是投影结果而不是输入：2 个头对 8 个输入的 16 组导数有 {pairs:d} 组非零。"
        "H × D_head 也不必等于 D：D = 8 时用两个 6 维的头，输出仍为 {width:d} 维。",
    ),
    uses=(init_attention, attention),
)


@h10.quick
def every_input() -> Numbers:
    config, x = Config(d_model=8, num_heads=2), normal(1, 1, 3, 8)
    # With the identity for W^O, the output is the heads, side by side.
    weights = drawn(init_attention, config, 0.35).replace(wo_NHD=jnp.eye(8).reshape(2, 4, 8))
    slopes = jit(jax.jacfwd(lambda x: attention(weights, x, x, ALL, config, HYPER)[0]))(x)
    by_head = np.abs(np.asarray(slopes)).reshape(3, 2, 4, 3, 8).max(axis=(0, 2, 3))
    label = Words("pairs of head and input with a slope", "导数非零的（头, 输入）对数")
    yield near("pairs", label, np.count_nonzero(by_head), 16, dtype=F32)
    # Ten thousand times what rounding leaves of sums that cancel.
    yield at_least("least", Words("the least of their slopes", "其中最小者"), by_head.min(), 1e4 * ROUND, F32)
    wide = Config(d_model=8, num_heads=2, head_dim=6)
    out = jax.eval_shape(lambda x: attention(drawn(init_attention, wide, 1.0), x, x, ALL, wide, HYPER)[0], x)
    label = Words("outputs of two heads of 6, D = 8", "D = 8、两个 6 维头的输出宽度")
    yield near("width", label, out.shape[-1], 8, dtype=F32)


# --- shapes ------------------------------------------------------------------------

h11 = chapter.claim(
    "H11",
    "S1 §7.1",
    Verdict.TRUE,
    Words(
        "From the input to the feed-forward net every array has the shape that the table lists; the example has B = 2, "
        "L = 4, D = 8, H = 2.",
        "从输入到前馈网络，每一步张量的形状都如对照表所列，以 B = 2、L = 4、D = 8、H = 2 为例。",
    ),
    formula=r"(B, L) \to (B, L, D) \to (B, H, L, D_{head}) \to (B, H, L, L) \to (B, L, D)",
    finding=Words(
        "All {right:d} shapes are as listed. But the input is integer ids, not text, and X W_Q is (B, L, D) until it "
        "is reshaped and transposed.",
        "{right:d} 个形状全部相符。只是输入是整数编号而非文本，而 X W_Q 在变形和转置之前仍是 (B, L, D)。",
    ),
    uses=(embed, attention, attention_scores, masked_softmax, ffn, unembed),
)

h11.quick(attention_models.shape_table)


# --- the feed-forward net ------------------------------------------------------------

h12 = chapter.claim(
    "H12",
    "S1 §7.1, S2 §6",
    Verdict.TRUE,
    Words(
        "The feed-forward net is two linear layers with a ReLU between, four times as wide inside, and takes each "
        "position by itself; newer models use GELU or SwiGLU.",
        "前馈网络是两层线性变换夹一个 ReLU，中间层宽四倍，对每个位置单独作用；新模型也用 GELU 或 SwiGLU。",
    ),
    formula=r"\mathrm{FFN}(x) = \max(0, x W_1 + b_1)\, W_2 + b_2, \quad d_{ff} = 4 d",
    finding=Words(
        "SwiGLU has a third matrix: at {gated:d} inner units instead of {width:d}, two thirds, it has {ratio:.4f} "
        "times the weights.",
        "SwiGLU 多一个矩阵：中间层取三分之二，即 {gated:d} 而非 {width:d} 时，参数个数是原来的 {ratio:.4f} 倍。",
    ),
    uses=(init_ffn, ffn),
)


@h12.quick
def feed_forward() -> Numbers:
    x, moved = normal(1, 4, 8), normal(1, 4, 8)
    moved[2] += 1.0  # one position alone
    for kind in ("relu", "gelu", "swiglu"):
        config = Config(d_model=8, ffn=kind, d_ff=32)
        net = drawn(init_ffn, config, 0.3, 2)
        run = jit(lambda x, net=net, config=config: ffn(net, x[None], config, HYPER)[0])
        want = net_by_numpy(kind, net, x.astype(np.float64))
        label = Words(f"{kind}: max difference from the formula", f"{kind}：与公式的最大差")
        # Sums of 8 and 32 terms, each rounded, of numbers up to the size of the inner ones.
        yield at_most(kind, label, gap(run(x), want), 64 * ROUND * max(4.0, float(np.max(np.abs(want)))), F32)
        if kind == "relu":
            change = np.abs(np.asarray(run(moved) - run(x))).max(axis=1)
            label = Words("positions that change with another's input", "因其他位置的改动而改变的位置数")
            yield near("others", label, np.count_nonzero(np.delete(change, 2)), 0, dtype=F32)
            yield at_least("own", Words("change of the position itself", "该位置自身的改变"), change[2], 1e-3, F32)
    wide = [Config(d_model=512, ffn=kind, ffn_bias=False, match_ffn_parameters=True) for kind in ("relu", "swiglu")]
    yield near("width", Words("d_ff, d = 512", "d = 512 时的 d_ff"), wide[0].F, 2048)
    yield near("gated", Words("d_ff of SwiGLU, 8d/3", "SwiGLU 的 d_ff，即 8d/3"), wide[1].F, 8 * 512 / 3, 0.5)
    ratio = count(init_ffn, wide[1]) / count(init_ffn, wide[0])
    yield near("ratio", Words("its weights over ReLU's", "与 ReLU 的参数之比"), ratio, 1.0, 0.5 / (8 * 512 / 3))


h13 = chapter.claim(
    "H13",
    "S2 §6",
    Verdict.EMPIRICAL,
    Words(
        "Attention learns relations between words, the feed-forward net transforms each word; its widening and "
        "narrowing makes the model far more expressive.",
        "注意力学习词与词的关系，前馈网络对每个词做非线性变换；维度先扩大再缩小使表达能力有飞跃性的提升。",
    ),
    formula=r"\frac{8 d^2}{4 d^2 + 8 d^2} = \frac{2}{3}",
    finding=Words(
        "At d_ff = 4d the net holds {share:.4f} of a layer's weights: its gain is to be weighed against that.",
        "d_ff = 4d 时，前馈网络占一层参数的 {share:.4f}：收益须与这一代价相权衡。",
    ),
    learned=Words(
        "On text, d_ff = 4d differs by {net_mean:+.3f} nats from a net of one unit, by {expansion_mean:+.3f} from "
        "d_ff = d, and by {depth_mean:+.3f} from as many weights in twice the layers with d_ff = d.",
        "在文本上，d_ff = 4d 与只有一个单元的网络相差 {net_mean:+.3f} nat，与 d_ff = d 相差 {expansion_mean:+.3f}，"
        "与层数加倍、d_ff = d 而参数同样多的模型相差 {depth_mean:+.3f}。",
    ),
    uses=(init_attention, init_ffn),
)


@h13.quick
def share_of_weights() -> Numbers:
    config = Config(d_model=64, ffn="relu", ffn_bias=False)
    net, heads = count(init_ffn, config), count(init_attention, config)
    label = Words("the net's share of a layer's weights", "前馈网络占一层参数的比例")
    yield near("share", label, net / (heads + net), 2 / 3, 1e-12)


h13.full(attention_trained.widths)


# --- encoder and decoder -------------------------------------------------------------

h14 = chapter.claim(
    "H14",
    "S2 §8.2",
    Verdict.IMPRECISE,
    Words(
        "In cross-attention Q comes from the decoder layer before, K and V from the encoder's last layer.",
        "交叉注意力的 Q 来自前一个解码器层，K 与 V 来自编码器最后一层的输出。",
    ),
    formula=r"Q = X_{dec} W^Q, \; K = X_{enc} W^K, \; V = X_{enc} W^V",
    finding=Words(
        "Q comes from the sub-layer before, self-attention in the same layer: in the first layer, another token 0 "
        "moves the scores of position 3 by {before:.2g}. The rest holds: T × S scores, every real source token seen, "
        "no effect of padding or of the future, and in both layers K follows the encoder's last layer.",
        "Q 来自前一个子层，即同一层的自注意力：在第一层，改动第 0 个词元会使位置 3 的得分变动 {before:.2g}。"
        "其余都成立：得分为 T × S，真实的源词元全部可见，填充与未来毫无影响，"
        "两个层的 K 都随编码器最后一层而变。",
    ),
    uses=(init_transformer, forward, masks.cross),
)


h14.quick(attention_models.cross)


h15 = chapter.claim(
    "H15",
    "S2 §8.2",
    Verdict.EMPIRICAL,
    Words(
        "Through cross-attention the model learns which part of the source the word being written belongs to.",
        "借助交叉注意力，模型能学到正在翻译的词与原文哪个部分相关。",
    ),
    finding=Words(
        "Where it is known what belongs together, it does: the largest weight of a single head stands on the right "
        "source token in {copy:.3f} of cases on copying and {reverse:.3f} on reversing, in the worst of the seeds. "
        "With several heads no single one need do so.",
        "在对应关系已知的任务上确实如此：各种子中最差者，单头的最大权重落在正确源词元上的比例，"
        "复制任务为 {copy:.3f}，反转任务为 {reverse:.3f}。若有多个头，则未必由某一个头独自对齐。",
    ),
    uses=(forward,),
)
h15.full(attention_trained.alignment)


h16 = chapter.claim(
    "H16",
    "S2 §2",
    Verdict.TRUE,
    Words(
        "An encoder embeds, adds positions, then runs layers of multi-head self-attention and a feed-forward net, each "
        "followed by addition and layer norm.",
        "编码器先做词嵌入并加位置编码，每层依次是多头自注意力与前馈网络，其后各有一次残差相加与层归一化。",
    ),
    formula=r"x \leftarrow \mathrm{LN}(x + \mathrm{MHSA}(x)), \quad x \leftarrow \mathrm{LN}(x + \mathrm{FFN}(x))",
    uses=(init_transformer, encode),
)


h16.quick(attention_models.encoder)


# --- code --------------------------------------------------------------------------

h17 = chapter.claim(
    "H17",
    "S2 §10",
    Verdict.TRUE,
    Words(
        "The listing scales the scores, hides masked ones with −10⁹, applies softmax, multiplies by V, and returns "
        "output and weights.",
        "代码依次缩放得分、用 −10⁹ 掩盖、做 softmax、乘以 V，并返回输出与权重。",
    ),
    formula=r"\mathrm{softmax}\left(\frac{Q K^\top}{\sqrt{d_k}} + M\right) V",
    finding=Words(
        "It agrees with the library. The formula of §8.1 adds M before the division, which tells once M is mild: with "
        "−20 and d_k = 4, the hidden one of two equal keys gets {after:.2g} if added after, {before:.2g} if before.",
        "它与本库的结果一致。而 §8.1 的公式在除法之前加 M，M 不够大时就有区别：取 −20、d_k = 4，"
        "两个相同的键中被掩盖者，在除法之后加时权重为 {after:.2g}，之前加则为 {before:.2g}。",
    ),
    uses=(attend, masks.causal),
)


@h17.quick
def listing() -> Numbers:
    q, k, v = (normal(seed, 2, 3, 6, 4) for seed in range(3))  # [B, H, L, d_k], as the listing has them
    scores = q @ k.swapaxes(-2, -1) / np.float32(math.sqrt(4))
    scores = np.where(np.tri(6, dtype=bool), scores, np.float32(-1e9))
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    want = powers / powers.sum(axis=-1, keepdims=True)
    causal = jit(lambda q, k, v: attend(q, k, v, masks.causal(), weights=True))
    out, weights = causal(*(x.swapaxes(1, 2) for x in (q, k, v)))
    label = Words("output, max difference from the listing", "输出与该代码的最大差")
    yield at_most("gap", label, gap(jnp.swapaxes(out, 1, 2), want @ v), 32 * ROUND * np.max(np.abs(v)), F32)
    yield at_most("weights", Words("weights, the same", "权重，同上"), gap(weights, want), 32 * ROUND, F32)
    future = np.abs(np.triu(np.asarray(weights), 1)).sum()
    yield near("hidden", Words("weight on the future", "未来位置上的权重"), future, 0, dtype=F32)
    # Two equal keys of score 0, the second hidden by −20: a row with M after the scale, a row with M before it.
    mild = jnp.array([[[[0.0, -20.0]]], [[[0.0, -20.0 / math.sqrt(4)]]]])
    hidden = jit(lambda x, bias: attend(x[:, :1], x, x, bias=bias, weights=True)[1])(jnp.zeros((2, 2, 1, 4)), mild)
    labels = {
        "after": (Words("hidden weight, −20 after the scale", "缩放后加 −20 的被掩权重"), 20),
        "before": (Words("before the scale", "缩放前加"), 10),
    }
    for (name, (label, power)), weight in zip(labels.items(), hidden[:, 0, 0, 1], strict=True):
        right = 1 / (1 + math.exp(power))
        yield near(name, label, weight, right, 40 * ROUND * right, F32)


h18 = chapter.claim(
    "H18",
    "S1 §7.2",
    Verdict.TRUE,
    Words("A small example worked by hand agrees with what the code prints.", "手算的小例子与代码打印的结果一致。"),
    formula=r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} \begin{pmatrix} 5 & 7 \\ 6 & 8 \end{pmatrix}"
    r" = \begin{pmatrix} 17 & 23 \\ 39 & 53 \end{pmatrix}",
    uses=(attention_scores, attend),
)


@h18.quick
def by_hand() -> Numbers:
    q, k = one_head(*(np.array(rows, np.float32) for rows in ([[1, 2], [3, 4]], [[5, 6], [7, 8]])))
    both = jit(lambda q, k: (attention_scores(q, k, BARE), attend(q, k, k, weights=True)[1]))
    scores, weights = (np.asarray(x)[0, 0] for x in both(q, k))
    label = Words("entries of QKᵀ unlike 17, 23, 39, 53", "QKᵀ 中与 17、23、39、53 不符的元素数")
    yield near("wrong", label, np.count_nonzero(scores != np.array([[17, 23], [39, 53]])), 0, dtype=F32)
    # The rows' scores differ by 6 and 14, over √2; a score of 39 rounds by 39 parts in 2²⁴.
    for row, apart in enumerate((6, 14)):
        label = Words(f"weight of key 2, row {row + 1}", f"第 {row + 1} 行第 2 个键的权重")
        want = 1 / (1 + math.exp(-apart / math.sqrt(2)))
        yield near(f"row{row + 1}", label, weights[row, 1], want, 100 * ROUND, F32)
