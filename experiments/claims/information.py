"""Chapter E: probability, information and loss (S0 and S3 §5, S1 §3.2 and §5)."""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import tempering
from experiments.claims import information_trained
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
from experiments.claims.record import Chapter, Curves, Numbers, Verdict, Words, at_least, at_most, near, shown
from transformer_jax.config import Hyper
from transformer_jax.data.markov import entropy_rate, mean_floor, transition_table
from transformer_jax.data.packing import pack_documents
from transformer_jax.data.tasks import next_token
from transformer_jax.encoder_decoder import forward
from transformer_jax.exact import outcomes
from transformer_jax.losses import (
    bits_per_byte,
    cross_entropy,
    distillation,
    entropy,
    kl_divergence,
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
    formula=r"10^{-500} = 0",
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
    label = Words("the library's loss + ln P(W), relative", "库中损失 + ln P(W)（相对）")
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
        "前提是首词元之前另有起始词元，且目标为独热分布。只错位会丢掉 P(w₁)：{classes:.0f} 个词元时，"
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
    formula=r"I \propto 1 / p",
    finding=Words(
        "It falls with the probability, but as −log p, which the article itself writes one sentence on: from "
        "p = 0.01 to 0.001 it grows from {p01:.2f} bits to {p001:.2f}, by half and not tenfold.",
        "信息量确随概率增大而减小，但规律是 −log p（原文下一句自己就这么写）："
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


e09 = chapter.claim(
    "E09",
    "S1 §5.1",
    Verdict.TRUE,
    Words("A word that must come carries no information.", "必然出现的词不携带任何信息。"),
    formula=r"-\log 1 = 0",
    uses=(cross_entropy,),
)


@e09.quick
def certain_event() -> Numbers:
    nats = nats_of([[0.0, -np.inf, -np.inf], [0.0, 0.0, 0.0]], [0, 0])
    yield near("certain", Words("nats at p = 1", "p = 1 时的 nat 数"), nats[0], 0.0, dtype="float32")
    yield near("even", Words("… at p = ⅓", "p = ⅓ 时"), nats[1], math.log(3), ROUNDING, "float32")


e10 = chapter.claim(
    "E10",
    "S1 §5.1",
    Verdict.TRUE,
    Words(
        "Entropy is the mean information; uniform distributions have the most, concentrated ones the least.",
        "熵是信息量的加权平均；均匀分布的熵最大，集中分布的熵最小。",
    ),
    formula=r"H(p) = -\sum_x p(x) \log p(x) \le \log n",
    uses=(entropy,),
)


@e10.quick
def entropy_bounds() -> Numbers:
    rng, n = np.random.default_rng(0), 16
    z = rng.normal(size=(1000, n)) * rng.exponential(2.0, size=(1000, 1))
    certain = np.where(np.arange(n) == 3, 0.0, -np.inf)
    found = np.asarray(jax.jit(entropy)(np.stack([np.zeros(n), certain, *z]).astype(np.float32)), np.float64)
    yield near("uniform", Words("H, uniform over 16", "16 类均匀分布的 H"), found[0], math.log(n), ROUNDING, "float32")
    yield near("certain", Words("H, one class", "只有一类时的 H"), found[1], 0.0, dtype="float32")
    label = Words("largest H of 1000 others", "另外 1000 个分布中最大的 H")
    yield at_most("largest", label, found[2:].max(), math.log(n) + ROUNDING, "float32")
    yield at_least("least", Words("least H", "最小的 H"), found[2:].min(), -ROUNDING, "float32")
    p = softmax64(z.astype(np.float32).astype(np.float64))
    direct = -(p * np.log(p)).sum(axis=1)
    label = Words("max |ΔH| to the sum in float64", "与 float64 求和的 max |ΔH|")
    # p of 2⁻²⁰ and less still counts with the rounding of logits as large as 100.
    yield at_most("direct", label, np.abs(found[2:] - direct).max(), 100 * EPSILON, "float32")


e11 = chapter.claim(
    "E11",
    "S1 §5.1",
    Verdict.WRONG,
    Words(
        "Low perplexity means that a model's distributions are concentrated, high perplexity that it hesitates.",
        "困惑度低说明模型输出的分布集中、选择确定，困惑度高说明它犹豫不决。",
    ),
    formula=r"\text{ppl} = \exp H(p, q)",
    finding=Words(
        "Perplexity compares with the data. A model that puts 0.99 on a word that never comes has an entropy of "
        "{sure_entropy:.3f} nats and a perplexity of {sure:.0f}; one that hesitates evenly between two has "
        "{even_entropy:.3f} and {even:.0f}. How sure it rightly is, calibration says: its error is {sure_ece:.2f}.",
        "困惑度是拿分布与数据相比。把 0.99 压在从不出现的词上的模型，"
        "熵只有 {sure_entropy:.3f} nat，困惑度却是 {sure:.0f}；在两个词之间平均犹豫的模型，熵为 {even_entropy:.3f}，"
        "困惑度只有 {even:.0f}。"
        "自信得对不对要看校准，前者的校准误差为 {sure_ece:.2f}。",
    ),
    uses=(entropy, cross_entropy, perplexity),
)


@e11.quick
def confidently_wrong() -> Numbers:
    q = np.array([[0.99, 0.01], [0.5, 0.5]])
    nats = nats_of(np.log(q), [1, 1])
    H, ppl = jax.jit(lambda z, nats: (entropy(z), perplexity(nats)))(np.log(q).astype(np.float32), nats)
    for i, name, en, zh in (
        (0, "sure", "q = (0.99, 0.01)", "q = (0.99, 0.01)"),
        (1, "even", "q = (½, ½)", "q = (½, ½)"),
    ):
        label = Words(f"perplexity, {en}, the second comes", f"{zh}、出现第二类时的困惑度")
        yield near(name, label, ppl[i], 1 / q[i, 1], ROUNDING / float(q[i, 1]), "float32")
        want = -(q[i] * np.log(q[i])).sum()
        yield near(f"{name}_entropy", Words(f"H, {en}", f"{zh} 的 H"), H[i], want, ROUNDING, "float32")
    label = Words("calibration error of the first", "前者的校准误差")
    error = tempering.reliability(np.log(q[:1]), np.array([1])).error
    yield near("sure_ece", label, error, 0.99, 1e-12)


e12 = chapter.claim(
    "E12",
    "S1 §5.2",
    Verdict.TRUE,
    Words(
        "Cross-entropy is the data's entropy, which no model changes, plus the KL divergence: minimising one "
        "minimises the other.",
        "交叉熵等于真实分布自身的熵（与模型无关的常数）加上 KL 散度，所以最小化其一就是最小化另一个。",
    ),
    formula=r"H(p, q) = H(p) + D_{KL}(p \| q)",
    uses=(cross_entropy, entropy, kl_divergence),
)


@e12.quick
def entropy_and_divergence() -> Numbers:
    n = 7
    zp, zq = np.random.default_rng(0).normal(size=(2, n)).astype(np.float32)
    p, q = softmax64(zp.astype(np.float64)), softmax64(zq.astype(np.float64))

    @jax.jit
    def both(zp: jax.Array, zq: jax.Array) -> Any:
        def cross(zq: jax.Array) -> jax.Array:
            # Each class is the target once, as heavy as it is likely.
            return cross_entropy(jnp.tile(zq, (1, n, 1)), jnp.arange(n)[None], jax.nn.softmax(zp)[None]).nats

        def kl(zq: jax.Array) -> jax.Array:
            return kl_divergence(zp, zq)[0]

        return cross(zq), entropy(zp), kl(zq), jax.grad(cross)(zq), jax.grad(kl)(zq), jax.grad(kl)(zp)

    cross, H, kl, *slopes = (np.asarray(x, np.float64) for x in both(zp, zq))
    yield near(
        "identity",
        Words("H(p, q) − H(p) − KL(p‖q)", "H(p, q) − H(p) − KL(p‖q)"),
        cross - H - kl,
        0.0,
        ROUNDING,
        "float32",
    )
    want = (p * np.log(p / q)).sum()
    yield near("kl", Words("KL(p‖q), nats", "KL(p‖q)（nat）"), kl, want, ROUNDING, "float32")
    label = Words("max |∂H(p, q)/∂z − (q − p)|", "max |∂H(p, q)/∂z − (q − p)|")
    yield at_most("cross_slope", label, np.abs(slopes[0] - (q - p)).max(), ROUNDING, "float32")
    label = Words("max |∂KL/∂z − (q − p)|", "max |∂KL/∂z − (q − p)|")
    yield at_most("kl_slope", label, np.abs(slopes[1] - (q - p)).max(), ROUNDING, "float32")
    label = Words("… at q = p", "q = p 处")
    yield at_most("least", label, np.abs(slopes[2]).max(), ROUNDING, "float32")


e13 = chapter.claim(
    "E13",
    "S1 §5.2",
    Verdict.OVERCLAIM,
    Words(
        "All that a language model does is fit q to p, and translation, classification and speech recognition all "
        "come down to cross-entropy.",
        "语言模型所做的一切就是让 q 拟合 p，翻译、分类、语音识别最终都统一为交叉熵。",
    ),
    finding=Words(
        "What is minimised is often something else: with label smoothing of 0.1 the best q is not p but lies "
        "{moved:.3f} from it. And what is wanted is: cross-entropy calls a model with {poor_acc:.0%} right answers "
        "({poor:.2f} nats) better than one with {good_acc:.0%} ({good:.2f}). Speech is scored by edits, often "
        "trained on sums over alignments.",
        "实际最小化的常常是别的东西：标签平滑 0.1 时，最优的 q 不是 p，而与它相差 {moved:.3f}。"
        "真正想要的也不是它：按交叉熵，答对 {poor_acc:.0%} 的模型（{poor:.2f} nat）"
        "优于答对 {good_acc:.0%} 的（{good:.2f}）。"
        "语音识别用编辑距离评分，训练目标也常是对各种对齐求和。",
    ),
    uses=(cross_entropy,),
)


@e13.quick
def not_all_is_fitting() -> Numbers:
    n, a = 4, 0.1
    p = np.array([0.7, 0.2, 0.08, 0.02])
    smoothed = (1 - a) * p + a / n

    @jax.jit
    def slope(z: jax.Array, p: jax.Array) -> jax.Array:
        def objective(z: jax.Array) -> jax.Array:
            targets = jnp.arange(n)[None]
            return cross_entropy(jnp.tile(z, (1, n, 1)), targets, p[None], label_smoothing=a).objective

        return jax.grad(objective)(z)

    weights = p.astype(np.float32)
    at_p, at_smoothed = (np.abs(slope(np.log(x).astype(np.float32), weights)).max() for x in (p, smoothed))
    label = Words("max |slope| of the smoothed loss at q = p", "平滑损失在 q = p 处的 max |斜率|")
    yield near("moved", label, at_p, np.abs(smoothed - p).max(), ROUNDING, "float32")
    label = Words("… at q = 0.9 p + 0.1/4", "在 q = 0.9 p + 0.1/4 处")
    yield at_most("smoothed", label, at_smoothed, ROUNDING, "float32")
    # Two questions, the first answer right. One model is never right, by little; one half the time, else certain.
    for name, right in (("poor", [0.49, 0.49]), ("good", [0.99, 0.001])):
        z = np.log(np.array([[[x, 1 - x] for x in right]])).astype(np.float32)
        sums = jax.jit(lambda z: cross_entropy(z, jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 2))))(z)
        want = -np.log(right).mean()
        label = Words(
            f"nats, p of the answers {right[0]:g} and {right[1]:g}",
            f"答案概率为 {right[0]:g} 与 {right[1]:g} 时的 nat 数",
        )
        yield near(name, label, sums.loss, want, 8 * ROUNDING, "float32")
        want = sum(x > 0.5 for x in right) / 2
        yield near(f"{name}_acc", Words("… part right", "答对的比例"), sums.accuracy, want, dtype="float32")


