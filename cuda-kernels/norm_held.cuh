// The kernel of the norms' last forward steps: a row in the registers of a cluster, weights and biases in its
// shared memory.
#pragma once

#include "ampere.cuh"
#include "held.cuh"
#include "norm_cluster.cuh"

constexpr int HELD_THREADS = 32 * HELD_WARPS;
constexpr int LINE_PACKS = LINE_BYTES / 16;
constexpr int FACTOR_PACKS = 32 * HELD_PACKS + LINE_PACKS + 1;  // of a warp; see HeldFactors

template <bool CENTERED>
constexpr int held_bytes(int warps) {
  return warps * FACTOR_PACKS * 16 * (CENTERED ? 2 : 1);
}

// A warp's part of weights or biases, in shared memory as it lies in memory. It begins a line before the part
// does, since rows' parts begin up to a line before their columns, and has a pack more, since packs that lie
// like a row's are put together from two.
template <typename T, bool WHOLE>
struct HeldFactors {
  static constexpr int SIZE = Pack<T>::SIZE, LINE = LINE_PACKS * SIZE;
  uint4* packs;
  const T* factors;  // or null
  int skew;

  __device__ HeldFactors(char* memory, int warp_id, const T* factors)
      : packs(reinterpret_cast<uint4*>(memory) + warp_id * FACTOR_PACKS),
        factors(factors),
        skew(WHOLE || !factors ? 0 : skew_of(factors)) {}

  // Asks for them. Where there are none, `value` stands for each.
  __device__ void load(const HeldPart<T>& part, float value) {
    Pack<T> same;
#pragma unroll
    for (int i = 0; i < SIZE; ++i) set(same, i, from_float<T>(value));
    const int first = part.own * part.ELEMENTS - LINE - skew + part.lane_id * SIZE;
    const T* const place = factors + first;
#pragma unroll
    for (int i = 0; i <= HELD_PACKS; ++i) {
      uint4* const pack = &packs[32 * i + part.lane_id];
      if (i == HELD_PACKS && part.lane_id >= FACTOR_PACKS - 32 * HELD_PACKS) break;
      // Of 16 bytes in which something is the factors', all can be read.
      const bool touches =
          static_cast<unsigned>(first + 32 * i * SIZE + SIZE - 1) < static_cast<unsigned>(part.N + SIZE - 1);
      if (factors) cp_async<16>(pack, place + 32 * i * SIZE, touches);
      if (!factors) *pack = same.words;
    }
  }

  // Those for this lane's i-th pack of a row, once all lanes' copies are there. Elements beside the row are
  // anything.
  __device__ Pack<T> operator()(const HeldPart<T>& part, int i) const {
    const int offset = LINE + skew - part.skew + (32 * i + part.lane_id) * SIZE;
    const uint4* const place = packs + offset / SIZE;
    const uint4 low = place[0];
    if (WHOLE) return {low};
    const uint4 high = place[1];
    const int bytes = offset % SIZE * static_cast<int>(sizeof(T));
    uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int j = 0; j < 6; ++j) words[j] = bytes & 8 ? words[j + 2] : words[j];
#pragma unroll
    for (int j = 0; j < 5; ++j) words[j] = bytes & 4 ? words[j + 1] : words[j];
    if (sizeof(T) == 2) {
#pragma unroll
      for (int j = 0; j < 4; ++j) words[j] = __funnelshift_r(words[j], words[j + 1], bytes % 4 * 8);
    }
    return {make_uint4(words[0], words[1], words[2], words[3])};
  }
};

