"""A run as a pure function: init_state, train_step, eval_step, run. No mesh, no files, no flags."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from flax import struct

from transformer_jax import keys
from transformer_jax.batch import Batch
from transformer_jax.config import Config, Hyper
from transformer_jax.encoder_decoder import Transformer, forward, hidden, init_transformer, logits_of
from transformer_jax.errors import ConfigError
from transformer_jax.layers import UNCONSTRAINED, Constrain
from transformer_jax.losses import Sums, cross_entropy
from transformer_jax.optim import clip, global_norm, learning_rate, optimizer

Metrics = dict[str, jax.Array]


@struct.dataclass
class TrainState:
    """All that a run must keep. step: int32, updates made. key: the run's own, never advanced.

    Every draw is a function of (key, step): a restored run continues as if never stopped.
    ema: the moving average of the parameters; None where the config lacks the term.
    """

    step: jax.Array
    params: Transformer
    opt_state: Any
    key: jax.Array
    ema: Transformer | None = None

    @property
    def weights(self) -> Transformer:
        """What a model is judged by and used with: the averaged parameters where they are kept."""
        return self.params if self.ema is None else self.ema


def init_state(config: Config, hyper: Hyper, key: jax.Array) -> TrainState:
    """Fresh parameters and moments from the run's key (copied: donating the state leaves the caller's key)."""
    params = init_transformer(keys.named(key, "init"), config)
    rule: Any = optimizer(config, hyper)
    # A copy: the average and the parameters are donated apart.
    ema = jax.tree.map(jnp.copy, params) if config.has("ema") else None
    return TrainState(jnp.zeros((), jnp.int32), params, rule.init(params), jax.random.clone(key), ema)


def batch_key(key: jax.Array, step: jax.Array) -> jax.Array:
    """The key of the batch of `step`: it depends on the run's key alone, so arms share batches."""
    return jax.random.fold_in(keys.named(key, "data"), step)


def token_sums(
    params: Transformer,
    config: Config,
    hyper: Hyper,
    batch: Batch,
    key: jax.Array | None = None,
    constrain: Constrain = UNCONSTRAINED,
) -> Sums:
    """Forward and loss: sums over the batch's counted tokens.

    With config.loss_chunks the logits of a part of the positions exist at a time, and are
    computed again in the backward pass. Experts add their losses for each routed token.
    """
    with constrain.scope():
        x, seen = hidden(params, config, hyper, batch, key, constrain=constrain)

        def of(x: jax.Array, targets: jax.Array, weights: jax.Array) -> Sums:
            logits = constrain(logits_of(params, config, hyper, x), "BTV")
            with jax.named_scope("loss"):
                return cross_entropy(
                    logits,
                    targets,
                    weights,
                    label_smoothing=hyper.label_smoothing if config.has("label_smoothing") else None,
                    z_loss=hyper.z_loss if config.has("z_loss") else None,
                )

        sums = in_chunks(of, config.loss_chunks, x, batch.targets_BT, batch.weights_BT)
    if seen.experts is None:
        return sums
    return dataclasses.replace(sums, objective=sums.objective + seen.experts.weighted(hyper), experts=seen.experts)


def in_chunks(of: Callable[..., Sums], chunks: int, *arrays: jax.Array) -> Sums:
    """of(*arrays) as a sum over `chunks` parts of their axis 1 (T), one part in memory at a time.

    Where T is no multiple the last part is filled with zeros, which weigh nothing.
    """
    if chunks == 1:
        return of(*arrays)
    T = arrays[0].shape[1]
    size = -(-T // chunks)

    def parts(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, 0), (0, chunks * size - T), *[(0, 0)] * (x.ndim - 2)])
        return jnp.moveaxis(x.reshape(x.shape[0], chunks, size, *x.shape[2:]), 1, 0)

    part = jax.checkpoint(of)
    add = lambda sums, xs: (sums + part(*xs), None)  # noqa: E731
    return jax.lax.scan(add, Sums.zero(), tuple(map(parts, arrays)))[0]


