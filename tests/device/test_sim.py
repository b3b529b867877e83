"""The imitation itself does what tests of a device rest on."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from tests.device.devices import on_devices


def results_of_operators() -> list[tuple[str, bool]]:
    torch.manual_seed(0)
    found = []

    def check(name: str, compute: object, *tensors: torch.Tensor) -> None:
        expected = compute(*tensors)  # type: ignore[operator]
        got = compute(*(tensor.to("sim") for tensor in tensors))  # type: ignore[operator]
        pairs = zip(expected, got, strict=True) if isinstance(expected, tuple) else [(expected, got)]
        found.append((name, all(g.device.type == "sim" and torch.equal(e, g.cpu()) for e, g in pairs)))

    x, y = torch.randn(6, 4), torch.randn(4, 5)
    check("matmul", torch.matmul, x, y)
    check("views", lambda t: (t.t()[1:3].reshape(-1), t.view(3, 8)[1], t.unfold(0, 2, 1).sum(-1)), x)
    check("in place", lambda t: t.clone().add_(1).mul_(2).clamp_(min=0), x)
    check("topk", lambda t: t.topk(2, dim=1), x)
    check("index", lambda t: t[torch.tensor([0, 2])], x)
    check("masked", lambda t: t[t > 0], x)
    check("dtype", lambda t: t.to(torch.bfloat16).float(), x)
    check("cat", lambda t: torch.cat([t, t.flip(0)]), x)
    check("where", lambda t: torch.where(t > 0, t, torch.zeros_like(t)), x)
    check("softmax", lambda t: t.softmax(-1), x)
    check("resized", lambda t: torch.add(t, t, out=torch.empty(0, device=t.device)), x)
    check("foreach", lambda t: tuple(torch._foreach_mul([t, t + 1], 2.0)), x)
    check("unique", lambda t: torch.unique(t), torch.tensor([3, 1, 3, 2]))
    heads = torch.randn(3, 2, 2, 4, 8)
    expected = torch.nn.functional.scaled_dot_product_attention(*heads)
    got = torch.nn.functional.scaled_dot_product_attention(*heads.to("sim")).cpu()
    return [*found, ("attention", torch.allclose(expected, got, atol=1e-6))]  # another algorithm than the CPU's


def test_operators_give_the_cpus_results_on_the_device() -> None:
    assert [name for name, equal in on_devices(results_of_operators)[0] if not equal] == []


def touch_memory_of_the_device() -> int:
    tensor = torch.ones(4, device="sim")
    child = os.fork()
    if child == 0:
        import ctypes

        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        os.close(2)
        os._exit(int(ctypes.c_float.from_address(tensor.data_ptr()).value))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_the_host_cant_touch_the_devices_memory() -> None:
    assert on_devices(touch_memory_of_the_device) == [-signal.SIGSEGV]


def copies_that_nobody_waited_for() -> dict[str, object]:
    torch.sim.set_copy_delay(1_000_000)
    host = torch.arange(1000.0).pin_memory()
    start = time.monotonic()
    moved = host.to("sim", non_blocking=True)
    waited = time.monotonic() - start
    host.fill_(-1.0)  # before the copy has read it
    seen = moved[:3].cpu().tolist()
    back = torch.zeros(1000).pin_memory()
    back.copy_(torch.ones(1000, device="sim"), non_blocking=True)
    early = float(back.sum())
    torch.sim.synchronize()
    side = torch.sim.Stream()
    with torch.sim.stream(side):
        unfinished = torch.full((1000,), 5.0).pin_memory().to("sim", non_blocking=True)
    without_wait = unfinished.sum().isnan()  # another stream doesn't wait by itself
    missed = bool(without_wait)
    torch.sim.current_stream().wait_stream(side)
    return {
        "waited": waited, "seen": seen, "early": early, "late": float(back.sum()), "missed": missed,
        "after the event": float(unfinished.sum()),
    }  # fmt: skip


def test_a_missing_synchronisation_shows() -> None:
    found = on_devices(copies_that_nobody_waited_for)[0]
    assert found.pop("waited") < 0.8
    assert found == {
        "seen": [-1.0, -1.0, -1.0], "early": 0.0, "late": 1000.0, "missed": True, "after the event": 5000.0,
    }  # fmt: skip


def memory_of_a_device() -> list[object]:
    torch.sim.set_memory_limit(1 << 20)
    before = torch.sim.memory_allocated()
    kept = torch.empty(1 << 18, dtype=torch.uint8, device="sim")
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 1 MiB"):
        torch.empty(1 << 20, dtype=torch.uint8, device="sim")
    held, (left, total) = torch.sim.memory_allocated() - before, torch.sim.mem_get_info()
    del kept
    torch.empty(1 << 20, dtype=torch.uint8, device="sim")
    return [held, left, total, torch.sim.max_memory_allocated(), torch.sim.memory_allocated()]


def test_memory_has_a_limit_and_is_counted() -> None:
    assert on_devices(memory_of_a_device) == [[1 << 18, (1 << 20) - (1 << 18), 1 << 20, 1 << 20, 0]]


def draws_of_two_devices() -> list[bool]:
    torch.manual_seed(7)
    first, second = torch.rand(3, device="sim:0").cpu(), torch.rand(3, device="sim:1").cpu()
    state = torch.sim.get_rng_state(1)
    next_one = torch.rand(3, device="sim:1").cpu()
    torch.sim.set_rng_state(state, 1)
    again = torch.rand(3, device="sim:1").cpu()
    own = torch.rand(3, generator=torch.Generator("sim").manual_seed(7), device="sim").cpu()
    host = torch.Generator().manual_seed(7)
    return [
        torch.equal(first, second), torch.equal(next_one, again), not torch.equal(second, next_one),
        torch.equal(own, torch.rand(3, generator=host)),
    ]  # fmt: skip


def test_each_device_has_a_generator() -> None:
    assert on_devices(draws_of_two_devices, num_devices=2) == [[True] * 4]


def device_in_a_fork() -> str:
    torch.ones(1, device="sim")
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            torch.ones(1, device="sim")
        except RuntimeError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.close(write)
    return os.read(read, 1000).decode()


def test_a_fork_after_the_first_use_has_no_device() -> None:
    assert "Cannot re-initialize sim in forked subprocess" in on_devices(device_in_a_fork)[0]
