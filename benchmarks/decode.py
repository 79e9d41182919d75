"""Milliseconds per token of greedy decoding, with the KV cache and without, one row and eight.

    make bench BENCH=decode
    make bench BENCH=decode ARGS="--rounds 5 --slots 1024"

D256 N4 L4 V256 on a prompt of half the slots; each row writes the same number of tokens. Without a
cache each token is a forward pass over all slots. Also: grouped heads, half
precision, a ring. The ways take turns, so that a change of the machine's speed meets them all: only
ratios within one run mean anything.
"""

import argparse
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.batch import Batch
from transformer_jax.cache import extend, init_cache, ring_slots
from transformer_jax.config import Config, Hyper
from transformer_jax.encoder_decoder import hidden, init_transformer, logits_of

CONFIG = Config(vocab_size=256, d_model=256, num_heads=4, num_layers=4)
WAYS = {
    "no cache": CONFIG,
    "cache": CONFIG,
    "cache, 1 key/value head": CONFIG.replace(num_kv_heads=1),
    "cache, bfloat16": CONFIG.replace(compute_dtype="bfloat16"),
    "ring of a window of 64": CONFIG.replace(mask="window"),
}
HYPER = Hyper(window=64)


def with_cache(config: Config, slots: int, tokens: int) -> Callable:
    """(params, prompt [B, S/2]) -> (cache, first id): filled; and (params, cache, id) -> the last id after `tokens`."""

    def greedy(params, x_BTD):
        return jnp.argmax(logits_of(params, config, HYPER, x_BTD[:, -1:])[:, 0], axis=-1).astype(jnp.int32)

    @jax.jit
    def fill(params, prompt_BT):
        B, T = prompt_BT.shape
        if config.mask == "window":
            cache, x = init_cache(config, B, ring_slots(HYPER.window, 64), piece=64), None
            for start in range(0, T, 64):
                x, cache = extend(params, config, HYPER, cache, prompt_BT[:, start : start + 64])
        else:
            x, cache = extend(params, config, HYPER, init_cache(config, B, slots), prompt_BT)
        return cache, greedy(params, x)

    @jax.jit
    def write(params, held):
        def step(held, _):
            x, cache = extend(params, config, HYPER, held[0], held[1][:, None])
            return (cache, greedy(params, x)), None

        return jax.lax.scan(step, held, length=tokens)[0][1]

    return lambda params, prompt: (write, fill(params, prompt))


def without_cache(config: Config, slots: int, tokens: int) -> Callable:
    """The same with a forward pass over all slots for each token."""

    @jax.jit
    def write(params, row_BS):
        def step(row_BS, t):
            x, _ = hidden(params, config, HYPER, Batch(row_BS, row_BS, jnp.ones(row_BS.shape)))
            last = jax.lax.dynamic_slice_in_dim(x, t, 1, axis=1)
            ids = jnp.argmax(logits_of(params, config, HYPER, last)[:, 0], axis=-1).astype(jnp.int32)
            return row_BS.at[:, t + 1].set(ids), ids

        return jax.lax.scan(step, row_BS, slots // 2 - 1 + jnp.arange(tokens))[1][-1]

    return lambda params, prompt: (write, jnp.pad(prompt, ((0, 0), (0, slots - prompt.shape[1]))))


def main() -> None:
    """Print a row for each way and batch: median milliseconds per token (of all rows together)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slots", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=32)
    asked = parser.parse_args()
    for B in (1, 8):
        prompt = jax.random.randint(jax.random.key(0), (B, asked.slots // 2), 0, CONFIG.V)
        calls, times = {}, {name: [] for name in WAYS}
        for name, config in WAYS.items():
            params = init_transformer(jax.random.key(1), config)
            # A pass over everything for each token is slow enough to be measured on few of them.
            tokens = max(1, asked.tokens // 8) if name == "no cache" else asked.tokens
            make = without_cache if name == "no cache" else with_cache
            write, held = make(config, asked.slots, tokens)(params, prompt)
            calls[name] = (write, params, held, tokens)
            jax.block_until_ready(write(params, held))
        for _ in range(asked.rounds):
            for name, (write, params, held, tokens) in calls.items():
                begun = time.perf_counter()
                jax.block_until_ready(write(params, held))
                times[name].append((time.perf_counter() - begun) / tokens)
        base = np.median(times["no cache"])
        for name in WAYS:
            ms = 1e3 * np.asarray(times[name])
            print(
                f"B{B} S{asked.slots} {name:26} {np.median(ms):8.2f} ms per token (least {ms.min():.2f}), "
                f"{base / np.median(times[name]):6.1f} times as fast as without a cache"
            )


if __name__ == "__main__":
    main()
