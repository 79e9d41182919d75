"""The optional parts inside a whole model: position biases, experts, caps, implementations."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.quick import jit
from transformer_jax import masks, relative
from transformer_jax.batch import Batch
from transformer_jax.config import Config, Hyper, with_terms
from transformer_jax.encoder_decoder import Transformer, forward, hidden, init_transformer
from transformer_jax.errors import ConfigError
from transformer_jax.layers import apply_stack, implementation_for, position_bias
from transformer_jax.train import gradients, init_state, token_sums, train_step

B, T, S, V = 3, 7, 5, 11
HYPER = Hyper()


def small(**changes: Any) -> Config:
    sizes = {"vocab_size": V, "d_model": 6, "num_heads": 3, "head_dim": 2, "d_ff": 10, "seq_len": T, "batch_size": B}
    return Config(**{**sizes, **changes})


@functools.cache
def parameters(config: Config) -> Transformer:
    """Random in every leaf, so that no zero bias or table hides a fault."""
    fresh = init_transformer(jax.random.key(0), config)
    leaves, tree = jax.tree.flatten(fresh)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    return jax.tree.unflatten(
        tree, [x + 0.3 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    )


def batch(config: Config, **changes: Any) -> Batch:
    ids = jax.random.randint(jax.random.key(2), (B, T + 1), 0, V)
    source = jax.random.randint(jax.random.key(3), (B, S), 0, V) if config.architecture == "encoder_decoder" else None
    made = Batch(ids[:, :-1], ids[:, 1:], jnp.ones((B, T)), source_BS=source)
    return made.replace(**changes)


def logits(config: Config, data: Batch, hyper: Hyper = HYPER, params: Transformer | None = None) -> jax.Array:
    run = jit(forward, static_argnums=1)
    return run(params or parameters(config), config, hyper, data)[0]


@pytest.mark.parametrize("positions", ["none", "alibi"])
def test_a_bias_stands_beside_that_of_the_positions(positions: str) -> None:
    """Infinities above the diagonal are the causal mask, whatever else is added."""
    config = small(positions=positions)
    stack, x = parameters(config).decoder, jax.random.normal(jax.random.key(4), (B, T, config.D))
    assert stack is not None
    bias = relative.dense(jnp.where(jnp.tri(T, dtype=bool), 0.0, -jnp.inf))

    def out(mask: masks.Mask, bias: relative.Bias | None) -> jax.Array:
        positions_BT = jnp.arange(T)[None]
        run = jit(
            lambda stack: apply_stack(stack, x, config, HYPER, mask=mask, positions_BT=positions_BT, bias=bias)[0]
        )
        return run(stack)

    np.testing.assert_allclose(out(masks.full(), bias), out(masks.causal(), None), atol=1e-5)


@pytest.mark.parametrize("positions", ["alibi", "t5"])
def test_relative_positions_know_distances_alone(positions: str) -> None:
    config = small(positions=positions)
    data = batch(config, positions_BT=jnp.arange(T)[None])
    moved = logits(config, data.replace(positions_BT=jnp.arange(T)[None] + 500))
    np.testing.assert_allclose(moved, logits(config, data), atol=1e-5)
    np.testing.assert_allclose(logits(config, batch(config)), logits(config, data), atol=1e-5)  # slots by default
    stretched = logits(config, data.replace(positions_BT=jnp.arange(T)[None] * 2))
    assert float(jnp.max(jnp.abs(stretched - moved))) > 1e-2


def test_t5_buckets_look_one_way_where_the_mask_is_causal() -> None:
    config = small(positions="t5", architecture="encoder_decoder")
    params = parameters(config)
    assert params.decoder is not None and params.encoder is not None
    for stack, mask, bidirectional in (
        (params.decoder, masks.causal(), False),
        (params.decoder, masks.prefix_lm(3), True),
        (params.encoder, masks.padding(jnp.array([2])), True),
    ):
        bias = position_bias(stack, config, mask)
        assert bias is not None and stack.relative_CN is not None
        want = relative.t5(stack.relative_CN, distance=128, bidirectional=bidirectional).dense(T, T)
        np.testing.assert_array_equal(bias.dense(T, T), want)
    assert not np.array_equal(params.encoder.relative_CN, params.decoder.relative_CN)
    without = logits(config.replace(positions="none"), batch(config), params=params)
    assert float(jnp.max(jnp.abs(logits(config, batch(config)) - without))) > 1e-2


@pytest.mark.parametrize("architecture", ["decoder", "encoder_decoder"])
def test_tables_of_positions_are_trained(architecture: str) -> None:
    config = small(positions="t5", architecture=architecture, attention_sink=True, qk_norm=True)
    grads, _ = jit(gradients, static_argnums=1)(parameters(config), config, HYPER, batch(config))
    stacks = [stack for stack in (grads.encoder, grads.decoder) if stack is not None]
    for stack in stacks:
        leaves = (stack.relative_CN, stack.layers.attention.sink_N, stack.layers.attention.q_scale_H)
        assert all(float(jnp.max(jnp.abs(leaf))) > 1e-4 for leaf in leaves)


def test_final_softcap_bounds_the_logits() -> None:
    config = with_terms(small(), [Hyper(final_softcap=0.5)])
    plain, capped = logits(small(), batch(config)), logits(config, batch(config), Hyper(final_softcap=0.5))
    np.testing.assert_allclose(capped, 0.5 * np.tanh(np.asarray(plain) / 0.5), atol=1e-6)
    assert float(jnp.max(jnp.abs(plain))) > 0.5


def test_banded_attention_is_for_windows() -> None:
    config = small(attention_implementation="banded", mask="window")
    assert implementation_for(config, masks.window(3), 9) == "banded"
    assert implementation_for(config, masks.padding(jnp.array([3])), 9) == "dense"
    assert implementation_for(config.replace(attention_implementation="linear"), masks.full(), 9) == "linear"
    config = config.replace(architecture="encoder_decoder")
    hyper = Hyper(window=3)
    got = logits(with_terms(config, [hyper]), batch(config), hyper)
    dense, params = config.replace(attention_implementation="dense"), parameters(with_terms(config, [hyper]))
    np.testing.assert_allclose(got, logits(dense, batch(config), hyper, params), atol=1e-5)


def test_traces_are_refused_where_there_are_no_weights() -> None:
    config = small(attention_implementation="blockwise")
    with pytest.raises(ConfigError, match="blockwise attention cannot do weights: dense can"):
        jax.eval_shape(lambda p: forward(p, config, HYPER, batch(config), trace=True)[0], parameters(config))


# --- experts -----------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["decoder", "encoder", "encoder_decoder"])
def test_experts_add_their_losses_for_each_routed_token(architecture: str) -> None:
    config = small(num_experts=3, architecture=architecture, num_encoder_layers=1)
    lengths, source = jnp.array([7, 2, 4]), jnp.array([5, 1, 3])
    data = batch(config, lengths_B=lengths, weights_BT=(jnp.arange(T)[None] < lengths[:, None]).astype(jnp.float32))
    data = data.replace(source_lengths_B=source) if architecture == "encoder_decoder" else data
    seen = jit(hidden, static_argnums=1)(parameters(config), config, HYPER, data)[1].experts
    assert seen is not None
    routed = int(lengths.sum()) + (int(source.sum()) if architecture == "encoder_decoder" else 0)
    assert float(seen.tokens) == routed
    assert 0.5 * routed < float(seen.load_balance) < 3 * routed
    off, on = (
        jit(token_sums, static_argnums=1)(parameters(config), config, hyper, data)
        for hyper in (Hyper(load_balance=0.0, router_z_loss=0.0), Hyper(load_balance=0.5, router_z_loss=0.25))
    )
    np.testing.assert_allclose(on.objective - off.objective, 0.5 * seen.load_balance + 0.25 * seen.z, rtol=1e-4)
    np.testing.assert_allclose(off.objective, off.nats, rtol=1e-6)
    np.testing.assert_array_equal(on.nats, off.nats)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), on.experts, seen)


@pytest.mark.parametrize("factor", [0.0, 0.75])
def test_f1_experts_under_accumulation_give_the_step_of_one_batch(factor: float) -> None:
    config = small(num_experts=3, expert_capacity=factor, batch_size=6)
    ids = jax.random.randint(jax.random.key(4), (6, T + 1), 0, V)
    lengths = jnp.array([7, 1, 3, 6, 2, 5])
    data = Batch(ids[:, :-1], ids[:, 1:], (jnp.arange(T)[None] < lengths[:, None]).astype(jnp.float32), lengths)
    hyper = Hyper(load_balance=0.5, router_z_loss=0.1)
    run = jit(gradients, static_argnums=1)
    (whole, sums), (parts, added) = (
        run(parameters(c), c, hyper, data) for c in (config, config.replace(accumulation=3))
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), whole, parts)
    np.testing.assert_allclose(jax.tree.leaves(sums), jax.tree.leaves(added), rtol=1e-5)


def test_balance_spreads_tokens_over_experts() -> None:
    """From a router that sends nearly all to one expert, the load-balancing loss brings their shares together."""
    config = small(num_experts=4, experts_per_token=1, expert_capacity=0.0, num_layers=1, steps=40, seq_len=T)

    def balance(weight: float) -> float:
        hyper = Hyper(learning_rate=0.02, load_balance=weight, router_z_loss=0.0)
        state = init_state(config, hyper, jax.random.key(0))
        moe: Any = state.params.decoder.layers.ffn  # type: ignore[union-attr]
        layers = state.params.decoder.layers.replace(ffn=moe.replace(wr_DE=moe.wr_DE.at[..., 0].add(2.0)))  # type: ignore[union-attr]
        state = state.replace(params=state.params.replace(decoder=state.params.decoder.replace(layers=layers)))
        data = batch(config)
        step = jit(lambda state: train_step(config, state, hyper, data))
        for _ in range(40):
            state, metrics = step(state)
        assert float(metrics["dropped"]) == 0
        return float(metrics["load_balance"])

    assert balance(1.0) < 1.2 < 1.4 < balance(0.0)
