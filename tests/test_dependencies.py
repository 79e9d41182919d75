"""Zero where the masks forbid, exactly, and above zero wherever they allow: derivatives of whole models."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference
from tests.quick import jit
from transformer_jax import masks
from transformer_jax.batch import Batch
from transformer_jax.config import Config, Hyper
from transformer_jax.dependencies import Pattern, leaks, measured, predicted, reach, reach_source, silent
from transformer_jax.encoder_decoder import Transformer, init_transformer
from transformer_jax.errors import ConfigError
from transformer_jax.layers import apply_stack

B, T, S, V = 2, 7, 5, 11
SMALL = Config(
    vocab_size=V,
    d_model=6,
    num_heads=2,
    head_dim=4,
    d_ff=7,
    seq_len=T,
    max_positions=T,
    block_size=2,
    relative_buckets=4,
    relative_distance=3,
)
measure = jit(measured, static_argnums=1)


def tokens(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(0, V, shape), jnp.int32)


def batch(**parts: Any) -> Batch:
    ids = tokens(B, T)
    arrays = {name: jnp.asarray(value, jnp.int32) for name, value in parts.items()}
    return Batch(ids, ids, jnp.ones((B, T)), **arrays)


def parameters(config: Config, seed: int = 0) -> Transformer:
    """Draws of 0.5 (norm scales about 1), large enough for weights to differ, small enough for none to underflow."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda k: init_transformer(k, config), jax.random.key(0))

    def draw(path: tuple, leaf: Any) -> jax.Array:
        return jnp.asarray(rng.normal("scale" in path[-1].name, 0.5, leaf.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)


# --- the algebra -------------------------------------------------------------------


def spread(allowed: np.ndarray, layers: int, cross: np.ndarray | None = None, encoded: Any = None) -> list[Any]:
    """Layer by layer, with sets: what each position has seen of its row and of the source."""
    T = len(allowed)
    own, other = [{i} for i in range(T)], [set() for _ in range(T)]
    for _ in range(layers):
        sees = [[i] + [j for j in range(T) if allowed[i, j]] for i in range(T)]
        own = [set().union(*(own[j] for j in sees[i])) for i in range(T)]
        other = [set().union(*(other[j] for j in sees[i])) for i in range(T)]
        if cross is not None:
            for i in range(T):
                other[i] = other[i].union(*(encoded[s] for s in np.flatnonzero(cross[i])))
    return [own, other]


def as_array(seen: list[set[int]], width: int) -> np.ndarray:
    return np.array([[j in row for j in range(width)] for row in seen])


@pytest.mark.parametrize("layers", [0, 1, 2, 3, 5])
def test_reach_equals_sets_that_spread(layers: int) -> None:
    rng = np.random.default_rng(layers)
    allowed = rng.random((3, 2, 11, 11)) < 0.08
    allowed[:, :, 4] = False  # sees nothing, and is itself
    got = np.asarray(reach(jnp.asarray(allowed), layers))
    for b in range(3):
        np.testing.assert_array_equal(got[b], as_array(spread(allowed[b].any(0), layers)[0], 11))
    np.testing.assert_array_equal(got[:, 4], np.tile(np.eye(11, dtype=bool)[4], (3, 1)))
    if layers:
        cross, source = rng.random((3, 1, 11, 5)) < 0.1, rng.random((3, 2, 5, 5)) < 0.2
        encoded = reach(jnp.asarray(source), 2)
        got = np.asarray(reach_source(jnp.asarray(allowed), jnp.asarray(cross), encoded, layers))
        for b in range(3):
            memory = spread(source[b].any(0), 2)[0]
            want = spread(allowed[b].any(0), layers, cross[b, 0], memory)[1]
            np.testing.assert_array_equal(got[b], as_array(want, 5))


def test_a_window_grows_by_its_width_less_one_a_layer() -> None:
    for width in (1, 2, 3):
        for layers in (1, 2, 3):
            got = np.asarray(reach(masks.window(width).dense(13, 13), layers))[0]
            assert np.flatnonzero(got[12]).tolist() == list(range(12 - layers * (width - 1), 13))


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"float32 \(1, 1, 3, 3\)"):
        reach(jnp.ones((1, 1, 3, 3)), 1)
    with pytest.raises(ConfigError, match=r"\(1, 1, 3, 5\)"):
        reach(jnp.ones((1, 1, 3, 5), bool), 1)
    with pytest.raises(ConfigError, match="layers=-1"):
        reach(jnp.ones((1, 1, 3, 3), bool), -1)
    with pytest.raises(ConfigError, match="source_BS"):
        predicted(SMALL.replace(architecture="encoder_decoder"), Hyper(), batch())
    two = predicted(SMALL, Hyper(), batch())
    with pytest.raises(ConfigError, match=r"rows is \(3, 3\) measured, \(2, 2\) predicted"):
        leaks(two._replace(rows_BB=jnp.zeros((3, 3))), two)
    with pytest.raises(ConfigError, match=r"source is None measured, \(2, 7, 5\) predicted"):
        silent(two, two._replace(source_BTS=jnp.zeros((B, T, S), bool)))


