// softmax v13_dispatch: a table sends rows of every length and alignment to the kernel that suits them.
//
// Change:   one table (routes.cuh) chooses the kernel from a row's length and from where rows start. A warp
//           holds a row of up to 3.5 KiB, or several short ones, a block of one to eight warps a row of up to
//           16 KiB, a cluster a longer one; packs are always whole, and elements beside them go to single
//           lanes. Rows that start at a line run with the smallest L1. Short rows that are no whole packs lie
//           in shared memory, a tile of them a block, where lanes take single elements. Rows whose skew
//           differs from that of out's rows are laid out on out's lines, and each pack of x is shifted
//           together from two aligned loads. Rows that no cluster holds are split over many blocks by two
//           launches: the first finds each part's maximum and sum, the second merges them and writes. Where
//           L2 does not keep them in between, they are held by blocks of the whole GPU, in shared memory,
//           which exchange their parts' maxima and sums through L2.
// Why:      which kernel is fastest depends on the rows. In v05 a lane loads and stores the elements of
//           ragged packs one by one, and most of a warp waits. A smaller L1 bounds the bytes that loads have
//           in flight; more requests at once probably make device memory open and close its pages, and turn
//           from reads to writes, more often. Rows of several skews were stored element by element. With a
//           block a row, few long rows leave most of the GPU idle.
// Counter:  the time falls at rows of 1024, at misaligned rows of 515, at rows of x that lie an odd number of
//           elements apart, and most at few rows of millions of elements.
// Requires: compute capability 9.0; contiguous rows.
// Source:   see v10; CUDA C++ Programming Guide, "Unified Data/L1/Texture Cache"; CUDA Runtime API,
//           cudaLaunchAttributePreferredSharedMemoryCarveout; CUDA C++ Programming Guide, "Cooperative
//           Groups", for blocks that wait for each other; the split row is PyTorch Inductor's split reduction
// Twin:     triton-kernels/softmax/softmax/v13_dispatch.py
#include "routes.cuh"

namespace {

using namespace softmax_routes;

template <typename T, Form FORM, int LANES, int PACKS, Skews SKEWS>
__global__ void __launch_bounds__(LANES_THREADS)
    softmax_v13_dispatch_lanes_kernel(const T* __restrict__ x, T* __restrict__ out, int64_t M, int N,
                                      int64_t stride_xm) {
  softmax_of_lanes_row<T, FORM, LANES, PACKS, SKEWS>(x, out, M, N, stride_xm);
}

template <typename T, Form FORM, int LANES>
__global__ void __launch_bounds__(TILE_THREADS)
    softmax_v13_dispatch_tile_kernel(const T* __restrict__ x, T* __restrict__ out, int64_t M, int N,
                                     int64_t stride_xm, int rows) {
  softmax_of_row_tile<T, FORM, LANES>(x, out, M, N, stride_xm, rows);
}

template <typename T, Form FORM, typename As, Ends ENDS, Skews SKEWS>
__global__ void __launch_bounds__(As::THREADS, As::BLOCKS)
    softmax_v13_dispatch_held_kernel(const T* __restrict__ x, T* __restrict__ out, int64_t M, int N,
                                     int64_t stride_xm) {
  softmax_of_held_row<T, FORM, As, ENDS, SKEWS>(x, out, M, N, stride_xm);
}

template <typename T, Form FORM, int PACKS, Skews SKEWS>
__global__ void __launch_bounds__(HELD_THREADS, CLUSTER_BLOCKS)
    softmax_v13_dispatch_cluster_kernel(const T* __restrict__ x, T* __restrict__ out, int N,
                                        int64_t stride_xm, int blocks) {
  softmax_of_cluster_row<T, FORM, PACKS, SKEWS>(x, out, N, stride_xm, blocks);
}

template <typename T, Form FORM>
__global__ void __launch_bounds__(SHARED_THREADS, 1536 / SHARED_THREADS)
    softmax_v13_dispatch_shared_kernel(const T* __restrict__ x, T* __restrict__ out, int N,
                                       int64_t stride_xm) {
  softmax_of_shared_row<T, FORM>(x, out, N, stride_xm);
}

template <typename T, Form FORM>
__global__ void __launch_bounds__(GRID_THREADS, 1)
    softmax_v13_dispatch_grid_kernel(GridShape shape, GridInputs<T, 1> x, T* out, GroupCounts* counts,
                                     MaxSum* numbers) {
  GridSoftmax<T, FORM> work{out, shape.N};
  go_through_grid_rows<T, 1>(shape, x, counts, numbers, work);
}

template <typename T, Skews SKEWS>
__global__ void __launch_bounds__(SPLIT_THREADS, SPLIT_BLOCKS)
    softmax_v13_dispatch_parts_kernel(const T* __restrict__ x, const T* out, MaxSum* numbers, int64_t N,
                                      int64_t stride_xm, int parts) {
  softmax_of_parts<T, SKEWS>(x, out, numbers, N, stride_xm, parts);
}

template <typename T, Form FORM, Skews SKEWS>
__global__ void __launch_bounds__(SPLIT_THREADS, SPLIT_BLOCKS)
    softmax_v13_dispatch_rows_kernel(const T* __restrict__ x, T* __restrict__ out, const MaxSum* numbers,
                                     int64_t N, int64_t stride_xm, int parts) {
  softmax_of_split_rows<T, FORM, SKEWS>(x, out, numbers, N, stride_xm, parts);
}

template <typename T, Form FORM, Skews SKEWS>
void launch_lanes(const SoftmaxArgs& args) {
  launch_lanes_rows<T>(args, [&](auto lanes, auto packs, int64_t blocks) {
    softmax_v13_dispatch_lanes_kernel<T, FORM, lanes, packs, SKEWS>
        <<<static_cast<unsigned>(blocks), LANES_THREADS, 0, args.stream>>>(
            static_cast<const T*>(args.x), static_cast<T*>(args.out), args.M, static_cast<int>(args.N),
            args.stride_xm);
  });
  CUDA_CHECK(cudaGetLastError());
}

template <typename T, Form FORM>
void launch_tiles(const SoftmaxArgs& args) {
  const int N = static_cast<int>(args.N);
  const TileShape<T> shape(args.M, N, {args.stride_xm});
  choose_tile_lanes(shape.lanes, [&](auto lanes) {
    softmax_v13_dispatch_tile_kernel<T, FORM, lanes>
        <<<static_cast<unsigned>(shape.blocks), TILE_THREADS, shape.shared_bytes, args.stream>>>(
            static_cast<const T*>(args.x), static_cast<T*>(args.out), args.M, N, args.stride_xm, shape.rows);
  });
  CUDA_CHECK(cudaGetLastError());
}

// With the smallest L1 if rows start at lines: misaligned neighbours share a line, which L1 keeps for the
// second row.
template <typename T, Form FORM, Ends ENDS, Skews SKEWS>
bool launch_held(const SoftmaxArgs& args) {
  return launch_held_rows<T, SKEWS>(args, [&]<typename As>(As, int64_t blocks, int64_t threads) {
    const auto kernel = softmax_v13_dispatch_held_kernel<T, FORM, As, ENDS, SKEWS>;
    const auto x = static_cast<const T*>(args.x);
    const auto out = static_cast<T*>(args.out);
    const int N = static_cast<int>(args.N);
    if constexpr (ENDS == Ends::WHOLE) {
      launch_with_small_l1(blocks, threads, args.stream, kernel, x, out, args.M, N, args.stride_xm);
    } else {
      kernel<<<static_cast<unsigned>(blocks), static_cast<unsigned>(threads), 0, args.stream>>>(
          x, out, args.M, N, args.stride_xm);
      CUDA_CHECK(cudaGetLastError());
    }
  });
}

template <typename T, Form FORM, int PACKS, Skews SKEWS>
bool launch_cluster(const SoftmaxArgs& args) {
  return launch_cluster_rows<T, SKEWS>(args, PACKS,
                                       softmax_v13_dispatch_cluster_kernel<T, FORM, PACKS, SKEWS>);
}

template <typename T, Form FORM>
bool launch_grid_rows(const SoftmaxArgs& args) {
  const GridShape shape = grid_shape<T, 1>(args.M, args.N);
  if (shape.blocks == 0) return false;
  auto* const numbers = static_cast<MaxSum*>(args.memory->workspace(args.M * shape.blocks * sizeof(MaxSum)));
  launch_grid<1>(shape, args.stream, softmax_v13_dispatch_grid_kernel<T, FORM>, shape,
                 GridInputs<T, 1>{{static_cast<const T*>(args.x)}, {args.stride_xm}},
                 static_cast<T*>(args.out), static_cast<GroupCounts*>(args.memory->zeroed()), numbers);
  return true;
}

template <typename T, Form FORM, Skews SKEWS>
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
               softmax_v13_dispatch_rows_kernel<T, FORM, SKEWS>, x, out, static_cast<const MaxSum*>(numbers),
               args.N, args.stride_xm, parts);
}

