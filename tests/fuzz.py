"""Random models that must agree: the comparison, the search, and the call that shows a failure again.

A Case is one static configuration and a seed for everything that is traced: parameters, numbers
of Hyper, tokens, lengths, DRAWS of each in one program. What the case asks for is compared with
a second way to the same numbers:

    blockwise, banded    the model with dense attention, plain scan, plain loss
    dense, linear        the same with `naive` in the place of attend

`naive` is the textbook formula over all pairs, with masks and biases of its own. In float64 it
also judges the attention layer by itself, so that a fault that all implementations share is seen.
"""

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np

from tests.fuzz_cases import VOCAB, Case, cases
from tests.fuzz_naive import allowed_by, bias_by, naive, naive_attend
from tests.quick import jit
from transformer_jax import attention as attention_module
from transformer_jax import masks
from transformer_jax.batch import Batch
from transformer_jax.config import Config, Hyper
from transformer_jax.encoder_decoder import decoder_mask, forward, init_transformer
from transformer_jax.layers import Constrain, implementation_for, position_bias
from transformer_jax.scores import Scoring
from transformer_jax.train import token_sums

DRAWS = 4
# What two ways may differ by, over the largest entry of the quantity: units of the type's rounding (160
# are 2e-5 in float32; in the half types every product of a layer is rounded, in an order of its own),
# and NOISE times what one rounding of every parameter does to the quantity.
UNITS, HALF_UNITS, NOISE = 160, 8, 4


# --- what is traced ---------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def _shapes(config: Config) -> Any:
    return jax.eval_shape(lambda k: init_transformer(k, config), jax.random.key(0))


def traced(case: Case) -> tuple[Any, Any, Hyper, Batch, jax.Array, np.ndarray]:
    """Parameters, a direction in their space, Hyper, batch and dropout keys: DRAWS of each, from the seed."""
    rng, R, config = np.random.default_rng(case.traced), DRAWS, case.config
    shapes = _shapes(config)

    def weights(around: float) -> Any:
        def leaf(path: tuple, a: Any) -> np.ndarray:
            scale = "scale" in jax.tree_util.keystr(path[-1:])
            fan = a.shape[-2] if len(a.shape) > 1 else 4
            return (around * scale + rng.standard_normal((R, *a.shape)) / fan**0.5).astype(np.float32)

        return jax.tree_util.tree_map_with_path(leaf, shapes)

    def number(low: float, high: float, off: float | None = None) -> Any:
        made = rng.uniform(low, high, R)
        return (made if off is None else np.where(rng.random(R) < 0.3, off, made)).astype(np.float32)

    T, S, B = case.length, case.source, case.rows
    rates = {f"{name}_rate": number(0.1, 0.6, 0.0) for name in ("dropout", "attention_dropout", "activation_dropout")}
    plain = jax.tree.map(lambda x: np.full(R, x, np.float32), Hyper())
    hyper = plain.replace(
        attention_temperature=number(0.5, 2.0),
        dk_exponent=number(0.0, 1.0),
        attention_softcap=number(0.5, 3.0, 0.0),
        final_softcap=number(0.5, 3.0, 0.0),
        rope_base=number(2.0, 1000.0),
        rope_factor=number(1.0, 8.0, 1.0),
        rope_slow=number(0.1, 0.2, 0.0),
        rope_fast=number(0.5, 2.0, 0.0),
        rope_attention_factor=number(0.5, 2.0, 0.0),
        window=rng.integers(1, (case.band or T) + 1, R, dtype=np.int32),
        prefix=rng.integers(0, T + 1, R, dtype=np.int32),
        label_smoothing=number(0.1, 0.5, 0.0),
        z_loss=number(0.1, 0.5, 0.0),
        load_balance=number(0.1, 0.5, 0.0),
        router_z_loss=number(0.1, 0.5, 0.0),
        **rates,
    )

    def ints(low: int, high: int, *shape: int) -> Any:
        return rng.integers(low, high, (R, B, *shape), dtype=np.int32)

    both = case.architecture == "encoder_decoder"
    batch = Batch(
        tokens_BT=ints(0, VOCAB, T),
        targets_BT=ints(0, VOCAB, T),
        weights_BT=number(0.5, 2.0, 0.0)[:, None, None] * ints(0, 2, T).astype(np.float32) + np.eye(1, T, dtype="f"),
        lengths_B=ints(0, T + 1) if case.lengths else None,
        positions_BT=ints(0, 12, T) if case.places else None,
        segments_BT=ints(0, 2, T) if case.segments else None,
        source_BS=ints(0, VOCAB, S) if both else None,
        source_lengths_B=ints(0, S + 1) if both and case.lengths else None,
        source_positions_BS=ints(0, 12, S) if both and case.places else None,
        source_segments_BS=ints(0, 2, S) if both and case.segments else None,
    )
    x = rng.standard_normal((R, B, T, config.D)).astype(np.float32)
    return weights(1.0), weights(0.0), hyper, batch, jax.random.split(jax.random.key(case.traced), R), x


