// softmax_backward v07_dispatch: a table sends rows of every length and alignment to the kernel for them.
//
// Change:   one table (routes.cuh) chooses the kernel from a row's length and from where rows start. The
//           kernels of register-resident rows and of rows in shared memory are v03's and v04's, whose packs
//           are counted from a line of 128 bytes if a row has several warps or blocks. Short rows that are no
//           whole packs lie in shared memory, a tile of them a block, as in softmax's v13. Rows that no
//           cluster holds are split over many blocks by two launches: the first sums the terms of each part,
//           the second adds these sums and writes the gradient. Rows of more than a block's registers go
//           there, too, if dout or y has another skew within 16 bytes than out: their packs are shifted
//           together from two aligned loads. Where L2 does not keep dout and y in between, rows are held by
//           blocks of the whole GPU, in shared memory, which exchange their parts' sums through L2.
// Why:      counted from a line, a warp's 32 packs are four lines of L2 instead of parts of five, and a bulk
//           copy is faster if source and destination have the same offset in their lines. With a block a row,
//           few long rows leave most of the GPU idle. A dout of another skew was loaded element by element.
// Counter:  at a row of 4096 nothing changes; the time falls at rows of 262144, and most at few rows of
//           millions of elements.
// Requires: compute capability 9.0; contiguous rows.
// Source:   see softmax's v13
// Twin:     triton-kernels/softmax/softmax_backward/v07_dispatch.py
#include "routes.cuh"

