"""Kernels for CUDA without a GPU: the real compiler, where it is installed, and a driver that notes calls."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from backlight import devices
from backlight.measure.stats import fused_rows
from backlight.measure.stats.compiled_rows import CompileError, c_compiler
from backlight.measure.stats.fused_rows import KERNELS, FusedRows

SOURCE = Path(fused_rows.__file__).with_name("rows.cu").read_bytes()
DEVICE = torch.device("cuda", 1)
STREAM = 0x7F00DEADBEEF

# Both libraries in one. A call returns `failing` where that has its name's first letters.
DRIVER = r"""
#include <stdio.h>
#include <string.h>
char noted[4096], failing[64];
static int note(const char *call) { strcat(noted, call); strcat(noted, "\n");
                                    return *failing && !strncmp(call, failing, strlen(failing)); }
#define NOTE(...) char line[256]; snprintf(line, sizeof line, __VA_ARGS__); return note(line)
int nvrtcCreateProgram(void **p, const char *s, const char *n, int h, void *a, void *b)
    { *p = (void *)0x7f0000000001; NOTE("create %d", (int)strlen(s)); }
int nvrtcCompileProgram(void *p, int n, const char **o) { NOTE("compile %llx %s", (long long)p, o[0]); }
int nvrtcGetProgramLogSize(void *p, size_t *n) { *n = 9; return 0; }
int nvrtcGetProgramLog(void *p, char *to) { strcpy(to, "bad line"); return 0; }
int nvrtcGetCUBINSize(void *p, size_t *n) { *n = 6; return 0; }
int nvrtcGetCUBIN(void *p, char *to) { memcpy(to, "ab\0cd", 6); NOTE("binary"); }
int nvrtcDestroyProgram(void **p) { NOTE("destroy"); }
const char *nvrtcGetErrorString(int r) { return "a problem"; }
int cuGetErrorString(int r, const char **text) { *text = "a problem"; return 0; }
int cuDeviceGet(int *d, int index) { *d = 10 + index; return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) { *v = a == 75 ? 9 : a == 76 ? 0 : -1; return d != 11; }
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = (void *)0x7f0000000002; NOTE("retain %d", d); }
int cuCtxPushCurrent_v2(void *c) { NOTE("push %llx", (long long)c); }
int cuCtxPopCurrent_v2(void **c) { NOTE("pop"); }
int cuModuleLoadData(void **m, const char *b)
    { *m = (void *)0x7f0000000003; NOTE("load %d", !memcmp(b, "ab\0cd", 6)); }
int cuModuleGetFunction(void **f, void *m, const char *n)
    { *f = (void *)(0x7f0000000100 + *n); NOTE("function %llx %s", (long long)m, n); }
int cuLaunchKernel(void *f, unsigned x, unsigned y, unsigned z, unsigned a, unsigned b, unsigned c,
                   unsigned shared, void *stream, long long **args, void **extra)
    { NOTE("launch %c %u %u %u %u %u %u %u %llx %llx %lld", (char)((long long)f - 0x7f0000000100),
           x, y, z, a, b, c, shared, (long long)stream, *args[0], *args[1]); }
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A driver and compiler that note their calls."""
    if not (compiler := c_compiler()):
        pytest.skip("there is no C compiler")
    (tmp_path / "driver.c").write_text(DRIVER)
    library = tmp_path / "driver.so"
    subprocess.run(
        [*compiler, "-shared", "-fPIC", "-w", str(tmp_path / "driver.c"), "-o", str(library)], check=True
    )
    load, names = ctypes.CDLL, {"libcuda.so.1", "libnvrtc.so.12"}
    monkeypatch.setattr(fused_rows.ctypes, "CDLL", lambda name: load(str(library) if name in names else name))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(devices, "stream_handle", lambda device: STREAM)
    return load(str(library))


def noted(driver: Any) -> list[str]:
    text = ctypes.create_string_buffer(4096)
    ctypes.memmove(text, driver.noted, 4096)
    ctypes.memset(driver.noted, 0, 4096)
    return text.value.decode().splitlines()


def failing(driver: Any, call: str) -> None:
    ctypes.memmove(driver.failing, call.encode() + b"\0", len(call) + 1)


@pytest.mark.slow
def test_load_and_launch(driver: Any) -> None:
    launch = fused_rows.load(DEVICE, SOURCE, KERNELS)
    assert noted(driver) == [
        f"create {len(SOURCE)}", "compile 7f0000000001 --gpu-architecture=sm_90", "binary", "destroy",
        "retain 11", "push 7f0000000002", "load 1",
        *(f"function 7f0000000003 {name}" for name in KERNELS), "pop",
    ]  # fmt: skip
    launch("keep_rows", 3_000_000, (0x7F1234567890, -(2**40)))
    assert noted(driver) == [
        "push 7f0000000002",
        f"launch k 3000000 1 1 {fused_rows.THREADS} 1 1 0 {STREAM:x} 7f1234567890 {-(2**40)}",
        "pop",
    ]
    failing(driver, "launch")
    with pytest.raises(RuntimeError, match="CUDA: a problem"):
        launch("keep_rows", 1, (1, 2))
    assert noted(driver)[-1] == "pop"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("create", "CompileError: NVRTC: a problem"), ("compile", "CompileError: NVRTC for sm_90: bad line"),
        ("retain", "RuntimeError: CUDA: a problem"), ("load", "RuntimeError: CUDA: a problem"),
        ("function", "RuntimeError: CUDA: a problem"),
    ],
)  # fmt: skip
def test_a_call_that_fails_is_the_reason(call: str, reason: str, driver: Any) -> None:
    failing(driver, call)
    rows = FusedRows(DEVICE)
    rows.wait()
    assert rows.reason == reason
    assert not rows.is_ready()
    calls = noted(driver)
    assert sum("push" in one for one in calls) == sum("pop" in one for one in calls)


def test_build_without_cuda_has_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    rows = FusedRows(DEVICE)
    rows.wait()
    assert rows.reason == "CompileError: this build of torch is not for CUDA"


@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_90", "sm_100"])
def test_nvrtc_compiles_the_source(architecture: str) -> None:
    try:
        fused_rows.nvrtc()
    except OSError as error:
        pytest.skip(f"NVRTC is not installed: {error}")
    binary = fused_rows.compile_source(SOURCE, architecture)
    assert binary.startswith(b"\x7fELF")
    assert all(name.encode() in binary for name in KERNELS)
    with pytest.raises(CompileError, match="undefined"):
        fused_rows.compile_source(b"__global__ void one() { missing(); }", architecture)