# --- the comparison ---------------------------------------------------------------


def self_mask(config: Config, hyper: Hyper, batch: Batch) -> masks.Mask:
    """The mask of the last stack's self-attention; an encoder hides padding and other segments only."""
    return decoder_mask(config.replace(mask="none") if config.architecture == "encoder" else config, hyper, batch)


def numbers(case: Case, config: Config, values: Any, plain: bool = False) -> dict[str, Any]:
    """By `case.order`: logits, also the objective's gradient, also a Hessian-vector product; of every draw.

    And the first layer's self-attention alone, of given inputs, without rotation or dropout.
    plain: with naive attention.
    """

    def one(
        params: Any, direction: Any, hyper: Hyper, batch: Batch, key: jax.Array, x_BTD: jax.Array
    ) -> dict[str, Any]:
        def objective(p: Any) -> tuple[jax.Array, jax.Array]:
            seen = []
            watch = Constrain(lambda x, letters: (seen.append(x) if letters == "BTV" else None, x)[1])
            made = token_sums(p, config, hyper, batch, key, watch).objective
            return made, seen[0] if config.loss_chunks == 1 else forward(p, config, hyper, batch, key)[0]

        made = {}
        if case.order == 0:
            made["logits"] = forward(params, config, hyper, batch, key)[0]
        elif case.order == 1:
            made["gradient"], made["logits"] = jax.grad(objective, has_aux=True)(params)
        else:
            both = jax.jvp(jax.grad(objective, has_aux=True), (params,), (direction,), has_aux=True)
            made["gradient"], made["hessian_vector"], made["logits"] = both
        if not plain and config is case.config:
            stack, mask = params.decoder or params.encoder, self_mask(config, hyper, batch)
            first = jax.tree.map(lambda w: w[0], stack.layers.attention)
            way, bias = implementation_for(config, mask, x_BTD.shape[1]), position_bias(stack, config, mask)
            layer = attention_module.attention(
                first, x_BTD, x_BTD, mask, config, hyper, bias=bias, implementation=way
            )  # fmt: skip
            made["layer"] = layer[0]
        return made

    def all_draws(arguments: tuple) -> dict[str, Any]:
        return jax.lax.map(lambda a: one(*a), arguments) if case.mapped else jax.vmap(one)(*arguments)

    own = attention_module.attend
    with mock.patch.object(attention_module, "attend", naive_attend if plain else own):
        return jax.device_get(jit(all_draws)(values))


def layer_in_float64(case: Case, values: Any) -> np.ndarray:
    """What `numbers` calls layer, by the formula: [R, B, T, D]."""
    config, out = case.config, []
    for r in range(DRAWS):
        params, _, hyper, batch, _, x = jax.tree.map(lambda a, r=r: a[r], values)
        stack, mask = params.decoder or params.encoder, self_mask(config, hyper, batch)
        bias = position_bias(stack, config, mask)
        p, x = jax.tree.map(lambda w: np.float64(w[0]), stack.layers.attention), np.float64(x)
        q, k, v = (np.einsum("btd,dnh->btnh", x, w) for w in (p.wq_DNH, p.wk_DKH, p.wv_DKH))
        if p.bq_NH is not None:
            q, k, v = q + p.bq_NH, k + p.bk_KH, v + p.bv_KH
        if config.qk_norm:
            sizes = (np.sqrt(np.mean(y**2, axis=-1, keepdims=True) + config.norm_epsilon) for y in (q, k))
            q, k = (y / size * w for y, size, w in zip((q, k), sizes, (p.q_scale_H, p.k_scale_H), strict=True))
        cap = float(hyper.attention_softcap) if config.has("attention_softcap") else None
        scoring = Scoring(
            float(hyper.dk_exponent), float(hyper.attention_temperature), cap, p.sink_N, config.normaliser
        )
        allowed = allowed_by(np, mask, case.length, case.length)
        added = bias_by(np, bias, config.N, case.length, case.length)
        y = naive(np, q, k, v, allowed, scoring, added, None, config.attention_implementation == "linear")
        out.append(np.einsum("btnh,nhd->btd", y, p.wo_NHD) + (0 if p.bo_D is None else p.bo_D))
    return np.stack(out)


