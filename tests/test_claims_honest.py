"""The ledger says no more than it knows: texts, what is explained, experiments, and what its trainings call."""

import functools
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from experiments.claims import ledger, table, training
from experiments.claims.record import Claim, Verdict, Words, near, shown
from experiments.sweep import Question
from tests.claim_texts import misprinted
from tests.test_claims import CLAIMS, codes_of, executed, of
from transformer_jax.data import make_task
from transformer_jax.train import run


@pytest.mark.parametrize(
    ("sentence", "fails"),
    [
        ("6/d = {x:.3f}", True),
        ("6/d is about {x:.3f}", False),
        ("{x:.3f} = 6/d", True),
        ("{x:.1f}", False),
        ("{y:.2f}", True),
    ],
)
def test_a_misprint_is_seen(sentence: str, fails: bool) -> None:
    label = Words("", "")
    assert bool(misprinted(sentence, [near("x", label, 0.086, 0.094, 0.05), shown("y", label, 1e-3)])) is fails


def test_arithmetic_is_no_experiment(tmp_path: Path) -> None:
    claim = of(lambda: [near("x", Words("", ""), 1.0, 1.0)], Verdict.EMPIRICAL)
    one = ledger.check(claim, ledger.FULL, tmp_path)
    assert (one.status, one.passed) == ("unverifiable", None)


@pytest.mark.parametrize("verdict", list(Verdict))
def test_what_is_not_simply_true_is_explained_at_once(
    verdict: Verdict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    claim = of(lambda: [near("x", Words("", ""), 1.0, 1.0)], verdict, Words("a counter-example", "反例"))
    list(table.watch([claim], ledger.QUICK, tmp_path))
    told = verdict in (Verdict.WRONG, Verdict.CONDITIONAL, Verdict.OVERCLAIM)
    assert ("a counter-example" in capsys.readouterr().out) is told


class TracedError(Exception):
    """Instead of training."""


@pytest.mark.parametrize("claim", [c for c in CLAIMS.values() if c.train and not c.measure], ids=lambda claim: claim.id)
def test_a_sweep_calls_what_its_claim_names(claim: Claim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arms of a check that only trains, traced and not run."""

    def trace(question: Question, *_: Any, **__: Any) -> None:
        for arm in question.arms:
            config, hyper, task = arm.config.replace(steps=1), arm.hyper, make_task(arm.config)
            draw = functools.partial(task.train_batch, task.data)
            jax.eval_shape(lambda key, c=config, h=hyper, draw=draw: run(c, h, key, draw), jax.random.key(0))
        raise TracedError

    monkeypatch.setattr(training, "run_sweep", trace)
    jax.clear_caches()  # of what is held no Python is run
    done: list[ledger.Checked] = []
    seen = executed(lambda: done.append(ledger.check(claim, ledger.FULL, tmp_path)))
    assert "TracedError" in done[0].error
    assert claim.train is not None
    module = claim.train.__module__
    # What measures the trained models is not reached; a chapter that trains has it in a module of its own.
    own = list(vars(sys.modules[module]).values()) if module.endswith("_trained") else []
    missing = [ledger.name_of(use) for use in claim.uses if use not in own and not codes_of(use) & seen]
    assert not missing, f"not called: {missing}"
