"""What does temperature do, in attention while a model is trained, and to the text that it writes?

    python launch.py --experiment=temperature --workdir=runs/temperature
    python launch.py --experiment=temperature --depth=full --workdir=runs/temperature_full

Small decoders of two layers learn a Markov chain of order 2 over eight symbols, whose least possible
loss is known: the primary loss is what a model's lies above it. Five temperatures of the attention softmax,
one program, each at four learning rates with the same seeds. Then the models of temperature 1 write text at
eight sampling temperatures, which the true chain judges; their confidences are held to held-out
symbols; and dH/dT = Var(z)/T^3 is shown on their own logits (tempering.py has the formulas).

Expected, with six seeds (315 s of CPU time): only attention that begins too sharp costs something. T = 0.25
ends 0.023 nats above T = 1 (0.014 to 0.032); 0.5, 2 and 4 are undecided, all within 0.011 of it. Training
undoes most of a temperature: between 0.25 and 4 the scores' variance is 15 to 0.06 before it, a factor of
256, and 133 to 32 after; the entropy of attention 1.42 to 3.23 nats before, 0.46 to 0.93 after.
Samples at T = 0 repeat 79% of their 4-grams and cost the chain 0.64 nats a token, less than its entropy rate
of 1.11; at 1 they cost 1.17 and repeat 11%, at 2 they cost 2.09 and repeat 3%. The calibration error is
least at 1: 0.022, against 0.41 at 0 and 0.22 at 2. The three ways to dH/dT part by 4e-11.
"""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import ask, grid, report, results, stats, tempering, trained
from experiments.flags import Settings
from experiments.grid import Arm, Run
from experiments.observe import attention_statistics
from experiments.observed import before_and_after, over_training
from experiments.sections import Section
from experiments.sweep import Outcome, Question
from experiments.tempering import Reliability
from transformer_jax import keys
from transformer_jax.batch import Batch
from transformer_jax.cache import check_cacheable, check_positions
from transformer_jax.config import Config, Hyper
from transformer_jax.data import make_task
from transformer_jax.data.markov import ORDER, chain_of, entropy_rate, mean_floor
from transformer_jax.decode import generate
from transformer_jax.encoder_decoder import Transformer, forward
from transformer_jax.errors import ConfigError
from transformer_jax.losses import Sums
from transformer_jax.samplers import Sampler
from transformer_jax.train import eval_step

FLAGS = ask.FLAGS
SEEDS = 6
IN_ATTENTION = (0.25, 0.5, 1.0, 2.0, 4.0)
OF_SAMPLES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
OF_SLOPES = tuple(np.geomspace(0.1, 4.0, 40).tolist())
RATES = (7e-4, 2e-3, 6e-3, 1.8e-2)
BASE = Config(
    task="markov",
    vocab_size=8,
    d_model=32,
    num_heads=2,
    num_layers=2,
    seq_len=64,
    batch_size=8,
    steps=600,
    scan_unroll=0,
)
FULL = BASE.replace(vocab_size=16, d_model=64, num_heads=4, seq_len=128, steps=3000)
SAMPLES = 32  # that a model writes at each temperature
GRAMS = (1, 2, 3)
REPEATED = 4
SPACE = "\N{NO-BREAK SPACE}"
METRICS = ("entropy", *(f"distinct_{n}" for n in GRAMS), f"repetition_{REPEATED}", "generator_nats", "impossible")


def question(settings: Settings) -> Question:
    """The arms: attention temperatures, crossed with --sweep; `--depth=full` is larger."""
    config, hyper = settings.configure(FULL if settings.depth == "full" else BASE)
    for name in ("attention_temperature", "learning_rate"):
        if name in settings.overrides:
            raise ConfigError(f"--{name} is what this experiment sweeps: use --sweep={name}=… for other values")
    extra = grid.parse_sweep(settings.sweep)
    temperatures = extra.pop("attention_temperature", IN_ATTENTION)
    if 1.0 not in temperatures:
        raise ConfigError("--sweep=attention_temperature needs 1: with it the others are compared, and it writes text")
    rates = extra.pop("learning_rate", RATES)
    arms = [Arm(f"T={x:g}", config, dataclasses.replace(hyper, attention_temperature=x)) for x in temperatures]
    arms = grid.with_shared_terms(grid.cross(arms, extra))
    for arm in arms:
        check(arm.config)
    names = [arm.name for arm in arms]
    against = [name.replace(name.partition(",")[0], "T=1", 1) for name in names]
    pairs, notes = stats.first_pairs([pair for pair in zip(names, against, strict=True) if pair[0] != pair[1]])
    return Question(
        name="temperature",
        title="What does temperature do in attention, and to what a model writes?",
        arms=arms,
        learning_rates=tuple(sorted(rates)),
        comparisons=pairs,
        notes=notes,
        observe=attention_statistics,
        losses={"excess": excess},
        primary="report_excess_loss",
        floor=floor_of,
    )