e14 = chapter.claim(
    "E14",
    "S1 §1.1, S1 §5.2",
    Verdict.IMPRECISE,
    Words("KL divergence is a distance between distributions.", "KL 散度是分布之间的距离。"),
    finding=Words(
        "It is neither symmetric nor obeys the triangle inequality. For Bernoulli variables of ½, ¼ and ⅒: "
        "KL(½‖⅒) = {pr:.3f} but KL(⅒‖½) = {rp:.3f}; and it exceeds KL(½‖¼) + KL(¼‖⅒) = {way:.3f}.",
        "它既不对称，也不满足三角不等式。以参数 ½、¼、⅒ 的伯努利分布为例：KL(½‖⅒) = {pr:.3f}，KL(⅒‖½) = {rp:.3f}；"
        "而 KL(½‖¼) + KL(¼‖⅒) = {way:.3f} 反而更小。",
    ),
    uses=(kl_divergence,),
)


@e14.quick
def no_metric() -> Numbers:
    p, q, r = (np.array([x, 1 - x]) for x in (0.5, 0.25, 0.1))
    pairs = {"pr": (p, r), "rp": (r, p), "pq": (p, q), "qr": (q, r)}
    run = jax.jit(lambda a, b: kl_divergence(a, b)[0])
    found = {name: float(run(*(np.log(x).astype(np.float32) for x in pair))) for name, pair in pairs.items()}
    for name, en in (("pr", "KL(½‖⅒)"), ("rp", "KL(⅒‖½)")):
        a, b = pairs[name]
        yield near(name, Words(en, en), found[name], (a * np.log(a / b)).sum(), ROUNDING, "float32")
    yield shown("way", Words("KL(½‖¼) + KL(¼‖⅒)", "KL(½‖¼) + KL(¼‖⅒)"), found["pq"] + found["qr"], "float32")
    label = Words("by how much the detour is shorter", "绕道反而短了多少")
    yield at_least("shorter", label, found["pr"] - found["pq"] - found["qr"], 0.2, "float32")
    yield at_least(
        "apart", Words("|KL(½‖⅒) − KL(⅒‖½)|", "|KL(½‖⅒) − KL(⅒‖½)|"), abs(found["pr"] - found["rp"]), 0.1, "float32"
    )


