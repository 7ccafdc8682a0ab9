"""How often machine code of NVIDIA touches local memory: by the loops of its control flow, read from a disassembly.

    python scripts/machine_loops.py KERNEL.cubin ...

Registers that do not fit are spilled: stored to local memory (STL) and loaded again (LDL). What that costs depends on
where these instructions are, and of that the number of bytes says nothing: many are stored once by a program and
loaded once for each of its tiles.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

PLACES = ("mainloop", "branch", "tile", "other", "once")
"""How often an instruction runs: in each step of a loop of matrix products; in steps that take a branch of such a loop;
once for each time that such a loop runs (a loop around it); in each step of another loop (those of the warps that load,
of conversions); once for a program."""

PRODUCTS = ("HGMMA", "HMMA", "UTCHMMA")
LAST = ("EXIT", "RET", "BRX")

_LINE = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)(.*)")
_LABEL = re.compile(r"^(\.L_x_\d+):", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One instruction: what it does first (`HGMMA` of `HGMMA.64x128x16`), where it may jump, and whether it may not."""

    opcode: str
    targets: tuple[str, ...]
    falls_through: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Instructions that run one after the other, the blocks that may follow, and its labels."""

    opcodes: Counter[str]
    successors: tuple[int, ...]

    @property
    def products(self) -> int:
        """Its instructions for tensor cores."""
        return sum(self.opcodes[name] for name in PRODUCTS)


def local_accesses(disassembly: str) -> dict[str, tuple[int, int]]:
    """Loads and stores of local memory by place (see PLACES), of a kernel as `nvdisasm -c` prints it."""
    blocks = blocks_of(disassembly)
    dominators = dominators_of(blocks)
    loops = {head: body for head, body in natural_loops(blocks, dominators).items() if not _waits(blocks, body)}
    found = {place: [0, 0] for place in PLACES}
    for number in dominators:
        counted = found[_place(number, blocks, loops, dominators)]
        counted[0] += blocks[number].opcodes["LDL"]
        counted[1] += blocks[number].opcodes["STL"]
    return {place: (loads, stores) for place, (loads, stores) in found.items()}


def _place(number: int, blocks: Sequence[Block], loops: dict[int, set[int]], dominators: dict[int, set[int]]) -> str:
    around = sorted((head for head, body in loops.items() if number in body), key=lambda head: len(loops[head]))
    if not around:
        return "once"
    head, body = around[0], loops[around[0]]
    if not any(blocks[each].products for each in body):
        return "other"
    nested = [inner for other, inner in loops.items() if other != head and inner < body]
    if any(blocks[each].products for inner in nested for each in inner):
        return "tile"
    ends = [each for each in body if head in blocks[each].successors]
    return "mainloop" if all(number in dominators[end] for end in ends) else "branch"


def _waits(blocks: Sequence[Block], body: set[int]) -> bool:
    """Whether a loop only asks a barrier again and again."""
    return len(body) == 1 and all(blocks[each].opcodes["SYNCS"] and not blocks[each].products for each in body)


def blocks_of(disassembly: str) -> tuple[Block, ...]:
    """The basic blocks of a kernel; the first is where it begins."""
    instructions, labels = _instructions(disassembly)
    first = {0, *labels.values()}
    first |= {at + 1 for at, each in enumerate(instructions) if each.targets or not each.falls_through}
    begins = sorted(at for at in first if at < len(instructions))
    numbers = {at: number for number, at in enumerate(begins)}
    found = []
    for at, after in zip(begins, [*begins[1:], len(instructions)], strict=True):
        last = instructions[after - 1]
        following = [numbers[labels[target]] for target in last.targets if labels[target] in numbers]
        if last.falls_through and after in numbers:
            following.append(numbers[after])
        opcodes = Counter(each.opcode for each in instructions[at:after])
        found.append(Block(opcodes=opcodes, successors=tuple(dict.fromkeys(following))))
    return tuple(found)


def _instructions(disassembly: str) -> tuple[list[Instruction], dict[str, int]]:
    """All instructions, and by label the number of the one behind it."""
    found: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in disassembly.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(found)
        elif match := _LINE.match(line):
            opcode = match[3].split(".")[0]
            jumps = opcode in ("BRA", "BRX", "JMP")
            targets = tuple(re.findall(r"\.L_x_\d+", match[4])) if jumps else ()
            conditional = bool(match[2]) or bool(re.match(r"\s*!?U?P\d", match[4]))
            ends = (jumps or opcode in LAST) and not conditional
            found.append(Instruction(opcode=opcode, targets=targets, falls_through=not ends))
    return found, labels


def dominators_of(blocks: Sequence[Block]) -> dict[int, set[int]]:
    """Of each block that can be reached: those that are on every way to it, itself among them."""
    reached = _reached(blocks)
    before = _predecessors(blocks, reached)
    found = {number: set(reached) for number in reached} | {0: {0}}
    changed = True
    while changed:
        changed = False
        for number in reached[1:]:
            new = set.intersection(*(found[each] for each in before[number])) | {number}
            changed |= new != found[number]
            found[number] = new
    return found


def _reached(blocks: Sequence[Block]) -> list[int]:
    """Blocks that can be reached, each behind one that it follows."""
    found, waiting = {0: None}, [0]
    while waiting:
        for each in blocks[waiting.pop(0)].successors:
            if each not in found:
                found[each] = None
                waiting.append(each)
    return list(found)


def _predecessors(blocks: Sequence[Block], reached: Iterable[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {number: [] for number in reached}
    for number in found:
        for each in blocks[number].successors:
            found[each].append(number)
    return found


def natural_loops(blocks: Sequence[Block], dominators: dict[int, set[int]]) -> dict[int, set[int]]:
    """The blocks of each loop, by the one that it begins with."""
    before = _predecessors(blocks, dominators)
    found: dict[int, set[int]] = {}
    for number, before_it in dominators.items():
        for head in set(blocks[number].successors) & before_it:
            body = found.setdefault(head, {head})
            waiting = [number]
            while waiting:
                each = waiting.pop()
                if each not in body:
                    body.add(each)
                    waiting += before[each]
    return found


def disassembled(cubin: bytes) -> str:
    """The text of `nvdisasm -c`, from the Triton of this interpreter: of its labels, jumps through tables too."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(tool), "-c", file.name], capture_output=True, text=True, check=True).stdout


def main() -> int:
    """Print one line for each file."""
    for name in sys.argv[1:]:
        found = local_accesses(disassembled(Path(name).read_bytes()))
        print(name, ", ".join(f"{place} {loads} LDL {stores} STL" for place, (loads, stores) in found.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