def check(config: Config) -> None:
    """Raise ConfigError for a model whose samples could not be judged or drawn: before it is trained."""
    if config.task != "markov":
        raise ConfigError(f"task={config.task}: samples are judged by the chain they should come from: task=markov")
    check_cacheable(config)
    if config.mask == "prefix":
        raise ConfigError(f"mask=prefix: samples begin with {ORDER} symbols, and a prefix is read at once")
    if config.seq_len < ORDER + REPEATED:
        raise ConfigError(
            f"seq_len={config.seq_len}: {ORDER} symbols of a prompt and one {REPEATED}-gram need {ORDER + REPEATED}"
        )
    check_positions(config, config.seq_len, f"samples of seq_len={config.seq_len}")


@functools.cache
def floor_of(config: Config) -> float:
    """The chain's own mean loss over a row, nats: what make_task(config).floor says."""
    return mean_floor(chain_of(config), config.seq_len)


def excess(config: Config, params: Transformer, hyper: Hyper, batch: Batch, index: jax.Array) -> Sums:
    """Sums whose mean loss is in nats above the floor."""
    sums = eval_step(config, params, hyper, batch)
    return dataclasses.replace(sums, nats=sums.nats - floor_of(config) * sums.count)


# --- after the training -------------------------------------------------------------


def uncut_logits(params: Transformer, config: Config, hyper: Hyper, tokens_BT: jax.Array) -> jax.Array:
    """Logits [B, T, V] of the model that writes."""
    # Experts without a capacity, as when text is written: no token of a row depends on later ones.
    batch = Batch(tokens_BT, tokens_BT, jnp.ones(tokens_BT.shape))
    return forward(params, config.replace(expert_capacity=0.0), hyper, batch)[0]


_logits = jax.jit(uncut_logits, static_argnums=1)


def logits_of(model: trained.Model, ids_BT: np.ndarray) -> np.ndarray:
    """Logits [B, T, V] of a trained model on rows of ids."""
    from experiments.loop import device_hyper

    return np.asarray(_logits(model.params, model.config, device_hyper(model.hyper), jnp.asarray(ids_BT)))


def held_out(config: Config) -> np.ndarray:
    """All rows of the reported split, [rows, T + 1]: inputs and the last target."""
    task = make_task(config)
    batches = jax.jit(jax.vmap(lambda i: task.eval_batch(task.data, "report", i)))(
        jnp.arange(task.eval_batches["report"])
    )
    rows = jnp.concatenate([batches.tokens_BT, batches.targets_BT[..., -1:]], axis=-1)
    return np.asarray(rows).reshape(-1, config.seq_len + 1)


def write(model: trained.Model, prompts_RO: np.ndarray, key: jax.Array) -> np.ndarray:
    """Samples at each of OF_SAMPLES after the same prompts, [temperatures, R, T], prompts included; one program.

    Row r draws with the same noise at every temperature: what differs is the temperature's doing.
    """
    (R, O), n = prompts_RO.shape, len(OF_SAMPLES)
    prompts = np.tile(prompts_RO, (n, 1))
    made = generate(
        model.params, model.config, model.hyper, list(prompts), key, max_new_tokens=model.config.seq_len - O,
        sampler=Sampler(temperature=np.repeat(OF_SAMPLES, R)), row_ids=np.tile(np.arange(R), n).tolist(),
    )  # fmt: skip
    return np.concatenate([prompts, np.asarray(made.ids_BT)], axis=1).reshape(n, R, -1)


def judge(model: trained.Model, samples: np.ndarray) -> list[dict[str, float]]:
    """METRICS of the samples [temperatures, R, T] of OF_SAMPLES, of what was drawn: the prompts are context alone."""
    n, R, T = samples.shape
    logits = logits_of(model, samples.reshape(n * R, T)).reshape(n, R, T, -1)
    rows = []
    for temperature, ids_RT, z_RTV in zip(OF_SAMPLES, samples, logits, strict=True):
        drawn, likelihood = ids_RT[:, ORDER:], tempering.under_chain(chain_of(model.config), ids_RT)
        # Position t is asked about id t + 1.
        entropy = tempering.entropy(tempering.log_probabilities(z_RTV[:, ORDER - 1 : -1], temperature))
        values = [tempering.distinct(drawn, n) for n in GRAMS]
        values = [float(entropy.mean()), *values, tempering.repetition(drawn, REPEATED)]
        rows.append(dict(zip(METRICS, [*values, likelihood.nats, likelihood.impossible], strict=True)))
    return rows


