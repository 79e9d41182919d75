"""Chapter J: gradients, descent, Adam, a small training (S1 §4, §5.3, §8). Trained: optimisation_trained.py."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims import optimisation_trained
from experiments.claims.attention_loops import ROUND, drawn, gap, jit
from experiments.claims.optimisation_loops import backward, differences, named
from experiments.claims.record import Chapter, Curves, Numbers, Verdict, Words, at_least, at_most, near, shown
from transformer_jax.batch import Batch
from transformer_jax.config import Config, Hyper
from transformer_jax.data import make_task
from transformer_jax.encoder_decoder import init_transformer
from transformer_jax.losses import cross_entropy, distillation
from transformer_jax.optim import optimizer
from transformer_jax.train import gradients, run

chapter = Chapter("J", Words("Optimisation", "优化"))

F32 = "float32"


j01 = chapter.claim(
    "J01",
    "S1 §4.1",
    Verdict.IMPRECISE,
    Words(
        "The chain rule carries the gradient from the loss over logits, attention output, values and linear layer back "
        "to the embedding.",
        "链式法则把梯度从损失依次经 logits、注意力输出、value、线性层一路传回词嵌入。",
    ),
    formula=r"\frac{dL}{dW} = \frac{dL}{dy} \frac{dy}{dW}",
    finding=Words(
        "The rule holds, the path is one of several. Along it alone W_Q and W_K get no gradient (they have {qk:.0%} of "
        "that of W_V and W_O), and that of the embedding is off by {off:.0%}: the rest comes by residual connections, "
        "the feed-forward net, queries and keys.",
        "法则成立，但这只是多条路径之一。只走这条路时 W_Q 与 W_K 没有梯度（实际为 W_V 与 W_O 的 {qk:.0%}），"
        "词嵌入的梯度偏差达 {off:.0%}：其余部分来自残差连接、前馈网络以及查询与键。",
    ),
    uses=(gradients, init_transformer),
)


@j01.quick
def chain_rule() -> Numbers:
    config = Config(
        vocab_size=7, d_model=6, num_heads=1, num_layers=1, d_ff=8, ffn="relu", ffn_bias=False, norm="rmsnorm"
    )
    config = config.replace(positions="none", tie_embeddings=False)
    params = drawn(init_transformer, config, 0.6)
    ids, targets = np.array([3, 1, 4, 1, 5]), np.array([1, 4, 1, 5, 2])
    w = named(params)
    hand, numeric = backward(w, ids, targets), differences(w, ids, targets)
    # Of the third derivative h²/6, of rounding 10⁻¹⁶/h, for h = 10⁻⁵.
    label = Words("by hand against central differences, relative", "手推与中心差分的相对差")
    yield at_most("numeric", label, apart(hand, numeric), 1e-6)
    batch = Batch(jnp.asarray(ids[None]), jnp.asarray(targets[None]), jnp.ones((1, 5)))
    made, _ = jit(lambda params: gradients(params, config, Hyper(), batch))(params)
    label = Words("the library's against those by hand, relative", "本库与手推的相对差")
    # Some ten products in a row, of sums of up to eight terms.
    yield at_most("library", label, apart(named(made), hand), 200 * ROUND, F32)
    path = backward(w, ids, targets, chain=True)
    sizes = {name: float(np.linalg.norm(g)) for name, g in hand.items()}
    share = math.hypot(sizes["W_Q"], sizes["W_K"]) / math.hypot(sizes["W_V"], sizes["W_O"])
    label = Words("‖∂L/∂(W_Q, W_K)‖ over ‖∂L/∂(W_V, W_O)‖", "‖∂L/∂(W_Q, W_K)‖ 与 ‖∂L/∂(W_V, W_O)‖ 之比")
    yield at_least("qk", label, share, 1e-3)
    off = np.linalg.norm(path["embedding"] - hand["embedding"]) / sizes["embedding"]
    label = Words("embedding: what the one path leaves out", "词嵌入：单一路径遗漏的比例")
    yield at_least("off", label, off, 1e-3)


def apart(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    """The largest difference of two gradients, each tensor's over its largest entry."""
    return max(float(np.max(np.abs(a[name] - b[name])) / np.max(np.abs(b[name]))) for name in b)


