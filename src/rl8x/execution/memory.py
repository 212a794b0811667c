"""How memory that tensors have freed is kept for the next ones."""

from __future__ import annotations

import ctypes
import functools
import gc
import sys
from typing import Final

from rl8x.execution.compiler import compiler

# glibc's names for what is set here (malloc.h).
_M_MXFAST: Final = 1
_M_TRIM_THRESHOLD: Final = -1
_M_TOP_PAD: Final = -2
_M_MMAP_MAX: Final = -4


def keep_freed_memory() -> None:
    """Have the C library keep the memory that tensors free, for the next ones, instead of giving it back at once.

    Every pass over a minibatch frees and takes the same few megabytes. Given back to the system and taken again, each
    page is zeroed and mapped anew, which costs more than the arithmetic on it: 32% of PPO on one thread (Zen 5). Does
    nothing where the library is not glibc.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # Small blocks set aside for later are gathered whenever a larger one is asked for, which is all the time.
        mallopt(_M_MXFAST, 0)
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_M_TOP_PAD, 64 * 2**20)


def give_back_freed_memory() -> None:
    """Give the system back what is kept, so that it shows as available; what nothing refers to any more too."""
    gc.collect()
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


# PyTorch asks for memory that begins at a multiple of 64 bytes, for which the C library splits and joins blocks each
# time. A freed block goes to a list of its thread and size instead, eight sizes to a power of two, and the next tensor
# of that size gets the one that was freed last. What lists have no room for, and large blocks, go back to the library.
_SMALL_BLOCKS: Final = """
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <cstring>

namespace {

constexpr size_t kHeader = 64, kSmallest = 64, kLargest = 1 << 16;
constexpr int kSizes = 88, kKept = 32, kLarge = -1;

struct Block { Block* next; int size; };  // lies in the header, before the data

struct Lists { Block* first[kSizes] = {}; int count[kSizes] = {}; };

// Plain values, which stay readable while a thread ends and frees its last tensors.
thread_local Lists* lists = nullptr;
thread_local bool ended = false;

struct Ending {
  bool begun = false;
  ~Ending() {
    ended = true;
    if (lists == nullptr) return;
    for (Block* block : lists->first)
      while (block != nullptr) { Block* next = block->next; c10::free_cpu(block); block = next; }
    delete lists;
    lists = nullptr;
  }
};
thread_local Ending ending;

Lists* mine() {
  if (lists == nullptr && !ended) { ending.begun = true; lists = new Lists; }
  return lists;
}

void give_back(void* data) {
  if (data == nullptr) return;
  c10::profiledCPUMemoryReporter().Delete(data);
  Block* block = reinterpret_cast<Block*>(static_cast<char*>(data) - kHeader);
  Lists* all = block->size == kLarge ? nullptr : mine();
  if (all == nullptr || all->count[block->size] == kKept) { c10::free_cpu(block); return; }
  block->next = all->first[block->size];
  all->first[block->size] = block;
  ++all->count[block->size];
}

c10::DataPtr pointer(void* data) { return {data, data, &give_back, c10::Device(c10::DeviceType::CPU)}; }

struct SmallBlocks final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return pointer(nullptr);
    const size_t wanted = bytes;
    int size = kLarge;
    if (bytes <= kLargest) {
      bytes = bytes < kSmallest ? kSmallest : bytes;
      size_t step = size_t(1) << (60 - __builtin_clzll(bytes));  // an eighth of the power of two below
      bytes = (bytes + step - 1) & ~(step - 1);
      int power = 63 - __builtin_clzll(bytes);
      size = (power - 6) * 8 + ((bytes >> (power - 3)) & 7);
    }
    Lists* all = size == kLarge ? nullptr : mine();
    Block* block = all == nullptr ? nullptr : all->first[size];
    if (block != nullptr) {
      all->first[size] = block->next;
      --all->count[size];
    } else {
      block = static_cast<Block*>(c10::alloc_cpu(bytes + kHeader));
      block->size = size;
    }
    void* data = reinterpret_cast<char*>(block) + kHeader;
    c10::profiledCPUMemoryReporter().New(data, wanted);
    return pointer(data);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};

}  // namespace

extern "C" void install() { c10::SetCPUAllocator(new SmallBlocks, 255); }
"""


@functools.cache
def keep_small_blocks() -> bool:
    """Have PyTorch keep small blocks, up to 64 KiB, in lists of its own; for good, and for all of the process.

    An update of 64 rows takes and frees some thirty of them: compiled PPO on 16 x 128 steps of Pendulum is 6% slower
    without the lists, on 4096 x 32 by 2% to 4% (two Xeon cores, torch 2.13). Needs a C++ compiler, which
    compiled execution needs anyway, and two seconds the first time on a machine. At most 32 blocks of each size are
    kept, 25 MB a thread if it has had so many of every size.

    Returns:
        Whether that was possible.
    """
    try:
        ctypes.CDLL(str(compiler().library("source", _SMALL_BLOCKS))).install()
    except Exception:  # without a C++ compiler, the blocks are the C library's
        return False
    return True
