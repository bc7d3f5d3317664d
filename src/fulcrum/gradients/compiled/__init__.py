"""Loops in C for what PyTorch has no fast operation for on a CPU, compiled on this machine when they are first needed.

`find_kernels` gives the library, or None: without a C compiler, where FULCRUM_COMPILE is 0, or where the compiled code
does not reproduce a small example. Callers then take PyTorch's operations, with the same results but for rounding.
The sources (`*.c`) lie beside this file. The library is kept in the user's cache folder, under a name that depends on
the sources, the compiler, the processor and this list of options.

A call of the library releases the interpreter's lock; it starts no threads and keeps no state.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import lru_cache
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

OPTIONS = ("-O3", "-march=native", "-fno-math-errno", "-std=gnu11", "-shared", "-fPIC")
"""No option here lets the compiler change the order of additions or assume that numbers are finite."""

MOST_LANES = 16
"""Numbers in the widest vector that the code may be compiled to; every other width divides it."""

SWITCH = "FULCRUM_COMPILE"

compile_failures: list[str] = []
"""Why there is no library, one sentence; empty where there is one, or where nobody has asked yet."""


@lru_cache(maxsize=1)
def find_kernels() -> ctypes.CDLL | None:
    """The compiled library; None where there is none, and `compile_failures` says why."""
    try:
        library = _load()
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        compile_failures.append((str(error).strip().splitlines() or [type(error).__name__])[0])
        return None
    if not reproduces_example(library):
        compile_failures.append("the compiled code did not reproduce a small example")
        return None
    return library


def explain_missing_kernels() -> str:
    """Why there is no library; empty where there is one."""
    return "" if find_kernels() is not None else compile_failures[-1]


def address(values: Tensor) -> ctypes.c_void_p:
    """Where a CPU tensor's numbers begin. The caller keeps the tensor until the call is over."""
    return ctypes.c_void_p(values.data_ptr())


def reproduces_example(library: ctypes.CDLL) -> bool:
    """Whether a product of two small matrices comes out right: a wrong instruction set would end the process here."""
    a, b = torch.arange(6.0).view(2, 3), torch.arange(12.0).view(3, 4)
    found = torch.zeros(2, 4)
    library.fulcrum_example(address(a), address(b), address(found), 2, 3, 4)
    return torch.equal(found, a @ b)


def _load() -> ctypes.CDLL:
    if os.environ.get(SWITCH) == "0":
        raise ValueError(f"{SWITCH} is 0")
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise ValueError("there is no C compiler (cc, gcc or clang)")
    compiler = os.path.abspath(compiler)
    sources = sorted(
        (each.name, each.read_text(encoding="utf-8"))
        for each in resources.files(__package__).iterdir()
        if each.name.endswith((".c", ".h"))
    )
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=30).stdout
    told = (sources, compiler, version, _describe_processor(), OPTIONS)
    name = f"kernels-{hashlib.sha256(repr(told).encode()).hexdigest()[:24]}.so"
    folder = _find_private_folder()
    if folder is not None and _is_whole(folder / name):
        return ctypes.CDLL(str(folder / name))
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        for file, text in sources:
            (Path(scratch) / file).write_text(text, encoding="utf-8")
        words = [compiler, *OPTIONS, "-o", name, *(file for file, _ in sources if file.endswith(".c")), "-lm"]
        done = subprocess.run(words, cwd=scratch, capture_output=True, text=True, check=False, timeout=120)
        if done.returncode:
            raise ValueError(f"{compiler} failed: {(done.stderr.strip().splitlines() or ['no message'])[0]}")
        if folder is None:
            return ctypes.CDLL(str(Path(scratch) / name))
        seal = Path(scratch) / "seal"
        seal.write_text(_digest(Path(scratch) / name), encoding="ascii")
        os.replace(Path(scratch) / name, folder / name)  # whole or not at all: another process may look now
        os.replace(seal, folder / f"{name}.sha256")
    return ctypes.CDLL(str(folder / name))


def _is_whole(kept: Path) -> bool:
    """Whether a kept library is the one that was compiled: code from a file that was cut off would end the process."""
    seal = kept.with_name(f"{kept.name}.sha256")
    return kept.is_file() and seal.is_file() and seal.read_text(encoding="ascii", errors="replace") == _digest(kept)


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _find_private_folder() -> Path | None:
    """The folder of compiled code, which nobody else may write to; None where it cannot be made or is not ours."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        root = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
        folder = root / "fulcrum" / "kernels"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.stat()
    except (OSError, RuntimeError):
        return None
    ours = hasattr(os, "getuid") and about.st_uid == os.getuid() and not about.st_mode & 0o022
    return folder if ours and os.access(folder, os.W_OK) else None


def _describe_processor() -> str:
    """What `-march=native` depends on: the processor's model and its instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))
