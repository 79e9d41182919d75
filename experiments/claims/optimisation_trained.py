"""The claims of chapter J that only training can tell: gradient scales, optimisers, distillation (S1 §4.2, §5.3)."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims.paired import lower, lower_arm
from experiments.claims.record import Numbers, Words, at_least, at_most, shown
from experiments.claims.training import arms, best_rate, compared, kept, mean, trained
from experiments.grid import Arm
from experiments.sweep import Outcome, Question
from transformer_jax.batch import Batch
from transformer_jax.config import Config, Hyper, to_dict
from transformer_jax.data import SPLITS, Task, make_task
from transformer_jax.encoder_decoder import Transformer, forward, init_transformer
from transformer_jax.losses import cross_entropy, distillation
from transformer_jax.optim import optimizer
from transformer_jax.train import batch_key, gradients, run

F32 = "float32"


# --- J03 and J05: one sweep, four arms -------------------------------------------------

SEEDS = 6  # the sign-flip p of five is never below 0.0625
# One range for all arms: the best rates of SGD and Adam lie a factor of 80 and more apart.
RATES = (1.5e-3, 4.5e-3, 1.35e-2, 4e-2, 0.12, 0.36, 1.08, 3.24)
BASE = Config(d_model=64, num_heads=4, num_layers=2, seq_len=64, batch_size=8, steps=300, scan_unroll=0)
ARMS = {
    "sgd": (BASE.replace(optimizer="sgd"), Hyper()),
    "momentum": (BASE.replace(optimizer="momentum"), Hyper()),
    "adam": (BASE, Hyper(b1=0.9, b2=0.999, adam_epsilon=1e-8)),
    "paper": (BASE, Hyper(b1=0.9, b2=0.98, adam_epsilon=1e-9)),  # Vaswani et al. 2017 §5.3
}
LABELS = {
    "sgd": Words("SGD", "SGD"),
    "momentum": Words("momentum", "动量"),
    "adam": Words("Adam, defaults", "Adam（默认值）"),
    "paper": Words("Adam, β₂ = 0.98", "Adam（β₂ = 0.98）"),
}


def gradient_scales(config: Config, hyper: Hyper, params: Any, batch: Batch) -> dict[str, jax.Array]:
    """`rms_ratio`: the largest root mean square of a tensor's gradient over the smallest, layers apart."""
    grads, _ = gradients(params, config, hyper, batch)
    assert grads.decoder is not None
    layers = [jax.tree.map(lambda g, i=i: g[i], grads.decoder.layers) for i in range(config.L)]
    tensors = jax.tree.leaves((grads.embedding, grads.decoder.final_norm, layers))
    sizes = jnp.stack([jnp.sqrt(jnp.mean(jnp.square(g))) for g in tensors])
    return {"rms_ratio": jnp.max(sizes) / jnp.min(sizes)}


def optimisers_question() -> Question:
    """SGD, momentum and Adam with two settings on text, each at the best of the same rates."""
    return Question(
        name="claim_optimisers",
        title="Which optimiser, and do Adam's decay rates matter?",
        arms=tuple(Arm(name, *setting) for name, setting in ARMS.items()),
        learning_rates=RATES,
        comparisons=(("adam", "sgd"), ("adam", "momentum"), ("adam", "paper")),
        observe=gradient_scales,
    )


def optimisers_sweep(folder: Path) -> tuple[dict[str, Any], Outcome]:
    """The sweep of both claims, in one folder beside those of the claims: it is trained once."""
    return trained(optimisers_question(), SEEDS, folder.parent / "optimisers", names=LABELS)


def scales(folder: Path) -> Numbers:
    """J03: the spread of gradient sizes before and after training, in the seed where it is least."""
    found, outcome = optimisers_sweep(folder)
    ratios = {}
    for i, name in enumerate(ARMS):
        runs = outcome.of(i, arms(found)[name]["best_learning_rate"])
        ratios[name] = np.min([run.measured["rms_ratio"][[0, -1]] for run in runs], axis=0)
    label = Words("gradients' RMS, largest over smallest, at the start", "梯度均方根最大与最小之比，训练前")
    yield at_least("trained_first", label, ratios["sgd"][0], 10.0, F32)  # arms share their first weights
    label = Words("at the end, the least of all arms", "训练后，各方法中最小者")
    yield at_least("least", label, min(last for _, last in ratios.values()), 10**0.5, F32)
    for name, (_, last) in ratios.items():
        label = Words(f"at the end, {LABELS[name].en}", f"训练后，{LABELS[name].zh}")
        yield shown(f"last_{name}", label, last, F32)


