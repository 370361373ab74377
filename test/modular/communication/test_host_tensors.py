"""Tensors inside messages, with and without torch."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from mstar.communication import host_tensors
from mstar.communication.messages import HostTensor
from mstar.communication.tensor_bytes import as_bytes, dtype_name, dtype_named, of_bytes

NUMPY_DTYPES = ["bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"]
NUMPY_DTYPES += ["float16", "float32", "float64", "complex64"]


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)])
def test_arrays_and_tensors_of_every_dtype(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    packed = host_tensors.from_numpy(array)
    assert (packed.dtype, packed.shape, packed.data) == (dtype, shape, array.tobytes())
    back = host_tensors.to_numpy(packed)
    assert (back.dtype, back.shape, back.tolist()) == (array.dtype, shape, array.tolist())
    tensor = host_tensors.to_torch(packed)
    assert (tensor.dtype, tuple(tensor.shape)) == (getattr(torch, dtype), shape)
    assert tensor.tolist() == array.tolist()
    assert host_tensors.from_torch(tensor) == packed


def test_bfloat16_is_words_to_numpy_and_numbers_to_torch() -> None:
    tensor = torch.tensor([1.0, -2.5], dtype=torch.bfloat16)
    packed = host_tensors.from_torch(tensor)
    assert packed == HostTensor(
        "bfloat16", (2,), b"\x80\x3f\x20\xc0"
    )  # 1.0 and -2.5: sign, 8 exponent bits, 7 of mantissa
    words = host_tensors.to_numpy(packed)
    assert words.tolist() == [0x3F80, 0xC020]
    assert host_tensors.from_numpy(words, "bfloat16") == packed
    assert torch.equal(host_tensors.to_torch(packed), tensor)


def test_layout_does_not_matter() -> None:
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    turned = host_tensors.from_numpy(array.T)
    assert turned.data == np.ascontiguousarray(array.T).tobytes()
    assert host_tensors.from_torch(torch.from_numpy(array).T) == turned
    assert host_tensors.from_numpy(array.astype(">i4")).data == array.tobytes()
    assert as_bytes(torch.arange(4, dtype=torch.int16)[::2]).tolist() == [0, 0, 2, 0]


def test_as_bytes_is_a_view_where_it_can_be() -> None:
    tensor = torch.zeros(2, 2, dtype=torch.bfloat16)
    as_bytes(tensor)[0:2] = (0x80, 0x3F)
    assert tensor[0, 0] == 1.0
    raw = torch.zeros(8, dtype=torch.uint8)
    of_bytes(raw, torch.float32, (2, 1))[0] = 1.0
    assert raw.tolist() == [0, 0, 128, 63, 0, 0, 0, 0]


def test_the_results_can_be_written_to() -> None:
    packed = host_tensors.from_numpy(np.zeros(3, np.float32))
    host_tensors.to_torch(packed)[0] = 1.0
    assert host_tensors.to_numpy(packed).tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="read-only"):
        host_tensors.to_numpy(packed)[0] = 1.0


@pytest.mark.parametrize(
    "bad",
    [
        HostTensor("float32", (2,), b"\0" * 7),
        HostTensor("float32", (2,), b"\0" * 12),
        HostTensor("float32", (-1, -2), b"\0" * 8),
        HostTensor("object", (1,), b"\0" * 8),
        HostTensor("", (1,), b"\0"),
    ],
)
def test_bad_bytes_are_refused(bad: HostTensor) -> None:
    for read in (host_tensors.to_numpy, host_tensors.to_torch):
        with pytest.raises(ValueError, match=r"takes|unknown"):
            read(bad)


def test_what_does_not_travel_is_refused() -> None:
    with pytest.raises(ValueError, match="object"):
        host_tensors.from_numpy(np.array([object()]))
    with pytest.raises(ValueError, match="bfloat16"):
        host_tensors.from_numpy(np.zeros(2, np.float32), "bfloat16")
    with pytest.raises(ValueError, match="complex128"):
        host_tensors.from_torch(torch.zeros(1, dtype=torch.complex128))


def test_every_dtype_name_is_its_own_inverse() -> None:
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.bool, torch.uint64):
        assert dtype_named(dtype_name(dtype)) == dtype
        tensor = torch.zeros(3, dtype=dtype)
        assert torch.equal(
            host_tensors.to_torch(host_tensors.from_torch(tensor)).view(torch.uint8), tensor.view(torch.uint8)
        )


def test_arrays_need_no_torch() -> None:
    script = (
        "import sys, numpy as np\n"
        "from mstar.communication import host_tensors as h, address, arena, bus, loopback, wakeup\n"
        "h.to_numpy(h.from_numpy(np.zeros(3)))\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
