"""Chapter H: several heads, feed-forward nets, cross-attention, shapes (S1 §7, S2 §5-8 and §10)."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims import attention_models, attention_trained
from experiments.claims.attention_heads import ALL, BARE, F32, HYPER, chapter, one_head
from experiments.claims.attention_loops import (
    ROUND,
    count,
    drawn,
    gap,
    jit,
    net_by_numpy,
    normal,
)
from experiments.claims.record import Numbers, Verdict, Words, at_least, at_most, near
from transformer_jax import masks
from transformer_jax.attention import attend, attention, init_attention
from transformer_jax.config import Config
from transformer_jax.embedding import embed, unembed
from transformer_jax.encoder_decoder import encode, forward, init_transformer
from transformer_jax.ffn import ffn, init_ffn
from transformer_jax.scores import attention_scores, masked_softmax

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
        "On text, each at the best of the rates tried, the validation loss of 4 heads differs from that "
        "of one by {four_mean:+.3f} nats (p {four_p:.2g}), that of 8 by {eight_mean:+.3f} (p {eight_p:.2g}), that of "
        "16, which are 4 wide, by {sixteen_mean:+.3f} (p {sixteen_p:.2g}).",
        "在文本上、各取最佳学习率时，4 头的验证损失与单头相差 {four_mean:+.3f} nat（p 值 {four_p:.2g}），8 头相差 "
        "{eight_mean:+.3f}（p 值 {eight_p:.2g}），每头仅 4 维的 16 头相差 {sixteen_mean:+.3f}（p 值 "
        "{sixteen_p:.2g}）。",
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
        "A gain, no leap: on text d_ff = 4d ends at {wide:.3f} nats, d_ff = d at {even:.3f} (difference "
        "{expansion_lower:+.3f} to {expansion_upper:+.3f}). Nor is it the weights alone: as many in twice the layers "
        "with d_ff = d give {deep:.3f} ({depth_lower:+.3f} to {depth_upper:+.3f}). Next to no net, d_ff = 1, gives "
        "{none:.3f}.",
        "有收益，但谈不上飞跃：在文本上 d_ff = 4d 的损失为 {wide:.3f} nat，d_ff = d 为 {even:.3f}（差值 "
        "{expansion_lower:+.3f} 至 {expansion_upper:+.3f}）。也不只是参数多：同样多的参数用于层数加倍、d_ff = d 的模型"
        "得 {deep:.3f}（{depth_lower:+.3f} 至 {depth_upper:+.3f}）。几乎没有前馈网络（d_ff = 1）则为 {none:.3f}。",
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
        "两层的 K 都随编码器最后一层而变。",
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
        "source token in {copy:.3f} of cases on copying and {reverse:.3f} on reversing (median of the seeds; alignment "
        "error rates {copy_aer:.3f} and {reverse_aer:.3f}). It need "
        "not: of all runs that write {right:.0%} of the tokens right, one has {copy_least:.2f} and one "
        "{reverse_least:.2f}. (The median was chosen after a first look.)",
        "在对应关系已知的任务上确实如此：单头的最大权重落在正确源词元上的比例，复制任务为 {copy:.3f}，"
        "反转任务为 {reverse:.3f}（各种子的中位数；对齐错误率 {copy_aer:.3f} 与 {reverse_aer:.3f}）。"
        "但并非必然：在写对至少 {right:.0%} 词元的运行中，"
        "复制任务最低的一次只有 {copy_least:.2f}，反转任务最低的只有 {reverse_least:.2f}。"
        "（用中位数判定是看过初步结果后定下的。）",
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
