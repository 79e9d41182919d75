"""Collectives, read from a program's text: by hand-written programs with known counts and bytes, and by a real one."""

import jax
import jax.numpy as jnp
import pytest

from tests.quick import jit
from transformer_jax import collectives, sharding

TEXT = """
HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[4,8]{1,0})->f32[4,8]{1,0}}

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  ROOT %sum = f32[] add(%x, %x)
}

%inner (p.1: (s32[], f32[2,8])) -> (s32[], f32[2,8]) {
  %p.1 = (s32[], f32[2,8]{1,0}) parameter(0)
  %r.1 = (f32[2,8]{1,0:T(8,128)}, /*index=1*/bf16[3]{0}) all-reduce(%a), to_apply=%add, metadata={op_name="jit(f)/ffn"}
  ROOT %t = (s32[], f32[2,8]{1,0}) tuple(%i, %c)
}

%outer.2 (p.2: (s32[], f32[2,8])) -> (s32[], f32[2,8]) {
  %w = (s32[], f32[2,8]{1,0}) while(%p.2), condition=%test, body=%inner, backend_config={"known_trip_count":{"n":"5"}}
  %permute = f32[2,8]{1,0} collective-permute(%c), channel_id=3, source_target_pairs={{0,1},{1,0}}
  ROOT %t.2 = (s32[], f32[2,8]{1,0}) tuple(%i, %permute)
}

%test (p.3: (s32[], f32[2,8])) -> pred[] {
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

%branch (p.4: f32[2]) -> f32[6] {
  ROOT %gather = (f32[2]{0}, f32[6]{0}) all-gather-start(%p.4), replica_groups=[1,3]<=[3], dimensions={0}
}

ENTRY %main.1_spmd (p: f32[4,8]) -> f32[4,8] {
  %while.1 = (s32[], f32[2,8]{1,0}) while(%t), body=%outer.2, backend_config={"known_trip_count":{"n":"3"}}
  %while.2 = (s32[], f32[2,8]{1,0}) while(%t), condition=%test, body=%inner
  %scatter = f32[2,8]{1,0} reduce-scatter(%p), channel_id=9, replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%add
  %done = f32[6]{0} all-gather-done(%g)
  ROOT %c = f32[6]{0} conditional(%pred, %a, %a), branch_computations={%branch, %branch}
}
"""


def test_loops_multiply_and_bytes_are_those_of_the_larger_side() -> None:
    found = [(c.kind, c.count, c.bytes, c.bounded) for c in collectives.read(TEXT)]
    reduced = 2 * 8 * 4 + 3 * 2
    assert found == [
        ("all-reduce", 15, reduced, True),
        ("collective-permute", 3, 64, True),
        ("all-reduce", 1, reduced, False),
        ("reduce-scatter", 1, 64 * 4, True),
        ("all-gather", 1, 24, True),
        ("all-gather", 1, 24, True),
    ]
    assert collectives.read(TEXT)[0].place == "jit(f)/ffn"
    assert collectives.totals(collectives.read(TEXT))["all-reduce"] == (16, 16 * reduced)


def test_a_loop_counts_by_its_condition_where_its_trips_are_not_written() -> None:
    """As libtpu writes loops: the counter is compared with a constant of the condition's own."""
    bound = "  %n = u32[]{:T(128)} constant(7)\n  %other = u32[] constant(9)\n"
    text = TEXT.replace(
        "%test (p.3: (s32[], f32[2,8])) -> pred[] {\n", "%test (p.3: (s32[], f32[2,8])) -> pred[] {\n" + bound
    )
    found = [(c.kind, c.count, c.bounded) for c in collectives.read(text)][:3]
    assert found == [("all-reduce", 15, True), ("collective-permute", 3, True), ("all-reduce", 7, True)]


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ("f32[2,3]{1,0}", [24]),
        ("(bf16[4]{0}, s32[], /*index=2*/pred[7]{0})", [8, 4, 7]),
        ("f8e4m3fn[5]", [5]),
        ("c64[2]", [16]),
        ("u8[0,3]", [0]),
    ],
)
def test_bytes_of_shapes(shape: str, sizes: list[int]) -> None:
    assert collectives.shape_bytes(shape) == sizes


def test_a_scan_of_products_split_by_their_inner_axis() -> None:
    mesh = sharding.make_mesh({"model": 4})
    spread = sharding.shardings({"w_FD": jnp.zeros((8, 16))}, mesh)["w_FD"]
    w, x = (jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=spread) for _ in "wx")

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda y, _: (jnp.tanh(x.T @ (w @ y)), None), jnp.ones((16, 3)), length=6)[0]

    text = jit(f).lower(x, w).compile().as_text()
    found = collectives.totals(collectives.read(text))
    assert found == {"all-reduce": (6, 6 * 16 * 3 * 4)}
