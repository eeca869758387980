// cross_entropy_backward v04_dispatch: rows of any alignment by 16 bytes, rows of medium length by warps.
//
// Change:   packs are counted from a multiple of 16 bytes of out's row. If the logits' row has another skew,
//           a pack of logits is shifted together from the two aligned words that it spans. A row has as many
//           lanes as in v03, and if it is longer, a warp for every 128 packs of it. Rows of up to 1024 packs
//           that do have out's skew are taken by warps, too. In fp32 rows of another skew are moved by
//           accesses of neighbouring single elements: two words a pack would take twice the registers.
// Why:      in logits whose rows lie an odd number of elements apart, most rows have another skew than out's,
//           and v02 and v03 store them element by element, a pack's width apart from lane to lane, which
//           writes every sector in parts. And a row of 240 packs gives most of v02's threads
//           one pack of four, or none.
// Counter:  at rows of 131,072 nothing changes; the time falls most at logits whose rows lie an odd number of
//           elements apart.
// Requires: rows of contiguous elements; of fewer than 2^31 elements if they have out's skew. out may be the
//           logits.
// Routes:   another skew than out's: this file's shifted packs, in fp32 its single elements
//           up to 128 packs: v03's kernel
//           up to 1024 packs: this file's warps
//           longer: v02's kernel
// Source:   layer_norm's v12, for the shifted packs
#include "gradient.cuh"
#include "lib/shifted_packs.cuh"

void cross_entropy_backward_v03_rows_per_block(const CrossEntropyBackwardArgs& args);

namespace {

constexpr int THREADS = 256;
constexpr int PACKS = 4;                   // of a lane, in rows that whole warps take
constexpr int WARP_PACKS = 32 * PACKS;     // of a row that a warp takes
constexpr int64_t MOST_WARP_PACKS = 1024;  // a longer row leaves few of v02's threads without work
constexpr int BLOCKS_PER_SM = 3;
constexpr int ELEMENTS = 8;     // of a lane that moves single elements, all requested at once
constexpr int LEAST_LANES = 4;  // of a row of single elements

// The row that a group of LANES lanes takes, and which part of it, if a row has `parts`. Several parts are
// counted in 32 bits: 2^32 parts of WARP_PACKS exceed a GPU's memory.
struct Part {
  int64_t row;
  int number;

  template <int LANES>
  __device__ static Part of_group(unsigned parts) {
    const int64_t group = static_cast<int64_t>(blockIdx.x) * (THREADS / LANES) + threadIdx.x / LANES;
    if (parts == 1) return {group, 0};
    const auto at = static_cast<uint32_t>(group);
    return {at / parts, static_cast<int>(at % parts)};
  }
};

// logits, out: [M, N], rows stride_lm and stride_om apart; target, lse: [M]; dout: [M], stride_dm apart. Each
// group of LANES lanes takes EACH * LANES packs of a row, counted from a multiple of 16 bytes of out.
template <typename T, int LANES, int EACH>
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    cross_entropy_backward_v04_dispatch_shifted_kernel(const CrossEntropyBackwardArgs args, unsigned parts) {
  constexpr int SIZE = Pack<T>::SIZE, STEP = LANES * SIZE;
  const auto [row, number] = Part::of_group<LANES>(parts);
  if (row >= args.M) return;
  T* const row_out = static_cast<T*>(args.out) + row * args.stride_om;
  const RowPart<T> part(args.N, skew_of(row_out), number, LANES * EACH);
  const ReadRow<T> from(args.logits, row, args.M, args.N, args.stride_lm, part);
  const int mine = static_cast<int>(threadIdx.x % LANES) * SIZE;
  const ShiftedPacks<T, EACH> packs(from, part, mine, STEP);

  const int64_t target = args.target[row];
  const RowGradient gradient(args, target, args.lse[row], dout_of<T>(args, row));
  const bool ignored = target == args.ignore_index;
  // The target counted as elements of the part are; -1 if it lies in another part, or is no class.
  const int64_t behind = target - part.start;
  const int hit = behind >= part.from && behind < part.end ? static_cast<int>(behind) : -1;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int first = mine + i * STEP;
    if (part.count(first) == 0) continue;
    const Pack<T> pack = packs[i];
    Pack<T> result;
#pragma unroll
    for (int j = 0; j < SIZE; ++j) {
      const float value = gradient(to_float(pack[j]), first + j == hit);
      set(result, j, from_float<T>(ignored ? 0.0f : value));
    }
    store_part<Reuse::SOON>(row_out + part.start, part, first, result);
  }
}

// The same for rows that have out's skew. out may be the logits.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    cross_entropy_backward_v04_dispatch_warps_kernel(const CrossEntropyBackwardArgs args, unsigned parts) {
  constexpr int SIZE = Pack<T>::SIZE;
  const auto [row, number] = Part::of_group<32>(parts);
  if (row >= args.M) return;
  const T* const row_logits = static_cast<const T*>(args.logits) + row * args.stride_lm;
  T* const row_out = static_cast<T*>(args.out) + row * args.stride_om;
  const int lane_id = threadIdx.x % 32;
  const int start = (number * WARP_PACKS + lane_id) * SIZE - skew_of(row_logits);
  write_gradient<PACKS>(args, row, row_logits, row_out, [=](int i) { return start + i * 32 * SIZE; });
}

