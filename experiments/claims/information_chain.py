"""Chapter E, its first part: chain rule, likelihood, codes (S0 and S3 §5, S1 §3.2 and §5.1)."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims.information_probes import (
    BOS,
    EPSILON,
    ROUNDING,
    SMALL,
    every_row,
    huffman_lengths,
    nats_of,
    row_sums,
    small_model,
    softmax64,
)
from experiments.claims.record import Chapter, Numbers, Verdict, Words, at_least, at_most, near, shown
from transformer_jax.config import Hyper
from transformer_jax.data.markov import entropy_rate, mean_floor, transition_table
from transformer_jax.data.packing import pack_documents
from transformer_jax.data.tasks import next_token
from transformer_jax.encoder_decoder import forward
from transformer_jax.exact import outcomes
from transformer_jax.losses import (
    bits_per_byte,
    cross_entropy,
    perplexity,
)
from transformer_jax.samplers import GREEDY, Sampler, adjusted, draw

chapter = Chapter("E", Words("Probability, information and loss", "概率、信息与损失"))

e01 = chapter.claim(
    "E01",
    "S0 §5.1, S3 §5.1",
    Verdict.TRUE,
    Words(
        "The probability of a whole text is the product of each token's probability given those before it.",
        "整篇文本的概率，等于每个词元在其前文条件下的概率之积。",
    ),
    formula=r"P(W) = \prod_{t=1}^T P(w_t \mid w_{<t})",
    uses=(forward, cross_entropy, outcomes),
)


@e01.quick
def chain_rule() -> Numbers:
    params, tails = small_model(), every_row(4)
    rows = jnp.asarray(np.concatenate([np.full((len(tails), 1), BOS, np.int32), tails], axis=1))
    p = np.exp(-np.asarray(row_sums(next_token(rows, jnp.ones(rows.shape, bool)), params).nats, np.float64))
    label = Words("ΣP(W) over all 3⁴ texts", "对全部 3⁴ 个文本求和的 ΣP(W)")
    yield near("sum", label, p.sum(), 1.0, 4 * ROUNDING, "float32")
    listed = outcomes(params, SMALL, Hyper(), [BOS], max_new_tokens=4)
    apart = max(abs(listed.probability(row) - x) for row, x in zip(tails.tolist(), p, strict=True))
    label = Words("max |ΔP(W)|, what can be written against exp(−loss)", "逐词写出的概率与 exp(−损失) 的 max |ΔP(W)|")
    yield at_most("written", label, apart, 4 * ROUNDING, "float32")


e02 = chapter.claim(
    "E02",
    "S0 §5.2, S3 §5.2",
    Verdict.TRUE,
    Words(
        "Thousands of probabilities multiply to something like 10⁻⁵⁰⁰, which a float stores as zero.",
        "几千个概率连乘会小到 10⁻⁵⁰⁰，浮点数只能存成 0。",
    ),
    formula=r"\mathrm{fl}(10^{-500}) = 0",
    uses=(cross_entropy, perplexity),
)


@e02.quick
def products_underflow() -> Numbers:
    yield near("tiny", Words("10⁻⁵⁰⁰", "10⁻⁵⁰⁰"), float("1e-500"), 0.0)
    # The least subnormals are 2⁻¹⁴⁹ and 2⁻¹⁰⁷⁴; half of one is rounded to 0.
    for dtype, steps in (("float32", 150), ("float64", 1075)):
        halves = np.multiply.accumulate(np.full(1200, 0.5, dtype), dtype=dtype)
        label = Words(f"halves whose product is 0, {dtype}", f"乘到 0 的 ½ 的个数（{dtype}）")
        yield near(dtype, label, np.argmax(halves == 0) + 1, steps, dtype=dtype)
    n = 5000
    sums = jax.jit(lambda z, y: cross_entropy(z, y, jnp.ones((1, n))))(np.zeros((1, n, 2), np.float32),
                                                                       np.zeros((1, n), np.int32))  # fmt: skip
    label = Words("nats of 5000 halves, by their logarithms", "用对数求 5000 个 ½ 之积的 nat 数")
    # The sum is taken in float32: in any order it is off by n half units at the very most.
    yield near("logs", label, sums.nats, n * math.log(2), n * n * math.log(2) * EPSILON / 2, "float32")
    label = Words("perplexity", "困惑度")
    yield near("perplexity", label, perplexity(sums.loss), 2.0, 2 * math.log(2) * n * EPSILON, "float32")


e03 = chapter.claim(
    "E03",
    "S0 §5.2, S3 §5.2",
    Verdict.TRUE,
    Words(
        "The logarithm grows with its argument and turns the product into a sum, whose negative is the loss.",
        "对数单调递增，把连乘变成连加，再取负号就是损失。",
    ),
    formula=r"\mathcal{L} = -\ln P(W) = -\sum_{t=1}^T \ln P(w_t \mid w_{<t})",
    uses=(cross_entropy,),
)


@e03.quick
def logarithm_of_a_product() -> Numbers:
    rng = np.random.default_rng(0)
    z, targets = rng.normal(size=(40, 7)), rng.integers(0, 7, 40)
    p = softmax64(z)[np.arange(40), targets]
    label = Words("|ln ∏p − Σ ln p|", "|ln ∏p − Σ ln p|")
    # A product of 40 factors, and a sum of 40 terms, half a unit in the last place each.
    yield at_most("product", label, abs(np.log(np.prod(p)) - np.log(p).sum()), 1e-12)
    rising = np.sort(rng.random(1000))
    label = Words("steps of ln that are not upwards", "ln 不上升的步数")
    yield near("rising", label, (np.diff(np.log(rising)) <= 0).sum(), 0)
    nats = nats_of(z, targets).sum()
    label = Words("the library's loss + ln P(W), relative", "本库损失 + ln P(W)（相对）")
    yield near("loss", label, nats / -np.log(np.prod(p)) - 1, 0.0, ROUNDING, "float32")


e04 = chapter.claim(
    "E04",
    "S0 §5.2, S3 §5.2",
    Verdict.CONDITIONAL,
    Words(
        "The negative log-likelihood of the text shifted by one is mathematically identical to cross-entropy.",
        "序列错位一位得到的负对数似然，在数学上与交叉熵完全等价。",
    ),
    formula=r"-\ln P(W) = \sum_t H(\text{onehot}(w_t), q_t)",
    finding=Words(
        "With a token before the first, and one-hot targets. Shifting alone drops P(w₁): probabilities of all texts "
        "over {classes:.0f} ids then sum to {dropped:.3f}, with a start token to {whole:.3f}. Label smoothing of 0.1 "
        "adds {smoothed:.2f} nats a token, and a mean is a sum over {count:.0f} tokens divided by their number.",
        "前提是首词元之前另有起始词元，且目标为 one-hot 分布。只错位会丢掉 P(w₁)：{classes:.0f} 个词元时，"
        "所有文本的概率之和变成 {dropped:.3f}，有起始词元才是 {whole:.3f}。"
        "标签平滑 0.1 使每词元多出 {smoothed:.2f} nat；取平均则还要除以词元数 {count:.0f}。",
    ),
    uses=(next_token, forward, cross_entropy),
)


@e04.quick
def shifted_by_one() -> Numbers:
    params, rows = small_model(), every_row(4)
    batch = next_token(jnp.asarray(rows), jnp.ones(rows.shape, bool))
    sums = row_sums(batch, params, 0.1)
    p, begins = np.exp(-np.asarray(sums.nats, np.float64)), rows[:, 0] == BOS
    label = Words("Σ exp(−loss) over texts that follow a start token", "有起始词元时对所有文本的 Σ exp(−损失)")
    yield near("whole", label, p[begins].sum(), 1.0, 4 * ROUNDING, "float32")
    label = Words("… over texts without one", "没有起始词元时")
    yield near("dropped", label, p.sum(), SMALL.V, 4 * SMALL.V * ROUNDING, "float32")
    yield shown("classes", Words("ids", "词元数"), SMALL.V)
    extra = (p * np.asarray(sums.objective - sums.nats))[begins].sum() / 3  # of the texts that the model writes
    yield at_least("smoothed", Words("nats that smoothing adds", "标签平滑多出的 nat 数"), extra, 1e-2, "float32")
    ratio = float(sums.nats[0] / jax.vmap(lambda s: s.loss)(sums)[0])
    yield near("count", Words("sum over mean", "总和与均值之比"), ratio, 3.0, 3 * EPSILON, "float32")


e05 = chapter.claim(
    "E05",
    "S3 §6",
    Verdict.CONDITIONAL,
    Words(
        "Next-token prediction decomposes the generation of a whole document rigorously.",
        "逐词元预测严格分解了整篇文档的生成。",
    ),
    finding=Words(
        "If each token sees all that came before. Rows cut it: where a Markov chain of order 2 costs {whole:.3f} nats "
        "a token, the best model of rows of 4 pays {rows4:.3f}, of single pairs {rows1:.3f}. A document of 65 ids "
        "in rows of 16 becomes {pieces:.0f} pieces, the first target of each with one token of context.",
        "前提是每个词元都能看到全部前文。切成定长的行就断了：在每词元 {whole:.3f} nat 的二阶马尔可夫链上，"
        "行长 4 的最好模型也要 {rows4:.3f}，只看相邻一对则要 {rows1:.3f}。"
        "65 个词元的文档按行长 16 切成 {pieces:.0f} 段，每段的第一个目标只有一个词元的上文。",
    ),
    uses=(transition_table, entropy_rate, mean_floor, pack_documents),
)


@e05.quick
def cut_context() -> Numbers:
    table = transition_table(6, 2)
    # The stationary law again, as an eigenvector over pairs: (a, b) is followed by (b, c).
    pairs = np.zeros((36, 36))
    for a, b, c in itertools.product(range(6), repeat=3):
        pairs[6 * a + b, 6 * b + c] = table[a, b, c]
    values, vectors = np.linalg.eig(pairs.T)
    chance = np.real(vectors[:, np.argmax(np.real(values))])
    joint = (chance / chance.sum()).reshape(6, 6)
    whole = -(joint[..., None] * table * np.log(table)).sum()
    one = -(joint * np.log(joint / joint.sum(axis=1, keepdims=True))).sum()
    label = Words("nats a token, all the context", "看全部前文时每词元的 nat 数")
    yield near("whole", label, entropy_rate(table), whole, 1e-12)
    for n in (1, 4, 16):
        label = Words(f"… rows of {n}", f"行长 {n} 时")
        yield near(f"rows{n}", label, mean_floor(table, n), (one + (n - 1) * whole) / n, 1e-12)
    yield at_least(
        "lost", Words("nats that one token's context lacks", "只看一个词元时多出的 nat 数"), one - whole, 0.05
    )
    document = np.arange(65) % 6
    batch = pack_documents([document], 16)
    yield near(
        "pieces", Words("pieces of 65 ids in rows of 16", "65 个词元按行长 16 切成的段数"), len(batch.tokens_BT), 4
    )
    label = Words("targets that are not their token's successor", "不是后继词元的目标数")
    yield near("targets", label, np.sum(np.reshape(batch.targets_BT, -1) != document[1:]), 0)


e06 = chapter.claim(
    "E06",
    "S1 §3.2",
    Verdict.IMPRECISE,
    Words(
        "A language model gives a distribution over the vocabulary and then takes the most probable word.",
        "语言模型给出整个词表上的概率分布，然后选出概率最高的词。",
    ),
    formula=r"\mathrm{arg}\,\max_w q(w)",
    finding=Words(
        "The distribution is the model; the choice is made after it. Drawn from the same logits, {other:.1%} of the "
        "ids are not the most probable one; of those that greedy decoding takes, {greedy:.0%}.",
        "模型只给出分布，怎么选是另一回事。从同一组 logits 采样，{other:.1%} 的词元不是概率最高者；"
        "贪心解码时为 {greedy:.0%}。",
    ),
    uses=(Sampler, adjusted, draw),
)


@e06.quick
def choosing() -> Numbers:
    N, z = 4000, np.array([1.0, 0.5, 0.0, -0.5, 2.0])
    logits = np.broadcast_to(z.astype(np.float32), (N, 5))

    @jax.jit
    def ids(logits: jax.Array) -> list[jax.Array]:
        seen, rows, step = jnp.zeros((N, 5), bool), jnp.arange(N), jnp.int32(0)
        samplers = (Sampler(), GREEDY)
        return [draw(jax.random.key(0), adjusted(logits, s.of_rows(N), seen), rows, step) for s in samplers]

    drawn, greedy = (np.asarray(x) for x in ids(logits))
    p = softmax64(z)[4]
    label = Words("draws that are not the most probable id", "采样结果不是概率最高词元的比例")
    yield near("other", label, (drawn != 4).mean(), 1 - p, 5 * math.sqrt(p * (1 - p) / N), "float32")
    yield near("greedy", Words("… greedy", "贪心解码时"), (greedy != 4).mean(), 0.0, dtype="float32")


e07 = chapter.claim(
    "E07",
    "S1 §3.2",
    Verdict.TRUE,
    Words(
        "Maximising the true word's probability is minimising −log p, called cross-entropy; it is a code length.",
        "最大化真实词的概率，就是最小化 −log p，即交叉熵；它对应编码长度。",
    ),
    formula=r"\mathrm{arg}\,\max p(w) = \mathrm{arg}\,\min (-\log p(w))",
    uses=(cross_entropy, bits_per_byte),
)


@e07.quick
def code_length() -> Numbers:
    p = np.array([1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 16])
    nats = nats_of(np.tile(np.log(p), (5, 1)), np.arange(5))
    bits = np.asarray(jax.jit(lambda nats: bits_per_byte(nats, 1.0))(nats))
    label = Words("max |bits − length in Huffman's code|", "max |比特数 − 哈夫曼码长|")
    yield at_most("code", label, np.abs(bits - huffman_lengths(p)).max(), 4 * ROUNDING, "float32")
    label = Words("max |loss + Σ onehot·ln q|", "max |损失 + Σ onehot·ln q|")
    onehot = -(np.eye(5) * np.log(p)).sum(axis=1)
    yield at_most("onehot", label, np.abs(nats - onehot).max(), ROUNDING, "float32")
    theta = np.linspace(-3, 3, 61)
    weights = softmax64(np.stack([theta, -(theta**2), np.zeros(61)], axis=1))[:, 0]
    losses = nats_of(np.log(np.stack([weights, 1 - weights], axis=1)), np.zeros(61))
    label = Words("argmin of the loss − argmax of p, over θ", "损失的 argmin − p 的 argmax（对 θ）")
    yield near("argmin", label, np.argmin(losses) - np.argmax(weights), 0)


e08 = chapter.claim(
    "E08",
    "S1 §5.1",
    Verdict.WRONG,
    Words(
        "The information in a word is inversely proportional to its probability.",
        "一个词的信息量与它出现的概率成反比。",
    ),
    formula=r"I = -\log p",
    finding=Words(
        "It falls with the probability, but as −log p, which the article itself writes two sentences on: from "
        "p = 0.01 to 0.001 it grows from {p01:.2f} bits to {p001:.2f}, by half and not tenfold.",
        "信息量确随概率增大而减小，但规律是 −log p（原文隔一句自己就这么写）："
        "p 从 0.01 降到 0.001，信息量由 {p01:.2f} 比特增至 {p001:.2f} 比特，只多一半，而不是十倍。",
    ),
    uses=(cross_entropy, bits_per_byte),
)


@e08.quick
def bits_of_rare_words() -> Numbers:
    p = np.array([0.1, 0.01, 0.001])
    nats = nats_of(np.log(np.stack([p, 1 - p], axis=1)), np.zeros(3))
    bits = np.asarray(jax.jit(lambda nats: bits_per_byte(nats, 1.0))(nats), np.float64)
    for name, label, x, of in zip(("p1", "p01", "p001"), ("0.1", "0.01", "0.001"), bits, p, strict=True):
        yield near(
            name, Words(f"bits at p = {label}", f"p = {label} 时的比特数"), x, -np.log2(of), 10 * ROUNDING, "float32"
        )
    label = Words(
        "information at 0.001 over that at 0.01 (10 if inverse)", "p = 0.001 与 0.01 的信息量之比（反比则为 10）"
    )
    yield near("ratio", label, bits[2] / bits[1], 1.5, 4 * ROUNDING, "float32")