j02 = chapter.claim(
    "J02",
    "S1 §4.2",
    Verdict.CONDITIONAL,
    Words(
        "Subtracting the rate times the gradient goes downhill, as the gradient points uphill.",
        "梯度指向上升方向，所以减去学习率乘以梯度就会下降。",
    ),
    formula=r"W \leftarrow W - \eta \frac{dL}{dW}, \quad \eta < \frac{2}{\lambda_{max}}",
    finding=Words(
        "Only with a rate below 2/λ_max, λ_max the largest curvature. On L = (x² + 10 y²)/2 that is 0.2: at 0.19 a "
        "step multiplies |y| by {below:.3g}, at 0.21 by {above:.3g}.",
        "只有学习率小于 2/λ_max（λ_max 为最大曲率）时才成立。对 L = (x² + 10 y²)/2，临界值为 0.2："
        "取 0.19 时每步 |y| 变为 {below:.3g} 倍，取 0.21 时变为 {above:.3g} 倍。",
    ),
    uses=(optimizer,),
)


@j02.quick
def descent() -> Numbers:
    rates, curvature, steps = np.array([0.05, 0.1, 0.15, 0.19, 0.21, 0.25]), np.array([1.0, 10.0]), 40
    # A row for each rate.
    rule = optimizer(Config(optimizer="sgd"), Hyper(learning_rate=jnp.asarray(rates[:, None], jnp.float32)))

    def step(carry: tuple, _: None) -> tuple[tuple, jax.Array]:
        w, state = carry
        updates, state = rule.update(w * jnp.asarray(curvature, jnp.float32)[None], state, w)
        moved = w + updates
        return (moved, state), moved

    start = jnp.ones((len(rates), 2))
    _, path = jit(lambda w: jax.lax.scan(step, (w, rule.init(w)), None, length=steps))(start)
    path = np.concatenate([np.ones((1, len(rates), 2)), np.asarray(path, np.float64)])
    losses = 0.5 * np.sum(path**2 * curvature, axis=2)
    for name, rate in (("below", 0.19), ("above", 0.21)):
        factor = abs(path[1, list(rates).index(rate), 1])
        label = Words(f"|y| after a step over before, η = {rate}", f"η = {rate} 时一步后 |y| 的倍数")
        yield near(name, label, factor, abs(1 - rate * 10), 4 * ROUND, F32)
    label = Words("rates at which every step lowers the loss", "每一步都使损失下降的学习率个数")
    yield near("falling", label, np.sum(np.all(np.diff(losses, axis=0) < 0, axis=0)), sum(rates < 0.2), dtype=F32)
    label = Words("rates at which the loss ends higher", "损失最终升高的学习率个数")
    yield near("rising", label, np.sum(losses[-1] > losses[0]), sum(rates > 0.2), dtype=F32)
    caption = Words(
        "The loss over steps, for rates below and above 2/λ_max = 0.2.",
        "学习率在 2/λ_max = 0.2 上下时损失随步数的变化。",
    )
    lines = {f"η = {rate:g}": (list(range(steps + 1)), list(losses[:, i])) for i, rate in enumerate(rates)}
    yield Curves(caption, "step", "L", lines, log_y=True)


j03 = chapter.claim(
    "J03",
    "S1 §4.2",
    Verdict.EMPIRICAL,
    Words(
        "The gradients of different parameters of a Transformer differ hugely in scale.",
        "Transformer 中不同参数的梯度尺度差异巨大。",
    ),
    finding=Words(
        "At the first step of a small model on random tokens, the root mean squares of {tensors:d} tensors' gradients "
        "already lie {ratio:.0f}-fold apart.",
        "一个小模型在随机词元上的第一步，{tensors:d} 个张量的梯度均方根就已相差 {ratio:.0f} 倍。",
    ),
    learned=Words(
        "On text, in the seed where it is least, the ratio is {trained_first:.0f} at the start, and at the end "
        "{last_sgd:.0f} with SGD, {last_momentum:.0f} with momentum, {last_adam:.0f} with Adam.",
        "在文本上，取各种子中最小者，该比值开始时为 {trained_first:.0f}，训练结束时 SGD 为 {last_sgd:.0f}，"
        "动量法为 {last_momentum:.0f}，Adam 为 {last_adam:.0f}。",
    ),
    uses=(gradients, init_transformer),
)


