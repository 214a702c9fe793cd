"""All-reduce over symmetric memory in Triton, fused with the residual add and RMSNorm. Formulas are in ``all_reduce``.

Every rank has a buffer of one layout and the addresses of all of them, mapped into its process; who allocates and maps
them is not known here. Three ways:

- few rows (``SymmetricRows``): every rank stores its rows into everybody's buffer, and reads what arrives in its own.
  One trip, no barrier: a flag travels with every 4 bytes.
- more (``SymmetricBlocks``): the same, but a program's rows travel as they are, and one flag behind them: half of the
  bytes, a second message.
- many (``sum_add_rms_norm_triton``): others' rows have been copied here before. The copies' end is told by
  ``signal_triton``, on the stream of the copies, and awaited by ``wait_triton``.

**Lines.** 8 bytes of a row, a chunk (4 numbers of 16 bits, 2 of 32), travel as a line of 16: low half, flag, high half,
flag. Aligned 8-byte stores arrive whole, so a half whose flag is right is right. The flag is the epoch of the launch.

**Epochs.** Program p of a launch has row p, and counts its launches in ``epochs[p]``: the count before plus one is the
epoch. All ranks launch the same sequence of row counts, so the same launch has the same epoch for a row on all of them,
replayed from a graph or not. Launches of fewer rows don't count for, and don't touch, the rows they lack.

**Two slots, by the epoch's parity, are enough.** A rank stores row p of epoch e + 2, over that of e, only when its
launch of e + 1 has ended, which got row p of e + 1 from everybody. A rank sends that in a launch which starts after the
one that read e: launches of a buffer are in one stream. So whatever is overwritten has been read by all. (Of e + 1 and
e themselves, which may be under way at once on two ranks, each has its own slot.)

**Early launch.** With PDL the next kernel's programs may start before a launch has ended; what they do before their
wait is read weights and addresses. The wait ends when all predecessors have ended, so "starts after" above holds for
everything from the load of the epoch on. Nor can early programs take the room that ours still need: they come when all
of ours have started.

**Flags.** Buffers start as zeros, and epochs as 1. A row has one width, so all lines of a slot have the flag of e - 2
when e is awaited, or 0 in the beginning: the counter may wrap around (it does so after days), flag 0 included.

**Progress.** Program p waits for program p of the others, and for nothing else; they all send before they wait. That
needs programs to start in the order of their ids, or all at once, which ``max_rows`` up to the number of SMs gives.
Blocks are more than that: a program takes the next one when it starts, so what a rank waits for is under way there.
A rank that has died is waited for until the word ``abort`` isn't 0 (results are garbage then); afterwards counters may
differ between ranks, so the buffers are of no use until all ranks have zeroed them and the counters.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false
# (a launch takes num_warps beside the parameters of the kernel; the ranges of a kernel are Triton's; a constexpr takes
# a Python value, and decides what is bound)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language import core

from pico_vllm.kernels.attention_config import device_of
from pico_vllm.kernels.attention_tiles import start_after_predecessors
from pico_vllm.kernels.rms_norm_triton import _add_and_normalise, _tile

_CHUNK_BYTES = 8
LINE_BYTES = tl.constexpr(16)
#: Polls between two looks at the word that says to give up: it may lie in the host's memory.
_POLLS_A_LOOK = tl.constexpr(4096)
_MAX_WARPS = 32
#: Numbers of a block of rows, counting whole powers of 2, and of a warp.
_BLOCK_NUMBERS, _NUMBERS_A_WARP = 8192, 1024


@dataclass(frozen=True, slots=True)
class _SymmetricBuffers:
    """One rank's view of the buffers in which rows of one width and dtype meet.

    Attributes:
        peers: [size] int64, addresses of all ranks' buffers, mapped into this process, multiples of 16; all zeros
            before any rank's first launch.
        epochs: [programs of a launch at most] int32, zeros before the first launch; this rank's own.
        abort: [1] int32, 0: anything else ends every wait. On the device, or pinned memory of the host.
        rank: this one.
        max_rows: of a launch.
        hidden_size: of every row.
        dtype: of what is sent and of results.
    """

    peers: torch.Tensor
    epochs: torch.Tensor
    abort: torch.Tensor
    rank: int
    max_rows: int
    hidden_size: int
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.peers.shape[0]

    def _check(self, num_programs: int) -> None:
        assert self.peers.dtype == torch.int64 and self.peers.is_contiguous()
        assert self.epochs.dtype == self.abort.dtype == torch.int32
        assert 0 <= self.rank < self.size and self.epochs.shape == (num_programs,)


@dataclass(frozen=True, slots=True)
class SymmetricRows(_SymmetricBuffers):
    """Buffers of ``symmetric_rows_bytes``, in which a program has a row."""

    def __post_init__(self) -> None:
        self._check(self.max_rows)
        assert self.hidden_size * self.dtype.itemsize % _CHUNK_BYTES == 0


def symmetric_rows_bytes(size: int, max_rows: int, hidden_size: int, dtype: torch.dtype) -> int:
    """Bytes of one rank's buffer: lines [2 slots, size senders, max_rows, chunks of a row]."""
    return 2 * size * max_rows * (hidden_size * dtype.itemsize // _CHUNK_BYTES) * LINE_BYTES.value


@triton.jit(do_not_specialize=["num_rows"])
def _all_reduce_kernel(
    partial_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    peers_ptr,
    epochs_ptr,
    abort_ptr,
    partial_stride,
    residual_stride,
    num_rows,
    eps,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    HIDDEN: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS_AND_NORMALISES: tl.constexpr,
    IS_COMPILED: tl.constexpr,
    PACK: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[r] = cast(sum over ranks of partial[r]), or that added to residual[r] in place and y[r] the norm of the sum.

    Grid: (num_rows,); a program has a row, in BLOCK chunks of CHUNK numbers, PACK of them a thread. Everything is a
    tensor of chunks, or a tuple of CHUNK tensors of numbers: lines are made and read without a word between threads.
    Partial sums of splits, the sum over ranks, the sum of squares, the root and the division are fp32; what is sent,
    and every sum, is rounded to y's dtype. Chunks past HIDDEN are zeros and aren't sent.
    """
    row = tl.program_id(0).to(tl.int64)
    # A thread's chunks are no neighbours, as far as the compiler sees. Else it loads two at once, and what it gives the
    # assembly is laid out in another way, so that words go between threads.
    chunks = tl.arange(0, BLOCK) ^ 1
    is_in = chunks < HIDDEN // CHUNK
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    if ADDS_AND_NORMALISES:
        weight = tl.load(_as_chunks(weight_ptr) + chunks, mask=is_in, other=0)
    own_buffer = tl.load(peers_ptr + RANK)
    buffers = ()  # of the others, in the order of sending: every rank begins with the next one
    for i in tl.static_range(1, SIZE):
        buffers += (tl.load(peers_ptr + (RANK + i) % SIZE),)
    start_after_predecessors(PDL)

    epoch = tl.load(epochs_ptr + row) + 1
    if NUM_SPLITS == 1 and partial_ptr.dtype.element_ty == dtype:
        own = tl.load(_as_chunks(partial_ptr + row * partial_stride) + chunks, mask=is_in, other=0)
    else:
        total = _load_fp32(partial_ptr + row * partial_stride, chunks, is_in, CHUNK)
        for split in tl.static_range(1, NUM_SPLITS):
            split_row = split * num_rows + row  # int64
            total = _add(total, _load_fp32(partial_ptr + split_row * partial_stride, chunks, is_in, CHUNK), CHUNK)
        own = _to_chunks(total, dtype, CHUNK)
    row_bytes: tl.constexpr = HIDDEN // CHUNK * LINE_BYTES
    slot = ((epoch & 1).to(tl.int64) * SIZE * MAX_ROWS + row) * row_bytes  # of sender 0
    lines = slot + chunks * LINE_BYTES  # [BLOCK], bytes from a buffer's start
    for i in tl.static_range(1, SIZE):
        _send_lines(buffers[i - 1] + RANK * MAX_ROWS * row_bytes + lines, own, epoch, is_in, IS_COMPILED)
    if ADDS_AND_NORMALISES:
        residual_ptrs = _as_chunks(residual_ptr + row * residual_stride) + chunks
        residual = _to_numbers(tl.load(residual_ptrs, mask=is_in, other=0), dtype, CHUNK)

    received = _poll_lines(
        own_buffer + lines, is_in, epoch, abort_ptr, SIZE, RANK, MAX_ROWS * row_bytes, IS_COMPILED, PACK
    )
    total = _to_numbers(own if RANK == 0 else received[0], dtype, CHUNK)
    for rank in tl.static_range(1, SIZE):
        of_rank = own if rank == RANK else received[rank - (rank > RANK)]
        total = _add(total, _to_numbers(of_rank, dtype, CHUNK), CHUNK)
    y = _to_chunks(total, dtype, CHUNK)
    if ADDS_AND_NORMALISES:
        summed = _to_chunks(_add(_to_numbers(y, dtype, CHUNK), residual, CHUNK), dtype, CHUNK)
        tl.store(residual_ptrs, summed, mask=is_in)
        y = _normalise_row(summed, weight, eps, dtype, CHUNK, HIDDEN)
    tl.store(_as_chunks(y_ptr + row * HIDDEN) + chunks, y, mask=is_in)
    tl.debug_barrier()  # all threads have read the old count
    tl.store(epochs_ptr + row, epoch)


@triton.jit
def _as_chunks(pointer):
    return pointer.to(tl.pointer_type(tl.int64), bitcast=True)


@triton.jit
def _to_numbers(chunks, dtype: tl.constexpr, CHUNK: tl.constexpr):
    """Chunks of CHUNK numbers of dtype → a tuple of CHUNK tensors of numbers, fp32."""
    numbers = ()
    for i in tl.static_range(CHUNK):
        bits = (chunks >> (i * 64 // CHUNK)).to(tl.int16 if CHUNK == 4 else tl.int32)
        numbers += (bits.to(dtype, bitcast=True).to(tl.float32),)
    return numbers


@triton.jit
def _to_chunks(numbers, dtype: tl.constexpr, CHUNK: tl.constexpr):
    """The inverse of ``_to_numbers``; rounds to dtype."""
    chunks = tl.zeros(numbers[0].shape, tl.int64)
    for i in tl.static_range(CHUNK):
        bits = numbers[i].to(dtype).to(tl.uint16 if CHUNK == 4 else tl.uint32, bitcast=True)
        chunks |= bits.to(tl.int64) << (i * 64 // CHUNK)
    return chunks


@triton.jit
def _load_fp32(pointer, chunks, is_in, CHUNK: tl.constexpr):
    """CHUNK fp32 numbers a chunk, as ``_to_numbers`` has them."""
    numbers = ()
    for i in tl.static_range(CHUNK // 2):
        pairs = tl.load(_as_chunks(pointer) + chunks * (CHUNK // 2) + i, mask=is_in, other=0)
        numbers += _to_numbers(pairs, tl.float32, 2)
    return numbers


@triton.jit
def _add(a, b, CHUNK: tl.constexpr):
    sums = ()
    for i in tl.static_range(CHUNK):
        sums += (a[i] + b[i],)
    return sums


@triton.jit
def _normalise_row(x, weight, eps, dtype: tl.constexpr, CHUNK: tl.constexpr, HIDDEN: tl.constexpr):
    """``rms_norm_triton._normalise`` of one row in chunks."""
    numbers = _to_numbers(x, dtype, CHUNK)
    weights = _to_numbers(weight, dtype, CHUNK)
    squares = numbers[0] * numbers[0]
    for i in tl.static_range(1, CHUNK):
        squares += numbers[i] * numbers[i]
    mean_square = tl.sum(squares, axis=0) * (1.0 / HIDDEN)
    inverse_rms = tl.div_rn(1.0, tl.sqrt_rn(mean_square + eps))
    products = ()
    for i in tl.static_range(CHUNK):
        products += ((numbers[i] * inverse_rms).to(dtype).to(tl.float32) * weights[i],)
    return _to_chunks(products, dtype, CHUNK)


@triton.jit
def _send_lines(addresses, chunks, epoch, is_in, IS_COMPILED: tl.constexpr):
    """Store lines at [BLOCK] addresses; compiled, in one store of 16 bytes each."""
    if IS_COMPILED:
        tl.inline_asm_elementwise(
            """{
            .reg .pred is_in;
            .reg .b32 low, high;
            setp.ne.b32 is_in, $4, 0;
            mov.b64 {low, high}, $2;
            @is_in st.volatile.global.v4.b32 [$1], {low, $3, high, $3};
            mov.b32 $0, 0;
            }""",
            "=r,l,l,r,r",
            (addresses, chunks, epoch, is_in.to(tl.int32)),
            dtype=tl.int32,  # an assembly has a result
            is_pure=False,
            pack=1,
        )
    else:
        flag = epoch.to(tl.int64) << 32
        pointers = addresses.to(tl.pointer_type(tl.int64))
        tl.store(pointers, (chunks & 0xFFFFFFFF) | flag, mask=is_in)
        tl.store(pointers + 1, ((chunks >> 32) & 0xFFFFFFFF) | flag, mask=is_in)


@triton.jit
def _poll_lines(
    addresses,
    is_in,
    epoch,
    abort_ptr,
    SIZE: tl.constexpr,
    RANK: tl.constexpr,
    SENDER_BYTES: tl.constexpr,
    IS_COMPILED: tl.constexpr,
    PACK: tl.constexpr,
):
    """Wait for every other rank's lines: a tuple, in the order of ranks, of their chunks, [BLOCK].

    Compiled, each thread waits for its own lines, of all senders at once, and for no other thread. ``addresses`` are
    those of sender 0's lines.
    """
    if IS_COMPILED:
        assembly: tl.constexpr = _poll_assembly(SIZE, RANK, SENDER_BYTES, PACK)
        constraints: tl.constexpr = _poll_constraints(SIZE, PACK)
        operands = (addresses, epoch, is_in.to(tl.int32), abort_ptr.to(tl.int64))
        return _inline_assembly_of_int64s(assembly, constraints, operands, SIZE - 1, PACK)
    received = ()
    for sender in tl.static_range(SIZE):
        if sender != RANK:
            pointers = (addresses + sender * SENDER_BYTES).to(tl.pointer_type(tl.int64))
            waits = 1
            low, high = tl.zeros(is_in.shape, tl.int64), tl.zeros(is_in.shape, tl.int64)
            while waits != 0:
                low = tl.load(pointers, mask=is_in, other=0, volatile=True)
                high = tl.load(pointers + 1, mask=is_in, other=0, volatile=True)
                is_late = is_in & (((low >> 32) != epoch) | ((high >> 32) != epoch))
                waits = tl.max(is_late.to(tl.int32), axis=0) * (tl.load(abort_ptr, volatile=True) == 0).to(tl.int32)
            received += ((low & 0xFFFFFFFF) | (high << 32),)
    return received


@triton.constexpr_function
def _poll_assembly(size, rank, sender_bytes, pack):
    """PTX that waits for ``pack`` lines of every other rank; operands as in ``_poll_constraints``."""
    senders = [sender for sender in range(size) if sender != rank]
    num_lines = (size - 1) * pack  # by sender, then by line
    first = num_lines
    epoch, abort = f"${first + pack}", f"${first + 3 * pack}"
    code = ["{", ".reg .pred late, looks;", ".reg .b32 polls, gone;"]
    for p in range(pack):
        code += [f".reg .pred awaited{p};", f"setp.ne.b32 awaited{p}, ${first + 2 * pack + p}, 0;"]
    for i in range(num_lines):
        code += [
            f".reg .b32 low{i}, low_flag{i}, high{i}, high_flag{i};",
            f"mov.b32 low{i}, 0;",
            f"mov.b32 high{i}, 0;",
        ]
        code += [f"mov.b32 low_flag{i}, {epoch};", f"mov.b32 high_flag{i}, {epoch};"]
    code += ["mov.b32 polls, 0;", "POLL:"]
    for i in range(num_lines):
        registers = f"low{i}, low_flag{i}, high{i}, high_flag{i}"
        address = f"${first + i % pack} + {senders[i // pack] * sender_bytes}"
        code += [f"@awaited{i % pack} ld.volatile.global.v4.b32 {{{registers}}}, [{address}];"]
    code += ["add.u32 polls, polls, 1;", f"and.b32 gone, polls, {_POLLS_A_LOOK.value - 1};"]
    code += ["setp.eq.u32 looks, gone, 0;", "mov.b32 gone, 0;", f"@looks ld.volatile.global.b32 gone, [{abort}];"]
    code += ["setp.ne.b32 late, gone, gone;"]
    for i in range(num_lines):
        code += [f"setp.ne.or.b32 late, {flag}_flag{i}, {epoch}, late;" for flag in ("low", "high")]
    code += ["setp.eq.and.b32 late, gone, 0, late;", "@late bra POLL;"]
    code += [f"mov.b64 ${i}, {{low{i}, high{i}}};" for i in range(num_lines)]
    return " ".join([*code, "}"])


@triton.constexpr_function
def _poll_constraints(size, pack):
    """Of ``_poll_assembly``. Out: chunks, by sender and then by line. In, each ``pack`` times: addresses of sender 0's
    lines, epochs, whether a line is awaited (else its chunk is 0), the address of the word that says to give up.
    """
    return ",".join(["=&l"] * ((size - 1) * pack) + ["l"] * pack + ["r"] * (2 * pack) + ["l"] * pack)


@core.extern
def _inline_assembly_of_int64s(assembly, constraints, operands, count, pack, _semantic=None):
    """``tl.inline_asm_elementwise`` with so many results: a kernel can't name a tuple of types."""
    dtypes = (tl.int64,) * core._unwrap_if_constexpr(count)
    return tl.inline_asm_elementwise(assembly, constraints, operands, dtypes, False, pack, _semantic=_semantic)


def all_reduce_add_rms_norm_triton(
    partial: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    rows: SymmetricRows,
    *,
    num_warps: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``all_reduce_add_rms_norm_reference`` in one kernel; writes the sum into ``residual`` in place and returns it.

    Args:
        partial: this rank's, [num_rows, hidden_size] of residual's dtype, or [num_splits, num_rows, hidden_size] fp32.
        residual: [num_rows, hidden_size], at most ``rows.max_rows`` rows.
        weight: [hidden_size].
        eps: added to the mean square.
        rows: where ranks meet. Every rank launches the same sequence of row counts, in one stream.
        num_warps: as Triton means it; None = a chunk a thread, if there are threads enough.
    """
    assert residual.dtype == rows.dtype and residual.shape == partial.shape[-2:] and residual.stride(1) == 1
    y = _launch_all_reduce(partial, residual, weight, eps, rows, num_warps)
    return y, residual


def all_reduce_triton(partial: torch.Tensor, rows: SymmetricRows, *, num_warps: int | None = None) -> torch.Tensor:
    """``all_reduce_reference`` in one kernel, into a new tensor; arguments as of ``all_reduce_add_rms_norm_triton``."""
    return _launch_all_reduce(partial, None, None, 0.0, rows, num_warps)


def _launch_all_reduce(
    partial: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    rows: SymmetricRows,
    num_warps: int | None,
) -> torch.Tensor:
    num_rows, hidden_size = partial.shape[-2:]
    assert num_rows <= rows.max_rows and hidden_size == rows.hidden_size
    assert partial.stride(-1) == 1 and partial.dtype == (rows.dtype if partial.dim() == 2 else torch.float32)
    assert partial.dim() == 2 or partial.is_contiguous()
    assert all(_has_whole_chunks(tensor) for tensor in (partial, residual, weight) if tensor is not None)
    y = torch.empty((num_rows, hidden_size), dtype=rows.dtype, device=partial.device)
    if num_rows == 0:
        return y
    device = device_of(partial.device.index)
    chunk = _CHUNK_BYTES // rows.dtype.itemsize
    block = max(triton.next_power_of_2(hidden_size // chunk), 32)
    num_warps = num_warps or min(block // 32, _MAX_WARPS)
    pack = max(block // (32 * num_warps), 1)
    _all_reduce_kernel[(num_rows,)](
        partial,
        residual,
        weight,
        y,
        rows.peers,
        rows.epochs,
        rows.abort,
        partial.stride(-2),
        0 if residual is None else residual.stride(0),
        num_rows,
        eps,
        RANK=rows.rank,
        SIZE=rows.size,
        MAX_ROWS=rows.max_rows,
        NUM_SPLITS=partial.shape[0] if partial.dim() == 3 else 1,
        HIDDEN=hidden_size,
        CHUNK=chunk,
        BLOCK=block,
        ADDS_AND_NORMALISES=residual is not None,
        IS_COMPILED=device.architecture > 0,
        PACK=pack,
        PDL=device.launches_early,
        num_warps=num_warps,
        launch_pdl=device.launches_early,
    )
    return y


def _has_whole_chunks(tensor: torch.Tensor) -> bool:
    strides = (stride * tensor.element_size() for stride in tensor.stride()[:-1])
    return tensor.data_ptr() % _CHUNK_BYTES == 0 and all(stride % _CHUNK_BYTES == 0 for stride in strides)


@dataclass(frozen=True, slots=True)
class SymmetricBlocks(_SymmetricBuffers):
    """Buffers of ``symmetric_blocks_bytes``, in which a program has a block of rows.

    Attributes:
        tickets: [2] int32, zeros before the first launch: blocks that are taken, and that are done, of one under way.
    """

    tickets: torch.Tensor

    def __post_init__(self) -> None:
        self._check(num_blocks(self.max_rows, self.hidden_size))
        assert self.tickets.dtype == torch.int32


def rows_of_block(hidden_size: int) -> int:
    """How many rows travel under one flag."""
    return max(_BLOCK_NUMBERS // triton.next_power_of_2(hidden_size), 1)


def num_blocks(num_rows: int, hidden_size: int) -> int:
    """How many blocks so many rows are."""
    return -(-num_rows // rows_of_block(hidden_size))


def symmetric_blocks_bytes(size: int, max_rows: int, hidden_size: int, dtype: torch.dtype) -> int:
    """Bytes of one rank's buffer: flags [size senders, blocks] int32, then rows [2 slots, size, max_rows, hidden]."""
    return _flags_bytes(size, max_rows, hidden_size) + 2 * size * max_rows * hidden_size * dtype.itemsize


def _flags_bytes(size: int, max_rows: int, hidden_size: int) -> int:
    return -(-size * num_blocks(max_rows, hidden_size) * 4 // 256) * 256


@triton.jit(do_not_specialize=["num_rows"])
def _block_all_reduce_kernel(
    partial_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    peers_ptr,
    epochs_ptr,
    tickets_ptr,
    abort_ptr,
    partial_stride,
    residual_stride,
    num_rows,
    eps,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    FLAGS_NUMBERS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS_BLOCK: tl.constexpr,
    ADDS_AND_NORMALISES: tl.constexpr,
    PDL: tl.constexpr,
):
    """As ``_all_reduce_kernel``, ROWS rows a program, which follow each other in memory wherever they are.

    Grid: (ceil(num_rows / ROWS),). Rounds as that kernel does; columns past HIDDEN and rows past num_rows aren't sent.
    """
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    columns = tl.arange(0, BLOCK)
    if ADDS_AND_NORMALISES:
        weight = tl.load(weight_ptr + columns, mask=columns < HIDDEN, other=0.0)
    start_after_predecessors(PDL)

    block = tl.atomic_add(tickets_ptr, 1)
    epoch = tl.load(epochs_ptr + block) + 1
    rows = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = (rows < num_rows)[:, None] & (columns < HIDDEN)[None, :]
    own = tl.load(partial_ptr + rows[:, None] * partial_stride + columns[None, :], mask=mask, other=0.0)
    # Where sender 0's rows of this launch lie in a buffer.
    numbers = ((epoch & 1).to(tl.int64) * SIZE * MAX_ROWS + rows)[:, None] * HIDDEN + columns[None, :]
    for i in tl.static_range(1, SIZE):
        buffer = tl.load(peers_ptr + (RANK + i) % SIZE)
        tl.store(_numbers_of(buffer, FLAGS_NUMBERS, dtype) + RANK * MAX_ROWS * HIDDEN + numbers, own, mask=mask)
    tl.debug_barrier()  # all threads have stored
    ranks = tl.arange(0, RANKS_BLOCK)
    is_peer = (ranks < SIZE) & (ranks != RANK)
    flags_at = tl.load(peers_ptr + ranks, mask=is_peer, other=0) + (RANK * MAX_BLOCKS + block) * 4
    new_flags = tl.zeros((RANKS_BLOCK,), tl.int32) + epoch
    tl.atomic_xchg(flags_at.to(tl.pointer_type(tl.int32)), new_flags, mask=is_peer, sem="release", scope="sys")
    if ADDS_AND_NORMALISES:
        residual_ptrs = residual_ptr + rows[:, None] * residual_stride + columns[None, :]
        residual = tl.load(residual_ptrs, mask=mask, other=0.0)

    own_buffer = tl.load(peers_ptr + RANK)
    flag_ptrs = own_buffer.to(tl.pointer_type(tl.int32)) + ranks * MAX_BLOCKS + block
    _wait_for_flags(flag_ptrs, epoch, is_peer, abort_ptr)
    tl.debug_barrier()  # no thread reads before one has seen the flags
    received_ptrs = _numbers_of(own_buffer, FLAGS_NUMBERS, dtype) + numbers
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            part = own
        else:
            part = tl.load(received_ptrs + rank * MAX_ROWS * HIDDEN, mask=mask, other=0.0, cache_modifier=".cg")
        total = part.to(tl.float32) if rank == 0 else total + part.to(tl.float32)
    if ADDS_AND_NORMALISES:
        y = _add_and_normalise(total, residual, residual_ptrs, mask, weight, eps, HIDDEN)
    else:
        y = total.to(dtype)
    tl.store(y_ptr + rows[:, None] * HIDDEN + columns[None, :], y, mask=mask)
    tl.store(epochs_ptr + block, epoch)
    if tl.atomic_add(tickets_ptr + 1, 1) == tl.num_programs(0) - 1:  # the last one: all have their tickets
        tl.store(tickets_ptr, 0)
        tl.store(tickets_ptr + 1, 0)


@triton.jit
def _numbers_of(buffer, FLAGS_NUMBERS: tl.constexpr, dtype: tl.constexpr):
    """Pointer to the first number of a buffer of blocks.

    The compiler knows that it is aligned, so stores are of 16 bytes. It is told of the conversion itself: it takes
    additions out of one, and forgets what was said of them.
    """
    return tl.multiple_of(buffer.to(tl.pointer_type(dtype)), 16) + FLAGS_NUMBERS


def block_all_reduce_add_rms_norm_triton(
    partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, blocks: SymmetricBlocks
) -> tuple[torch.Tensor, torch.Tensor]:
    """``all_reduce_add_rms_norm_reference`` in one kernel; writes the sum into ``residual`` in place and returns it.

    Args:
        partial: this rank's, [num_rows, hidden_size] of residual's dtype.
        residual: [num_rows, hidden_size], at most ``blocks.max_rows`` rows.
        weight: [hidden_size].
        eps: added to the mean square.
        blocks: where ranks meet. Every rank launches the same sequence of row counts, in one stream.
    """
    assert residual.shape == partial.shape and residual.dtype == blocks.dtype and residual.stride(1) == 1
    return _launch_block_all_reduce(partial, residual, weight, eps, blocks), residual


def block_all_reduce_triton(partial: torch.Tensor, blocks: SymmetricBlocks) -> torch.Tensor:
    """``all_reduce_reference`` in one kernel, into a new tensor; arguments as of the fused one."""
    return _launch_block_all_reduce(partial, None, None, 0.0, blocks)


def _launch_block_all_reduce(
    partial: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    blocks: SymmetricBlocks,
) -> torch.Tensor:
    num_rows, hidden_size = partial.shape
    assert num_rows <= blocks.max_rows and hidden_size == blocks.hidden_size
    assert partial.stride(1) == 1 and partial.dtype == blocks.dtype
    y = torch.empty((num_rows, hidden_size), dtype=blocks.dtype, device=partial.device)
    if num_rows == 0:
        return y
    launches_early = device_of(partial.device.index).launches_early
    block = triton.next_power_of_2(hidden_size)
    rows = rows_of_block(hidden_size)
    _block_all_reduce_kernel[(num_blocks(num_rows, hidden_size),)](
        partial,
        residual,
        weight,
        y,
        blocks.peers,
        blocks.epochs,
        blocks.tickets,
        blocks.abort,
        partial.stride(0),
        0 if residual is None else residual.stride(0),
        num_rows,
        eps,
        RANK=blocks.rank,
        SIZE=blocks.size,
        MAX_ROWS=blocks.max_rows,
        MAX_BLOCKS=len(blocks.epochs),
        FLAGS_NUMBERS=_flags_bytes(blocks.size, blocks.max_rows, hidden_size) // blocks.dtype.itemsize,
        HIDDEN=hidden_size,
        BLOCK=block,
        ROWS=rows,
        RANKS_BLOCK=triton.next_power_of_2(blocks.size),
        ADDS_AND_NORMALISES=residual is not None,
        PDL=launches_early,
        num_warps=block_warps(hidden_size),
        launch_pdl=launches_early,
    )
    return y


def block_warps(hidden_size: int) -> int:
    """Of a program."""
    return min(max(rows_of_block(hidden_size) * triton.next_power_of_2(hidden_size) // _NUMBERS_A_WARP, 1), 16)


@triton.jit(do_not_specialize=["num_rows"])
def _sum_add_rms_norm_kernel(
    partial_ptr,
    received_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    partial_stride,
    sender_stride,
    received_stride,
    residual_stride,
    num_rows,
    eps,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """``_add_rms_norm_kernel`` of cast(sum over ranks, in their order, in fp32): partial of RANK, received of others.

    Grid: (ceil(num_rows / ROWS),); a program has ROWS whole rows. received is [SIZE, rows, HIDDEN]; it is read after
    the wait, like all that isn't a weight.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < HIDDEN)[None, :]
    residual_ptrs = residual_ptr + rows[:, None] * residual_stride + columns[None, :]
    partial_ptrs = partial_ptr + rows[:, None] * partial_stride + columns[None, :]
    received_ptrs = received_ptr + rows[:, None] * received_stride + columns[None, :]
    weight = tl.load(weight_ptr + columns, mask=columns < HIDDEN, other=0.0)
    start_after_predecessors(PDL)
    residual = tl.load(residual_ptrs, mask=mask, other=0.0)
    first_ptrs = partial_ptrs if RANK == 0 else received_ptrs
    total = tl.load(first_ptrs, mask=mask, other=0.0).to(tl.float32)
    for rank in tl.static_range(1, SIZE):
        received_ptrs += sender_stride
        if rank == RANK:
            total += tl.load(partial_ptrs, mask=mask, other=0.0).to(tl.float32)
        else:
            total += tl.load(received_ptrs, mask=mask, other=0.0).to(tl.float32)
    y = _add_and_normalise(total, residual, residual_ptrs, mask, weight, eps, HIDDEN)
    tl.store(y_ptr + rows[:, None] * HIDDEN + columns[None, :], y, mask=mask)


def sum_add_rms_norm_triton(
    partial: torch.Tensor,
    received: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    rank: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``all_reduce_add_rms_norm_reference`` of rows that have arrived; writes the sum into ``residual`` in place.

    Args:
        partial: this rank's, [num_rows, hidden_size] of residual's dtype.
        received: [size, at least num_rows, hidden_size] of that dtype, others' partials; this rank's isn't read.
        residual: [num_rows, hidden_size].
        weight: [hidden_size].
        eps: added to the mean square.
        rank: this one.

    Returns:
        (normalised, residual).
    """
    num_rows, hidden_size = residual.shape
    assert partial.shape == residual.shape and partial.dtype == received.dtype == residual.dtype
    assert received.shape[1] >= num_rows and received.shape[2] == hidden_size and 0 <= rank < received.shape[0]
    assert partial.stride(1) == received.stride(2) == residual.stride(1) == 1
    y = torch.empty((num_rows, hidden_size), dtype=residual.dtype, device=residual.device)
    if num_rows == 0:
        return y, residual
    launches_early = device_of(residual.device.index).launches_early
    block, rows, num_warps = _tile(hidden_size)
    _sum_add_rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
        partial,
        received,
        residual,
        weight,
        y,
        partial.stride(0),
        received.stride(0),
        received.stride(1),
        residual.stride(0),
        num_rows,
        eps,
        RANK=rank,
        SIZE=received.shape[0],
        HIDDEN=hidden_size,
        BLOCK=block,
        ROWS=rows,
        PDL=launches_early,
        num_warps=num_warps,
        launch_pdl=launches_early,
    )
    return y, residual


@triton.jit
def _signal_kernel(peers_ptr, counter_ptr, flags_offset, RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Store counter + 1 into word RANK of every other rank's flags, then into the counter.

    Grid: (1,). A release for the whole system: what the stream did before is seen by whoever sees the flag.
    """
    epoch = tl.load(counter_ptr) + 1
    ranks = tl.arange(0, BLOCK)
    is_peer = (ranks < SIZE) & (ranks != RANK)
    buffers = tl.load(peers_ptr + ranks, mask=is_peer, other=0)
    flag_ptrs = (buffers + flags_offset + RANK * 4).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(flag_ptrs, tl.full((BLOCK,), 0, tl.int32) + epoch, mask=is_peer, sem="release", scope="sys")
    tl.debug_barrier()  # all threads have read the old count
    tl.store(counter_ptr, epoch)


@triton.jit
def _wait_kernel(flags_ptr, counter_ptr, abort_ptr, RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Wait until every other rank's word of our flags has come to counter + 1, which becomes the counter.

    Grid: (1,). A flag may be further on: its rank has signalled again. The difference is compared, so it may wrap.
    """
    epoch = tl.load(counter_ptr) + 1
    ranks = tl.arange(0, BLOCK)
    _wait_for_flags(flags_ptr + ranks, epoch, (ranks < SIZE) & (ranks != RANK), abort_ptr)
    tl.debug_barrier()  # all threads have read the old count
    tl.store(counter_ptr, epoch)


@triton.jit
def _wait_for_flags(flag_ptrs, epoch, is_awaited, abort_ptr):
    """Until all awaited flags have come to the epoch, or somebody gives up."""
    num_late = 1
    polls = 0
    while num_late > 0:
        flags = tl.atomic_add(flag_ptrs, 0, mask=is_awaited, sem="acquire", scope="sys")
        num_late = tl.sum((is_awaited & (epoch - flags > 0)).to(tl.int32), axis=0)
        polls += 1
        if polls % _POLLS_A_LOOK == 0:
            num_late *= (tl.load(abort_ptr, volatile=True) == 0).to(tl.int32)


def signal_triton(peers: torch.Tensor, flags_offset: int, counter: torch.Tensor, rank: int) -> None:
    """Tell every other rank that what this stream has done so far, copies to them above all, is done.

    Of the same signals and waits, every rank launches the same number. What a rank copies to after signal e may be
    read by the other until it signals e + 1, if it does so after its reads: two places, in turn, are enough then.

    Args:
        peers: [size] int64, addresses of all ranks' buffers.
        flags_offset: bytes from there to a buffer's flags, [size] int32, zeros before the first signal.
        counter: [1] int32, 0 before the first signal; of the signals alone.
        rank: this one.
    """
    size = peers.shape[0]
    assert peers.dtype == torch.int64 and counter.dtype == torch.int32 and flags_offset % 4 == 0 and 0 <= rank < size
    block = triton.next_power_of_2(size)
    _signal_kernel[(1,)](peers, counter, flags_offset, RANK=rank, SIZE=size, BLOCK=block, num_warps=1)


def wait_triton(flags: torch.Tensor, counter: torch.Tensor, abort: torch.Tensor, rank: int) -> None:
    """Make the stream wait until every other rank has signalled as often as this has waited, this time included.

    Args:
        flags: [size] int32, this rank's own.
        counter: [1] int32, 0 before the first wait; of the waits alone.
        abort: [1] int32, 0: anything else ends the wait.
        rank: this one.
    """
    assert flags.dtype == counter.dtype == abort.dtype == torch.int32 and 0 <= rank < flags.shape[0]
    size = flags.shape[0]
    block = triton.next_power_of_2(size)
    _wait_kernel[(1,)](flags, counter, abort, RANK=rank, SIZE=size, BLOCK=block, num_warps=1)
