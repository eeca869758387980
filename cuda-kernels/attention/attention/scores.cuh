// What v14's consumers do with a tile of scores, from the product that makes them to the one that takes them.
#pragma once

#include "lib/ptx/wgmma_registers.cuh"
#include "lib/tanh.cuh"
#include "tile.cuh"
#include "work.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Starts scores = q @ k^T.
template <typename T, typename Tile>
__device__ inline void multiply_keys(float (&scores)[Tile::SCORES], uint64_t q, uint64_t k) {
#pragma unroll
  for (int step = 0; step < Tile::PANELS * 4; ++step) {
    const int within = step % 4 * 2;  // 16 columns, in descriptors' units of 16 bytes
    wgmma_m64k16<Tile::BLOCK_N, T, false, true>(scores, q + step / 4 * (Tile::Q_BYTES / 16) + within,
                                                k + step / 4 * (Tile::K_BYTES / 16) + within, step > 0);
  }
}

// Starts out += p @ v.
template <typename T, int N, int STEPS>
__device__ inline void multiply_values(float (&out)[N], const uint32_t (&p)[STEPS][4], uint64_t v) {
#pragma unroll
  for (int step = 0; step < STEPS; ++step)
    wgmma_m64k16_registers<N * 2, T, false>(out, p[step], v + step * (16 * ROW_BYTES / 16), true);
}

// Softcap: puts scores into tanh. The cap itself is part of the factor that turns them into powers of 2.
template <int N>
__device__ inline void bound(float (&scores)[N], float cap) {
#pragma unroll
  for (int i = 0; i < N; ++i) scores[i] = tanh_by_exp2(scores[i] * cap);
}

// Hides keys outside the band, and beyond the last one. `row` and `key` are those of the thread's first
// score.
template <int N>
__device__ inline void hide(float (&scores)[N], const Task& task, int row, int key) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int in_row = row + i % 4 / 2 * 8;
    const int low = in_row + task.first - key;
    const int high = min(in_row + task.last, task.Sk - 1) - key;
    const int at = i / 4 * 8 + i % 2;
    if (at < low || at > high) scores[i] = -INFINITY;
  }
}

constexpr float THRESHOLD = 8.0f;  // powers of 2

// Raises the rows' maxima to those of the scores if one of the warp's has grown by much. Then the result is
// true, and what was summed under the old ones has to shrink by `shrink`, as the rows' sums do here.
template <int N>
__device__ inline bool raise(Rows& rows, float (&shrink)[2], const float (&scores)[N], float factor) {
  float top[4] = {rows.max[0], rows.max[0], rows.max[1], rows.max[1]};
#pragma unroll
  for (int i = 0; i < N; ++i) top[i % 4] = fmaxf(top[i % 4], scores[i]);
  float max[2];
  bool grown = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    max[half] = fmaxf(top[half * 2], top[half * 2 + 1]);
    max[half] = fmaxf(max[half], __shfl_xor_sync(0xffffffff, max[half], 1));
    max[half] = fmaxf(max[half], __shfl_xor_sync(0xffffffff, max[half], 2));
    grown |= (max[half] - rows.max[half]) * factor > THRESHOLD;  // false where both are -inf
  }
  if (!__any_sync(0xffffffff, grown)) return false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float base = max[half] == -INFINITY ? 0.0f : max[half];
    shrink[half] = exp2_approx((rows.max[half] - base) * factor);
    rows.max[half] = max[half];
    rows.sum[half] *= shrink[half];
  }
  return true;
}

// Multiplies the results of a thread's two rows.
template <int N>
__device__ inline void rescale(float (&out)[N], const float (&shrink)[2]) {
#pragma unroll
  for (int j = 0; j < N; ++j) out[j] *= shrink[j % 4 / 2];
}

// Rounds powers of 2 of the scores, under the rows' maxima, to p: where 16 columns of sums lie, wgmma expects
// its first operand. `sum` gets those of the thread's columns. Where rows have SEEN a key their maxima are
// numbers; otherwise one may be -inf.
template <bool SEEN, typename T, int STEPS>
__device__ inline void powers_of(uint32_t (&p)[STEPS][4], float (&sum)[2], const float (&scores)[STEPS * 8],
                                 const Rows& rows, float factor) {
  float shift[2];
#pragma unroll
  for (int half = 0; half < 2; ++half)
    shift[half] = !SEEN && rows.max[half] == -INFINITY ? 0.0f : rows.max[half] * factor;
  float sums[4] = {};
#pragma unroll
  for (int i = 0; i < STEPS * 8; i += 2) {
    float powers[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      powers[j] = exp2_approx(fmaf(scores[i + j], factor, -shift[i % 4 / 2]));
      sums[i % 4 + j] += powers[j];
    }
    alignas(4) const T pair[2] = {from_float<T>(powers[0]), from_float<T>(powers[1])};
    p[i / 8][i % 8 / 2] = *reinterpret_cast<const uint32_t*>(pair);
  }
  sum[0] = sums[0] + sums[1];
  sum[1] = sums[2] + sums[3];
}

// Turns scores into p, and adds them to the rows' sums.
template <typename T, int STEPS>
__device__ inline void exponentiate(uint32_t (&p)[STEPS][4], Rows& rows, const float (&scores)[STEPS * 8],
                                    float factor) {
  float sum[2];
  powers_of<false, T>(p, sum, scores, rows, factor);
  rows.sum[0] += sum[0];
  rows.sum[1] += sum[1];
}

// The same before any search for maxima: the old ones serve while no sum is so large that a score may be far
// above them. Only then are maxima raised. As of `raise`, the result is true if that changed one.
template <typename T, int STEPS>
__device__ inline bool exponentiate_unsearched(uint32_t (&p)[STEPS][4], Rows& rows, float (&shrink)[2],
                                               const float (&scores)[STEPS * 8], float factor) {
  constexpr float LARGEST = 256.0f;  // no power below it is further than THRESHOLD above its maximum
  float sum[2];
  powers_of<true, T>(p, sum, scores, rows, factor);
  // Under a maximum of -inf, where all scores so far were, a sum is infinite or NaN.
  const bool large = !(sum[0] <= LARGEST && sum[1] <= LARGEST);
  bool grown = false;
  if (__any_sync(0xffffffff, large)) {
    grown = raise(rows, shrink, scores, factor);
    powers_of<false, T>(p, sum, scores, rows, factor);
  }
  rows.sum[0] += sum[0];
  rows.sum[1] += sum[1];
  return grown;
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL
