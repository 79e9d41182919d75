"""Seconds per training step of 42 M parameters, by how its weights are laid out.

    make bench BENCH=layouts
    make bench BENCH=layouts ARGS="--rounds 7 --only base,fused_qkv"

Batch 4 x 256, D512 N8 H64 L12 F1376 V8192, RMSNorm, SwiGLU, RoPE, tied, float32, AdamW with
clipping to 1. The variants are written out here, apart from the library, because they differ
in what its parameter names fix; those named `library` are its own step. They take turns, so that a change
of the machine's speed meets them all: only ratios within one run mean anything.
"""

import argparse
import dataclasses
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from transformer_jax.batch import Batch
from transformer_jax.config import Config, Hyper
from transformer_jax.train import init_state, train_step

B, T, D, N, H, L, F, V = 4, 256, 512, 8, 64, 12, 1376, 8192


@dataclasses.dataclass(frozen=True)
class Layout:
    """One way to write the step. heads_apart: weights [D, N, H] instead of [D, N H]."""

    fused_qkv: bool = False
    fused_glu: bool = False
    heads_apart: bool = False
    listed: bool = False  # a list of layers instead of stacked arrays
    unroll: int = L
    loss_chunks: int = 1  # over V, recomputed in the backward pass
    clip: bool = True


LAYOUTS = {
    "base": Layout(),
    "heads_apart": Layout(heads_apart=True),
    "fused_qkv": Layout(fused_qkv=True),
    "fused_glu": Layout(fused_glu=True),
    "listed": Layout(listed=True),
    "unroll_1": Layout(unroll=1),
    "unroll_2": Layout(unroll=2),
    "unroll_4": Layout(unroll=4),
    "loss_chunks_4": Layout(loss_chunks=4),
    "no_clip": Layout(clip=False),
}
LIBRARY = Config(
    vocab_size=V, d_model=D, num_layers=L, num_heads=N, d_ff=F, ffn="swiglu", ffn_bias=False, norm="rmsnorm",
    scale_embeddings=False, optimizer="adamw", terms=("clip",), scan_unroll=0, seq_len=T, batch_size=B,
)  # fmt: skip
LIBRARIES = {
    "library": LIBRARY,
    "library_scan": LIBRARY.replace(scan_unroll=1),
    "library_blockwise": LIBRARY.replace(attention_implementation="blockwise"),
    "library_loss_chunks_4": LIBRARY.replace(loss_chunks=4),
}


def init(layout: Layout) -> dict:
    def layer(key):
        k = jax.random.split(key, 7)

        def w(i, *shape):
            return jax.random.normal(k[i], shape) * shape[0] ** -0.5

        heads = (N, H) if layout.heads_apart else (N * H,)
        p = {"n1": jnp.ones(D), "n2": jnp.ones(D), "wo": w(3, N * H, D), "w2": w(6, F, D)}
        if layout.heads_apart:
            p["wo"] = p["wo"].reshape(N, H, D)
        p |= {"qkv": w(0, D, 3 * N * H)} if layout.fused_qkv else {n: w(i, D, *heads) for i, n in enumerate("qkv")}
        return p | ({"w1g": w(4, D, 2 * F)} if layout.fused_glu else {"w1": w(4, D, F), "wg": w(5, D, F)})

    keys = jax.random.split(jax.random.key(0), L)
    layers = [layer(k) for k in keys] if layout.listed else jax.vmap(layer)(keys)
    return {"embed": jax.random.normal(jax.random.key(1), (V, D)) * D**-0.5, "layers": layers, "nf": jnp.ones(D)}


def rms(x, w):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * w


def rotate(x, cos, sin):
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def apply_layer(layout, p, x, cos, sin, mask):
    y = rms(x, p["n1"])
    if layout.fused_qkv:
        q, k, v = (z.reshape(B, T, N, H) for z in jnp.split(y @ p["qkv"], 3, -1))
    elif layout.heads_apart:
        q, k, v = (jnp.einsum("btd,dnh->btnh", y, p[n]) for n in "qkv")
    else:
        q, k, v = ((y @ p[n]).reshape(B, T, N, H) for n in "qkv")
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    s = jnp.einsum("btnh,bsnh->bnts", q, k) * H**-0.5
    w = jax.nn.softmax(jnp.where(mask, s, -jnp.inf), -1)
    o = jnp.einsum("bnts,bsnh->btnh", w, v)
    x = x + (jnp.einsum("btnh,nhd->btd", o, p["wo"]) if layout.heads_apart else o.reshape(B, T, N * H) @ p["wo"])
    y = rms(x, p["n2"])
    if layout.fused_glu:
        a, g = jnp.split(y @ p["w1g"], 2, -1)
    else:
        a, g = y @ p["w1"], y @ p["wg"]
    return x + (jax.nn.silu(g) * a) @ p["w2"]


