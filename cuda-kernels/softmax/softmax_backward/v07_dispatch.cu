// softmax_backward v07_dispatch: rows of every length, each by the kernel that suits it.
//
// Change:   short rows that are no whole packs lie in shared memory, a tile of them a block, as in softmax's
//           v13. Rows that no cluster holds are held by blocks of the whole GPU, in shared memory, which
//           exchange their parts' sums through L2. Rows that are longer still, and shorter ones of another
//           skew, are split over many blocks by two launches: the first sums the terms of each part, the
//           second adds these sums and writes the gradient. Rows of more than a block's registers go there,
//           too, if dout or y has another skew within 16 bytes than out: their packs are shifted together
//           from two aligned loads.
// Why:      v06 left the longest rows to v01's kernel, which gives a row one block: with few rows most of the
//           GPU idles. It loads a dout of another skew element by element.
// Counter:  at a row of 4096, which goes to v06's kernel, nothing changes; the time falls most at few rows of
//           millions of elements.
// Requires: compute capability 9.0; contiguous rows.
// Routes:   see route()
// Source:   see softmax's v13
// Twin:     triton-kernels/softmax/softmax_backward/v07_dispatch.py
#include "grid_row.cuh"
#include "row_tile.cuh"
#include "split_row.cuh"

void softmax_backward_v06_lines(const SoftmaxBackwardArgs& args);

namespace {

enum class Kernel {
  V06,    // held by lanes, a warp, a block or a cluster
  TILE,   // short rows in shared memory, which are no whole packs
  SPLIT,  // held by the whole GPU, or over blocks of two launches, which hold nothing
};

constexpr int64_t SHIFTED_ROW = 32 * 1024;  // bytes from which rows of another skew are split
// Up to which a cluster holds a row of dout and one of y in shared memory.
constexpr int64_t LONGEST_ROW = int64_t{MOST_CLUSTER_BLOCKS} * (104 * 1024 - LINE_BYTES);

template <typename T>
Kernel route(int64_t N, Skews skews) {
  const bool alike = skews == Skews::ALIKE;
  if (suits_tiles<T>(N, alike)) return Kernel::TILE;
  const int64_t bytes = N * static_cast<int64_t>(sizeof(T));
  return bytes <= (alike ? LONGEST_ROW : SHIFTED_ROW) ? Kernel::V06 : Kernel::SPLIT;
}

template <typename T, typename Gradient, int LANES>
__global__ void __launch_bounds__(TILE_THREADS)
    softmax_backward_v07_dispatch_tile_kernel(const SoftmaxBackwardArgs args, int rows) {
  gradient_of_row_tile<T, Gradient, LANES>(args, rows);
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
__global__ void __launch_bounds__(GRID_THREADS, 1)
    softmax_backward_v07_dispatch_grid_kernel(GridShape shape, GridInputs<T, 2> inputs, T* out,
                                              GroupCounts* counts, TermSum* numbers) {
  GridSoftmaxGradient<T, Gradient> work{out, shape.N};
  go_through_grid_rows<T, 2>(shape, inputs, counts, numbers, work);
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

// False if the GPU does not hold a row, and for rows too short for a barrier.
template <typename T>
bool launch_grid_rows(const SoftmaxBackwardArgs& args) {
  if (args.N * static_cast<int64_t>(sizeof(T)) <= GRID_ROW) return false;
  const GridShape shape = grid_shape<T, 2>(args.M, args.N);
  if (shape.blocks == 0) return false;
  const auto numbers = static_cast<TermSum*>(args.memory->workspace(args.M * shape.blocks * sizeof(TermSum)));
  const GridInputs<T, 2> inputs{{static_cast<const T*>(args.dout), static_cast<const T*>(args.y)},
                                {args.stride_dm, args.stride_ym}};
  launch_grid<2>(shape, args.stream,
                 args.log ? softmax_backward_v07_dispatch_grid_kernel<T, LogSoftmaxGradient>
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
               args.log ? softmax_backward_v07_dispatch_rows_kernel<T, LogSoftmaxGradient, SKEWS>
                        : softmax_backward_v07_dispatch_rows_kernel<T, SoftmaxGradient, SKEWS>,
               args, static_cast<const float*>(sums), parts);
}

}  // namespace

void softmax_backward_v07_dispatch(const SoftmaxBackwardArgs& args) {
  if (args.M == 0 || args.N == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    const bool alike = skewed_alike<T>(args.y, args.stride_ym, args.out, args.N) &&
                       skewed_alike<T>(args.dout, args.stride_dm, args.out, args.N);
    switch (route<T>(args.N, alike ? Skews::ALIKE : Skews::DIFFER)) {
      case Kernel::V06:
        return softmax_backward_v06_lines(args);
      case Kernel::TILE:
        return args.log ? launch_tiles<T, LogSoftmaxGradient>(args) : launch_tiles<T, SoftmaxGradient>(args);
      case Kernel::SPLIT:
        if (launch_grid_rows<T>(args)) return;
        return alike ? launch_split<T, Skews::ALIKE>(args) : launch_split<T, Skews::DIFFER>(args);
    }
  });
}
