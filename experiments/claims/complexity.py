"""Chapter I: what other ways to attend cost, and how to count (S2 §1 and §9)."""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims.complexity_pairs import chapter, cost, f32, growth, qkv
from experiments.claims.drawn import U
from experiments.claims.record import Curves, Numbers, Verdict, Words, at_least, at_most, near
from transformer_jax import masks
from transformer_jax.attention import attend
from transformer_jax.meter import measure, slope
from transformer_jax.scores import PLAIN, attention_scores, weights_of

i05 = chapter.claim(
    "I05",
    "S2 §9",
    Verdict.CONDITIONAL,
    Words(
        "FlashAttention gives exactly the same result as standard attention, with less memory.",
        "FlashAttention 的输出与标准注意力完全相同，而内存更少。",
    ),
    finding=Words(
        "Exactly in real numbers; in float32 {changed:.0%} of the outputs differ, by up to {gap:.1e}, as sums are "
        "taken in blocks. Memory grows with exponent {blockwise:.2f} instead of {dense:.2f} (a {ratio:.0f}th of it at "
        "n = 16,384, one head of 64); the scores that are computed are still n².",
        "在实数运算中完全相同；float32 下有 {changed:.0%} 的输出不同，最多相差 {gap:.1e}，因为求和是分块进行的。"
        "内存的指数为 {blockwise:.2f}，而非 {dense:.2f}（n = 16,384、一个 64 维的头时为 1/{ratio:.0f}）；"
        "但要算的得分仍有 n² 个。",
    ),
    uses=(attend, measure, slope),
)


@i05.quick
def blocks() -> Numbers:
    both = jax.jit(lambda q, k, v: [attend(q, k, v, masks.causal(), implementation=name, block=block)
                                    for name, block in (("dense", 0), ("blockwise", 16))])  # fmt: skip
    q, k, v = qkv(5, 64, 16)
    dense, blockwise = np.asarray(both(q, k, v), np.float64)
    # Weights whose sum is 1 within 64 U, of values up to 4; scores up to 16 are rounded alike in both.
    yield at_most(
        "gap",
        Words("max |blockwise − dense|", "max |分块 − 稠密|"),
        np.max(np.abs(dense - blockwise)),
        256 * U,
        "float32",
    )
    yield at_least("changed", Words("outputs that differ", "不同的输出"), np.mean(dense != blockwise), 0.01, "float32")
    lengths = (4096, 8192, 16_384)
    bytes = {name: [cost(name, n, masks.causal()).working_bytes for n in lengths] for name in ("dense", "blockwise")}
    for name, exponent in (("dense", 2.0), ("blockwise", 1.0)):
        label = Words(f"exponent of the bytes, {name}", "内存的指数，" + {"dense": "稠密", "blockwise": "分块"}[name])
        # What a block takes, a few 128², is a tenth of what n d takes, and that a tenth of n².
        yield near(name, label, slope(lengths, bytes[name]).value, exponent, 0.1, "int64")
    ratio = bytes["dense"][-1] / bytes["blockwise"][-1]
    yield at_least(
        "ratio",
        Words("bytes, dense over blockwise, n = 16,384", "内存之比，稠密比分块，n = 16,384"),
        ratio,
        16.0,
        "int64",
    )
    lines = {name: (list(lengths), [x / 2**20 for x in values]) for name, values in bytes.items()}
    caption = Words("Live memory of one head of 64, counted.", "一个 64 维的头所需的内存（由计量器得出）。")
    yield Curves(caption, "n", "MiB", lines, log_x=True, log_y=True)


i06 = chapter.claim(
    "I06",
    "S2 §9",
    Verdict.IMPRECISE,
    Words(
        "Sparse and linear attention approximate attention in n log n or n.",
        "稀疏注意力和线性注意力以 O(n log n) 或 O(n) 的代价近似注意力。",
    ),
    formula=r"\frac{\sum_{j \le i} \phi(q_i / \sqrt{d_k}) \cdot \phi(k_j)\, v_j}"
    r"{\sum_{j \le i} \phi(q_i / \sqrt{d_k}) \cdot \phi(k_j)}, \quad \phi(x) = \mathrm{elu}(x) + 1",
    finding=Words(
        "What falls is the cost (exponent {exponent:.2f}); what comes out is another function. On random inputs linear "
        "attention is {linear:.0%} of the output's norm away from softmax, a window of 16 of 64 tokens {sparse:.0%}.",
        "降下来的是代价（指数 {exponent:.2f}），算出来的却是另一个函数。在随机输入上，线性注意力与 softmax 注意力相差"
        "输出范数的 {linear:.0%}，64 个词元中宽 16 的窗口相差 {sparse:.0%}。",
    ),
    uses=(attend, masks.window, measure, slope),
)


