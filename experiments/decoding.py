"""The exact decoding lab: every sequence that a small model can write, and samplers held to it.

    python launch.py --experiment=decoding
    python launch.py --experiment=decoding --top_k=2 --sample_temperature=1.5 --seed=3

A fresh model over 4 ids writes at most 4 more; all sequences and their exact probabilities are listed (exact.py: one
batched forward pass without a cache, float64), and `generate` draws 12,288, with its cache and samplers. For
each setting: how many sequences it leaves, their entropy in nats, the most probable one, the expected length,
and p of the chi-square test of the draws against the list. Expected: entropy 1.775 of the model, 0 of greedy,
2.474 at temperature 1.7; and no p below 0.001 / settings, else the exit code is 1.
"""

import dataclasses
from collections.abc import Mapping

import jax
import numpy as np

from experiments.flags import Settings
from experiments.terminal import console_of, say, table
from experiments.workdir import open_workdir
from transformer_jax.config import Config, Hyper, to_dict, with_terms
from transformer_jax.decode import generate
from transformer_jax.encoder_decoder import Transformer, init_transformer
from transformer_jax.exact import Outcomes, outcomes
from transformer_jax.samplers import Sampler, check_sampler

SAMPLING = {
    "sample_temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
}
FLAGS = (*SAMPLING, "seed", "workdir", "overwrite")
BASE = Config(
    vocab_size=4, d_model=8, num_heads=2, num_layers=1, positions="alibi", seq_len=8, tie_embeddings=False, task="copy"
)
PROMPT, NEW, STOP = (0, 2), 4, 3
ROWS, ROUNDS = 4096, 3
LEVEL = 0.001
SPREAD = 1.4  # of the weights: fresh ones leave the ids almost equally likely
SETTINGS = {
    "the model": Sampler(),
    "greedy": Sampler(temperature=0.0),
    "temperature 0.6": Sampler(temperature=0.6),
    "temperature 1.7": Sampler(temperature=1.7),
    "top_k 2": Sampler(top_k=2),
    "top_p 0.7": Sampler(top_p=0.7),
    "min_p 0.35": Sampler(min_p=0.35),
    "penalty 1.8": Sampler(repetition_penalty=1.8),
    "top_k 3, top_p 0.75": Sampler(top_k=3, top_p=0.75),
    "temperature 1.7, top_p 0.7": Sampler(temperature=1.7, top_p=0.7),
    "all five": Sampler(temperature=1.3, top_k=3, top_p=0.9, min_p=0.1, repetition_penalty=1.4),
}

Counts = Mapping[tuple[int, ...], int]


def drawn(
    params: Transformer, config: Config, hyper: Hyper, sampler: Sampler, key: jax.Array
) -> dict[tuple[int, ...], int]:
    """How often `generate` wrote each sequence, of ROWS times ROUNDS."""
    counts: dict[tuple[int, ...], int] = {}
    for start in range(0, ROWS * ROUNDS, ROWS):
        made = generate(
            params, config, hyper, [list(PROMPT)] * ROWS, key, max_new_tokens=NEW, sampler=sampler,
            stop_ids=(STOP,), row_ids=range(start, start + ROWS),
        )  # fmt: skip
        for ids, length in zip(np.asarray(made.ids_BT).tolist(), np.asarray(made.lengths_B).tolist(), strict=True):
            counts[tuple(ids[:length])] = counts.get(tuple(ids[:length]), 0) + 1
    return counts


def misfit(counts: Counts, found: Outcomes) -> float:
    """p of the chi-square test; sequences expected fewer than 5 times count as one. 0 for a sequence that cannot be."""
    from scipy import stats

    if not set(counts) <= set(found.sequences):
        return 0.0
    total = sum(counts.values())
    expected = found.p * total
    seen = np.array([counts.get(ids, 0) for ids in found.sequences])
    rare = expected < 5
    if rare.any():
        expected, seen = np.r_[expected[~rare], expected[rare].sum()], np.r_[seen[~rare], seen[rare].sum()]
    if len(seen) == 1:
        return float(seen[0] == total)
    return float(stats.chisquare(seen, expected * total / expected.sum()).pvalue)


def distance(counts: Counts, found: Outcomes) -> float:
    """Total variation between the draws and the list: half the sum of |frequency - p|."""
    total = sum(counts.values())
    outside = sum(n for ids, n in counts.items() if ids not in set(found.sequences)) / total
    inside = sum(abs(counts.get(ids, 0) / total - p) for ids, p in zip(found.sequences, found.p, strict=True))
    return float(inside + outside) / 2


def run(settings: Settings) -> int:
    """Print the table, write results.json where a workdir is given; 0 if every setting fits its list, else 1."""
    config, hyper = settings.configure(BASE)
    config = with_terms(config, [hyper])
    asked = {field: getattr(settings, flag) for flag, field in SAMPLING.items() if flag in settings.given}
    tried = {"as asked": Sampler(**asked)} if asked else SETTINGS
    for sampler in tried.values():
        check_sampler(sampler, config.V)
    workdir = None
    if settings.workdir:
        identity = {"experiment": "decoding", "config": to_dict(config), "hyper": to_dict(hyper)}
        identity |= {"seed": settings.seed, "asked": asked}
        workdir = open_workdir(settings.workdir, identity, {}, overwrite=settings.overwrite)
    params = jax.tree.map(lambda x: SPREAD * x, init_transformer(jax.random.key(settings.seed + 3), config))
    rows, found = [], {}
    for name, sampler in tried.items():
        exact = outcomes(params, config, hyper, PROMPT, sampler, max_new_tokens=NEW, stop_ids=(STOP,))
        counts = drawn(params, config, hyper, sampler, jax.random.key(settings.seed + 11))
        p = misfit(counts, exact)
        found[name] = {
            "sampler": dataclasses.asdict(sampler),
            "sequences": len(exact.sequences),
            "entropy": exact.entropy,
            "mode": list(exact.mode),
            "mode_probability": float(exact.p[0]),
            "expected_length": exact.expected_length,
            "total_variation": distance(counts, exact),
            "p": p,
        }
        mode = f"{' '.join(map(str, exact.mode))} ({exact.p[0]:.3f})"
        numbers = (f"{len(exact.sequences)}", f"{exact.entropy:.3f}", mode, f"{exact.expected_length:.3f}", f"{p:.3f}")
        rows.append((name, *numbers))
    console, level = console_of(None), LEVEL / len(tried)
    say(console, f"{config.V} ids, after the prompt {' '.join(map(str, PROMPT))}, {STOP} ends a sequence", "bold")
    table(console, ("setting", "listed", "entropy", "mode", "length", "p"), rows)
    wrong = [name for name, row in found.items() if row["p"] < level]
    draws = f"{ROWS * ROUNDS:,} draws of each"
    say(console, f"{draws}: " + (f"NOT as listed: {', '.join(wrong)}" if wrong else f"none has p below {level:.2g}"))
    if workdir:
        workdir.write("results.json", {"experiment": "decoding", "draws": ROWS * ROUNDS, "settings": found})
    return 1 if wrong else 0
