// Rows of a matrix as 16-byte packs, and what lanes tell each other about a row.
#pragma once

#include <type_traits>

#include "common.cuh"

// What caches keep together: 16 bytes for every lane of a warp are four lines, or parts of five.
constexpr int LINE_BYTES = 128, LINE_PACKS = LINE_BYTES / 16;
template <typename T>
constexpr int LINE_ELEMENTS = LINE_BYTES / static_cast<int>(sizeof(T));

// A row may start anywhere, but a wide access must start at a multiple of 16 bytes. So the row's packs are
// those of memory: pack p holds the elements from p * SIZE - skew on, and the first and the last one may
// reach beyond the row. `skew` is how many elements lie between a multiple of BYTES and the row's start. With
// a line's BYTES several packs may lie before the row.
template <int BYTES = 16, typename T>
__device__ int skew_of(const T* row) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(row) % BYTES / sizeof(T));
}

// Packs up to the end of a row of n elements, at most.
template <typename T, int BYTES = 16>
__host__ __device__ constexpr int64_t most_packs(int64_t n) {
  return cdiv(n + BYTES / static_cast<int>(sizeof(T)) - 1, Pack<T>::SIZE);
}

// The same for rows that lie `stride` elements apart, where it is known whether they are skewed.
template <typename T, int BYTES = 16>
int64_t most_packs(const void* rows, int64_t n, int64_t stride) {
  const bool skewed =
      reinterpret_cast<uintptr_t>(rows) % BYTES || stride % (BYTES / static_cast<int>(sizeof(T)));
  return skewed ? most_packs<T, BYTES>(n) : cdiv(n, Pack<T>::SIZE);
}

// Whether all elements of a pack from `first` on are the row's, so that one access may move them.
template <typename T>
__device__ bool is_whole(int first, int n) {
  return first >= 0 && first + Pack<T>::SIZE <= n;
}

template <typename T>
__device__ void set(Pack<T>& pack, int i, T value) {
  reinterpret_cast<T*>(&pack.words)[i] = value;
}

// Left alone, the compiler converts a pack's elements once and keeps the results, in twice the registers.
template <typename T>
__device__ void keep_packed(Pack<T>& pack) {
  asm volatile("" : "+r"(pack.words.x), "+r"(pack.words.y), "+r"(pack.words.z), "+r"(pack.words.w));
}

// A bf16 is the upper half of a float. Left alone, the compiler takes two instructions for every second one.
template <typename T>
__device__ float float_of(const Pack<T>& pack, int i) {
  return to_float(pack[i]);
}
__device__ inline float float_of(const Pack<__nv_bfloat16>& pack, int i) {
  const uint32_t pair = reinterpret_cast<const uint32_t*>(&pack.words)[i / 2];
  return __uint_as_float(i % 2 ? pair & 0xffff0000 : pair << 16);
}

// The elements from `first` on that are the row's, one by one, and `fill` for the others.
template <typename T>
__device__ Pack<T> load_ragged(const T* row, int first, int n, float fill) {
  Pack<T> pack;
#pragma unroll
  for (int i = 0; i < Pack<T>::SIZE; ++i) {
    const int at = first + i;
    set(pack, i, at >= 0 && at < n ? row[at] : from_float<T>(fill));
  }
  return pack;
}

// The packs of a row that start at first_of(i), in two halves, so that a thread that holds several rows asks
// for all that is wide before it waits for single elements. `fill` stands where there is no row. `aligned`:
// whether the row is skewed like the one that the packs are laid out for.
//
// The wide half has a predicate for every load, where a branch between two of them would have the compiler
// wait.
template <typename T, int PACKS, typename First>
__device__ void load_whole_packs(Pack<T> (&packs)[PACKS], const T* row, int n, bool aligned, float fill,
                                 First first_of) {
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
#pragma unroll
    for (int j = 0; j < Pack<T>::SIZE; ++j) set(packs[i], j, from_float<T>(fill));
    const int first = first_of(i);
    uint4& words = packs[i].words;
    asm volatile(
        "{\n"
        ".reg .pred whole;\n"
        "setp.ne.b32 whole, %5, 0;\n"
        "@whole ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n"
        "}"
        : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w)
        : "l"(row + first), "r"(static_cast<int>(aligned && is_whole<T>(first, n))));
  }
}
template <typename T, int PACKS, typename First>
__device__ void load_other_packs(Pack<T> (&packs)[PACKS], const T* row, int n, bool aligned, float fill,
                                 First first_of) {
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const int first = first_of(i);
    const bool inside = first < n && first + Pack<T>::SIZE > 0;
    if (inside && !(aligned && is_whole<T>(first, n))) packs[i] = load_ragged(row, first, n, fill);
  }
}