@i06.quick
def another_function() -> Numbers:
    n, d = 64, 16
    q, k, v = qkv(6, n, d)
    kinds = (("dense", masks.causal()), ("linear", masks.causal()), ("dense", masks.window(16)))
    made = jax.jit(lambda q, k, v: [attend(q, k, v, mask, implementation=name, block=16) for name, mask in kinds])
    full, linear, sparse = np.asarray(made(q, k, v), np.float64)[:, 0, :, 0]
    x, y, z = (np.asarray(a, np.float64)[0, :, 0] for a in (q / 4, k, v))
    features = [np.where(a > 0, a + 1, np.exp(np.minimum(a, 0))) for a in (x, y)]
    by_hand = np.zeros((n, d))
    for i in range(n):
        terms = [features[0][i] @ features[1][j] for j in range(i + 1)]
        by_hand[i] = sum(t * z[j] for j, t in enumerate(terms)) / sum(terms)
    gap = np.max(np.abs(linear - by_hand))
    # Sums of 64 positive terms and their quotient, times values up to 4.
    yield at_most(
        "formula", Words("linear attention against its formula", "线性注意力与其公式之差"), gap, 1024 * U, "float32"
    )
    away = [np.linalg.norm(other - full) / np.linalg.norm(full) for other in (linear, sparse)]
    yield at_least(
        "linear", Words("‖linear − softmax‖ / ‖softmax‖", "‖线性 − softmax‖ / ‖softmax‖"), away[0], 0.1, "float32"
    )
    yield at_least("sparse", Words("the same of a window of 16", "宽 16 的窗口"), away[1], 0.1, "float32")
    exponent = growth("linear", masks.causal(), "products")
    yield near("exponent", Words("exponent of its FLOPs", "FLOPs 的指数"), exponent, 1.0, 1e-9, "int64")


i07 = chapter.claim(
    "I07",
    "S2 §9",
    Verdict.EMPIRICAL,
    Words(
        "At tens to hundreds of thousands of tokens plain attention exhausts a GPU's memory at once; FlashAttention "
        "made GPT-4 possible.",
        "序列达到数万至数十万个词元时，普通注意力一下子就占满 GPU 显存；有了 FlashAttention 才有 GPT-4。",
    ),
    finding=Words(
        "Nothing of it is run here. Counted, a layer of 8 heads of 64 in float32 needs {short:.1f} GiB at 10⁴ tokens, "
        "which many cards "
        "have, and {long:.0f} GiB at 10⁵, which none has; blockwise {flash:.2f} GiB. What GPT-4 needed, no code can "
        "tell.",
        "此处不做实测，只是计数：float32 下一层 8 个 64 维的头在 10⁴ 个词元时需 {short:.1f} GiB，许多显卡都有；"
        "10⁵ 个时需 {long:.0f} GiB，没有显卡能容纳；分块实现只需 {flash:.2f} GiB。GPT-4 依赖什么，代码无从判断。",
    ),
    uses=(measure, attend),
)


@i07.quick
def exhausted() -> Numbers:
    heads = 8
    gib = {n: cost("dense", n, heads=heads).working_bytes / 2**30 for n in (10**4, 10**5)}
    for name, n in (("short", 10**4), ("long", 10**5)):
        label = Words(f"GiB at n = {n:,}: scores and weights, 64n²", f"n = {n:,} 时的 GiB：得分和权重，64n²")
        # Beside them a few columns of n, and the outputs.
        scores = 2 * 4 * heads * n * n / 2**30
        yield near(name, label, gib[n], scores, 0.02 * scores, "int64")
    yield at_least(
        "beyond",
        Words("bytes at 10⁵ over 80 GB", "10⁵ 时所需字节与 80 GB 之比"),
        gib[10**5] * 2**30 / 80e9,
        4.0,
        "int64",
    )
    flash = cost("blockwise", 10**5, heads=heads).working_bytes / 2**30
    yield at_most(
        "flash", Words("GiB blockwise, n = 100,000", "分块实现的 GiB，n = 100,000"), flash, gib[10**4], "int64"
    )


