"""The interpreter of PTX: what it works out, and what it refuses."""

import numpy as np
import pytest
from ptx.arithmetic import rule
from ptx.machine import Device
from ptx.memory import Fault
from ptx.source import Kernel, parse

WARP = 32


def kernel_of(body: str) -> Kernel:
    """A kernel with these instructions. They are given %rd1, its memory; %rd2, 4 bytes there for each thread of the grid; %r1, the number
    of the thread in its block; %rd3, four times that number.
    """
    (kernel,) = parse(f"""
    .version 8.0
    .target sm_90
    .shared .align 16 .b8 room[1024];
    .visible .entry kernel(.param .u64 kernel_param_0)
    {{
        .reg .pred %p<9>; .reg .b32 %r<40>; .reg .b64 %rd<20>; .reg .f32 %f<20>; // registers
        ld.param.u64 %rd1, [kernel_param_0];
        mov.u32 %r1, %tid.x;
        mov.u32 %r2, %ctaid.x;
        mov.u32 %r3, %ntid.x;
        mul.lo.s32 %r2, %r2, %r3;
        add.s32 %r2, %r2, %r1;
        mul.wide.s32 %rd2, %r2, 4;
        add.s64 %rd2, %rd2, %rd1;
        mul.wide.s32 %rd3, %r1, 4;
        {body}
        ret;
    }}""").values()
    return kernel


def run(body: str, out: np.ndarray, threads: int = WARP, blocks: int = 1, device: Device | None = None) -> np.ndarray:
    """What a kernel makes of `out`."""
    device = device or Device()
    address = device.memory.allocate(out.nbytes)
    device.write(address, out.tobytes())
    device.launch(kernel_of(body), (blocks, 1, 1), (threads, 1, 1), [np.uint64(address).tobytes()])
    return np.frombuffer(device.memory.read(address, out.nbytes), out.dtype).reshape(out.shape)


def zeros(n: int = WARP, dtype: type = np.uint32) -> np.ndarray:
    return np.zeros(n, dtype)


# --- what it works out ----------------------------------------------------------------------------------------------------------------


def given(opcode: str, *values: object) -> object:
    its_rule = rule(opcode)
    assert its_rule is not None
    arrays = [np.array([value], dtype) for value, dtype in zip(values, its_rule.sources, strict=True)]
    (result,) = np.asarray(its_rule.function(*arrays), its_rule.result)
    return result


@pytest.mark.parametrize(
    ("opcode", "values", "expected"),
    [
        ("add.s32", (2**31 - 1, 1), -(2**31)),
        ("mul.wide.s32", (-(2**31), 2**31 - 1), -(2**31) * (2**31 - 1)),
        ("div.s64", (-7, 2), -3),
        ("rem.s64", (-7, 2), -1),
        ("shl.b32", (1, 32), 0),
        ("shr.u32", (2**31, 32), 0),
        ("shr.s32", (-(2**31), 40), -1),
        ("cvt.rzi.s32.f32", (-1.9,), -1),
        ("cvt.rzi.s32.f32", (np.nan,), 0),
        ("cvt.rzi.s32.f32", (1e20,), 2**31 - 1),
        ("cvt.rn.f16.f32", (2049.0,), 2048.0),  # half to even
        ("cvt.s64.s32", (-5,), -5),
        ("cvt.u64.u32", (2**32 - 1,), 2**32 - 1),
        ("max.f32", (np.nan, 1.0), 1.0),
        ("setp.lt.f32", (np.nan, 1.0), False),
        ("setp.ne.f32", (np.nan, 1.0), False),
        ("setp.neu.f32", (np.nan, 1.0), True),
        ("setp.leu.f32", (np.nan, 1.0), True),
        ("setp.leu.f32", (2.0, 1.0), False),
        ("setp.equ.f32", (2.0, 1.0), False),
        ("setp.equ.f32", (np.nan, 1.0), True),
        ("setp.lt.u32", (2**32 - 1, 1), False),
        ("setp.lt.s32", (-1, 1), True),
        ("selp.b32", (1, 2, False), 2),
    ],
)
def test_an_instruction_gives_what_the_manual_says(opcode, values, expected):
    assert given(opcode, *values) == expected


