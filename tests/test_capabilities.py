"""The capability table, cell by cell: what an implementation can do equals dense, the rest is refused by name."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fuzz_naive import naive_attend
from tests.quick import jit
from transformer_jax import banded, masks, relative
from transformer_jax.attention import CAPABILITIES, attend
from transformer_jax.errors import ConfigError
from transformer_jax.masks import BlockSparse, Causal, Inverted, Mask, Padding, PrefixLM, Segments, Window
from transformer_jax.scores import Scoring

B, T, N, K, H = 2, 11, 4, 2, 3
FEATURES = sorted(frozenset().union(*CAPABILITIES.values()))
EXACT = [name for name in CAPABILITIES if name != "linear"]
# A band is asked for by a window, which banded attention therefore has in every cell.
WINDOW = Window(4)


def part_named(name: str) -> Any:
    ids = jnp.array([[0] * 5 + [1] * 6, [3] * 2 + [0] * 9])
    random = jax.random.bernoulli(jax.random.key(5), 0.6, (B, N, T, T))
    made = {
        "Causal": Causal(),
        "Inverted": Inverted(),
        "Window": WINDOW,
        "PrefixLM": PrefixLM(jnp.array([3, 0])),
        "Padding": Padding(jnp.array([11, 5])),
        "Segments": Segments(ids, ids),
        "BlockSparse": BlockSparse(2),
        "Dense": masks.Dense(random),
    }
    return made[name]


def cell(implementation: str, feature: str) -> tuple[dict[str, Any], int]:
    """The arguments of `attend` for a call that uses the feature, and its number of keys."""
    parts = (WINDOW,) if implementation == "banded" else ()
    scoring: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    S = T
    if feature.endswith("mask"):
        part = part_named(feature.split()[1])
        parts = parts if part is WINDOW and parts else (*parts, part)
    elif feature.startswith("normaliser"):
        scoring["normaliser"] = feature.split()[1]
    elif feature == "a bias":
        rest["bias"] = relative.alibi(N) + relative.dense(jax.random.normal(jax.random.key(6), (1, N, T, T)))
    elif feature == "a soft-cap":
        scoring["softcap"] = 0.7
    elif feature == "a sink":
        scoring["sink_N"] = jnp.arange(N, dtype=jnp.float32) - 1
    elif feature == "dropout":
        rest |= {"dropout_rate": 0.4, "key": jax.random.key(7)}
    elif feature == "half-precision scores":
        scoring["score_dtype"] = "bfloat16"
    elif feature == "weights":
        rest["weights"] = True
    elif feature == "other lengths":
        S = T + 3
    mask = Mask(parts)
    if feature == "positions":
        mask = Mask((*parts, Causal())).at(jnp.array([[3 * i % 7 for i in range(T)]]), None)
    return {"mask": mask, "scoring": Scoring(**scoring), **rest}, S


def inputs(S: int) -> tuple[jax.Array, ...]:
    shapes = {"q": (B, T, N, H), "k": (B, S, K, H), "v": (B, S, K, 5)}
    return tuple(jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes.values()))


def outcome(implementation: str, S: int, arguments: dict[str, Any], call: Any = attend) -> Any:
    """Output, and the gradient of a sum of its sines; call: attend, or naive_attend, which knows no weights."""
    mask, weights = arguments["mask"], arguments.get("weights", False) and call is attend
    block = 4 if implementation != "dense" else 0
    run = functools.partial(call, implementation=implementation, block=block, **arguments)

    def total(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
        out: Any = run(q, k, v)
        return jnp.sum(jnp.sin(out[0] if weights else out)), out

    assert isinstance(mask, Mask)
    grads, out = jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(*inputs(S))
    return out, grads


@pytest.mark.parametrize(("implementation", "feature"), [*itertools.product(EXACT, FEATURES)])
def test_cell_equals_dense_or_is_refused(implementation: str, feature: str) -> None:
    arguments, S = cell(implementation, feature)
    if feature not in CAPABILITIES[implementation]:
        with pytest.raises(ConfigError, match=f"{implementation} attention cannot do {feature}.*: .*dense"):
            jax.eval_shape(functools.partial(attend, implementation=implementation, **arguments), *inputs(S))
        return
    got = outcome(implementation, S, arguments)
    if implementation == "dense":
        want = outcome("dense", S, arguments, naive_attend)
        got = (got[0][0] if feature == "weights" else got[0], got[1])
    else:
        want = outcome("dense", S, arguments)
    plain = outcome("dense", S, {"mask": Mask((WINDOW,)) if implementation == "banded" else masks.full()})
    atol = 2e-2 if feature == "half-precision scores" else 2e-6
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=atol), got, want)
    if implementation != "dense" and feature not in ("a Window mask", "other lengths"):
        # The feature did something: what is compared is not two calls that ignore it alike.
        assert any(
            not np.allclose(a, b, atol=1e-4) for a, b in zip(got[1], plain[1], strict=True) if a.shape == b.shape
        )


@pytest.mark.parametrize("feature", FEATURES)
def test_linear_attention_does_little_and_says_so(feature: str) -> None:
    arguments, S = cell("linear", feature)
    call = functools.partial(attend, implementation="linear", **arguments)
    if feature in CAPABILITIES["linear"]:
        got, want = outcome("linear", S, arguments), outcome("linear", S, arguments, naive_attend)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6), got, want)
        return
    with pytest.raises(ConfigError, match=f"linear attention cannot do {feature}.*: .*dense"):
        jax.eval_shape(call, *inputs(S))


def test_every_kind_of_mask_has_a_column() -> None:
    kinds = {kind.__name__ for kind in vars(masks).values() if isinstance(kind, type) and hasattr(kind, "allows")}
    assert {f"a {kind} mask" for kind in kinds} <= set(FEATURES)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"implementation": "flash"}, "attention_implementation 'flash'"),
        ({"implementation": "linear", "scoring": Scoring(score_dtype="float16")}, r"half-precision scores \(float16\)"),
        ({"implementation": "banded"}, "banded attention needs a window mask"),
        ({"implementation": "banded", "mask": masks.window(12)}, "a window of 12 in a row of 11"),
        ({"implementation": "banded", "mask": masks.window(5), "band": 3}, "band=3 is narrower than the window of 5"),
        ({"scoring": Scoring(normaliser="sparsemax")}, "normaliser 'sparsemax'"),
        ({"scoring": Scoring(normaliser="relu", sink_N=jnp.zeros(N))}, "a sink with normaliser relu"),
        ({"mask": masks.padding(jnp.array([12, 3]))}, r"lengths \[12, 3\] of rows with 11 keys"),
        ({"mask": masks.padding(jnp.array([-1, 3]))}, r"lengths \[-1, 3\] of rows with 11 keys"),
        ({"mask": masks.padding(jnp.array([2, 3, 4]))}, "a Padding mask of 3 rows in a batch of 2"),
        ({"mask": masks.segments(jnp.zeros((1, 1), int))}, r"a Segments mask of \(1, 1\)"),
        ({"mask": masks.dense(jnp.ones((3, 1, 1, T), bool))}, "a Dense mask of 3 rows in a batch of 2"),
        ({"mask": masks.prefix_lm(jnp.array([0, 1, 2]))}, "a PrefixLM mask of 3 rows in a batch of 2"),
        ({"bias": jnp.zeros((B, N, T, T - 1))}, r"a DenseBias bias of \(11, 10\) in an attention of \(11, 11\)"),
    ],
)
def test_calls_at_odds_are_refused_with_their_values(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        attend(*inputs(T), **arguments)


@pytest.mark.parametrize(
    ("width", "block", "queries"), [(7, 2, 2), (7, 2, 4), (11, 1, 3), (2, 4, 4), (1, 3, 6), (9, 4, 64), (5, 16, 1)]
)
@pytest.mark.parametrize("both_ways", [False, True])
def test_bands_of_any_width_in_blocks_and_groups_of_any_size(
    width: int, block: int, queries: int, both_ways: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(banded, "QUERIES", queries)
    mask = Mask((Window(width),)) if both_ways else masks.window(width)
    arguments = {"mask": mask & masks.padding(jnp.array([11, 8]))}

    def run(implementation: str) -> Any:
        call = functools.partial(attend, implementation=implementation, block=block, **arguments)
        return jit(jax.value_and_grad(lambda *qkv: jnp.sum(jnp.sin(call(*qkv))), argnums=(0, 1, 2)))(*inputs(T))

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6), run("banded"), run("dense"))


@pytest.mark.parametrize("which", [1, 2])
@pytest.mark.parametrize("at", ["rows", "slots", "heads"])
def test_keys_and_values_that_only_broadcast_are_refused(which: int, at: str) -> None:
    given = list(inputs(T))
    given[which] = {"rows": given[which][:1], "slots": given[which][:, :1], "heads": given[which][:, :, :1]}[at]
    for implementation in CAPABILITIES:
        with pytest.raises(ConfigError, match=r"they must agree"):
            attend(*given, masks.window(3), implementation=implementation)


@pytest.mark.parametrize("implementation", ["dense", "blockwise", "banded"])
@pytest.mark.parametrize(
    ("held", "heads", "N", "words"),
    [
        ("bias", 4, 1, "a ALiBi bias of 4 heads in an attention of 1"),
        ("array", 4, 1, "a DenseBias bias of 4 heads in an attention of 1"),
        ("t5", 4, 1, "a T5 bias of 4 heads in an attention of 1"),
        ("mask", 4, 1, "a Dense mask of 4 heads in an attention of 1"),
        ("sink", 4, 1, r"a sink of shape \(4,\) in an attention of 1 heads"),
        ("mask", 3, 4, "a Dense mask of 3 heads in an attention of 4"),
        ("sink", 1, 4, r"a sink of shape \(1,\) in an attention of 4 heads"),
    ],
)
def test_other_heads_than_the_queries_are_refused(
    implementation: str, held: str, heads: int, N: int, words: str
) -> None:
    """They would be stretched, and an output of more heads than queries come back."""
    ones = jnp.ones((1, heads, T, T))
    arguments: dict[str, Any] = {
        "bias": {"bias": relative.alibi(heads)},
        "array": {"bias": ones},
        "t5": {"bias": relative.t5(jnp.ones((8, heads)), distance=9, bidirectional=False)},
        "mask": {"mask": masks.window(3) & masks.dense(ones > 0)},
        "sink": {"scoring": Scoring(sink_N=jnp.zeros(heads))},
    }[held]
    q = jnp.ones((B, T, N, 3))
    with pytest.raises(ConfigError, match=words):
        attend(q, q, q, **{"mask": masks.window(3), "implementation": implementation, **arguments})


@pytest.mark.parametrize("implementation", ["blockwise", "banded"])
def test_a2_rows_that_fill_up_the_last_block_reach_no_gradient(implementation: str) -> None:
    """T = 11 in blocks of 4: the twelfth row would see only keys that the bias forbids, and be NaN."""
    bias = jnp.zeros((1, 1, 1, T)).at[..., T - 1].set(-jnp.inf)
    arguments = {"mask": masks.window(2), "bias": bias}
    got, want = outcome(implementation, T, arguments), outcome("dense", T, arguments)
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(got))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6), got, want)


def test_causal_linear_attention_of_other_lengths_is_refused() -> None:
    with pytest.raises(ConfigError, match="11 queries over 14 keys"):
        attend(*inputs(T + 3), masks.causal(), implementation="linear")


def test_a_traced_window_needs_a_band_and_is_loud_beyond_it() -> None:
    def run(width: jax.Array, band: int) -> jax.Array:
        out = attend(*inputs(T), masks.window(width), implementation="banded", band=band, block=3)
        assert isinstance(out, jax.Array)
        return out

    with pytest.raises(ConfigError, match="needs `band`"):
        jit(lambda w: run(w, 0))(4)
    within = jit(lambda w: run(w, 6))
    for width in (1, 4, 6):
        np.testing.assert_allclose(within(width), attend(*inputs(T), masks.window(width)), atol=2e-6)
    assert bool(jnp.all(jnp.isnan(within(7))))


def test_dropout_is_that_of_the_place_whatever_the_blocks() -> None:
    arguments = {"dropout_rate": 0.5, "key": jax.random.key(1)}
    q, k, _ = inputs(T)
    v = jnp.broadcast_to(jnp.eye(T)[None, :, None], (B, T, K, T))  # the output is the weights
    want = attend(q, k, v, **arguments)
    for block in (1, 3, 4, 64):
        got = attend(q, k, v, implementation="blockwise", block=block, **arguments)
        np.testing.assert_allclose(got, want, atol=1e-6)
    dropped = np.asarray(want) == 0
    assert 0.4 < dropped.mean() < 0.6
    # [B, T, N, S]; the last pair would be one if a head's rows followed on those of the head before.
    pairs = [(dropped[0], dropped[1]), (dropped[:, :, 0], dropped[:, :, 1]), (dropped[:, 0], dropped[:, 1])]
    for a, b in (*pairs, (dropped[:, 1:, 0], dropped[:, :-1, 1])):
        assert 0.3 < (a == b).mean() < 0.7  # rows, heads and queries have bits of their own
