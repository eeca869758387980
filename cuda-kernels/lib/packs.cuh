// Rows of a matrix as packs of 16 bytes: loads and stores of misaligned rows, and reductions of a row over
// lanes and blocks. The terms (pack, skew, line, lane) are explained in docs/glossary.md.
#pragma once

#include <climits>
#include <type_traits>

#include "common.cuh"

// A cache line. The 32 packs of a warp are 512 bytes: four lines if they start with one, otherwise parts of
// five.
constexpr int LINE_BYTES = 128, LINE_PACKS = LINE_BYTES / 16;
template <typename T>
constexpr int LINE_ELEMENTS = LINE_BYTES / static_cast<int>(sizeof(T));

// The skew of a row: the number of elements between the last multiple of BYTES and the row's start.
//
// A row may start at any element, but a 16-byte access needs an address that is a multiple of 16. Packs are
// therefore counted from that multiple: pack p holds elements p * SIZE - skew and up. The first and the last
// pack may hold elements beside the row; with BYTES = 128, up to seven packs lie before it.
template <int BYTES = 16, typename T>
__device__ int skew_of(const T* row) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(row) % BYTES / sizeof(T));
}

// Upper bound on the packs of a row of n elements, for any skew.
template <typename T, int BYTES = 16>
__host__ __device__ constexpr int64_t most_packs(int64_t n) {
  return cdiv(n + BYTES / static_cast<int>(sizeof(T)) - 1, Pack<T>::SIZE);
}

// The same for a matrix whose rows are `stride` elements apart. Without the skew's extra elements if all rows
// are aligned to BYTES.
template <typename T, int BYTES = 16>
int64_t most_packs(const void* rows, int64_t n, int64_t stride) {
  const bool skewed =
      reinterpret_cast<uintptr_t>(rows) % BYTES || stride % (BYTES / static_cast<int>(sizeof(T)));
  return skewed ? most_packs<T, BYTES>(n) : cdiv(n, Pack<T>::SIZE);
}

// How many rows apart two rows have the same skew within BYTES, in all matrices with these strides (in
// elements): a power of two, at most the elements of BYTES.
template <typename T, int BYTES = 16, typename... Strides>
int skew_period(Strides... strides) {
  int period = 1;
  while (((strides * period % (BYTES / static_cast<int>(sizeof(T))) != 0) || ...)) period *= 2;
  return period;
}

// True if all elements of the pack that starts at `first` belong to the row, so that one access may move it.
template <typename T>
__device__ bool is_whole(int first, int n) {
  return first >= 0 && first + Pack<T>::SIZE <= n;
}

template <typename T>
__device__ void set(Pack<T>& pack, int i, T value) {
  reinterpret_cast<T*>(&pack.words)[i] = value;
}

// Defeats common subexpression elimination (CSE): the empty asm makes the pack look new. Otherwise the
// compiler converts its elements to fp32 once and keeps them, in twice the registers.
template <typename T>
__device__ void keep_packed(Pack<T>& pack) {
  asm volatile("" : "+r"(pack.words.x), "+r"(pack.words.y), "+r"(pack.words.z), "+r"(pack.words.w));
}

// Converts element i to fp32. A bf16 is the upper half of a float, so one mask or shift suffices; the
// compiler's own code takes two instructions for every second element.
template <typename T>
__device__ float float_of(const Pack<T>& pack, int i) {
  return to_float(pack[i]);
}
__device__ inline float float_of(const Pack<__nv_bfloat16>& pack, int i) {
  const uint32_t pair = reinterpret_cast<const uint32_t*>(&pack.words)[i / 2];
  return __uint_as_float(i % 2 ? pair & 0xffff0000 : pair << 16);
}

// A ragged pack, loaded element by element: those of the row, and `fill` in the other places.
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

// Loads of a row's packs, pack i from first_of(i) on, in two functions: first the whole packs by 16-byte
// loads, then the ragged ones element by element. A thread that holds several rows can issue all wide loads
// before it waits for single elements. Places without an element get `fill`. `aligned`: whether this row has
// the skew for which the packs were laid out.
//
// Each wide load has a predicate instead of a branch, because the compiler waits for loads before a branch.
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