// A cluster of `blocks` blocks takes one row after the other, gridDim.x apart. Every warp sends what it finds
// of its part to all blocks, and waits for what the others find; weights and biases travel to shared memory
// while the first row does. Without CENTERED the mean is taken to be 0.
// WHOLE: all rows, weights and biases start at multiples of 16 bytes and have only whole packs.
template <typename T, bool CENTERED, bool WHOLE>
__device__ void normalise_held(const NormArgs& args, int blocks) {
#if __CUDA_ARCH__ >= 900
  constexpr int SIZE = Pack<T>::SIZE;
  extern __shared__ __align__(128) char memory[];
  __shared__ WarpExchange<MeanSquares, 2> exchange;

  const int N = static_cast<int>(args.N), lane_id = threadIdx.x % 32, warp_id = threadIdx.x / 32;
  const int warps = blockDim.x / 32, parts = blocks * warps, own = blockIdx.y * warps + warp_id;
  HeldFactors<T, WHOLE> weights(memory, warp_id, static_cast<const T*>(args.weight));
  HeldFactors<T, WHOLE> biases(memory, warps + warp_id,
                               CENTERED ? static_cast<const T*>(args.bias) : nullptr);

  int turn = 0;
  for (int64_t index = blockIdx.x; index < args.M; index += gridDim.x, ++turn) {
    const T* const x = static_cast<const T*>(args.x) + index * args.stride_xm;
    const HeldPart<T> part{N, skew_of<LINE_BYTES>(x), own, lane_id};
    Pack<T> held[HELD_PACKS];
    load_held(held, x, part, 0.0f);
    const int single = WHOLE ? part.NONE : part.single();
    T raw = from_float<T>(0.0f), raw_weight = from_float<T>(1.0f), raw_bias = raw;
    if (!WHOLE && single != part.NONE) {
      raw = x[single];
      if (weights.factors) raw_weight = weights.factors[single];
      if (biases.factors) raw_bias = biases.factors[single];
    }
    if (turn == 0) {
      exchange.begin(parts);
      weights.load(part, 1.0f);
      if (CENTERED) biases.load(part, 0.0f);
      cp_async_commit_group();
    }

    MeanSquares mine = {};
    const float element = to_float(raw);
    if (CENTERED) {
      float sum = element;
#pragma unroll
      for (int i = 0; i < HELD_PACKS; ++i) {
        float pack_sum = 0.0f;  // so that additions wait for few others
        keep_packed(held[i]);
#pragma unroll
        for (int j = 0; j < SIZE; ++j) pack_sum += float_at(held[i], j);
        sum += pack_sum;
      }
      mine.mean = lanes_sum(sum) / static_cast<float>(max(part.elements_of(own), 1));
    }
    if (!WHOLE && single != part.NONE) mine.squares = (element - mine.mean) * (element - mine.mean);
#pragma unroll
    for (int i = 0; i < HELD_PACKS; ++i) {
      const float from = part.holds(i) ? mine.mean : 0.0f;  // those beside the row are 0
      float squares = 0.0f;
      keep_packed(held[i]);
#pragma unroll
      for (int j = 0; j < SIZE; ++j) {
        const float distance = CENTERED ? float_at(held[i], j) - from : float_at(held[i], j);
        squares = fmaf(distance, distance, squares);
      }
      mine.squares += squares;
    }
    mine.squares = lanes_sum(mine.squares);
    exchange(mine, own, parts, blocks, turn);

    // Chan's formula, for all parts at once. Lanes beyond the last part read it again, and count none of it.
    constexpr int EACH = MOST_PARTS / 32;
    MeanSquares its[EACH], whole = {};
    float elements[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int other = 32 * i + lane_id;
      its[i] = exchange.at(min(other, parts - 1), turn);
      elements[i] = static_cast<float>(part.elements_of(other));  // 0 beyond the row
      if (CENTERED) whole.mean = fmaf(elements[i], its[i].mean, whole.mean);
    }
    if (CENTERED) whole.mean = lanes_sum(whole.mean) / static_cast<float>(N);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const float distance = its[i].mean - whole.mean;
      if (32 * i + lane_id < parts) whole.squares += its[i].squares;
      if (CENTERED) whole.squares = fmaf(elements[i] * distance, distance, whole.squares);
    }
    const float rstd = rstd_of(lanes_sum(whole.squares), N, args.eps);
    if (own == 0 && lane_id == 0) {
      if (CENTERED) args.mean[index] = whole.mean;
      args.rstd[index] = rstd;
    }

    const auto result = [&](float value, float its_weight, float its_bias) {
      const float unit = (CENTERED ? value - whole.mean : value) * rstd;
      return CENTERED ? fmaf(unit, its_weight, its_bias) : unit * its_weight;
    };
    T* const out = static_cast<T*>(args.out) + index * args.N;
    T* const first_out = out + part.first_of(0);
    if (turn == 0) {
      cp_async_wait_group<0>();
      __syncwarp();  // for other lanes' copies
    }
#pragma unroll
    for (int i = 0; i < HELD_PACKS; ++i) {
      keep_packed(held[i]);
      const Pack<T> its_weights = weights(part, i);
      const Pack<T> its_biases = CENTERED ? biases(part, i) : Pack<T>{};
      float values[SIZE];
#pragma unroll
      for (int j = 0; j < SIZE; ++j)
        values[j] = result(float_at(held[i], j), float_at(its_weights, j), float_at(its_biases, j));
      Pack<T> results;
      round_to(results, values);
      // In one piece, which the compiler would otherwise take apart.
      if (part.holds(i)) __stwb(reinterpret_cast<uint4*>(first_out + 32 * i * SIZE), results.words);
    }
    if (!WHOLE && single != part.NONE)
      out[single] = from_float<T>(result(element, to_float(raw_weight), to_float(raw_bias)));
  }
#endif
}

// Launches it, as kernel(args, blocks), with at most `most_rows` rows for a cluster. False where the GPU has
// no room for the cluster, a row is too long or too short for one, there is a residual, or the result is
// skewed otherwise than x.
template <typename T, bool CENTERED, typename Kernel>
bool launch_held(const NormArgs& args, int64_t most_rows, Kernel* kernel) {
  constexpr int SIZE = Pack<T>::SIZE;
  const auto skew = [](const void* rows) { return reinterpret_cast<uintptr_t>(rows) % 16; };
  if (args.residual || args.N < 2 * SIZE || skew(args.x) != skew(args.out) ||
      (args.stride_xm - args.N) % SIZE != 0)
    return false;
  const HeldShape shape(most_packs<T, LINE_BYTES>(args.x, args.N, args.stride_xm));
  constexpr int MOST_BYTES = held_bytes<CENTERED>(HELD_WARPS);
  if (shape.blocks == 0 || most_shared_memory() < MOST_BYTES) return false;
  allow_shared_memory(kernel, MOST_BYTES);
  const int bytes = held_bytes<CENTERED>(shape.threads / 32);
  const int resident =
      ClusterLaunch(reinterpret_cast<const void*>(kernel), shape.blocks, shape.threads, bytes, args.stream)
          .resident();
  if (resident == 0) return false;
  // Several rows share what is loaded of weights and biases, as long as there are enough for all SMs.
  const int64_t rows = std::clamp<int64_t>(args.M / resident, 1, most_rows), clusters = cdiv(args.M, rows);
  if (clusters > INT32_MAX) return false;
  launch_clusters(clusters, shape, bytes, args.stream, kernel, args, shape.blocks);
  return true;
}
