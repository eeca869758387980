// Where a thread waits for its loads: accesses without a branch, and a wait that is pinned to its place.
#pragma once

#include "load_if.cuh"

// A predicated store of 16 bytes, which are not read soon.
template <typename T>
__device__ void store_if(bool stored, uint4* to, Pack<T> pack) {
  asm volatile(
      "{\n"
      ".reg .pred stored;\n"
      "setp.ne.b32 stored, %5, 0;\n"
      "@stored st.global.cs.v4.b32 [%4], {%0, %1, %2, %3};\n"
      "}" ::"r"(pack.words.x),
      "r"(pack.words.y), "r"(pack.words.z), "r"(pack.words.w), "l"(to), "r"(static_cast<int>(stored))
      : "memory");
}

// Pins the wait for a pack to this place. `nothing` is 0, but the compiler must not know it: so the pack is
// used here, and not before `nothing` is computed.
template <typename T>
__device__ void add_nothing(Pack<T>& pack, uint32_t nothing) {
  pack.words.x |= nothing, pack.words.y |= nothing, pack.words.z |= nothing, pack.words.w |= nothing;
}
