"""What does dividing attention scores by sqrt(d_k) buy?

    python launch.py --experiment=dk_scaling --workdir=runs/dk
    python launch.py --experiment=dk_scaling --depth=full --workdir=runs/dk_full

One-head language models on real text, heads of 16 and 64, with the scores multiplied by
d_k to the power -0 (off), -1/2 (on), -1 (twice); each at three learning rates, each with
the same seeds. Claims B04, B12, B13 and B16-B20 are answered from the same runs. Expected
(see BUILD_NOTES.md for the measured numbers): with Adam at its own best rate the
unscaled arm is worse and its query gradients are larger on average with a long lower
tail; they do not vanish.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import ask, grid, stats
from experiments.flags import Settings
from experiments.grid import Arm
from experiments.observe import attention_statistics
from experiments.observed import at_mark, before_and_after, over_training
from experiments.sections import Section
from experiments.sweep import Outcome, Question
from transformer_jax.config import Config, Hyper
from transformer_jax.data import make_task
from transformer_jax.encoder_decoder import forward, init_transformer
from transformer_jax.errors import ConfigError
from transformer_jax.scores import score_factor

FLAGS = ask.FLAGS
SEEDS = 6
EXPONENTS = {"off": 0.0, "on": 0.5, "twice": 1.0}
WIDTHS = (16, 64)
RATES = (1.5e-3, 4.5e-3, 1.35e-2)
# One range for Adam and SGD, whose best rates lie a factor of 80 and more apart.
FULL_RATES = (1.5e-3, 4.5e-3, 1.35e-2, 4e-2, 0.12, 0.36, 1.08)
BASE = Config(
    d_model=64,
    num_heads=1,
    num_layers=2,
    d_ff=256,
    seq_len=64,
    batch_size=8,
    steps=300,
    optimizer="adam",
    scan_unroll=0,
)


def question(settings: Settings) -> Question:
    """The arms: head width x exponent, crossed with --sweep; `--depth=full` adds width 256, SGD and steps."""
    full = settings.depth == "full"
    config, hyper = settings.configure(BASE.replace(steps=1500) if full else BASE)
    for name in ("dk_exponent", "head_dim", "learning_rate"):
        if name in settings.overrides:
            raise ConfigError(f"--{name} is what this experiment sweeps: use --sweep={name}=… for other values")
    extra = grid.parse_sweep(settings.sweep)
    widths = extra.pop("head_dim", (*WIDTHS, 256) if full else WIDTHS)
    exponents = {_exponent_name(x): x for x in extra.pop("dk_exponent", EXPONENTS.values())}
    rates = extra.pop("learning_rate", FULL_RATES if full else RATES)
    arms = [
        Arm(f"d_k={width} {name}", config.replace(head_dim=width), dataclasses.replace(hyper, dk_exponent=exponent))
        for width in widths
        for name, exponent in exponents.items()
    ]
    if full and "optimizer" not in settings.overrides:
        extra.setdefault("optimizer", ("adam", "sgd"))
    arms = grid.with_shared_terms(grid.cross(arms, extra))
    names = [arm.name for arm in arms]
    pairs = [
        (name, other)
        for name in names
        for against in ("off", "twice")
        if " on" in name and (other := name.replace(" on", f" {against}", 1)) in names
    ]
    if full:  # three widths and two optimisers are more than a family of six: on against off, each
        pairs = [pair for pair in pairs if " off" in pair[1]]
    kept, notes = stats.first_pairs(pairs)
    return Question(
        name="dk_scaling",
        title="What does dividing attention scores by √d_k buy?",
        arms=arms,
        learning_rates=tuple(sorted(rates)),
        comparisons=kept,
        observe=attention_statistics,
        notes=notes,
    )


def _exponent_name(x: float) -> str:
    return {v: k for k, v in EXPONENTS.items()}.get(x, f"{x:g}")


@dataclasses.dataclass(frozen=True)
class Identity:
    """Off at temperature 1 against on at temperature 1/sqrt(d_k): claim B20."""

    d_k: int
    factor_ulps: int
    max_abs_logit_difference: float


def identity(config: Config) -> Identity:
    """Run both on one batch with the same weights."""
    task = make_task(config)
    params = init_transformer(jax.random.key(0), config)
    batch = task.eval_batch(task.data, "report", jnp.int32(0))
    settings = (
        Hyper(dk_exponent=0.0, attention_temperature=1.0),
        Hyper(dk_exponent=0.5, attention_temperature=np.float32(1.0) / np.sqrt(np.float32(config.H))),
    )
    both = jax.jit(lambda hyper: forward(params, config, hyper, batch)[0])
    off, on = (both(jax.tree.map(jnp.float32, h).replace(window=jnp.int32(1), prefix=jnp.int32(0))) for h in settings)
    factors = [np.float32(score_factor(config.H, h.dk_exponent, h.attention_temperature)) for h in settings]
    ulps = abs(int(factors[0].view(np.int32)) - int(factors[1].view(np.int32)))
    return Identity(config.H, ulps, float(jnp.max(jnp.abs(off - on))))


def sections(outcome: Outcome, results: dict[str, Any]) -> list[Section]:
    """The report's own parts: gradients at step 0, scores over training, and the claims."""
    arms = results["arms"]
    return [_gradients(arms), before_and_after(arms), *_over_training(arms), _claims(outcome, arms)]


