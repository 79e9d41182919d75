"""Chapter E: entropy, perplexity, divergences (S1 §5)."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import tempering
from experiments.claims import information_trained
from experiments.claims.information_chain import chapter
from experiments.claims.information_probes import (
    EPSILON,
    ROUNDING,
    nats_of,
    softmax64,
)
from experiments.claims.record import Curves, Numbers, Verdict, Words, at_least, at_most, near, shown
from transformer_jax.losses import (
    cross_entropy,
    distillation,
    entropy,
    kl_divergence,
    perplexity,
)

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
    formula=r"L = T^2 D_{KL}(p_{\text{teacher}} \| q_{\text{student}})",
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
        "{forward_gap:.3f} nats from it, by the printed reverse {reverse_gap:.3f}, measured by the former. The reverse "
        "makes them narrower (entropy {reverse_entropy:.2f} against {forward_entropy:.2f}) where each learns at the "
        "rate best for its own loss; at the rate best for the former, where the reverse has learnt less, no "
        "difference is seen ({early_low:+.2f} to {early_high:+.2f}). Seeds and this choice of rates were set after a "
        "first look.",
        "让小模型学习概率已知的教师：按 KL(教师‖学生) 训练，最终相距 {forward_gap:.3f} nat；"
        "照印出的反向训练，按同一量度相距 {reverse_gap:.3f}。各取对自身损失最好的学习率时，反向学得的分布更窄"
        "（熵 {reverse_entropy:.2f} 对 {forward_entropy:.2f}）；若都按前一量度选学习率，反向学得较少，则看不出差别"
        "（{early_low:+.2f} 至 {early_high:+.2f}）。种子数与学习率的选法是看过初步结果后定下的。",
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
        "reference at β = 0.1, 1 and 10. The article names no direction here; this is the usual one.",
        "有了它，最优策略是归一化的 π_ref exp(r/β)：β = 0.1、1、10 时"
        "与参考策略相距 {b01:.2f}、{b1:.2f}、{b10:.4f} nat。原文在此未写明方向；通常用的是 KL(π‖π_ref)。",
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
