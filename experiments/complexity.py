"""What does attention cost, and how does it grow with the length?

    python launch.py --experiment=complexity --workdir=runs/complexity
    python launch.py --experiment=complexity --depth=full --workdir=runs/complexity_full

Time, FLOPs of the products and live bytes of dense, blockwise, banded and linear attention,
forward and with the backward pass, over lengths T: one causal head of 64, batch 1, window 128.
FLOPs and bytes are read from the program (transformer_jax.meter) and the FLOPs are held
against formulas derived by hand; times are medians of rounds in which the implementations
take turns. The slopes are exponents: 2 is quadratic.

Claims I01-I06, articles S1 §6.3 and S2 §9. Expected: dense 2 in all three, with a window mask
too; blockwise 2 in FLOPs and at most 1 in bytes; banded and linear 1. Times may grow faster
than FLOPs: arrays outgrow the caches, and large ones are paged in anew at every call. About a
minute on two cores; --depth=full, to T = 16,384 where memory allows, about seven on busy ones.
"""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments.flags import Settings
from experiments.interrupt import Stopper
from experiments.workdir import Workdir, open_workdir, read_json, versions
from transformer_jax import masks
from transformer_jax.attention import attend
from transformer_jax.banded import grouping
from transformer_jax.blockwise import BLOCK
from transformer_jax.config import Config, Hyper
from transformer_jax.errors import ConfigError
from transformer_jax.layers import apply_stack, init_stack
from transformer_jax.linear_attention import CHUNK
from transformer_jax.masks import Mask
from transformer_jax.meter import Cost, measure, slope

FLAGS = ("workdir", "overwrite", "depth")
TITLE = "What does attention cost, and how does it grow with T?"
WIDTH, WINDOW = 64, 128
LENGTHS = {"quick": (512, 1024, 2048, 4096), "full": (512, 1024, 2048, 4096, 8192, 16384)}
# Rounds of one length, and the seconds after which no further round begins (three are always run).
ROUNDS, SECONDS = 9, {"quick": 12.0, "full": 45.0}
LIMIT = 4 * 2**30  # bytes that a program may need by the meter's count, to be run
PAIRS_AT = 1024
MODEL_WIDTHS = (64, 128, 512)
METHODS = ("dense", "dense, window", "blockwise", "banded", "linear")
FORWARD, BOTH = "forward", "forward and backward"
DIRECTIONS = (FORWARD, BOTH)
NUMBERS = {"time": "median_seconds", "FLOPs": "products", "bytes": "working_bytes"}


def mask_of(name: str) -> Mask:
    """The mask of a method: a window of WINDOW keys, or causal."""
    return masks.window(WINDOW) if name in ("dense, window", "banded") else masks.causal()


def program(name: str, direction: str) -> Callable[..., Any]:
    """A method as a function of q, k, v [1, T, 1, H], with the backward pass also of the output's cotangent."""
    mask, implementation = mask_of(name), name.split(",")[0]

    def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        return attend(q, k, v, mask, implementation=implementation)

    def both(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array) -> Any:
        out, backward = jax.vjp(forward, q, k, v)
        return out, backward(g)

    return forward if direction == FORWARD else both


def arguments(T: int, direction: str) -> list[jax.Array]:
    """Normal q, k, v, and for the backward pass a cotangent."""
    keys = jax.random.split(jax.random.key(T), 3 if direction == FORWARD else 4)
    return [jax.random.normal(key, (1, T, 1, WIDTH)) for key in keys]


# --- counts --------------------------------------------------------------------------------


def by_hand(name: str, direction: str, T: int, H: int = WIDTH) -> int:
    """FLOPs of the products of one head, derived from what is multiplied; a multiply-add is two.

    With u = 2 H a pair of a query and a key, the cost of one q.k or of one weight times a value:

    dense      T² pairs: q.k, weights.v; backward dv, d(weights), dq, dk: 2 u, with backward 6 u.
    blockwise  T² pairs, T rounded up to blocks: q.k once more for the row maxima, and again when
               the backward pass makes the weights anew: 3 u, with backward 8 u. These are all
               blocks, the meter's dearest branch; `taken` leaves out those the mask skips.
    banded     each query against the keys of its own block and of those that the window reaches
               before it, with blocks of w/2 3 w/2 keys: 2 u, with backward 7 u, as q.k is made anew.
    linear     T queries, each with c keys of its chunk and the carried sum. With W = H + 1
               columns (the values, and ones): c (2 H + 2 W) inside, 2 H W to read the sum and
               2 H W to add to it; backward twice that, and q.k inside the chunk once more.
    """
    backward = direction != FORWARD
    if name == "blockwise":
        return (8 if backward else 3) * 2 * H * (_blocks(T)[0] * _blocks(T)[1]) ** 2
    if name == "banded":
        size = min(max(16, math.ceil(WINDOW / 2)), T)
        keys = (1 + math.ceil((WINDOW - 1) / size)) * size
        return (7 if backward else 2) * 2 * H * grouping(T, size)[0] * size * keys
    if name == "linear":
        size, W = min(CHUNK, T), H + 1
        rows = math.ceil(T / size) * size
        once = rows * (size * (2 * H + 2 * W) + 4 * H * W)
        return 3 * once + rows * size * 2 * H if backward else once
    return (6 if backward else 2) * 2 * H * T**2


