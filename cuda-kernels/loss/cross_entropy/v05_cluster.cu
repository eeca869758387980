// cross_entropy v05_cluster: several SMs share a row where there are few.
//
// Change:   where rows are too few for eight blocks an SM, a cluster of up to eight blocks takes one, each a
//           part of it. They send their numbers to the first of them through distributed shared memory. Rows
//           that are many, or short, keep v04's kernels.
// Why:      512 rows are 3.9 blocks an SM: most SMs have four, some three, and when the first of them end,
//           nothing fills in. Smaller parts of the same bytes are dealt out more evenly; and of 16 rows, most
//           of 132 SMs would not have any. Where rows are many, nothing changes.
// Counter:  at 2048 rows nothing; at 512 rows of 151,936 time rises by 6 %, to 57 us: v04 was not late there.
// Requires: compute capability 9.0; rows that are contiguous, of fewer than 2^31 elements.
// Source:   CUDA C++ Programming Guide, "Distributed Shared Memory"; PTX ISA, "st.async"
// Twin:     none, Triton gives a program no access to another one's shared memory.
#include "lib/cluster.cuh"
#include "lib/ptx/hopper.cuh"
#include "loss.cuh"

void cross_entropy_v04_rows_per_block(const CrossEntropyArgs& args);

namespace {

constexpr int THREADS = 256;
constexpr int PACKS = 4;  // of a thread on their way
constexpr int MOST_BLOCKS = 8;
constexpr int BLOCKS_PER_SM = 8;
constexpr int64_t SMALLEST_PART = 32 * 1024;  // bytes, two rounds of a block

// logits: [M, N], rows stride_lm apart; target, losses, lse: [M]. Block `rank` of a cluster takes the rank-th
// part of a row.
template <typename T, bool SMOOTHED>
__global__ void __launch_bounds__(THREADS)
    cross_entropy_v05_cluster_kernel(const CrossEntropyArgs args, int blocks) {
#if __CUDA_ARCH__ >= 900
  __shared__ RowSums warps[32], others[MOST_BLOCKS];
  __shared__ uint64_t exchanged;  // a phase completes when all blocks' numbers are there
  const int rank = static_cast<int>(cluster_block());
  const int64_t row = blockIdx.x / blocks;
  const T* row_logits = static_cast<const T*>(args.logits) + row * args.stride_lm;
  const int64_t target = args.target[row];
  if (target == args.ignore_index) {  // which all blocks of the cluster see
    if (rank == 0 && threadIdx.x == 0) write_ignored(args, row);
    return;
  }

  if (threadIdx.x == 0) {
    mbarrier_init(&exchanged, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(&exchanged, blocks * (SMOOTHED ? 3 : 2) * sizeof(float));
  }
  __syncthreads();  // for the barrier to be initialised
  cluster_arrive();

  const float logit = rank == 0 && threadIdx.x == 0 ? logit_of(row_logits, target, args.N) : 0.0f;
  const Edges<T> edges(row_logits, static_cast<int>(args.N));
  const int each = (edges.end_pack - edges.first_pack + blocks - 1) / blocks;
  const int begin = edges.first_pack + rank * each, end = min(begin + each, edges.end_pack);
  RowSums mine;
  add_row<SMOOTHED, THREADS, PACKS>(mine, edges.row_packs, begin, end);
  if (rank == 0) edges.template add_to<SMOOTHED>(mine);
  RowSums sums = block_merge<SMOOTHED>(mine, warps);

  cluster_wait();  // for all blocks to run, with their barriers initialised
  if (threadIdx.x == 0) {
    store_async(&others[rank].max, sums.max, &exchanged, 0);
    store_async(&others[rank].sum, sums.sum, &exchanged, 0);
    if (SMOOTHED) store_async(&others[rank].total, sums.total, &exchanged, 0);
  }
  if (rank > 0 || threadIdx.x >= 32) return;
  mbarrier_wait_parity_cluster(&exchanged, 0);  // for every block's numbers; this block does not end before
  sums = lanes_merge<SMOOTHED>(threadIdx.x < blocks ? others[threadIdx.x] : RowSums{});
  if (threadIdx.x == 0) write_loss(args, row, sums, logit);
#endif
}

template <typename T, bool SMOOTHED>
void launch(const CrossEntropyArgs& args, int blocks) {
  const auto kernel = cross_entropy_v05_cluster_kernel<T, SMOOTHED>;
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
    args.smoothing > 0.0f ? launch<T, true>(args, blocks) : launch<T, false>(args, blocks);
  });
}
