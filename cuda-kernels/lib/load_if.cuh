// Loads with a predicate in place of a branch: before a branch the compiler would wait for the loads under
// way.
#pragma once

#include "common.cuh"

// How a line of memory is read, which says what caches keep of it.
// - ONCE: L2 evicts it first (.cs).
// - USUAL: no hint.
// - AGAIN: many blocks read it and none writes it (.nc).
enum class Reading { ONCE, USUAL, AGAIN };

// Loads 16 bytes if `wanted`; else `words` stay as they are.
template <Reading READING = Reading::ONCE>
__device__ void load_if(bool wanted, const void* from, uint4& words) {
#define LOAD_IF(CACHE)                                             \
  asm volatile(                                                    \
      "{\n"                                                        \
      ".reg .pred wanted;\n"                                       \
      "setp.ne.b32 wanted, %5, 0;\n"                               \
      "@wanted ld.global" CACHE                                    \
      ".v4.b32 {%0, %1, %2, %3}, [%4];\n"                          \
      "}"                                                          \
      : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w) \
      : "l"(from), "r"(static_cast<int>(wanted)))
  if constexpr (READING == Reading::ONCE) LOAD_IF(".cs");
  if constexpr (READING == Reading::USUAL) LOAD_IF("");
  if constexpr (READING == Reading::AGAIN) LOAD_IF(".nc");
#undef LOAD_IF
}
