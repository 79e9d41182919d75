"""Random models agree, a fault is found and shrunk to a call, and what cannot be done is refused."""

import dataclasses
import random
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import fuzz, fuzz_cases, fuzz_naive, reference
from tests.fuzz_cases import Case
from transformer_jax import blockwise, masks, scores
from transformer_jax.attention import CAPABILITIES, attend
from transformer_jax.config import IMPLEMENTATIONS
from transformer_jax.errors import ConfigError
from transformer_jax.scores import Scoring

PARTS = 4  # of the random models, so that no test is long
quiet = hypothesis.settings(
    max_examples=30,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list[Any](hypothesis.HealthCheck),
)


@pytest.mark.parametrize("part", range(PARTS))
def test_random_models_agree(part: int, request: pytest.FixtureRequest) -> None:
    asked = request.config.getoption("--fuzz")
    decided: dict[str, list[float]] = {}

    def check(case: Case) -> None:
        for name, share in fuzz.check(case).items():
            decided.setdefault(name, []).append(share)

    count = -(-(asked or 40) // PARTS)
    seed = part * count if asked is None else random.SystemRandom().randrange(2**32)
    fuzz.search(count, seed=seed, check=check)
    if asked is None:
        assert decided.keys() == {"logits", "gradient", "hessian_vector", "layer"}
    for name, shares in decided.items():
        assert np.mean(shares) > 0.7, name


def test_every_cell_of_the_table_is_drawn() -> None:
    drawn: dict[str, set[str]] = {name: set() for name in IMPLEMENTATIONS}
    orders = set()

    def collect(case: Case) -> None:
        orders.add(case.order)
        for feature, settings in fuzz_cases.SETTINGS.items():
            if all(
                set(value) <= set(case.terms) if name == "terms" else getattr(case, name) == value
                for name, value in settings.items()
                if feature != "half-precision scores"
            ) and (feature != "half-precision scores" or case.score_dtype != "float32"):
                drawn[case.attention_implementation].add(feature)

    fuzz.search(300, check=collect)
    assert orders == {0, 2}
    for name, can in CAPABILITIES.items():
        # A window is what banded attention has; its other masks are not Config's to combine with one.
        wanted = set(fuzz_cases.SETTINGS) & can
        if name == "banded":
            wanted -= {f for f in wanted if f.endswith("mask")} - {"a Window mask", "a Segments mask"}
        assert drawn[name] == wanted, name


def find_fault(implementation: str) -> tuple[str, AssertionError]:
    def logits_only(case: Case) -> None:
        fuzz.check(dataclasses.replace(case, order=0))

    with pytest.raises(AssertionError, match="differ by") as caught:
        fuzz.search(20, check=logits_only, implementation=implementation)
    (call,) = {note for note in caught.value.__notes__ if note.startswith("from tests.fuzz")}
    return call, caught.value


def test_a_fault_is_found_and_shrunk_to_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    sees = blockwise.Block.allowed
    monkeypatch.setattr(blockwise.Block, "allowed", lambda self, q, k: sees(self, q + 1, k))
    call, _ = find_fault("blockwise")
    case = eval(call.split("check(", 1)[1][:-1], {"Case": Case})
    assert case.length <= 3 and case.rows == 1 and case.num_layers == 1
    assert call.count("=") <= 8, call
    with pytest.raises(AssertionError, match="differ by"):
        exec(call, {})
    monkeypatch.undo()
    exec(call, {})


@pytest.mark.parametrize(("power", "quantity"), [(1, "gradient"), (2, "hessian_vector")])
def test_a_fault_of_derivatives_alone_is_found(monkeypatch: pytest.MonkeyPatch, power: int, quantity: str) -> None:
    """Scores that are right, and with them all values, but whose first or second derivative is not."""
    right = blockwise.attention_scores

    def wrong(*args: Any) -> jax.Array:
        s = right(*args)
        return s + 0.05 * (s - jax.lax.stop_gradient(s)) ** power

    monkeypatch.setattr(blockwise, "attention_scores", wrong)
    case = Case(attention_implementation="blockwise", mask="causal", length=5, num_heads=2, traced=3)
    fuzz.check(case)
    with pytest.raises(AssertionError, match=f"^{quantity} of draw"):
        fuzz.check(dataclasses.replace(case, order=2))


def test_a_fault_of_all_implementations_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = scores.softcap
    monkeypatch.setattr(scores, "softcap", lambda s, cap: right(s, cap * 1.01))
    case = Case(
        attention_implementation="blockwise", mask="causal", length=5, num_heads=2, terms=("attention_softcap",)
    )
    with pytest.raises(AssertionError, match="layer of draw"):
        fuzz.check(case)


def test_refused_cells_say_so() -> None:
    seen = set()

    @quiet
    @hypothesis.given(fuzz_cases.refused())
    def refuse(drawn: tuple[Case, str]) -> None:
        case, feature = drawn
        with pytest.raises(ConfigError) as error:
            fuzz.trace(case)
        said = str(error.value)
        assert case.attention_implementation in said and feature in said
        seen.add((case.attention_implementation, feature))

    refuse()
    assert {name for name, _ in seen} == {"banded", "blockwise", "linear"}


@pytest.mark.parametrize("K", [1, 3])
def test_naive_is_the_loop(K: int) -> None:
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((2, n, heads, 3)) for n, heads in ((5, 3), (7, K), (7, K)))
    mask = masks.padding(jnp.array([7, 0])) & masks.causal() & masks.window(3)
    allowed, bias = fuzz_naive.allowed_by(np, mask, 5, 7), rng.standard_normal((1, 3, 5, 7))
    got = fuzz_naive.naive(np, q, k, v, allowed, Scoring(dk_exponent=0.3, temperature=0.7), bias)
    want, _ = reference.attend(q, k, v, allowed, bias, 0.3, 0.7)
    np.testing.assert_allclose(got, want, atol=1e-12)


def test_linear_attention_of_far_negative_features() -> None:
    # phi(x) = exp(x) below 0: as elu(x) + 1 it has lost a tenth of itself at -15, and all at -17.
    rng = np.random.default_rng(2)
    q, k = (jnp.asarray(rng.uniform(-20, -14, (1, 5, 1, 2)), jnp.float32) for _ in range(2))
    v = jnp.asarray(rng.standard_normal((1, 5, 1, 2)), jnp.float32)
    scoring = Scoring(dk_exponent=0.0)
    got = attend(q, k, v, masks.causal(), scoring=scoring, implementation="linear")
    allowed = fuzz_naive.allowed_by(np, masks.causal(), 5, 5)
    want = fuzz_naive.naive(np, np.float64(q), np.float64(k), np.float64(v), allowed, scoring, phi=True)
    np.testing.assert_allclose(got, want, atol=1e-5)
