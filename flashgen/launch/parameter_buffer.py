"""`ParameterBuffer`: the parameters of one kernel in fixed places of memory, as the CUDA driver reads them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from flashgen.codegen.build import CompiledPart
from flashgen.codegen.family import Parameter
from flashgen.core.workload import DTYPE_BYTES
from flashgen.launch import driver
from flashgen.launch.parameters import SLOT_BYTES, Layout, element_of

ELEMENT_BYTES = {**DTYPE_BYTES, "u8": 1}
"""Bytes of one element of what a tensor descriptor may be of: of a mask a byte."""

C_TYPES: dict[str, Any] = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}

View = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides in elements of a tensor, such that a tensor descriptor takes them."""


class DescriptorArg(NamedTuple):
    """One tensor descriptor of a kernel: its parameter, the number of its map among the addresses, what it is of.

    A tuple, because every plan makes several, and a frozen dataclass takes three times as long to make.
    """

    parameter: Parameter
    position: int
    view: View
    box: tuple[int, ...]
    swizzle: int

    @property
    def element(self) -> str:
        """The element type."""
        return element_of(self.parameter)

    def maps(self) -> driver.TensorMaps:
        """The descriptors of this tensor, none encoded yet."""
        shape, strides = self.view
        return driver.TensorMaps(
            dtype=self.element,
            shape=shape,
            strides=strides,
            box=self.box,
            swizzle=self.swizzle,
            element_bytes=ELEMENT_BYTES[self.element],
        )


class ParameterBuffer:
    """All parameters of a kernel but what launches write, and how many blocks are launched.

    Attributes:
        addresses: of the kernel's parameters, in order; that of a tensor map is 0 until a launch writes it.
        config: what the driver is told beside them.
        descriptors: the tensor descriptors, in order.
    """

    __slots__ = ("_layout", "_memory", "addresses", "config", "descriptors")

    def __init__(
        self,
        part: CompiledPart,
        layout: Layout,
        *,
        programs: int,
        scalars: Mapping[str, int],
        view: Callable[[Parameter], View],
    ) -> None:
        """Write the scalars and describe the descriptors.

        Args:
            part: the kernel.
            layout: of its parameters.
            programs: blocks of a launch.
            scalars: values by name; parameters that are not among them are 0 at first.
            view: shape and strides of the tensor that a descriptor is of.
        """
        metadata = part.handle.metadata
        self._layout = layout
        self.descriptors: list[DescriptorArg] = []
        boxes = iter(getattr(metadata, "tensordesc_meta", None) or ())
        values: list[int] = []
        for parameter in layout.parameters:
            if parameter.name not in layout.described:
                values.append(scalars.get(parameter.name, 0))
                continue
            found, box = view(parameter), next(boxes)
            self.descriptors.append(
                DescriptorArg(
                    parameter=parameter,
                    position=len(values),
                    view=found,
                    box=tuple(box["block_size"]),
                    swizzle=box["swizzle"],
                )
            )
            values += [0, *found[0], *found[1]]
        count = layout.count
        self._memory = ctypes.create_string_buffer(2 * SLOT_BYTES * count)  # the parameters, and their addresses
        layout.packed.pack_into(self._memory, 0, *values, *[0] * (count - len(values)))
        start = ctypes.addressof(self._memory)
        self.addresses = (ctypes.c_uint64 * count).from_buffer(self._memory, SLOT_BYTES * count)
        layout.places.pack_into(self._memory, SLOT_BYTES * count, *range(start, start + SLOT_BYTES * count, SLOT_BYTES))
        self.config = driver.LaunchConfig(
            grid_x=programs,
            grid_y=1,
            grid_z=1,
            block_x=metadata.num_warps * 32,  # of all partitions, where a kernel specialises its warps
            block_y=1,
            block_z=1,
            shared_bytes=metadata.shared,
        )

    def slot(self, parameter: Parameter) -> Any:
        """The value of a parameter that is no descriptor, for a launch to write."""
        kind = C_TYPES.get(parameter.type, ctypes.c_uint64)
        return kind.from_buffer(self._memory, SLOT_BYTES * self._layout.positions[parameter.name])
