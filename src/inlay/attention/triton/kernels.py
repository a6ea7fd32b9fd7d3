"""The Triton kernels: store new keys and values, attend to the pieces of a work table, merge partial results.

One attention kernel serves decode, prefill and the encoding of packed modules, for shared and private keys. Features
that a layer does not need are compiled away (``constexpr``). In Triton's interpreter (``TRITON_INTERPRET=1``) the
kernels run on the CPU, one program at a time. tables.py describes the columns of the tables.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def quantized(numbers, LARGEST: tl.constexpr):
    """``storage.quantize`` of rows, (rows, width) fp32, up to the final conversion, which does no more
    rounding.
    """
    most = tl.max(tl.abs(numbers), 1)
    # tl.max ignores NaN
    finite = (most <= 3.4028234663852886e38) & (tl.sum((numbers != numbers).to(tl.int32), 1) == 0)
    some = most > 1e-30
    factor = tl.where(finite & some, tl.div_rn(1.0, tl.where(some, most, 1.0)) * LARGEST, 0.0)
    small = tl.where(finite[:, None], numbers * factor[:, None], 0.0)
    if LARGEST == 127.0:
        # 1.5 · 2²³: adding it leaves no bits for fractions, so the sum is rounded to an integer
        small = (small + 12582912.0) - 12582912.0
    else:  # fp8 e4m3: three bits of mantissa, and multiples of 2⁻⁹ below 2⁻⁶
        bits = small.to(tl.int32, bitcast=True)
        near = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
        small = tl.where(tl.abs(small) < 0.015625, (small + 24576.0) - 24576.0, near.to(tl.float32, bitcast=True))
    scale = tl.where(finite, tl.where(some, tl.div_rn(most, LARGEST), 0.0), float("nan"))
    return small, scale


@triton.jit(do_not_specialize=["rows"])
def store(
    key_ptr, value_ptr, keys_ptr, values_ptr, key_scale_ptr, value_scale_ptr, slot_ptr, step_ptr,
    rows, key_head, key_row, value_head, value_row, keys_head, keys_slot, values_head, values_slot,
    scales_head, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_ROWS: tl.constexpr, SHARED: tl.constexpr,
    LARGEST: tl.constexpr,
):  # fmt: skip
    """Store the new keys and values of a block of rows and one head in their slots.

    Args:
        slot_ptr: (rows,) int32, -1 for a padding row.
        step_ptr: (1,) int32, added to every slot.
        LARGEST: For 8-bit pools, the number that the largest magnitude of a row becomes. Else 0.
    """
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    head = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    slot = tl.load(slot_ptr + row, mask=row < rows, other=-1)
    live = slot >= 0  # padding rows of a recorded pass have slot -1
    slot = (slot + tl.load(step_ptr)).to(tl.int64)
    cells = live[:, None] & (d < HEAD_DIM)[None, :]
    key = tl.load(key_ptr + head * key_head + row[:, None] * key_row + d[None, :], mask=cells, other=0.0)
    if LARGEST > 0:
        key, scale = quantized(key.to(tl.float32), LARGEST)
        key = key.to(keys_ptr.dtype.element_ty)
        tl.store(key_scale_ptr + head * scales_head + slot, scale, mask=live)
    tl.store(keys_ptr + head * keys_head + slot[:, None] * keys_slot + d[None, :], key, mask=cells)
    if not SHARED:
        value = tl.load(value_ptr + head * value_head + row[:, None] * value_row + d[None, :], mask=cells, other=0.0)
        if LARGEST > 0:
            value, scale = quantized(value.to(tl.float32), LARGEST)
            value = value.to(values_ptr.dtype.element_ty)
            tl.store(value_scale_ptr + head * scales_head + slot, scale, mask=live)
        tl.store(values_ptr + head * values_head + slot[:, None] * values_slot + d[None, :], value, mask=cells)


@triton.jit(do_not_specialize=["first_work", "window"])
def attend(
    query_ptr, keys_ptr, values_ptr, key_scale_ptr, value_scale_ptr, output_ptr, partial_ptr, lse_ptr,
    work_ptr, lane_ptr, piece_ptr, position_ptr, step_ptr, cos_ptr, sin_ptr, slope_ptr, sink_ptr,
    first_work, scale, softcap, window,
    query_head, query_row, keys_head, keys_slot, values_head, values_slot, scales_head, output_row, output_head,
    GROUP: tl.constexpr, HEAD_TILE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, SLOPES: tl.constexpr, SINKS: tl.constexpr, WIDE: tl.constexpr,
    QUANTIZED: tl.constexpr,
):  # fmt: skip
    """Process one work item for one head of keys: a tile of lanes against a range of pieces.

    A lane is a query row that reads at a shift. A tile holds all query heads of the key's head, so each key is loaded
    once for all of them. A piece is a range of slots at consecutive positions.

    Args:
        PAIRS: Pairs of dimensions that a shift rotates. 0 if nothing is read at a shift.
        WIDE: Products in fp32.
        QUANTIZED: Keys and values are in 8 bits with a scale for each slot and head. Products are then in the query's
            dtype, which holds such keys exactly. The scales of keys are applied to the scores.
    """
    narrow: tl.constexpr = query_ptr.dtype.element_ty if QUANTIZED else keys_ptr.dtype.element_ty
    head_blocks: tl.constexpr = (GROUP + HEAD_TILE - 1) // HEAD_TILE
    work = work_ptr + (tl.program_id(0) + first_work) * 5
    kv_head = tl.program_id(1) // head_blocks
    first_lane, lanes = tl.load(work), tl.load(work + 1)
    first_piece, end_piece, partial = tl.load(work + 2), tl.load(work + 3), tl.load(work + 4)
    step = tl.load(step_ptr)

    m = tl.arange(0, BLOCK_M)
    lane = m // HEAD_TILE
    in_group = (tl.program_id(1) % head_blocks) * HEAD_TILE + m % HEAD_TILE
    live = (lane < lanes) & (in_group < GROUP)
    head = kv_head * GROUP + in_group
    row = tl.load(lane_ptr + (first_lane + lane) * 3, mask=live, other=0)
    lane_shift = tl.load(lane_ptr + (first_lane + lane) * 3 + 1, mask=live, other=0)
    at = tl.load(position_ptr + row, mask=live, other=0) + step - lane_shift

    d = tl.arange(0, BLOCK_D)
    inside_head = d < HEAD_DIM
    cells = live[:, None] & inside_head[None, :]
    queries = query_ptr + head.to(tl.int64) * query_head + row.to(tl.int64) * query_row
    if PAIRS == 0:
        query = tl.load(queries[:, None] + d[None, :], mask=cells, other=0.0)
        operand = query.to(tl.float32 if WIDE else narrow)
    else:
        lane_turn = tl.load(lane_ptr + (first_lane + lane) * 3 + 2, mask=live, other=0)
        turning = d < 2 * PAIRS
        if INTERLEAVED:
            partner, pair, minus = d ^ 1, d // 2, d % 2 == 0
        else:
            partner = tl.where(d < PAIRS, d + PAIRS, d - PAIRS)
            pair, minus = tl.where(d < PAIRS, d, d - PAIRS), d < PAIRS
        turned_cells = live[:, None] & turning[None, :]
    if SLOPES:
        slope = tl.load(slope_ptr + head, mask=live, other=0.0) * 1.4426950408889634
    keys = keys_ptr + kv_head.to(tl.int64) * keys_head
    values = values_ptr + kv_head.to(tl.int64) * values_head
    if QUANTIZED:
        key_scales = key_scale_ptr + kv_head.to(tl.int64) * scales_head
        value_scales = value_scale_ptr + kv_head.to(tl.int64) * scales_head

    # [BLOCK_M] fp32, in units of log 2, because the hardware has exp2
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    output = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for number in range(first_piece, end_piece):
        piece = piece_ptr + number * 7
        slot = tl.load(piece).to(tl.int64)
        length = tl.load(piece + 1) + tl.load(piece + 6) * step
        first = tl.load(piece + 2) + tl.load(piece + 3)
        masked = tl.load(piece + 4)
        reach = at - first  # the last key at or before the lane's position
        end = tl.where(masked > 0, tl.minimum(length, tl.max(tl.where(live, reach, -1)) + 1), length)
        begin = 0
        if WINDOW:
            begin = tl.maximum(0, tl.min(tl.where(live, reach, 2147483647)) - window + 1)
        if PAIRS > 0:  # reloaded for every piece: kept, it would take the registers that the output needs
            query = tl.load(queries[:, None] + d[None, :], mask=cells, other=0.0).to(tl.float32)
            partners = tl.load(queries[:, None] + partner[None, :], mask=turned_cells, other=0.0).to(tl.float32)
            turn = (lane_turn + tl.load(piece + 5)).to(tl.int64)
            angles = turn[:, None] * PAIRS + pair[None, :]
            cos = tl.load(cos_ptr + angles, mask=turned_cells, other=1.0)
            sin = tl.load(sin_ptr + angles, mask=turned_cells, other=0.0)
            turned = query * cos + tl.where(minus[None, :], -partners, partners) * sin
            operand = turned.to(tl.float32 if WIDE else narrow)
        for start in range(begin, end, BLOCK_N):
            n = start + tl.arange(0, BLOCK_N)
            there = n < end
            at_slot = slot + n
            key = tl.load(
                keys + at_slot[None, :] * keys_slot + d[:, None], mask=inside_head[:, None] & there[None, :], other=0.0
            )
            value = tl.load(
                values + at_slot[:, None] * values_slot + d[None, :],
                mask=there[:, None] & inside_head[None, :],
                other=0.0,
            )
            if QUANTIZED:
                key_scale = tl.load(key_scales + at_slot, mask=there, other=0.0)
                value_scale = tl.load(value_scales + at_slot, mask=there, other=0.0)
                key, value = key.to(tl.float32), value.to(tl.float32) * value_scale[:, None]
            if WIDE:
                key, value = key.to(tl.float32), value.to(tl.float32)
            elif QUANTIZED:
                key, value = key.to(narrow), value.to(narrow)
            scores = tl.dot(operand, key, input_precision="ieee")
            if QUANTIZED:
                scores = scores * key_scale[None, :]
            if SOFTCAP:
                growth = tl.exp2(scores * (2.0 * 1.4426950408889634 * scale / softcap))
                scores = (1.0 - 2.0 / (growth + 1.0)) * (softcap * 1.4426950408889634)
            else:
                scores = scores * (scale * 1.4426950408889634)
            behind = reach[:, None] - n[None, :]
            if SLOPES:
                scores -= slope[:, None] * behind
            visible = there[None, :] & live[:, None] & ((behind >= 0) | (masked == 0))
            if WINDOW:
                visible = visible & (behind < window)
            scores = tl.where(visible, scores, float("-inf"))
            better = tl.maximum(best, tl.max(scores, 1))
            finite = tl.where(better == float("-inf"), 0.0, better)
            weights = tl.exp2(scores - finite[:, None])
            keep = tl.exp2(best - finite)
            total = total * keep + tl.sum(weights, 1)
            if not WIDE:
                weights = weights.to(narrow)
            output = output * keep[:, None] + tl.dot(weights, value, input_precision="ieee")
            best = better

    seen = total > 0
    whole = tl.where(seen, total, 1.0)
    output = output / whole[:, None]
    lse = tl.where(seen, best * 0.6931471805599453 + tl.log(whole), float("-inf"))
    if partial < 0:
        if SINKS:
            sink = tl.load(sink_ptr + head, mask=live, other=float("-inf"))
            top = tl.maximum(lse, sink)
            top = tl.where(top == float("-inf"), 0.0, top)
            own = tl.exp(lse - top)
            output = output * (own / tl.maximum(own + tl.exp(sink - top), 1e-38))[:, None]
        target = output_ptr + row.to(tl.int64) * output_row + head * output_head
        tl.store(target[:, None] + d[None, :], output.to(output_ptr.dtype.element_ty), mask=cells)
    else:
        heads = tl.num_programs(1) // head_blocks * GROUP
        index = (partial + lane).to(tl.int64) * heads + head
        tl.store(partial_ptr + index[:, None] * HEAD_DIM + d[None, :], output, mask=cells)
        tl.store(lse_ptr + index, lse, mask=live)


@triton.jit
def merge(
    partial_ptr, lse_ptr, output_ptr, row_ptr, first_ptr, index_ptr, sink_ptr, output_row, output_head,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of one row and head through their log-sum-exp, in fp32. Sinks enter here, once.

    Entry i of the table is row ``row_ptr[i]``. Its partial results are
    ``index_ptr[first_ptr[i]] … index_ptr[first_ptr[i + 1] - 1]``. A row of -1 is padding.
    """
    number, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(row_ptr + number).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    inside_head = d < HEAD_DIM
    best, total = float("-inf"), 0.0
    if SINKS:
        best = tl.load(sink_ptr + head)
        total = tl.where(best == float("-inf"), 0.0, 1.0)
    output = tl.zeros([BLOCK_D], tl.float32)
    for at in range(tl.load(first_ptr + number), tl.load(first_ptr + number + 1)):
        index = tl.load(index_ptr + at).to(tl.int64) * HEADS + head
        lse = tl.load(lse_ptr + index)
        part = tl.load(partial_ptr + index * HEAD_DIM + d, mask=inside_head, other=0.0)
        better = tl.maximum(best, lse)
        finite = tl.where(better == float("-inf"), 0.0, better)
        keep, weight = tl.exp(best - finite), tl.exp(lse - finite)
        output = output * keep + part * weight
        total = total * keep + weight
        best = better
    output = output / tl.where(total > 0, total, 1.0)
    target = output_ptr + row * output_row + head * output_head
    tl.store(target + d, output.to(output_ptr.dtype.element_ty), mask=inside_head & (row + 0 * d >= 0))