def _gradients(arms: list[dict[str, Any]]) -> Section:
    names = ["grad_q_mean", "grad_q_median", "grad_q_p10", "grad_v_mean", "grad_v_p10", "grad_qk_norm", "grad_vo_norm"]
    rows = [[arm["name"], *(f"{at_mark(arm, name):.3g}" for name in names)] for arm in arms]
    return Section(
        "Gradients before the first step",
        "Norms of the summed loss's gradient with respect to every query and value vector (mean, median, 10th "
        "percentile over positions; mean over layers and seeds), and to the projection weights. If unscaled attention "
        "killed all gradients, the first row of each width would be zero.",
        ("arm", "query mean", "query median", "query p10", "value mean", "value p10", "‖g‖ W_q W_k", "‖g‖ W_v W_o"),
        rows,
    )


def _over_training(arms: list[dict[str, Any]]) -> list[Section]:
    """A plot of the score variance and one of the entropy, a line for each arm and layer."""
    text = "Claim B17: the variance is 1 (scaled) or d_k (unscaled) at the first step, not always."
    return [
        over_training(arms, "score_variance", Section("Variance of the scores over training", text), log=True),
        over_training(arms, "attention_entropy", Section("Entropy of attention over training")),
    ]


def _claims(outcome: Outcome, arms: list[dict[str, Any]]) -> Section:
    """Each claim with what the articles predict and what these runs measured."""
    first = arms[0]["config"]["optimizer"]
    arms = [arm for arm in arms if arm["config"]["optimizer"] == first]
    at = {(arm["config"]["head_dim"], arm["hyper"]["dk_exponent"]): arm for arm in arms}
    widths = sorted({width for width, _ in at})
    rows = []
    for width in widths:
        off, on = at.get((width, 0.0)), at.get((width, 0.5))
        if off:
            rows.append(
                ("B04", f"Var(q·k)/d_k at the start, d_k={width}", "1", f"{at_mark(off, 'dot_variance') / width:.3f}")
            )
        if off and on:
            for name, label in (("grad_q_mean", "mean"), ("grad_q_p10", "10th percentile")):
                measured = f"{at_mark(on, name):.3g} scaled, {at_mark(off, name):.3g} unscaled"
                rows.append(
                    ("B12", f"unscaled gradients vanish: {label} of ‖dL/dq‖, d_k={width}", "unscaled 0", measured)
                )
        if on:
            uniform = float(np.mean(np.log(np.arange(2, on["config"]["seq_len"] + 1))))
            entropy = f"{at_mark(on, 'attention_entropy'):.3f} of {uniform:.3f} nats"
            rows += [
                (
                    "B16",
                    f"scaled scores' variance at the start, d_k={width}",
                    "1",
                    f"{at_mark(on, 'score_variance'):.3f}",
                ),
                ("B17", f"and after training, d_k={width}", "1", f"{at_mark(on, 'score_variance', -1):.3f}"),
                ("B18", f"scaled attention starts even: its entropy, d_k={width}", "all of it", entropy),
            ]
    entropies = [at_mark(at[width, 0.5], "attention_entropy") for width in widths if (width, 0.5) in at]
    if len(entropies) > 1:
        spread = f"{np.ptp(entropies):.4f} nats"
        rows.append(("B19", "scaled entropy at the start does not depend on d_k: its spread", "0", spread))
    for config in {arm.config.H: arm.config for arm in outcome.question.arms}.values():
        same = identity(config)
        measured = f"{same.factor_ulps} ulp, {same.max_abs_logit_difference:.2g}"
        rows.append(("B20", f"off = on at temperature 1/√d_k, d_k={same.d_k}: factor, logits", "0 ulp, 0", measured))
    return Section(
        "What the articles say, and what these runs measured",
        "B13, the training consequence, is the verdict at the top. B04 needs independent unit coordinates: queries and "
        "keys here are projections of normalised inputs, at initialisation.",
        ("claim", "statement", "predicted", "measured"),
        rows,
    )


def run(settings: Settings) -> int:
    """Train, compare, report; exit code 0, or that of the signal that stopped it."""
    return ask.run(settings, question(settings), SEEDS, sections)