e15 = chapter.claim(
    "E15",
    "S1 §5.3",
    Verdict.WRONG,
    Words(
        "Distillation, which makes a student imitate the teacher's whole distribution, minimises KL(student‖teacher).",
        "知识蒸馏要让学生模仿教师的整个分布，所最小化的是 KL(学生‖教师)。",
    ),
    formula=r"L = D_{KL}(q_{\text{student}} \| p_{\text{teacher}})",
    finding=Words(
        "What the text describes is KL(teacher‖student), times T² at temperature T, with the slope T(q − p). One "
        "Gaussian fitted to two at ±2.5: forward KL covers both (mean {mean_forward:.2f}, width {width_forward:.2f}), "
        "the printed one takes the heavier (mean {mean_reverse:.2f}, width {width_reverse:.2f}) and forgets the other.",
        "文中所述其实是 KL(教师‖学生)；温度为 T 时还要乘 T²，斜率为 T(q − p)。用一个高斯去拟合 ±2.5 处的两个高斯："
        "正向 KL 把两峰都盖住（均值 {mean_forward:.2f}，宽 {width_forward:.2f}），"
        "而照印出的公式只取较重的一峰（均值 {mean_reverse:.2f}，宽 {width_reverse:.2f}），丢下另一峰。",
    ),
    learned=Words(
        "Small students of a teacher with known probabilities: trained by KL(teacher‖student) they end "
        "{forward_gap:.3f} nats from it, by the printed reverse {reverse_gap:.3f}, measured by the former.",
        "让小模型学习概率已知的教师：按 KL(教师‖学生) 训练，最终相距 {forward_gap:.3f} nat；"
        "照印出的反向训练，按同一量度相距 {reverse_gap:.3f}。",
    ),
    uses=(distillation, kl_divergence),
)