// The packs of a row of n elements that start at first_of(i), which are multiples of 16 bytes, all by wide
// loads: one that reaches beyond the row brings up to 14 bytes of what lies beside it, of the same 16, which
// therefore can be read. Before they are looked at, mask_beside must clear those; where nothing is loaded,
// packs are 0.
template <typename T, int PACKS, typename First>
__device__ void load_touching_packs(Pack<T> (&packs)[PACKS], const T* row, int n, First first_of) {
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const int first = first_of(i);
    uint4& words = packs[i].words;
    words = make_uint4(0, 0, 0, 0);
    asm volatile(
        "{\n"
        ".reg .pred touches;\n"
        "setp.ne.b32 touches, %5, 0;\n"
        "@touches ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n"
        "}"
        : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w)
        : "l"(row + first), "r"(static_cast<int>(max(first, 0) < min(n, first + Pack<T>::SIZE))));
  }
}
template <typename T>
__device__ void mask_beside(Pack<T>& pack, int first, int n, float fill = 0.0f) {
  if (is_whole<T>(first, n)) return;
#pragma unroll
  for (int i = 0; i < Pack<T>::SIZE; ++i) {
    if (first + i < 0 || first + i >= n) set(pack, i, from_float<T>(fill));
  }
}

template <typename T>
__device__ void store_pack(T* row, int first, int n, bool aligned, Pack<T> pack) {
  if (aligned && is_whole<T>(first, n)) {
    __stwb(reinterpret_cast<uint4*>(row + first), pack.words);
  } else if (first < n) {
#pragma unroll
    for (int i = 0; i < Pack<T>::SIZE; ++i) {
      const int at = first + i;
      if (at >= 0 && at < n) row[at] = pack[i];
    }
  }
}

// The largest element, two at a time where two fit a register. NaN only where all are.
__device__ inline float max_of(const Pack<float>& pack) {
  return fmaxf(fmaxf(pack[0], pack[1]), fmaxf(pack[2], pack[3]));
}
__device__ inline float max_of(const Pack<__nv_bfloat16>& pack) {
  const auto* pairs = reinterpret_cast<const __nv_bfloat162*>(&pack.words);
  const __nv_bfloat162 most = __hmax2(__hmax2(pairs[0], pairs[1]), __hmax2(pairs[2], pairs[3]));
  return fmaxf(__low2float(most), __high2float(most));
}
__device__ inline float max_of(const Pack<__half>& pack) {
  const auto* pairs = reinterpret_cast<const __half2*>(&pack.words);
  const __half2 most = __hmax2(__hmax2(pairs[0], pairs[1]), __hmax2(pairs[2], pairs[3]));
  return fmaxf(__low2float(most), __high2float(most));
}

// Of LANES neighbouring lanes, a power of two; every one gets the result. All 32 lanes must take part.
template <int LANES = 32>
__device__ float lanes_max(float value) {
#pragma unroll
  for (int distance = LANES / 2; distance > 0; distance /= 2) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffff, value, distance));
  }
  return value;
}
template <int LANES = 32>
__device__ float lanes_sum(float value) {
#pragma unroll
  for (int distance = LANES / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(0xffffffff, value, distance);
  }
  return value;
}

// Of all threads of the block, of which there are whole warps; every one gets the result. `parts` are 32 that
// no thread still reads.
__device__ inline float block_sum(float value, float* parts) {
  const int warp_id = threadIdx.x / 32, lane_id = threadIdx.x % 32;
  value = lanes_sum(value);
  if (lane_id == 0) parts[warp_id] = value;
  __syncthreads();  // for every warp's part
  return lanes_sum(lane_id < blockDim.x / 32 ? parts[lane_id] : 0.0f);
}

// Calls launch with LANES and PACKS, as integral constants, for a row of up to 128 packs: as few lanes as
// hold it in two packs each, and above 64 packs a warp with four. Whether it did.
template <typename Launch>
bool choose_lanes(int64_t packs, Launch launch) {
  const auto two_packs = [&](auto lanes) { launch(lanes, std::integral_constant<int, 2>{}); };
  if (packs > 128) return false;
  if (packs <= 2) {
    two_packs(std::integral_constant<int, 1>{});
  } else if (packs <= 4) {
    two_packs(std::integral_constant<int, 2>{});
  } else if (packs <= 8) {
    two_packs(std::integral_constant<int, 4>{});
  } else if (packs <= 16) {
    two_packs(std::integral_constant<int, 8>{});
  } else if (packs <= 32) {
    two_packs(std::integral_constant<int, 16>{});
  } else if (packs <= 64) {
    two_packs(std::integral_constant<int, 32>{});
  } else {
    launch(std::integral_constant<int, 32>{}, std::integral_constant<int, 4>{});
  }
  return true;
}

// exp(x) for x <= 0. The difference from the maximum is taken first, and is exact where it is small; folding
// the factor into one multiply-add would lose the digits that a large maximum takes.
__device__ inline float exp_of(float x) {
  constexpr float LOG2_E = 1.4426950408889634f;
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * LOG2_E));
  return result;
}
