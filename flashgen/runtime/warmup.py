"""The public calls `warmup` and `reload`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from flashgen.core.checks import flag, instance, items, whole_number
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.errors import DeviceError
from flashgen.core.input_copies import as_served, has_aligned_rows
from flashgen.core.nearest import in_blocks
from flashgen.core.workload import Specialization, Workload
from flashgen.runtime.ops import kernel_cache, serve

SHORT_QUERIES = 1024
"""From this query length on the default config is the same for all lengths, but for what more keys ask for."""

MANY_KEYS = 1 << 17
"""Over so many, CTAs share the keys of whatever tiles are few enough."""


MANY_ROWS, MANY_BATCHES = 8192, 33
"""Numbers beyond which a tile or a batch element more changes little; up to powers of two."""

KEY_STEPS = 4
"""Numbers of keys in each factor of two, for calls with more of them than queries, as a chunk of a prompt has."""

MANY_WAVES = 8
"""Waves of tiles beyond which one that is not full changes little."""

ALL_LENGTHS = tuple(1 << power for power in range(8, 25))
"""Of keys: the rules of decode families make a difference between lengths in steps of powers of two."""


def warmup(
    workloads: Iterable[Workload | str],
    *,
    seqlens: Iterable[int] | None = None,
    device: int | None = None,
    offset_tensor: bool = False,
    training: bool = False,
    dropout: bool = False,
    helpers: bool = False,
    prefix: bool = False,
) -> int:
    """Compile and load every kernel that the ladder can return for these workloads, so that serving never compiles.

    Args:
        workloads: workloads or their keys: of forward passes (`b1-h32-hk8-s4096-d128-causal`), of backward passes
            (`bwd-b1-h32-hk8-s4096-d128-causal`, with `-deterministic` where that will be asked for) and of steps of
            decoding (`dec-b64-h32-hk8-sk8192-d128-page16`), where the batch, the queries of a sequence and the keys
            that there is room for are the most that there will be: all smaller ones are ready, too, and calls with
            `fixed_split_size`. Of packed sequences (`b64-h32-hk8-tq16384-s2048-d128-causal-varlen`) the number, the
            rows and the bounds are the most that there will be, likewise.
        seqlens: also these key lengths of each workload; None takes every config recorded for its specialization class
            and the default one, with all tiles that serve smaller batches and lengths.
        device: GPU index, None the current one. Tensors are taken to begin at multiples of 16 bytes, as torch's
            allocator has it; others have kernels of their own, which their first call compiles.
        offset_tensor: also the kernels that read the query offset from a tensor; steps of decoding have none.
        training: also the backward pass of every workload of a forward pass; deterministic while
            `torch.use_deterministic_algorithms(True)` is on.
        dropout: also the kernels of the same passes with dropout.
        helpers: also what `append_kv` and `merge_states` launch for the types and head dimensions of the workloads,
            with and without rotary embeddings of whole heads; other forms are compiled by their first call.
        prefix: also what steps of decoding launch for a `Prefix` in a cache like their own, with as many keys as they
            have at most, whichever of their sequences share one: the pass over these keys, and the merge.

    Returns:
        The number of kernels that are ready.

    Raises:
        WorkloadError: a key cannot be read.
        UnsupportedError: no family supports a workload.
        DeviceError: torch sees no such GPU.
        BuildError: a kernel does not compile.
    """
    from flashgen.codegen.families import exact_sibling
    from flashgen.codegen.usual_helpers import prefix_merge, usual_helpers
    from flashgen.runtime.ops.helpers import warm as warm_helper

    if device is None:
        device = torch.cuda.current_device() if torch.cuda.is_available() else 0
    index = whole_number("the index of a GPU", device, 0, error=DeviceError)
    where = serve.device_at(index)
    offset_tensor, training = flag("offset_tensor", offset_tensor), flag("training", training)
    dropout, prefix = flag("dropout", dropout), flag("prefix", prefix)
    lengths = None if seqlens is None else _lengths(seqlens)
    pairs, beside = set(), set()
    for workload in _asked(workloads, training=training):
        for form, aligned16 in _forms(workload):
            for spec in variants(form, aligned16=aligned16, offset_tensor=offset_tensor, dropout=dropout):
                found = _reachable(form, spec, where, lengths)
                pairs |= {(spec, each) for config in found for each in (config, exact_sibling(config, spec))}
                pairs |= set(_by_decoding(form, spec, where, lengths))
        if prefix and workload.is_decode:
            pairs |= set(_over_prefixes(workload, where))
            beside.add(prefix_merge(workload.specialization))
    count = kernel_cache.warm(pairs, where, index)
    if flag("helpers", helpers):
        beside |= {helper for spec, _ in pairs for helper in usual_helpers(spec)}
    for helper in beside:
        warm_helper(helper, index)
    return count + len(beside)


def _lengths(seqlens: Iterable[int]) -> tuple[int, ...]:
    return tuple(whole_number("a key length", length, 0) for length in items("seqlens", seqlens))


def _asked(workloads: Iterable[Workload | str], *, training: bool) -> Iterator[Workload]:
    for item in items("workloads", workloads):
        workload = Workload.parse(item) if isinstance(item, str) else instance("a workload", item, Workload)
        yield workload
        if training and workload.direction == "forward":
            fixed = torch.are_deterministic_algorithms_enabled()
            yield replace(workload, direction="backward", deterministic=fixed)


def _forms(workload: Workload) -> Iterator[tuple[Workload, bool]]:
    """What calls of a workload are served as, and whether by aligned tensors: some heads are padded in larger calls."""
    yield workload, has_aligned_rows(workload)
    wider = as_served(workload)
    if wider != workload:
        yield wider, True


def variants(
    workload: Workload, *, aligned16: bool = True, offset_tensor: bool, dropout: bool = False
) -> Iterator[Specialization]:
    """What of the same workload is compiled by itself: a bias may have a gradient or not."""
    dropouts = (False, True) if dropout and not workload.is_decode else (False,)
    offsets = (False, True) if offset_tensor and not workload.is_decode and _has_positions(workload) else (False,)
    bias_grads = (False, True) if workload.direction == "backward" and workload.bias else (False,)
    for variant, bias_grad, drops in itertools.product(offsets, bias_grads, dropouts):
        yield Specialization.of(
            workload, aligned16=aligned16, offset_tensor=variant, bias_grad=bias_grad, dropout=drops
        )


def _has_positions(workload: Workload) -> bool:
    """Whether a query offset changes anything."""
    has_window = workload.window_left is not None or workload.window_right is not None
    return workload.causal or workload.alibi or has_window


def _reachable(
    workload: Workload, spec: Specialization, device: Device, lengths: tuple[int, ...] | None
) -> set[Config]:
    if workload.is_decode:
        return _reachable_steps(workload, spec, device)
    if workload.is_packed:
        return _reachable_packed(workload, spec, device)
    from flashgen.codegen.families import balanced, default_config, invalid, usual
    from flashgen.codegen.family import Sizes
    from flashgen.runtime.lookup.ladder import resolve

    records = serve.records()
    if lengths is not None:
        shapes = [workload, *(workload.with_shape(seqlen_k=n, seqlen_q=min(workload.seqlen_q, n)) for n in lengths)]
        return {resolve(shape, spec, device, records).config for shape in shapes}
    choices = records.choices(spec, device)
    known = {record.config for record, _ in records.of(spec, device)}
    known |= {twin.record.config for twin in choices.twins}
    known |= {resolve(exact, spec, device, records).config for exact in choices.same_bits}
    default, sizes = default_config(spec, device), Sizes.of(workload)
    known |= _other_tiles({default, *known}, workload, spec, device)
    rows = {sizes.seqlen_q, *range(1, min(sizes.seqlen_q, SHORT_QUERIES))}
    at = [sizes._replace(seqlen_q=n, seqlen_k=keys) for n in rows for keys in {sizes.seqlen_k, MANY_KEYS}]
    defaults = {usual(default, spec, each, device) for each in at}
    able = {config for config in known if invalid(config, spec, device) is None}
    some = [each for each in at if each.seqlen_q in {sizes.seqlen_q, *_powers_to(SHORT_QUERIES)}]
    by_size = {balanced(config, spec, each, device) for config in able for each in some}
    return defaults | able | by_size | set(_at_lengths(workload, spec, device))


def _at_lengths(workload: Workload, spec: Specialization, device: Device) -> Iterator[Config]:
    """What serves a workload at other lengths and with fewer batch elements, whose tiles fill the SMs otherwise."""
    from flashgen.codegen.family import Sizes
    from flashgen.runtime.lookup.by_sizes import SizesLookup

    records, sizes = serve.records(), Sizes.of(workload)
    lookup = SizesLookup(records.choices(spec, device), workload, spec, device, records)
    most, is_grouped = min(sizes.seqlen_q, MANY_ROWS), sizes.nheads != sizes.nheads_k
    able = (*(in_blocks(rows, is_grouped=is_grouped) for rows in range(1, most + 1)), *_powers_to(sizes.seqlen_q))
    lengths = {sizes.seqlen_q, *(rows for rows in able if rows <= sizes.seqlen_q)}
    # as many heads as fill so many waves of SMs, each with one tile
    waves = (device.num_sms * wave // sizes.nheads for wave in range(1, MANY_WAVES + 1))
    counts = (*range(1, MANY_BATCHES), *_powers_to(sizes.batch), sizes.batch, *waves)
    batches = {batch for batch in counts if 0 < batch <= sizes.batch}
    chunks, steps = {sizes.seqlen_q, *_powers_to(sizes.seqlen_q)}, _steps_to(sizes.seqlen_k)
    for batch, rows in itertools.product(batches, lengths):
        for keys in {rows, sizes.seqlen_k, *(steps if rows in chunks else ())}:
            at = sizes._replace(batch=batch, seqlen_q=rows, seqlen_k=keys)
            config = lookup.config(at, generated_only=True, has_own_offset=True)
            if config is not None:
                yield config


def _reachable_steps(workload: Workload, spec: Specialization, device: Device) -> set[Config]:
    """The configs of all classes of steps that are not larger than this one."""
    from flashgen.codegen.family import Sizes
    from flashgen.runtime.lookup.decode_ladder import served_step

    group, records = workload.nheads // workload.nheads_k, serve.records()
    found = set()
    for queries in range(1, workload.seqlen_q + 1):
        for batch in _powers_to(workload.batch):
            for keys in (0, *_powers_to(workload.keys_reached)):
                sizes = Sizes(
                    batch=batch,
                    nheads=group * workload.nheads_k,
                    nheads_k=workload.nheads_k,
                    seqlen_q=queries,
                    seqlen_k=keys,
                )
                found.add(served_step(spec, sizes, device, records).config)
    return found


def _over_prefixes(workload: Workload, device: Device) -> Iterator[tuple[Specialization, Config]]:
    """The configs of all passes over keys that sequences of such steps share: of some groups, so many queries of each.

    Sinks count with the own keys. With fixed splits a pass is chosen by the most query rows that a tile has.
    """
    from flashgen.codegen.family import Sizes
    from flashgen.launch.decode_numbers import MANY_ROWS
    from flashgen.runtime.lookup.decode_ladder import served_step

    spec, records = Specialization.of(replace(workload, sink=False), offset_tensor=True), serve.records()
    for groups in _powers_to(workload.batch):
        for queries in _powers_to(workload.batch * workload.seqlen_q):
            # the smallest groups of these classes
            members = -(-(queries // 2 + 1) // workload.seqlen_q)
            if (groups // 2 + 1) * members > workload.batch:
                continue
            for keys in (0, *_powers_to(workload.keys_reached)):
                sizes = Sizes(
                    batch=groups,
                    nheads=workload.nheads,
                    nheads_k=workload.nheads_k,
                    seqlen_q=queries if keys else max(queries, MANY_ROWS),
                    seqlen_k=keys,
                )
                yield spec, served_step(spec, sizes, device, records).config


def _reachable_packed(workload: Workload, spec: Specialization, device: Device) -> set[Config]:
    """The configs of all classes of packed sequences that are not larger than this one; the bounds are of both sides.

    A block table may have room for fewer keys than the queries that a sequence may have.
    """
    from flashgen.runtime.lookup.packed_ladder import PackedSizes, served_packed

    records, most = serve.records(), PackedSizes.of(workload)
    choices = records.choices(spec, device)
    found = {choices.default, *(one.config for one in choices.here if one.reason is None)}
    # what a tile takes is found once for as many rows of a sequence: the number of sequences changes last
    for seqlen_q, seqlen_k in itertools.product(_powers_to(most.seqlen_q), _powers_to(most.seqlen_k)):
        if seqlen_k >= seqlen_q or spec.page_size:
            for rows, batch in itertools.product(_powers_to(most.total_q), _powers_to(most.batch)):
                if seqlen_q <= rows:
                    sizes = most._replace(batch=batch, total_q=rows, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
                    found.add(served_packed(spec, sizes, device, records).config)
    return found | _other_tiles(found, workload, spec, device)


def _other_tiles(configs: set[Config], workload: Workload, spec: Specialization, device: Device) -> set[Config]:
    """What may serve in the place of configs of a backward pass, whose tiles have the heads that a batch takes.

    In their order: another one serves few tiles, and lengths that have these say so. So do lengths of few keys, for
    which there are tiles that no others are launched with.
    """
    from flashgen.codegen.families import beside, fitted, invalid, most_keys
    from flashgen.codegen.family import Sizes

    if spec.direction != "backward":
        return set()
    orders = {one.get("heads_per_group", 0) for one in configs}
    tiles = {tile for one in configs for tile in beside(one, spec, device) if tile.get("heads_per_group", 0) in orders}
    able = {tile for tile in tiles if most_keys(tile) is None and invalid(tile, spec, device) is None}
    return {fitted(tile, spec, Sizes.of(workload), device) for tile in able}


def _powers_to(size: int) -> list[int]:
    """Powers of two up to the first one that is not below a size."""
    return [2**exponent for exponent in range(max(size - 1, 0).bit_length() + 1)]


def _steps_to(keys: int) -> list[int]:
    """Numbers up to one in `KEY_STEPS` equal factors for each factor of two."""
    return sorted({int(keys / 2 ** (number / KEY_STEPS)) for number in range(KEY_STEPS * keys.bit_length())} - {0})


def _by_decoding(
    workload: Workload, spec: Specialization, device: Device, lengths: tuple[int, ...] | None
) -> Iterator[tuple[Specialization, Config]]:
    """The decode configs that serve a workload of few queries at these key lengths, or at any."""
    from flashgen.codegen.family import Sizes
    from flashgen.runtime.lookup.few_queries import decode_specialization, keys_seen, served_by_decoding

    sizes = Sizes.of(workload)
    for seqlen_k in (workload.seqlen_k, *(ALL_LENGTHS if lengths is None else lengths)):
        at = sizes._replace(seqlen_k=seqlen_k)
        served = served_by_decoding(spec, at, keys_seen(at, workload.window_left), device, serve.records())
        if not isinstance(served, str):
            yield decode_specialization(spec), served.config


def reload() -> None:
    """Read settings and databases again at the next call, e.g. after tuning beside a running process."""
    serve.reload()