@e15.quick
def two_modes() -> Numbers:
    x = np.linspace(-10, 10, 201)
    means, widths = np.linspace(-4, 4, 81), np.linspace(0.3, 4, 75)
    heavy = 0.6
    peaks = np.exp(-((x - np.array([[2.5], [-2.5]])) ** 2) / (2 * 0.7**2))
    teacher = np.log(heavy * peaks[0] + (1 - heavy) * peaks[1] + 1e-300)
    students = -((x - means[:, None, None]) ** 2) / (2 * widths[:, None] ** 2)

    @jax.jit
    def losses(students: jax.Array, teacher: jax.Array) -> list[jax.Array]:
        def of(direction: str) -> jax.Array:
            one = lambda student: distillation(student, teacher, direction=direction)[0]  # noqa: E731
            return jax.vmap(jax.vmap(one))(students)

        return [of(direction) for direction in ("forward", "reverse", "jensen_shannon")]

    fits, lines = {}, {"teacher": (x.tolist(), softmax64(teacher).tolist())}
    found = losses(students.astype(np.float32), teacher.astype(np.float32))
    for name, loss in zip(("forward", "reverse", "jensen_shannon"), found, strict=True):
        i, j = np.unravel_index(np.argmin(loss), loss.shape)
        fits[name] = (means[i], widths[j], float(loss[i, j]))
        lines[name] = (x.tolist(), softmax64(students[i, j]).tolist())
    # Forward KL matches the moments; half a step of the grid either way.
    moments = (2.5 * (2 * heavy - 1), math.sqrt(0.7**2 + 4 * heavy * (1 - heavy) * 2.5**2))
    for name, (mean, width) in {"forward": moments, "reverse": (2.5, 0.7)}.items():
        en, zh = {"forward": ("forward", "正向"), "reverse": ("reverse", "反向")}[name]
        yield near(f"mean_{name}", Words(f"mean, {en} KL", f"{zh} KL 的均值"), fits[name][0], mean, 0.051, "float32")
        yield near(f"width_{name}", Words(f"width, {en} KL", f"{zh} KL 的宽度"), fits[name][1], width, 0.026, "float32")
    # The peaks overlap by exp(−3.5²/2·0.7²) only.
    label = Words("reverse KL at its best, −ln 0.6", "反向 KL 的最小值，即 −ln 0.6")
    yield near("floor", label, fits["reverse"][2], -math.log(heavy), 1e-3, "float32")
    yield shown("mean_middle", Words("mean, Jensen–Shannon", "JS 散度的均值"), fits["jensen_shannon"][0], "float32")
    yield Curves(Words("One Gaussian fitted to two.", "用一个高斯拟合两个高斯。"), "x", "p", lines)

    student, target = np.random.default_rng(0).normal(size=(2, 6)).astype(np.float32)
    for T in (1.0, 3.0, 100.0):
        slope = jax.jit(jax.grad(lambda s, t, T=T: distillation(s, t, temperature=T)[0]))(student, target)
        want = T * (softmax64(student / T) - softmax64(target / T))
        label = Words(f"max |slope − T(q − p)|, T = {T:g}", f"max |斜率 − T(q − p)|，T = {T:g}")
        yield at_most(f"slope{T:g}", label, np.abs(slope - want).max(), T * ROUNDING, "float32")