// For fp32 rows of another skew than out's. Each group of LANES lanes takes ELEMENTS * LANES elements of a
// row; neighbouring lanes have neighbouring ones. out may be the logits.
template <int LANES>
__global__ void __launch_bounds__(THREADS)
    cross_entropy_backward_v04_dispatch_elements_kernel(const CrossEntropyBackwardArgs args, unsigned parts) {
  constexpr int WIDTH = ELEMENTS * LANES;
  const auto [row, number] = Part::of_group<LANES>(parts);
  if (row >= args.M) return;
  const int64_t start = static_cast<int64_t>(number) * WIDTH + threadIdx.x % LANES;
  const int left = static_cast<int>(min(args.N - start, int64_t{WIDTH}));
  const float* const from = static_cast<const float*>(args.logits) + row * args.stride_lm + start;
  float* const to = static_cast<float*>(args.out) + row * args.stride_om + start;
  float logits[ELEMENTS];
#pragma unroll
  for (int i = 0; i < ELEMENTS; ++i) logits[i] = i * LANES < left ? from[i * LANES] : 0.0f;

  const int64_t target = args.target[row];
  const RowGradient gradient(args, target, args.lse[row], dout_of<float>(args, row));
  const bool ignored = target == args.ignore_index;
  // The target counted from this lane's first element; -1 if it is none of the part's.
  const int64_t behind = target - start;
  const int hit = behind >= 0 && behind < left ? static_cast<int>(behind) : -1;
#pragma unroll
  for (int i = 0; i < ELEMENTS; ++i) {
    const float value = gradient(logits[i], i * LANES == hit);
    if (i * LANES < left) to[i * LANES] = ignored ? 0.0f : value;
  }
}

void launch_elements(const CrossEntropyBackwardArgs& args) {
  const auto launch = [&](auto lanes) {
    const int64_t parts = cdiv(args.N, ELEMENTS * lanes);
    cross_entropy_backward_v04_dispatch_elements_kernel<lanes>
        <<<static_cast<unsigned>(cdiv(args.M * parts, THREADS / lanes)), THREADS, 0, args.stream>>>(
            args, static_cast<unsigned>(parts));
  };
  if (args.N <= LEAST_LANES * ELEMENTS) {
    launch(std::integral_constant<int, LEAST_LANES>{});
  } else if (args.N <= 8 * ELEMENTS) {
    launch(std::integral_constant<int, 8>{});
  } else if (args.N <= 16 * ELEMENTS) {
    launch(std::integral_constant<int, 16>{});
  } else {
    launch(std::integral_constant<int, 32>{});
  }
  CUDA_CHECK(cudaGetLastError());
}

template <typename T>
void launch_shifted(const CrossEntropyBackwardArgs& args) {
  const int64_t packs = most_packs<T>(args.out, args.N, args.stride_om), parts = cdiv(packs, WARP_PACKS);
  choose_lanes(std::min<int64_t>(packs, WARP_PACKS), [&](auto lanes, auto each) {
    cross_entropy_backward_v04_dispatch_shifted_kernel<T, lanes, each>
        <<<static_cast<unsigned>(cdiv(args.M * parts, THREADS / lanes)), THREADS, 0, args.stream>>>(
            args, static_cast<unsigned>(parts));
  });
  CUDA_CHECK(cudaGetLastError());
}

template <typename T>
void launch_warps(const CrossEntropyBackwardArgs& args, int64_t packs) {
  const int64_t parts = cdiv(packs, WARP_PACKS);
  cross_entropy_backward_v04_dispatch_warps_kernel<T>
      <<<static_cast<unsigned>(cdiv(args.M * parts, THREADS / 32)), THREADS, 0, args.stream>>>(
          args, static_cast<unsigned>(parts));
  CUDA_CHECK(cudaGetLastError());
}

// Whether all rows of the logits have the skew of out's.
template <typename T>
bool are_skewed_alike(const CrossEntropyBackwardArgs& args) {
  const auto skew = [](const void* rows) { return reinterpret_cast<uintptr_t>(rows) % 16; };
  return skew(args.logits) == skew(args.out) &&
         (args.M == 1 || (args.stride_lm - args.stride_om) % Pack<T>::SIZE == 0);
}

}  // namespace

void cross_entropy_backward_v04_dispatch(const CrossEntropyBackwardArgs& args) {
  if (args.M == 0 || args.N == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (!are_skewed_alike<T>(args)) {
      if constexpr (sizeof(T) == 4) {
        return launch_elements(args);
      } else {
        return launch_shifted<T>(args);
      }
    }
    const int64_t packs = most_packs<T>(args.logits, args.N, args.stride_lm);
    if (packs > WARP_PACKS && packs <= MOST_WARP_PACKS) return launch_warps<T>(args, packs);
    cross_entropy_backward_v03_rows_per_block(args);
  });
}