// The 16 bytes that begin `skew` elements into two adjacent packs, without a branch: shifts by 8 bytes, by 4,
// and by a funnel shift within words.
template <typename T>
__device__ Pack<T> put_together(uint4 low, uint4 high, int skew) {
  uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  const int bytes = skew * static_cast<int>(sizeof(T));
#pragma unroll
  for (int i = 0; i < 6; ++i) words[i] = bytes & 8 ? words[i + 2] : words[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) words[i] = bytes & 4 ? words[i + 1] : words[i];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = __funnelshift_r(words[i], words[i + 1], bytes % 4 * 8);
  return {make_uint4(words[0], words[1], words[2], words[3])};
}

// Loads the pack that starts at element `first` of the n factors (weights or biases) that all rows share; it
// stays in L1 and L2. If its address is not a multiple of 16 bytes, it spans two words of 16 bytes, which are
// loaded and shifted together. If a word would reach beyond the last factor, or lies before the first one, it
// is loaded element by element. Elements outside of the factors are undefined.
template <typename T>
__device__ Pack<T> load_factors(const T* factors, int first, int n) {
  constexpr int SIZE = Pack<T>::SIZE;
  const int skew = skew_of(factors + first), begin = first - skew;
  if (begin <= -SIZE || begin + (skew == 0 ? SIZE : 2 * SIZE) > n)
    return load_ragged(factors, first, n, 0.0f);
  const auto* const words = reinterpret_cast<const uint4*>(factors + begin);
  const uint4 low = __ldg(words);
  return skew == 0 ? Pack<T>{low} : put_together<T>(low, __ldg(words + 1), skew);
}

// Loads of a row's packs, ragged ones included, by 16-byte loads alone. first_of(i) is a multiple of 16
// bytes. A ragged pack brings up to 14 bytes from beside the row; these lie in the same aligned 16 bytes as
// an element of the row, so reading them cannot fault. The caller must replace them by mask_beside() before
// it uses the pack. Packs without an element of the row become 0, and so do those that reach beyond the first
// `readable` elements, if the caller sets such a limit.
template <typename T, int PACKS, typename First>
__device__ void load_touching_packs(Pack<T> (&packs)[PACKS], const T* row, int n, First first_of,
                                    int readable = INT_MAX) {
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const int first = first_of(i);
    uint4& words = packs[i].words;
    const bool touches = max(first, 0) < min(n, first + Pack<T>::SIZE);
    words = make_uint4(0, 0, 0, 0);
    asm volatile(
        "{\n"
        ".reg .pred touches;\n"
        "setp.ne.b32 touches, %5, 0;\n"
        "@touches ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n"
        "}"
        : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w)
        : "l"(row + first), "r"(static_cast<int>(touches && first + Pack<T>::SIZE <= readable)));
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

// The largest element of a pack, by packed maxima of two where two elements fit a register. NaN only if all
// elements are NaN.
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

// Maximum and sum over LANES neighbouring lanes, a power of two; every lane gets the result. All 32 lanes
// must call.
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

// Sum over all threads of the block, which must be whole warps; every thread gets it. `parts`: 32 floats of
// shared memory that no thread still reads.
__device__ inline float block_sum(float value, float* parts) {
  const int warp_id = threadIdx.x / 32, lane_id = threadIdx.x % 32;
  value = lanes_sum(value);
  if (lane_id == 0) parts[warp_id] = value;
  __syncthreads();  // waits for every warp's part
  return lanes_sum(lane_id < blockDim.x / 32 ? parts[lane_id] : 0.0f);
}

// Chooses lanes a row for rows of up to 128 packs, and calls launch(LANES, PACKS) with integral constants:
// the fewest lanes that hold the row in two packs each, and 32 lanes with four packs above 64 packs. Returns
// false for longer rows, without a launch.
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

// exp(x) for x <= 0. The caller subtracts the maximum first, which is exact for nearby values. One
// multiply-add of x, log2(e) and -maximum * log2(e) would save an instruction, but its rounded last term
// loses digits where the maximum is large.
__device__ inline float exp_of(float x) {
  constexpr float LOG2_E = 1.4426950408889634f;
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * LOG2_E));
  return result;
}