@j03.quick
def scales() -> Numbers:
    config = Config(vocab_size=64, d_model=32, num_heads=2, num_layers=4)
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 64, (8, 33)))

    @jit
    def sizes(key: jax.Array) -> list[jax.Array]:
        batch = Batch(ids[:, :-1], ids[:, 1:], jnp.ones((8, 32)))
        grads, _ = gradients(init_transformer(key, config), config, Hyper(), batch)
        assert grads.decoder is not None
        layers = [jax.tree.map(lambda g, i=i: g[i], grads.decoder.layers) for i in range(config.L)]
        tensors = jax.tree.leaves((grads.embedding, grads.decoder.final_norm, layers))
        return [jnp.sqrt(jnp.mean(jnp.square(g))) for g in tensors]

    found = np.array([float(size) for size in sizes(jax.random.key(0))])
    label = Words("largest RMS of a tensor's gradient over the smallest", "张量梯度均方根的最大与最小之比")
    yield at_least("ratio", label, found.max() / found.min(), 10.0, F32)  # an order of magnitude
    yield shown("tensors", Words("tensors", "张量数"), len(found), F32)


j03.full(optimisation_trained.scales)


j04 = chapter.claim(
    "J04",
    "S1 §4.2",
    Verdict.TRUE,
    Words(
        "Adam normalises each parameter by its own gradients: steps of large ones are shrunk, of small ones enlarged.",
        "Adam 按各参数自身的梯度做归一化：梯度大的步长被压小，梯度小的被放大。",
    ),
    formula=r"\Delta = -\eta\, \frac{\hat m}{\sqrt{\hat v} + \epsilon}, \quad \hat m = g, \; \hat v = g^2 \Rightarrow "
    r"\Delta = -\eta\, \frac{g}{|g| + \epsilon}",
    finding=Words(
        "As long as gradients are far above ε = 10⁻⁸: for 0.01 and a thousandth of it the first steps differ by "
        "{milli:.1e}, at a millionth, where |g| = ε, the step is {micro:.3f} of the rate.",
        "前提是梯度远大于 ε = 10⁻⁸：梯度 0.01 与其千分之一的第一步只差 {milli:.1e}，"
        "缩到百万分之一（|g| = ε）时步长只有学习率的 {micro:.3f}。",
    ),
    uses=(optimizer,),
)


@j04.quick
def adam() -> Numbers:
    rng, steps, rate = np.random.default_rng(0), 20, 0.25
    # Columns: 100 and 0.01 that stay; 0.01 times 10³, 10⁻³ and 10⁻⁶; a path of changing signs and sizes.
    constant = np.array([100.0, 0.01, 10.0, 1e-5, 1e-8])
    grads = np.concatenate([np.tile(constant, (steps, 1)), 0.01 * rng.standard_normal((steps, 1))], axis=1)
    grads = grads.astype(np.float32)
    rule = optimizer(Config(optimizer="adam"), Hyper(learning_rate=rate))

    @jit
    def updates(grads: jax.Array) -> jax.Array:
        def step(state: Any, g: jax.Array) -> tuple[Any, jax.Array]:
            update, state = rule.update(g, state)
            return state, jnp.asarray(update)

        return jax.lax.scan(step, rule.init(grads[0]), grads)[1]

    made = np.asarray(updates(jnp.asarray(grads)), np.float64) / rate
    want = adam_by_loop(grads.astype(np.float64))
    # 1 − β₂ᵗ is as good as float32's β₂, to 2⁻²⁴/10⁻³ of itself; the root takes half of that.
    bias, eps = 500 * ROUND, 1e-8
    label = Words("max difference from a loop, 20 steps, in rates", "20 步与循环计算的最大差（以学习率计）")
    yield at_most("gap", label, gap(made, want), 2 * bias, F32)
    first = made[0]
    label = Words("step at g = 100 over step at g = 0.01", "g = 100 与 g = 0.01 的步长之比")
    yield near("even", label, first[0] / first[1], 1.0, eps / 0.01 + 8 * ROUND, F32)
    label = Words("first step at g = 0.01, in rates", "g = 0.01 时的第一步（以学习率计）")
    yield near("sign", label, first[1], -1.0, eps / 0.01 + bias, F32)
    for name, place, factor in (("kilo", 2, 1e3), ("milli", 3, 1e-3)):
        label = Words(f"change of the step for g × {factor:g}, relative", f"梯度乘以 {factor:g} 后步长的相对变化")
        change, right = abs(first[place] / first[1] - 1), abs((1 + eps / 0.01) / (1 + eps / 0.01 / factor) - 1)
        yield near(name, label, change, right, 8 * ROUND, F32)
    label = Words("first step at |g| = ε, in rates", "|g| = ε 时的第一步（以学习率计）")
    yield near("micro", label, -first[4], 0.5, bias, F32)


def adam_by_loop(grads: np.ndarray, b1: float = 0.9, b2: float = 0.999, epsilon: float = 1e-8) -> np.ndarray:
    """The updates at rate 1 for gradients [steps, n], in float64 (Kingma & Ba 2015, algorithm 1)."""
    m, v, updates = np.zeros(grads.shape[1]), np.zeros(grads.shape[1]), []
    for t, g in enumerate(grads, 1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        updates.append(-m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + epsilon))
    return np.array(updates)


