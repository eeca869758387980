// layer_norm v04_rows_per_block: 16 bytes an access, and as many threads a row as it needs.
//
// Change:   a thread holds packs of 16 bytes instead of single elements, wherever a row starts: it loads
//           every pack that touches the row whole, and masks what lies outside of it. A row of up to 128
//           packs gets a warp or a part of one, so that a warp may hold several rows; a longer row gets just
//           enough warps for a few packs a thread.
// Why:      an eighth of the loads and stores in bf16. A block of 256 for a row of 256 elements leaves most
//           of its threads idle, and still waits at two barriers; lanes of a warp need shuffles alone. Trials
//           of CUDA's v04 and v05 ran between the predictions and the recording.
// Counter:  sectors_per_load rises to 16, that of full packs; instructions fall, dram_share rises; time falls
//           most at a row of 256.
// Requires: contiguous rows of up to 64 KiB. Stores are wide where out's rows have the skew of x's.
// Source:   rows by warps of PyTorch, aten/src/ATen/native/cuda/PersistentSoftmax.cuh
// Twin:     triton-kernels/norm/layer_norm/v04_rows_per_block.py
#include "args.h"
#include "norm/norm_row.cuh"

namespace {

constexpr int LANES_THREADS = 128;               // of a block for rows of a warp or less
constexpr int FEW_PACKS = 4, FEW_THREADS = 512;  // for rows of several warps
constexpr int MANY_PACKS = 5, MANY_THREADS = 832;
constexpr int64_t LARGEST_ROW = 64 * 1024;  // bytes
static_assert(MANY_THREADS * MANY_PACKS >= LARGEST_ROW / 16 + 1, "a skewed row needs a pack more");

// LANES lanes take a row, of at most LANES * PACKS packs; a block takes LANES_THREADS / LANES rows.
template <typename T, int LANES, int PACKS, Alignment ALIGNMENT>
__global__ void __launch_bounds__(LANES_THREADS)
    layer_norm_v04_rows_per_block_lanes_kernel(const LayerNormArgs args) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * (LANES_THREADS / LANES) + threadIdx.x / LANES;
  // Lanes past the last row stay for the shuffles, with the last row's values.
  const int64_t inside = min(index, args.M - 1);
  const NormRow<T> row(args, inside);
  RegisterRow<T, PACKS, Norm::LAYER, ALIGNMENT> held(args.N, skew_of(row.x), threadIdx.x % LANES, LANES);
  held.load(args, row, inside);
  held.finish_load(row);
  const float mean = lanes_sum<LANES>(held.sum()) / static_cast<float>(held.n);
  const float rstd = rstd_of(lanes_sum<LANES>(held.squares(mean)), held.n, args.eps);
  if (index >= args.M) return;
  if (threadIdx.x % LANES == 0) {
    args.mean[index] = mean;
    args.rstd[index] = rstd;
  }
  held.write(row, mean, rstd);
}

// A block takes a row, of at most blockDim.x * PACKS packs.
template <typename T, int PACKS, int THREADS, Alignment ALIGNMENT>
__global__ void __launch_bounds__(THREADS) layer_norm_v04_rows_per_block_kernel(const LayerNormArgs args) {
  __shared__ float mean_parts[32], square_parts[32];
  const NormRow<T> row(args, blockIdx.x);
  RegisterRow<T, PACKS, Norm::LAYER, ALIGNMENT> held(args.N, skew_of(row.x), threadIdx.x, blockDim.x);
  held.load(args, row, blockIdx.x);
  held.finish_load(row);
  const float mean = block_sum(held.sum(), mean_parts) / static_cast<float>(held.n);
  const float rstd = rstd_of(block_sum(held.squares(mean), square_parts), held.n, args.eps);
  if (threadIdx.x == 0) {
    args.mean[blockIdx.x] = mean;
    args.rstd[blockIdx.x] = rstd;
  }
  held.write(row, mean, rstd);
}

template <typename T, int PACKS, int THREADS, Alignment ALIGNMENT>
void launch_block(const LayerNormArgs& args, int64_t packs) {
  const int64_t threads = cdiv(cdiv(packs, PACKS), 32) * 32;
  layer_norm_v04_rows_per_block_kernel<T, PACKS, THREADS, ALIGNMENT>
      <<<static_cast<unsigned>(args.M), static_cast<unsigned>(threads), 0, args.stream>>>(args);
}

template <typename T, Alignment ALIGNMENT>
void launch(const LayerNormArgs& args) {
  const int64_t packs = most_packs<T>(args.x, args.N, args.stride_xm);
  const bool launched = choose_lanes(packs, [&](auto lanes, auto each) {
    layer_norm_v04_rows_per_block_lanes_kernel<T, lanes, each, ALIGNMENT>
        <<<static_cast<unsigned>(cdiv(args.M, LANES_THREADS / lanes)), LANES_THREADS, 0, args.stream>>>(args);
  });
  if (launched) return;
  // Few packs a thread where they fill whole groups of four warps; else more, so that fewer threads have
  // none.
  if (packs <= FEW_PACKS * FEW_THREADS && packs % (128 * FEW_PACKS) == 0) {
    launch_block<T, FEW_PACKS, FEW_THREADS, ALIGNMENT>(args, packs);
  } else {
    launch_block<T, MANY_PACKS, MANY_THREADS, ALIGNMENT>(args, packs);
  }
}

}  // namespace

void layer_norm_v04_rows_per_block(const LayerNormArgs& args) {
  if (args.M == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    const int64_t bytes = args.N * sizeof(T);
    if (bytes > LARGEST_ROW) {
      throw std::runtime_error("x has rows of " + std::to_string(bytes) +
                               " bytes, v04_rows_per_block holds " + std::to_string(LARGEST_ROW) +
                               ": take v02_welford or v05_cluster");
    }
    are_whole<T>(args) ? launch<T, Alignment::PACK>(args) : launch<T, Alignment::ELEMENT>(args);
  });
  CUDA_CHECK(cudaGetLastError());
}
