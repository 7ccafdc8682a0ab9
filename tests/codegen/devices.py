"""One known device of each kind that a kernel's text, its config and what it compiles to depend on."""

from __future__ import annotations

from flashgen.core.device import CATALOGUE

ONE_OF_EACH_KIND = list({(d.arch, d.smem_per_block, d.smem_per_sm, d.regs_per_sm): d for d in CATALOGUE}.values())