@pytest.mark.parametrize("opcode", ["mad.lo.s32", "ex2.approx.f32", "add.ftz.f32", "cvt.rni.s32.f32", "mul.rz.f32"])
def test_what_is_not_known_is_refused(opcode):
    assert rule(opcode) is None
    with pytest.raises(ValueError, match=f"not known: {opcode}"):
        run(f"{opcode} %f1, %f1, %f1;", zeros())


# --- what it refuses ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ld.global.u32 %r5, [%rd2+4];", "is not allocated"),
        ("ld.global.u32 %r5, [%rd2+-4];", "is not allocated"),
        ("ld.global.u32 %r5, [%rd2+120];", "is not allocated"),
        ("ld.global.u32 %r5, [%rd2+2];", "not aligned"),
        ("ld.global.v4.u32 {%r5, %r6, %r7, %r8}, [%rd2];", "16 bytes at .*: not aligned"),
        ("st.shared.u32 [%rd3+1000], %r1;", "outside"),
        ("st.global.u32 [%rd1], %r1;", "a race: thread"),
        ("ld.global.u32 %r5, [%rd1]; st.global.u32 [%rd2], %r1;", "a race: thread"),
        ("setp.eq.s32 %p1, %r1, 3; @%p1 ret; bar.sync 0;", "thread 3 has ended, and others wait"),
        ("setp.eq.s32 %p1, %r1, 3; @%p1 bra two; bar.sync 0; ret; two: bar.sync 0;", "lanes of a warp wait at different barriers"),
        ("setp.eq.s32 %p1, %r1, 3; @%p1 bra end; shfl.sync.bfly.b32 %r5, %r1, 1, 31, -1; end: ret;", "not all lanes of a warp"),
        ("atom.shared.add.u32 %r5, [room], 2; ld.shared.u32 %r6, [room]; st.shared.u32 [room], %r6;", "a race: thread"),
        ("atom.shared.add.u32 %r5, [room], 2; ld.shared.u32 %r6, [room];", "a race: thread"),
        ("ld.shared.u32 %r6, [room]; atom.shared.add.u32 %r5, [room], 2;", "an atomic operation where something was touched"),
        ("again: bra.uni again;", "no end after"),
    ],
)
def test_what_a_gpu_would_do_wrong_is_a_fault(monkeypatch, text, message):
    monkeypatch.setattr("ptx.machine._PATIENCE", 1000)
    with pytest.raises(Fault, match=message):
        run(text, zeros())


REVERSED = """
    mov.u64 %rd5, room; add.s64 %rd6, %rd5, %rd3; st.shared.u32 [%rd6], %r1;
    sub.s32 %r5, 63, %r1; mul.wide.s32 %rd4, %r5, 4; add.s64 %rd4, %rd4, %rd5; ld.shared.u32 %r6, [%rd4]; st.global.u32 [%rd2], %r6;
"""


def test_threads_of_a_block_race_where_no_barrier_is_between():
    with pytest.raises(Fault, match=r"a race: thread .* reads"):
        run(REVERSED, zeros(64), 64)


def test_halves_of_a_word_may_be_two_threads():
    mine = "mul.wide.s32 %rd4, %r1, 2; add.s64 %rd4, %rd4, %rd1; ld.global.u16 %r5, [%rd4]; {} st.global.u16 [%rd4], %r1;"
    np.testing.assert_array_equal(run(mine.format(""), zeros(dtype=np.uint16)), np.arange(WARP))
    with pytest.raises(Fault, match="a race: thread"):
        run(mine.format("ld.global.u32 %r6, [%rd1];"), zeros(dtype=np.uint16))


@pytest.mark.parametrize("touch", ["st.global.u32 [%rd4], %r1;", "ld.global.u32 %r5, [%rd4+128]; st.global.u32 [%rd2], %r1;"])
def test_blocks_race(touch):
    """Whatever they write, and whatever barriers each has."""
    with pytest.raises(Fault, match="a race: thread"):
        run("add.s64 %rd4, %rd1, %rd3; bar.sync 0;" + touch, zeros(64), blocks=2)


def test_freed_memory_cannot_be_read():
    device = Device()
    address = device.memory.allocate(64)
    device.memory.free(address)
    for use in (lambda: device.memory.read(address, 4), lambda: device.memory.free(address)):
        with pytest.raises(Fault, match="allocated"):
            use()
