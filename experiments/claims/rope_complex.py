"""Chapter A, its first part: complex numbers and Euler's formula (S0 and S3, §2.1-2.3)."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims.drawn import U, normal
from experiments.claims.record import Chapter, Numbers, Verdict, Words, at_least, at_most, near
from transformer_jax.rope import Rotation, rotate, rotation
from transformer_jax.rope_scaling import Scaled, scaled_frequencies
from transformer_jax.scores import Scoring, attention_scores

chapter = Chapter("A", Words("Complex numbers and rotary positions", "复数与旋转位置编码"))

H, BASE = 64, 10_000.0
THETA = np.array([BASE ** (-2 * i / H) for i in range(H // 2)])
RAW = Scoring(dk_exponent=0.0)  # the dot product itself


def pair(z: complex) -> jax.Array:
    """A complex number as one head of two coordinates, [1, 1, 1, 2]."""
    return jnp.asarray([z.real, z.imag], jnp.float32).reshape(1, 1, 1, 2)


def number(x: Any) -> np.ndarray:
    """Heads of two coordinates as complex numbers: [..., 2] -> [...]."""
    pairs = np.asarray(x, np.float64)
    return pairs[..., 0] + 1j * pairs[..., 1]


def at(*places: int) -> jax.Array:
    """Positions [1, T]."""
    return jnp.asarray([places], jnp.int32)


def series(angles: np.ndarray) -> np.ndarray:
    """e^{iθ} from its power series: no cosine, no sine."""
    terms = [np.ones_like(angles, complex)]
    for k in range(1, 40):
        terms.append(terms[-1] * 1j * angles / k)
    return sum(reversed(terms), np.zeros_like(angles, complex))


a01 = chapter.claim(
    "A01",
    "S0 §2.1, S3 §2.1",
    Verdict.TRUE,
    Words(
        "Each multiplication by i is a quarter turn anticlockwise; four are a full one.",
        "每乘一次 i 逆时针转四分之一圈，乘四次转满一圈。",
    ),
    formula=r"1 \to i \to -1 \to -i \to 1",
    uses=(rotate,),
)


@a01.quick
def quarter_turns() -> Numbers:
    turns = np.cumprod(np.full(4, 1j))
    yield near("back", Words("|i⁴ − 1|", "|i⁴ − 1|"), abs(turns[-1] - 1), 0.0, dtype="complex128")
    angles = np.diff(np.unwrap(np.angle([1, *turns])))
    yield near(
        "angle", Words("each turn, in degrees", "每次转过的角度"), np.degrees(angles).mean(), 90.0, 1e-12, "complex128"
    )
    x, quarter, gaps = pair(1), Rotation(jnp.zeros((1, 1, 1)), jnp.ones((1, 1, 1))), []
    for place in (1j, -1, -1j, 1):
        x = rotate(x, quarter, "half")
        gaps.append(abs(number(x).item() - place))
    label = Words("the library's quarter turns, distance from i, −1, −i, 1", "本库的四次旋转与 i, −1, −i, 1 的距离")
    yield near("walked", label, max(gaps), 0.0, dtype="float32")


a02 = chapter.claim(
    "A02",
    "S0 §2.1",
    Verdict.WRONG,
    Words("After four multiplications by i the number is back at the origin.", "乘四次 i 之后回到原点。"),
    formula=r"1 \cdot i^4 = 1 \ne 0",
    finding=Words(
        "It is back where it started, at 1. The origin is 0, at distance {nearest:.0f} from every point on the way: a "
        "rotation keeps distances from it. (The English article says “start”, which is right.)",
        "它回到的是起点 1。原点是 0，途中每一点到原点的距离都是 {nearest:.0f}：旋转保持到原点的距离不变。"
        "（英文版写的是“起点”，没有错。）",
    ),
)


@a02.quick
def back_to_start() -> Numbers:
    z = np.cumprod([1, 1j, 1j, 1j, 1j])
    yield near("start", Words("|z₄ − 1|", "|z₄ − 1|"), abs(z[4] - 1), 0.0, dtype="complex128")
    nearest = np.abs(z).min()
    yield near("nearest", Words("least distance from 0", "到 0 的最小距离"), nearest, 1.0, dtype="complex128")


a03 = chapter.claim(
    "A03",
    "S0 §2.1, S3 §2.1",
    Verdict.IMPRECISE,
    Words("Multiplying complex numbers is rotation.", "复数的乘法就是旋转。"),
    formula=r"|zw| = |z|\,|w|, \quad \mathrm{arg}(zw) = \mathrm{arg}\, z + \mathrm{arg}\, w",
    finding=Words(
        "It is rotation and scaling: by w the length is multiplied by |w|, and only |w| = 1 leaves it. YaRN makes use "
        "of that: its factor on cosine and sine makes every rotated vector {stretched:.4f} times as long at four "
        "times the context.",
        "它是旋转加缩放：乘以 w 后长度变为 |w| 倍，只有 |w| = 1 时长度不变。YaRN 正利用了这一点：上下文扩展到四倍时，"
        "余弦和正弦上的系数使每个旋转后的向量变为原来的 {stretched:.4f} 倍长。",
    ),
    uses=(scaled_frequencies, rotation, rotate),
)


@a03.quick
def rotation_and_scaling() -> Numbers:
    rng = np.random.default_rng(3)
    z, w = rng.normal(size=(2, 1000)) + 1j * rng.normal(size=(2, 1000))
    longer = np.max(np.abs(np.abs(z * w) / (np.abs(z) * np.abs(w)) - 1))
    yield at_most("lengths", Words("max | |zw| / |z||w| − 1 |", "max | |zw| / |z||w| − 1 |"), longer, 2e-15)
    apart = np.angle(z * w) - np.angle(z) - np.angle(w)
    apart = np.max(np.abs(apart - 2 * np.pi * np.round(apart / (2 * np.pi))))
    yield at_most("angles", Words("max error of arg zw, mod 2π", "arg zw 的最大误差（模 2π）"), apart, 4e-15)

    @jax.jit
    def stretched(x: jax.Array) -> jax.Array:
        scaled = scaled_frequencies("yarn", H, BASE, factor=4.0, original=1024)
        return rotate(x, rotation(at(0, 1, 10, 100), H, BASE, scaled), "half")

    x = normal(3, 1, 4, 1, H)
    ratio = np.linalg.norm(np.asarray(stretched(x), float)) / np.linalg.norm(x.astype(float))
    label = Words("‖turned by YaRN‖ / ‖x‖, 1 + 0.1 ln 4", "YaRN 旋转后的长度之比，1 + 0.1 ln 4")
    yield near("stretched", label, ratio, 1 + 0.1 * math.log(4), 8 * U, "float32")


a04 = chapter.claim(
    "A04",
    "S0 §2.2, S3 §2.2",
    Verdict.TRUE,
    Words(
        "e^{iθ} is cos θ + i sin θ: 1 at 0, i at π/2, −1 at π, so that e^{iπ} + 1 = 0.",
        "e^{iθ} 等于 cos θ + i sin θ：θ 为 0、π/2、π 时分别是 1、i、−1，因而 e^{iπ} + 1 = 0。",
    ),
    formula=r"e^{i\theta} = \cos\theta + i\sin\theta",
    uses=(rotation,),
)


@a04.quick
def euler() -> Numbers:
    angles = np.linspace(-np.pi, np.pi, 101)
    gap = np.max(np.abs(series(angles) - (np.cos(angles) + 1j * np.sin(angles))))
    # Terms of size π^k / k! add up to e^π = 23, each rounded.
    label = Words("max |series of e^{iθ} − (cos θ + i sin θ)|", "max |e^{iθ} 的级数 − (cos θ + i sin θ)|")
    yield at_most("series", label, gap, 1e-14, "complex128")
    identity = abs(np.exp(1j * np.pi) + 1)
    yield at_most("identity", Words("|e^{iπ} + 1|", "|e^{iπ} + 1|"), identity, 2.0**-52, "complex128")
    quarter = Scaled(jnp.asarray([np.pi / 2], jnp.float32), jnp.float32(1))
    turn = rotation(at(0, 1, 2), 2, BASE, quarter)
    found = number(jnp.stack([turn.cos, turn.sin], axis=-1)).reshape(3)
    label = Words("the library at 0, π/2, π: distance from 1, i, −1", "本库在 0, π/2, π 处与 1, i, −1 的距离")
    yield at_most("landmarks", label, np.max(np.abs(found - [1, 1j, -1])), 2 * np.pi * U, "float32")


a05 = chapter.claim(
    "A05",
    "S0 §2.2, S3 §2.2",
    Verdict.CONDITIONAL,
    Words(
        "Multiplying by e^{iθ} leaves the length exactly as it is and turns anticlockwise by θ.",
        "乘以 e^{iθ} 时长度完全保持，只逆时针转过 θ 角。",
    ),
    formula=r"|z e^{i\theta}| = |z|",
    finding=Words(
        "Exactly only in exact arithmetic: over 4,096 positions the length of a head of 64 changes by up to {f32:.1e} "
        "of itself in float32 and {bf16:.1e} in bfloat16, a single pair by up to {bf16_pair:.1e}.",
        "只有在精确运算中才完全保持：在 4096 个位置上，宽度 64 的一个头的长度在 float32 下相对变动至多 {f32:.1e}，"
        "在 bfloat16 下至多 {bf16:.1e}，单独一对坐标至多 {bf16_pair:.1e}。",
    ),
    uses=(rotation, rotate),
)


@a05.quick
def lengths() -> Numbers:
    @jax.jit
    def turned(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        turn = rotation(jnp.arange(4096, dtype=jnp.int32)[None], H, BASE)
        return rotate(x.astype(jnp.float32), turn, "half"), rotate(x, turn, "half")

    def changes(x: np.ndarray, y: jax.Array) -> tuple[float, float]:
        """Largest relative change of a head's length, and of a pair's."""
        before, after = (np.asarray(z, np.float64).reshape(-1, 2, H // 2) for z in (x, y))
        heads = np.linalg.norm(after, axis=(1, 2)) / np.linalg.norm(before, axis=(1, 2))
        pairs = np.linalg.norm(after, axis=1) / np.linalg.norm(before, axis=1)
        return np.max(np.abs(heads - 1)), np.max(np.abs(pairs - 1))

    # cos, sin, two products and their sum are rounded: 4 U. A bfloat16 result is rounded once more, to 2^-8.
    x = normal(5, 1, 4096, 1, H).astype(jnp.bfloat16)
    single, half = (changes(x, y) for y in turned(x))
    label = Words("max relative change of length", "长度的最大相对变化")
    yield at_most("f32", label, single[0], 4 * U, "float32")
    yield at_most("bf16", label, half[0], 2.0**-8, "bfloat16")
    label = Words("of a pair", "单独一对坐标的")
    yield at_most("bf16_pair", label, half[1], 2.0**-8 + 4 * U, "bfloat16")
    # The largest of 4,096 roundings is far above a 64th of the bound.
    yield at_least("inexact", Words("and not exact", "确实不精确"), half[0], 2.0**-14, "bfloat16")
    one = number(rotate(pair(1 + 0j), rotation(at(1), 2, BASE), "half")).item()
    label = Words("angle at position 1, θ = 1", "位置 1 处转过的角度（θ = 1）")
    yield near("angle", label, np.angle(one), 1.0, 4 * U, "float32")


a06 = chapter.claim(
    "A06",
    "S0 §2.3, S3 §2.3",
    Verdict.TRUE,
    Words("By the addition theorems, the angles of two rotations add up.", "由两角和公式，两次旋转相乘时角度相加。"),
    formula=r"e^{i\alpha} e^{i\beta} = e^{i(\alpha + \beta)}",
    uses=(rotation, rotate),
)


@a06.quick
def angles_add() -> Numbers:
    a, b = np.random.default_rng(6).uniform(-np.pi, np.pi, (2, 1000))

    def turn(angle: np.ndarray) -> np.ndarray:
        return np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]).transpose(2, 0, 1)

    gap = np.max(np.abs(turn(a) @ turn(b) - turn(a + b)))
    yield at_most("matrices", Words("max |R(α)R(β) − R(α+β)|", "max |R(α)R(β) − R(α+β)|"), gap, 1e-15)

    @jax.jit
    def apart(x: jax.Array) -> jax.Array:
        first, second = at(*range(8)), at(3, 1, 4, 1, 5, 9, 2, 6)
        twice = rotate(rotate(x, rotation(first, H, BASE), "half"), rotation(second, H, BASE), "half")
        return twice - rotate(x, rotation(first + second, H, BASE), "half")

    x = normal(6, 1, 8, 1, H)
    gap = np.linalg.norm(np.asarray(apart(x), float), axis=-1) / np.linalg.norm(x.astype(float), axis=-1)
    # Three rotations of 4 U, and three angles of at most 14, each of two roundings.
    label = Words("turned by m, then by n, against m + n: relative", "先转 m 再转 n 与一次转 m + n 的相对差")
    yield at_most("library", label, np.max(gap), (12 + 3 * 2 * 14) * U, "float32")


a07 = chapter.claim(
    "A07",
    "S0 §2.4, S3 §2.4",
    Verdict.TRUE,
    Words(
        "The dot product of two plane vectors is the real part of one number times the other's conjugate.",
        "平面上两个向量的点积等于一个复数与另一个的共轭之积的实部。",
    ),
    formula=r"\vec q \cdot \vec k = \mathrm{Re}(q k^*)",
    uses=(attention_scores,),
)


@a07.quick
def conjugates() -> Numbers:
    q, k = normal(7, 2, 1000, 1, 1, 2)
    a, b = number(q).ravel(), number(k).ravel()
    real, size = np.real(a * b.conj()), np.abs(a) * np.abs(b)
    polar = size * np.cos(np.angle(a) - np.angle(b))
    label = Words(
        "max |Re qk* − |q||k| cos(arg q − arg k)| / |q||k|", "max |Re qk* − |q||k| cos(arg q − arg k)| / |q||k|"
    )
    yield at_most("polar", label, np.max(np.abs(real - polar) / size), 2e-15, "complex128")
    scores = np.asarray(attention_scores(jnp.asarray(q), jnp.asarray(k), RAW), np.float64).ravel()
    label = Words("the library's score against Re qk*, relative", "本库的得分与 Re qk* 的相对差")
    yield at_most("library", label, np.max(np.abs(scores - real) / size), 4 * U, "float32")


a08 = chapter.claim(
    "A08",
    "S0 §2.4",
    Verdict.IMPRECISE,
    Words("Each vector is rotated by as many turns as its position says.", "位置是几，向量就转几圈。"),
    formula=r"q_m = q\, e^{im\theta}",
    finding=Words(
        "By an angle, mθ radians: position 2 with θ = 1 makes {turns:.4f} of a turn. Whole turns would put every "
        "position in the same place.",
        "旋转的是角度 mθ（弧度）：θ = 1 时位置 2 只转 {turns:.4f} 圈。若按整圈旋转，所有位置都会落在同一处。",
    ),
    uses=(rotation, rotate),
)


@a08.quick
def turns() -> Numbers:
    turned = number(rotate(pair(1 + 0j), rotation(at(2), 2, BASE), "half")).item()
    label = Words("turns at position 2, 2/2π", "位置 2 处的圈数，2/2π")
    yield near("turns", label, np.angle(turned) / (2 * np.pi), 1 / np.pi, 4 * U, "float32")
    label = Words("moved by two whole turns", "转两整圈后的位移")
    yield at_most("whole", label, abs(np.exp(2j * np.pi * 2) - 1), 4 * np.pi * 2.0**-52, "complex128")
    label = Words("moved by two radians, 2 sin 1", "转两弧度后的位移，2 sin 1")
    yield near("moved", label, abs(turned - 1), 2 * math.sin(1), 8 * U, "float32")


# --- scores at two positions ----------------------------------------------------------------------


def queries_and_keys() -> tuple[jax.Array, jax.Array]:
    """64 random queries and keys, [64, 1, 1, H] each."""
    q, k = jnp.asarray(normal(0, 2, 64, 1, 1, H))
    return q, k


def scores(q: jax.Array, k: jax.Array, m: int, n: int, layouts: tuple[str, str] = ("half", "half")) -> np.ndarray:
    """The library's scores of queries at position m and keys at n: [64]."""
    q = rotate(q, rotation(at(m), H, BASE), layouts[0])
    k = rotate(k, rotation(at(n), H, BASE), layouts[1])
    return np.asarray(attention_scores(q, k, RAW), np.float64).ravel()


def as_numbers(x: Any) -> np.ndarray:
    """Heads in the half layout as complex numbers: [64, H/2]."""
    heads = np.asarray(x, np.float64).reshape(-1, H)
    return heads[:, : H // 2] + 1j * heads[:, H // 2 :]


def rounding(q: jax.Array, k: jax.Array, m: int, n: int) -> float:
    """The most that float32 may change a score at positions m and n.

    Two rotations of 4 U and a sum of H terms of U each; frequency, angle and its reduction are rounded too, which
    moves the angle by up to 4 U of itself.
    """
    sizes = np.abs(as_numbers(q)) * np.abs(as_numbers(k))
    return float(np.max(sizes @ (U * (8 + H + 4 * (m + n) * THETA))))
