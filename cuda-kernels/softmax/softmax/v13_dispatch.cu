// softmax v13_dispatch: rows of every length and alignment, each by the kernel that suits it.
//
// Change:   four kernels are new. Short rows that are no whole packs lie in shared memory, a tile of them a
//           block, where lanes take single elements; global memory is read and written by 16 bytes. Rows
//           whose skew within 16 bytes differs from that of out's rows are laid out on out's lines, and each
//           pack of x is shifted together from two aligned loads. Rows that no cluster holds are held by
//           blocks of the whole GPU, in shared memory, which exchange their parts' maxima and sums through
//           L2. Rows that are longer still are split by two launches: the first finds each part's maximum
//           and sum, the second merges them and writes the result.
// Why:      in short rows of v05 a lane loads and stores the elements of ragged packs one by one, and most of
//           a warp waits. v12 left rows of another skew to kernels that store element by element, eight
//           stores to 16 bytes of which each touches all of a warp's lines. It left the longest rows to v02's
//           kernel, which gives a row one block: with few rows most of the GPU idles.
// Counter:  at a row of 4096, which goes to v12's kernel, nothing changes; the time falls at rows of x that
//           lie an odd number of elements apart, and most at few rows of millions of elements, of which
//           device memory sees each once.
// Requires: compute capability 9.0; contiguous rows.
// Routes:   see route()
// Source:   see v10; CUDA C++ Programming Guide, "Cooperative Groups", for blocks that wait for each other;
//           the split row is PyTorch Inductor's split reduction
// Twin:     triton-kernels/softmax/softmax/v13_dispatch.py
#include "cluster_row.cuh"
#include "grid_row.cuh"
#include "held_row.cuh"
#include "row_tile.cuh"
#include "split_row.cuh"

void softmax_v12_small_l1(const SoftmaxArgs& args);

