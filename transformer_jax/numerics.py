"""One place for the numerics policy: half-precision products accumulate in float32."""

import jax
import jax.numpy as jnp

HALF = (jnp.bfloat16, jnp.float16)


def product(spec: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """einsum of x with w cast to x's type; accumulated in float32, returned in x's type."""
    w = w.astype(x.dtype)
    if x.dtype not in HALF:
        return jnp.einsum(spec, x, w)
    return jnp.einsum(spec, x, w, preferred_element_type=jnp.float32).astype(x.dtype)


def product_f32(spec: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """As `product`, but the float32 sums are returned: for scores and logits."""
    return jnp.einsum(spec, x, w.astype(x.dtype), preferred_element_type=jnp.float32)