def test_leaks_and_silences_are_found_where_they_are() -> None:
    may = Pattern(jnp.tri(3, dtype=bool)[None], None, jnp.ones((1, 1), bool))
    slopes = Pattern(jnp.tri(3)[None], None, jnp.ones((1, 1)))
    assert leaks(slopes, may).largest == 0.0 and leaks(slopes, may).count == silent(slopes, may).count == 0
    other = slopes._replace(target_BTT=slopes.target_BTT.at[0, 0, 2].set(1e-40).at[0, 2, 1].set(0.0))
    found = leaks(other, may)
    assert 0 < found.largest < 2e-40 and found.where["target"].tolist() == [[0, 0, 2]]
    assert silent(other, may).where["target"].tolist() == [[0, 2, 1]]
    other = slopes._replace(target_BTT=slopes.target_BTT.at[0, 0, 1].set(jnp.nan).at[0, 1, 0].set(jnp.nan))
    assert np.isnan(leaks(other, may).largest) and leaks(other, may).count == 1 and silent(other, may).count == 0


# --- whole models ------------------------------------------------------------------

LEFT = [[0, 1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 1, 2, 3]]  # row 1 begins with three pads
REAL = [[1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1]]
PACKED = [[1, 1, 1, 2, 2, 2, 3], [1, 2, 2, 2, 2, 2, 2]]
RESTARTED = [[0, 1, 2, 0, 1, 2, 0], [0, 0, 1, 2, 3, 4, 5]]
SOURCE = [[1, 1, 2, 2, 2], [2, 2, 2, 1, 1]]  # nothing for segment 3
BOTH = {"architecture": "encoder_decoder"}
ROWS = {
    "right padding": {"lengths_B": [7, 3]},
    "left padding": {"positions_BT": LEFT, "segments_BT": REAL},
    "packed": {"positions_BT": RESTARTED, "segments_BT": PACKED},
    "restarted": {"positions_BT": RESTARTED},
}
PAIRS = {
    "source": {"source_lengths_B": [5, 2], "lengths_B": [7, 4]},
    "packed": {"segments_BT": PACKED, "source_segments_BS": SOURCE, "source_lengths_B": [5, 4]},
    "no source": {"source_lengths_B": [0, 5]},
}
PLAIN: dict[str, dict[str, Any]] = {"whole": {}}
PADDED = {"padded": ROWS["right padding"]}

