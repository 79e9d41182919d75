"""Chapter I, its first part: how many scores there are (S1 §6.3, S2 §9)."""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims.drawn import U, normal
from experiments.claims.record import Chapter, Numbers, Verdict, Words, at_least, at_most, near, shown
from transformer_jax import masks
from transformer_jax.attention import attend
from transformer_jax.config import Config, Hyper
from transformer_jax.layers import apply_stack, init_stack
from transformer_jax.masks import Mask
from transformer_jax.meter import Cost, measure, slope

chapter = Chapter("I", Words("Complexity", "计算复杂度"))

LENGTHS = (512, 1024, 2048)
WIDTH = 64  # of a head


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    """A float32 array that is never made."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def cost(implementation: str, n: int, mask: Mask | None = None, heads: int = 1, width: int = WIDTH) -> Cost:
    """What attention over n tokens costs, by the library's meter; nothing is run."""
    x = f32(1, n, heads, width)
    return measure(lambda q, k, v: attend(q, k, v, mask, implementation=implementation), x, x, x)


def growth(implementation: str, mask: Mask | None, field: str) -> float:
    """The exponent of n in a field of the cost."""
    return slope(LENGTHS, [getattr(cost(implementation, n, mask), field) for n in LENGTHS]).value


def qkv(seed: int, n: int, width: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normal queries, keys and values of one head, [1, n, 1, width] each."""
    q, k, v = jnp.asarray(normal(seed, 3, 1, n, 1, width))
    return q, k, v


i01 = chapter.claim(
    "I01",
    "S1 §6.3, S2 §9",
    Verdict.CONDITIONAL,
    Words(
        "Self-attention takes time n²d and memory quadratic in n.", "自注意力的时间复杂度为 n²d，内存随 n 呈平方增长。"
    ),
    formula=r"2 n^2 d + 4 n d^2 + 8 n d^2",
    finding=Words(
        "Of the core alone, QKᵀ and AV, whose exponent is {core:.2f}. A layer has projections and a feed-forward net "
        "as well, 12nd² multiply-adds against 2n²d: with d = {width:.0f} they are equal at n = 6d exactly, and from "
        "n = 32 to 128 the layer's exponent is {layer:.2f}. Dense memory has exponent {memory:.2f}; it need not (I05).",
        "只适用于核心部分 QKᵀ 和 AV，其指数为 {core:.2f}。一层还有投影和前馈网络，共 12nd² 次乘加，核心为 2n²d："
        "d = {width:.0f} 时二者恰在 n = 6d 处相等，n 从 32 到 128 时整层的指数只有 {layer:.2f}。"
        "稠密实现的内存指数为 {memory:.2f}，但并非必须如此（见 I05）。",
    ),
    uses=(measure, slope, attend, apply_stack),
)


@i01.quick
def layer_and_core() -> Numbers:
    found = [cost("dense", n, heads=8) for n in LENGTHS]
    by_hand = 4 * 8 * WIDTH * LENGTHS[-1] ** 2
    label = Words("FLOPs of the core, n = 2048, 8 heads of 64: 4n²d", "核心的 FLOPs，n = 2048，8 个 64 维的头：4n²d")
    yield near("flops", label, found[-1].products, by_hand, 0, "int64")
    exponent = slope(LENGTHS, [one.products for one in found]).value
    yield near("core", Words("exponent of n, core", "核心的指数"), exponent, 2.0, 1e-9, "int64")
    # Beside the scores there are the outputs, of n d: from 512 on, less than a tenth.
    exponent = slope(LENGTHS, [one.working_bytes for one in found]).value
    yield near("memory", Words("exponent of n, bytes", "内存的指数"), exponent, 2.0, 0.1, "int64")
    config = Config(vocab_size=2, d_model=WIDTH, num_heads=1, num_layers=1, positions="none")
    stack = jax.eval_shape(lambda key: init_stack(key, config, 1, cross=False), jax.random.key(0))

    def layer(stack: Any, x: jax.Array) -> jax.Array:
        places = jnp.arange(x.shape[1])[None]
        return apply_stack(stack, x, config, Hyper(), mask=masks.causal(), positions_BT=places)[0]

    lengths = (32, 64, 128, 6 * WIDTH)
    whole = [measure(layer, stack, f32(1, n, WIDTH)).products for n in lengths]
    core = [cost("dense", n, masks.causal()).products for n in lengths]
    ratio = core[-1] / (whole[-1] - core[-1])
    yield near("ratio", Words("core over the rest, n = 6d", "核心与其余部分之比，n = 6d"), ratio, 1.0, 0, "int64")
    predicted = slope(lengths[:3], [4 * n * n * WIDTH + 24 * n * WIDTH**2 for n in lengths[:3]]).value
    yield near(
        "layer",
        Words("exponent of a layer, n = 32…128", "整层的指数，n = 32…128"),
        slope(lengths[:3], whole[:3]).value,
        predicted,
        1e-9,
        "int64",
    )
    yield shown("width", Words("d", "d"), WIDTH, "int64")


i02 = chapter.claim(
    "I02",
    "S1 §6.3",
    Verdict.WRONG,
    Words(
        "The number of pairs that attention scores is C(n, 2), about n(n − 1)/2.",
        "注意力要计算的配对数是 C(n, 2)，约为 n(n − 1)/2。",
    ),
    formula=r"n^2, \quad \sum_{i=1}^n i = \frac{n(n + 1)}{2}",
    finding=Words(
        "The sentence before rightly says about n². Pairs are ordered and a token meets itself: {full:,.0f} for "
        "n = 1024, {causal:,.0f} of them causal, against "
        "C(n, 2) = {choose:,.0f}. The dense product computes all n², masked or not.",
        "原文前一句说的“大致 n² 个”才对。配对是有序的，且包括词元自身：n = 1024 时为 {full:,.0f} 对，"
        "其中因果的 {causal:,.0f} 对，"
        "而 C(n, 2) = {choose:,.0f}。无论是否掩码，稠密乘法都计算全部 n² 个得分。",
    ),
    uses=(masks.full, masks.causal, Mask.pairs, measure),
)


@i02.quick
def pairs() -> Numbers:
    n = 1024
    yield near(
        "full", Words("pairs, n = 1024: n²", "配对数，n = 1024：n²"), masks.full().pairs(n, n), n * n, 0, "int64"
    )
    causal = masks.causal().pairs(n, n)
    yield near("causal", Words("causal: n(n + 1)/2", "因果：n(n + 1)/2"), causal, sum(range(1, n + 1)), 0, "int64")
    label = Words("causal pairs beyond C(n, 2): n", "因果配对数比 C(n, 2) 多：n")
    yield near("beyond", label, causal - math.comb(n, 2), n, 0, "int64")
    scores = cost("dense", n, masks.causal()).products / (4 * WIDTH)
    yield near(
        "scored", Words("scores that dense attention computes", "稠密注意力计算的得分数"), scores, n * n, 0, "int64"
    )
    yield shown("choose", Words("C(n, 2)", "C(n, 2)"), math.comb(n, 2), "int64")


i03 = chapter.claim(
    "I03",
    "S1 §6.3",
    Verdict.IMPRECISE,
    Words("A window of w tokens brings the cost from n² down to n·w.", "只看宽 w 的局部窗口，代价便由 n² 变为 n·w。"),
    formula=r"n w - \frac{w (w - 1)}{2}",
    finding=Words(
        "A causal window has {pairs:.0f} pairs for n = 1024, w = 128, not {product:.0f}; and only a kernel that leaves "
        "the others out saves anything. Masked dense attention costs as much as without a mask (exponent "
        "{masked:.2f}); banded attention has exponent {banded:.2f} and the same result (within {gap:.0e}).",
        "n = 1024、w = 128 的因果窗口有 {pairs:.0f} 对，而不是 {product:.0f} 对；"
        "而且只有真正跳过其余配对的实现才节省计算。"
        "带掩码的稠密注意力与不带掩码的计算量相同（指数 {masked:.2f}）；带状实现的指数为 {banded:.2f}，结果相同"
        "（误差 {gap:.0e}）。",
    ),
    uses=(masks.window, Mask.pairs, measure, slope, attend),
)


@i03.quick
def window() -> Numbers:
    n, w = 1024, 128
    by_hand = sum(min(i + 1, w) for i in range(n))
    yield near(
        "pairs",
        Words("pairs, n = 1024, w = 128", "配对数，n = 1024，w = 128"),
        masks.window(w).pairs(n, n),
        by_hand,
        0,
        "int64",
    )
    yield shown("product", Words("n·w", "n·w"), n * w, "int64")
    mask, lengths = masks.window(w), LENGTHS
    dense, plain, banded = (
        [cost(name, m, kind).products for m in lengths]
        for name, kind in (("dense", mask), ("dense", None), ("banded", mask))
    )
    yield near(
        "same", Words("masked − unmasked FLOPs", "有无掩码的 FLOPs 之差"), sum(dense) - sum(plain), 0, 0, "int64"
    )
    yield near(
        "masked",
        Words("exponent, masked dense", "指数，带掩码的稠密实现"),
        slope(lengths, dense).value,
        2.0,
        1e-9,
        "int64",
    )
    yield near("banded", Words("exponent, banded", "指数，带状实现"), slope(lengths, banded).value, 1.0, 1e-9, "int64")
    x, mask = qkv(3, 64, 8), masks.window(16)
    both = jax.jit(lambda q, k, v: [attend(q, k, v, mask, implementation=name) for name in ("dense", "banded")])
    one, other = np.asarray(both(*x), np.float64)
    # Weighted means of 16 values up to 4, in another order.
    yield at_most(
        "gap",
        Words("banded − dense, same window", "带状 − 稠密，同一窗口"),
        np.max(np.abs(one - other)),
        64 * U,
        "float32",
    )


i04 = chapter.claim(
    "I04",
    "S1 §6.3",
    Verdict.OVERCLAIM,
    Words(
        "Choosing the pairs that matter out of n² is a typical problem of combinatorial optimisation.",
        "在 n² 个配对中选择值得计算的，属于典型的组合优化。",
    ),
    finding=Words(
        "A fixed pattern optimises nothing: a window of 16 holds {window:.0%} of the weight of random queries and keys "
        "(64 tokens, all visible), the best 16 keys of each query {best:.0%}. And the best set needs no search: "
        "weights add up, so that the largest w of a row are best, as all {subsets:.0f} subsets of 3 of 8 confirm.",
        "固定模式什么也没有优化：对随机的查询和键（64 个词元，全部可见），宽 16 的窗口只占 {window:.0%} 的权重，"
        "而每个查询最好的 16 个键占 {best:.0%}。最好的集合也无需搜索：权重是相加的，每行最大的 w 个就是最优，"
        "枚举 8 选 3 的全部 {subsets:.0f} 个子集可以证实。",
    ),
    uses=(attend, masks.window),
)


@i04.quick
def chosen() -> Numbers:
    n, w = 64, 16
    weights = np.asarray(attend(*qkv(4, n, 16), weights=True)[1], np.float64)[0, 0]
    inside = np.asarray(masks.window(w).dense(n, n))[0, 0]
    rows = slice(w - 1, None)  # whose windows are full
    held = np.sum(weights * inside, axis=1)[rows]
    # A window knows nothing of random weights: it holds w / n of them on average, five standard errors allowed.
    error = 5 * float(np.std(held)) / math.sqrt(len(held))
    yield near("window", Words("weight in the window, w/n", "窗口内的权重，w/n"), held.mean(), w / n, error, "float32")
    best = np.sort(weights, axis=1)[:, -w:].sum(axis=1)[rows]
    yield at_least(
        "best", Words("weight of the best w keys", "最好的 w 个键的权重"), best.mean(), held.mean() + error, "float32"
    )
    row = weights[7, :8]
    tried = [row[list(subset)].sum() for subset in itertools.combinations(range(8), 3)]
    yield near("subsets", Words("subsets of 3 of 8", "8 选 3 的子集数"), len(tried), 56, 0, "int64")
    yield near(
        "search",
        Words("best of all − the three largest", "枚举最优 − 最大三个之和"),
        max(tried) - np.sort(row)[-3:].sum(),
        0,
        1e-15,
    )
