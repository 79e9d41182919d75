"""Faults to plant in the library, and the claims of the ledger that must see each."""

from typing import NamedTuple


class Planted(NamedTuple):
    """A fault: the only occurrence of `old` in a module's source becomes `new`."""

    name: str
    module: str
    old: str
    new: str
    claims: tuple[str, ...]


HALF = "turned = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)"
SCORES = "transformer_jax.scores"

MUTANTS = (
    Planted(
        "RoPE turns one coordinate the other way",
        "transformer_jax.rope", HALF, HALF.replace("a * cos - b * sin", "a * cos + b * sin"),
        ("A05", "A06", "A09"),
    ),
    Planted(
        "half and interleaved pairs mixed",
        "transformer_jax.rope",
        "a, b = head[..., : rotated // 2], head[..., rotated // 2 :]", "a, b = head[..., 0::2], head[..., 1::2]",
        ("A12",),
    ),
    Planted(
        "the angle in bfloat16",
        "transformer_jax.rope",
        "positions_BT[..., None].astype(jnp.float32) * turns",
        "positions_BT[..., None].astype(jnp.bfloat16).astype(jnp.float32) * turns",
        ("A10",),
    ),
    Planted(
        "scale off by the root of two",
        SCORES,
        "return jnp.power(jnp.float32(H), -jnp.asarray(dk_exponent, jnp.float32)) / jnp.asarray(temperature",
        "return 2**0.5 * jnp.power(jnp.float32(H), -jnp.asarray(dk_exponent, jnp.float32)) / jnp.asarray(temperature",
        ("B16", "H07"),
    ),
    Planted(
        "temperature multiplies",
        SCORES,
        "jnp.float32)) / jnp.asarray(temperature, jnp.float32)",
        "jnp.float32)) * jnp.asarray(temperature, jnp.float32)",
        ("B20",),
    ),
    Planted(
        "softmax without the largest score subtracted",
        SCORES, "powers = jnp.exp(scores - top)", "powers = jnp.exp(scores)", ("F09",),
    ),
    Planted(
        "softmax over the queries",
        SCORES,
        "total = jnp.sum(powers, axis=-1, keepdims=True)", "total = jnp.sum(powers, axis=-2, keepdims=True)",
        ("F01", "H06"),
    ),
    Planted(
        "a row that sees nothing divides by zero",
        SCORES, "total = jnp.where(some | (total > 0), total, 1)", "total = total", ("D02",),
    ),
    Planted(
        "hidden scores are -10,000",
        SCORES,
        "scores = jnp.where(allowed, scores, -jnp.inf)", "scores = jnp.where(allowed, scores, -1e4)",
        ("D09",),
    ),
    Planted(
        "ReLU weights of absolute scores",
        SCORES, "positive = jax.nn.relu(scores)", "positive = jnp.abs(scores)",
        ("F03",),
    ),
    Planted(
        "causal mask hides the query's own key",
        "transformer_jax.masks",
        "return block.k_positions <= block.q_positions\n", "return block.k_positions < block.q_positions\n",
        ("D07",),
    ),
    Planted(
        "causal is inverted",
        "transformer_jax.masks",
        "return block.k_positions <= block.q_positions\n", "return (block.k_positions >= block.q_positions)\n",
        ("D03", "D07", "D10", "D11"),
    ),
    Planted(
        "the inverted mask is causal",
        "transformer_jax.masks",
        "return block.k_positions >= block.q_positions", "return block.k_positions <= block.q_positions",
        ("D07", "D10"),
    ),
    Planted(
        "a window one key too wide",
        "transformer_jax.masks",
        "jnp.abs(block.q_positions - block.k_positions) < self.width",
        "jnp.abs(block.q_positions - block.k_positions) <= self.width",
        ("D13", "I03"),
    ),
    Planted(
        "padding shows one key too many",
        "transformer_jax.masks",
        "block.k_slots_S[None, None, None, :] < self.lengths_B",
        "block.k_slots_S[None, None, None, :] <= self.lengths_B",
        ("D12",),
    ),
    Planted(
        "the source's padding is seen by the decoder",
        "transformer_jax.encoder_decoder", "masks.cross(batch.source_lengths_B)", "masks.cross(None)", ("D12", "H14"),
    ),
    Planted(
        "epsilon outside the root",
        "transformer_jax.norms",
        "jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + epsilon)",
        "1 / (jnp.sqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True)) + epsilon)",
        ("C01", "C11"),
    ),
    Planted(
        "RMSNorm subtracts the mean",
        "transformer_jax.norms",
        "y = x.astype(jnp.float32)\n", "y = x.astype(jnp.float32) - jnp.mean(x, -1, keepdims=True)\n",
        ("C01", "C04"),
    ),
    Planted(
        "LayerNorm keeps the mean",
        "transformer_jax.norms", "x = x - jnp.mean(x, axis=-1, keepdims=True)", "x = x", ("C07", "C11"),
    ),
    Planted(
        "KL the wrong way round",
        "transformer_jax.losses", "return _weighted(_kl(logp, logq), weights, temperature)",
        "return _weighted(_kl(logq, logp), weights, temperature)",
        ("E12", "E14", "E15"),
    ),
    Planted(
        "a mean of token losses where their weighted sum belongs",
        "transformer_jax.losses",
        "return jnp.sum(jnp.where(counted, x * weights, 0.0))", "return jnp.mean(jnp.where(counted, x * weights, 0.0))",
        ("E01", "E02", "E04"),
    ),
    Planted(
        "entropy is a mean over classes",
        "transformer_jax.losses", "return -jnp.sum(jnp.where(p > 0, p *", "return -jnp.mean(jnp.where(p > 0, p *",
        ("E10", "E11"),
    ),
    Planted(
        "bits are nats",
        "transformer_jax.losses", "(jnp.asarray(num_bytes) * np.log(2.0))", "jnp.asarray(num_bytes)", ("E07", "E08"),
    ),
    Planted(
        "distillation without T squared",
        "transformer_jax.losses", "return jnp.square(jnp.asarray(temperature, jnp.float32)) *", "return", ("E15",),
    ),
    Planted(
        "targets are not shifted",
        "transformer_jax.data.tasks",
        "return Batch(row_BW[:, :-1], row_BW[:, 1:], weights_BT",
        "return Batch(row_BW[:, :-1], row_BW[:, :-1], weights_BT",
        ("E01", "E04"),
    ),
    Planted(
        "sampling multiplies by the temperature",
        "transformer_jax.samplers", "z = z / jnp.where(", "z = z * jnp.where(", ("F05", "F08"),
    ),
    Planted(
        "top-p leaves out the id that crosses p",
        "transformer_jax.samplers",
        "inside = (before < of_row.top_p)", "inside = (before + p < of_row.top_p)", ("F08",),
    ),
    Planted(
        "sines and cosines swapped",
        "transformer_jax.positions",
        "jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1)",
        "jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=-1)",
        ("G05", "G08"),
    ),
    Planted(
        "the period's exponent runs over d, not d/2 pairs",
        "transformer_jax.positions", "-np.arange(0, D, 2) / D", "-np.arange(0, D // 2) / D", ("G05", "G11"),
    ),
    Planted(
        "ALiBi favours what is far",
        "transformer_jax.relative", "return -self.slopes_N", "return self.slopes_N", ("D08",),
    ),
    Planted(
        "the feed-forward net sees its neighbour",
        "transformer_jax.ffn",
        'hidden = _shift(product("btd,df->btf", x_BTD, params.w1_DF), params.b1_F)',
        'hidden = _shift(product("btd,df->btf", jnp.roll(x_BTD, 1, axis=1), params.w1_DF), params.b1_F)',
        ("H12",),
    ),
    Planted(
        "Adam's rate is not negated",
        "transformer_jax.optim", "lambda step: -learning_rate(", "lambda step: learning_rate(", ("J02", "J04", "J06"),
    ),
)  # fmt: skip