namespace {

enum class Kernel {
  V12,              // short rows of whole packs, and longer rows of x that have the skew of out's
  TILE,             // short rows in shared memory, which are no whole packs
  SHIFTED,          // held by a warp or a block, and shifted together
  SHIFTED_CLUSTER,  // held by a cluster, and shifted together
  SPLIT,            // held by the whole GPU, or over blocks of two launches, which hold nothing
};

constexpr int64_t SHORT_ROW = LEAST_WARP_PACKS * 16;  // bytes from which a row gets a warp
constexpr int64_t HELD_ROW = 16 * 1024;               // up to which a block holds a row
// Up to which a cluster holds a row: in registers alone if it is shifted, else in shared memory, too.
constexpr int64_t SHIFTED_ROW = int64_t{MOST_PARTS} * 32 * HELD_PACKS * 16;
constexpr int64_t LONGEST_ROW = int64_t{MOST_CLUSTER_BLOCKS} * (208 * 1024 - LINE_BYTES);

// The kernel for rows of `bytes` bytes, with what lies before them in their first line.
template <typename T>
Kernel route(int64_t N, int64_t bytes, Skews skews) {
  const bool alike = skews == Skews::ALIKE;
  if (suits_tiles<T>(N, alike)) return Kernel::TILE;
  if (alike || bytes < SHORT_ROW) return bytes <= LONGEST_ROW ? Kernel::V12 : Kernel::SPLIT;
  if (bytes <= HELD_ROW) return Kernel::SHIFTED;
  return bytes <= SHIFTED_ROW ? Kernel::SHIFTED_CLUSTER : Kernel::SPLIT;
}

template <typename T, bool LOG, int LANES>
__global__ void __launch_bounds__(TILE_THREADS)
    softmax_v13_dispatch_tile_kernel(const T* __restrict__ x, T* __restrict__ out, int64_t M, int N,
                                     int64_t stride_xm, int rows) {
  softmax_of_row_tile<T, LOG, LANES>(x, out, M, N, stride_xm, rows);
}

template <typename T, bool LOG, typename As>
__global__ void __launch_bounds__(As::THREADS, As::BLOCKS)
    softmax_v13_dispatch_held_kernel(const T* __restrict__ x, T* __restrict__ out, int64_t M, int N,
                                     int64_t stride_xm) {
  softmax_of_held_row<T, LOG, As, false, Skews::DIFFER>(x, out, M, N, stride_xm);
}

template <typename T, bool LOG>
__global__ void __launch_bounds__(HELD_THREADS, SPLIT_BLOCKS)
    softmax_v13_dispatch_cluster_kernel(const T* __restrict__ x, T* __restrict__ out, int N,
                                        int64_t stride_xm, int blocks) {
  softmax_of_cluster_row<T, LOG, HELD_PACKS, Skews::DIFFER>(x, out, N, stride_xm, blocks);
}

template <typename T, Skews SKEWS>
__global__ void __launch_bounds__(SPLIT_THREADS, SPLIT_BLOCKS)
    softmax_v13_dispatch_parts_kernel(const T* __restrict__ x, const T* out, MaxSum* numbers, int64_t N,
                                      int64_t stride_xm, int parts) {
  softmax_of_parts<T, SKEWS>(x, out, numbers, N, stride_xm, parts);
}

template <typename T, bool LOG, Skews SKEWS>
__global__ void __launch_bounds__(SPLIT_THREADS, SPLIT_BLOCKS)
    softmax_v13_dispatch_rows_kernel(const T* __restrict__ x, T* __restrict__ out, const MaxSum* numbers,
                                     int64_t N, int64_t stride_xm, int parts) {
  softmax_of_split_rows<T, LOG, SKEWS>(x, out, numbers, N, stride_xm, parts);
}

template <typename T, bool LOG>
__global__ void __launch_bounds__(GRID_THREADS, 1)
    softmax_v13_dispatch_grid_kernel(GridShape shape, GridInputs<T, 1> x, T* out, GroupCounts* counts,
                                     MaxSum* numbers) {
  GridSoftmax<T, LOG> work{out, shape.N};
  go_through_grid_rows<T, 1>(shape, x, counts, numbers, work);
}

template <typename T, bool LOG>
void launch_tiles(const SoftmaxArgs& args) {
  const int N = static_cast<int>(args.N);
  const TileShape<T> shape(args.M, N, {args.stride_xm});
  choose_tile_lanes(shape.lanes, [&](auto lanes) {
    softmax_v13_dispatch_tile_kernel<T, LOG, lanes>
        <<<static_cast<unsigned>(shape.blocks), TILE_THREADS, shape.shared_bytes, args.stream>>>(
            static_cast<const T*>(args.x), static_cast<T*>(args.out), args.M, N, args.stride_xm, shape.rows);
  });
  CUDA_CHECK(cudaGetLastError());
}

template <typename T, bool LOG>
bool launch_shifted(const SoftmaxArgs& args) {
  return launch_held_rows<T, Skews::DIFFER>(args, [&]<typename As>(As, int64_t blocks, int64_t threads) {
    softmax_v13_dispatch_held_kernel<T, LOG, As>
        <<<static_cast<unsigned>(blocks), static_cast<unsigned>(threads), 0, args.stream>>>(
            static_cast<const T*>(args.x), static_cast<T*>(args.out), args.M, static_cast<int>(args.N),
            args.stride_xm);
    CUDA_CHECK(cudaGetLastError());
  });
}

template <typename T, bool LOG>
bool launch_shifted_cluster(const SoftmaxArgs& args) {
  const HeldShape shape(most_packs<T, LINE_BYTES>(args.out, args.N, args.N), HELD_PACKS);
  return launch_by_rows(args.M, shape, 0, args.stream, softmax_v13_dispatch_cluster_kernel<T, LOG>,
                        static_cast<const T*>(args.x), static_cast<T*>(args.out), static_cast<int>(args.N),
                        args.stride_xm, shape.blocks);
}

// False if the GPU does not hold a row.
template <typename T, bool LOG>
bool launch_grid_rows(const SoftmaxArgs& args) {
  const GridShape shape = grid_shape<T, 1>(args.M, args.N);
  if (shape.blocks == 0) return false;
  auto* const numbers = static_cast<MaxSum*>(args.memory->workspace(args.M * shape.blocks * sizeof(MaxSum)));
  launch_grid<1>(shape, args.stream, softmax_v13_dispatch_grid_kernel<T, LOG>, shape,
                 GridInputs<T, 1>{{static_cast<const T*>(args.x)}, {args.stride_xm}},
                 static_cast<T*>(args.out), static_cast<GroupCounts*>(args.memory->zeroed()), numbers);
  return true;
}

template <typename T, bool LOG, Skews SKEWS>
void launch_split(const SoftmaxArgs& args) {
  const int parts = split_parts(args.M, args.N * static_cast<int64_t>(sizeof(T)));
  const int64_t blocks = args.M * parts;  // never too many for a grid: such rows would take TiB
  const auto x = static_cast<const T*>(args.x);
  const auto out = static_cast<T*>(args.out);
  auto* const numbers = static_cast<MaxSum*>(args.memory->workspace(blocks * sizeof(MaxSum)));
  softmax_v13_dispatch_parts_kernel<T, SKEWS>
      <<<static_cast<unsigned>(blocks), SPLIT_THREADS, 0, args.stream>>>(x, out, numbers, args.N,
                                                                         args.stride_xm, parts);
  launch_early(static_cast<unsigned>(blocks), SPLIT_THREADS, args.stream,
               softmax_v13_dispatch_rows_kernel<T, LOG, SKEWS>, x, out, static_cast<const MaxSum*>(numbers),
               args.N, args.stride_xm, parts);
}

template <typename T, bool LOG>
void launch(const SoftmaxArgs& args) {
  const Skews skews =
      skewed_alike<T>(args.x, args.stride_xm, args.out, args.N) ? Skews::ALIKE : Skews::DIFFER;
  const int64_t packs = skews == Skews::ALIKE ? most_packs<T, LINE_BYTES>(args.x, args.N, args.stride_xm)
                                              : most_packs<T, LINE_BYTES>(args.out, args.N, args.N);
  switch (route<T>(args.N, packs * 16, skews)) {
    case Kernel::V12:
      return softmax_v12_small_l1(args);
    case Kernel::TILE:
      return launch_tiles<T, LOG>(args);
    case Kernel::SHIFTED:
      if (!launch_shifted<T, LOG>(args)) softmax_v12_small_l1(args);  // the grid would be too large
      return;
    case Kernel::SHIFTED_CLUSTER:
      if (launch_shifted_cluster<T, LOG>(args)) return;
      [[fallthrough]];  // the GPU has no room for the cluster
    case Kernel::SPLIT:
      if (launch_grid_rows<T, LOG>(args)) return;
      return skews == Skews::ALIKE ? launch_split<T, LOG, Skews::ALIKE>(args)
                                   : launch_split<T, LOG, Skews::DIFFER>(args);
  }
}

}  // namespace

void softmax_v13_dispatch(const SoftmaxArgs& args) {
  if (args.M == 0 || args.N == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    args.log ? launch<T, true>(args) : launch<T, false>(args);
  });
}
