"""FlashAttention-2's Python package on flashgen's kernels: the same functions, arguments, defaults and results.

    from flashgen.flash_attn import flash_attn_func

or, for programs that import `flash_attn` themselves, `flashgen.flash_attn.install()` before they do. What is not
supported raises `UnsupportedError` with its name. See docs/flash-attn.md.
"""

from flashgen.flash_attn.flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from flashgen.flash_attn.installation import install, uninstall
from flashgen.flash_attn.kvcache import flash_attn_with_kvcache

__version__ = "2.8.4"
"""The FlashAttention whose functions these are, for programs that compare it."""

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
    "uninstall",
]
