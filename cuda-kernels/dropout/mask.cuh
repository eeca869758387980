// The dropout mask, drawn element by element or in runs of whole Philox blocks.
#pragma once

#include "dropout.h"
#include "lib/philox.h"

// Which elements are kept.
class Mask {
  uint64_t seed_, offset_;
  uint32_t threshold_;
  bool all_;

 public:
  __device__ explicit Mask(const Dropout& dropout)
      : seed_(dropout.seed_at ? *dropout.seed_at : dropout.seed),
        offset_(dropout.offset + (dropout.offset_at ? *dropout.offset_at : 0)),
        threshold_(dropout.threshold),
        all_(dropout.all) {}

  // The grid's first thread stores seed and offset for the backward pass.
  __device__ void note(int64_t* used) const {
    if (used == nullptr || blockIdx.x > 0 || threadIdx.x > 0) return;
    used[0] = static_cast<int64_t>(seed_);
    used[1] = static_cast<int64_t>(offset_);
  }

  // In loops, against CSE: the compiler would keep the keys of all ten rounds in registers.
  __device__ void forget_keys() { asm volatile("" : "+l"(seed_)); }

  // Element i alone, at the price of a whole Philox call.
  __device__ bool keeps(int64_t i) const {
    const auto [w0, w1, w2, w3] = words_of(i / 4).of;
    return keeps_word(i & 2 ? (i & 1 ? w3 : w2) : (i & 1 ? w1 : w0));
  }

  // COUNT elements from i on; both are multiples of 4.
  template <int COUNT>
  __device__ void keeps(bool (&kept)[COUNT], int64_t i) const {
#pragma unroll
    for (int j = 0; j < COUNT; ++j) {
      if (j % 4 == 0) {
        const auto [w0, w1, w2, w3] = words_of((i + j) / 4).of;
        kept[j] = keeps_word(w0), kept[j + 1] = keeps_word(w1);
        kept[j + 2] = keeps_word(w2), kept[j + 3] = keeps_word(w3);
      }
    }
  }

  // The words of a Philox block's four elements, and whether an element is kept by its word.
  __device__ Words words_of(uint64_t block) const { return random_words(seed_, offset_, block); }
  __device__ bool keeps_word(uint32_t word) const { return word >= threshold_ && !all_; }
};