def _rows(tree: Any, R: int) -> np.ndarray:
    return np.concatenate([np.float64(x).reshape(R, -1) for x in jax.tree.leaves(tree)], axis=1)


def _nudged(case: Case, values: tuple) -> tuple:
    """The draws, and twice again with every parameter changed by at most one rounding of the type."""
    rng = np.random.default_rng(case.traced)

    def near(w: np.ndarray) -> np.ndarray:
        return (w * (1 + case.epsilon * rng.uniform(-1, 1, w.shape))).astype(w.dtype)

    copies = [values, *((jax.tree.map(near, values[0]), *values[1:]) for _ in range(2))]
    return jax.tree.map(lambda *a: jnp.concatenate(a), *copies)


def compare(case: Case) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Of each quantity, for every draw: the largest difference over the quantity's scale, and what it may be."""
    config, values = case.config, traced(case)
    other = config.replace(scan_unroll=1, remat=False, loss_chunks=1)
    plain = case.attention_implementation in ("dense", "linear")
    if not plain:
        other = other.replace(attention_implementation="dense", attention_block=0, band=0)
    got = numbers(case, config, values)
    want = numbers(case, other, _nudged(case, values), plain)
    found, base = {}, (HALF_UNITS if case.half else UNITS) * case.epsilon
    for name in want:
        if name != "layer":
            a, b = _rows(got[name], DRAWS), _rows(want[name], 3 * DRAWS).reshape(3, DRAWS, -1)
            scale = np.maximum(np.max(np.abs(b[0]), axis=1), 1e-3)
            noise = np.max(np.abs(b[1:] - b[:1]), axis=(0, 2)) / scale
            found[name] = np.max(np.abs(a - b[0]), axis=1) / scale, base + NOISE * noise
    if not case.half:
        a, b = _rows(got["layer"], DRAWS), _rows(layer_in_float64(case, values), DRAWS)
        scale = np.maximum(np.max(np.abs(b), axis=1), 1e-3)
        found["layer"] = np.max(np.abs(a - b), axis=1) / scale, np.full(DRAWS, base)
    return found


def check(case: Case) -> dict[str, float]:
    """Of each quantity, the part of the case's draws that decide something: they may differ by less than half.

    Raises AssertionError where the two ways differ; whatever is raised carries the call that shows it again.
    """
    try:
        found = compare(case)
        for name, (differs, allowed) in found.items():
            for r in range(DRAWS):
                assert differs[r] <= allowed[r], (
                    f"{name} of draw {r} differ by {differs[r]:.2g} of their scale, allowed {allowed[r]:.2g}"
                )
    except Exception as error:
        error.add_note(case.call)
        raise
    return {name: float(np.mean(allowed < 0.5)) for name, (_, allowed) in found.items()}


def search(
    examples: int, *, seed: int = 0, check: Callable[[Case], Any] = check, implementation: str | None = None
) -> None:
    """Check the simplest case and as many drawn ones; of a failure, raise the smallest that fails.

    A search of its own for every case: within one, later examples are variations of earlier ones.
    """
    settings = hypothesis.settings(
        max_examples=2,
        derandomize=False,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
        suppress_health_check=list[Any](hypothesis.HealthCheck),
    )
    done = set()

    def once(case: Case) -> None:
        if case not in done:
            check(case)
            done.add(case)

    for i in range(examples):
        hypothesis.seed(seed + i)(settings(hypothesis.given(cases(implementation))(once)))()


def trace(case: Case) -> None:
    """Trace the forward pass of one draw: nothing is compiled."""
    values = jax.tree.map(lambda a: a[0], traced(case))
    jax.eval_shape(lambda p, h, b, k: forward(p, case.config, h, b, k), values[0], *values[2:5])