// Returns false, without a launch, if the kernel refuses the rows.
template <typename T, Form FORM>
bool launch(const SoftmaxArgs& args, const Route& route, Start start) {
  const bool differ = start <= Start::SHIFTED;
  switch (route.by) {
    case By::LANES:
      differ ? launch_lanes<T, FORM, Skews::DIFFER>(args) : launch_lanes<T, FORM, Skews::ALIKE>(args);
      return true;
    case By::TILE:
      launch_tiles<T, FORM>(args);
      return true;
    case By::HELD:
      if (start == Start::LINES) return launch_held<T, FORM, Ends::WHOLE, Skews::ALIKE>(args);
      return differ ? launch_held<T, FORM, Ends::RAGGED, Skews::DIFFER>(args)
                    : launch_held<T, FORM, Ends::RAGGED, Skews::ALIKE>(args);
    case By::CLUSTER:
      if (differ) return launch_cluster<T, FORM, HELD_PACKS, Skews::DIFFER>(args);
      return route.packs == HELD_PACKS ? launch_cluster<T, FORM, HELD_PACKS, Skews::ALIKE>(args)
                                       : launch_cluster<T, FORM, MOST_HELD_PACKS, Skews::ALIKE>(args);
    case By::SHARED:
      return launch_shared_rows<T>(args, softmax_v13_dispatch_shared_kernel<T, FORM>);
    case By::GRID:
      return launch_grid_rows<T, FORM>(args);
    case By::SPLIT:
      differ ? launch_split<T, FORM, Skews::DIFFER>(args) : launch_split<T, FORM, Skews::ALIKE>(args);
      return true;
  }
  return false;
}

}  // namespace

void softmax_v13_dispatch(const SoftmaxArgs& args) {
  if (args.M == 0 || args.N == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    launch_by_routes<T>(args, [&](const Route& route, Start start) {
      return args.log ? launch<T, Form::LOGARITHM>(args, route, start)
                      : launch<T, Form::SOFTMAX>(args, route, start);
    });
  });
}
