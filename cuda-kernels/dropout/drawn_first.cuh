// Packs that are unpacked only after their masks are drawn, so that loads are under way meanwhile.
#pragma once

#include "lib/packs.cuh"
#include "lib/waits.cuh"
#include "mask.cuh"

// Which of COUNT elements from start + i on are kept. Both are multiples of COUNT, and start is a multiple of
// a power of two above i: so the sum carries nothing into the upper half of a Philox block's number, and the
// compiler sees which products of the first rounds several calls share.
template <int COUNT>
__device__ void keeps_from(const Mask& mask, bool (&kept)[COUNT], int64_t start, uint32_t i) {
  const uint64_t upper = static_cast<uint64_t>(start) >> 34 << 32;
  const uint32_t block = static_cast<uint32_t>(start >> 2) + i / 4;
#pragma unroll
  for (int j = 0; j < COUNT; j += 4) {
    const auto [w0, w1, w2, w3] = mask.words_of(upper | (block + j / 4)).of;
    kept[j] = mask.keeps_word(w0), kept[j + 1] = mask.keeps_word(w1);
    kept[j + 2] = mask.keeps_word(w2), kept[j + 3] = mask.keeps_word(w3);
  }
}

// Unpacks a pack only after its mask is computed. The compiler would unpack it, and so wait for memory,
// before the first word is drawn, because it takes a load before a branch for complete.
template <typename T, int COUNT>
__device__ void take_after(const bool (&kept)[COUNT], uint32_t zero, Pack<T>& pack) {
  add_nothing(pack, kept[COUNT - 1] ? zero : 0);
}
