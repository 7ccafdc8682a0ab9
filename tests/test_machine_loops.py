"""Where `scripts/machine_loops.py` finds loads and stores of spilled registers."""

from __future__ import annotations

from flashgen.codegen.build import compile_kernel
from flashgen.codegen.portable_forward.family import PORTABLE_FORWARD
from flashgen.core.device import find_device
from flashgen.core.workload import Specialization
from scripts.machine_loops import blocks_of, disassembled, dominators_of, local_accesses, natural_loops

# a persistent program: its tiles, in each a mainloop with a branch for masked blocks, a wait out of line, and a switch
PROGRAM = """
        /*0000*/                   STL [R1], R2 ;
        /*0010*/               @P0 BRA `(.L_x_9) ;
.L_x_0:
        /*0020*/                   LDL R3, [R1] ;
        /*0030*/                   STL [R1+0x4], R3 ;
.L_x_1:
        /*0040*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R3 ;
        /*0050*/              @!P1 BRA `(.L_x_6) ;
.L_x_2:
        /*0060*/                   HGMMA.64x64x16.F32.BF16 R8, gdesc[UR4], R8 ;
        /*0070*/                   LDL.LU R4, [R1+0x4] ;
        /*0080*/               @P2 BRA `(.L_x_4) ;
        /*0090*/                   LDL R5, [R1+0x8] ;
        /*00a0*/                   STL.64 [R1+0x8], R5 ;
.L_x_4:
        /*00b0*/                   BRX R6 -0xc0 (*"BRANCH_TARGETS .L_x_1,.L_x_5"*);
.L_x_5:
        /*00c0*/                   LDL R7, [R1] ;
        /*00d0*/               @P3 BRA `(.L_x_0) ;
        /*00e0*/                   EXIT ;
.L_x_6:
        /*00f0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R3 ;
        /*0100*/              @!P1 BRA `(.L_x_6) ;
        /*0110*/                   BRA `(.L_x_2) ;
.L_x_9:
        /*0120*/                   LDL R9, [R1] ;
        /*0130*/                   UTMALDG.4D [UR8], [UR6] ;
        /*0140*/               @P4 BRA `(.L_x_9) ;
        /*0150*/                   EXIT ;
.L_x_10:
        /*0160*/                   BRA `(.L_x_10);
"""


def test_loads_and_stores_are_counted_by_the_loop_that_they_are_in() -> None:
    assert local_accesses(PROGRAM) == {
        "mainloop": (1, 0),
        "branch": (1, 1),
        "tile": (2, 1),
        "other": (1, 0),
        "once": (0, 1),
    }


def test_without_a_loop_around_a_mainloop_the_rest_runs_once() -> None:
    found = local_accesses(PROGRAM.replace("@P3 BRA `(.L_x_0)", "NOP"))
    assert (found["tile"], found["once"], found["mainloop"]) == ((0, 0), (2, 2), (1, 0))


def test_what_nvdisasm_prints_is_read() -> None:
    spec, device = Specialization.parse("fwd-bf16-d64"), find_device("h200")
    compiled = compile_kernel(spec, PORTABLE_FORWARD.default(spec, device), device)
    text = disassembled(compiled.handle.asm["cubin"])
    blocks = blocks_of(text)
    assert sum(block.products for block in blocks) == text.count(" HGMMA.") > 0
    loops = natural_loops(blocks, dominators_of(blocks)).values()
    assert any(blocks[number].products for body in loops for number in body)
    assert set(local_accesses(text).values()) == {(0, 0)}
