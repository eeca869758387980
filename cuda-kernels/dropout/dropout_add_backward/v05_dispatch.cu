// dropout_add_backward v05_dispatch: few long rows are summed by threads that own columns, in one launch;
// rows of dout, x and dx may start differently within 16 bytes.
//
// Change:   if the packs of one row fill the GPU, a thread owns a pack of columns in all rows. It writes dx,
//           and at the end dbias, without partial sums. Where rows have several skews, a pack of dout or x is
//           shifted together from two aligned words, and one of dx from those of two lanes.
//           Rows of any number are shifted together so where dout or x is no whole packs, or is skewed
//           unlike dx: packs are aligned in dx, and have v04's columns. Without dbias they are counted
//           through the matrix, and one in which a row ends is put together from two rows (function_dx.cu).
// Why:      of rows of a million elements, v04 has a chunk of rows for every skew, so that it writes up to
//           eight partial sums of every column, more than there are rows. And its second launch has a block
//           of 1024 threads for 32 columns, of which few warps have a chunk to add. Where skews differ, v04
//           has accesses of one element: instructions, not memory, limit it.
// Counter:  at rows of 4096 nothing changes; the time falls at few rows of millions of elements.
// Requires: rows that are contiguous, at any distance; any length.
// Routes:   dbias, and rows whose packs fill the GPU: threads that own columns
//           dbias, and skews that differ, but in fp32: v04's rows, shifted together
//           other rows with dbias: v04's kernels
//           dx alone: function_dx.cu's kernels
// Source:   layer_norm's v12, for the shifted packs
// Twin:     triton-kernels/dropout/dropout_add_backward/v05_dispatch.py
#include "args.h"
#include "columns.cuh"
#include "dx.h"
#include "lib/shifted_packs.cuh"
#include "shifted_rows.cuh"

void dropout_add_backward_v04_rows_abreast(const DropoutAddBackwardArgs& args);