def optimisers(folder: Path) -> Numbers:
    """J05: Adam against SGD and momentum; its default decay rates against those of Vaswani et al."""
    found, _ = optimisers_sweep(folder)
    for name in ("sgd", "momentum"):
        label = LABELS[name]
        words = Words(f"Adam less {label.en}, nats", f"Adam 减 {label.zh}（nat）")
        yield from lower_arm(f"against_{name}", words, found, "adam", name)
    row = compared(found, "adam", "paper")
    ends = row["ci95"] or (float("nan"), float("nan"))
    label = Words(
        "default less (0.9, 0.98, 10⁻⁹), farther end of the interval", "默认值减 (0.9, 0.98, 10⁻⁹)，置信区间较远一端"
    )
    yield at_most("betas", label, max(map(abs, ends)), 0.1, F32)
    label = Words("default less (0.9, 0.98, 10⁻⁹), mean", "默认值减 (0.9, 0.98, 10⁻⁹)，均值")
    yield shown("betas_mean", label, row["difference"], F32)
    for name, label in LABELS.items():
        arm = arms(found)[name]
        yield shown(f"loss_{name}", Words(f"loss, {label.en}", f"损失，{label.zh}"), mean(arm, "report_loss"), F32)
        words = Words(f"best rate, {label.en}", f"最佳学习率，{label.zh}")
        yield shown(f"rate_{name}", words, arm["best_learning_rate"], F32)


# --- J07: distillation -------------------------------------------------------------------

STUDENTS = ("data", "forward", "reverse", "jensen_shannon")
STUDENT_RATES = (1e-3, 3e-3, 1e-2, 3e-2)
STUDENT_SEEDS = 6
TEACHER = Config(d_model=32, num_heads=2, num_layers=2, seq_len=32, batch_size=16, steps=400)
TEACHER = TEACHER.replace(task="markov", vocab_size=16)
# It sees its own token alone, of a chain whose next one depends on two: no student can be its teacher.
STUDENT = TEACHER.replace(d_model=16, num_heads=1, num_layers=1, mask="window", steps=300)
TEACHER_RATE = 1e-2
# By what a student learns.
WAYS = {
    "data": Words("the data", "数据"),
    "forward": Words("KL(teacher‖student)", "KL(教师‖学生)"),
    "reverse": Words("KL(student‖teacher)", "KL(学生‖教师)"),
    "jensen_shannon": Words("the Jensen–Shannon divergence", "JS 散度"),
}
EVALUATED = 8  # batches of each split


def sums_of(teacher: jax.Array, student: jax.Array, batch: Batch) -> jax.Array:
    """[5]: cross-entropy with the data, and the divergences of `distillation`, KL(t‖s), KL(s‖t) and JSD; the count."""
    weights = batch.weights_BT
    made = [distillation(student, teacher, weights, direction=name)[0] for name in STUDENTS[1:]]
    plain = cross_entropy(student, batch.targets_BT, weights)
    return jnp.stack([plain.objective, *made, plain.count])


def student(task: Task, teacher: Transformer, hyper: Hyper, way: jax.Array, key: jax.Array) -> Transformer:
    """Trained on the loss that `way` [4] picks (a one-hot row), from a key: what it learns from shares every draw."""
    rule: Any = optimizer(STUDENT, hyper)

    def step(carry: tuple[Any, Any], i: jax.Array) -> tuple[tuple[Any, Any], None]:
        params, state = carry
        batch = task.train_batch(task.data, batch_key(key, i))
        target = forward(teacher, TEACHER, hyper, batch)[0]

        def loss(params: Transformer) -> jax.Array:
            sums = sums_of(target, forward(params, STUDENT, hyper, batch)[0], batch)
            return jnp.dot(way, sums[:4]) / sums[4]

        updates, state = rule.update(jax.grad(loss)(params), state, params)
        return (jax.tree.map(jnp.add, params, updates), state), None

    params = init_transformer(key, STUDENT)
    return jax.lax.scan(step, (params, rule.init(params)), jnp.arange(STUDENT.steps))[0][0]


