// dropout_add_backward v05_dispatch: a block owns columns in all of few long rows, and sums them in one
// launch; rows of dout, x and dx may start differently within 16 bytes.
//
// Change:   where rows are long, and few beside v04's partial sums, a block owns columns in all rows, and
//           writes their dbias itself; how many columns, follows from the waves of blocks (owned_columns). A
//           group of its threads takes rows of one skew, so packs are aligned in
//           dx as in v04; the sums of all groups meet in shared memory.
//           Where dout or x is skewed unlike dx, its packs are shifted together from two aligned words,
//           whatever the number of rows. Without dbias packs are counted through the matrix, and one in
//           which a row ends is put together from two rows (function_dx.cu).
// Why:      of rows of a million elements, v04 has a chunk of rows for every skew, so that it writes up to
//           eight partial sums of every column, more than there are rows. And its second launch has a block
//           of 1024 threads for 32 columns, of which few warps have a chunk to add. Where skews differ, v04
//           has accesses of one element: instructions, not memory, limit it.
// Counter:  at rows of 4096 nothing changes; the time falls at few rows of millions of elements.
// Requires: rows that are contiguous, at any distance; any length.
// Routes:   dbias, and long rows, few or very long (launch_owned_columns): blocks that own columns
//           dbias, and skews that differ, but in fp32: v04's rows, shifted together
//           other rows with dbias, or dx that starts within 16 bytes: v04's kernels
//           dx alone: function_dx.cu's kernels
// Twin:     triton-kernels/dropout/dropout_add_backward/v05_dispatch.py
#include "args.h"
#include "columns.cuh"
#include "dx.h"
#include "owned_columns.cuh"
#include "shifted_rows.cuh"

void dropout_add_backward_v04_rows_abreast(const DropoutAddBackwardArgs& args);

namespace {

constexpr int THREADS = 256;  // of a block, at most
constexpr int BLOCKS_PER_SM = 3;
constexpr int MANY_WAVES = 4;           // of blocks: the last one, not full, is then little beside the others
constexpr int LEAST_BLOCKS_PER_SM = 2;  // keep memory busy
// Partial sums of an eighth of the matrices' bytes take longer than a last wave of blocks that is not full.
constexpr int64_t FEW_ROWS_SHARE = 8;
template <Activation ACTIVATION>
constexpr int ROWS = ACTIVATION == Activation::none ? 2 : 1;  // under way, of one matrix or two

template <typename T, Activation ACTIVATION, Skews SKEWS>
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    dropout_add_backward_v05_dispatch_kernel(const DropoutAddBackwardArgs args, const OwnedColumns layout) {
  take_owned_columns<T, ACTIVATION, SKEWS, ROWS<ACTIVATION>, THREADS>(args, layout);
}

// Whether rows are few beside the partial sums that v04 would write and read.
template <typename T>
bool are_few(const DropoutAddBackwardArgs& args) {
  const int64_t chunks = row_layout<T, THREADS, BLOCKS_PER_SM>(args.M, args.N, true).chunks;
  const int64_t matrices = args.x ? 3 : 2, size = sizeof(T);
  return FEW_ROWS_SHARE * 2 * chunks * int64_t{sizeof(float)} >= matrices * args.M * size;
}

// False where v04's chunks of rows are better, or dx starts within 16 bytes.
template <typename T, Activation ACTIVATION>
bool launch_owned_columns(const DropoutAddBackwardArgs& args) {
  if (!aligned_to_16_bytes(args.dx)) return false;
  const int64_t sms = multiprocessor_count(), many = MANY_WAVES * BLOCKS_PER_SM * sms;
  const int64_t most = most_owning_blocks<T>(args);
  if (most < many && (most < LEAST_BLOCKS_PER_SM * sms || !are_few<T>(args))) return false;
  const OwnedColumns layout = owned_columns<T, THREADS, BLOCKS_PER_SM>(args);
  const auto kernel = are_skewed_alike<T>(args)
                          ? dropout_add_backward_v05_dispatch_kernel<T, ACTIVATION, Skews::ALIKE>
                          : dropout_add_backward_v05_dispatch_kernel<T, ACTIVATION, Skews::DIFFER>;
  const auto blocks = static_cast<unsigned>(layout.blocks(args.N));
  kernel<<<blocks, layout.threads(), 0, args.stream>>>(args, layout);
  return true;
}

template <typename T, Activation ACTIVATION, int UNDER_WAY>
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    dropout_add_backward_v05_dispatch_rows_kernel(const DropoutAddBackwardArgs args, const RowLayout layout,
                                                  int64_t edge, float* partials) {
  take_shifted_rows<T, ACTIVATION, UNDER_WAY, THREADS>(args, layout, edge, partials);
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
  const RowLayout layout = row_layout<T, THREADS, BLOCKS_PER_SM>(args.M, args.N, true);
  auto* partials = static_cast<float*>(args.memory->workspace(layout.chunks * args.N * sizeof(float)));
  dropout_add_backward_v05_dispatch_rows_kernel<T, ACTIVATION, ROWS<ACTIVATION>>
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
    if (launch_owned_columns<T, ACTIVATION>(args)) return;
    if (args.M == 0 || !launch_shifted_rows<T, ACTIVATION>(args)) dropout_add_backward_v04_rows_abreast(args);
  });
  CUDA_CHECK(cudaGetLastError());
}
