"""From a sweep's numbers to an answer: fair arms, paired statistics, a verdict in words."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments import stats
from experiments.sweep import Outcome, Question, RunResult
from transformer_jax.config import to_dict

SCALARS = ("report_loss", "selection_loss", "report_accuracy")
# Of each further loss that a question asks for, by its name.
FURTHER = "report_{}_loss"
LABELS = {
    "report_loss": "validation loss",
    "selection_loss": "loss on the selection split",
    "report_accuracy": "next-token accuracy",
    "train_loss": "training loss, last tenth",
    "report_honest_loss": "honest loss",
    "report_excess_loss": "excess loss",
}


def scalars(question: Question) -> tuple[str, ...]:
    """The names of a run's final numbers."""
    return SCALARS + tuple(FURTHER.format(name) for name in question.losses)


def summarise(values: Sequence[float | None]) -> dict[str, Any]:
    """Values by seed with their mean and 95% interval, None where a seed diverged; JSON-safe."""
    mean, low, high = stats.mean_interval(values)
    ci = None if low is None or high is None else [low, high]
    return {"per_seed": list(values), "mean": mean, "ci95": ci}


def number(x: Any) -> float | None:
    """A float for JSON: None where it is not finite."""
    x = float(x)
    return x if math.isfinite(x) else None