def lessons() -> dict[str, Any]:
    """Of each split: nats per token [ways, rates, seeds, 4], the four measures of `sums_of`; teacher: its own loss.

    One teacher for all; students of a seed share first weights and batches.
    """
    task, numbers = make_task(STUDENT), Hyper(learning_rate=TEACHER_RATE)

    def measured(split: str, teacher: Transformer, params: Transformer, hyper: Hyper) -> jax.Array:
        def add(i: jax.Array, sums: jax.Array) -> jax.Array:
            batch = task.eval_batch(task.data, split, i)
            logits = forward(teacher, TEACHER, hyper, batch)[0], forward(params, STUDENT, hyper, batch)[0]
            return sums + sums_of(*logits, batch)

        sums = jax.lax.fori_loop(0, EVALUATED, add, jnp.zeros(5))
        return sums[:4] / sums[4]

    def one(teacher: Transformer, way: jax.Array, rate: jax.Array, key: jax.Array) -> dict[str, jax.Array]:
        hyper = Hyper(learning_rate=rate, window=1)
        params = student(task, teacher, hyper, way, key)
        return {split: measured(split, teacher, params, hyper) for split in SPLITS}

    @jax.jit
    def every(key: jax.Array, keys: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        state, history = run(TEACHER, numbers, key, lambda batch_key: task.train_batch(task.data, batch_key))
        by_seed = jax.vmap(one, (None, None, None, 0))
        by_rate = jax.vmap(by_seed, (None, None, 0, None))
        by_way = jax.vmap(by_rate, (None, 0, None, None))
        return by_way(state.params, jnp.eye(4), jnp.array(STUDENT_RATES), keys), history["loss"]

    keys = jax.vmap(jax.random.key)(jnp.arange(STUDENT_SEEDS))
    made, history = every(jax.random.key(1000), keys)
    return {name: np.asarray(x, np.float64).tolist() for name, x in {**made, "teacher": history}.items()}


def students(folder: Path) -> Numbers:
    """J07: each way of learning at the rate that is best for its own loss."""
    settings = {
        "teacher": to_dict(TEACHER),
        "student": to_dict(STUDENT),
        "teacher_rate": TEACHER_RATE,
        "rates": list(STUDENT_RATES),
        "seeds": STUDENT_SEEDS,
        "ways": list(STUDENTS),
        "evaluated": EVALUATED,
    }
    held = kept(folder / "lessons.json", settings, lessons)
    found = {split: np.asarray(held[split]) for split in SPLITS}
    best = {}
    for i, way in enumerate(STUDENTS):
        own = {rate: values[:, i].tolist() for rate, values in zip(STUDENT_RATES, found["selection"][i], strict=True)}
        best[way] = found["report"][i, STUDENT_RATES.index(best_rate(WAYS[way], own))]
    ways = {
        "forward": (1, "reverse", Words("KL(teacher‖student)", "KL(教师‖学生)")),
        "reverse": (2, "forward", Words("KL(student‖teacher)", "KL(学生‖教师)")),
    }
    for way, (measure, other, label) in ways.items():
        words = Words(f"{label.en}: {way} less {other}", f"{label.zh}：按{WAYS[way].zh}学得减按{WAYS[other].zh}学得")
        yield from lower(f"by_{way}", words, *([float(x) for x in best[name][:, measure]] for name in (way, other)))
    for i, (measure, label) in enumerate({"forward": ways["forward"][2], "reverse": ways["reverse"][2]}.items(), 1):
        for name in STUDENTS:
            words = Words(f"{label.en}, learnt by {name}", f"{label.zh}，按{WAYS[name].zh}学得")
            yield shown(f"{measure}_{name}", words, best[name][:, i].mean(), F32)
    yield shown("floor", Words("entropy rate of the chain", "该链的熵率"), make_task(STUDENT).floor or float("nan"))
    words = Words("the teacher's training loss", "教师的训练损失")
    yield shown("teacher_loss", words, np.mean(held["teacher"][-40:]), F32)
    for name in STUDENTS:
        words = Words(f"loss on the data, learnt by {name}", f"数据上的损失，按{WAYS[name].zh}学得")
        yield shown(f"loss_{name}", words, best[name][:, 0].mean(), F32)
