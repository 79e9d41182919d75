"""What a compiled program says between devices, read from its text: each collective, how often, and its bytes.

    compiled = jax.jit(step).lower(state, batch).compile()
    for row in collectives.read(compiled.as_text()): ...

Loops count with the trips that XLA wrote down (`known_trip_count`) or, where it did not (on TPU), with
the constant that the loop's counter is compared with; a loop of unknown length counts once, and is said
to. All branches of a conditional count. A collective's bytes are those of the larger of what a device
puts in and what it gets: the whole of a gather, of a reduction, of a reduce-scatter's input.
"""

import dataclasses
import math
import re
from collections.abc import Iterator

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
_BYTES = {"pred": 1, "bf16": 2}  # others carry their bits: f32, s8, u64, c64, f8e4m3fn
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_OPERATION = re.compile(r"= (\(.*?\)|\S+) ([\w\-]+)\(")
_ARRAY = re.compile(r"\b(pred|bf16|[sufc]\d+\w*)\[([\d,]*)\]")
_CALLEES = re.compile(
    r"(?:calls|to_apply|condition|true_computation|false_computation|async_execution_thread_calls)=%?([\w.\-]+)"
)
_GROUP = re.compile(r"replica_groups=(?:\{\{([\d,]*)\}|\[\d+,(\d+)\])")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of the program. count: times it runs, bytes: of one, on one device.

    shape: as XLA writes it. place: the operation of the source that it is for. bounded: False where a loop
    of unknown length is around it, which then counts once.
    """

    kind: str
    shape: str
    count: int
    bytes: int
    place: str
    bounded: bool = True


def read(text: str) -> list[Collective]:
    """The collectives of a compiled program's text (`compiled.as_text()`), in its order."""
    bodies, entry = _computations(text)
    return list(_walk(bodies, entry, 1, True))


def totals(found: list[Collective]) -> dict[str, tuple[int, int]]:
    """Kind -> (times, bytes in all) on one device."""
    return {
        kind: (sum(c.count for c in of), sum(c.count * c.bytes for c in of))
        for kind in KINDS
        if (of := [c for c in found if c.kind == kind])
    }


def shapes(shape: str) -> list[tuple[int, ...]]:
    """Sides of each array in a shape as XLA writes it: "(f32[2,3]{1,0}, s32[])" gives [(2, 3), ()]."""
    return [tuple(int(n) for n in sizes.split(",") if n) for _, sizes in _ARRAY.findall(shape)]


def shape_bytes(shape: str) -> list[int]:
    """Bytes of each array in a shape as XLA writes it: "(f32[2,3]{1,0}, s32[])" gives [24, 4]."""
    return [_width(kind) * math.prod(int(n) for n in sizes.split(",") if n) for kind, sizes in _ARRAY.findall(shape)]


def _width(kind: str) -> int:
    digits = re.match(r"[a-z]+(\d+)", kind)
    return _BYTES.get(kind) or max(1, int(digits[1]) // 8 if digits else 1)


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Name -> lines of its operations; and the name of the entry."""
    bodies: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in text.splitlines():
        head = None if line.startswith(" ") else _HEAD.match(line)
        if head:
            lines = bodies.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif line.startswith(" "):
            lines.append(line)
    return bodies, entry


def _walk(bodies: dict[str, list[str]], name: str, times: int, bounded: bool) -> Iterator[Collective]:
    for line in bodies.get(name, ()):
        operation = _OPERATION.search(line)
        if operation is None:
            continue
        shape, kind = operation[1], operation[2].removesuffix("-start")
        if kind in KINDS:
            yield _collective(kind, shape, line, operation[2] != kind, times, bounded)
            continue
        if kind == "while":
            trips = _trips(bodies, line)
            body = re.search(r"body=%?([\w.\-]+)", line)
            assert body is not None
            yield from _walk(bodies, body[1], times * (trips or 1), bounded and trips is not None)
        branches = re.search(r"branch_computations=\{([^}]*)\}", line)
        inner = [name.strip().lstrip("%") for name in branches[1].split(",")] if branches else []
        for callee in _CALLEES.findall(line) + inner:
            yield from _walk(bodies, callee, times, bounded)


def _trips(bodies: dict[str, list[str]], line: str) -> int | None:
    """Of a while: the known count, or N where its condition ends in `counter < N`; None where neither is there."""
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line)
    if known:
        return int(known[1])
    condition = re.search(r"condition=%?([\w.\-]+)", line)
    inside = bodies.get(condition[1], []) if condition else []
    constants = {
        found[1]: int(found[2])
        for text in inside
        if (found := re.search(r"%?([\w.\-]+) = [su]\d+\[\]\S* constant\((\d+)\)", text))
    }
    ends = [re.search(r"ROOT .* compare\(%?([\w.\-]+), %?([\w.\-]+)\), direction=LT", text) for text in inside]
    bounds = [constants[end[2]] for end in ends if end and end[2] in constants]
    return bounds[0] if bounds else None


def _collective(kind: str, shape: str, line: str, started: bool, times: int, bounded: bool) -> Collective:
    arrays = shape_bytes(shape)
    # What starts an asynchronous one holds operand, result and sometimes counters; a plain one has a result an operand.
    size = max(arrays) if started else sum(arrays)
    group = _GROUP.search(line)
    if kind == "reduce-scatter" and not started and group:
        size *= int(group[2]) if group[2] else len(group[1].split(","))
    place = re.search(r'op_name="([^"]*)"', line)
    return Collective(kind, shape, times, size, place[1] if place else "", bounded)
