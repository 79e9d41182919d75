"""Chapter F: temperature and decoding (S1 §3.3)."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from experiments import decoding, tempering
from experiments.claims import softmax_trained
from experiments.claims.record import Curves, Numbers, Verdict, Words, at_least, at_most, near, shown
from experiments.claims.softmax_weights import EPSILON, ROUNDING, chapter, softmax64, tempered, weights
from transformer_jax.beam import beam_search
from transformer_jax.config import Config, Hyper
from transformer_jax.data.markov import entropy_rate, stationary, transition_table
from transformer_jax.encoder_decoder import init_transformer
from transformer_jax.exact import Outcomes, distribution, outcomes
from transformer_jax.losses import entropy
from transformer_jax.samplers import Sampler, adjusted, draw
from transformer_jax.scores import masked_softmax

f05 = chapter.claim(
    "F05",
    "S1 §3.3",
    Verdict.TRUE,
    Words(
        "Dividing scores by a temperature below 1 sharpens the distribution, above 1 it flattens it.",
        "得分除以温度：T 小于 1 时分布更尖锐，大于 1 时更平滑。",
    ),
    formula=r"p_i = \frac{e^{z_i / T}}{\sum_j e^{z_j / T}}, \quad \frac{dH}{dT} = \frac{\text{Var}_p(z)}{T^3} \ge 0",
    learned=Words(
        "So it is in trained models: from T = 0.25 to 4 the mean entropy of their predictions rises from "
        "{trained_cold:.2f} to {trained_hot:.2f} nats, at every step of T, with the slope that the formula gives.",
        "训练后的模型也是如此：T 从 0.25 升到 4，预测的平均熵从 {trained_cold:.2f} 升到 {trained_hot:.2f} nat，"
        "每一步都上升，斜率与公式一致。",
    ),
    uses=(adjusted, Sampler, entropy),
)
f05.full(softmax_trained.flattening)


@f05.quick
def temperature() -> Numbers:
    z = np.random.default_rng(0).normal(size=12) * 2
    T = np.array([0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 1e4])
    p = tempered(z, T)
    label = Words("max |Δp| to softmax(z/T) in float64", "与 float64 的 softmax(z/T) 的 max |Δp|")
    want = softmax64(z.astype(np.float32).astype(np.float64) / T[1:, None])
    # z/T is as large as 40, and rounded.
    yield at_most("formula", label, np.abs(p[1:] - want).max(), 40 * EPSILON, "float32")
    H = np.asarray(jax.jit(lambda p: entropy(jnp.log(p)))(p[1:]), np.float64)
    yield at_least(
        "rising",
        Words("least rise of H from one T to the next", "H 随 T 的最小增量"),
        np.diff(H).min(),
        1e-2,
        "float32",
    )
    yield near(
        "zero", Words("p of the largest at T = 0", "T = 0 时最大者的 p"), p[0, np.argmax(z)], 1.0, dtype="float32"
    )
    # H is ln n − Var(z)/2T² to second order.
    yield near("hot", Words("H at T = 10⁴", "T = 10⁴ 时的 H"), H[-1], math.log(12), ROUNDING, "float32")
    slopes = tempering.entropy_slopes(z[None], T[1:-1])
    variance = [float(q @ z**2 - (q @ z) ** 2) for q in softmax64(z / T[1:-1, None])]
    apart = np.abs(slopes.autodiff - variance / T[1:-1] ** 3).max()
    label = Words("max |dH/dT − Var(z)/T³|", "max |dH/dT − Var(z)/T³|")
    yield at_most("slope", label, apart, 1e-10)
    yield shown("steepest", Words("largest dH/dT", "最大的 dH/dT"), slopes.formula.max())


f06 = chapter.claim(
    "F06",
    "S1 §3.3",
    Verdict.EMPIRICAL,
    Words(
        "Below temperature 1 output is more stable; taking the argmax each time makes it very mechanical.",
        "温度低于 1 时输出更稳定；每次都取 argmax 则非常机械，总走同一套路。",
    ),
    finding=Words(
        "A Markov chain, written at temperatures: at 0 it runs in circles of {cycle:.0f} symbols. At 0.5, 1 and 2 a "
        "symbol costs {cost05:.3f}, {cost1:.3f} and {cost2:.3f} nats under the chain itself; the entropy of what is "
        "written is {rate05:.3f}, {rate1:.3f} and {rate2:.3f}: below 1 it is likelier than real text, and poorer.",
        "让一条马尔可夫链按不同温度书写：温度 0 时，它以 {cycle:.0f} 个符号为一圈循环。温度 0.5、1、2 时，"
        "每个符号在该链下的代价为 {cost05:.3f}、{cost1:.3f}、{cost2:.3f} nat，所写文本的熵率为 "
        "{rate05:.3f}、{rate1:.3f}、{rate2:.3f}：低于 1 时所写文本比真实文本概率更高，也更贫乏。",
    ),
    learned=Words(
        "Trained models at T = 0 repeat {repeat0:.0%} of their 4-grams, at 0.5 {repeat05:.0%}, at 1 {repeat1:.0%}; a "
        "symbol costs {cost0:.2f}, {cost05:.2f} and {cost1:.2f} nats under the true chain, at 1.5 {cost15:.2f}.",
        "训练好的模型在 T = 0 时重复 {repeat0:.0%} 的 4-gram，0.5 时 {repeat05:.0%}，1 时 {repeat1:.0%}；"
        "在真实链下每个符号的代价为 {cost0:.2f}、{cost05:.2f}、{cost1:.2f} nat，温度 1.5 时为 {cost15:.2f}。",
    ),
    uses=(transition_table, distribution, stationary, entropy_rate),
)


@f06.quick
def written_by_the_chain() -> Numbers:
    n, table = 8, transition_table(8, 2)
    logits = np.log(table)

    def at(T: float) -> np.ndarray:
        rows = [distribution(z, frozenset(), Sampler(temperature=T)) for z in logits.reshape(-1, n)]
        return np.array(rows).reshape(n, n, n)

    cost, rate = {}, {}
    for T in (0.5, 1.0, 2.0):
        p = at(T)
        by_hand = table ** (1 / T) / (table ** (1 / T)).sum(axis=-1, keepdims=True)
        label = Words(f"max |Δp| by hand, T = {T:g}", f"T = {T:g} 时与手算的 max |Δp|")
        yield at_most(f"p{T:g}", label, np.abs(p - by_hand).max(), 1e-14)
        cost[T], rate[T] = -(stationary(p)[..., None] * p * logits).sum(), entropy_rate(p)
        name = f"{T:g}".replace(".", "")
        label = Words(f"nats a symbol under the chain, T = {T:g}", f"T = {T:g} 时每符号在链下的代价（nat）")
        yield shown(f"cost{name}", label, cost[T])
        label = Words(f"entropy of what is written, T = {T:g}", f"T = {T:g} 时所写文本的熵率")
        yield shown(f"rate{name}", label, rate[T])
    yield near("own", Words("cost − entropy at T = 1", "T = 1 时代价 − 熵率"), cost[1.0] - rate[1.0], 0.0, 1e-12)
    for name, en, zh, x in (("likelier", "cost", "代价", cost), ("poorer", "entropy", "熵率", rate)):
        label = Words(f"{en} at 1 − {en} at 0.5", f"温度 1 与 0.5 的{zh}之差")
        yield at_least(name, label, x[1.0] - x[0.5], 0.05)
    context, seen, greedy = (0, 1), {}, at(0.0)
    while context not in seen:
        seen[context] = len(seen)
        context = (context[1], int(np.argmax(greedy[context])))
    yield shown("cycle", Words("symbols of the circle at T = 0", "T = 0 时循环的长度"), len(seen) - seen[context])


f06.full(softmax_trained.writing)


f07 = chapter.claim(
    "F07",
    "S1 §3.3",
    Verdict.EMPIRICAL,
    Words(
        "Use a temperature of 0.7 to 0.9 for general text and 0.1 for code and mathematics; above 1.2 it hallucinates.",
        "通用文本用温度 0.7 到 0.9，代码和数学用 0.1，1.2 以上容易产生幻觉。",
    ),
    finding=Words(
        "It depends on the model. The most probable of a question's answers is drawn less often as T rises: one of "
        "{sure:.2f} at T = 1 with {low:.3f} at 0.1, {middle:.3f} at 0.8 and {high:.3f} at 1.2. If the second is the "
        "right one, warmth helps: {wrong_low:.4f} at 0.1, {wrong_high:.3f} at 1.2. No threshold stands at 1.2.",
        "这要看模型。一道题最可能的答案，T 越高越少被抽到：T = 1 时为 {sure:.2f} 的答案，在 0.1、0.8、1.2 时为 "
        "{low:.3f}、{middle:.3f}、{high:.3f}。若正确的是居次的那个，升温反而有益：0.1 时 {wrong_low:.4f}，"
        "1.2 时 {wrong_high:.3f}。1.2 处并没有什么门槛。",
    ),
    learned=Words(
        "A trained model's answers to sums are right to {right0:.1%} at T = 0, {right01:.1%} at 0.1, {right08:.1%} at "
        "0.8, {right12:.1%} at 1.2 and {right2:.1%} at 2; its calibration error at these is {ece0:.3f}, {ece01:.3f}, "
        "{ece08:.3f}, {ece12:.3f} and {ece2:.3f}. Nothing breaks at 1.2: from there to 1.4 as many right answers are "
        "lost as from 1 to 1.2 ({steeper_low:+.1%} to {steeper_high:+.1%} more; less than twice as many is judged, "
        "since a first look). Steps and seeds were set after a first look.",
        "训练好的模型做加法题，T = 0、0.1、0.8、1.2、2 时答对率为 {right0:.1%}、{right01:.1%}、{right08:.1%}、"
        "{right12:.1%}、{right2:.1%}，校准误差为 {ece0:.3f}、{ece01:.3f}、{ece08:.3f}、{ece12:.3f}、{ece2:.3f}。"
        "1.2 处没有突变：从 1.2 到 1.4 答对率的下降与从 1 到 1.2 相当（相差 "
        "{steeper_low:+.1%} 至 {steeper_high:+.1%}；判据为不到两倍，是看过初步结果后定下的）。"
        "步数与种子数是看过初步结果后定下的。",
    ),
    uses=(adjusted, Sampler),
)


@f07.quick
def one_right_answer() -> Numbers:
    p = np.array([0.6, 0.25, 0.1, 0.05])
    T = np.array([0.0, 0.1, 0.5, 0.8, 1.0, 1.2, 2.0, 5.0])
    found = tempered(np.log(p), T).astype(np.float64)
    at = {f"{t:g}": row for t, row in zip(T, found, strict=True)}
    # Powers of p, normalised: by hand.
    powers = {t: p ** (1 / float(t)) / (p ** (1 / float(t))).sum() for t in ("0.1", "0.8", "1.2")}
    yield shown("sure", Words("p of the right answer at T = 1", "T = 1 时正确答案的 p"), at["1"][0], "float32")
    for name, t in (("low", "0.1"), ("middle", "0.8"), ("high", "1.2")):
        label = Words(f"right at T = {t}, the most probable", f"T = {t}、正确者最可能时的答对率")
        yield near(name, label, at[t][0], powers[t][0], 10 * ROUNDING, "float32")
    for name, t in (("wrong_low", "0.1"), ("wrong_high", "1.2")):
        label = Words(f"right at T = {t}, the second", f"T = {t}、正确者居次时的答对率")
        yield near(name, label, at[t][1], powers[t][1], 10 * ROUNDING, "float32")
    yield near("zero", Words("right at T = 0", "T = 0 时的答对率"), at["0"][0], 1.0, dtype="float32")
    label = Words("rises of the first's chance with T", "最可能者的概率随 T 上升的次数")
    yield near("falls", label, (np.diff(found[:, 0]) >= 0).sum(), 0, dtype="float32")
    yield Curves(
        Words("Chance of each of four answers.", "四个答案各自的概率。"),
        "T",
        "p",
        {f"p = {x:g}": (T.tolist(), found[:, i].tolist()) for i, x in enumerate(p)},
    )


f07.full(softmax_trained.answering)


f08 = chapter.claim(
    "F08",
    "S1 §3.3",
    Verdict.GAP,
    Words(
        "To choose a word there is the argmax, or a draw at some temperature.",
        "选词的办法只有 argmax，或按某个温度随机采样。",
    ),
    finding=Words(
        "The library also cuts off the tail, by number (top-k), by mass (top-p) and by ratio to the first (min-p), in "
        "this order after the temperature, punishes what was written, and searches with beams. Draws fit the "
        "distributions written out by hand (least p of {tests:.0f} χ² tests {worst:.2f}). A wide beam finds the most "
        "probable of all texts, p = {best:.3f}; step by step the argmax finds one of {greedy:.3f}.",
        "本库还能截去尾部：按个数（top-k）、按概率质量（top-p）、按与首位之比（min-p），依此顺序在温度之后进行；"
        "还可惩罚已写过的词元，并有集束搜索。采样结果与手算分布相符"
        "（{tests:.0f} 次 χ² 检验中最小的 p 为 {worst:.2f}）。"
        "足够宽的集束能找到全部文本中概率最高者，p = {best:.3f}；逐步取 argmax 只得到 {greedy:.3f}。",
    ),
    uses=(adjusted, draw, outcomes, beam_search),
)


SEEN = (0, 1)
# By the sampler's names. Of T = 2, k = 3, p = 0.7 two ids are left, and three with p before k.
SETTINGS: dict[str, dict[str, float]] = {
    "T = 0.5": {"temperature": 0.5},
    "k = 3": {"top_k": 3},
    "p = 0.7": {"top_p": 0.7},
    "min-p = 0.3": {"min_p": 0.3},
    "penalty 1.5": {"repetition_penalty": 1.5},
    "T = 2, k = 3, p = 0.7": {"temperature": 2.0, "top_k": 3, "top_p": 0.7},
    "T = 1.5, k = 6, p = 0.9, min-p = 0.4": {"temperature": 1.5, "top_k": 6, "top_p": 0.9, "min_p": 0.4},
}


def truncated(z: np.ndarray, of: Sampler) -> np.ndarray:
    """What a sampler of plain numbers draws from over distinct logits [V], by its description, in float64."""
    z = z.copy()
    for i in SEEN:
        z[i] = z[i] / of.repetition_penalty if z[i] > 0 else z[i] * of.repetition_penalty
    p = softmax64(z / of.temperature)
    kept = np.argsort(-p)[: of.top_k or len(p)]
    share = p[kept] / p[kept].sum()
    inside = [i for n, i in enumerate(kept) if share[:n].sum() < of.top_p and p[i] >= of.min_p * p[kept[0]]]
    return np.where(np.isin(np.arange(len(p)), inside), p, 0) / p[inside].sum()


@f08.quick
def samplers() -> Numbers:
    z, N, R = np.array([1.3, -0.2, 0.9, 2.0, 0.1, -1.1, 0.5, 1.7]), 4000, len(SETTINGS)
    each = [Sampler(**setting) for setting in SETTINGS.values()]
    rows = Sampler(**{name: np.array([getattr(of, name) for of in each]) for name in dataclasses.asdict(each[0])})
    seen = np.tile(np.isin(np.arange(len(z)), SEEN), (R, 1))

    @jax.jit
    def run(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        left = adjusted(jnp.broadcast_to(logits, (R, len(z))), rows.of_rows(R), jnp.asarray(seen))
        many = jnp.repeat(left, N, axis=0)
        return jax.nn.softmax(left), draw(jax.random.key(0), many, jnp.arange(R * N), jnp.int32(0))

    p, ids = run(z.astype(np.float32))
    drawn, chances = np.reshape(ids, (R, N)), []
    for i, (name, of) in enumerate(zip(SETTINGS, each, strict=True)):
        want = truncated(z, of)
        label = Words(f"max |Δp| by hand, {name}", f"与手算的 max |Δp|，{name.replace('penalty', '惩罚')}")
        yield at_most(f"p{i}", label, np.abs(np.asarray(p[i]) - want).max(), ROUNDING, "float32")
        inside = np.flatnonzero(want)
        counts = {(int(x),): int((drawn[i] == x).sum()) for x in np.unique(drawn[i])}
        chances.append(decoding.misfit(counts, Outcomes(tuple((int(x),) for x in inside), want[inside])))
    yield shown("tests", Words("settings", "设置数"), R)
    label = Words("least p of the χ² tests of 4000 draws", "4000 次采样的 χ² 检验中最小的 p")
    yield at_least("worst", label, min(chances), 1e-3 / R, "float32")

    config = Config(vocab_size=3, d_model=4, num_heads=1, num_layers=1, d_ff=4, positions="none")
    shapes = jax.eval_shape(lambda key: init_transformer(key, config), jax.random.key(0))
    rng = np.random.default_rng(36)
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 1, leaf.shape), jnp.float32), shapes)
    every = outcomes(params, config, Hyper(), [0], max_new_tokens=3)
    greedy = outcomes(params, config, Hyper(), [0], Sampler(temperature=0.0), max_new_tokens=3).mode
    # 9 beams hold all beginnings of two ids.
    found = beam_search(params, config, Hyper(), [[0]], max_new_tokens=3, beam=9)
    label = Words("p of the beam's text − the largest p", "集束所得文本的 p − 最大的 p")
    yield near("beam", label, every.probability(np.asarray(found.ids_BWT)[0, 0].tolist()) - every.p[0], 0.0)
    apart = float(found.scores_BW[0, 0]) - math.log(every.p[0])
    yield near("score", Words("its score − ln p", "其得分 − ln p"), apart, 0.0, 4 * ROUNDING, "float32")
    yield shown("best", Words("largest p of a text", "文本概率的最大值"), every.p[0])
    yield at_most("greedy", Words("p of the greedy text", "贪心文本的 p"), every.probability(greedy), every.p[0] - 0.01)


f09 = chapter.claim(
    "F09",
    "missing (S1 §3.1)",
    Verdict.TRUE,
    Words(
        "Softmax does not change when a constant is added to every score (which none of the articles states).",
        "所有得分加上同一常数，softmax 不变（各篇均未提及）。",
    ),
    formula=r"\text{softmax}(z + c) = \text{softmax}(z)",
    finding=Words(
        "So the largest may be taken off first, without which e¹⁰²⁴ would overflow. Bit by bit the same where z + c is "
        "exact; where it is rounded, the weights move with it: by {rounded:.1g} at c = 1000.",
        "因此可以先减去最大值，否则 e¹⁰²⁴ 会溢出。z + c 无舍入时结果逐位相同；"
        "有舍入时权重随之变动：c = 1000 时为 {rounded:.1g}。",
    ),
    uses=(masked_softmax,),
)


@f09.quick
def shift_invariance() -> Numbers:
    rng = np.random.default_rng(0)
    exact = rng.integers(-256, 256, 32) / 64  # with 1024 they still fit into 24 bits
    w = weights([exact, exact + 1024, exact - 1024])
    label = Words("max |Δweight|, ±1024 added, z + c exact", "加 ±1024（z + c 无舍入）时的 max |Δ权重|")
    yield near("exact", label, np.abs(w - w[0]).max(), 0.0, dtype="float32")
    yield at_most(
        "formula", Words("… to float64", "与 float64 的差"), np.abs(w - softmax64(exact)).max(), ROUNDING, "float32"
    )
    z = rng.normal(size=32)
    moved = np.abs(np.diff(weights([z, z + 1000]), axis=0)).max()
    # z + 1000 is rounded to 2⁻¹⁵: 3·10⁻⁵ of a weight, up or down, and as much of their sum.
    yield at_most("rounded", Words("max |Δweight|, 1000 added", "加 1000 时的 max |Δ权重|"), moved, 2.0**-14, "float32")
