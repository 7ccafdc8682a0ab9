"""What `scripts/role_order.py` takes for a thread that acts for its role too early."""

from __future__ import annotations

import pytest

from scripts.role_order import hasty

KERNEL = """
.visible .entry kernel()
{{
    barrier.sync 	1;
    @%p1 bra 	$L__BB0_2;
$L__BB0_1:                              // a role
{lines}
    @%p2 bra 	$L__BB0_1;
$L__BB0_2:
    barrier.sync 	1;
    ret;
}}
"""

MEET = "    bar.sync 	2, 128;"
FENCE = "    fence.proxy.async.shared::cta;"
LOAD = "    ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%r2+198128];"
STORE = "    st.shared.v4.b32 [ %r3 + 0 ], { %r4, %r5, %r6, %r7 };"
ARRIVE = "    @%p3 mbarrier.arrive.shared::cta.b64 _, [%r8];"
PRODUCTS = "    wgmma.wait_group.sync.aligned 0;"
COPY_OUT = "    @%p4 cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%rd1, {%r1, %r2, %r3, %r4}], [%r5];"
ADD_OUT = "    @%p4 cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%rd3, {%r1, %r2}], [%r5];"
STORED = "    cp.async.bulk.wait_group.read 	0;"
HAND_OVER = "    bar.arrive %r9, 160; mov.u32 %r10, %r9;"


@pytest.mark.parametrize(
    ("lines", "line", "behind"),
    [
        ([LOAD, ARRIVE, MEET], ARRIVE, LOAD),
        ([LOAD, MEET, ARRIVE, MEET], None, None),
        ([PRODUCTS, ARRIVE, MEET], ARRIVE, PRODUCTS),
        ([PRODUCTS, HAND_OVER, MEET], None, None),
        ([STORE, MEET, COPY_OUT, FENCE], COPY_OUT, STORE),
        ([STORE, FENCE, COPY_OUT, MEET], COPY_OUT, STORE),
        ([STORE, FENCE, MEET, COPY_OUT], None, None),
        ([STORED, STORE, MEET], STORE, STORED),
        ([STORED, MEET, STORE], None, None),
        ([STORE, HAND_OVER, FENCE, MEET, ADD_OUT], HAND_OVER, STORE),
        ([STORE, FENCE, HAND_OVER, MEET, ADD_OUT], None, None),
        # the next turn of a loop
        ([ARRIVE, LOAD], ARRIVE, LOAD),
        ([ARRIVE, LOAD, MEET], None, None),
    ],
)
def test_one_thread_acts_for_warps_that_have_met(lines: list[str], line: str | None, behind: str | None) -> None:
    found = hasty(KERNEL.format(lines="\n".join(lines)))
    if line is None or behind is None:
        assert found == []
    else:
        assert all(part.startswith(line.strip()) for part in found)
        assert any(part.endswith(behind.strip()) for part in found)


def test_a_kernel_without_roles_has_none_to_act_for() -> None:
    text = KERNEL.format(lines=f"{LOAD}\n{ARRIVE}").replace("barrier.sync 	1;", "bar.sync 	0;")
    assert hasty(text) == []
