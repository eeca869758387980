// Which elements equal their maximum: a bit each, of the UNITS packs (or elements) that a thread loads at
// once.
#pragma once

#include "amax_backward_moves.cuh"

// Two equal elements each are compared by one instruction, and chosen by another. `which`: of 0 to UNITS - 1.
template <typename T, Moves MOVES>
struct TieBits {
  using Word = uint32_t;
  static constexpr int UNITS = 4;
  // Elements 2 i and 2 i + 1 of a pack have bit i of its four bits in the lower and in the upper half.
  uint32_t word = 0;

  // The bits of the elements [low, high).
  __device__ static uint32_t inside(int low, int high) {
    const auto first = [](int count) { return (1u << (count + 1) / 2) - 1 | ((1u << count / 2) - 1) << 16; };
    return first(high) & ~first(low);
  }
  __device__ static uint32_t equal(const Pack<T>& pack, const Pack<T>& largest) {
    using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
    const auto *pairs = reinterpret_cast<const Pair*>(&pack.words),
               *others = reinterpret_cast<const Pair*>(&largest.words);
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) bits |= __heq2_mask(pairs[i], others[i]) & 0x10001u << i;
    return bits;
  }
  __device__ void add(int which, uint32_t bits) { word |= bits << 4 * which; }
  __device__ int count() const { return __popc(word); }
  __device__ int count(int column) const { return __popc(word & 0x1111u << (column / 2 + column % 2 * 16)); }
  __device__ Pack<T> choose(int which, const Pack<T>& share, const Pack<T>& nothing) const {
    Pack<T> chosen;
    const auto *ties = reinterpret_cast<const uint32_t*>(&share.words),
               *others = reinterpret_cast<const uint32_t*>(&nothing.words);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t mask = (word >> (4 * which + i) & 0x10001u) * 0xffffu;
      reinterpret_cast<uint32_t*>(&chosen.words)[i] = (ties[i] & mask) | (others[i] & ~mask);
    }
    return chosen;
  }
};
template <Moves MOVES>
struct TieBits<float, MOVES> {
  using Word = uint16_t;
  static constexpr int UNITS = 4;
  uint32_t word = 0;

  __device__ static uint32_t inside(int low, int high) { return (1u << high) - (1u << low); }
  __device__ static uint32_t equal(const Pack<float>& pack, const Pack<float>& largest) {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) bits |= pack[i] == largest[i] ? 1u << i : 0;
    return bits;
  }
  __device__ void add(int which, uint32_t bits) { word |= bits << 4 * which; }
  __device__ int count() const { return __popc(word); }
  __device__ int count(int column) const { return __popc(word & 0x1111u << column); }
  __device__ Pack<float> choose(int which, const Pack<float>& share, const Pack<float>& nothing) const {
    Pack<float> chosen;
#pragma unroll
    for (int i = 0; i < 4; ++i) set(chosen, i, word >> (4 * which + i) & 1 ? share[i] : nothing[i]);
    return chosen;
  }
};

// Of single elements.
template <typename T>
struct ElementBits {
  using Word = uint8_t;
  static constexpr int UNITS = 8;
  uint32_t word = 0;

  __device__ static uint32_t inside(int low, int high) { return high > low; }
  __device__ static uint32_t equal(const Element<T>& element, const Element<T>& largest) {
    return to_float(element.value) == to_float(largest.value);
  }
  __device__ void add(int which, uint32_t bits) { word |= bits << which; }
  __device__ int count() const { return __popc(word); }
  __device__ int count(int) const { return __popc(word); }
  __device__ Element<T> choose(int which, const Element<T>& share, const Element<T>& nothing) const {
    return word >> which & 1 ? share : nothing;
  }
};
template <typename T>
struct TieBits<T, Moves::ELEMENTS> : ElementBits<T> {};
template <>
struct TieBits<float, Moves::ELEMENTS> : ElementBits<float> {};
