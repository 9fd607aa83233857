"""What the machine can do, measured in the same run as what is compared with it."""

from __future__ import annotations

import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np


def read_bandwidth(num_threads: int, megabytes: int = 256, repeats: int = 5) -> float:
    """Bytes a second that `num_threads` read together from memory, each its own array: the best of a few tries."""
    arrays = [np.ones(megabytes * 2**20 // 8, np.int64) for _ in range(num_threads)]
    best = 0.0
    with ThreadPoolExecutor(num_threads) as pool:
        for _ in range(repeats):
            start = time.perf_counter()
            list(pool.map(np.max, arrays))
            best = max(best, sum(array.nbytes for array in arrays) / (time.perf_counter() - start))
    return best


def describe(num_threads: int) -> str:
    """One line of conditions: processor, threads, other load, bandwidth."""
    with open("/proc/cpuinfo") as file:
        model = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), platform.processor())
    load = os.getloadavg()[0]
    bandwidth = read_bandwidth(num_threads) / 1e9
    return f"{model}, {num_threads} threads, load average before {load:.1f}, memory read {bandwidth:.1f} GB/s"
