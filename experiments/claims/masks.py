"""Chapter D: causality and padding (S1 §7.2, S2 §8.1)."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims import masks_trained
from experiments.claims.masks_infinity import chapter
from experiments.claims.masks_probes import (
    EPSILON,
    LETTERS,
    ROUNDING,
    H,
    T,
    by_loop,
    drawn,
    ids,
    model_weights,
    reads,
    weights_under,
)
from experiments.claims.record import Numbers, Verdict, Words, at_least, at_most, near, shown
from transformer_jax import masks, relative
from transformer_jax.attention import attend
from transformer_jax.batch import Batch
from transformer_jax.cache import extend, init_cache
from transformer_jax.config import Config, Hyper
from transformer_jax.encoder_decoder import forward, logits_of
from transformer_jax.losses import cross_entropy
from transformer_jax.scores import Scoring, attention_scores, score_factor, weights_of

d07 = chapter.claim(
    "D07",
    "S2 §8.1",
    Verdict.WRONG,
    Words(
        "The mask that hides the future is 0 where i ≤ j and minus infinity where i > j.",
        "遮住未来的掩码在 i ≤ j 处为 0，在 i > j 处为负无穷。",
    ),
    formula=r"M_{ij} = \begin{cases} 0 & (j \le i) \\ -\infty & (j > i) \end{cases}",
    finding=Words(
        "Printed upside down, and against the text beside it: this shows the future and hides the past. Attention "
        "under it gives later keys a weight of up to {future:.2f} and earlier ones {past:.0f}; the last row sees "
        "itself alone. Causal is 0 where j ≤ i.",
        "公式写反了，与旁边的文字也不符：它露出未来、遮住过去。按它计算，后面的键权重可达 {future:.2f}，"
        "前面的键为 {past:.0f}，最后一行只看自己。因果掩码应在 j ≤ i 处为 0。",
    ),
    learned=Words(
        "Trained on text, the printed mask shows a loss of {seen_inverted:.2f} nats a token where causal shows "
        "{seen_causal:.2f}; asked without the future its loss is {honest_inverted:.2f} against {honest_causal:.2f}.",
        "在文本上训练，照印出的掩码看到的损失是每词元 {seen_inverted:.2f} nat，因果掩码是 {seen_causal:.2f}；"
        "不许看未来时，前者的损失为 {honest_inverted:.2f}，后者为 {honest_causal:.2f}。",
    ),
    uses=(attend, masks.inverted, masks.causal),
)


@d07.quick
def printed_upside_down() -> Numbers:
    q, k, v = drawn()
    i, j = np.indices((T, T))
    kinds = {"printed": (masks.inverted(), i <= j), "causal": (masks.causal(), j <= i)}
    by_kind = {}
    for name, (mask, allowed) in kinds.items():
        out, weights = jax.jit(lambda q, k, v, mask=mask: attend(q, k, v, mask, weights=True))(q, k, v)
        by_kind[name] = np.asarray(weights)[0, 0]
        off = np.abs(np.asarray(out)[0, :, 0] - by_loop(q, k, v, allowed)).max()
        zh = {"printed": "照印出的公式", "causal": "因果"}[name]
        label = Words(f"max |Δoutput| to a loop over the {name} formula", f"与逐键循环（{zh}）的 max |Δ输出|")
        yield at_most(f"loop_{name}", label, off, ROUNDING, "float32")
    inverted, causal = by_kind["printed"], by_kind["causal"]
    label = Words("largest weight of a later key, as printed", "照印出公式时后面键的最大权重")
    # One of T - 1 rows of standard normal scores must exceed an even share.
    yield at_least("future", label, inverted[j > i].max(), 1 / T, "float32")
    yield near("past", Words("… of an earlier key", "前面键的最大权重"), inverted[j < i].max(), 0.0, dtype="float32")
    yield near(
        "last", Words("… of the last row on itself", "最后一行对自己的权重"), inverted[-1, -1], 1.0, EPSILON, "float32"
    )
    yield near(
        "causal",
        Words("… of a later key, causal", "因果掩码下后面键的最大权重"),
        causal[j > i].max(),
        0.0,
        dtype="float32",
    )


d07.full(masks_trained.cheating)


d08 = chapter.claim(
    "D08",
    "S2 §8.1",
    Verdict.IMPRECISE,
    Words(
        "The mask is added to the dot products first, and their sum is divided by the root of d_k.",
        "先把掩码加到点积上，再把两者之和除以 d_k 的平方根。",
    ),
    formula=r"\text{softmax}\left(\frac{QK^T}{\sqrt{d_k}} + M\right) V",
    finding=Words(
        "The same only for 0 and minus infinity ({infinite:.0f} apart). A finite bias is weakened by √d_k: ALiBi of "
        "slope ½ at d_k = 16 becomes one of slope ⅛, and outputs move by up to {finite:.2g}. The same article's code "
        "scales first.",
        "只有对 0 和负无穷才一样（相差 {infinite:.0f}）。有限的偏置会被削弱 √d_k 倍："
        "d_k = 16 时斜率 ½ 的 ALiBi 变成斜率 ⅛，输出最多变动 {finite:.2g}。同一篇文章的代码则是先缩放。",
    ),
    uses=(attend, attention_scores, weights_of, score_factor, relative.ALiBi),
)


@d08.quick
def mask_before_scale() -> Numbers:
    q, k, v = drawn()
    i, j = np.indices((T, T))
    hidden = np.where(j <= i, 0.0, -np.inf).astype(np.float32)
    sloped = np.where(j <= i, -0.5 * (i - j), -np.inf).astype(np.float32)

    @jax.jit
    def outputs(q: jax.Array, k: jax.Array, v: jax.Array) -> list[Any]:
        def after(slope: float) -> Any:
            bias = (
                relative.Bias((relative.ALiBi(jnp.full(1, slope)),)) if slope else relative.dense(jnp.asarray(hidden))
            )
            return attend(q, k, v, masks.causal() if slope else None, bias=bias)

        def before(bias: np.ndarray) -> jax.Array:
            raw = attention_scores(q, k, Scoring(dk_exponent=0.0), jnp.asarray(bias)[None, None])
            weights = weights_of(raw * score_factor(H, 0.5, 1.0), None, Scoring())
            return jnp.einsum("bnts,bsnh->btnh", weights, v)

        return [after(0.0), before(hidden), after(0.5), after(0.125), before(sloped)]

    after, before, half, eighth, half_before = map(np.asarray, outputs(q, k, v))
    label = Words("max |Δoutput|, −∞", "−∞ 时的 max |Δ输出|")
    yield at_most("infinite", label, np.abs(after - before).max(), ROUNDING, "float32")
    label = Words("… ALiBi of slope ½", "斜率 ½ 的 ALiBi")
    yield at_least("finite", label, np.abs(half - half_before).max(), 1e-2, "float32")
    label = Words("… slope ⅛ after the scale against ½ before it", "缩放后斜率 ⅛ 与缩放前斜率 ½ 的差")
    yield at_most("weaker", label, np.abs(eighth - half_before).max(), ROUNDING, "float32")


d09 = chapter.claim(
    "D09",
    "S2 §8.1",
    Verdict.CONDITIONAL,
    Words(
        "A very small value close to minus infinity makes the weight of the future exactly zero.",
        "填入接近负无穷的极小值，未来的权重就完全变为 0。",
    ),
    formula=r"\mathrm{fl}\big( e^{s_{ij} + c - \max_k s_{ik}} \big) = 0",
    finding=Words(
        "By underflow, and only against what the row may see. With −10⁴ added, a hidden key has the weight "
        "{hidden:.0f} where the one allowed score is −2·10⁴; with −10 it keeps {mild:.1e}. Under booleans it has "
        "{boolean:.0f}.",
        "靠的是下溢，还要看该行可见的得分。加 −10⁴ 时，若唯一可见的得分为 −2·10⁴，被遮的键权重为 {hidden:.0f}；"
        "加 −10 时还剩 {mild:.1e}。布尔掩码下为 {boolean:.0f}。",
    ),
    uses=(attend, masks.causal),
)


@d09.quick
def small_enough() -> Numbers:
    # Three rows of two keys, of which the second must not be seen: their scores, and what is added to the second.
    scores, added = np.array([[-2e4, 0], [-2e4, 0], [0, 0]], np.float32), (-1e9, -1e4, -10.0)
    q, k = jnp.ones((3, 1, 1, 1)), jnp.asarray(scores)[:, :, None, None]
    weights = weights_under(q, k, k, [[[0.0, constant]] for constant in added])[:, 0, 1]
    label = Words("weight of a hidden key, −10⁹ added", "加 −10⁹ 时被遮键的权重")
    yield near("huge", label, weights[0], 0.0, dtype="float32")
    label = Words("… −10⁴ added, the allowed score −2·10⁴", "加 −10⁴、可见得分为 −2·10⁴ 时")
    yield near("hidden", label, weights[1], 1.0, dtype="float32")
    label = Words("… −10 added, both scores 0", "加 −10、两个得分都为 0 时")
    mild = 1 / (1 + math.exp(10))
    yield near("mild", label, weights[2], mild, 8 * EPSILON * mild, "float32")
    _, weights = jax.jit(lambda q, k: attend(q, k, k, masks.causal(), weights=True))(q, k)
    yield near("boolean", Words("… booleans", "布尔掩码"), np.max(weights[:, 0, 0, 1]), 0.0, dtype="float32")


d10 = chapter.claim(
    "D10",
    "S2 §8.1",
    Verdict.TRUE,
    Words("A model that sees the future word in training is cheating.", "训练时能看到未来的词，就等于作弊。"),
    finding=Words(
        "An attention made by hand that reads the next token scores {cheat:.0f} nats on text of which nobody can "
        "predict anything, and {honest:.1f} once it sees the past alone; the best there is is ln 8 = {chance:.2f}.",
        "一个手工构造、直接读取下一词元的注意力，在完全不可预测的文本上得 {cheat:.0f} nat；"
        "只许看过去时得 {honest:.1f}，而最好的成绩也只是 ln 8 = {chance:.2f}。",
    ),
    uses=(attend, cross_entropy, masks.full, masks.causal),
)


@d10.quick
def reading_the_answer() -> Numbers:
    cheat, printed, honest = reads((1, masks.full(), 1), (1, masks.inverted(), 1), (1, masks.causal(), 1))
    # The weight of the answer is 1 - 15 e^-60, and its logit 40 above the others.
    yield at_most("cheat", Words("nats, future visible", "能看到未来时的 nat 数"), cheat, 1e-6, "float32")
    yield at_most("printed", Words("… the mask of D07", "用 D07 的掩码"), printed, 1e-6, "float32")
    yield shown("chance", Words("ln 8", "ln 8"), math.log(LETTERS))
    yield at_least("honest", Words("… past only", "只看过去"), honest, math.log(LETTERS), "float32")


d11 = chapter.claim(
    "D11",
    "S2 §8.1",
    Verdict.TRUE,
    Words("Masking makes causal, autoregressive generation possible.", "有了掩码，就能进行保持因果关系的自回归生成。"),
    formula=r"f(x_{1 \dots t}) = f(x_{1 \dots T})_{1 \dots t}",
    uses=(forward, extend, init_cache),
)


@d11.quick
def prefixes() -> Numbers:
    config = Config(vocab_size=11, d_model=8, num_heads=2, num_layers=2, d_ff=8)
    params, hyper, row = model_weights(config), Hyper(), ids(1, T, V=11)
    # A second row that is the same but for its last three tokens.
    rows = jnp.concatenate([row, row.at[:, 3:].add(1) % 11])
    both = jax.jit(lambda tokens: forward(params, config, hyper, Batch(tokens, tokens, jnp.ones(tokens.shape)))[0])(
        rows
    )
    apart = np.abs(np.asarray(both[0] - both[1]))
    label = Words("max |Δlogit| before a changed token", "改动之前各位置的 max |Δlogit|")
    yield near("before", label, apart[:3].max(), 0.0, dtype="float32")
    yield at_least("after", Words("… from it on", "改动之后"), apart[3:].max(), 1e-2, "float32")

    def one(cache: Any, token: jax.Array) -> tuple[Any, jax.Array]:
        x, cache = extend(params, config, hyper, cache, token.reshape(1, 1))
        return cache, logits_of(params, config, hyper, x)[0, 0]

    stepwise = jax.jit(lambda: jax.lax.scan(one, init_cache(config, 1, T), row[0])[1])()
    off = np.abs(np.asarray(stepwise - both[0])).max() / np.abs(np.asarray(both[0])).max()
    label = Words("max |Δlogit| token by token, relative", "逐词元生成与整行的相对 max |Δlogit|")
    yield at_most("cache", label, off, 1e-5, "float32")


d12 = chapter.claim(
    "D12",
    "S1 §7.1, S1 §7.2",
    Verdict.TRUE,
    Words("A padding mask takes padding out of the result.", "填充掩码使填充位置对结果毫无影响。"),
    uses=(forward, attend, masks.padding),
)


@d12.quick
def padding_does_nothing() -> Numbers:
    config = Config(architecture="encoder_decoder", vocab_size=11, d_model=8, num_heads=2, num_layers=1, d_ff=8)
    params = model_weights(config)
    source, tokens = ids(1, 7, V=11), ids(1, 5, V=11, seed=1)

    @jax.jit
    def logits(source: jax.Array, tokens: jax.Array, read: int, written: int) -> jax.Array:
        """Of the first three tokens; `read` tokens of the source and `written` of the target are no padding."""
        lengths = {"source_lengths_B": jnp.asarray(read)[None], "lengths_B": jnp.asarray(written)[None]}
        batch = Batch(tokens, tokens, jnp.ones(tokens.shape), source_BS=source, **lengths)
        return forward(params, config, Hyper(), batch)[0][:, :3]

    want = logits(source, tokens, 4, 3)
    other = (source.at[:, 4:].add(1) % 11, tokens.at[:, 3:].add(1) % 11)
    label = Words("max |Δlogit| of real tokens, other ids in the padding", "填充换成别的词元时真实位置的 max |Δlogit|")
    yield near("ids", label, jnp.max(jnp.abs(want - logits(*other, 4, 3))), 0.0, dtype="float32")
    label = Words("… other ids, source padding not masked", "源端填充未遮住而换成别的词元时")
    seen = jnp.max(jnp.abs(logits(source, tokens, 7, 3) - logits(*other, 7, 3)))
    yield at_least("unmasked", label, seen, 1e-2, "float32")
    q, k, v = drawn()
    longer = [jnp.concatenate([x, x[:, :3]], axis=1) for x in (k, v)]
    out = jax.jit(lambda q, k, v: attend(q, k, v, masks.padding(jnp.asarray([T]))))(q, *longer)
    off = np.abs(np.asarray(out)[0, :, 0] - by_loop(q, k, v, np.ones((T, T), bool))).max()
    label = Words("max |Δoutput|, three keys of padding against none", "补三个键与不补时的 max |Δ输出|")
    yield at_most("amount", label, off, ROUNDING, "float32")


d13 = chapter.claim(
    "D13",
    "S0 §4.2, S1 §7.2, S2 §8",
    Verdict.GAP,
    Words(
        "Of masks the articles have the causal one and that of padding.",
        "文章里的掩码只有因果掩码和填充掩码两种。",
    ),
    finding=Words(
        "The library also has prefixes, windows, packed documents, blocks and padding of a source, and they compose. "
        "Of {all:.0f} pairs of 12 queries and 12 keys they allow {prefix:.0f} (prefix of 5), {window:.0f} (window of "
        "4), {segments:.0f} (documents of 3, 4 and 5, causal), {blocks:.0f} (blocks of 4), {cross:.0f} (source of 9).",
        "本库还有前缀、窗口、打包文档、分块以及源端填充的掩码，并可任意组合。12 个查询与 12 个键的 {all:.0f} 对之中，"
        "它们分别允许 {prefix:.0f}（前缀 5）、{window:.0f}（窗口 4）、{segments:.0f}（长 3、4、5 的文档，因果）、"
        "{blocks:.0f}（块长 4）和 {cross:.0f}（源长 9）对。",
    ),
    uses=(masks.prefix_lm, masks.window, masks.segments, masks.block_sparse, masks.cross, masks.Mask.pairs, attend),
)


@d13.quick
def other_masks() -> Numbers:
    n, p, w, size = 12, 5, 4, 4
    parts = (3, 4, 5)
    document = np.repeat(np.arange(3), parts)
    i, j = np.indices((n, n))
    packed = masks.causal() & masks.segments(jnp.asarray(document)[None])
    # Name -> the mask, what it should allow, and how many pairs by arithmetic.
    kinds: dict[str, tuple[Words, masks.Mask, np.ndarray, float]] = {
        "prefix": (Words("prefix", "前缀"), masks.prefix_lm(p), (j <= i) | (j < p), n * (n + 1) / 2 + p * (p - 1) / 2),
        "window": (Words("window", "窗口"), masks.window(w), (j <= i) & (j > i - w), n * w - w * (w - 1) / 2),
        "segments": (
            Words("packed", "打包"),
            packed,
            (j <= i) & (document[i] == document[j]),
            sum(m * (m + 1) / 2 for m in parts),
        ),
        "blocks": (
            Words("blocks", "分块"),
            masks.block_sparse(size),
            (j <= i) & ((j // size == i // size) | (j // size == i // size - 1) | (j < size)),
            3 * size * (size + 1) / 2 + 3 * size**2,  # own blocks; the one before of two, the first of the last
        ),
        "cross": (Words("cross", "交叉"), masks.cross(jnp.asarray([9])), j < 9, n * 9),
    }
    q, k, v = drawn(n, n)
    outs = jax.jit(lambda q, k, v: [attend(q, k, v, mask) for _, mask, _, _ in kinds.values()])(q, k, v)
    yield shown("all", Words("pairs", "全部对数"), n * n)
    for (name, (label, mask, allowed, count)), out in zip(kinds.items(), outs, strict=True):
        pairs = Words(f"pairs allowed, {label.en}", f"允许的对数（{label.zh}）")
        yield near(name, pairs, mask.pairs(n, n), count)
        off = np.abs(np.asarray(out)[0, :, 0] - by_loop(q, k, v, allowed)).max()
        gap = Words(f"max |Δoutput| to a loop, {label.en}", f"与逐键循环的 max |Δ输出|（{label.zh}）")
        yield at_most(f"{name}_loop", gap, off, ROUNDING, "float32")
