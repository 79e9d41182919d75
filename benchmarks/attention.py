"""Blockwise and banded attention against their goals.

    make bench BENCH=attention
    make bench BENCH=attention ARGS="--only ratio --rounds 9"

One causal head of 64 unless said otherwise, float32, forward and backward:
    memory   blockwise at T = 16,384 in a process of its own: peak resident bytes above those before
    growth   exponent of blockwise's bytes over T 512 ... 16,384, by the meter and by XLA
    time     exponent of banded attention's time (window 128) over the same lengths
    ratio    blockwise to dense at T = 1,024, by block size

Implementations take turns in rounds, so that a change of the machine's speed meets them all.
The median is of the rounds' own ratios; goals are on it. Nothing is asserted: read the last column.
"""

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.complexity import interleaved
from transformer_jax import masks
from transformer_jax.attention import attend
from transformer_jax.masks import Mask
from transformer_jax.meter import measure, slope

H, WINDOW = 64, 128
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
BLOCKS = (64, 128, 256, 512)
SHAPES = ((1, 1), (4, 8))  # batch, heads
PROBES = 10
GOALS = {"memory": 1.0, "growth": 1.05, "time": 1.1, "ratio": 1.3}


def program(implementation: str, mask: Mask, block: int = 0, backward: bool = True) -> Callable[..., Any]:
    """Attention of q, k, v; with the backward pass also of the output's cotangent."""

    def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        return attend(q, k, v, mask, implementation=implementation, block=block)

    def both(g: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        out, pull = jax.vjp(forward, q, k, v)
        return out, pull(g)

    return both if backward else lambda g, q, k, v: forward(q, k, v)


def inputs(T: int, B: int = 1, N: int = 1) -> list[jax.Array]:
    """Cotangent, q, k, v."""
    return [jax.random.normal(key, (B, T, N, H)) for key in jax.random.split(jax.random.key(0), 4)]


def row(name: str, measured: float, goal: float | None, unit: str = "", note: str = "") -> None:
    """A line of the table; without a goal, for information."""
    kept = "" if goal is None else ("kept" if measured <= goal else f"MISSED by {measured / goal - 1:.0%}")
    wanted = "" if goal is None else f"<= {goal:g}"
    print(f"{name:44} {measured:8.3f} {unit:4} {wanted:8} {kept:14} {note}".rstrip(), flush=True)


# --- memory --------------------------------------------------------------------------------------


def resident() -> tuple[int, int]:
    """(now, the most so far) resident bytes of this process.

    From /proc where there is one: getrusage's peak is handed on to a child, so that under a large
    parent it says nothing. Elsewhere getrusage's peak stands for both.
    """
    status = Path("/proc/self/status")
    if status.exists():
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        now, most = (int(lines[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
        return now, most
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return most, most


def child(T: int) -> None:
    """What the memory measurement's own process does: prints its readings as JSON."""
    args = jax.block_until_ready(inputs(T))
    before = resident()[0]
    compiled = jax.jit(program("blockwise", masks.causal())).lower(*args).compile()
    ready, compiling = resident()
    out = jax.block_until_ready(compiled(*args))
    rusage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    finite = all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(out))
    print(json.dumps({"before": before, "ready": ready, "compiling": compiling, "most": resident()[1],
                      "rusage": rusage * (1 if sys.platform == "darwin" else 1024), "finite": finite}))  # fmt: skip


def memory(T: int) -> None:
    command = [sys.executable, "-m", "benchmarks.attention", "--child", str(T)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    gib = {name: value / 2**30 for name, value in found.items()}
    assert found["finite"]
    note = f"{gib['before']:.3f} before, peak {gib['most']:.3f} (getrusage {gib['rusage']:.3f})"
    row(f"peak RSS, compiling and running, T {T:,}", gib["most"] - gib["before"], GOALS["memory"], "GiB", note)
    if found["most"] > found["compiling"]:
        row("    over what compiling left", gib["most"] - gib["ready"], None, "GiB")
    else:
        row("    of which before the run (its peak is compiling)", gib["compiling"] - gib["before"], None, "GiB")


def growth() -> None:
    """Exponents of the bytes, over all lengths and over the longer half, where constants weigh less."""
    f, found = program("blockwise", masks.causal()), {"meter, working bytes": [], "XLA, temporary bytes": []}
    for T in LENGTHS:
        args = [jax.ShapeDtypeStruct((1, T, 1, H), jnp.float32)] * 4
        found["meter, working bytes"].append(measure(f, *args).working_bytes)
        analysis: Any = jax.jit(f).lower(*args).compile().memory_analysis()
        found["XLA, temporary bytes"].append(analysis.temp_size_in_bytes)
    for name, values in found.items():
        note = " ".join(f"{value / 2**20:.1f}" for value in values) + " MiB"
        fit, tail = slope(LENGTHS, values), slope(LENGTHS[-3:], values[-3:])
        row(f"bytes exponent, {name}", fit.value, GOALS["growth"], note=f"± {fit.error:.3f}")
        row(f"    T {LENGTHS[-3]:,} and longer; {note}", tail.value, None)


# --- time --------------------------------------------------------------------------------------


def lengths(rounds: int) -> None:
    calls = {}
    for T in LENGTHS:
        f, args = jax.jit(program("banded", masks.window(WINDOW))), inputs(T)
        calls[T] = lambda f=f, args=args: f(*args)
    wall = interleaved(calls, rounds)
    user = interleaved(calls, rounds, clock=lambda: resource.getrusage(resource.RUSAGE_SELF).ru_utime)
    readings = {"median": (wall, np.median), "least": (wall, np.min), "median of user CPU": (user, np.median)}
    for name, (times, pick) in readings.items():
        seconds = [float(pick(times[T])) for T in LENGTHS]
        fit = slope(LENGTHS, seconds)
        note = f"± {fit.error:.3f}; " + " ".join(f"{1e6 * s / T:.2f}" for s, T in zip(seconds, LENGTHS, strict=True))
        row(f"banded time exponent, {name}", fit.value, GOALS["time"] if name == "median" else None, note=note)
    print(f"    (microseconds per position at T {', '.join(f'{T:,}' for T in LENGTHS)})")
    # What wall time has beyond user time: other processes, and the kernel's work for pages that are touched anew.
    for T in LENGTHS[:: len(LENGTHS) - 1]:
        before = resource.getrusage(resource.RUSAGE_SELF)
        for _ in range(PROBES):
            jax.block_until_ready(calls[T]())
        after = resource.getrusage(resource.RUSAGE_SELF)
        faults = (after.ru_minflt - before.ru_minflt) / PROBES
        kernel, own = after.ru_stime - before.ru_stime, after.ru_utime - before.ru_utime
        note = f"{faults:,.0f} page faults a call"
        row(f"    kernel's share of CPU time, T {T:,}", kernel / max(kernel + own, 1e-9), None, note=note)


def ratios(rounds: int, T: int) -> None:
    for (B, N), (kind, mask), backward in itertools.product(
        SHAPES, {"full": masks.full(), "causal": masks.causal()}.items(), (True, False)
    ):
        args, calls = inputs(T, B, N), {}
        for block in (0, *BLOCKS):
            f = jax.jit(program("blockwise" if block else "dense", mask, block, backward))
            calls[block] = lambda f=f, args=args: f(*args)
        times = {block: np.asarray(seconds) for block, seconds in interleaved(calls, rounds).items()}
        dense = times[0]
        passes = "forward and backward" if backward else "forward"
        print(f"batch {B}, heads {N}, {kind}, {passes}: dense {1e3 * np.median(dense):.1f} ms")
        for block in BLOCKS:
            ratio = float(np.median(times[block] / dense))
            note = f"{1e3 * np.median(times[block]):.1f} ms; of the least {times[block].min() / dense.min():.3f}"
            row(f"    block {block}", ratio, GOALS["ratio"], note=note)


def main() -> None:
    """Print a row for each measurement: measured, goal, whether it is kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default=",".join(GOALS), help="of " + ", ".join(GOALS))
    parser.add_argument("--child", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child)
        return
    parts = {
        "memory": lambda: memory(LENGTHS[-1]),
        "growth": growth,
        "time": lambda: lengths(args.rounds),
        "ratio": lambda: ratios(args.rounds, 1024),
    }
    wanted = args.only.split(",")
    if unknown := [name for name in wanted if name not in parts]:
        parser.error(f"--only={unknown[0]}: choose from {', '.join(parts)}")
    print(
        f"jax {jax.__version__}, {jax.devices()[0].device_kind}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}"
    )
    print(f"{'':44} measured      goal")
    for name in wanted:
        parts[name]()
    print(f"load at the end {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
