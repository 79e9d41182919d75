"""What attention does inside a run: scores, entropies, and gradients by path."""

from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.batch import Batch
from transformer_jax.config import Config, Hyper
from transformer_jax.encoder_decoder import forward, init_probe
from transformer_jax.errors import ConfigError
from transformer_jax.losses import cross_entropy
from transformer_jax.scores import score_factor


def attention_statistics(config: Config, hyper: Hyper, params: Any, batch: Batch) -> dict[str, jax.Array]:
    """Per layer L on a fixed batch, in evaluation mode.

    score_variance: of the scaled scores over visible pairs; dot_variance: of q.k itself.
    attention_entropy (nats) and attention_max: mean over rows. p_saturated: share of rows
    whose largest weight is above 0.999. Rows with one visible key are left out: they have nothing to choose.
    grad_q_*, grad_v_*: norms of the summed loss's gradient with respect to each query
    (value) vector, mean, median and 10th percentile over positions. grad_qk_norm,
    grad_vo_norm: norms of the gradients of the projection weights.
    Dense attention is asked, as only it has weights: blockwise and banded are the same function.
    """
    if config.architecture == "encoder":
        raise ConfigError("architecture=encoder: what attention does is measured in a decoder")
    if config.attention_implementation != "linear":
        config = config.replace(attention_implementation="dense")

    def objective(params: Any, probe: Any) -> tuple[jax.Array, Any]:
        logits, traces = forward(params, config, hyper, batch, probe=probe, trace=True)
        return cross_entropy(logits, batch.targets_BT, batch.weights_BT).nats, traces.decoder

    (weights, probes), trace = jax.grad(objective, argnums=(0, 1), has_aux=True)(params, init_probe(config, batch))
    visible = trace.allowed_BNTS
    rows = jnp.sum(visible, axis=-1) > 1  # [L, B, N, T]
    factor = score_factor(config.H, hyper.dk_exponent, hyper.attention_temperature)

    def over_rows(x_LBNT: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(rows, x_LBNT, 0), axis=(1, 2, 3)) / jnp.sum(rows, axis=(1, 2, 3))

    def variance(x_LBNTS: jax.Array) -> jax.Array:
        count = jnp.sum(visible, axis=(1, 2, 3, 4))
        mean = jnp.sum(jnp.where(visible, x_LBNTS, 0), axis=(1, 2, 3, 4)) / count
        gap = jnp.square(x_LBNTS - mean[:, None, None, None, None])
        return jnp.sum(jnp.where(visible, gap, 0), axis=(1, 2, 3, 4)) / count

    p = trace.weights_BNTS
    entropy = -jnp.sum(jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1)), 0), axis=-1)
    top = jnp.max(p, axis=-1)
    scores = variance(trace.scores_BNTS)
    out = {
        "score_variance": scores,
        "dot_variance": scores / jnp.square(factor),
        "attention_entropy": over_rows(entropy),
        "attention_max": over_rows(top),
        "p_saturated": over_rows((top > 0.999).astype(jnp.float32)),
    }
    attention = weights.decoder.layers.attention

    def norm(*grads: jax.Array) -> jax.Array:
        return jnp.sqrt(sum(jnp.sum(jnp.square(g), axis=(1, 2, 3)) for g in grads))

    out["grad_qk_norm"] = norm(attention.wq_DNH, attention.wk_DKH)
    out["grad_vo_norm"] = norm(attention.wv_DKH, attention.wo_NHD)
    for name, grads in (("q", probes.q_BTNH), ("v", probes.v_BSKH)):
        # Position 0 sees one key: its query has no gradient in any arm.
        sizes = jnp.linalg.norm(grads, axis=-1)[:, :, 1:].reshape(grads.shape[0], -1)
        out[f"grad_{name}_mean"] = jnp.mean(sizes, axis=1)
        out[f"grad_{name}_median"] = jnp.median(sizes, axis=1)
        out[f"grad_{name}_p10"] = jnp.percentile(sizes, 10, axis=1)
    return out
