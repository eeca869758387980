// cross_entropy v05_cluster: few rows are split, each over the blocks of a cluster.
//
// Change:   if the rows are too few for eight blocks an SM, a cluster of up to eight blocks takes a row, each
//           block a part of it. The blocks send their statistics to the first block through distributed
//           shared memory.
// Why:      512 rows are 3.9 blocks an SM: most SMs have four, some three, and when the first blocks end, no
//           others fill in. Smaller parts of the same bytes are distributed more evenly; and of 16 rows, most
//           of 132 SMs would get none. With many rows nothing changes.
// Counter:  at 2048 rows nothing changes; at 512 rows occupancy rises, and the SMs should end closer
//           together.
// Requires: compute capability 9.0; rows of contiguous elements, of fewer than 2^31 elements.
// Routes:   enough rows for eight blocks an SM, or rows of less than 64 KiB: v04's kernels
//           else: a cluster of 2 to 8 blocks, of at least 32 KiB each
// Source:   CUDA C++ Programming Guide, "Distributed Shared Memory"; PTX ISA, "st.async"
// Twin:     none, Triton gives a program no access to another one's shared memory.
#include "lib/cluster.cuh"
#include "lib/ptx/hopper.cuh"
#include "loss.cuh"

void cross_entropy_v04_rows_per_block(const CrossEntropyArgs& args);

namespace {

constexpr int THREADS = 256;
constexpr int PACKS = 4;  // in flight a thread
constexpr int MOST_BLOCKS = 8;
constexpr int BLOCKS_PER_SM = 8;
constexpr int64_t SMALLEST_PART = 32 * 1024;  // bytes: two rounds of a block

// logits: [M, N], rows stride_lm apart; target, losses, lse: [M]. Block `rank` of a cluster takes the rank-th
// part of a row.
template <typename T, Smoothing SMOOTHING>
__global__ void __launch_bounds__(THREADS)
    cross_entropy_v05_cluster_kernel(const CrossEntropyArgs args, int blocks) {
#if __CUDA_ARCH__ >= 900
  constexpr bool SMOOTHED = SMOOTHING == Smoothing::SHARED;
  __shared__ RowSums warps[32], others[MOST_BLOCKS];
  __shared__ uint64_t exchanged;  // a phase completes when the statistics of all blocks have arrived
  const int rank = static_cast<int>(cluster_block());
  const int64_t row = blockIdx.x / blocks;
  const T* row_logits = static_cast<const T*>(args.logits) + row * args.stride_lm;
  const int64_t target = args.target[row];
  if (target == args.ignore_index) {  // all blocks of the cluster take this branch
    if (rank == 0 && threadIdx.x == 0) write_ignored(args, row);
    return;
  }

  if (threadIdx.x == 0) {
    mbarrier_init(&exchanged, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(&exchanged, blocks * (SMOOTHED ? 3 : 2) * sizeof(float));
  }
  __syncthreads();  // waits for the mbarrier to be initialised
  cluster_arrive();

  const bool writes = rank == 0 && threadIdx.x == 0;
  const T logit = writes ? loaded_logit(row_logits, target, args.N) : from_float<T>(0.0f);
  const Edges<T> edges(row_logits, static_cast<int>(args.N));
  const int each = (edges.end_pack - edges.first_pack + blocks - 1) / blocks;
  const int begin = edges.first_pack + rank * each, end = min(begin + each, edges.end_pack);
  RowSums mine;
  add_row<SMOOTHING, THREADS, PACKS>(mine, edges.row_packs, begin, end);
  if (rank == 0) edges.template add_to<SMOOTHING>(mine);
  RowSums sums = block_merge<SMOOTHING>(mine, warps);

  cluster_wait();  // waits until all blocks run and have initialised their mbarriers
  if (threadIdx.x == 0) {
    store_async(&others[rank].max, sums.max, &exchanged, 0);
    store_async(&others[rank].sum, sums.sum, &exchanged, 0);
    if (SMOOTHED) store_async(&others[rank].total, sums.total, &exchanged, 0);
  }
  if (rank > 0 || threadIdx.x >= 32) return;
  mbarrier_wait_parity_cluster(&exchanged, 0);  // waits for all statistics, so block 0 ends last
  sums = lanes_merge<SMOOTHING>(threadIdx.x < blocks ? others[threadIdx.x] : RowSums{});
  if (threadIdx.x == 0) write_loss(args, row, sums, to_float(logit));
#endif
}

template <typename T, Smoothing SMOOTHING>
void launch(const CrossEntropyArgs& args, int blocks) {
  const auto kernel = cross_entropy_v05_cluster_kernel<T, SMOOTHING>;
  ClusterLaunch clusters(reinterpret_cast<const void*>(kernel), blocks, THREADS, 0, args.stream);
  clusters(static_cast<int>(args.M), kernel, args, blocks);
}

}  // namespace

void cross_entropy_v05_cluster(const CrossEntropyArgs& args) {
  if (args.M == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    const int64_t bytes = args.N * sizeof(T), enough = BLOCKS_PER_SM * multiprocessor_count();
    int blocks = 1;
    while (blocks < MOST_BLOCKS && args.M * blocks < enough && 2 * blocks * SMALLEST_PART <= bytes) {
      blocks *= 2;
    }
    if (blocks == 1 || bytes >= int64_t{1} << 31) return cross_entropy_v04_rows_per_block(args);
    args.smoothing > 0.0f ? launch<T, Smoothing::SHARED>(args, blocks)
                          : launch<T, Smoothing::NONE>(args, blocks);
  });
}