def train_loss(run: RunResult) -> float | None:
    """Mean training loss over the last tenth of the steps."""
    return None if run.diverged is not None else number(np.mean(run.loss[-max(1, len(run.loss) // 10) :]))


def arm_result(outcome: Outcome, i: int) -> dict[str, Any]:
    """One arm at each learning rate, and at its own best: chosen on the selection split, reported on the other."""
    question = outcome.question
    arm = question.arms[i]
    runs = {rate: outcome.of(i, rate) for rate in question.learning_rates}
    selection = {rate: [run.final(question.selection) for run in of] for rate, of in runs.items()}
    best = stats.best_setting(selection)
    chosen = runs[best.value]
    metrics = {name: summarise([run.final(name) for run in chosen]) for name in scalars(question)}
    metrics["train_loss"] = summarise([train_loss(run) for run in chosen])
    return {
        "name": arm.name,
        "config": to_dict(arm.config),
        "hyper": to_dict(dataclasses.replace(arm.hyper, learning_rate=best.value)),
        "best_learning_rate": best.value,
        "warning": best.warning if len(runs) > 1 else None,
        "metrics": metrics,
        "observed": observed(chosen),
        "learning_rates": [
            {
                "learning_rate": rate,
                "selection": summarise(selection[rate]),
                "report": summarise([run.final(question.primary) for run in of]),
            }
            for rate, of in runs.items()
        ],
        "diverged": [
            {"learning_rate": rate, "seed": seed, "step": run.diverged}
            for rate, of in runs.items()
            for seed, run in enumerate(of)
            if run.diverged is not None
        ],
    }


def observed(runs: Sequence[RunResult]) -> dict[str, Any]:
    """What the question measured, averaged over seeds: name -> [marks, …]; and the marks."""
    out: dict[str, Any] = {"marks": list(runs[0].marks)}
    for name in runs[0].measured:
        over_seeds = np.stack([run.measured[name] for run in runs]).astype(np.float64)
        finite = np.isfinite(over_seeds)
        count = finite.sum(axis=0)
        mean = np.where(count > 0, np.where(finite, over_seeds, 0.0).sum(axis=0) / np.maximum(count, 1), np.nan)
        out[name] = _plain(mean)
    return out


def _plain(x: np.ndarray) -> Any:
    return number(x) if x.ndim == 0 else [_plain(row) for row in x]


def build(outcome: Outcome) -> dict[str, Any]:
    """results.json of a complete sweep."""
    question = outcome.question
    arms = [arm_result(outcome, i) for i in range(len(question.arms))]
    values = {arm["name"]: arm["metrics"][question.primary]["per_seed"] for arm in arms}
    rows = stats.compare(values, question.comparisons, question.primary) if question.comparisons else []
    comparisons = [row.to_dict() for row in rows]
    return {
        "experiment": question.name,
        "title": question.title,
        "primary_metric": question.primary,
        "metric_label": LABELS.get(question.primary, question.primary),
        "unit": "nats per token",
        "seeds": outcome.seeds,
        "steps": len(next(iter(outcome.results.values())).loss),
        "config": to_dict(question.arms[0].config),
        "arms": arms,
        "comparisons": comparisons,
        "verdict": verdict(rows, arms, outcome.seeds),
        "would_change": would_change(rows, arms, outcome),
        "programs_compiled": outcome.programs_compiled,
        "wall_seconds": round(outcome.wall_seconds, 3),
        "tokens_per_second": round(outcome.tokens_per_second, 1),
        "certificate": dataclasses.asdict(outcome.certificate)
        | {"max_abs_difference": number(outcome.certificate.max_abs_difference)},
        "notes": outcome.notes,
    }


def verdict(rows: Sequence[stats.Comparison], arms: Sequence[dict[str, Any]], seeds: int) -> str:
    """The answer in a sentence or two: each comparison with its size, interval and judgement."""
    parts = []
    for row in rows:
        if row.lower is not None and row.difference is not None:
            higher = row.b if row.lower == row.a else row.a
            ends = sorted(abs(x) for x in row.ci95 or ())  # decided: both ends are on one side of 0
            span = f" (95% interval {ends[0]:.3f} to {ends[1]:.3f})" if ends else ""
            parts.append(f"{row.lower} ends {abs(row.difference):.3f} nats below {higher}{span}")
        else:
            size = [] if row.difference is None else [f"difference {row.difference:+.3f}".replace("-", "−")]
            judgement, _, reason = row.verdict.partition(": ")
            inside = ", ".join(part for part in (reason, *size) if part)
            parts.append(f"{row.a} against {row.b} is {judgement} ({inside})")
    lost = sum(len(arm["diverged"]) for arm in arms)
    if lost:
        parts.append(f"{lost} of {sum(len(arm['learning_rates']) for arm in arms) * seeds} runs diverged")
    return "; ".join(parts) + "." if parts else "No losses are compared."


def would_change(rows: Sequence[stats.Comparison], arms: Sequence[dict[str, Any]], outcome: Outcome) -> list[str]:
    """What a sceptic should ask for before believing the verdict, from this run's own numbers."""
    out = []
    by_name = {arm["name"]: arm for arm in arms}
    for row in rows:
        if row.seeds_needed is not None:
            out.append(
                f"{row.a} against {row.b}: about {row.seeds_needed} seeds would decide it; there were {outcome.seeds}."
            )
        a, b = by_name[row.a], by_name[row.b]
        flips = []
        for at_a, at_b in zip(a["learning_rates"], b["learning_rates"], strict=True):
            left, right = at_a["report"]["mean"], at_b["report"]["mean"]
            if None not in (left, right, row.difference) and (left - right) * row.difference < 0:
                flips.append(f"{at_a['learning_rate']:g}")
        if flips:
            out.append(
                f"At the learning rate {' and '.join(flips)} the order of {row.a} and {row.b} is the other way round."
            )
    out += [f"{arm['name']}: {arm['warning']}" for arm in arms if arm["warning"]]
    steps = len(next(iter(outcome.results.values())).loss)
    out.append(
        f"More steps: the runs ended at {steps}, where the losses were still falling." if _falling(outcome) else ""
    )
    return [line for line in out if line]


def _falling(outcome: Outcome) -> bool:
    """Whether the last fifth of the mean training loss is below the fifth before it by more than 1%."""
    loss = np.stack([run.loss for run in outcome.results.values() if run.diverged is None] or [np.ones(5)])
    fifth = max(1, loss.shape[1] // 5)
    return bool(loss[:, -fifth:].mean() < 0.99 * loss[:, -2 * fifth : -fifth].mean())


def metrics_rows(outcome: Outcome, every: int = 10) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl: each run's training loss at every tenth step, validation at the marks."""
    rows = []
    for run, result in outcome.results.items():
        label = {"arm": outcome.question.arms[run.arm].name, "learning_rate": run.learning_rate, "seed": run.seed}
        steps = len(result.loss)
        for step in range(0, steps, every):
            loss, norm = number(result.loss[step]), number(result.grad_norm[step])
            rows.append({"step": step, "loss": loss, "grad_norm": norm, **label})
        for m, mark in enumerate(result.marks):
            at = {name: number(result.measured[name][m]) for name in scalars(outcome.question)}
            rows.append({"step": mark, "loss": None, **at, **label})
    return rows


def mean_curves(outcome: Outcome, i: int, rate: float) -> dict[str, np.ndarray]:
    """For plots: the primary loss on the same validation batches at each mark; mean, low, high over finite seeds."""
    runs = outcome.of(i, rate)
    marks = np.asarray(runs[0].marks)
    values = np.stack([run.measured[outcome.question.primary.replace("_loss", "_curve")] for run in runs])
    bands = [stats.mean_interval([number(x) for x in values[:, m]]) for m in range(len(marks))]
    table = np.array([[np.nan if x is None else x for x in band] for band in bands])
    loss = np.stack([run.loss for run in runs]) - outcome.question.floor(outcome.question.arms[i].config)
    return {"marks": marks, "mean": table[:, 0], "low": table[:, 1], "high": table[:, 2], "loss": loss}
