"""Chapter A: complex numbers, Euler's formula and rotary positions (S0 and S3, §2)."""

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims.record import Chapter, Curves, Numbers, Verdict, Words, at_least, at_most, near
from transformer_jax.rope import rotate, rotation

chapter = Chapter("A", Words("Complex numbers and rotary positions", "复数与旋转位置编码"))

H = 64  # width of a head in A10


a01 = chapter.claim(
    "A01",
    "S0 §2.1, S3 §2.1",
    Verdict.TRUE,
    Words(
        "Each multiplication by i is a quarter turn; four are a full one.", "每乘一次 i 转四分之一圈，乘四次转满一圈。"
    ),
    formula=r"i^4 = 1",
)


@a01.quick
def quarter_turns() -> Numbers:
    turns = np.cumprod(np.full(4, 1j))
    yield near("back", Words("|i⁴ − 1|", "|i⁴ − 1|"), abs(turns[-1] - 1), 0.0, dtype="complex128")
    angles = np.diff(np.unwrap(np.angle([1, *turns])))
    yield near(
        "angle", Words("each turn, in degrees", "每次转过的角度"), np.degrees(angles).mean(), 90.0, 1e-12, "complex128"
    )


a10 = chapter.claim(
    "A10",
    "S0 §2.4, S3 §2.4",
    Verdict.IMPRECISE,
    Words(
        "Shifting both tokens by 100 positions leaves the score strictly identical.",
        "两个词元同时右移 100 个位置，注意力得分分毫不差。",
    ),
    formula=r"\langle R_{m+100}\, q, R_{n+100}\, k \rangle = \langle R_m q, R_n k \rangle",
    finding=Words(
        "Exact in real numbers only: in float32 the score moves by {f100:.1e} at a shift of 100 and by "
        "{f1000000:.1e} at a million, because the angle mθ is rounded before its cosine is taken.",
        "只在实数运算中精确：float32 下位移 100 时得分变动 {f100:.1e}，位移一百万时变动 {f1000000:.1e}，"
        "因为取余弦之前角度 mθ 已被舍入。",
    ),
    uses=(rotation, rotate),
)


def shifted_scores(shift: int) -> jax.Array:
    """Scores of 64 random pairs of query and key at positions 2 and 5, all `shift` further: [64]."""
    q, k = jax.random.normal(jax.random.key(0), (2, 64, 1, 1, H))
    at = [rotation(jnp.full((1, 1), m + shift), H, 10_000.0) for m in (2, 5)]
    turned = (rotate(x, turn, "half") for x, turn in zip((q, k), at, strict=True))
    return jnp.einsum("btnh,btnh->b", *turned, precision="highest")


@a10.quick
def shifts() -> Numbers:
    here = shifted_scores(0)
    gaps = {shift: float(jnp.max(jnp.abs(shifted_scores(shift) - here))) for shift in (100, 1000, 10_000, 1_000_000)}
    for shift, gap in gaps.items():
        label = Words(f"max |Δscore| at a shift of {shift:,}", f"位移 {shift:,} 时的 max |Δ得分|")
        yield at_most(f"f{shift}", label, gap, 1e-7 * H * max(shift, 100) / 10, "float32")
    yield at_least("moved", Words("and it does move", "得分确有变动"), gaps[100], 1e-9, "float32")
    caption = Words("How far a shift moves the score, float32.", "位移使得分变动多少（float32）。")
    lines = {"max |Δscore|": (list(gaps), list(gaps.values()))}
    yield Curves(caption, "shift", "max |Δscore|", lines, log_x=True, log_y=True)


a14 = chapter.claim(
    "A14",
    "S0 §2",
    Verdict.UNVERIFIABLE,
    Words("RoPE needs nothing but high-school complex numbers.", "RoPE 只需要高中水平的复数知识。"),
    finding=Words("A statement about readers: no code can check it.", "这是关于读者的说法，代码无法检验。"),
)