# name -> changes of the config, numbers, and batches; those of a case run through one program.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, dict[str, Any]]]] = {
    "causal": ({}, {}, PLAIN),
    "causal, multi-query, post": ({"num_kv_heads": 1, "norm_placement": "post", "positions": "learned"}, {}, ROWS),
    "none, sandwich, t5": (
        {"mask": "none", "norm_placement": "sandwich", "positions": "t5", "num_layers": 1},
        {},
        PADDED,
    ),
    "inverted, no norms": (
        {"mask": "inverted", "norm_placement": "none", "positions": "sinusoidal", "num_layers": 1},
        {},
        PLAIN,
    ),
    "window, sigmoid, one layer": ({"mask": "window", "num_layers": 1, "normaliser": "sigmoid"}, {"window": 3}, PLAIN),
    "window, two layers": ({"mask": "window"}, {"window": 3}, PLAIN),
    "window, three layers": ({"mask": "window", "num_layers": 3}, {"window": 2}, PLAIN),
    "prefix, rmsnorm, sinks": (
        {"mask": "prefix", "norm": "rmsnorm", "attention_sink": True, "num_layers": 1},
        {"prefix": 3},
        PLAIN,
    ),
    "block sparse": ({"mask": "block_sparse", "num_layers": 1}, {}, PLAIN),
    "encoder": ({"architecture": "encoder", "num_encoder_layers": 1}, {}, {"short": {"lengths_B": [4, 0]}} | PADDED),
    "encoder, two layers": ({"architecture": "encoder"}, {}, ROWS),
    "window, three layers, packed": ({"mask": "window", "num_layers": 3}, {"window": 2}, ROWS),
    "prefix, two layers": ({"mask": "prefix"}, {"prefix": 2}, ROWS),
    "prefix, both": ({**BOTH, "mask": "prefix"}, {"prefix": 2}, PAIRS),
    "linear, both": (
        {**BOTH, "attention_implementation": "linear"},
        {},
        {name: parts for name, parts in PAIRS.items() if name != "packed"},
    ),
    "both": ({**BOTH, "mask": "window"}, {"window": 2}, PAIRS),
    "experts": ({"num_experts": 3, "expert_capacity": 0.4, "num_layers": 1}, {}, PADDED),
    "experts, none dropped": ({"num_experts": 3, "expert_capacity": 0.0, "num_layers": 1}, {}, PADDED),
    "blockwise, sinks, alibi": (
        {"attention_implementation": "blockwise", "attention_block": 2, "attention_sink": True, "positions": "alibi"},
        {},
        ROWS,
    ),
    "blockwise, both": (
        {**BOTH, "attention_implementation": "blockwise", "attention_block": 3, "num_layers": 1},
        {},
        PAIRS,
    ),
    "banded, t5": (
        {"attention_implementation": "banded", "attention_block": 2, "band": 3, "mask": "window", "positions": "t5"},
        {"window": 3},
        PADDED,
    ),
    "linear": ({"attention_implementation": "linear", "attention_block": 3}, {}, PADDED),
    "relu": ({"normaliser": "relu", "num_layers": 1}, {}, PADDED),
    "entmax": ({"normaliser": "entmax15", "num_layers": 1}, {}, PADDED),
}
# A negative score has no weight under relu, a low one none under entmax15: there only the zeros are certain.
SPARSE = ("relu", "entmax15")
# What a batch without the part amounts to.
FILLERS = {
    "lengths_B": [T, T],
    "segments_BT": [[1] * T] * B,
    "positions_BT": [list(range(T))] * B,
    "source_lengths_B": [S, S],
    "source_segments_BS": [[1] * S] * B,
}


def may_see(n: int, parts: dict[str, Any], see: Callable[[int, int], bool], side: str = "") -> np.ndarray:
    """Booleans [B, n, n] by loops over the lists that a batch was made of, not by the library's masks."""
    end = "S" if side else "T"
    lengths = parts.get(f"{side}lengths_B", [n] * B)
    segments = parts.get(f"{side}segments_B{end}", [[0] * n] * B)
    positions = parts.get(f"{side}positions_B{end}", [list(range(n))] * B)

    def may(b: int, _: int, i: int, j: int) -> bool:
        near = see(positions[b][i], positions[b][j])
        return near and segments[b][i] == segments[b][j] and j < lengths[b]

    return reference.mask_array(may, B, 1, n, n)[:, 0]


def by_hand(config: Config, hyper: Hyper, parts: dict[str, Any]) -> tuple[np.ndarray, np.ndarray | None]:
    """The pattern [B, T, T] and [B, T, S], spread layer by layer."""
    both_ways = reference.predicate("none")
    see = reference.predicate(config.mask, window=hyper.window, prefix=hyper.prefix, block=config.block_size)
    if config.architecture == "encoder":
        own, layers = may_see(T, parts, both_ways), config.encoder_layers
    else:
        own, layers = may_see(T, parts, see), config.L
    if config.architecture != "encoder_decoder":
        return np.stack([as_array(spread(own[b], layers)[0], T) for b in range(B)]), None
    encoder = may_see(S, parts, both_ways, "source_")
    lengths, ids = parts["source_lengths_B"], parts.get("source_segments_BS")

    def looks(b: int, _: int, i: int, j: int) -> bool:
        return j < lengths[b] and (ids is None or ids[b][j] == parts["segments_BT"][b][i])

    cross = reference.mask_array(looks, B, 1, T, S)[:, 0]
    rows = [spread(own[b], layers, cross[b], spread(encoder[b], config.encoder_layers)[0]) for b in range(B)]
    return np.stack([as_array(r[0], T) for r in rows]), np.stack([as_array(r[1], S) for r in rows])