def afterwards(outcome: Outcome, found: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The floor; samples, calibration and dH/dT of the models of the first arm at temperature 1, at its best rate."""
    arms = outcome.question.arms
    i = next(i for i, arm in enumerate(arms) if arm.hyper.attention_temperature == 1)
    arm, models = found["arms"][i], trained.models(folder)
    rows_BW = held_out(arms[i].config)
    table = chain_of(arms[i].config)
    floor = {
        "nats": floor_of(arms[i].config),
        "entropy_rate": entropy_rate(table),
        "generator_on_report_split": tempering.chain_loss(table, rows_BW),
    }
    judged: list[list[dict[str, float]] | None] = []
    reliable: list[list[Reliability] | None] = []
    slopes = None
    for seed, loss in enumerate(arm["metrics"]["report_loss"]["per_seed"]):
        if loss is None:  # diverged: nothing to ask
            judged, reliable = [*judged, None], [*reliable, None]
            continue
        model = models[Run(i, arm["best_learning_rate"], seed)]
        places = (seed * SAMPLES + np.arange(SAMPLES)) % len(rows_BW)
        samples = write(model, rows_BW[places, :ORDER], keys.named(jax.random.key(seed), "samples"))
        judged.append(judge(model, samples))
        logits = logits_of(model, rows_BW[:, :-1])
        by_temperature = [tempering.log_probabilities(logits, temperature) for temperature in OF_SAMPLES]
        reliable.append([tempering.reliability(logp, rows_BW[:, 1:]) for logp in by_temperature])
        if slopes is None:
            slopes = _slopes(seed, logits[: arms[i].config.batch_size].reshape(-1, logits.shape[-1]))
    about = {"arm": arm["name"], "learning_rate": arm["best_learning_rate"]}
    return {
        "floor": floor,
        "sampling": {
            **about,
            "samples": SAMPLES,
            "tokens": arms[i].config.seq_len - ORDER,
            "temperatures": _over_seeds(judged),
        },
        "calibration": {**about, "tokens": rows_BW[:, 1:].size, "temperatures": _calibration(reliable)},
        "entropy_derivative": {**about, **slopes} if slopes else None,
    }


def _slopes(seed: int, logits_PV: np.ndarray) -> dict[str, Any]:
    found = tempering.entropy_slopes(logits_PV, OF_SLOPES)
    lists = {name: x.tolist() for name, x in dataclasses.asdict(found).items()}
    return {"seed": seed, "positions": len(logits_PV), **lists, "max_abs_difference": found.largest_difference}


def _over_seeds(judged: Sequence[list[dict[str, float]] | None]) -> list[dict[str, Any]]:
    """Each metric at each temperature by seed, None where a seed diverged, or drew nothing that is possible."""
    return [
        {"temperature": temperature}
        | {
            name: results.summarise([None if of is None else results.number(of[t][name]) for of in judged])
            for name in METRICS
        }
        for t, temperature in enumerate(OF_SAMPLES)
    ]


def _calibration(reliable: Sequence[list[Reliability] | None]) -> list[dict[str, Any]]:
    """The error by seed, and the curve of all seeds' tokens together: bins that hold none are left out."""
    edges = np.linspace(0, 1, tempering.BINS + 1)
    rows = []
    for t, temperature in enumerate(OF_SAMPLES):
        alive = [of[t] for of in reliable if of is not None]
        bins = []
        if alive:
            every = functools.reduce(Reliability.__add__, alive)
            for b in np.flatnonzero(every.count):
                count = float(every.count[b])
                means = {"confidence": every.confidence[b] / count, "accuracy": every.correct[b] / count}
                bins.append({"low": edges[b], "high": edges[b + 1], "count": int(count), **means})
        ece = results.summarise([None if of is None else of[t].error for of in reliable])
        rows.append({"temperature": temperature, "ece": ece, "bins": bins})
    return rows


# --- the report ---------------------------------------------------------------------


def sections(outcome: Outcome, found: dict[str, Any]) -> list[Section]:
    """The report's own parts: the floor, attention, what is written, calibration, dH/dT."""
    arms = found["arms"]
    entropy = Section("Entropy of attention over training", "Nats, means over the visible rows of a batch and seeds.")
    parts = [_floor(found), before_and_after(arms), over_training(arms, "attention_entropy", entropy)]
    if found["entropy_derivative"] is None:
        return [*parts, Section("What is written", f"Every seed of {found['sampling']['arm']} diverged: no text.")]
    return [*parts, _sampling(found), _calibrated(found), _derivative(found)]


def _floor(found: dict[str, Any]) -> Section:
    floor = found["floor"]
    return Section(
        "The floor",
        f"Excess loss is what a model's loss lies above the least possible. Rows are drawn from a Markov chain of "
        f"order {ORDER}. In the long run it costs {floor['entropy_rate']:.4f} nats per token, its entropy rate; with a "
        f"row's first prediction, which sees one symbol, the least mean loss is {floor['nats']:.4f}. "
        f"On the very tokens of the reported split the chain's own loss is "
        f"{floor['generator_on_report_split']:.4f}: that luck of the draw is in the distance of every arm alike.",
    )


def _shown(metric: dict[str, Any], digits: int = 3) -> str:
    """Mean ± half of the 95% interval."""
    half = report.half_width(metric["ci95"])
    return report.fixed(metric["mean"], digits) + ("" if half is None else f"{SPACE}±{SPACE}{half:.{digits}f}")


def _sampling(found: dict[str, Any]) -> Section:
    of, floor = found["sampling"], found["floor"]["entropy_rate"]
    shown = [name for name in METRICS if name != "impossible"]
    rows = [[f"{row['temperature']:g}", *(_shown(row[name]) for name in shown)] for row in of["temperatures"]]
    impossible = max(row["impossible"]["mean"] for row in of["temperatures"])
    never = (
        "every transition of this chain is possible" if impossible == 0 else "left out, up to " + f"{impossible:.2%}"
    )

    def draw(path: Path) -> None:
        from experiments.plots_temperature import sampling

        sampling(path, [row["temperature"] for row in of["temperatures"]], of["temperatures"], floor)

    return Section(
        "What is written at each temperature",
        f"{of['samples']} samples of {of['tokens']} tokens from each model of {of['arm']} at its best rate, after "
        f"{ORDER} symbols of held-out rows; means and 95% intervals over seeds. Entropy: of the distributions that "
        "were drawn from, nats. Distinct-n: different n-grams of a sample over all of its n-grams. Repetition: part of "
        "the 4-grams that stood before in the same sample. Chain: −ln p of the drawn tokens under the true chain, nats "
        f"per token; text of the chain itself has {floor:.3f}. Impossible transitions: {never}.",
        ("T", "entropy", *(f"distinct-{n}" for n in GRAMS), "repetition", "chain"),
        rows,
        figure=("sampling.png", draw),
    )


def _calibrated(found: dict[str, Any]) -> Section:
    of = found["calibration"]
    rows = [[f"{row['temperature']:g}", _shown(row["ece"], 4)] for row in of["temperatures"]]

    def draw(path: Path) -> None:
        from experiments.plots_temperature import calibration

        calibration(path, of["temperatures"])

    return Section(
        "Calibration at each temperature",
        f"Confidences of the same models on {of['tokens']:,} held-out tokens, in {tempering.BINS} equal bins. Expected "
        "calibration error: |accuracy − confidence| of a bin, weighted by its tokens. Curves: all seeds' tokens "
        "together; a mark is as large as its bin; below the diagonal a model is too sure. At T = 0 every confidence "
        "is 1.",
        ("T", "calibration error"),
        rows,
        figure=("calibration.png", draw),
    )


def _derivative(found: dict[str, Any]) -> Section:
    of = found["entropy_derivative"]

    def draw(path: Path) -> None:
        from experiments.plots_temperature import slopes

        slopes(path, of)

    return Section(
        "dH/dT = Var(z)/T³",
        f"The derivative of the entropy by the temperature, mean over {of['positions']} held-out positions of the "
        f"model of seed {of['seed']}: the formula, JAX's derivative, and central differences, in float64. The largest "
        f"difference between any two, at {len(of['temperatures'])} temperatures: {of['max_abs_difference']:.1e} nats. "
        "A variance is never negative: entropy never falls as T rises.",
        figure=("entropy_derivative.png", draw),
    )


def run(settings: Settings) -> int:
    """Train, compare, write, judge, report; exit code 0, or that of the signal that stopped it."""
    return ask.run(settings, question(settings), SEEDS, sections, afterwards)