i08 = chapter.claim(
    "I08",
    "S2 §1",
    Verdict.OVERCLAIM,
    Words(
        "An RNN forgets and cannot be computed in parallel; a Transformer loses nothing, however long the sequence.",
        "RNN 会遗忘，也不能并行；Transformer 则不管序列多长都不损失信息。",
    ),
    finding=Words(
        "Softmax disperses: a key whose score is 5 above all others gets {p10:.3f} of the weight among 10 keys, "
        "{p1000:.3f} among 1,000, {p10000:.3f} among 10,000. And a recurrence that is linear in its state runs in "
        "parallel: linear attention, step by step or all at once, is the same to {parallel:.0e}.",
        "softmax 会弥散：得分比其他键高 5 的键，在 10 个键中占 {p10:.3f} 的权重，在 1000 个中占 {p1000:.3f}，"
        "在 10000 个中只占 {p10000:.3f}。而状态更新为线性的递归可以并行：线性注意力逐步递推与一次算完的结果相同"
        "（{parallel:.0e}）。",
    ),
    learned=Words(
        "Trained alike on “what followed this symbol before?”, a GRU answers {gru6:.0%} right among 6 symbols, "
        "{gru12:.0%} among 12 and {gru24:.0%} among 24, attention {attention6:.0%}, {attention12:.0%} and "
        "{attention24:.0%} (medians). Of {seeds:.0f} models each, {attention24_learnt:.0f} with attention learnt 24 "
        "symbols (99% right), and {gru24_learnt:.0f} GRUs. On this budget recurrent recall falls off sooner: whether "
        "its state is full or its training too short, this does not tell. Steps, seeds and what is judged were set "
        "after a first look.",
        "同样训练“这个符号上次出现时后面是什么”：GRU 在 6 个符号中答对 {gru6:.0%}，12 个中 {gru12:.0%}，24 个中 "
        "{gru24:.0%}；注意力分别为 {attention6:.0%}、{attention12:.0%} 和 {attention24:.0%}（均为中位数）。"
        "各 {seeds:.0f} 个模型中，学会 24 个符号（答对 99%）的注意力模型有 {attention24_learnt:.0f} 个，"
        "GRU 有 {gru24_learnt:.0f} 个。"
        "在这一训练预算下，循环网络的回忆更早变差；究竟是状态容量不够还是训练不足，本实验无法区分。"
        "步数、种子数与判据是看过初步结果后定下的。",
    ),
    uses=(attention_scores, weights_of, attend),
)


@i08.full
def trained(folder: Path) -> Numbers:
    from experiments.claims import complexity_trained

    yield from complexity_trained.recall(folder)


@i08.quick
def dispersion() -> Numbers:
    ns = (10, 100, 1000, 10_000)
    k = np.zeros((len(ns), ns[-1], 1, 1), np.float32)
    k[:, 7] = 5

    @jax.jit
    def weights(k: jax.Array) -> jax.Array:
        scores = attention_scores(jnp.ones((len(ns), 1, 1, 1)), k, PLAIN)
        return weights_of(scores, masks.padding(jnp.asarray(ns)).dense(1, ns[-1]), PLAIN)

    shares = np.asarray(weights(k), np.float64)[:, 0, 0, 7].tolist()
    for n, found in zip(ns, shares, strict=True):
        share = math.exp(5) / (math.exp(5) + n - 1)
        label = Words(f"weight of the one key, n = {n:,}", f"那一个键的权重，n = {n:,}")
        # Sums of n terms, blocked or not, and exp of 5.
        yield near(f"p{n}", label, found, share, (n + 20) * U * share, "float32")
    x = qkv(8, 64, 16)
    run = jax.jit(lambda q, k, v: [attend(q, k, v, masks.causal(), implementation="linear", block=b) for b in (1, 64)])
    steps, at_once = np.asarray(run(*x), np.float64)
    gap = np.max(np.abs(steps - at_once))
    yield at_most("parallel", Words("recurrence − all at once", "逐步递推 − 一次算完"), gap, 1024 * U, "float32")
    caption = Words("Weight of a key whose score is 5 above the others.", "得分比其他键高 5 的键所占的权重。")
    yield Curves(caption, "n", "p", {"p": (list(ns), shares)}, log_x=True, log_y=True)


i09 = chapter.claim(
    "I09",
    "S1 §6.3, S2 §9",
    Verdict.GAP,
    Words(
        "Complexities are derived on paper; how to count those of a real program is left out.",
        "复杂度只在纸上推导，没有说明如何计量真实程序的代价。",
    ),
    finding=Words(
        "The compiler's own count is a trap: of a loop over 16 matrix products it counts the body once, {xla:.3g} "
        "FLOPs. The library's meter reads the trip count: {meter:.3g}, as unrolled.",
        "编译器自带的计数是个陷阱：16 次矩阵乘法的循环，它只把循环体计一次，得 {xla:.3g} FLOPs。"
        "本库的计量器会读出循环次数：{meter:.3g}，与展开后相同。",
    ),
    uses=(measure,),
)


@i09.quick
def loops() -> Numbers:
    n, steps = 128, 16
    by_hand = steps * 2 * n**3

    def looped(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, _: (x @ w, None), x, None, length=steps)[0]

    def unrolled(x: jax.Array, w: jax.Array) -> jax.Array:
        for _ in range(steps):
            x = x @ w
        return x

    found = [measure(f, f32(n, n), f32(n, n)).products for f in (looped, unrolled)]
    yield near(
        "meter", Words("FLOPs by the meter, 16 · 2n³", "计量器的 FLOPs，16 · 2n³"), found[0], by_hand, 0, "int64"
    )
    yield near("unrolled", Words("and of the unrolled loop", "展开后的循环"), found[1], by_hand, 0, "int64")
    counted: Any = jax.jit(looped).lower(f32(n, n), f32(n, n)).compile().cost_analysis()
    yield at_most(
        "xla", Words("by the compiler: below half", "编译器的计数：不到一半"), flops(counted), by_hand / 2, "int64"
    )


def flops(counted: Any) -> float:
    """Of a cost analysis, a dict or a list of one."""
    return float((counted[0] if isinstance(counted, list) else counted)["flops"])