namespace {

using namespace softmax_backward_routes;

template <typename T, typename Gradient, int LANES>
__global__ void __launch_bounds__(TILE_THREADS)
    softmax_backward_v07_dispatch_tile_kernel(const SoftmaxBackwardArgs args, int rows) {
  gradient_of_row_tile<T, Gradient, LANES>(args, rows);
}

template <typename T, int LANES, int PACKS>
__global__ void __launch_bounds__(GRADIENT_LANES_THREADS)
    softmax_backward_v07_dispatch_lanes_kernel(const T* __restrict__ dout, const T* __restrict__ y,
                                               T* __restrict__ out, int64_t M, int N, int64_t stride_dm,
                                               int64_t stride_ym, bool log) {
  gradient_of_lanes_row<T, LANES, PACKS>(dout, y, out, M, N, stride_dm, stride_ym, log);
}

template <typename T>
__global__ void __launch_bounds__(GRADIENT_BLOCK_THREADS)
    softmax_backward_v07_dispatch_block_kernel(const T* __restrict__ dout, const T* __restrict__ y,
                                               T* __restrict__ out, int N, int64_t stride_dm,
                                               int64_t stride_ym, bool log) {
  gradient_of_block_row<T>(dout, y, out, N, stride_dm, stride_ym, log);
}

template <typename T>
__global__ void __launch_bounds__(GRADIENT_SHARED_THREADS)
    softmax_backward_v07_dispatch_shared_kernel(const T* __restrict__ dout, const T* __restrict__ y,
                                                T* __restrict__ out, int N, int64_t stride_dm,
                                                int64_t stride_ym, int blocks, int part_packs, bool log) {
  gradient_of_shared_row<T>(dout, y, out, N, stride_dm, stride_ym, blocks, part_packs, log);
}

template <typename T, typename Gradient>
__global__ void __launch_bounds__(GRID_THREADS, 1)
    softmax_backward_v07_dispatch_grid_kernel(GridShape shape, GridInputs<T, 2> inputs, T* out,
                                              GroupCounts* counts, TermSum* numbers) {
  GridSoftmaxGradient<T, Gradient> work{out, shape.N};
  go_through_grid_rows<T, 2>(shape, inputs, counts, numbers, work);
}

template <typename T, Skews SKEWS>
__global__ void __launch_bounds__(SPLIT_THREADS, SPLIT_BLOCKS)
    softmax_backward_v07_dispatch_parts_kernel(const SoftmaxBackwardArgs args, float* sums, int parts) {
  sums_of_parts<T, SKEWS>(args, sums, parts);
}

template <typename T, typename Gradient, Skews SKEWS>
__global__ void __launch_bounds__(SPLIT_THREADS, SPLIT_BLOCKS)
    softmax_backward_v07_dispatch_rows_kernel(const SoftmaxBackwardArgs args, const float* sums, int parts) {
  gradient_of_split_rows<T, Gradient, SKEWS>(args, sums, parts);
}

template <typename T, typename Gradient>
void launch_tiles(const SoftmaxBackwardArgs& args) {
  const TileShape<T> shape(args.M, static_cast<int>(args.N), {args.stride_dm, args.stride_ym});
  choose_tile_lanes(shape.lanes, [&](auto lanes) {
    softmax_backward_v07_dispatch_tile_kernel<T, Gradient, lanes>
        <<<static_cast<unsigned>(shape.blocks), TILE_THREADS, shape.shared_bytes, args.stream>>>(args,
                                                                                                 shape.rows);
  });
  CUDA_CHECK(cudaGetLastError());
}

template <typename T>
bool launch_lanes(const SoftmaxBackwardArgs& args) {
  const bool launched = launch_lanes_rows<T>(args, [&](auto lanes, auto packs, int64_t blocks) {
    softmax_backward_v07_dispatch_lanes_kernel<T, lanes, packs>
        <<<static_cast<unsigned>(blocks), GRADIENT_LANES_THREADS, 0, args.stream>>>(
            static_cast<const T*>(args.dout), static_cast<const T*>(args.y), static_cast<T*>(args.out),
            args.M, static_cast<int>(args.N), args.stride_dm, args.stride_ym, args.log);
  });
  CUDA_CHECK(cudaGetLastError());
  return launched;
}

template <typename T>
void launch_block(const SoftmaxBackwardArgs& args) {
  const int64_t packs = most_packs<T, LINE_BYTES>(args.y, args.N, args.stride_ym);
  const int64_t threads = cdiv(cdiv(packs, GRADIENT_BLOCK_PACKS), 32) * 32;
  softmax_backward_v07_dispatch_block_kernel<T>
      <<<static_cast<unsigned>(args.M), static_cast<unsigned>(threads), 0, args.stream>>>(
          static_cast<const T*>(args.dout), static_cast<const T*>(args.y), static_cast<T*>(args.out),
          static_cast<int>(args.N), args.stride_dm, args.stride_ym, args.log);
  CUDA_CHECK(cudaGetLastError());
}

template <typename T>
bool launch_grid_rows(const SoftmaxBackwardArgs& args) {
  const GridShape shape = grid_shape<T, 2>(args.M, args.N);
  if (shape.blocks == 0) return false;
  const auto numbers = static_cast<TermSum*>(args.memory->workspace(args.M * shape.blocks * sizeof(TermSum)));
  const GridInputs<T, 2> inputs{{static_cast<const T*>(args.dout), static_cast<const T*>(args.y)},
                                {args.stride_dm, args.stride_ym}};
  launch_grid<2>(shape, args.stream,
                 args.log ? softmax_backward_v07_dispatch_grid_kernel<T, PreciseLogGradient<T>>
                          : softmax_backward_v07_dispatch_grid_kernel<T, SoftmaxGradient>,
                 shape, inputs, static_cast<T*>(args.out), static_cast<GroupCounts*>(args.memory->zeroed()),
                 numbers);
  return true;
}

template <typename T, Skews SKEWS>
void launch_split(const SoftmaxBackwardArgs& args) {
  const int parts = split_parts(args.M, args.N * static_cast<int64_t>(sizeof(T)));
  const int64_t blocks = args.M * parts;  // never too many for a grid: such rows would take TiB
  auto* const sums = static_cast<float*>(args.memory->workspace(blocks * sizeof(float)));
  softmax_backward_v07_dispatch_parts_kernel<T, SKEWS>
      <<<static_cast<unsigned>(blocks), SPLIT_THREADS, 0, args.stream>>>(args, sums, parts);
  launch_early(static_cast<unsigned>(blocks), SPLIT_THREADS, args.stream,
               args.log ? softmax_backward_v07_dispatch_rows_kernel<T, PreciseLogGradient<T>, SKEWS>
                        : softmax_backward_v07_dispatch_rows_kernel<T, SoftmaxGradient, SKEWS>,
               args, static_cast<const float*>(sums), parts);
}

// Returns false, without a launch, if the kernel refuses the rows.
template <typename T>
bool launch(const SoftmaxBackwardArgs& args, const Route& route, Start start) {
  switch (route.by) {
    case By::TILE:
      args.log ? launch_tiles<T, PreciseLogGradient<T>>(args) : launch_tiles<T, SoftmaxGradient>(args);
      return true;
    case By::LANES:
      return launch_lanes<T>(args);
    case By::BLOCK:
      launch_block<T>(args);
      return true;
    case By::SHARED:
      return launch_shared_rows<T>(args, softmax_backward_v07_dispatch_shared_kernel<T>);
    case By::GRID:
      return launch_grid_rows<T>(args);
    case By::SPLIT:
      start == Start::DIFFER ? launch_split<T, Skews::DIFFER>(args) : launch_split<T, Skews::ALIKE>(args);
      return true;
  }
  return false;
}

}  // namespace

void softmax_backward_v07_dispatch(const SoftmaxBackwardArgs& args) {
  if (args.M == 0 || args.N == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    launch_by_routes<T>(args, [&](const Route& route, Start start) { return launch<T>(args, route, start); });
  });
}