j05 = chapter.claim(
    "J05",
    "S1 §4.2",
    Verdict.EMPIRICAL,
    Words(
        "Adam is what Transformers are trained with, and its two decay rates may stay at their defaults.",
        "Adam 是训练 Transformer 事实上的默认选择，两个动量参数用默认值即可。",
    ),
    formula=r"(\beta_1, \beta_2, \epsilon) = (0.9,\, 0.999,\, 10^{-8})",
    finding=Words(
        "On text, each at its best rate, Adam's loss differs from SGD's by {against_sgd_mean:+.3f} nats, from "
        "momentum's by {against_momentum_mean:+.3f}; its defaults differ from (0.9, 0.98, 10⁻⁹) by {betas_mean:+.3f}. "
        "The rate must be searched for all the same: best are {rate_sgd:g}, {rate_momentum:g} and {rate_adam:g}.",
        "在文本上、各取最佳学习率时，Adam 的损失与 SGD 相差 {against_sgd_mean:+.3f} nat，"
        "与动量法相差 {against_momentum_mean:+.3f}；默认值与 (0.9, 0.98, 10⁻⁹) 相差 {betas_mean:+.3f}。"
        "学习率仍需搜索：SGD、动量法与 Adam 的最佳值为 {rate_sgd:g}、{rate_momentum:g} 与 {rate_adam:g}。",
    ),
    uses=(optimizer, gradients),
)
j05.full(optimisation_trained.optimisers)


j06 = chapter.claim(
    "J06",
    "S1 §8.2",
    Verdict.TRUE,
    Words(
        "Training a small language model, one sees the loss fall with the steps.",
        "跑一个小型语言模型，可以看到损失随训练步数下降。",
    ),
    uses=(run, make_task),
)


@j06.quick
def falls() -> Numbers:
    config = Config(d_model=16, num_heads=2, num_layers=1, seq_len=32, batch_size=16, steps=150)
    config, hyper = config.replace(task="markov", vocab_size=8), Hyper(learning_rate=0.02)
    task = make_task(config)
    one = jit(lambda key: run(config, hyper, key, lambda batch_key: task.train_batch(task.data, batch_key))[1]["loss"])
    loss = np.asarray(one(jax.random.key(0)), np.float64)
    thirds, floor = loss.reshape(3, 50).mean(axis=1), task.floor
    assert floor is not None
    label = Words("loss of the last third less that of the first, nats", "最后三分之一与最初三分之一的损失之差（nat）")
    yield at_most("fall", label, thirds[2] - thirds[0], -0.1, F32)
    yield at_most(
        "middle", Words("middle third less first", "中间三分之一减最初三分之一"), thirds[1] - thirds[0], 0.0, F32
    )
    yield at_most(
        "late", Words("last third less middle", "最后三分之一减中间三分之一"), thirds[2] - thirds[1], 0.0, F32
    )
    # No loss lies below the chain's entropy rate, but for the sampling of 50 × 512 tokens of a spread below 2 nats.
    label = Words("last third, above the chain's entropy rate", "最后三分之一高出该链熵率的部分")
    yield at_least("above", label, thirds[2] - floor, -5 * 2 / math.sqrt(50 * 512), F32)
    caption = Words("Loss of a small language model on a Markov chain.", "小型语言模型在马尔可夫链上的损失。")
    steps = list(range(len(loss)))
    yield Curves(caption, "step", "nats", {"L": (steps, list(loss)), "H": (steps, [floor] * len(loss))})


