"""Optimisers and schedules: an optax chain made inside the traced function.

`optimizer(config, hyper)` may be built with traced numbers: its arms differ in learning
rate without another compile. The learning rate is hyper.learning_rate times a unit shape
of the step; the shapes are ours because optax's raise on traced peaks.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from transformer_jax.config import Config, Hyper

# The schedules whose rates depend on how many steps there will be.
NEEDS_STEPS = ("cosine", "wsd")


def schedule_shape(config: Config, step: jax.Array) -> jax.Array:
    """The factor in (0, 1] that update number `step` (0, 1, …) is made with.

    Warm-up is linear: update k of w has (k+1)/w, so that no update is wasted at 0 and the
    peak is update w-1. Then
        constant      1
        inverse_sqrt  sqrt(w / (k+1))                       Vaswani et al. 2017 §5.3, peak 1
        cosine        (1 + cos(pi (k-w+1)/(steps-w+1))) / 2  never 0: lowest at the last update
        wsd           1, then linear over the last `decay` updates, lowest at the last
    Past the last step, cosine and wsd stay at their lowest.
    """
    k = jnp.minimum(step, config.steps - 1).astype(jnp.float32)
    w = float(config.warmup_steps)
    warm = jnp.minimum((step.astype(jnp.float32) + 1.0) / max(w, 1.0), 1.0)
    if config.schedule == "constant":
        after = jnp.float32(1.0)
    elif config.schedule == "inverse_sqrt":
        after = jax.lax.rsqrt(jnp.maximum(step.astype(jnp.float32) + 1.0, w) / max(w, 1.0))
    elif config.schedule == "cosine":
        # As a squared sine of what is left: 1 + cos near pi cancels to 0 in float32.
        left = jnp.minimum((config.steps - k) / (config.steps - w + 1.0), 1.0)
        after = jnp.square(jnp.sin(0.5 * jnp.pi * left))
    else:
        left = config.steps - k
        after = jnp.minimum(left / (config.decay + 1.0), 1.0)
    return warm * after


def learning_rate(config: Config, hyper: Hyper, step: jax.Array) -> jax.Array:
    """The rate that update number `step` is made with: what is applied is what is logged."""
    return jnp.asarray(hyper.learning_rate, jnp.float32) * schedule_shape(config, step)


def decays(params: Any) -> Any:
    """True for the leaves that weight decay acts on: weights and tables, not norms and biases.

    By name, as stacked layers give biases a second axis: `w…`, `embed…`, `source…`, `position…` decay.
    """

    def by_name(path: tuple, _: Any) -> bool:
        return str(getattr(path[-1], "name", "")).startswith(("w", "embed", "source", "position"))

    return jax.tree_util.tree_map_with_path(by_name, params)


def global_norm(grads: Any) -> jax.Array:
    """sqrt of the sum of squares over all leaves, float32 whatever their types."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads)))


def clip(grads: Any, norm: jax.Array, limit: jax.Array) -> Any:
    """Scale grads so that their global norm (given) is at most `limit`; limit 0: as they are.

    A zero gradient stays zero: the divisor is never below the limit.
    """
    factor = jnp.where(limit > 0, limit / jnp.maximum(norm, jnp.where(limit > 0, limit, 1.0)), 1.0)
    return jax.tree.map(lambda g: (g * factor).astype(g.dtype), grads)


def optimizer(config: Config, hyper: Hyper) -> optax.GradientTransformation:
    """adam, adamw (decoupled decay), sgd or momentum, times minus the scheduled rate.

    Kingma & Ba 2015; Loshchilov & Hutter 2019. Clipping is apart (`clip`): the norm that
    clips is the norm that is logged.
    """
    rules = []
    if config.optimizer in ("adam", "adamw"):
        rules.append(optax.scale_by_adam(b1=hyper.b1, b2=hyper.b2, eps=hyper.adam_epsilon, mu_dtype=jnp.float32))
    if config.optimizer == "adamw":
        rules.append(optax.add_decayed_weights(hyper.weight_decay, mask=decays))
    if config.optimizer == "momentum":
        rules.append(optax.trace(decay=hyper.momentum))
    rules.append(optax.scale_by_schedule(lambda step: -learning_rate(config, hyper, jnp.asarray(step))))
    return optax.chain(*rules)
