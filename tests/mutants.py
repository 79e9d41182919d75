"""Faults to plant in the library, and the claims of the ledger that must see each."""

from typing import NamedTuple


class Planted(NamedTuple):
    """A fault: the only occurrence of `old` in a module's source becomes `new`."""

    name: str
    module: str
    old: str
    new: str
    claims: tuple[str, ...]


MUTANTS = (
    Planted(
        "RoPE turns one coordinate the other way",
        "transformer_jax.rope",
        "turned = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)",
        "turned = jnp.concatenate([a * cos + b * sin, a * sin + b * cos], axis=-1)",
        ("A10",),
    ),
)