j07 = chapter.claim(
    "J07",
    "S1 §5.3",
    Verdict.GAP,
    Words(
        "A small distillation experiment, left to the reader, makes cross-entropy and KL divergence clear.",
        "建议读者跑一次知识蒸馏的小实验，以理解交叉熵与 KL 散度。",
    ),
    formula=r"T^2\, \mathrm{KL}(p_{teacher} \,\|\, p_{student})",
    finding=Words(
        "Here it is. A student of free logits, trained on KL in either direction, comes within {forward:.1g} and "
        "{reverse:.1g} nats of every log-probability of its teacher, wrong answers included. Trained on the teacher's "
        "choices alone, it gives all wrong answers the same chance, where the teacher's differ by {teacher:.2f} nats.",
        "这里补上了实验。logits 自由的学生按任一方向的 KL 训练，其每个对数概率与教师之差都不超过 {forward:.1g} 与 "
        "{reverse:.1g} nat，错误选项也不例外；而只用教师选出的答案训练，学生给所有错误选项相同的概率，"
        "教师的却相差 {teacher:.2f} nat。",
    ),
    learned=Words(
        "With Transformers: students that see one token, of a chain that depends on two, cannot be their teacher. By "
        "KL(teacher‖student) those taught with it end at {forward_forward:.3f} nats, with the reverse at "
        "{forward_reverse:.3f}, on the data at {forward_data:.3f}; by KL(student‖teacher) it is {reverse_forward:.3f}, "
        "{reverse_reverse:.3f} and {reverse_data:.3f}.",
        "用 Transformer 做：学生只看一个词元，而链的下一步取决于两个，所以学生无法等同于教师。"
        "按 KL(教师‖学生) 衡量，以它学得的为 {forward_forward:.3f} nat，以反向学得的为 {forward_reverse:.3f}，"
        "从数据学得的为 {forward_data:.3f}；按 KL(学生‖教师) 衡量则依次为 {reverse_forward:.3f}、"
        "{reverse_reverse:.3f} 与 {reverse_data:.3f}。",
    ),
    uses=(distillation, cross_entropy, optimizer),
)


@j07.quick
def students() -> Numbers:
    rows, V, T = 4, 6, 2.0
    teacher = np.random.default_rng(0).standard_normal((rows, V)).astype(np.float32)
    choices, rule = teacher.argmax(axis=1), optimizer(Config(optimizer="sgd"), Hyper(learning_rate=1.0))

    def by_kl(direction: str) -> Callable[[jax.Array], jax.Array]:
        return lambda w: distillation(w, jnp.asarray(teacher), temperature=T, direction=direction)[0]

    def by_choice(w: jax.Array) -> jax.Array:
        return cross_entropy(w[None], jnp.asarray(choices)[None], jnp.ones((1, rows))).objective

    def taught(loss: Callable[[jax.Array], jax.Array]) -> tuple[jax.Array, jax.Array]:
        """The first gradient, at logits of 0, and the logits after 600 steps."""

        def step(carry: tuple, _: None) -> tuple[tuple, None]:
            w, state = carry
            updates, state = rule.update(jax.grad(loss)(w), state, w)
            return (w + updates, state), None

        zero = jnp.zeros((rows, V))
        return jax.grad(loss)(zero), jax.lax.scan(step, (zero, rule.init(zero)), None, length=600)[0][0]

    losses = {"forward": by_kl("forward"), "reverse": by_kl("reverse"), "hard": by_choice}
    made = jit(lambda: {name: taught(loss) for name, loss in losses.items()})()
    p = log_softmax(teacher / T)
    # At a uniform student: T (1/V − p) forward; reverse, T/V (mean of ln p − ln p).
    first = {"forward": T * (1 / V - np.exp(p)), "reverse": T / V * (p.mean(axis=1, keepdims=True) - p)}
    ways = {
        "forward": Words("KL(teacher‖student)", "KL(教师‖学生)"),
        "reverse": Words("KL(student‖teacher)", "KL(学生‖教师)"),
    }
    for name, way in ways.items():
        slope, student = made[name]
        label = Words(f"{way.en}: first gradient, max difference", f"{way.zh}：初始梯度的最大差")
        yield at_most(f"{name}_slope", label, gap(slope, first[name]), 20 * ROUND, F32)
        # The slowest direction shrinks by 1 − λ a step, λ > 0.03 the least curvature: (1 − 0.03)^600 = 10⁻⁸.
        label = Words(f"{way.en}: max |Δ ln p| at the end", f"{way.zh}：最终的 max |Δ ln p|")
        apart = gap(log_softmax(np.asarray(student)), log_softmax(teacher))
        yield at_most(name, label, apart, 1e-5, F32)
    wrong = np.arange(V) != choices[:, None]
    spread = [np.ptp(np.asarray(x, np.float64)[wrong].reshape(rows, V - 1), axis=1) for x in (made["hard"][1], teacher)]
    label = Words("by choices: largest spread of wrong answers' ln p", "只学答案：错误选项 ln p 的最大极差")
    yield at_most("hard", label, spread[0].max(), 600 * ROUND, F32)
    yield shown("teacher", Words("the teacher's, mean", "教师的平均极差"), spread[1].mean(), F32)


j07.full(optimisation_trained.students)


def log_softmax(x: np.ndarray) -> np.ndarray:
    """Over the last axis, in float64."""
    x = x.astype(np.float64)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))
