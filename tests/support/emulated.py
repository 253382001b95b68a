"""Kernels for 64-bit ARM on other machines: linked with a small C program, run under qemu's user emulation.

Needs ``qemu-aarch64`` and ``aarch64-linux-gnu-gcc`` (Debian: qemu-user, gcc-aarch64-linux-gnu, libc6-dev-arm64-cross).
The emulated program maps a file with the records and all memory that they point to. It runs the real thread pool: the
main thread calls pool_run, and its helpers are pthreads in pool_main.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from pillion.errors import Internal
from pillion.kernels.cpu.language.isa import BY_NAME
from pillion.kernels.cpu.language.module import FAULT_CELL, SCRATCH_BYTES, KernelSpec
from pillion.kernels.cpu.language.records import STEP, RecordLayout, Words
from pillion.kernels.cpu.runtime import thread_pool_code
from pillion.kernels.cpu.runtime.program import CpuStepRecord
from tests.support.machine_code import object_code

GCC, QEMU = "aarch64-linux-gnu-gcc", "qemu-aarch64"
BASE = 1 << 36
_ALIGNMENT = 64
_HEADER_WORDS = 8
_TIMEOUT_S = 10

_DRIVER = """
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
typedef long word;
extern word pool_run(word, word, word, word), pool_main(word), {fault}[];
{declared}
static word kernels[] = {{ {table} }};
static char pool[{first_line} + 64 * 64] __attribute__((aligned(64))), counters[{counter_bytes}];
static char scratch[64][{scratch_bytes}] __attribute__((aligned(64)));
static void run(word *header) {{
    word step = header[2], threads = header[3], entry[4] = {{ kernels[header[0]], header[1], -1, 0 }};
    pthread_t handles[64];
    memset(pool, 0, sizeof pool);
    *(word *)(pool + {threads_place}) = threads;
    *(word *)(pool + {counters_place}) = (word)counters;
    for (word thread = 0; thread < threads; thread++) {{
        char *line = pool + {first_line} + 64 * thread;
        *(word *)(line + {pool_place}) = (word)pool;
        *(word *)(line + {scratch_place}) = (word)scratch[thread];
        if (thread) pthread_create(&handles[thread], 0, (void *(*)(void *))pool_main, line);
    }}
    pool_run((word)pool, (word)entry, 1, step);
    pool_run((word)pool, 0, -1, 0);
    for (word thread = 1; thread < threads; thread++) pthread_join(handles[thread], 0);
    header[4] = {fault}[0];
    header[5] = {fault}[1];
    {fault}[0] = 0;
}}
int main(int count, char **args) {{
    while (getchar() == '\\n') {{
        int file = open(args[1], O_RDWR);
        struct stat about;
        fstat(file, &about);
        word *header = mmap((void *){base}L, about.st_size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0);
        if (header == MAP_FAILED) return 3;
        run(header);
        munmap(header, about.st_size);
        close(file);
        putchar('\\n');
        fflush(stdout);
    }}
    return 0;
}}
"""


def available() -> bool:
    """Return True if the emulator and the cross compiler are installed."""
    return bool(shutil.which(GCC) and shutil.which(QEMU))


class EmulatedRunner:
    """Runs single kernels as :class:`tests.support.kernel_runner.Runner`, on emulated ARM; its files are in ``folder``.

    One emulated process runs all kernels, one line in and one line out for each, since an emulator starts slowly.
    """

    def __init__(self, specs: Sequence[KernelSpec], folder: Path, checked: bool, isa: str = "neon") -> None:
        self.kernels = SimpleNamespace(checked=checked)  # The attribute that tests read of a runner.
        self._names = list(dict.fromkeys(spec.name for spec in specs))
        self._program, self._memory = folder / "program", folder / "memory"
        (folder / "kernels.o").write_bytes(object_code(specs, BY_NAME[isa], checked=checked))
        numbers = range(len(self._names))
        source = _DRIVER.format(
            declared="\n".join(f'extern word k{i}() __asm__("{self._names[i]}");' for i in numbers),
            table=", ".join(f"(word)k{i}" for i in numbers),
            fault=FAULT_CELL,
            base=BASE,
            counter_bytes=thread_pool_code.COUNTER_STRIDE,
            scratch_bytes=SCRATCH_BYTES,
            first_line=thread_pool_code.FIRST_THREAD_LINE,
            threads_place=thread_pool_code.THREADS,
            counters_place=thread_pool_code.COUNTERS,
            pool_place=thread_pool_code.POOL,
            scratch_place=thread_pool_code.SCRATCH,
        )
        (folder / "driver.c").write_text(source)
        options = ["-O1", "-w", "-static", "-no-pie", "-pthread", "-o", str(self._program)]
        subprocess.run([GCC, *options, "driver.c", "kernels.o", "-lm"], cwd=folder, check=True)
        command = [QEMU, str(self._program), str(self._memory)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)

    def close(self) -> None:
        """End the emulated process."""
        self._process.communicate(timeout=_TIMEOUT_S)

    def run(self, spec: KernelSpec, values: Mapping[str, Any], step: CpuStepRecord, threads: int = 3) -> None:
        """Run one kernel, in place on the arrays of ``values`` and ``step``."""
        args = np.zeros(spec.layout.num_words, np.int64)
        spec.layout.fill(args, values)
        places = [*_pointers(spec.layout, args), *_pointers(STEP, step.words)]
        ranges = _merged((int(words[at]), int(words[at + 1])) for words, at in places)
        records = {id(words): words.copy() for words in (args, step.words)}
        size = _HEADER_WORDS * 8
        begins = []
        for address, length in ranges:
            # Arrays in one cache line stay there, and overruns of up to a line hit no other range.
            size = -(-size // _ALIGNMENT) * _ALIGNMENT + address % _ALIGNMENT
            begins.append(size)
            size += length + _ALIGNMENT
        for words, at in places:
            index = next(i for i, (address, length) in enumerate(ranges) if address <= words[at] <= address + length)
            records[id(words)][at] = BASE + begins[index] + words[at] - ranges[index][0]
        at_records = -(-size // _ALIGNMENT) * _ALIGNMENT
        image = np.zeros(at_records + args.nbytes + step.words.nbytes, np.uint8)
        at_step = at_records + args.nbytes
        header = [self._names.index(spec.name), BASE + at_records, BASE + at_step, threads, 0, 0]
        image[: 8 * len(header)] = np.array(header, np.int64).view(np.uint8)
        for begin, (address, length) in zip(begins, ranges, strict=True):
            image[begin : begin + length] = np.frombuffer(ctypes.string_at(address, length), np.uint8)
        image[at_records:at_step] = records[id(args)].view(np.uint8)
        image[at_step:] = records[id(step.words)].view(np.uint8)
        image.tofile(self._memory)
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(b"\n")
        assert self._process.stdout.read(1) == b"\n", f"the emulated process is gone: {self._process.wait()}"
        image = np.fromfile(self._memory, np.uint8)
        number, offset = image[32:48].view(np.int64).tolist()
        if number:
            raise Internal(f"kernel {self._names[number - 1]} accessed byte {offset} of its memory, out of bounds")
        for begin, (address, length) in zip(begins, ranges, strict=True):
            ctypes.memmove(address, image[begin:].ctypes.data, length)


def _pointers(layout: RecordLayout, words: Words) -> list[tuple[Words, int]]:
    return [(words, layout.place[name]) for name in layout.pointers if words[layout.place[name]]]


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return (address, bytes) of memory that several pointers may share; overlapping or adjacent ranges are merged."""
    found: list[tuple[int, int]] = []
    for address, length in sorted(ranges):
        if found and address <= sum(found[-1]):
            begin, before = found.pop()
            address, length = begin, max(before, address + length - begin)
        found.append((address, length))
    return found
