"""Copies of pages and slots in host memory: where they lie, how they get there and back, and memory that is pinned."""

import gc
import mmap
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mstar.engine.resources import page_tensors
from mstar.engine.resources.host_pool import HostPool
from mstar.engine.resources.page_tensors import pinned_zeros

LAYERS, PAGES, SHAPE = 3, 9, (4, 2)
PAGE_BYTES = LAYERS * 4 * 2 * 4
DIRECT, ONE, SOME, ALL = 0, 1, 2 * PAGE_BYTES + 1, 1 << 20
"""Bytes that a device buffer may take: none; a page, which it always has; two; as many as there are."""


def pool(first: float = 0.0) -> Tensor:
    values = torch.arange(first, first + LAYERS * PAGES * 8, dtype=torch.float32)
    return values.view(LAYERS, PAGES, *SHAPE).clone()


def pages(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def test_a_page_on_the_host_is_one_piece_with_all_its_layers():
    host, device = HostPool(5, pool(), staging_bytes=DIRECT), pool(1000.0)
    host.store(device, pages(7, 2), pages(1, 5))
    assert host.rows.shape == (5, LAYERS, *SHAPE) and host.rows.is_contiguous()
    assert torch.equal(host.rows[0], device[:, 7]) and torch.equal(host.rows[4], device[:, 2])
    assert not host.rows[1:4].any()


@pytest.mark.parametrize("staging_bytes", [DIRECT, ONE, SOME, ALL])
def test_what_was_stored_comes_back_elsewhere_and_nothing_else_changes(staging_bytes: int):
    """In pieces as large as the buffer; host pages in runs, upwards and downwards, and apart."""
    device = pool(1000.0)
    host = HostPool(8, device, staging_bytes=staging_bytes)
    sources, places, targets = pages(8, 1, 3, 4, 0, 6), pages(4, 5, 6, 2, 1, 8), pages(2, 7, 1, 0, 5, 4)
    host.store(device, sources, places)
    assert not host.rows[[2, 6]].any()
    before, after = device.clone(), pool(5000.0)
    expected = after.clone()
    host.load(after, places, targets)
    expected[:, torch.from_numpy(targets).long()] = before[:, torch.from_numpy(sources).long()]
    assert torch.equal(after, expected) and torch.equal(device, before)


def test_every_bit_is_kept():
    """Of what is not a number as well."""
    bits = torch.randint(-(2**31), 2**31 - 1, (LAYERS, PAGES, *SHAPE), dtype=torch.int32)
    bits[:, 2] = 0x7FC12345
    device = bits.view(torch.float32)
    host = HostPool(3, device, staging_bytes=ALL)
    host.store(device, pages(2, 5), pages(3, 1))
    after = torch.zeros_like(device)
    host.load(after, pages(3, 1), pages(0, 1))
    assert torch.equal(after.view(torch.int32)[:, :2], bits[:, [2, 5]])


@pytest.mark.parametrize("staging_bytes", [ONE, SOME, ALL])
def test_between_host_and_device_one_piece_of_memory_is_copied_at_a_time(
    staging_bytes: int, monkeypatch: pytest.MonkeyPatch
):
    """What is in one piece at both ends needs no temporary on the host, so nobody waits for one."""
    device = pool()
    host = HostPool(8, device, staging_bytes=staging_bytes)
    sizes: list[int] = []
    copy = Tensor.copy_

    def watched(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        assert self.is_contiguous() and source.is_contiguous() and non_blocking
        assert (self.dtype, self.shape) == (source.dtype, source.shape)
        sizes.append(len(self))
        return copy(self, source, non_blocking)

    monkeypatch.setattr(Tensor, "copy_", watched)
    host.store(device, pages(1, 2, 3, 4), pages(5, 6, 7, 2))
    host.load(device, pages(5, 6, 7, 2), pages(4, 3, 2, 1))
    once = {ONE: [1, 1, 1, 1], SOME: [2, 1, 1], ALL: [3, 1]}[staging_bytes]
    assert sizes == 2 * once


class Runtime:
    """Of an accelerator: what it was asked, and what it answers."""

    def __init__(self, answer: int = 0) -> None:
        self.answer = answer
        self.calls: list[tuple[str, int, int]] = []

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.calls.append(("register", address, num_bytes))
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", address, 0))
        return 0


def played(monkeypatch: pytest.MonkeyPatch, answer: int = 0) -> Runtime:
    runtime = Runtime(answer)

    def check(code: int) -> None:
        if code:
            raise RuntimeError(f"out of memory ({code})")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", check)
    return runtime


def test_pinned_memory_is_as_large_as_its_tensor_and_begins_on_a_page_of_its_own(monkeypatch: pytest.MonkeyPatch):
    runtime = played(monkeypatch)
    ones = [pinned_zeros((5, 3, 7), torch.float32) for _ in range(2)]
    assert [call[2] for call in runtime.calls] == [5 * 3 * 7 * 4] * 2
    for tensor, (kind, address, _) in zip(ones, runtime.calls, strict=True):
        assert kind == "register" and address == tensor.data_ptr() and address % mmap.PAGESIZE == 0
        assert tensor.shape == (5, 3, 7) and tensor.dtype == torch.float32 and not tensor.any()
        tensor.fill_(2.0)


def test_memory_is_released_before_it_goes(monkeypatch: pytest.MonkeyPatch):
    runtime = played(monkeypatch)
    tensor = pinned_zeros((16,), torch.float32)
    address = tensor.data_ptr()
    gc.collect()
    assert len(runtime.calls) == 1
    del tensor
    gc.collect()
    assert runtime.calls[1:] == [("unregister", address, 0)]


def test_memory_that_cannot_be_pinned_is_used_as_it_is_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    runtime = played(monkeypatch, answer=2)
    forgotten: list[Any] = []
    monkeypatch.setattr(page_tensors, "_forget_error", lambda: forgotten.append(True))
    tensor = pinned_zeros((16,), torch.float32)
    assert forgotten == [True]
    tensor.fill_(1.0)
    assert tensor.sum() == 16
    (record,) = caplog.records
    assert "64 bytes" in record.message and "out of memory (2)" in record.message and "wait" in record.message
    del tensor
    gc.collect()
    assert [call[0] for call in runtime.calls] == ["register"]