namespace {

constexpr int THREADS = 256;      // of a block, at most
constexpr int BLOCKS_PER_SM = 4;  // whose threads own columns
constexpr int CHUNK_BLOCKS = 3;   // of an SM, whose rows are shifted together
constexpr int64_t FEW_ROWS = 64;  // a thread walks so few rows in little time, even if few threads do

// dx and dbias of the columns that a thread owns. Rows are added in their order.
template <typename T, Activation ACTIVATION>
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    dropout_add_backward_v05_dispatch_kernel(const DropoutAddBackwardArgs args) {
  constexpr int SIZE = Pack<T>::SIZE;
  constexpr bool SLOPES = ACTIVATION != Activation::none;
  constexpr int ROWS = SLOPES ? 1 : 2;  // under way, of one matrix or two
  using Packs = ShiftedPacks<T, 1>;
  const RowPart<T> part(args.N, 0, blockIdx.x, THREADS);
  const int first = static_cast<int>(threadIdx.x) * SIZE;
  const auto load = [&](const void* matrix, int64_t row, int64_t stride) {
    const void* const there = row < args.M ? matrix : nullptr;
    return Packs(ReadRow<T>(there, row, args.M, args.N, stride, part), part, first, 0);
  };

  const Mask mask(args.dropout);
  Pack<T> bias = {};
  if (SLOPES && args.bias) {
    bias = load_ragged(static_cast<const T*>(args.bias) + part.start, first, part.end, 0.0f);
  }
  float sums[SIZE] = {};
  // dx of a row, which all lanes of a warp store together, whether they own columns of it or not.
  const auto take = [&](int64_t row, const Packs& douts, const Packs& xs) {
    bool kept[SIZE];  // before the wait for the loads
    keeps_anywhere(mask, kept, row * args.N + part.start + first);
    const Pack<T> dout = douts[0], x = SLOPES ? xs[0] : Pack<T>{};
    Pack<T> dx;
#pragma unroll
    for (int j = 0; j < SIZE; ++j) {
      // Computed for all elements, then selected: computed only where kept, each would take a branch.
      const float z = to_float(x[j]) + to_float(bias[j]);
      const float passed = gradient<ACTIVATION>(to_float(dout[j]), z, args.dropout.scale);
      const float value = kept[j] ? passed : 0.0f;
      sums[j] += value;
      set(dx, j, from_float<T>(value));
    }
    store_shifted<32>(static_cast<T*>(args.dx) + row * args.N + part.start, part, first, dx);
  };
  for (int64_t row = 0; row < args.M; row += ROWS) {
    const Packs douts = load(args.dout, row, args.stride_dm);
    const Packs xs = load(SLOPES ? args.x : nullptr, row, args.stride_xm);
    if constexpr (ROWS == 2) {
      const Packs next = load(args.dout, row + 1, args.stride_dm);
      take(row, douts, xs);
      if (row + 1 < args.M) take(row + 1, next, xs);
    } else {
      take(row, douts, xs);
    }
  }

  Pack<T> total;
#pragma unroll
  for (int j = 0; j < SIZE; ++j) set(total, j, from_float<T>(sums[j]));
  T* const dbias = static_cast<T*>(args.dbias) + part.start;
  store_pack(dbias, first, part.end, skew_of(dbias) == 0, total);
}

// Whether a block for every THREADS packs of a row fills the GPU. With so few rows that v04 has one of each
// skew, a part of it is enough.
template <typename T>
bool fills_the_gpu(const DropoutAddBackwardArgs& args) {
  const int64_t blocks = cdiv(args.N, THREADS * Pack<T>::SIZE), sms = multiprocessor_count();
  return blocks >= (args.M <= FEW_ROWS ? 1 : BLOCKS_PER_SM) * sms;
}

template <typename T, Activation ACTIVATION, int ROWS>
__global__ void __launch_bounds__(THREADS, CHUNK_BLOCKS)
    dropout_add_backward_v05_dispatch_rows_kernel(const DropoutAddBackwardArgs args, const RowLayout layout,
                                                  int64_t edge, float* partials) {
  take_shifted_rows<T, ACTIVATION, ROWS, THREADS>(args, layout, edge, partials);
}

template <typename T>
__global__ void __launch_bounds__(32 * CHUNK_WARPS)
    dropout_add_backward_v05_dispatch_sum_kernel(const float* partials, int chunks, int64_t N, T* dbias) {
  add_chunks(partials, chunks, N, dbias);
}

// Rows whose skews differ, and the sums of their columns. False where v04 has aligned packs, and in fp32,
// whose accesses of single elements are whole sectors.
template <typename T, Activation ACTIVATION>
bool launch_shifted_rows(const DropoutAddBackwardArgs& args) {
  if constexpr (sizeof(T) == 4) return false;
  if (are_skewed_alike<T>(args) || !aligned_to_16_bytes(args.dx)) return false;
  constexpr int ROWS = ACTIVATION == Activation::none ? 2 : 1;
  const RowLayout layout = row_layout<T, THREADS, CHUNK_BLOCKS>(args.M, args.N, true);
  auto* partials = static_cast<float*>(args.memory->workspace(layout.chunks * args.N * sizeof(float)));
  dropout_add_backward_v05_dispatch_rows_kernel<T, ACTIVATION, ROWS>
      <<<layout.strips * layout.chunks, layout.lanes * layout.groups, 0, args.stream>>>(
          args, layout, edge_rows<T>(args), partials);
  dropout_add_backward_v05_dispatch_sum_kernel<T><<<cdiv(args.N, 32), 32 * CHUNK_WARPS, 0, args.stream>>>(
      partials, layout.chunks, args.N, static_cast<T*>(args.dbias));
  return true;
}

}  // namespace

void dropout_add_backward_v05_dispatch(const DropoutAddBackwardArgs& args) {
  if (args.dbias == nullptr) return dropout_add_backward_dx(args);
  if (args.N == 0) return;
  dispatch(args.dtype, args.activation, [&]<typename T, Activation ACTIVATION>() {
    if (fills_the_gpu<T>(args)) {
      dropout_add_backward_v05_dispatch_kernel<T, ACTIVATION>
          <<<static_cast<unsigned>(cdiv(args.N, THREADS * Pack<T>::SIZE)), THREADS, 0, args.stream>>>(args);
    } else if (args.M == 0 || !launch_shifted_rows<T, ACTIVATION>(args)) {
      dropout_add_backward_v04_rows_abreast(args);
    }
  });
  CUDA_CHECK(cudaGetLastError());
}