e15.full(information_trained.directions)


e16 = chapter.claim(
    "E16",
    "S1 §5.3",
    Verdict.TRUE,
    Words(
        "Preference alignment keeps the new policy from drifting off by a KL divergence to the reference policy.",
        "偏好对齐用新策略对参考策略的 KL 散度加以约束，防止模型偏离太远。",
    ),
    formula=r"\max_\pi E_\pi[r] - \beta D_{KL}(\pi \| \pi_{ref})",
    finding=Words(
        "With it the best policy is π_ref exp(r/β), normalised: {b01:.2f}, {b1:.2f} and {b10:.4f} nats from the "
        "reference at β = 0.1, 1 and 10. Here the direction is the one that the article gives.",
        "有了它，最优策略是归一化的 π_ref exp(r/β)：β = 0.1、1、10 时"
        "与参考策略相距 {b01:.2f}、{b1:.2f}、{b10:.4f} nat。此处 KL 的方向与文中一致。",
    ),
    uses=(kl_divergence,),
)


@e16.quick
def tethered_policy() -> Numbers:
    ref, reward = np.random.default_rng(0).normal(size=(2, 8))

    @jax.jit
    def slope(z: jax.Array, beta: float) -> tuple[jax.Array, jax.Array]:
        def loss(z: jax.Array) -> tuple[jax.Array, jax.Array]:
            kl = kl_divergence(z, jnp.asarray(ref, jnp.float32))[0]
            return beta * kl - jnp.sum(jax.nn.softmax(z) * jnp.asarray(reward, jnp.float32)), kl

        found, kl = jax.grad(loss, has_aux=True)(z)
        return jnp.max(jnp.abs(found)), kl

    for name, beta in (("b01", 0.1), ("b1", 1.0), ("b10", 10.0)):
        best = ref + reward / beta
        p, q = softmax64(best), softmax64(ref)
        steep, kl = slope(best.astype(np.float32), beta)
        # Logits are as large as 1/β, and so is what their rounding moves.
        label = Words(f"max |slope| at π_ref exp(r/β), β = {beta:g}", f"π_ref exp(r/β) 处的 max |斜率|，β = {beta:g}")
        yield at_most(f"{name}_slope", label, steep, ROUNDING * max(beta, 1) * (1 + 1 / beta), "float32")
        label = Words(f"KL(π‖π_ref), β = {beta:g}", f"KL(π‖π_ref)，β = {beta:g}")
        yield near(name, label, kl, (p * np.log(p / q)).sum(), ROUNDING * (1 + 1 / beta), "float32")


e17 = chapter.claim(
    "E17",
    "S1 §5.2",
    Verdict.UNVERIFIABLE,
    Words("One need not invent loss functions out of nothing.", "不需要凭空设计损失函数。"),
    finding=Words(
        "Advice on where losses come from: no measurement could contradict it.",
        "这是关于损失函数从何而来的建议，没有测量能够反驳它。",
    ),
)


e18 = chapter.claim(
    "E18",
    "S0 §5, S3 §5",
    Verdict.UNVERIFIABLE,
    Words(
        "Trained on nothing but the next word, a model ends up writing whole novels full of logic.",
        "模型只训练预测下一个字，最终却能写出结构完整、充满逻辑的整篇小说。",
    ),
    finding=Words(
        "The chain rule says that it could (E01), not that training gets there; no program judges a novel.",
        "链式法则只说明有此可能（E01），不保证训练做得到；小说写得如何，也没有程序能评判。",
    ),
)
