"""RoPE frequencies, as they were trained and stretched to a longer context.

A head turns pair i of its R rotated coordinates by position * base**(-2i/R). A model that was
trained on `original` positions reads `factor` times as many when its pairs turn more slowly:

    linear   every pair by the factor (Chen et al. 2023, position interpolation)
    ntk      a larger base, so that the fastest pair is kept and the slowest divided by the factor
    dynamic  the same, by what the row's own real tokens ask for; nothing changes within `original`
    yarn     pairs of many turns in `original` are kept, of few divided, a ramp over the pairs between
             (Peng et al. 2023); the attention factor sharpens the scores
    llama3   the same idea with the ramp over the turns instead of the pairs (Llama 3.1)

"Turns" are full circles of a pair within the original context: original * frequency / 2 pi.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from transformer_jax.config import ROPE_SCALINGS, Config, Hyper, check_value
from transformer_jax.errors import ConfigError, unknown

OWN_TURNS = {"yarn": (1.0, 32.0), "llama3": (1.0, 4.0)}  # slow, fast


class Scaled(NamedTuple):
    """Radians per position, float32 [R/2], [B or 1, R/2] or [B, T, R/2]; what cos and sin are multiplied by, []."""

    frequencies: jax.Array
    attention_factor: jax.Array


def frequencies(rotated: int, base: ArrayLike) -> jax.Array:
    """base**(-2i/R) for i in 0…R/2-1: float32 [R/2], radians per position.

    A power, not exp of a logarithm: the rounding of ln(base) alone would cost 5e-7.
    """
    return jnp.power(jnp.asarray(base, jnp.float32), _exponents(rotated, rotated))


def scaled_frequencies(
    kind: str,
    rotated: int,
    base: ArrayLike,
    *,
    factor: ArrayLike,
    original: int,
    slow: ArrayLike = 0.0,
    fast: ArrayLike = 0.0,
    attention_factor: ArrayLike = 0.0,
    length: ArrayLike | None = None,
) -> Scaled:
    """Frequencies of R = `rotated` coordinates, stretched as `kind` says, and the attention factor.

    kind, rotated, original are static; every other number may be traced. factor: at least 1.
    slow, fast: the turns below which yarn and llama3 divide a pair and above which they keep it;
    0: the kind's own (1 and 32, 1 and 4). attention_factor: 0 is the kind's own, which is
    0.1 ln(factor) + 1 for yarn and 1 for the others; kind "none" has no scaling to multiply.
    length: tokens of each row, integers [B] or one number, or [B, T] of each token's own document;
    dynamic alone reads it, and gives [B or 1, R/2] or [B, T, R/2] instead of [R/2].
    Raises ConfigError for an unknown kind, for dynamic without a length, and for known turns that leave
    nothing between slow and fast.
    """
    if kind not in ROPE_SCALINGS:
        raise unknown("rope_scaling", kind, ROPE_SCALINGS)
    full, own = frequencies(rotated, base), jnp.ones((), jnp.float32)
    if kind == "none":
        return Scaled(full, own)
    factor = jnp.asarray(factor, jnp.float32)
    if kind == "linear":
        made = full / factor
    elif kind == "ntk":
        made = full * _slower(rotated, factor)
    elif kind == "dynamic":
        if length is None:
            raise ConfigError("rope_scaling=dynamic depends on the length of each row, and none is given")
        # factor * length / original - (factor - 1), without its cancellation.
        excess = jnp.maximum(jnp.atleast_1d(jnp.asarray(length)) - original, 0) / original
        made = jax.vmap(lambda one: full * _slower(rotated, 1.0 + factor * one))(excess.reshape(-1))
        made = made.reshape(*excess.shape, -1)
    else:
        slow, fast = _turns(kind, slow, fast)
        if kind == "yarn":
            kept = _kept_by_pair(rotated, base, original, slow, fast)
            own = 0.1 * jnp.log(jnp.maximum(factor, 1.0)) + 1.0
        else:
            turns = original / (2 * math.pi) * full
            kept = (turns - slow) / jnp.maximum(fast - slow, 1e-6)
        kept, divided = jnp.clip(kept, 0.0, 1.0), full / factor
        # The select keeps a pair bit for bit; the sum alone would round it.
        made = jnp.where(kept < 1.0, divided + kept * (full - divided), full)
    return Scaled(made, _or(attention_factor, own))


def _exponents(rotated: int, over: int) -> np.ndarray:
    """-2i/over for the R/2 pairs."""
    return (-np.arange(0, rotated, 2) / over).astype(np.float32)


def _slower(rotated: int, stretch: jax.Array) -> jax.Array:
    """What a base larger by stretch**(R/(R-2)) multiplies each frequency by: [R/2].

    Written as a power of `stretch` itself, so that 1 changes no bit. R = 2 has only pair 0, which is kept.
    """
    return jnp.power(stretch, _exponents(rotated, max(rotated - 2, 1)))


def _or(value: ArrayLike, own: ArrayLike) -> jax.Array:
    """`value`, or `own` where it is 0."""
    value = jnp.asarray(value, jnp.float32)
    return jnp.where(value > 0, value, own)


def _turns(kind: str, slow: ArrayLike, fast: ArrayLike) -> tuple[jax.Array, jax.Array]:
    own_slow, own_fast = OWN_TURNS[kind]
    slow, fast = _or(slow, own_slow), _or(fast, own_fast)
    if not isinstance(slow, jax.core.Tracer) and not isinstance(fast, jax.core.Tracer) and np.any(slow >= fast):
        raise ConfigError(f"rope_slow={slow:g} is not below rope_fast={fast:g} (rope_scaling={kind})")
    return slow, fast


def _kept_by_pair(rotated: int, base: ArrayLike, original: int, slow: jax.Array, fast: jax.Array) -> jax.Array:
    """YaRN's ramp: 1 at the pair that makes `fast` turns, 0 at the one that makes `slow`, unclipped [R/2].

    The pair that makes r turns is R ln(original / (2 pi r)) / (2 ln base), rounded outwards; the
    bounds on it are those of the published code, R - 1 although there are R/2 pairs.
    """

    def pair(turns: jax.Array) -> jax.Array:
        return rotated * jnp.log(original / (2 * math.pi * turns)) / (2 * jnp.log(jnp.asarray(base, jnp.float32)))

    first = jnp.maximum(jnp.floor(pair(fast)), 0.0)
    last = jnp.minimum(jnp.ceil(pair(slow)), rotated - 1.0)
    # Equal ends are a step. An original context of few positions puts the last before the first: also a step.
    last = jnp.maximum(last, first + 0.001)
    return (last - jnp.arange(rotated // 2)) / (last - first)


# --- what Hugging Face's model files say ---------------------------------------------

_KINDS = {"default": "none"} | {kind: kind for kind in ROPE_SCALINGS if kind != "none"}
_NAMES = ("rope_type", "type")
_FIELDS = {
    "rope_theta": "rope_base",
    "partial_rotary_factor": "rope_fraction",
    "factor": "rope_factor",
    "original_max_position_embeddings": "rope_original_positions",
    "attention_factor": "rope_attention_factor",
    "beta_slow": "rope_slow",
    "beta_fast": "rope_fast",
    "low_freq_factor": "rope_slow",
    "high_freq_factor": "rope_fast",
}
_ANY = ("rope_theta", "partial_rotary_factor")
_REQUIRED = {
    "none": (),
    "linear": ("factor",),
    "ntk": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}
_OPTIONAL = {
    "linear": ("original_max_position_embeddings",),
    "ntk": ("original_max_position_embeddings",),
    "yarn": ("attention_factor", "beta_slow", "beta_fast", "mscale", "mscale_all_dim", "truncate"),
}


def from_hugging_face(parameters: Mapping[str, Any], max_position_embeddings: int | None = None) -> dict[str, Any]:
    """Config and Hyper fields by name from a `rope_scaling` (`type`) or `rope_parameters` (`rope_type`) dict.

    max_position_embeddings: the model's own. It is the original context of dynamic, and of yarn
    and llama3 where they leave original_max_position_embeddings out. A key that is null is absent.
    yarn's mscale and mscale_all_dim (DeepSeek-V2), where both stand and no attention_factor does, give
    (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1); one alone changes nothing.
    Raises ConfigError for an unknown kind or key, two kinds, a key that is missing, a value out of range.
    """
    given = {key: value for key, value in parameters.items() if value is not None}
    names = {str(given.pop(name)) for name in _NAMES if name in given} or {"default"}
    if len(names) > 1:
        raise ConfigError(f"RoPE scaling of two kinds: {' and '.join(f'{n}={parameters[n]!r}' for n in _NAMES)}")
    name = names.pop()
    if name not in _KINDS:
        raise unknown("RoPE scaling", name, _KINDS)
    kind = _KINDS[name]
    known = _ANY + _REQUIRED[kind] + _OPTIONAL.get(kind, ())
    for key in given:
        if key not in known:
            raise unknown(f"key of {name} RoPE scaling", key, known + _NAMES)
    if max_position_embeddings is not None and "original_max_position_embeddings" in _REQUIRED[kind]:
        if kind == "dynamic" or "original_max_position_embeddings" not in given:
            given["original_max_position_embeddings"] = max_position_embeddings
    if missing := [key for key in _REQUIRED[kind] if key not in given]:
        raise ConfigError(f"{name} RoPE scaling without {' and '.join(missing)}")
    if given.pop("truncate", True) is not True:
        raise ConfigError("yarn RoPE scaling with truncate=False: the ends of its ramp are whole pairs here")
    scales = given.pop("mscale", 0), given.pop("mscale_all_dim", 0)
    made: dict[str, Any] = {"rope_scaling": kind} | {_FIELDS[key]: value for key, value in given.items()}
    for settings in (Config, Hyper):
        for field in dataclasses.fields(settings):
            if field.name in made:
                check_value(f"{name} RoPE scaling", field, made[field.name])
    if not all(isinstance(scale, int | float) and scale >= 0 for scale in scales):
        raise ConfigError(f"mscale={scales[0]!r} and mscale_all_dim={scales[1]!r}: not numbers of at least 0")
    if all(scales) and "rope_attention_factor" not in made:
        above, below = (0.1 * scale * math.log(made["rope_factor"]) + 1.0 for scale in scales)
        made["rope_attention_factor"] = above / below
    if kind == "llama3" and not 0 < made["rope_slow"] < made["rope_fast"]:
        raise ConfigError(
            f"low_freq_factor={made['rope_slow']} and high_freq_factor={made['rope_fast']}: "
            "the first must be above 0 and below the second"
        )
    return made