@pytest.mark.parametrize("name", CASES)
def test_derivatives_are_0_exactly_where_nothing_can_be_seen(name: str) -> None:
    changes, numbers, batches = CASES[name]
    config, hyper = SMALL.replace(**changes), Hyper(**numbers)
    given = {part: filler for parts in batches.values() for part, filler in FILLERS.items() if part in parts}
    if config.architecture == "encoder_decoder":
        given["source_BS"] = SOURCE
    for case, parts in batches.items():
        fed = batch(**(given | parts))
        may = predicted(config, hyper, fed)
        target, source = by_hand(config, hyper, parts)
        np.testing.assert_array_equal(may.target_BTT, target, err_msg=case)
        assert (may.source_BTS is None) == (source is None)
        if source is not None:
            np.testing.assert_array_equal(may.source_BTS, source, err_msg=case)
        slopes = measure(parameters(config), config, hyper, fed)
        found, dead = leaks(slopes, may), silent(slopes, may)
        assert found.largest == 0.0 and found.count == 0, (case, found)
        if config.normaliser in SPARSE:
            assert dead.count < 0.5 * np.sum(target), case  # most of what may be seen is
        else:
            assert dead.count == 0, (case, dead)


def test_random_masks_in_every_attention() -> None:
    """Padding and segments leave the cross mask alike in all rows that meet: here it is sparse, and layers count."""
    config = SMALL.replace(**BOTH, num_layers=3, num_encoder_layers=2, positions="none")
    p, hyper, rng = parameters(config), Hyper(), np.random.default_rng(31)
    own, source = (jnp.asarray(rng.random((1, 2, n, n)) < part) for n, part in ((T, 0.1), (S, 0.15)))
    cross = jnp.zeros((1, 1, T, S), bool).at[0, 0, jnp.array([1, 1, 4]), jnp.array([0, 3, 2])].set(True)
    nowhere = jnp.zeros((1, 1), jnp.int32)

    def outputs(x: jax.Array, y: jax.Array) -> jax.Array:
        assert p.encoder is not None and p.decoder is not None
        run = functools.partial(apply_stack, config=config, hyper=hyper, positions_BT=nowhere)
        memory, _ = run(p.encoder, y[None], mask=masks.dense(source))
        return run(p.decoder, x[None], mask=masks.dense(own), memory=memory, memory_mask=masks.dense(cross))[0][0]

    inputs = (jnp.asarray(rng.normal(size=(n, SMALL.D)), jnp.float32) for n in (T, S))
    slopes = [np.abs(np.asarray(d)).max(axis=(1, 3)) for d in jit(jax.jacrev(outputs, argnums=(0, 1)))(*inputs)]

    def pattern(layers: int, encoder_layers: int) -> list[np.ndarray]:
        found = reach(own, layers), reach_source(own, cross, reach(source, encoder_layers), layers)
        return [np.asarray(x[0]) for x in found]

    for slope, may in zip(slopes, pattern(3, 2), strict=True):
        np.testing.assert_array_equal(slope > 0, may)
    # One layer more or fewer, of either stack, is another pattern here.
    for layers, encoder_layers in ((2, 2), (4, 2), (3, 1), (3, 3)):
        assert np.any(pattern(layers, encoder_layers)[1] != pattern(3, 2)[1])


def test_a_leak_between_rows_is_found() -> None:
    slopes = measure(parameters(SMALL), SMALL, Hyper(), batch())
    may = predicted(SMALL, Hyper(), batch())
    assert np.all(np.diag(np.asarray(slopes.rows_BB)) > 0)
    found = leaks(slopes._replace(rows_BB=slopes.rows_BB.at[0, 1].set(1e-9)), may)
    assert found.where["rows"].tolist() == [[0, 1]] and found.count == 1