def backward_scale(config: Config, batch: Batch) -> float:
    """What the sum over a batch's tokens is multiplied by in the backward pass; 1 but in float16.

    There a weight's gradient overflows as a sum over tokens, while small ones are lost in a mean: divided by
    131,072 tokens, the gradient was 1.3% off (D32 L2); by about the root, 0.05%, as of a sum that fits. A power of
    two rounds nothing.
    """
    return 2.0 ** -round(math.log2(batch.tokens_BT.size) / 2) if config.compute_dtype == "float16" else 1.0


def gradients(
    params: Transformer,
    config: Config,
    hyper: Hyper,
    batch: Batch,
    key: jax.Array | None = None,
    constrain: Constrain = UNCONSTRAINED,
) -> tuple[Transformer, Sums]:
    """Gradient of the mean objective over the whole batch, and the sums; 0 where no token counts.

    With config.accumulation = A the rows are taken in A parts whose *sums* are added and
    divided once: the same number as one big batch, however tokens fall into parts. A part
    whose gradient is not finite is in the sum too: as in the big batch, none is left out.
    What has one row for all (positions may) is each part's. Raises ConfigError for rows that A does not divide.
    """

    def of(part: Batch, part_key: jax.Array | None) -> tuple[Transformer, Sums]:
        scale = backward_scale(config, part)

        def objective(p: Transformer) -> tuple[jax.Array, Sums]:
            sums = token_sums(p, config, hyper, part, part_key, constrain)
            return sums.objective if scale == 1.0 else sums.objective * scale, sums

        # Backward passes of custom rules are traced here, outside of what the model sets.
        with jax.default_matmul_precision(config.matmul_precision):
            grads, sums = jax.grad(objective, has_aux=True)(params)
        return grads if scale == 1.0 else jax.tree.map(lambda g: g / scale, grads), sums

    if config.accumulation == 1:
        grads, sums = of(batch, key)
    else:
        A = config.accumulation
        B = batch.tokens_BT.shape[0]
        if B % A:
            raise ConfigError(f"accumulation={A} does not divide a batch of {B} rows")
        # What has one row for all has it in each part.
        whole = jax.tree.map(lambda x: jnp.broadcast_to(x, (A, *x.shape[1:])) if x.shape[0] == 1 else x, batch)
        parts = jax.tree.map(lambda x: x.reshape(A, x.shape[0] // A, *x.shape[1:]), whole)

        def add(carry: tuple[Transformer, Sums], xs: tuple[Batch, jax.Array]) -> tuple[tuple, None]:
            part, i = xs
            new = of(part, None if key is None else jax.random.fold_in(key, i))
            return jax.tree.map(jnp.add, carry, new), None

        zero = (jax.tree.map(jnp.zeros_like, params), Sums.zero(config.E > 0))
        (grads, sums), _ = jax.lax.scan(add, zero, (parts, jnp.arange(A)))
    return jax.tree.map(lambda g: g / sums.divisor.astype(g.dtype), grads), sums


def train_step(
    config: Config,
    state: TrainState,
    hyper: Hyper,
    batch: Batch,
    constrain: Constrain = UNCONSTRAINED,
) -> tuple[TrainState, Metrics]:
    """One update. Metrics, float32 scalars: loss and objective (nats per token), accuracy,
    grad_norm (before clipping), learning_rate (the one applied), tokens (counted); where the
    term is on, z_loss (its part of the objective); with experts, for a routed token,
    load_balance (1 where even), router_z, dropped (the part of its assignments).

    A non-finite gradient is applied as it is: a diverged run shows it in its loss.
    """
    key = jax.random.fold_in(keys.named(state.key, "dropout"), state.step)
    grads, sums = gradients(state.params, config, hyper, batch, key, constrain)
    norm = global_norm(grads)
    if config.has("clip"):
        grads = clip(grads, norm, jnp.asarray(hyper.clip_norm, jnp.float32))
    rule: Any = optimizer(config, hyper)
    updates, opt_state = rule.update(grads, state.opt_state, state.params)
    params: Any = optax.apply_updates(cast(Any, state.params), updates)
    metrics = {
        "loss": sums.loss,
        "objective": sums.objective / sums.divisor,
        "accuracy": sums.accuracy,
        "grad_norm": norm,
        "learning_rate": learning_rate(config, hyper, state.step),
        "tokens": sums.count,
    }
    if config.has("z_loss"):
        metrics["z_loss"] = sums.z / jnp.maximum(sums.count, 1e-9)
    if sums.experts is not None:
        routed = sums.experts.mean()
        metrics |= {"load_balance": routed.load_balance, "router_z": routed.z, "dropped": routed.dropped}
    ema = None if state.ema is None else averaged(state.ema, params, hyper, state.step + 1)
    return TrainState(state.step + 1, params, opt_state, state.key, ema), metrics


def averaged(ema: Transformer, params: Transformer, hyper: Hyper, updates: jax.Array) -> Transformer:
    """The moving average after `updates` (1, 2, …) updates, the last of which gave `params`.

    ema += (1 - d) (params - ema), d = min(ema_decay, (1 + updates) / (10 + updates)): young averages forget
    quickly, so that nothing is left of the first parameters and no bias needs correction.
    """
    n = updates.astype(jnp.float32)
    decay = jnp.minimum(jnp.asarray(hyper.ema_decay, jnp.float32), (1.0 + n) / (10.0 + n))
    return jax.tree.map(lambda old, new: old + (1.0 - decay).astype(old.dtype) * (new - old), ema, params)


def eval_step(
    config: Config, params: Transformer, hyper: Hyper, batch: Batch, constrain: Constrain = UNCONSTRAINED
) -> Sums:
    """Sums over a batch, without dropout. Add them over batches, divide once."""
    return token_sums(params, config, hyper, batch, constrain=constrain)


def evaluate(
    config: Config,
    params: Transformer,
    hyper: Hyper,
    batch_of: Callable[[jax.Array], Batch],
    count: jax.Array | int,
    constrain: Constrain = UNCONSTRAINED,
) -> Sums:
    """Sums over batches 0…count-1 of `batch_of(index)`; count may be traced."""

    def add(i: jax.Array, sums: Sums) -> Sums:
        return sums + eval_step(config, params, hyper, batch_of(i), constrain)

    return jax.lax.fori_loop(0, count, add, Sums.zero(config.E > 0))


def evaluate_mixture(
    members: Sequence[tuple[Config, Hyper, Transformer]], batch_of: Callable[[jax.Array], Batch], count: jax.Array | int
) -> Sums:
    """As `evaluate`, for an ensemble: an id's probability is the mean of the members', as in beam.beam_search."""

    def logp(config: Config, hyper: Hyper, params: Transformer, batch: Batch) -> jax.Array:
        return jax.nn.log_softmax(forward(params, config, hyper, batch)[0])

    def add(i: jax.Array, sums: Sums) -> Sums:
        batch = batch_of(i)
        # The number of members is a constant under the loss's own softmax.
        total = functools.reduce(jnp.logaddexp, (logp(*member, batch) for member in members))
        return sums + cross_entropy(total, batch.targets_BT, batch.weights_BT)

    return jax.lax.fori_loop(0, count, add, Sums.zero())


def run(
    config: Config,
    hyper: Hyper,
    key: jax.Array,
    batch_of: Callable[[jax.Array], Batch],
    steps: int | None = None,
) -> tuple[TrainState, Metrics]:
    """A whole run, (config, hyper, key) -> (state, metrics [steps]); jit it, map it, vmap it.

    batch_of(key): the training batch of a key.
    """

    def step(state: TrainState, _: None) -> tuple[TrainState, Metrics]:
        return train_step(config, state, hyper, batch_of(batch_key(key, state.step)))

    return jax.lax.scan(step, init_state(config, hyper, key), None, length=config.steps if steps is None else steps)