def loss(layout, params, ids):
    angle = jnp.arange(T)[:, None] * 1e4 ** (-jnp.arange(0, H, 2) / H)
    cos, sin = jnp.cos(angle)[:, None, :], jnp.sin(angle)[:, None, :]
    mask = jnp.tril(jnp.ones((T, T), bool))
    x = params["embed"][ids[:, :-1]]
    body = partial(apply_layer, layout)
    if layout.listed:
        for p in params["layers"]:
            x = body(p, x, cos, sin, mask)
    else:
        step = lambda x, p: (body(p, x, cos, sin, mask), None)  # noqa: E731
        x, _ = jax.lax.scan(step, x, params["layers"], unroll=layout.unroll)
    x = rms(x, params["nf"]).reshape(B * T, D)
    target = ids[:, 1:].reshape(-1)
    if layout.loss_chunks == 1:
        logits = x @ params["embed"].T
        return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, target[:, None], -1)[:, 0])
    # In chunks of V: the running log-sum-exp of the chunks, each recomputed in the backward pass.
    part = jax.checkpoint(lambda x, w: jax.nn.logsumexp(x @ w.T, -1))
    chunks = params["embed"].reshape(layout.loss_chunks, -1, D)
    log_z, _ = jax.lax.scan(lambda z, w: (jnp.logaddexp(z, part(x, w)), None), jnp.full(B * T, -jnp.inf), chunks)
    return jnp.mean(log_z - jnp.sum(x * params["embed"][target], -1))


def build(layout: Layout):
    """(state, step): the state is a tuple that the step takes and gives back, with a loss."""
    clip = [optax.clip_by_global_norm(1.0)] if layout.clip else []
    rule = optax.chain(*clip, optax.adamw(1e-3, weight_decay=0.01))

    def step(state, ids):
        params, moments = state
        value, grads = jax.value_and_grad(partial(loss, layout))(params, ids)
        updates, moments = rule.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    params = jax.jit(partial(init, layout))()
    return (params, rule.init(params)), jax.jit(step, donate_argnums=0)


def library(config: Config):
    """The project's own step."""
    hyper = Hyper(clip_norm=1.0)

    def step(state, ids):
        batch = Batch(tokens_BT=ids[:, :-1], targets_BT=ids[:, 1:], weights_BT=jnp.ones((B, T)))
        state, metrics = train_step(config, state, hyper, batch)
        return state, metrics["loss"]

    return jax.jit(lambda key: init_state(config, hyper, key))(jax.random.key(0)), jax.jit(step, donate_argnums=0)


def main() -> None:
    """A row for each layout: median and least seconds per step, ratio to `base`, compile seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    wanted = args.only.split(",") if args.only else [*LAYOUTS, *LIBRARIES]
    ids = jax.random.randint(jax.random.key(2), (B, T + 1), 0, V)
    made, compiled, times = {}, {}, {name: [] for name in wanted}
    for name in wanted:
        begun = time.perf_counter()
        state, step = library(LIBRARIES[name]) if name in LIBRARIES else build(LAYOUTS[name])
        made[name] = [jax.block_until_ready(step(state, ids))[0], step]
        compiled[name] = time.perf_counter() - begun
    for _ in range(args.rounds):
        for name, (state, step) in made.items():
            begun = time.perf_counter()
            made[name][0], value = step(state, ids)
            jax.block_until_ready(value)
            times[name].append(time.perf_counter() - begun)
    base = np.median(times[wanted[0]])
    print(f"{'layout':21} median   least  to {wanted[0]}  first call")
    for name in wanted:
        t = np.asarray(times[name])
        print(f"{name:21} {np.median(t):6.3f}  {t.min():6.3f}  {np.median(t) / base:7.3f}  {compiled[name]:6.1f} s")


if __name__ == "__main__":
    main()