def taken(name: str, direction: str, T: int) -> int:
    """`by_hand` without the blocks that a causal mask lets blockwise attention skip: n (n + 1) / 2 of n² are left."""
    number, blocks = by_hand(name, direction, T), _blocks(T)[0]
    return number * (blocks + 1) // (2 * blocks) if name == "blockwise" else number


def _blocks(T: int) -> tuple[int, int]:
    """Number and size of blockwise attention's blocks."""
    size = min(BLOCK, T)
    return math.ceil(T / size), size


def count(name: str, direction: str, T: int) -> Cost:
    """What the meter finds; nothing is run."""
    shape = jax.ShapeDtypeStruct((1, T, 1, WIDTH), jnp.float32)
    return measure(program(name, direction), *[shape] * (3 if direction == FORWARD else 4))


def pairs(T: int, width: int) -> dict[str, tuple[int, int]]:
    """Allowed (query, key) pairs of a row: kind -> (formula, counted from the mask)."""
    return {
        "full, n²": (T * T, masks.full().pairs(T, T)),
        "causal, n(n+1)/2": (T * (T + 1) // 2, masks.causal().pairs(T, T)),
        "window, nw − w(w−1)/2": (T * width - width * (width - 1) // 2, masks.window(width).pairs(T, T)),
    }


def crossing(d_model: int) -> int:
    """Length from which on dense attention's core (q.k, weights.v) costs more than all other products of its layer.

    The layer is the library's own, with a feed-forward net of 4 d. By hand: 4 n² d FLOPs against
    8 n d² for the projections and 16 n d² for the net: n > 6 d.
    """
    config = Config(vocab_size=2, d_model=d_model, num_heads=1, num_layers=1, positions="none")
    stack = jax.eval_shape(lambda key: init_stack(key, config, 1, cross=False), jax.random.key(0))

    def core_wins(T: int) -> bool:
        x, qkv = (jax.ShapeDtypeStruct((1, T, *rest), jnp.float32) for rest in ((d_model,), (1, d_model)))

        def layer(stack: Any, x: jax.Array) -> jax.Array:
            places = jnp.arange(T)[None]
            return apply_stack(stack, x, config, Hyper(), mask=masks.causal(), positions_BT=places)[0]

        core = measure(lambda q, k, v: attend(q, k, v, masks.causal()), qkv, qkv, qkv).products
        return 2 * core > measure(layer, stack, x).products

    low, high = 1, 2
    while not core_wins(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if core_wins(middle) else (middle, high)
    return high


def differences(T: int = 512) -> dict[str, float]:
    """Distance of each method's output from dense attention under the same mask, relative to its norm."""
    qkv = arguments(T, FORWARD)
    made = {name: jax.jit(program(name, FORWARD))(*qkv) for name in METHODS}
    model = {"blockwise": "dense", "banded": "dense, window", "linear": "dense"}
    gaps = {a: (made[a] - made[b], made[b]) for a, b in model.items()}
    return {name: float(jnp.linalg.norm(gap) / jnp.linalg.norm(whole)) for name, (gap, whole) in gaps.items()}


# --- times -----------------------------------------------------------------------------------


def interleaved(
    calls: Mapping[Any, Callable[[], Any]],
    rounds: int,
    seconds: float = math.inf,
    stopped: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Any, list[float]]:
    """Seconds of each call, in rounds in which all take their turn, there and back.

    A change of the machine's speed so meets them all. A short call is repeated to 5 ms and
    divided. Two calls of each come first, and are not counted: they compile, and say how long it
    is. After `seconds` no further round begins, if three have been run.
    """

    def timed(call: Callable[[], Any], repeats: int) -> float:
        begun = clock()
        for _ in range(repeats):
            jax.block_until_ready(call())
        return (clock() - begun) / repeats

    repeats, found = {}, {name: [] for name in calls}
    for name, call in calls.items():
        timed(call, 1)
        repeats[name] = max(1, math.ceil(5e-3 / max(timed(call, 1), 1e-6)))
    begun = clock()
    for done in range(rounds):
        if stopped() or (done >= 3 and clock() - begun > seconds):
            break
        for name in list(calls)[:: -1 if done % 2 else 1]:
            found[name].append(timed(calls[name], repeats[name]))
    return found


def summary(seconds: Sequence[float]) -> dict[str, Any]:
    """Median, least and number of times."""
    ordered, half = sorted(seconds), len(seconds) // 2
    median = ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
    return {"median_seconds": median, "least_seconds": ordered[0], "rounds": len(ordered)}


# --- the experiment ----------------------------------------------------------------------------


def rows_of(lengths: Sequence[int], limit: float = LIMIT) -> list[dict[str, Any]]:
    """Counts of every method, direction and length; `skipped` says why one is not to be run, "" otherwise."""
    rows = []
    for T in lengths:
        for direction in DIRECTIONS:
            for name in METHODS:
                cost = count(name, direction, T)
                over = f"needs {cost.peak_bytes / 2**30:.2f} GiB by the meter, limit {limit / 2**30:g} GiB"
                rows.append(
                    {
                        "method": name,
                        "direction": direction,
                        "T": T,
                        "products": cost.products,
                        "least_products": cost.least_products,
                        "by_hand": by_hand(name, direction, T),
                        "taken": taken(name, direction, T),
                        "working_bytes": cost.working_bytes,
                        "skipped": over if cost.peak_bytes > limit else "",
                    }
                )
    return rows


def add_times(rows: list[dict[str, Any]], rounds: int, seconds: float, stopped: Callable[[], bool]) -> bool:
    """Times of what is not skipped, written into the rows, a length at a time; False if it was stopped."""
    for T in dict.fromkeys(row["T"] for row in rows):
        run = [row for row in rows if row["T"] == T and not row["skipped"]]
        calls = {}
        for i, row in enumerate(run):
            compiled, inputs = jax.jit(program(row["method"], row["direction"])), arguments(T, row["direction"])
            calls[i] = lambda compiled=compiled, inputs=inputs: compiled(*inputs)
        found = interleaved(calls, rounds, seconds, stopped)
        if stopped():
            return False
        for i, row in enumerate(run):
            row.update(summary(found[i]))
    return True


def slopes_of(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Exponents in T of time, FLOPs and bytes with standard errors, for each method and direction."""
    found = []
    for direction in DIRECTIONS:
        for name in METHODS:
            mine = [row for row in rows if (row["method"], row["direction"]) == (name, direction)]
            entry: dict[str, Any] = {"method": name, "direction": direction}
            for label, field in NUMBERS.items():
                run = [row for row in mine if field in row]
                fit = slope([row["T"] for row in run], [row[field] for row in run]) if len(run) > 2 else None
                entry[label] = fit and {"value": fit.value, "error": fit.error}
            found.append(entry)
    return found


def results_of(depth: str, lengths: Sequence[int], rounds: int, stopped: Callable[[], bool]) -> dict[str, Any] | None:
    """Everything that complexity.json holds; None if it was stopped."""
    begun, load = time.monotonic(), os.getloadavg()[0]
    rows = rows_of(lengths)
    if not add_times(rows, rounds, SECONDS[depth], stopped):
        return None
    return {
        "experiment": "complexity",
        "title": TITLE,
        "depth": depth,
        "head_dim": WIDTH,
        "window": WINDOW,
        "block": BLOCK,
        "chunk": CHUNK,
        "rows": rows,
        "slopes": slopes_of(rows),
        "pairs": {"n": PAIRS_AT, "counts": pairs(PAIRS_AT, WINDOW), "article": math.comb(PAIRS_AT, 2)},
        "crossings": [{"d_model": d, "by_hand": 6 * d + 1, "length": crossing(d)} for d in MODEL_WIDTHS],
        "differences": differences(),
        "versions": versions(),
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
        "load": [load, os.getloadavg()[0]],
        "wall_seconds": time.monotonic() - begun,
    }


def run(settings: Settings) -> int:
    """Measure, write complexity.json and complexity.png, print; exit code 0, or that of the signal that stopped it."""
    if settings.overrides:
        raise ConfigError(f"--{min(settings.overrides)} has no effect in --experiment=complexity: leave it out")
    lengths = LENGTHS[settings.depth]
    identity = {"experiment": "complexity", "depth": settings.depth, "lengths": lengths, "head_dim": WIDTH}
    identity |= {"window": WINDOW, "block": BLOCK, "chunk": CHUNK}
    workdir = open_workdir(settings.workdir or "runs/complexity", identity, {}, overwrite=settings.overwrite)
    results = read_json(workdir.path / "complexity.json")
    if results is None:
        with Stopper() as stop:
            results = results_of(settings.depth, lengths, ROUNDS, lambda: bool(stop.reason))
            if results is None:
                print(f"{stop.reason}: times are of one sitting, and nothing was kept")
                return stop.exit_code
        workdir.write("complexity.json", results)
    show(workdir, results)
    return 0


def show(workdir: Workdir, results: Mapping[str, Any]) -> None:
    """Draw the picture where it is missing, and print the answer."""
    from experiments import plots_complexity

    path: Path = workdir.path / "complexity.png"
    if not path.exists():
        plots_complexity.draw(path, results)
    plots_complexity.print_results(results, workdir.path)
